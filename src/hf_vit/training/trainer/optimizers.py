"""A recipe's optimizer: torch's, or one of timm's."""

from typing import Any

import torch

from hf_vit.errors import UserError
from hf_vit.training.recipes.definition import Recipe


def optimizer_of(recipe: Recipe) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and settings of a recipe's optimizer; weight decay comes with the parameter groups.

    Raises:
        UserError: it is one of timm's, and timm is not installed.
    """
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
    """timm's optimizers.

    Raises:
        UserError: timm is not installed.
    """
    try:
        from timm import optim
    except ImportError as error:
        raise UserError(
            f"the optimizer {optimizer} is timm's, which is not installed: pip install 'hf-vit[timm]'; or choose "
            "--optimizer adamw"
        ) from error
    return optim
