"""The moving average of weights (EMA), and low-rank updates of frozen weights (LoRA)."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone
from hf_vit.training.trainer.distributed import get_local_parts
from hf_vit.training.trainer.optimizers import number_layers

_HEADS = ("classifier", "distillation_classifier")
# Updating queries and values works best (arXiv 2106.09685, section 7.1).
_TARGETS = ["q_proj", "v_proj"]
_NAME = "default"


@final
class WeightAverage:
    """Exponential moving average (EMA) of a model's weights and running statistics, starting from its current ones.

    average <- decay * average + (1 - decay) * weights after every step, in at least float32. Every process averages its
    part of sharded weights. The average covers about 1 / (1 - decay) steps, so the 0.9999 of arXiv 2010.11929, section
    4.1, is for long trainings.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self._averages = [widen(value) for value in get_local_parts(model)]
        self._training_weights: list[torch.Tensor] | None = None  # while the model has the averaged weights

    @torch.no_grad()
    def update(self) -> None:
        """Add the model's weights after a step to the averages; integers, such as counts of batches, are copied."""
        for average, weight in zip(self._averages, get_local_parts(self.model), strict=True):
            if average.is_floating_point():
                average.lerp_(weight.to(average.dtype), 1 - self.decay)
            else:
                average.copy_(weight)

    def remainder(self) -> dict[str, torch.Tensor]:
        """Return the averages with a wider dtype than the model's, for the checkpoint."""
        pairs = enumerate(zip(self._averages, get_local_parts(self.model), strict=True))
        return {f"average.{index}": average for index, (average, weight) in pairs if average.dtype != weight.dtype}

    def take(self, state: dict[str, torch.Tensor]) -> None:
        """Move the averages of `remainder` from a state dict into this object; missing ones stay as they are."""
        for index, average in enumerate(self._averages):
            average.copy_(state.pop(f"average.{index}", average))

    @contextmanager
    def use_averages(self) -> Generator[None]:
        """Put the averaged weights into the model for a block of code; blocks may be nested."""
        if self._training_weights is not None:
            yield
            return
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Put the averaged weights into the model, or restore its training weights exactly."""
        parts = get_local_parts(self.model)
        if self._training_weights is None:
            values = self._averages
            self._training_weights = [part.clone() for part in parts]
        else:
            values = self._training_weights
            self._training_weights = None
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)


def widen(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, with floating-point numbers in at least float32."""
    kind = torch.promote_types(value.dtype, torch.float32) if value.is_floating_point() else value.dtype
    return value.to(kind, copy=True)


@final
class LoraAdapter:
    """Low-rank updates of the query and value projections, which peft adds to a model in place.

    Only the updates, which are scaled by alpha / rank, and the heads are trained.
    """

    def __init__(self, model: nn.Module, rank: int = 8, alpha: float = 16.0) -> None:
        try:
            from peft import LoraConfig, LoraModel
        except ImportError as error:
            raise UserError("LoRA needs peft; install it with pip install 'hf-vit[peft]'") from error
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=_TARGETS)  # pyright: ignore[reportArgumentType]
        try:
            self._tuner = LoraModel(model, config, _NAME)
        except ValueError as error:
            raise UserError(
                f"{type(model).__name__} has no query and value projections ({', '.join(_TARGETS)}), which LoRA "
                "trains; use --tune all or --tune head"
            ) from error
        self._scale = alpha / rank
        _train_heads(model)

    @torch.no_grad()
    def make_merged_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state dict without the adapter, with the updates added to the weights."""
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
        """Remove the adapter from the model; with `merge` its updates are added to the weights."""
        if merge:
            self._tuner.merge_and_unload()
        else:
            self._tuner.unload()


def train_head_only(model: nn.Module) -> None:
    """Freeze the model under a classifier's heads, or in the backbone of a segmentation or detection model."""
    backbones = [module for module in model.modules() if isinstance(module, HfBaseBackbone)]
    for backbone in backbones:
        backbone.base_model.requires_grad_(False)  # the feature pyramid around it is new
    if not backbones:
        model.requires_grad_(False)
        _train_heads(model)


def train_last_blocks(model: nn.Module, blocks: int) -> None:
    """Freeze everything below the last `blocks` blocks (partial fine-tuning, arXiv 2111.06377, section 4.3).

    Raises a `UserError` for a model that has no numbered blocks, or no more than these.
    """
    numbers = number_layers(model, "--tune last-blocks")
    depth = max(numbers.values()) - 1
    if blocks >= depth:
        raise UserError(
            f"--tuned-blocks {blocks} leaves none of the {depth} blocks of {type(model).__name__} frozen; give a "
            "smaller number, or use --tune all"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(numbers[name] > depth - blocks)


def _train_heads(model: nn.Module) -> None:
    """Unfreeze the classification heads; raise UserError if there are none."""
    heads = [head for head in (getattr(model, name, None) for name in _HEADS) if isinstance(head, nn.Module)]
    if not heads:
        raise UserError(f"{type(model).__name__} has no classification head to train; use --tune all")
    for head in heads:
        head.requires_grad_(True)
