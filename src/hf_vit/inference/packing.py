"""Dense layers packed for oneDNN on CPUs, where torch has it: the one place that calls what torch does not document.

Legend: D inputs, M outputs of a layer.
"""

from typing import Any, final

import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit.inference.freezing import REMEDY
from hf_vit.rewriting.dense import Dense

# For which weights are packed best: the tokens of one 224 px image; other numbers run as well.
_ROWS = 197
# None where torch was built without oneDNN, or has other names for them by now: then nothing is packed.
_REORDER: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_TAKES_BFLOAT16: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)


def pack(part: nn.Module) -> nn.Module:
    """A rewritten part of a model with every dense layer packed that can be; the packed weight is the only one."""
    if type(part) is Dense:
        return PackedDense(part) if _can_be_packed(part.weight) else part
    for name, child in part.named_children():
        setattr(part, name, pack(child))
    return part


def _can_be_packed(weight: torch.Tensor) -> bool:
    if _REORDER is None or _LINEAR is None or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return _TAKES_BFLOAT16 is not None and _TAKES_BFLOAT16()
    return weight.dtype == torch.float32


@final
class PackedDense(nn.Module):
    """A `Dense` whose bias, GELU or residual oneDNN adds while the product is in the cache: [.., D] -> [.., M].

    Its weight is opaque and nobody's parameter.
    """

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.approximate, self.dtype = dense.approximate, dense.weight.dtype
        self.weight = _REORDER(dense.weight.detach(), _ROWS)
        self.bias = None if dense.bias is None else dense.bias.detach()

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if inputs.requires_grad and torch.is_grad_enabled():
            raise UserError(f"a model optimized for inference has no gradients; {REMEDY}")
        wide = inputs.to(self.dtype)
        if residual is not None:
            outputs = _LINEAR.binary(wide, residual.to(self.dtype), self.weight, self.bias, "add")
        elif self.approximate is not None:
            outputs = _LINEAR(wide, self.weight, self.bias, "gelu", [], self.approximate)
        else:
            outputs = _LINEAR(wide, self.weight, self.bias, "none", [], "")
        return outputs.to(inputs.dtype)
