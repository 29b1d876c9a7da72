"""The dense layer of rewritten models, to which the GELU or the residual that follows belongs.

Legend: D inputs, M outputs of a layer.
"""

from typing import TypeVar, final

import torch
from torch import nn
from torch.nn import functional as F


class Merged(nn.Module):
    """Abstract: what it gives is another number than the plain model's part of this name, which others belong to.

    A GELU, a residual, a LayerScale may be in it. A hook would see that number, and a part in its place would lack it.
    """


@final
class Dense(Merged):
    """x W' + b, then GELU, or + residual: [.., D] -> [.., M].

    It computes in the dtype of its weights, and returns the inputs'. The weights are buffers, so that the dtype of the
    model stays that of its other parameters, and have names of their own: they are not what a plain layer's would be.

    Args:
        weight, bias: [M, D], [M] or None.
        approximate: torch's name of a GELU's approximation, or None for no GELU.
    """

    merged_weight: torch.Tensor
    merged_bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str | None = None) -> None:
        super().__init__()
        self.approximate = approximate
        self.register_buffer("merged_weight", weight.detach())
        self.register_buffer("merged_bias", None if bias is None else bias.detach())

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        outputs = F.linear(inputs.to(self.merged_weight.dtype), self.merged_weight, self.merged_bias)
        if self.approximate is not None:
            outputs = F.gelu(outputs, approximate=self.approximate)
        return (outputs if residual is None else outputs + residual).to(inputs.dtype)


Part = TypeVar("Part", bound=nn.Module)


def derived(kind: type[Part], module: nn.Module, without: tuple[str, ...] = ()) -> Part:
    """A module of a subclass with the state, hooks and parts of another, which stays as it is; `without` some parts."""
    new = kind.__new__(kind)
    parts = {name: part for name, part in module._modules.items() if name not in without}
    new.__dict__ = {**vars(module), "_modules": parts}
    return new
