"""Sharpness-aware minimisation (arXiv 2010.01412): descend by the gradient at the worst point nearby."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn

from hf_vit.errors import UserError

# One forward and backward pass of a micro-batch: adds to the gradients, returns the loss.
Backward = Callable[[Any], torch.Tensor]
# What keeps the gradients of several processes apart.
Unsynced = Callable[[], AbstractContextManager[Any]]


@final
class SharpnessAware:
    """Makes the gradient of a step that of w + rho * g / |g|, g being the gradient at the weights w (equation 2).

    Both passes of a micro-batch draw the same dropout. Every process perturbs by its own gradient, as the paper's
    accelerators do: m-sharpness, m being a process's images (section 4.1); `micro_batches` makes it a micro-batch's.

    Args:
        rho: length of the perturbation; 0.05 is the paper's default.
        micro_batches: perturb for every micro-batch anew, instead of once a step.

    Raises:
        UserError: rho is not above 0.
    """

    def __init__(self, rho: float = 0.05, micro_batches: bool = False) -> None:
        if not rho > 0:
            raise UserError(f"sharpness-aware minimisation with rho {rho} is none; give a rho above 0")
        self.rho, self.micro_batches = rho, micro_batches
        self._batches: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._done = 0
        self._weights: list[tuple[nn.Parameter, torch.Tensor]] = []

    def begin(self, batches: Sequence[Any]) -> None:
        """The micro-batches of the next step."""
        self._batches, self._losses, self._done = list(batches), [], 0

    def backward(self, model: nn.Module, inputs: dict[str, Any], run: Backward, unsynced: Unsynced) -> torch.Tensor:
        """Add a micro-batch's part to the gradient; called for each of a step's in their order.

        Returns:
            Its loss at the weights themselves.
        """
        if self.micro_batches:
            kept = [(parameter, parameter.grad) for parameter in model.parameters()]
            loss = self._climb(model, [inputs], run, unsynced)[0]
            for parameter, gradient in kept:
                parameter.grad = gradient
            run(inputs)
            self._return()
            return loss
        if self._done == 0:
            self._losses = self._climb(model, self._batches, run, unsynced)
        run(inputs)
        self._done += 1
        if self._done == len(self._batches):
            self._return()
        return self._losses[self._done - 1]

    def _climb(self, model: nn.Module, batches: list[Any], run: Backward, unsynced: Unsynced) -> list[torch.Tensor]:
        """Go to the perturbed weights, with all gradients cleared; returns the losses at the weights themselves."""
        model.zero_grad(set_to_none=True)
        device = next(model.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), unsynced():
            losses = [run(batch) for batch in batches]
        with torch.no_grad():
            slopes = [(weight, weight.grad) for weight in model.parameters() if weight.grad is not None]
            norm = torch.nn.utils.get_total_norm([slope for _, slope in slopes])
            self._weights = [(weight, weight.detach().clone()) for weight, _ in slopes]
            for weight, slope in slopes:
                weight.add_(slope * (self.rho / norm.clamp(min=1e-12)))
        model.zero_grad(set_to_none=True)
        return losses

    @torch.no_grad()
    def _return(self) -> None:
        """Back to the weights themselves, to the bit."""
        for weight, value in self._weights:
            weight.copy_(value)
        self._weights = []
