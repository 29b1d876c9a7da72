"""Accuracy against the number of training images: ViT, Hybrid, Axial and BiT of about equal compute on fractals.

    python benchmarks/data_scale.py --estimate          # CPU hours of what is left, by a minute of measuring; no runs
    python benchmarks/data_scale.py                     # goes on from the records that are there
    python benchmarks/data_scale.py --figure            # tables and figure of these, no runs

Figures 3, 4 and 5 of arXiv 2010.11929 in small. Every model sees as many images, however many different ones there are.
They are turned, shrunk and moved (a jitter of 50): without that, BiT reached 99.9% and ViT 91.7% of the validation
images in the choices at 3,000 images already, which are the first of the records.

1. Choices: at two numbers of images every rate and regularisation is tried with seed 0, for a sixth of the images; the
   best on VALIDATION images is taken at all numbers that are nearer to that one (as ratios). Ties go to the first. (The
   rates were 3e-4, 1e-3 and 3e-3 at first; as the highest was the best, higher ones came in, three times. The trials of
   rates that went out are still among the records.)
2. Runs: every number of images with every seed; the held-out images of the same classes are looked at once, and then
   what the encoder is worth elsewhere: a linear regression on the features of 5 and 25 images a class of digits and
   photographs, and fine-tuning on them by the recipe `small-data`, at that of its rates that is best on validation.
3. Predictions: before the first run with the most images, a scaling law (arXiv 2106.04560) is fitted to the errors of
   the others, and what it says of that one is recorded.
4. Plateaus: at the two numbers of the choices a second reading, at a constant rate until validation accuracy and loss
   have not got better three times out of ten that fit into the images of a run; the best of the ten is kept.

Each finished job is a line of the output and is not repeated. Start it in as many processes of one thread as there are
cores, whenever you like: each takes the next job that no other on this machine is at, waits where all that is left
waits for others, and lets go of it when it is killed. Or once with --runner ray, for all cores of Ray's machines.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from records import Job, Records, runner_options

from hf_vit import HfAxialViTConfig, HfBitConfig, HfHybridViTConfig, HfViTConfig, UserError
from hf_vit.cost.flops import forward_flops
from hf_vit.cost.scaling_law import fit_scaling_law
from hf_vit.evaluation import evaluate
from hf_vit.results.figures import new_figure, save_figure
from hf_vit.training import finetune
from hf_vit.training.recipes.registry import find_recipe

SIDE = 32
OUTPUT = Path(__file__).parent / "results" / "data_scale.jsonl"
_BLOCKS: dict[str, Any] = {"num_attention_heads": 4, "pooling": "gap"}
_VIT: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, **_BLOCKS}
# 8 to 10 million FLOPs an image, 4x4 tokens; fixed before any training.
MODELS: dict[str, Any] = {
    "ViT": HfViTConfig(image_size=SIDE, patch_size=8, num_hidden_layers=5, **_VIT),
    "Hybrid": HfHybridViTConfig(
        image_size=SIDE, stage_depths=(1,), stem_width=32, stem_patch_size=2, num_hidden_layers=2, **_VIT
    ),
    "Axial": HfAxialViTConfig(
        image_size=SIDE, patch_size=8, num_hidden_layers=2, hidden_size=72, intermediate_size=288, **_BLOCKS
    ),
    "BiT": HfBitConfig(image_size=SIDE, stage_depths=(1, 1), stem_width=32),
}
# A ResNet has no stochastic depth.
REGULARISATIONS: dict[str, dict[str, Any]] = {"none": {}, "mixup": {"mixup_alpha": 0.2}}
TRANSFERS = ("digits", "photos")
SHOTS = (5, 25)
PLATEAU = {"schedule": "constant", "evaluations": 10, "patience": 3}


@dataclass(frozen=True)
class Plan:
    """What is to be done; see the options."""

    sizes: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)
    chosen_at: tuple[int, int] = (3_000, 100_000)
    rates: tuple[float, ...] = (1e-2, 3e-2, 1e-1)
    seeds: tuple[int, ...] = (0, 1, 2)
    models: tuple[str, ...] = tuple(MODELS)
    classes: int = 100
    jitter: int = 50
    seen: int = 300_000
    batch_size: int = 128
    transfer_epochs: float = 20

    def job(self, kind: str, model: str, images: int, seed: int, **more: Any) -> Job:
        seen = self.seen // 6 if kind == "choice" else self.seen
        same = {"seen": seen, "classes": self.classes, "jitter": self.jitter, "batch_size": self.batch_size}
        return {"kind": kind, "model": model, "images": images, "seed": seed, **more, **same}

    def choices(self, model: str, images: int) -> list[Job]:
        """The trials that choose for this number of images, at the nearer of the two."""
        near = min(self.chosen_at, key=lambda size: abs(math.log(size / images)))
        return [
            self.job("choice", model, near, 0, learning_rate=rate, regularisation=regularisation)
            for rate in self.rates
            for regularisation in REGULARISATIONS
        ]

    def runs(self, model: str) -> list[Job]:
        """All of a model, the smallest first."""
        return [self.job("run", model, size, seed) for size in sorted(self.sizes) for seed in self.seeds]

    def prediction(self, model: str) -> Job:
        return self.job("prediction", model, max(self.sizes), 0)

    def jobs(self) -> Iterator[tuple[Job, list[Job]]]:
        """Each with those that have to be done before it, in the order in which they are worth most."""
        for size in dict.fromkeys(self.chosen_at):
            for model in self.models:
                yield from ((choice, []) for choice in self.choices(model, size))
        for seed in self.seeds:
            for size in sorted(self.sizes):
                for model in self.models:
                    last = [self.prediction(model)] if size == max(self.sizes) else []
                    yield self.job("run", model, size, seed), self.choices(model, size) + last
        for model in self.models:
            yield self.prediction(model), [run for run in self.runs(model) if run["images"] < max(self.sizes)]
        for seed in self.seeds:
            for size in dict.fromkeys(self.chosen_at):
                for model in self.models:
                    yield self.job("plateau", model, size, seed), self.choices(model, size)


def work(plan: Plan, records: Records, runner: str = "local", address: str | None = None) -> None:
    """Do what is left and nobody else does, until nothing is left."""
    records.work(list(plan.jobs()), partial(do, epochs=plan.transfer_epochs), runner, address)


def do(job: Job, needed: list[dict[str, Any]], epochs: float) -> dict[str, Any]:
    return predict(job, needed) if job["kind"] == "prediction" else carry_out(job, needed, epochs)


def carry_out(job: Job, needed: list[dict[str, Any]], epochs: float) -> dict[str, Any]:
    """One training, and of all but choices what comes after it; `epochs` are those of a transfer."""
    rate, regularisation = chosen(job, needed)
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept) / "out"
        result = train(job, rate, regularisation, folder)
        done = {
            "learning_rate": rate,
            "regularisation": regularisation,
            "validation_accuracy": result.validation["accuracy"],
            "training_loss": next((entry["loss"] for entry in reversed(result.history) if "loss" in entry), None),
            "forward_flops": forward_flops(MODELS[job["model"]]),
            "last_step": max(entry["step"] for entry in result.history),
        }
        if job["kind"] != "choice":
            done["test_accuracy"] = result.test.top1
        if job["kind"] == "run":
            done |= transfers(folder, epochs, job["seed"])
    return done


def chosen(job: Job, needed: list[dict[str, Any]]) -> tuple[float, str]:
    """Learning rate and regularisation: a choice's own, else those of the best on validation images."""
    trials = [record for record in needed if record["kind"] == "choice"]
    best = max(trials, key=lambda trial: trial["validation_accuracy"], default=job)
    return best["learning_rate"], best["regularisation"]


def train(job: Job, rate: float, regularisation: str, folder: Path) -> Any:
    """A model from fresh weights, for as many steps as its images are to be seen, or until its plateau."""
    settings = {"evaluations": 4} | REGULARISATIONS[regularisation] | (PLATEAU if job["kind"] == "plateau" else {})
    return finetune(
        MODELS[job["model"]],
        f"fractals:classes={job['classes']},images={max(1, job['images'] // job['classes'])},jitter={job['jitter']}",
        folder,
        recipe=find_recipe("small-data"),
        learning_rate=rate,
        steps=max(1, job["seen"] // job["batch_size"]),
        batch_size=job["batch_size"],
        seed=job["seed"],
        # Beyond that a table would not fit beside the model; a stream makes them meanwhile.
        streaming=job["images"] > 100_000,
        device="cpu",
        precision="fp32",
        **settings,
    )


def transfers(folder: Path, epochs: float, seed: int) -> dict[str, Any]:
    """Accuracies of the encoder on other data, held out: few-shot, and fine-tuned."""
    worth: dict[str, Any] = {}
    for name in TRANSFERS:
        shots = evaluate(folder, name, protocol="few-shot", shots=SHOTS, device="cpu", output=folder.parent / name)
        for count, draws in zip(shots.result.shots, shots.result.accuracy, strict=True):
            worth[f"{name}, {count} a class"] = statistics.fmean(draws)
        with tempfile.TemporaryDirectory() as kept:
            tuned = finetune(
                str(folder), name, Path(kept) / "out", recipe="small-data", lr_sweep=True, epochs=epochs, seed=seed,
                image_size=SIDE, device="cpu", precision="fp32", evaluations=4,
            )  # fmt: skip
        worth[f"{name}, fine-tuned"] = tuned.test.top1
    return worth


def predict(job: Job, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The error with the most images, by the law of the errors with fewer."""
    points = [(run["images"], 1 - run["test_accuracy"]) for run in runs]
    try:
        law = fit_scaling_law(points)
    except UserError as error:
        return {"law": None, "reason": str(error)}
    return {"law": str(law), "intervals": law.intervals, "predicted_accuracy": 1 - float(law.error(job["images"]))}


def estimate(plan: Plan, records: Records) -> dict[str, float]:
    """CPU hours that is left of each kind, of runs and plateaus for one seed; by short trainings of each model."""
    hours: dict[str, float] = {}
    for model in plan.models:
        step, run, transfer = measured(model, plan)
        for job, _ in plan.jobs():
            if job["model"] != model or job["kind"] == "prediction" or records.find(job):
                continue
            seconds = run + job["seen"] / plan.batch_size * step + job["images"] * image_seconds()
            if job["kind"] == "run":
                # Digits and photographs, each at two rates, in batches of 64.
                seconds += transfer + 2 * plan.transfer_epochs * (1257 + 800) / plan.batch_size * step
            share = 1 if job["kind"] == "choice" else len(plan.seeds)
            hours[job["kind"]] = hours.get(job["kind"], 0) + seconds / 3600 / share
    return hours


def measured(model: str, plan: Plan) -> tuple[float, float, float]:
    """CPU seconds of a step, of a training without its steps, and of what follows it without its steps."""
    with tempfile.TemporaryDirectory() as kept:

        def trained(steps: int) -> float:
            job = plan.job("run", model, 1_000, 0) | {"seen": steps * plan.batch_size}
            return cpu_seconds(lambda: train(job, 1e-3, "mixup", Path(kept) / str(steps) / "out"))

        few, more = trained(4), trained(24)
        step = max(0.0, more - few) / 20
        return step, few - 4 * step, cpu_seconds(lambda: transfers(Path(kept) / "24" / "out", 0.01, 0))


def cpu_seconds(action: Callable[[], object]) -> float:
    begun = time.process_time()
    action()
    return time.process_time() - begun


def image_seconds() -> float:
    """CPU seconds that a fractal takes to be made, by benchmarks/results/fractals.json."""
    rows = json.loads((OUTPUT.parent / "fractals.json").read_text())["rows"]
    return 1 / next(row["images_per_second"] for row in rows if row.get("side_px") == SIDE)


Table = dict[str, dict[int, dict[int, float]]]  # model -> images -> seed -> value


def rows(plan: Plan, records: Records, value: str = "test_accuracy", kind: str = "run") -> Table:
    table: Table = {}
    for job, _ in plan.jobs():
        if job["kind"] == kind and (record := records.find(job)):
            table.setdefault(job["model"], {}).setdefault(job["images"], {})[job["seed"]] = record[value]
    return table


def ahead(table: Table, first: str, second: str) -> dict[int, str]:
    """Who is ahead at each number of images by the 95% interval of the seeds' differences, or that it holds 0."""
    from scipy.stats import t

    told: dict[int, str] = {}
    for images in sorted(set(table.get(first, {})) & set(table.get(second, {}))):
        a, b = table[first][images], table[second][images]
        gaps = [a[seed] - b[seed] for seed in a.keys() & b.keys()]
        if len(gaps) < 2:
            told[images] = "one seed"
            continue
        gap = statistics.fmean(gaps)
        margin = float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))
        told[images] = f"{first if gap > 0 else second} by {abs(gap):.1%}" if abs(gap) > margin else "not told apart"
        told[images] += f" ± {margin:.1%}"
    return told


def crossings(table: Table, first: str, second: str) -> dict[int, list[float]]:
    """Of every seed the numbers of images at which its curves cross, between two points on a logarithmic scale."""
    sizes = sorted(set(table.get(first, {})) & set(table.get(second, {})))
    seeds = set.intersection(*(set(table[model][size]) for model in (first, second) for size in sizes)) if sizes else ()
    crossed: dict[int, list[float]] = {}
    for seed in sorted(seeds):
        gaps = [(math.log(size), table[first][size][seed] - table[second][size][seed]) for size in sizes]
        crossed[seed] = [
            math.exp(x + (following - x) * gap / (gap - next_gap))
            for (x, gap), (following, next_gap) in pairwise(gaps)
            if gap * next_gap < 0
        ]
    return crossed


def page(plan: Plan, records: Records) -> list[str]:
    """Lines of a table: accuracies in %, with the standard deviation where there are several seeds."""
    values = [
        "test_accuracy",
        *(f"{data}, {way}" for data in TRANSFERS for way in (f"{SHOTS[-1]} a class", "fine-tuned")),
    ]
    lines = [f"| fractals | {' | '.join(f'{size:,}' for size in plan.sizes)} |", "|---" * (len(plan.sizes) + 1) + "|"]
    for value in values:
        for model, points in rows(plan, records, value).items():
            cells = [in_percent(list(points[size].values())) if size in points else "" for size in plan.sizes]
            name = model if value == "test_accuracy" else f"{value}: {model}"
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def in_percent(seeds: Sequence[float]) -> str:
    spread = f" ± {100 * statistics.stdev(seeds):.1f}" if len(seeds) > 1 else ""
    return f"{100 * statistics.fmean(seeds):.1f}{spread}"


def tell(plan: Plan, records: Records) -> None:
    """The tables of what is there."""
    print("\n".join(page(plan, records)))
    table = rows(plan, records)
    for other in [model for model in table if model != "ViT"]:
        print(f"ViT and {other}: {ahead(table, 'ViT', other)}")
        for seed, places in crossings(table, "ViT", other).items():
            print(f"  seed {seed}: " + (", ".join(f"cross at {x:,.0f}" for x in places) or "do not cross"))
    for model in plan.models:
        if (record := records.find(plan.prediction(model))) and record["law"]:
            seen = table.get(model, {}).get(max(plan.sizes), {}).values()
            print(
                f"{model}: {record['law']} predicts {record['predicted_accuracy']:.1%}, measured",
                *map("{:.1%}".format, seen),
            )


def draw(plan: Plan, records: Records, path: Path) -> None:
    """Accuracies against images, with the range of the seeds: held out, few-shot, fine-tuned; and against compute."""
    figure = new_figure(13, 7)
    panels = figure.subplots(2, 3)
    shown = {panels[0, 0]: ("held-out fractals", [("test_accuracy", "-")])}
    for row, data in enumerate(TRANSFERS[:2]):
        few = [(f"{data}, {count} a class", style) for count, style in zip(SHOTS, ("--", "-"), strict=True)]
        shown[panels[row, 1]] = (f"{data}, linear on {SHOTS[0]} (dashed) and {SHOTS[1]} a class", few)
        shown[panels[row, 2]] = (f"{data}, fine-tuned", [(f"{data}, fine-tuned", "-")])
    for place, (model, points) in enumerate(rows(plan, records, kind="plateau").items()):
        bars(panels[0, 0], points, f"C{place}", " ", f"{model}, plateau", fillstyle="none")
    for axes, (title, values) in shown.items():
        for value, style in values:
            for place, (model, points) in enumerate(rows(plan, records, value).items()):
                bars(axes, points, f"C{place}", style, model if style == "-" else None)
        axes.set(xscale="log", title=title, xlabel="training images (fractals)", ylabel="test accuracy")
    for axes in shown:
        if axes.lines:
            axes.legend(fontsize=7)
    compute(panels[1, 0], plan, records)
    save_figure(figure, path)


def bars(
    axes: Any, points: dict[int, dict[int, float]], colour: str, style: str, label: str | None, **more: Any
) -> None:
    sizes = sorted(points)
    seeds = [list(points[size].values()) for size in sizes]
    means = [statistics.mean(values) for values in seeds]  # exact: fmean can lie outside of equal values
    reach = [[mean - min(values) for mean, values in zip(means, seeds, strict=True)],
             [max(values) - mean for mean, values in zip(means, seeds, strict=True)]]  # fmt: skip
    axes.errorbar(sizes, means, yerr=reach, marker="o", capsize=3, linestyle=style, color=colour, label=label, **more)


def compute(axes: Any, plan: Plan, records: Records) -> None:
    """Validation accuracy of seed 0 against the FLOPs of a training (three times forward), as figure 5."""
    size = max(plan.chosen_at)
    for place, model in enumerate(plan.models):
        kinds = (plan.choices(model, size), [plan.job("run", model, size, 0)], [plan.job("plateau", model, size, 0)])
        best = [
            max(found, key=lambda record: record["validation_accuracy"])
            for jobs in kinds
            if (found := [record for job in jobs if (record := records.find(job))])
        ]
        flops = [3 * one["forward_flops"] * one["last_step"] * one["batch_size"] for one in best]
        axes.plot(flops, [one["validation_accuracy"] for one in best], "o", color=f"C{place}", label=model)
    axes.set(xscale="log", title=f"{size:,} images, by compute", xlabel="training FLOPs", ylabel="validation accuracy")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sizes", type=int, nargs="+", default=list(Plan.sizes))
    options.add_argument("--chosen-at", type=int, nargs=2, default=list(Plan.chosen_at))
    options.add_argument("--rates", type=float, nargs="+", default=list(Plan.rates))
    options.add_argument("--seeds", type=int, nargs="+", default=list(Plan.seeds))
    options.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options.add_argument("--classes", type=int, default=Plan.classes)
    options.add_argument("--jitter", type=int, default=Plan.jitter, help="of the images, percent; see docs/data.md")
    options.add_argument("--seen", type=int, default=Plan.seen, help="images a run sees")
    options.add_argument("--batch-size", type=int, default=Plan.batch_size)
    options.add_argument("--transfer-epochs", type=float, default=Plan.transfer_epochs)
    runner_options(options)
    options.add_argument("--estimate", action="store_true")
    options.add_argument("--figure", action="store_true")
    options.add_argument("--output", type=Path, default=OUTPUT)
    asked = vars(options.parse_args())
    records, figure, only_estimate = Records(asked.pop("output")), asked.pop("figure"), asked.pop("estimate")
    runner, address = asked.pop("runner"), asked.pop("address")
    torch.set_num_threads(1)
    plan = Plan(**{name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()})
    if only_estimate:
        hours = estimate(plan, records)
        print(", ".join(f"{kind}: {value:.2f} CPU hours" for kind, value in hours.items()))
        print(f"the first seed with its choices {sum(hours.values()):.2f} CPU hours")
        return
    if not figure:
        work(plan, records, runner, address)
    tell(plan, records)
    if figure:
        draw(plan, records, records.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
