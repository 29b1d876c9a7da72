"""Where a model of tokens keeps its patches, told apart by family: grid, patch side, prefix tokens.

Legend: B batch, N tokens, h x w patch grid.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from hf_vit.families import FAMILIES
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.modeling_hf_vit import class_token_index, patch_token_slice

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
    """The model without its head."""
    return getattr(model, "base_model", model)


def kind_of(model: nn.Module) -> str:
    """The family: a config's `model_type`, or the class's name."""
    return str(getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__)


def keywords_of(model: nn.Module, pixel_values: torch.Tensor) -> dict[str, Any]:
    """`TokenLayout.keywords` of a model of any family."""
    return TokenLayout(model).keywords(pixel_values) if kind_of(model) in KNOWN else {}


@final
class TokenLayout:
    """How the tokens of a model of a known family (`KNOWN`) lie.

    Attributes:
        config: of the encoder.
        patch_px: (height, width) of the image area behind one patch, in px.
        patch_tokens: where the patches stand among the tokens, row by row.
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
            self._grid_of = self._whole_patches

    def _whole_patches(self, height: int, width: int) -> tuple[int, int]:
        return height // self.patch_px[0], width // self.patch_px[1]

    def grid(self, pixel_values: torch.Tensor) -> tuple[int, int]:
        """(h, w) in patches of images [B, C, H, W]."""
        return self._grid_of(pixel_values.shape[2], pixel_values.shape[3])

    def keywords(self, pixel_values: torch.Tensor) -> dict[str, Any]:
        """What transformers' ViT and DeiT must be told about images of another than their nominal size."""
        nominal = as_pair(self.config.image_size) == tuple(pixel_values.shape[2:])
        told = self.config.model_type in ("vit", "deit") and not nominal
        return {"interpolate_pos_encoding": True} if told else {}
