"""Accuracy against the number of training images: ViT, Hybrid, Axial and BiT of about equal compute on fractals.

    python benchmarks/data_scale.py [--part 0/2]        # goes on from the records that are there
    python benchmarks/data_scale.py --figure            # table and figure of these, no runs

Figures 3 and 4 of arXiv 2010.11929 in small. Every model sees as many images, however many different ones there are.

1. Choices: at two numbers of images every rate and regularisation is tried with seed 0, for a third of the images; the
   best on VALIDATION images is taken at all numbers that are nearer to that one (as ratios). Ties go to the first.
2. Runs: every number of images with every seed; the held-out images of the same classes are looked at once, and then
   what the encoder is worth elsewhere: a linear regression on the features of 5 and 25 images a class of digits and
   photographs, and fine-tuning on them by the recipe `small-data`.

Each finished choice and run is a line of the output and is not repeated. Two processes share the work with `--part 0/2`
and `--part 1/2`, each with one thread; the second half of a model's runs waits for its choices, so start both again
until nothing is left.
"""

import argparse
import fcntl
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_vit import HfAxialViTConfig, HfBitConfig, HfHybridViTConfig, HfViTConfig
from hf_vit.cost.flops import forward_flops
from hf_vit.environment import hardware, versions
from hf_vit.evaluation import evaluate
from hf_vit.training import finetune
from hf_vit.training.recipes.registry import find_recipe

SIDE = 32
OUTPUT = Path(__file__).parent / "results" / "data_scale.jsonl"
_BLOCKS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "pooling": "gap"}
# 25 to 30 million FLOPs an image; fixed before any training.
MODELS: dict[str, Any] = {
    "ViT": HfViTConfig(image_size=SIDE, patch_size=4, num_hidden_layers=4, **_BLOCKS),
    "Hybrid": HfHybridViTConfig(image_size=SIDE, stage_depths=(1,), stem_width=32, num_hidden_layers=3, **_BLOCKS),
    "Axial": HfAxialViTConfig(image_size=SIDE, patch_size=4, num_hidden_layers=2, **_BLOCKS),
    "BiT": HfBitConfig(image_size=SIDE, stage_depths=(3, 3, 3), stem_width=32),
}
# A ResNet has no stochastic depth.
REGULARISATIONS: dict[str, dict[str, Any]] = {"none": {}, "mixup": {"mixup_alpha": 0.2}}
TRANSFERS = ("digits", "photos")


@dataclass(frozen=True)
class Plan:
    """What is to be run; see the options."""

    sizes: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)
    chosen_at: tuple[int, int] = (3_000, 100_000)
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    seeds: tuple[int, ...] = (0, 1, 2)
    models: tuple[str, ...] = tuple(MODELS)
    classes: int = 100
    seen: int = 300_000
    batch_size: int = 64
    transfer_epochs: float = 30

    def choices(self) -> Iterator[dict[str, Any]]:
        """What identifies each trial of a rate and a regularisation."""
        for model in self.models:
            for size in self.chosen_at:
                for rate in self.rates:
                    for regularisation in REGULARISATIONS:
                        same = {"seen": self.seen // 3, "classes": self.classes, "batch_size": self.batch_size}
                        yield {
                            "kind": "choice", "model": model, "images": size, "learning_rate": rate,
                            "regularisation": regularisation, "seed": 0, **same,
                        }  # fmt: skip

    def runs(self) -> Iterator[dict[str, Any]]:
        """What identifies each run, the smallest first."""
        for size in self.sizes:
            for seed in self.seeds:
                for model in self.models:
                    same = {"seen": self.seen, "classes": self.classes, "batch_size": self.batch_size}
                    yield {"kind": "run", "model": model, "images": size, "seed": seed, **same}


class Records:
    """Lines of a file, to which several processes add."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def has(self, identity: dict[str, Any]) -> bool:
        return any(all(record.get(key) == value for key, value in identity.items()) for record in self.all())

    def add(self, record: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(record) + "\n")


def data_name(classes: int, images: int) -> str:
    return f"fractals:classes={classes},images={max(1, images // classes)}"


def train(identity: dict[str, Any], rate: float, regularisation: str, folder: Path) -> Any:
    """A model from fresh weights, for as many steps as its images are to be seen."""
    # Beyond that a table would not fit beside the model; a stream makes them meanwhile.
    streaming = identity["images"] > 100_000
    return finetune(
        MODELS[identity["model"]],
        data_name(identity["classes"], identity["images"]),
        folder,
        recipe=find_recipe("small-data"),
        learning_rate=rate,
        steps=max(1, identity["seen"] // identity["batch_size"]),
        batch_size=identity["batch_size"],
        evaluations=4,
        seed=identity["seed"],
        streaming=streaming,
        device="cpu",
        precision="fp32",
        **REGULARISATIONS[regularisation],
    )


def chosen(records: Records, plan: Plan, model: str, images: int) -> dict[str, Any] | None:
    """The best trial at the nearer of the two numbers of images; None where some are not done yet."""
    near = min(plan.chosen_at, key=lambda size: abs(math.log(size / images)))
    wanted = [trial for trial in plan.choices() if (trial["model"], trial["images"]) == (model, near)]
    done = records.all()
    trials = [next((r for r in done if all(r.get(k) == v for k, v in each.items())), None) for each in wanted]
    known = [trial for trial in trials if trial is not None]
    return max(known, key=lambda trial: trial["validation_accuracy"]) if len(known) == len(wanted) else None


def transfers(folder: Path, plan: Plan, seed: int) -> dict[str, Any]:
    """Accuracies of the encoder on other data, held out: few-shot, and fine-tuned."""
    worth: dict[str, Any] = {}
    for name in TRANSFERS:
        shots = evaluate(folder, name, protocol="few-shot", shots=(5, 25), device="cpu", output=folder.parent / name)
        worth[f"{name} few-shot"] = {str(count): accuracy for count, accuracy in mean_of(shots.result).items()}
        with tempfile.TemporaryDirectory() as kept:
            tuned = finetune(
                str(folder), name, Path(kept) / "out", recipe="small-data", epochs=plan.transfer_epochs, seed=seed,
                image_size=SIDE, device="cpu", precision="fp32", evaluations=4,
            )  # fmt: skip
            worth[f"{name} fine-tuned"] = tuned.test.top1
    return worth


def mean_of(result: Any) -> dict[int, float]:
    """Shots -> mean accuracy of the draws."""
    return {shots: statistics.fmean(draws) for shots, draws in zip(result.shots, result.accuracy, strict=True)}


def work(plan: Plan, records: Records, part: tuple[int, int]) -> int:
    """Do what this process has to do; how many runs wait for choices."""
    index, count = part
    for identity in list(plan.choices())[index::count]:
        if not records.has(identity):
            carry_out(identity, identity["learning_rate"], identity["regularisation"], plan, records)
    waiting = 0
    for identity in list(plan.runs())[index::count]:
        if records.has(identity):
            continue
        best = chosen(records, plan, identity["model"], identity["images"])
        if best is None:
            waiting += 1
        else:
            carry_out(identity, best["learning_rate"], best["regularisation"], plan, records)
    return waiting


def carry_out(identity: dict[str, Any], rate: float, regularisation: str, plan: Plan, records: Records) -> None:
    """One training and its record."""
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as kept:
        result = train(identity, rate, regularisation, Path(kept) / "out")
        record = identity | {
            "learning_rate": rate,
            "regularisation": regularisation,
            "validation_accuracy": result.validation["accuracy"],
            "training_loss": next((entry["loss"] for entry in reversed(result.history) if "loss" in entry), None),
        }
        if identity["kind"] == "run":
            record["test_accuracy"] = result.test.top1
            record |= transfers(Path(kept) / "out", plan, identity["seed"])
    record |= {
        "forward_flops": forward_flops(MODELS[identity["model"]]),
        "cpu_seconds": round(time.process_time() - begun, 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": hardware("cpu"),
        "versions": versions(),
    }
    records.add(record)
    print(
        ", ".join(f"{key} {value}" for key, value in record.items() if key not in ("versions", "hardware")), flush=True
    )


def rows(records: Records, value: str = "test_accuracy") -> dict[str, dict[int, list[float]]]:
    """Model -> images -> the value of every seed."""
    table: dict[str, dict[int, list[float]]] = {}
    for record in records.all():
        if record["kind"] == "run":
            table.setdefault(record["model"], {}).setdefault(record["images"], []).append(record[value])
    return table


def ahead(table: dict[str, dict[int, list[float]]], first: str, second: str) -> dict[int, str]:
    """Who is ahead at each number of images, or that the seeds do not tell: two standard errors of the difference."""
    told: dict[int, str] = {}
    for images in sorted(set(table.get(first, {})) & set(table.get(second, {}))):
        a, b = table[first][images], table[second][images]
        if min(len(a), len(b)) < 2:
            told[images] = "one seed"
            continue
        gap = statistics.fmean(a) - statistics.fmean(b)
        error = 2 * math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
        told[images] = "not told apart" if abs(gap) <= error else f"{first if gap > 0 else second} by {abs(gap):.1%}"
    return told


def draw(records: Records, path: Path) -> None:
    """Accuracy against images, a line a model, with the range of its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for model, points in rows(records).items():
        sizes = sorted(points)
        means = [statistics.fmean(points[size]) for size in sizes]
        reach = [[mean - min(points[size]) for size, mean in zip(sizes, means, strict=True)],
                 [max(points[size]) - mean for size, mean in zip(sizes, means, strict=True)]]  # fmt: skip
        axes.errorbar(sizes, means, yerr=reach, marker="o", capsize=3, label=model)
    axes.set(xscale="log", xlabel="training images (fractals)", ylabel="accuracy on held-out images")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--part", default="0/1", help="I/N: this process' share")
    options.add_argument("--sizes", type=int, nargs="+", default=list(Plan.sizes))
    options.add_argument("--chosen-at", type=int, nargs=2, default=list(Plan.chosen_at))
    options.add_argument("--rates", type=float, nargs="+", default=list(Plan.rates))
    options.add_argument("--seeds", type=int, nargs="+", default=list(Plan.seeds))
    options.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options.add_argument("--classes", type=int, default=Plan.classes)
    options.add_argument("--seen", type=int, default=Plan.seen, help="images a run sees")
    options.add_argument("--batch-size", type=int, default=Plan.batch_size)
    options.add_argument("--transfer-epochs", type=float, default=Plan.transfer_epochs)
    options.add_argument("--figure", action="store_true")
    options.add_argument("--output", type=Path, default=OUTPUT)
    asked = vars(options.parse_args())
    records, figure, part = Records(asked.pop("output")), asked.pop("figure"), asked.pop("part")
    index, count = (int(number) for number in part.split("/"))
    torch.set_num_threads(1)
    plan = Plan(**{name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()})
    if not figure and (waiting := work(plan, records, (index, count))):
        print(f"{waiting} runs wait for choices that another process makes: start this again")
    table = rows(records)
    for model, points in table.items():
        shown = (f"{size:,}: {statistics.fmean(values):.1%} ({len(values)})" for size, values in sorted(points.items()))
        print(f"{model:8} {', '.join(shown)}")
    for other in table.keys() - {"ViT"}:
        print(f"ViT and {other}: {ahead(table, 'ViT', other)}")
    if figure:
        draw(records, records.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
