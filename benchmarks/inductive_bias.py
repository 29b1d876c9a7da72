"""Measure how few digits ViT, Hybrid and Axial of about equal size need.

Data: the UCI digits (8x8, 1,257 / 180 / 360 for training, validation and test), stretched to 32x32 px, one channel.
Every run takes the same number of optimiser steps, whatever the number of training images, with one recipe for all:
AdamW, batch 32, weight decay 0.05, cosine after 10% warm-up, random shifts by up to 4 px. Its learning rate is the one
of `RATES` with the best mean accuracy of the three models on the VALIDATION images (200 training images, one seed);
those runs are the first that are made. The test images are looked at once by each of the others, after its last step.
Nested subsets: the 50 images of a seed are among its 100, and so on; all classes are equally frequent.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import Job, PlannedJob, Records, read, script_options
from script import count_parameters, vit_sizes
from tables import TABLES, group
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import hf_vit
from hf_vit.data import load_data
from hf_vit.results.figures import make_figure, save_figure

SIDE = 32
_OTHERS = {"num_channels": 1, "num_labels": 10, "pooling": "gap", "position_embedding": "learned"}
WIDTHS = vit_sizes(64, 128, image_size=SIDE, **_OTHERS)
# 8x8 tokens each. An axial block holds two halves, each the size of a ViT's block; the hybrid's stem is about one.
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "vit": (hf_vit.HfViTConfig, hf_vit.HfViTForImageClassification, {"patch_size": 4, "num_hidden_layers": 4}),
    "hybrid": (hf_vit.HfHybridViTConfig, hf_vit.HfHybridViTForImageClassification,
               {"stage_depths": (1,), "stem_width": 32, "num_hidden_layers": 3}),
    "axial": (hf_vit.HfAxialViTConfig, hf_vit.HfAxialViTForImageClassification,
              {"patch_size": 4, "num_hidden_layers": 2}),
}  # fmt: skip
EXAMPLES = (50, 100, 200, 400, 1257)
SEEDS = (0, 1, 2)
RATES = (1e-3, 2e-3, 4e-3)
BATCH, STEPS, WEIGHT_DECAY, SHIFT = 32, 1600, 0.05, 4


@dataclass(frozen=True)
class Run:
    """The settings of a training; equal settings mean the same run."""

    kind: str  # recipe: judged on validation images; data: on test images
    family: str
    examples: int
    seed: int
    patch: int
    rate: float
    steps: int


@dataclass(frozen=True)
class Images:
    """Images [n, C, 32, 32] in [-1, 1] and labels [n] of every split."""

    images: dict[str, torch.Tensor]
    labels: dict[str, torch.Tensor]

    @property
    def classes(self) -> int:
        return int(self.labels["train"].max()) + 1


@cache
def load_digits() -> Images:
    data, images, labels = load_data("digits"), {}, {}
    for name, split in data.splits.items():
        pixels = torch.tensor(np.stack([np.asarray(image.convert("L")) for image in split["image"]])).float()
        images[name] = F.interpolate(pixels[:, None] / 127.5 - 1, size=(SIDE, SIDE), mode="bilinear", antialias=False)
        labels[name] = torch.tensor(split["label"])
    return Images(images, labels)


def subset(labels: torch.Tensor, examples: int, seed: int) -> torch.Tensor:
    """Return the indices of `examples` images, class by class in turn; those of a seed contain its smaller subsets."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    ranks = torch.zeros(len(labels))
    for label in labels.unique():
        class_indices = shuffled[labels[shuffled] == label]
        ranks[class_indices] = torch.arange(len(class_indices)) + label / 100
    return ranks.argsort()[:examples]


def batches(indices: torch.Tensor, steps: int, generator: torch.Generator, size: int = BATCH) -> Iterator[torch.Tensor]:
    """Yield `steps` batches of indices, repeating an image only when all have been used."""
    waiting = indices[:0]
    for _ in range(steps):
        while len(waiting) < size:
            waiting = torch.cat([waiting, indices[torch.randperm(len(indices), generator=generator)]])
        yield waiting[:size]
        waiting = waiting[size:]


def shift_images(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return images shifted by up to `SHIFT` px in both directions, with background at the borders."""
    padded = F.pad(images, (SHIFT,) * 4, value=-1.0)
    offsets = torch.randint(2 * SHIFT + 1, (len(images), 2), generator=generator)
    return torch.stack([image[:, y : y + SIDE, x : x + SIDE] for image, (y, x) in zip(padded, offsets, strict=True)])


def build_model(run: Run) -> torch.nn.Module:
    config_class, model_class, fields = FAMILIES[run.family]
    patch = {} if run.family == "hybrid" else {"patch_size": run.patch}
    torch.manual_seed(run.seed)
    return model_class(config_class(**{**WIDTHS, **fields, **patch}))


def train(model: torch.nn.Module, digits: Images, run: Run) -> None:
    generator = torch.Generator().manual_seed(run.seed)
    indices = subset(digits.labels["train"], run.examples, run.seed)

    def compute_loss(batch: torch.Tensor) -> torch.Tensor:
        images = shift_images(digits.images["train"][batch], generator)
        return model(images, labels=digits.labels["train"][batch]).loss

    train_steps(model, compute_loss, batches(indices, run.steps, generator), run.steps, run.rate)


def train_steps(
    model: torch.nn.Module,
    compute_loss: Callable[[torch.Tensor], torch.Tensor],
    order: Iterable[torch.Tensor],
    steps: int,
    rate: float,
    after: Callable[[int], None] = lambda step: None,
    **settings: Any,
) -> None:
    """Train with AdamW, 10% warm-up and cosine decay to 0; `after` is called after every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY, **settings)
    warm_up = max(steps // 10, 1)
    for step, batch in enumerate(order):
        progress = (step - warm_up) / max(steps - warm_up, 1)
        factor = (step + 1) / warm_up if step < warm_up else 0.5 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.zero_grad()
        compute_loss(batch).backward()
        optimizer.step()
        after(step + 1)


@torch.no_grad()
def compute_accuracy(model: Any, data: Images, split: str) -> float:
    predicted = model.eval()(data.images[split]).logits.argmax(-1)
    return float((predicted == data.labels[split]).float().mean())


def carry_out(job: Job, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Train at the job's rate, or at the one that is best in these trials."""
    digits, rate = load_digits(), job.get("rate") or choose_rate(trials)
    run = Run(**(job | {"rate": rate}))
    model = build_model(run)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(digits.images["train"][:1])
    train(model.train(), digits, run)
    split = "validation" if run.kind == "recipe" else "test"
    return {
        "rate": rate,
        f"{split}_accuracy": round(compute_accuracy(model, digits, split), 4),
        "parameters": count_parameters(model),
        "flops_forward_one_image": counter.get_total_flops(),
    }


def choose_rate(trials: list[dict[str, Any]]) -> float:
    """Return the rate with the best mean validation accuracy of the three models, the lower one if equal."""
    scores = {rate: [run["validation_accuracy"] for run in trials if run["rate"] == rate] for rate in RATES}
    return max(RATES, key=lambda rate: statistics.mean(scores[rate]))


def jobs(steps: int) -> Iterator[PlannedJob]:
    """Return the trials, and the runs that depend on them."""
    trial_jobs = [asdict(Run("recipe", family, 200, 0, 4, rate, steps)) for rate in RATES for family in FAMILIES]
    yield from ((job, []) for job in trial_jobs)
    for seed, examples, family in itertools.product(SEEDS, EXAMPLES, FAMILIES):
        job = asdict(Run("data", family, examples, seed, 4, 0, steps))
        yield {name: value for name, value in job.items() if name != "rate"}, trial_jobs


def mean_and_deviation(lines: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Return (mean, standard deviation) over the seeds."""
    values = [line[name] for line in lines]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def draw(path: Path) -> None:
    """Draw accuracy against training images beside the record."""
    figure = make_figure(6, 4)
    axes = figure.add_subplot()
    for family, lines in group([line for line in read(path) if line["kind"] == "data"], "family").items():
        points = [
            (examples, *(100 * value for value in mean_and_deviation(runs, "test_accuracy")))
            for examples, runs in sorted(group(lines, "examples").items())
        ]
        axes.errorbar(*zip(*points, strict=True), marker="o", capsize=3, label=family)  # x, y, y error
    axes.set(xscale="log", xlabel="training images", ylabel="test accuracy (%)")
    axes.legend()
    save_figure(figure, path.with_suffix(".png"))


def main() -> None:
    options = script_options(__doc__, "inductive_bias.jsonl")
    options.add_argument("--limit", type=int, help="of these runs the first (a smoke test)")
    options.add_argument("--steps", type=int, default=STEPS)
    arguments = options.parse_args()
    Records(arguments.output).work(list(jobs(arguments.steps))[: arguments.limit], carry_out)
    print(TABLES["inductive_bias"](arguments.output))
    draw(arguments.output)


if __name__ == "__main__":
    main()
