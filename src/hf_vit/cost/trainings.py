"""Time and money of a training from its FLOPs, beside what finished ones took (facts.json)."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch

from hf_vit.conversion.loading import find_config
from hf_vit.cost.flops import Macs, forward_macs
from hf_vit.cost.flops import training_flops as count_training
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.results.facts import Facts, Record, fraction

# Of a peak rate, where nothing is measured: the original runs kept 0.32 (H/14) and 0.43 (L/16) of a TPUv3 core's
# 61.5 TFLOP/s busy, see hf_vit.cost.blog.
DEFAULT_UTILISATION = 0.4
# Of an image: contrastive training runs two views through the model, and forward through a second, slower one.
_CONTRASTIVE = 2 * (3 + 1) / 3
_SECONDS = 0.3  # of measuring a rate
_SIDES = {"cpu": 1024, "cuda": 8192}  # large enough for the full rate, small enough for many products in the time


def matmul_flops_per_second(device: str = "cpu", precision: Literal["fp32", "bf16"] = "fp32") -> float:
    """Return the FLOP/s of the fastest of many square matrix products on a torch device; takes a third of a second."""
    place = torch.device(device)
    side = _SIDES.get(place.type, 2048)
    left = torch.ones(side, side, device=place, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)

    def wait() -> None:
        if place.type != "cpu":
            torch.accelerator.synchronize()

    best, until = float("inf"), time.perf_counter() + _SECONDS
    torch.mm(left, left)
    while best == float("inf") or time.perf_counter() < until:
        wait()
        start = time.perf_counter()
        torch.mm(left, left)
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


@final
@dataclass(frozen=True)
class CostEstimate:
    """What a training at devices * device_flops * utilisation FLOP/s is expected to take.

    `price` is that of one device for an hour, `dollars` that of all device hours; None without a price.
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
    """Time and money of a training.

    Args:
        training_flops: see `hf_vit.cost.training_flops`.
        device_flops: peak FLOP/s of one device at the precision of the training, a multiply-add being 2.
        devices: how many of them.
        utilisation: share of the peak that the training keeps, losses to communication and input included.
        price: dollars a device-hour.

    Raises:
        UserError: a number that is not above 0 (a price may be 0), or a utilisation above 1.
    """
    for name, value in (("FLOPs of the training", training_flops), ("device FLOP/s", device_flops)):
        if not 0 < value < math.inf:
            raise UserError(f"{name}: {value:g} is not possible; give a finite number above 0")
    if devices < 1:
        raise UserError(f"{devices} devices cannot train; give at least 1")
    if not 0 < utilisation <= 1:
        raise UserError(f"utilization {utilisation:g} must be above 0 and at most 1: a share of the peak")
    if price is not None and not 0 <= price < math.inf:
        raise UserError(f"price {price:g} is negative or not finite; give dollars per device-hour")
    seconds = training_flops / (devices * device_flops * utilisation)
    hours = devices * seconds / 3600
    dollars = None if price is None else hours * price
    return CostEstimate(training_flops, devices, device_flops, utilisation, price, seconds, hours, dollars)


@final
@dataclass(frozen=True)
class MeasuredRun:
    """A finished training: all images that it saw, and its seconds with evaluations and checkpoints.

    `error` is 1 - top-1 accuracy of the last evaluation after it; None without one.
    """

    folder: str
    images: float
    training_flops: float
    seconds: float | None
    hardware: str | None
    error: float | None

    @property
    def flops_per_second(self) -> float | None:
        """Return what the training sustained, all its time counted."""
        return self.training_flops / self.seconds if self.seconds else None


def measured_run(folder: str | os.PathLike[str]) -> MeasuredRun | None:
    """Return the last training of a model folder; None if its facts.json records none.

    Raises:
        UserError: facts.json or config.json is damaged, or the record does not tell how many images were seen.
    """
    records = Facts.load(folder).records
    places = [place for place, record in enumerate(records) if record.kind == "training"]
    if not places:
        return None
    training = records[places[-1]]
    config, task = find_config(folder)
    images = _count_images(training, Path(folder).name)
    passes = _CONTRASTIVE if training.values.get("objective") == "contrastive" else 1
    accuracies = [fraction(each.values.get("top1")) for each in records[places[-1] :] if each.kind == "evaluation"]
    last = next((accuracy for accuracy in reversed(accuracies) if accuracy is not None), None)
    return MeasuredRun(
        folder=Path(folder).name,
        images=images,
        training_flops=passes * count_training(config, images, task=task),
        seconds=training.seconds,
        hardware=str(training.hardware["name"]) if "name" in training.hardware else None,
        error=None if last is None else 1 - last,
    )


def _count_images(training: Record, folder: str) -> float:
    values, recipe = training.values, training.values.get("recipe")
    seen = values.get("images_seen")  # older records do not have it
    if isinstance(seen, int | float):
        return float(seen)
    steps, batch = values.get("steps"), recipe.get("batch_size") if isinstance(recipe, dict) else None
    if not isinstance(steps, int | float) or not isinstance(batch, int | float):
        raise UserError(
            f"the training record in {folder}/facts.json lacks steps or recipe.batch_size, so its "
            "images cannot be counted; give --images"
        )
    ratio = values.get("unlabelled_ratio", 0)  # a batch counts labeled images
    return float(steps * batch * (1 + (ratio if isinstance(ratio, int) else 0)))


@final
@dataclass(frozen=True)
class CostSummary:
    """The cost of a model: multiply-adds of a forward pass by part, a training on so many images in all, its estimate
    where a device was given, and the last training in the model's folder.
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
        """Return those of one image."""
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
    """Count a model's FLOPs and, as far as asked for, what a training takes.

    Args:
        model: a variant such as "L/16", or the folder of a saved model.
        image_size: (height, width) px; by default the model's own.
        images: of the training set; by default those that a trained folder's facts.json tells of.
        epochs: how often each is seen, 1 by default.
        devices, device_flops, utilisation, price: see `hf_vit.cost.estimate`.

    Raises:
        UserError: bad input, or something asked for that needs what was not told.
    """
    config, task = find_config(model)
    macs = forward_macs(config, image_size, task)
    run = measured_run(model) if Path(model).expanduser().is_dir() else None
    for name, value in {"--images": images, "--epochs": epochs}.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} {value:g} is not possible; give a finite number above 0")
    if images is None and epochs is not None:
        raise UserError("epochs are counted in passes over a training set; give --images, the size of that set, too")
    seen = images * (1 if epochs is None else epochs) if images is not None else run.images if run else None
    flops = None if seen is None else count_training(config, seen, image_size, task)
    options: dict[str, Any] = {"devices": devices, "utilisation": utilisation, "price": price}
    options = {name: value for name, value in options.items() if value is not None}
    if device_flops is None and options:
        raise UserError("time and money follow from the rate of a device; give --device-flops, its peak FLOP/s")
    if device_flops is not None and flops is None:
        raise UserError("the time of a training follows from its images; give --images, and --epochs if above 1")
    size, expected = as_pair(config.image_size if image_size is None else image_size), None
    if device_flops is not None and flops is not None:
        expected = estimate(flops, device_flops=device_flops, **options)
    return CostSummary(str(model), size, macs, seen, flops, expected, run)
