"""The layers of a model that only infers: fewer, larger products, and nothing computed again that never changes.

Legend: B batch, C channels, H x W px, h x w patch grid, P patch side, N tokens, D inputs and M outputs of a layer,
O x I x k x k a kernel, A heads, K head size.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, final

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from hf_vit.models.modeling_hf_axial_resnet import DenseNorm
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
from hf_vit.models.resnet_hf_vit import StdConv2d

# The GELUs that a dense layer takes along, by their modules: what a user put in an activation's place stays.
_GELUS = {type(ACT2FN["gelu"]): "none", type(ACT2FN["gelu_pytorch_tanh"]): "tanh"}
Part = TypeVar("Part", bound=nn.Module)


def derive(kind: type[Part], module: nn.Module, without: tuple[str, ...] = ()) -> Part:
    """Return a module of a subclass that shares state, hooks and parts, except `without`, with another module."""
    new = kind.__new__(kind)
    parts = {name: part for name, part in module._modules.items() if name not in without}
    new.__dict__ = {**vars(module), "_modules": parts}
    return new


class Merged(nn.Module):
    """Abstract: its output is not what the plain model's part of this name returns, as neighbors are merged into it.

    A hook would see another number, and a part in its place would lack the rest.
    """


@final
class Dense(Merged):
    """x W' + b, then GELU, or + residual: [.., D] -> [.., M], computed in the dtype of its weights.

    The weights are buffers, so that the dtype of the model stays that of its other parameters.
    """

    merged_weight: torch.Tensor
    merged_bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str | None = None) -> None:
        super().__init__()
        self.approximate = approximate  # torch's name of a GELU's approximation, None for no GELU
        self.register_buffer("merged_weight", weight.detach())
        self.register_buffer("merged_bias", None if bias is None else bias.detach())

    @classmethod
    def of(cls, dtype: torch.dtype, *linears: nn.Linear, scale: HfViTLayerScale | None = None) -> "Dense":
        """Return layers of the same inputs as one, outputs side by side, with the LayerScale that follows."""
        weights: list[torch.Tensor] = [linear.weight for linear in linears]
        biases: list[Any] = [linear.bias for linear in linears]  # torch's annotation leaves None out
        weight, bias = (torch.cat(weights) if len(weights) > 1 else weights[0]).to(dtype), biases[0]
        if len(linears) > 1 and any(each is not None for each in biases):
            pairs = zip(weights, biases, strict=True)
            bias = torch.cat([of.new_zeros(len(of)) if each is None else each for of, each in pairs])
        bias = None if bias is None else bias.to(dtype)
        if scale is not None:
            factor = scale.lambda1.to(dtype)
            weight, bias = weight * factor[:, None], None if bias is None else bias * factor
        return cls(weight, bias)

    @classmethod
    def of_normed(cls, dense_norm: DenseNorm, dtype: torch.dtype) -> "Dense":
        """Return a product with the batch norm that follows it in evaluation."""
        scale, shift = scale_and_shift(dense_norm.norm)
        bias: Any = dense_norm.dense.bias  # the package's have none
        if bias is not None:
            shift = shift + bias * scale
        return cls(dense_norm.dense.weight.to(dtype) * scale.to(dtype)[:, None], shift.to(dtype))

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        outputs = F.linear(inputs.to(self.merged_weight.dtype), self.merged_weight, self.merged_bias)
        if self.approximate is not None:
            outputs = F.gelu(outputs, approximate=self.approximate)
        return (outputs if residual is None else outputs + residual).to(inputs.dtype)


def scale_and_shift(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a batch norm multiplies by and adds in evaluation, [C] each."""
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    return scale, norm.bias - norm.running_mean * scale


class FusedAttention(HfViTAttention, Merged):
    """`HfViTAttention` whose q, k and v are one product, and whose output projection adds the residual."""

    qkv: nn.Module

    @classmethod
    def of(cls, attention: HfViTAttention, scale: HfViTLayerScale | None, dtype: torch.dtype) -> Self:
        new = derive(cls, attention, without=("q_proj", "k_proj", "v_proj", "o_proj"))
        new.qkv = Dense.of(dtype, attention.q_proj, attention.k_proj, attention.v_proj)
        new.o_proj = Dense.of(dtype, attention.o_proj, scale=scale)
        return new

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = self.qkv(hidden_states).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return query, key, value

    def query_and_key(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.project(hidden_states)[:2]

    def attend_first(self, num_queries: int, hidden_states: torch.Tensor, attention_mask: Any) -> torch.Tensor:
        """Let only the first tokens attend, to all tokens: [B, num_queries, D]."""
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
        mask = attention_mask if isinstance(attention_mask, torch.Tensor) else attention_mask.special_mask
        return super().attend_first(num_queries, hidden_states, mask)


@final
class FusedMLP(Merged):
    """`HfViTMLP` or `HfMixerMLP` in evaluation: a GELU belongs to the first product, the residual to the second."""

    def __init__(self, mlp: HfViTMLP | HfMixerMLP, scale: HfViTLayerScale | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1, self.fc2 = Dense.of(dtype, mlp.fc1), Dense.of(dtype, mlp.fc2, scale=scale)
        self.fc1.approximate = _GELUS.get(type(mlp.activation_fn))
        self.activation_fn = None if self.fc1.approximate else mlp.activation_fn

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.fc1(hidden_states)
        return self.fc2(hidden if self.activation_fn is None else self.activation_fn(hidden), residual)


@final
class FusedSwiGLU(Merged):
    """`HfViTSwiGLU` in evaluation: gate and values are one product, the residual belongs to the other."""

    def __init__(self, mlp: HfViTSwiGLU, scale: HfViTLayerScale | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Dense.of(dtype, mlp.gate_proj, mlp.up_proj)
        self.down_proj = Dense.of(dtype, mlp.down_proj, scale=scale)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        gate, values = self.gate_up(hidden_states).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * values, residual)


FUSED_ATTENTIONS: dict[type[nn.Module], type[FusedAttention]] = {
    HfViTAttention: FusedAttention,
    HfLocalViTAttention: FusedLocalAttention,
}
FUSED_MLPS: dict[type[nn.Module], Callable[..., nn.Module]] = {HfViTMLP: FusedMLP, HfViTSwiGLU: FusedSwiGLU}


class FusedLayer(HfViTLayer):
    """`HfViTLayer` in evaluation: attention and MLP add their residuals.

    The last one of a classifier that reads special tokens computes these alone, `num_read` of them.
    """

    num_read: int | None

    @classmethod
    def of(cls, layer: HfViTLayer, dtype: torch.dtype) -> "FusedLayer":
        new = derive(cls, layer, without=("layer_scale1", "layer_scale2", "dropout", "drop_path"))
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
        self.patch: Sequence[int] = kernel.shape[2:]
        self.dense = Dense(kernel.permute(0, 2, 3, 1).flatten(1), None if bias is None else bias.to(dtype))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        if self.patch == (1, 1) and torch.compiler.is_exporting():  # else a product stands between two transposes
            kernel = self.dense.merged_weight[:, :, None, None]
            return F.conv2d(maps.to(kernel.dtype), kernel, self.dense.merged_bias).to(maps.dtype)
        h, w = maps.shape[2] // self.patch[0], maps.shape[3] // self.patch[1]
        whole = maps[:, :, : h * self.patch[0], : w * self.patch[1]]
        cut = whole.unflatten(2, (h, -1)).unflatten(4, (w, -1))  # [B, C, h, P, w, P]
        return self.dense(cut.permute(0, 2, 4, 3, 5, 1).flatten(3)).permute(0, 3, 1, 2)


def fuse_pooling(pooling: AttentionPooling, dtype: torch.dtype) -> nn.Module:
    new: Any = derive(AttentionPooling, pooling)
    linears: Any = pooling.attention.items()
    new.attention = nn.ModuleDict({name: Dense.of(dtype, linear) for name, linear in linears})
    new.mlp = FusedMLP(pooling.mlp, None, dtype)
    return new


@final
class StandardizedConv2d(StdConv2d):
    """`StdConv2d` that holds the standardized kernel [O, I, k, k], in whose dtype it computes, and not its weight."""

    kernel: torch.Tensor

    @classmethod
    def of(cls, conv: StdConv2d, dtype: torch.dtype) -> "StandardizedConv2d":
        new = derive(cls, conv)
        bias = None if conv.bias is None else conv.bias.detach().to(dtype)
        new._parameters, new._buffers = {}, {"weight": conv.weight.detach().to(dtype), "bias": bias}
        kernel = StdConv2d.standardized(new).contiguous(memory_format=torch.channels_last)
        new._buffers = {"kernel": kernel, "bias": bias}
        return new

    def standardized(self) -> torch.Tensor:
        return self.kernel

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wide = input.to(self.kernel.dtype)
        # In an engine's graph a product over channels would stand between two transposes.
        outputs = self.convolved(wide, self.kernel) if torch.compiler.is_exporting() else super().forward(wide)
        return outputs.to(input.dtype)


class ChannelwiseGroupNorm(nn.GroupNorm):
    """GroupNorm by sums over each channel's pixels, [B, C, H, W] -> [B, C, H, W]: for what has channels last.

    Where engines normalize a group at once, they take it to another layout and back; a compiler goes through memory by
    the group. The variance is that of what the mean was taken from, so that none of it cancels.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        centred = wide - self._of_groups(wide.mean((2, 3)))
        sums = torch.linalg.vector_norm(centred, dim=(2, 3)) ** 2
        variance = self._of_groups(sums / (input.shape[2] * input.shape[3]))
        weight, bias = (each[:, None, None] for each in (self.weight, self.bias))
        return (centred * (weight * torch.rsqrt(variance + self.eps)) + bias).to(input.dtype)

    def _of_groups(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the mean of each channel's group, [B, C] -> [B, C, 1, 1]; a product is not repeated a pixel."""
        size = self.num_channels // self.num_groups
        means = channels.unflatten(1, (self.num_groups, size)).mean(2)
        spread = torch.eye(self.num_groups, dtype=means.dtype, device=means.device).repeat_interleave(size, 1)
        return (means @ spread)[:, :, None, None]
