"""Sharpness-aware minimization (arXiv 2010.01412): use the gradient at the worst point nearby."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit.training.trainer.distributed import gather_tensor, get_local_part, synchronize_gradients

# Runs a forward and backward pass of a micro-batch, which adds to the gradients, and returns the loss.
Backward = Callable[[Any], torch.Tensor]


@final
class SharpnessAware:
    """Replaces the gradient of a step by that at w + rho * g / |g| (equation 2), where g is the gradient at w.

    Both passes of a micro-batch have the same dropout, and only the first changes buffers such as the running
    statistics of batch norms. g is the gradient of the whole step over all processes; with `micro_batches` it is that
    of a micro-batch of one process, as on the paper's accelerators (m-sharpness, section 4.1). The paper's rho is 0.05.
    """

    def __init__(self, rho: float = 0.05, micro_batches: bool = False) -> None:
        if not rho > 0:
            raise UserError(f"the radius of SAM is {rho}, but it must be above 0; choose for example --sam-rho 0.05")
        self.rho = rho
        self.micro_batches = micro_batches
        self._batches: list[Any] = []
        self._losses: list[torch.Tensor] = []  # at the original weights, one for each micro-batch of the step
        self._num_done = 0
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []  # changed tensors, and what `_restore` puts back

    def begin(self, batches: Sequence[Any]) -> None:
        """Set the micro-batches of the next step."""
        self._batches = list(batches)
        self._losses = []
        self._num_done = 0

    def backward(self, model: nn.Module, inputs: dict[str, Any], run: Backward) -> torch.Tensor:
        """Add the gradient of the next micro-batch of the step, and return its loss at the original weights."""
        self._num_done += 1
        is_last = self._num_done == len(self._batches)
        if self.micro_batches:
            old_gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
            loss = self._climb(model, [inputs], run, together=False)[0]
            for parameter, gradient in old_gradients:
                parameter.grad = gradient
        else:
            if self._num_done == 1:
                self._losses = self._climb(model, self._batches, run, together=True)
            loss = self._losses[self._num_done - 1]
        synchronize_gradients(model, is_last)
        run(inputs)
        if self.micro_batches or is_last:
            self._restore()
        return loss

    def _climb(self, model: nn.Module, batches: list[Any], run: Backward, together: bool) -> list[torch.Tensor]:
        """Move to the perturbed weights and clear all gradients; return the losses at the original weights."""
        model.zero_grad(set_to_none=True)
        device = next(model.parameters()).device
        losses: list[torch.Tensor] = []
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for number, batch in enumerate(batches, start=1):
                synchronize_gradients(model, together and number == len(batches))
                losses.append(run(batch))
        with torch.no_grad():
            pairs = [(weight, weight.grad) for weight in model.parameters() if weight.grad is not None]
            norm = gather_tensor(torch.nn.utils.get_total_norm([gradient for _, gradient in pairs]))
            # Of sharded weights every process changes its own part.
            local_pairs = [(get_local_part(weight), get_local_part(gradient)) for weight, gradient in pairs]
            changed_tensors = [*(weight for weight, _ in local_pairs), *model.buffers()]
            self._stored = [(tensor, tensor.clone()) for tensor in changed_tensors]
            for weight, gradient in local_pairs:
                # Scaled float16 gradients may be infinite, and then the step is skipped.
                weight.add_(torch.where(norm.isfinite(), gradient * (self.rho / norm.clamp(min=1e-12)), 0))
        model.zero_grad(set_to_none=True)
        return losses

    @torch.no_grad()
    def _restore(self) -> None:
        """Restore the exact original weights, and the buffers after the first passes."""
        for tensor, value in self._stored:
            tensor.copy_(value)
        self._stored = []
