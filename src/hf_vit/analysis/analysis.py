"""What an analysis is, and how those of attention maps and of feature maps read models of several libraries.

A new analysis is a module with one class, which computes and draws, and a line of the table in `api`.

Legend: B batch, N tokens, C channels, H x W px, A heads, L layers, D feature channels or hidden size (they may differ
by depth), h x w patch grid or places of a map.
"""

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from hf_vit.analysis.images import AnalysisImages, CueConflicts
from hf_vit.errors import UserError
from hf_vit.families import FAMILIES
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.outputs import find_layers, is_channels_last, watch_layers
from hf_vit.loading.pixels import crop_to_patches
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.modeling_hf_vit import AttentionMaps, attention_probabilities, class_token_index, patch_token_slice
from hf_vit.results.figures import integer_ticks, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def describe_arrays(**arrays: tuple[str, str, str]) -> Mapping[str, ArraySpec]:
    """Return the descriptions of arrays: name -> (axes, separated by spaces; unit; meaning)."""
    return {name: ArraySpec(tuple(axes.split()), unit, meaning) for name, (axes, unit, meaning) in arrays.items()}


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

    def batches(self, limit: int | None = None, images: AnalysisImages | None = None) -> Iterator[torch.Tensor]:
        """Yield the images (by default the context's) as the model sees them, [B, C, H, W]: whole patches.

        Raises:
            UserError: the processor makes images of several sizes.
        """
        shape: torch.Size | None = None
        for batch in (images or self.context.images).batches(self.context.settings.batch_size, limit):
            pixel_values = self.context.subject.pixel_values(batch)
            if shape is not None and pixel_values.shape[1:] != shape:
                raise UserError(
                    f"the image processor makes images of {tuple(shape[1:])} and {tuple(pixel_values.shape[2:])} px; "
                    "averages need one size: use a processor that resizes"
                )
            shape = pixel_values.shape[1:]
            yield crop_to_patches(self.context.subject.model, pixel_values)


OURS = tuple(family.model_type for family in FAMILIES.values() if family.has_tokens)
OUR_VITS = tuple(family.model_type for family in FAMILIES.values() if family.is_vit)
# transformers' families -> tokens before the patches: class, distillation, registers. The class token is the first.
PREFIX_TOKENS: dict[str, Callable[[Any], int]] = {
    "vit": lambda config: 1,
    "deit": lambda config: 2,
    "dinov2": lambda config: 1,
    "dinov2_with_registers": lambda config: 1 + config.num_register_tokens,
}
KNOWN = (*OURS, *PREFIX_TOKENS)
# Families whose layers give maps: ours, and transformers'.
_RESNETS = (
    *(family.model_type for family in FAMILIES.values() if not family.has_tokens),
    *("resnet", "bit", "regnet", "convnext"),
)


def encoder_of(model: nn.Module) -> Any:
    """Return the model without its head."""
    return getattr(model, "base_model", model)


def kind_of(model: nn.Module) -> str:
    """Return the family: a config's `model_type`, or the class's name."""
    return str(getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__)


def keywords_of(model: nn.Module, pixel_values: torch.Tensor) -> dict[str, Any]:
    """Return the keywords of transformers' ViT and DeiT for images [B, C, H, W] of another than their nominal size."""
    if kind_of(model) not in ("vit", "deit"):
        return {}
    is_nominal = as_pair(encoder_of(model).config.image_size) == tuple(pixel_values.shape[2:])
    return {} if is_nominal else {"interpolate_pos_encoding": True}


@final
class TokenLayout:
    """How the tokens of a model of a known family (`KNOWN`) lie.

    Attributes:
        patch_px: (height, width) of the image area behind one patch, in px.
        patch_tokens: the slice of the patches among the tokens, row by row.
        class_token: index of the class token, None without one.
    """

    def __init__(self, model: nn.Module) -> None:
        config = encoder_of(model).config
        self.class_token: int | None = 0
        if config.model_type in OURS:
            self.patch_px: tuple[int, int] = config.patch_stride
            attends = config.model_type in OUR_VITS  # the tokens of a Mixer are its patches
            self.patch_tokens = patch_token_slice(config) if attends else slice(None)
            self.class_token = class_token_index(config) if attends and config.has_class_token else None
            self._grid_of = config.grid_of
        else:
            self.patch_px = as_pair(config.patch_size)
            self.patch_tokens = slice(PREFIX_TOKENS[config.model_type](config), None)
            self._grid_of = lambda height, width: (height // self.patch_px[0], width // self.patch_px[1])

    def grid(self, pixel_values: torch.Tensor) -> tuple[int, int]:
        """Return (h, w) in patches of images [B, C, H, W]."""
        return self._grid_of(pixel_values.shape[2], pixel_values.shape[3])


def attention_obstacle(model: nn.Module) -> str | None:
    """Return why the attention of a model cannot be read; None if it can."""
    kind, known = kind_of(model), (*OUR_VITS, *PREFIX_TOKENS)
    if kind in known:
        return None
    return f"it needs attention maps, which can be read from {', '.join(known)}, not from {kind}"


@final
class AttentionReader:
    """Reads attention probabilities under any attention implementation, in memory for one layer.

    They are computed anew from the queries and keys of the layer that runs, so a pass costs one forward and little
    more, and no layer is kept. `layout` says where the patches stand among the tokens.

    Raises:
        UserError: the model is of another family.
    """

    def __init__(self, model: nn.Module) -> None:
        if obstacle := attention_obstacle(model):
            raise UserError(f"attention cannot be analyzed: {obstacle}; choose other analyses with --only")
        self.encoder, self.layout = encoder_of(model), TokenLayout(model)

    def read(self, pixel_values: torch.Tensor, receive: Callable[[int, AttentionMaps], None]) -> None:
        """Run the encoder on [B, C, H, W]; `receive(layer, maps)` gets every layer's map, first layer first."""
        h, w = self.layout.grid(pixel_values)
        layers, rows = itertools.count(), list[torch.Tensor]()

        def hook_of(part: str) -> Callable[..., None]:
            def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
                grid = (w, h) if part == "column" else (h, w)
                found: Any = _probabilities(module, arguments[0] if arguments else keywords["hidden_states"], grid)
                if part in ("row", "column"):  # lines are folded into the batch: [B*h, A, w, w] -> [B, A, h, w, w]
                    found = found.unflatten(0, (-1, grid[0])).transpose(1, 2)
                if part == "row":
                    rows.append(found)
                    return
                layer = next(layers)
                pair = (rows.pop(), found) if part == "column" else found
                receive(layer, AttentionMaps({layer: pair}, (h, w), self.layout.patch_tokens))

            return hook

        handles = [
            module.register_forward_pre_hook(hook_of(name.split(".")[-2]), with_kwargs=True)
            for name, module in self.encoder.named_modules()
            if hasattr(module, "q_proj") and hasattr(module, "scaling")
        ]
        try:
            self.encoder(pixel_values, **keywords_of(self.encoder, pixel_values))
        finally:
            for handle in handles:
                handle.remove()


def _probabilities(module: Any, hidden_states: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """[B, A, N, N] of an attention module of ours or of transformers' on its input."""
    if hasattr(module, "probabilities"):
        return module.probabilities(hidden_states, None, grid, None)
    query, key = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj)
    )
    return attention_probabilities(query, key, module.scaling)


class AttentionAnalysis(Analysis):
    """Abstract: reads the attention maps of all layers, batch by batch."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.reader = AttentionReader(context.subject.model)

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        return attention_obstacle(context.subject.model)

    @torch.inference_mode()
    def read(self, pixel_values: torch.Tensor, receive: Callable[[int, AttentionMaps], None]) -> None:
        """Run the model on a batch [B, C, H, W]; `receive(layer, maps)` gets every layer's map."""
        self.reader.read(pixel_values, receive)


class HeadNumbers(AttentionAnalysis):
    """Abstract: means over the images of numbers that every layer and head has; arrays [L, A]."""

    @abstractmethod
    def numbers(self, layer: int, maps: AttentionMaps) -> dict[str, torch.Tensor]:
        """Return numbers [B, A] of one layer, by name."""

    def measure(self) -> Arrays:
        sums: dict[str, dict[int, Any]] = {}
        num_images = 0

        def add(layer: int, maps: AttentionMaps) -> None:
            for name, values in self.numbers(layer, maps).items():
                layers = sums.setdefault(name, {})
                layers[layer] = layers.get(layer, 0.0) + values.sum(dim=0).cpu().double().numpy()

        for pixel_values in self.batches():
            self.read(pixel_values, add)
            num_images += len(pixel_values)
        return {
            name: (np.stack([layers[layer] for layer in sorted(layers)]) / num_images).astype(np.float32)
            for name, layers in sums.items()
        }


def feature_obstacle(model: nn.Module) -> str | None:
    """Return why the feature maps of a model cannot be read; None if they can."""
    kind = kind_of(model)
    # The last ones are the blocks of timm's and torchvision's ResNets.
    if kind in (*KNOWN, *_RESNETS) or all(re.fullmatch(r"layer\d\.\d+", name) for name in find_layers(model)):
        return None
    known = ", ".join((*KNOWN, *_RESNETS))
    return f"it needs feature maps, which can be read from {known} and timm's ResNets, not from {kind}"


class FeatureAnalysis(Analysis):
    """Abstract: reads the feature maps [B, D, h, w] of all depths.

    Depth 0 of a model of tokens is its embeddings (a hybrid's stem included), the others are its layers, patches
    alone; of a ResNet they are its blocks.
    """

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        return feature_obstacle(context.subject.model)

    def maps(self, pixel_values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        """Run the model on [B, C, H, W]; return the maps of all depths, and the model's output."""
        return read_features(self.context.subject.model, pixel_values)

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


def read_features(model: nn.Module, pixel_values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
    """Run a model on [B, C, H, W] once; return the map [B, D, h, w] of every depth, and the model's output."""
    maps: list[torch.Tensor] = []
    layout = TokenLayout(model) if kind_of(model) in KNOWN else None

    def add(name: str, features: torch.Tensor) -> None:
        if layout is not None:
            features = features[:, layout.patch_tokens].transpose(1, 2).unflatten(2, layout.grid(pixel_values))
        elif is_channels_last(model):
            features = features.permute(0, 3, 1, 2)
        maps.append(features)

    with watch_layers(model, add):
        output = model(pixel_values, **keywords_of(model, pixel_values))
    return maps, output


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


def rounded(values: NDArray[np.float32]) -> list[float | None]:
    """Return numbers [...] for facts.json, None where undefined."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]


def shown_pixels(pixel_values: torch.Tensor) -> NDArray[np.uint8]:
    """Return the model's input [B, C, H, W] as images to show [B, H, W, 3], each stretched to its own range."""
    pixels = pixel_values.detach().float().cpu()
    low, high = pixels.amin(dim=(1, 2, 3), keepdim=True), pixels.amax(dim=(1, 2, 3), keepdim=True)
    stretched = (pixels - low) / (high - low).clamp(min=1e-12) * 255
    return stretched.round().to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()


def draw_panels(
    panels: "Mapping[str, Any]", xlabel: str, ylabel: str, draw: "Callable[[Axes, Any], None]", **legend: Any
) -> "Figure":
    """Draw a panel per title, side by side: `draw(axes, panel)` draws its points and lines."""
    figure = new_figure(4.4 * len(panels), 3.6)
    for place, (title, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        draw(axes, panel)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.set_title(title, fontsize=9)
        axes.grid(visible=True, alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(**{"fontsize": 8, **legend})
    return figure


def heads_by_depth(arrays: "Mapping[str, NDArray[np.float32]]", label: str) -> "Figure":
    """Draw a panel per array [L, A]: a dot per head over the layers, a line through their means."""
    top = 1.05 * max(float(values.max()) for values in arrays.values())

    def draw(axes: "Axes", values: NDArray[np.float32]) -> None:
        layers = np.arange(1, len(values) + 1)
        for head in values.T:
            axes.scatter(layers, head, s=10, alpha=0.6, color="tab:blue", linewidths=0)
        axes.plot(layers, values.mean(axis=1), color="tab:orange", label="mean of the heads")
        integer_ticks(axes.xaxis)
        axes.set_ylim(0, top or 1)

    return draw_panels({name.replace("_", " "): values for name, values in arrays.items()}, "layer", label, draw)


def curves(
    panels: "Mapping[str, Mapping[str, NDArray[np.float32]]]",
    xlabel: str,
    ylabel: str,
    x: "NDArray[np.float32] | None" = None,
) -> "Figure":
    """Draw a panel per title, a line per label over `x`, by default the place in the array."""

    def draw(axes: "Axes", lines: Mapping[str, NDArray[np.float32]]) -> None:
        for label, values in lines.items():
            axes.plot(np.arange(len(values)) if x is None else x, values, marker=".", label=label or None)
        if x is None:
            integer_ticks(axes.xaxis)
        axes.set_ylim(bottom=0)

    return draw_panels(panels, xlabel, ylabel, draw)
