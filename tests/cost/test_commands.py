"""`hf-vit cost` and `hf-vit scaling-law`, as a user meets them."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.cost import cost_summary, forward_flops, measured_run, training_flops
from hf_vit.results.facts import DataFact, Record, append_record

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 4}


@pytest.fixture
def run(succeeds, monkeypatch: pytest.MonkeyPatch):
    """Run a command line in a wide terminal: what it printed."""
    monkeypatch.setenv("COLUMNS", "200")
    return succeeds


def trained(folder: Path, steps: int = 100, top1: float = 0.9, num_hidden_layers: int = 1, **values: Any) -> Path:
    """A saved model whose facts tell of a training of 10 s, at 8 images a step, and of an evaluation."""
    sizes = TINY | {"num_hidden_layers": num_hidden_layers}
    HfViTForImageClassification(HfViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(folder)
    fields: dict[str, Any] = {"command": "hf-vit finetune", "date": datetime(2031, 2, 3, tzinfo=UTC)}
    training = {"steps": steps, "recipe": {"batch_size": 8}, **values}
    append_record(folder, Record(kind="training", values=training, seconds=10, hardware={"name": "Some CPU"}, **fields))
    append_record(folder, Record(kind="evaluation", values={"top1": top1}, **fields))
    return folder


def test_flops_of_a_variant(run) -> None:
    told = json.loads(run("cost", "S/16", "--json"))
    assert told["image_size"] == [224, 224]
    assert told["forward_flops"] == 2 * sum(told["macs"].values())
    assert told["training_flops"] is None
    wide = json.loads(run("cost", "S/16", "--image-size", "224x320", "--json"))
    assert wide["image_size"] == [224, 320]
    assert wide["forward_flops"] > told["forward_flops"]


def test_time_and_money_of_a_training(run) -> None:
    training = ("--images", "303e6", "--epochs", 14)
    device = ("--devices", 8, "--device-flops", "312e12", "--utilization", 0.5, "--price", 2)
    told = json.loads(run("cost", "L/16", *training, *device, "--json"))
    assert told["images"] == 303e6 * 14
    assert told["training_flops"] == pytest.approx(1567e18, rel=0.01)
    seconds = told["training_flops"] / (8 * 312e12 * 0.5)
    assert told["estimate"]["seconds"] == pytest.approx(seconds)
    assert told["estimate"]["device_hours"] == pytest.approx(8 * seconds / 3600)
    assert told["estimate"]["dollars"] == pytest.approx(8 * seconds / 3600 * 2)
    out = run("cost", "L/16", *training, *device)
    for words in ("1,567 exaFLOPs", "14.5 days", f"${8 * seconds / 3600 * 2:,.2f}", "50%"):
        assert words in out


def test_a_trained_folder_shows_the_estimate_beside_the_measured_time(run, tmp_path: Path) -> None:
    folder = trained(tmp_path / "model")
    config = HfViTConfig(image_size=8, patch_size=4, **TINY)
    told = json.loads(run("cost", folder, "--device-flops", "1e9", "--utilization", 0.5, "--json"))
    assert told["images"] == 800
    assert told["estimate"]["dollars"] is None
    assert told["training_flops"] == told["measured"]["training_flops"] == 3 * forward_flops(config) * 800
    assert told["measured"] | {"training_flops": 0} == {
        "folder": "model", "images": 800, "training_flops": 0, "seconds": 10, "hardware": "Some CPU",
        "error": pytest.approx(0.1),
    }  # fmt: skip
    assert told["estimate"]["seconds"] == pytest.approx(told["training_flops"] / 0.5e9)
    out = run("cost", folder, "--device-flops", "here")
    for words in ("estimated time", "40% utilization", "measured time", "10.0 s", "Some CPU", "training on 800 images"):
        assert words in out


def test_contrastive_training_costs_two_views_and_a_second_encoder(tmp_path: Path) -> None:
    """Each of two views: forward and backward (3 forwards), and forward through the momentum encoder."""
    seen = measured_run(trained(tmp_path / "seen", images_seen=750))
    assert seen is not None
    assert seen.images == 750
    assert seen.error == pytest.approx(0.1)
    found = measured_run(trained(tmp_path / "model", objective={"objective": "contrastive"}, top1=94.0))
    assert found is not None
    config = HfViTConfig(image_size=8, patch_size=4, **TINY)
    assert found.training_flops == pytest.approx(2 * (3 + 1) * forward_flops(config) * 800)
    assert found.error is None, "94 is no share"
    assert training_flops(config, 800) == 3 * forward_flops(config) * 800


@pytest.mark.parametrize(
    ("recipe", "forwards"),
    [
        ({"tune": "all"}, 3),
        ({"tune": "head"}, 1),
        ({"tune": "lora"}, 2),
        ({"tune": "last-blocks", "tuned_blocks": 1}, 2),
        ({"tune": "all", "sam_rho": 0.05}, 6),
    ],
)
def test_frozen_weights_cost_no_gradients(recipe: dict[str, Any], forwards: int, tmp_path: Path) -> None:
    """In forward passes: 1 forward, 1 for the gradients of features, 1 for those of weights; half of two blocks."""
    folder = trained(tmp_path / "model", recipe={"batch_size": 8, **recipe}, num_hidden_layers=2)
    config = HfViTConfig(image_size=8, patch_size=4, **TINY | {"num_hidden_layers": 2})
    found = measured_run(folder)
    assert found is not None
    assert found.training_flops == pytest.approx(forwards * forward_flops(config) * 800)
    assert cost_summary(folder).training_flops == pytest.approx(found.training_flops)
    assert cost_summary(folder, images=800).training_flops == training_flops(config, 800)


def test_the_page_shows_the_memory_that_is_printed(run) -> None:
    page = (Path(__file__).parents[2] / "docs/cost.md").read_text()
    line, shown = page.split("$ hf-vit ", 1)[1].split("\n```", 1)[0].split("\n", 1)
    assert [row.rstrip() for row in run(*line.split()).splitlines()] == shown.splitlines()


def test_published_prices(run) -> None:
    for mode, shown in (
        ("blog", ("$40,718", "6.08", "111.8 days", "assumption 5")),
        ("corrected", ("$40,718 -> $5,090", "$8,214 -> $32,855", "111.8 -> 178.9", "178.9 -> 88.0", "correction 4")),
    ):
        out = run("cost", "ViT-L/16", "--mode", mode)
        assert all(words in out for words in shown)
    assert json.loads(run("cost", "H/14", "--mode", "blog", "--json"))["tpu_dollars"] == pytest.approx(149_700)
    assert "$18,713" in run("cost", "H/14", "--mode", "corrected")
    assert len(json.loads(run("cost", "L/16", "--mode", "corrected", "--json"))["corrections"]) == 4


def test_this_machine_beside_the_tpu_cores(run) -> None:
    """680 core-days of L/16 are 340 of a device of two cores' peak; of 1567 exaFLOPs, at 123 TFLOP/s, 147.4 days."""
    out = run("cost", "L/16", "--mode", "tpu", "--device-flops", 123e12)
    for words in ("680", "61.5 TFLOPs/s", "26.67 TFLOPs/s, 43%", "2 TPU cores", "340.0 days", "147.4 days"):
        assert words in out, words
    measured = json.loads(run("cost", "H/14", "--mode", "tpu", "--json"))
    assert measured["device_flops"] > 1e8
    assert measured["days"] == pytest.approx(2500 * 61.5e12 / measured["device_flops"])
    assert measured["least_days"] == pytest.approx(measured["days"] * measured["tpu_utilisation"])


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["Q/16"], ["Q/16"]), (["B/16", "--mode", "guess"], ["guess", "corrected"]),
        (["B/16", "--mode", "blog"], ["B/16", "--mode flops"]),
        (["L/16", "--mode", "blog", "--devices", 4, "--price", 2], ["--devices, --price", "--mode flops"]),
        (["B/16", "--mode", "tpu"], ["B/16", "L/16 and H/14"]),
        (["L/16", "--mode", "tpu", "--device-flops", 0], ["above 0"]),
        (["L/16", "--mode", "tpu", "--devices", 4], ["--devices", "has no effect with --mode tpu"]),
        (["B/16", "--image-size", 15], ["15x15", "patch"]), (["B/16", "--device-flops", "1e12"], ["--images"]),
        (["B/16", "--epochs", 3], ["--images"]), (["B/16", "--images", 0], ["above 0"]),
        (["B/16", "--images", 10, "--price", 3], ["--device-flops"]),
        (["B/16", "--images", 10, "--device-flops", "fast"], ["'fast'", "here"]),
    ],
)  # fmt: skip
def test_cost_refuses_in_one_line(fails, words, shown) -> None:
    fails(("cost", *words), *shown)


def test_a_folder_whose_cost_is_not_known_is_refused(run, fails, tmp_path: Path) -> None:
    folder, empty = trained(tmp_path / "model"), tmp_path / "empty"
    empty.mkdir()
    fails(("cost", empty), "no config.json")
    for content, word in (("{", "valid JSON"), ("[]", "not an object"), ('{"model_type": "vit"}', "'vit'"),
                          ('{"model_type": "hf_vit", "hidden_size": -3}', "hidden_size=-3")):  # fmt: skip
        (empty / "config.json").write_text(content)
        fails(("cost", empty), word)
    date = datetime(2031, 2, 3, tzinfo=UTC)
    soup = {"recipe": {"soup": "greedy"}}  # it has no steps
    append_record(folder, Record(kind="training", values=soup, command="x", date=date))
    assert "training" not in run("cost", folder)
    assert "training on 10 images" in run("cost", folder, "--images", 10)
    fails(("scaling-law", folder), "no training with steps")
    (folder / "facts.json").write_text("[")
    fails(("cost", folder), "facts.json is damaged")


def test_a_scaling_law_of_a_table(run, fails, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    rows = [f"{compute},{0.63 * (compute + 0.52) ** -0.32 + 0.12}" for compute in (0.1, 1, 10, 100, 1000, 10000)]
    table.write_text("\n".join(["compute,error", *rows]))
    assert "E = 0.63 (C + 0.52)^-0.32 + 0.12" in run("scaling-law", table, "--output", tmp_path / "law.png")
    assert (tmp_path / "law.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(run("scaling-law", table, "--json"))
    assert [told[name] for name in "abcd"] == pytest.approx([0.63, 0.32, 0.12, 0.52], rel=1e-6)
    assert told["intervals"]["b"] == pytest.approx([0.32, 0.32], rel=1e-4)
    expected = 0.63 * (1e5 + 0.52) ** -0.32 + 0.12
    out, shown = (run("scaling-law", table, "--predict", "1e5", *more) for more in (["--json"], []))
    (predicted,) = json.loads(out)["predictions"]
    assert [predicted["error"], *predicted["interval"]] == pytest.approx([expected] * 3, rel=1e-4)
    assert f"error at 100000 │ {expected:.4g}" in " ".join(shown.split())
    out = run("scaling-law", table, "--no-shift")
    assert " C^-" in out
    assert "│ d " not in out
    fails(("scaling-law", table, "--predict", "0"), "--predict 0 is not a compute above 0; give a positive number")


def test_a_scaling_law_of_trained_folders(run, tmp_path: Path) -> None:
    first = trained(tmp_path / "0")
    folders = [first]
    for place in range(1, 5):
        folder = tmp_path / str(place)
        shutil.copytree(first, folder)
        (folder / "facts.json").unlink()
        folders.append(trained(folder, steps=100 * 4**place, top1=1 - 0.1 * 2.0**-place - 0.05))
    (first / "facts.json").unlink()
    trained(first, steps=100, top1=1 - 0.1 - 0.05)
    others: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"top1": 0.85}, {"size": 50}),
        ({"top1": 0.2}, {"size": 10}),  # evaluate --num-images 10
        ({"top1": 0.3, "fed": {"draft": True}}, {"size": 50}),
        ({"protocol": "objectnet", "top1": 0.01}, {}),
        ({"top1": 1}, {"split": "train"}),
        ({"top1": 0.1}, {"fingerprint": "0"}),
    )
    for values, fields in others:
        data, date = DataFact(name="others", **fields), datetime(2031, 2, 4, tzinfo=UTC)
        append_record(first, Record(kind="evaluation", command="", date=date, values=values, data=data))
    told = json.loads(run("scaling-law", *folders[:4], folders[4] / "facts.json", "--json"))
    config = HfViTConfig(image_size=8, patch_size=4, **TINY)
    assert told["points"][4] == pytest.approx([training_flops(config, 8 * 100 * 4**4) / 1e18, 0.05 + 0.1 / 16])
    # Halved at every fourfold compute: an exponent of 1/2, and what is left is 0.05.
    assert told["b"] == pytest.approx(0.5, rel=1e-3)
    assert told["c"] == pytest.approx(0.05, rel=1e-3)


def test_scaling_law_refuses_in_one_line(fails, tmp_path: Path) -> None:
    folder, table = trained(tmp_path / "model"), tmp_path / "runs.csv"
    fails(("scaling-law", folder), "1 runs are too few")
    fails(("scaling-law", tmp_path / "none.csv"), "none.csv does not exist")
    table.write_text("compute,error\n1,0.5\n2,0.4\n3,0.3\n4,0.2\n0,0.9\n")
    fails(("scaling-law", table), "run 5", "compute of 0")
    fails(("scaling-law", table, "--output", tmp_path / "no" / "law.png"), "does not exist; create it first")
    before = table.read_bytes()
    fails(("scaling-law", table, "--output", table), "runs.csv cannot be used for the plot", ".png")
    assert table.read_bytes() == before
    table = table.rename(tmp_path / "runs.png")
    fails(("scaling-law", table, "--output", table), "runs.png cannot be used for the plot")
    (folder / "facts.json").unlink()
    fails(("scaling-law", folder), "no training")
    trained(folder, top1="unknown")
    fails(("scaling-law", folder), "no evaluation", "hf-vit evaluate")
