"""What the scripts of `benchmarks/` share: their options, and rows that are printed and kept in a dated file."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hf_vit.speed.measuring import Quartiles, others_load
from hf_vit.speed.speed_file import SpeedFile


def parser(description: str | None, turns: int) -> argparse.ArgumentParser:
    """The options that every script has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--turns", type=int, default=turns, help=f"turns of every contestant (default {turns})")
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch (default: all cores)")
    options.add_argument("--output", type=Path, help="JSON file to write")
    return options


def run_program(code: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """Run a program of its own to its end; what its last line holds as JSON.

    Args:
        environment: its whole environment; by default this process's.
    """
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(ran.stdout.splitlines()[-1])


class Script:
    """Rows of what a script measured, printed as they come.

    Args:
        options: parsed, see `parser`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        torch.set_num_threads(options.threads)
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
        self._report = SpeedFile(options.output, sys.argv, "cpu", turns=options.turns)

    def add(self, **row: object) -> None:
        """A row, with the load of others at this moment."""
        load = others_load()
        plain = {name: asdict(value) if isinstance(value, Quartiles) else value for name, value in row.items()}
        self._report.add({**plain, "others_load": round(load, 2)}, load)
        print(", ".join(f"{name} {value}" for name, value in row.items()), f"[load {load:.1f}]", flush=True)

    def finish(self, **whole: object) -> None:
        """What is true of all rows; tell when others kept the machine busy."""
        self._report.finish(**whole)
        if not self._report.is_quiet:
            most = max(self._report.loads)
            print(f"The machine was busy (others kept up to {most:.1f} cores): repeat in a quiet moment.")
