"""An average of the weights over the steps of a training (Polyak), which is judged and released in their place."""

from collections.abc import Generator
from contextlib import contextmanager
from itertools import chain
from typing import final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@final
class WeightAverage:
    """Exponential moving average of a model's weights, from the weights that it has now.

    average <- decay * average + (1 - decay) * weights after every step; batch norm's running statistics alike.

    Args:
        model: whose weights.
        decay: 0.9999 in arXiv 2010.11929, section 4.1. About 1 / (1 - decay) steps count, so it should be much smaller
            for a short training.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self._averaged.update_parameters(model)  # the first call copies
        self._is_in_place = False

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        pairs = zip(self._averaged.module.buffers(), self.model.buffers(), strict=True)
        moved = [(own, own.lerp(learnt, 1 - self.decay)) for own, learnt in pairs if own.is_floating_point()]
        self._averaged.update_parameters(self.model)  # which copies buffers
        for own, value in moved:
            own.copy_(value)

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
        averaged: nn.Module = self._averaged.module
        mine = chain(averaged.parameters(), averaged.buffers())
        for own, learnt in zip(mine, chain(self.model.parameters(), self.model.buffers()), strict=True):
            kept = own.clone()
            own.copy_(learnt)
            learnt.copy_(kept)
        self._is_in_place = not self._is_in_place
