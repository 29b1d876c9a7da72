"""A tiny model and tiny images that can be learnt in seconds: squares of one colour on noise."""

import json
import shutil

import numpy as np
import pytest
from data.conftest import make_tar
from PIL import Image

from hf_vit import HfAxialResNetConfig, HfViTConfig
from hf_vit.loading.folders import list_checkpoints

COLOURS = {"blue": (40, 40, 230), "green": (40, 200, 40), "red": (230, 40, 40)}
NAMES = list(COLOURS)


def coloured_square(colour, seed, side=12):
    random = np.random.RandomState(seed)
    pixels = random.randint(0, 60, (side, side, 3), dtype=np.uint8)
    top, left = random.randint(0, side // 2, 2)
    pixels[top : top + side // 2, left : left + side // 2] = colour
    return Image.fromarray(pixels)


def make_colour_folder(root, count=20, colours=COLOURS):
    for position, (name, colour) in enumerate(colours.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            coloured_square(colour, 1000 * position + index).save(root / name / f"{index:02d}.png")
    return root


def write_parquet(path, files, names=tuple(COLOURS)):
    """Write a shard of image files, each of the class that its folder is called."""
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    features = Features({"image": ImageFeature(), "label": ClassLabel(names=list(names))})
    images = [{"bytes": file.read_bytes(), "path": None} for file in files]
    rows = {"image": images, "label": [names.index(file.parent.name) for file in files]}
    Dataset.from_dict(rows, features=features).to_parquet(path)


def write_tar(path, files):
    """Write such a shard as webdataset."""
    make_tar(path, [{"png": each.read_bytes(), "cls": b"%d" % NAMES.index(each.parent.name)} for each in files])


def write_numbers(root, sizes):
    """Write shards with so many rows each, numbered through, and return a stream of them."""
    from datasets import Dataset, load_dataset

    root.mkdir()
    for shard in range(len(sizes)):
        numbers = list(range(sum(sizes[:shard]), sum(sizes[: shard + 1])))
        Dataset.from_dict({"image": numbers, "label": numbers}).to_parquet(root / f"{shard}.parquet")
    files = sorted(map(str, root.glob("*.parquet")))
    return load_dataset("parquet", data_files=files, streaming=True, split="train")


class Rows:
    """A transform of such rows that tells the epoch, as those of `hf_vit.data.transforms`, and counts what it read."""

    mixable = True
    prepared = 0

    def __init__(self):
        import torch

        self._epoch = torch.tensor(-1).share_memory_()

    def set_epoch(self, epoch):
        self._epoch.fill_(epoch)

    def __call__(self, batch):
        Rows.prepared += len(batch["image"])
        return {"pixel_values": [(int(self._epoch), row) for row in batch["image"]], "label": batch["label"]}


class Images:
    """Fixed noise with hard or soft labels, which only shows what a training does to weights."""

    def __init__(self, count=12, soft=False):
        import torch

        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randn(count, 3, 8, 8, generator=generator)
        self.labels = torch.arange(count) % 3
        if soft:
            self.labels = torch.rand(count, 3, generator=generator).softmax(-1)

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}


def assert_complete(folder, *pictures):
    """Assert that a finished model's folder is flat, and holds no pickle but these pictures."""
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "preprocessor_config.json", "facts.json", "README.md"}
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert not any(path.is_dir() for path in folder.iterdir())
    for name in pictures:
        with Image.open(folder / name) as picture:
            assert (picture.format, picture.width > 100) == ("PNG", True)


def same_weights(one, other):
    """Return whether the models saved in two folders are equal to the bit."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    return ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)


def untimed_log(result):
    """Return the log of a training without what depends on the clock."""
    entries = [entry for entry in result.history if "train_runtime" not in entry]
    timed = ("runtime", "per_second")
    return [{key: value for key, value in entry.items() if not key.endswith(timed)} for entry in entries]


@pytest.fixture(scope="session")
def colours(tmp_path_factory):
    """A folder of three classes with 20 images each."""
    return make_colour_folder(tmp_path_factory.mktemp("images") / "colours")


@pytest.fixture(autouse=True, scope="session")
def _no_waiting():
    """Else datasets waits 5 s at the end of a shuffled pass over a parquet stream, and torch for a stopped worker."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)
        patched.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
        yield


@pytest.fixture
def killed(tmp_path):
    """A folder as a kill would have left it: the checkpoints of a finished run, but for its last ones."""

    def make(done, name, lost=1):
        again = tmp_path / name
        shutil.copytree(done.folder / "checkpoints", again / "checkpoints")
        left = list_checkpoints(again / "checkpoints")
        for checkpoint in left[len(left) - lost :]:
            shutil.rmtree(checkpoint)
        return again

    return make


def interrupt():
    raise KeyboardInterrupt


@pytest.fixture
def stop_at(monkeypatch):
    """Act before a training step, which is counted from 1, once."""

    def arm(number, act=interrupt):
        from hf_vit.training import HfViTTrainer

        step, calls = HfViTTrainer.training_step, []

        def acting(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == number:
                act()
            return step(self, *args, **kwargs)

        monkeypatch.setattr(HfViTTrainer, "training_step", acting)

    return arm


@pytest.fixture(scope="session")
def make_colours():
    """Write such a folder somewhere: (folder, images a class, {class: colour})."""
    return make_colour_folder


def save_model(model, folder, **settings):
    """Save a model with an image processor of its size, and return the folder."""
    from hf_vit.data import make_processor

    model.save_pretrained(folder)
    make_processor(model.config, **settings).save_pretrained(folder)
    return folder


def harm(folder, name, change):
    """Remove a file, cut it in half, change fields of its JSON, or write another content."""
    path = folder / name
    if change is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif change == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif isinstance(change, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    elif isinstance(change, str):
        path.write_text(change)
    else:
        change().save_pretrained(folder)


def make_tiny_config(**fields):
    sizes = dict(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    return HfViTConfig(**{**sizes, "intermediate_size": 32, "num_labels": 3, **fields})


def make_resnet_config():
    """Of a model that has batch norms."""
    return HfAxialResNetConfig(image_size=8, num_labels=3, stage_depths=(1,), stem_width=8)


def make_teacher_model(names=tuple(COLOURS), **fields):
    """A classifier of these classes, whose head is not zero."""
    import torch

    from hf_vit import HfViTForImageClassification

    torch.manual_seed(7)
    config = make_tiny_config(**{"num_labels": len(names), "id2label": dict(enumerate(names)), **fields})
    model = HfViTForImageClassification(config)
    for name, parameter in model.named_parameters():
        if "classifier" in name:
            torch.nn.init.normal_(parameter)
    return model.eval()


def make_transformers_vit(**fields):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    return ViTForImageClassification(ViTConfig(**sizes, intermediate_size=32, num_labels=3, **fields))


@pytest.fixture(scope="session")
def tiny_config():
    return make_tiny_config


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_config, tmp_path_factory):
    """A saved classifier of two classes, 8 px images, with a head that is not zero."""
    import torch

    from hf_vit import HfViTForImageClassification

    torch.manual_seed(0)
    model = HfViTForImageClassification(tiny_config(num_labels=2))
    torch.nn.init.normal_(model.classifier.weight)
    return save_model(model, tmp_path_factory.mktemp("checkpoint") / "tiny", image_mean=[0.4, 0.5, 0.6])


@pytest.fixture
def make_trainer(tiny_config, tmp_path):
    """An `HfViTTrainer` on noise: `extras` are keywords of its own, the others TrainingArguments'."""
    import torch
    from torch import nn
    from transformers import TrainingArguments

    from hf_vit import HfViTForImageClassification
    from hf_vit.training import HfViTTrainer

    def make(model=None, dataset=None, extras=None, **arguments):
        torch.manual_seed(0)
        model = model or HfViTForImageClassification(tiny_config())
        if hasattr(model, "classifier") and not model.classifier.weight.any():
            nn.init.normal_(model.classifier.weight)
        defaults = dict(output_dir=str(tmp_path / "work"), report_to="none", use_cpu=True)
        settings = TrainingArguments(**{**defaults, "max_steps": 1, "learning_rate": 0.1, "optim": "sgd", **arguments})
        data = dict(train_dataset=dataset or Images(), eval_dataset=dataset or Images())
        return HfViTTrainer(model=model, args=settings, **data, **(extras or {}))

    return make
