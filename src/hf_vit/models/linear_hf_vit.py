"""The dense layer of the blocks, and what makes it faster on CPUs than torch leaves it.

Products of bfloat16 are computed in float32 where the processor only emulates them: faster, and no less exact. The GELU
that follows is computed in the same pass: torch's own kernel of the original's tanh GELU costs two to five times erf's
on CPUs; oneDNN's, which work on the product while it is in the cache, next to nothing, at the same accuracy.

Legend: D inputs, M outputs of a layer.
"""

import platform
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# Whether this CPU has no instructions for bfloat16; oneDNN then takes three to four times as long as for float32.
EMULATES_BFLOAT16 = platform.machine() in ("x86_64", "AMD64") and not (
    torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
)
# The GELUs that can be fused: hidden_act -> torch's name of the approximation.
FUSED_GELUS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}
# None where torch was built without oneDNN.
_DENSE_POINTWISE = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def is_emulated(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch would emulate the product of these two, by their dtypes or by autocast; never in an export."""
    if not EMULATES_BFLOAT16:
        return False
    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu") == torch.bfloat16 and inputs.dtype in (torch.float32, torch.bfloat16)
    else:
        narrow = inputs.dtype == weight.dtype == torch.bfloat16
    if not narrow or inputs.device.type != "cpu" or type(weight) is not nn.Parameter:
        return False
    return not (torch.compiler.is_exporting() or torch.jit.is_tracing())  # pyright: ignore[reportPrivateImportUsage]


def _as_float32(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()


class _Float32Product(torch.autograd.Function):
    """bfloat16 inputs [.., D] -> bfloat16 outputs [.., M] by products in float32, of which it keeps nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(inputs.float(), weight.float(), _as_float32(bias)).to(inputs.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        with torch.autocast("cpu", enabled=False):
            wide = gradient.float()
            rows = wide.reshape(-1, wide.shape[-1])
            return (
                (wide @ weight.float()).to(inputs.dtype) if of_inputs else None,
                (rows.T @ inputs.float().reshape(-1, inputs.shape[-1])).to(weight.dtype) if of_weight else None,
                rows.sum(0).to(weight.dtype) if of_bias else None,
            )


class HfViTLinear(nn.Linear):
    """`nn.Linear`; products of bfloat16 in float32 where they would be emulated, with outputs in bfloat16 all the same.

    Under autocast that takes the float32 weights as they are; without it, bfloat16 weights are widened for the moment.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if not is_emulated(input, weight):
            return F.linear(input, weight, self.bias)
        with torch.autocast("cpu", enabled=False):
            return _Float32Product.apply(input.to(torch.bfloat16), weight, self.bias)  # pyright: ignore[reportReturnType]


def can_fuse_gelu(dense: nn.Linear, inputs: torch.Tensor) -> bool:
    """Whether nothing but the plain product of this layer, without gradients, is asked for on a CPU with oneDNN."""
    untouched = type(dense) is HfViTLinear and not (
        dense._forward_hooks or dense._forward_pre_hooks or "forward" in vars(dense)
    )
    watched = (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or torch._C._len_torch_dispatch_stack() > 0  # counters of FLOPs and the like know F.linear alone
    )
    return untouched and not watched and _has_kernel(inputs, dense.weight)


def _has_kernel(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    if _DENSE_POINTWISE is None or not torch.backends.mkldnn.enabled or inputs.numel() == 0:
        return False
    if type(weight) is not nn.Parameter or {inputs.device.type, weight.device.type} != {"cpu"}:
        return False
    if inputs.dtype == weight.dtype == torch.bfloat16:
        return EMULATES_BFLOAT16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return inputs.dtype == weight.dtype == torch.float32


def dense_gelu(dense: nn.Linear, inputs: torch.Tensor, approximate: str) -> torch.Tensor:
    """gelu(inputs W' + b) where `can_fuse_gelu`, [.., D] -> [.., M]; `approximate` as in torch."""
    assert _DENSE_POINTWISE is not None
    weight, bias = dense.weight, dense.bias
    if not is_emulated(inputs, weight):
        return _DENSE_POINTWISE(inputs, weight, bias, "gelu", [], approximate)
    outputs = _DENSE_POINTWISE(inputs.float(), weight.float(), _as_float32(bias), "gelu", [], approximate)
    return outputs.to(inputs.dtype)
