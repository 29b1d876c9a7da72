"""The script of a scaling law, from end to end with very few images: what is chosen, fitted, predicted, and when."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from hf_vit.training import pretrain

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("scaling_law")
    monkeypatch.setattr(module, "CLASSES", 2)
    monkeypatch.setattr(module, "BATCH_SIZE", 8)
    return module


@pytest.mark.slow  # trains fourteen models
def test_it_chooses_fits_predicts_and_does_nothing_twice(script, monkeypatch, tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    sizes = ("--sizes", 16, 32, 48, 64, "--largest", 80, "--chosen-at", 16, "--rates", "1e-4", "1e-2")
    small = [*map(str, (*sizes, "--seeds", 0, 1, "--output", path))]
    for extra in ([], ["--figure"], []):
        monkeypatch.setattr(sys, "argv", ["scaling_law.py", *small, *extra])
        script.main()
    done = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["kind"] for record in done] == ["choice"] * 4 + ["run"] * 8 + ["prediction"] + ["run"] * 2
    choices, runs, prediction = done[:4], [record for record in done if record["kind"] == "run"], done[12]
    losses = {rate: sum(choice["loss"] for choice in choices if choice["rate"] == rate) for rate in (1e-4, 1e-2)}
    assert {run["rate"] for run in runs} == {min(losses, key=losses.__getitem__)}
    assert [run["images"] for run in runs[8:]] == [80, 80], "the largest after the prediction"
    law = script.law_of(runs[:8], shift=True)
    assert prediction["loss"] == pytest.approx(float(law.error(runs[8]["teraflops"])))
    assert runs[8]["teraflops"] == pytest.approx(5 * runs[0]["teraflops"])
    printed = capsys.readouterr().out
    assert f"| {prediction['loss']:.3f} |\n" in printed
    assert path.with_suffix(".png").stat().st_size > 1000

    monkeypatch.setattr(sys, "argv", ["scaling_law.py", *small, "--no-shift"])
    script.main()
    (other,) = [json.loads(line) for line in path.read_text().splitlines()[15:]]
    assert (other["shift"], other["sizes"], list(other["intervals"])) == (False, [16, 32, 48, 64], ["a", "b", "c"])
    assert other["loss"] == pytest.approx(float(script.law_of(runs[:8], shift=False).error(runs[8]["teraflops"])))


def test_its_loss_is_what_the_training_measures(script, tmp_path):
    data = script.fractals(16)
    result = pretrain(
        script.MODEL, data, tmp_path / "out", objective="next-patch", steps=2, batch_size=8, image_size=script.SIDE,
        evaluations=1, device="cpu", precision="fp32",
    )  # fmt: skip
    assert script.mean_loss(result.folder, data, "validation") == pytest.approx(result.validation_loss, abs=1e-5)
    assert script.mean_loss(result.folder, data, "test") != result.validation_loss
    assert script.mean_loss(result.folder, script.fractals(2), "test") == script.mean_loss(result.folder, data, "test")
