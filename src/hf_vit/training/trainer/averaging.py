"""An average of the weights over the steps of a training (Polyak), which is judged and released in their place."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import final

import torch
from torch import nn

from hf_vit.training.trainer.sharding import local_parts


@final
class WeightAverage:
    """Exponential moving average of a model's weights, from the weights that it has now.

    average <- decay * average + (1 - decay) * weights after every step; batch norm's running statistics alike. Of
    weights that are divided among processes each averages its own part.

    Args:
        model: whose weights.
        decay: 0.9999 in arXiv 2010.11929, section 4.1. About 1 / (1 - decay) steps count, so it should be much smaller
            for a short training.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self._averages = [value.clone() for value in local_parts(model)]
        self._is_in_place = False

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        for average, learnt in self._pairs():
            if average.is_floating_point():
                average.lerp_(learnt, 1 - self.decay)
            else:
                average.copy_(learnt)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The model has the average's weights, and gets its own back, to the bit; nesting changes nothing."""
        if self._is_in_place:
            yield
            return
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights and the average's."""
        for average, learnt in self._pairs():
            kept = average.clone()
            average.copy_(learnt)
            learnt.copy_(kept)
        self._is_in_place = not self._is_in_place

    def _pairs(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self._averages, local_parts(self.model), strict=True)
