"""The script of accuracy against training images, from end to end with very few of them; and what it says of them."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data_scale.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("data_scale", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["data_scale"] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def run(script, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
    script.main()


def test_it_chooses_trains_transfers_and_does_nothing_twice(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "TRANSFERS", ("digits",))
    output = tmp_path / "records.jsonl"
    sizes = ("--sizes", 12, "--chosen-at", 12, 12, "--rates", "1e-3", "--seeds", 0, "--models", "ViT")
    small = (*sizes, "--classes", 2, "--seen", 12, "--batch-size", 4, "--transfer-epochs", "0.05", "--output", output)
    # The other process has chosen nothing yet: this one does its half of the choices, and its run waits.
    run(script, monkeypatch, *small, "--part", "0/2")
    assert "1 runs wait for choices" in capsys.readouterr().out
    assert [json.loads(line)["kind"] for line in output.read_text().splitlines()] == ["choice"]
    run(script, monkeypatch, *small)
    lines = output.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["kind"] for record in records] == ["choice", "choice", "run"]
    assert {record["regularisation"] for record in records[:2]} == {"none", "mixup"}
    best = max(records[:2], key=lambda record: record["validation_accuracy"])
    assert records[2]["regularisation"] == best["regularisation"]
    assert "test_accuracy" not in records[0], "a choice looks at no test image in what it keeps"
    assert 0 <= records[2]["test_accuracy"] <= 1
    assert set(records[2]["digits few-shot"]) == {"5", "25"}
    assert 0 <= records[2]["digits fine-tuned"] <= 1
    run(script, monkeypatch, *small, "--figure")
    run(script, monkeypatch, *small)
    assert output.read_text().splitlines() == lines
    assert output.with_suffix(".png").stat().st_size > 1000
    assert "ViT      12: " in capsys.readouterr().out


def test_models_are_of_about_equal_compute(script):
    costs = [script.forward_flops(config) for config in script.MODELS.values()]
    assert max(costs) < 1.25 * min(costs)


def test_who_is_ahead_is_told_with_its_uncertainty(script):
    table = {"ViT": {10: [0.5, 0.52], 30: [0.6, 0.7], 90: [0.9]}, "BiT": {10: [0.6, 0.62], 30: [0.61, 0.7], 90: [0.8]}}
    assert script.ahead(table, "ViT", "BiT") == {10: "BiT by 10.0%", 30: "not told apart", 90: "one seed"}


def test_choices_are_taken_from_the_nearer_number_of_images(script, tmp_path):
    plan = script.Plan(models=("ViT",), rates=(1e-3,), chosen_at=(1_000, 100_000))
    records = script.Records(tmp_path / "records.jsonl")
    assert script.chosen(records, plan, "ViT", 3_000) is None
    for number, trial in enumerate(plan.choices()):
        records.add(trial | {"validation_accuracy": number / 10})
    assert [script.chosen(records, plan, "ViT", images)["images"] for images in (10, 9_000, 11_000, 10**6)] == [
        1_000, 1_000, 100_000, 100_000,
    ]  # fmt: skip
    assert script.chosen(records, plan, "ViT", 10)["regularisation"] == "mixup"
