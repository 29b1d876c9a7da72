"""Everything that `hf-vit cost` tells of a model: its forward pass, a training, what that takes, and what one took."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from hf_vit.conversion.loading import find_config
from hf_vit.cost.estimate import DEFAULT_UTILISATION, CostEstimate, estimate
from hf_vit.cost.flops import Macs, forward_macs
from hf_vit.cost.flops import training_flops as count_training
from hf_vit.cost.runs import MeasuredRun, measured_run
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import as_pair


@final
@dataclass(frozen=True)
class CostSummary:
    """The cost of a model.

    Attributes:
        image_size: (height, width) px.
        macs: multiply-adds of a forward pass on one image, by part.
        images: of the training, every epoch's counted; None where none was asked for.
        training_flops: that they cost.
        estimate: time and money, where a device was told.
        measured: the last training in the model's folder, where there was one.
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
        """Of one image."""
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
    found = None
    if device_flops is not None:
        if flops is None:
            raise UserError("the time of a training follows from its images; give --images, and --epochs if above 1")
        share = DEFAULT_UTILISATION if utilisation is None else utilisation
        found = estimate(
            flops, device_flops=device_flops, devices=1 if devices is None else devices, utilisation=share, price=price
        )
    elif any(value is not None for value in (devices, utilisation, price)):
        raise UserError("time and money follow from the rate of a device; give --device-flops, its peak FLOP/s")
    size = as_pair(config.image_size if image_size is None else image_size)
    return CostSummary(str(model), size, macs, seen, flops, found, run)
