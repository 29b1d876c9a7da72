"""Dense layers and convolutions packed for oneDNN on CPUs, where torch has it: the one place that calls what torch does
not document.

Legend: D inputs, M outputs of a layer; B batch, I x H x W a map, O x h x w what becomes of it.
"""

from typing import Any, final

import torch
from torch import nn

from hf_vit.environment import has_avx2_alone
from hf_vit.errors import UserError
from hf_vit.inference.attention import attend_by_products
from hf_vit.inference.freezing import refuse_gradients
from hf_vit.models.resnet_hf_vit import PADDINGS
from hf_vit.rewriting.convolutions import StandardizedConv2d
from hf_vit.rewriting.dense import Dense, Merged
from hf_vit.rewriting.transformer import FusedAttention

# For which weights are packed best: the tokens of one 224 px image; other numbers run as well.
_ROWS = 197
# None where torch was built without oneDNN, or has other names for them by now: then nothing is packed.
_REORDER: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_REORDER_KERNEL: Any = getattr(torch.ops.mkldnn, "_reorder_convolution_weight", None)
_CONVOLUTION: Any = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
_GELU_IN_PLACE: Any = torch.ops.aten.gelu_
_TAKES_BFLOAT16: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)


def pack(part: nn.Module) -> nn.Module:
    """A rewritten part of a model with every layer packed that can be; the packed weight is the only one."""
    if type(part) is Dense:
        return PackedDense(part) if _can_be_packed(part.merged_weight, _REORDER, _LINEAR) else part
    if type(part) is StandardizedConv2d:
        return _packed_convolution(part)
    for name, child in part.named_children():
        setattr(part, name, pack(child))
    if isinstance(part, FusedAttention) and getattr(part.qkv, "computed_in", None) == torch.bfloat16:
        attend_by_products(part)
    return part


def _packed_convolution(part: StandardizedConv2d) -> nn.Module:
    # oneDNN's own choice of an order for kernels of 1x1 is many times slower at some sizes.
    if part.kernel_size == (1, 1) and part.groups == 1:
        return PackedPointwise(part) if _can_be_packed(part.kernel, _REORDER, _LINEAR) else part
    return PackedConv2d(part) if _can_be_packed(part.kernel, _REORDER_KERNEL, _CONVOLUTION) else part


def _can_be_packed(weight: torch.Tensor, *operators: Any) -> bool:
    if None in operators or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return _TAKES_BFLOAT16 is not None and _TAKES_BFLOAT16()
    return weight.dtype == torch.float32


@final
class PackedDense(Merged):
    """A `Dense` whose bias, residual or, where that is faster, GELU oneDNN adds while the product is in the cache:
    [.., D] -> [.., M].

    Its weight is opaque and nobody's parameter.
    """

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.approximate, self.computed_in = dense.approximate, dense.merged_weight.dtype
        self.fuses_gelu = not has_avx2_alone()
        self.packed_weight = _REORDER(dense.merged_weight, _ROWS)
        self.packed_bias = dense.merged_bias

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        refuse_gradients_and_tracing(inputs)
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

    The order is that of the size that comes first; for another one oneDNN may change it at every pass. The kernel is
    opaque and nobody's parameter.
    """

    def __init__(self, convolution: StandardizedConv2d) -> None:
        super().__init__()
        self.computed_in, self.pad = convolution.kernel.dtype, PADDINGS[str(convolution.padding)]
        self.kernel_side, self.stride, self.groups = convolution.kernel_size[0], convolution.stride, convolution.groups
        self.packed_bias = convolution.bias
        self.packed_kernel = [convolution.kernel]  # a list, in which a frozen part can change its order

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        refuse_gradients_and_tracing(inputs)
        wide, padding = self.pad(inputs.to(self.computed_in), self.kernel_side, self.stride[0])
        how = (padding, self.stride, (1, 1), self.groups)
        (kernel,) = self.packed_kernel
        if not kernel.is_mkldnn:
            kernel = self.packed_kernel[0] = _REORDER_KERNEL(kernel, *how, wide.shape)
        return _CONVOLUTION(wide, kernel, self.packed_bias, *how, "none", [], "").to(inputs.dtype)


def refuse_gradients_and_tracing(inputs: torch.Tensor) -> None:
    """Of a pass by what torch does not document."""
    refuse_gradients(inputs)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        # Where torch.compile meets this, it leaves the product out of its graph.
        raise UserError("a model optimized for inference cannot be traced or exported; give it as it was loaded")
