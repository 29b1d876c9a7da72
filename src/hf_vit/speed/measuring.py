"""Speed, memory and FLOPs as they are measured: contestants take turns in one process, and ratios within a turn count.

Absolute times move with whatever else the machine does; what two contestants take in the same turn moves together.
Rows of what was measured are kept in a dated file that says whether others left the machine alone.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES
from hf_vit.results.measurements import Measurements

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
    """FLOPs of a call of a torch module, 2 a multiply-add, as torch's FlopCounterMode counts them.

    Matrix products, convolutions and attention are counted; norms, activations and softmax are not.

    Args:
        model: the module; for the count its parameters ask for no gradient, which the counter would look for.
        function: calls it.
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
    """One model's forward pass.

    Attributes:
        images_per_second: over the turns.
        times_as_fast: as the first model, paired by turns.
        peak_memory: bytes that torch holds at most, beyond weights and input; None of a graph.
    """

    images_per_second: Quartiles
    times_as_fast: Quartiles
    peak_memory: int | None


def noise_for(subject: "LoadedModel", batch: int) -> torch.Tensor:
    """[B, C, H, W] on the model's device: images of noise in the size that it is fed with, as its processor makes them.

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


def parser(description: str | None, turns: int) -> argparse.ArgumentParser:
    """Return the options that every script of `benchmarks/` has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--turns", type=int, default=turns, help=f"turns of every contestant (default {turns})")
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch (default: all cores)")
    options.add_argument("--output", type=Path, help="JSON file to write")
    return options


def run_program(code: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """Run a program of its own to its end, and return what its last line holds as JSON.

    Args:
        environment: its whole environment; by default this process's.
    """
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(ran.stdout.splitlines()[-1])


class Script(SpeedFile):
    """Rows of what a script of `benchmarks/` measured, printed as they come.

    Args:
        options: parsed, see `parser`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        torch.set_num_threads(options.threads)
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(options.output, sys.argv, "cpu", turns=options.turns)

    def record(self, **row: object) -> None:
        """Add a row, with the load of others at this moment."""
        load = others_load()
        plain = {name: asdict(value) if isinstance(value, Quartiles) else value for name, value in row.items()}
        self.add({**plain, "others_load": round(load, 2)}, load)
        print(", ".join(f"{name} {value}" for name, value in row.items()), f"[load {load:.1f}]", flush=True)

    def finish(self, **whole: object) -> None:
        super().finish(**whole)
        if not self.is_quiet:
            most = max(self.loads)
            print(f"The machine was busy (other processes used up to {most:.1f} cores): measure again when it is idle.")
