"""Base classes of analyses, which read attention maps and feature maps of models of several libraries.

A new analysis is a module with one class that computes and draws, and one line in `ANALYSES` of `registry`.

Legend: B batch, N tokens, C channels, H x W px, A heads, L layers, D feature channels or hidden size (they may differ
by depth), h x w patch grid or positions of a feature map.
"""

import itertools
import math
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
from hf_vit.loading.outputs import find_layers, find_output_token, is_channels_last, run_hooks, watch_layers
from hf_vit.loading.pixels import crop_to_patches
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.modeling_hf_vit import (
    AttentionMaps,
    compute_attention_probabilities,
    get_class_token_index,
    get_patch_token_slice,
)
from hf_vit.results.figures import make_figure, set_integer_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Arrays = dict[str, NDArray[np.float32]]
Pictures = dict[str, "Figure"]


@final
@dataclass(frozen=True)
class ArraySpec:
    """The description of an array: its axes in order, its unit, and its meaning."""

    axes: tuple[str, ...]
    unit: str
    meaning: str


def describe_arrays(**arrays: tuple[str, str, str]) -> Mapping[str, ArraySpec]:
    """Return the specs of arrays, each given as name=(axes separated by spaces, unit, meaning)."""
    return {name: ArraySpec(tuple(axes.split()), unit, meaning) for name, (axes, unit, meaning) in arrays.items()}


@final
@dataclass(frozen=True)
class AnalysisSettings:
    """Settings of the analyses; they are saved with every result.

    Attributes:
        num_images: number of randomly drawn images to average over; 128 in arXiv 2010.11929, D.7.
        batch_size: images per forward pass.
        num_pictures: number of images that are plotted (rollout, head maps).
        rollout_identity: weight of the identity matrix that rollout adds to every layer; 0.5 in arXiv 2005.00928, 0 for
            the plain product.
        cka_batch_size: images per minibatch of CKA, at least 4.
        seed: random seed for drawing images.
    """

    num_images: int = 128
    batch_size: int = 8
    num_pictures: int = 4
    rollout_identity: float = 0.5
    cka_batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise a UserError for the first value that is out of its range."""
        for name, minimum in (("num_images", 1), ("batch_size", 1), ("num_pictures", 1), ("cka_batch_size", 4)):
            if getattr(self, name) < minimum:
                raise UserError(f"{name}={getattr(self, name)} is too small; give at least {minimum}")
        if not 0 <= self.rollout_identity < 1:
            raise UserError(
                f"rollout_identity={self.rollout_identity} is out of range; give a number from 0 to below 1"
            )


@final
@dataclass(frozen=True)
class Context:
    """The inputs of an analysis.

    Attributes:
        loaded: the model.
        images: the images.
        settings: numbers of images, batch sizes and seed.
        against: second model, for `cka_between`.
        cue_conflicts: images for `shape_bias`.
        optimize: whether an analysis that needs only predictions may use an optimized copy of the model.
    """

    loaded: LoadedModel
    images: AnalysisImages
    settings: AnalysisSettings = field(default_factory=AnalysisSettings)
    against: LoadedModel | None = None
    cue_conflicts: CueConflicts | None = None
    optimize: bool = False


class Analysis(ABC):
    """Abstract: one analysis of a model.

    Attributes:
        name: name on the command line and of the result files.
        title: heading in the report.
        source: paper and section that it follows.
        shows: explanation of the plot and its limits.
        second_input: field of `Context` that it needs besides model, images and settings.
        reads_images: whether it needs images of one size.
        arrays: specs of the result's arrays; arrays that do not apply to a model are absent.
        engine: the engine that ran an optimized model, if one was used.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    shows: ClassVar[str]
    second_input: ClassVar[Literal["against", "cue_conflicts"] | None] = None
    reads_images: ClassVar[bool] = True
    arrays: ClassVar[Mapping[str, ArraySpec]]

    def __init__(self, context: Context) -> None:
        self.context = context
        self.notes: list[str] = []
        self.engine: str | None = None

    @classmethod
    @abstractmethod
    def find_obstacle(cls, context: Context) -> str | None:
        """Return why the analysis does not apply, as the end of "NAME does not apply: ..."; None if it does."""

    @abstractmethod
    def measure(self) -> Arrays:
        """Return the float32 arrays that `arrays` describes; memory does not grow with the number of images."""

    @abstractmethod
    def draw(self, arrays: Arrays) -> Pictures:
        """Return figures of the arrays by title."""

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        """Return the numbers to record in facts.json."""
        return {}

    def batches(self, limit: int | None = None, images: AnalysisImages | None = None) -> Iterator[torch.Tensor]:
        """Yield preprocessed images [B, C, H, W], by default those of the context, cropped to whole patches."""
        shape: torch.Size | None = None
        for batch in (images or self.context.images).batches(self.context.settings.batch_size, limit):
            pixel_values = self.context.loaded.pixel_values(batch)
            if shape is not None and pixel_values.shape[1:] != shape:
                raise UserError(
                    f"the image processor returns images of {tuple(shape[1:])} and {tuple(pixel_values.shape[2:])} "
                    "px, but averages need one size; set do_resize in preprocessor_config.json"
                )
            shape = pixel_values.shape[1:]
            model = self.context.loaded.model
            if find_model_type(model) in PREFIX_TOKENS:  # these ignore the rest, too
                layout = TokenLayout(model)
                height, width = (n * px for n, px in zip(layout.grid(pixel_values), layout.patch_px, strict=True))
                pixel_values = pixel_values[:, :, :height, :width]
            yield crop_to_patches(model, pixel_values)


OURS = tuple(family.model_type for family in FAMILIES.values() if family.has_tokens)
OUR_VITS = tuple(family.model_type for family in FAMILIES.values() if family.is_vit)
# Model type in transformers -> number of tokens before the patches (class, distillation, registers); class is first.
PREFIX_TOKENS: dict[str, Callable[[Any], int]] = {
    "vit": lambda config: 1,
    "deit": lambda config: 2,
    "dinov2": lambda config: 1,
    "dinov2_with_registers": lambda config: 1 + config.num_register_tokens,
}
TOKEN_MODELS = (*OURS, *PREFIX_TOKENS)
# Model types whose layers return feature maps: ours, and those of transformers.
_MAP_MODELS = (
    *(family.model_type for family in FAMILIES.values() if not family.has_tokens),
    *("resnet", "bit", "regnet", "convnext"),
)


def find_encoder(model: nn.Module) -> Any:
    """Return the model without its head."""
    return getattr(model, "base_model", model)


def find_model_type(model: nn.Module) -> str:
    """Return the config's `model_type`, or the class name of a model without a config."""
    return str(getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__)


def forward_options(model: nn.Module, pixel_values: torch.Tensor) -> dict[str, Any]:
    """Return the keyword arguments that transformers' ViT and DeiT need for images [B, C, H, W] of another size."""
    if find_model_type(model) not in ("vit", "deit"):
        return {}
    is_nominal = as_pair(find_encoder(model).config.image_size) == tuple(pixel_values.shape[2:])
    return {} if is_nominal else {"interpolate_pos_encoding": True}


@final
class TokenLayout:
    """The order of tokens in a model whose type is in `TOKEN_MODELS`.

    Attributes:
        patch_px: (height, width) in pixels of the image area that one patch covers.
        patch_tokens: slice of the patches among the tokens, row by row.
        class_token: index of the class token, or None.
        output_token: index of the class token or first patch that the output is read from; None for other tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        config = find_encoder(model).config
        self.class_token: int | None = None
        self.output_token: int | None = None
        self.patch_tokens = slice(None)
        if config.model_type in OURS:
            self.patch_px: tuple[int, int] = config.patch_stride
            self._compute_grid = config.grid_of
            if config.model_type in OUR_VITS:  # a Mixer has no other tokens than its patches
                self.patch_tokens = get_patch_token_slice(config)
                self.class_token = get_class_token_index(config) if config.has_class_token else None
                self.output_token = find_output_token(config)
        else:
            self.patch_px = as_pair(config.patch_size)
            self._compute_grid = lambda height, width: (height // self.patch_px[0], width // self.patch_px[1])
            self.patch_tokens = slice(PREFIX_TOKENS[config.model_type](config), None)
            self.class_token = self.output_token = 0  # all of these models have one

    def grid(self, pixel_values: torch.Tensor) -> tuple[int, int]:
        """Return the patch grid (h, w) for images [B, C, H, W]."""
        return self._compute_grid(pixel_values.shape[2], pixel_values.shape[3])


def find_attention_obstacle(model: nn.Module) -> str | None:
    """Return why the attention of a model cannot be read, or None."""
    kind = find_model_type(model)
    readable_types = (*OUR_VITS, *PREFIX_TOKENS)
    if kind in readable_types:
        return None
    return f"it needs attention maps, which can be read from {', '.join(readable_types)}, but not from {kind}"


@final
class AttentionReader:
    """Reads attention probabilities under any attention implementation.

    Probabilities are recomputed from queries and keys while each layer runs. A pass takes little more than one forward
    pass, and only one layer is in memory.

    Attributes:
        encoder: the model without its head.
        layout: the order of its tokens.

    Raises:
        UserError: the attention of this model type cannot be read.
    """

    def __init__(self, model: nn.Module) -> None:
        if obstacle := find_attention_obstacle(model):
            raise UserError(f"the model's attention cannot be analyzed: {obstacle}; choose other analyses with --only")
        self.encoder = find_encoder(model)
        self.layout = TokenLayout(model)

    def read(self, pixel_values: torch.Tensor, receive: Callable[[int, AttentionMaps], None]) -> None:
        """Run the encoder on [B, C, H, W] and call `receive(layer, maps)` for every layer, from first to last."""
        h, w = self.layout.grid(pixel_values)
        layers = itertools.count()
        rows = list[torch.Tensor]()

        def make_hook(axis: str) -> Callable[..., None]:
            """Return a pre-hook for attention along "row" or "column"; other names mean full attention."""

            def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
                """Compute the probabilities; those of rows wait for the columns of the same layer."""
                grid = (w, h) if axis == "column" else (h, w)
                hidden_states = arguments[0] if arguments else keywords["hidden_states"]
                probabilities: Any = _compute_probabilities(module, hidden_states, grid, keywords.get("rotation"))
                if axis in ("row", "column"):  # lines are part of the batch axis: [B*h, A, w, w] -> [B, A, h, w, w]
                    probabilities = probabilities.unflatten(0, (-1, grid[0])).transpose(1, 2)
                if axis == "row":
                    rows.append(probabilities)
                    return
                layer = next(layers)  # of the pass; a module that several layers share runs several times
                layer_maps = (rows.pop(), probabilities) if axis == "column" else probabilities
                receive(layer, AttentionMaps({layer: layer_maps}, (h, w), self.layout.patch_tokens))

            return hook

        handles: list[Any] = []
        for name, module in self.encoder.named_modules():
            if hasattr(module, "q_proj") and hasattr(module, "scaling"):
                axis = name.split(".")[-2]  # "row" or "column" in "layers.0.row.attention"
                handles.append(module.register_forward_pre_hook(make_hook(axis), with_kwargs=True))
        try:
            with run_hooks(self.encoder):
                self.encoder(pixel_values, **forward_options(self.encoder, pixel_values))
        finally:
            for handle in handles:
                handle.remove()


def _compute_probabilities(
    module: Any, hidden_states: torch.Tensor, grid: tuple[int, int], rotation: Any
) -> torch.Tensor:
    """Return the attention probabilities [B, A, N, N] of an attention module for its input."""
    if hasattr(module, "compute_probabilities"):
        return module.compute_probabilities(hidden_states, None, grid, None, rotation)
    query = module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    key = module.k_proj(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    return compute_attention_probabilities(query, key, module.scaling)


class AttentionAnalysis(Analysis):
    """Abstract: an analysis of the attention maps of all layers."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.reader = AttentionReader(context.loaded.model)

    @classmethod
    def find_obstacle(cls, context: Context) -> str | None:
        return find_attention_obstacle(context.loaded.model)

    @torch.inference_mode()
    def read(self, pixel_values: torch.Tensor, receive: Callable[[int, AttentionMaps], None]) -> None:
        """Run the model on [B, C, H, W] and call `receive(layer, maps)` for every layer."""
        self.reader.read(pixel_values, receive)


class HeadMetric(AttentionAnalysis):
    """Abstract: metrics of every layer and head, averaged over the images; arrays [L, A]."""

    @abstractmethod
    def compute(self, layer: int, maps: AttentionMaps) -> dict[str, torch.Tensor]:
        """Return metrics [B, A] of one layer by name."""

    def measure(self) -> Arrays:
        sums: dict[str, dict[int, Any]] = {}
        num_images = 0

        def add_layer(layer: int, maps: AttentionMaps) -> None:
            for name, values in self.compute(layer, maps).items():
                layers = sums.setdefault(name, {})
                layers[layer] = layers.get(layer, 0.0) + values.sum(dim=0).cpu().double().numpy()

        for pixel_values in self.batches():
            self.read(pixel_values, add_layer)
            num_images += len(pixel_values)
        return {
            name: (np.stack([layers[layer] for layer in sorted(layers)]) / num_images).astype(np.float32)
            for name, layers in sums.items()
        }


class FeatureAnalysis(Analysis):
    """Abstract: an analysis of the feature maps [B, D, h, w] of all depths.

    For models with tokens, depth 0 is the embeddings (including a hybrid's stem) and the other depths are the layers,
    without prefix tokens. For ResNets, depths are blocks.
    """

    @classmethod
    def find_obstacle(cls, context: Context) -> str | None:
        model = context.loaded.model
        kind = find_model_type(model)
        readable_types = (*TOKEN_MODELS, *_MAP_MODELS)
        # Layers of ResNets in timm and torchvision have names such as "layer1.0".
        if kind in readable_types or all(re.fullmatch(r"layer\d\.\d+", name) for name in find_layers(model)):
            return None
        types = ", ".join(readable_types)
        return f"it needs feature maps, which can be read from {types} and timm's ResNets, but not from {kind}"

    def read_maps(self, pixel_values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        """Run the model on [B, C, H, W] and return the maps of all depths and the model's output."""
        return read_features(self.context.loaded.model, pixel_values)

    def compute_patch_px(self, pixel_values: torch.Tensor, last: torch.Tensor) -> tuple[int, int]:
        """Return (height, width) in pixels of the image area behind a position of the last map, such as a patch."""
        (height, width), (h, w) = pixel_values.shape[2:], last.shape[2:]
        model = self.context.loaded.model
        if find_model_type(model) in TOKEN_MODELS:
            patch_px = TokenLayout(model).patch_px
        else:  # the stride of a convolutional network is a power of two
            patch_px = 2 ** round(math.log2(height / h)), 2 ** round(math.log2(width / w))
        if (h * patch_px[0], w * patch_px[1]) != (height, width):
            raise UserError(
                f"{self.name} needs images of whole patches, but some of the {h}x{w} patches of {height}x{width} px "
                "are incomplete; set a multiple of the patch size in preprocessor_config.json"
            )
        return patch_px


def read_features(model: nn.Module, pixel_values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
    """Run a model on [B, C, H, W] and return the map [B, D, h, w] of every depth, and the model's output."""
    maps: list[torch.Tensor] = []
    layout = TokenLayout(model) if find_model_type(model) in TOKEN_MODELS else None

    def add_map(name: str, features: torch.Tensor) -> None:
        """Convert a layer's output to [B, D, h, w], without prefix tokens."""
        if layout is not None:
            maps.append(features[:, layout.patch_tokens].transpose(1, 2).unflatten(2, layout.grid(pixel_values)))
        else:
            maps.append(features.permute(0, 3, 1, 2) if is_channels_last(model) else features)

    with watch_layers(model, add_map):
        output = model(pixel_values, **forward_options(model, pixel_values))
    return maps, output


@final
class MapComparison:
    """Accumulates how well feature maps match expected ones, for every (case, depth), over images and positions.

    The mean over positions is subtracted first, as it says nothing about how features move.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], NDArray[np.float64]] = {}

    def add(self, case: int, depth: int, actual: torch.Tensor, expected: torch.Tensor, valid: torch.Tensor) -> None:
        """Add the actual and the expected maps [B, D, h, w] of one case and depth at the valid positions [h, w]."""
        actual_values, expected_values = actual.float()[:, :, valid], expected.float()[:, :, valid]
        mean = actual_values.mean(dim=2, keepdim=True)
        centered, expected_centered = actual_values - mean, expected_values - mean  # [B, D, positions]
        difference, variance = (centered - expected_centered).square().sum(), centered.square().sum()
        cosine = F.cosine_similarity(centered, expected_centered, dim=1).sum()
        sums = [value.item() for value in (difference, variance, cosine)]
        sums.append(len(centered) * centered.shape[2])  # number of positions
        self._sums[case, depth] = self._sums.get((case, depth), np.zeros(4)) + sums

    def arrays(self, prefix: str = "") -> Arrays:
        """Return `error` and `cosine`, [case, depth]; NaN if no position counts or the map is constant.

        `error` is the root of the squared difference divided by the variance of the actual map over positions: 0 means
        equal, 1 means no better than predicting the mean everywhere. `cosine` is the mean cosine similarity over
        positions.
        """
        cases = max(case for case, _ in self._sums) + 1
        depths = max(depth for _, depth in self._sums) + 1
        sums = np.array([[self._sums[case, depth] for depth in range(depths)] for case in range(cases)])
        is_defined = (sums[..., 1] > 0) & (sums[..., 3] > 0)
        difference, variance, cosine, num_positions = np.where(is_defined[..., None], sums, np.nan).transpose(2, 0, 1)
        return {
            f"{prefix}error": np.sqrt(difference / variance).astype(np.float32),
            f"{prefix}cosine": (cosine / num_positions).astype(np.float32),
        }


def round_values(values: NDArray[np.float32]) -> list[float | None]:
    """Return values as a list for facts.json, with None for undefined ones."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]


def to_display_images(pixel_values: torch.Tensor) -> NDArray[np.uint8]:
    """Return model inputs [B, C, H, W] as uint8 images [B, H, W, 3], each stretched to the full range."""
    pixels = pixel_values.detach().float().cpu()
    low, high = pixels.amin(dim=(1, 2, 3), keepdim=True), pixels.amax(dim=(1, 2, 3), keepdim=True)
    stretched = (pixels - low) / (high - low).clamp(min=1e-12) * 255
    return stretched.round().to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()


def draw_panels(
    panels: "Mapping[str, Any]", xlabel: str, ylabel: str, draw: "Callable[[Axes, Any], None]", **legend: Any
) -> "Figure":
    """Draw panels (title -> content) side by side; `draw` gets axes and content, `legend` are options of legends."""
    figure = make_figure(4.4 * len(panels), 3.6)
    for index, (title, content) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), index + 1)
        draw(axes, content)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.set_title(title, fontsize=9)
        axes.grid(visible=True, alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(**{"fontsize": 8, **legend})
    return figure


def draw_heads(arrays: "Mapping[str, NDArray[np.float32]]", label: str) -> "Figure":
    """Draw a panel per array [L, A]: a dot per head over the layers, and a line through the means."""
    top = 1.05 * max(float(values.max()) for values in arrays.values())

    def draw_panel(axes: "Axes", values: NDArray[np.float32]) -> None:
        layers = np.arange(1, len(values) + 1)
        for head in values.T:
            axes.scatter(layers, head, s=10, alpha=0.6, color="tab:blue", linewidths=0)
        axes.plot(layers, values.mean(axis=1), color="tab:orange", label="mean of the heads")
        set_integer_ticks(axes.xaxis)
        axes.set_ylim(0, top or 1)

    return draw_panels({name.replace("_", " "): values for name, values in arrays.items()}, "layer", label, draw_panel)


def draw_curves(
    panels: "Mapping[str, Mapping[str, NDArray[np.float32]]]",
    xlabel: str,
    ylabel: str,
    x: "NDArray[np.float32] | None" = None,
) -> "Figure":
    """Draw a panel per title with a line per label (title -> label -> values) over `x`, by default the index."""

    def draw_panel(axes: "Axes", lines: Mapping[str, NDArray[np.float32]]) -> None:
        for label, values in lines.items():
            axes.plot(np.arange(len(values)) if x is None else x, values, marker=".", label=label or None)
        if x is None:
            set_integer_ticks(axes.xaxis)
        axes.set_ylim(bottom=0)

    return draw_panels(panels, xlabel, ylabel, draw_panel)
