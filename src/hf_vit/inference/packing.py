"""Dense layers and convolutions for oneDNN on CPUs, packed or in int8: the one place that calls what torch does not
document. Beside them attention in bfloat16 by one product after the other, where torch's kernel takes twice as long.

Legend: D inputs, M outputs of a layer; B batch, I x H x W a map, O x h x w what becomes of it; N tokens, A heads,
n x m pairs of tokens, K head size.
"""

import math
from typing import Any, final

import torch
from torch import nn

from hf_vit.environment import cpu_capabilities, has_avx2_alone, sums_int8_in_16_bits
from hf_vit.errors import UserError
from hf_vit.inference.freezing import precede, refuse_gradients
from hf_vit.inference.layers import Dense, FusedAttention, Merged, PatchProduct, StandardizedConv2d
from hf_vit.inference.plan import REPLACEMENTS
from hf_vit.models.resnet_hf_vit import PADDINGS, StdConv2d

# For which weights are packed best: the tokens of one 224 px image; other numbers run as well.
_ROWS = 197
# A float32 near it is a whole number, whose last eight bits are its own: three times as fast as a cast to bytes.
_ROUNDING = 1.5 * 2**23
# None where torch was built without oneDNN, or has other names for them by now: then nothing is packed.
_REORDER: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_REORDER_KERNEL: Any = getattr(torch.ops.mkldnn, "_reorder_convolution_weight", None)
_CONVOLUTION: Any = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
_TAKES_BFLOAT16: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
_GELU_IN_PLACE: Any = torch.ops.aten.gelu_
_INT8_PACK: Any = getattr(torch.ops.onednn, "qlinear_prepack", None)
_INT8_LINEAR: Any = getattr(torch.ops.onednn, "qlinear_pointwise", None)

# Attention: so many probabilities at once stay in a core's cache; of larger images torch's kernel is as fast, and does
# not hold the probabilities; fewer in all take longer by three calls than by one.
_PORTION, _MOST_PAIRS, _FEWEST_PAIRS = 2**20, 2**24, 2**15


def pack(part: nn.Module, in_int8: bool = False) -> nn.Module:
    """Pack every layer of a rewritten part of a model that can be packed; the packed weight is the only one.

    In int8 dense layers are, but for what cuts patches, which is packed in float; convolutions stay as they are.
    """
    if type(part) is Dense:
        if in_int8:
            return QuantizedDense(part)
        return PackedDense(part) if _can_be_packed(part.merged_weight, _REORDER, _LINEAR) else part
    if type(part) is StandardizedConv2d and not in_int8:
        # oneDNN's own choice of an order for kernels of 1x1 is many times slower at some sizes.
        if part.kernel_size == (1, 1) and part.groups == 1:
            return PackedPointwise(part) if _can_be_packed(part.kernel, _REORDER, _LINEAR) else part
        return PackedConv2d(part) if _can_be_packed(part.kernel, _REORDER_KERNEL, _CONVOLUTION) else part
    for name, child in part.named_children():
        setattr(part, name, pack(child, in_int8 and not isinstance(part, PatchProduct)))
    if isinstance(part, FusedAttention):
        qkv = part.qkv
        quantized = isinstance(qkv, QuantizedDense)
        is_half = getattr(qkv, "computed_in", None) == torch.bfloat16
        multiplies_tables = part.config.position_embedding.startswith("relative")  # by q, in their own dtype
        if (quantized or is_half) and attend_by_products(part) and quantized and not multiplies_tables:
            qkv.outputs_dtype = torch.bfloat16
    return part


def _can_be_packed(weight: torch.Tensor, *operators: Any) -> bool:
    if None in operators or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return _TAKES_BFLOAT16 is not None and _TAKES_BFLOAT16()
    return weight.dtype == torch.float32


def _refuse_gradients_and_tracing(inputs: torch.Tensor) -> None:
    """Raise a UserError for a pass that operators which torch does not document cannot make."""
    refuse_gradients(inputs)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        # Where torch.compile meets this, it leaves the product out of its graph.
        raise UserError("a model optimized for inference cannot be traced or exported; give it as it was loaded")


@final
class PackedDense(Merged):
    """A `Dense` whose bias, residual or, where that is faster, GELU oneDNN adds while the product is in the cache:
    [.., D] -> [.., M]. Its weight is opaque and nobody's parameter.
    """

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.approximate, self.computed_in = dense.approximate, dense.merged_weight.dtype
        self.fuses_gelu = not has_avx2_alone()
        self.packed_weight = _REORDER(dense.merged_weight, _ROWS)
        self.packed_bias = dense.merged_bias

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        _refuse_gradients_and_tracing(inputs)
        wide, weight, bias = inputs.to(self.computed_in), self.packed_weight, self.packed_bias
        if residual is not None:
            outputs = _LINEAR.binary(wide, residual.to(self.computed_in), weight, bias, "add")
        elif self.approximate is not None and self.fuses_gelu:
            outputs = _LINEAR(wide, weight, bias, "gelu", [], self.approximate)
        else:
            outputs = _LINEAR(wide, weight, bias, "none", [], "")
            if self.approximate is not None:
                outputs = _GELU_IN_PLACE(outputs, approximate=self.approximate)
        return outputs.to(inputs.dtype)


@final
class PackedPointwise(nn.Module):
    """A `StandardizedConv2d` of 1x1 as a packed dense layer over channels: [B, I, H, W] -> [B, O, h, w]."""

    def __init__(self, convolution: StandardizedConv2d) -> None:
        super().__init__()
        self.stride = convolution.stride
        self.dense = PackedDense(Dense(convolution.kernel.flatten(1), convolution.bias))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        down, across = self.stride
        return self.dense(inputs.permute(0, 2, 3, 1)[:, ::down, ::across]).permute(0, 3, 1, 2)


@final
class PackedConv2d(nn.Module):
    """A `StandardizedConv2d` whose kernel is in oneDNN's order already: [B, I, H, W] -> [B, O, h, w].

    The order is that of the size that comes first; for another one oneDNN may change it at every pass.
    """

    def __init__(self, convolution: StandardizedConv2d) -> None:
        super().__init__()
        self.computed_in, self.pad = convolution.kernel.dtype, PADDINGS[str(convolution.padding)]
        self.kernel_side, self.stride, self.groups = convolution.kernel_size[0], convolution.stride, convolution.groups
        self.packed_bias = convolution.bias
        self.packed_kernel = [convolution.kernel]  # a list, in which a frozen part can change its order

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        _refuse_gradients_and_tracing(inputs)
        wide, padding = self.pad(inputs.to(self.computed_in), self.kernel_side, self.stride[0])
        how = (padding, self.stride, (1, 1), self.groups)
        (kernel,) = self.packed_kernel
        if not kernel.is_mkldnn:
            kernel = self.packed_kernel[0] = _REORDER_KERNEL(kernel, *how, wide.shape)
        return _CONVOLUTION(wide, kernel, self.packed_bias, *how, "none", [], "").to(inputs.dtype)


def check_int8(model: nn.Module, device: torch.device, compile: bool) -> None:
    """Raise a UserError where int8 cannot be computed, or where nothing would be."""
    if compile:
        raise UserError("quantize='int8' cannot be combined with compile=True; give one of them")
    missing = None in (_INT8_PACK, _INT8_LINEAR) or not torch.backends.mkldnn.is_available()
    if device.type != "cpu" or missing:
        raise UserError(f"quantize='int8' is for oneDNN on CPUs, and the model is on {device}; leave it out")
    if all(type(part) is StdConv2d or type(part) not in REPLACEMENTS for part in model.modules()):
        raise UserError(f"quantize='int8' is for dense layers, and a {type(model).__name__} has none; leave it out")


@final
class QuantizedDense(Merged):
    """A `Dense` in int8, with its bias, GELU or residual in float32: [.., D] -> [.., M].

    Weights are quantized per channel, once; what enters by the range of the batch.
    """

    outputs_dtype: torch.dtype | None = None  # unless that is float64; None for that of the residual, or of the inputs

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.approximate, weight = dense.approximate, dense.merged_weight.float()
        levels = 64 if sums_int8_in_16_bits() else 127  # 2 * 255 * 64 fits
        self.weight_scales = weight.abs().amax(dim=1).clamp(min=1e-12) / levels
        rounded = torch.round(weight / self.weight_scales[:, None]).to(torch.int8)
        self.weight_zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.packed_weight = _INT8_PACK(rounded, None)
        self.packed_bias = None if dense.merged_bias is None else dense.merged_bias.float()

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        _refuse_gradients_and_tracing(inputs)
        wide = inputs.float().contiguous()
        dtype = (inputs if residual is None else residual).dtype
        if self.outputs_dtype is not None and dtype != torch.float64:
            dtype = self.outputs_dtype
        shape = (*inputs.shape[:-1], len(self.weight_scales))
        if not wide.numel():
            return wide.new_empty(shape, dtype=dtype)
        low, high = torch.aminmax(wide)
        lowest = min(float(low), 0.0)
        span = max(float(high), 0.0) - lowest
        if not span < float("inf"):  # int8 has no NaN: what depends on one is one
            return torch.full(shape, torch.nan, dtype=dtype)
        scale = max(span / 254, 1e-12)  # so that what is rounded stays within a byte
        zero = math.ceil(-lowest / scale)
        rounded = torch.add(wide.new_tensor(_ROUNDING + zero), wide, alpha=1 / scale)
        quantized = rounded.view(torch.int32).to(torch.uint8)
        weight = (self.packed_weight, self.weight_scales, self.weight_zeros)
        into = (1.0, 0, dtype if dtype == torch.bfloat16 and residual is None else torch.float32)
        if residual is not None:
            other, post = residual.float().contiguous(), ("add", 1.0, "none", [], "")
            outputs = _INT8_LINEAR.binary(
                quantized, scale, zero, *weight, other, self.packed_bias, *into, 1.0, 0, *post
            )
        else:
            post = ("none", [], "") if self.approximate is None else ("gelu", [], self.approximate)
            outputs = _INT8_LINEAR(quantized, scale, zero, *weight, self.packed_bias, *into, *post)
        return outputs.to(dtype)


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
        first, *others = (_attend(q, k, v, self.scaling) for q, k, v in portions)
        attended = torch.cat((first, *others)) if others else first
        return attended.unflatten(0, query.shape[:2]).transpose(1, 2).to(query.dtype), None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attend by explicit products, [b, A, n or m, K] -> [b*A, n, K]."""
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    logits = torch.baddbmm(query.new_empty(1, 1, 1), query, key.mT, beta=0, alpha=scaling)
    return torch.bmm(logits.softmax(-1), value)


def attend_by_products(part: nn.Module) -> bool:
    """Have an attention computed so, where that has been measured to be faster; return whether it is."""
    known = cpu_capabilities()
    is_faster = bool(known.get("avx512_bf16")) and not known.get("amx_bf16")
    if is_faster:
        part.__class__ = precede(type(part), by=ProductAttention)
    return is_faster
