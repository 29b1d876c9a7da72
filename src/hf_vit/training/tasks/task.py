"""What a training learns: the one abstract `Task`, which the driver (`hf_vit.training.run`) carries out.

A new task is one class here and one line of the table in `registry`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import nn
from transformers import AutoImageProcessor, PreTrainedModel, TrainerCallback, TrainerState, ViTImageProcessor
from transformers.integrations.integration_utils import TensorBoardCallback

from hf_vit.data import ImageData, eval_transform, train_transform, transform_split
from hf_vit.data.annotations import Target
from hf_vit.display import Displayed
from hf_vit.errors import UserError
from hf_vit.loading.start import ModelSource
from hf_vit.results.facts import Facts, Record
from hf_vit.training.plan import Run, choose_attention, log_folder, training_arguments
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.trainer.callbacks import Clock, StopOnTermination, callbacks_of
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.optimizers import optimizer_of


@dataclass(frozen=True, repr=False)
class TrainingResult(Displayed):
    """A finished training.

    Attributes:
        folder: holds model, processor, facts.json, learning_curve.png, README.md and what the task draws.
        model: what was saved, in evaluation mode.
        processor: its image processor.
        steps: optimizer steps done.
        seconds: spent training, evaluations and checkpoints included.
        history: the Trainer's log, one entry a logging or evaluation; empty where the run was found finished.
    """

    folder: Path
    model: PreTrainedModel
    processor: ViTImageProcessor
    recipe: Recipe
    steps: int
    seconds: float
    history: list[dict[str, Any]]

    def overview(self) -> dict[str, object]:
        return {
            "folder": self.folder,
            "model": type(self.model).__name__,
            "recipe": self.recipe.name,
            "steps": f"{self.steps:,}",
            "time": f"{self.seconds:,.1f} s",
        }


Result = TypeVar("Result", bound=TrainingResult)


class Task(ABC, Generic[Result]):
    """Abstract: what is learnt, from which images, by which module, and what is left at the end."""

    # The Auto class that loads what is saved.
    auto_class: Any
    # Whether the images of a batch do not need each other, so that it can be put together from micro-batches.
    accumulates: bool = True
    # Whether images may have several classes each.
    multi_label: bool = False
    # What the images bear, see `ImageData`; and whether they can be read while training.
    target: Target = "label"
    streams: bool = True
    # Which trainer, and what of its arguments is not as classifiers have it.
    trainer_class: type[HfViTTrainer] = HfViTTrainer
    arguments: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that decides what is learnt beside recipe and model: for the facts, and for resuming."""

    @abstractmethod
    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        """The module that is trained, and its image processor.

        Raises:
            UserError: the task cannot be had with this model, data or recipe.
        """

    @abstractmethod
    def collator(self, run: Run) -> Any:
        """What makes a batch of examples."""

    @abstractmethod
    def conclude(self, run: Run, model: PreTrainedModel, state: TrainerState, seconds: float) -> Result:
        """The result, of the finished model (in evaluation mode)."""

    @abstractmethod
    def values(self, run: Run, result: Result) -> dict[str, Any]:
        """What facts.json says of it, beside `run_values`."""

    @abstractmethod
    def write(self, run: Run, result: Result, folder: Path) -> None:
        """Write pictures and further facts into the finished folder."""

    @abstractmethod
    def recall(self, folder: Path, recipe: Recipe) -> Result:
        """The result of a run that was found finished, from what its folder holds.

        Raises:
            UserError: it holds the model of another task, or of another command.
        """

    def recalled(self, folder: Path, recipe: Recipe, mark: str) -> tuple[dict[str, Any], dict[str, Any], list[Record]]:
        """The fields of `TrainingResult`; the values of its record, which have a `mark`; and the records after it."""
        records = Facts.load(folder).records
        last = max((index for index, record in enumerate(records) if record.kind == "training"), default=0)
        values = cast(dict[str, Any], records[last].values) if records else {}
        if mark not in values or values.get("task") != self.settings().get("task"):
            raise UserError(f"the output folder {folder} holds a model of another kind; choose a new or empty one")
        shared = {
            "folder": folder,
            "model": self.auto_class.from_pretrained(folder).eval(),
            "processor": AutoImageProcessor.from_pretrained(folder),
            "recipe": recipe.override(learning_rate=values["recipe"]["learning_rate"]),  # a sweep may have chosen it
            "steps": values["steps"],
            "seconds": records[last].seconds or 0.0,
            "history": [],
        }
        return shared, values, records[last + 1 :]

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that asks for what the task does not do.

        Raises:
            UserError: it does.
        """
        return

    def learners(self, module: Any) -> Sequence[PreTrainedModel]:
        """The vision transformers in the module that is trained."""
        return [module]

    def released(self, module: Any) -> PreTrainedModel:
        """What is saved of the module that was trained."""
        return module

    def transforms(self, run: Run) -> tuple[Any, Any]:
        """How images are seen in training, and how in validation."""
        return train_transform(run.processor, run.recipe.augmentation, run.options.seed), eval_transform(run.processor)

    def training_images(self, run: Run, transform: Any) -> Any:
        """The data set that is trained on."""
        return transform_split(run.data, "train", transform, seed=run.options.seed)

    def learnt_from(self, run: Run) -> list[str]:
        """SHA-256 of every image that was trained on, as far as they are known."""
        return [image.digest for image in run.data.seen.get("train", ())]

    def kept_bytes(self) -> int:
        """What a checkpoint holds beside weights and optimizer of the module that is trained."""
        return 0

    def describe(self, run: Run) -> str:
        """What is about to be trained, in one line."""
        return run.describe()

    def remark(self, result: Result) -> str | None:
        """What the user must know of a finished training beside its numbers, in one line."""
        return None

    def callbacks(self, run: Run) -> list[TrainerCallback]:
        """Beside those of every training."""
        return []

    def trainer_values(self, run: Run) -> dict[str, Any]:
        """Keywords of the trainer; an adapter is put into the model here."""
        return {}

    def build_trainer(self, run: Run) -> HfViTTrainer:
        """The trainer of a run, ready to go."""
        for model in self.learners(run.model):
            choose_attention(run, model)
        training, judging = self.transforms(run)
        trainer = self.trainer_class(
            model=run.model,
            args=training_arguments(run, **self.arguments),
            train_dataset=self.training_images(run, training),
            eval_dataset=transform_split(run.data, "validation", judging),
            data_collator=self.collator(run),
            processing_class=run.processor,
            optimizer_cls_and_kwargs=optimizer_of(run.recipe),
            callbacks=[Clock(), StopOnTermination(), *self.callbacks(run)],
            **self.trainer_values(run),
        )
        for callback in callbacks_of(trainer, TensorBoardCallback):
            callback.logging_dir = callback.logging_dir or str(log_folder(run.output))  # or as its environment says
        return trainer
