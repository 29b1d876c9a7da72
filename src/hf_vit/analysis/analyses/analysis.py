"""What an analysis is: one module and one class each; all of them stand in the table of `registry.py`.

Legend: B batch, C channels, H x W px.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.analysis.reading.cue_conflicts import CueConflicts
from hf_vit.analysis.reading.images import AnalysisImages
from hf_vit.errors import UserError
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.pixels import seen_part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arrays = dict[str, NDArray[np.float32]]


@final
@dataclass(frozen=True)
class ArraySpec:
    """What an array of a result holds: its axes in order, its unit, its meaning."""

    axes: tuple[str, ...]
    unit: str
    meaning: str


@final
@dataclass(frozen=True)
class AnalysisSettings:
    """Choices of the analyses; they are written into every result.

    Attributes:
        num_images: images to average over, drawn by `seed`; 128 in arXiv 2010.11929, D.7.
        batch_size: images a forward where attention is read.
        num_pictures: images that are shown (rollout, head maps).
        rollout_identity: share of the identity that rollout mixes into every layer; 0.5 in arXiv 2005.00928, 0 for
            the plain product.
        cka_batch_size: images a minibatch of CKA, at least 4.
        seed: of the choice of images.
    """

    num_images: int = 128
    batch_size: int = 8
    num_pictures: int = 4
    rollout_identity: float = 0.5
    cka_batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_images", 1), ("batch_size", 1), ("num_pictures", 1), ("cka_batch_size", 4)):
            if getattr(self, name) < least:
                raise UserError(f"{name} {getattr(self, name)} is too few; it must be at least {least}")
        if not 0 <= self.rollout_identity < 1:
            raise UserError(f"rollout_identity {self.rollout_identity} must be a share, 0 <= rollout_identity < 1")


@final
@dataclass(frozen=True)
class Context:
    """What an analysis is given: the model, the images, the settings, and what some compare with.

    Attributes:
        optimize: let those that read answers alone make a copy of the model faster, where so many images repay it.
    """

    subject: LoadedModel
    images: AnalysisImages
    settings: AnalysisSettings = field(default_factory=AnalysisSettings)
    against: LoadedModel | None = None
    cue_conflicts: CueConflicts | None = None
    optimize: bool = False


class Analysis(ABC):
    """Abstract: one question about a model.

    Attributes:
        name: on the command line, and of its files.
        title: for people.
        source: the paper and section it follows.
        shows: what the picture shows, and what it does not.
        second_input: the field of `Context` that it needs beside model, images and settings.
        arrays: the arrays of a result; those that do not apply to a model are absent.
        engine: what computed an optimized model, once it has.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    shows: ClassVar[str]
    second_input: ClassVar[Literal["against", "cue_conflicts"] | None] = None
    arrays: ClassVar[Mapping[str, ArraySpec]]

    def __init__(self, context: Context) -> None:
        self.context = context
        self.notes: list[str] = []
        self.engine: str | None = None

    @classmethod
    @abstractmethod
    def obstacle(cls, context: Context) -> str | None:
        """Why it cannot be made here, as the end of "NAME does not apply: ..."; None if it can."""

    @abstractmethod
    def measure(self) -> Arrays:
        """The arrays of `arrays`, float32; memory does not grow with the number of images."""

    @abstractmethod
    def draw(self, arrays: Arrays) -> "dict[str, Figure]":
        """Title -> picture of what `measure` gave."""

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        """The few numbers that facts.json keeps."""
        return {}

    def batches(
        self, size: int, limit: int | None = None, images: AnalysisImages | None = None
    ) -> Iterator[torch.Tensor]:
        """The images (by default the context's) as the model sees them, [B, C, H, W] on its device: whole patches.

        Raises:
            UserError: the processor makes images of several sizes.
        """
        shape: torch.Size | None = None
        for batch in (images or self.context.images).batches(size, limit):
            pixel_values = self.context.subject.pixel_values(batch)
            if shape is not None and pixel_values.shape[1:] != shape:
                raise UserError(
                    f"the image processor makes images of {tuple(shape[1:])} and {tuple(pixel_values.shape[2:])} px; "
                    "averages need one size: use a processor that resizes"
                )
            shape = pixel_values.shape[1:]
            yield seen_part(self.context.subject.model, pixel_values)


def rounded(values: NDArray[np.float32]) -> list[float | None]:
    """Numbers [...] for facts.json, None where undefined."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]
