"""The file of an analysis, `NAME.json`, and the way to and from arrays.

| field    | meaning                                                                                                   |
|----------|-----------------------------------------------------------------------------------------------------------|
| format   | version of this table, 1                                                                                  |
| name, title, source, shows | as the analysis says of itself                                                          |
| inputs   | model and against (name, kind, fingerprint of weights and config), images and cue_conflicts (name,        |
|          | fingerprint, split, size, skipped), settings (`AnalysisSettings`)                                         |
| arrays   | name -> axes, shape, unit, meaning, values (nested lists of float32; null for undefined)                  |
| notes    | what else must be said                                                                                    |
| pictures | file name -> title                                                                                        |

The same model, images and settings give the same bytes: no dates, times or paths are in it. Its JSON schema is
`AnalysisDocument.model_json_schema()`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from hf_vit.analysis.analyses.analysis import Analysis, Arrays
from hf_vit.results.documents import Document, ModelInput


@final
class ImagesInput(BaseModel):
    """The images it was looked at with."""

    name: str
    fingerprint: str
    split: str | None
    size: int
    skipped: list[str]


@final
class AnalysisInputs(BaseModel):
    """All that a result depends on; results in one folder share it, but for what only some compare with."""

    model: ModelInput
    images: ImagesInput
    settings: dict[str, int | float]
    against: ModelInput | None = None
    cue_conflicts: ImagesInput | None = None


@final
class StoredArray(BaseModel):
    """An array as JSON keeps it."""

    axes: list[str]
    shape: list[int]
    unit: str
    meaning: str
    values: list[Any]

    def array(self) -> NDArray[np.float32]:
        """The array, float32."""
        return np.array(self.values, dtype=np.float32).reshape(self.shape)


@final
class AnalysisDocument(Document):
    """One analysis; see the module's table."""

    command: ClassVar[str] = "hf-vit analyze"

    name: str
    title: str
    source: str
    shows: str
    inputs: AnalysisInputs
    arrays: dict[str, StoredArray]
    notes: list[str] = Field(default_factory=list[str])
    pictures: dict[str, str] = Field(default_factory=dict[str, str])

    @classmethod
    def of(cls, analysis: Analysis, arrays: Arrays, inputs: AnalysisInputs, pictures: Mapping[str, str]) -> Self:
        """What an analysis found."""
        return cls(
            name=analysis.name,
            title=analysis.title,
            source=analysis.source,
            shows=analysis.shows,
            inputs=inputs,
            arrays={name: _stored(analysis, name, values) for name, values in arrays.items()},
            notes=analysis.notes,
            pictures=dict(pictures),
        )


def _stored(analysis: Analysis, name: str, values: NDArray[np.float32]) -> StoredArray:
    spec = analysis.arrays[name]
    if len(spec.axes) != values.ndim:
        raise ValueError(f"{analysis.name}.{name} has {values.ndim} axes; its description names {spec.axes}")
    # The shortest decimals that give the same float32 again.
    decimals: NDArray[Any] = values.astype(np.float32).astype(str).astype(np.float64).astype(object)
    decimals[~np.isfinite(values)] = None
    return StoredArray(
        axes=list(spec.axes), shape=list(values.shape), unit=spec.unit, meaning=spec.meaning, values=decimals.tolist()
    )
