"""An average of the weights over the steps of a training (Polyak), which is judged and released in their place."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import torch
from torch import nn

from hf_vit.training.trainer.sharding import local_parts


@final
class WeightAverage:
    """Exponential moving average of a model's weights, from the weights that it has now.

    average <- decay * average + (1 - decay) * weights after every step, in at least float32; batch norm's running
    statistics alike. Of weights that are divided among processes each averages its own part.

    Args:
        model: whose weights.
        decay: 0.9999 in arXiv 2010.11929, section 4.1. About 1 / (1 - decay) steps count, so it should be much smaller
            for a short training.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self._averages = [wide(value) for value in local_parts(model)]
        self._learnt: list[torch.Tensor] | None = None  # the model's own, while it has the average's

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        for average, learnt in zip(self._averages, local_parts(self.model), strict=True):
            if average.is_floating_point():
                average.lerp_(learnt.to(average.dtype), 1 - self.decay)
            else:
                average.copy_(learnt)

    def remainder(self) -> dict[str, torch.Tensor]:
        """The averages that the model's own dtype is too narrow for: what a checkpoint keeps beside the model."""
        pairs = zip(self._averages, local_parts(self.model), strict=True)
        return {f"average.{i}": average for i, (average, own) in enumerate(pairs) if average.dtype != own.dtype}

    def take(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from such averages, which are taken out of the state; without them, from the model's weights."""
        for i, average in enumerate(self._averages):
            average.copy_(state.pop(f"average.{i}", average))

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The model has the average's weights, and gets its own back, to the bit; nesting changes nothing."""
        if self._learnt is not None:
            yield
            return
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Give the model the average's weights; where it has them, its own."""
        parts = local_parts(self.model)
        if self._learnt is None:
            given, self._learnt = self._averages, [part.clone() for part in parts]
        else:
            given, self._learnt = self._learnt, None
        for part, value in zip(parts, given, strict=True):
            part.copy_(value)


def wide(value: torch.Tensor) -> torch.Tensor:
    """A copy to average in: floating-point numbers in at least float32."""
    kind = torch.promote_types(value.dtype, torch.float32) if value.is_floating_point() else value.dtype
    return value.to(kind, copy=True)
