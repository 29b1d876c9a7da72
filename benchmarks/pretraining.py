"""What pre-training without labels gives on few real images: scratch against masked patches, next patches and contrast.

Data: the UCI digits (1,257 / 180 / 360 for training, validation and test) at 32x32 px, and crops of eight photographs
(800 / 160 / 320, the splits own different tiles), both RGB. One ViT (3 layers, 64 wide, patch 8 px, 16 patches) for
all. Every pre-training takes `STEPS` steps on all training images, every fine-tuning `TUNING_STEPS` on 20 labelled
images a class or on all; "scratch, long" is fine-tuned for the sum of both. `--scale` multiplies all of them. Images
are varied alike for all (random crops of 85 to 100% of a side); contrast also varies brightness, contrast and the
channels' gains. Masked patches come with each of the paper's targets (arXiv 2010.11929, B.1.2).

For each start, data set and number of labels every pair of a pre-training and a fine-tuning rate is tried with seed 0;
the best on VALIDATION images is run with five seeds, and each of those looks once at the test images. The linear probe
is a logistic regression on standardised frozen features: the mean of the patch tokens, or the class token, whichever is
better on validation images; each encoder has the pre-training rate at which its probe is best on validation images.
"""

import copy
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from records import Job, Records, script_options
from script import vit_sizes
from small_trainings import SIDE, Images, batches, compute_accuracy, load_images, subset, train_steps
from tables import TABLES
from torch.nn import functional as F

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTForMaskedPatchPrediction, HfViTModel
from hf_vit.evaluation.protocols.probes import Probe
from hf_vit.training.tasks.momentum_contrast import ContrastiveOptions, MomentumContrast, compute_momentum
from hf_vit.training.tasks.patch_prediction import NextPatch, RandomMasking

PATCHES = 16
WIDTHS = vit_sizes(64, 128, image_size=SIDE, patch_size=8, num_hidden_layers=3)
STEPS, TUNING_STEPS, BATCH, TUNING_BATCH = 200, 200, 64, 32
# Ways to start: name -> (objective, fields of the configuration).
STARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "scratch": ("none", {}),
    "scratch, long": ("labels", {}),
    "masked, mean colour": ("masked", {}),
    "masked, downsampled": ("masked", {"prediction_target": "downsampled"}),
    "masked, pixels": ("masked", {"prediction_target": "pixels"}),
    "next patch": ("next", {"is_causal": True, "predict_next_patch": True}),
    "contrast": ("contrast", {}),
}
RATES, TUNING_RATES = (2.5e-4, 1e-3, 4e-3), (5e-4, 1e-3, 2e-3, 4e-3)
DATA, LABELS, SEEDS = ("digits", "photos"), (20, 0), (0, 1, 2, 3, 4)
TRIALS = {"run": "trial", "probe": "probe trial"}


@dataclass(frozen=True)
class Run:
    """The settings of a training; equal settings mean the same run."""

    data: str
    start: str
    seed: int


def vary_images(images: torch.Tensor, generator: torch.Generator, colours: bool = False) -> torch.Tensor:
    """Return random crops of 85 to 100% of each side, resized bilinearly, with changed light if `colours` is set."""
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


def build_config(run: Run, data: Images) -> HfViTConfig:
    return HfViTConfig(**WIDTHS, **STARTS[run.start][1], num_labels=data.classes)


def pretrain(run: Run, data: Images, steps: int, rate: float) -> Any:
    """Return the encoder after pre-training; from scratch, with its initial weights."""
    objective, _ = STARTS[run.start]
    config, images = build_config(run, data), data.images["train"]
    torch.manual_seed(run.seed)
    generator = torch.Generator().manual_seed(run.seed)
    order = batches(torch.arange(len(images)), steps, generator, BATCH)
    if objective == "contrast":
        options = ContrastiveOptions(hidden_size=256, projection_size=64, normalization="batch")
        contrast = MomentumContrast(encoder := HfViTModel(config), options).train()

        def contrast_loss(batch: torch.Tensor) -> torch.Tensor:
            views = [vary_images(images[batch], generator, colours=True) for _ in range(2)]
            return contrast(torch.stack(views, dim=1))["loss"]

        def after(step: int) -> None:
            contrast.update_momentum(compute_momentum(step, steps, options.momentum))

        train_steps(contrast, contrast_loss, order, steps, rate, after, fused=True)
        return encoder
    if objective in ("none", "labels"):
        return HfViTForImageClassification(config).vit
    model = HfViTForMaskedPatchPrediction(config).train()
    policy = NextPatch() if objective == "next" else RandomMasking()

    def compute_loss(batch: torch.Tensor) -> torch.Tensor:
        pixels = vary_images(images[batch], generator)
        return model(pixels, *policy.draw(len(batch), PATCHES, generator)).loss

    train_steps(model, compute_loss, order, steps, rate, fused=True)
    return model.vit


def fine_tune(run: Run, encoder: Any, data: Images, labels: int, rate: float, steps: int) -> Any:
    """Return a classifier on a copy of the encoder, with all weights trained."""
    torch.manual_seed(run.seed + 1)
    model = HfViTForImageClassification(build_config(run, data))
    missing, _ = model.vit.load_state_dict(copy.deepcopy(encoder.state_dict()), strict=False)
    assert not [name for name in missing if not name.startswith("pooler.")], missing
    generator = torch.Generator().manual_seed(run.seed + 1)
    indices = subset(data.labels["train"], labels * data.classes or len(data.labels["train"]), run.seed)
    order = batches(indices, steps, generator, TUNING_BATCH)

    def compute_loss(batch: torch.Tensor) -> torch.Tensor:
        return model(vary_images(data.images["train"][batch], generator), labels=data.labels["train"][batch]).loss

    train_steps(model.train(), compute_loss, order, steps, rate, fused=True)
    return model.eval()


@torch.no_grad()
def extract_features(encoder: Any, images: torch.Tensor) -> dict[str, Any]:
    """Return features [n, D] by kind: the mean of the patches, and the class token."""
    special, causal = encoder.config.num_special_tokens, encoder.config.is_causal
    tokens = torch.cat([encoder.eval()(part).last_hidden_state for part in images.split(256)])
    features = {"patches": (tokens[:, :PATCHES] if causal else tokens[:, special:]).mean(dim=1)}
    if special:
        features["class token"] = tokens[:, -1] if causal else tokens[:, 0]
    return {name: value.numpy() for name, value in features.items()}


def fit_probe(encoder: Any, data: Images, labels: int, seed: int) -> tuple[float, float, str]:
    """Return validation and test accuracy of the linear probe, and which features it uses."""
    features = {split: extract_features(encoder, images) for split, images in data.images.items()}
    indices = subset(data.labels["train"], labels * data.classes or len(data.labels["train"]), seed).numpy()
    readings: list[tuple[float, float, str]] = []
    for name in features["train"]:
        probe = Probe.fit(features["train"][name][indices], data.labels["train"][indices].numpy(), 1.0)
        scores = (probe.score(features[s][name], data.labels[s].numpy()) for s in ("validation", "test"))
        readings.append((*scores, name))
    return max(readings, key=lambda reading: reading[0])


def list_trials(kind: str, data: str, start: str, labels: int, scale: float) -> list[Job]:
    """Return every pair of rates with seed 0; a probe has no rates."""
    rates = RATES if not start.startswith("scratch") else (0.0,)
    tunings = [{"tuning_rate": rate} for rate in TUNING_RATES] if kind == "run" else [{}]
    same = {"kind": TRIALS[kind], "data": data, "start": start, "labels": labels, "seed": 0, "scale": scale}
    return [same | {"rate": rate} | tuning for rate, tuning in itertools.product(rates, tunings)]


def jobs(scale: float) -> Iterator[tuple[Job, list[Job]]]:
    """Return all runs with the trials that select their rates; those with the same encoder are adjacent."""
    for data, start in itertools.product(DATA, STARTS):
        kinds = [kind for kind in TRIALS if (kind, start) != ("probe", "scratch, long")]
        readings = [*itertools.product(kinds, LABELS)]
        trials = {(kind, labels): list_trials(kind, data, start, labels, scale) for kind, labels in readings}
        all_trials = itertools.chain.from_iterable(trials.values())
        yield from ((trial, []) for trial in sorted(all_trials, key=lambda trial: trial["rate"]))
        for seed, (kind, labels) in itertools.product(SEEDS, readings):
            same = {"data": data, "start": start, "labels": labels, "seed": seed, "scale": scale}
            yield {"kind": kind, **same}, trials[kind, labels]


def run_job(job: Job, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Pre-train, then fine-tune or probe: a trial at its rates for validation images, a run at the best for test."""
    rates = max(trials, key=lambda trial: trial["accuracy"], default=job)
    data, scale = load_images(job["data"]), job["scale"]
    steps, tuning = (max(1, int(count * scale)) for count in (STEPS, TUNING_STEPS))
    run = Run(job["data"], job["start"], job["seed"])
    start, is_trial = pretrained_encoder(run, steps, rates["rate"]), job["kind"] in TRIALS.values()
    if "tuning_rate" not in rates:
        validation, test, reads = fit_probe(start, data, job["labels"], job["seed"])
        return {"rate": rates["rate"], "reads": reads, "accuracy": validation if is_trial else test}
    tuning += steps if job["start"] == "scratch, long" else 0
    model = fine_tune(run, start, data, job["labels"], rates["tuning_rate"], tuning)
    result = compute_accuracy(model, data, "validation" if is_trial else "test")
    return {"rate": rates["rate"], "tuning_rate": rates["tuning_rate"], "accuracy": result}


@functools.lru_cache(maxsize=1)
def pretrained_encoder(run: Run, steps: int, rate: float) -> Any:
    """Return an encoder that is pre-trained once for all runs of a process; fine-tuning copies it."""
    return pretrain(run, load_images(run.data), steps, rate)


def main() -> None:
    options = script_options(__doc__, "pretraining.jsonl", runner=True)
    options.add_argument("--scale", type=float, default=4.0, help="of all numbers of steps")
    arguments = options.parse_args()
    Records(arguments.output).work(list(jobs(arguments.scale)), run_job, arguments.runner, arguments.address)
    print(TABLES["pretraining"](arguments.output))


if __name__ == "__main__":
    main()
