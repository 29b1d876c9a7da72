"""The training's loader beside torchvision's, webdataset's and datasets' own, from files to batches on two workers.

Needs `pip install webdataset`. Every contestant gives the same images in batches of 32 to the same augmentation (a
random crop of 20 to 100% of the area, resized, perhaps mirrored, scaled to [-1, 1]): hf_vit by its own transform, the
others by torchvision's v2 on uint8 tensors, as its documentation advises. The first epoch starts the workers, and
hf_vit keeps the decoded images in memory for the second. "open" is what comes before: hf_vit looks at every image, the
others at names.

1. "JPEG files": 512 px, in class folders; "one process" without workers, on one thread.
2. "small files": 32 px, eight times as many.
3. "shards": the JPEG files in eight tars, read as a stream.
4. "uneven shards": seven eighths of them in one of the eight tars.
5. "stalling disk": the JPEG files, of which every hundredth takes half a second to be opened.
6. "decoded": augmentation alone on one core, of batches of 224 px: a random crop and mirroring, and RandAugment after
   them. hf_vit draws for every image; torchvision's v2 is given the whole batch, for which it draws once.

With `--idx FOLDER` of IDX files it measures instead (`first_step.json`): the seconds and the memory, beyond the
imports, until the first step of `finetune` on these images as IDX, parquet and PNG files, where nothing is cached and
once more; and how fast photographs of 12 megapixels are trained on, predicted and embedded by a tiny model (without its
start), beside torchvision's loader alone with the same crops, and with whole photographs.
"""

import itertools
import os
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import PIL.Image
import torch
from jpeg import write_images
from script import Script, alternate, parser, run_program, save_with_processor, vit_sizes
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from transformers import TrainingArguments

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.data import AugmentationConfig, ImageCollator, image_transforms, load_data, make_processor, transform_split
from hf_vit.data.idx import read_idx
from hf_vit.speed.measuring import compute_quartiles, compute_speed_ratio
from hf_vit.training import HfViTTrainer

BATCH, WORKERS, SHARDS, SMALL, EPOCHS = 32, 2, 8, 32, 2
SCALE, RANDAUGMENT, REPEATS = (0.2, 1.0), (2, 15), 16
STALL, ONE_IN = 0.5, 100

Batches = Iterable[Any]


@dataclass(frozen=True)
class Layout:
    """The files of one kind of data set: a folder with "train" (class folders), or with tars."""

    path: Path
    images: int
    size: int = 224  # px of what the model takes
    workers: int = WORKERS
    is_stream: bool = False
    stalls: bool = False

    @property
    def tars(self) -> list[str]:
        return sorted(map(str, self.path.glob("train-*.tar")))


def build_config(size: int) -> HfViTConfig:
    """Return the smallest model there is."""
    sizes = vit_sizes(8, 8, heads=1, num_hidden_layers=1, num_labels=2)
    return HfViTConfig(image_size=size, patch_size=size // 2, **sizes)


def open_ours(layout: Layout) -> Batches:
    config = build_config(layout.size)
    data = load_data(f"{layout.path}/*.tar" if layout.is_stream else str(layout.path), streaming=layout.is_stream)
    augmentation = AugmentationConfig(horizontal_flip=0.5, random_resized_crop=SCALE)
    varied, _ = image_transforms(make_processor(config), augmentation)
    arguments = TrainingArguments(
        output_dir=str(layout.path.parent / "out"), per_device_train_batch_size=BATCH,
        dataloader_num_workers=layout.workers, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    images: Any = {"train_dataset": transform_split(data, "train", varied), "data_collator": ImageCollator(2)}
    return HfViTTrainer(HfViTForImageClassification(config), arguments, **images).get_train_dataloader()


def build_transform(size: int, *policy: Any, whole: bool = False) -> Callable[[Any], torch.Tensor]:
    crop = [v2.RandomResizedCrop(size, SCALE, antialias=True), v2.RandomHorizontalFlip()]
    crop = [v2.Resize((size, size), antialias=True)] if whole else crop
    scale = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    return v2.Compose([v2.PILToTensor(), *crop, *policy, *scale])


def open_torchvision(layout: Layout, whole: bool = False) -> Batches:
    folder = ImageFolder(str(layout.path / "train"), build_transform(layout.size, whole=whole))
    return load(folder, layout.workers, shuffle=True)


def load(data: Any, workers: int, **settings: Any) -> Batches:
    return DataLoader(data, BATCH, num_workers=workers, persistent_workers=workers > 0, **settings)


def transform_rows(transform: Any, image: str, label: str, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"pixel_values": [transform(each.convert("RGB")) for each in rows[image]], "label": rows[label]}


def open_datasets(layout: Layout) -> Batches:
    transform = partial(transform_rows, build_transform(layout.size))
    if layout.is_stream:
        files = {"train": layout.tars}
        stream = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
        settings: Any = {"batched": True, "batch_size": BATCH, "remove_columns": stream.column_names}
        stream = stream.shuffle(seed=0, buffer_size=1000).map(partial(transform, "jpg", "cls"), **settings)
        return load(stream, layout.workers)
    table = datasets.load_dataset("imagefolder", data_dir=str(layout.path), split="train")
    return load(table.with_transform(partial(transform, "image", "label")), layout.workers, shuffle=True)


def open_webdataset(layout: Layout) -> Batches:
    import webdataset

    stream = webdataset.WebDataset(layout.tars, shardshuffle=SHARDS).shuffle(1000).decode("pilrgb")
    stream = stream.to_tuple("jpg", "cls").map_tuple(build_transform(layout.size), int)
    return webdataset.WebLoader(stream.batched(BATCH), batch_size=None, num_workers=WORKERS, persistent_workers=True)


def contestants(layout: Layout) -> dict[str, Callable[[Layout], Batches]]:
    third = {"webdataset": open_webdataset} if layout.is_stream else {"torchvision": open_torchvision}
    return {"hf_vit": open_ours, **third, "datasets": open_datasets}


def measure(open_loader: Callable[[Layout], Batches], layout: Layout) -> list[float]:
    """Return the seconds of opening the loader, then the seconds per image of every epoch."""
    start = time.perf_counter()
    batches = iterate_epochs(open_loader(layout))
    seconds = [time.perf_counter() - start]
    for _ in range(EPOCHS):
        num_images, start = 0, time.perf_counter()
        while num_images < layout.images:  # a stream of hf_vit goes from one epoch into the next by itself
            batch = next(batches)
            num_images += len(batch["pixel_values"] if isinstance(batch, dict) else batch[0])
        seconds.append((time.perf_counter() - start) / num_images)
    return seconds


def measure_augmentation(report: Script) -> None:
    """Record images/s of augmentation alone on one thread, image by image and on whole batches."""
    processor = make_processor(HfViTConfig(image_size=224))
    with tempfile.TemporaryDirectory() as folder:
        images = [PIL.Image.open(path).resize((224, 224)) for path in write_images(Path(folder), BATCH, 512)]
    threads, keys = torch.get_num_threads(), np.arange(BATCH, dtype=np.uint64)
    torch.set_num_threads(1)
    for policy in (None, RANDAUGMENT):
        augmentation = AugmentationConfig(horizontal_flip=0.5, random_resized_crop=SCALE, randaugment=policy)
        ours, _ = image_transforms(processor, augmentation)
        whole = build_transform(224, *([v2.RandAugment(*policy, num_magnitude_bins=31)] if policy else []))
        decoded = ours.prepare(images)
        ways = {
            "hf_vit": lambda ours=ours, decoded=decoded: torch.stack([*ours.finish(decoded, keys)]),
            "torchvision, whole batches": lambda whole=whole, decoded=decoded: whole(torch.stack(decoded)),
        }
        seconds = alternate({name: partial(time_often, way) for name, way in ways.items()}, 3 * report.options.turns, 1)
        for name, values in seconds.items():
            row: dict[str, Any] = {"layout": "decoded, RandAugment" if policy else "decoded", "contestant": name}
            row["later_images_per_second"] = round(BATCH / compute_quartiles(values).median, 1)
            if name != "hf_vit":
                row["hf_vit_later"] = compute_speed_ratio(seconds, "hf_vit", name)
            report.record(**row)
    torch.set_num_threads(threads)


def time_often(function: Callable[[], Any]) -> float:
    """Return the mean seconds of a call; a batch for which an expensive operation is drawn takes twice as long."""
    start = time.perf_counter()
    for _ in range(REPEATS):
        function()
    return (time.perf_counter() - start) / REPEATS


def iterate_epochs(loader: Any) -> Iterator[Any]:
    for epoch in itertools.count():
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        yield from loader


def make_splits(folder: Path, side: int) -> None:
    """Make the class folders; else validation and test are cut from train, and the contestants see other images."""
    for split, label in itertools.product(("train", "validation", "test"), "ab"):
        (folder / split / label).mkdir(parents=True)
        if split != "train":
            image = PIL.Image.new("RGB", (side, side), (len(split), ord(label), 0))
            image.save(folder / split / label / f"{label}.jpg")


def write_photographs(folder: Path, images: int, side: int, others_side: int) -> None:
    """Write photographs as JPEG for training, in two classes by turns, and other images for the other splits."""
    make_splits(folder, others_side)
    for number, path in enumerate(write_images(folder, images, side)):
        path.rename(folder / "train" / "ab"[number % 2] / path.name)


def write_layouts(folder: Path, images: int) -> dict[str, Layout]:
    write_photographs(folder / "files", images, 512, SMALL)
    make_splits(folder / "small", SMALL)
    noise = np.random.default_rng(0)
    for number in range(8 * images):
        pixels = noise.integers(256, size=(SMALL, SMALL, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / "small" / "train" / "ab"[number % 2] / f"{number}.png")
    stored = sorted((folder / "files" / "train").glob("*/*.jpg"), key=lambda path: int(path.stem))
    ends = [images * shard // SHARDS for shard in range(1, SHARDS)]
    uneven = [images * 7 // 8 + images * shard // (8 * 7) for shard in range(SHARDS - 1)]
    for name, borders in (("shards", ends), ("uneven", uneven)):
        write_shards(folder / name, stored, "train", borders)
        for split in ("validation", "test"):
            write_shards(folder / name, sorted((folder / "files" / split).glob("*/*.jpg")), split, [])
    return {
        "JPEG files": Layout(folder / "files", images),
        "JPEG files, one process": Layout(folder / "files", images, workers=0),
        "small files": Layout(folder / "small", 8 * images, SMALL),
        "shards": Layout(folder / "shards", images, is_stream=True),
        "uneven shards": Layout(folder / "uneven", images, is_stream=True),
        "stalling disk": Layout(folder / "files", images, stalls=True),
    }


def write_shards(folder: Path, paths: list[Path], split: str, ends: list[int]) -> None:
    """Write one tar up to each of these numbers of images, and one with the rest."""
    folder.mkdir(exist_ok=True)
    for shard, (begin, end) in enumerate(itertools.pairwise([0, *ends, len(paths)])):
        with tarfile.open(folder / f"{split}-{shard}.tar", "w") as tar:
            for path in paths[begin:end]:
                tar.add(path, f"{path.stem}.jpg")
                (label := folder / "label").write_text(str("ab".index(path.parent.name)))
                tar.add(label, f"{path.stem}.cls")
    (folder / "label").unlink()


def stalling_open() -> Callable[..., PIL.Image.Image]:
    """Return Pillow's function, by which all contestants open images, that waits at every hundredth."""
    opened, plain_open = itertools.count(1), PIL.Image.open

    def open_image(*args: Any, **kwargs: Any) -> PIL.Image.Image:
        if next(opened) % ONE_IN == 0:
            time.sleep(STALL)
        return plain_open(*args, **kwargs)

    return open_image


# The way to the first step, and photographs

PHOTOGRAPHS, PHOTOGRAPH = 64, 3464  # images of so many px a side
FIRST_STEP = """
import json, os, resource, sys, time
start = time.perf_counter()
from hf_vit import HfViTConfig
from hf_vit.training import HfViTTrainer, finetune
before, imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
def stop(*_):
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"seconds": time.perf_counter() - imported, "mb": grown * 1024 / 1e6}), flush=True)
    os._exit(0)
HfViTTrainer.training_step = stop
sizes = dict(hidden_size=16, num_attention_heads=1, intermediate_size=16, num_hidden_layers=1)
finetune(HfViTConfig(image_size=28, patch_size=7, **sizes), *sys.argv[1:], steps=100)
"""
ONCE = """
import glob, json, sys, time
from PIL import Image
start = time.perf_counter()
for path in glob.glob(sys.argv[1] + "/*/*/*.png"):
    with Image.open(path) as image:
        image.convert("RGB")
print(json.dumps({"seconds": time.perf_counter() - start}))
"""
COMMAND = """
import json, resource, sys, time
from hf_vit.evaluation import embed, predict
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
command, model, folder, output = sys.argv[1:]
def measure(split):
    start = time.perf_counter()
    if command == "predict":
        predict(model, f"{folder}/{split}", output=f"{output}-{split}.csv")
    else:
        embed(model, folder, f"{output}-{split}", splits=[split])
    return time.perf_counter() - start
measure("test")
start = measure("validation")  # two small images
seconds, grown = measure("train") - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"seconds": seconds, "mb": grown * 1024 / 1e6}))
"""


def write_forms(idx: Path, folder: Path) -> dict[str, Path]:
    """Write the images of IDX files as PNG files in class folders, and as one parquet file a split."""
    names = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    (folder / "parquet").mkdir()
    for split, prefix in (("train", "train"), ("test", "t10k")):
        paths: list[str] = []
        labels = read_idx(idx / f"{prefix}-labels-idx1-ubyte.gz").tolist()
        for number, (pixels, label) in enumerate(
            zip(read_idx(idx / f"{prefix}-images-idx3-ubyte.gz"), labels, strict=True)
        ):
            paths.append(f"{folder}/png/{split}/{label}/{number}.png")
            Path(paths[-1]).parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(pixels).save(paths[-1])
        images = [{"bytes": Path(path).read_bytes(), "path": None} for path in paths]  # else it would name the files
        table = datasets.Dataset.from_dict({"image": images, "label": labels}, names)
        table.to_parquet(folder / "parquet" / f"{split}.parquet")
    return {"IDX": idx, "parquet": folder / "parquet", "PNG files": folder / "png"}


def measure_first_step(settings: Any) -> None:
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        report = Script(settings)
        forms = write_forms(settings.idx, folder)
        for turn in range(settings.turns):
            environment = {**os.environ, "HF_HOME": str(folder / f"cache{turn}")}
            report.record(turn=turn, work="PNG files read and decoded", **run_program(ONCE, forms["PNG files"]))
            for form, path in forms.items():
                for state in ("first", "repeated"):
                    target = folder / f"out-{form}-{state}-{turn}"
                    values = run_program(FIRST_STEP, path, target, environment=environment)
                    report.record(turn=turn, work=f"{form}, {state}", **values)
        write_photographs(folder / "photographs", PHOTOGRAPHS, PHOTOGRAPH, 224)
        layout = Layout(folder / "photographs", PHOTOGRAPHS)
        save_with_processor(HfViTForImageClassification(build_config(layout.size)), folder / "model")
        for turn in range(settings.turns):
            for name, open_loader in {"hf_vit": open_ours, "torchvision": open_torchvision}.items():
                _, first, later = measure(open_loader, layout)
                rates = {"images_per_second": 1 / first, "later_images_per_second": 1 / later}
                report.record(turn=turn, work=f"photographs, training by {name}", **rates)
            _, whole, _ = measure(partial(open_torchvision, whole=True), layout)
            report.record(turn=turn, work="photographs, whole, by torchvision", images_per_second=1 / whole)
            for command in ("predict", "embed"):
                values = run_program(COMMAND, command, folder / "model", layout.path, folder / f"{command}{turn}")
                rates = {"images_per_second": PHOTOGRAPHS / values["seconds"], "mb": values["mb"]}
                report.record(turn=turn, work=f"photographs, {command}", **rates)
        report.finish()


def main() -> None:
    options = parser(__doc__, turns=5)
    options.add_argument("--images", type=int, default=1024)
    options.add_argument("--layouts", nargs="+", help='names such as "JPEG files" (default: all)')
    options.add_argument("--idx", type=Path, help="folder of IDX files to measure the way to the first step with")
    settings = options.parse_args()
    datasets.disable_progress_bars()
    if settings.idx is not None:
        measure_first_step(settings)
        return
    import webdataset

    report = Script(settings)
    measure_augmentation(report)
    with tempfile.TemporaryDirectory() as temporary_folder:
        layouts = write_layouts(Path(temporary_folder), settings.images)
        layouts = {name: layouts[name] for name in settings.layouts or layouts}
        turns_by_case: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
        for _ in range(settings.turns):
            for name, layout in layouts.items():
                torch.set_num_threads(settings.threads if layout.workers else 1)
                slow_disk = patch("PIL.Image.open", stalling_open()) if layout.stalls else nullcontext()
                with slow_disk:
                    for contestant, open_loader in contestants(layout).items():
                        turns_by_case[name, contestant].append(measure(open_loader, layout))
    for (name, contestant), turns in turns_by_case.items():
        opening, *epochs = zip(*turns, strict=True)
        _, *ours = zip(*turns_by_case[name, "hf_vit"], strict=True)
        row: dict[str, Any] = {"layout": name, "contestant": contestant}
        row["open_seconds"] = round(compute_quartiles(opening).median, 2)
        for title, theirs, hf_vit_seconds in zip(("first", "later"), epochs, ours, strict=True):
            row[f"{title}_images_per_second"] = round(1 / compute_quartiles(theirs).median, 1)
            if contestant != "hf_vit":
                both = {"theirs": theirs, "hf_vit": hf_vit_seconds}
                row[f"hf_vit_{title}"] = compute_speed_ratio(both, "hf_vit", "theirs")
        report.record(**row)
    report.finish(images=settings.images, workers=WORKERS, batch_size=BATCH, webdataset=webdataset.__version__)


if __name__ == "__main__":
    main()
