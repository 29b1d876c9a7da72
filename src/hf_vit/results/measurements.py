"""Rows of a benchmark in a dated JSON file, rewritten after every row so that a killed run keeps what it has."""

import datetime
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hf_vit.environment import hardware, versions
from hf_vit.errors import UserError
from hf_vit.results.redaction import redact_command, redact_values
from hf_vit.results.writing import write_atomically


class Measurements:
    """What was measured under which circumstances.

    Args:
        path: the file; None keeps all in memory alone.
        command: what was typed, as a line or as arguments; secrets and places are left out.
        device: torch device.
        packages: others whose versions decide about the numbers.
        settings: whatever else does (turns, batch sizes).

    Raises:
        UserError: there is no folder for the file.
    """

    def __init__(
        self,
        path: Path | None,
        command: str | Sequence[str],
        device: str,
        packages: Sequence[str] = (),
        **settings: object,
    ) -> None:
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"there is no folder {path.parent} for the results; make it first")
        self.path = path
        self.rows: list[Mapping[str, Any]] = []
        self.head = {
            "date": datetime.date.today().isoformat(),
            "command": redact_command(command),
            "hardware": {**hardware(device), "threads": torch.get_num_threads()},
            "versions": versions() | _versions_of(packages),
            **settings,
        }

    def add(self, row: Mapping[str, Any], **whole: object) -> None:
        """Write with one more row; `whole`: what is now true of all of them."""
        self.rows.append(_rounded(row))
        self.write(**whole)

    def write(self, **whole: object) -> None:
        """Write the rows as they are."""
        if self.path is not None:
            content = json.loads(json.dumps({**self.head, **whole, "rows": self.rows}))
            write_atomically(self.path, json.dumps(redact_values(content), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """With as many digits as mean something."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _versions_of(packages: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
