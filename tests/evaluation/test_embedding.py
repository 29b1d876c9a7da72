"""Embeddings and predictions of a data set, on a disk or in an object store, whatever is killed meanwhile."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from comparison import zoo
from data.conftest import encoded, make_folder, picture
from evaluation.tiny import choose_features
from fsspec.implementations.memory import MemoryFileSystem
from results.test_writing import left_by
from training.conftest import save_model, write_parquet

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTModel, UserError
from hf_vit.data import eval_transform, load_data
from hf_vit.evaluation import embed, embedding
from hf_vit.loading import load_model
from hf_vit.loading.pixels import keep_image_sizes
from hf_vit.results.delivery import prepare_output
from hf_vit.writing import write_atomically
from hf_vit_cli.main import main

SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A saved classifier of ten classes, 8 px images."""
    torch.manual_seed(0)
    classifier = HfViTForImageClassification(HfViTConfig(image_size=8, patch_size=4, num_labels=10, **SIZES))
    torch.nn.init.normal_(classifier.classifier.weight)
    return save_model(classifier, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of two classes with 30 and 20 images."""
    return make_folder(tmp_path_factory.mktemp("images") / "noise", {"a": 30, "b": 20})


def read(folder, split):
    table = [pq.read_table(path) for path in sorted(folder.glob(f"{split}-*.parquet"))]
    return [row for part in table for row in part.to_pylist()]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def forward(model, table):
    """What the model itself says of every image, one by one."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    classifier = AutoModelForImageClassification.from_pretrained(model).eval()
    transform = eval_transform(AutoImageProcessor.from_pretrained(model))
    pixel_values = torch.stack(list(transform.prepare([row["image"] for row in table])))
    with torch.no_grad():
        return classifier.base_model(pixel_values), classifier(pixel_values).logits


def test_embeddings_are_what_the_head_sees(model, images, tmp_path):
    done = embed(str(model), str(images), tmp_path / "out", batch_size=7, rows_per_file=16)
    assert done.rows == 50
    data = load_data(str(images))
    for split in ("train", "validation", "test"):
        rows, table = read(tmp_path / "out", split), data.split(split)
        assert [row["index"] for row in rows] == list(range(len(table)))
        assert [row["label"] for row in rows] == [data.label_names[label] for label in table["label"]]
        assert all((images / row["image"]).is_file() and row["image"][0] == row["label"] for row in rows)
        (expected, _), found = forward(model, table), torch.tensor([row["embedding"] for row in rows])
        torch.testing.assert_close(found, expected.pooler_output, atol=1e-5, rtol=1e-5)
    shards = [f"train-0000{i}-of-00003.parquet" for i in (0, 1, 2)]
    assert [name for name in done.files if name.startswith("train")] == shards


@pytest.mark.parametrize(("kind", "norm"), [("class", True), ("mean", False), ("class+mean", True), ("patches", False)])
@pytest.mark.parametrize("patches", [None, 9])
def test_features_of_layers_by_command(kind, norm, patches, model, images, tmp_path, succeeds):
    """They are those of hidden states, which transformers records, also of images that keep their shape."""
    arguments = ["embed", model, "--data", images, "--output", tmp_path / "out", "--features", kind, "--layers", "2"]
    arguments += ["--split", "test", *([] if norm else ["--no-norm"])]
    succeeds(*arguments, *([] if patches is None else ["--max-num-patches", patches]))
    rows, subject = read(tmp_path / "out", "test"), load_model(str(model))
    if patches is not None:
        subject = keep_image_sizes(subject, patches)
    vit = subject.model.base_model
    for row, image in zip(rows, load_data(str(images)).split("test")["image"], strict=True):
        inputs = subject.prepare([image])
        inputs = inputs if patches is not None else {"pixel_values": inputs}
        with torch.no_grad():
            states = vit(**inputs, output_hidden_states=True).hidden_states[-2:]
            tokens = [(vit.layernorm(state) if norm else state)[0] for state in states]
        found, expected = torch.tensor(row["embedding"]), choose_features(tokens, kind)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_predictions_by_command(model, images, tmp_path, succeeds):
    """Of a list of images whose columns have other names."""
    rows = [f"noise/{file.relative_to(images)},{file.parent.name}" for file in sorted(images.glob("*/*.png"))]
    listed = images.parent / "list.csv"
    listed.write_text("\n".join(["photo,kind", *rows]) + "\n")
    columns = ("--image-column", "photo", "--label-column", "kind")
    words = ("embed", model, "--data", listed, *columns, "--output", tmp_path / "out", "--split", "train")
    assert "39 rows in 1 file and manifest.json" in succeeds(*words, "--predictions", "--top", 3)
    table = load_data(str(listed), image_column="photo", label_column="kind").split("train")
    _, logits = forward(model, table)
    best = logits.double().softmax(-1).topk(3)
    rows = read(tmp_path / "out", "train")
    assert [row["label"] for row in rows] == ["ab"[label] for label in table["label"]]
    assert [row["labels"] for row in rows] == [[f"LABEL_{k}" for k in row] for row in best.indices.tolist()]
    np.testing.assert_allclose([row["probabilities"] for row in rows], best.values, atol=1e-5)


def test_two_calls_at_once_do_not_mix(model, images, tmp_path, monkeypatch):
    """The second comes while the first, which found an empty folder, is about to say what it will hold."""
    out, calls, second, write = tmp_path / "out", [], [], embedding._write_manifest

    def meet(*arguments):
        monkeypatch.undo()
        call = threading.Thread(target=lambda: second.append(outcome(predictions=True)))
        call.start()
        call.join(1)  # it waits for its turn; without one it is done by now
        write(*arguments)
        calls.append(call)

    def outcome(**options):
        try:
            return embed(str(model), str(images), out, splits=["test"], **options)
        except UserError as error:
            return str(error)

    monkeypatch.setattr(embedding, "_write_manifest", meet)
    first = outcome()
    calls[0].join()
    assert not isinstance(first, str)
    assert "was started with settings" in str(second[0])
    assert set(read(out, "test")[0]) == {"index", "image", "label", "embedding"}


def test_predictions_of_several_classes_an_image(model, images, tmp_path):
    """Each class by itself, as `predict` tells it; equal ones in the order of the classes."""
    several = HfViTForImageClassification.from_pretrained(model, problem_type="multi_label_classification")
    with torch.no_grad():
        several.classifier.weight[[2, 7]] = several.classifier.weight[0].clone()
    save_model(several, tmp_path / "several")
    embed(str(tmp_path / "several"), str(images), tmp_path / "out", splits=["test"], predictions=True, top=10)
    rows = read(tmp_path / "out", "test")
    _, logits = forward(tmp_path / "several", load_data(str(images)).split("test"))
    for row, expected in zip(rows, logits.double().sigmoid(), strict=True):
        found = dict(zip(row["labels"], row["probabilities"], strict=True))
        assert [found[f"LABEL_{k}"] for k in range(10)] == pytest.approx(expected.tolist(), abs=1e-5)
        assert [label for label in row["labels"] if label[-1] in "027"] == ["LABEL_0", "LABEL_2", "LABEL_7"]


def test_streamed_shards_become_files(model, images, tmp_path):
    (tmp_path / "data").mkdir()
    files = sorted(images.glob("*/*.png"), key=lambda path: path.name)
    for split, count in (("train", 3), ("test", 1), ("val", 1)):
        for shard in range(count):
            chosen = files[shard * 9 : shard * 9 + 9 - shard]
            write_parquet(tmp_path / "data" / f"{split}-{shard}.parquet", chosen, ("a", "b"))
    streamed = embed(str(model), str(tmp_path / "data"), tmp_path / "stream", streaming=True)
    assert streamed.files[:3] == [f"train-0000{i}-of-00003.parquet" for i in range(3)]
    assert [pq.read_metadata(tmp_path / "stream" / name).num_rows for name in streamed.files] == [9, 8, 7, 9, 9]
    embed(str(model), str(tmp_path / "data"), tmp_path / "table")
    stream, table = (read(tmp_path / name, "train") for name in ("stream", "table"))
    np.testing.assert_allclose([row["embedding"] for row in stream], [row["embedding"] for row in table], atol=1e-5)
    assert [row["label"] for row in stream] == [row["label"] for row in table]
    data = load_data(str(tmp_path / "data"), streaming=True)
    data.splits["train"] = data.splits["train"].take(4)
    embed(str(model), data, tmp_path / "few", splits=["train"])
    assert len(read(tmp_path / "few", "train")) == 4, "the stream that is there now"


def test_a_stream_of_other_columns_or_another_cut_does_not_go_on(model, images, tmp_path):
    write_parquet(tmp_path / "data.parquet", sorted(images.glob("*/*.png")), ("a", "b"))
    call = partial(embed, str(model), str(tmp_path / "data.parquet"), tmp_path / "out", streaming=True)
    call()
    for others in ({"seed": 1}, {"image_column": "image"}, {"label_column": "label"}):
        with pytest.raises(UserError, match=r"was started with settings=.*; give the same value"):
            call(**others)


def test_bad_input(model, images, tmp_path):
    embed(str(model), str(images), tmp_path / "out", splits=["test"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for data, output, given, said in (
        (images, "out", dict(splits=["test"], batch_size=3), "with settings={'batch_size': 32}, but now"),
        ("digits", "out", dict(splits=["test"]), "was started with data"),
        (images, "full", {}, "holds other files"),
        (images, "new", dict(splits=["dev"]), "no split 'dev'"),
        (images, "new", dict(num_processes=0), "at least 1"),
        (images, "new", dict(layers=2), "only work with --features"),
        (images, "new", dict(features="mean", layers=9), "--layers 9 does not fit a model with 2 layers; give 1 to 2"),
        (images, "new", dict(features="mean", predictions=True), "leave --predictions out"),
    ):
        with pytest.raises(UserError, match=said):
            embed(str(model), str(data), tmp_path / output, **given)
    save_model(HfViTModel.from_pretrained(model), tmp_path / "headless")
    with pytest.raises(UserError, match="is not a classifier"):
        embed(str(tmp_path / "headless"), str(images), tmp_path / "new", predictions=True)
    assert not (tmp_path / "new").exists()


BY_SIXTY = dict(rows_per_file=60, batch_size=8)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The digits, embedded without a break."""
    return embed(str(model), "digits", tmp_path_factory.mktemp("whole") / "out", **BY_SIXTY).folder


def go_on(model, whole, folder):
    """The same call after a kill; what was complete is left alone, the rest becomes what it would have been."""
    before = files_of(folder)
    assert 3 <= len(before) < len(files_of(whole))
    left_by(2**22 + 1, folder / "train-00000-of-00021.parquet").touch()  # no process has so high a number
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}
    done = embed(str(model), "digits", folder, **BY_SIXTY)
    assert done.done_before == len(before)
    assert files_of(folder) == files_of(whole)
    assert all((folder / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())
    assert not list(folder.glob(".*"))
    for split in ("train", "validation", "test"):
        rows = [row["index"] for row in read(folder, split)]
        assert rows == list(range(len(load_data("digits").split(split))))


def wait_for_files(folder, is_alive):
    while len(files_of(folder)) < 3:
        assert is_alive(), "it ended before it could be killed"
        time.sleep(0.005)


def test_a_killed_run_goes_on_without_duplicates_or_gaps(model, whole, tmp_path, warm):
    folder = tmp_path / "out"
    job = dict(model=str(model), data="digits", output=str(folder), **BY_SIXTY)
    process = warm.start("hf_vit.evaluation.embedding:embed", tmp_path / "process", **job)
    wait_for_files(folder, lambda: process.wait(0) is None)
    process.kill()
    go_on(model, whole, folder)


@pytest.mark.slow
def test_two_killed_processes_leave_nobody_behind(model, whole, tmp_path):
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "hf_vit", "embed", str(model), "--data", "digits", "--output", str(folder)]
    command += ["--rows-per-file", "60", "--batch-size", "8", "--num-processes", "2", "--no-optimize"]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        wait_for_files(folder, lambda: process.poll() is None)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    go_on(model, whole, folder)


def test_a_bad_image_is_named_and_a_damaged_file_too(model, images, tmp_path):
    shutil.copytree(images, tmp_path / "data")
    (tmp_path / "data" / "a" / "000.png").write_bytes(encoded(picture(0))[:40])
    with pytest.raises(UserError, match=r"000\.png"):
        embed(str(model), str(tmp_path / "data"), tmp_path / "out")
    done = embed(str(model), str(tmp_path / "data"), tmp_path / "out", skip_bad_images=True)
    assert (done.rows, done.skipped) == (49, ["a/000.png"])
    file = tmp_path / "out" / done.files[0]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged"):
        embed(str(model), str(tmp_path / "data"), tmp_path / "out", skip_bad_images=True)


@pytest.mark.parametrize(
    ("told", "optimize"), [("[]", False), ("null", True), ('{"settings": null}', False), ("{", True)]
)
def test_a_manifest_of_somebody_else(told, optimize, model, images, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text(told)
    with pytest.raises(UserError, match=r"manifest\.json is damaged or was not written by hf-vit embed .*; choose"):
        embed(str(model), str(images), tmp_path / "out", optimize=optimize)


def test_a_split_that_is_named_twice(model, images, tmp_path):
    done = embed(str(model), str(images), tmp_path / "out", splits=["test", "test"])
    assert done.rows == len(read(tmp_path / "out", "test"))
    manifest = (tmp_path / "out" / "manifest.json").read_text()
    assert embed(str(model), str(images), tmp_path / "out", splits=["test"]).done_before == len(done.files)
    assert (tmp_path / "out" / "manifest.json").read_text() == manifest, "seconds and hardware are of the first call"


def test_a_folder_that_an_earlier_version_began_goes_on(model, images, tmp_path):
    embed(str(model), str(images), tmp_path / "out", batch_size=np.int64(32))  # a number of NumPy is a number
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]
    assert set(settings) == {"predictions", "top", "batch_size", "rows_per_file", "streaming"}, "those of 0.2"


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_another_image_processor_does_not_go_on(library, model, images, tmp_path):
    if library == "timm":
        zoo.save("efficientnet", tmp_path / "model", ["ant", "bee"])
    else:
        shutil.copytree(model, tmp_path / "model")
    embed(str(tmp_path / "model"), str(images), tmp_path / "out")
    file = tmp_path / "model" / ("config.json" if library == "timm" else "preprocessor_config.json")
    content = json.loads(file.read_text())
    content.get("pretrained_cfg", {})["mean"] = content["image_mean"] = [0.1, 0.2, 0.3]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"was started with processor=.*; give the same value"):
        embed(str(tmp_path / "model"), str(images), tmp_path / "out")


def test_a_list_in_another_order_is_no_reason_to_go_on(model, images, tmp_path):
    shutil.copytree(images, tmp_path / "noise")
    rows = [f"{path.parent.name}/{path.name},{path.parent.name}\n" for path in sorted(images.glob("*/*.png"))]
    table = tmp_path / "noise" / "metadata.csv"
    table.write_text("".join(["file_name,label\n", *rows]))
    again = [str(model), str(table), tmp_path / "out"]
    embed(*again, rows_per_file=4)
    table.write_text("".join(["file_name,label\n", *reversed(rows)]))
    with pytest.raises(UserError, match=r"another order than when .* rows would be missing or repeated; restore"):
        embed(*again, rows_per_file=4)
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"order"', '"other"'))  # that of 0.2 has no order
    assert embed(*again, rows_per_file=4).done_before > 0


PLACE = "memory://bucket/embeddings"


GIVEN = dict(splits=["test"], rows_per_file=50, batch_size=25)


@pytest.fixture(scope="module")
def on_disk(model, tmp_path_factory):
    """What is written on a disk."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    embed(str(model), "digits", folder, **GIVEN)
    return files_of(folder)


def objects(store):
    names = store.ls("bucket/embeddings", detail=False)
    return {Path(name).name: store.cat_file(name) for name in names if name.endswith(".parquet")}


def test_what_the_network_broke_off_the_same_command_finishes(model, on_disk, store, monkeypatch):
    """Two objects arrive, then nothing does; what arrived is not computed again."""
    written, most, lost = [], 3, MemoryFileSystem.pipe_file  # the manifest among them

    def pipe_file(self, path, value, **given):
        if len(written) == most:
            raise ConnectionResetError("reset by https://bucket.example/part?Signature=SECRET")
        written.append(Path(path).name)
        return lost(self, path, value, **given)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with pytest.raises(UserError, match=rf"^{PLACE}/\S+ cannot be written \(reset by") as raised:
        embed(str(model), "digits", PLACE, **GIVEN)
    assert "SECRET" not in str(raised.value)
    assert objects(store) == {name: on_disk[name] for name in written[1:]}
    before, written[:], most = written[1:], [], None
    assert embed(str(model), "digits", PLACE, **GIVEN).done_before == 2
    assert objects(store) == on_disk
    assert written[-1] == "manifest.json"
    assert not set(before) & set(written)


def test_what_other_processes_wrote_is_there(model, on_disk, store, monkeypatch):
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
    assert embed(str(model), "digits", PLACE, **GIVEN).done_before == 0
    assert objects(store) == on_disk


def test_objects_are_the_files_of_a_disk(model, on_disk, store, tmp_path, command):
    done = embed(str(model), "digits", f"{PLACE}/", **GIVEN)
    assert objects(store) == on_disk
    assert (done.folder, sorted(done.files)) == (PLACE, sorted(on_disk))
    assert f'"rows": {done.rows}' in store.cat_file("bucket/embeddings/manifest.json").decode()
    with pytest.raises(UserError, match=f"{PLACE} was started with settings"):
        embed(str(model), "digits", PLACE, **GIVEN | dict(batch_size=3))
    MemoryFileSystem.store.clear()
    words = ("embed", model, "--data", "digits", "--split", "test", "--rows-per-file", 50, "--batch-size", 25)
    for place in (PLACE, f"file://{tmp_path}/a%20b"):
        code, out, _ = command(*words, "--no-optimize", "--output", place)
        assert (code, place != PLACE or f"manifest.json in {PLACE}" in out) == (0, True)
    assert objects(store) == on_disk
    assert files_of(tmp_path / "a b") == on_disk


def test_places_that_cannot_be_written_are_refused_before_any_work(store, monkeypatch):
    store.pipe_file("bucket/taken/notes.txt", b"mine")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for place, said in (
        ("s3://bucket/x", "pip install s3fs$"),
        ("ftp://host/x", "an unknown scheme; give a local path, file:///, or one of s3://, gs://"),
        ("nosuch://x", "an unknown scheme"),
        ("file://x", "an unknown scheme"),
        ("memory://", "is a whole bucket; give a folder in it, such as memory://NAME/embeddings$"),
        ("memory://bucket/taken", r"holds other files \(notes\.txt\)"),
        (Path("s3://bucket/x"), "is a URL, not a local path"),
    ):
        with pytest.raises(UserError, match=said):
            embed("no-such-model", "digits", place)
    with pytest.raises(UserError, match="is in the folder of the data, memory://bucket/taken; choose one outside"):
        embed("no-such-model", "memory://bucket/taken", "memory://bucket/taken/new")
    assert not Path("s3:").exists()


@pytest.mark.parametrize(
    "write",
    [
        lambda place: write_atomically(Path(place), "x"),
        lambda place: prepare_output(Path(place)),
        lambda place: main(["convert", "NO", "--output", place]),
        lambda place: main(["finetune", "NO", "--data", "digits", "--output", place]),
        lambda place: main(["compare", "NO", "--data", "digits", "--output", place]),
    ],
)
def test_other_outputs_refuse_an_address_before_any_work(write, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, SystemExit)) as stopped:
        write("gs://bucket/x")
    assert "is a URL, not a local path" in str(stopped.value) + capsys.readouterr().err
    assert not list(tmp_path.iterdir())
