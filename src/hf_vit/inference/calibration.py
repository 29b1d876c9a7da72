"""Fit int8 layers to calibration images: record the inputs of dense layers, smooth channels, compensate rounding.

Legend: n tokens, D inputs and M outputs of a layer.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_vit.inference.layers import Dense, derive

# Layers that read what another of their module reads, with which they are merged: they need no record.
_MERGED_WITH_ANOTHER = ("k_proj", "v_proj", "up_proj")
_BATCH = 8  # images computed at a time
# Exponent of the inputs' range in a channel's factor; as the weights' ranges become more uneven by it, 1 is too much.
_MIGRATION = 0.85
_DAMPING = 0.01  # share of the mean squared input that is added
_BLOCK = 128  # columns rounded between two products


class Inputs(NamedTuple):
    """What is recorded of the inputs of a layer: the sum of their products [D, D], and the largest of each channel."""

    products: torch.Tensor
    largest: torch.Tensor


@contextmanager
def record_inputs(model: nn.Module, images: torch.Tensor | None) -> Generator[None]:
    """Run images through a model, and put the attribute `inputs` on its dense layers until the context ends."""
    linears: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if images is not None and type(module) is nn.Linear and not name.endswith(_MERGED_WITH_ANOTHER)
    }

    def record(linear: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        rows = arguments[0].detach().float().flatten(0, -2)
        products, largest = rows.T @ rows, rows.abs().amax(dim=0)
        before = getattr(linear, "inputs", None)
        linear.inputs = Inputs(products, largest) if before is None else Inputs(
            before.products + products, torch.maximum(before.largest, largest)
        )  # fmt: skip

    modes = {module: module.training for module in model.modules()}
    hooks = [linear.register_forward_pre_hook(record) for linear in linears.values()]
    try:
        model.eval()
        with torch.no_grad():
            for batch in () if images is None else images.split(_BATCH):
                model(batch)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
        for linear in linears.values():
            vars(linear).pop("inputs", None)


def smooth(norm: Any, dense: Any) -> Any:
    """Divide the channels that a norm returns, and multiply the columns of the dense layer that reads them.

    Channels with large values, which set the step of all, get a step closer to the others'. The factors are powers of
    two, so that products stay the same (SmoothQuant, arXiv 2211.10438, section 4).

    Returns:
        The norm with its new weights; the layer is changed in place.
    """
    if type(dense) is not Dense or dense.inputs is None or getattr(norm, "weight", None) is None:
        return norm
    columns = dense.merged_weight.abs().amax(dim=0).clamp(min=1e-8)
    exponents = _MIGRATION * dense.inputs.largest.clamp(min=1e-8).log2() - (1 - _MIGRATION) * columns.log2()
    factors = torch.exp2((exponents - exponents.mean()).round())
    dense.merged_weight = dense.merged_weight * factors
    products = dense.inputs.products / factors / factors[:, None]
    dense.inputs = Inputs(products, dense.inputs.largest / factors)
    new_norm = derive(type(norm), norm)
    vars(new_norm)["_parameters"] = {
        name: None if value is None else nn.Parameter(value.detach() / factors.to(value.dtype), requires_grad=False)
        for name, value in norm._parameters.items()
    }
    return new_norm


def round_weights(steps: torch.Tensor, levels: int, inputs: Inputs | None) -> torch.Tensor:
    """Round weights [M, D] in units of their step to whole numbers of at most `levels`.

    With recorded inputs, the columns not yet rounded make up for the error that rounding a column causes on them
    (GPTQ, arXiv 2210.17323, algorithm 1; columns with the largest inputs first).
    """
    if inputs is None:
        return torch.round(steps)
    size = len(inputs.products)
    damping = _DAMPING * inputs.products.diagonal().mean().clamp(min=1e-12)
    products = inputs.products.double() + damping * torch.eye(size, dtype=torch.float64)
    order = products.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(products[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    remaining, rounded = steps[:, order], torch.empty_like(steps)
    for start in range(0, size, _BLOCK):
        block = slice(start, min(start + _BLOCK, size))
        errors = torch.empty_like(remaining[:, block])
        for column in range(block.start, block.stop):
            rounded[:, order[column]] = whole = remaining[:, column].round().clamp(-levels, levels)
            errors[:, column - start] = error = (remaining[:, column] - whole) / factor[column, column]
            remaining[:, column : block.stop] -= error[:, None] * factor[column, column : block.stop]
        remaining[:, block.stop :] -= errors @ factor[block, block.stop :]
    return rounded
