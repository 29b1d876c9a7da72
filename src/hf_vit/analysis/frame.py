"""What an analysis is: one module and one class each; all of them stand in the table of `registry.py`.

Legend: B batch, C channels, H x W px, A heads, L layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.analysis.reading.attention import AttentionReader, attention_obstacle
from hf_vit.analysis.reading.cue_conflicts import CueConflicts
from hf_vit.analysis.reading.images import AnalysisImages
from hf_vit.errors import UserError
from hf_vit.models.modeling_hf_vit import AttentionMaps
from hf_vit.subjects.subject import Subject

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
    """What an analysis is given: the model, the images, the settings, and what some compare with."""

    subject: Subject
    images: AnalysisImages
    settings: AnalysisSettings = field(default_factory=AnalysisSettings)
    against: Subject | None = None
    cue_conflicts: CueConflicts | None = None


class Analysis(ABC):
    """Abstract: one question about a model.

    Attributes:
        name: on the command line, and of its files.
        title: for people.
        source: the paper and section it follows.
        shows: what the picture shows, and what it does not.
        arrays: the arrays of a result; those that do not apply to a model are absent.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    shows: ClassVar[str]
    arrays: ClassVar[Mapping[str, ArraySpec]]

    def __init__(self, context: Context) -> None:
        self.context = context
        self.notes: list[str] = []

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
        """The images (by default the context's) as the model takes them, [B, C, H, W] on its device.

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
            yield pixel_values


class AttentionAnalysis(Analysis):
    """Abstract: looks at the attention maps of all layers, batch by batch."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.reader = AttentionReader(context.subject.model)

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        return attention_obstacle(context.subject.model)

    def read(self, limit: int | None = None) -> None:
        """One pass over the (first `limit`) images: `begin`, then `observe` for every layer, then `end`."""
        for pixel_values in self.batches(self.context.settings.batch_size, limit):
            self.begin(pixel_values)
            with torch.inference_mode():
                self.reader.read(pixel_values, self.observe)
            self.end()

    def begin(self, pixel_values: torch.Tensor) -> None:
        """Before a batch [B, C, H, W]."""

    @abstractmethod
    def observe(self, layer: int, maps: AttentionMaps) -> None:
        """One layer of a batch."""

    def end(self) -> None:
        """After the last layer of a batch."""


@final
class LayerHeadMeans:
    """Running means over images of numbers that every layer and head has."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, NDArray[np.float64]]] = {}
        self._images = 0

    def add(self, layer: int, values: Mapping[str, torch.Tensor]) -> None:
        """Values [B, A] of one layer."""
        for name, found in values.items():
            layers = self._sums.setdefault(name, {})
            batch = found.sum(dim=0).cpu().double().numpy()
            layers[layer] = layers.get(layer, np.zeros_like(batch)) + batch
        if layer == 0:
            self._images += len(next(iter(values.values())))

    def arrays(self) -> Arrays:
        """[L, A] a name."""
        return {
            name: (np.stack([layers[layer] for layer in sorted(layers)]) / self._images).astype(np.float32)
            for name, layers in self._sums.items()
        }


def rounded(values: NDArray[np.float32]) -> list[float | None]:
    """Numbers [...] for facts.json, None where undefined."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]


def shown_pixels(pixel_values: torch.Tensor) -> NDArray[np.uint8]:
    """Images as the model was given them [B, C, H, W] -> [B, H, W, 3] to show; each stretched to its own range."""
    pixels = pixel_values.detach().float().cpu()
    low, high = pixels.amin(dim=(1, 2, 3), keepdim=True), pixels.amax(dim=(1, 2, 3), keepdim=True)
    stretched = (pixels - low) / (high - low).clamp(min=1e-12) * 255
    return stretched.round().to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
