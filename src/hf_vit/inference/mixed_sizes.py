"""Batches of mixed sizes without padding: the tokens of all images in one sequence, attention within each image alone.

Legend: B images, T tokens of all of them, N of one (n of a batch padded to the largest), D hidden size, A heads,
K head size, h x w patch grid. Source: "Patch n' Pack" (NaViT, arXiv 2307.06304, section 2).
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from hf_vit.inference.freezing import Frozen, precede
from hf_vit.inference.layers import derive
from hf_vit.inference.plan import attends_otherwise, has_listeners
from hf_vit.models.embeddings_hf_vit import Grid, image_grids_of, top_left_indices
from hf_vit.models.modeling_hf_hybrid_vit import HfHybridViTModel
from hf_vit.models.modeling_hf_vit import HfViTBaseModel, HfViTModel, patch_token_slice

Model = TypeVar("Model", bound=nn.Module)
WITHIN_IMAGES = "within_images"
# What makes a pass show or change tokens in their places of the padded batch.
_OF_PADDED = ("output_hidden_states", "output_attentions", "bool_masked_pos", "patch_sources")


def attend_within_images(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    images: Sequence[tuple[int, int]] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each image, [1, A, T, K] -> [1, T, A, K]; `images` as (how many, N of each)."""
    causal: bool = getattr(module, "is_causal", False)
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        return _by_varlen(query, key, value, scaling, images, causal), None
    lengths = [count * length for count, length in images]
    parts = zip(images, *(states[0].split(lengths, dim=1) for states in (query, key, value)), strict=True)
    attended = []
    for shape, *states in parts:
        of_image = (part.unflatten(1, shape).transpose(0, 1) for part in states)  # [B, A, N, K]
        output = F.scaled_dot_product_attention(*of_image, is_causal=causal, scale=scaling)
        attended.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)[None], None


def _by_varlen(query: Any, key: Any, value: Any, scaling: float, images: Any, causal: bool) -> torch.Tensor:
    """Attend by torch's kernel for sequences of any lengths, in one call; it is for GPUs and half precision."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = torch.tensor([0, *(length for count, length in images for _ in range(count))], device=query.device)
    starts, longest = lengths.cumsum(0, dtype=torch.int32), max(length for _, length in images)
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))  # [T, A, K]
    window = (-1, 0) if causal else (-1, -1)
    output: Any = varlen_attn(query, key, value, starts, starts, longest, longest, scale=scaling, window_size=window)
    return output[None]


ALL_ATTENTION_FUNCTIONS.register(WITHIN_IMAGES, attend_within_images)


def _within_images(layer: Any, config: Any) -> Any:
    """Return another object around the same weights: the layer itself may be computing somebody else's pass."""
    attention, new = derive(type(layer.attention), layer.attention), derive(type(layer), layer)
    vars(attention)["config"] = config
    new._modules["attention"] = attention
    return new


class UnpaddedModel(HfViTBaseModel):
    """Goes before the class of a model that leaves the padding of a `patch_attention_mask` out; its outputs stay."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorated one's parameters are spelt out)
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        asked = {name: kwargs.get(name, getattr(self.config, name, None)) for name in _OF_PADDED}
        shown = any(value is not None and value is not False for value in asked.values())
        padded = shown or attends_otherwise(self.config)
        if patch_attention_mask is None or padded or self.training or any(map(has_listeners, self.modules())):
            return super().forward(pixel_values, patch_attention_mask=patch_attention_mask, **kwargs)
        one_sequence: Any = self.one_sequence  # the decorator takes return_dict beside its parameters
        return one_sequence(pixel_values, patch_attention_mask, return_dict=kwargs.get("return_dict"))

    @can_return_tuple
    def one_sequence(self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor) -> Any:
        """Compute a padded batch; `last_hidden_state` is 0 on padding."""
        grid = self.config.grid_of(*pixel_values.shape[2:])
        image_grids = image_grids_of(patch_attention_mask, len(pixel_values), grid)
        sizes = {own: [i for i, other in enumerate(image_grids) if other == own] for own in dict.fromkeys(image_grids)}
        stride_h, stride_w = self.config.patch_stride
        parts = [
            self.embed(pixel_values[images, :, : h * stride_h, : w * stride_w], None).hidden_states
            for (h, w), images in sizes.items()
        ]
        shapes = [(part.shape[0], part.shape[1]) for part in parts]
        hidden_states = torch.cat([part.flatten(0, 1) for part in parts])[None]
        config = copy.copy(self.config)
        config._attn_implementation = WITHIN_IMAGES
        for layer in self.layer_sequence():
            hidden_states = _within_images(layer, config)(hidden_states, images=shapes)
        if not self.norm_after_pooling:
            hidden_states = self.layernorm(hidden_states)
        parts = [
            part.unflatten(0, shape)
            for part, shape in zip(hidden_states[0].split([b * n for b, n in shapes]), shapes, strict=True)
        ]
        last, pooled = self._padded(parts, sizes, len(pixel_values), grid), None
        if self.pooler is not None:
            pooled = torch.cat([self.pooler(part) for part in parts])
            pooled = self.layernorm(pooled) if self.norm_after_pooling else pooled
            order = torch.tensor([i for images in sizes.values() for i in images], device=pooled.device)
            pooled = pooled[order.argsort()]
        return BaseModelOutputWithPooling(last_hidden_state=last, pooler_output=pooled)

    def _padded(self, parts: list[torch.Tensor], sizes: dict[Grid, list[int]], batch: int, grid: Grid) -> torch.Tensor:
        """Put tokens by sizes into [B, n, D] by images, each at the top left of the padded grid."""
        special, of_patches = self.config.num_special_tokens, patch_token_slice(self.config)
        padded = parts[0].new_zeros(batch, special + grid[0] * grid[1], parts[0].shape[2])

        def of_special(h: int, w: int) -> slice:
            return slice(h * w, None) if self.config.is_causal else slice(special)

        for part, (own, images) in zip(parts, sizes.items(), strict=True):
            rows = torch.tensor(images, device=part.device)
            padded[:, of_patches][rows[:, None], top_left_indices(own, grid, part.device)] = part[:, of_patches]
            padded[rows, of_special(*grid)] = part[:, of_special(*own)]
        return padded


_KINDS = (HfViTModel, HfHybridViTModel)


def _needs_no_grid(module: Any) -> bool:
    """Return whether its type, as loaded or optimized, needs no grid: without relative positions, whose bias is the
    grid's.
    """
    kind: type = type(module)
    kind = kind.__bases__[-1] if issubclass(kind, Frozen) else kind
    return kind in _KINDS and not module.config.position_embedding.startswith("relative")


def without_padding(model: Model) -> Model:
    """Return a model of the same weights, hooks and outputs that leaves the padding of batches of mixed sizes out.

    The tokens of all images go through the layers in one sequence, and attend within their image. Give it images padded
    at their right and bottom, and the `patch_attention_mask` that every model here takes.

    Args:
        model: as loaded or optimized. One that needs padding (axial and local models, relative positions, merged
            tokens) comes back as it is. Training, hooks and hidden states, which show tokens in places, go on with it,
            and so do attention functions of one's own.

    Returns:
        Another object; the model itself stays as it is.
    """
    if _needs_no_grid(model):
        return _shared(model)
    encoders = {name: child for name, child in model.named_children() if _needs_no_grid(child)}
    if not encoders:
        return model
    new = derive(type(model), model)
    new._modules |= {name: _shared(encoder) for name, encoder in encoders.items()}
    return new


def _shared(encoder: Any) -> Any:
    """Return another object around the same layers; transformers' recording hooks must not be put on them twice."""
    maybe_install_capturing_hooks(encoder)
    return derive(precede(type(encoder), by=UnpaddedModel), encoder)
