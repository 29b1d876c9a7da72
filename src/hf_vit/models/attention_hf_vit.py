"""Multi-head self-attention through transformers' attention interface, and attention maps under any implementation.

Legend: B batch, N tokens, D hidden size, A heads, K head size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_hf_vit import HfViTBaseConfig
from .linear_hf_vit import HfViTLinear
from .positions_hf_vit import Grid, RelativePositionBias


def attention_probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    attention_mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k' * scaling + bias + mask), [B, A, N, N], in the dtype of `query`; torch sums in at least float32."""
    logits = torch.matmul(query * scaling, key.transpose(2, 3))
    if position_bias is not None:
        logits = logits + position_bias
    if attention_mask is not None:
        logits = logits + attention_mask
    return torch.softmax(logits, dim=-1).to(query.dtype)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    is_causal: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The explicit formula; returns the output [B, N, A, K] and the probabilities [B, A, N, N]."""
    probabilities = attention_probabilities(query, key, scaling, attention_mask, position_bias)
    probabilities = F.dropout(probabilities, p=dropout, training=module.training)
    return torch.matmul(probabilities, value).transpose(1, 2).contiguous(), probabilities


class HfViTAttention(nn.Module):
    """Self-attention with separate q, k, v and output projections [B, N, D] -> [B, N, D]."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = config.is_causal
        self.attention_dropout = config.attention_probs_dropout_prob
        self.q_proj = HfViTLinear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = HfViTLinear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.v_proj = HfViTLinear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = HfViTLinear(config.hidden_size, config.hidden_size)
        self.relative_position = RelativePositionBias(config) if config.position_embedding == "relative" else None

    def heads(self, projected: torch.Tensor) -> torch.Tensor:
        """[B, N, A*K] -> [B, A, N, K]; A may be a shard of the heads under tensor parallelism."""
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def position_bias(
        self, query: torch.Tensor, grid: Grid | None, image_grids: list[Grid] | None
    ) -> torch.Tensor | None:
        if self.relative_position is None:
            return None
        if "flash" in (self.config._attn_implementation or ""):
            raise ValueError(
                "position_embedding='relative' adds a bias that flash attention cannot take; "
                "use attn_implementation='sdpa', 'flex_attention' or 'eager'"
            )
        return self.relative_position(query, grid, self.scaling, image_grids)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, N, D] -> query, key and value [B, A, N, K]."""
        return (*self.query_and_key(hidden_states), self.heads(self.v_proj(hidden_states)))

    def query_and_key(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, N, D] -> query and key [B, A, N, K]: all that attention probabilities need."""
        return self.heads(self.q_proj(hidden_states)), self.heads(self.k_proj(hidden_states))

    def attend(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        grid: Grid | None = None,
        image_grids: list[Grid] | None = None,
        num_queries: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Everything but the output projection: [B, N, D], and the probabilities where the implementation has them.

        With `num_queries` only the first tokens attend, to all tokens; then N is that number.
        """
        query, key, value = self.project(hidden_states)
        if num_queries is not None:
            query = query[:, :, :num_queries]
            attention_mask = None if attention_mask is None else attention_mask[:, :, :num_queries]
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation or "eager", eager_attention_forward
        )
        bias = self.position_bias(query, grid, image_grids)
        if bias is not None:
            kwargs["position_bias"] = bias
        attended, probabilities = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            **kwargs,
        )
        return attended.flatten(2), probabilities

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attended, probabilities = self.attend(hidden_states, attention_mask, **kwargs)
        return self.o_proj(attended), probabilities

    def probabilities(
        self,
        hidden_states: torch.Tensor,
        token_mask: torch.Tensor | None,
        grid: Grid,
        image_grids: list[Grid] | None,
    ) -> torch.Tensor:
        """[B, A, N, N] from q and k alone, whatever the attention implementation; `token_mask` is [B, N] bool."""
        query, key = self.query_and_key(hidden_states)
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        if self.is_causal:
            allowed = allowed.tril()
        if token_mask is not None:
            allowed = allowed & token_mask[:, None, None, :]
        mask = torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, torch.finfo(query.dtype).min)
        bias = self.position_bias(query, grid, image_grids)
        return attention_probabilities(query, key, self.scaling, mask, bias)


@dataclass(frozen=True)
class AttentionMaps:
    """Attention probabilities of the asked layers, with their axes named.

    Attributes:
        maps: layer index -> [B, A, N, N] (plain and hybrid), or the pair (rows [B, A, h, w, w], columns
            [B, A, w, h, h]) of an axial layer.
        grid: (h, w) in patches.
        patch_tokens: where the patch tokens stand among the N tokens, row by row.
    """

    maps: dict[int, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
    grid: Grid
    patch_tokens: slice

    @property
    def axes(self) -> tuple[str, ...] | tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of a map's axes (of both maps of a pair)."""
        if isinstance(next(iter(self.maps.values())), tuple):
            return ("batch", "head", "row", "query", "key"), ("batch", "head", "column", "query", "key")
        return "batch", "head", "query", "key"

    def __getitem__(self, layer: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.maps:
            raise KeyError(f"layer {layer} was not asked for; there are {sorted(self.maps)}")
        return self.maps[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self.maps)

    def __len__(self) -> int:
        return len(self.maps)

    def dense(self, layer: int) -> torch.Tensor:
        """[B, A, N, N]: from every token to every token; of an axial layer, columns after rows.

        A token (i, j) sees (i', j') through (i', j): first along row i', then along column j. Residuals and MLPs
        between the two are left out, as in attention rollout.
        """
        found = self[layer]
        if isinstance(found, torch.Tensor):
            return found
        rows, columns = found
        composed = torch.einsum("bawqk,bakwv->baqwkv", columns, rows)
        return composed.flatten(4, 5).flatten(2, 3)
