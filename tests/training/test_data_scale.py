"""The script of accuracy against training images, from end to end with very few of them; and what it says of them."""

import importlib
import json
import sys
import time
from functools import partial
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data_scale.py"
# Of which a record's accuracies are invented where a test needs many.
COUNTS = (10, 30, 90, 270, 810, 2430)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("data_scale")


@pytest.fixture
def records(script, tmp_path):
    return script.Records(tmp_path / "records.jsonl")


def run(script, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
    script.main()


@pytest.mark.slow  # trains five models and transfers them
def test_it_chooses_trains_transfers_and_does_nothing_twice(script, monkeypatch, records, capsys):
    monkeypatch.setattr(script, "TRANSFERS", ("digits",))
    monkeypatch.setattr(script, "REGULARISATIONS", {"mixup": {"mixup_alpha": 0.2}})
    sizes = ("--sizes", 12, "--chosen-at", 12, 12, "--rates", "1e-3", "--seeds", 0, "--models", "ViT")
    small = (*sizes, "--classes", 2, "--seen", 24, "--batch-size", 4, "--transfer-epochs", "0.05")
    small = (*small, "--output", records.path)
    run(script, monkeypatch, *small)
    lines = records.path.read_text().splitlines()
    done = [json.loads(line) for line in lines]
    assert [record["kind"] for record in done] == ["choice", "prediction", "run", "plateau"]
    assert [record["last_step"] for record in done if "last_step" in record][:2] == [1, 6]
    assert "test_accuracy" not in done[0], "a choice looks at no test image in what it keeps"
    assert done[1]["law"] is None
    assert "0 runs are too few" in done[1]["reason"]
    assert 0 <= done[2]["test_accuracy"] <= 1
    assert {"digits, 5 a class", "digits, 25 a class", "digits, fine-tuned"} <= done[2].keys()
    run(script, monkeypatch, *small)
    assert records.path.read_text().splitlines() == lines
    assert f"| 12 |\n|---|---|\n| fractals: ViT | {100 * done[2]['test_accuracy']:.1f} |\n" in capsys.readouterr().out


@pytest.fixture
def invented(script, monkeypatch):
    """Trainings that cost nothing: what was asked for is written down."""
    monkeypatch.setattr(script, "carry_out", lambda job, needed, epochs: {
        "validation_accuracy": job.get("learning_rate", 0), "regularisation": "none",
        "learning_rate": job.get("learning_rate"), "forward_flops": 1, "last_step": 1,
        "test_accuracy": 0.9 - 0.5 * (job["images"] + 20) ** -0.3 + 0.001 * job["seed"],
    })  # fmt: skip
    monkeypatch.setattr(sys.modules["records"], "PAUSE", 0.01)
    return script.Plan(sizes=COUNTS, chosen_at=(30, 810), models=("ViT", "BiT"), seeds=(0, 1, 2))


def test_the_largest_is_predicted_before_it_is_looked_at(script, records, invented):
    script.work(invented, records)
    done = [json.loads(line) for line in records.path.read_text().splitlines()]
    assert len(done) == len(list(invented.jobs())) == 2 * (2 * 6 + 6 * 3 + 1 + 2 * 3)
    for model in invented.models:
        of_model = [(one["kind"], one["images"]) for one in done if one["model"] == model]
        assert of_model.index(("prediction", 2430)) < of_model.index(("run", 2430))
        assert max(place for place, (kind, _) in enumerate(of_model) if kind == "choice") < of_model.index(("run", 10))
        prediction = records.find(invented.prediction(model))
        assert prediction["predicted_accuracy"] == pytest.approx(0.901 - 0.5 * 2450**-0.3, abs=0.003)
        assert set(prediction["intervals"]) == set("abcd")


def hold(path: str, job: dict) -> None:
    """Be at a job until the end of this process; says so by a file."""
    sys.path.insert(0, str(SCRIPT.parent))
    with importlib.import_module("data_scale").Records(Path(path)).claim(job) as is_ours:
        Path("claimed").write_text(str(is_ours))
        time.sleep(600)


def test_what_another_process_is_at_is_left_to_it(script, records, invented, warm, tmp_path):
    """Until it dies; a line that it had begun is no record, and nothing is lost after it."""
    job, _ = next(invented.jobs())
    other = warm.start("training.test_data_scale:hold", tmp_path / "other", path=str(records.path), job=job)
    told = tmp_path / "other" / "claimed"
    while not (told.exists() and told.read_text()):
        assert other.wait(0.05) is None, other.err
    assert told.read_text() == "True"
    do = partial(script.do, job, [], epochs=1)
    assert not records.attempt(job, do)
    assert records.find(job) is None
    other.kill()
    other.wait(10)
    records.path.write_text('{"kind": "choice", "mod')
    assert records.attempt(job, do)
    assert records.find(job)["learning_rate"] == invented.rates[0]
    assert not records.attempt(job, do), "nothing is repeated"


def test_models_are_of_about_equal_compute(script):
    costs = [script.forward_flops(config) for config in script.MODELS.values()]
    assert max(costs) < 1.1 * min(costs)


def test_the_best_on_validation_is_taken_from_the_nearer_number_of_images(script, records):
    plan = script.Plan(models=("ViT",), chosen_at=(1_000, 100_000))
    near = {images: plan.choices("ViT", images)[0]["images"] for images in (10, 9_000, 11_000, 10**6)}
    assert near == {10: 1_000, 9_000: 1_000, 11_000: 100_000, 10**6: 100_000}
    first, second = plan.rates[:2]
    for choice in plan.choices("ViT", 9_000) + plan.choices("ViT", 11_000):
        better = (choice["learning_rate"], choice["regularisation"]) == (second, "mixup")
        records.add(choice | {"validation_accuracy": 0.6 if better == (choice["images"] == 1_000) else 0.5})
    found = {images: [records.find(one) for one in plan.choices("ViT", images)] for images in (9_000, 11_000)}
    assert script.chosen(plan.job("run", "ViT", 9_000, 2), found[9_000]) == (second, "mixup")
    # Of equally good ones the first.
    assert script.chosen(plan.job("plateau", "ViT", 11_000, 0), found[11_000]) == (first, "none")


def test_who_is_ahead_is_told_with_its_uncertainty(script, records):
    """Differences of -10, -9 and -11 points: ± t(2) s / sqrt(3), by hand 4.303 * 1 / 1.732; then 10, -1 and 5."""
    accuracies = {
        "ViT": {10: (0.50, 0.52, 0.51), 1000: (0.60, 0.70, 0.80)},
        "BiT": {10: (0.60, 0.61, 0.62), 1000: (0.50, 0.71, 0.75)},
    }
    for model, sizes in accuracies.items():
        for images, seeds in sizes.items():
            for seed, accuracy in enumerate(seeds):
                run = {"kind": "run", "model": model, "images": images, "seed": seed, "cpu_seconds": 1}
                records.add(run | {"test_accuracy": accuracy, "date": "2026-11-28"})
    table = script.TABLES["data_scale"](records.path)
    assert "| ViT - BiT, points (2 of 3 seeds cross) | -10.0 ± 2.5 | +4.7 ± 13.7 |" in table
