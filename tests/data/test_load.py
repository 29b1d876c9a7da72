"""load_data on folders, lists, parquet and webdataset files: the same content gives the same data and splits."""

import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import struct
import time
import zlib
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from data.conftest import contents, everything, make_folder, make_table, make_tar, picture, write_idx
from datasets import Array2D, Array3D, Dataset, Features, LargeList, List, Value
from PIL import Image

from hf_vit import HfViTConfig
from hf_vit.data import AugmentationConfig, image_transforms, load_data, make_processor, to_rgb, transform_split
from hf_vit.data.splits import assign_split, cut_rows
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
        "5 images for validation and 2 images for test were split off the 40 training images (by content hash, seed 0)"
    ]
    assert data.notes[0] in caplog.text
    stored = {(Image.open(file).tobytes(), file.parent.name) for file in folder.glob("*/*.png")}
    assert everything(data) == stored
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
        (("train2017", "val_2017", "test-2017"), [11, 11, 11]),
        (("training_set", "valset", "Test images"), [11, 11, 11]),
        (("train", "dev"), [9, 11, 2]),
        (("train", "val", "test -> val"), [11, 11, 11]),
        (("test",), [11]),
    ],
)
def test_split_folders_are_used(tmp_path, names, expected):
    for number, name in enumerate(names):
        name, _, linked = name.partition(" -> ")
        if linked:
            os.symlink(linked, tmp_path / "d" / name)
        else:
            make_folder(tmp_path / "d" / name, {"a": 5, "b": 6}, seed=10_000 * number)
    data = load_data(str(tmp_path / "d"))
    assert counts(data) == expected
    assert ("for test were split off the 11 training images" in " ".join(data.notes)) == ("dev" in names)
    assert "dev" in names or len(data.notes) == ("test -> val" in names), "test images are those of validation"
    if names == ("test",):
        with pytest.raises(UserError, match=r"has no split 'train'; choose one of test"):
            data.split("train")


def test_what_counts_of_a_folder(tmp_path):
    """Images deeper inside; a class called like a split; any case; neither hidden nor other files nor circles."""
    root = tmp_path / "d"
    make_folder(root, {"train": 4, "bus/deep": 4, "bus": 2}, suffix=".PNG")
    picture(77).save(root / "bus" / "photo.JpEg", "JPEG")
    for name in ("train/.DS_Store", ".DS_Store", "train/._000.PNG", "train/Thumbs.db", "readme.txt"):
        (root / name).write_bytes(b"no image")
    for name in (".git", "__MACOSX/a", "@eaDir", "bus/@eaDir", "$RECYCLE.BIN"):
        make_folder(root / name, {"c": 1})
    make_folder(tmp_path / "store", {"x": 4}, seed=900)
    os.symlink(tmp_path / "store" / "x", root / "x")
    os.symlink(root, tmp_path / "store" / "x" / "back")
    data = load_data(str(root))
    assert data.label_names == ["bus", "train", "x"]
    assert sum(map(len, data.seen.values())) == 4 + 4 + 2 + 1 + 4
    assert data.notes[0] == "ignored 2 files in 'd' that are not images (1 .txt, 1 .db)"


def test_a_table_beside_class_folders_is_told(folder):
    """Such as predictions of these images, whose labels are not those of the folders."""
    table = {"image": list(map(str, sorted(folder.glob("*/*.png")))), "label": ["cat", "owl"] * 20}
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "predictions.parquet")
    note = "'pets' is read from its parquet files, such as predictions.parquet, not from its 40 image files"
    assert all(note in load_data(str(folder), streaming=streaming).notes for streaming in (False, True))


@pytest.mark.parametrize("form", ["class label", "names", "numbers", "tar", "json tar"])
def test_whatever_holds_the_images_they_are_the_same_data(form, tmp_path):
    """As a table and as a stream, with the same cut."""
    folder = make_folder(tmp_path / "pets", {"cat": 30, "dog": 20, "owl": 10})
    plain, names = load_data(str(folder)), NAMES
    if "tar" in form:
        key, names = ("json", NAMES) if "json" in form else ("cls", ["0", "1", "2"])
        value = {name: f'{{"label": "{name}"}}' if key == "json" else str(NAMES.index(name)) for name in NAMES}
        files, source = sorted(folder.glob("*/*.png")), tmp_path / "shards"
        samples = [{"png": file.read_bytes(), key: value[file.parent.name].encode()} for file in files]
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


@pytest.fixture
def remembering(tmp_path, monkeypatch):
    """A cache of checked images that also has those of files of the last seconds."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    now = time.time_ns
    monkeypatch.setattr("time.time_ns", lambda: now() + 10**10)


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_unchanged_images_are_not_read_again(kind, tmp_path, monkeypatch):
    """Changed, new and missing images are noticed; a damaged record is made again; the variable turns it off."""
    folder = make_folder(tmp_path / "pets", {"cat": 500, "dog": 500})
    source = folder if kind == "folder" else tmp_path / "train.parquet"

    def write():
        if kind == "parquet":
            make_table(folder, names=["cat", "dog"]).to_parquet(source)

    def load(check=True):
        data = load_data(source, check=check)
        return data.fingerprint, data.seen, [note for note in data.notes if "earlier check" in note]

    write()
    first = load(check=False)
    assert load() == first == (*first[:2], []), "an earlier look at headers alone does not count"
    (note,) = (again := load())[2]
    assert again == (*first[:2], [note])
    assert note.startswith("1,000 of 1,000 images were not read")
    kept = load_data(source, keep=True)  # for a training, which needs the pixels at once
    assert kept.seen["train"][0].pixels == kept.splits["train"][0]["image"].tobytes()
    vary, _ = image_transforms(make_processor(HfViTConfig()), AugmentationConfig(random_resized_crop=(0.5, 1)))
    vary.set_epoch(0)  # else its keys are drawn anew
    one, other = (transform_split(data, "train", vary)[7]["pixel_values"] for data in (kept, load_data(source)))
    assert torch.equal(one, other)
    assert not any("earlier check" in note for note in kept.notes)
    picture(999_999).save(folder / "cat" / "000.png")
    picture(999_998).save(folder / "cat" / "new.png")
    (folder / "dog" / "000.png").unlink()
    write()
    changed = load()
    assert changed[0] != first[0]
    assert [note[:11] for note in changed[2]] == (["998 of 1,00"] if kind == "folder" else [])
    monkeypatch.setenv("HF_VIT_CHECK_ALL", "1")
    assert load() == (*changed[:2], [])
    monkeypatch.delenv("HF_VIT_CHECK_ALL")
    for record in (tmp_path / "cache").rglob("*.npz"):
        record.write_bytes(record.read_bytes()[:-9] + b"123456789")
    (note,) = (damaged := load())[2]
    assert damaged == (*changed[:2], [note])
    assert "is damaged (its content has changed), so all images are checked again" in note
    assert load()[2][0].startswith("1,000 of 1,000 images")


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize("kind", ["named files", "pixels"])
def test_a_table_is_not_all_that_its_images_depend_on(kind, tmp_path, monkeypatch):
    """Rows may name files, and the range of numbers in other splits decides how pixels are encoded."""

    def write(split, images):
        table = {"image": images, "label": [row % 2 for row in range(len(images))]}
        Dataset.from_dict(table).to_parquet(tmp_path / f"{split}.parquet")

    files = [str(tmp_path / f"{row}.png") for row in range(1000)]
    if kind == "pixels":
        write("train", [[[0.0, row / 1000], [1.0, 0.5]] for row in range(1000)])
        write("test", [[[1.0, 0.0], [0.0, 1.0]]] * 2)
    else:
        for row, file in enumerate(files):
            picture(row).save(file)
        write("train", files)
        write("test", files[:2])
    first = load_data(tmp_path)
    if kind == "pixels":
        write("test", [[[200.0, 0.0], [0.0, 1.0]]] * 2)
    else:
        picture(999_999).save(files[0])
    changed = load_data(tmp_path)
    assert changed.fingerprint != first.fingerprint
    monkeypatch.setenv("HF_VIT_CHECK_ALL", "1")
    assert changed.seen == load_data(tmp_path).seen != first.seen


@pytest.mark.parametrize("others", [False, True])
def test_images_of_other_splits_are_not_read(others, tmp_path, monkeypatch):
    """A split is the same without them; for the fingerprint of the whole data they are hashed, not decoded."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    for split in ("train", "test"):
        make_folder(tmp_path / "pets" / split, {"cat": 20, "dog": 20} if split == "train" else {"dog": 9})
    whole = load_data(tmp_path / "pets")
    part = load_data(tmp_path / "pets", splits=["test"], hash_others=others)
    assert list(part.splits) == (list(SPLITS) if others else ["test"])
    assert (part.fingerprint == whole.fingerprint) is others
    assert (part.label_names, contents(part, "test")) == (whole.label_names, contents(whole, "test"))
    cut = load_data(tmp_path / "pets", splits=["validation"], hash_others=others)
    assert contents(cut, "validation") == contents(whole, "validation")
    bad = tmp_path / "pets" / "train" / "cat" / "000.png"
    bad.write_bytes(bad.read_bytes()[:40])
    with pytest.raises(UserError, match="cat/000"):
        load_data(tmp_path / "pets", splits=["train"], hash_others=others)
    assert load_data(tmp_path / "pets", splits=["test"], hash_others=others).seen["test"] == whole.seen["test"]


def test_a_cache_that_cannot_be_written_stops_no_command(folder, tmp_path, monkeypatch):
    wanted = load_data(folder).fingerprint
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "file"))
    assert load_data(folder).fingerprint == wanted


def test_copies_are_told_and_stay_on_one_side(tmp_path):
    folder = make_folder(tmp_path / "pets", {"cat": 20, "dog": 20})
    for number in range(20):
        shutil.copy(folder / "cat" / f"{number:03d}.png", folder / "cat" / f"copy {number}.png")
    data = load_data(str(folder))
    digests = {split: {image.digest for image in seen} for split, seen in data.seen.items()}
    assert not digests["train"] & (digests["test"] | digests["validation"])
    assert len(data.notes) == 2
    assert data.notes[1].startswith("20 duplicate images in one split: cat/")
    shutil.copy(folder / "cat" / "000.png", folder / "dog" / "the same.png")
    assert "1 duplicate image with different classes: " in load_data(str(folder)).notes[2]
    for number, split in enumerate(("train", "val", "test")):
        make_folder(tmp_path / "split" / split, {"cat": 4, "dog": 4}, seed=100 * number)
    shutil.copy(tmp_path / "split/train/cat/000.png", tmp_path / "split/test/cat/again.png")
    said = "1 duplicate image in several splits, so results are too good: cat/000.png = cat/again.png"
    assert load_data(str(tmp_path / "split")).notes == [said]  # no copy is in the same split
    (tmp_path / "split/test/cat/again.png").unlink()
    shutil.copy(tmp_path / "split/val/cat/000.png", tmp_path / "split/test/cat/again.png")  # which chose the checkpoint
    assert load_data(str(tmp_path / "split")).notes == [said]


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
@pytest.mark.parametrize(
    "form", ["folder", "glob", "subfolders", "glob of subfolders", "glob from here", "Split", "split of classes"]
)
def test_split_named_files(folder, tmp_path, monkeypatch, form, streaming):
    monkeypatch.chdir(tmp_path)
    table = make_table(folder).shuffle(seed=0)
    (tmp_path / "d" / "test").mkdir(parents=True)
    last = "test-0" if form in ("folder", "glob") else "test/part"
    for number, name in enumerate(("train-0", "train-1", "val", last)):
        table.shard(4, number, contiguous=True).to_parquet(str(tmp_path / "d" / f"{name}.parquet"))
    if form.lower().startswith("split"):  # a column
        shutil.rmtree(tmp_path / "d")
        divided = table.add_column(form.split()[0], ["train", "Val", "test", "train"] * 10)
        divided = divided.class_encode_column("split") if form == "split of classes" else divided
        divided.to_parquet(str(tmp_path / "d" / "train.parquet"))
    pattern = {"glob": "*.parquet", "glob of subfolders": "**/*.parquet"}.get(form, "")
    source = tmp_path / "d" / pattern if form != "glob from here" else "**/*.parquet"
    data = load_data(str(source), streaming=streaming)
    assert [len(contents(data, split)) for split in SPLITS] == [20, 10, 10]
    assert data.notes == []
    table.to_parquet(str(tmp_path / "d" / "holdout.parquet"))
    with pytest.raises(UserError, match=r"^'holdout.parquet' names no split, but other files name train; write"):
        load_data(str(source), streaming=streaming)


def test_a_rewritten_parquet_file_is_read_anew(folder, tmp_path):
    path = str(tmp_path / "pets.parquet")
    for rows in (40, 30):
        make_table(folder).select(range(rows)).to_parquet(path)
        os.utime(path, (1, 1))  # as of an archive that is unpacked again
        assert sum(map(len, load_data(path).seen.values())) == rows


@EITHER
def test_hub_data_sets_come_through_datasets(folder, monkeypatch, streaming):
    table = make_table(folder, names=NAMES)
    table = table.rename_columns({"image": "img", "label": "fine_label"}).add_column("coarse_label", [0] * 40)

    def load_dataset(name, config, revision, streaming):
        assert (name, config) == ("someone/pets", "small")
        kinds = {"train": table, "val": table.select(range(5)), "extra": table.select(range(3))}
        kinds["dev"] = kinds["extra"]
        assert revision == "abc"
        return {key: part.to_iterable_dataset() if streaming else part for key, part in kinds.items()}

    commits = iter(["abc"])  # it is asked once, as another answer may be of another commit
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info", lambda *args, **more: SimpleNamespace(sha=next(commits), siblings=None)
    )
    data = load_data("someone/pets:small", streaming=streaming)
    assert (data.name, data.label_names, data.revision) == ("someone/pets:small", NAMES, "abc")
    assert len(contents(data, "validation")) == 5
    assert data.notes[:2] == [
        "ignored the split 'extra' of 'someone/pets:small', which is none of train, validation and test",
        "ignored the split 'dev' of 'someone/pets:small', as it has another one for validation",
    ]


def test_a_stream_of_the_hub_is_not_read_for_its_column_split(folder, monkeypatch):
    table = make_table(folder, names=NAMES).add_column("split", ["train", "test"] * 20)
    rows = []
    read = table.to_iterable_dataset().map(lambda row: rows.append(1) or row, features=table.features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: {"train": read})
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info", lambda *given, **more: SimpleNamespace(sha="abc", siblings=None)
    )
    data = load_data("someone/pets", streaming=True)
    assert len(rows) <= 40  # to see whether there are labels
    assert "the column 'split' of 'someone/pets' divides no stream; leave --streaming out to divide by it" in data.notes


@EITHER
def test_a_test_split_without_labels_is_left_out(folder, tmp_path, streaming):
    table = make_table(folder, names=NAMES)
    (tmp_path / "d").mkdir()
    table.to_parquet(str(tmp_path / "d" / "train.parquet"))
    hidden = table.remove_columns("label").add_column("label", [-1] * 40, feature=table.features["label"])
    hidden.to_parquet(str(tmp_path / "d" / "test.parquet"))
    data = load_data(str(tmp_path / "d"), streaming=streaming)
    assert "split 'test' of 'd' was left out, because it has no labels" in data.notes
    assert [len(contents(data, split)) for split in SPLITS] == [33, 5, 2]


@EITHER
def test_without_a_training_split_classes_are_those_of_all_labels(folder, tmp_path, streaming):
    table, data = make_table(folder), tmp_path / "d"
    table.filter(lambda row: row["label"] != NAMES[-1]).to_parquet(str(data / "val.parquet"))
    table.to_parquet(str(data / "test.parquet"))
    assert load_data(str(data), streaming=streaming).label_names == NAMES
    for file in data.iterdir():
        make_table(folder, label=lambda name: -1).to_parquet(str(file))
    with pytest.raises(UserError, match="'d' holds no labeled image"):
        load_data(str(data), streaming=streaming)


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
        ((8, 8), None), ((8, 8), List(List(Value("uint8")))), ((8, 8), List(List(Value("int32"), length=8), length=8)),
        ((8, 8), LargeList(LargeList(Value("uint16")))), ((8, 8), Array2D((8, 8), "int64")), ((8, 8, 1), None),
        ((1, 8, 8), None), ((8, 8, 3), Array3D((8, 8, 3), "int64")), ((3, 8, 8), None),
    ],
)  # fmt: skip
def test_lists_of_numbers_are_pixels(tmp_path, shape, feature):
    """Of 0 to 255; of fractions up to 1, or what rounding makes of it, of which a dark image stays dark."""
    pixels = noise(48, *shape)
    pixels[3], pixels[-1].flat[0] = pixels[3] > 200, 255
    last = np.moveaxis(pixels, 1, -1) if shape[0] in (1, 3) else pixels.reshape(48, 8, 8, -1)
    expected = {image.tobytes() for image in np.broadcast_to(last, (48, 8, 8, 3)).astype(np.uint8)}
    for scale in (1, 1.0, 1.0000002 / 255)[: 3 if feature is None else 1]:
        for split, part in (("train", pixels[:24]), ("test", pixels[24:])):
            numbers_table(tmp_path / f"{split}.parquet", part * scale, feature)
        for streaming in (False, True):
            assert images(load_data(str(tmp_path), streaming=streaming)) == expected, scale


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
        (np.ones((24, 784), int), r"lists of 784 with numbers from 1 to 1; save them as .* such as 28x28x1"),
        (np.ones((24, 3072), int), r"lists of 3072 .* such as 32x32x3"),
        (np.ones((24, 10), int), r"lists of 10 .* from 0 to 255 or 0 to 1$"),
        (np.ones((24, 5, 8, 8), int), r"lists of 5x8x8 .* x 1 or 3 channels \(with opacity 2 or 4\) of numbers"),
        (np.full((24, 8, 8, 3), 256), "lists of 8x8x3 with numbers from 256 to 256"),
        (np.full((24, 8, 8, 3), 255.5), "lists of 8x8x3 with numbers from 255.5 to 255.5"),
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
    said = f"the {bits}-bit images look dark (6% brightness): their highest value is {highest:,} of {full}"
    assert sum(said in note for note in notes) == 1


@pytest.mark.parametrize("kind", ["gray", "color"])
def test_dark_images_of_16_bits_are_told(folder, kind):
    """Colors as the PNG standard has them: Pillow writes none."""
    for number, file in enumerate(sorted(folder.glob("*/*.png"))):
        values = np.random.RandomState(number).randint(0, 4096, (12, 12, 3 if kind == "color" else 1))
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
        head = struct.pack(">IIBBBBB", 12, 12, 16, 2 if kind == "color" else 0, 0, 0, 0)
        chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
        parts = (struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
                 for name, part in chunks)  # fmt: skip
        file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    assert sum("the 16-bit images look dark" in note for note in load_data(str(folder)).notes) == 1


# ---- lists of images and their labels, by any names of columns


@pytest.fixture
def flat(folder, tmp_path):
    """The 40 images of `folder` in one place without class folders, and (file name, class) of each."""
    place = tmp_path / "flat"
    place.mkdir()
    rows = []
    for file in sorted(folder.glob("*/*.png")):
        name = f"{file.parent.name}-{file.name}"
        shutil.copy(file, place / name)
        rows.append((name, file.parent.name))
    return place, rows


def write_csv(path, header, rows, delimiter=","):
    path.write_text("\n".join(delimiter.join(map(str, row)) for row in (header, *rows)) + "\n")
    return path


def write_jsonl(path, header, rows):
    path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))
    return path


WRITERS = {
    "metadata.csv": write_csv,
    "labels.csv": lambda path, header, rows: write_csv(path, header, rows, ";"),
    "metadata.tsv": lambda path, header, rows: write_csv(path, header, rows, "\t"),
    "metadata.jsonl": write_jsonl,
}


@EITHER
@pytest.mark.parametrize("name", WRITERS)
def test_a_list_beside_its_images_is_the_folder_of_class_folders(name, streaming, flat, folder):
    place, rows = flat
    WRITERS[name](place / name, ("file_name", "note", "label"), [(file, "x", label) for file, label in rows])
    classes, listed = load_data(str(folder)), load_data(str(place), streaming=streaming)
    assert listed.label_names == NAMES
    assert all(contents(listed, split) == contents(classes, split) for split in classes.splits)
    assert streaming or listed.fingerprint == classes.fingerprint
    again = load_data(str(place / name))
    assert again.fingerprint == classes.fingerprint, "the list itself"


def test_columns_of_any_name(flat, folder, tmp_path):
    place, rows = flat
    table = make_table(folder).rename_columns({"image": "photo", "label": "species"}).add_column("label", [0] * 40)
    table.to_parquet(str(tmp_path / "pets.parquet"))
    path = write_csv(place / "birds.csv", ("photo", "species", "label"), [(file, label, 0) for file, label in rows])
    for source, streaming in ((path, False), (tmp_path / "pets.parquet", False), (tmp_path / "pets.parquet", True)):
        data = load_data(str(source), image_column="photo", label_column="species", streaming=streaming)
        assert everything(data) == everything(load_data(str(folder)))
    for source, columns, said in (
        (path, ("photo", "kind"), r"has no column 'kind' \(--label-column\); choose one of photo, species, label"),
        (path, (None, None), "columns photo, species, label, but none of image files.* --image-column, or move birds"),
        (folder, ("x", None), r"has no column 'x' \(--image-column\)"),
    ):
        with pytest.raises(UserError, match=said):
            load_data(str(source), image_column=columns[0], label_column=columns[1])


@pytest.mark.parametrize(
    "how",
    [
        "split",
        "SPLIT",
        "folders",
        "folders in one",
        "folders of Windows",
        "whole paths",
        "elsewhere",
        "lists",
        "_images",
    ],
)
def test_splits_of_a_list(how, flat, monkeypatch):
    place, rows = flat
    source = place
    if how == "elsewhere":  # a folder above all images says nothing of their splits
        source, place = place.with_name("lists"), place.rename(place.with_name("dev"))
        source.mkdir()
    if how == "whole paths":  # on two drives of Windows
        for function in ("relpath", "commonpath"):
            monkeypatch.setattr(f"os.path.{function}", Mock(side_effect=ValueError("Paths don't have the same drive")))
    inner = "images/" if how == "folders in one" else ""
    class_folder = "train/" if how == "lists" else ""  # as of CIFAR-100
    suffix = how if how == "_images" else ""  # of Kaggle's folders
    parts = [f"train{suffix}"] * 30 + [f"val{suffix}"] * 5 + [f"test{suffix}"] * 5
    rows = [(*rows[number * 7 % 40], part) for number, part in enumerate(parts)]  # every class in train
    if how.lower() == "split":  # a column
        write_csv(place / "metadata.csv", ("file_name", "label", how), rows)
    else:
        for file, _, part in rows:
            (place / inner / part / class_folder).mkdir(exist_ok=True, parents=True)
            (place / file).rename(place / inner / part / class_folder / file)
    if "folders" in how or how in ("whole paths", "elsewhere", "_images"):
        whole = f"{place}/{{}}/{{}}"
        forms = {"whole paths": whole, "elsewhere": whole, "folders of Windows": ".\\{}\\{}"}
        form = forms.get(how, f"{inner}{{}}/{{}}")
        listed = [(form.format(part, file), label) for file, label, part in rows]
        write_csv(source / "metadata.csv", ("file_name", "label"), listed)
    if how == "lists":
        for part in ("train", "val", "test"):
            inside = [(class_folder + file, label) for file, label, split in rows if split == part]
            write_jsonl(place / part / "metadata.jsonl", ("file_name", "label"), inside)
    data = load_data(str(source))
    assert counts(data) == [30, 5, 5]
    assert data.notes == [] or "ignored" in data.notes[0]


def test_what_a_list_lacks_is_named(flat):
    place, rows = flat
    path = write_csv(place / "metadata.csv", ("file_name", "label"), [*rows, ("gone.png", "cat")])
    assert load_data(str(place), skip_bad_images=True).skipped == ["flat/gone.png"]
    of_holidays = "".join(f"\n{file},{label},holiday" for file, label in rows)
    for text, said in (
        ("file_name,label\nno/such/a.png,cat\nb.png,dog\n", r"image '.*no/such/a\.png' is missing"),
        (path.read_text(), r"image '.*gone\.png' is missing; replace or remove such images"),
        (f"file_name,label,split{of_holidays}", r"metadata\.csv has the split 'holiday', .*; write train, valid"),
        (f"file_name,label,split{of_holidays.replace('holiday', 'train')}\n{rows[0][0]},cat,", "has the split ''"),
        ('file_name,label\n"unclosed\n', r"^metadata\.csv of 'flat'"),
        ("", r"metadata\.csv of 'flat' cannot be read as a list"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            load_data(str(place))


NFC, NFD = "cr\u00e8me", "cre\u0300me"


def named_images(root, names):
    """Make a folder with four images for each name, and return (file, name) of each."""
    root.mkdir(parents=True)
    rows = [(f"{number}-{copy}.png", name) for number, name in enumerate(names) for copy in range(4)]
    for seed, (file, _) in enumerate(rows):
        picture(seed).save(root / file)
    return rows


@pytest.mark.parametrize("write", [write_csv, write_jsonl])
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["1", "01", "2"], ["01", "1", "2"]), (["001", "0x1", "true"], ["001", "0x1", "true"]),
        (["NA", "null", "nan"], ["NA", "nan", "null"]), (["2", "10", "1"], ["1", "2", "10"]),
        (["1.0", "2", "other"], ["1.0", "2", "other"]), (["9" * 20, "1e5"], ["1e5", "9" * 20]),
        ([NFC, NFD, " b ", "b"], ["b", NFC]), (["a b", "a\u00a0b", "c", "c\u200b", "\u00adc"], ["a b", "c"]),
    ],
)  # fmt: skip
def test_labels_are_text_and_numbers_where_all_are(tmp_path, write, labels, names):
    rows = named_images(tmp_path / "d", labels)
    path = write(tmp_path / "d" / f"metadata.{write.__name__[6:]}", ("file_name", "label"), rows)
    assert load_data(str(path)).label_names == names


@pytest.mark.parametrize(("one", "other"), [("Cat", "cat"), ("1", "\uff11"), ("red fox", "red_fox")])
def test_classes_whose_names_look_alike_are_told(tmp_path, one, other):
    rows = named_images(tmp_path / "d", [one, other, "b"])
    source = write_csv(tmp_path / "d" / "l.csv", ("file_name", "label"), rows)
    stored = [{"bytes": (tmp_path / "d" / file).read_bytes(), "path": file} for file, _ in rows]
    parquet = tmp_path / "d.parquet"
    Dataset.from_dict({"image": stored, "label": [label for _, label in rows]}).to_parquet(parquet)
    first, second = sorted([one, other])
    note = f"classes '{first}' and '{second}' look alike; use one name if they are the same class"
    for data in (load_data(source), load_data(source, streaming=True), load_data(parquet, streaming=True)):
        assert data.label_names == sorted([one, other, "b"])
        assert note in data.notes


@pytest.mark.parametrize(
    ("write", "train", "test", "names"),
    [
        (write_csv, ["1", "2", "other"], ["1", "2"], ["1", "2", "other"]),
        (write_csv, ["a", "b"], ["-1"], ["a", "b"]),
        (write_jsonl, [1, 2, 10], ["2", "1"], ["1", "2", "10"]),
        (write_jsonl, [1, "x", True], [1, "true"], ["1", "true", "x"]),
        (write_jsonl, [["a"], ["b", "a"]], ["b", None], ["a", "b"]),
    ],
)
def test_the_labels_of_all_lists_are_typed_together(tmp_path, write, train, test, names):
    suffix = write.__name__[6:]
    for split, labels in (("train", train), ("test", test)):
        rows = named_images(tmp_path / split, [label for label in labels if label is not None])
        write(tmp_path / split / f"metadata.{suffix}", ("file_name", "label"), rows)
    data = load_data(str(tmp_path), multi_label=True)
    assert data.label_names == names
    if "-1" not in test:
        each = [label if isinstance(label, list) else [label] for label in data.splits["test"]["label"]]
        told = [str(label).lower() for label in test if label is not None for _ in range(4)]
        assert [names[label] for (label,) in each] == told


def test_lists_and_folders_of_names_that_look_alike_are_the_same_data(tmp_path):
    """A model of one is evaluated on the other: zeros in front, either Unicode form, and blanks."""
    rows = []
    for number, (split, name) in enumerate([(s, n) for s in ("train", "test") for n in ("01", "10", "c", "e")]):
        spelled = {"c": (NFC, NFD)[split == "test"], "e": ("e ", " e")[split == "test"]}.get(name, name)
        make_folder(tmp_path / "d" / split, {spelled: 4}, seed=100 * number)
        rows += [(f"{split}/{spelled.strip().replace(NFD, NFC)}/{copy:03d}.png", spelled) for copy in range(4)]
    folder = load_data(str(tmp_path / "d"))
    assert folder.label_names == ["01", "10", NFC, "e"]
    listed = load_data(str(write_csv(tmp_path / "d" / "l.csv", ("file_name", "label"), rows)))
    assert listed.fingerprint == folder.fingerprint
    assert contents(listed, "test") == contents(folder, "test")


@pytest.mark.parametrize("column", ["label", "file_name", "split", " label"])
def test_a_column_that_is_there_twice_is_refused_if_it_counts(flat, column):
    place, rows = flat
    header = ("file_name", "label", "split", "note", "note", column)
    rows = [(*row, "train", "x", "y", row[0] if column == "file_name" else "train") for row in rows]
    write_csv(place / "l.csv", header, rows)
    fields = ", ".join(f'"{name}": "{value}"' for name, value in zip(header, rows[0], strict=True))
    (place / "l.jsonl").write_text(f"{{{fields}}}\n")
    for name in ("l.csv", "l.jsonl"):
        with pytest.raises(UserError, match=rf"^row 1 of {name} has the key '{column.strip()}' twice"):
            load_data(str(place / name))
    plain = [row[:-1] for row in rows]
    assert load_data(str(write_csv(place / "l.csv", header[:-1], plain))).label_names == NAMES
    columns = [pyarrow.array(values) for values in zip(*rows, strict=True)]
    names = ["image", "label", "split", "x", "y", column.strip().replace("file_name", "image")]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), place / "l.parquet")
    with pytest.raises(UserError, match=rf"^train/l\.parquet of 'l\.parquet' has the column '{names[-1]}' twice"):
        load_data(str(place / "l.parquet"))


def test_other_columns_and_line_ends_do_not_count(flat, folder):
    """Megabytes in a cell or line, mixed types, line breaks in quotes, CRLF and a byte order mark."""
    place, rows = flat
    notes = ['"two\nlines, ""quoted"""', "x" * 3_000_000, *[""] * 38]
    lines = [f"{file}, {label},{note}" for (file, label), note in zip(rows, notes, strict=True)]
    (place / "l.csv").write_bytes("\r\n".join(["\ufefffile_name,label,note", *lines, ""]).encode())
    mixed = [1, "a", None, {"b": [1]}, [2, "c"], "x" * 3_000_000, True, *[0.5] * 33]
    noted = [(*row, note) for row, note in zip(rows, mixed, strict=True)]
    write_jsonl(place / "l.jsonl", ("file_name", "label", "note"), noted)
    for name in ("l.csv", "l.jsonl"):
        assert everything(load_data(str(place / name))) == everything(load_data(str(folder)))


def test_lists_as_windows_and_excel_write_them(flat, folder):
    """A line that names the separator, rows of empty cells at the end, backslashes in paths, commas in a name."""
    place, rows = flat
    write_csv(place / "l.csv", ("file_name", "label", '"notes: a, b, c"'), [(*row, 1) for row in rows], ";")
    assert everything(load_data(str(place / "l.csv"))) == everything(load_data(str(folder)))
    lines = [f"..\\{place.name}\\{file};{label};" for file, label in rows]
    (place / "l.csv").write_bytes("\r\n".join(["sep=;", "file_name;label;", *lines, ";;", ";;", ""]).encode())
    assert everything(load_data(str(place / "l.csv"))) == everything(load_data(str(folder)))


# ---- splits: in proportion, others by content; refused where a class is too small


def digest(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def cut(images: list[str], labels: list[int], missing=("validation", "test"), seed: int = 0):
    """{name of an image: its split}, and the notes."""
    names = [f"class {number}" for number in range(max(labels) + 1)]
    parts, notes = cut_rows([digest(image) for image in images], labels, names, missing, seed=seed)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(len(images)))
    return {images[row]: part for part, rows in parts.items() for row in rows}, notes


@pytest.mark.parametrize("counts", [[3, 3], [3, 500], [4, 7, 9, 3, 3], [3] * 400, [900, 3, 3, 3]])
@pytest.mark.parametrize("missing", [("validation", "test"), ("test",), ("validation",)])
def test_no_class_loses_its_training_images_and_no_split_is_empty(counts, missing):
    labels = np.repeat(np.arange(len(counts)), counts).tolist()
    images = [f"{label}-{place}" for place, label in enumerate(labels)]
    parts, notes = cut(images, labels, missing)
    trained = {labels[place] for place, image in enumerate(images) if parts[image] == "train"}
    assert trained == set(range(len(counts)))
    assert set(parts.values()) == {"train", *missing}
    plain = {image: assign_split(digest(image), missing, seed=0) for image in images}
    assert bool(notes) == (parts != plain), "what is not by content alone is told"
    filled = [note for note in notes if "without images" in note]
    counts = [f"left {part} without images; images moved there: {[*parts.values()].count(part)}" for part in missing]
    assert all(any(note.endswith(text) for text in counts) for note in filled)


def test_an_image_is_never_moved_by_others():
    """Sets that grow, are renamed and shuffled: what was trained on is never in another split later."""
    random = np.random.RandomState(0)
    labels = {f"image {number}": number % 3 for number in range(300)}
    some = sorted(labels)
    for _ in range(20):
        random.shuffle(some)
        few, notes = cut(some[:150], [labels[image] for image in some[:150]])
        many, later = cut(some, [labels[image] for image in some])
        assert notes == later == []
        assert all(many[image] == part for image, part in few.items())


def test_tiny_sets_that_grow_never_test_on_what_they_trained_on():
    """Splits that would be empty get the images that are last to be given back."""
    random = np.random.RandomState(0)
    moved = 0
    for trial in range(200):
        images = [f"{trial}-{number}" for number in range(30)]
        labels = {image: number % 3 for number, image in enumerate(images)}
        before, notes = cut(images[:15], [labels[image] for image in images[:15]])
        after, _ = cut(images, [labels[image] for image in images])
        moved += bool(notes)
        if not any("no training image" in note for note in notes):
            assert all(after[image] == "train" for image, part in before.items() if part == "train"), trial
        random.shuffle(images)
    assert moved > 50


def test_a_class_with_one_image_is_refused_with_the_remedy():
    pets, few = [digest(number) for number in range(21)], [0] * 20 + [1]
    for digests, labels, missing, said in (
        (pets, few, ["validation", "test"], "class 'owl' has 1 image; to cut validation and test .* at least 3: add"),
        (pets[:3], [0, 0, 1], ["validation", "test"], r"class 'cat' has 2 different images \(2 classes are that small"),
        ([*pets[:20], *pets[:1] * 5], [0] * 20 + [1] * 5, ["test"], "class 'owl' has 1 image"),
    ):
        with pytest.raises(UserError, match=said):
            cut_rows(digests, labels, ["cat", "owl"], missing, seed=0)
    parts, _ = cut_rows(pets[:4], [0, 0, 1, 1], ["cat", "owl"], ["test"], seed=0)
    assert len(parts["train"]) + len(parts["test"]) == 4
    parts, _ = cut_rows(pets[:10], [0] * 5 + [2] * 5, ["cat", "dog", "owl"], ["test"], seed=0)
    assert parts["test"].size, "a class that only a bigger data set has needs no images"


def test_images_of_several_classes_fill_a_split_too():
    """As in small multi-label sets, and where the same image lies in the folders of two classes."""
    for trial in range(20):
        digests = [digest(f"{trial} {number}") for number in range(6)]
        parts, notes = cut_rows(digests, [[0, 1], [0, 1], [1, 2], [1, 2], [2, 0], [2, 0]], "abc", ["test"], seed=0)
        assert parts["test"].size
        assert {note.endswith("images moved there: 1") for note in notes} <= {True}
    missing = ["validation", "test"]
    parts_of = {digest(number): assign_split(digest(number), missing, seed=0) for number in range(99)}
    held_out, kept = ([each for each in parts_of if parts_of[each] == part] for part in ("validation", "train"))
    with pytest.raises(UserError, match="too few images to cut test"):
        cut_rows([*held_out[:2], kept[0]], [0] * 3, "a", missing, seed=0)


def test_the_rule_is_frozen():
    """By other means: splits of published models must be the same in ten years."""
    for number, seed in itertools.product(range(200), (0, 1)):
        place = int(digest(f"{seed} {digest(number)}")[:12], 16) / 16**12
        part = "validation" if place < 0.1 else "test" if place < 0.2 else "train"
        for missing in (("validation", "test"), ("test",)):  # one that is given leaves the other where it was
            assert assign_split(digest(number), missing, seed=seed) == (part if part in missing else "train")


# ---- IDX files


def write_mnist(folder, *, names="{split}-{kind}-idx{rank}-ubyte", splits=("train", "t10k"), first=0, count=40):
    """Write splits of noise with the classes `first` and `first` + 1 in turn, and return split -> its pixels."""
    pixels = {}
    for number, split in enumerate(splits):
        images = np.random.RandomState(number).randint(0, 256, (count, 6, 4)).astype(np.uint8)
        labels = (np.arange(count) % 2 + first).astype(np.uint8)
        write_idx(folder / names.format(split=split, kind="images", rank=3), images)
        write_idx(folder / names.format(split=split, kind="labels", rank=1), labels)
        pixels[split] = images
    return pixels


def pixels_of(data, split):
    rows = data.splits[split]
    return {(np.asarray(row["image"].convert("L")).tobytes(), data.label_names[row["label"]]) for row in rows}


@EITHER
@pytest.mark.parametrize(
    "names",
    [
        "{split}-{kind}-idx{rank}-ubyte",
        "{split}-{kind}-idx{rank}-ubyte.gz",
        "{split}-{kind}.idx{rank}-ubyte",
        "{split}_{kind}_idx{rank}_ubyte.gz",
        "raw/{split}-{kind}-idx{rank}-ubyte.gz",
        "{split}-{kind}-idx{rank}-ubyte/{split}-{kind}-idx{rank}-ubyte",
        "QMNIST-{split}-{kind}-IDX{rank}-UBYTE",
    ],
)
def test_idx_files_are_the_images_and_labels_in_them(tmp_path, names, streaming):
    pixels = write_mnist(tmp_path / "data", names=names)
    data = load_data(tmp_path / "data", streaming=streaming)
    assert data.label_names == ["0", "1"]
    assert pixels_of(data, "test") == {(image.tobytes(), str(row % 2)) for row, image in enumerate(pixels["t10k"])}
    train = pixels_of(data, "train") | pixels_of(data, "validation")
    assert train == {(image.tobytes(), str(row % 2)) for row, image in enumerate(pixels["train"])}
    if not streaming:  # the hash of an image is that of its PGM file
        digests = {hashlib.sha256(b"P5\n4 6\n255\n" + image.tobytes()).hexdigest() for image in pixels["t10k"]}
        assert {scan.digest for scan in data.seen["test"]} == digests


def test_emnist_is_turned_upright_and_named_by_its_table(tmp_path):
    names = "emnist-letters-{split}-{kind}-idx{rank}-ubyte.gz"
    pixels = write_mnist(tmp_path, names=names, splits=("train", "test"), first=1)
    (tmp_path / "emnist-letters-mapping.txt").write_text("1 65 97\n2 66 98\n")
    expected = {(image.T.tobytes(), "AB"[row % 2]) for row, image in enumerate(pixels["test"])}
    file = tmp_path / names.format(split="test", kind="images", rank=3)
    for source in (tmp_path, tmp_path / "emnist-letters-*", tmp_path / "*-test-*", file):
        data = load_data(source)
        assert pixels_of(data, "test") == expected
        assert data.label_names == ["A", "B"]
    assert list(data.splits) == ["test"]  # of one file
    write_mnist(tmp_path, names=names.replace("letters", "digits"))
    with pytest.raises(UserError, match=r"2 data sets in IDX format .*emnist-digits-\*"):
        load_data(tmp_path)


def test_compressed_copies_are_ignored_and_columns_of_qmnist_are_read(tmp_path):
    pixels = write_mnist(tmp_path)
    write_mnist(tmp_path, names="{split}-{kind}-idx{rank}-ubyte.gz")
    labels = np.stack([np.arange(40) % 2, *[np.full(40, 9)] * 7], axis=1).astype(np.int32)
    for split in ("train", "t10k"):
        for path in tmp_path.glob(f"{split}-labels*"):
            path.unlink()
        write_idx(tmp_path / f"{split}-labels-idx2-int", labels)
    data = load_data(tmp_path)
    assert pixels_of(data, "test") == {(image.tobytes(), str(row % 2)) for row, image in enumerate(pixels["t10k"])}
    assert "t10k-images-idx3-ubyte.gz was ignored, as t10k-images-idx3-ubyte holds the same split" in data.notes


def test_archives_that_unpack_into_folders_are_read_by_any_path(tmp_path):
    """Kaggle's MNIST has every file as itself and in a folder of that name, with the names differing in a character."""
    pixels = write_mnist(tmp_path, names="{split}-{kind}.idx{rank}-ubyte")
    name = "{split}-{kind}-idx{rank}-ubyte"
    write_mnist(tmp_path, names=f"{name}/{name}")
    expected = {(image.tobytes(), str(row % 2)) for row, image in enumerate(pixels["t10k"])}
    images = "t10k-images-idx3-ubyte"
    for source in ("*", "t10k-images.idx3-ubyte", "t10k-*-ubyte", f"{images}/{images}", "t10k-images-*"):
        assert pixels_of(load_data(tmp_path / source), "test") == expected, source


@pytest.mark.parametrize(
    "names",
    [
        "MNIST/raw/{split}-{kind}-idx{rank}-ubyte Fashion/raw/{split}-{kind}-idx{rank}-ubyte",
        "EMNIST_Digits_{split}_{kind}_idx{rank}_ubyte EMNIST_Letters_{split}_{kind}_idx{rank}_ubyte",
        "{split}-{kind}-idx{rank}-ubyte gzip/{split}-{kind}-idx{rank}-ubyte.gz",
        "{split}-{kind}-idx{rank}-ubyte qmnist-{split}-{kind}-idx{rank}-ubyte",
    ],
)
def test_one_of_several_idx_sets_is_offered_under_a_name_that_works(tmp_path, names):
    for name in names.split():
        write_mnist(tmp_path, names=name)
    (tmp_path / "EMNIST_Digits_mapping.txt").write_text("0 48\n1 79 111\n")
    with pytest.raises(UserError, match="2 data sets in IDX format") as error:
        load_data(tmp_path)
    listed, offered = re.search(r"\((.*)\); give one of them, such as '(.*)'", str(error.value)).groups()
    assert len(set(listed.split(", "))) == 2
    assert load_data(offered).label_names == (["0", "O"] if "EMNIST" in names else ["0", "1"])


def cut_gzip(folder):
    packed = write_idx(folder / f"{IMAGES}.gz", PIXELS)
    packed.write_bytes(packed.read_bytes()[:-200])
    (folder / IMAGES).unlink()


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
PIXELS = np.random.RandomState(0).randint(0, 256, (40, 6, 4)).astype(np.uint8)
DAMAGED = {
    "magic": (lambda d: (d / IMAGES).write_bytes(b"<!DOCTYPE html>"),
              rf"{IMAGES} is not an IDX file \(it begins with b'<!DO'\)"),
    "cut": (lambda d: write_idx(d / IMAGES, PIXELS, cut=5), f"{IMAGES} announces 40x6x4 values, .* holds less"),
    "longer": (lambda d: write_idx(d / IMAGES, PIXELS, cut=-5), f"{IMAGES} announces 40x6x4 values, .* holds more"),
    "huge": (lambda d: (d / IMAGES).write_bytes(struct.pack(">I3I", 2051, 2**32 - 1, 2**16, 2**16)),
             f"{IMAGES} announces 4294967295x65536x65536 values, but the file holds less"),
    "cut gzip": (cut_gzip, rf"{IMAGES}.gz cannot be read \(Compressed file ended"),
    "counts": (lambda d: write_idx(d / LABELS, np.zeros(39, np.uint8)),
               f"{IMAGES} holds 40 images but {LABELS} 39 labels"),
    "columns": (lambda d: write_idx(d / LABELS, np.zeros((40, 3), np.int32)),
                f"{LABELS} holds 40x3 values; labels need one whole number per image"),
    "numbers": (lambda d: write_idx(d / IMAGES, PIXELS.astype(np.int32)), "holds 40x6x4 values of type int32"),
    "header": (lambda d: (d / IMAGES).write_bytes(b"\0\0\x08\x03\0\0"), f"{IMAGES}.* holds less"),
    "no labels": (lambda d: (d / LABELS).unlink(), f"{IMAGES} has no file of labels"),
    "no images": (lambda d: (d / IMAGES).unlink(), f"labels {LABELS} without images"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_idx_files_are_named(tmp_path, how):
    write_mnist(tmp_path)
    damage, match = DAMAGED[how]
    damage(tmp_path)
    with pytest.raises(UserError, match=match) as error:
        load_data(tmp_path)
    assert "\n" not in str(error.value)
