"""Speed, memory and FLOPs as they are measured: contestants take turns in one process, and ratios within a turn count.

Absolute times move with whatever else the machine does; what two contestants take in the same turn moves together.
Rows of what was measured are kept in a dated file that says whether others left the machine alone.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES
from hf_vit.results.documents import Measurements

if TYPE_CHECKING:
    from hf_vit.loading.model import LoadedModel

# Load of others, in cores, above which a machine is not called quiet.
BUSY = 0.5


@dataclass(frozen=True)
class Quartiles:
    """Lower quartile, median and upper quartile of what was measured in all turns."""

    lower: float
    median: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f} to {self.upper:.2f})"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of at least one value; values between two are interpolated."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(lower, median, upper)


def take_turns(contestants: Mapping[str, Callable[[], Any]], turns: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Return the seconds of every contestant in every turn; turns differ in order.

    Whoever follows a contestant whose threads still wait for more to do is held up, so nobody follows the same always.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for turn in range(-warm_up, turns):
        order.shuffle(names)
        for name in names:
            started = time.perf_counter()
            contestants[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def speed_ratio(seconds: Mapping[str, Sequence[float]], subject: str, other: str) -> Quartiles:
    """Return how many times as fast as the other the subject is, paired by turns."""
    return quartiles([theirs / ours for ours, theirs in zip(seconds[subject], seconds[other], strict=True)])


def others_load(seconds: float = 0.5) -> float:
    """Return the cores that other processes keep busy now, measured over so many seconds."""
    import psutil

    def ticks() -> tuple[float, float, float]:
        system, own = psutil.cpu_times(), os.times()
        # "user" holds a guest's time; waiting for a disk keeps no core busy.
        names = ("user", "nice", "system", "irq", "softirq", "steal")
        return sum(getattr(system, name, 0.0) for name in names), own.user + own.system, time.perf_counter()

    busy, own, started = ticks()
    time.sleep(seconds)
    busy_after, own_after, ended = ticks()
    return max(((busy_after - busy) - (own_after - own)) / (ended - started), 0.0)


def peak_memory(function: Callable[[], Any], device: str = "cpu") -> int:
    """Return the bytes that torch holds at most during a second call, beyond what it held before."""
    function()
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Its own chatter would look like an error on a machine without a GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    held = peak = 0
    results: Any = profile.profiler and profile.profiler.kineto_results
    for event in results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def counted_flops(model: torch.nn.Module, function: Callable[[], Any]) -> int:
    """Return the FLOPs of a call of a torch module, 2 a multiply-add, as torch's FlopCounterMode counts them.

    Matrix products, convolutions and attention are counted; norms, activations and softmax are not. For the count the
    parameters ask for no gradient, which the counter would look for.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            function()
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
    return counter.get_total_flops()


@final
@dataclass(frozen=True)
class ForwardSpeed:
    """One model's forward pass: rate over the turns, times as fast as the first model (paired by turns).

    `peak_memory` are the bytes that torch holds at most, beyond weights and input; None of a graph.
    """

    images_per_second: Quartiles
    times_as_fast: Quartiles
    peak_memory: int | None


def noise_for(subject: "LoadedModel", batch: int) -> torch.Tensor:
    """Return images of noise in the model's input size, as its processor makes them, [B, C, H, W] on its device.

    Raises:
        UserError: the model refuses a batch of this size.
    """
    height, width = subject.input_size
    levels = np.random.default_rng(0).integers(0, 256, (batch, height, width, 3), np.uint8)
    sample = subject.pixel_values([Image.fromarray(image) for image in levels])
    _forward(subject, sample)()
    return sample


def measure_forwards(
    subjects: "Mapping[str, LoadedModel]", samples: Mapping[str, torch.Tensor], turns: int
) -> tuple[dict[str, ForwardSpeed], float]:
    """Time forward passes of all models on prepared images.

    Args:
        subjects: the models, the first of them the measure of the others.
        samples: for every model the images it is timed with, [B, C, H, W] on its device.
        turns: forwards of every model that count; two more warm up.

    Returns:
        The speeds, and the cores that others kept busy before or after, whichever was more.
    """
    forwards = {name: _forward(subject, samples[name]) for name, subject in subjects.items()}
    first, load = next(iter(forwards)), others_load()
    seconds = take_turns(forwards, turns)
    load = max(load, others_load())
    speeds = {
        name: ForwardSpeed(
            images_per_second=quartiles([len(samples[name]) / second for second in seconds[name]]),
            times_as_fast=speed_ratio(seconds, name, first),
            peak_memory=None if subjects[name].is_graph else peak_memory(forward, str(samples[name].device)),
        )
        for name, forward in forwards.items()
    }
    return speeds, load


def _forward(subject: "LoadedModel", sample: torch.Tensor) -> Callable[[], Any]:
    model = subject.model.eval()

    def forward() -> None:
        with torch.inference_mode():
            model(sample)
        if sample.is_cuda:
            torch.cuda.synchronize(sample.device)

    return forward


class SpeedFile:
    """Collects rows and writes them into a file, see `Measurements`.

    Attributes:
        loads: cores that others kept busy, one number a row.
    """

    def __init__(self, path: Path | None, command: str | Sequence[str], device: str, **settings: object) -> None:
        self.loads: list[float] = []
        self._file = Measurements(path, command, device, packages=("timm", "vit-pytorch", *RUNTIMES), **settings)

    @property
    def is_quiet(self) -> bool:
        """Whether others left the machine alone in every row."""
        return max(self.loads, default=0.0) <= BUSY

    def add(self, row: Mapping[str, Any], load: float) -> None:
        """Add a row, and the load of others while it was measured."""
        self.loads.append(load)
        self._file.add(row, quiet=self.is_quiet)

    def finish(self, **whole: object) -> None:
        """Add what is true of all rows."""
        self._file.write(quiet=self.is_quiet, **whole)
