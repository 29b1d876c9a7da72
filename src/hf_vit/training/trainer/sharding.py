"""Weights that are divided among processes (FSDP2), brought together again."""

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_vit.errors import UserError


def whole_model(model: nn.Module) -> Any:
    """The model itself, or in every process a copy with all the weights of one that is sharded.

    Args:
        model: after the training; the processes must call this together.

    Raises:
        UserError: it is sharded by the first version of FSDP.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        raise UserError("FSDP of version 1 is not supported; set fsdp_version: 2 (examples/accelerate/fsdp2.yaml)")
    if not isinstance(model, FSDPModule):
        return model
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True)
    state = cast("dict[str, torch.Tensor]", get_model_state_dict(model, options=options))
    # Sharding makes a class of its own of the model's.
    kinds: Any = (kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    kind = next(kind for kind in kinds if issubclass(kind, PreTrainedModel))
    whole: Any = kind(cast(Any, model).config)
    whole.load_state_dict(state)
    return whole.to(next(iter(state.values())).device)
