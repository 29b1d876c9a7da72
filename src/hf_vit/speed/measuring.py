"""Speed, memory and FLOPs as they are measured: contestants take turns in one process, and ratios within a turn count.

Absolute times move with whatever else the machine does; what two contestants take in the same turn moves together.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

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
    """The quartiles of at least one value; values between two are interpolated."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(lower, median, upper)


def take_turns(contestants: Mapping[str, Callable[[], Any]], turns: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of every contestant in every turn, each in an order of its own.

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
    """How many times as fast as the other the subject is, paired by turns."""
    return quartiles([theirs / ours for ours, theirs in zip(seconds[subject], seconds[other], strict=True)])


def others_load(seconds: float = 0.5) -> float:
    """Cores that other processes keep busy at this moment, seen over so many seconds."""
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
    """Bytes that torch holds at most during a call, beyond what it held before; the second call is looked at."""
    import torch

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


def counted_flops(model: "nn.Module", function: Callable[[], Any]) -> int:
    """FLOPs of a call of a torch module, 2 a multiply-add, as torch's FlopCounterMode counts them.

    Matrix products, convolutions and attention are counted; norms, activations and softmax are not.

    Args:
        model: the module; for the count its parameters ask for no gradient, which the counter would look for.
        function: calls it.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

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
