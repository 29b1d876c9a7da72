"""The price of the original trainings as a blog post estimated it, a corrected estimate, and a comparison with TPUs.

Two trainings of arXiv 2010.11929, table 2 (14 epochs of JFT-300M) are priced on preemptible cloud TPUs and on a machine
with four V100 GPUs. `blog_estimate` repeats the post's arithmetic; `corrected_estimate` replaces the four assumptions
that do not hold, one after the other, and records the effect of each.
"""

from dataclasses import dataclass
from typing import final

from hf_vit.cost.flops import training_flops
from hf_vit.errors import UserError
from hf_vit.variants import variant_config

# TPUv3-core-days in table 2 of the paper, for 14 epochs of 303 million images.
CORE_DAYS = {"L/16": 680.0, "H/14": 2500.0}
JFT_IMAGES = 303e6
EPOCHS = 14

# Prices in the post, in dollars per hour: a virtual machine, a preemptible v3-8, a cloud GPU.
VM_PRICE, TPU_PRICE, GPU_PRICE = 0.095, 2.40, 3.06
# The post's GPU machine relative to one TPU core: number of GPUs, share of their summed speed that they reach together,
# and gain from mixed precision.
GPUS = 4
SCALING = 0.95
MIXED_PRECISION = 1.6

CORES_PER_DEVICE = 8  # cores of a "v3-8", which TPU_PRICE pays for
TPU_CORE_FLOPS = 123e12 / 2  # bfloat16 peak of a TPUv3 chip, which has two cores (Google's documentation of TPU v3)
V100_FLOPS = 125e12  # peak of its tensor cores (NVIDIA's data sheet of the V100 SXM2)


@final
@dataclass(frozen=True)
class BlogEstimate:
    """The post's numbers: prices on TPUs (virtual machine and TPU) and on the GPU machine.

    `speed_up` is the speed of the GPU machine relative to the unit of a core-day.
    """

    model: str
    core_days: float
    tpu_dollars: float
    speed_up: float
    gpu_days: float
    gpu_dollars: float
    assumptions: tuple[str, ...]


@final
@dataclass(frozen=True)
class Correction:
    """One assumption that does not hold, what replaces it, and the number that changes."""

    assumption: str
    instead: str
    quantity: str
    before: float
    after: float


@final
@dataclass(frozen=True)
class CorrectedEstimate:
    """The numbers after all corrections, and the corrections in order.

    `sustained_flops` is the mean FLOP/s of one TPU core during the training, `tpu_utilisation` its fraction of the
    peak.
    """

    model: str
    core_days: float
    device_days: float
    tpu_dollars: float
    speed_up: float
    gpu_days: float
    gpu_dollars: float
    sustained_flops: float
    tpu_utilisation: float
    corrections: tuple[Correction, ...]


@final
@dataclass(frozen=True)
class BesideTpu:
    """One training on TPUv3 cores and on another device; rates are in FLOP/s.

    Attributes:
        cores: number of TPU cores with the same peak rate as the device.
        days: duration on the device at the TPU's utilization.
        least_days: duration on the device at its full rate.
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


def blog_estimate(model: str) -> BlogEstimate:
    """Repeat the post's arithmetic for "L/16" or "H/14".

    Raises:
        UserError: the paper states no core-days for this model.
    """
    core_days = CORE_DAYS.get(model.removeprefix("ViT-"))
    if core_days is None:
        raise UserError(
            f"--mode blog, corrected and tpu only cover {' and '.join(CORE_DAYS)}, for which the paper states "
            f"core-days, not '{model.removeprefix('ViT-')}'; use --mode flops with --device-flops and --price"
        )
    speed_up = GPUS * SCALING * MIXED_PRECISION
    return BlogEstimate(
        model=model,
        core_days=core_days,
        tpu_dollars=core_days * 24 * (VM_PRICE + TPU_PRICE),
        speed_up=speed_up,
        gpu_days=core_days / speed_up,
        gpu_dollars=core_days / speed_up * 24 * GPU_PRICE,
        assumptions=(
            f"every core-day costs as much as a day of a whole TPU device (${VM_PRICE + TPU_PRICE:.3f}/h)",
            f"the machine with {GPUS} GPUs costs ${GPU_PRICE}/h",
            f"mixed precision makes the GPUs {MIXED_PRECISION} times as fast as a TPU core",
            "one V100 is as fast as one TPU core",
            f"{GPUS} GPUs reach {SCALING:.0%} of {GPUS} times the speed of one GPU",
        ),
    )


def corrected_estimate(model: str) -> CorrectedEstimate:
    """Repeat the post's arithmetic with four of its assumptions replaced.

    Raises:
        UserError: the paper states no core-days for this model.
    """
    original = blog_estimate(model)
    device_days = original.core_days / CORES_PER_DEVICE
    machine_price = GPUS * GPU_PRICE
    tpu_dollars = device_days * 24 * (VM_PRICE + TPU_PRICE)
    days_without_factor = original.core_days / (GPUS * SCALING)
    cores_per_gpu = V100_FLOPS / TPU_CORE_FLOPS
    speed_up = GPUS * SCALING * cores_per_gpu
    gpu_days = original.core_days / speed_up
    sustained_flops = training_flops(variant_config(model), JFT_IMAGES * EPOCHS) / (original.core_days * 86400)
    utilization = sustained_flops / TPU_CORE_FLOPS
    # One entry for each of the post's assumptions: its replacement, the quantity, and its value before and after.
    changes = (
        (
            f"the price applies to a device with {CORES_PER_DEVICE} cores, so {device_days:g} device-days are paid",
            *("TPU dollars", original.tpu_dollars, tpu_dollars),
        ),
        (
            f"that is the price of one V100; {GPUS} cost ${machine_price:.2f}/h",
            *("GPU dollars", original.gpu_dollars, original.gpu_days * 24 * machine_price),
        ),
        (
            "the TPU already computed in bfloat16, so the core-days include this gain, which must not count twice",
            *("GPU days", original.gpu_days, days_without_factor),
        ),
        (
            f"according to the peak rates of {V100_FLOPS / 1e12:g} and {TPU_CORE_FLOPS / 1e12:g} TFLOP/s, one V100 "
            f"equals {cores_per_gpu:.2f} cores at the same utilization ({utilization:.0%} on the TPU)",
            *("GPU days", days_without_factor, gpu_days),
        ),
    )
    return CorrectedEstimate(
        model=model,
        core_days=original.core_days,
        device_days=device_days,
        tpu_dollars=tpu_dollars,
        speed_up=speed_up,
        gpu_days=gpu_days,
        gpu_dollars=gpu_days * 24 * machine_price,
        sustained_flops=sustained_flops,
        tpu_utilisation=utilization,
        corrections=tuple(map(Correction, original.assumptions, *zip(*changes, strict=True))),
    )


def beside_tpu(model: str, device_flops: float) -> BesideTpu:
    """Compare a device with the TPU cores of the paper's training of "L/16" or "H/14".

    Nothing runs on a TPU; its numbers come from the paper's core-days and Google's data sheet. `device_flops` is the
    peak rate of the device in FLOP/s.

    Raises:
        UserError: the paper states no core-days for this model, or the rate is not above 0.
    """
    if not 0 < device_flops < float("inf"):
        raise UserError(f"device_flops={device_flops:g} is out of range; give a finite number above 0")
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
