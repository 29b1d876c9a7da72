"""A Transformer's parts as fewer and larger products: q, k and v as one, LayerScale in the weights, patches cut by one.

Legend: B batch, C channels, H x W px, h x w patch grid, P patch side, N tokens, D hidden size, A heads, K head size.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self, final

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from hf_vit.models.modeling_hf_local_vit import HfLocalViTAttention
from hf_vit.models.modeling_hf_mixer import HfMixerMLP
from hf_vit.models.modeling_hf_vit import (
    AttentionPooling,
    HfViTAttention,
    HfViTLayer,
    HfViTLayerScale,
    HfViTMLP,
    HfViTSwiGLU,
)
from hf_vit.rewriting.dense import Dense, Merged, derived

# The GELUs that a dense layer takes along, by their modules: what a user put in an activation's place stays.
_GELUS = {type(ACT2FN["gelu"]): "none", type(ACT2FN["gelu_pytorch_tanh"]): "tanh"}


def dense_of(linear: nn.Linear, dtype: torch.dtype, scale: HfViTLayerScale | None = None) -> Dense:
    """A dense layer, and the LayerScale that follows it."""
    given: Any = linear.bias  # torch's annotation leaves None out
    weight, bias = linear.weight.to(dtype), None if given is None else given.to(dtype)
    if scale is None:
        return Dense(weight, bias)
    factor = scale.lambda1.to(dtype)
    return Dense(weight * factor[:, None], None if bias is None else bias * factor)


def dense_of_all(linears: Sequence[nn.Linear], dtype: torch.dtype) -> Dense:
    """Dense layers of the same inputs as one, their outputs side by side."""
    weights: list[torch.Tensor] = [linear.weight for linear in linears]
    biases: list[Any] = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return Dense(torch.cat(weights).to(dtype), None)
    every = [
        weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)
    ]
    return Dense(torch.cat(weights).to(dtype), torch.cat(every).to(dtype))


class FusedAttention(HfViTAttention, Merged):
    """`HfViTAttention` whose q, k and v are one product, and whose output projection adds the residual."""

    qkv: nn.Module

    @classmethod
    def of(cls, attention: HfViTAttention, scale: HfViTLayerScale | None, dtype: torch.dtype) -> Self:
        new = derived(cls, attention, without=("q_proj", "k_proj", "v_proj", "o_proj"))
        new.qkv = dense_of_all((attention.q_proj, attention.k_proj, attention.v_proj), dtype)
        new.o_proj = dense_of(attention.o_proj, dtype, scale)
        return new

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(hidden_states).chunk(3, dim=-1)
        )
        return query, key, value

    def query_and_key(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.project(hidden_states)[:2]

    def attend_first(
        self, num_queries: int, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """As `attend`, but only the first tokens attend, to all tokens: [B, num_queries, D]."""
        query, key, value = self.project(hidden_states)
        mask = None if attention_mask is None else attention_mask[:, :, :num_queries]
        attended = F.scaled_dot_product_attention(query[:, :, :num_queries], key, value, mask, scale=self.scaling)
        return attended.transpose(1, 2).flatten(2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        num_queries: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if num_queries is None:
            attended, probabilities = self.attend(hidden_states, attention_mask, **kwargs)
        else:
            attended, probabilities = self.attend_first(num_queries, hidden_states, attention_mask), None
        return self.o_proj(attended, residual), probabilities


@final
class FusedLocalAttention(FusedAttention, HfLocalViTAttention):
    """The same of `HfLocalViTAttention`, whose special tokens see all."""

    def attend_first(self, num_queries: int, hidden_states: torch.Tensor, attention_mask: Any) -> torch.Tensor:
        dense = isinstance(attention_mask, torch.Tensor)
        return super().attend_first(
            num_queries, hidden_states, attention_mask if dense else attention_mask.special_mask
        )


@final
class FusedMLP(Merged):
    """`HfViTMLP` or `HfMixerMLP` in evaluation, [.., D] -> [.., D].

    A GELU belongs to the first product, the residual to the second.
    """

    def __init__(self, mlp: HfViTMLP | HfMixerMLP, scale: HfViTLayerScale | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1, self.fc2 = dense_of(mlp.fc1, dtype), dense_of(mlp.fc2, dtype, scale)
        self.fc1.approximate = _GELUS.get(type(mlp.activation_fn))
        self.activation_fn = None if self.fc1.approximate else mlp.activation_fn

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.fc1(hidden_states)
        return self.fc2(hidden if self.activation_fn is None else self.activation_fn(hidden), residual)


@final
class FusedSwiGLU(Merged):
    """`HfViTSwiGLU` in evaluation, [.., D] -> [.., D]: gate and values are one product, the residual is the other's."""

    def __init__(self, mlp: HfViTSwiGLU, scale: HfViTLayerScale | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = dense_of_all((mlp.gate_proj, mlp.up_proj), dtype)
        self.down_proj = dense_of(mlp.down_proj, dtype, scale)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        gate, values = self.gate_up(hidden_states).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * values, residual)


def fused_mixer_mlp(mlp: HfMixerMLP, dtype: torch.dtype) -> FusedMLP:
    """One of the two MLPs of a Mixer's block, which adds no residual itself."""
    return FusedMLP(mlp, None, dtype)


FUSED_ATTENTIONS: dict[type[nn.Module], type[FusedAttention]] = {
    HfViTAttention: FusedAttention,
    HfLocalViTAttention: FusedLocalAttention,
}
FUSED_MLPS: dict[type[nn.Module], Callable[..., nn.Module]] = {HfViTMLP: FusedMLP, HfViTSwiGLU: FusedSwiGLU}


class FusedLayer(HfViTLayer):
    """`HfViTLayer` in evaluation: the same norms, attention and MLP, each of which adds its residual.

    The last one of a classifier that reads special tokens computes these alone, `num_read` of them (see `heads`).
    """

    num_read: int | None

    @classmethod
    def of(cls, layer: HfViTLayer, dtype: torch.dtype) -> "FusedLayer":
        new = derived(cls, layer, without=("layer_scale1", "layer_scale2", "dropout", "drop_path"))
        new.attention = FUSED_ATTENTIONS[type(layer.attention)].of(layer.attention, layer.layer_scale1, dtype)
        new.mlp = FUSED_MLPS[type(layer.mlp)](layer.mlp, layer.layer_scale2, dtype)
        new.num_read = None
        return new

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        only_for_head: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        normed, num_queries = self.layernorm_before(hidden_states), self.num_read if only_for_head else None
        residual = hidden_states[:, :num_queries]
        hidden_states, _ = self.attention(normed, attention_mask, residual, num_queries=num_queries, **kwargs)
        return self.mlp(self.layernorm_after(hidden_states), hidden_states)


@final
class PatchProduct(nn.Module):
    """A convolution that cuts patches, as one product: [B, C, H, W] -> [B, D, h, w]."""

    def __init__(self, projection: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__()
        kernel, bias = projection.weight.to(dtype), projection.bias
        self.patch = kernel.shape[2:]
        self.dense = Dense(kernel.permute(0, 2, 3, 1).flatten(1), None if bias is None else bias.to(dtype))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        if self.patch == (1, 1) and torch.compiler.is_exporting():  # else a product stands between two transposes
            kernel = self.dense.merged_weight[:, :, None, None]
            return F.conv2d(maps.to(kernel.dtype), kernel, self.dense.merged_bias).to(maps.dtype)
        h, w = maps.shape[2] // self.patch[0], maps.shape[3] // self.patch[1]
        whole = maps[:, :, : h * self.patch[0], : w * self.patch[1]]
        cut = whole.unflatten(2, (h, -1)).unflatten(4, (w, -1))  # [B, C, h, P, w, P]
        return self.dense(cut.permute(0, 2, 4, 3, 5, 1).flatten(3)).permute(0, 3, 1, 2)


def fused_pooling(pooling: AttentionPooling, dtype: torch.dtype) -> nn.Module:
    """`AttentionPooling` on rewritten dense layers."""
    new: Any = derived(AttentionPooling, pooling)
    linears: Any = pooling.attention.items()
    new.attention = nn.ModuleDict({name: dense_of(linear, dtype) for name, linear in linears})
    new.mlp = FusedMLP(pooling.mlp, None, dtype)
    return new
