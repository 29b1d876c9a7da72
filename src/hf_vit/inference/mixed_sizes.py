"""Run batches of mixed sizes without padding: all images' tokens form one sequence, with attention within each image.

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

from hf_vit.inference.engines import EngineEncoder
from hf_vit.inference.freezing import Frozen, add_base
from hf_vit.inference.layers import derive
from hf_vit.inference.plan import has_custom_attention, has_listeners
from hf_vit.models.embeddings_hf_vit import Grid, Tokens, compute_top_left_indices, find_image_grids
from hf_vit.models.modeling_hf_hybrid_vit import HfHybridViTModel
from hf_vit.models.modeling_hf_vit import HfViTBaseModel, HfViTModel, get_patch_token_slice

Model = TypeVar("Model", bound=nn.Module)
WITHIN_IMAGES = "within_images"
# Options that return or change tokens by their position in the padded batch.
_PADDED_OPTIONS = ("output_hidden_states", "output_attentions", "bool_masked_pos", "patch_sources")


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
    """Compute attention within each image, [1, A, T, K] -> [1, T, A, K].

    `images` lists runs of consecutive images with equal token counts, as (number of images, N).
    """
    is_causal: bool = getattr(module, "is_causal", False)
    fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0  # flash attention's kernel
    if fits and query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) >= (8, 0):
        return _attend_by_varlen(query, key, value, scaling, images, is_causal), None
    lengths = [count * length for count, length in images]
    parts = zip(images, *(states[0].split(lengths, dim=1) for states in (query, key, value)), strict=True)
    outputs = []
    for shape, *states in parts:
        image_states = (state.unflatten(1, shape).transpose(0, 1) for state in states)  # [B, A, N, K]
        output = F.scaled_dot_product_attention(*image_states, is_causal=is_causal, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


def _attend_by_varlen(query: Any, key: Any, value: Any, scaling: float, images: Any, is_causal: bool) -> torch.Tensor:
    """Compute attention by torch's kernel for sequences of any length, in one call, on GPUs in half precision."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = torch.tensor([0, *(length for count, length in images for _ in range(count))], device=query.device)
    starts = lengths.cumsum(0, dtype=torch.int32)
    longest = max(length for _, length in images)
    query, key, value = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))  # [T, A, K]
    window = (-1, 0) if is_causal else (-1, -1)
    output: Any = varlen_attn(query, key, value, starts, starts, longest, longest, scale=scaling, window_size=window)
    return output[None]


ALL_ATTENTION_FUNCTIONS.register(WITHIN_IMAGES, attend_within_images)


def _copy_layer(layer: Any, config: Any) -> Any:
    """Return a copy of a layer with the same weights and another config.

    The layer itself is not changed, as another thread may be using it.
    """
    attention = derive(type(layer.attention), layer.attention)
    layer_copy = derive(type(layer), layer)
    vars(attention)["config"] = config
    layer_copy._modules["attention"] = attention
    return layer_copy


def _join_rotations(image_tokens: Sequence[Tokens]) -> dict[str, Any]:
    """Return the keyword arguments of all layers: the rotation of all images' tokens, in one sequence."""

    def join(tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join tables [1, 1, N, K/2] or [1, N, 2] to one [1, 1, T, K/2] or [1, T, 2]."""
        sizes = zip(tables, (len(tokens.hidden_states) for tokens in image_tokens), strict=True)
        joined = torch.cat([table.flatten(0, -3).expand(size, -1, -1).flatten(0, 1) for table, size in sizes])
        return joined.view(*tables[0].shape[:-2], *joined.shape)

    rotations: list[Any] = [tokens.rotation for tokens in image_tokens]
    if rotations[0] is None:
        return {}
    if isinstance(rotations[0], torch.Tensor):
        return {"rotation": join(rotations)}
    return {"rotation": tuple(join(tables) for tables in zip(*rotations, strict=True))}


class UnpaddedModel(HfViTBaseModel):
    """Class put before a model's class to skip the padding of a `patch_attention_mask`, with the same outputs."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorated method lists its parameters)
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Compute the outputs without padding where nothing asks for padded results or listens to modules."""
        requested_options = {name: kwargs.get(name, getattr(self.config, name, None)) for name in _PADDED_OPTIONS}
        reads_positions = any(value is not None and value is not False for value in requested_options.values())
        needs_padding = reads_positions or has_custom_attention(self.config)
        if patch_attention_mask is None or needs_padding or self.training or any(map(has_listeners, self.modules())):
            return super().forward(pixel_values, patch_attention_mask=patch_attention_mask, **kwargs)
        run_as_one_sequence: Any = self.run_as_one_sequence  # the decorator adds a parameter, return_dict
        return run_as_one_sequence(pixel_values, patch_attention_mask, return_dict=kwargs.get("return_dict"))

    @can_return_tuple
    def run_as_one_sequence(self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor) -> Any:
        """Compute a padded batch as one sequence; `last_hidden_state` is 0 on padding."""
        grid = self.config.grid_of(*pixel_values.shape[2:])
        sizes: dict[Grid, list[int]] = {}  # grid -> images with it
        for image, image_grid in enumerate(find_image_grids(patch_attention_mask, len(pixel_values), grid)):
            sizes.setdefault(image_grid, []).append(image)
        stride_h, stride_w = self.config.patch_stride
        image_tokens: list[Tokens] = []  # of the images of each size
        for (h, w), images in sizes.items():
            image_tokens.append(self.embed(pixel_values[images, :, : h * stride_h, : w * stride_w], None))
        encoded = self._run_layers(image_tokens)
        last_hidden_state = self._pad(encoded, sizes, len(pixel_values), grid)
        pooled = None
        if self.pooler is not None:
            pooled = torch.cat([self.pooler(tokens) for tokens in encoded])
            pooled = self.layernorm(pooled) if self._norms_pooled else pooled
            order = torch.tensor([image for images in sizes.values() for image in images], device=pooled.device)
            pooled = pooled[order.argsort()]
        return BaseModelOutputWithPooling(last_hidden_state=last_hidden_state, pooler_output=pooled)

    def _run_layers(self, image_tokens: Sequence[Tokens]) -> list[torch.Tensor]:
        """Run all layers, and the norm unless it follows the pooling, on the tokens of all images as one sequence.

        Return the tokens [B, N, D] of the images of each size, as they came.
        """
        arguments = _join_rotations(image_tokens)
        shapes = [(tokens.hidden_states.shape[0], tokens.hidden_states.shape[1]) for tokens in image_tokens]
        hidden_states = torch.cat([tokens.hidden_states.flatten(0, 1) for tokens in image_tokens])[None]
        config = copy.copy(self.config)
        config._attn_implementation = WITHIN_IMAGES
        for layer in self.layer_sequence():
            hidden_states = _copy_layer(layer, config)(hidden_states, images=shapes, **arguments)
        if not self._norms_pooled:
            hidden_states = self.layernorm(hidden_states)
        flat_parts = hidden_states[0].split([num_images * num_tokens for num_images, num_tokens in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(flat_parts, shapes, strict=True)]

    def _pad(self, parts: list[torch.Tensor], sizes: dict[Grid, list[int]], batch: int, grid: Grid) -> torch.Tensor:
        """Put tokens, grouped by image size, into [B, n, D], each image at the top left of the padded grid."""
        special = self.config.num_special_tokens
        patch_slice = get_patch_token_slice(self.config)
        padded = parts[0].new_zeros(batch, special + grid[0] * grid[1], parts[0].shape[2])

        def slice_special(h: int, w: int) -> slice:
            return slice(h * w, None) if self.config.is_causal else slice(special)

        for part, (image_grid, images) in zip(parts, sizes.items(), strict=True):
            rows = torch.tensor(images, device=part.device)
            patches = compute_top_left_indices(image_grid, grid, part.device)
            padded[:, patch_slice][rows[:, None], patches] = part[:, patch_slice]
            padded[rows, slice_special(*grid)] = part[:, slice_special(*image_grid)]
        return padded


_ENCODERS = (HfViTModel, HfHybridViTModel)


def _needs_no_grid(module: Any) -> bool:
    """Return whether an encoder's type, loaded or optimized, works without a grid, and it has no relative positions."""
    encoder_class: type = type(module)
    while issubclass(encoder_class, (Frozen, EngineEncoder)):  # whose torch layers compute padded batches
        encoder_class = encoder_class.__bases__[-1]
    return encoder_class in _ENCODERS and not module.config.position_embedding.startswith("relative")


def without_padding(model: Model) -> Model:
    """Return a model with the same weights, hooks and outputs that skips the padding of batches of mixed sizes.

    The tokens of all images pass the layers as one sequence and attend within their image. Images must be padded at the
    right and bottom and come with the `patch_attention_mask` that every model here takes.

    The model, as loaded or optimized, is not changed. One that needs padding (axial and local models, relative
    positions, merged tokens) is returned as it is. Padding also remains in training, and with hooks, hidden states,
    attentions or custom attention functions, which read tokens by position.
    """
    if _needs_no_grid(model):
        return _share_layers(model)
    encoders = {name: child for name, child in model.named_children() if _needs_no_grid(child)}
    if not encoders:
        return model
    unpadded = derive(type(model), model)
    unpadded._modules |= {name: _share_layers(encoder) for name, encoder in encoders.items()}
    return unpadded


def _share_layers(encoder: Any) -> Any:
    """Return another object with the same layers.

    transformers' recording hooks are installed first, as the copy would install them a second time.
    """
    maybe_install_capturing_hooks(encoder)
    return derive(add_base(type(encoder), base=UnpaddedModel), encoder)
