"""Distributed training: sharded weights (FSDP2), and batch norms over the images of all processes."""

from itertools import chain
from typing import Any, cast, final

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_vit.models.modeling_hf_axial_resnet import LogitNorm
from hf_vit.training.processes import make_refusal


def get_local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process' part of a tensor, sharing memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Discard the gathered copies of sharded weights that remain after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def get_local_parts(model: nn.Module) -> list[torch.Tensor]:
    """Return this process' parts of a model's parameters and buffers, sharing memory."""
    reshard(model)
    return [get_local_part(tensor) for tensor in chain(model.parameters(), model.buffers())]


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor in every process; all processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, or a full copy of a sharded model in every process; all processes must call this together."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    state = {name: gather_tensor(value) for name, value in model.state_dict().items()}
    # FSDP derives a class from the model's class.
    original_class = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    copy: Any = cast(Any, original_class)(model.config)
    copy.load_state_dict(state)
    return copy.to(next(iter(state.values())).device)


def synchronize_gradients(model: nn.Module, together: bool) -> None:
    """Set whether the next backward pass averages gradients over all processes, or only adds to those of each."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = together
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(together)


def check_sharding(plugin: Any, config: Any, uses_micro_batches: bool) -> None:
    """Raise UserError for settings that do not work with FSDP; `plugin` is accelerate's, or None without FSDP."""
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise make_refusal("fsdp1")
    if getattr(config, "backbone_config", None) is not None:
        raise make_refusal("fsdp dense")
    if uses_micro_batches:
        raise make_refusal("sam micro-batches")
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
    if plugin.activation_checkpointing and any(getattr(config, rate, 0) for rate in rates):
        raise make_refusal("checkpointing dropout")


def synchronize_batch_norms(model: nn.Module) -> None:
    """Replace the batch norms of a model in place by ones with the statistics of all processes.

    All processes must have the same number of images. torch's `SyncBatchNorm` works only on GPUs. Names, weights and
    evaluation mode do not change.
    """
    for module in model.modules():
        module.__class__ = _KINDS.get(type(module), type(module))


def share_statistics(model: nn.Module) -> None:
    """Give all processes the running statistics of the first one, which are those that are saved."""
    for name, buffer in model.named_buffers():
        if "running_" in name:
            distributed.broadcast(buffer, 0)


def gather(value: torch.Tensor) -> torch.Tensor:
    """Stack a tensor [...] of every process to [processes, ...] in all of them, without gradient."""
    parts = [torch.empty_like(value) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, value.contiguous())
    return torch.stack(parts)


@final
class _Gather(torch.autograd.Function):
    """`gather` with the gradient of the sum of all processes' losses."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return gather(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].contiguous().clone()
        distributed.all_reduce(gradient)
        return gradient[distributed.get_rank()]


def _normalize(norm: nn.BatchNorm1d | nn.BatchNorm2d, values: torch.Tensor) -> torch.Tensor:
    """Normalize [B, C, ...] (B images of every process, C channels) with the statistics of all processes.

    The variance over all images is the mean of the processes' variances plus the variance of their means.
    """
    wide = values if values.dtype == torch.float64 else values.float()
    axes = [axis for axis in range(wide.ndim) if axis != 1]
    parts: torch.Tensor = _Gather.apply(torch.stack([wide.mean(axes), wide.var(axes, unbiased=False)]))
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
class SynchronizedBatchNorm1d(nn.BatchNorm1d):
    """A `BatchNorm1d` whose statistics in training are those of all processes' images."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _normalize(self, input) if self.training else super().forward(input)


@final
class SynchronizedBatchNorm2d(nn.BatchNorm2d):
    """A `BatchNorm2d` whose statistics in training are those of all processes' images."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _normalize(self, input) if self.training else super().forward(input)


@final
class SynchronizedLogitNorm(LogitNorm):
    """A `LogitNorm` whose statistics in training are those of all processes' images."""

    def compute_moments(
        self, q: torch.Tensor, k: torch.Tensor, to_q: torch.Tensor, to_k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return mean squares, means and their number over the logits of all processes."""
        mean_square, mean, number = super().compute_moments(q, k, to_q, to_k)
        parts: torch.Tensor = _Gather.apply(torch.stack([mean_square, mean]))
        mean_square, mean = parts.mean(0)
        return mean_square, mean, len(parts) * number


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    LogitNorm: SynchronizedLogitNorm,
}
