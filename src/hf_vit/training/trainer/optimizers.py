"""The optimizer of a recipe, from torch or timm, and learning rates that decay from layer to layer."""

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone
from hf_vit_settings import Recipe

# Not the layers of a stage, as in transformers' Hiera and ConvNeXt, which every stage numbers from 0.
_LAYER = re.compile(r"(?:^|(?<!\.\d)\.)layers\.(\d+)\.")
_EMBEDDINGS = re.compile(r"(?:^|\.)embeddings\.")


def choose_optimizer(recipe: Recipe) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and the settings of a recipe's optimizer; weight decay is set by the parameter groups."""
    betas = (recipe.beta1, recipe.beta2)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD, {"lr": recipe.learning_rate, "momentum": recipe.momentum}
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": recipe.learning_rate, "betas": betas, "eps": 1e-8, "fused": True}
    timm_optim = import_timm_optim(recipe.optimizer)
    if recipe.optimizer == "lion":
        return timm_optim.Lion, {"lr": recipe.learning_rate, "betas": betas}
    if recipe.optimizer == "muon":
        # The paper's coefficients, which are not timm's default.
        muon = {"momentum": recipe.momentum, "nesterov": True, "ns_coefficients": "original"}
        return timm_optim.Muon, {"lr": recipe.learning_rate, "betas": betas, "adjust_lr_fn": "match_rms_adamw", **muon}
    # Only the recipe's `clip` clips gradients, not the optimizer itself.
    return timm_optim.Lamb, {"lr": recipe.learning_rate, "betas": betas, "max_grad_norm": None}


def import_timm_optim(optimizer: str) -> Any:
    """Return the module of timm's optimizers, or raise a `UserError` if timm is not installed."""
    try:
        from timm import optim
    except ImportError as error:
        raise UserError(
            f"the optimizer {optimizer} needs timm; install it with pip install 'hf-vit[timm]', or use "
            "--optimizer adamw"
        ) from error
    return optim


def number_layers(model: nn.Module, option: str = "--layer-decay") -> dict[str, int]:
    """Map every parameter name to its layer: 0 the embeddings and a hybrid's stem, 1..L the blocks, L + 1 the rest.

    A block that several layers share gets the highest of their numbers. In a model for masks or boxes the layers are
    those of the backbone, and everything else is L + 1. Raises a `UserError` for a model without numbered layers, which
    `option` needs.
    """
    names = [name for name, _ in model.named_parameters()]
    backbone: Any = getattr(model.config, "backbone_config", None)
    paths = [path and f"{path}." for path, module in model.named_modules() if isinstance(module, HfBaseBackbone)]
    backbone_names = [name for name in names if name.startswith(tuple(paths or [""]))]
    matches = {name: _LAYER.search(name) for name in backbone_names}
    blocks = [int(match[1]) for match in matches.values() if match]
    depth: int | None = getattr(backbone or model.config, "num_hidden_layers", None)
    if not blocks or depth is None:
        raise UserError(
            f"{option} does not work with {type(model).__name__}, which has no sequence of layers; leave {option} out"
        )
    num_blocks = max(blocks) + 1  # fewer than layers if several layers share one
    highest: dict[int, int] = {}  # block -> number of its last layer
    for layer in range(depth):
        highest[layer * num_blocks // depth] = layer + 1
    numbers = dict.fromkeys(names, depth + 1)
    for name, match in matches.items():
        if match:
            numbers[name] = highest[int(match[1])]
        elif _EMBEDDINGS.search(name):
            numbers[name] = 0
    return numbers


def make_parameter_groups(
    model: nn.Module, decaying: Collection[str], *, learning_rate: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Divide the parameters into an optimizer's groups, by layer and weight decay, the highest rate first.

    The rate of layer l is learning_rate * layer_decay ** (L + 1 - l) (BEiT, arXiv 2106.08254, appendix). `decaying`
    names the parameters with weight decay. timm's `param_groups_layer_decay` does not fit, because its scales take
    effect in timm's schedules only.
    """
    numbers = number_layers(model)
    last_layer = max(numbers.values())
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        distance = last_layer - numbers[name]
        is_exempt = name not in decaying
        settings = {"lr": learning_rate * layer_decay**distance, "weight_decay": 0.0 if is_exempt else weight_decay}
        groups.setdefault((distance, is_exempt), {"params": [], **settings})["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]
