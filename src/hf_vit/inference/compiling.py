"""torch's inductor with the weights frozen into the graph."""

from typing import Any

import torch
from torch import nn


def compile_frozen(model: nn.Module) -> None:
    """`model.compile()`, frozen; on CPUs operators are called from C++, which saves as many calls of Python.

    Both have to be set while dynamo traces too, and as options they come too late.
    """
    from torch._inductor import config  # not before it is needed: it takes a second

    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    model.compile(dynamic=False)
    compiled: Any = model._compiled_call_impl

    def frozen(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), config.patch(freezing=True, cpp_wrapper=on_cpu):
            return compiled(*args, **kwargs)

    model._compiled_call_impl = frozen
