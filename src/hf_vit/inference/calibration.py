"""Record the inputs of dense layers on calibration images, and smooth channels."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_vit.conversion.targets.graphs.fitting import Inputs
from hf_vit.inference.freezing import add_base
from hf_vit.inference.layers import Dense, Merged, derive

# Layers of blocks that read what another of their module reads, with which they are merged: they need no record.
_MERGED_WITH_ANOTHER = ("k_proj", "v_proj", "up_proj")
_BATCH = 8  # images computed at a time


@contextmanager
def record_inputs(model: nn.Module, images: torch.Tensor) -> Generator[None]:
    """Run images through a model, and put the attribute `inputs` on its dense layers until the context ends."""
    linears: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and (".map." in name or not name.endswith(_MERGED_WITH_ANOTHER))
    }

    def record(linear: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        linear.inputs = Inputs.record(arguments[0], getattr(linear, "inputs", None))

    modes = {module: module.training for module in model.modules()}
    hooks = [linear.register_forward_pre_hook(record) for linear in linears.values()]
    try:
        model.eval()
        with torch.no_grad():
            for batch in images.split(_BATCH):
                model(batch)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
        for linear in linears.values():
            vars(linear).pop("inputs", None)


def smooth(norm: Any, dense: Any) -> Any:
    """Divide the channels that a norm returns, and multiply the columns of the dense layer that reads them.

    Returns:
        The norm with its new weights; the layer is changed in place.
    """
    if type(dense) is not Dense or dense.inputs is None or getattr(norm, "weight", None) is None:
        return norm
    factors = dense.inputs.choose_factors(dense.merged_weight)
    dense.merged_weight = dense.merged_weight * factors
    dense.inputs = dense.inputs.divide(factors)
    new_norm = derive(add_base(type(norm), base=Merged), norm)
    vars(new_norm)["_parameters"] = {
        name: None if value is None else nn.Parameter(value.detach() / factors.to(value.dtype), requires_grad=False)
        for name, value in norm._parameters.items()
    }
    return new_norm
