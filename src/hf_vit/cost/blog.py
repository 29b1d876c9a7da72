"""The price of the original runs as a blog post computed it, the same corrected, and another device beside their TPUs.

Two of the paper's trainings (arXiv 2010.11929, table 2: 14 epochs of JFT-300M) are priced, on preemptible cloud TPUs
and on a machine with four V100 GPUs. The post's arithmetic is repeated number by number; `corrected_estimate` changes
the four assumptions that do not hold, one after the other, and records what each changes.
"""

from dataclasses import dataclass
from typing import final

from hf_vit.cost.flops import training_flops
from hf_vit.errors import UserError
from hf_vit.variants import variant_config

# TPUv3-core-days that the paper states (table 2). 303 million images, 14 epochs.
CORE_DAYS = {"L/16": 680.0, "H/14": 2500.0}
JFT_IMAGES, EPOCHS = 303e6, 14

VM_PRICE, TPU_PRICE, GPU_PRICE = 0.095, 2.40, 3.06  # $ an hour: virtual machine, preemptible v3-8, cloud GPU
GPUS, SCALING, MIXED_PRECISION = 4, 0.95, 1.6  # the post's factors from one TPU core to its GPU machine

CORES_A_DEVICE = 8  # what a "v3-8" has, and what TPU_PRICE pays for
TPU_CORE_FLOPS = 123e12 / 2  # bfloat16 peak of a TPUv3 chip, which has two cores (Google's documentation of TPU v3)
V100_FLOPS = 125e12  # peak of its tensor cores (NVIDIA's data sheet of the V100 SXM2)


@final
@dataclass(frozen=True)
class BlogEstimate:
    """The post's numbers: prices on TPUs (virtual machine + TPU, per hour) and on the GPU machine.

    `speed_up` is that of the GPU machine over what a core-day is a day of.
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
    """One assumption that does not hold: its replacement, and the number that this changes."""

    assumption: str
    instead: str
    quantity: str
    before: float
    after: float


@final
@dataclass(frozen=True)
class CorrectedEstimate:
    """The numbers after all corrections, in the order in which they are made.

    `sustained_flops` are the FLOP/s that the run kept on one TPU core; `tpu_utilisation` is their share of its peak.
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
    """One training on TPUv3 cores and on another device: rates in FLOP/s.

    Attributes:
        cores: TPU cores of the device's rate.
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


def blog_estimate(model: str) -> BlogEstimate:
    """Repeat the post's arithmetic for "L/16" or "H/14".

    Raises:
        UserError: the paper states no core-days for this model.
    """
    core_days = CORE_DAYS.get(model.removeprefix("ViT-"))
    if core_days is None:
        raise UserError(
            f"modes blog, corrected and tpu are of the runs whose core-days the paper states, {' and '.join(CORE_DAYS)}"
            f", not '{model.removeprefix('ViT-')}'; use --mode flops, which needs FLOP/s and a price"
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
            f"every core-day is paid as a day of a whole TPU device (${VM_PRICE + TPU_PRICE:.3f}/h)",
            f"${GPU_PRICE}/h pays for the machine with {GPUS} GPUs",
            f"mixed precision makes the GPUs {MIXED_PRECISION} times as fast as a TPU core",
            "one V100 is as fast as one TPU core",
            f"{GPUS} GPUs are {SCALING:.0%} as fast as {GPUS} times one",
        ),
    )


def corrected_estimate(model: str) -> CorrectedEstimate:
    """Repeat the post's arithmetic with four of its assumptions replaced.

    Raises:
        UserError: the paper states no core-days for this model.
    """
    blog = blog_estimate(model)
    device_days, machine_price = blog.core_days / CORES_A_DEVICE, GPUS * GPU_PRICE
    tpu_dollars, without_twice = device_days * 24 * (VM_PRICE + TPU_PRICE), blog.core_days / (GPUS * SCALING)
    cores_a_gpu = V100_FLOPS / TPU_CORE_FLOPS
    speed_up = GPUS * SCALING * cores_a_gpu
    gpu_days = blog.core_days / speed_up
    sustained = training_flops(variant_config(model), JFT_IMAGES * EPOCHS) / (blog.core_days * 86400)
    share = sustained / TPU_CORE_FLOPS
    # In the order of the post's assumptions: what holds instead, and the number that it changes.
    changes = (
        (
            f"the price is that of a device with {CORES_A_DEVICE} cores: {device_days:g} device-days",
            *("TPU dollars", blog.tpu_dollars, tpu_dollars),
        ),
        (
            f"that is the price of one V100: {GPUS} cost ${machine_price:.2f}/h",
            *("GPU dollars", blog.gpu_dollars, blog.gpu_days * 24 * machine_price),
        ),
        (
            "the TPU computed in bfloat16 already, so that core-days hold this gain: it is not taken again",
            *("GPU days", blog.gpu_days, without_twice),
        ),
        (
            f"by their peak rates, {V100_FLOPS / 1e12:g} and {TPU_CORE_FLOPS / 1e12:g} TFLOP/s, it is "
            f"{cores_a_gpu:.2f} cores, if it keeps the same share of its peak ({share:.0%} on the TPU)",
            *("GPU days", without_twice, gpu_days),
        ),
    )
    return CorrectedEstimate(
        model=model,
        core_days=blog.core_days,
        device_days=device_days,
        tpu_dollars=tpu_dollars,
        speed_up=speed_up,
        gpu_days=gpu_days,
        gpu_dollars=gpu_days * 24 * machine_price,
        sustained_flops=sustained,
        tpu_utilisation=share,
        corrections=tuple(map(Correction, blog.assumptions, *zip(*changes, strict=True))),
    )


def beside_tpu(model: str, device_flops: float) -> BesideTpu:
    """Compare a device of so many FLOP/s with the TPU cores of the paper's training of "L/16" or "H/14".

    Nothing runs on a TPU: the cores' numbers are the paper's core-days and Google's data sheet.

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
