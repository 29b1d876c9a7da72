"""Attention maps and feature maps of models of several libraries, read from one ordinary forward pass.

Legend: B batch, N tokens, C channels, D feature channels or hidden size, A heads, h x w patch grid.
"""

import re
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit.families import FAMILIES
from hf_vit.loading.outputs import is_channels_last, layers_of, watch_layers
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.modeling_hf_vit import AttentionMaps, attention_probabilities, class_token_index, patch_token_slice

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


def encoder_of(model: nn.Module) -> Any:
    """Return the model without its head."""
    return getattr(model, "base_model", model)


def kind_of(model: nn.Module) -> str:
    """Return the family: a config's `model_type`, or the class's name."""
    return str(getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__)


def keywords_of(model: nn.Module, pixel_values: torch.Tensor) -> dict[str, Any]:
    """Return `TokenLayout.keywords` of a model of any family."""
    return TokenLayout(model).keywords(pixel_values) if kind_of(model) in KNOWN else {}


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
        self.config = config
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

    def keywords(self, pixel_values: torch.Tensor) -> dict[str, Any]:
        """Return the keywords of transformers' ViT and DeiT for images of another than their nominal size."""
        is_nominal = as_pair(self.config.image_size) == tuple(pixel_values.shape[2:])
        is_theirs = self.config.model_type in ("vit", "deit")
        return {"interpolate_pos_encoding": True} if is_theirs and not is_nominal else {}


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
    more, and no layer is kept.

    Attributes:
        layout: where the patches stand among the tokens.
        num_layers, num_heads: how many maps a pass gives, and of how many heads each.
        is_axial: whether a map is a pair, along rows and along columns (see `AttentionMaps`).

    Raises:
        UserError: the model is of another family.
    """

    def __init__(self, model: nn.Module) -> None:
        if obstacle := attention_obstacle(model):
            raise UserError(f"attention cannot be analyzed: {obstacle}; choose other analyses with --only")
        self.encoder = encoder_of(model)
        self.layout = TokenLayout(model)
        config = self.layout.config
        self.is_axial = config.model_type == "hf_axial_vit"
        self.num_layers, self.num_heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        self._probabilities = _our_probabilities if config.model_type in OUR_VITS else _their_probabilities

    def read(self, pixel_values: torch.Tensor, receive: Callable[[int, AttentionMaps], None]) -> None:
        """Run the encoder on [B, C, H, W]; `receive(layer, maps)` gets every layer's map, first layer first."""
        grid, layer = self.layout.grid(pixel_values), 0
        rows: torch.Tensor | None = None

        def finish(found: Any) -> None:
            nonlocal layer
            receive(layer, AttentionMaps({layer: found}, grid, self.layout.patch_tokens))
            layer += 1

        def whole(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            finish(self._probabilities(module, _hidden_states(arguments, keywords), grid))

        def along_rows(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            nonlocal rows
            rows = self._lines(module, _hidden_states(arguments, keywords), grid)

        def along_columns(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            finish((rows, self._lines(module, _hidden_states(arguments, keywords), (grid[1], grid[0]))))

        hooks = {"row": along_rows, "column": along_columns}
        handles = [
            module.register_forward_pre_hook(hooks.get(name.split(".")[-2], whole), with_kwargs=True)
            for name, module in self.encoder.named_modules()
            if hasattr(module, "q_proj") and hasattr(module, "scaling")
        ]
        try:
            self.encoder(pixel_values, **self.layout.keywords(pixel_values))
        finally:
            for handle in handles:
                handle.remove()

    def _lines(self, module: nn.Module, lines: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Return probabilities [B, A, h, w, w] of lines folded into the batch [B*h, w, D]."""
        return self._probabilities(module, lines, grid).unflatten(0, (-1, grid[0])).transpose(1, 2)


def _hidden_states(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    return arguments[0] if arguments else keywords["hidden_states"]


def _our_probabilities(module: Any, hidden_states: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    return module.probabilities(hidden_states, None, grid, None)


def _their_probabilities(module: Any, hidden_states: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    query, key = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj)
    )
    return attention_probabilities(query, key, module.scaling)


_RESNET_LAYERS = r"layer\d\.\d+"  # timm's and torchvision's
# Families whose layers give maps: ours, and transformers'.
_RESNETS = (
    *(family.model_type for family in FAMILIES.values() if not family.has_tokens),
    *("resnet", "bit", "regnet", "convnext"),
)


def feature_obstacle(model: nn.Module) -> str | None:
    """Return why the feature maps of a model cannot be read; None if they can."""
    kind = kind_of(model)
    if kind in (*KNOWN, *_RESNETS) or all(re.fullmatch(_RESNET_LAYERS, name) for name in layers_of(model)):
        return None
    known = ", ".join((*KNOWN, *_RESNETS))
    return f"it needs feature maps, which can be read from {known} and timm's ResNets, not from {kind}"


@final
class FeatureReader:
    """Reads the feature map [B, D, h, w] of every depth from one ordinary forward.

    Depth 0 of a model of tokens is its embeddings (a hybrid's stem included), the others are its layers, patches
    alone; of a ResNet they are its blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout = TokenLayout(model) if kind_of(model) in KNOWN else None
        self._channels_last = is_channels_last(model)

    def maps(self, pixel_values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        """Run the model on [B, C, H, W]; return the maps of all depths, and the model's output."""
        maps: list[torch.Tensor] = []
        layout = self.layout
        keywords = {} if layout is None else layout.keywords(pixel_values)

        def to_map(features: torch.Tensor) -> torch.Tensor:
            if layout is None:
                return features.permute(0, 3, 1, 2) if self._channels_last else features
            return features[:, layout.patch_tokens].transpose(1, 2).unflatten(2, layout.grid(pixel_values))

        with watch_layers(self.model, lambda name, features: maps.append(to_map(features))):
            output = self.model(pixel_values, **keywords)
        return maps, output
