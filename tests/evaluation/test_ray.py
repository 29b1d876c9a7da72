"""Work by Ray gives the files and numbers of one process; kills: `python -m campaigns ray_faults`."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from comparison import zoo
from comparison.test_compare import FEW, contents
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from evaluation.test_embedding import files_of
from evaluation.tiny import NAMES, make_data, make_images, save_ours
from PIL import Image
from safetensors.torch import load_file

from hf_vit import HfViTConfig, HfViTForImageClassification, UserError
from hf_vit.comparison import compare
from hf_vit.data import load_data
from hf_vit.evaluation import embed, embedding, evaluate, predict
from hf_vit.evaluation.runners import open_runner
from hf_vit.training import finetune
from hf_vit_cli.main import main

SETTINGS = dict(rows_per_file=5, batch_size=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A classifier of 8 px, a folder of 16 and 8 images, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("ray")
    save_ours(folder / "model")
    for index, image in enumerate(make_images(24)):
        (folder / "images" / NAMES[index % 3 // 2]).mkdir(parents=True, exist_ok=True)
        image.save(folder / "images" / NAMES[index % 3 // 2] / f"{index:02d}.png")
    embed(str(folder / "model"), str(folder / "images"), folder / "whole", **SETTINGS)
    return folder


@pytest.fixture(scope="module")
def ray():
    """Ray on this machine, for all tests of this file."""
    module = pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.MonkeyPatch.context() as patched:
        # Its processes live on for the next test: importing takes each of them seconds.
        patched.setenv("RAY_num_workers_soft_limit", "8")
        with open_runner("ray", None, "cpu", 1):
            module.cloudpickle.register_pickle_by_value(sys.modules[__name__])
            yield module


@pytest.mark.parametrize(
    "splits",
    [
        ["test"],  # one file, read by one process: the only test by default that starts Ray
        pytest.param(["train", "validation", "test"], marks=pytest.mark.slow),  # with more processes that import
    ],
)
def test_files_are_those_of_one_process(ray, place, tmp_path, splits):
    given = dict(SETTINGS, splits=splits)
    done = embed(str(place / "model"), str(place / "images"), tmp_path / "out", **given, runner="ray")
    found, whole = files_of(tmp_path / "out"), files_of(place / "whole")
    assert found == {name: content for name, content in whole.items() if name.partition("-")[0] in splits}
    assert done.files == sorted(found, key=lambda name: (splits.index(name.partition("-")[0]), name))


@pytest.mark.slow  # processes that import this package start for each call: half a minute
def test_a_stream_without_its_bad_images_is_that_of_one_process(ray, place, tmp_path):
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    (tmp_path / "data").mkdir()
    for split, first in (("train", 0), ("test", 5), ("val", 10)):
        paths = sorted((place / "images" / NAMES[0]).iterdir())[first : first + 5]
        rows = {"image": [{"bytes": path.read_bytes(), "path": None} for path in paths], "label": [0] * 5}
        if split == "train":
            rows["image"][-1]["bytes"] = rows["image"][-1]["bytes"][:40]
        Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "data" / f"{split}-0.parquet")
    given = dict(streaming=True, batch_size=5)
    model, data = str(place / "model"), str(tmp_path / "data")
    with pytest.raises(UserError, match=r"^image 'train/train-0\.parquet, row 4' is not an[^\n]*$"):
        embed(model, data, tmp_path / "none", runner="ray", **given)
    local, by_ray = (
        embed(model, data, tmp_path / name, skip_bad_images=True, runner=name, **given) for name in ("local", "ray")
    )
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")
    assert by_ray.skipped == local.skipped != []


@pytest.mark.parametrize("runner", ["local", pytest.param("ray", marks=pytest.mark.slow)])  # as above
def test_images_that_change_after_they_were_read_are_refused(runner, request, place, tmp_path, monkeypatch):
    """As where a node has other files under the same names."""
    if runner == "ray":
        request.getfixturevalue("ray")
    shutil.copytree(place / "images", tmp_path / "images")
    victim, other = (f"images/{NAMES[0]}/{name}.png" for name in ("07", "00"))

    def after_a_change(function):
        def changed(*given, **options):
            shutil.copy(place / other, tmp_path / victim)
            return function(*given, **options)

        return changed

    monkeypatch.setattr(embedding, "_write_or_check_manifest", after_a_change(embedding._write_or_check_manifest))
    where = r"^on node [\d.]+: image" if runner == "ray" else "^image"
    said = where + rf" '[^']*{NAMES[0]}/07\.png' has changed since the command began"
    with pytest.raises(UserError, match=said) as told:
        embed(str(place / "model"), str(tmp_path / "images"), tmp_path / "out", runner=runner)
    assert str(told.value).endswith("; give data on storage that all nodes share") == (runner == "ray")
    if runner == "ray":
        from hf_vit.evaluation.ray_runner import RayRunner

        shutil.copy(place / victim, tmp_path / victim)
        monkeypatch.setattr(RayRunner, "run", after_a_change(RayRunner.run))
        seen = load_data(str(tmp_path / "images")).seen
        split = next(split for split, images in seen.items() if any(each.name.endswith("07.png") for each in images))
        with pytest.raises(UserError, match=said):
            evaluate(str(place / "model"), str(tmp_path / "images"), split=split, runner=runner, progress=False)


@pytest.mark.slow  # as above
def test_evaluations_and_predictions_are_those_of_one_process(ray, place, tmp_path):
    """Also of JPEG files that are decoded smaller, which gives other numbers."""
    model, data = str(place / "model"), str(place / "images")
    for more in (dict(protocol="top1"), dict(protocol="knn", neighbors=[1])):
        one, other = (
            evaluate(model, data, runner=runner, batch_size=3, progress=False, **more).result
            for runner in ("local", "ray")
        )
        assert other.values() == one.values()
        if more["protocol"] == "top1":
            pairs = list(zip(one.wrong, other.wrong, strict=True))
            assert pairs
            assert all(left == right and left.thumbnail == right.thumbnail for left, right in pairs)
    (tmp_path / "torn.png").write_bytes(b"\x89PNG")
    given = dict(images=[place / "images" / "ant", tmp_path / "torn.png", place / "images" / "bee"], batch_size=2)
    one, other = (predict(model, runner=runner, skip_bad_images=True, **given) for runner in ("local", "ray"))
    assert other == one
    assert [each.problem is None for each in other] == [True] * 16 + [False] + [True] * 8
    with pytest.raises(UserError, match=r"torn\.png is not an image"):
        predict(model, runner="ray", **given)
    random = np.random.RandomState(1)
    for index in range(12):
        path = tmp_path / "images" / NAMES[index % 2] / f"{index:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.randint(0, 256, (40, 64, 3), dtype=np.uint8)).save(path, quality=90)
    data, found = str(tmp_path / "images"), []
    for runner, draft in (("local", True), ("ray", True), ("local", False)):
        given = dict(runner=runner, draft=draft, batch_size=4)
        out = tmp_path / f"{runner}{draft}"
        embed(model, data, out, **given)
        answers = predict(model, f"{data}/*/*.jpg", **given)
        found.append((evaluate(model, data, progress=False, **given).result.loss, answers, files_of(out)))
    here, there, whole_size = found
    assert there == here
    assert all(one != other for one, other in zip(here, whole_size, strict=True))


@pytest.mark.slow  # as above
def test_what_fails_on_a_node_is_told_in_one_line(ray, place, tmp_path, monkeypatch):
    """Other versions, no model, another model, and a part whose file cannot be replaced by a folder."""
    from hf_vit.evaluation import ray_runner

    node, known = ray.util.get_node_ip_address(), ray_runner.get_compared_versions()
    work = dict(data=str(place / "images"), output=tmp_path / "out", runner="ray")

    def refused(said, model=place / "model"):
        with pytest.raises(UserError, match=said) as told:
            embed(str(model), **work)
        assert "\n" not in str(told.value)

    with monkeypatch.context() as patched:
        patched.setattr(ray_runner, "get_compared_versions", lambda: known | {"torch": "1.0"})
        refused(rf"^node {node} has torch {known['torch']}, but this run uses 1\.0; install 1\.0")
    opened, entered = embedding.load_model, embedding._write_or_check_manifest
    for change, said in (
        (lambda folder: (folder / "model.safetensors").unlink(), rf"^on node {node}: "),
        (lambda folder: shutil.rmtree(folder), rf"^on node {node}: there is no file or folder"),
        (_save_other, f"^node {node} has another model under the name model; put the model on storage that all"),
    ):
        # As on a node whose disk is another one: after this process opened it, and before the others do.
        shutil.copytree(place / "model", tmp_path / "model")

        def open_then_change(model, device, change=change):
            subject = opened(model, device)
            change(tmp_path / "model")
            return subject

        with monkeypatch.context() as patched:
            patched.setattr(embedding, "load_model", open_then_change)
            refused(said, tmp_path / "model")
        shutil.rmtree(tmp_path / "model", ignore_errors=True)

    def enter(folder, manifest):
        entered(folder, manifest)
        (folder.path / sorted(files_of(place / "whole"))[3] / "mine").mkdir(parents=True)

    monkeypatch.setattr(embedding, "_write_or_check_manifest", enter)
    work |= SETTINGS | {"output": tmp_path / "other"}
    refused("cannot be written")


def _save_other(folder):
    model = HfViTForImageClassification.from_pretrained(folder)
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)


@pytest.mark.slow  # a cluster of its own, in whose processes the import is barred
def test_a_node_without_the_package_is_named(place, tmp_path):
    pytest.importorskip("ray", reason="the extra ray is not installed")
    (tmp_path / "barred").mkdir()
    (tmp_path / "barred" / "sitecustomize.py").write_text('import sys; sys.modules["hf_vit"] = None\n')
    program = (
        "import os, sys, hf_vit_cli.main, hf_vit.evaluation.ray_runner\n"
        f"os.environ['PYTHONPATH'] = {str(tmp_path / 'barred')!r}\n"
        "hf_vit_cli.main.main(sys.argv[1:])"
    )
    words = ["embed", place / "model", "--data", place / "images", "--output", tmp_path / "out", "--runner", "ray"]
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert re.fullmatch(r"hf-vit: node [\d.]+ cannot import hf_vit; install the package there\n", done.stderr)


RATES = (1e-6, 3e-3)


@pytest.mark.slow  # trainings in processes of their own
def test_a_sweep_is_that_of_one_process(ray, place, tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = HfViTConfig(image_size=8, patch_size=4, **sizes)
    settings = dict(steps=4, evaluations=2, batch_size=8, warmup=0.0, device="cpu", keep_checkpoints=True)

    def sweep(output, **given):
        done = finetune(config, str(place / "images"), output, lr_sweep=RATES, **settings, **given)
        return [{**trial, "seconds": None} for trial in done.trials], done.test.top1

    told = []
    one, other = sweep(tmp_path / "one"), sweep(tmp_path / "other", runner="ray", report=told.append)
    assert other == one
    expected, found = (
        {str(path.relative_to(folder)): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
        for folder in (tmp_path / "one", tmp_path / "other")
    )
    assert len(expected) == 1 + len(RATES) * 2
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        assert all(torch.equal(found[name][key], value) for key, value in tensors.items()), name
    assert sum(line.startswith("learning rate ") for line in told) == len(RATES)
    # What a lost driver left goes on by the same command.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "one" / "checkpoints", again / "checkpoints")
    shutil.rmtree(again / "checkpoints" / "rate-0.003" / "checkpoints" / "checkpoint-4")
    assert sweep(again, runner="ray", resume=True)[0] == one[0]


@pytest.mark.slow  # as above
def test_a_comparison_is_that_of_one_process(ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = make_data()
    for kind in ("vit", "resnet"):
        zoo.save(kind, tmp_path / kind, NAMES)
    given = dict(settings=FEW, device="cpu", progress=False)
    for runner in ("local", "ray"):
        assert compare(["vit", "resnet"], data, runner, runner=runner, **given).measured == ["vit", "resnet"]
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    (tmp_path / "ray" / "models" / "resnet.json").unlink()
    told = []
    again = compare(["vit", "resnet"], data, "ray", runner="ray", report=told.append, **given)
    assert told == ["vit: already measured, using the stored result", "resnet: measured"]
    assert again.measured == ["resnet"]
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def _die_once(marked, twice):
    place = Path(marked)
    if twice or not place.exists():
        place.touch()
        os.kill(os.getpid(), 9)
    return place.name


def _refuse(name):
    raise UserError(f"{name} is bad")


def _benchmarked(job, needed):
    value = job["number"] + sum(record["value"] for record in needed)
    return {"value": value, "earlier_cpu_seconds": 100.0}


@pytest.mark.slow  # processes that are killed start again
def test_tasks_run_after_those_they_need_and_again_where_they_are_killed(ray, tmp_path, monkeypatch):
    from hf_vit.evaluation.ray_runner import run_independent

    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    records = importlib.import_module("records")
    ray.cloudpickle.register_pickle_by_value(records)
    first, second, last = jobs = [{"kind": "sum", "number": number} for number in (1, 2, 3)]
    needing = [(last, [first, second]), (first, []), (second, [first])]
    for runner in ("local", "ray"):
        kept = records.Records(tmp_path / f"{runner}.jsonl")
        kept.work(needing, _benchmarked, runner)
        assert [kept.find(job)["value"] for job in jobs] == [1, 3, 7]
        assert all(100 <= kept.find(job)["cpu_seconds"] < 110 for job in jobs), "with those of killed processes"
        lines = kept.path.read_text().splitlines()
        kept.work(needing, _benchmarked, runner)
        assert kept.path.read_text().splitlines() == lines, "nothing is repeated"
    with open_runner("ray", None, "cpu") as runner:
        places = [str(tmp_path / name) for name in "ab"]
        assert dict(run_independent(runner, _die_once, places, False)) == {0: "a", 1: "b"}
        with pytest.raises(UserError, match="ended 4 times during the same work"):
            list(run_independent(runner, _die_once, places[:1], True))
        with pytest.raises(UserError, match=rf"^on node {ray.util.get_node_ip_address()}: x is bad$"):
            list(run_independent(runner, _refuse, ["x"]))


@pytest.mark.slow  # Ray runs
def test_what_ray_cannot_do_is_refused(ray, place):
    model, data = str(place / "model"), str(place / "images")
    for given, said in (
        (dict(protocol="robustness"), "robustness does not work with --runner ray"),
        (dict(device="cuda"), "has no GPU"),
        (dict(device="cuda:1"), "Ray assigns the GPUs itself"),
        (dict(address="127.0.0.1:6379"), "already connected to Ray"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate(model, data, runner="ray", progress=False, **given)
    with pytest.raises(UserError, match="Ray cannot load a model object"):
        predict((None, None), [data], runner="ray")


def test_what_is_refused_before_ray_begins(place, tmp_path, monkeypatch, capsys):
    no_cluster = r"the address|cannot be reached|is not HOST:PORT|with --address HOST:PORT"
    refusals = [
        *((("ray", f"127.0.0.1:{port}"), no_cluster) for port in ("1", "x", "99999999")),
        (("ray", "nowhere"), no_cluster),
        (("ray", "ray://host:1"), no_cluster),
        (("spark", None), "--runner spark is unknown; choose one of local, ray"),
        (("local", "10.0.0.1:6379"), "only works with --runner ray"),
    ]
    with monkeypatch.context() as patched:
        patched.setattr("ray.is_initialized", lambda: False)  # other tests of this file keep a connection
        for given, said in refusals:
            with pytest.raises(UserError, match=said), open_runner(*given, None):
                raise AssertionError("it runs")
    config, out = HfViTConfig(image_size=8, patch_size=4), tmp_path / "out"
    with pytest.raises(UserError, match="--runner ray runs the trials of --lr-sweep"):
        finetune(config, str(place / "images"), out, runner="ray")
    with pytest.raises(UserError, match="only works with --runner ray"):
        finetune(config, str(place / "images"), out, address="127.0.0.1:1")
    with pytest.raises(UserError, match="Ray cannot load a model object"):
        compare([(None, None), "x"], make_data(), out, runner="ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "hf_vit.evaluation.ray_runner", raising=False)
    with pytest.raises(SystemExit, match="1"):
        main(["embed", str(place / "model"), "--data", "digits", "--output", str(out), "--runner", "ray"])
    assert capsys.readouterr().err == 'hf-vit: --runner ray needs Ray; install it with pip install "hf-vit[ray]"\n'
    assert not out.exists()
