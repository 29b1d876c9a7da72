"""Several processes: weights that are sharded among them (FSDP2), and batch norms over the images of all."""

from itertools import chain
from typing import Any, cast, final

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_vit.models.modeling_hf_axial_resnet import LogitNorm
from hf_vit.training.processes import refusal_of


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process' part of a tensor, in its own memory; all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divide_again(model: nn.Module) -> None:
    """Drop the whole weights that a forward pass has left, which are copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def local_parts(model: nn.Module) -> list[torch.Tensor]:
    """Return this process' part of a model's parameters and buffers, in its own memory."""
    divide_again(model)
    return [local_part(tensor) for tensor in chain(model.parameters(), model.buffers())]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor in every process; the processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, or in every process a whole copy of a sharded one; the processes must call this together."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    state = {name: whole(value) for name, value in model.state_dict().items()}
    # Sharding makes a class of its own of the model's.
    kind = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    copy: Any = cast(Any, kind)(model.config)
    copy.load_state_dict(state)
    return copy.to(next(iter(state.values())).device)


def synchronise_gradients(model: nn.Module, together: bool) -> None:
    """Choose whether the next backward pass averages gradients over the processes, or each adds up its own."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = together
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(together)


def check_sharding(plugin: Any, config: Any, climbs_alone: bool) -> None:
    """Refuse what FSDP cannot do before the first step, by accelerate's settings of it (None without)."""
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise refusal_of("fsdp1")
    if climbs_alone:
        raise refusal_of("sam micro-batches")
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
    if plugin.activation_checkpointing and any(getattr(config, rate, 0) for rate in rates):
        raise refusal_of("checkpointing dropout")


def synchronise_batch_norms(model: nn.Module) -> None:
    """Let every batch norm of a model see the images of all processes, equally many of each; in place.

    torch's `SyncBatchNorm` does so on GPUs alone. Names, weights and evaluation mode stay.
    """
    for module in model.modules():
        module.__class__ = _KINDS.get(type(module), type(module))


def gather(value: torch.Tensor) -> torch.Tensor:
    """[...] of every process -> [processes, ...] in all of them; no gradient flows."""
    parts = [torch.empty_like(value) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, value.contiguous())
    return torch.stack(parts)


@final
class _Gather(torch.autograd.Function):
    """`gather` with the gradient of the sum of all processes' losses; their mean is what the processes make of it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return gather(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].contiguous().clone()
        distributed.all_reduce(gradient)
        return gradient[distributed.get_rank()]


def _together(value: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _Gather.apply(value))


def _normalise(norm: nn.BatchNorm1d | nn.BatchNorm2d, values: torch.Tensor) -> torch.Tensor:
    """Training's batch norm of [B, C, ...], B images of each process."""
    wide = values if values.dtype == torch.float64 else values.float()
    others = [axis for axis in range(wide.ndim) if axis != 1]
    parts = _together(torch.stack([wide.mean(others), wide.var(others, unbiased=False)]))
    mean = parts[:, 0].mean(0)
    variance = parts[:, 1].mean(0) + parts[:, 0].var(0, unbiased=False)
    with torch.no_grad():
        assert norm.momentum is not None
        assert norm.num_batches_tracked is not None
        count = len(parts) * wide.numel() // wide.shape[1]
        norm.num_batches_tracked += 1
        cast(torch.Tensor, norm.running_mean).lerp_(mean, norm.momentum)
        cast(torch.Tensor, norm.running_var).lerp_(variance * (count / (count - 1)), norm.momentum)
    shape = [1, -1, *[1] * (wide.ndim - 2)]
    result = (wide - mean.view(shape)) * (variance + norm.eps).rsqrt().view(shape)
    if norm.affine:
        result = result * norm.weight.view(shape) + norm.bias.view(shape)
    return result.to(values.dtype)


@final
class SynchronisedBatchNorm1d(nn.BatchNorm1d):
    """A `BatchNorm1d` whose statistics in training are those of all processes' images."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _normalise(self, input) if self.training else super().forward(input)


@final
class SynchronisedBatchNorm2d(nn.BatchNorm2d):
    """A `BatchNorm2d` whose statistics in training are those of all processes' images."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _normalise(self, input) if self.training else super().forward(input)


@final
class SynchronisedLogitNorm(LogitNorm):
    """A `LogitNorm` whose statistics in training are those of all processes' images."""

    def moments(
        self, q: torch.Tensor, k: torch.Tensor, to_q: torch.Tensor, to_k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        mean_square, mean, number = super().moments(q, k, to_q, to_k)
        parts = _together(torch.stack([mean_square, mean]))
        mean_square, mean = parts.mean(0)
        return mean_square, mean, len(parts) * number


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SynchronisedBatchNorm1d,
    nn.BatchNorm2d: SynchronisedBatchNorm2d,
    LogitNorm: SynchronisedLogitNorm,
}
