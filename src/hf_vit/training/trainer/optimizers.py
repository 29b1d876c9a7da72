"""A recipe's optimizer, torch's or one of timm's, and learning rates that fall from layer to layer."""

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit_settings import Recipe

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EMBEDDINGS = re.compile(r"(?:^|\.)embeddings\.")


def optimizer_of(recipe: Recipe) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return class and settings of a recipe's optimizer; weight decay comes with the parameter groups."""
    betas = (recipe.beta1, recipe.beta2)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD, {"lr": recipe.learning_rate, "momentum": recipe.momentum}
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": recipe.learning_rate, "betas": betas, "eps": 1e-8, "fused": True}
    timm_optim = import_timm_optim(recipe.optimizer)
    if recipe.optimizer == "lion":
        return timm_optim.Lion, {"lr": recipe.learning_rate, "betas": betas}
    if recipe.optimizer == "muon":
        # The coefficients of the source; timm's default are others.
        muon = {"momentum": recipe.momentum, "nesterov": True, "ns_coefficients": "original"}
        return timm_optim.Muon, {"lr": recipe.learning_rate, "betas": betas, "adjust_lr_fn": "match_rms_adamw", **muon}
    # Its own clipping is off: the recipe's `clip` is the only one.
    return timm_optim.Lamb, {"lr": recipe.learning_rate, "betas": betas, "max_grad_norm": None}


def import_timm_optim(optimizer: str) -> Any:
    """Return timm's optimizers, or refuse where timm is not installed."""
    try:
        from timm import optim
    except ImportError as error:
        raise UserError(
            f"the optimizer {optimizer} needs timm: pip install 'hf-vit[timm]'; or choose --optimizer adamw"
        ) from error
    return optim


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return parameter name -> layer: 0 the embeddings (a hybrid's stem too), 1..L the blocks, L + 1 norm and head.

    A block that several layers share has the number of the highest. Of a model for masks or boxes the layers are those
    of its backbone, and everything else is head. A model without numbered layers is refused.
    """
    names = [name for name, _ in model.named_parameters()]
    backbone: Any = getattr(model.config, "backbone_config", None)
    inside = [name for name in names if backbone is None or "backbone." in name]
    indices = {int(match[1]) for name in inside if (match := _LAYER.search(name))}
    depth: int | None = getattr(backbone or model.config, "num_hidden_layers", None)
    if not indices or depth is None:
        raise UserError(f"--layer-decay does not support {type(model).__name__}; leave it out")
    groups = max(indices) + 1
    highest = {index * groups // depth: index + 1 for index in range(depth)}
    numbers: dict[str, int] = {}
    for name in inside:
        block = _LAYER.search(name)
        numbers[name] = highest[int(block[1])] if block else 0 if _EMBEDDINGS.search(name) else depth + 1
    return dict.fromkeys(names, depth + 1) | numbers


def parameter_groups(
    model: nn.Module, decaying: Collection[str], *, learning_rate: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Return an optimizer's groups: the rate of layer l is learning_rate * layer_decay ** (L + 1 - l), highest first.

    BEiT, arXiv 2106.08254, appendix. Not timm's `param_groups_layer_decay`, whose scales only timm's schedules read.
    `decaying` names the parameters with weight decay.
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
