"""Time and money of a training from its FLOPs: what any number of devices need at a share of their peak rate."""

from dataclasses import dataclass
from math import isfinite
from typing import final

from hf_vit.errors import UserError

# Of a peak rate, where nothing is measured: the original runs kept 0.32 (H/14) and 0.43 (L/16) of a TPUv3 core's
# 61.5 TFLOP/s busy, see hf_vit.cost.blog.
DEFAULT_UTILISATION = 0.4


@final
@dataclass(frozen=True)
class CostEstimate:
    """What a training is expected to take.

    Attributes:
        training_flops: of the whole training.
        devices, device_flops, utilisation: the training runs at devices * device_flops * utilisation FLOP/s.
        price: of one device for an hour, in dollars; None where no money was asked for.
        seconds: time by the clock.
        device_hours: of all devices together.
        dollars: device_hours * price.
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
        if not (value > 0 and isfinite(value)):
            raise UserError(f"{name}: {value:g} is not possible; give a finite number above 0")
    if devices < 1:
        raise UserError(f"{devices} devices cannot train; give at least 1")
    if not 0 < utilisation <= 1:
        raise UserError(f"utilization {utilisation:g} must be above 0 and at most 1: a share of the peak")
    if price is not None and not (price >= 0 and isfinite(price)):
        raise UserError(f"price {price:g} is negative or not finite; give dollars per device-hour")
    seconds = training_flops / (devices * device_flops * utilisation)
    hours = devices * seconds / 3600
    dollars = None if price is None else hours * price
    return CostEstimate(training_flops, devices, device_flops, utilisation, price, seconds, hours, dollars)
