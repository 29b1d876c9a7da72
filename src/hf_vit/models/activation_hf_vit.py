"""A dense layer and its GELU in one pass, where torch can: inference on CPUs.

torch's own kernel of the original's tanh GELU costs two to five times erf's on CPUs; oneDNN's, which work on the
product while it is in the cache, next to nothing, at the same accuracy.
"""

import torch
from torch import nn

# The GELUs that can be fused: hidden_act -> torch's name of the approximation.
FUSED_GELUS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}
# None where torch was built without oneDNN.
_DENSE_POINTWISE = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def can_fuse_gelu(dense: nn.Linear, inputs: torch.Tensor) -> bool:
    """Whether nothing but the plain product of this layer, without gradients, is asked for on a CPU with oneDNN."""
    untouched = type(dense) is nn.Linear and not (
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
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return inputs.dtype == weight.dtype == torch.float32


def dense_gelu(dense: nn.Linear, inputs: torch.Tensor, approximate: str) -> torch.Tensor:
    """gelu(inputs W' + b) where `can_fuse_gelu`, [.., D] -> [.., M]; `approximate` as in torch."""
    assert _DENSE_POINTWISE is not None
    return _DENSE_POINTWISE(inputs, dense.weight, dense.bias, "gelu", [], approximate)
