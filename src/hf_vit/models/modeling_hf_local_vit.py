"""The Local-ViT: the plain ViT whose patches see a part of the image, computed without the parts they do not see.

Legend: B batch, N tokens, S special tokens, h x w patch grid, D hidden size, A heads, K head size; T tiles of n queries
and m keys; R lines of L tokens.
Sources: arXiv 1906.05909 (local), 1904.10509 (strided), 1811.11721 (criss-cross); the halo of keys around a tile of
queries is 2103.12731's.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional as F

from .backbone_hf_vit import HfViTBaseBackbone
from .configuration_hf_local_vit import HfLocalViTConfig
from .embeddings_hf_vit import Grid, Tokens, additive
from .modeling_hf_vit import (
    HfViTAttention,
    HfViTBaseForImageClassification,
    HfViTBaseModel,
    HfViTForImageClassification,
    HfViTLayer,
    HfViTPreTrainedModel,
    attention_probabilities,
)
from .pretraining_hf_vit import HfViTBaseForMaskedPatchPrediction

TILE = 8  # patches a side of a tile of queries; 4 and 16 are slower with a window of 7


def sees(config: HfLocalViTConfig, query: torch.Tensor, key: torch.Tensor, width: int) -> torch.Tensor:
    """Return whether patches see others: numbers in raster order, on a grid of `width` columns, that broadcast ->
    bool.
    """
    if config.attention_pattern == "strided":
        apart = (query - key).abs()
        return (apart < config.attention_stride) | (apart % config.attention_stride == 0)
    rows, columns = (query // width - key // width).abs(), (query % width - key % width).abs()
    if config.attention_pattern == "criss_cross":
        return (rows == 0) | (columns == 0)
    reach = config.attention_window // 2
    return (rows <= reach) & (columns <= reach)


def own_raster(exists: torch.Tensor) -> torch.Tensor:
    """[B, h*w] bool, False on padding -> which patch comes when in each image's own raster order, padding behind it."""
    return exists.int().argsort(dim=1, descending=True, stable=True)


def dense_mask(config: HfLocalViTConfig, tokens: Tokens) -> torch.Tensor:
    """[B or 1, 1, N, N], the pattern as a mask for all pairs of tokens."""
    hidden_states, special = tokens.hidden_states, config.num_special_tokens
    numbers = torch.arange(tokens.grid[0] * tokens.grid[1], device=hidden_states.device)[None]
    if tokens.token_mask is not None and config.attention_pattern == "strided":
        numbers = own_raster(tokens.token_mask[:, special:]).argsort(dim=1)
    allowed = sees(config, numbers[:, :, None], numbers[:, None], tokens.grid[1])
    allowed = F.pad(allowed, (special, 0, special, 0), value=True)
    if tokens.token_mask is not None:
        allowed = allowed & tokens.token_mask[:, None]
    return additive(allowed, hidden_states.dtype)[:, None]


class Tiles(NamedTuple):
    """Local attention by tiles: the patches of a square, and around them all that one of these sees.

    Attributes:
        special_mask: [B, 1, S, N], of the special tokens as queries; None where nothing is padded.
        queries: [T, n] patches; past the last row or column the last ones again.
        keys: [T, S + m] tokens, special ones first.
        mask: [B*T, 1, n, S + m], of both.
        places: [h*w], where each patch stands among the queries of all tiles.
    """

    special_mask: torch.Tensor | None
    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor
    places: torch.Tensor


class Lines(NamedTuple):
    """Criss-cross and strided attention by lines of L tokens: one sees what is near it, and its column over all lines.

    Attributes:
        special_mask: [B, 1, S, N], of the special tokens as queries; None where nothing is padded.
        mask: [B or 1, 1, R, L, S + m + R]; of the m near tokens those of the own column count there alone.
        order: [B, h*w], which patch stands where along the lines; None for the order they come in.
    """

    special_mask: torch.Tensor | None
    mask: torch.Tensor
    order: torch.Tensor | None


def tiles_of(config: HfLocalViTConfig, tokens: Tokens, special_mask: torch.Tensor | None) -> Tiles:
    (h, w), device, special = map(torch.sym_int, tokens.grid), tokens.hidden_states.device, config.num_special_tokens
    offsets, reach = torch.arange(TILE, device=device), config.attention_window // 2
    queries, keys = [], []
    for side in (h, w):
        starts = TILE * torch.arange((side + TILE - 1) // TILE, device=device)[:, None]
        extent = torch.sym_min(TILE + 2 * reach, side)
        queries.append((starts + offsets).clamp(max=side - 1))
        keys.append((starts - reach).clamp(min=0, max=side - extent) + torch.arange(extent, device=device))
    queries, keys = (  # [tiles down, tiles across, rows, columns] -> [T, rows * columns]
        (rows[:, None, :, None] * w + columns[None, :, None]).flatten(2).flatten(0, 1)
        for rows, columns in (queries, keys)
    )
    allowed = F.pad(sees(config, queries[:, :, None], keys[:, None], w), (special, 0), value=True)[None]
    keys = torch.cat([torch.arange(special, device=device).expand(keys.shape[0], -1), keys + special], dim=1)
    if tokens.token_mask is not None:
        allowed = allowed & tokens.token_mask[:, keys][:, :, None]
    mask = additive(allowed, tokens.hidden_states.dtype).expand(tokens.hidden_states.shape[0], -1, -1, -1)
    rows, columns = torch.arange(h, device=device)[:, None], torch.arange(w, device=device)
    tile = rows // TILE * ((w + TILE - 1) // TILE) + columns // TILE
    places = (tile * TILE + rows % TILE) * TILE + columns % TILE
    return Tiles(special_mask, queries + special, keys, mask.flatten(0, 1)[:, None], places.flatten())


def lines_of(config: HfLocalViTConfig, tokens: Tokens, special_mask: torch.Tensor | None) -> Lines:
    (h, w), device, special = map(torch.sym_int, tokens.grid), tokens.hidden_states.device, config.num_special_tokens
    strided = config.attention_pattern == "strided"
    length: Any = torch.sym_min(config.attention_stride, h * w) if strided else w  # a symbol in a graph
    keys, order = torch.arange(1, h * w + 1, device=device)[None], None  # 0 is what is not there
    if tokens.token_mask is not None:
        exists = tokens.token_mask[:, special:]
        if strided:
            order = own_raster(exists)
            exists = exists.gather(1, order)
        keys = keys * exists
    keys = F.pad(keys, (0, -(h * w) % length)).unflatten(1, (-1, length))  # [B or 1, R, L]
    queries = torch.arange(1, keys.shape[1] * length + 1, device=device).unflatten(0, (-1, length))[..., None]
    near = near_lines(keys[:, None, ..., None], strided)[:, 0, :, None, :, 0]  # [B or 1, R, 1, m]
    near_allowed = (near > 0) & (near % length != queries % length) & sees(config, queries - 1, near - 1, w)
    columns_allowed = (keys > 0).transpose(1, 2)[:, None].expand(-1, keys.shape[1], -1, -1)
    allowed = torch.cat([F.pad(near_allowed, (special, 0), value=True), columns_allowed], dim=-1)
    return Lines(special_mask, additive(allowed, tokens.hidden_states.dtype)[:, None], order)


def near_lines(lines: torch.Tensor, with_neighbours: bool) -> torch.Tensor:
    """[B, A, R, L, K] -> the tokens near each line, [B, A, R, m, K]: its own, or also those of the lines beside it."""
    if not with_neighbours:
        return lines
    count, padded = lines.shape[2], F.pad(lines, (0, 0, 0, 0, 1, 1))
    return torch.cat([padded[:, :, start : start + count] for start in range(3)], dim=3)


class HfLocalViTAttention(HfViTAttention):
    """Self-attention in which a patch sees the patches of `attention_pattern` and the special tokens.

    Under "eager" by the formula for all pairs, with a mask; else by `Tiles` or `Lines`, without the pairs that see
    nothing of each other.
    """

    config: HfLocalViTConfig

    def attend(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(attention_mask, torch.Tensor):
            return super().attend(hidden_states, attention_mask, *args, **kwargs)
        query, key, value = self.project(hidden_states)
        by_parts: Any = self.attend_tiles if isinstance(attention_mask, Tiles) else self.attend_lines
        attended = by_parts(query, key, value, attention_mask)
        if special := self.config.num_special_tokens:
            of_special, _ = self.interface(query[:, :, :special], key, value, attention_mask.special_mask)
            attended = torch.cat([of_special, attended], dim=1)
        return attended.flatten(2), None

    def interface(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if mask is not None and self.config._attn_implementation == "flex_attention":
            # As transformers reads a mask there, torch compiles a kernel for CPUs that crashes (2.15).
            kwargs["position_bias"], mask = mask.expand(-1, query.shape[1], -1, -1), None
        return super().interface(query, key, value, mask, **kwargs)

    def attend_tiles(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        """[B, A, N, K] -> [B, h*w, A, K]."""

        def cut(tensor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            chosen = tensor.transpose(1, 2).index_select(1, tokens.flatten())
            return chosen.unflatten(1, (-1, tokens.shape[1])).flatten(0, 1).transpose(1, 2)

        parts = (cut(query, tiles.queries), cut(key, tiles.keys), cut(value, tiles.keys))
        attended, _ = self.interface(*parts, tiles.mask)
        return attended.unflatten(0, (query.shape[0], -1)).flatten(1, 2).index_select(1, tiles.places)

    def attend_lines(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lines: Lines) -> torch.Tensor:
        """[B, A, N, K] -> [B, h*w, A, K]; one softmax over three sets of keys, which no attention kernel has."""
        special, count = self.config.num_special_tokens, query.shape[2] - self.config.num_special_tokens
        length, strided = lines.mask.shape[3], self.config.attention_pattern == "strided"
        order = None if lines.order is None else lines.order[:, None, :, None].expand_as(query[:, :, special:])

        def fold(tensor: torch.Tensor) -> torch.Tensor:
            """[B, A, N, K] -> [B, A, R, L, K], patches alone."""
            patches = tensor[:, :, special:] if order is None else tensor[:, :, special:].gather(2, order)
            return F.pad(patches, (0, 0, 0, -count % length)).unflatten(2, (-1, length))

        queries, keys, values = fold(query * self.scaling), fold(key), fold(value)
        near_keys, near_values = near_lines(keys, strided), near_lines(values, strided)
        of_special = queries @ key[:, :, None, :special].transpose(3, 4)
        near = queries @ near_keys.transpose(3, 4)
        columns = (queries.transpose(2, 3) @ keys.permute(0, 1, 3, 4, 2)).transpose(2, 3)
        logits = torch.cat([of_special, near, columns], dim=-1) + lines.mask
        probabilities = torch.softmax(logits, dim=-1).to(query.dtype)
        probabilities = F.dropout(probabilities, p=self.attention_dropout, training=self.training)
        of_special, near, columns = probabilities.split([special, near.shape[-1], columns.shape[-1]], dim=-1)
        attended = of_special @ value[:, :, None, :special] + near @ near_values
        attended = attended + (columns.transpose(2, 3) @ values.transpose(2, 3)).transpose(2, 3)
        attended = attended.flatten(2, 3)[:, :, :count]
        if order is not None:
            attended = torch.zeros_like(attended).scatter(2, order, attended)
        return attended.transpose(1, 2)

    def probabilities(
        self,
        hidden_states: torch.Tensor,
        token_mask: torch.Tensor | None,
        grid: Grid,
        image_grids: list[Grid] | None,
    ) -> torch.Tensor:
        """Return attention probabilities; 0 where the pattern sees nothing."""
        query, key = self.query_and_key(hidden_states)
        mask = dense_mask(self.config, Tokens(query[:, 0], grid, token_mask))
        return attention_probabilities(query, key, self.scaling, mask)


class HfLocalViTPreTrainedModel(HfViTPreTrainedModel):
    """Abstract: what every model of the local family shares."""

    config: HfLocalViTConfig
    config_class = HfLocalViTConfig
    _supports_flash_attn = False  # its kernels take no mask


class HfLocalViTModel(HfLocalViTPreTrainedModel, HfViTBaseModel):
    """The bare Local-ViT: tokens and the pooled output. "eager" attention alone needs N x N memory."""

    def build_layer(self, config: HfLocalViTConfig, drop_path_rate: float) -> nn.Module:
        layer = HfViTLayer(config, drop_path_rate)
        layer.attention = HfLocalViTAttention(config)
        return layer

    def _attention_mask(self, tokens: Tokens) -> torch.Tensor | Tiles | Lines:
        # A trace by torch.jit would keep the tiles and lines of its own size.
        if (self.config._attn_implementation or "eager") == "eager" or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            return dense_mask(self.config, tokens)
        special_mask = None
        if tokens.token_mask is not None:
            allowed = tokens.token_mask[:, None, None].expand(-1, -1, self.config.num_special_tokens, -1)
            special_mask = additive(allowed, tokens.hidden_states.dtype)
        by_parts = tiles_of if self.config.attention_pattern == "local" else lines_of
        return by_parts(self.config, tokens, special_mask)


class HfLocalViTForImageClassification(HfLocalViTPreTrainedModel, HfViTBaseForImageClassification):
    """The Local-ViT with a linear classifier on the pooled output."""

    model_class = HfLocalViTModel

    @classmethod
    def from_vit(cls, checkpoint: str | HfViTForImageClassification, **overrides: Any) -> Self:
        """Start from a plain ViT, whose weights all fit; the image size may be changed afterwards with `resize_to`.

        Args:
            checkpoint: a `HfViTForImageClassification`, or what its `from_pretrained` takes.
            overrides: fields of the new config, for example attention_window.

        Raises:
            StrictDataclassError: the ViT has what a local model cannot hold (causal attention, relative positions).
        """
        model, vit = cls._from_fields_of(checkpoint, **overrides)
        model.load_state_dict(vit.state_dict())
        return model


class HfLocalViTForMaskedPatchPrediction(HfLocalViTPreTrainedModel, HfViTBaseForMaskedPatchPrediction):
    """The Local-ViT with a head that predicts patches; see `HfViTForMaskedPatchPrediction`."""

    model_class = HfLocalViTModel


class HfLocalViTBackbone(HfLocalViTPreTrainedModel, HfViTBaseBackbone):
    """The Local-ViT as a backbone; see `HfViTBackbone`."""

    model_class = HfLocalViTModel
