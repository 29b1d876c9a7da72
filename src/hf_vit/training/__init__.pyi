from .finetuning import FinetuneOptions, FinetuneResult, finetune
from .pretraining import PretrainResult, pretrain
from .recipes.registry import RECIPES, Recipe, find_recipe
from .tasks.distillation import DistillationOptions, DistillationTrainer
from .trainer.hf_vit_trainer import HfViTTrainer
from .trainer.replaying import Replay, replay

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
