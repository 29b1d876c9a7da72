"""Dense layers in int8 on CPUs, by oneDNN's own operators: weights per channel once, what enters with every batch.

Legend: D inputs, M outputs of a layer.
"""

import math
from typing import Any, final

import torch
from torch import nn

from hf_vit.environment import sums_int8_in_16_bits
from hf_vit.errors import UserError
from hf_vit.inference.attention import attend_by_products
from hf_vit.inference.packing import pack, refuse_gradients_and_tracing
from hf_vit.models.resnet_hf_vit import StdConv2d
from hf_vit.rewriting.dense import Dense, Merged
from hf_vit.rewriting.planning import REPLACEMENTS
from hf_vit.rewriting.transformer import FusedAttention, PatchProduct

# A float32 near it is a whole number, whose last eight bits are its own: three times as fast as a cast to bytes.
_ROUNDING = 1.5 * 2**23
_PREPACK: Any = getattr(torch.ops.onednn, "qlinear_prepack", None)
_LINEAR: Any = getattr(torch.ops.onednn, "qlinear_pointwise", None)


def check_int8(model: nn.Module, device: torch.device, compile: bool) -> None:
    """Raise UserError where int8 cannot be computed, or where nothing would be."""
    if compile:
        raise UserError("quantize='int8' does not go with compile=True; give one of them")
    if device.type != "cpu" or _PREPACK is None or _LINEAR is None or not torch.backends.mkldnn.is_available():
        raise UserError(f"quantize='int8' is for oneDNN on CPUs, and the model is on {device}; leave it out")
    if all(type(part) is StdConv2d or type(part) not in REPLACEMENTS for part in model.modules()):
        raise UserError(f"quantize='int8' is for dense layers, and a {type(model).__name__} has none; leave it out")


def quantize(part: nn.Module) -> nn.Module:
    """A rewritten part of a model with its dense layers in int8; what cuts patches is packed in float."""
    if type(part) is Dense:
        return QuantizedDense(part)
    if isinstance(part, PatchProduct):
        return pack(part)
    for name, child in part.named_children():
        setattr(part, name, quantize(child))
    if isinstance(part, FusedAttention) and isinstance(part.qkv, QuantizedDense):
        multiplies_tables = part.config.position_embedding.startswith("relative")  # by q, in their own dtype
        if attend_by_products(part) and not multiplies_tables:
            part.qkv.outputs_dtype = torch.bfloat16
    return part


@final
class QuantizedDense(Merged):
    """A `Dense` in int8, with its bias, GELU or residual in float32: [.., D] -> [.., M].

    Its weight is opaque and nobody's parameter.

    Attributes:
        outputs_dtype: of what it gives, unless that is float64; None for that of the residual, or of the inputs.
    """

    outputs_dtype: torch.dtype | None = None

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.approximate, weight = dense.approximate, dense.merged_weight.float()
        levels = 64 if sums_int8_in_16_bits() else 127  # 2 * 255 * 64 fits
        self.weight_scales = weight.abs().amax(dim=1).clamp(min=1e-12) / levels
        rounded = torch.round(weight / self.weight_scales[:, None]).to(torch.int8)
        self.weight_zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.packed_weight = _PREPACK(rounded, None)
        self.packed_bias = None if dense.merged_bias is None else dense.merged_bias.float()

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        refuse_gradients_and_tracing(inputs)
        wide = inputs.float().contiguous()
        dtype = (inputs if residual is None else residual).dtype
        if self.outputs_dtype is not None and dtype != torch.float64:
            dtype = self.outputs_dtype
        if not wide.numel():
            return wide.new_empty((*inputs.shape[:-1], len(self.weight_scales)), dtype=dtype)
        low, high = torch.aminmax(wide)
        lowest = min(float(low), 0.0)
        span = max(float(high), 0.0) - lowest
        if not span < float("inf"):  # int8 has no NaN: what depends on one is one
            return torch.full((*inputs.shape[:-1], len(self.weight_scales)), torch.nan, dtype=dtype)
        scale = max(span / 254, 1e-12)  # so that what is rounded stays within a byte
        zero = math.ceil(-lowest / scale)
        rounded = torch.add(wide.new_tensor(_ROUNDING + zero), wide, alpha=1 / scale)
        quantized = rounded.view(torch.int32).to(torch.uint8)
        weight = (self.packed_weight, self.weight_scales, self.weight_zeros)
        into = (1.0, 0, dtype if dtype == torch.bfloat16 and residual is None else torch.float32)
        if residual is not None:
            other = residual.float().contiguous()
            post = ("add", 1.0, "none", [], "")
            outputs = _LINEAR.binary(quantized, scale, zero, *weight, other, self.packed_bias, *into, 1.0, 0, *post)
        else:
            post = ("none", [], "") if self.approximate is None else ("gelu", [], self.approximate)
            outputs = _LINEAR(quantized, scale, zero, *weight, self.packed_bias, *into, *post)
        return outputs.to(dtype)
