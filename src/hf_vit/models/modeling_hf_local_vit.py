"""Define the Local-ViT: a plain ViT whose patches attend to a part of the image, without computing the other pairs.

Legend: B batch, N tokens, S special tokens, h x w patch grid, D hidden size, A heads, K head size; T tiles of n queries
and m keys; R lines of L tokens.
Sources: arXiv 1906.05909 (local), 1904.10509 (strided), 1811.11721 (criss-cross); the halo of keys around a tile of
queries is from 2103.12731.
"""

from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional as F

from .backbone_hf_vit import HfViTBaseBackbone
from .configuration_hf_local_vit import HfLocalViTConfig
from .embeddings_hf_vit import Tokens, make_additive
from .modeling_hf_vit import (
    HfViTAttention,
    HfViTBaseForImageClassification,
    HfViTBaseModel,
    HfViTForImageClassification,
    HfViTLayer,
    HfViTPreTrainedModel,
)
from .pretraining_hf_vit import HfViTBaseForMaskedPatchPrediction

TILE = 8  # side of a tile of queries in patches; 4 and 16 are slower with a window of 7


def may_attend(config: HfLocalViTConfig, query: torch.Tensor, key: torch.Tensor, width: int) -> torch.Tensor:
    """Return whether queries may attend to keys, as a bool tensor of the broadcast shape.

    Both are patch numbers in raster order on a grid of `width` columns.
    """
    if config.attention_pattern == "strided":
        distance = (query - key).abs()
        return (distance < config.attention_stride) | (distance % config.attention_stride == 0)
    row_distance = (query // width - key // width).abs()
    column_distance = (query % width - key % width).abs()
    if config.attention_pattern == "criss_cross":
        return (row_distance == 0) | (column_distance == 0)
    reach = config.attention_window // 2
    return (row_distance <= reach) & (column_distance <= reach)


def compute_raster_order(exists: torch.Tensor) -> torch.Tensor:
    """Return the numbers of each image's patches in raster order, padding last, from a mask [B, h*w] (False on
    padding).
    """
    return exists.int().argsort(dim=1, descending=True, stable=True)


def make_dense_mask(config: HfLocalViTConfig, tokens: Tokens) -> torch.Tensor:
    """Return the pattern as a mask [B or 1, 1, N, N] for all pairs of tokens, added to the logits."""
    special = config.num_special_tokens
    numbers = torch.arange(tokens.grid[0] * tokens.grid[1], device=tokens.hidden_states.device)[None]
    if tokens.token_mask is not None and config.attention_pattern == "strided":
        numbers = compute_raster_order(tokens.token_mask[:, special:]).argsort(dim=1)
    allowed = may_attend(config, numbers[:, :, None], numbers[:, None], tokens.grid[1])
    allowed = F.pad(allowed, (special, 0, special, 0), value=True)
    if tokens.token_mask is not None:
        allowed = allowed & tokens.token_mask[:, None]
    return make_additive(allowed, tokens.hidden_states.dtype)[:, None]


class Tiles(NamedTuple):
    """Local attention by tiles: square tiles of queries, each with all the keys that one of its queries attends to.

    Attributes:
        special_mask: [B, 1, S, N], mask for the special tokens as queries; None when nothing is padded.
        queries: [T, n] patches; tiles beyond the border repeat the last row or column.
        keys: [T, S + m] tokens, special ones first.
        mask: [B*T, 1, n, S + m], mask for both.
        positions: [h*w], the index of each patch among the queries of all tiles.
    """

    special_mask: torch.Tensor | None
    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor


class Lines(NamedTuple):
    """Criss-cross and strided attention by lines of L tokens: queries attend to near tokens, and to their column of all
    lines.

    Attributes:
        special_mask: [B, 1, S, N], mask for the special tokens as queries; None when nothing is padded.
        mask: [B or 1, 1, R, L, S + m + R]; a near token of the query's own column counts only in the column.
        order: [B, h*w], the patches in the order of the lines; None for raster order.
    """

    special_mask: torch.Tensor | None
    mask: torch.Tensor
    order: torch.Tensor | None


def make_tiles(config: HfLocalViTConfig, tokens: Tokens, special_mask: torch.Tensor | None) -> Tiles:
    """Cut the grid into tiles of queries, and find for each tile the keys within reach of the window."""
    h, w = map(torch.sym_int, tokens.grid)
    device = tokens.hidden_states.device
    special = config.num_special_tokens
    offsets = torch.arange(TILE, device=device)
    reach = config.attention_window // 2
    query_sides, key_sides = [], []  # rows [tiles down, rows] and columns [tiles across, columns] of the tiles
    for side in (h, w):
        starts = TILE * torch.arange((side + TILE - 1) // TILE, device=device)[:, None]
        extent = torch.sym_min(TILE + 2 * reach, side)
        query_sides.append((starts + offsets).clamp(max=side - 1))
        key_sides.append((starts - reach).clamp(min=0, max=side - extent) + torch.arange(extent, device=device))
    queries, near_patches = (  # [tiles down, tiles across, rows, columns] -> [T, rows * columns]
        (rows[:, None, :, None] * w + columns[None, :, None]).flatten(2).flatten(0, 1)
        for rows, columns in (query_sides, key_sides)
    )
    is_near = may_attend(config, queries[:, :, None], near_patches[:, None], w)
    allowed = F.pad(is_near, (special, 0), value=True)[None]
    special_tokens = torch.arange(special, device=device).expand(near_patches.shape[0], -1)
    keys = torch.cat([special_tokens, near_patches + special], dim=1)
    if tokens.token_mask is not None:
        allowed = allowed & tokens.token_mask[:, keys][:, :, None]
    mask = make_additive(allowed, tokens.hidden_states.dtype).expand(tokens.hidden_states.shape[0], -1, -1, -1)
    rows, columns = torch.arange(h, device=device)[:, None], torch.arange(w, device=device)
    tile_index = rows // TILE * ((w + TILE - 1) // TILE) + columns // TILE
    positions = (tile_index * TILE + rows % TILE) * TILE + columns % TILE
    return Tiles(special_mask, queries + special, keys, mask.flatten(0, 1)[:, None], positions.flatten())


def make_lines(config: HfLocalViTConfig, tokens: Tokens, special_mask: torch.Tensor | None) -> Lines:
    """Arrange the patches in lines, and build the mask of near tokens and of columns.

    A line is a row of the grid (criss-cross), or `attention_stride` patches in raster order (strided). Key numbers
    start at 1; 0 is padding.
    """
    h, w = map(torch.sym_int, tokens.grid)
    device = tokens.hidden_states.device
    special = config.num_special_tokens
    is_strided = config.attention_pattern == "strided"
    length: Any = torch.sym_min(config.attention_stride, h * w) if is_strided else w  # a symbol in a graph
    numbers = torch.arange(1, h * w + 1, device=device)[None]
    order = None
    if tokens.token_mask is not None:
        is_patch = tokens.token_mask[:, special:]
        if is_strided:
            order = compute_raster_order(is_patch)
            is_patch = is_patch.gather(1, order)
        numbers = numbers * is_patch
    keys = F.pad(numbers, (0, -(h * w) % length)).unflatten(1, (-1, length))  # [B or 1, R, L]
    queries = torch.arange(1, keys.shape[1] * length + 1, device=device).unflatten(0, (-1, length))[..., None]
    near_keys = gather_near_lines(keys[:, None, ..., None], is_strided)[:, 0, :, None, :, 0]  # [B or 1, R, 1, m]
    is_in_other_column = near_keys % length != queries % length  # those of the own column come below
    allowed_near = (near_keys > 0) & is_in_other_column & may_attend(config, queries - 1, near_keys - 1, w)
    allowed_in_column = (keys > 0).transpose(1, 2)[:, None].expand(-1, keys.shape[1], -1, -1)
    allowed = torch.cat([F.pad(allowed_near, (special, 0), value=True), allowed_in_column], dim=-1)
    return Lines(special_mask, make_additive(allowed, tokens.hidden_states.dtype)[:, None], order)


def gather_near_lines(lines: torch.Tensor, with_neighbors: bool) -> torch.Tensor:
    """Return the tokens near each line [B, A, R, m, K] from lines [B, A, R, L, K]: the line itself, or also both
    neighbors.
    """
    if not with_neighbors:
        return lines
    count = lines.shape[2]
    padded = F.pad(lines, (0, 0, 0, 0, 1, 1))
    return torch.cat([padded[:, :, start : start + count] for start in range(3)], dim=3)


class HfLocalViTAttention(HfViTAttention):
    """Self-attention in which a patch attends to the patches of `attention_pattern` and to the special tokens.

    With "eager" attention it follows the formula for all pairs, with a mask; otherwise it computes `Tiles` or `Lines`,
    which skip most pairs outside the pattern.
    """

    config: HfLocalViTConfig

    def attend(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend by tiles or lines, or under a dense mask for all pairs; special tokens always attend to all tokens."""
        if isinstance(attention_mask, torch.Tensor):
            return super().attend(hidden_states, attention_mask, *args, **kwargs)
        query, key, value = self.project(hidden_states)
        query, key = self.normalize_and_rotate(query, key, kwargs.get("rotation"))
        attend_parts: Any = self.attend_tiles if isinstance(attention_mask, Tiles) else self.attend_lines
        output = attend_parts(query, key, value, attention_mask)
        special = self.config.num_special_tokens
        if special:
            special_output, _ = self.interface(query[:, :, :special], key, value, attention_mask.special_mask)
            output = torch.cat([special_output, output], dim=1)
        return output.flatten(2), None

    def interface(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the attention implementation; pass the mask to flex attention as a bias."""
        if mask is not None and self.config._attn_implementation == "flex_attention":
            # Given as a mask, transformers makes torch 2.15 compile a CPU kernel that crashes.
            kwargs["position_bias"] = mask.expand(-1, query.shape[1], -1, -1)
            mask = None
        return super().interface(query, key, value, mask, **kwargs)

    def attend_tiles(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        """Attend by tiles: query, key and value [B, A, N, K] -> output of the patches [B, h*w, A, K]."""

        def gather_tiles(tensor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            tile_tokens = tensor.transpose(1, 2).index_select(1, tokens.flatten())
            return tile_tokens.unflatten(1, (-1, tokens.shape[1])).flatten(0, 1).transpose(1, 2)

        tensors = (gather_tiles(query, tiles.queries), gather_tiles(key, tiles.keys), gather_tiles(value, tiles.keys))
        output, _ = self.interface(*tensors, tiles.mask)
        return output.unflatten(0, (query.shape[0], -1)).flatten(1, 2).index_select(1, tiles.positions)

    def attend_lines(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lines: Lines) -> torch.Tensor:
        """Attend by lines: query, key and value [B, A, N, K] -> output of the patches [B, h*w, A, K].

        One softmax covers three sets of keys (special, near, column), which no attention kernel supports.
        """
        special = self.config.num_special_tokens
        count = query.shape[2] - special
        length = lines.mask.shape[3]
        is_strided = self.config.attention_pattern == "strided"
        order = None if lines.order is None else lines.order[:, None, :, None].expand_as(query[:, :, special:])

        def arrange_in_lines(tensor: torch.Tensor) -> torch.Tensor:
            """Return the patches of [B, A, N, K] as lines [B, A, R, L, K]."""
            patches = tensor[:, :, special:] if order is None else tensor[:, :, special:].gather(2, order)
            return F.pad(patches, (0, 0, 0, -count % length)).unflatten(2, (-1, length))

        queries = arrange_in_lines(query * self.scaling)
        keys = arrange_in_lines(key)
        values = arrange_in_lines(value)
        near_keys = gather_near_lines(keys, is_strided)
        near_values = gather_near_lines(values, is_strided)
        special_logits = queries @ key[:, :, None, :special].transpose(3, 4)
        near_logits = queries @ near_keys.transpose(3, 4)
        column_logits = (queries.transpose(2, 3) @ keys.permute(0, 1, 3, 4, 2)).transpose(2, 3)
        logits = torch.cat([special_logits, near_logits, column_logits], dim=-1) + lines.mask
        probabilities = torch.softmax(logits, dim=-1).to(query.dtype)
        probabilities = F.dropout(probabilities, p=self.attention_dropout, training=self.training)
        sizes = [special, near_logits.shape[-1], column_logits.shape[-1]]
        to_special, to_near, to_column = probabilities.split(sizes, dim=-1)
        outside_column = to_special @ value[:, :, None, :special] + to_near @ near_values
        from_column = (to_column.transpose(2, 3) @ values.transpose(2, 3)).transpose(2, 3)
        output = (outside_column + from_column).flatten(2, 3)[:, :, :count]
        if order is not None:
            output = torch.zeros_like(output).scatter(2, order, output)
        return output.transpose(1, 2)

    def make_map_mask(self, tokens: Tokens) -> torch.Tensor:
        return make_dense_mask(self.config, tokens)


class HfLocalViTPreTrainedModel(HfViTPreTrainedModel):
    """Abstract: what every model of the local family shares."""

    config: HfLocalViTConfig
    config_class = HfLocalViTConfig
    _supports_flash_attn = False  # flash attention takes no mask


class HfLocalViTModel(HfLocalViTPreTrainedModel, HfViTBaseModel):
    """The bare Local-ViT, which returns tokens and a pooled output. Only "eager" attention needs N x N memory."""

    _without_attentions = ("",)  # any other function than "eager" sees tiles or lines

    def build_layer(self, config: HfLocalViTConfig, drop_path_rate: float) -> nn.Module:
        layer = HfViTLayer(config, drop_path_rate)
        layer.attention = HfLocalViTAttention(config)
        return layer

    def _make_attention_mask(self, tokens: Tokens) -> torch.Tensor | Tiles | Lines:
        """Return a dense mask for eager attention, else the tiles or lines of this batch."""
        # A trace by torch.jit would fix the tiles and lines of its example's size.
        if (self.config._attn_implementation or "eager") == "eager" or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            return make_dense_mask(self.config, tokens)
        special_mask = None
        if tokens.token_mask is not None:
            allowed = tokens.token_mask[:, None, None].expand(-1, -1, self.config.num_special_tokens, -1)
            special_mask = make_additive(allowed, tokens.hidden_states.dtype)
        make_parts = make_tiles if self.config.attention_pattern == "local" else make_lines
        return make_parts(self.config, tokens, special_mask)


class HfLocalViTForImageClassification(HfLocalViTPreTrainedModel, HfViTBaseForImageClassification):
    """The Local-ViT with a linear classifier on the pooled output."""

    model_class = HfLocalViTModel

    @classmethod
    def from_vit(cls, checkpoint: str | Path | HfViTForImageClassification, **overrides: Any) -> Self:
        """Start from a plain ViT, whose weights all fit; use `resize_to` to change the image size afterwards.

        Args:
            checkpoint: a `HfViTForImageClassification`, or an argument of its `from_pretrained`.
            overrides: fields of the new config, for example attention_window.

        Raises:
            StrictDataclassError: a local model cannot have all the ViT's features (causal attention, relative
                positions).
        """
        is_model = isinstance(checkpoint, nn.Module)
        vit: Any = checkpoint if is_model else HfViTForImageClassification.from_pretrained(checkpoint)
        model = cls._from_fields_of(vit, **overrides)
        model.load_state_dict(vit.state_dict())
        return model


class HfLocalViTForMaskedPatchPrediction(HfLocalViTPreTrainedModel, HfViTBaseForMaskedPatchPrediction):
    """The Local-ViT with a head that predicts patches; see `HfViTForMaskedPatchPrediction`."""

    model_class = HfLocalViTModel


class HfLocalViTBackbone(HfLocalViTPreTrainedModel, HfViTBaseBackbone):
    """The Local-ViT as a backbone; see `HfViTBackbone`."""

    model_class = HfLocalViTModel
