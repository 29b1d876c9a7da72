"""load_data on folders, parquet and webdataset files: the same content gives the same data."""

import json
import logging
import os
import shutil

import numpy as np
import pytest
from datasets import Array2D, Array3D, Dataset, Features, LargeList, List, Value
from PIL import Image

from hf_vit.data import load_data, to_rgb
from hf_vit.errors import UserError

NAMES = ["cat", "dog", "owl"]


def test_folder_of_class_folders_is_cut_and_says_so(folder, caplog, look):
    with caplog.at_level(logging.INFO, "hf_vit"):
        data = load_data(str(folder))
    assert data.name == "pets"
    assert data.label_names == ["cat", "dog", "owl"]
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 33, "validation": 5, "test": 2}
    assert len(look.everything(data)) == 40
    assert data.notes == [
        "5 images for validation and 2 images for test were cut from the 40 training images (by content, seed 0)"
    ]
    assert data.notes[0] in caplog.text
    original = {(Image.open(file).tobytes(), file.parent.name) for file in folder.glob("*/*.png")}
    assert look.everything(data) == original


def test_columns_are_an_image_and_a_class_label(folder):
    import datasets

    table = load_data(str(folder)).splits["test"]
    assert isinstance(table.features["image"], datasets.Image)
    assert table.features["label"].names == ["cat", "dog", "owl"]


def test_the_cut_depends_on_the_seed_alone(folder, tmp_path, look):
    first = load_data(str(folder))
    shutil.copytree(folder, tmp_path / "elsewhere")
    again, other = load_data(str(tmp_path / "elsewhere")), load_data(str(folder), seed=1)
    assert [look.contents(again, split) for split in again.splits] == [
        look.contents(first, split) for split in first.splits
    ]
    assert look.contents(other, "test") != look.contents(first, "test")


@pytest.mark.parametrize(
    "names", [("train", "val", "test"), ("Train", "validation", "testing"), ("train", "dev", None)]
)
def test_split_folders_are_used(tmp_path, make, names):
    for number, name in enumerate(names):
        if name:
            make.folder(tmp_path / "d" / name, {"a": 5, "b": 6}, seed=10_000 * number)
    data = load_data(str(tmp_path / "d"))
    if names[2]:
        assert [data.num_examples(split) for split in ("train", "validation", "test")] == [11, 11, 11]
        assert data.notes == []
    else:
        assert [data.num_examples(split) for split in ("train", "validation", "test")] == [9, 11, 2]
        assert "for test were cut from the 11 training images" in data.notes[0]


def test_a_test_folder_alone_is_not_cut(tmp_path, make):
    make.folder(tmp_path / "test", {"a": 2, "b": 1})
    data = load_data(str(tmp_path))
    assert list(data.splits) == ["test"]
    with pytest.raises(UserError, match=r"has no split 'train' \(it has test\)"):
        data.split("train")


def test_images_deeper_inside_a_class_folder_count(tmp_path, make, look):
    make.folder(tmp_path / "a", {"images": 5})
    make.folder(tmp_path / "b", {"images": 5, "more": 2}, seed=50)
    data = load_data(str(tmp_path))
    assert data.label_names == ["a", "b"]
    assert len(look.everything(data)) == 12


def test_a_class_may_be_called_like_a_split(tmp_path, make):
    make.folder(tmp_path, {"train": 4, "bus": 4})
    assert load_data(str(tmp_path)).label_names == ["bus", "train"]


def test_suffix_case_hidden_files_and_other_files(tmp_path, make):
    make.folder(tmp_path / "d", {"a": 4, "b": 4}, suffix=".PNG")
    make.picture(77).save(tmp_path / "d" / "b" / "photo.JpEg", "JPEG")
    for name in ("a/.DS_Store", ".DS_Store", "a/._000.PNG", "a/Thumbs.db", "readme.txt"):
        (tmp_path / "d" / name).write_bytes(b"no image")
    for name in (".git", "__MACOSX/a"):
        make.folder(tmp_path / "d" / name, {"c": 1})
    data = load_data(str(tmp_path / "d"))
    assert data.label_names == ["a", "b"]
    assert sum(data.num_examples(split) for split in data.splits) == 9
    assert data.notes[0] == "2 files in 'd' that are no images were ignored"


def test_linked_class_folders_are_followed_but_circles_are_not(tmp_path, make):
    make.folder(tmp_path / "store", {"x": 4, "y": 4})
    (tmp_path / "d").mkdir()
    for label in "xy":
        os.symlink(tmp_path / "store" / label, tmp_path / "d" / label)
    os.symlink(tmp_path / "d", tmp_path / "store" / "x" / "back")
    assert sum(map(len, load_data(str(tmp_path / "d")).seen.values())) == 8


@pytest.mark.parametrize("form", ["folder", "parquet", "tar"])
def test_streams_and_tables_agree_on_every_image(form, tmp_path, make, look):
    folder = make.folder(tmp_path / "pets", {"cat": 40, "dog": 30})
    if form == "parquet":
        make.table(folder, names=NAMES[:2]).to_parquet(str(tmp_path / "pets.parquet"))
    if form == "tar":
        files = sorted(folder.glob("*/*.png"))
        make.tar(
            tmp_path / "pets.tar",
            [{"png": file.read_bytes(), "cls": b"01"[n // 40 :][:1]} for n, file in enumerate(files)],
        )
    source = str(folder if form == "folder" else tmp_path / f"pets.{form}")
    table, stream = load_data(source), load_data(source, streaming=True)
    for split in table.splits:
        assert look.contents(stream, split) == look.contents(table, split)
    pictures = [{image for image, _ in look.contents(data, "test")} for data in (table, load_data(str(folder)))]
    assert pictures[0] == pictures[1], "whatever holds the images"


def test_adding_and_renaming_never_tests_on_what_was_trained_on(tmp_path, make, look):
    folder = make.folder(tmp_path / "pets", {"cat": 30, "dog": 30})
    data = load_data(str(folder))
    before = {split: look.contents(data, split) for split in data.splits}
    make.folder(tmp_path / "new", {"cat": 10, "dog": 10}, seed=500)
    for file in sorted((tmp_path / "new").glob("*/*.png")):
        file.rename(folder / file.parent.name / f"!{file.name}")  # sorts before all others
    for number, file in enumerate(sorted(folder.glob("dog/0*.png"))):
        file.rename(file.with_name(f"holiday {99 - number}.png"))
    after = load_data(str(folder))
    assert all(before[split] <= look.contents(after, split) for split in before)


def test_copies_are_told_and_stay_on_one_side(tmp_path, make):
    folder = make.folder(tmp_path / "pets", {"cat": 20, "dog": 20})
    for number in range(20):
        shutil.copy(folder / "cat" / f"{number:03d}.png", folder / "cat" / f"copy {number}.png")
    data = load_data(str(folder))
    digests = {split: {image.digest for image in seen} for split, seen in data.seen.items()}
    assert not digests["train"] & (digests["test"] | digests["validation"])
    assert len(data.notes) == 2
    assert data.notes[1].startswith("20 images are there more than once: cat/")
    shutil.copy(folder / "cat" / "000.png", folder / "dog" / "the same.png")
    assert "1 image is there under several classes, which nothing can learn: " in load_data(str(folder)).notes[2]


def test_copies_across_given_splits_are_told(tmp_path, make):
    for number, split in enumerate(("train", "val", "test")):
        make.folder(tmp_path / "pets" / split, {"cat": 4, "dog": 4}, seed=100 * number)
    shutil.copy(tmp_path / "pets/train/cat/000.png", tmp_path / "pets/test/cat/again.png")
    _, note = load_data(str(tmp_path / "pets")).notes
    assert (
        note
        == "1 image is there in train and outside of it, where results are too good then: cat/000.png = cat/again.png"
    )


# ---- parquet and webdataset


@pytest.mark.parametrize("kind", ["class label", "names", "numbers"])
@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_holds_the_same_data(folder, tmp_path, kind, streaming, look, make):
    names = NAMES
    table = {
        "class label": lambda: make.table(folder, names=names),
        "names": lambda: make.table(folder),
        "numbers": lambda: make.table(folder, label=lambda name: 5 + names.index(name)),
    }[kind]()
    table.to_parquet(str(tmp_path / "pets.parquet"))
    data = load_data(str(tmp_path / "pets.parquet"), streaming=streaming)
    assert data.label_names == (["5", "6", "7"] if kind == "numbers" else names)
    assert {image for image, _ in look.everything(data)} == {
        image for image, _ in look.everything(load_data(str(folder)))
    }
    if kind != "numbers":
        assert look.everything(data) == look.everything(load_data(str(folder)))
    if kind == "class label" and not streaming:
        assert data.fingerprint == load_data(str(folder)).fingerprint


def test_fingerprint_is_of_contents_classes_and_splits(folder, tmp_path, make):
    original = load_data(str(folder)).fingerprint
    for number, file in enumerate(sorted(folder.glob("cat/*.png"))):
        file.rename(file.with_name(f"{number:03d}-renamed.PNG"))
    assert load_data(str(folder)).fingerprint == original
    renamed = folder.rename(tmp_path / "animals")
    assert load_data(str(renamed)).fingerprint == original
    (renamed / "cat").rename(renamed / "cot")
    assert load_data(str(renamed)).fingerprint != original
    (renamed / "cot").rename(renamed / "cat")
    make.picture(99).save(renamed / "cat" / "000-renamed.PNG", "PNG")
    assert load_data(str(renamed)).fingerprint != original


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["folder", "glob", "subfolders"])
def test_split_named_files(folder, tmp_path, form, streaming, look, make):
    table = make.table(folder).shuffle(seed=0)
    (tmp_path / "d" / "test").mkdir(parents=True)
    for name, rows in (("train-0", range(10)), ("train-1", range(10, 20)), ("val", range(20, 30))):
        table.select(rows).to_parquet(str(tmp_path / "d" / f"{name}.parquet"))
    last = tmp_path / "d" / ("test/part.parquet" if form == "subfolders" else "test-0.parquet")
    table.select(range(30, 40)).to_parquet(str(last))
    source = str(tmp_path / "d" / "*.parquet") if form == "glob" else str(tmp_path / "d")
    data = load_data(source, streaming=streaming)
    assert [len(look.contents(data, split)) for split in ("train", "validation", "test")] == [20, 10, 10]
    assert data.notes == []


def test_a_rewritten_parquet_file_is_read_anew(folder, tmp_path, make):
    path = str(tmp_path / "pets.parquet")
    make.table(folder).to_parquet(path)
    assert sum(map(len, load_data(path).seen.values())) == 40
    make.table(folder).select(range(30)).to_parquet(path)
    os.utime(path, (1, 1))
    assert sum(map(len, load_data(path).seen.values())) == 30


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("label", ["cls", "json"])
def test_webdataset_holds_the_same_data(tmp_path, make, streaming, label, look):
    samples = []
    for index in range(60):
        written = str(index % 3) if label == "cls" else json.dumps({"label": ["cat", "dog", "owl"][index % 3]})
        samples.append({"png": make.encoded(make.picture(index)), label: written.encode()})
    make.tar(tmp_path / "a.tar", samples[:40])
    make.tar(tmp_path / "b.tar", samples[40:])
    data = load_data(str(tmp_path), streaming=streaming)
    assert data.label_names == (["0", "1", "2"] if label == "cls" else ["cat", "dog", "owl"])
    expected = {(make.picture(i).tobytes(), data.label_names[i % 3]) for i in range(60)}
    assert look.everything(data) == expected
    parts = [len(look.contents(data, split)) for split in ("train", "validation", "test")]
    assert parts == [45, 8, 7], "of a stream as of a table"


def test_streamed_folder_has_the_cut_of_the_table(folder, look):
    table, stream = load_data(str(folder)), load_data(str(folder), streaming=True)
    assert [stream.num_examples(split) for split in stream.splits] == [33, 5, 2]
    for split in table.splits:
        assert look.contents(stream, split) == look.contents(table, split)


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_sets_come_through_datasets(folder, monkeypatch, streaming, look, make):
    import datasets

    table = make.table(folder, names=NAMES)
    table = table.rename_columns({"image": "img", "label": "fine_label"}).add_column("coarse_label", [0] * 40)
    asked = []

    def load_dataset(name, config, revision, streaming):
        asked.append((name, config))
        kinds = {"train": table, "val": table.select(range(5)), "extra": table.select(range(3))}
        return {key: part.to_iterable_dataset() if streaming else part for key, part in kinds.items()}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info", lambda self, name, timeout: type("Info", (), {"sha": "abc"})
    )
    data = load_data("someone/pets:small", streaming=streaming)
    assert asked == [("someone/pets", "small")]
    assert data.name == "someone/pets:small"
    assert data.label_names == NAMES
    assert len(look.contents(data, "validation")) == 5
    assert "split 'extra' of 'someone/pets:small' was left out" in data.notes


def test_a_test_split_without_labels_is_left_out(folder, tmp_path, make):
    names = NAMES
    table = make.table(folder, names=names)
    (tmp_path / "d").mkdir()
    table.to_parquet(str(tmp_path / "d" / "train.parquet"))
    hidden = table.remove_columns("label").add_column("label", [-1] * 40, feature=table.features["label"])
    hidden.to_parquet(str(tmp_path / "d" / "test.parquet"))
    data = load_data(str(tmp_path / "d"))
    assert "split 'test' of 'd' has no labels and was left out" in data.notes
    assert [data.num_examples(split) for split in ("train", "validation", "test")] == [33, 5, 2]


def numbers_table(path, pixels, feature=None):
    """Write images as lists of numbers, of the classes 0 and 1 in turn."""
    features = feature and Features({"image": feature, "label": Value("int64")})
    columns = {"image": [image.tolist() for image in pixels], "label": [row % 2 for row in range(len(pixels))]}
    Dataset.from_dict(columns, features=features).to_parquet(str(path))
    return str(path)


def as_read(source, streaming):
    """The pixels of all images, as RGB."""
    splits = load_data(source, streaming=streaming).splits.values()
    return sorted(np.asarray(row["image"].convert("RGB")).tobytes() for split in splits for row in split)


@pytest.mark.parametrize("streaming", [False, True])
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
def test_lists_of_0_to_255_are_pixels_of_8_bits(tmp_path, shape, feature, streaming):
    pixels = np.random.RandomState(0).randint(0, 256, (24, *shape))
    source = numbers_table(tmp_path / "x.parquet", pixels, feature)
    last = np.moveaxis(pixels, 1, -1) if shape[0] in (1, 3) else pixels.reshape(24, 8, 8, -1)
    expected = np.broadcast_to(last, (24, 8, 8, 3)).astype(np.uint8)
    assert as_read(source, streaming) == sorted(image.tobytes() for image in expected)


@pytest.mark.parametrize("streaming", [False, True])
def test_lists_with_a_number_above_255_are_of_16_bits(tmp_path, streaming):
    """In whichever split it is."""
    pixels = np.random.RandomState(0).randint(0, 256, (48, 8, 8))
    pixels[-1, 0, 0] = 65535
    for split, part in (("train", pixels[:24]), ("test", pixels[24:])):
        numbers_table(tmp_path / f"{split}.parquet", part)
    splits = load_data(str(tmp_path), streaming=streaming).splits
    brightest = {split: max(np.asarray(to_rgb(row["image"])).max() for row in rows) for split, rows in splits.items()}
    assert brightest["train"] == 1
    assert brightest["test"] == 255


@pytest.mark.parametrize("streaming", [False, True])
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
def test_lists_that_are_no_images_are_refused(tmp_path, pixels, match, streaming):
    source = numbers_table(tmp_path / "x.parquet", pixels)
    with pytest.raises(UserError, match=rf"^the column 'image' of 'x\.parquet' holds {match}"):
        as_read(source, streaming)


@pytest.mark.parametrize(("highest", "bits", "full"), [(16, 8, "255"), (4095, 16, "65,535")])
def test_dark_numbers_are_told(tmp_path, highest, bits, full):
    pixels = np.random.RandomState(0).randint(0, highest + 1, (24, 8, 8))
    pixels[0, 0, 0] = highest
    notes = load_data(numbers_table(tmp_path / "x.parquet", pixels)).notes
    assert (
        sum(f"images of {bits} bits reach {highest:,} of {full}, so they are seen in 6%" in note for note in notes) == 1
    )
