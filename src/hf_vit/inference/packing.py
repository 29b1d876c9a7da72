"""Dense layers packed for oneDNN on CPUs, where torch has it: the one place that calls what torch does not document.

Legend: D inputs, M outputs of a layer.
"""

from typing import Any, final

import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit.inference.attention import attend_by_products
from hf_vit.inference.freezing import REMEDY
from hf_vit.rewriting.dense import Dense, Merged
from hf_vit.rewriting.transformer import FusedAttention

# For which weights are packed best: the tokens of one 224 px image; other numbers run as well.
_ROWS = 197
# None where torch was built without oneDNN, or has other names for them by now: then nothing is packed.
_REORDER: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_TAKES_BFLOAT16: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)


def pack(part: nn.Module) -> nn.Module:
    """A rewritten part of a model with every dense layer packed that can be; the packed weight is the only one."""
    if type(part) is Dense:
        return PackedDense(part) if _can_be_packed(part.merged_weight) else part
    for name, child in part.named_children():
        setattr(part, name, pack(child))
    if isinstance(part, FusedAttention) and getattr(part.qkv, "computed_in", None) == torch.bfloat16:
        attend_by_products(part)
    return part


def _can_be_packed(weight: torch.Tensor) -> bool:
    if _REORDER is None or _LINEAR is None or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return _TAKES_BFLOAT16 is not None and _TAKES_BFLOAT16()
    return weight.dtype == torch.float32


@final
class PackedDense(Merged):
    """A `Dense` whose bias, GELU or residual oneDNN adds while the product is in the cache: [.., D] -> [.., M].

    Its weight is opaque and nobody's parameter.
    """

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.approximate, self.computed_in = dense.approximate, dense.merged_weight.dtype
        self.packed_weight = _REORDER(dense.merged_weight, _ROWS)
        self.packed_bias = dense.merged_bias

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if inputs.requires_grad and torch.is_grad_enabled():
            raise UserError(f"a model optimized for inference has no gradients; {REMEDY}")
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            # Where torch.compile meets this, it leaves the product out of its graph.
            raise UserError("a model optimized for inference cannot be traced or exported; give it as it was loaded")
        wide, weight, bias = inputs.to(self.computed_in), self.packed_weight, self.packed_bias
        if residual is not None:
            outputs = _LINEAR.binary(wide, residual.to(self.computed_in), weight, bias, "add")
        elif self.approximate is not None:
            outputs = _LINEAR(wide, weight, bias, "gelu", [], self.approximate)
        else:
            outputs = _LINEAR(wide, weight, bias, "none", [], "")
        return outputs.to(inputs.dtype)
