"""Measure accuracy against the number of training images: ViT, Hybrid, Axial and BiT of about equal compute.

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
"""

import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from records import Job, Records, read_plan, script_options
from script import CPU, vit_sizes
from tables import TABLES

from hf_vit import HfAxialViTConfig, HfBitConfig, HfHybridViTConfig, HfViTConfig, UserError
from hf_vit.cost.flops import forward_flops
from hf_vit.cost.scaling_law import fit_scaling_law
from hf_vit.evaluation import evaluate
from hf_vit.training import finetune
from hf_vit.training.recipes.registry import find_recipe

SIDE = 32
_VIT = vit_sizes(64, 256, image_size=SIDE, pooling="gap")
# 8 to 10 million FLOPs an image, 4x4 tokens; fixed before any training.
MODELS: dict[str, Any] = {
    "ViT": HfViTConfig(patch_size=8, num_hidden_layers=5, **_VIT),
    "Hybrid": HfHybridViTConfig(stage_depths=(1,), stem_width=32, stem_patch_size=2, num_hidden_layers=2, **_VIT),
    "Axial": HfAxialViTConfig(patch_size=8, num_hidden_layers=2, **_VIT | vit_sizes(72, 288)),
    "BiT": HfBitConfig(image_size=SIDE, stage_depths=(1, 1), stem_width=32),
}
# A ResNet has no stochastic depth.
REGULARISATIONS: dict[str, dict[str, Any]] = {"none": {}, "mixup": {"mixup_alpha": 0.2}}
TRANSFERS = ("digits", "photos")
SHOTS = (5, 25)
PLATEAU = {"schedule": "constant", "evaluations": 10, "patience": 3}


@dataclass(frozen=True)
class Plan:
    """The plan of the experiment; its fields are the script's options."""

    sizes: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)
    chosen_at: tuple[int, ...] = (3_000, 100_000)
    rates: tuple[float, ...] = (1e-2, 3e-2, 1e-1)
    seeds: tuple[int, ...] = (0, 1, 2)
    models: tuple[str, ...] = tuple(MODELS)
    classes: int = 100
    jitter: int = 50  # of the images, percent; see docs/data.md
    seen: int = 300_000  # images a run sees
    batch_size: int = 128
    transfer_epochs: float = 20

    def job(self, kind: str, model: str, images: int, seed: int, **more: Any) -> Job:
        seen = self.seen // 6 if kind == "choice" else self.seen
        same = {"seen": seen, "classes": self.classes, "jitter": self.jitter, "batch_size": self.batch_size}
        return {"kind": kind, "model": model, "images": images, "seed": seed, **more, **same}

    def choices(self, model: str, images: int) -> list[Job]:
        """Return the trials that select settings for this number of images."""
        near = min(self.chosen_at, key=lambda size: abs(math.log(size / images)))
        cases = itertools.product(self.rates, REGULARISATIONS)
        return [self.job("choice", model, near, 0, learning_rate=rate, regularisation=name) for rate, name in cases]

    def runs(self, model: str) -> list[Job]:
        """Return all runs of a model, the smallest first."""
        return [self.job("run", model, size, seed) for size in sorted(self.sizes) for seed in self.seeds]

    def prediction(self, model: str) -> Job:
        return self.job("prediction", model, max(self.sizes), 0)

    def jobs(self) -> Iterator[tuple[Job, list[Job]]]:
        """Return all jobs with those they depend on, the most valuable first."""
        chosen_at = dict.fromkeys(self.chosen_at)
        for size, model in itertools.product(chosen_at, self.models):
            yield from ((choice, []) for choice in self.choices(model, size))
        for seed, size, model in itertools.product(self.seeds, sorted(self.sizes), self.models):
            last = [self.prediction(model)] if size == max(self.sizes) else []
            yield self.job("run", model, size, seed), self.choices(model, size) + last
        for model in self.models:
            yield self.prediction(model), [run for run in self.runs(model) if run["images"] < max(self.sizes)]
        for seed, size, model in itertools.product(self.seeds, chosen_at, self.models):
            yield self.job("plateau", model, size, seed), self.choices(model, size)


def run_job(job: Job, needed: list[dict[str, Any]], epochs: float) -> dict[str, Any]:
    """Carry out one training and, unless it only selects settings, the transfers after it."""
    if job["kind"] == "prediction":
        return predict(job, needed)
    # Learning rate and regularization: those of the trial itself, else the best ones on validation images.
    trials = [record for record in needed if record["kind"] == "choice"]
    best = max(trials, key=lambda trial: trial["validation_accuracy"], default=job)
    rate, regularisation = best["learning_rate"], best["regularisation"]
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept) / "out"
        result = train(job, rate, regularisation, folder)
        done = {
            "learning_rate": rate, "regularisation": regularisation,
            "validation_accuracy": result.validation["accuracy"],
            "training_loss": next((entry["loss"] for entry in reversed(result.history) if "loss" in entry), None),
            "forward_flops": forward_flops(MODELS[job["model"]]),
            "last_step": max(entry["step"] for entry in result.history),
        }  # fmt: skip
        if job["kind"] != "choice":
            done["test_accuracy"] = result.test.top1
        if job["kind"] == "run":
            done |= measure_transfers(folder, epochs, job["seed"])
    return done


def train(job: Job, rate: float, regularisation: str, folder: Path) -> Any:
    """Train a model from new weights for as many steps as its images should be seen, or until it reaches a plateau."""
    settings = {"evaluations": 4} | REGULARISATIONS[regularisation] | (PLATEAU if job["kind"] == "plateau" else {})
    return finetune(
        MODELS[job["model"]],
        f"fractals:classes={job['classes']},images={max(1, job['images'] // job['classes'])},jitter={job['jitter']}",
        folder, recipe=find_recipe("small-data"), learning_rate=rate, steps=max(1, job["seen"] // job["batch_size"]),
        batch_size=job["batch_size"], seed=job["seed"], **CPU, **settings,
        # Beyond that a table would not fit beside the model; a stream makes them meanwhile.
        streaming=job["images"] > 100_000,
    )  # fmt: skip


def measure_transfers(folder: Path, epochs: float, seed: int) -> dict[str, Any]:
    """Return held-out accuracies of the encoder on other data: few-shot, and fine-tuned."""
    accuracies: dict[str, Any] = {}
    for name in TRANSFERS:
        shots = evaluate(folder, name, protocol="few-shot", shots=SHOTS, device="cpu", output=folder.parent / name)
        for count, draws in zip(shots.result.shots, shots.result.accuracy, strict=True):
            accuracies[f"{name}, {count} a class"] = statistics.fmean(draws)
        with tempfile.TemporaryDirectory() as temporary_folder:
            tuned = finetune(
                str(folder), name, Path(temporary_folder) / "out", recipe="small-data", lr_sweep=True, epochs=epochs,
                seed=seed, image_size=SIDE, device="cpu", precision="fp32", evaluations=4,
            )  # fmt: skip
        accuracies[f"{name}, fine-tuned"] = tuned.test.top1
    return accuracies


def predict(job: Job, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the error with the most images, predicted by a law fitted to the errors with fewer."""
    points = [(run["images"], 1 - run["test_accuracy"]) for run in runs]
    try:
        law = fit_scaling_law(points)
    except UserError as error:
        return {"law": None, "reason": str(error)}
    return {"law": str(law), "intervals": law.intervals, "predicted_accuracy": 1 - float(law.error(job["images"]))}


def main() -> None:
    arguments = script_options(__doc__, "data_scale.jsonl", Plan, runner=True, models=MODELS).parse_args()
    plan = read_plan(Plan, arguments)
    run = partial(run_job, epochs=plan.transfer_epochs)
    Records(arguments.output).work(list(plan.jobs()), run, arguments.runner, arguments.address)
    print(TABLES["data_scale"](arguments.output))


if __name__ == "__main__":
    main()
