"""Define the layers of an optimized model: fewer, larger products, and nothing constant computed more than once.

Legend: B batch, C channels, H x W px, h x w patch grid, P patch side, N tokens, D inputs and M outputs of a layer,
O x I x k x k a kernel, A heads, K head size.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, cast, final

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from hf_vit.models.embeddings_hf_vit import Rotation
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

# The GELUs that `Dense` can apply, with torch's name of the approximation; other activations stay modules.
_GELUS = {type(ACT2FN["gelu"]): "none", type(ACT2FN["gelu_pytorch_tanh"]): "tanh"}
Part = TypeVar("Part", bound=nn.Module)


def derive(kind: type[Part], module: nn.Module, without: tuple[str, ...] = ()) -> Part:
    """Return a module of a subclass that shares state, hooks and parts, except `without`, with another module."""
    new_module = kind.__new__(kind)
    parts = {name: part for name, part in module._modules.items() if name not in without}
    vars(new_module).update(vars(module) | {"_modules": parts})  # a frozen module refuses to be given parts
    return new_module


class Merged(nn.Module):
    """Abstract: a layer that merges several of the plain model's, so its output is not that of the layer it replaces.

    A hook on it would get other values, and a module put in its place would lack what was merged.
    """


@final
class Dense(Merged):
    """Dense layer x W' + b [.., D] -> [.., M], followed by GELU or + residual, computed in the dtype of its weights.

    The weights are buffers, so that the model's dtype remains that of its other parameters.
    """

    merged_weight: torch.Tensor
    merged_bias: torch.Tensor | None

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str | None = None, source: Any = None
    ) -> None:
        super().__init__()
        self.approximate = approximate  # torch's name of the GELU's approximation, None for no GELU
        self.inputs: Any = getattr(source, "inputs", None)  # what `calibration` recorded of the layer `source`
        self.register_buffer("merged_weight", weight.detach())
        self.register_buffer("merged_bias", None if bias is None else bias.detach())

    @classmethod
    def from_linears(cls, dtype: torch.dtype, *linears: nn.Linear, scale: HfViTLayerScale | None = None) -> "Dense":
        """Merge layers with the same inputs (their outputs become one, side by side) and a LayerScale that follows."""
        weights: list[torch.Tensor] = [linear.weight for linear in linears]
        biases: list[Any] = [linear.bias for linear in linears]  # torch's annotation leaves None out
        weight = (torch.cat(weights) if len(weights) > 1 else weights[0]).to(dtype)
        bias = None
        if any(value is not None for value in biases):
            zeros = [linear.weight.new_zeros(linear.out_features) for linear in linears]
            bias = torch.cat([zero if value is None else value for zero, value in zip(zeros, biases, strict=True)])
            bias = bias.to(dtype)
        if scale is not None:
            factor = scale.lambda1.to(dtype)
            weight = weight * factor[:, None]
            bias = None if bias is None else bias * factor
        return cls(weight, bias, source=linears[0])

    @classmethod
    def from_dense_norm(cls, dense_norm: DenseNorm, dtype: torch.dtype) -> "Dense":
        """Merge a dense layer with the batch norm that follows it, as in evaluation."""
        scale, shift = scale_and_shift(dense_norm.norm)
        bias: Any = dense_norm.dense.bias  # None, unless an adapter added one
        if bias is not None:
            shift = shift + bias * scale
        weight = dense_norm.dense.weight.to(dtype) * scale.to(dtype)[:, None]
        return cls(weight, shift.to(dtype), source=dense_norm.dense)

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the product [..., O] of inputs [..., I], then GELU if there was one, plus `residual`."""
        outputs = F.linear(inputs.to(self.merged_weight.dtype), self.merged_weight, self.merged_bias)
        if self.approximate is not None:
            outputs = F.gelu(outputs, approximate=self.approximate)
        # Under autocast inputs have a lower dtype than the residual, which must keep its own.
        return outputs.to(inputs.dtype) if residual is None else (outputs + residual).to(residual.dtype)


def scale_and_shift(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors and terms [C] that a batch norm in evaluation applies to its inputs."""
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    return scale, norm.bias - norm.running_mean * scale


class FusedAttention(HfViTAttention, Merged):
    """`HfViTAttention` that computes q, k and v in one product and adds the residual in the output projection."""

    qkv: nn.Module

    @classmethod
    def from_attention(cls, attention: HfViTAttention, scale: HfViTLayerScale | None, dtype: torch.dtype) -> Self:
        """Build the fused form of an attention and the LayerScale that follows it."""
        fused_attention = derive(cls, attention, without=("q_proj", "k_proj", "v_proj", "o_proj"))
        fused_attention.qkv = Dense.from_linears(dtype, attention.q_proj, attention.k_proj, attention.v_proj)
        fused_attention.o_proj = Dense.from_linears(dtype, attention.o_proj, scale=scale)
        return fused_attention

    def interleave(self) -> None:
        """Put channels that rotate together side by side, where they form complex numbers without a copy.

        The order of the weights' rows is the same for queries and keys, so that it does not change their products.
        """
        qkv = cast("Dense", self.qkv)
        if self.config.rotary_embedding is None or self.config.use_qk_norm or self.rotary_pairing == "interleaved":
            return
        rows = torch.arange(len(qkv.merged_weight)).view(3, -1, 2, self.head_dim // 2)
        order = torch.cat([rows[:2].mT.flatten(), rows[2].flatten()])
        qkv.merged_weight = qkv.merged_weight[order]
        qkv.merged_bias = None if qkv.merged_bias is None else qkv.merged_bias[order]
        self.rotary_pairing = "interleaved"

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project tokens [B, N, D] to query, key and value [B, A, N, K] by one product."""
        query, key, value = map(self.heads, self.qkv(hidden_states).chunk(3, dim=-1))
        return query, key, value

    def query_and_key(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.project(hidden_states)[:2]

    def attend_first(
        self, num_queries: int, hidden_states: torch.Tensor, attention_mask: Any, rotation: Rotation | None
    ) -> torch.Tensor:
        """Compute attention for the first `num_queries` tokens only, [B, num_queries, D], to all tokens."""
        query, key, value = self.project(hidden_states)
        query, key = self.normalize_and_rotate(query, key, rotation)
        mask = None if attention_mask is None else attention_mask[:, :, :num_queries]
        output = F.scaled_dot_product_attention(query[:, :, :num_queries], key, value, mask, scale=self.scaling)
        return output.transpose(1, 2).flatten(2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        num_queries: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the result [B, N or num_queries, D] with `residual` added, and the probabilities."""
        if num_queries is None:
            output, probabilities = self.attend(hidden_states, attention_mask, **kwargs)
        else:
            output = self.attend_first(num_queries, hidden_states, attention_mask, kwargs.get("rotation"))
            probabilities = None
        if self.inner_layernorm is not None:
            output = self.inner_layernorm(output)
        return self.o_proj(output, residual), probabilities


@final
class FusedLocalAttention(FusedAttention, HfLocalViTAttention):
    """`FusedAttention` for `HfLocalViTAttention`, whose special tokens attend to all tokens."""

    def attend_first(
        self, num_queries: int, hidden_states: torch.Tensor, attention_mask: Any, rotation: Rotation | None
    ) -> torch.Tensor:
        mask = attention_mask if isinstance(attention_mask, torch.Tensor) else attention_mask.special_mask
        return super().attend_first(num_queries, hidden_states, mask, rotation)


@final
class FusedMLP(Merged):
    """`HfViTMLP` or `HfMixerMLP` in evaluation: the first product applies a GELU, the second adds the residual."""

    def __init__(self, mlp: HfViTMLP | HfMixerMLP, scale: HfViTLayerScale | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1 = Dense.from_linears(dtype, mlp.fc1)
        self.fc2 = Dense.from_linears(dtype, mlp.fc2, scale=scale)
        self.fc1.approximate = _GELUS.get(type(mlp.activation_fn))
        self.activation_fn = None if self.fc1.approximate else mlp.activation_fn
        self.inner_layernorm = getattr(mlp, "inner_layernorm", None)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.fc1(hidden_states)
        hidden = hidden if self.activation_fn is None else self.activation_fn(hidden)
        return self.fc2(hidden if self.inner_layernorm is None else self.inner_layernorm(hidden), residual)


@final
class FusedSwiGLU(Merged):
    """`HfViTSwiGLU` in evaluation: gate and values are one product, and the other product adds the residual."""

    def __init__(self, mlp: HfViTSwiGLU, scale: HfViTLayerScale | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Dense.from_linears(dtype, mlp.gate_proj, mlp.up_proj)
        self.inner_layernorm = mlp.inner_layernorm
        self.down_proj = Dense.from_linears(dtype, mlp.down_proj, scale=scale)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        gate, values = self.gate_up(hidden_states).chunk(2, dim=-1)
        gated_values = F.silu(gate) * values
        return self.down_proj(
            gated_values if self.inner_layernorm is None else self.inner_layernorm(gated_values), residual
        )


FUSED_ATTENTIONS: dict[type[nn.Module], type[FusedAttention]] = {
    HfViTAttention: FusedAttention,
    HfLocalViTAttention: FusedLocalAttention,
}
FUSED_MLPS: dict[type[nn.Module], Callable[..., nn.Module]] = {HfViTMLP: FusedMLP, HfViTSwiGLU: FusedSwiGLU}


class FusedLayer(HfViTLayer):
    """`HfViTLayer` in evaluation, whose attention and MLP add the residuals where no norm follows them.

    If the classifier reads only special tokens, the last layer computes only these, `num_read` of them.
    """

    num_read: int | None

    @classmethod
    def from_layer(cls, layer: HfViTLayer, dtype: torch.dtype) -> "FusedLayer":
        scales = {name: getattr(layer, name) for name in ("layer_scale1", "layer_scale2")}
        merged = {} if layer.norm_after_branches else scales
        fused_layer = derive(cls, layer, without=(*merged, "dropout", "drop_path"))
        attention_class = FUSED_ATTENTIONS[type(layer.attention)]
        fused_layer.attention = attention_class.from_attention(layer.attention, merged.get("layer_scale1"), dtype)
        fused_layer.mlp = FUSED_MLPS[type(layer.mlp)](layer.mlp, merged.get("layer_scale2"), dtype)
        fused_layer.num_read = None
        return fused_layer

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        only_for_head: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Transform tokens [B, N, D]; return only those that the head reads if `only_for_head`."""
        num_queries = self.num_read if only_for_head else None
        if self.norm_after_branches:
            attention_output, _ = self.attention(hidden_states, attention_mask, num_queries=num_queries, **kwargs)
            branch = self.layernorm_before(attention_output)
            residual = hidden_states[:, :num_queries]
            hidden_states = residual + (branch if self.layer_scale1 is None else self.layer_scale1(branch))
            branch = self.layernorm_after(self.mlp(hidden_states))
            return hidden_states + (branch if self.layer_scale2 is None else self.layer_scale2(branch))
        normalized = self.layernorm_before(hidden_states)
        residual = hidden_states[:, :num_queries]
        hidden_states, _ = self.attention(normalized, attention_mask, residual, num_queries=num_queries, **kwargs)
        return self.mlp(self.layernorm_after(hidden_states), hidden_states)


@final
class PatchProduct(nn.Module):
    """Convolution that cuts an image into patches, computed as one product: [B, C, H, W] -> [B, D, h, w]."""

    def __init__(self, projection: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__()
        kernel = projection.weight.to(dtype)
        bias = projection.bias
        self.patch: Sequence[int] = kernel.shape[2:]
        self.dense = Dense(kernel.permute(0, 2, 3, 1).flatten(1), None if bias is None else bias.to(dtype))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """Return one vector for each patch of maps: [B, C, H, W] -> [B, D, h, w]."""
        if self.patch == (1, 1) and torch.compiler.is_exporting():  # a product would need two transposes
            kernel = self.dense.merged_weight[:, :, None, None]
            return F.conv2d(maps.to(kernel.dtype), kernel, self.dense.merged_bias).to(maps.dtype)
        h, w = maps.shape[2] // self.patch[0], maps.shape[3] // self.patch[1]
        cropped = maps[:, :, : h * self.patch[0], : w * self.patch[1]]
        patches = cropped.unflatten(2, (h, -1)).unflatten(4, (w, -1))  # [B, C, h, P, w, P]
        return self.dense(patches.permute(0, 2, 4, 3, 5, 1).flatten(3)).permute(0, 3, 1, 2)


def fuse_pooling(pooling: AttentionPooling, dtype: torch.dtype) -> nn.Module:
    fused_pooling: Any = derive(AttentionPooling, pooling)
    linears: Any = pooling.attention.items()
    fused_pooling.attention = nn.ModuleDict({name: Dense.from_linears(dtype, linear) for name, linear in linears})
    fused_pooling.mlp = FusedMLP(pooling.mlp, None, dtype)
    return fused_pooling


@final
class StandardizedConv2d(StdConv2d):
    """`StdConv2d` with its standardized kernel [O, I, k, k], in whose dtype it computes, instead of its weight."""

    kernel: torch.Tensor

    @classmethod
    def from_conv(cls, conv: StdConv2d, dtype: torch.dtype) -> "StandardizedConv2d":
        """Standardize the kernel of a convolution once."""
        standardized = derive(cls, conv)
        bias = None if conv.bias is None else conv.bias.detach().to(dtype)
        standardized._parameters = {}
        standardized._buffers = {"weight": conv.weight.detach().to(dtype), "bias": bias}
        kernel = StdConv2d.standardized(standardized).contiguous(memory_format=torch.channels_last)
        standardized._buffers = {"kernel": kernel, "bias": bias}
        return standardized

    def standardized(self) -> torch.Tensor:
        return self.kernel

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        inputs = input.to(self.kernel.dtype)
        # In an engine's graph a 1x1 kernel as a product would need two transposes.
        outputs = self.convolve(inputs, self.kernel) if torch.compiler.is_exporting() else super().forward(inputs)
        return outputs.to(input.dtype)


class ChannelwiseGroupNorm(nn.GroupNorm):
    """GroupNorm by sums over the pixels of each channel, [B, C, H, W] -> [B, C, H, W], for channels-last memory.

    Engines that normalize whole groups transpose the input and back; a compiler reads memory group by group. The
    variance is computed from centered values, so that no digits cancel.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a map [B, C, H, W]."""
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        centered = values - self._average_groups(values.mean((2, 3)))
        sums = torch.linalg.vector_norm(centered, dim=(2, 3)) ** 2
        variance = self._average_groups(sums / (input.shape[2] * input.shape[3]))
        weight, bias = (parameter[:, None, None] for parameter in (self.weight, self.bias))
        return (centered * (weight * torch.rsqrt(variance + self.eps)) + bias).to(input.dtype)

    def _average_groups(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the mean of each channel's group, [B, C] -> [B, C, 1, 1], as a product, done once for all pixels."""
        size = self.num_channels // self.num_groups
        means = channels.unflatten(1, (self.num_groups, size)).mean(2)
        group_channels = torch.eye(self.num_groups, dtype=means.dtype, device=means.device).repeat_interleave(size, 1)
        return (means @ group_channels)[:, :, None, None]
