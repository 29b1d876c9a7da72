"""The price of the original runs, as a blog post on the paper reckoned it, and the same reckoning corrected.

Two of the paper's trainings (arXiv 2010.11929, table 2: 14 epochs of JFT-300M) are priced, on preemptible cloud TPUs
and on a machine with four V100 GPUs. The post's arithmetic is repeated number by number; `corrected_estimate` changes
the four assumptions that do not hold, one after the other, and says what each changes.
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
    """The post's numbers.

    Attributes:
        core_days: TPUv3-core-days that the paper states.
        tpu_dollars: core_days * 24 h * (virtual machine + TPU).
        speed_up: of the GPU machine over what a core-day is a day of.
        gpu_days, gpu_dollars: of the training on the GPU machine.
        assumptions: what it takes for granted.
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
    """One assumption that does not hold: what is put in its place, and the number it changes."""

    assumption: str
    instead: str
    quantity: str
    before: float
    after: float


@final
@dataclass(frozen=True)
class CorrectedEstimate:
    """The numbers after all corrections, which are made in the order they are listed.

    Attributes:
        sustained_flops: FLOP/s that the run kept on one TPU core, from its FLOPs and its core-days.
        tpu_utilisation: the same as a share of the core's peak.
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


def blog_estimate(model: str) -> BlogEstimate:
    """The post's arithmetic for "L/16" or "H/14".

    Raises:
        UserError: the paper states no core-days for this model.
    """
    core_days = _core_days(model)
    speed_up = GPUS * SCALING * MIXED_PRECISION
    gpu_days = core_days / speed_up
    return BlogEstimate(
        model=model,
        core_days=core_days,
        tpu_dollars=core_days * 24 * (VM_PRICE + TPU_PRICE),
        speed_up=speed_up,
        gpu_days=gpu_days,
        gpu_dollars=gpu_days * 24 * GPU_PRICE,
        assumptions=(
            f"every core-day is paid as a day of a whole TPU device (${VM_PRICE + TPU_PRICE:.3f}/h)",
            f"${GPU_PRICE}/h pays for the machine with {GPUS} GPUs",
            f"mixed precision makes the GPUs {MIXED_PRECISION} times as fast as a TPU core",
            "one V100 is as fast as one TPU core",
            f"{GPUS} GPUs are {SCALING:.0%} as fast as {GPUS} times one",
        ),
    )


def corrected_estimate(model: str) -> CorrectedEstimate:
    """The post's arithmetic with four of its assumptions replaced; each is told with what it changes.

    Raises:
        UserError: the paper states no core-days for this model.
    """
    blog = blog_estimate(model)
    device_days = blog.core_days / CORES_A_DEVICE
    tpu_dollars = device_days * 24 * (VM_PRICE + TPU_PRICE)
    machine_price = GPUS * GPU_PRICE
    without_twice = blog.core_days / (GPUS * SCALING)
    cores_a_gpu = V100_FLOPS / TPU_CORE_FLOPS
    speed_up = GPUS * SCALING * cores_a_gpu
    gpu_days = blog.core_days / speed_up
    sustained = training_flops(variant_config(model), JFT_IMAGES * EPOCHS) / (blog.core_days * 86400)
    share = sustained / TPU_CORE_FLOPS
    corrections = (
        Correction(
            assumption=blog.assumptions[0],
            instead=f"the price is that of a device with {CORES_A_DEVICE} cores: {device_days:g} device-days",
            quantity="TPU dollars",
            before=blog.tpu_dollars,
            after=tpu_dollars,
        ),
        Correction(
            assumption=blog.assumptions[1],
            instead=f"that is the price of one V100: {GPUS} cost ${machine_price:.2f}/h",
            quantity="GPU dollars",
            before=blog.gpu_dollars,
            after=blog.gpu_days * 24 * machine_price,
        ),
        Correction(
            assumption=blog.assumptions[2],
            instead="the TPU computed in bfloat16 already, so that core-days hold this gain: it is not taken again",
            quantity="GPU days",
            before=blog.gpu_days,
            after=without_twice,
        ),
        Correction(
            assumption=blog.assumptions[3],
            instead=f"by their peak rates, {V100_FLOPS / 1e12:g} and {TPU_CORE_FLOPS / 1e12:g} TFLOP/s, it is "
            f"{cores_a_gpu:.2f} cores, if it keeps the same share of its peak ({share:.0%} on the TPU)",
            quantity="GPU days",
            before=without_twice,
            after=gpu_days,
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
        corrections=corrections,
    )


def _core_days(model: str) -> float:
    name = model.removeprefix("ViT-")
    if name not in CORE_DAYS:
        known = " and ".join(CORE_DAYS)
        raise UserError(
            f"modes blog, corrected and tpu are of the runs whose core-days the paper states, {known}, not '{model}'; "
            "use --mode flops, which needs FLOP/s and a price"
        )
    return CORE_DAYS[name]
