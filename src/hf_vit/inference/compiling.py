"""torch's inductor with the weights frozen into the graph."""

from typing import Any

import torch
from torch import nn


def compile_frozen(model: nn.Module) -> None:
    """`model.compile()`, frozen: that has to be set while dynamo traces too, and as an option it comes too late."""
    from torch._inductor import config  # not before it is needed: it takes a second

    model.compile(dynamic=False)
    compiled: Any = model._compiled_call_impl

    def frozen(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), config.patch(freezing=True):
            return compiled(*args, **kwargs)

    model._compiled_call_impl = frozen
