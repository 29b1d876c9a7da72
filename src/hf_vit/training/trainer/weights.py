"""Weights beside those that learn: their moving average, and low-rank updates (LoRA) of frozen ones."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit.training.trainer.distributed import local_parts

_HEADS = ("classifier", "distillation_classifier")
# Section 7.1 of arXiv 2106.09685: updates of queries and values pay most.
_TARGETS = ["q_proj", "v_proj"]
_NAME = "default"


@final
class WeightAverage:
    """Exponential moving average of a model's weights and running statistics, starting from its current ones.

    average <- decay * average + (1 - decay) * weights after every step, in at least float32. Of sharded weights every
    process averages its own part. About 1 / (1 - decay) steps count: the 0.9999 of arXiv 2010.11929, section 4.1, suits
    long trainings.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self._averages = [wide(value) for value in local_parts(model)]
        self._learnt: list[torch.Tensor] | None = None  # the model's own, while it has the average's

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step."""
        for average, learnt in zip(self._averages, local_parts(self.model), strict=True):
            if average.is_floating_point():
                average.lerp_(learnt.to(average.dtype), 1 - self.decay)
            else:
                average.copy_(learnt)

    def remainder(self) -> dict[str, torch.Tensor]:
        """Return the averages that the model's dtype is too narrow for: a checkpoint keeps them beside the model."""
        pairs = zip(self._averages, local_parts(self.model), strict=True)
        return {f"average.{i}": average for i, (average, own) in enumerate(pairs) if average.dtype != own.dtype}

    def take(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from such averages, which are taken out of the state; without them, from the model's weights."""
        for i, average in enumerate(self._averages):
            average.copy_(state.pop(f"average.{i}", average))

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Give the model the average's weights, then its own back, to the bit; nesting changes nothing."""
        if self._learnt is not None:
            yield
            return
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Give the model the average's weights; where it has them, its own."""
        parts = local_parts(self.model)
        if self._learnt is None:
            values, self._learnt = self._averages, [part.clone() for part in parts]
        else:
            values, self._learnt = self._learnt, None
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)


def wide(value: torch.Tensor) -> torch.Tensor:
    """Return a copy to average in: floating-point numbers in at least float32."""
    kind = torch.promote_types(value.dtype, torch.float32) if value.is_floating_point() else value.dtype
    return value.to(kind, copy=True)


@final
class LoraAdapter:
    """Low-rank updates of the attention's query and value projections, put into a model in place by peft.

    Updates, which are scaled by alpha / rank, and heads learn; everything else is frozen.
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
                f"{type(model).__name__} has no query and value projections ({', '.join(_TARGETS)}) for "
                "LoRA; choose --tune all or head"
            ) from error
        self._scale = alpha / rank
        _train_heads(model)

    @torch.no_grad()
    def merged_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state dict of the model without adapter, with the updates added to its weights."""
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


def train_head_only(model: nn.Module) -> None:
    """Freeze everything but the classification heads."""
    model.requires_grad_(False)
    _train_heads(model)


def _train_heads(model: nn.Module) -> None:
    heads = [head for name in _HEADS if isinstance(head := getattr(model, name, None), nn.Module)]
    if not heads:
        raise UserError(f"{type(model).__name__} has no classification head to train; choose --tune all")
    for head in heads:
        head.requires_grad_(True)
