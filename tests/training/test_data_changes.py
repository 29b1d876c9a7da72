"""Data that changes: a model measured again, a run that goes on, a file that vanishes."""

import json
import re
import shutil
from functools import partial

import pytest
import yaml
from data.conftest import picture
from datasets import Dataset
from models.families import FAMILIES, OTHERS
from PIL import Image
from training.conftest import NAMES, same_weights, save_model, write_parquet, write_tar

from hf_vit import UserError
from hf_vit.data import load_data
from hf_vit.data.fingerprints import describe_changes, hash_states, list_file_states
from hf_vit.data.sources import resolve_source
from hf_vit.results.facts import Facts
from hf_vit.training import FinetuneOptions, finetune

SETTINGS = dict(steps=4, evaluations=2, batch_size=8)


@pytest.fixture(scope="module")
def first(make_colours, tiny_config, tmp_path_factory):
    """Images in colours/, and the folder model/ of a model that was trained on them."""
    folder = tmp_path_factory.mktemp("first")
    finetune(tiny_config(), str(make_colours(folder / "colours")), folder / "model", **SETTINGS)
    return folder


@pytest.fixture
def trained(first, tmp_path):
    """A copy of both, which a test may change."""
    return (shutil.copytree(first / name, tmp_path / name) for name in ("colours", "model"))


def rows(folder):
    """The card's table of results."""
    return re.findall(r"^\| (colours.*?) \| (\w+) \| (\d+) ", (folder / "README.md").read_text(), flags=re.MULTILINE)


def indexed(folder):
    """Splits in the card's metadata, with their accuracy."""
    metadata = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    results = metadata["model-index"][0]["results"]
    return [(result["dataset"]["split"], result["metrics"][0]["value"]) for result in results]


@pytest.mark.parametrize(
    ("kind", "family"), [("folders", "plain"), ("list", "hybrid"), ("folders", "axial_resnet"), ("streaming", "plain")]
)
def test_bad_images_are_the_same_for_every_command(kind, family, make_colours, command, succeeds, tmp_path):
    """Images below a patch and torn ones in every split: nothing has changed, and the card keeps one row of results."""
    data, images = tmp_path / "colours", make_colours(tmp_path / "all", 11)
    for number, (split, first, last) in enumerate((("train", 0, 6), ("validation", 6, 8), ("test", 8, 11))):
        for name in ("blue", "green", "red"):
            (data / split / name).mkdir(parents=True)
            for index in range(first, last):
                with Image.open(images / name / f"{index:02d}.png") as image:
                    image.resize((40, 40)).save(data / split / name / f"{index:02d}.png")
        Image.new("RGB", (3, 12), (99 * number, 0, 0)).save(data / split / "red" / "narrow.png")
        torn = data / split / "red" / f"{first:02d}.png"
        torn.write_bytes(torn.read_bytes()[:-40])
    files = sorted(data.rglob("*.png"))
    if kind == "list":
        entries = [dict(file_name=str(file), label=file.parent.name, split=file.parts[-3]) for file in files]
        data = tmp_path / "colours.jsonl"
        data.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    given = ["--data", data, "--skip-bad-images", *(["--streaming"] if kind == "streaming" else [])]
    quick = ["--image-size", "32", "--steps", "1", "--evaluations", "1", "--batch-size", "4", "--precision", "fp32"]
    model = save_model((FAMILIES | OTHERS)[family].build("classification", image_size=32), tmp_path / "model")
    out = succeeds("finetune", "--model", model, "--output", tmp_path / "out", *given, *quick)
    skipped = 3 if family == "axial_resnet" else 4  # the narrow ones too, where there are patches
    assert kind == "streaming" or f"skipped {skipped} unreadable images" in out
    assert kind == "streaming" or Facts.load(tmp_path / "out").records[0].values["skipped_images"] == skipped
    code, _, err = command("evaluate", tmp_path / "out", *given)
    assert (code, re.findall("warning.*", err)) == (0, [])
    first, second = Facts.load(tmp_path / "out").filter_kind("evaluation")
    assert (first.data, first.values["top1"]) == (second.data, second.values["top1"])
    assert [(split, size) for _, split, size in rows(tmp_path / "out")] == [("test", "9")]


def test_images_that_are_added_make_no_training_image_a_test_image(trained, command):
    data, folder = trained
    before, table = load_data(str(data)), Facts.load(folder).filter_kind("evaluation")[0]
    for name in ("blue", "green", "red"):
        (data / name / "00.png").write_bytes((data / name / "00.png").read_bytes())
        shutil.copy(data / name / "01.png", data / name / "zz.png")  # a copy of what is there already
        Image.new("RGB", (12, 12), name).save(data / name / "new.bmp")  # a picture that no other is
    code, _, err = command("evaluate", folder, "--data", data)
    assert code == 0
    assert re.search(r"warning: colours has changed since the training \(its fingerprint is \w{16}, and was", err)
    assert "were training images" not in err
    after = load_data(str(data))
    trained_on = {image.digest for image in before.seen["train"]}
    assert not trained_on & {image.digest for image in after.seen["test"]}
    # The honest row stays, the metadata is its.
    first, second = rows(folder)
    assert first == (f"colours ({before.fingerprint})", "test", str(before.num_examples("test")))
    assert second == (f"colours ({after.fingerprint})", "test", str(after.num_examples("test")))
    assert indexed(folder) == [("test", round(table.values["top1"], 4))]
    assert "has changed since the training" in (folder / "README.md").read_text()


def test_training_images_in_a_test_folder_are_told(trained, command, tmp_path):
    data, folder = trained
    source = load_data(str(data))
    holdout = tmp_path / "holdout" / "test"
    for image in [*source.seen["train"][:5], *source.seen["test"]]:
        name = image.name.split("/")[-2]
        (holdout / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(image.name, holdout / name)
    metadata = indexed(folder)
    code, _, err = command("evaluate", folder, "--data", tmp_path / "holdout")
    total = 5 + source.num_examples("test")
    assert code == 0
    assert f"warning: 5 of the {total} images were training images, so the result is too good\n" in err
    record = Facts.load(folder).records[-1]
    assert record.values["trained_images"] == 5
    assert f"5 of the {total} images were training images" in (folder / "README.md").read_text()
    assert indexed(folder) == metadata, "no number for others to compare by"
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "training_images.txt").unlink()
    for name, options in {"compare": ("--no-robustness", "--speed-turns", 0), "diff": ()}.items():
        words = (name, folder, other, "--data", tmp_path / "holdout", "--output", tmp_path / name, *options)
        code, out, _ = command(*words)
        assert (code, out.count("training images")) == (0, 1)
        assert f"{folder.name}: 5 of the {total} images were training images, so the result is too good" in out


def test_what_a_base_or_an_ingredient_learnt_from_is_told_of_its_heirs(trained, make_colours, command, tmp_path):
    data, folder = trained
    heir, soup = tmp_path / "heir", tmp_path / "soup"
    others = make_colours(tmp_path / "others", colours={"blue": (0, 0, 9), "green": (0, 9, 0), "red": (9, 0, 0)})
    finetune(str(folder), str(others), heir, **SETTINGS)
    for split in ("train", "validation", "test"):
        shutil.copytree(data, tmp_path / "leaky" / split)
    code, out, _ = command("soup", folder, heir, "--output", soup, "--data", tmp_path / "leaky")
    count, total = load_data(str(data)).num_examples("train"), len([*data.rglob("*.png")])
    assert code == 0
    for split in ("validation", "test"):
        assert f"warning: {split} split: {count} of the {total} images were training images" in out
    for model in (heir, soup):
        _, _, err = command("evaluate", model, "--data", data, "--split", "train")
        assert f"warning: {count} of the {count} images were training images" in err


def test_results_of_training_images_stay_out_of_the_card(trained, command):
    data, folder = trained
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".png", ".md")}
    code, out, err = command("evaluate", folder, "--data", data, "--split", "train")
    assert code == 0
    assert "images were training images" in err
    assert "plots were not made (add --output DIR)" in out
    assert Facts.load(folder).records[-1].data.split == "train"
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert command("evaluate", folder, "--data", data, "--split", "train", "--protocol", "calibration")[0] == 0
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_the_seed_of_an_evaluation_is_not_that_of_the_splits(trained, command):
    data, folder = trained
    code, _, err = command("evaluate", folder, "--data", data, "--seed", 1)
    assert (code, "warning" in err) == (0, False)
    first, last = Facts.load(folder).filter_kind("evaluation")
    assert (first.values["top1"], first.data.fingerprint) == (last.values["top1"], last.data.fingerprint)


def test_the_hashes_of_training_images_stay_at_home(trained):
    from hf_vit.hub.contents import collect

    data, folder = trained
    kept = (folder / "training_images.txt").read_text().split()
    assert sorted(image.digest[:16] for image in load_data(str(data)).seen["train"]) == kept
    scratch = folder.parent / "scratch"
    scratch.mkdir()
    assert "training_images.txt" in collect(folder, "me/model", scratch=scratch, license="mit").skipped


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_whose_labels_are_read_otherwise_is_not_gone_on_with(streaming, tiny_config, tmp_path, stop_at):
    """The files, and the names of every image's classes, are the same; the numbers of the classes are not."""
    labels = {"cat": [number % 2 for number in range(60)], "dog": [1 - number % 2 for number in range(60)]}
    Dataset.from_dict({"image": list(map(picture, range(60))), **labels}).to_parquet(tmp_path / "d.parquet")
    train = partial(finetune, tiny_config(), tmp_path / "d.parquet", tmp_path / "out", streaming=streaming, **SETTINGS)
    first, second = ("cat", "dog") if streaming else ("cat,dog", "dog,cat")
    stop_at(4)
    with pytest.raises(KeyboardInterrupt):
        train(label_column=first)
    changed = "label_column was cat and is now dog" if streaming else r"classes was cat, dog \(\w+\) and is now dog"
    with pytest.raises(UserError, match=changed):
        train(label_column=second, resume=True)


SHARD_SETTINGS = dict(steps=6, evaluations=3, batch_size=4, dropout=0.1, shift_px=1)


@pytest.fixture(scope="module")
def encoded(colours):
    """The files of three shards of 12 images."""
    files = [colours / NAMES[i % 3] / f"{i // 3:02d}.png" for i in range(36)]
    return [files[12 * k : 12 * k + 12] for k in range(3)]


WRITERS = {"parquet": write_parquet, "tar": write_tar}


@pytest.fixture
def shards(encoded, tmp_path):
    def make(kind):
        folder = tmp_path / "data"
        folder.mkdir()
        for number, files in enumerate(encoded):
            WRITERS[kind](folder / f"train-{number}.{kind}", files)
        return folder

    return make


@pytest.fixture
def train(tiny_config):
    def run(data, output, streaming=True, **options):
        chosen = FinetuneOptions(streaming=streaming, device="cpu", **options)
        return finetune(tiny_config(), str(data), output, options=chosen, **SHARD_SETTINGS)

    return run


@pytest.fixture
def stopped(train, stop_at):
    """A run that was stopped after its first checkpoint."""

    def run(data, output, **options):
        stop_at(4)
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
    with pytest.raises(UserError, match=rf"data was data .*now data .*train-1\.{kind} is missing: restore the data"):
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
        assert train(data, output, streaming, resume=True).steps == SHARD_SETTINGS["steps"]


def test_a_run_that_was_split_otherwise_is_not_gone_on_with_and_names_the_image_that_changed(
    make_colours, stopped, train, tmp_path
):
    data = make_colours(tmp_path / "colours", count=10)
    output = stopped(data, tmp_path / "out", streaming=False)
    run = output / "checkpoints" / "run.json"
    settings = json.loads(run.read_text())
    others = {name: value for name, value in settings.items() if name != "splits"}
    assert settings["splits"] == "validation and test cut by content"
    run.write_text(json.dumps(others))  # as of version 0.1, whose test images would now be trained on
    with pytest.raises(UserError, match=r"splits was \(not set\) and is now validation and test cut by content; give"):
        train(data, output, False, resume=True)
    run.write_text(json.dumps(settings))
    shutil.copy(data / "red" / "03.png", data / "green" / "extra.png")
    (data / "red" / "07.png").unlink()
    message = r"train/red/07\.png is missing, train/green/extra\.png is new: restore the data"
    with pytest.raises(UserError, match=message):
        train(data, output, False, resume=True)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])  # a worker process: 20 s
def test_a_shard_that_vanishes_while_training(workers, shards, train, tmp_path, stop_at):
    """One line with its name; once it is back, the run ends as if nothing had been."""
    data = shards("parquet")
    unbroken = train(data, tmp_path / "unbroken", num_workers=workers)

    def take_away():
        for shard in data.iterdir():
            shard.rename(tmp_path / shard.name)

    stop_at(3, take_away)
    message = r"data changed during the run: train/train-0\.parquet is missing, .* continue from checkpoint-2"
    with pytest.raises(UserError, match=message):
        train(data, tmp_path / "out", num_workers=workers)
    for number in range(3):
        (tmp_path / f"train-{number}.parquet").rename(data / f"train-{number}.parquet")
    train(data, tmp_path / "out", num_workers=workers, resume=True)
    assert same_weights(unbroken.folder, tmp_path / "out")


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "tar"])
@pytest.mark.parametrize("part", [0, 0.5])
def test_a_shard_that_is_cut_off(part, kind, streaming, shards):
    data = shards(kind)
    shard = data / f"train-1.{kind}"
    content = shard.read_bytes()
    shard.write_bytes(content[: int(part * len(content))])
    with pytest.raises(UserError, match=rf"cannot be read as \w+, because train/train-1\.{kind} is damaged .*restore"):
        load_data(str(data), streaming=streaming)


def test_states_do_not_depend_on_the_place(shards, tmp_path):
    data = shards("tar")
    states = list_file_states(resolve_source(str(data)))
    moved = shutil.copytree(data, tmp_path / "elsewhere")
    again = list_file_states(resolve_source(str(moved)))
    assert states == again
    assert hash_states(states) == load_data(str(moved), streaming=True).fingerprint
    sizes = list_file_states(resolve_source(str(data)), contents=False)
    assert sizes["train/train-0.tar"] == str((data / "train-0.tar").stat().st_size)
    assert list_file_states(resolve_source("digits")) == {}


def test_changes_are_counted():
    before = {f"train/{number}.tar": "a" for number in range(6)}
    assert describe_changes(before, before) == ""
    told = "train/0.tar is missing, train/1.tar is missing, train/2.tar is missing and 3 more"
    assert describe_changes(before, {}) == told
