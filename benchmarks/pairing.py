"""Fair comparisons on a noisy machine: contestants take turns in one process, and only ratios within a turn count.

Shared by the benchmarks of this folder. Absolute times move with whatever else the machine does; what two contestants
take in the same turn moves together. Results carry the load the machine had: a run that was not quiet says so.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

BUSY = 0.5  # load of others, in cores, above which a run is not called quiet


@dataclass(frozen=True)
class Quartiles:
    """Lower quartile, median and upper quartile of what was measured in all turns."""

    lower: float
    median: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f} to {self.upper:.2f})"


def quartiles(values: Sequence[float]) -> Quartiles:
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(lower, median, upper)


def take_turns(contestants: Mapping[str, Callable[[], Any]], turns: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of every contestant in every turn; who begins changes from turn to turn."""
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            contestants[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def speed_ratio(seconds: Mapping[str, Sequence[float]], subject: str, other: str) -> Quartiles:
    """How many times as fast as the other the subject is, paired by turns."""
    return quartiles([theirs / ours for ours, theirs in zip(seconds[subject], seconds[other], strict=True)])


def others_load() -> float:
    """Cores that other processes keep busy at this moment, seen over half a second."""

    def ticks() -> tuple[float, float, float]:
        with open("/proc/stat") as file:
            fields = [int(field) for field in file.readline().split()[1:9]]
        idle, times = fields[3] + fields[4], os.times()
        return sum(fields) - idle, (times.user + times.system) * os.sysconf("SC_CLK_TCK"), time.perf_counter()

    busy, own, started = ticks()
    time.sleep(0.5)
    busy_after, own_after, ended = ticks()
    used = (busy_after - busy) - (own_after - own)
    return max(used / os.sysconf("SC_CLK_TCK") / (ended - started), 0.0)


def parser(description: str | None, turns: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--turns", type=int, default=turns, help=f"turns of every contestant (default {turns})")
    made.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch (default: all cores)")
    made.add_argument("--output", type=Path, help="JSON file to write")
    return made


class Report:
    """Collects rows and writes them with date, hardware, versions and the load of the machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []
        self.loads: list[float] = []
        torch.set_num_threads(options.threads)

    def add(self, **row: Any) -> None:
        self.loads.append(others_load())
        plain = {name: asdict(value) if isinstance(value, Quartiles) else value for name, value in row.items()}
        self.rows.append({**plain, "others_load": round(self.loads[-1], 2)})
        print(", ".join(f"{name} {value}" for name, value in row.items()), f"[load {self.loads[-1]:.1f}]", flush=True)

    def finish(self, **more: Any) -> None:
        quiet = max(self.loads, default=0.0) <= BUSY
        if not quiet:
            print(f"The machine was busy (others kept up to {max(self.loads):.1f} cores): repeat in a quiet moment.")
        if self.options.output is None:
            return
        result = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
            "versions": {
                "python": platform.python_version(),
                **{package: version(package) for package in ("torch", "transformers", "timm")},
            },
            "turns": self.options.turns,
            "quiet": quiet,
            **more,
            "rows": self.rows,
        }
        self.options.output.parent.mkdir(parents=True, exist_ok=True)
        self.options.output.write_text(json.dumps(result, indent=1) + "\n")


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
