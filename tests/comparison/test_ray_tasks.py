"""Runs that know nothing of each other, on Ray: files and numbers are those of one process."""

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import zoo
from comparison.test_compare import FEW, contents
from evaluation.tiny import NAMES, make_images
from safetensors.torch import load_file

from hf_vit import HfViTConfig
from hf_vit.comparison import compare
from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.evaluation.runners import running
from hf_vit.training import finetune


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray on this machine, two runs at once, for all tests of this file."""
    module = pytest.importorskip("ray", reason="the extra ray is not installed")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_num_workers_soft_limit", "8")
        with running("ray", None, "cpu"):
            module.cloudpickle.register_pickle_by_value(sys.modules[__name__])
            yield module
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number, image in enumerate(make_images(60)):
        (folder / "ab"[number % 2]).mkdir(exist_ok=True)
        image.save(folder / "ab"[number % 2] / f"{number}.png")
    return folder


RATES = (1e-6, 3e-3)


def sweep(images: Path, output: Path, **given: Any) -> Any:
    sizes: dict[str, Any] = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = HfViTConfig(image_size=8, patch_size=4, **sizes)
    settings: dict[str, Any] = dict(steps=4, evaluations=2, batch_size=8, warmup=0.0, device="cpu")
    return finetune(config, str(images), output, lr_sweep=RATES, keep_checkpoints=True, **settings, **given)


def weights_in(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {str(path.relative_to(folder)): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}


def without_time(done: Any) -> list[dict[str, Any]]:
    return [{**trial, "seconds": None} for trial in done.trials]


@pytest.mark.slow
def test_a_sweep_is_that_of_one_process(ray: Any, images: Path, tmp_path: Path) -> None:
    one, told = sweep(images, tmp_path / "one"), list[str]()
    other = sweep(images, tmp_path / "other", runner="ray", report=told.append)
    assert without_time(other) == without_time(one)
    assert other.test.top1 == one.test.top1
    expected, found = weights_in(tmp_path / "one"), weights_in(tmp_path / "other")
    assert len(expected) == 1 + len(RATES) * 2
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        assert all(torch.equal(found[name][key], value) for key, value in tensors.items()), name
    assert sum(line.startswith("learning rate ") for line in told) == len(RATES)
    # What a lost driver left goes on by the same command.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "one" / "checkpoints", again / "checkpoints")
    shutil.rmtree(again / "checkpoints" / "rate-0.003" / "checkpoints" / "checkpoint-4")
    assert without_time(sweep(images, again, runner="ray", resume=True)) == without_time(one)


def test_a_comparison_is_that_of_one_process(
    ray: Any, data: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("vit", "resnet"):
        zoo.save(kind, tmp_path / kind, NAMES)
    for runner in ("local", "ray"):
        done = compare(["vit", "resnet"], data, runner, settings=FEW, device="cpu", progress=False, runner=runner)
        assert done.measured == ["vit", "resnet"]
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    (tmp_path / "ray" / "models" / "resnet.json").unlink()
    told: list[str] = []
    again = compare(["vit", "resnet"], data, "ray", settings=FEW, device="cpu", runner="ray", report=told.append)
    assert told == ["vit: kept, it was finished before", "resnet: measured"]
    assert again.measured == ["resnet"]
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def _die_once(marked: str, twice: bool) -> str:
    place = Path(marked)
    if twice or not place.exists():
        place.touch()
        os.kill(os.getpid(), 9)
    return place.name


def _benchmarked(job: dict[str, Any], needed: list[dict[str, Any]]) -> dict[str, Any]:
    return {"value": job["number"] + sum(record["value"] for record in needed)}


def test_jobs_of_a_benchmark_are_done_after_those_that_they_need(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    records = importlib.import_module("records")
    ray.cloudpickle.register_pickle_by_value(records)
    first, second, last = jobs = [{"kind": "sum", "number": number} for number in (1, 2, 3)]
    needing = [(last, [first, second]), (first, []), (second, [first])]
    found: dict[str, list[Any]] = {}
    for runner in ("local", "ray"):
        kept = records.Records(tmp_path / f"{runner}.jsonl")
        kept.work(needing, _benchmarked, runner)
        found[runner] = [kept.find(job)["value"] for job in jobs]
        lines = kept.path.read_text().splitlines()
        kept.work(needing, _benchmarked, runner)
        assert kept.path.read_text().splitlines() == lines, "nothing is repeated"
    assert found == {"local": [1, 3, 7], "ray": [1, 3, 7]}


def _refuse(name: str) -> None:
    raise UserError(f"{name} is bad")


@pytest.mark.slow
def test_what_is_killed_is_run_again_and_what_is_refused_is_told_with_its_node(ray: Any, tmp_path: Path) -> None:
    from hf_vit.evaluation.ray_tasks import independent

    with running("ray", None, "cpu") as runner:
        assert runner is not None
        places = [str(tmp_path / name) for name in "ab"]
        done = dict(independent(runner, _die_once, places, False))
        assert done == {0: "a", 1: "b"}
        with pytest.raises(UserError, match="ended 4 times over the same work"):
            list(independent(runner, _die_once, places[:1], True))
        with pytest.raises(UserError, match=rf"^on node {ray.util.get_node_ip_address()}: x is bad$"):
            list(independent(runner, _refuse, ["x"]))


def test_what_ray_cannot_do_is_refused(images: Path, data: ImageData, tmp_path: Path) -> None:
    config = HfViTConfig(image_size=8, patch_size=4)
    with pytest.raises(UserError, match="Ray runs the rates of a sweep"):
        finetune(config, str(images), tmp_path / "out", runner="ray")
    with pytest.raises(UserError, match="add --runner ray"):
        finetune(config, str(images), tmp_path / "out", address="127.0.0.1:1")
    with pytest.raises(UserError, match="made in Python stays in one process"):
        compare([(None, None), "x"], data, tmp_path / "out", runner="ray")
    assert not (tmp_path / "out").exists()
