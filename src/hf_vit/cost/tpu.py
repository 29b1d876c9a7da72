"""A device beside the TPU cores that the paper's trainings ran on: rates, and how long it would take.

Nothing here runs on a TPU: the cores' numbers are the paper's core-days and Google's data sheet, the device's its rate.
"""

from dataclasses import dataclass
from typing import final

from hf_vit.cost.blog import TPU_CORE_FLOPS, corrected_estimate
from hf_vit.errors import UserError


@final
@dataclass(frozen=True)
class BesideTpu:
    """One training on TPUv3 cores and on another device.

    Attributes:
        core_days: TPUv3-core-days that the paper states.
        tpu_core_flops: bfloat16 peak of a core, FLOP/s.
        sustained_flops: FLOP/s that the training kept on a core, from its FLOPs and its core-days.
        tpu_utilisation: the same as a share of the peak.
        device_flops: rate of the device, FLOP/s.
        cores: TPU cores of the same rate.
        days: that the device takes if it keeps the same share of its rate.
        least_days: that it takes if it keeps all of it.
    """

    model: str
    core_days: float
    tpu_core_flops: float
    sustained_flops: float
    tpu_utilisation: float
    device_flops: float
    cores: float
    days: float
    least_days: float


def beside_tpu(model: str, device_flops: float) -> BesideTpu:
    """The paper's training of "L/16" or "H/14" on a device of so many FLOP/s.

    Raises:
        UserError: the paper states no core-days for this model, or the rate is not above 0.
    """
    if not 0 < device_flops < float("inf"):
        raise UserError(f"device FLOP/s: {device_flops:g} is not possible; give a finite number above 0")
    tpu = corrected_estimate(model)
    cores = device_flops / TPU_CORE_FLOPS
    return BesideTpu(
        model=model,
        core_days=tpu.core_days,
        tpu_core_flops=TPU_CORE_FLOPS,
        sustained_flops=tpu.sustained_flops,
        tpu_utilisation=tpu.tpu_utilisation,
        device_flops=device_flops,
        cores=cores,
        days=tpu.core_days / cores,
        least_days=tpu.core_days * tpu.sustained_flops / device_flops,
    )
