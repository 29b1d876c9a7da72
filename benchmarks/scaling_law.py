"""A scaling law whose intervals determine something: the loss of predicting next patches over compute, ViT on fractals.

The plain ViT of data_scale.py predicts each patch's mean color from the patches before it (cross-entropy in nats; arXiv
2010.11929, B.1.2). Every image is seen once, so that compute is what is varied: training FLOPs, three times the
encoder's forward pass, by the number of images.

1. Choices: every rate with every seed at one number of images; the best on VALIDATION images, by the mean of the seeds,
   is taken everywhere.
2. Runs: every number of images but the largest, with every seed; the loss is that of TEST images.
3. Prediction: E = a (C + d)^-b + c (arXiv 2106.04560; --no-shift: d = 0, for runs that are all beyond the start of
   learning) is fitted to these, and what it says of the largest is recorded.
4. The largest, twice as far as the law has seen, with every seed.
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_scale import MODELS, SIDE
from records import Job, Records, read_plan, script_options
from tables import TABLES, group
from transformers import AutoModelForMaskedImageModeling

from hf_vit.cost.flops import forward_flops
from hf_vit.cost.scaling_law import ScalingLaw, fit_scaling_law
from hf_vit.data import eval_transform, load_data
from hf_vit.data.transforms import make_processor
from hf_vit.results.figures import make_figure, save_figure
from hf_vit.training import pretrain
from hf_vit.training.tasks.patch_prediction import MaskingCollator, NextPatch

MODEL = MODELS["ViT"]
CLASSES, BATCH_SIZE = 100, 128


@dataclass(frozen=True)
class Plan:
    """The plan of the experiment; its fields are the script's options."""

    sizes: tuple[int, ...] = (8_000, 16_000, 32_000, 64_000, 128_000)
    largest: int = 256_000
    chosen_at: int = 32_000
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    seeds: tuple[int, ...] = (0, 1, 2)
    shift: bool = True

    def choices(self) -> list[Job]:
        same = {"kind": "choice", "images": self.chosen_at}
        return [same | {"seed": seed, "rate": rate} for seed in self.seeds for rate in self.rates]

    def runs(self) -> list[Job]:
        return [{"kind": "run", "images": size, "seed": seed} for seed in self.seeds for size in self.sizes]

    def prediction(self) -> Job:
        fitted = {} if self.shift else {"sizes": list(self.sizes), "shift": False}
        return {"kind": "prediction", "images": self.largest, "seeds": list(self.seeds)} | fitted

    def held_out(self) -> list[Job]:
        return [{"kind": "run", "images": self.largest, "seed": seed} for seed in self.seeds]

    def jobs(self) -> Iterator[tuple[Job, list[Job]]]:
        """Return all jobs with those they depend on."""
        yield from ((choice, []) for choice in self.choices())
        yield from ((run, self.choices()) for run in self.runs())
        yield self.prediction(), self.runs()
        yield from ((run, [*self.choices(), self.prediction()]) for run in self.held_out())


def run_job(job: Job, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Carry out a prediction, or a training evaluated on validation (trials) or test images (runs)."""
    if job["kind"] == "prediction":
        law = fit_law(results, job.get("shift", True))
        return {"law": str(law), "intervals": law.intervals, "loss": float(law.error(compute_teraflops(job["images"])))}
    losses = {rate: [run["loss"] for run in own] for rate, own in group(results, "rate").items() if rate}
    rate = job["rate"] if job["kind"] == "choice" else min(losses, key=lambda rate: statistics.fmean(losses[rate]))
    with tempfile.TemporaryDirectory() as temporary_folder:
        result = pretrain(
            MODEL, fractals(job["images"]), Path(temporary_folder) / "out", objective="next-patch", learning_rate=rate,
            batch_size=BATCH_SIZE, steps=max(1, job["images"] // BATCH_SIZE), seed=job["seed"], image_size=SIDE,
            streaming=True, evaluations=1, device="cpu", precision="fp32",
        )  # fmt: skip
        # The held-out images are the same however many are trained on, which would all be made for it.
        loss = mean_loss(result.folder, fractals(CLASSES), "validation" if job["kind"] == "choice" else "test")
    return {"rate": rate, "loss": loss, "teraflops": compute_teraflops(job["images"])}


def fractals(images: int) -> str:
    return f"fractals:classes={CLASSES},images={images // CLASSES},jitter=50"


def compute_teraflops(images: int) -> float:
    return 3 * forward_flops(MODEL) * images / 1e12


@torch.inference_mode()
def mean_loss(folder: Path, data: str, split: str) -> float:
    """Return the cross-entropy per patch in nats for a split's images."""
    model = AutoModelForMaskedImageModeling.from_pretrained(folder).eval()
    images = load_data(data, image_size=(SIDE, SIDE), streaming=False).splits[split]["image"]
    transform, collate = eval_transform(make_processor(model.config)), MaskingCollator(NextPatch(), model.config)
    total = 0.0
    for first in range(0, len(images), BATCH_SIZE):
        values = transform.prepare(images[first : first + BATCH_SIZE])
        batch = collate([{"pixel_values": value} for value in values])
        total += float(model(**batch).loss) * len(values)  # as many patches of every image
    return total / len(images)


def fit_law(runs: list[dict[str, Any]], shift: bool) -> ScalingLaw:
    return fit_scaling_law([(run["teraflops"], run["loss"]) for run in runs], shift)


def draw(plan: Plan, records: Records, path: Path) -> None:
    runs, held_out = ([run for job in jobs if (run := records.find(job))] for jobs in (plan.runs(), plan.held_out()))
    law = fit_law(runs, plan.shift)
    figure = make_figure(6, 4)
    axes = figure.add_subplot()
    curve = np.geomspace(compute_teraflops(min(plan.sizes)), compute_teraflops(plan.largest), 200)
    axes.plot(curve, law.error(curve), label=f"{law}, fitted to the filled", color="C0")
    axes.fill_between(curve, *law.interval(curve), alpha=0.2, color="C0", label="its 95%")
    axes.axhline(law.c, label="its floor", color="C0", linestyle=":")
    labels = {"fitted": (runs, "C0"), "predicted before they were looked at": (held_out, "none")}
    for label, (drawn, fill) in labels.items():
        if points := [(run["teraflops"], run["loss"]) for run in drawn]:
            axes.plot(*zip(*points, strict=True), "o", color="C0", markerfacecolor=fill, label=label)
    axes.set(xscale="log", xlabel="training compute C (TFLOPs)", ylabel="test loss (nats)")
    ticks = [compute_teraflops(size) for size in (*plan.sizes, plan.largest)]
    axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def main() -> None:
    options = script_options(__doc__, "scaling_law.jsonl", Plan, runner=True)
    options.add_argument("--figure", action="store_true", help="draw the law from what is recorded; run nothing")
    arguments = options.parse_args()
    records, plan = Records(arguments.output), read_plan(Plan, arguments)
    if not arguments.figure:
        records.work(list(plan.jobs()), run_job, arguments.runner, arguments.address)
    print(TABLES["scaling_law"](records.path))
    if arguments.figure:
        draw(plan, records, records.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
