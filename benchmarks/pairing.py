"""Fair comparisons on a noisy machine: contestants take turns in one process, and only ratios within a turn count.

Shared by the benchmarks of this folder. Absolute times move with whatever else the machine does; what two contestants
take in the same turn moves together. Results carry the load the machine had: a run that was not quiet says so.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hf_vit.environment import cpu_name
from hf_vit.results.redaction import redact_command
from hf_vit.speed.measuring import BUSY, Quartiles, others_load, quartiles, speed_ratio, take_turns

__all__ = ["Quartiles", "Report", "cpu_name", "others_load", "parser", "quartiles", "speed_ratio", "take_turns"]


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
            "command": redact_command(sys.argv),
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
