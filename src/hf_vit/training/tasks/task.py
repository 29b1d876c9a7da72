"""The tasks of training: the abstract `Task`, which `hf_vit.training.run` executes, and its results.

A task learns from labels, masks or boxes and is measured on the test split (`MeasuredTask`), or from images alone
(`PretextTask`). A new task needs a class and a line in `hf_vit.training.api.TASKS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoImageProcessor, PreTrainedModel, TrainerCallback, TrainerState, ViTImageProcessor
from transformers.integrations.integration_utils import TensorBoardCallback

from hf_vit.data import ImageData, eval_transform, train_transform, transform_split
from hf_vit.data.annotations import Target
from hf_vit.data.batches import TransformedImages
from hf_vit.data.image_data import draw_images
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
from hf_vit.loading.model import get_label_names, load_model
from hf_vit.loading.pixels import keep_own_sizes
from hf_vit.results.facts import Facts, Record
from hf_vit.training.features import bypass_backbone, load_features
from hf_vit.training.plan import Run, Start, choose_attention, limit_evaluation, log_folder, make_training_arguments
from hf_vit.training.trainer.callbacks import KeepCheckpoints, Patience, StopOnTermination, find_callbacks
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.optimizers import choose_optimizer
from hf_vit_settings import Recipe

# The settings of a recipe that do not apply to pre-training, which ends with the weights of the last step.
_CLASSIFIER_SETTINGS = (
    *("loss", "tune", "class_weights", "balanced_sampling", "repeated_augmentation", "new_head", "architecture"),
    *("layer_decay", "average_decay", "sam_rho", "label_smoothing", "head_bias", "mixup_alpha", "cutmix_alpha"),
    "patience",
)
# Protocol of a test split -> the class of its result.
RESULTS: dict[str, type[ClassificationResult | MultiLabelResult | SegmentationResult | DetectionResult]] = {
    "top1": ClassificationResult,
    "multi-label": MultiLabelResult,
    "segmentation": SegmentationResult,
    "detection": DetectionResult,
}
# The defaults of all settings; those given here have none, and every recipe sets them.
DEFAULTS = Recipe(name="", source="", summary="", learning_rate=1.0, batch_size=1, epochs=1.0).settings()


def find_active_settings(recipe: Recipe, names: Sequence[str] = _CLASSIFIER_SETTINGS) -> dict[str, Any]:
    """Return the named settings of a recipe that differ from their defaults."""
    values = recipe.settings()
    return {name: values[name] for name in names if values[name] != DEFAULTS[name]}


@dataclass(frozen=True, repr=False)
class TrainingResult(Displayed):
    """A finished training.

    Attributes:
        folder: holds model, processor, facts.json, learning_curve.png, README.md and the pictures of the task.
        model: the saved model, in evaluation mode.
        processor: its image processor.
        steps: the number of optimizer steps.
        seconds: the duration of the training, with evaluations and checkpoints.
        history: the Trainer's log, an entry per report or evaluation; empty if the run had already finished.
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
    """Abstract: defines what a model learns, from which images and in which module, and the files of the result."""

    # The name of the default recipe, and whether the task learns from labels, masks or boxes (and is fine-tuning).
    recipe: ClassVar[str] = "default-small"
    has_labels: ClassVar[bool] = True
    # For masks and boxes: the name of the task in the record, which is also the name of the protocol.
    task: ClassVar[str | None] = None
    # The Auto class that loads the saved model.
    auto_class: Any
    # Whether a batch can be accumulated from micro-batches, and whether an image may have several classes.
    accumulates: bool = True
    multi_label: bool = False
    # The kind of annotation, see `ImageData`; and whether images can be streamed.
    target: Target = "label"
    streams: bool = True
    # Whether heads can be trained on cached features.
    caches_features: bool = False
    # The trainer, and the training arguments that differ from those of a classifier.
    trainer_class: type[HfViTTrainer] = HfViTTrainer
    arguments: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings that influence the result besides recipe and model, for the facts and for resuming."""

    @abstractmethod
    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        """Build the module to train and its image processor, or raise a `UserError` if model or data do not fit."""

    @abstractmethod
    def make_collator(self, run: Run) -> Any:
        """Return the function that combines examples to a batch."""

    @abstractmethod
    def conclude(self, run: Run, state: TrainerState, shared: dict[str, Any]) -> Result:
        """Make the result of a finished model in evaluation mode; `shared` has the fields of `TrainingResult`."""

    @abstractmethod
    def values(self, run: Run, result: Result, shared: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the training record in facts.json: those of every task (`shared`) and of this one."""

    @abstractmethod
    def write(self, run: Run, result: Result, folder: Path) -> None:
        """Write pictures and further facts into the finished folder."""

    @abstractmethod
    def recall(self, folder: Path, recipe: Recipe) -> Result:
        """Read the result of a finished run from its folder, which must hold a model of this task."""

    def read_shared(
        self, folder: Path, recipe: Recipe, key: str
    ) -> tuple[dict[str, Any], dict[str, Any], list[Record]]:
        """Return the fields of `TrainingResult`, the values of the training record, and the records after it.

        Raises a `UserError` unless the record has the `key` by which the task recognizes its own runs.
        """
        records = Facts.load(folder).records
        last = max((index for index, record in enumerate(records) if record.kind == "training"), default=0)
        values = cast(dict[str, Any], records[last].values) if records else {}
        if key not in values or values.get("task") != self.task:
            raise UserError(
                f"the output folder {folder} holds a model for another task; choose a new or empty folder with --output"
            )
        shared = {
            "folder": folder,
            "model": self.auto_class.from_pretrained(folder).eval(),
            "processor": AutoImageProcessor.from_pretrained(folder),
            # A sweep may have chosen them.
            "recipe": recipe.override(**{name: values["recipe"].get(name) for name in ("learning_rate", "tune")}),
            "steps": values["steps"],
            "seconds": records[last].seconds or 0.0,
            "history": [],
        }
        return shared, values, records[last + 1 :]

    def check(self, recipe: Recipe) -> None:
        """Raise a `UserError` if a recipe has settings that the task does not support."""

    def list_models(self, module: Any) -> Sequence[PreTrainedModel]:
        """Return the vision transformers in the module that is trained."""
        return [module]

    def get_released(self, module: Any) -> PreTrainedModel:
        """Return the part of the trained module that is saved."""
        return module

    def make_transforms(self, run: Run) -> tuple[Any, Any]:
        """Return the transforms of training and of validation images."""
        return train_transform(run.processor, run.recipe.augmentation, run.options.seed), eval_transform(run.processor)

    def choose_images(self, run: Run, transform: Any) -> Any:
        """Return the training split as a data set of transformed images."""
        return transform_split(run.data, "train", transform, seed=run.options.seed)

    def list_training_digests(self, run: Run) -> list[str]:
        """Return the SHA-256 of the training images, without those of a stream, which are not read beforehand."""
        return [image.digest for image in run.data.seen.get("train", ())]

    def count_extra_bytes(self) -> int:
        """Return the bytes that a checkpoint needs in addition to weights and optimizer of the trained module."""
        return 0

    def describe(self, run: Run) -> str:
        """Describe the training that is about to begin in one line."""
        return run.describe()

    def make_warning(self, result: Result) -> str | None:
        """Return a warning of one line about the finished training, if there is a reason for one."""
        return None

    def make_callbacks(self, run: Run) -> list[TrainerCallback]:
        """Return the callbacks that the task needs in addition to those of every training."""
        return []

    def prepare_trainer(self, run: Run) -> dict[str, Any]:
        """Return further keywords of the trainer, after putting an adapter into the model if the recipe has one."""
        return {}

    def build_trainer(self, run: Run) -> HfViTTrainer:
        """Build the trainer of a run, with data sets, optimizer and callbacks."""
        for model in self.list_models(run.model):
            choose_attention(run, model)
        training, validation = self.make_transforms(run)
        if run.options.cache_features:
            if run.checkpoint is not None and any(run.checkpoint.glob("*.safetensors")):
                model: Any = run.model  # other weights may have been saved in the folder that it was read from
                model.load_state_dict(type(model).from_pretrained(run.checkpoint).state_dict())
            train_images, validation_images = load_features(run, {"train": training, "validation": validation})
            bypass_backbone(run.model)
        else:
            train_images = self.choose_images(run, training)
            drawn_images = draw_images(run.data, "validation", limit_evaluation(run)[1], run.options.seed)
            validation_images = transform_split(drawn_images, "validation", validation)
        trainer = self.trainer_class(
            model=run.model,
            args=make_training_arguments(run, **self.arguments),
            train_dataset=train_images,
            eval_dataset=validation_images,
            data_collator=self.make_collator(run),
            processing_class=run.processor,
            optimizer_cls_and_kwargs=choose_optimizer(run.recipe),
            callbacks=[KeepCheckpoints(), StopOnTermination(), *self.make_callbacks(run)],
            **self.prepare_trainer(run),
        )
        for callback in find_callbacks(trainer, TensorBoardCallback):
            # An environment variable may have set another folder.
            callback.logging_dir = callback.logging_dir or str(log_folder(run.output))
        return trainer


@dataclass(frozen=True, repr=False)
class FinetuneResult(TrainingResult):
    """A finished classifier, or model for masks or boxes, with the weights of the best checkpoint by validation.

    Attributes:
        validation: accuracy (mIoU, AP) and loss of that checkpoint on the validation split.
        test: the single measurement on the test split; without pictures and matrix if the run had already finished.
        chance: the highest accuracy on the validation split that chance explains (see `compute_chance_accuracy`).
        best_step: the optimizer step after which the best checkpoint was written.
        trials: every learning rate of a sweep, or choice of `--tune auto`, with its results on the validation split.
        pushed: the result of sharing on the Hub, if that was requested.
    """

    validation: dict[str, float]
    test: ClassificationResult | MultiLabelResult | SegmentationResult | DetectionResult
    best_step: int
    chance: float = 0.0
    trials: Sequence[Mapping[str, Any]] = field(default=())
    pushed: PushResult | None = None

    def overview(self) -> dict[str, object]:
        (metric, validation), *_ = self.validation.items()
        (test_metric, test), *_ = self.test.headline().items()
        scores = {
            f"validation {metric.replace('_', ' ')}": f"{validation:.2%}",
            f"test {test_metric.removeprefix('top-1 ')}": f"{test:.2%} of {self.test.num_images:,} images",
            "best checkpoint": f"step {self.best_step:,}",
        }
        return {**super().overview(), **scores, **({} if self.pushed is None else {"shared at": self.pushed.url})}


class MeasuredTask(Task[FinetuneResult]):
    """Abstract: a task that learns from annotations; one protocol measures its model once on the test split."""

    # The metrics of the validation split for the record; the first one chooses the best checkpoint.
    metrics: ClassVar[tuple[str, ...]]

    @abstractmethod
    def protocol(self, data: ImageData) -> str:
        """Return the name of the protocol that measures the test split."""

    def make_callbacks(self, run: Run) -> list[TrainerCallback]:
        return [] if run.recipe.patience is None else [Patience(run.recipe.patience)]

    def conclude(self, run: Run, state: TrainerState, shared: dict[str, Any]) -> FinetuneResult:
        model: Any = shared["model"]
        model.to(pick_device(run.options.device))
        best = find_best_evaluation(state)
        return FinetuneResult(
            **shared,
            validation={name: best[f"eval_{name}"] for name in (*self.metrics, "loss") if f"eval_{name}" in best},
            test=cast(Any, PROTOCOLS[self.protocol(run.data)](_open_test(run, model))),
            best_step=int(best["step"]),
            chance=best.get("eval_chance", 0.0),
            trials=run.trials,
        )

    def values(self, run: Run, result: FinetuneResult, shared: dict[str, Any]) -> dict[str, Any]:
        values = dict(shared)
        if run.trials:
            values["tune_trials" if run.reason else "learning_rate_sweep"] = [dict(trial) for trial in run.trials]
        if run.reason:
            values["tune_reason"] = run.reason
        scores = {f"validation_{name}": value for name, value in result.validation.items()}
        return {**values, **run.task, "best_step": result.best_step, **scores}

    def write(self, run: Run, result: FinetuneResult, folder: Path) -> None:
        images = _open_test(run, result.model)
        test = ProtocolRun(self.protocol(run.data), result.test, images, {}, result.test.seconds)
        save_protocol(test, folder=folder, command=run.command, device=run.options.device)

    def recall(self, folder: Path, recipe: Recipe) -> FinetuneResult:
        shared, values, later_records = self.read_shared(folder, recipe, "best_step")
        evaluation = next(record for record in later_records if record.kind == "evaluation")
        test = RESULTS[str(evaluation.values.get("protocol", "top1"))].restore(
            evaluation.values,
            num_images=(evaluation.data and evaluation.data.size) or 0,
            label_names=get_label_names(shared["model"]),
            seconds=evaluation.seconds or 0.0,
        )
        names = (*self.metrics, "loss")
        return FinetuneResult(
            **shared,
            validation={name: values[f"validation_{name}"] for name in names if f"validation_{name}" in values},
            test=test,
            best_step=values["best_step"],
            chance=values.get("chance_accuracy", 0.0),
            trials=values.get("learning_rate_sweep", values.get("tune_trials", ())),
        )


def _open_test(run: Run, model: PreTrainedModel) -> Examination:
    """Return the examination of a model on the test split of a run."""
    return Examination(
        keep_own_sizes(load_model((model, run.processor))),
        run.data,
        num_images=limit_evaluation(run)[1],
        batch_size=run.micro_batch_size,
        seed=run.options.seed,
        progress=False,
    )


def find_best_evaluation(state: TrainerState) -> dict[str, Any]:
    """Return the log entry of the evaluation at the best checkpoint, or of the last one."""
    entries = [entry for entry in state.log_history if "eval_score" in entry]
    return next((entry for entry in entries if entry["step"] == state.best_global_step), entries[-1])


@dataclass(frozen=True, repr=False)
class PretrainResult(TrainingResult):
    """A finished pre-training: the model after the last step, for momentum contrast its encoder only.

    Attributes:
        picture: a file in `folder` with predictions or embeddings of validation images.
        validation_loss: the loss on the validation split after the last step; None without an evaluation.
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
    # The last weights are saved, because a lower loss of the pretext does not mean a better model.
    arguments: ClassVar[dict[str, Any]] = {
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
        "greater_is_better": None,
        "prediction_loss_only": True,
    }

    def __init__(self, name: str, fields: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.name = name
        self.fields = dict(fields)
        self._options = options

    def settings(self) -> dict[str, Any]:
        return {"objective": self.name, **self.fields, **self._options}

    @abstractmethod
    def draw(self, run: Run, model: PreTrainedModel, path: Path) -> None:
        """Draw predictions or embeddings of validation images."""

    def check(self, recipe: Recipe) -> None:
        active = find_active_settings(recipe)
        if active:
            names = [f"loss {recipe.loss}" if name == "loss" else name for name in active]
            raise UserError(
                f"hf-vit pretrain does not support {', '.join(names)} of the recipe {recipe.name}; leave "
                f"these settings out, or choose another --recipe, such as {self.recipe}"
            )

    def conclude(self, run: Run, state: TrainerState, shared: dict[str, Any]) -> PretrainResult:
        loss = next((entry["eval_loss"] for entry in reversed(state.log_history) if "eval_loss" in entry), None)
        return PretrainResult(**shared, picture=run.output / self.picture, validation_loss=loss)

    def values(self, run: Run, result: PretrainResult, shared: dict[str, Any]) -> dict[str, Any]:
        return {**shared, "objective": self.settings(), "validation_loss": result.validation_loss}

    def write(self, run: Run, result: PretrainResult, folder: Path) -> None:
        self.draw(run, result.model, folder / self.picture)

    def recall(self, folder: Path, recipe: Recipe) -> PretrainResult:
        shared, values, _ = self.read_shared(folder, recipe, "objective")
        return PretrainResult(**shared, picture=folder / self.picture, validation_loss=values["validation_loss"])


def load_validation_images(run: Run, count: int) -> list[tuple[torch.Tensor, int]]:
    """Return `count` validation images [C, H, W] as the model's input with their labels.

    They are spread evenly over the split; of a stream they are the first ones.
    """
    split = transform_split(run.data, "validation", eval_transform(run.processor), cache_bytes=0)
    if isinstance(split, TransformedImages):
        examples = (split[index] for index in sorted({number * len(split) // count for number in range(count)}))
    else:
        examples = iter(split)
    return [(example["pixel_values"], int(example["label"])) for example in islice(examples, count)]


def stack_pixels(examples: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Stack the pixel values of n examples, [n, ...]."""
    return torch.stack([torch.as_tensor(example["pixel_values"]) for example in examples])


class Views:
    """A transform that makes n views of every image, [n, 3, H, W], by n training transforms; they are never mixed."""

    mixable = False

    def __init__(self, *views: TrainTransform) -> None:
        self.views = views

    def prepare(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Apply the part of the transforms that is not random, and therefore the same for all views."""
        return self.views[0].prepare(images)

    def finish(self, prepared: Sequence[torch.Tensor], indices: NDArray[np.uint64]) -> list[torch.Tensor]:
        """Apply the random part of every transform and stack the views of each image."""
        views = (view.finish(prepared, indices) for view in self.views)
        return [torch.stack(views_of_one) for views_of_one in zip(*views, strict=True)]

    def set_epoch(self, epoch: int) -> None:
        """Use the augmentations of this epoch from now on."""
        for view in self.views:
            view.set_epoch(epoch)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return every view of the images of a batch, and their labels."""
        views = zip(*(view(batch)["pixel_values"] for view in self.views), strict=True)
        return {"pixel_values": [torch.stack(views_of_one) for views_of_one in views], "label": list(batch["label"])}
