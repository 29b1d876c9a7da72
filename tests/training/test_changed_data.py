"""Data that is missing, changed or cut off when a run goes on, or while it runs: the file is named, nothing hangs."""

import io
import shutil
import tarfile

import pytest
from datasets import ClassLabel, Dataset, Features, Image
from safetensors.torch import load_file

from hf_vit import UserError
from hf_vit.data import load_data
from hf_vit.data.fingerprints import file_states, states_fingerprint, tell_changes
from hf_vit.data.sources.data_source import resolve_source
from hf_vit.training import FinetuneOptions, HfViTTrainer, finetune

NAMES = ["blue", "green", "red"]
SETTINGS = dict(steps=6, evaluations=3, batch_size=4, dropout=0.1, shift_px=1)


@pytest.fixture(scope="module")
def encoded(colours):
    """PNG files and labels of three shards of 12 images."""
    files = [colours / NAMES[i % 3] / f"{i // 3:02d}.png" for i in range(36)]
    return [[(path.read_bytes(), i % 3) for i, path in enumerate(files)][12 * k : 12 * k + 12] for k in range(3)]


def write_parquet(path, rows):
    features = Features({"image": Image(), "label": ClassLabel(names=NAMES)})
    table = {"image": [{"bytes": png, "path": None} for png, _ in rows], "label": [label for _, label in rows]}
    Dataset.from_dict(table, features=features).to_parquet(path)


def write_tar(path, rows):
    with tarfile.open(path, "w") as tar:
        for row, (png, label) in enumerate(rows):
            for suffix, content in (("png", png), ("cls", str(label).encode())):
                info = tarfile.TarInfo(f"{path.stem}-{row:03d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


WRITERS = {"parquet": write_parquet, "tar": write_tar}


@pytest.fixture
def shards(encoded, tmp_path):
    def make(kind):
        folder = tmp_path / "data"
        folder.mkdir()
        for number, rows in enumerate(encoded):
            WRITERS[kind](folder / f"train-{number}.{kind}", rows)
        return folder

    return make


@pytest.fixture
def train(tiny_config):
    def run(data, output, streaming=True, **options):
        chosen = FinetuneOptions(streaming=streaming, device="cpu", **options)
        return finetune(tiny_config(), str(data), output, options=chosen, **SETTINGS)

    return run


@pytest.fixture
def stopped(train, monkeypatch):
    """A run that was stopped after its first checkpoint."""

    def run(data, output, **options):
        step, calls = HfViTTrainer.training_step, []

        def stop(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return step(self, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(HfViTTrainer, "training_step", stop)
            with pytest.raises(KeyboardInterrupt):
                train(data, output, **options)
        return output

    return run


@pytest.mark.parametrize(("kind", "streaming"), [("parquet", True), ("tar", True), ("parquet", False)])
def test_a_run_names_the_shard_that_changed(kind, streaming, shards, stopped, train, encoded, tmp_path):
    data = shards(kind)
    output = stopped(data, tmp_path / "out", streaming=streaming)
    one, two = data / f"train-1.{kind}", data / f"train-2.{kind}"
    whole = one.read_bytes()

    one.unlink()
    with pytest.raises(UserError, match=rf"data was data .*now data .*train/train-1\.{kind} is missing: put the data"):
        train(data, output, streaming, resume=True)
    WRITERS[kind](one, encoded[0] + encoded[1])
    two.unlink()
    write = WRITERS[kind]
    write(data / f"train-3.{kind}", encoded[2])
    names = rf"train/train-2\.{kind} is missing, train/train-1\.{kind} has changed, train/train-3\.{kind} is new"
    with pytest.raises(UserError, match=names):
        train(data, output, streaming, resume=True)

    (data / f"train-3.{kind}").rename(two)
    one.write_bytes(whole)
    if kind == "parquet":  # the same bytes again, whatever the writer puts into the file
        assert train(data, output, streaming, resume=True).steps == SETTINGS["steps"]


def test_a_run_names_the_image_that_changed(make_colours, stopped, train, tmp_path):
    data = make_colours(tmp_path / "colours", count=10)
    output = stopped(data, tmp_path / "out", streaming=False)
    shutil.copy(data / "red" / "03.png", data / "green" / "extra.png")
    (data / "red" / "07.png").unlink()
    message = r"train/red/07\.png is missing, train/green/extra\.png is new: put the data back as it was"
    with pytest.raises(UserError, match=message):
        train(data, output, False, resume=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_vanishes_while_training(workers, shards, train, tmp_path, monkeypatch):
    """One line with its name; once it is back, the run ends as if nothing had been."""
    data, step, calls = shards("parquet"), HfViTTrainer.training_step, []
    unbroken = train(data, tmp_path / "unbroken", num_workers=workers)

    def take_away(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            for shard in data.iterdir():
                shard.rename(tmp_path / shard.name)
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(HfViTTrainer, "training_step", take_away)
        message = r"training data train/train-0\.parquet is missing, .* then go on from checkpoint-2 with --resume"
        with pytest.raises(UserError, match=message):
            train(data, tmp_path / "out", num_workers=workers)
    for number in range(3):
        (tmp_path / f"train-{number}.parquet").rename(data / f"train-{number}.parquet")
    train(data, tmp_path / "out", num_workers=workers, resume=True)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (unbroken.folder, tmp_path / "out"))
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "tar"])
@pytest.mark.parametrize("part", [0, 0.5])
def test_a_shard_that_is_cut_off(part, kind, streaming, shards):
    data = shards(kind)
    shard = data / f"train-1.{kind}"
    content = shard.read_bytes()
    shard.write_bytes(content[: int(part * len(content))])
    with pytest.raises(
        UserError, match=rf"'data' cannot be read as \w+: the file train/train-1\.{kind} is damaged \(.*put it back"
    ):
        load_data(str(data), streaming=streaming)


def test_states_do_not_depend_on_the_place(shards, tmp_path):
    data = shards("tar")
    states = file_states(resolve_source(str(data)))
    moved = shutil.copytree(data, tmp_path / "elsewhere")
    again = file_states(resolve_source(str(moved)))
    assert states == again
    assert states_fingerprint(states) == load_data(str(moved), streaming=True).fingerprint
    sizes = file_states(resolve_source(str(data)), contents=False)
    assert sizes["train/train-0.tar"] == str((data / "train-0.tar").stat().st_size)
    assert file_states(resolve_source("digits")) == {}


def test_changes_are_counted():
    before = {f"train/{number}.tar": "a" for number in range(6)}
    assert tell_changes(before, before) == ""
    told = "train/0.tar is missing, train/1.tar is missing, train/2.tar is missing and 3 more"
    assert tell_changes(before, {}) == told
