"""Training as the papers did it: recipes as data, `HfViTTrainer`, `finetune`, the main job, and `pretrain`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_vit.training.distillation import DistillationOptions, DistillationTrainer
    from hf_vit.training.finetuning import FinetuneOptions, FinetuneResult, finetune
    from hf_vit.training.pretraining import PretrainResult, pretrain
    from hf_vit.training.recipes import RECIPES, Recipe, find_recipe
    from hf_vit.training.replaying import Replay, replay
    from hf_vit.training.trainer import HfViTTrainer

# Name -> module: transformers' Trainer alone takes seconds to import.
_LAZY = {
    "RECIPES": "recipes",
    "DistillationOptions": "distillation",
    "DistillationTrainer": "distillation",
    "FinetuneOptions": "finetuning",
    "FinetuneResult": "finetuning",
    "HfViTTrainer": "trainer",
    "PretrainResult": "pretraining",
    "Recipe": "recipes",
    "Replay": "replaying",
    "find_recipe": "recipes",
    "finetune": "finetuning",
    "pretrain": "pretraining",
    "replay": "replaying",
}

__all__ = [
    "RECIPES",
    "DistillationOptions",
    "DistillationTrainer",
    "FinetuneOptions",
    "FinetuneResult",
    "HfViTTrainer",
    "PretrainResult",
    "Recipe",
    "Replay",
    "find_recipe",
    "finetune",
    "pretrain",
    "replay",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"hf_vit.training.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'hf_vit.training' has no attribute '{name}'")
