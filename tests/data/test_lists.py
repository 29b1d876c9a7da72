"""Lists of images and their labels: CSV files and lines of JSON, by any names of columns."""

import json
import shutil

import pytest

from hf_vit.data import load_data
from hf_vit.errors import UserError


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


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_a_list_beside_its_images_is_the_folder_of_class_folders(name, streaming, flat, folder, look):
    place, rows = flat
    WRITERS[name](place / name, ("file_name", "note", "label"), [(file, "x", label) for file, label in rows])
    classes, listed = load_data(str(folder)), load_data(str(place), streaming=streaming)
    assert listed.label_names == ["cat", "dog", "owl"]
    for split in classes.splits:
        assert look.contents(listed, split) == look.contents(classes, split)
    assert streaming or listed.fingerprint == classes.fingerprint
    again = load_data(str(place / name))
    assert again.fingerprint == classes.fingerprint, "the list itself"


# datasets leaves the list open (5.2, folder_based_builder).
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_lists_are_what_datasets_reads(flat):
    """The convention is that of `datasets`: its own reader pairs the same files with the same labels."""
    from datasets import load_dataset

    place, rows = flat
    write_csv(place / "metadata.csv", ("file_name", "label"), rows)
    theirs = load_dataset("imagefolder", data_dir=str(place))["train"]
    expected = {(row["image"].tobytes(), row["label"]) for row in theirs}
    ours = load_data(str(place))
    read = {(row["image"].tobytes(), ours.label_names[row["label"]]) for table in ours.splits.values() for row in table}
    assert read == expected


def test_columns_of_any_name(flat, look, folder, tmp_path, make):
    place, rows = flat
    table = make.table(folder).rename_columns({"image": "photo", "label": "species"}).add_column("label", [0] * 40)
    table.to_parquet(str(tmp_path / "pets.parquet"))
    path = write_csv(place / "birds.csv", ("photo", "species", "label"), [(file, label, 0) for file, label in rows])
    for source, streaming in ((path, False), (tmp_path / "pets.parquet", False), (tmp_path / "pets.parquet", True)):
        data = load_data(str(source), image_column="photo", label_column="species", streaming=streaming)
        assert look.everything(data) == look.everything(load_data(str(folder)))
    with pytest.raises(UserError, match=r"has no column 'kind' \(--label-column\); it has photo, species, label"):
        load_data(str(path), image_column="photo", label_column="kind")
    with pytest.raises(UserError, match=r"columns photo, species, label; needed: one of image files.* --image-column"):
        load_data(str(path))
    with pytest.raises(UserError, match=r"has no column 'x' \(--image-column\)"):
        load_data(str(folder), image_column="x")


@pytest.mark.parametrize("how", ["column", "folders", "lists"])
def test_splits_of_a_list(how, flat):
    place, rows = flat
    parts = ["train"] * 30 + ["val"] * 5 + ["test"] * 5
    rows = [(*rows[number * 7 % 40], part) for number, part in enumerate(parts)]  # every class in train
    if how == "column":
        write_csv(place / "metadata.csv", ("file_name", "label", "split"), rows)
    else:
        for file, _, part in rows:
            (place / part).mkdir(exist_ok=True)
            (place / file).rename(place / part / file)
    if how == "folders":
        listed = [(f"{part}/{file}", label) for file, label, part in rows]
        write_csv(place / "metadata.csv", ("file_name", "label"), listed)
    if how == "lists":
        for part in ("train", "val", "test"):
            inside = [row[:2] for row in rows if row[2] == part]
            write_jsonl(place / part / "metadata.jsonl", ("file_name", "label"), inside)
    data = load_data(str(place))
    assert [data.num_examples(split) for split in ("train", "validation", "test")] == [30, 5, 5]
    assert data.notes == [] or "ignored" in data.notes[0]


def test_what_a_list_lacks_is_named(flat):
    place, rows = flat
    path = write_csv(place / "metadata.csv", ("file_name", "label"), [*rows, ("gone.png", "cat")])
    with pytest.raises(UserError, match=r"image '.*gone\.png' is not there; replace or remove it"):
        load_data(str(place))
    assert load_data(str(place), skip_bad_images=True).skipped == ["flat/gone.png"]
    write_csv(path, ("file_name", "label", "split"), [(*row, "holiday") for row in rows])
    with pytest.raises(UserError, match=r"metadata\.csv: split 'holiday' is none; needed: train, validation or test"):
        load_data(str(place))
    path.write_text('file_name,label\n"unclosed\n')
    with pytest.raises(UserError, match=r"^metadata\.csv of 'flat'"):
        load_data(str(place))
    path.write_text("")
    with pytest.raises(UserError, match=r"metadata\.csv of 'flat' cannot be read as a list"):
        load_data(str(place))


NFC, NFD = "cr\u00e8me", "cre\u0300me"


def named_images(make, root, names):
    """Make a folder with four images for each name, and return (file, name) of each."""
    root.mkdir(parents=True)
    rows = [(f"{number}-{copy}.png", name) for number, name in enumerate(names) for copy in range(4)]
    for seed, (file, _) in enumerate(rows):
        make.picture(seed).save(root / file)
    return rows


@pytest.mark.parametrize("write", [write_csv, write_jsonl])
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["1", "01", "2"], ["01", "1", "2"]),
        (["001", "0x1", "true"], ["001", "0x1", "true"]),
        (["NA", "null", "nan"], ["NA", "nan", "null"]),
        (["2", "10", "1"], ["1", "2", "10"]),
        (["1.0", "2", "other"], ["1.0", "2", "other"]),
        (["9" * 20, "1e5"], ["1e5", "9" * 20]),
        ([NFC, NFD, " b ", "b"], ["b", NFC]),
    ],
)
def test_labels_are_text_and_numbers_where_all_are(make, tmp_path, write, labels, names):
    rows = named_images(make, tmp_path / "d", labels)
    path = write(tmp_path / "d" / f"metadata.{write.__name__[6:]}", ("file_name", "label"), rows)
    assert load_data(str(path)).label_names == names


def test_decimal_labels_are_refused_with_a_remedy(make, tmp_path):
    path = write_csv(tmp_path / "l.csv", ("file_name", "label"), named_images(make, tmp_path / "d", ["1.0", "2"]))
    with pytest.raises(UserError, match=r"are of type float; needed: whole numbers or names \(write 1 for 1\.0, or"):
        load_data(str(path))


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
def test_the_labels_of_all_lists_are_typed_together(make, tmp_path, write, train, test, names):
    suffix = write.__name__[6:]
    for split, labels in (("train", train), ("test", test)):
        rows = named_images(make, tmp_path / split, [label for label in labels if label is not None])
        write(tmp_path / split / f"metadata.{suffix}", ("file_name", "label"), rows)
    data = load_data(str(tmp_path), multi_label=True)
    assert data.label_names == names
    if "-1" not in test:
        each = [label if isinstance(label, list) else [label] for label in data.splits["test"]["label"]]
        told = [str(label).lower() for label in test if label is not None for _ in range(4)]
        assert [names[label] for (label,) in each] == told


def test_lists_and_folders_of_names_that_look_alike_are_the_same_data(make, look, tmp_path):
    """A model of one is evaluated on the other: zeros in front, either Unicode form, and blanks."""
    rows = []
    for number, (split, name) in enumerate([(s, n) for s in ("train", "test") for n in ("01", "10", "c", "e")]):
        spelled = {"c": (NFC, NFD)[split == "test"], "e": ("e ", " e")[split == "test"]}.get(name, name)
        make.folder(tmp_path / "d" / split, {spelled: 4}, seed=100 * number)
        rows += [(f"{split}/{spelled.strip().replace(NFD, NFC)}/{copy:03d}.png", spelled) for copy in range(4)]
    folder = load_data(str(tmp_path / "d"))
    assert folder.label_names == ["01", "10", NFC, "e"]
    listed = load_data(str(write_csv(tmp_path / "d" / "l.csv", ("file_name", "label"), rows)))
    assert listed.fingerprint == folder.fingerprint
    assert look.contents(listed, "test") == look.contents(folder, "test")


@pytest.mark.parametrize("column", ["label", "file_name", "split", " label"])
def test_a_column_that_is_there_twice_is_refused_if_it_counts(flat, column):
    place, rows = flat
    header = ("file_name", "label", "split", "note", "note", column)
    rows = [(*row, "train", "x", "y", row[0] if column == "file_name" else "train") for row in rows]
    with pytest.raises(UserError, match=rf"^l\.csv, row 1: '{column.strip()}' is there twice; remove or rename one$"):
        load_data(str(write_csv(place / "l.csv", header, rows)))
    fields = ", ".join(f'"{name}": "{value}"' for name, value in zip(header, rows[0], strict=True))
    (place / "l.jsonl").write_text(f"{{{fields}}}\n")
    with pytest.raises(UserError, match=rf"^l\.jsonl, row 1: '{column.strip()}' is there twice; remove or rename one$"):
        load_data(str(place / "l.jsonl"))
    plain = [row[:-1] for row in rows]
    assert load_data(str(write_csv(place / "l.csv", header[:-1], plain))).label_names == ["cat", "dog", "owl"]


def test_other_columns_and_line_ends_do_not_count(flat, look, folder):
    """Megabytes in a cell or line, mixed types, line breaks in quotes, CRLF and a byte order mark."""
    place, rows = flat
    notes = ['"two\nlines, ""quoted"""', "x" * 3_000_000, *[""] * 38]
    lines = [
        "file_name,label,note",
        *(f"{file}, {label},{note}" for (file, label), note in zip(rows, notes, strict=True)),
    ]
    (place / "l.csv").write_bytes("\r\n".join(["\ufeff" + lines[0], *lines[1:], ""]).encode())
    mixed = [1, "a", None, {"b": [1]}, [2, "c"], "x" * 3_000_000, True, *[0.5] * 33]
    write_jsonl(
        place / "l.jsonl", ("file_name", "label", "note"), [(*row, note) for row, note in zip(rows, mixed, strict=True)]
    )
    for name in ("l.csv", "l.jsonl"):
        assert look.everything(load_data(str(place / name))) == look.everything(load_data(str(folder)))
