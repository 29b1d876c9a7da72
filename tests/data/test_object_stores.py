"""Images in object stores are the images of a disk, and what fails there is told as the store's failure."""

import json
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from data.conftest import contents, make_folder, make_table, make_tar
from evaluation.tiny import save_ours
from fsspec.implementations.memory import MemoryFileSystem

from hf_vit import UserError
from hf_vit.data import load_data
from hf_vit.data.load import load_unlabeled
from hf_vit.evaluation import predict
from hf_vit.evaluation.prediction import list_image_files, predict_images, write_dense_predictions
from hf_vit.loading.model import load_model


@pytest.fixture
def stored(store):
    """Puts what is below a folder into the store, and gives its address there."""

    def put(folder: Path) -> str:
        for path in folder.rglob("*"):
            if path.is_file():
                store.pipe_file(f"bucket/{folder.name}/{path.relative_to(folder)}", path.read_bytes())
        return f"memory://bucket/{folder.name}"

    return put


def made(kind: str, folder: Path) -> str:
    """The same images another way below `folder`; returns what of it is the data."""
    names = [(f"{name}/{number:03d}.png", name) for name in ("cat", "dog") for number in range(12)]
    if kind == "folder":
        (folder / "dog" / "012.png").rename(folder / "dog" / "a %41 #[1]?.png")
    elif kind == "splits":
        for name in ("cat", "dog", "owl"):
            shutil.rmtree(folder / name)
        for split in ("train", "val"):
            make_folder(folder / split, {"cat": 7, "dog": 5}, seed=50 * len(split))
    elif kind == "list":
        (folder / "metadata.csv").write_text("\n".join(["file_name,label", *map(",".join, names), ""]))
    elif kind == "lines":
        rows = [json.dumps({"file_name": file, "label": label}) for file, label in names]
        (folder / "labels.jsonl").write_text("\n".join(rows))
        return "labels.jsonl"
    elif kind in ("parquet", "pattern"):
        name = "train-[0].parquet" if kind == "parquet" else "train-0.parquet"
        make_table(folder, names=["cat", "dog", "owl"]).to_parquet(folder / name)
        return name if kind == "parquet" else "*.parquet"
    else:
        files = sorted(folder.glob("*/*.png"))
        (folder / "shards").mkdir()
        samples = [{"png": path.read_bytes(), "cls": b"%d" % "cdo".index(path.parent.name[0])} for path in files]
        make_tar(folder / "shards" / "train-0.tar", samples)
        return "shards"
    return ""


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["folder", "splits", "list", "lines", "parquet", "pattern", "webdataset"])
def test_they_are_those_of_a_disk(kind, streaming, folder, stored):
    inside = made(kind, folder)
    there = load_data(f"{stored(folder)}/{inside}".rstrip("/"), streaming=streaming)
    here = load_data(str(folder / inside), streaming=streaming)
    assert (there.name, there.label_names, there.notes) == (here.name, here.label_names, here.notes)
    assert (there.fingerprint, there.files) == (here.fingerprint, here.files)
    assert there.changed_files() == ""
    for split in here.splits:
        assert contents(there, split) == contents(here, split) != set()


def test_what_changes_meanwhile_is_seen(folder, stored, store):
    assert load_unlabeled(stored(folder)).fingerprint == load_unlabeled(str(folder)).fingerprint
    data = load_data(stored(folder))
    store.rm_file("bucket/pets/cat/000.png")
    store.pipe_file("bucket/pets/dog/000.png", b"longer than before" * 100)
    assert data.changed_files() == "train/cat/000.png is missing, train/dog/000.png has changed"


def test_a_hub_repository_by_address(hub, xet_client, folder):
    fingerprint, is_same, refusals = xet_client.run("data.conftest:load_uploaded", folder=str(folder))
    assert fingerprint == load_data(str(folder)).fingerprint
    assert is_same
    said = (
        "in the column 'label' of 'alice/tables' mean owl, dog, cat in test.parquet, but cat, dog, owl in train.parquet"
    )
    assert [said in refusal for refusal in refusals] == [True, True], refusals


def test_a_failing_store_is_no_corrupt_image(folder, stored, monkeypatch):
    """Skipped bad images are images that were seen to be bad."""
    address, cat_file = stored(folder), MemoryFileSystem.cat_file

    def broken(self, path, *args, **given):
        if path.endswith("cat/003.png"):
            raise ConnectionResetError("reset by https://bucket.example/cat?Signature=SECRET")
        return cat_file(self, path, *args, **given)

    opened = MemoryFileSystem._open
    monkeypatch.setattr(MemoryFileSystem, "cat_file", broken)
    monkeypatch.setattr(
        MemoryFileSystem, "_open", lambda self, path, *args, **given: broken(self, path) and opened(self, path, *args)
    )
    said = r"cat/003.png cannot be read \(reset by https://bucket.example/cat\)"
    for load in (load_data, load_unlabeled):
        with pytest.raises(UserError, match=said) as raised:
            load(address, skip_bad_images=True)
        assert "SECRET" not in str(raised.value)


def test_a_corrupt_object_is_a_corrupt_image(folder, stored, store):
    address = stored(folder)
    store.pipe_file("bucket/pets/cat/003.png", b"no image")
    with pytest.raises(UserError, match=r"^image 'memory://bucket/pets/cat/003.png' is not an image"):
        load_data(address)
    assert load_data(address, skip_bad_images=True).skipped == ["cat/003.png"]


@pytest.mark.parametrize("named", ["https://example.com/x.png", "file:///etc/hostname", "/etc/hostname", "../../x.png"])
def test_a_list_names_nothing_beyond_itself(named, folder, stored, store):
    address = stored(folder)
    store.pipe_file("bucket/pets/metadata.csv", f"file_name,label\n{named},cat\ncat/000.png,dog\n".encode())
    with pytest.raises(UserError, match=r"^metadata.csv names '.*', which is outside its folder; write a path"):
        load_data(address)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("named", ["memory://bucket/pets/cat/000.png", "/etc/hostname"])
def test_a_table_reads_nothing_from_elsewhere(named, place, streaming, folder, stored, store, tmp_path):
    """One of this machine may name files of this machine, one of a store neither; none an address."""
    from datasets import Dataset, Features, Image, Value

    stored(folder)
    rows = {"image": [{"bytes": None, "path": named}] * 20, "label": ["cat", "dog"] * 10}
    table = Dataset.from_dict(rows, features=Features({"image": Image(decode=False), "label": Value("string")}))
    table.to_parquet(tmp_path / "x.parquet")
    store.pipe_file("bucket/x.parquet", (tmp_path / "x.parquet").read_bytes())
    source = "memory://bucket/x.parquet" if place == "memory" else str(tmp_path / "x.parquet")
    own_file = place == "disk" and named.startswith("/")
    said = "is not an image" if own_file else r"names a file instead of an image \('[^']*'\), which is not read"
    with pytest.raises(UserError, match=said):
        print([list(rows) for rows in load_data(source, streaming=streaming).splits.values()])


def test_places_that_cannot_be_read_are_told(folder, stored, store, monkeypatch):
    address = stored(folder)
    (folder / "annotations").mkdir()
    store.pipe_file("bucket/dense/images/a.png", b"x")
    store.pipe_file("bucket/dense/annotations/a.png", b"x")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for place, said in (
        ("s3://bucket/x", "the library that reads s3://bucket/x is not installed; install it with pip install s3fs$"),
        ("ftp://host/x", "^the URL ftp://host/x has an unknown scheme; give a local path, file:///, or one of s3"),
        ("memory://bucket/no", "^'memory://bucket/no' does not exist; give a folder"),
        ("memory://bucket/no*.parquet", "^'memory://bucket/no"),
        (f"{address}/cat", "holds images such as '000.png' but no class folders"),
        (f"{address}/cat/000.png", "is not a data set file; give .parquet"),
        ("memory://bucket/dense", "holds masks or objects as separate files, which .* from a local folder"),
    ):
        with pytest.raises(UserError, match=said):
            load_data(place)
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(UserError, match=r'needs universal-pathlib; install with pip install "hf-vit\[stores\]"$'):
        load_data(address)


def test_a_path_as_an_address(folder):
    (folder / "dog").rename(folder / "a dog")
    assert load_data(f"file://{folder}".replace(" ", "%20")).fingerprint == load_data(str(folder)).fingerprint


@pytest.fixture
def model(tmp_path):
    save_ours(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("given", ["", "/*", "/00[0-3].png", "/000.png"])
def test_predictions(given, model, folder, stored):
    address = stored(folder)
    (folder / "cat" / "x").mkdir()
    subject = load_model(model)
    here = predict_images(subject, [f"{folder}/cat{given}"])
    there = predict_images(subject, [f"{address}/cat{given}"])
    assert [each.scores for each in there] == [each.scores for each in here] != []
    assert [each.image for each in there] == [each.image.replace(str(folder), address) for each in here]


def test_folders_are_those_of_data(model, folder, caplog):
    """Hidden files are none, other kinds are told, and a link that leads nowhere is an image that is not there."""
    for name in ("._000.png", "a.heic"):
        (folder / "cat" / name).write_bytes(b"no image")
    (folder / "cat" / "z.png").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"no image .*z\.png"):
        predict(model, str(folder / "cat"))
    found = predict(model, str(folder / "cat"), skip_bad_images=True)
    assert [each.problem is None for each in found] == [True] * 12 + [False]
    assert "ignored 1 file in 'cat' that are not images (1 .heic)" in caplog.text
    (folder / "cat" / b"caf\xe9.png".decode(errors="surrogateescape")).write_bytes(b"")
    for given in (folder / "cat", folder / "cat" / "c*.png"):
        with pytest.raises(UserError, match="is not valid UTF-8; rename"):
            predict(model, str(given))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_tables_of_predictions(ending, model, folder, stored, store, monkeypatch, succeeds):
    stored(folder)
    monkeypatch.chdir(folder.parent)
    for place in (f"here.{ending}", f"memory://bucket/there.{ending}"):
        out = succeeds("predict", model, "pets/cat", "--output", place)
    assert f"predictions in memory://bucket/there.{ending}" in out
    here = (folder.parent / f"here.{ending}").read_bytes()
    assert store.cat_file(f"bucket/there.{ending}") == here != b""
    (folder / "cat" / "x.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="is not a table; give a file name that ends in"):
        predict(model, "pets/cat", output="memory://bucket/there.txt")
    with pytest.raises(UserError, match="is a URL, not a local path"):
        write_dense_predictions([], "memory://bucket/masks")
    monkeypatch.setattr(MemoryFileSystem, "put_file", Mock(side_effect=OSError("the disk of the store is full")))
    with pytest.raises(UserError, match=rf"there.{ending} cannot be written \(the disk of the store is full\); check"):
        predict(model, "pets/cat", output=f"memory://bucket/there.{ending}")
    assert store.cat_file(f"bucket/there.{ending}") == here


def test_a_failing_store_is_no_image_to_pass_over(model, folder, stored, monkeypatch):
    address = stored(folder)
    assert predict(model, [f"{address}/cat/no.png"], skip_bad_images=True)[0].problem is not None
    files = list(list_image_files([f"{address}/cat"]))
    for name in ("_open", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, name, Mock(side_effect=PermissionError("Forbidden")))
    with pytest.raises(UserError, match=r"cat/000.png cannot be read \(Forbidden\); check the path, your permissions"):
        predict_images(load_model(model), files, skip_bad_images=True)
