"""Sharpness-aware minimization (arXiv 2010.01412): descend by the gradient at the worst point nearby."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit.training.trainer.distributed import local_part, synchronise_gradients, whole

# One forward and backward pass of a micro-batch: adds to the gradients, returns the loss.
Backward = Callable[[Any], torch.Tensor]


@final
class SharpnessAware:
    """Makes the gradient of a step that at w + rho * g / |g| (equation 2).

    Both passes of a micro-batch draw the same dropout, and the first alone changes buffers: batch norm's running
    statistics. g is the gradient at the weights w of the whole step, over all processes; `micro_batches` makes it a
    micro-batch's of one process, as the paper's accelerators do: m-sharpness (section 4.1). rho: 0.05 in the paper.
    """

    def __init__(self, rho: float = 0.05, micro_batches: bool = False) -> None:
        if not rho > 0:
            raise UserError(f"rho {rho} of sharpness-aware minimization must be above 0")
        self.rho, self.micro_batches = rho, micro_batches
        self._batches: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._done = 0
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, batches: Sequence[Any]) -> None:
        """The micro-batches of the next step."""
        self._batches, self._losses, self._done = list(batches), [], 0

    def backward(self, model: nn.Module, inputs: dict[str, Any], run: Backward) -> torch.Tensor:
        """Add a micro-batch's part to the gradient, in the order of the step; return its loss at the weights."""
        self._done += 1
        is_last = self._done == len(self._batches)
        if self.micro_batches:
            kept = [(parameter, parameter.grad) for parameter in model.parameters()]
            loss = self._climb(model, [inputs], run, together=False)[0]
            for parameter, gradient in kept:
                parameter.grad = gradient
        else:
            if self._done == 1:
                self._losses = self._climb(model, self._batches, run, together=True)
            loss = self._losses[self._done - 1]
        synchronise_gradients(model, is_last)
        run(inputs)
        if self.micro_batches or is_last:
            self._return()
        return loss

    def _climb(self, model: nn.Module, batches: list[Any], run: Backward, together: bool) -> list[torch.Tensor]:
        """Go to the perturbed weights, with all gradients cleared; returns the losses at the weights themselves."""
        model.zero_grad(set_to_none=True)
        device = next(model.parameters()).device
        losses: list[torch.Tensor] = []
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for number, batch in enumerate(batches, start=1):
                synchronise_gradients(model, together and number == len(batches))
                losses.append(run(batch))
        with torch.no_grad():
            slopes = [(weight, weight.grad) for weight in model.parameters() if weight.grad is not None]
            norm = whole(torch.nn.utils.get_total_norm([slope for _, slope in slopes]))
            pairs = [(local_part(weight), local_part(slope)) for weight, slope in slopes]
            self._kept = [(tensor, tensor.clone()) for tensor in (*(weight for weight, _ in pairs), *model.buffers())]
            for weight, slope in pairs:
                weight.add_(slope * (self.rho / norm.clamp(min=1e-12)))
        model.zero_grad(set_to_none=True)
        return losses

    @torch.no_grad()
    def _return(self) -> None:
        """Back to the weights themselves, and to the buffers that the first passes left, to the bit."""
        for tensor, value in self._kept:
            tensor.copy_(value)
        self._kept = []
