"""Fit int8 layers to the inputs that they have on calibration images: smooth channels, compensate rounding.

Legend: n tokens, D inputs and M outputs of a layer.
"""

from typing import NamedTuple

import torch

from hf_vit.errors import UserError

# Exponent of the inputs' range in a channel's factor; as the weights' ranges become more uneven by it, 1 is too much.
_MIGRATION = 0.85
_DAMPING = 0.01  # share of the mean squared input that is added
_BLOCK = 128  # columns rounded between two products


class Inputs(NamedTuple):
    """What is recorded of the inputs of a layer: the sum of their products [D, D], and the range of each channel."""

    products: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor

    @classmethod
    def record(cls, inputs: torch.Tensor, before: "Inputs | None") -> "Inputs":
        """Return the record of inputs [.., D], together with what was recorded before."""
        rows = inputs.detach().float().flatten(0, -2)
        if not (len(rows) and bool(rows.isfinite().all())):
            raise UserError("calibrate has no images, or gives values that are NaN or infinite; give other images")
        products, lowest, highest = rows.T @ rows, rows.amin(dim=0), rows.amax(dim=0)
        if before is None:
            return cls(products, lowest, highest)
        lowest, highest = torch.minimum(lowest, before.lowest), torch.maximum(highest, before.highest)
        return cls(products + before.products, lowest, highest)

    def choose_factors(self, weight: torch.Tensor) -> torch.Tensor:
        """Return factors [D] by which to divide inputs, and multiply columns of the weight [M, D] that reads them.

        Channels with large values, which set the step of all, get a step closer to the others'. The factors are powers
        of two, so that products stay the same (SmoothQuant, arXiv 2211.10438, section 4).
        """
        columns = weight.abs().amax(dim=0).clamp(min=1e-8)
        largest = torch.maximum(self.highest, -self.lowest).clamp(min=1e-8)
        exponents = _MIGRATION * largest.log2() - (1 - _MIGRATION) * columns.log2()
        return torch.exp2((exponents - exponents.mean()).round())

    def divide(self, factors: torch.Tensor) -> "Inputs":
        """Return the record of the inputs divided by factors [D]."""
        return Inputs(self.products / factors / factors[:, None], self.lowest / factors, self.highest / factors)


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
