"""load_data on folders, parquet and webdataset files: the same content gives the same data."""

import json
import logging
import os
import shutil

import datasets
import numpy as np
import pytest
from data.conftest import contents, everything, make_folder, make_table, make_tar, picture
from datasets import Array2D, Array3D, Dataset, Features, LargeList, List, Value
from PIL import Image

from hf_vit.data import load_data, to_rgb
from hf_vit.errors import UserError

NAMES = ["cat", "dog", "owl"]
SPLITS = ("train", "validation", "test")
EITHER = pytest.mark.parametrize("streaming", [False, True])


def counts(data):
    return [data.num_examples(split) for split in SPLITS if split in data.splits]


def images(data):
    return {image for image, _ in everything(data)}


def test_folder_of_class_folders_is_cut_by_content_and_seed_alone_and_says_so(folder, caplog, tmp_path):
    with caplog.at_level(logging.INFO, "hf_vit"):
        data = load_data(str(folder))
    assert (data.name, data.label_names, counts(data)) == ("pets", NAMES, [33, 5, 2])
    assert data.notes == [
        "5 images for validation and 2 images for test were cut from the 40 training images (by content, seed 0)"
    ]
    assert data.notes[0] in caplog.text
    assert everything(data) == {
        (Image.open(file).tobytes(), file.parent.name) for file in folder.glob("*/*.png")
    }  # fmt: skip
    assert isinstance(data.splits["test"].features["image"], datasets.Image)
    assert data.splits["test"].features["label"].names == NAMES
    shutil.copytree(folder, tmp_path / "elsewhere")
    again, other = load_data(str(tmp_path / "elsewhere"), streaming=True), load_data(str(folder), seed=1)
    assert counts(again) == [33, 5, 2]
    assert all(contents(again, split) == contents(data, split) for split in SPLITS)
    assert contents(other, "test") != contents(data, "test")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("train", "val", "test"), [11, 11, 11]),
        (("Train", "validation", "testing"), [11, 11, 11]),
        (("train", "dev"), [9, 11, 2]),
        (("test",), [11]),
    ],
)
def test_split_folders_are_used(tmp_path, names, expected):
    for number, name in enumerate(names):
        make_folder(tmp_path / "d" / name, {"a": 5, "b": 6}, seed=10_000 * number)
    data = load_data(str(tmp_path / "d"))
    assert counts(data) == expected
    assert ("for test were cut from the 11 training images" in " ".join(data.notes)) == ("dev" in names)
    assert data.notes == [] or "dev" in names
    if names == ("test",):
        with pytest.raises(UserError, match=r"has no split 'train' \(it has test\)"):
            data.split("train")


def test_what_counts_of_a_folder(tmp_path):
    """Images deeper inside; a class called like a split; any case; neither hidden nor other files nor circles."""
    root = tmp_path / "d"
    make_folder(root, {"train": 4, "bus/deep": 4, "bus": 2}, suffix=".PNG")
    picture(77).save(root / "bus" / "photo.JpEg", "JPEG")
    for name in ("train/.DS_Store", ".DS_Store", "train/._000.PNG", "train/Thumbs.db", "readme.txt"):
        (root / name).write_bytes(b"no image")
    for name in (".git", "__MACOSX/a"):
        make_folder(root / name, {"c": 1})
    make_folder(tmp_path / "store", {"x": 4}, seed=900)
    os.symlink(tmp_path / "store" / "x", root / "x")
    os.symlink(root, tmp_path / "store" / "x" / "back")
    data = load_data(str(root))
    assert data.label_names == ["bus", "train", "x"]
    assert sum(map(len, data.seen.values())) == 4 + 4 + 2 + 1 + 4
    assert data.notes[0] == "2 files in 'd' that are no images were ignored"


@pytest.mark.parametrize("form", ["class label", "names", "numbers", "tar", "json tar"])
def test_whatever_holds_the_images_they_are_the_same_data(form, tmp_path):
    """As a table and as a stream, with the same cut."""
    folder = make_folder(tmp_path / "pets", {"cat": 30, "dog": 20, "owl": 10})
    plain, names = load_data(str(folder)), NAMES
    if "tar" in form:
        files = sorted(folder.glob("*/*.png"))
        labels = [file.parent.name if "json" in form else str(NAMES.index(file.parent.name)) for file in files]
        key = "json" if "json" in form else "cls"
        values = [json.dumps({"label": label}) if "json" in form else label for label in labels]
        samples = [{"png": f.read_bytes(), key: v.encode()} for f, v in zip(files, values, strict=True)]
        source, names = tmp_path / "shards", NAMES if "json" in form else ["0", "1", "2"]
        source.mkdir()
        make_tar(source / "a.tar", samples[:40])
        make_tar(source / "b.tar", samples[40:])
    else:
        label = (lambda name: 5 + NAMES.index(name)) if form == "numbers" else (lambda name: name)
        table = make_table(folder, names=NAMES if form == "class label" else None, label=label)
        names, source = ["5", "6", "7"] if form == "numbers" else NAMES, tmp_path / "pets.parquet"
        table.to_parquet(str(source))
    table, stream = load_data(str(source)), load_data(str(source), streaming=True)
    assert table.label_names == stream.label_names == names
    for split in SPLITS:
        renamed = {(image, names[NAMES.index(label)]) for image, label in contents(plain, split)}
        assert contents(stream, split) == contents(table, split) == renamed
    assert form != "class label" or table.fingerprint == plain.fingerprint


def test_adding_and_renaming_never_tests_on_what_was_trained_on(tmp_path):
    folder = make_folder(tmp_path / "pets", {"cat": 30, "dog": 30})
    data = load_data(str(folder))
    before = {split: contents(data, split) for split in data.splits}
    make_folder(tmp_path / "new", {"cat": 10, "dog": 10}, seed=500)
    for file in sorted((tmp_path / "new").glob("*/*.png")):
        file.rename(folder / file.parent.name / f"!{file.name}")  # sorts before all others
    for number, file in enumerate(sorted(folder.glob("dog/0*.png"))):
        file.rename(file.with_name(f"holiday {99 - number}.png"))
    after = load_data(str(folder))
    assert all(before[split] <= contents(after, split) for split in before)


def test_copies_are_told_and_stay_on_one_side(tmp_path):
    folder = make_folder(tmp_path / "pets", {"cat": 20, "dog": 20})
    for number in range(20):
        shutil.copy(folder / "cat" / f"{number:03d}.png", folder / "cat" / f"copy {number}.png")
    data = load_data(str(folder))
    digests = {split: {image.digest for image in seen} for split, seen in data.seen.items()}
    assert not digests["train"] & (digests["test"] | digests["validation"])
    assert len(data.notes) == 2
    assert data.notes[1].startswith("20 images are there more than once: cat/")
    shutil.copy(folder / "cat" / "000.png", folder / "dog" / "the same.png")
    assert "1 image is there under several classes, which nothing can learn: " in load_data(str(folder)).notes[2]
    for number, split in enumerate(("train", "val", "test")):
        make_folder(tmp_path / "split" / split, {"cat": 4, "dog": 4}, seed=100 * number)
    shutil.copy(tmp_path / "split/train/cat/000.png", tmp_path / "split/test/cat/again.png")
    said = "1 image is there in train and outside of it, where results are too good then: cat/000.png = cat/again.png"
    assert load_data(str(tmp_path / "split")).notes[1] == said


def test_fingerprint_is_of_contents_classes_and_splits(folder, tmp_path):
    original = load_data(str(folder)).fingerprint
    for number, file in enumerate(sorted(folder.glob("cat/*.png"))):
        file.rename(file.with_name(f"{number:03d}-renamed.PNG"))
    renamed = folder.rename(tmp_path / "animals")
    assert load_data(str(renamed)).fingerprint == original
    (renamed / "cat").rename(renamed / "cot")
    assert load_data(str(renamed)).fingerprint != original
    (renamed / "cot").rename(renamed / "cat")
    picture(99).save(renamed / "cat" / "000-renamed.PNG", "PNG")
    assert load_data(str(renamed)).fingerprint != original


@EITHER
@pytest.mark.parametrize("form", ["folder", "glob", "subfolders"])
def test_split_named_files(folder, tmp_path, form, streaming):
    table = make_table(folder).shuffle(seed=0)
    (tmp_path / "d" / "test").mkdir(parents=True)
    last = "test/part" if form == "subfolders" else "test-0"
    for number, name in enumerate(("train-0", "train-1", "val", last)):
        table.select(range(10 * number, 10 * number + 10)).to_parquet(str(tmp_path / "d" / f"{name}.parquet"))
    data = load_data(str(tmp_path / "d" / ("*.parquet" if form == "glob" else "")), streaming=streaming)
    assert [len(contents(data, split)) for split in SPLITS] == [20, 10, 10]
    assert data.notes == []


def test_a_rewritten_parquet_file_is_read_anew(folder, tmp_path):
    path = str(tmp_path / "pets.parquet")
    for rows in (40, 30):
        make_table(folder).select(range(rows)).to_parquet(path)
        os.utime(path, (rows, rows))
        assert sum(map(len, load_data(path).seen.values())) == rows


@EITHER
def test_hub_data_sets_come_through_datasets(folder, monkeypatch, streaming):
    table = make_table(folder, names=NAMES)
    table = table.rename_columns({"image": "img", "label": "fine_label"}).add_column("coarse_label", [0] * 40)

    def load_dataset(name, config, revision, streaming):
        assert (name, config) == ("someone/pets", "small")
        kinds = {"train": table, "val": table.select(range(5)), "extra": table.select(range(3))}
        return {key: part.to_iterable_dataset() if streaming else part for key, part in kinds.items()}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info", lambda self, name, timeout: type("Info", (), {"sha": "abc"})
    )
    data = load_data("someone/pets:small", streaming=streaming)
    assert (data.name, data.label_names) == ("someone/pets:small", NAMES)
    assert len(contents(data, "validation")) == 5
    assert "split 'extra' of 'someone/pets:small' was left out" in data.notes


def test_a_test_split_without_labels_is_left_out(folder, tmp_path):
    table = make_table(folder, names=NAMES)
    (tmp_path / "d").mkdir()
    table.to_parquet(str(tmp_path / "d" / "train.parquet"))
    hidden = table.remove_columns("label").add_column("label", [-1] * 40, feature=table.features["label"])
    hidden.to_parquet(str(tmp_path / "d" / "test.parquet"))
    data = load_data(str(tmp_path / "d"))
    assert "split 'test' of 'd' has no labels and was left out" in data.notes
    assert counts(data) == [33, 5, 2]


# ---- images as lists of numbers


def numbers_table(path, pixels, feature=None):
    """Write images as lists of numbers, of the classes 0 and 1 in turn."""
    features = feature and Features({"image": feature, "label": Value("int64")})
    columns = {"image": [image.tolist() for image in pixels], "label": [row % 2 for row in range(len(pixels))]}
    Dataset.from_dict(columns, features=features).to_parquet(str(path))
    return str(path)


def noise(count, *shape, most=256):
    return np.random.RandomState(0).randint(0, most, (count, *shape))


@pytest.mark.parametrize(
    ("shape", "feature"),
    [
        ((8, 8), None),
        ((8, 8), List(List(Value("uint8")))),
        ((8, 8), List(List(Value("int32"), length=8), length=8)),
        ((8, 8), LargeList(LargeList(Value("uint16")))),
        ((8, 8), Array2D((8, 8), "int64")),
        ((8, 8, 1), None),
        ((1, 8, 8), None),
        ((8, 8, 3), Array3D((8, 8, 3), "int64")),
        ((3, 8, 8), None),
    ],
)
def test_lists_of_0_to_255_are_pixels_of_8_bits(tmp_path, shape, feature):
    pixels = noise(24, *shape)
    source = numbers_table(tmp_path / "x.parquet", pixels, feature)
    last = np.moveaxis(pixels, 1, -1) if shape[0] in (1, 3) else pixels.reshape(24, 8, 8, -1)
    expected = {image.tobytes() for image in np.broadcast_to(last, (24, 8, 8, 3)).astype(np.uint8)}
    for streaming in (False, True):
        assert images(load_data(source, streaming=streaming)) == expected


@EITHER
def test_lists_with_a_number_above_255_are_of_16_bits(tmp_path, streaming):
    """In whichever split it is."""
    pixels = noise(48, 8, 8)
    pixels[-1, 0, 0] = 65535
    for split, part in (("train", pixels[:24]), ("test", pixels[24:])):
        numbers_table(tmp_path / f"{split}.parquet", part)
    splits = load_data(str(tmp_path), streaming=streaming).splits
    brightest = {split: max(np.asarray(to_rgb(row["image"])).max() for row in rows) for split, rows in splits.items()}
    assert (brightest["train"], brightest["test"]) == (1, 255)


@pytest.mark.parametrize(
    ("pixels", "match"),
    [
        (np.ones((24, 784), int), r"lists of 784, numbers from 1 to 1; needed: height x width .* such as 28x28x1"),
        (np.ones((24, 3072), int), r"lists of 3072, .* such as 32x32x3"),
        (np.ones((24, 10), int), r"lists of 10, .* from 0 to 255; change them$"),
        (np.ones((24, 5, 8, 8), int), "lists of 5x8x8, "),
        (np.full((24, 8, 8, 3), 256), "lists of 8x8x3, numbers from 256 to 256"),
        (np.full((24, 8, 8, 3), 0.5), r"lists of 8x8x3 \(float64\)"),
    ],
)
def test_lists_that_are_no_images_are_refused(tmp_path, pixels, match):
    source = numbers_table(tmp_path / "x.parquet", pixels)
    for streaming in (False, True):
        with pytest.raises(UserError, match=rf"^the column 'image' of 'x\.parquet' holds {match}"):
            everything(load_data(source, streaming=streaming))


@pytest.mark.parametrize(("highest", "bits", "full"), [(16, 8, "255"), (4095, 16, "65,535")])
def test_dark_numbers_are_told(tmp_path, highest, bits, full):
    pixels = noise(24, 8, 8, most=highest + 1)
    pixels[0, 0, 0] = highest
    notes = load_data(numbers_table(tmp_path / "x.parquet", pixels)).notes
    said = f"images of {bits} bits reach {highest:,} of {full}, so they are seen in 6%"
    assert sum(said in note for note in notes) == 1
