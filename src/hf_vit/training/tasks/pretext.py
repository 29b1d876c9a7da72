"""Learning without labels (a pretext task): what both ways have in common, and what they leave."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, TrainerState

from hf_vit.data import eval_transform, transform_split
from hf_vit.data.batches import TransformedImages
from hf_vit.errors import UserError
from hf_vit.training.plan import Run
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.tasks.task import Task, TrainingResult


@dataclass(frozen=True, repr=False)
class PretrainResult(TrainingResult):
    """A finished pre-training: the model after the last step, of a contrastive training the encoder alone.

    Attributes:
        picture: the file in `folder` that shows what was learnt.
        validation_loss: of the task, on the validation split, after the last step; None without an evaluation.
    """

    picture: Path
    validation_loss: float | None

    def overview(self) -> dict[str, object]:
        loss = "not evaluated" if self.validation_loss is None else f"{self.validation_loss:.4f}"
        return {**super().overview(), "validation loss": loss}


class PretextTask(Task[PretrainResult]):
    """Abstract: one way of learning without labels.

    Args:
        name: of the objective.
        fields: of the model's configuration that the user chose; they replace those of the source.
    """

    picture: str
    # The last weights are kept: a lower loss of the pretext is no better model.
    arguments: ClassVar[dict[str, Any]] = {
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
        "greater_is_better": None,
        "prediction_loss_only": True,
    }

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self.name, self.fields = name, dict(fields)

    @abstractmethod
    def draw(self, run: Run, model: PreTrainedModel, path: Path) -> None:
        """Draw what was learnt, on validation images."""

    def check(self, recipe: Recipe) -> None:
        asked = {
            "loss bce": recipe.loss == "bce",
            "tune": recipe.tune != "all",
            "class_weights": recipe.class_weights,
            "balanced_sampling": recipe.balanced_sampling,
            "repeated_augmentation": recipe.repeated_augmentation > 1,
            "new_head": recipe.new_head,
            "architecture": bool(recipe.architecture),
            "layer_decay": recipe.layer_decay is not None,
            "average_decay": recipe.average_decay is not None,
            "sam_rho": recipe.sam_rho > 0,
            "label_smoothing": recipe.label_smoothing > 0,
            "head_bias": recipe.head_bias is not None,
            "mixup_alpha": recipe.augmentation.mixup_alpha > 0,
            "cutmix_alpha": recipe.augmentation.cutmix_alpha > 0,
        }
        if wrong := [name for name, is_asked in asked.items() if is_asked]:
            raise UserError(
                f"{', '.join(wrong)} of the recipe {recipe.name} is for classifiers (hf-vit finetune); leave that "
                "out, or pre-train with another recipe"
            )

    def conclude(self, run: Run, model: PreTrainedModel, state: TrainerState, seconds: float) -> PretrainResult:
        losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
        return PretrainResult(
            folder=run.output,
            model=model,
            processor=run.processor,
            recipe=run.recipe,
            picture=run.output / self.picture,
            validation_loss=losses[-1] if losses else None,
            steps=state.global_step,
            seconds=seconds,
            history=state.log_history,
        )

    def values(self, run: Run, result: PretrainResult) -> dict[str, Any]:
        return {"objective": self.settings(), "validation_loss": result.validation_loss}

    def write(self, run: Run, result: PretrainResult, folder: Path) -> None:
        self.draw(run, result.model, folder / self.picture)

    def recall(self, folder: Path, recipe: Recipe) -> PretrainResult:
        shared, values, _ = self.recalled(folder, recipe, "objective")
        return PretrainResult(**shared, picture=folder / self.picture, validation_loss=values["validation_loss"])


def validation_images(run: Run, count: int) -> list[tuple[torch.Tensor, int]]:
    """Validation images [C, H, W] with their labels, as the model sees them: evenly spread, of a stream the first."""
    split = transform_split(run.data, "validation", eval_transform(run.processor), cache_bytes=0)
    if isinstance(split, TransformedImages):
        examples = (split[index] for index in range(0, len(split), max(1, len(split) // count)))
    else:
        examples = iter(split)
    return [(example["pixel_values"], int(example["label"])) for example in islice(examples, count)]
