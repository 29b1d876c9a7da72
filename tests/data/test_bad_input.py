"""Bad input is one clear line before any training: what was given, what is needed, the remedy."""

import base64
import gc
import hashlib
import json
import shutil
import tracemalloc
import warnings
from functools import partial

import numpy as np
import pyarrow.parquet
import pytest
from data.conftest import encoded, everything, make_folder, make_table, make_tar, picture, tags
from datasets import ClassLabel, Dataset, List
from PIL import Image

from hf_vit.data import check_images, load_data, load_images
from hf_vit.errors import UserError

NAMES = ["cat", "dog", "owl"]
EITHER = pytest.mark.parametrize("streaming", [False, True])


def refuses(source, match, **options):
    def load_and_read():
        for split in load_data(str(source), **options).splits.values():
            list(split)

    with pytest.raises(UserError, match=match) as caught:
        load_and_read()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        *((path, "does not exist; give a folder") for path in ("./nowhere", "/no/where", "~/no/such/place", "a/b/c",
                                                               "gone.parquet", "d/x.TAR")),
        ("somebody/missing-data", "'somebody/missing-data' does not exist as a path, and cannot be loaded"),
        ("", "the data source is an empty text"),
    ],
)  # fmt: skip
@EITHER
def test_what_is_not_there_is_called_a_path_or_a_repository(source, match, streaming):
    refuses(source, match, streaming=streaming)


def test_an_unreachable_hub_is_said_at_once_and_cached_data_need_none(folder, monkeypatch, tmp_path):
    import datasets

    def load_dataset(name, *_, **__):
        assert name == "Some/MyPets", "datasets retries for 24 s"
        return {"train": table}

    table = make_table(folder, names=NAMES)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    said = "cannot be loaded as a Hub data set: offline mode is on, so the Hub cannot be reached.*; check"
    refuses("somebody/pets", said)
    refuses("Some/MyPets", said)
    (tmp_path / "Some___my_pets").mkdir()
    assert load_data("Some/MyPets").num_examples("train") == 33


def test_an_existing_folder_is_never_taken_for_a_hub_id(tmp_path, monkeypatch):
    make_folder(tmp_path / "user" / "name", {"a": 5, "b": 5})
    monkeypatch.chdir(tmp_path)
    assert load_data("user/name").name == "name"


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 9\n"


def write(root, *names):
    """Files that are nothing of what their names say; images and empty folders by their names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".png"):
            picture(len(name)).save(root / name)
        elif name.endswith("/"):
            (root / name).mkdir()
        else:
            (root / name).write_bytes(b"nothing of its name" * 100)
    return root


def folders(root, *names, **counts):
    for number, name in enumerate(names or [""]):
        make_folder(root / name, counts or {"a": 4, "b": 4}, seed=70 * number)
    return root


# What is in a folder -> what is said of it; with a star as a table and as a stream alike.
FOLDERS = {
    "no files": (lambda root: root, "holds no files; give one folder of images per class"),
    "no images": (lambda root: write(root, "a/1.txt", "a/2.txt", "n.CSV"), r"no images \(only 2 .txt, 1 .csv\)"),
    "no class folders": (lambda root: write(root, "x.png"), "images such as 'x.png' but no class folders; put the"),
    "split without classes": (lambda root: write(folders(root, "train"), "test/x.png"),
                              "test' holds images such as 'x.png' but no class folders"),
    "splits without classes": (lambda root: write(root, "train/x.png", "val/x.png"),
                               "train' holds images such as 'x.png' but no class folders"),
    "split beside another": (lambda root: folders(root, "train", "spare"), "'train' beside 'spare', which is not"),
    "an empty class": (lambda root: write(folders(root), "newt/"), "'.*newt' holds no images; add some, or move"),
    "yolo": (lambda root: write(root, "images/1.png", "labels/1.txt"), "labels' holds no images; .* of YOLO or Pascal"),
    "two lists": (lambda root: write(root, "train/labels.csv", "val/metadata.csv", "val/labels.csv", "1.png"),
                  "holds labels.csv and metadata.csv in one folder; give one of them by its path"),
    "one image *": (lambda root: folders(folders(root), newt=1), "class 'newt' has 1 image; to cut validation"),
    "one class *": (lambda root: folders(root, cat=9), r"have the class cat, but a classifier needs at least two"),
    "a class of test": (lambda root: make_folder(folders(root, "train") / "test", {"a": 4, "c": 4}).parent,
                        "class 'c' of .* is in test, but not in train"),
    "pointer *": (lambda root: (root / "x.parquet").write_text(POINTER) and root / "x.parquet",
                  "the file train/x.parquet of 'x.parquet' is a Git LFS pointer instead of the file; .* git lfs pull"),
    "parquet *": (lambda root: write(root, "x.parquet") / "x.parquet", "'x.parquet' cannot be read as parquet"),
    "tar *": (lambda root: write(root, "x.tar") / "x.tar", "'x.tar' cannot be read as webdataset"),
    "saved to disk": (lambda root: make_table(folders(root / "a")).save_to_disk(root / "x") or root / "x",
                      r"was written by save_to_disk, .* write parquet files with dataset.to_parquet"),
    "other files": (lambda root: write(root, "x.zip") / "x.zip", "is not a data set file; give .parquet files"),
    "no match": (lambda root: root / "*.jpg", "no file matches"),
    "captions": (lambda root: (folders(root) / "metadata.csv").write_text("file_name,text\na.png,a cat\n") and root,
                 "move metadata.csv away if the folder names are the classes"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_and_files_that_are_no_data(name, tmp_path):
    make, match = FOLDERS[name]
    source = make(tmp_path)
    for streaming in (False, True)[: 1 + name.endswith("*")]:
        refuses(source, match, streaming=streaming)


def other_label(folder, path, label):
    """As a program other than datasets may write it: one label beyond the names in the schema."""
    table = make_table(folder, names=NAMES)
    labels = [label if row == 17 else value for row, value in enumerate(table["label"])]
    wrong = table.remove_columns("label").add_column("label", labels)
    wrong = wrong.cast_column("label", table.features["label"]) if label != 7 else wrong
    pyarrow.parquet.write_table(wrong.data.table.replace_schema_metadata(table.data.table.schema.metadata), path)


def save_labels(folder, path, label):
    make_table(folder, label=label).to_parquet(str(path))


def save_lines(folder, path, label):
    rows = [{"file_name": str(file), "label": label} for file in sorted(folder.glob("*/*.png"))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_multi_hot(folder, path):
    table = make_table(folder, label=lambda name: [int(name == each) for each in NAMES])
    table.cast_column("label", List(ClassLabel(names=NAMES))).to_parquet(str(path))


def save_newer(folder, path):
    """As a later version of datasets may write it."""
    features = {"image": {"_type": "Image"}, "label": {"dtype": "string", "_type": "Value"}, "x": {"_type": "Smell"}}
    table = make_table(folder).add_column("x", [0] * 40).data.table
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def save_without(folder, path, column, **more):
    table = make_table(folder).remove_columns(column)
    for name, values in more.items():
        table = table.add_column(name, (values * len(table))[: len(table)])
    table.to_parquet(str(path))


OUTSIDE = r"the label (7|-1), which is not among the 3 classes|has no label; label it, or remove it"
TABLES = {
    **{f"{label} *": (partial(other_label, label=label), OUTSIDE) for label in (7, -1, None)},
    "floats *": (partial(save_labels, label=lambda name: 0.5 + len(name)), "have the type float; write whole numbers"),
    "below 0 *": (partial(save_labels, label=lambda name: NAMES.index(name) - 1), "label -1, .* number the classes"),
    "dict lines": (partial(save_lines, label={"x": 1}), "have the type dict; write whole numbers or names"),
    "decimal lines": (partial(save_lines, label="1.0"), r"have the type float; .* names \(write 1 for 1\.0, or"),
    "NaN lines": (partial(save_lines, label=float("nan")), "has images without a label; add the labels"),
    "multi-hot": (save_multi_hot, "are lists of 3 zeros and ones, .* write "),
    "newer *": (save_newer, "'x.parquet' cannot be read as parquet: Feature type 'Smell' not found"),
    "multi-hot lines": (partial(save_lines, label=[0, 1, 1]), "are lists of 3 zeros and ones, .* write "),
    "list lines": (partial(save_lines, label=[["a"]]), "have the type list; write whole numbers or names"),
    "no label": (partial(save_without, column="label"), "has the columns image, but .* 'label'"),
    "no image": (partial(save_without, column="image"), "has the columns label, but .*--image-column"),
    "numbers *": (partial(save_without, column="image", image=[7]), "'image' .* holds int64 instead of .*--image-col"),
    "some splits *": (partial(save_without, column=[], split=["test", "spare"]), "has the split 'spare'; write train"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_no_data(name, folder, tmp_path):
    path = tmp_path / ("x.jsonl" if name.endswith("lines") else "x.parquet")
    TABLES[name][0](folder, path)
    for streaming in (False, True)[: 1 + name.endswith("*")]:
        refuses(path, TABLES[name][1], streaming=streaming)


@EITHER
@pytest.mark.parametrize("texts", [["01", "1", "2"], [["01"], ["1"], ["1", "2"]]], ids=["one label", "lists"])
def test_labels_that_are_text_in_one_parquet_file_alone_are_refused(tmp_path, texts, streaming):
    """`datasets` would cast all to the type of the first file: 01 became 1."""
    numbers = [[1], [2], [1, 2]] if isinstance(texts[0], list) else [1, 2, 2]
    for split, labels in (("train", texts), ("test", numbers)):
        rows = {"image": [{"bytes": encoded(picture(0)), "path": None}] * 6, "label": labels * 2}
        (tmp_path / split).mkdir()
        pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / split / "0.parquet")
    said = r"the label column 'label' of '.*' is text in train/0\.parquet, but int64 in test/0"
    refuses(tmp_path, said, streaming=streaming)


@EITHER
def test_files_whose_classes_differ(folder, tmp_path, streaming):
    """`datasets` would read all of them by the first's names."""
    for name, names in (("train", NAMES), ("test", NAMES[::-1])):
        make_table(folder, names=names).to_parquet(str(tmp_path / "d" / f"{name}.parquet"))
    said = r"'label' .* mean .*owl, dog, cat.* in test/test\.parquet, but .*cat, dog, owl.* in train/train\.parquet"
    refuses(tmp_path / "d", said, streaming=streaming)
    make_table(folder).to_parquet(str(tmp_path / "d" / "train.parquet"))
    make_table(folder, label=lambda name: "yak").to_parquet(str(tmp_path / "d" / "test.parquet"))
    said = r"image( 0)? of split test has the label 'yak', which is not among the 3 classes \(cat, dog"
    refuses(tmp_path / "d", said, streaming=streaming)
    make_table(folder).add_column("note", [0] * 40).to_parquet(str(tmp_path / "d" / "train.parquet"))
    refuses(tmp_path / "d", "'d' cannot be read as parquet: .*; give all files the same columns", streaming=streaming)


@pytest.mark.parametrize("place", ["file", "class", "list"])
def test_names_that_are_not_utf_8_are_refused_before_any_work(folder, place):
    """As archives of other systems leave them; tables and reports could not hold them."""
    name = b"caf\xe9".decode(errors="surrogateescape")
    source, old = folder, folder / "cat" if place == "class" else folder / "cat/000.png"
    if place == "list":
        source = folder / "l.jsonl"
        source.write_text(json.dumps({"file_name": f"{name}.png", "label": "cat"}) + "\n")
    else:
        old.rename(old.with_name(name + old.suffix))
    refuses(source, r"^the file name .*caf\\udce9.* is not valid UTF-8; rename")


@EITHER
def test_class_names_with_half_a_character_are_refused(folder, streaming):
    """As programs leave them that cut text of 16-bit characters; JSON can hold it, no result can."""
    source, name = folder / "l.jsonl", "\ud83d smile"
    rows = [{"file_name": f"{label}/000.png", "label": label} for label in ("cat", "dog")]
    source.write_text("".join(json.dumps(row | {"label": row["label"] + name}) + "\n" for row in rows))
    refuses(source, r"class name '.*\\ud83d smile' has half of a character", streaming=streaming)


# ---- bad images


@EITHER
@pytest.mark.parametrize("kind", ["bytes", "struct"])
def test_rows_without_an_image_are_named_or_left_out(kind, folder, tmp_path, streaming):
    stored = [file.read_bytes() for file in sorted(folder.glob("*/*.png"))]
    rows = [None if row == 7 else {"bytes": each, "path": None} if kind == "struct" else each
            for row, each in enumerate(stored)]  # fmt: skip
    table = pyarrow.table({"image": rows, "label": [row % 2 for row in range(40)]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    refuses(tmp_path / "x.parquet", "is missing, because its row in the table is empty", streaming=streaming)
    data = load_data(str(tmp_path / "x.parquet"), streaming=streaming, skip_bad_images=True)
    assert len(everything(data)) == 39
    assert len(data.skipped) == 1


SPOILT = ["cat/000.png", "dog/001.png", "dog/002.png"]


@EITHER
def test_bad_images_are_named_or_skipped_and_counted_once(folder, streaming):
    # Four ways to be bad: no image at all, cut short, empty, and a link that leads nowhere.
    for name, content in zip(SPOILT, (b"GIF, or so", (folder / SPOILT[1]).read_bytes()[:200], b""), strict=True):
        (folder / name).write_bytes(content)
    (folder / "owl/gone.png").symlink_to("nowhere")
    bad = [*SPOILT, "owl/gone.png"]
    more = "" if streaming else r".* \(3 more bad images\); replace or remove such images"
    refuses(folder, rf"image '.*({'|'.join(bad)})' is {more}", streaming=streaming)
    data = load_data(str(folder), skip_bad_images=True, streaming=streaming)
    for _ in range(3):
        assert len(everything(data)) == 37
    assert sorted(data.skipped) == bad
    for file in folder.glob("*/*.png"):
        file.write_bytes(b"broken")
    if not streaming:
        refuses(folder, "split train has no usable image: image '.*' is not an image", skip_bad_images=True)


@EITHER
def test_images_smaller_than_a_patch(folder, streaming):
    picture(500, size=(9, 30)).save(folder / "owl" / "narrow.png")
    data = load_data(str(folder), streaming=streaming)
    assert len(everything(check_images(data, (10, 9)))) == 41
    with pytest.raises(UserError, match=r"'.*owl/narrow.png' is 30x9 px, smaller than one patch of 10x10 px"):
        everything(check_images(data, 10))
    kept = check_images(data, 10, skip_bad_images=True)
    assert len(everything(kept)) == 40
    assert kept.skipped == ["owl/narrow.png"]
    assert kept.fingerprint == data.fingerprint, "it is of the data, whatever a model can learn from"
    assert streaming or check_images(data, 9) is data, "nothing is copied when nothing changes"


def test_size_is_counted_upright_and_positive(folder):
    refuses("digits", "both sides must be at least 1 px", image_size=(0, 8))
    picture(500, size=(40, 11)).save(folder / "owl" / "turned.png", exif=tags())
    seen = [seen for split in load_data(str(folder)).seen.values() for seen in split]
    assert [(each.height, each.width) for each in seen if each.name.endswith("turned.png")] == [(40, 11)]
    Image.new("LAB", (12, 12)).save(folder / "owl" / "lab.tif")
    refuses(folder, r"image '.*lab.tif': an image of mode LAB cannot be converted")


def test_files_that_stand_for_images_and_images_too_large_are_called_so(folder, monkeypatch):
    (folder / "owl" / "000.png").write_text(POINTER)
    refuses(folder, r"image '.*owl/000.png' is a Git LFS pointer .* git lfs pull")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    refuses(folder, r"image '.*' is larger than the limit for decoding \(.*120 pixels.*\); cut it into smaller images")


def test_images_without_classes_are_checked_in_every_split(tmp_path):
    folders(tmp_path, "train", "val")
    next((tmp_path / "val" / "b").iterdir()).write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"image '.*b/.*png' "):
        load_images(str(tmp_path))


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_a_stream_tells_the_file_and_row_of_every_bad_image(kind, folder, tmp_path, caplog, monkeypatch):
    """Two files of 40 nameless images, of which three are bad, two of them alike."""
    images = [[file.read_bytes(), file.parent.name] for file in sorted(folder.glob("*/*.png"))]
    for row, content in ((3, b"GIF, or so"), (25, b""), (38, b"")):
        images[row][0] = content
    root = tmp_path / "files"
    root.mkdir()
    for number, part in enumerate((images[:20], images[20:])):
        if kind == "tar":
            samples = [{"png": content, "cls": b"%d" % NAMES.index(label)} for content, label in part]
            make_tar(root / f"{number}.tar", samples)
        else:
            columns = dict(zip(("image", "label"), map(list, zip(*part, strict=True)), strict=True))
            Dataset.from_dict(columns).to_parquet(root / f"{number}.parquet")
    row = "000{:02}.png" if kind == "tar" else "row {}"
    places = [f"train/{file}.{kind}, {row.format(number)}" for file, number in ((0, 3), (1, 5), (1, 18))]
    refuses(root, rf"image '({'|'.join(places)})' is ", streaming=True)
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # datasets leaves the archive of a stream that is not read to its end open until then
    data = load_data(str(root), streaming=True, skip_bad_images=True)
    for _ in range(2):
        assert sum(len(list(stream)) for stream in data.splits.values()) == 37
    assert sorted(data.skipped) == sorted(places)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(told) == [f"skipped the unreadable image {place}" for place in sorted(places)]
    # Of files too large to be searched the content is told.
    monkeypatch.setattr("hf_vit.data.reading._SEARCHED_BYTES", 0)
    data = load_data(str(shutil.copytree(root, tmp_path / "again")), streaming=True, skip_bad_images=True)
    everything(data)
    digest = hashlib.sha256(b"GIF, or so").hexdigest()[:12]
    assert kind == "tar" or any(name.endswith(f"with SHA-256 {digest}") for name in data.skipped)
    assert len(data.skipped) >= 2


def test_big_sets_show_their_progress(folder, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    load_data(str(folder))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("hf_vit.data.images.PROGRESS_FROM", 40)
    load_data(str(folder))
    shown = capsys.readouterr().err
    assert "Checking train images" in shown
    assert "40/40" in shown


def test_photographs_in_a_table_are_not_read_all_at_once(tmp_path):
    rows = [encoded(picture(number, (512, 400)), "BMP") for number in range(80)]
    table = pyarrow.table({"image": rows, "label": [number % 2 for number in range(80)]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    load_data(str(tmp_path / "x.parquet"))  # into the cache of `datasets`
    tracemalloc.start()
    load_data(str(tmp_path / "x.parquet"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < sum(map(len, rows)) / 3


@EITHER
def test_what_stands_in_for_an_image_or_its_class(tmp_path, streaming):
    text = base64.b64encode(encoded(picture(0))).decode()
    said = "^the text '.{,30}' .* is not an image file name; if it is an image in base64, store the bytes"
    for number, stored in enumerate((text, "x" * 300)):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"image": [stored] * 2, "label": [0, 1]}), path)
        refuses(path, said, streaming=streaming)
    (tmp_path / "list.csv").write_text(f"image,label\n{text},a\n")
    refuses(tmp_path / "list.csv", said)
    for text in ("cat", "01"):
        make_tar(tmp_path / "names.tar", [{"png": encoded(picture(0)), "cls": name} for name in (b"1", text.encode())])
        refuses(tmp_path / "names.tar", f"a .cls file holds '{text}'.*--label-column txt", streaming=streaming)


def test_files_may_be_named_as_base64_begins(tmp_path):
    folder = make_folder(tmp_path / "data", {"9j": 3, "iVBORw0KG": 3})
    for number, path in enumerate(sorted(folder.glob("*/*.png"))):
        path.rename(path.with_name(f"4R0lGOD{number}.png"))
    (folder / "9j" / "4").write_text("no image")
    assert sum(map(len, load_data(str(folder)).splits.values())) == 6
    rows = "".join(f"{path.relative_to(folder)},{path.parent.name}\n" for path in folder.glob("*/*.png"))
    (folder / "list.csv").write_text(f"image,label\n{rows}")
    assert sum(map(len, load_data(str(folder / "list.csv")).splits.values())) == 6


def test_a_quick_check_sees_what_a_full_one_sees_but_damaged_pixels(tmp_path):
    """Sizes, orientations and 16 bits of good files; truncated, empty and foreign ones are named."""
    folder = make_folder(tmp_path / "data", {"a": 12, "b": 12})
    picture(1, (30, 20)).save(folder / "a" / "turned.jpg", exif=tags())
    picture(2, (30, 20)).save(folder / "a" / "turned.png", exif=tags())
    Image.fromarray(np.full((9, 7), 300, np.uint16)).save(folder / "b" / "deep.png")
    picture(3, (5, 4)).save(folder / "b" / "c.bmp")
    full, quick = (load_data(folder, check=check) for check in (True, False))
    assert quick.seen == full.seen
    assert (quick.fingerprint, quick.notes) == (full.fingerprint, full.notes)
    jpeg, png = (encoded(picture(9, (90, 90)), kind) for kind in ("JPEG", "PNG"))
    for name, damaged in (("a.jpg", jpeg[:-500]), ("b.png", png[:-500]), ("c.png", b""), ("d.gif", b"x")):
        (folder / "a" / name).write_bytes(damaged)
        with pytest.raises(UserError, match=f"image '.*{name}'"):
            load_data(folder, check=False)
        assert load_data(folder, check=False, skip_bad_images=True).skipped == [f"a/{name}"]
        (folder / "a" / name).unlink()
    middle = bytearray(encoded(picture(9, (40, 40))))
    middle[300:340] = bytes(40)
    (folder / "a" / "m.png").write_bytes(middle)
    refuses(folder, "image '.*m.png'")
    assert sum(map(len, load_data(folder, check=False).seen.values())) == 29


def test_photographs_are_checked_at_an_eighth_of_their_size_with_the_same_result(tmp_path):
    """Sizes of large JPEGs that are turned, in CMYK or progressive are as Pillow shows them; half a file is named."""
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 256, (1203, 901, 3), dtype=np.uint8))
    made = {"cat": (noise, {"exif": tags()}), "dog": (noise.convert("CMYK"), {}), "owl": (noise, {"progressive": True})}
    for label, (image, settings) in made.items():
        for split in ("train", "validation", "test"):
            (tmp_path / split / label).mkdir(parents=True)
            image.save(tmp_path / split / label / "a.jpg", quality=95, **settings)
    upright = (1203, 901, False)
    scans = load_data(tmp_path).seen["train"]
    assert [(scan.height, scan.width, scan.is_turned) for scan in scans] == [(901, 1203, True), upright, upright]
    for label in NAMES:
        file = tmp_path / "test" / label / "a.jpg"
        content = file.read_bytes()
        assert len(content) > 1 << 20
        file.write_bytes(content[: len(content) // 2])
        refuses(tmp_path, f"image '.*test/{label}/a.jpg': is damaged|image '.*test/{label}/a.jpg' is damaged")
        file.write_bytes(content)
