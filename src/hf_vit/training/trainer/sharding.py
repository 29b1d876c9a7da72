"""Weights that are divided among processes (FSDP2): their parts at hand, and brought together again."""

from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_vit.training.refusals import refusal_of


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, in the very memory; all of one that is not divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divide_again(model: nn.Module) -> None:
    """Let go of the whole weights that a forward pass has left, which are copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def local_parts(model: nn.Module) -> list[torch.Tensor]:
    """What this process holds of a model's parameters and buffers, in the very memory."""
    divide_again(model)
    return [local_part(tensor) for tensor in chain(model.parameters(), model.buffers())]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, in every process; the processes must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or in every process a copy with all the weights of one that is sharded.

    Args:
        model: after the training, in its parts; the processes must call this together.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    state = {name: whole(value) for name, value in model.state_dict().items()}
    # Sharding makes a class of its own of the model's.
    kind = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    copy: Any = cast(Any, kind)(model.config)
    copy.load_state_dict(state)
    return copy.to(next(iter(state.values())).device)


def synchronise_gradients(model: nn.Module, together: bool) -> None:
    """Whether the next backward pass averages gradients over the processes, or each keeps and adds up its own."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = together
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(together)


def check_sharding(plugin: Any, config: Any, climbs_alone: bool) -> None:
    """Refuse what FSDP cannot do, before the first step.

    Args:
        plugin: accelerate's settings of FSDP; None without.
        config: of the model.
        climbs_alone: with sharpness-aware minimisation of every micro-batch.

    Raises:
        UserError: FSDP of version 1; or see `REFUSALS`.
    """
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise refusal_of("fsdp1")
    if climbs_alone:
        raise refusal_of("sam micro-batches")
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
    if plugin.activation_checkpointing and any(getattr(config, rate, 0) for rate in rates):
        raise refusal_of("checkpointing dropout")
