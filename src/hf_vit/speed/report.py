"""What contestants did in the cells of a table of speeds, kept as a file."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_vit.results.measurements import Measurements
from hf_vit.speed.cells import Comparison
from hf_vit.speed.measuring import BUSY


class SpeedReport:
    """Collects comparisons and writes them into a file, see `Measurements`."""

    def __init__(self, path: Path | None, command: str, device: str, **settings: Any) -> None:
        self.comparisons: list[Comparison] = []
        self._file = Measurements(path, command, device, packages=("timm", "vit-pytorch"), **settings)

    @property
    def is_quiet(self) -> bool:
        """Whether others left the machine alone in every cell."""
        return all(comparison.load <= BUSY for comparison in self.comparisons)

    def add(self, comparison: Comparison) -> None:
        self.comparisons.append(comparison)
        self._file.add(asdict(comparison), quiet=self.is_quiet)
