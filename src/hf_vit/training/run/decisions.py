"""What is decided of a run before its first step, and never again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import ViTImageProcessor

from hf_vit.data import ImageData
from hf_vit.environment import cpu_capabilities, pick_device
from hf_vit.errors import UserError
from hf_vit.loading.start import ModelSource
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig, as_pair
from hf_vit.training.processes import world_size
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.refusals import refusal_of
from hf_vit.training.run.checkpoints import work_folder
from hf_vit.training.run.options import FinetuneOptions

_LARGEST_MICRO_BATCH = 128
_BF16_FROM_WIDTH = 128


@dataclass(frozen=True)
class Run:
    """Everything decided before the first step.

    Attributes:
        recipe, options, command: as they were asked for.
        output: the folder that will hold the finished model.
        source, data: what is trained, and on what.
        model: the module that is trained.
        processor: its image processor.
        task: everything that decides what is learnt beside recipe and model, see `Task.settings`.
        steps: optimizer steps in all.
        micro_batch_size: images a forward pass of one process.
        bf16: whether it computes in bfloat16.
        checkpoint: where it goes on from; None from the beginning.
        trials: the learning rates of a sweep, whose best this run is.
    """

    recipe: Recipe
    options: FinetuneOptions
    command: str | Sequence[str] | None
    output: Path
    source: ModelSource
    data: ImageData
    model: nn.Module
    processor: ViTImageProcessor
    task: Mapping[str, Any]
    steps: int
    micro_batch_size: int
    bf16: bool
    checkpoint: Path | None
    trials: Sequence[Mapping[str, Any]] = field(default=())

    @property
    def work(self) -> Path:
        """Where checkpoints are."""
        return work_folder(self.output)

    @property
    def config(self) -> HfViTBaseConfig:
        """The configuration of the vision model, which is the backbone of a model for masks or boxes."""
        return vision_config(self.model)

    def describe(self) -> str:
        """What is about to be trained, in one line."""
        height, width = as_pair(self.config.image_size)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        images = self.data.num_examples("train")
        teacher = f", taught by {self.task['teacher']}" if "teacher" in self.task else ""
        return (
            f"{self.source.name} ({parameters:,} parameters, {height}x{width} px{teacher}) on {self.data.name}: "
            f"{'a stream' if images is None else f'{images:,} images'} of {len(self.data.label_names)} classes, "
            f"recipe {self.recipe.name}, {self.steps:,} steps of {self.recipe.batch_size} images in "
            f"{'bf16' if self.bf16 else 'fp32'}"
        )


def vision_config(model: nn.Module) -> HfViTBaseConfig:
    """The configuration of a model, or of the backbone in it."""
    return cast(HfViTBaseConfig, getattr(model.config, "backbone_config", None) or model.config)


def micro_batch_size(batch_size: int, asked: int | None, accumulates: bool = True) -> int:
    """Images a forward pass of one process.

    Args:
        batch_size: images a step.
        asked: what the user wants.
        accumulates: the batch may be put together from parts; else every process has its share at once.

    Raises:
        UserError: the processes, or the asked number, do not divide the batch, or it cannot be divided.
    """
    share, rest = divmod(batch_size, world_size())
    if rest:
        raise refusal_of("batch", processes=world_size(), batch_size=batch_size)
    if not accumulates:
        if asked not in (None, share):
            raise refusal_of("contrastive parts", share=share, parts=asked)
        return share
    if asked is None:
        return next(size for size in range(min(share, _LARGEST_MICRO_BATCH), 0, -1) if share % size == 0)
    if share % asked:
        of_each = "" if world_size() == 1 else f" of which each of {world_size()} processes has {share}"
        raise UserError(
            f"micro batch size {asked} does not divide the batch size {batch_size}{of_each}; choose a divisor of it"
        )
    return asked


def total_steps(recipe: Recipe, images: int | None) -> int:
    """Optimizer steps of a recipe.

    Raises:
        UserError: epochs of a stream whose length is unknown.
    """
    if recipe.steps is not None:
        return recipe.steps
    assert recipe.epochs is not None
    if images is None:
        raise UserError("the length of this stream is unknown, so epochs cannot be counted; give --steps instead")
    return max(1, math.ceil(recipe.epochs * math.ceil(images / recipe.batch_size)))


def use_bf16(options: FinetuneOptions, config: HfViTBaseConfig) -> bool:
    """Whether to compute in bfloat16.

    Raises:
        UserError: bf16 was asked for and the GPU has none.
    """
    device = pick_device(options.device)
    if options.precision == "fp32":
        return False
    if device.type == "cuda":
        if options.precision == "bf16" and not torch.cuda.is_bf16_supported():
            raise UserError("this GPU cannot compute in bf16; use --precision fp32")
        return torch.cuda.is_bf16_supported()
    if options.precision == "bf16":
        return True
    # CPUs without matrix units are slower in bf16, and narrow models lose more by casts than products gain.
    return bool(cpu_capabilities().get("amx_bf16")) and config.hidden_size >= _BF16_FROM_WIDTH
