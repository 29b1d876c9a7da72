"""Does it learn, and from how little? ViT, Hybrid and Axial of about equal size on few digits; and one ViT, cut finer.

    python benchmarks/inductive_bias.py [--output benchmarks/results/inductive_bias.jsonl] [--only recipe|data|patch]
    python benchmarks/inductive_bias.py --only data --steps 1600 --output FILE        # to the end

Data: the UCI digits (8x8, 1,257 / 180 / 360 for training, validation and test), stretched to 32x32 px, one channel.
Every run takes the same number of optimiser steps, whatever the number of training images, with one recipe for all:
AdamW, batch 32, weight decay 0.05, cosine after 10% warm-up, random shifts by up to 4 px. Its learning rate is the one
of `RATES` with the best mean accuracy of the three models on the VALIDATION images (200 training images, one seed);
those runs are the first that are made. The test images are looked at once by each run of the two sweeps, after its
last step. Nested subsets: the 50 images of a seed are among its 100, and so on; all classes are equally frequent.

The sweeps: accuracy against the number of training images (3 families, 5 sizes, 3 seeds), and against the patch side
of one ViT (2 to 32 px, all images, 3 seeds) with its compute. One JSON line is written for each finished run, and what
is in the file is not run again: stop and start as you like. About 40 minutes of one core.
"""

import argparse
import contextlib
import datetime
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import TABLES
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from hf_vit import (
    HfAxialViTConfig,
    HfAxialViTForImageClassification,
    HfHybridViTConfig,
    HfHybridViTForImageClassification,
    HfViTConfig,
    HfViTForImageClassification,
)
from hf_vit.data import load_data
from hf_vit.environment import cpu_name
from hf_vit.results.figures import new_figure, save_figure
from hf_vit.speed.measuring import others_load

SIDE = 32
WIDTHS: dict[str, Any] = {
    "image_size": SIDE,
    "num_channels": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_labels": 10,
    "pooling": "gap",
    "position_embedding": "learned",
}
# 8x8 tokens each. An axial block holds two halves, each the size of a ViT's block; the hybrid's stem is about one.
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "vit": (HfViTConfig, HfViTForImageClassification, {"patch_size": 4, "num_hidden_layers": 4}),
    "hybrid": (
        HfHybridViTConfig,
        HfHybridViTForImageClassification,
        {"stage_depths": (1,), "stem_width": 32, "num_hidden_layers": 3},
    ),
    "axial": (HfAxialViTConfig, HfAxialViTForImageClassification, {"patch_size": 4, "num_hidden_layers": 2}),
}
EXAMPLES = (50, 100, 200, 400, 1257)
PATCHES = (32, 16, 8, 4, 2)
SEEDS = (0, 1, 2)
RATES = (1e-3, 2e-3, 4e-3)
BATCH, STEPS, WEIGHT_DECAY, SHIFT = 32, 400, 0.05, 4


@dataclass(frozen=True)
class Run:
    """What is trained; two runs are the same if these are."""

    kind: str  # recipe: judged on validation images; data, patch: on test images
    family: str
    examples: int
    seed: int
    patch: int
    rate: float
    steps: int


@dataclass(frozen=True)
class Digits:
    """Images [n, 1, 32, 32] in [-1, 1] and labels [n] of every split."""

    images: dict[str, torch.Tensor]
    labels: dict[str, torch.Tensor]
    fingerprint: str


def load_digits() -> Digits:
    found, images, labels = load_data("digits"), {}, {}
    for name, split in found.splits.items():
        pixels = torch.tensor(np.stack([np.asarray(image.convert("L")) for image in split["image"]])).float()
        images[name] = F.interpolate(pixels[:, None] / 127.5 - 1, size=(SIDE, SIDE), mode="bilinear", antialias=False)
        labels[name] = torch.tensor(split["label"])
    return Digits(images, labels, found.fingerprint)


def subset(labels: torch.Tensor, examples: int, seed: int) -> torch.Tensor:
    """Indices of `examples` images, class by class in turn; a larger subset of the same seed holds a smaller one."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    ranks = torch.zeros(len(labels))
    for label in labels.unique():
        own = shuffled[labels[shuffled] == label]
        ranks[own] = torch.arange(len(own)) + label / 100
    return ranks.argsort()[:examples]


def batches(indices: torch.Tensor, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """`steps` batches of indices, every image once before any is seen again."""
    waiting = indices[:0]
    for _ in range(steps):
        while len(waiting) < BATCH:
            waiting = torch.cat([waiting, indices[torch.randperm(len(indices), generator=generator)]])
        yield waiting[:BATCH]
        waiting = waiting[BATCH:]


def shifted(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every image moved by up to `SHIFT` px either way; what comes in is background."""
    padded = F.pad(images, (SHIFT,) * 4, value=-1.0)
    offsets = torch.randint(2 * SHIFT + 1, (len(images), 2), generator=generator)
    return torch.stack([image[:, y : y + SIDE, x : x + SIDE] for image, (y, x) in zip(padded, offsets, strict=True)])


def build(run: Run) -> torch.nn.Module:
    config_class, model_class, own = FAMILIES[run.family]
    patch = {} if run.family == "hybrid" else {"patch_size": run.patch}
    torch.manual_seed(run.seed)
    return model_class(config_class(**{**WIDTHS, **own, **patch}))


def train(model: torch.nn.Module, digits: Digits, run: Run) -> None:
    generator = torch.Generator().manual_seed(run.seed)
    indices = subset(digits.labels["train"], run.examples, run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.rate, weight_decay=WEIGHT_DECAY)
    warm_up = max(run.steps // 10, 1)
    for step, batch in enumerate(batches(indices, run.steps, generator)):
        done = (step - warm_up) / max(run.steps - warm_up, 1)
        factor = (step + 1) / warm_up if step < warm_up else 0.5 * (1 + math.cos(math.pi * done))
        optimizer.param_groups[0]["lr"] = run.rate * factor
        images = shifted(digits.images["train"][batch], generator)
        loss = model(images, labels=digits.labels["train"][batch]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def accuracy(model: torch.nn.Module, digits: Digits, split: str) -> float:
    found = model.eval()(digits.images[split]).logits.argmax(-1)
    return float((found == digits.labels[split]).float().mean())


def carry_out(run: Run, digits: Digits) -> dict[str, Any]:
    model = build(run)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(digits.images["train"][:1])
    started, started_cpu = time.perf_counter(), time.process_time()
    train(model.train(), digits, run)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    split = "validation" if run.kind == "recipe" else "test"
    return {
        **asdict(run),
        f"{split}_accuracy": round(accuracy(model, digits, split), 4),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_forward_one_image": counter.get_total_flops(),
        "others_load": round(others_load(), 2),
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "versions": {package: version(package) for package in ("torch", "transformers")},
        "data": digits.fingerprint,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """All finished runs; a line cut off by a crash is no finished run."""
    found: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def run_of(line: dict[str, Any]) -> Run:
    return Run(**{name: line[name] for name in Run.__dataclass_fields__})


def trials(steps: int) -> list[Run]:
    return [Run("recipe", family, 200, 0, 4, rate, steps) for rate in RATES for family in FAMILIES]


def chosen_rate(lines: list[dict[str, Any]], steps: int) -> float:
    """The rate with the best mean validation accuracy of the three models; the lower one of equals."""
    found = {run_of(line): line["validation_accuracy"] for line in lines if line["kind"] == "recipe"}
    means = {rate: statistics.mean(found[run] for run in trials(steps) if run.rate == rate) for rate in RATES}
    return max(RATES, key=lambda rate: means[rate])


def sweeps(rate: float, steps: int) -> list[Run]:
    data = [Run("data", family, n, seed, 4, rate, steps) for seed in SEEDS for n in EXAMPLES for family in FAMILIES]
    others = [patch for patch in PATCHES if patch != 4]  # 4 px is in the first sweep
    return data + [Run("patch", "vit", EXAMPLES[-1], seed, patch, rate, steps) for seed in SEEDS for patch in others]


def carry_out_all(runs: list[Run], path: Path, digits: Digits) -> None:
    finished = {run_of(line) for line in read(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for run in runs:
        if run in finished:
            continue
        line = carry_out(run, digits)
        broken = path.exists() and not path.read_text().endswith("\n") and path.stat().st_size
        with path.open("a") as file:
            file.write(("\n" if broken else "") + json.dumps(line) + "\n")
        print({name: value for name, value in line.items() if name not in ("versions", "cpu", "data")}, flush=True)


def spread(lines: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """(mean, standard deviation) over the seeds."""
    values = [line[name] for line in lines]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def draw(path: Path) -> None:
    """Draw accuracy against training images beside the record."""
    lines = [line for line in read(path) if line["kind"] == "data"]
    lines = [line for line in lines if line["steps"] == max(line["steps"] for line in lines)]
    figure = new_figure(6, 4)
    axes = figure.add_subplot()
    for family in FAMILIES:
        points = []
        for examples in EXAMPLES:
            own = [line for line in lines if (line["family"], line["examples"]) == (family, examples)]
            if own:
                mean, deviation = spread(own, "test_accuracy")
                points.append((examples, 100 * mean, 100 * deviation))
        if points:
            axes.errorbar(*zip(*points, strict=True), marker="o", capsize=3, label=family)  # x, y, y error
    axes.set(xscale="log", xlabel="training images", ylabel="test accuracy (%)")
    axes.legend()
    save_figure(figure, path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/inductive_bias.jsonl"))
    parser.add_argument("--only", choices=("recipe", "data", "patch"), help="stop after the recipe, or one sweep alone")
    parser.add_argument("--limit", type=int, help="at most this many of the runs that are asked for (a smoke test)")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_digits()
    runs = trials(options.steps)[: options.limit]
    carry_out_all(runs, options.output, digits)
    if options.only != "recipe" and options.limit is None:
        rate = chosen_rate(read(options.output), options.steps)
        runs = [run for run in sweeps(rate, options.steps) if options.only in (None, run.kind)]
        carry_out_all(runs, options.output, digits)
    for name in ("inductive_bias", "patch_side"):
        print(TABLES[name](options.output))
    draw(options.output)


if __name__ == "__main__":
    main()
