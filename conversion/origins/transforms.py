"""What happens to source arrays on their way to a parameter of the model, and back.

A few named moves of one array, without arithmetic; and what is computed from several, with no way back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Transform:
    """A move of axes from a source array to a parameter.

    Attributes:
        name: as key tables have it.
        meaning: for people.
        apply: source array -> parameter.
        order: axes of the parameter in the order that the source has; joined ones are split by `revert`.
    """

    name: str
    meaning: str
    apply: Callable[[torch.Tensor], torch.Tensor]
    order: tuple[int, ...] | None = None

    def revert(self, parameter: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The source array of this shape, contiguous, that `apply` turns into the parameter."""
        axes = parameter if self.order is None else parameter.permute(self.order)
        return axes.reshape(tuple(shape)).contiguous()


_ALL = (
    Transform("keep", "as it is", lambda array: array),
    Transform("transpose", "[in, out] -> [out, in]", lambda array: array.T, (1, 0)),
    Transform("pointwise", "[in, out] or [1, 1, in, out] -> [out, in]", lambda array: array.flatten(0, -2).T, (1, 0)),
    Transform(
        "conv",
        "[height, width, in, out] -> [out, in, height, width]",
        lambda array: array.permute(3, 2, 0, 1),
        (2, 3, 1, 0),
    ),
    Transform("split_heads", "[in, A, K] -> [A*K, in]", lambda array: array.flatten(1).T, (1, 0)),
    Transform("join_heads", "[A, K, out] -> [out, A*K]", lambda array: array.flatten(0, 1).T, (1, 0)),
    Transform("flatten_heads", "[A, K] -> [A*K]", lambda array: array.flatten()),
    Transform("as_token", "[channels] -> [1, 1, channels]", lambda array: array[None, None]),
    Transform("as_table", "[rows, channels] -> [1, rows, channels]", lambda array: array[None]),
    Transform("flatten", "[1, 1, 1, channels] or [channels] -> [channels]", lambda array: array.flatten()),
)
TRANSFORMS = {transform.name: transform for transform in _ALL}


@dataclass(frozen=True)
class Computation:
    """A parameter made of several source arrays.

    Attributes:
        name: as key tables have it.
        meaning: for people.
        compute: (source arrays in the order of the key table, (h, w) patch grid of the model) -> parameter in float64.
    """

    name: str
    meaning: str
    compute: Callable[[Sequence[torch.Tensor], tuple[int, int]], torch.Tensor]


def offset_biases(arrays: Sequence[torch.Tensor], grid: tuple[int, int]) -> torch.Tensor:
    """The bias [(2h-1)*(2w-1), A] that an MLP gives to each head at each offset (Swin v2, arXiv 2111.09883).

    Args:
        arrays: weight [H, 2] and bias [H] of the first layer, weight [A, H] and bias [A] of the second.
        grid: (h, w) in patches.
    """
    down, right = (torch.arange(1 - side, side, dtype=torch.float32) for side in grid)
    offsets = torch.cartesian_prod(down, right)
    logarithms = offsets.sign() * (1 + offsets.abs()).log()  # in float32, as timm
    weight1, bias1, weight2, bias2 = (array.double() for array in arrays)
    return torch.relu(logarithms.double() @ weight1.T + bias1) @ weight2.T + bias2


_OFFSET_MLP = Computation(
    "offset_mlp", "four arrays of an MLP -> what it gives for every offset between patches", offset_biases
)
COMPUTATIONS = {_OFFSET_MLP.name: _OFFSET_MLP}
