"""Pack dense layers and convolutions for oneDNN on CPUs, in their dtype or in int8; compute bfloat16 attention faster.

This is the only module that calls undocumented operators of torch.
Legend: D inputs, M outputs of a layer; B batch, I x H x W an input map, O x h x w an output map; N tokens, A heads,
n x m pairs of tokens, K head size.
"""

import math
from typing import Any, final

import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_vit.conversion.targets.graphs.fitting import round_weights
from hf_vit.environment import get_cpu_capabilities, has_avx2_alone, sums_int8_in_16_bits
from hf_vit.errors import UserError
from hf_vit.inference.calibration import smooth
from hf_vit.inference.freezing import REMEDY, add_base, refuse_gradients
from hf_vit.inference.layers import (
    Dense,
    FusedAttention,
    FusedLayer,
    FusedMLP,
    Merged,
    PatchProduct,
    StandardizedConv2d,
)
from hf_vit.inference.plan import REPLACEMENTS
from hf_vit.models.resnet_hf_vit import PADDINGS, StdConv2d

# Number of rows that packing is optimized for, the tokens of one 224 px image; any number works.
_ROWS = 197
# A float32 near this number has no fraction, and its last eight bits are the rounded value: a cast to bytes takes three
# times as long.
_ROUNDING = 1.5 * 2**23
# None if torch was built without oneDNN or renamed an operator; then nothing is packed.
_REORDER: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_REORDER_KERNEL: Any = getattr(torch.ops.mkldnn, "_reorder_convolution_weight", None)
_CONVOLUTION: Any = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
_TAKES_BFLOAT16: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
_GELU_IN_PLACE: Any = torch.ops.aten.gelu_
# GELU returns at least this; in uint8 its zero has this level, and that of inputs of both signs the other one.
_LEAST_GELU = -0.1701
_GELU_ZERO = 24
_ZERO = 128
_LIKE_GELU = (nn.ReLU, type(ACT2FN["quick_gelu"]))
_INT8_PACK: Any = getattr(torch.ops.onednn, "qlinear_prepack", None)
_INT8_LINEAR: Any = getattr(torch.ops.onednn, "qlinear_pointwise", None)

# Attention by products: probabilities computed at a time, which fit a core's cache; the most per image, above which
# torch's kernel is as fast and needs less memory; the fewest per batch, below which one call beats three.
_PORTION = 2**20
_MOST_PAIRS = 2**24
_FEWEST_PAIRS = 2**15


def pack(module: nn.Module, in_int8: bool = False) -> nn.Module:
    """Pack all layers of a rewritten module that can be packed; only the packed weight remains.

    With `in_int8`, dense layers are packed in int8, except those that cut patches; convolutions stay as they are.
    """
    if type(module) is Dense:
        if in_int8:
            return QuantizedDense(module)
        return PackedDense(module) if _can_be_packed(module.merged_weight, _REORDER, _LINEAR) else module
    if type(module) is StandardizedConv2d and not in_int8:
        # As convolutions, oneDNN runs 1x1 kernels many times slower at some sizes.
        if module.kernel_size == (1, 1) and module.groups == 1:
            return PackedPointwise(module) if _can_be_packed(module.kernel, _REORDER, _LINEAR) else module
        return PackedConv2d(module) if _can_be_packed(module.kernel, _REORDER_KERNEL, _CONVOLUTION) else module
    if isinstance(module, FusedAttention):
        module.interleave()
    if isinstance(module, FusedLayer) and in_int8 and not module.norm_after_branches:
        mlp: Any = module.mlp
        module.layernorm_before = smooth(module.layernorm_before, module.attention.qkv)
        module.layernorm_after = smooth(module.layernorm_after, getattr(mlp, "fc1", None) or mlp.gate_up)
    for name, child in module.named_children():
        setattr(module, name, pack(child, in_int8 and not isinstance(module, PatchProduct)))
    if type(module) is FusedMLP and module.inner_layernorm is None:
        second = module.get_submodule("fc2")
        if isinstance(second, QuantizedDense):
            second.reads_gelu = module.fc1.approximate is not None or type(module.activation_fn) in _LIKE_GELU
    if isinstance(module, FusedAttention):
        qkv = module.qkv
        is_quantized = isinstance(qkv, QuantizedDense)
        is_half = getattr(qkv, "computed_in", None) == torch.bfloat16
        # q must keep the dtype of the tables, or of the norm's weights
        keeps_dtype = module.config.position_embedding.startswith("relative") or module.config.use_qk_norm
        attends = (is_half or is_quantized) and attend_by_products(module)
        if attends and is_quantized and not (keeps_dtype or qkv.is_calibrated):
            qkv.outputs_dtype = torch.bfloat16
    return module


def _can_be_packed(weight: torch.Tensor, *operators: Any) -> bool:
    """Return whether oneDNN can pack a weight on this machine."""
    if None in operators or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return _TAKES_BFLOAT16 is not None and _TAKES_BFLOAT16()
    return weight.dtype == torch.float32


def _refuse_gradients_and_tracing(inputs: torch.Tensor) -> None:
    """Raise a UserError where undocumented operators do not work: for gradients, tracing and export."""
    refuse_gradients(inputs)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        # torch.compile runs a product that raises this error outside its graph.
        raise UserError(f"a model optimized for inference cannot be traced or exported; {REMEDY}")


@final
class PackedDense(Merged):
    """`Dense` with a packed weight, [.., D] -> [.., M]; oneDNN adds bias and residual to the product in the cache.

    oneDNN applies the GELU too, where that is faster. The packed weight cannot be read and is not a parameter.
    """

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.approximate = dense.approximate
        self.computed_in = dense.merged_weight.dtype
        self.fuses_gelu = not has_avx2_alone()
        self.packed_weight = _REORDER(dense.merged_weight, _ROWS)
        self.packed_bias = dense.merged_bias

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return inputs [..., I] @ weight + bias, then GELU if it is fused, plus `residual`: [..., O]."""
        _refuse_gradients_and_tracing(inputs)
        inputs_ = inputs.to(self.computed_in)
        weight = self.packed_weight
        bias = self.packed_bias
        if residual is not None:
            outputs = _LINEAR.binary(inputs_, residual.to(self.computed_in), weight, bias, "add")
        elif self.approximate is not None and self.fuses_gelu:
            outputs = _LINEAR(inputs_, weight, bias, "gelu", [], self.approximate)
        else:
            outputs = _LINEAR(inputs_, weight, bias, "none", [], "")
            if self.approximate is not None:
                outputs = _GELU_IN_PLACE(outputs, approximate=self.approximate)
        return outputs.to((inputs if residual is None else residual).dtype)


@final
class PackedPointwise(nn.Module):
    """1x1 `StandardizedConv2d` as a packed dense layer over channels: [B, I, H, W] -> [B, O, h, w]."""

    def __init__(self, convolution: StandardizedConv2d) -> None:
        super().__init__()
        self.stride = convolution.stride
        self.dense = PackedDense(Dense(convolution.kernel.flatten(1), convolution.bias))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        row_stride, column_stride = self.stride
        return self.dense(inputs.permute(0, 2, 3, 1)[:, ::row_stride, ::column_stride]).permute(0, 3, 1, 2)


@final
class PackedConv2d(nn.Module):
    """`StandardizedConv2d` whose kernel is in oneDNN's memory order: [B, I, H, W] -> [B, O, h, w].

    The order suits the first input's size; for other sizes oneDNN may reorder the kernel in every pass.
    """

    def __init__(self, convolution: StandardizedConv2d) -> None:
        super().__init__()
        self.computed_in = convolution.kernel.dtype
        self.pad = PADDINGS[str(convolution.padding)]
        self.kernel_side = convolution.kernel_size[0]
        self.stride = convolution.stride
        self.groups = convolution.groups
        self.packed_bias = convolution.bias
        self.packed_kernel = [convolution.kernel]  # in a list, as a frozen module cannot set attributes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Convolve [B, I, H, W]; the first call puts the kernel in oneDNN's order for that size."""
        _refuse_gradients_and_tracing(inputs)
        padded, padding = self.pad(inputs.to(self.computed_in), self.kernel_side, self.stride[0])
        arguments = (padding, self.stride, (1, 1), self.groups)
        (kernel,) = self.packed_kernel
        if not kernel.is_mkldnn:
            kernel = self.packed_kernel[0] = _REORDER_KERNEL(kernel, *arguments, padded.shape)
        return _CONVOLUTION(padded, kernel, self.packed_bias, *arguments, "none", [], "").to(inputs.dtype)


def check_int8(model: nn.Module, device: torch.device, compile: bool) -> None:
    """Raise a UserError if int8 is not available, or if the model has no dense layers for it."""
    if compile:
        raise UserError("quantize='int8' cannot be combined with compile=True; leave one of them out")
    is_missing = None in (_INT8_PACK, _INT8_LINEAR) or not torch.backends.mkldnn.is_available()
    if device.type != "cpu" or is_missing:
        raise UserError(
            f"quantize='int8' needs a CPU and a torch with oneDNN, but the model is on {device}; leave "
            "quantize out, or move the model to the CPU"
        )
    if all(type(module) is StdConv2d or type(module) not in REPLACEMENTS for module in model.modules()):
        raise UserError(f"quantize='int8' needs dense layers, but {type(model).__name__} has none; leave quantize out")


@final
class QuantizedDense(Merged):
    """`Dense` in int8, with bias, GELU or residual in float32: [.., D] -> [.., M].

    Weights are quantized once, per output channel; inputs in every pass. Where a residual is added, each token has its
    own range, as a few tokens of pretrained models have values many times as large as those of the others; this takes
    no longer. Elsewhere, where oneDNN adds bias and GELU faster, the range is that of the batch, but for a calibrated
    layer without GELU.
    """

    reads_gelu = False  # whether inputs come from a GELU, which has hardly any negative values
    outputs_dtype: torch.dtype | None = None  # not used for float64; None: the dtype of the residual or the inputs

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.approximate = dense.approximate
        self.is_calibrated = dense.inputs is not None
        weight = dense.merged_weight.float()
        levels = 64 if sums_int8_in_16_bits() else 127  # 2 * 255 * 64 fits into 16 bits
        self.weight_scales = weight.abs().amax(dim=1).clamp(min=1e-12) / levels
        rounded = round_weights(weight / self.weight_scales[:, None], levels, dense.inputs).to(torch.int8)
        self.weight_zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.packed_weight = _INT8_PACK(rounded, None)
        self.packed_bias = None if dense.merged_bias is None else dense.merged_bias.float()

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Quantize inputs [..., I] by their range, multiply in int8, and return [..., O] in floating point."""
        _refuse_gradients_and_tracing(inputs)
        values = inputs.float().contiguous().flatten(0, -2)
        dtype = (inputs if residual is None else residual).dtype
        if self.outputs_dtype is not None and dtype != torch.float64:
            dtype = self.outputs_dtype
        shape = (*inputs.shape[:-1], len(self.weight_scales))
        if not values.numel():
            return values.new_empty(shape, dtype=dtype)
        weight = (self.packed_weight, self.weight_scales, self.weight_zeros)
        if residual is not None or (self.is_calibrated and self.approximate is None):
            scales, zero = self._compute_token_scales(values)
            rounded = (values * scales.reciprocal()).add_(_ROUNDING + zero)
            quantized = rounded.view(torch.int32).to(torch.uint8)
            outputs = _INT8_LINEAR(quantized, 1.0, zero, *weight, None, 1.0, 0, torch.float32, "none", [], "")
            outputs.mul_(scales)  # in place, as another tensor of this size takes longer
            outputs = outputs if self.packed_bias is None else outputs.add_(self.packed_bias)
            outputs = outputs if residual is None else outputs.add_(residual.float().reshape(outputs.shape))
            return outputs.to(dtype).view(shape)
        low, high = torch.aminmax(values)
        lowest = min(float(low), 0.0)
        span = max(float(high), 0.0) - lowest
        if not span < float("inf"):  # int8 has no NaN, so all outputs become NaN
            return torch.full(shape, torch.nan, dtype=dtype)
        scale = max(span / 254, 1e-12)  # rounded values fit into a byte
        zero = math.ceil(-lowest / scale)
        rounded = torch.add(values.new_tensor(_ROUNDING + zero), values, alpha=1 / scale)
        quantized = rounded.view(torch.int32).to(torch.uint8)
        into = (1.0, 0, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        operation = ("none", [], "") if self.approximate is None else ("gelu", [], self.approximate)
        outputs = _INT8_LINEAR(quantized, scale, zero, *weight, self.packed_bias, *into, *operation)
        return outputs.to(dtype).view(shape)

    def _compute_token_scales(self, values: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the step of each row of inputs, [n, 1], and the level of zero, which is the same for all."""
        highest = values.amax(dim=1, keepdim=True)
        if self.reads_gelu:
            return highest.div_(255 - _GELU_ZERO).clamp_(min=-_LEAST_GELU / _GELU_ZERO), _GELU_ZERO
        return torch.maximum(highest, -values.amin(dim=1, keepdim=True)).div_(127).clamp_(min=1e-12), _ZERO


class ProductAttention(FusedAttention):
    """Class put before an attention's class to compute unmasked attention by explicit bfloat16 products.

    Inputs and outputs keep their dtype.
    """

    def query_and_key(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = super().query_and_key(hidden_states)
        return query.to(hidden_states.dtype), key.to(hidden_states.dtype)

    def interface(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention by products if nothing is masked and they are faster for this size, else as loaded."""
        pairs_per_image = query.shape[1] * query.shape[2] * key.shape[2]
        # In float32 models bfloat16 attention changes more answers than int8 layers that were calibrated.
        keeps_dtype = getattr(self.qkv, "is_calibrated", False) and query.dtype != torch.bfloat16
        needs_mask = mask is not None or self.is_causal or "position_bias" in kwargs
        has_suitable_size = pairs_per_image <= _MOST_PAIRS and len(query) * pairs_per_image >= _FEWEST_PAIRS
        if keeps_dtype or needs_mask or self.config._attn_implementation != "sdpa" or not has_suitable_size:
            return super().interface(query, key, value, mask, **kwargs)
        images_per_portion = max(_PORTION // pairs_per_image, 1)
        portions = zip(*(tensor.bfloat16().split(images_per_portion) for tensor in (query, key, value)), strict=True)
        first_output, *other_outputs = (_attend(q, k, v, self.scaling) for q, k, v in portions)
        output = torch.cat((first_output, *other_outputs)) if other_outputs else first_output
        return output.unflatten(0, query.shape[:2]).transpose(1, 2).to(query.dtype), None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute attention by explicit products, [b, A, n or m, K] -> [b*A, n, K]."""
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    logits = torch.baddbmm(query.new_empty(1, 1, 1), query, key.mT, beta=0, alpha=scaling)
    return torch.bmm(logits.softmax(-1), value)


def attend_by_products(attention: nn.Module) -> bool:
    """Make an attention use explicit products where this was measured to be faster; return whether it does."""
    capabilities = get_cpu_capabilities()
    is_faster = bool(capabilities.get("avx512_bf16")) and not capabilities.get("amx_bf16")
    if is_faster:
        attention.__class__ = add_base(type(attention), base=ProductAttention)
    return is_faster
