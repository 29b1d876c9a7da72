"""Layer-wise learning-rate decay (BEiT, arXiv 2106.08254, appendix): the lower a layer, the smaller its rate.

Not timm's `param_groups_layer_decay`: it gives scales that only timm's schedules read, and wants timm's model methods.
"""

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from hf_vit.errors import UserError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EMBEDDINGS = re.compile(r"(?:^|\.)embeddings\.")


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Parameter name -> layer: 0 the embeddings (a hybrid's stem too), 1..L the blocks, L + 1 norm, pooling and head.

    A block that several layers share has the number of the highest. Of a model for masks or boxes the layers are those
    of its backbone, and everything else is head.

    Raises:
        UserError: the model has no such layers.
    """
    names = [name for name, _ in model.named_parameters()]
    backbone: Any = getattr(model.config, "backbone_config", None)
    inside = [name for name in names if backbone is None or "backbone." in name]
    found = {int(match[1]) for name in inside if (match := _LAYER.search(name))}
    depth: int | None = getattr(backbone or model.config, "num_hidden_layers", None)
    if not found or depth is None:
        raise UserError(
            f"layer-wise learning-rate decay needs a model of numbered layers, and {type(model).__name__} is none; "
            "leave --layer-decay out"
        )
    groups = max(found) + 1
    highest = {index * groups // depth: index + 1 for index in range(depth)}
    numbers: dict[str, int] = {}
    for name in inside:
        block = _LAYER.search(name)
        numbers[name] = highest[int(block[1])] if block else 0 if _EMBEDDINGS.search(name) else depth + 1
    return dict.fromkeys(names, depth + 1) | numbers


def parameter_groups(
    model: nn.Module, decaying: Collection[str], *, learning_rate: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Groups for an optimizer: the rate of layer l is learning_rate * layer_decay ** (L + 1 - l), highest layer first.

    Args:
        model: see `layer_numbers`.
        decaying: names of the parameters with weight decay.
        learning_rate: of the head.
        weight_decay: of `decaying`.
        layer_decay: factor from a layer to the one below.

    Raises:
        UserError: see `layer_numbers`.
    """
    numbers = layer_numbers(model)
    top = max(numbers.values())
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        key = top - numbers[name], name not in decaying
        settings = {"lr": learning_rate * layer_decay ** key[0], "weight_decay": 0.0 if key[1] else weight_decay}
        groups.setdefault(key, {"params": [], **settings})["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]
