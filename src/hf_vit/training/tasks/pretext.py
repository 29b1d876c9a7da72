"""Self-supervised learning (a pretext task): the base of both tasks, and their result."""

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
from hf_vit.training.tasks.task import Task, TrainingResult, active_settings
from hf_vit_settings import Recipe


@dataclass(frozen=True, repr=False)
class PretrainResult(TrainingResult):
    """A finished pre-training: the model after the last step, of a contrastive training the encoder alone.

    Attributes:
        picture: a file in `folder` with predictions or embeddings of validation images.
        validation_loss: on the validation split, after the last step; None without an evaluation.
    """

    picture: Path
    validation_loss: float | None

    def overview(self) -> dict[str, object]:
        loss = "not evaluated" if self.validation_loss is None else f"{self.validation_loss:.4f}"
        return {**super().overview(), "validation loss": loss}


class PretextTask(Task[PretrainResult]):
    """Abstract: an objective without labels; `fields` of the model's configuration replace those of the source."""

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
        """Draw predictions or embeddings of validation images."""

    def check(self, recipe: Recipe) -> None:
        if active := active_settings(recipe):
            wrong = [f"loss {recipe.loss}" if name == "loss" else name for name in active]
            raise UserError(
                f"{', '.join(wrong)} of the recipe {recipe.name} works in hf-vit finetune only; leave it "
                "out, or choose another recipe"
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
    """Return validation images [C, H, W] as the model sees them, with labels: evenly spread, of a stream the first."""
    split = transform_split(run.data, "validation", eval_transform(run.processor), cache_bytes=0)
    if isinstance(split, TransformedImages):
        examples = (split[index] for index in range(0, len(split), max(1, len(split) // count)))
    else:
        examples = iter(split)
    return [(example["pixel_values"], int(example["label"])) for example in islice(examples, count)]
