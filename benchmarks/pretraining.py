"""What pre-training without labels gives on few real images: scratch against masked patches, next patches and contrast.

    python benchmarks/pretraining.py [--output benchmarks/results/pretraining.jsonl] [--only main|moco]
    python benchmarks/pretraining.py --summary        # tables and plots of what is there, no runs

Data: the UCI digits (1,257 / 180 / 360 for training, validation and test) at 32x32 px, and crops of eight photographs
(800 / 160 / 320, the splits own different tiles), both RGB. One ViT (3 layers, 64 wide, patch 8 px, 16 patches) for
all. Every pre-training takes `STEPS` steps on all training images, every fine-tuning `TUNING_STEPS` on 20 labelled
images a class or on all; "scratch, long" trains with labels for the sum of both. Variation is the same for all (random
crops of 85 to 100% of a side); contrast also varies brightness, contrast and the channels' gains. No run is judged by
anything but its seed's own test accuracy after the last step; test images choose nothing.

The linear probe is a logistic regression on standardised frozen features: the mean of the patch tokens, or the class
token, whichever is better on the VALIDATION images. The learning rates of fine-tuning are chosen likewise: each start
(scratch, pre-trained) has the one of `RATES` that is best on the digits' validation images, 20 labels a class, seed 0.

The sweeps: main (10 ways to start, both data sets, 3 seeds), and moco (batch size and norm of momentum contrast, on
digits, 3 seeds, the same number of steps). One JSON line for each finished run; what is in the file is not run again.
About 31 CPU-minutes in all, as the first seed's runs took on a busy core.
"""

import argparse
import copy
import datetime
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inductive_bias import read, spread, subset
from torch.nn import functional as F

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTForMaskedPatchPrediction, HfViTModel
from hf_vit.data import load_data
from hf_vit.environment import cpu_name
from hf_vit.evaluation.protocols.probes import Probe
from hf_vit.speed.measuring import others_load
from hf_vit.training.tasks.masking import NextPatch, RandomMasking
from hf_vit.training.tasks.momentum_contrast import ContrastiveOptions, MomentumContrast, momentum_at

SIDE, PATCHES = 32, 16
WIDTHS: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
STEPS, TUNING_STEPS, BATCH, TUNING_BATCH, WEIGHT_DECAY = 200, 200, 64, 32, 0.05
RATE, RATES = 1e-3, (1e-3, 2e-3, 4e-3)
SEEDS = (0, 1, 2)
PROBED, TUNED = (5, 20, 0), (20, 0)  # labelled images a class; 0 is all
# Ways to start: name -> (objective, fields of the configuration, static masks).
STARTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "scratch": ("none", {}, False),
    "scratch, long": ("labels", {}, False),
    "scratch, no class token": ("none", {"pooling": "gap"}, False),
    "scratch, shared layers": ("none", {"num_hidden_groups": 1}, False),
    "masked": ("masked", {}, False),
    "masked, static masks": ("masked", {}, True),
    "masked, no class token": ("masked", {"pooling": "gap"}, False),
    "masked, shared layers": ("masked", {"num_hidden_groups": 1}, False),
    "next patch": ("next", {"is_causal": True, "predict_next_patch": True}, False),
    "contrast": ("contrast", {}, False),
}
MOCO = [(batch, norm) for norm in ("batch", "none") for batch in (16, 64, 128)]


@dataclass(frozen=True)
class Run:
    """What is trained; two runs are the same if these are."""

    kind: str  # rate (judged on validation images), main, moco
    data: str
    start: str
    seed: int
    batch: int = BATCH
    norm: str = "batch"
    rate: float = 0.0  # of fine-tuning; 0: the chosen one


@dataclass(frozen=True)
class Images:
    """Images [n, 3, 32, 32] in [-1, 1] and labels [n] of every split."""

    images: dict[str, torch.Tensor]
    labels: dict[str, torch.Tensor]
    fingerprint: str

    @property
    def classes(self) -> int:
        return int(self.labels["train"].max()) + 1


def load(name: str) -> Images:
    found, images, labels = load_data(name, image_size=(SIDE, SIDE)), {}, {}
    for split, table in found.splits.items():
        pixels = torch.tensor(np.stack([np.asarray(image.convert("RGB")) for image in table["image"]])).float()
        images[split] = pixels.permute(0, 3, 1, 2) / 127.5 - 1
        labels[split] = torch.tensor(table["label"])
    return Images(images, labels, found.fingerprint)


def varied(images: torch.Tensor, generator: torch.Generator, colours: bool = False) -> torch.Tensor:
    """Random crops of 85 to 100% of either side, resized bilinearly; with `colours`, other light too."""
    batch = len(images)
    share = 0.85 + 0.15 * torch.rand(batch, 2, generator=generator)
    middle = (2 * torch.rand(batch, 2, generator=generator) - 1) * (1 - share)
    theta = torch.zeros(batch, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = share[:, 0], share[:, 1], middle
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    images = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    if colours:
        gain = 0.6 + 0.8 * torch.rand(batch, 1, 1, 1, generator=generator)
        tint = 0.8 + 0.4 * torch.rand(batch, 3, 1, 1, generator=generator)
        light = 0.4 * torch.rand(batch, 1, 1, 1, generator=generator) - 0.2
        images = (images * gain * tint + light).clamp(-1, 1)
    return images


def batches(indices: torch.Tensor, size: int, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """`steps` batches of indices, every image once before any is seen again."""
    waiting = indices[:0]
    for _ in range(steps):
        while len(waiting) < size:
            waiting = torch.cat([waiting, indices[torch.randperm(len(indices), generator=generator)]])
        yield waiting[:size]
        waiting = waiting[size:]


def optimise(
    model: torch.nn.Module,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    order: Iterator[torch.Tensor],
    steps: int,
    rate: float,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """AdamW, a tenth of the steps warm-up, cosine to 0."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=rate, weight_decay=WEIGHT_DECAY, fused=True)
    warm_up = max(steps // 10, 1)
    for step, batch in enumerate(order):
        done = (step - warm_up) / max(steps - warm_up, 1)
        factor = (step + 1) / warm_up if step < warm_up else 0.5 * (1 + math.cos(math.pi * done))
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
        after(step + 1)


def config_of(run: Run, data: Images) -> HfViTConfig:
    return HfViTConfig(**WIDTHS, **STARTS[run.start][1], num_labels=data.classes)


def pretrain(run: Run, data: Images, steps: int, rate: float = RATE) -> Any:
    """The encoder that a way of starting leaves: of scratch with its first weights."""
    objective, _, static = STARTS[run.start]
    config, images = config_of(run, data), data.images["train"]
    torch.manual_seed(run.seed)
    generator = torch.Generator().manual_seed(run.seed)
    order = batches(torch.arange(len(images)), run.batch, steps, generator)
    if objective == "contrast":
        return contrast(run, HfViTModel(config), images, order, generator, steps, rate)
    if objective in ("none", "labels"):
        return HfViTForImageClassification(config).vit
    model = HfViTForMaskedPatchPrediction(config).train()
    policy = NextPatch() if objective == "next" else RandomMasking()
    kept = policy.draw(len(images), PATCHES, generator) if static else None

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        seen = varied(images[batch], generator)
        plan = policy.draw(len(batch), PATCHES, generator) if kept is None else [part[batch] for part in kept]
        return model(seen, *plan).loss

    optimise(model, loss_of, order, steps, rate)
    return model.vit


def contrast(
    run: Run, encoder: Any, images: torch.Tensor, order: Any, generator: torch.Generator, steps: int, rate: float
) -> Any:
    options = ContrastiveOptions(hidden_size=256, projection_size=64, normalization=run.norm)  # pyright: ignore[reportArgumentType]
    model = MomentumContrast(encoder, options).train()

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        views = [varied(images[batch], generator, colours=True) for _ in range(2)]
        return model(torch.stack(views, dim=1))["loss"]

    optimise(
        model,
        loss_of,
        order,
        steps,
        rate,
        lambda step: model.update_momentum(momentum_at(step, steps, options.momentum)),
    )
    return encoder


def fine_tune(
    run: Run, encoder: Any, data: Images, labels: int, rate: float, steps: int
) -> HfViTForImageClassification:
    """A classifier on a copy of the encoder, trained whole; "scratch, long" has the pre-training's steps on top."""
    torch.manual_seed(run.seed + 1)
    model = HfViTForImageClassification(config_of(run, data))
    missing, _ = model.vit.load_state_dict(copy.deepcopy(encoder.state_dict()), strict=False)
    assert not [name for name in missing if not name.startswith("pooler.")], missing
    generator = torch.Generator().manual_seed(run.seed + 1)
    chosen = subset(data.labels["train"], labels * data.classes or len(data.labels["train"]), run.seed)
    order = batches(chosen, TUNING_BATCH, steps, generator)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return model(varied(data.images["train"][batch], generator), labels=data.labels["train"][batch]).loss

    optimise(model.train(), loss_of, order, steps, rate)
    return model.eval()


@torch.no_grad()
def accuracy(model: Any, data: Images, split: str) -> float:
    return float((model(data.images[split]).logits.argmax(-1) == data.labels[split]).float().mean())


@torch.no_grad()
def features(encoder: Any, images: torch.Tensor) -> dict[str, Any]:
    """[n, D] of every token that may be read: the mean of the patches, and the class token."""
    special, causal = encoder.config.num_special_tokens, encoder.config.is_causal
    tokens = torch.cat([encoder.eval()(part).last_hidden_state for part in images.split(256)])
    found = {"patches": tokens[:, :PATCHES] if causal else tokens[:, special:]}
    found = {"patches": found["patches"].mean(dim=1)}
    if special:
        found["class token"] = tokens[:, -1] if causal else tokens[:, 0]
    return {name: value.numpy() for name, value in found.items()}


def probe(encoder: Any, data: Images, labels: int, seed: int) -> tuple[float, float, str]:
    """Validation and test accuracy of the linear probe, and which features it reads."""
    of = {split: features(encoder, data.images[split]) for split in ("train", "validation", "test")}
    chosen = subset(data.labels["train"], labels * data.classes or len(data.labels["train"]), seed).numpy()
    best = (-1.0, 0.0, "")
    for name in of["train"]:
        found = Probe.fit(of["train"][name][chosen], data.labels["train"][chosen].numpy(), 1.0)
        scores = [found.score(of[split][name], data.labels[split].numpy()) for split in ("validation", "test")]
        best = max(best, (scores[0], scores[1], name), key=lambda candidate: candidate[0])
    return best


def carry_out(run: Run, data: Images, rate: float, scale: float) -> dict[str, Any]:
    steps, tuning = max(int(STEPS * scale), 1), max(int(TUNING_STEPS * scale), 1)
    long = tuning + (steps if STARTS[run.start][0] == "labels" else 0)
    started = time.process_time()
    encoder = pretrain(run, data, steps)
    seconds = time.process_time() - started
    line: dict[str, Any] = {**asdict(run), "scale": scale, "pretraining_cpu_seconds": round(seconds, 2)}
    if run.kind == "rate":
        line["validation_accuracy"] = accuracy(fine_tune(run, encoder, data, 20, run.rate, long), data, "validation")
    else:
        tuned = {
            n: accuracy(fine_tune(run, encoder, data, n, rate, long), data, "test")
            for n in TUNED[: 1 if run.kind == "moco" else None]
        }
        probed = {n: probe(encoder, data, n, run.seed) for n in PROBED}
        line |= {
            "tuning_rate": rate,
            "fine_tuned": {str(n): round(value, 4) for n, value in tuned.items()},
            "probe": {str(n): round(value, 4) for n, (_, value, _) in probed.items()},
            "probe_reads": {str(n): name for n, (*_, name) in probed.items()},
        }
    return line | {
        "encoder_parameters": sum(parameter.numel() for parameter in encoder.parameters()),
        "cpu_seconds": round(time.process_time() - started, 2),
        "others_load": round(others_load(), 2),
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "versions": {package: version(package) for package in ("torch", "transformers", "scikit-learn")},
        "fingerprint": data.fingerprint,
    }


def trials() -> list[Run]:
    return [Run("rate", "digits", start, 0, rate=rate) for start in ("scratch", "masked") for rate in RATES]


def chosen_rate(lines: list[dict[str, Any]], start: str) -> float:
    """The best on validation images; of equals the lowest. Every pre-trained start has the rate of "masked"."""
    kind = "scratch" if start.startswith("scratch") else "masked"
    found = {
        line["rate"]: line["validation_accuracy"] for line in lines if (line["kind"], line["start"]) == ("rate", kind)
    }
    return max(sorted(found), key=lambda rate: found[rate])


def sweeps(only: str | None) -> list[Run]:
    """Seed by seed, so that what is there at any time can be compared."""
    runs: list[Run] = []
    for seed in SEEDS:
        runs += [Run("main", data, start, seed) for data in ("digits", "photos") for start in STARTS]
        # Batch norm at the usual batch is in the first sweep.
        others = [choice for choice in MOCO if choice != (BATCH, "batch")]
        runs += [Run("moco", "digits", "contrast", seed, batch, norm) for batch, norm in others]
    return [run for run in runs if only in (None, run.kind)]


def run_of(line: dict[str, Any]) -> Run:
    return Run(**{name: line[name] for name in Run.__dataclass_fields__})


def carry_out_all(runs: list[Run], path: Path, scale: float, limit: int | None) -> None:
    finished, data = {run_of(line) for line in read(path)}, dict[str, Images]()
    path.parent.mkdir(parents=True, exist_ok=True)
    for run in [run for run in runs if run not in finished][:limit]:
        if run.data not in data:
            data[run.data] = load(run.data)
        rate = 0.0 if run.kind == "rate" else chosen_rate(read(path), run.start)
        line = carry_out(run, data[run.data], rate, scale)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            {name: value for name, value in line.items() if name not in ("versions", "cpu", "fingerprint")}, flush=True
        )


COLUMNS = [("probe", n) for n in PROBED] + [("fine_tuned", n) for n in TUNED]


def percent(lines: list[dict[str, Any]], what: str, labels: int) -> tuple[float, float]:
    mean, deviation = spread([{"value": line[what][str(labels)]} for line in lines], "value")
    return 100 * mean, 100 * deviation


def table(rows: dict[str, list[dict[str, Any]]]) -> None:
    found = [(what, n) for what, n in COLUMNS if all(str(n) in line[what] for own in rows.values() for line in own)]
    head = [f"{what.replace('_', '-')} {n or 'all'}" for what, n in found]
    print(f"| | {' | '.join(head)} | encoder | seconds (CPU) | seeds |\n|{'---|' * (len(head) + 4)}")
    for name, lines in rows.items():
        cells = ["{:.1f} ± {:.1f}".format(*percent(lines, what, n)) for what, n in found]
        seconds = spread(lines, "pretraining_cpu_seconds")[0]
        print(f"| {name} | {' | '.join(cells)} | {lines[0]['encoder_parameters']:,} | {seconds:.0f} | {len(lines)} |")


def summarise(path: Path) -> None:
    """Print the tables, and draw them beside the results."""
    from matplotlib.figure import Figure

    lines = read(path)
    figure = Figure(figsize=(13, 8), layout="constrained")
    panels = figure.subplots(2, 3)
    for row, data in enumerate(("digits", "photos")):
        found = {
            start: [x for x in lines if (x["kind"], x["data"], x["start"]) == ("main", data, start)] for start in STARTS
        }
        found = {start: own for start, own in found.items() if own}
        print(f"\n{data}, test accuracy (%), by labelled images a class\n")
        table(found)
        for column, (what, budgets) in enumerate((("probe", PROBED), ("fine_tuned", TUNED))):
            for start, own in found.items():
                points = [percent(own, what, n) for n in budgets]
                panels[row, column].errorbar(
                    range(len(budgets)), *zip(*points, strict=True), marker="o", capsize=3, label=start
                )
            panels[row, column].set_xticks(range(len(budgets)), [f"{n} a class" if n else "all" for n in budgets])
            panels[row, column].set(title=f"{data}: {what.replace('_', '-')}", ylabel="test accuracy (%)")
    panels[0, 1].legend(fontsize=7)
    moco = [
        line
        for line in lines
        if line["kind"] == "moco" or (line["kind"], line["start"], line["data"]) == ("main", "contrast", "digits")
    ]
    rows = {
        f"{norm} norm, batch {batch}": [x for x in moco if (x["batch"], x["norm"]) == (batch, norm)]
        for batch, norm in MOCO
    }
    rows = {name: own for name, own in rows.items() if own}
    print("\ndigits, momentum contrast by batch size and norm of the heads, the same number of steps\n")
    table(rows)
    for panel, what in ((panels[0, 2], "probe"), (panels[1, 2], "fine_tuned")):
        for norm in ("batch", "none"):
            points = [
                (b, *percent(own, what, 20))
                for b, n in MOCO
                if n == norm and (own := [x for x in moco if (x["batch"], x["norm"]) == (b, n)])
            ]
            if points:
                panel.errorbar(*zip(*points, strict=True), marker="o", capsize=3, label=f"{norm} norm")
        panel.set(
            xscale="log",
            xlabel="batch",
            ylabel="test accuracy (%)",
            title=f"contrast: {what.replace('_', '-')}, 20 a class",
        )
        panel.legend()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    rates = {kind: chosen_rate(lines, kind) for kind in ("scratch", "masked")}
    print(f"\nFine-tuning rates {rates}; ± is one standard deviation over seeds; plot in {path.with_suffix('.png')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/pretraining.jsonl"))
    parser.add_argument("--only", choices=("main", "moco"), help="one sweep alone")
    parser.add_argument("--limit", type=int, help="at most this many of the runs that are asked for (a smoke test)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers of steps (a smoke test)")
    parser.add_argument("--summary", action="store_true", help="tables and plots of the finished runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.summary:
        carry_out_all(trials(), options.output, options.scale, None)
        carry_out_all(sweeps(options.only), options.output, options.scale, options.limit)
    summarise(options.output)


if __name__ == "__main__":
    main()
