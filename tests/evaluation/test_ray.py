"""Work by Ray: what one process would have said, whatever is killed meanwhile; and what is refused."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image

from hf_vit import HfViTConfig, HfViTForImageClassification, UserError
from hf_vit.data import load_data, make_processor
from hf_vit.evaluation import embed, evaluate, predict
from hf_vit.evaluation.embedding import job
from hf_vit.evaluation.remote_model import RemoteModel
from hf_vit.evaluation.runners import running
from hf_vit_cli.main import main


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A classifier of two classes, 8 px, and a folder of 24 and 16 images."""
    folder = tmp_path_factory.mktemp("ray")
    torch.manual_seed(0)
    labels = {0: "a", 1: "b"}
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = HfViTConfig(
        image_size=8, patch_size=4, id2label=labels, label2id={name: k for k, name in labels.items()}, **sizes
    )
    classifier = HfViTForImageClassification(config)
    torch.nn.init.normal_(classifier.classifier.weight)
    classifier.save_pretrained(folder / "model")
    make_processor(config).save_pretrained(folder / "model")
    random = np.random.RandomState(0)
    for name, count in (("a", 24), ("b", 16)):
        (folder / "images" / name).mkdir(parents=True)
        for index in range(count):
            pixels = random.randint(0, 256, (9, 11, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{index:02d}.png")
    return folder


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:x", "127.0.0.1:99999999", "ray://host:1"])
def test_where_no_cluster_is(address):
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.raises(UserError, match=r"the address|there is no cluster of Ray at"), running("ray", address, None):
        raise AssertionError("it was there")


@pytest.fixture(scope="module")
def ray():
    """Ray on this machine, for all tests of this file."""
    module = pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.MonkeyPatch.context() as patched:
        # Its processes live on for the next test: importing takes each of them seconds.
        patched.setenv("RAY_num_workers_soft_limit", "8")
        with running("ray", None, "cpu", 1):
            yield module


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


SETTINGS = dict(rows_per_file=5, batch_size=2)


@pytest.fixture(scope="module")
def whole(place):
    """What one process makes of it."""
    embed(str(place / "model"), str(place / "images"), place / "whole", **SETTINGS)
    return files_of(place / "whole")


def test_files_are_those_of_one_process(ray, place, whole, tmp_path):
    """What is killed meanwhile: `python -m campaigns ray_faults`."""
    done = embed(str(place / "model"), str(place / "images"), tmp_path / "out", **SETTINGS, runner="ray")
    assert done.rows == 40
    assert files_of(tmp_path / "out") == whole


@pytest.mark.slow
def test_a_stream_and_what_it_leaves_out(ray, place, tmp_path):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    (tmp_path / "data").mkdir()
    for split, first in (("train", 0), ("test", 9), ("val", 18)):
        rows = {"image": [], "label": []}
        for path in sorted((place / "images" / "a").iterdir())[first : first + 6]:
            rows["image"].append({"bytes": path.read_bytes(), "path": None})
            rows["label"].append(0)
        if split == "train":
            rows["image"][-1]["bytes"] = rows["image"][-1]["bytes"][:40]
        Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "data" / f"{split}-0.parquet")
    given = dict(streaming=True, batch_size=5)
    model, data = str(place / "model"), str(tmp_path / "data")
    with pytest.raises(UserError, match=r"^image 'train/train-0\.parquet, row 5' is not an") as told:
        embed(model, data, tmp_path / "none", runner="ray", **given)
    assert "\n" not in str(told.value)
    local = embed(model, data, tmp_path / "local", skip_bad_images=True, **given)
    by_ray = embed(model, data, tmp_path / "ray", skip_bad_images=True, runner="ray", **given)
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")
    assert by_ray.skipped == local.skipped != []


@pytest.mark.parametrize("runner", ["local", "ray"])
def test_images_of_another_content_are_refused(runner, ray, place, tmp_path, monkeypatch):
    """As where a node has other files under the same names: here they change when they have been looked at."""
    shutil.copytree(place / "images", tmp_path / "images")

    def after_a_change(function):
        def changed(*given, **options):
            shutil.copy(place / "images" / "b" / "00.png", tmp_path / "images" / "a" / "07.png")
            return function(*given, **options)

        return changed

    monkeypatch.setattr(job, "run_parts", after_a_change(job.run_parts))
    where = r"^on node [\d.]+: image" if runner == "ray" else "^image"
    said = where + r" '[^']*a/07\.png' is not the one that was looked at when the command began"
    with pytest.raises(UserError, match=said) as told:
        embed(str(place / "model"), str(tmp_path / "images"), tmp_path / "out", runner=runner)
    assert str(told.value).endswith("; give data that all nodes share") == (runner == "ray")
    if runner == "ray":
        shutil.copy(place / "images" / "a" / "07.png", tmp_path / "images" / "a" / "07.png")
        monkeypatch.setattr(RemoteModel, "answers", after_a_change(RemoteModel.answers))
        seen = load_data(str(tmp_path / "images")).seen
        split = next(split for split, images in seen.items() if any(each.name.endswith("a/07.png") for each in images))
        with pytest.raises(UserError, match=said):
            evaluate(str(place / "model"), str(tmp_path / "images"), split=split, runner=runner, progress=False)


@pytest.mark.parametrize("protocol", ["top1", pytest.param("knn", marks=pytest.mark.slow)])
def test_evaluations_are_those_of_one_process(ray, place, protocol):
    given = dict(protocol=protocol, batch_size=3, progress=False)
    given |= dict(neighbors=[1]) if protocol == "knn" else {}
    one, other = (
        evaluate(str(place / "model"), str(place / "images"), runner=runner, **given).result
        for runner in ("local", "ray")
    )
    assert other.values() == one.values()
    if protocol == "top1":
        pairs = list(zip(one.wrong, other.wrong, strict=True))
        assert pairs
        assert all(left == right and left.thumbnail == right.thumbnail for left, right in pairs)


def test_predictions_are_those_of_one_process(ray, place, tmp_path):
    (tmp_path / "torn.png").write_bytes(b"\x89PNG")
    given = dict(images=[place / "images" / "b", tmp_path / "torn.png", place / "images" / "a"], batch_size=2)
    one, other = (
        predict(str(place / "model"), runner=runner, skip_bad_images=True, **given) for runner in ("local", "ray")
    )
    assert other == one
    assert [each.problem is None for each in other] == [True] * 16 + [False] + [True] * 24
    with pytest.raises(UserError, match=r"torn\.png is not an image"):
        predict(str(place / "model"), runner="ray", **given)


def test_jpeg_files_are_decoded_smaller_as_in_one_process(ray, place, tmp_path):
    random = np.random.RandomState(1)
    for index in range(12):
        path = tmp_path / "images" / "ab"[index % 2] / f"{index:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.randint(0, 256, (40, 64, 3), dtype=np.uint8)).save(path, quality=90)
    model, data = str(place / "model"), str(tmp_path / "images")
    found = []
    for runner, draft in (("local", True), ("ray", True), ("local", False)):
        given = dict(runner=runner, draft=draft, batch_size=4)
        out = tmp_path / f"{runner}{draft}"
        embed(model, data, out, **given)
        answers = predict(model, str(tmp_path / "images" / "*" / "*.jpg"), **given)
        found.append((evaluate(model, data, progress=False, **given).result.loss, answers, files_of(out)))
    here, there, whole_size = found
    assert there == here
    assert all(one != other for one, other in zip(here, whole_size, strict=True))


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_told_in_one_line(ray, place, whole, tmp_path, monkeypatch):
    """One part's: a folder is in its way, which no file can replace."""
    entered = job._enter

    def enter(folder, manifest):
        entered(folder, manifest)
        (folder.path / sorted(whole)[3] / "mine").mkdir(parents=True)

    monkeypatch.setattr(job, "_enter", enter)
    with pytest.raises(UserError, match="cannot be written") as told:
        embed(str(place / "model"), str(place / "images"), tmp_path / "out", **SETTINGS, runner="ray")
    assert "\n" not in str(told.value)


def test_what_ray_cannot_do_is_refused(ray, place):
    model, data = str(place / "model"), str(place / "images")
    for given, said in (
        (dict(protocol="robustness"), "robustness stays in one process"),
        (dict(device="cuda"), "has no GPU"),
        (dict(device="cuda:1"), "Ray's choice"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate(model, data, runner="ray", progress=False, **given)
    with pytest.raises(UserError, match="connected to Ray already"):
        evaluate(model, data, runner="ray", address="127.0.0.1:6379")
    with pytest.raises(UserError, match="made in Python"):
        predict((None, None), [data], runner="ray")


def test_what_is_refused_before_ray_begins(place, tmp_path, monkeypatch, capsys):
    for given, said in (
        (("spark", None), "there is no runner 'spark'; there are local, ray"),
        (("local", "10.0.0.1:6379"), "add --runner ray"),
    ):
        with pytest.raises(UserError, match=said), running(*given, None):
            raise AssertionError("it runs")
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("ray_nodes", "ray_runner"):
        monkeypatch.delitem(sys.modules, f"hf_vit.evaluation.{name}", raising=False)
    with pytest.raises(SystemExit, match="1"):
        main(["embed", str(place / "model"), "--data", "digits", "--output", str(tmp_path / "x"), "--runner", "ray"])
    assert capsys.readouterr().err.strip() == 'hf-vit: the runner ray is not installed: pip install "hf-vit[ray]"'
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_node_with_other_versions_or_another_model_is_named(ray, place, tmp_path, monkeypatch):
    from hf_vit.evaluation import ray_runner

    node, known = ray.util.get_node_ip_address(), ray_runner.compared_versions()
    work = dict(data=str(place / "images"), output=tmp_path / "out", runner="ray")
    with monkeypatch.context() as patched:
        patched.setattr(ray_runner, "compared_versions", lambda: known | {"torch": "1.0"})
        with pytest.raises(UserError, match=rf"^node {node} has torch {known['torch']}, this run 1\.0; install the"):
            embed(str(place / "model"), **work)
    opened = job.NamedModel.opened
    for change, said in (
        (lambda folder: (folder / "model.safetensors").unlink(), rf"^on node {node}: "),
        (lambda folder: shutil.rmtree(folder), rf"^on node {node}: there is no folder"),
        (lambda folder: _save_other(folder), f"^node {node} has another model of the name model; give one that all"),
    ):
        # As on a node whose disk is another one: after this process opened it, and before the others do.
        shutil.copytree(place / "model", tmp_path / "model")

        def open_then_change(self, device, change=change):
            subject = opened(self, device)
            change(tmp_path / "model")
            return subject

        with monkeypatch.context() as patched:
            patched.setattr(job.NamedModel, "opened", open_then_change)
            with pytest.raises(UserError, match=said) as told:
                embed(str(tmp_path / "model"), **work)
        assert "\n" not in str(told.value)
        shutil.rmtree(tmp_path / "model", ignore_errors=True)


def _save_other(folder):
    model = HfViTForImageClassification.from_pretrained(folder)
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)


@pytest.mark.slow
def test_a_node_without_the_package_is_named(place, tmp_path):
    """By a cluster of its own, in whose processes the import is barred."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    (tmp_path / "barred").mkdir()
    (tmp_path / "barred" / "sitecustomize.py").write_text('import sys; sys.modules["hf_vit"] = None\n')
    program = (
        "import os, sys, hf_vit_cli.main, hf_vit.evaluation.ray_runner\n"
        f"os.environ['PYTHONPATH'] = {str(tmp_path / 'barred')!r}\n"
        "hf_vit_cli.main.main(sys.argv[1:])"
    )
    words = ["embed", place / "model", "--data", place / "images", "--output", tmp_path / "out", "--runner", "ray"]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert re.fullmatch(r"hf-vit: node [\d.]+ cannot import hf_vit; install the same packages there\n", done.stderr)
