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


def test_columns_of_any_name(flat, look, folder):
    place, rows = flat
    path = write_csv(place / "birds.csv", ("photo", "species", "label"), [(file, label, 0) for file, label in rows])
    data = load_data(str(path), image_column="photo", label_column="species")
    assert look.everything(data) == look.everything(load_data(str(folder)))
    with pytest.raises(UserError, match=r"has no column 'kind' \(--label-column\); it has photo, species, label"):
        load_data(str(path), image_column="photo", label_column="kind")
    with pytest.raises(UserError, match=r"columns photo, species, label; needed: one of image files.* --image-column"):
        load_data(str(path))
    with pytest.raises(UserError, match=r"has no column 'x' \(--image-column\)"):
        load_data(str(folder), image_column="x")


def test_columns_of_parquet_files(folder, tmp_path, make, look):
    table = make.table(folder).rename_columns({"image": "photo", "label": "species"}).add_column("label", [0] * 40)
    table.to_parquet(str(tmp_path / "pets.parquet"))
    for streaming in (False, True):
        data = load_data(
            str(tmp_path / "pets.parquet"), image_column="photo", label_column="species", streaming=streaming
        )
        assert look.everything(data) == look.everything(load_data(str(folder)))


@pytest.mark.parametrize("how", ["column", "folders", "lists"])
def test_splits_of_a_list(how, flat, look):
    place, rows = flat
    parts = ["train"] * 30 + ["val"] * 5 + ["test"] * 5
    rows = [rows[number * 7 % 40] for number in range(40)]  # every class in train
    if how == "column":
        write_csv(
            place / "metadata.csv",
            ("file_name", "label", "split"),
            [(*row, part) for row, part in zip(rows, parts, strict=True)],
        )
    else:
        for (file, _), part in zip(rows, parts, strict=True):
            (place / part).mkdir(exist_ok=True)
            (place / file).rename(place / part / file)
    if how == "folders":
        listed = [(f"{part}/{file}", label) for (file, label), part in zip(rows, parts, strict=True)]
        write_csv(place / "metadata.csv", ("file_name", "label"), listed)
    if how == "lists":
        for part in ("train", "val", "test"):
            inside = [row for row, other in zip(rows, parts, strict=True) if other == part]
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
