"""Estimate time and money of a training from its FLOPs, and read the cost of finished trainings from facts.json."""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch

from hf_vit.conversion.loading import find_config
from hf_vit.cost.flops import Macs, forward_macs
from hf_vit.cost.flops import training_flops as count_training
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.results.facts import DataFact, Facts, Record, as_fraction

# Fraction of the peak rate if nothing was measured. The original trainings reached 0.32 (H/14) and 0.43 (L/16) of a
# TPUv3 core's 61.5 TFLOP/s, see hf_vit.cost.blog.
DEFAULT_UTILISATION = 0.4
# Factor of contrastive training per image: two views pass forward and backward through the model, and forward
# through its momentum copy.
_CONTRASTIVE = 2 * (3 + 1) / 3
_SECONDS = 0.1  # duration of measuring a rate
_SIDES = {"cpu": 1024, "cuda": 8192}  # matrix sizes that reach the full rate and still allow many products


def matmul_flops_per_second(device: str = "cpu", precision: Literal["fp32", "bf16"] = "fp32") -> float:
    """Return the FLOP/s of the fastest of many square matrix products on a torch device, measured for 0.1 s."""
    torch_device = torch.device(device)
    side = _SIDES.get(torch_device.type, 2048)
    matrix = torch.ones(side, side, device=torch_device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)

    def wait() -> None:
        if torch_device.type != "cpu":
            torch.accelerator.synchronize(torch_device)

    best = float("inf")
    end = time.perf_counter() + _SECONDS
    torch.mm(matrix, matrix)
    while best == float("inf") or time.perf_counter() < end:
        wait()
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


@final
@dataclass(frozen=True)
class CostEstimate:
    """The expected cost of a training at devices * device_flops * utilisation FLOP/s.

    `price` is dollars per device-hour, `dollars` the total price; both are None without a price.
    """

    training_flops: float
    devices: int
    device_flops: float
    utilisation: float
    price: float | None
    seconds: float
    device_hours: float
    dollars: float | None


def estimate(
    training_flops: float,
    *,
    device_flops: float,
    devices: int = 1,
    utilisation: float = DEFAULT_UTILISATION,
    price: float | None = None,
) -> CostEstimate:
    """Estimate time and money of a training.

    Args:
        training_flops: see `hf_vit.cost.training_flops`.
        device_flops: peak FLOP/s of one device in the training's precision, counting a multiply-add as 2.
        devices: number of devices.
        utilisation: fraction of the peak that the training reaches, including losses to communication and data loading.
        price: dollars per device-hour.

    Raises:
        UserError: a number is not above 0 (a price may be 0), or the utilization is above 1.
    """
    for name, value in (("FLOPs of the training", training_flops), ("device FLOP/s", device_flops)):
        if not 0 < value < math.inf:
            raise UserError(f"the {name} are {value:g}; give a finite number above 0")
    if devices < 1:
        raise UserError(f"the number of devices is {devices}; give at least 1")
    if not 0 < utilisation <= 1:
        raise UserError(
            f"the utilization {utilisation:g} is out of range; give a fraction of the peak, above 0 and at most 1"
        )
    if price is not None and not 0 <= price < math.inf:
        raise UserError(f"the price {price:g} is negative or not finite; give dollars per device-hour")
    seconds = training_flops / (devices * device_flops * utilisation)
    hours = devices * seconds / 3600
    dollars = None if price is None else hours * price
    return CostEstimate(training_flops, devices, device_flops, utilisation, price, seconds, hours, dollars)


@final
@dataclass(frozen=True)
class MeasuredRun:
    """A finished training: the images of all epochs, and its duration including evaluations and checkpoints.

    `error` is 1 - top-1 accuracy of the last evaluation after it with the most images, of its data if possible, and not
    of training images; else None. `training_flops` is 0 for a head on cached features, whose backbone did not run, and
    leaves out a teacher, whose size is not recorded.
    """

    folder: str
    images: float
    training_flops: float
    seconds: float | None
    hardware: str | None
    error: float | None

    @property
    def flops_per_second(self) -> float | None:
        """Return the mean FLOP/s over the training's whole duration; None if it or the FLOPs are unknown."""
        return self.training_flops / self.seconds if self.seconds and self.training_flops else None


def measured_run(folder: str | os.PathLike[str]) -> MeasuredRun | None:
    """Return the last training of a model folder; None if facts.json records none, or not its number of images.

    Raises:
        UserError: facts.json or config.json is damaged.
    """
    training: Record | None = None
    trained_fingerprint: str | None = None
    accuracies: dict[tuple[bool, bool, int], float] = {}  # of the evaluations after the last training, by their rank
    for record in Facts.load(folder).records:
        data = record.data or DataFact(name="unnamed")
        if record.kind == "training":
            training, trained_fingerprint, accuracies = record, data.fingerprint, {}
        elif record.kind == "evaluation" and record.values.get("protocol", "top1") == "top1" and data.split != "train":
            accuracy = as_fraction(record.values.get("top1"))
            if accuracy is not None:  # one of fewer images, or of other pixels, does not replace a complete one
                rank = data.fingerprint == trained_fingerprint, not record.values.get("fed"), data.size or 0
                accuracies[rank] = accuracy
    images = None if training is None else _count_images(training.values)
    if training is None or images is None:
        return None
    accuracy = accuracies[max(accuracies)] if accuracies else None
    config, task = find_config(folder)
    return MeasuredRun(
        folder=Path(folder).name,
        images=images,
        training_flops=_count_passes(training.values, config.num_stages) * count_training(config, images, task=task),
        seconds=training.seconds,
        hardware=str(training.hardware["name"]) if "name" in training.hardware else None,
        error=None if accuracy is None else 1 - accuracy,
    )


def _count_passes(values: Mapping[str, Any], depth: int) -> float:
    """Return the FLOPs of a training in units of those that `training_flops` counts, for a model with `depth` blocks.

    Of its three equal parts, the gradients of weights are missing for frozen weights, and the backward pass is missing
    below the first trained weight. SAM does everything twice.
    """
    if values.get("cache_features"):  # the backbone did not run
        return 0
    objective = values.get("objective")
    if isinstance(objective, dict) and objective.get("objective") == "contrastive":
        return _CONTRASTIVE
    recipe = values.get("recipe")
    settings: dict[str, Any] = recipe if isinstance(recipe, dict) else {}
    tuned_share = min(settings.get("tuned_blocks", 0) / max(depth, 1), 1)
    parts = {"head": 1, "last-blocks": 1 + 2 * tuned_share, "lora": 2}.get(settings.get("tune", "all"), 3)
    return parts / 3 * (2 if settings.get("sam_rho") else 1)


def _count_images(values: Mapping[str, Any]) -> float | None:
    """Return how many images a training processed, counting repetitions; None if unknown, as of a model soup."""
    recipe = values.get("recipe")
    images_seen = values.get("images_seen")  # missing in older records
    if isinstance(images_seen, int | float):
        return float(images_seen)
    steps = values.get("steps")
    batch = recipe.get("batch_size") if isinstance(recipe, dict) else None
    if not isinstance(steps, int | float) or not isinstance(batch, int | float):
        return None
    ratio = values.get("unlabelled_ratio", 0)  # the batch size counts labeled images only
    return float(steps * batch * (1 + (ratio if isinstance(ratio, int) else 0)))


@final
@dataclass(frozen=True)
class CostSummary:
    """The cost of a model.

    Attributes:
        macs: multiply-adds of a forward pass by part of the model.
        images: training images of all epochs.
        training_flops: FLOPs of a training of all weights on these images, or of the training in the folder.
        estimate: its expected time and price, if a device was given.
        measured: the last training in the model's folder.
    """

    model: str
    image_size: tuple[int, int]
    macs: Macs
    images: float | None
    training_flops: float | None
    estimate: CostEstimate | None
    measured: MeasuredRun | None

    @property
    def forward_flops(self) -> int:
        """Return the FLOPs of a forward pass for one image."""
        return 2 * sum(self.macs.values())


def cost_summary(
    model: str | os.PathLike[str],
    *,
    image_size: tuple[int, int] | None = None,
    images: float | None = None,
    epochs: float | None = None,
    devices: int | None = None,
    device_flops: float | None = None,
    utilisation: float | None = None,
    price: float | None = None,
) -> CostSummary:
    """Count a model's FLOPs and, if asked for, estimate a training.

    Args:
        model: a variant such as "L/16", or the folder of a saved model.
        image_size: (height, width) px; by default the model's.
        images: size of the training set; by default the number recorded in the folder's facts.json.
        epochs: passes over the training set, 1 by default.
        devices, device_flops, utilisation, price: see `hf_vit.cost.estimate`.

    Raises:
        UserError: an argument is out of range, or one that it needs is missing.
    """
    config, task = find_config(model)
    macs = forward_macs(config, image_size, task)
    run = measured_run(folder) if (folder := Path(model).expanduser()).is_dir() else None
    for name, value in {"--images": images, "--epochs": epochs}.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} {value:g} is out of range; give a finite number above 0")
    if images is None and epochs is not None:
        raise UserError("--epochs was given without --images; also give --images, the size of the training set")
    total_images = (run and run.images) if images is None else images * (epochs or 1)
    flops = None if total_images is None else count_training(config, total_images, image_size, task)
    if flops and images is None and run and run.training_flops:  # it may have trained a part of the weights only
        flops *= run.training_flops / count_training(config, run.images, task=task)
    given: dict[str, Any] = {"devices": devices, "utilisation": utilisation, "price": price}
    options = {name: value for name, value in given.items() if value is not None}
    cost_estimate = None
    if device_flops is not None:
        if flops is None:
            raise UserError(
                "the time of a training needs its number of images; give --images, and --epochs if it is not 1"
            )
        cost_estimate = estimate(flops, device_flops=device_flops, **options)
    elif options:
        raise UserError("time and price need the speed of a device; give --device-flops, its peak FLOP/s")
    size = as_pair(config.image_size if image_size is None else image_size)
    return CostSummary(str(model), size, macs, total_images, flops, cost_estimate, run)
