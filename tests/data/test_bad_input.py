"""Bad input is one clear line before any training: what was given, what is needed, the remedy."""

import gc
import hashlib
import json
import warnings

import pytest
from datasets import Dataset
from PIL import Image

from hf_vit.data import check_images, load_data
from hf_vit.errors import UserError

NAMES = ["cat", "dog", "owl"]


def refuses(source, match, **options):
    def load_and_read():
        for split in load_data(str(source), **options).splits.values():
            list(split)

    with pytest.raises(UserError, match=match) as caught:
        load_and_read()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source", ["./nowhere", "/no/where", "../gone", "~/no/such/place", "a/b/c", "gone.parquet", "d/x.TAR"]
)
def test_a_missing_path_is_called_a_path(source):
    refuses(source, "does not exist; give a folder")


@pytest.mark.parametrize("streaming", [False, True])
def test_what_may_be_a_hub_id_names_both_readings(streaming):
    refuses(
        "somebody/missing-data",
        r"'somebody/missing-data' is no existing path, and as a data set of the Hub",
        streaming=streaming,
    )


def test_an_unreachable_hub_is_said_at_once(monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        raise RuntimeError("[Errno -2] Name or\nservice not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("datasets retries for 24 s"))
    refuses(
        "somebody/pets",
        "as a data set of the Hub it could not be loaded: offline mode is on, .*; check the spelling",
    )


def test_data_of_the_hub_that_are_cached_need_no_network(folder, make, monkeypatch, tmp_path):
    import datasets

    asked = []
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *args, **kwargs: asked.append(name) or {"train": table})
    table = make.table(folder, names=NAMES)
    refuses("Some/MyPets", "could not be loaded: offline mode is on, so the Hub cannot be reached")
    (tmp_path / "Some___my_pets").mkdir()
    assert load_data("Some/MyPets").num_examples("train") == 33
    assert asked == ["Some/MyPets"]


def test_an_existing_folder_is_never_taken_for_a_hub_id(tmp_path, make, monkeypatch):
    make.folder(tmp_path / "user" / "name", {"a": 5, "b": 5})
    monkeypatch.chdir(tmp_path)
    assert load_data("user/name").name == "name"


def test_empty_folder(tmp_path):
    refuses(tmp_path, "holds no files; needed: one folder of images a class")


def test_folder_without_images(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("a/1.txt", "a/2.txt", "notes.CSV"):
        (tmp_path / name).write_text("x")
    refuses(tmp_path, r"holds no images \(found: 2 .txt, 1 .csv\)")


def test_images_without_class_folders(tmp_path, make):
    make.picture(0).save(tmp_path / "x.png")
    refuses(tmp_path, "images such as 'x.png' but no class folders; put the images of every class into a folder")


def test_split_folder_without_class_folders(tmp_path, make):
    make.folder(tmp_path / "train", {"a": 4, "b": 4})
    (tmp_path / "test").mkdir()
    make.picture(0).save(tmp_path / "test" / "x.png")
    refuses(tmp_path, "test' holds images such as 'x.png' but no class folders")


def test_split_folders_beside_others(tmp_path, make):
    make.folder(tmp_path / "train", {"a": 4, "b": 4})
    make.folder(tmp_path / "spare", {"a": 4})
    refuses(tmp_path, "split folder 'train' beside 'spare', which is none")


def test_empty_class_folder(folder):
    (folder / "newt").mkdir()
    refuses(folder, "class folder '.*pets/newt' holds no images; add some or remove the folder")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_class_with_one_image(folder, make, streaming):
    make.folder(folder, {"newt": 1}, seed=70)
    refuses(folder, "class 'newt' has 1 image; to cut validation and test", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_only_one_class(tmp_path, make, streaming):
    make.folder(tmp_path, {"cat": 9})
    refuses(tmp_path, r"images of one class only \(cat\); a classifier needs at least two", streaming=streaming)


def test_a_class_of_test_that_train_lacks(tmp_path, make):
    make.folder(tmp_path / "train", {"a": 4, "b": 4})
    make.folder(tmp_path / "test", {"a": 4, "c": 4})
    refuses(tmp_path, "class 'c' of .* is in test but not in train")


@pytest.mark.parametrize("label", [7, -1, None])
@pytest.mark.parametrize("streaming", [False, True])
def test_labels_outside_the_classes(folder, tmp_path, label, streaming, make):
    names = NAMES
    table = make.table(folder, names=names)
    labels = [label if row == 17 else value for row, value in enumerate(table["label"])]
    wrong = table.remove_columns("label").add_column("label", labels)
    wrong = wrong.cast_column("label", table.features["label"]) if label != 7 else wrong
    import pyarrow.parquet

    # As a program other than datasets may write it: a label beyond the names in the schema.
    arrow = wrong.data.table.replace_schema_metadata(table.data.table.schema.metadata)
    pyarrow.parquet.write_table(arrow, tmp_path / "pets.parquet")
    refuses(
        tmp_path / "pets.parquet", r"(the label (7|-1)|no label), which is outside the 3 classes", streaming=streaming
    )


def test_a_label_in_test_that_train_lacks(folder, tmp_path, make):
    (tmp_path / "d").mkdir()
    make.table(folder).to_parquet(str(tmp_path / "d" / "train.parquet"))
    make.table(folder, label=lambda name: "yak").to_parquet(str(tmp_path / "d" / "test.parquet"))
    refuses(
        tmp_path / "d", r"image 0 of split test has the label 'yak', which is outside the 3 classes \(cat, dog, owl\)"
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_labels_that_are_no_classes(folder, tmp_path, streaming, make):
    make.table(folder, label=lambda name: 0.5 + len(name)).to_parquet(str(tmp_path / "f.parquet"))
    refuses(tmp_path / "f.parquet", "are of type float; needed: whole numbers or names", streaming=streaming)
    make.table(folder, label=lambda name: NAMES.index(name) - 1).to_parquet(str(tmp_path / "n.parquet"))
    refuses(tmp_path / "n.parquet", "has the label -1; classes are numbered from 0", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_files_that_number_their_classes_otherwise(folder, tmp_path, streaming, make):
    """`datasets` would read all of them by the first's names."""
    for name, names in (("train", NAMES), ("test", NAMES[::-1])):
        make.table(folder, names=names).to_parquet(str(tmp_path / "d" / f"{name}.parquet"))
    refuses(
        tmp_path / "d",
        r"the classes of the column 'label' in test/test\.parquet \(owl, dog, cat\) otherwise than in "
        r"train/train\.parquet \(cat, dog, owl\)",
        streaming=streaming,
    )


@pytest.mark.parametrize(("label", "kind"), [({"x": 1}, "dict"), ([["a"]], "list")])
def test_labels_that_are_objects(folder, tmp_path, label, kind):
    rows = [{"file_name": str(file), "label": label} for file in sorted(folder.glob("*/*.png"))]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refuses(tmp_path / "l.jsonl", f"are of type {kind}; needed: whole numbers or names")


def test_missing_columns(folder, tmp_path, make):
    table = make.table(folder)
    table.remove_columns("label").to_parquet(str(tmp_path / "l.parquet"))
    refuses(tmp_path / "l.parquet", "has the columns image; needed: a column 'label'")
    table.remove_columns("image").to_parquet(str(tmp_path / "i.parquet"))
    refuses(tmp_path / "i.parquet", "has the columns label; needed: one column of images")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["x.parquet", "x.tar"])
def test_files_that_are_not_what_their_names_say(tmp_path, name, streaming):
    (tmp_path / name).write_bytes(b"neither parquet nor tar" * 100)
    refuses(tmp_path / name, r"'x\.\w+' cannot be read as (parquet|webdataset)", streaming=streaming)


def test_other_files(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"PK")
    refuses(tmp_path / "x.zip", "is no data set file; needed: .parquet files")
    refuses(tmp_path / "*.jpg", "no file matches")


def test_nothing():
    refuses("", "no data given")


def test_image_size_must_be_positive():
    with pytest.raises(UserError, match="both sides must be at least 1 px"):
        load_data("digits", image_size=(0, 8))


# ---- bad images


def spoil(folder):
    """Three ways to be bad: no image at all, cut short, empty."""
    (folder / "cat" / "000.png").write_bytes(b"GIF, or so")
    whole = (folder / "dog" / "001.png").read_bytes()
    (folder / "dog" / "001.png").write_bytes(whole[: len(whole) // 2])
    (folder / "dog" / "002.png").write_bytes(b"")


def test_a_corrupt_image_is_named(folder):
    spoil(folder)
    refuses(
        folder, r"image '.*cat/000.png' is not an image.* \(2 more bad images\); replace or remove it, or pass skip"
    )


@pytest.mark.parametrize("name", ["cat/000.png", "dog/001.png", "dog/002.png"])
def test_every_kind_of_corrupt_image_is_found_while_streaming(folder, name):
    spoil(folder)
    for other in {"cat/000.png", "dog/001.png", "dog/002.png"} - {name}:
        (folder / other).unlink()
    refuses(folder, rf"image '.*{name}' is .*skip_bad_images", streaming=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_images_can_be_skipped_and_are_counted(folder, streaming, look):
    spoil(folder)
    data = load_data(str(folder), skip_bad_images=True, streaming=streaming)
    assert len(look.everything(data)) == 37
    assert sorted(data.skipped) == ["cat/000.png", "dog/001.png", "dog/002.png"]


def test_skipping_all_images_of_a_split_is_refused(folder):
    for file in folder.glob("*/*.png"):
        file.write_bytes(b"broken")
    refuses(folder, "split train has no usable image left: image '.*' is not an image", skip_bad_images=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_images_smaller_than_a_patch(folder, make, streaming, look):
    make.picture(500, size=(9, 30)).save(folder / "owl" / "narrow.png")
    data = load_data(str(folder), streaming=streaming)
    assert len(look.everything(check_images(data, (10, 9)))) == 41
    with pytest.raises(UserError, match=r"'.*owl/narrow.png' is 30x9 px, smaller than one patch of 10x10 px"):
        look.everything(check_images(data, 10))
    kept = check_images(data, 10, skip_bad_images=True)
    assert len(look.everything(kept)) == 40
    assert kept.skipped == ["owl/narrow.png"]
    assert kept.fingerprint == data.fingerprint, "it is of the data, whatever a model can learn from"
    if not streaming:
        assert check_images(data, 9) is data, "nothing is copied when nothing changes"


def test_size_is_counted_upright(folder, make):
    exif = Image.Exif()
    exif[0x0112] = 6
    make.picture(500, size=(40, 11)).save(folder / "owl" / "turned.png", exif=exif)
    data = load_data(str(folder))
    sizes = {seen.name.rsplit("/", 1)[-1]: (seen.height, seen.width) for split in data.seen.values() for seen in split}
    assert sizes["turned.png"] == (40, 11)


def test_an_image_of_a_mode_that_cannot_be_converted_is_bad(folder):
    Image.new("LAB", (12, 12)).save(folder / "owl" / "lab.tif")
    refuses(folder, r"image '.*lab.tif': images of mode LAB cannot be converted")


def test_a_skipped_image_of_a_stream_is_counted_once(folder):
    spoil(folder)
    data = load_data(str(folder), skip_bad_images=True, streaming=True)
    for _ in range(3):
        for stream in data.splits.values():
            list(stream)
    assert len(data.skipped) == 3


@pytest.fixture(params=["parquet", "webdataset"])
def bad_files(request, folder, tmp_path, make):
    """Two files of 40 nameless images; three are bad (two of them alike), and where these stand."""
    images = [(file.read_bytes(), file.parent.name) for file in sorted(folder.glob("*/*.png"))]
    for row, content in ((3, b"GIF, or so"), (25, b""), (38, b"")):
        images[row] = (content, images[row][1])
    root = tmp_path / "files"
    root.mkdir()
    for number, part in enumerate((images[:20], images[20:])):
        if request.param == "webdataset":
            make.tar(
                root / f"{number}.tar", [{"png": content, "cls": b"%d" % NAMES.index(label)} for content, label in part]
            )
        else:
            columns = {"image": [content for content, _ in part], "label": [label for _, label in part]}
            Dataset.from_dict(columns).to_parquet(root / f"{number}.parquet")
    rows = ("00003.png", "00005.png", "00018.png") if request.param == "webdataset" else ("row 3", "row 5", "row 18")
    files = [f"train/{number}.{'tar' if request.param == 'webdataset' else 'parquet'}" for number in (0, 1, 1)]
    return root, [f"{file}, {row}" for file, row in zip(files, rows, strict=True)]


def test_a_stream_tells_the_file_and_row_of_every_bad_image(bad_files, caplog):
    root, places = bad_files
    refuses(root, rf"image '({'|'.join(places)})' is ", streaming=True)
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # datasets leaves the archive of a stream that is not read to its end open until then
    data = load_data(str(root), streaming=True, skip_bad_images=True)
    for _ in range(2):
        assert sum(len(list(stream)) for stream in data.splits.values()) == 37
    assert sorted(data.skipped) == sorted(places)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(told) == [f"left out the unreadable image {place}" for place in sorted(places)]


def test_a_stream_too_large_to_search_tells_the_content(bad_files, monkeypatch):
    monkeypatch.setattr("hf_vit.data.sources.reading._SEARCHED_BYTES", 0)
    root, _ = bad_files
    digest = hashlib.sha256(b"GIF, or so").hexdigest()[:12]
    data = load_data(str(root), streaming=True, skip_bad_images=True)
    for stream in data.splits.values():
        list(stream)
    if next(root.iterdir()).suffix == ".parquet":
        assert any(name.endswith(f"with SHA-256 {digest}") for name in data.skipped)
    assert len(data.skipped) >= 2


def test_big_sets_show_their_progress(folder, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    load_data(str(folder))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("hf_vit.data.checks.PROGRESS_FROM", 40)
    load_data(str(folder))
    shown = capsys.readouterr().err
    assert "Checking train images" in shown
    assert "40/40" in shown
