from .api import FinetuneOptions, finetune, pretrain
from .recipes.registry import RECIPES, Recipe, find_recipe
from .tasks.distillation import DistillationOptions, DistillationTrainer
from .tasks.self_training import SelfTrainingOptions
from .tasks.task import FinetuneResult, PretrainResult
from .trainer.hf_vit_trainer import HfViTTrainer

__all__ = [
    "RECIPES",
    "DistillationOptions",
    "DistillationTrainer",
    "FinetuneOptions",
    "FinetuneResult",
    "HfViTTrainer",
    "PretrainResult",
    "Recipe",
    "SelfTrainingOptions",
    "find_recipe",
    "finetune",
    "pretrain",
]
