"""Rows of measured speeds, kept in a dated file that says whether others left the machine alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES
from hf_vit.results.measurements import Measurements
from hf_vit.speed.measuring import BUSY


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
        """One more row, and the load of others while it was measured."""
        self.loads.append(load)
        self._file.add(row, quiet=self.is_quiet)

    def finish(self, **whole: object) -> None:
        """Add what is true of all rows."""
        self._file.write(quiet=self.is_quiet, **whole)
