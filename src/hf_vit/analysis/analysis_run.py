"""What `analyze` gives: arrays by analysis and name, and what is kept of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hf_vit.analysis.analyses.analysis import Arrays
from hf_vit.analysis.reading.images import AnalysisImages
from hf_vit.display import Displayed
from hf_vit.loading.model import LoadedModel
from hf_vit.results.facts import Record


@final
@dataclass(eq=False, repr=False)
class AnalysisRun(Displayed, Mapping[str, Arrays]):
    """What `analyze` found: `run["attention_distance"]["distance"]` is an array [layer, head].

    Attributes:
        subject: the model that was looked at.
        images: what it was looked at with; `skipped` names what could not be read.
        arrays: analysis -> its arrays, float32; axes and units as in `ANALYSES[name].arrays`.
        measured: the analyses that were made now; the others were found finished.
        left_out: analysis -> why it does not apply to the model.
        summaries: analysis -> the few numbers that facts.json keeps.
        pictures: file -> title, without an output folder none.
        seconds: wall time of what was measured.
        record: what the model's folder was told; None where it has none, or nothing was new.
        engine: what computed an optimized model, of what was measured.
    """

    subject: LoadedModel
    images: AnalysisImages
    arrays: dict[str, Arrays] = field(default_factory=dict[str, Arrays])
    measured: list[str] = field(default_factory=list[str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    pictures: dict[Path, str] = field(default_factory=dict[Path, str])
    seconds: float = 0.0
    record: Record | None = None
    engine: str | None = None

    def overview(self) -> dict[str, object]:
        left_out = {"left out": ", ".join(self.left_out)} if self.left_out else {}
        images = f"{self.images.size:,} of {self.images.name}"
        return {"model": self.subject.name, "images": images, "analyses": ", ".join(self), **left_out}

    def __getitem__(self, name: str) -> dict[str, NDArray[np.float32]]:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)
