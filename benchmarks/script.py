"""Shared code of scripts that measure speed and memory: options, rows, programs, commands."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hf_vit.data import make_processor
from hf_vit.speed.measuring import Quartiles, SpeedFile, others_load

CPU: dict[str, Any] = {"device": "cpu", "precision": "fp32"}  # of every training


def describe(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def parser(description: str | None, turns: int) -> argparse.ArgumentParser:
    options = describe(description)
    options.add_argument("--turns", type=int, default=turns, help=f"turns of every contestant (default {turns})")
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch (default: all cores)")
    options.add_argument("--output", type=Path, help="JSON file to write, of results/")
    return options


def vit_sizes(hidden_size: int, intermediate_size: int, heads: int = 4, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden_size, "num_attention_heads": heads, "intermediate_size": intermediate_size}
    return sizes | others


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def train_once(config: Any, data: str, folder: Path, epochs: int, seed: int = 0) -> Path:
    """Train a classifier with the recipe "digits" unless this was done before; return its folder."""
    from hf_vit.training import finetune

    if not (folder / "facts.json").is_file():
        finetune(config, data, folder, recipe="digits", epochs=epochs, seed=seed, report=print, **CPU)
    return folder


def save_with_processor(model: Any, folder: Path) -> Path:
    """Save a model with the image processor of its configuration; return the folder."""
    model.save_pretrained(folder)
    make_processor(model.config).save_pretrained(folder)
    return folder


def name_own(place: Path) -> Path:
    """Return the folder in which this process makes what goes to a place."""
    return place.with_name(f"{place.name}.{os.getpid()}")


def settle(folder: Path, place: Path) -> None:
    """Rename a finished folder; where another process has made the same meanwhile, remove it."""
    try:
        folder.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        shutil.rmtree(folder)


def move_into_place(folder: Path, place: Path) -> None:
    """Move a finished folder, perhaps from another disk, so that it is there whole or not at all."""
    arriving = name_own(place)
    shutil.rmtree(arriving, ignore_errors=True)
    shutil.copytree(folder, arriving)
    settle(arriving, place)


def run_program(code: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Any:
    """Run a program of its own to its end, and return what its last line holds as JSON.

    Args:
        environment: its whole environment; by default this process's.
    """
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(process.stdout.splitlines()[-1])


def alternate(contestants: Mapping[str, Callable[[], Any]], turns: int, warm_up: int = 0) -> dict[str, list[Any]]:
    """Return what every contestant gave in every turn; who comes first changes from turn to turn."""
    results: dict[str, list[Any]] = {name: [] for name in contestants}
    for turn in range(-warm_up, turns):
        for name in list(contestants) if turn % 2 else reversed(contestants):
            result = contestants[name]()
            if turn >= 0:
                results[name].append(result)
    return results


class Script(SpeedFile):
    """The rows that a script measures; each is printed at once and kept.

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
            highest_load = max(self.loads)
            print(f"Other processes used up to {highest_load:.1f} cores. Measure again when the machine is idle.")
