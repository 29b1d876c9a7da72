"""What an analysis is, and what those of attention maps and of feature maps share.

A new analysis is a module with one class, which computes and draws, and a line of the table in `api`.

Legend: B batch, C channels, H x W px, A heads, L layers, D feature channels (they may differ by depth), h x w places
of a map.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from hf_vit.analysis.images import AnalysisImages, CueConflicts
from hf_vit.analysis.reading import AttentionReader, FeatureReader, attention_obstacle, feature_obstacle
from hf_vit.errors import UserError
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.pixels import seen_part
from hf_vit.models.modeling_hf_vit import AttentionMaps
from hf_vit.results.figures import integer_ticks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Arrays = dict[str, NDArray[np.float32]]
Pictures = dict[str, "Figure"]


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
        batch_size: images per forward pass where attention is read.
        num_pictures: images that are shown (rollout, head maps).
        rollout_identity: share of the identity that rollout mixes into every layer; 0.5 in arXiv 2005.00928, 0 for
            the plain product.
        cka_batch_size: images per minibatch of CKA, at least 4.
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
                raise UserError(f"{name} {getattr(self, name)} must be at least {least}")
        if not 0 <= self.rollout_identity < 1:
            raise UserError(f"rollout_identity {self.rollout_identity} must be a share, 0 <= rollout_identity < 1")


@final
@dataclass(frozen=True)
class Context:
    """The inputs of an analysis; `optimize` allows a faster copy of the model where answers alone are read."""

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
        source: the paper and section it follows.
        shows: what the picture shows, and what it does not.
        second_input: the field of `Context` that it needs beside model, images and settings.
        arrays: the arrays of a result; those that do not apply to a model are absent.
        engine: what computed an optimized model, if there was one.
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
        """Return why it does not apply, as the end of "NAME does not apply: ..."; None if it does."""

    @abstractmethod
    def measure(self) -> Arrays:
        """Return the arrays of `arrays`, float32; memory does not grow with the number of images."""

    @abstractmethod
    def draw(self, arrays: Arrays) -> Pictures:
        """Return pictures of the arrays, by title."""

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        """Return the few numbers that facts.json keeps."""
        return {}

    def batches(
        self, size: int, limit: int | None = None, images: AnalysisImages | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield the images (by default the context's) as the model sees them, [B, C, H, W]: whole patches.

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
    """Return numbers [...] for facts.json, None where undefined."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]


class AttentionAnalysis(Analysis):
    """Abstract: reads the attention maps of all layers, batch by batch."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.reader = AttentionReader(context.subject.model)

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        return attention_obstacle(context.subject.model)

    def read(self, limit: int | None = None) -> None:
        """Read the (first `limit`) images: for each batch `begin`, then `observe` for every layer, then `end`."""
        for pixel_values in self.batches(self.context.settings.batch_size, limit):
            self.begin(pixel_values)
            with torch.inference_mode():
                self.reader.read(pixel_values, self.observe)
            self.end()

    def begin(self, pixel_values: torch.Tensor) -> None:
        """Prepare for a batch [B, C, H, W]."""

    @abstractmethod
    def observe(self, layer: int, maps: AttentionMaps) -> None:
        """Take in one layer of a batch."""

    def end(self) -> None:
        """Finish a batch, after its last layer."""


class HeadNumbers(AttentionAnalysis):
    """Abstract: means over the images of numbers that every layer and head has; arrays [L, A]."""

    @abstractmethod
    def numbers(self, layer: int, maps: AttentionMaps) -> dict[str, torch.Tensor]:
        """Return numbers [B, A] of one layer, by name."""

    def measure(self) -> Arrays:
        self._sums: dict[str, dict[int, NDArray[np.float64]]] = {}
        self._images = 0
        self.read()
        return {
            name: (np.stack([layers[layer] for layer in sorted(layers)]) / self._images).astype(np.float32)
            for name, layers in self._sums.items()
        }

    def observe(self, layer: int, maps: AttentionMaps) -> None:
        numbers = self.numbers(layer, maps)
        for name, values in numbers.items():
            layers = self._sums.setdefault(name, {})
            batch = values.sum(dim=0).cpu().double().numpy()
            layers[layer] = layers.get(layer, np.zeros_like(batch)) + batch
        if layer == 0:
            self._images += len(next(iter(numbers.values())))


def shown_pixels(pixel_values: torch.Tensor) -> NDArray[np.uint8]:
    """Return the model's input [B, C, H, W] as images to show [B, H, W, 3], each stretched to its own range."""
    pixels = pixel_values.detach().float().cpu()
    low, high = pixels.amin(dim=(1, 2, 3), keepdim=True), pixels.amax(dim=(1, 2, 3), keepdim=True)
    stretched = (pixels - low) / (high - low).clamp(min=1e-12) * 255
    return stretched.round().to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()


def heads_by_depth(arrays: "Mapping[str, NDArray[np.float32]]", label: str) -> "Figure":
    """Draw a panel per array [L, A]: a dot per head over the layers, a line through their means."""
    figure = new_figure(4.4 * len(arrays), 3.6)
    top = 1.05 * max(float(values.max()) for values in arrays.values())
    for place, (name, values) in enumerate(arrays.items()):
        axes = figure.add_subplot(1, len(arrays), place + 1)
        layers = np.arange(1, len(values) + 1)
        for head in values.T:
            axes.scatter(layers, head, s=10, alpha=0.6, color="tab:blue", linewidths=0)
        axes.plot(layers, values.mean(axis=1), color="tab:orange", label="mean of the heads")
        integer_ticks(axes.xaxis)
        axes.set_xlabel("layer")
        axes.set_ylabel(label)
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.set_ylim(0, top or 1)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    return figure


class FeatureAnalysis(Analysis):
    """Abstract: reads the feature maps of all depths."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.reader = FeatureReader(context.subject.model)

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        return feature_obstacle(context.subject.model)

    def patch_px(self, pixel_values: torch.Tensor, last: torch.Tensor) -> tuple[int, int]:
        """Return (height, width) px of the image area behind one place of the last map; the patch of a transformer.

        Raises:
            UserError: the image is not a whole number of them.
        """
        (height, width), (h, w) = pixel_values.shape[2:], last.shape[2:]
        if height % h or width % w:
            raise UserError(
                f"{self.name} needs images of whole patches; {height}x{width} px do not divide into {h}x{w} of them: "
                "use a processor that resizes to a multiple"
            )
        return height // h, width // w


@final
class MapComparison:
    """How well moved feature maps predict the found ones, over images and places, for every (case, depth).

    The mean of the found map over its places is taken out of both: what all places share says nothing about them.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], NDArray[np.float64]] = {}

    def add(self, case: int, depth: int, found: torch.Tensor, wanted: torch.Tensor, inside: torch.Tensor) -> None:
        """Add maps [B, D, h, w]; `inside` [h, w] bool: the places that count."""
        found, wanted = found.float()[:, :, inside], wanted.float()[:, :, inside]  # [B, D, places]
        mean = found.mean(dim=2, keepdim=True)
        found, wanted = found - mean, wanted - mean
        values = [
            (found - wanted).square().sum(),
            found.square().sum(),
            F.cosine_similarity(found, wanted, dim=1).sum(),
        ]
        sums = [value.double().item() for value in values] + [float(len(found) * found.shape[2])]
        self._sums[case, depth] = self._sums.get((case, depth), np.zeros(4)) + sums

    def arrays(self, prefix: str = "") -> Arrays:
        """Return `error` and `cosine` [case, depth]; NaN where no place counts, or all places are found alike.

        `error` is the root of the squared difference as a share of the found map's variance over its places: 0 is
        equal, 1 as wrong as the found map's mean everywhere. `cosine` is the mean over places.
        """
        cases, depths = (max(key[axis] for key in self._sums) + 1 for axis in (0, 1))
        sums = np.array([[self._sums[case, depth] for depth in range(depths)] for case in range(cases)])
        defined = (sums[..., 1] > 0) & (sums[..., 3] > 0)
        difference, variance, cosine, places = np.where(defined[..., None], sums, np.nan).transpose(2, 0, 1)
        return {
            f"{prefix}error": np.sqrt(difference / variance).astype(np.float32),
            f"{prefix}cosine": (cosine / places).astype(np.float32),
        }


def curves(
    panels: "Mapping[str, Mapping[str, NDArray[np.float32]]]",
    xlabel: str,
    ylabel: str,
    x: "NDArray[np.float32] | None" = None,
) -> "Figure":
    """Draw a panel per title, a line per label over `x`, by default the place in the array."""
    figure = new_figure(4.4 * len(panels), 3.6)
    for place, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for label, values in lines.items():
            axes.plot(np.arange(len(values)) if x is None else x, values, marker=".", label=label or None)
        if x is None:
            integer_ticks(axes.xaxis)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if any(lines):
            axes.legend(fontsize=8)
    return figure
