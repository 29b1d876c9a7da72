"""Commands that only infer optimize the model where that repays itself: the same answers, and it is said by what."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from comparison import zoo
from evaluation.tiny import NAMES, our_subject, save_ours
from PIL import Image

from hf_vit.evaluation import evaluate
from hf_vit.loading import optimizing
from hf_vit.loading.model import load_model
from hf_vit.loading.optimizing import engine_for
from hf_vit.results.facts import Facts
from hf_vit_cli.main import main

COUNT = 24  # images of the test split


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for split, count in (("train", 4), ("validation", 4), ("test", COUNT)):
        for number in range(count):
            place = root / split / NAMES[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return root


@pytest.fixture
def folder(tmp_path):
    save_ours(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(params=["torch", pytest.param("openvino", marks=pytest.mark.slow)])  # each command makes graphs
def engine(request, monkeypatch):
    """Graphs for few images and small models, too, where one is asked for."""
    if request.param == "openvino":
        monkeypatch.setattr(optimizing, "GRAPH_FROM", 0)
        monkeypatch.setattr(optimizing, "GRAPH_PARAMETERS", 0)
    return request.param


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert not stopped.value.code


def close(given, wanted):
    """Numbers within 1e-5, everything else equal."""
    if isinstance(wanted, dict):
        assert set(given) == set(wanted)
        for name, value in wanted.items():
            close(given[name], value)
    elif isinstance(wanted, list):
        assert len(given) == len(wanted)
        for one, other in zip(given, wanted, strict=True):
            close(one, other)
    else:
        assert given == (pytest.approx(wanted, abs=1e-5) if isinstance(wanted, float) else wanted)


@pytest.mark.parametrize("engine", ["torch", "openvino"], indirect=True)
def test_evaluate(folder, data, engine, capfd):
    """Beside the same as loaded; the record says what computed, of a model as loaded nothing."""
    run("evaluate", folder, "--data", data, "--no-optimize")
    assert "optimized" not in capfd.readouterr().err
    run("evaluate", folder, "--data", data)
    assert f"note: optimized for inference, computed by {engine} " in capfd.readouterr().err
    plain, fast = (record.values for record in Facts.load(folder).of_kind("evaluation"))
    assert "engine" not in plain
    assert fast.pop("engine").startswith(f"{engine} ")
    assert min(each.pop("images_per_second") for each in (fast, plain)) > 0
    close(fast, plain)


@pytest.mark.parametrize("engine", ["torch", "openvino"], indirect=True)
def test_predict(folder, data, engine, capfd):
    pattern = data / "test" / "*" / "*.png"
    run("predict", folder, pattern, "--json", "--no-optimize")
    plain = json.loads(capfd.readouterr().out)
    run("predict", folder, pattern, "--json")
    shown = capfd.readouterr()
    assert f"computed by {engine} " in shown.err
    assert len(plain) == COUNT
    close(json.loads(shown.out), plain)


def test_embed(folder, data, engine, tmp_path, capfd):
    """A folder that was begun goes on as it was begun."""
    for name, option in (("plain", ["--no-optimize"]), ("fast", []), ("fast", []), ("plain", [])):
        run("embed", folder, "--data", data, "--output", tmp_path / name, "--split", "test", *option)
    rows = {
        name: [row for path in sorted((tmp_path / name).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
        for name in ("plain", "fast")
    }
    close(rows["fast"], rows["plain"])
    settings = {name: json.loads((tmp_path / name / "manifest.json").read_text())["settings"] for name in rows}
    assert "engine" not in settings["plain"]
    assert settings["fast"]["engine"] == engine


def test_compare(folder, data, engine, tmp_path, capfd):
    """Beside another library's model, which stays as it is loaded, as do all while they are attacked."""
    zoo.save("resnet", tmp_path / "other", NAMES)
    for name, option in (("plain", ["--no-optimize"]), ("fast", [])):
        words = ["--data", data, "--output", tmp_path / name, "--speed-turns", 0, "--epsilon", 1, *option]
        run("compare", folder, tmp_path / "other", *words)
        assert (f"model: optimized for inference, computed by {engine} " in capfd.readouterr().out) == (name == "fast")
    assert (tmp_path / "plain/models/other.json").read_bytes() == (tmp_path / "fast/models/other.json").read_bytes()
    plain, fast = (json.loads((tmp_path / name / "models/model.json").read_text()) for name in ("plain", "fast"))
    assert plain.pop("notes") == []
    assert fast.pop("notes")[0].startswith(f"optimized for inference, computed by {engine} ")
    assert plain["fgsm"]["1"] is not None
    close(fast, plain)


def test_analyze(folder, engine, tmp_path, capfd):
    """Where it reads answers alone."""
    random = np.random.default_rng(0)
    for number in range(COUNT):
        shape, texture = NAMES[number % 2], NAMES[(number + 1) % 2]
        place = tmp_path / "conflicts" / shape / f"{shape}{number}-{texture}{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(place)
    words = ("analyze", folder, "--only", "shape_bias", "--cue-conflict", tmp_path / "conflicts")
    for name, option in (("plain", ["--no-optimize"]), ("fast", [])):
        run(*words, "--output", tmp_path / name, *option)
        assert (f"optimized for inference, computed by {engine} " in capfd.readouterr().out) == (name == "fast")
    plain, fast = (json.loads((tmp_path / name / "shape_bias.json").read_text()) for name in ("plain", "fast"))
    assert fast["notes"].pop().startswith(f"optimized for inference, computed by {engine} ")
    assert fast == plain
    assert sum(plain["arrays"]["decisions"]["values"][0]) == COUNT // 2
    plain, fast = (record.values for record in Facts.load(folder).of_kind("analysis"))
    assert fast.pop("engine").startswith(f"{engine} ")
    assert fast == plain


def test_a_fingerprint_stays_that_of_the_weights_and_other_models_stay_as_they_are(folder, data):
    optimized = evaluate(folder, str(data), optimize=True)
    assert optimized.engine == "torch"
    subject = load_model(folder)
    assert optimized.examination.subject.fingerprint == subject.fingerprint
    # What is made in Python is somebody's; and what reads inside of a model, or its gradients, needs it as loaded.
    assert evaluate((subject.model, subject.processor), str(data), optimize=True).engine is None
    assert evaluate(folder, str(data), protocol="robustness", optimize=True, steps=1).engine is None
    assert evaluate(folder, str(data), protocol="patch-drop", optimize=True).engine is None
    subject.model.train()


REPAID = [(1, True, None), (15, True, None), (16, True, "torch"), (9_999, True, "torch"), (10_000, True, "openvino")]
REPAID += [(None, True, "openvino"), (None, False, "torch"), (10**6, False, "torch")]


@pytest.mark.parametrize(("images", "is_large", "engine"), REPAID)
def test_what_so_many_images_repay(images, is_large, engine, monkeypatch):
    monkeypatch.setattr(optimizing, "GRAPH_PARAMETERS", 0 if is_large else 10**8)
    assert engine_for(our_subject("plain"), images) == engine
