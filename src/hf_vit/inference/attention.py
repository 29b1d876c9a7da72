"""Attention in bfloat16 by one product after the other, on CPUs where torch's kernel for all of it takes twice as long;
and, for engines, with q, k and v apart.

Legend: B batch, N tokens, D hidden size, A heads, n x m pairs of tokens, K head size.
"""

from typing import Any

import torch
from torch import nn

from hf_vit.environment import cpu_capabilities
from hf_vit.inference.freezing import preceded
from hf_vit.rewriting.dense import Dense
from hf_vit.rewriting.transformer import FusedAttention

# So many probabilities at once stay in a core's cache.
_PORTION = 2**20
# Of larger images torch's kernel is as fast, and does not hold the probabilities.
_MOST_PAIRS = 2**24
# Fewer in all take longer by three calls than by one.
_FEWEST_PAIRS = 2**15


class ProductAttention(FusedAttention):
    """Goes before the class of an attention that is computed by explicit products in bfloat16, where nothing is masked.

    Inputs and outputs keep their dtype.
    """

    def query_and_key(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = super().query_and_key(hidden_states)
        return query.to(hidden_states.dtype), key.to(hidden_states.dtype)

    def interface(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        pairs_of_an_image = query.shape[1] * query.shape[2] * key.shape[2]
        restricted = mask is not None or self.is_causal or "position_bias" in kwargs
        suits = pairs_of_an_image <= _MOST_PAIRS and len(query) * pairs_of_an_image >= _FEWEST_PAIRS
        if restricted or self.config._attn_implementation != "sdpa" or not suits:
            return super().interface(query, key, value, mask, **kwargs)
        portion = max(_PORTION // pairs_of_an_image, 1)
        portions = zip(*(each.bfloat16().split(portion) for each in (query, key, value)), strict=True)
        first, *others = (_attended(q, k, v, self.scaling) for q, k, v in portions)
        attended = torch.cat((first, *others)) if others else first
        return attended.unflatten(0, query.shape[:2]).transpose(1, 2).to(query.dtype), None


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """[b, A, n or m, K] -> [b*A, n, K]."""
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    logits = torch.baddbmm(query.new_empty(1, 1, 1), query, key.mT, beta=0, alpha=scaling)
    return torch.bmm(logits.softmax(-1), value)


def attend_by_products(part: nn.Module) -> bool:
    """Have an attention computed so, where that has been measured to be faster; whether it is."""
    known = cpu_capabilities()
    is_faster = bool(known.get("avx512_bf16")) and not known.get("amx_bf16")
    if is_faster:
        part.__class__ = preceded(type(part), by=ProductAttention)
    return is_faster


class SeparateAttention(FusedAttention):
    """Goes before the class of an attention whose q, k and v are three products, q scaled by its weights.

    Engines copy what is cut out of one product, and scale in a pass of its own.
    """

    qkv: nn.ModuleList

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (self.heads(dense(hidden_states)) for dense in self.qkv)
        return query, key, value


def take_apart(part: FusedAttention) -> None:
    """Have an attention computed so."""
    merged: Any = part.qkv
    biases = (None,) * 3 if merged.merged_bias is None else merged.merged_bias.chunk(3)
    query, key, value = map(Dense, merged.merged_weight.chunk(3), biases)
    for tensor in query.buffers():
        tensor.mul_(part.scaling)
    part.qkv, part.scaling = nn.ModuleList((query, key, value)), 1.0
    part.__class__ = preceded(type(part), by=SeparateAttention)
