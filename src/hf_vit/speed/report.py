"""Results of comparisons as a dated JSON file, rewritten after every cell so that a killed run keeps what it has."""

import datetime
import json
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hf_vit.environment import hardware, versions
from hf_vit.errors import UserError
from hf_vit.speed.cells import Comparison
from hf_vit.speed.measuring import BUSY


class SpeedReport:
    """Collects comparisons; `path` None keeps them in memory alone.

    Args:
        command: what was typed.
        device: torch device.
        settings: whatever else decides about the numbers (turns, threads).

    Raises:
        UserError: there is no folder for the file.
    """

    def __init__(self, path: Path | None, command: str, device: str, **settings: Any) -> None:
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"there is no folder {path.parent} for the results; make it first")
        self.path = path
        self.comparisons: list[Comparison] = []
        self.head = {
            "date": datetime.date.today().isoformat(),
            "command": command,
            "hardware": {**hardware(device), "threads": torch.get_num_threads()},
            "versions": versions() | _peer_versions(),
            **settings,
        }

    @property
    def is_quiet(self) -> bool:
        """Whether others left the machine alone in every cell."""
        return all(comparison.load <= BUSY for comparison in self.comparisons)

    def add(self, comparison: Comparison) -> None:
        self.comparisons.append(comparison)
        if self.path is not None:
            rows = [_rounded(asdict(comparison)) for comparison in self.comparisons]
            whole = {**self.head, "quiet": self.is_quiet, "rows": rows}
            temporary = self.path.with_name(f".{self.path.name}.tmp")
            temporary.write_text(json.dumps(whole, indent=1) + "\n")
            temporary.replace(self.path)


def _rounded(value: Any) -> Any:
    """With as many digits as mean something."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _peer_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in ("timm", "vit-pytorch"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
