"""What a training learns: the abstract `Task`, which the driver (`hf_vit.training.run`) carries out, and its results.

A task learns from labels, masks or boxes and is measured on the test split (`MeasuredTask`), or from images alone
(`PretextTask`). A new one is a class and a line of `hf_vit.training.api.TASKS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoImageProcessor, PreTrainedModel, TrainerCallback, TrainerState, ViTImageProcessor
from transformers.integrations.integration_utils import TensorBoardCallback

from hf_vit.data import AugmentationConfig, ImageData, eval_transform, train_transform, transform_split
from hf_vit.data.annotations import Target
from hf_vit.data.batches import TransformedImages
from hf_vit.data.transforms import TrainTransform
from hf_vit.display import Displayed
from hf_vit.environment import pick_device
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.dense import DetectionResult, SegmentationResult
from hf_vit.evaluation.protocols.multi_label import MultiLabelResult
from hf_vit.evaluation.protocols.registry import PROTOCOLS, ProtocolRun
from hf_vit.evaluation.protocols.top1 import ClassificationResult
from hf_vit.evaluation.saving import save_protocol
from hf_vit.hub.push import PushResult
from hf_vit.loading.model import load_model
from hf_vit.results.facts import Facts, Record
from hf_vit.training.plan import Run, Start, choose_attention, log_folder, training_arguments
from hf_vit.training.trainer.callbacks import Clock, Patience, StopOnTermination, callbacks_of
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.optimizers import optimizer_of
from hf_vit_settings import Recipe

# Settings of a recipe that only classifiers have.
_OF_CLASSIFIERS = (
    *("loss", "tune", "class_weights", "balanced_sampling", "repeated_augmentation", "new_head", "architecture"),
    *("layer_decay", "average_decay", "sam_rho", "label_smoothing", "head_bias", "mixup_alpha", "cutmix_alpha"),
)


def active_settings(recipe: Recipe, names: Sequence[str] = _OF_CLASSIFIERS) -> dict[str, Any]:
    """Return those of a recipe's settings for classifiers that differ from their defaults, which switch them off."""
    defaults = {each.name: each.default for each in (*fields(Recipe), *fields(AugmentationConfig))} | {
        "architecture": {}
    }
    values = recipe.settings()
    return {name: values[name] for name in names if values[name] != defaults[name]}


@dataclass(frozen=True, repr=False)
class TrainingResult(Displayed):
    """A finished training.

    Attributes:
        folder: holds model, processor, facts.json, learning_curve.png, README.md and the pictures of the task.
        model: the saved model, in evaluation mode.
        processor: its image processor.
        steps: optimizer steps done.
        seconds: spent training, evaluations and checkpoints included.
        history: the Trainer's log, one entry a logging or evaluation; empty where the run had already finished.
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
    """Abstract: what a model learns, from which images, in which module, and what the finished folder holds."""

    # The name of its default recipe, and whether it learns from labels, masks or boxes (and is fine-tuned).
    recipe: ClassVar[str] = "default-small"
    has_labels: ClassVar[bool] = True
    # Of masks and boxes: what stands in the record as the task, whose protocol has this name as well.
    task: ClassVar[str | None] = None
    # The Auto class that loads the saved model.
    auto_class: Any
    # Whether a batch can be accumulated from micro-batches, and images may have several classes each.
    accumulates: bool = True
    multi_label: bool = False
    # The kind of annotation, see `ImageData`; and whether images can be streamed.
    target: Target = "label"
    streams: bool = True
    # The trainer, and its arguments that differ from a classifier's.
    trainer_class: type[HfViTTrainer] = HfViTTrainer
    arguments: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return everything beside recipe and model that decides what is learned: for the facts, and for resuming."""

    @abstractmethod
    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        """Build the module that is trained, and its image processor; or refuse model, data or recipe."""

    @abstractmethod
    def collator(self, run: Run) -> Any:
        """Return the function that makes a batch of examples."""

    @abstractmethod
    def conclude(self, run: Run, model: PreTrainedModel, state: TrainerState, seconds: float) -> Result:
        """Return the result, from the finished model in evaluation mode."""

    @abstractmethod
    def values(self, run: Run, result: Result, shared: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the training record in facts.json: the `shared` ones of `run_values`, and the task's."""

    @abstractmethod
    def write(self, run: Run, result: Result, folder: Path) -> None:
        """Write pictures and further facts into the finished folder."""

    @abstractmethod
    def recall(self, folder: Path, recipe: Recipe) -> Result:
        """Read the result of a finished run from its folder, which must hold a model of this task."""

    def recalled(self, folder: Path, recipe: Recipe, mark: str) -> tuple[dict[str, Any], dict[str, Any], list[Record]]:
        """Return the fields of `TrainingResult`, the values of its record, which have a `mark`, and later records."""
        records = Facts.load(folder).records
        last = max((index for index, record in enumerate(records) if record.kind == "training"), default=0)
        values = cast(dict[str, Any], records[last].values) if records else {}
        if mark not in values or values.get("task") != self.task:
            raise UserError(f"the output folder {folder} holds a model for another task; choose a new or empty folder")
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
        """Refuse a recipe with settings that the task does not have, by a `UserError`."""

    def learners(self, module: Any) -> Sequence[PreTrainedModel]:
        """Return the vision transformers in the module that is trained."""
        return [module]

    def released(self, module: Any) -> PreTrainedModel:
        """Return the part of the trained module that is saved."""
        return module

    def transforms(self, run: Run) -> tuple[Any, Any]:
        """Return the transforms of training and of validation images."""
        return train_transform(run.processor, run.recipe.augmentation, run.options.seed), eval_transform(run.processor)

    def training_images(self, run: Run, transform: Any) -> Any:
        """Return the data set that is trained on."""
        return transform_split(run.data, "train", transform, seed=run.options.seed)

    def learnt_from(self, run: Run) -> list[str]:
        """Return the SHA-256 of every image that was trained on, as far as they are known."""
        return [image.digest for image in run.data.seen.get("train", ())]

    def kept_bytes(self) -> int:
        """Return the bytes of a checkpoint beside weights and optimizer of the module that is trained."""
        return 0

    def describe(self, run: Run) -> str:
        """Describe the training that is about to begin, in one line."""
        return run.describe()

    def remark(self, result: Result) -> str | None:
        """Return a warning about the finished training, in one line."""
        return None

    def callbacks(self, run: Run) -> list[TrainerCallback]:
        """Return callbacks beside those of every training."""
        return []

    def trainer_values(self, run: Run) -> dict[str, Any]:
        """Return keywords of the trainer; an adapter is put into the model here."""
        return {}

    def build_trainer(self, run: Run) -> HfViTTrainer:
        """Build the trainer of a run."""
        for model in self.learners(run.model):
            choose_attention(run, model)
        training, validation = self.transforms(run)
        trainer = self.trainer_class(
            model=run.model,
            args=training_arguments(run, **self.arguments),
            train_dataset=self.training_images(run, training),
            eval_dataset=transform_split(run.data, "validation", validation),
            data_collator=self.collator(run),
            processing_class=run.processor,
            optimizer_cls_and_kwargs=optimizer_of(run.recipe),
            callbacks=[Clock(), StopOnTermination(), *self.callbacks(run)],
            **self.trainer_values(run),
        )
        for callback in callbacks_of(trainer, TensorBoardCallback):
            callback.logging_dir = callback.logging_dir or str(log_folder(run.output))  # or as its environment says
        return trainer


@dataclass(frozen=True, repr=False)
class FinetuneResult(TrainingResult):
    """A finished classifier, or model for masks or boxes, with the weights of the best checkpoint by validation.

    Attributes:
        validation: accuracy (mIoU, AP) and loss of that checkpoint on the validation split.
        test: measured once, on the test split; without pictures and matrix where the run had already finished.
        chance: the highest accuracy on the validation split that chance explains (see `accuracy_of_chance`).
        best_step: the optimizer step the best checkpoint was taken after.
        trials: every learning rate of a sweep and its results on the validation split.
        pushed: what was shared on the Hub, if that was asked for.
    """

    validation: dict[str, float]
    test: ClassificationResult | MultiLabelResult | SegmentationResult | DetectionResult
    best_step: int
    chance: float = 0.0
    trials: Sequence[Mapping[str, Any]] = field(default=())
    pushed: PushResult | None = None

    def overview(self) -> dict[str, object]:
        (score, validated), *_ = self.validation.items()
        (measure, reached), *_ = self.test.headline().items()
        judged = {
            f"validation {score.replace('_', ' ')}": f"{validated:.2%}",
            f"test {measure.removeprefix('top-1 ')}": f"{reached:.2%} of {self.test.num_images:,} images",
            "best checkpoint": f"step {self.best_step:,}",
        }
        return {**super().overview(), **judged, **({} if self.pushed is None else {"shared at": self.pushed.url})}


class MeasuredTask(Task[FinetuneResult]):
    """Abstract: a model that learns from annotations and is measured by one protocol, once, on the test split."""

    # The metrics of the validation split that are kept, the one that chooses the best checkpoint first.
    measured: ClassVar[tuple[str, ...]]

    @abstractmethod
    def protocol(self, data: ImageData) -> str:
        """Return the name of the protocol that measures the test split."""

    @abstractmethod
    def recalled_test(self, judged: Record, model: PreTrainedModel) -> Any:
        """Return the protocol's result from its record, without pictures."""

    def callbacks(self, run: Run) -> list[TrainerCallback]:
        return [] if run.recipe.patience is None else [Patience(run.recipe.patience)]

    def conclude(self, run: Run, model: PreTrainedModel, state: TrainerState, seconds: float) -> FinetuneResult:
        cast(nn.Module, model).to(pick_device(run.options.device))
        best = best_evaluation(state)
        return FinetuneResult(
            folder=run.output,
            model=model,
            processor=run.processor,
            recipe=run.recipe,
            validation={name: best[f"eval_{name}"] for name in (*self.measured, "loss") if f"eval_{name}" in best},
            test=cast(Any, PROTOCOLS[self.protocol(run.data)](_test_images(run, model))),
            steps=state.global_step,
            best_step=int(best["step"]),
            chance=best.get("eval_chance", 0.0),
            seconds=seconds,
            history=state.log_history,
            trials=run.trials,
        )

    def values(self, run: Run, result: FinetuneResult, shared: dict[str, Any]) -> dict[str, Any]:
        return {
            **shared,
            **({"learning_rate_sweep": [dict(trial) for trial in run.trials]} if run.trials else {}),
            **run.task,
            "best_step": result.best_step,
            **{f"validation_{name}": value for name, value in result.validation.items()},
        }

    def write(self, run: Run, result: FinetuneResult, folder: Path) -> None:
        images = _test_images(run, result.model)
        test = ProtocolRun(self.protocol(run.data), result.test, images, {}, result.test.seconds)
        save_protocol(test, folder=folder, command=run.command, device=run.options.device)

    def recall(self, folder: Path, recipe: Recipe) -> FinetuneResult:
        shared, values, later = self.recalled(folder, recipe, "best_step")
        judged = next(record for record in later if record.kind == "evaluation")
        names = (*self.measured, "loss")
        return FinetuneResult(
            **shared,
            validation={name: values[f"validation_{name}"] for name in names if f"validation_{name}" in values},
            test=self.recalled_test(judged, shared["model"]),
            best_step=values["best_step"],
            chance=values.get("chance_accuracy", 0.0),
            trials=values.get("learning_rate_sweep", ()),
        )


def _test_images(run: Run, model: PreTrainedModel) -> Examination:
    subject = load_model((model, run.processor))
    return Examination(subject, run.data, batch_size=run.micro_batch_size, progress=False)


def best_evaluation(state: TrainerState) -> dict[str, Any]:
    """Return the log entry of the evaluation that chose the best checkpoint."""
    entries = [entry for entry in state.log_history if "eval_score" in entry]
    return next((entry for entry in entries if entry["step"] == state.best_global_step), entries[-1])


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

    recipe = "pretrain-small"
    has_labels = False
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
                f"{', '.join(wrong)} of the recipe {recipe.name} works in hf-vit finetune only; leave it out, or "
                "choose another recipe"
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

    def values(self, run: Run, result: PretrainResult, shared: dict[str, Any]) -> dict[str, Any]:
        return {**shared, "objective": self.settings(), "validation_loss": result.validation_loss}

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


class Views:
    """n variations of every image, [n, 3, H, W], as a transform; they are not mixed."""

    mixable = False

    def __init__(self, *views: TrainTransform) -> None:
        self.views = views

    def prepare(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Return the images after the part without chance."""
        return self.views[0].prepare(images)

    def finish(self, prepared: Sequence[torch.Tensor], indices: NDArray[np.uint64]) -> list[torch.Tensor]:
        """Return all views of each image."""
        views = (view.finish(prepared, indices) for view in self.views)
        return [torch.stack(views_of_one) for views_of_one in zip(*views, strict=True)]

    def set_epoch(self, epoch: int) -> None:
        """Augment as in this epoch from now on."""
        for view in self.views:
            view.set_epoch(epoch)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        batches = [view(batch) for view in self.views]
        together = zip(*(each["pixel_values"] for each in batches), strict=True)
        return {"pixel_values": [torch.stack(views) for views in together], "label": batches[0]["label"]}
