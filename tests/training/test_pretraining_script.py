"""Rates of pre-training: chosen on validation images before any run, for each objective and number of labels."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("pretraining")
    monkeypatch.setattr(module, "DATA", ("digits",))
    return module


def test_runs_have_the_rates_that_are_best_on_validation(script, monkeypatch, tmp_path):
    """Where the best pair lies at the second of each; scratch has no rate of pre-training, a probe none of tuning."""
    asked = []

    def learn(job, rates):
        chosen = {name: rates[name] for name in ("rate", "tuning_rate") if name in rates}
        asked.append((job["kind"], *chosen.values()))
        best = (rates["rate"] in (0.0, script.RATES[1])) + (chosen.get("tuning_rate") == script.TUNING_RATES[1])
        return chosen | {"accuracy": best / 4}

    monkeypatch.setattr(script, "carry_out", learn)
    records = script.Records(tmp_path / "r.jsonl")
    script.work(records, 1.0)
    assert len(asked) == 2 * (2 * 4 + 5 * 12 + 7 * 5) + 2 * (1 + 5 * 3 + 6 * 5)
    runs = {tuple(rates) for kind, *rates in asked if kind == "run"}
    assert runs == {(0.0, script.TUNING_RATES[1]), (script.RATES[1], script.TUNING_RATES[1])}
    assert {tuple(rates) for kind, *rates in asked if kind == "probe"} == {(0.0,), (script.RATES[1],)}
    script.work(records, 1.0)
    assert len(records.path.read_text().splitlines()) == len(asked), "nothing is repeated"
    table = script.TABLES["pretraining"](records.path)
    cells = "50.0 ± 0.0 | +0.0 ± 0.0 | 0.001, 0.001"
    assert f"| digits | fine-tuned | contrast | {cells} | {cells} |" in table
    cells = "25.0 ± 0.0 | +0.0 ± 0.0 | 0.001"
    assert f"| digits | linear probe | contrast | {cells} | {cells} |" in table


@pytest.mark.slow  # pre-trains with every objective
def test_every_objective_learns_and_the_rates_matter(script, monkeypatch, tmp_path):
    """A step of each, judged on the split that its kind may see."""
    seen = []
    accuracy = script.accuracy
    monkeypatch.setattr(
        script, "accuracy", lambda model, data, split: seen.append(split) or accuracy(model, data, split)
    )
    for start in script.STARTS:
        job = {"kind": "run", "data": "digits", "start": start, "labels": 20, "seed": 0, "scale": 0.005}
        done = script.carry_out(job, {"rate": 1e-3, "tuning_rate": 1e-3})
        assert 0 <= done["accuracy"] <= 1
        assert json.loads(json.dumps(done)) == done
    script.carry_out(job | {"kind": "trial"}, {"rate": 1e-3, "tuning_rate": 1e-3})
    assert seen == ["test"] * len(script.STARTS) + ["validation"]
    data = script.load("digits")
    run = script.Run("digits", "masked, pixels", 0)
    first, second = (script.pretrain(run, data, 2, rate).state_dict() for rate in (1e-3, 4e-3))
    assert any((first[name] != second[name]).any() for name in first)


@pytest.mark.slow  # trains dozens of encoders
def test_an_encoder_is_trained_once_for_what_begins_with_it(script, monkeypatch, tmp_path):
    """And gives what one of its own would."""
    begun = []
    pretrain = script.pretrain
    monkeypatch.setattr(script, "pretrain", lambda run, *rest: begun.append(run) or pretrain(run, *rest))
    monkeypatch.setattr(script, "STARTS", {"next patch": script.STARTS["next patch"]})
    monkeypatch.setattr(script, "SEEDS", (0,))
    records = script.Records(tmp_path / "r.jsonl")
    script.work(records, 0.02)
    assert len(begun) <= len(script.RATES) + 4, "one a rate of the trials, and at most one of each run and probe"
    for line in map(json.loads, records.path.read_text().splitlines()[::5]):
        script.encoder.cache_clear()
        assert script.carry_out(line, line)["accuracy"] == line["accuracy"]


def test_the_long_start_from_scratch_has_the_steps_of_both(script, monkeypatch):
    asked = []
    fine_tune = script.fine_tune
    monkeypatch.setattr(script, "fine_tune", lambda *given: asked.append(given[-1]) or fine_tune(*given))
    for start in ("scratch", "scratch, long"):
        job = {"kind": "trial", "data": "digits", "start": start, "labels": 20, "seed": 0, "scale": 0.01}
        script.carry_out(job, {"rate": 0.0, "tuning_rate": 1e-3})
    assert asked == [2, 4]
