"""Training few weights: the head alone, or low-rank updates beside the frozen ones (LoRA, arXiv 2106.09685)."""

from collections.abc import Mapping
from typing import final

import torch
from torch import nn

from hf_vit.errors import UserError

HEADS = ("classifier", "distillation_classifier")
# Where section 7.1 of the paper found updates to pay most: queries and values.
_TARGETS = ["q_proj", "v_proj"]
_NAME = "default"


def train_head_only(model: nn.Module) -> None:
    """Freeze everything but the classification heads."""
    model.requires_grad_(False)
    _train_heads(model)


@final
class LoraAdapter:
    """Low-rank updates of the attention's query and value projections, put into a model in place by peft.

    Updates and heads learn, all else is frozen. `merged_state` is the model without adapter that is saved; `remove`
    leaves such a model behind.

    Args:
        model: an image classifier.
        rank: of the updates.
        alpha: the updates are scaled by alpha / rank.

    Raises:
        UserError: peft is not installed, or the model has no such projections.
    """

    def __init__(self, model: nn.Module, rank: int = 8, alpha: float = 16.0) -> None:
        try:
            from peft import LoraConfig, LoraModel
        except ImportError as error:
            raise UserError("LoRA needs peft, which is not installed: pip install 'hf-vit[peft]'") from error
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=_TARGETS)  # pyright: ignore[reportArgumentType]
        try:
            self._tuner = LoraModel(model, config, _NAME)
        except ValueError as error:
            raise UserError(
                f"{type(model).__name__} has no query and value projections ({', '.join(_TARGETS)}) to update; tune "
                "all of it, or its head"
            ) from error
        self._scale = alpha / rank
        _train_heads(model)

    @torch.no_grad()
    def merged_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """From the state dict of the model that of one without adapter, with the updates added to its weights."""
        merged: dict[str, torch.Tensor] = {}
        for name, value in state.items():
            if ".lora_" in name:
                continue
            path = name.removesuffix(".base_layer.weight")
            if path != name:
                down, up = (state[f"{path}.lora_{factor}.{_NAME}.weight"] for factor in "AB")
                value = value + ((up @ down) * self._scale).to(value.dtype)
            merged[name.replace(".base_layer.", ".")] = value
        return merged

    def remove(self, merge: bool) -> None:
        """Take the adapter out of the model; with `merge` its updates stay."""
        if merge:
            self._tuner.merge_and_unload()
        else:
            self._tuner.unload()


def _train_heads(model: nn.Module) -> None:
    heads = [head for name in HEADS if isinstance(head := getattr(model, name, None), nn.Module)]
    if not heads:
        raise UserError(f"{type(model).__name__} has no classification head to train; tune all of it")
    for head in heads:
        head.requires_grad_(True)
