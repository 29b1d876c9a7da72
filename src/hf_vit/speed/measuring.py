"""Measure speed, memory and FLOPs of contestants that take turns in one process.

Absolute times vary with other load on the machine; the ratio of two contestants within a turn varies little. Rows of
measurements go to a dated file that says whether the machine was otherwise idle.
"""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES
from hf_vit.loading.pixels import find_max_patches, keep_image_sizes
from hf_vit.results.documents import Measurements

if TYPE_CHECKING:
    from hf_vit.loading.model import LoadedModel

# A machine is quiet if other processes use at most so many cores.
BUSY = 0.5


@dataclass(frozen=True)
class Quartiles:
    """Lower quartile, median and upper quartile over all turns."""

    lower: float
    median: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f} to {self.upper:.2f})"


def compute_quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of at least one value, with linear interpolation."""
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def take_turns(contestants: Mapping[str, Callable[[], Any]], turns: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Return the seconds of every contestant in every turn; the order differs between turns.

    A contestant may be slowed down by idle threads of the one before it, so the order is shuffled.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for turn in range(-warm_up, turns):
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            contestants[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def compute_speed_ratio(seconds: Mapping[str, Sequence[float]], name: str, other: str) -> Quartiles:
    """Return how many times as fast `name` is as `other`, paired by turns."""
    return compute_quartiles(
        [other_seconds / own_seconds for own_seconds, other_seconds in zip(seconds[name], seconds[other], strict=True)]
    )


def others_load(seconds: float = 0.5) -> float:
    """Return how many cores other processes use now, measured for so many seconds."""
    import psutil

    def read_times() -> tuple[float, float, float]:
        """Return the CPU time of all processes, that of this process, and the time."""
        system, own_ticks = psutil.cpu_times(), os.times()
        # "user" includes the time of virtual machines; waiting for a disk does not use a core.
        names = ("user", "nice", "system", "irq", "softirq", "steal")
        return sum(getattr(system, name, 0.0) for name in names), own_ticks.user + own_ticks.system, time.perf_counter()

    busy, own_ticks, start = read_times()
    time.sleep(seconds)
    busy_after, own_ticks_after, end = read_times()
    return max(((busy_after - busy) - (own_ticks_after - own_ticks)) / (end - start), 0.0)


def measure_peak_memory(function: Callable[[], Any], device: str = "cpu") -> int | None:
    """Return the most bytes that torch allocates in a second call beyond those before; None for GPUs but CUDA's."""
    if torch.device(device).type not in ("cpu", "cuda"):  # torch records no peak of others
        return None
    function()
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Without a GPU the profiler prints notes that look like errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    allocated = peak = 0
    profiler: Any = profile.profiler  # None only before the profile begins
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def count_flops(model: torch.nn.Module, function: Callable[[], Any]) -> int:
    """Return the FLOPs of a call of a torch module, 2 per multiply-add, as torch's FlopCounterMode counts them.

    Matrix products, convolutions and attention count; norms, activations and softmax do not. Meanwhile parameters
    require no gradient, as the counter fails on those that do.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        # Attention as matrix products, as old versions of torch do not count the fused one of CPUs.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            function()
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
    return counter.get_total_flops()


@final
@dataclass(frozen=True)
class ForwardSpeed:
    """Speed of a model's forward pass: throughput over the turns, and relative to the first model (paired by turns).

    `peak_memory` is in bytes, without weights and input; None for an exported graph, and on GPUs other than CUDA's.
    """

    images_per_second: Quartiles
    times_as_fast: Quartiles
    peak_memory: int | None


def make_noise(loaded: "LoadedModel", batch: int) -> torch.Tensor:
    """Return preprocessed images of noise [B, C, H, W] in the model's input size, on its device.

    Raises:
        UserError: the model refuses a batch of this size.
    """
    if (count := find_max_patches(loaded)) is not None:
        height, width = loaded.image_size or (224, 224)
        keeping: Any = keep_image_sizes(loaded, count)
        loaded = replace(loaded, prepare=lambda images: keeping.prepare(images)["pixel_values"])
    else:
        height, width = loaded.input_size
    pixels = np.random.default_rng(0).integers(0, 256, (batch, height, width, 3), np.uint8)
    pixel_values = loaded.pixel_values([Image.fromarray(image) for image in pixels])
    _make_forward(loaded, pixel_values)()
    return pixel_values


def measure_forwards(
    models: "Mapping[str, LoadedModel]", samples: Mapping[str, torch.Tensor], turns: int
) -> tuple[dict[str, ForwardSpeed], float]:
    """Time the forward passes of all models on prepared images.

    Args:
        models: the models; speeds are relative to the first one.
        samples: for every model its images [B, C, H, W], on its device.
        turns: passes of every model that count; two more come before as warm-up.

    Returns:
        The speeds, and the cores that other processes used before or after, whichever was more.
    """
    forwards = {name: _make_forward(loaded, samples[name]) for name, loaded in models.items()}
    first = next(iter(forwards))
    load = others_load()
    seconds = take_turns(forwards, turns)
    load = max(load, others_load())
    speeds = {
        name: ForwardSpeed(
            images_per_second=compute_quartiles([len(samples[name]) / second for second in seconds[name]]),
            times_as_fast=compute_speed_ratio(seconds, name, first),
            peak_memory=None if models[name].is_graph else measure_peak_memory(forward, str(samples[name].device)),
        )
        for name, forward in forwards.items()
    }
    return speeds, load


def _make_forward(loaded: "LoadedModel", sample: torch.Tensor) -> Callable[[], Any]:
    """Return a function that runs a model on images and waits until it is done."""
    model = loaded.model.eval()

    def forward() -> None:
        with torch.inference_mode():
            model(sample)
        if sample.device.type != "cpu":
            torch.accelerator.synchronize(sample.device)

    return forward


class SpeedFile:
    """Collect rows of measurements and write them to a file, see `Measurements`."""

    def __init__(self, path: Path | None, command: str | Sequence[str], device: str, **settings: object) -> None:
        self.loads: list[float] = []  # for each row, the cores that other processes used
        self._file = Measurements(path, command, device, packages=("timm", "vit-pytorch", *RUNTIMES), **settings)

    @property
    def is_quiet(self) -> bool:
        """Return whether the machine was otherwise idle during every row."""
        return max(self.loads, default=0.0) <= BUSY

    def add(self, row: Mapping[str, Any], load: float) -> None:
        """Add a row, and the load of other processes while it was measured."""
        self.loads.append(load)
        self._file.add(row, quiet=self.is_quiet)

    def finish(self, **fields: object) -> None:
        """Add fields that hold for all rows."""
        self._file.write(quiet=self.is_quiet, **fields)
