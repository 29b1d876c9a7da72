"""Embeddings in object stores: the objects are the files of a local run, and the same command goes on."""

import sys
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from hf_vit import HfViTConfig, HfViTForImageClassification, UserError
from hf_vit.data import make_processor
from hf_vit.evaluation import embed
from hf_vit.results.delivery import free_folder
from hf_vit.results.writing import write_atomically
from hf_vit_cli.main import main

PLACE = "memory://bucket/embeddings"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    classifier = HfViTForImageClassification(HfViTConfig(image_size=8, patch_size=4, num_labels=10, **sizes))
    folder = tmp_path_factory.mktemp("model") / "tiny"
    classifier.save_pretrained(folder)
    make_processor(classifier.config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def store():
    """An empty store in this process's memory."""
    MemoryFileSystem.store.clear()
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


GIVEN = dict(splits=["test"], rows_per_file=50, batch_size=25)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """What is written on a disk."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    embed(model, "digits", folder, **GIVEN)
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def objects(store):
    names = store.ls("bucket/embeddings", detail=False)
    return {Path(name).name: store.cat_file(name) for name in names if name.endswith(".parquet")}


def test_objects_are_the_files_of_a_disk(model, whole, store):
    done = embed(model, "digits", f"{PLACE}/", **GIVEN)
    assert objects(store) == whole
    assert (done.folder, sorted(done.files)) == (PLACE, sorted(whole))
    assert f'"rows": {done.rows}' in store.cat_file("bucket/embeddings/manifest.json").decode()


def test_what_the_network_broke_off_the_same_command_finishes(model, whole, store, monkeypatch):
    """Two objects arrive, then nothing does; what arrived is not computed again."""
    written, lost = [], MemoryFileSystem.pipe_file

    def pipe_file(self, path, value, **given):
        if len(written) == 3:  # the manifest among them
            raise ConnectionResetError("reset by https://bucket.example/part?Signature=SECRET")
        written.append(Path(path).name)
        return lost(self, path, value, **given)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with pytest.raises(UserError, match=rf"^{PLACE}/\S+ cannot be written \(reset by") as raised:
        embed(model, "digits", PLACE, **GIVEN)
    assert "SECRET" not in str(raised.value)
    assert objects(store) == {name: whole[name] for name in written[1:]}
    before, written[:] = written[1:], []
    monkeypatch.setattr(
        MemoryFileSystem,
        "pipe_file",
        lambda self, path, value, **given: written.append(Path(path).name) or lost(self, path, value, **given),
    )
    assert embed(model, "digits", PLACE, **GIVEN).done_before == 2
    assert objects(store) == whole
    assert written[-1] == "manifest.json"
    assert not set(before) & set(written)


def test_what_other_processes_wrote_is_there(model, whole, store, monkeypatch):
    """s3fs answers from the listing that it has seen last, and hears nothing of what others write."""
    seen, opened = {}, MemoryFileSystem._open

    def ls(self, path, *given, **options):
        seen["listing"] = set(self.store)
        return listed(self, path, *given, **options)

    def _open(self, path, mode="rb", **options):
        if mode == "rb" and path not in seen.get("listing", self.store):
            raise FileNotFoundError(path)
        return opened(self, path, mode, **options)

    listed = MemoryFileSystem.ls
    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    monkeypatch.setattr(MemoryFileSystem, "_open", _open)
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda self, path=None: seen.clear())
    assert embed(model, "digits", PLACE, **GIVEN).done_before == 0
    assert objects(store) == whole


def test_by_command(model, whole, store, tmp_path, capsys):
    words = ["embed", model, "--data", "digits", "--split", "test", "--rows-per-file", "50", "--batch-size", "25"]
    for place in (PLACE, f"file://{tmp_path}/a%20b"):
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--no-optimize", "--output", place])
    assert f"manifest.json in {PLACE}" in capsys.readouterr().out
    assert objects(store) == whole
    assert {path.name: path.read_bytes() for path in (tmp_path / "a b").glob("*.parquet")} == whole


def test_places_that_cannot_be_written_are_refused_before_any_work(store, monkeypatch):
    store.pipe_file("bucket/taken/notes.txt", b"mine")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for place, said in (
        ("s3://bucket/x", "pip install s3fs$"),
        ("ftp://host/x", "a kind that is not known; give a path, file:///, s3://, gs://"),
        ("nosuch://x", "a kind that is not known"),
        ("file://x", "a kind that is not known"),
        ("memory://", "names no folder; give one, such as memory://NAME/embeddings$"),
        ("memory://bucket/taken", r"holds something else \(notes\.txt\)"),
        (Path("s3://bucket/x"), "is an address, not a place on this machine"),
    ):
        with pytest.raises(UserError, match=said):
            embed("no-such-model", "digits", place)
    assert not Path("s3:").exists()


def test_an_object_store_that_was_begun_otherwise_is_refused(model, store):
    embed(model, "digits", PLACE, **GIVEN)
    with pytest.raises(UserError, match=f"{PLACE} was begun with settings"):
        embed(model, "digits", PLACE, **GIVEN | dict(batch_size=3))
    store.pipe_file("bucket/embeddings/manifest.json", b"{")
    with pytest.raises(UserError, match=f"{PLACE}/manifest.json is damaged"):
        embed(model, "digits", PLACE, **GIVEN)


@pytest.mark.parametrize("write", [lambda place: write_atomically(place, "x"), free_folder])
def test_other_outputs_make_no_folder_of_an_address(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is an address, not a place on this machine; give a path"):
        write(Path("s3://bucket/x"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command", ["convert NO --output", "finetune NO --data digits --output", "compare NO --data digits --output"]
)
def test_commands_refuse_an_address_before_any_work(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        main([*command.split(), "gs://bucket/x"])
    assert "cannot be written (it is an address, not a place on this machine)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
