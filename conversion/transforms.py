"""What happens to a source array on its way to a parameter of the model: a few named moves, no arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Transform:
    """A move of axes from a source array to a parameter."""

    name: str
    meaning: str
    apply: Callable[[torch.Tensor], torch.Tensor]


_ALL = (
    Transform("keep", "as it is", lambda array: array),
    Transform("transpose", "[in, out] -> [out, in]", lambda array: array.T),
    Transform("conv", "[height, width, in, out] -> [out, in, height, width]", lambda array: array.permute(3, 2, 0, 1)),
    Transform("split_heads", "[in, A, K] -> [A*K, in]", lambda array: array.flatten(1).T),
    Transform("join_heads", "[A, K, out] -> [out, A*K]", lambda array: array.flatten(0, 1).T),
    Transform("flatten_heads", "[A, K] -> [A*K]", lambda array: array.flatten()),
    Transform("flatten", "[1, 1, 1, channels] or [channels] -> [channels]", lambda array: array.flatten()),
)
TRANSFORMS = {transform.name: transform for transform in _ALL}
