"""Learning to name images by their labels: the model is judged once on the test split."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForImageClassification,
    EvalPrediction,
    PreTrainedModel,
    TrainerCallback,
    TrainerState,
    ViTImageProcessor,
)

from hf_vit.data import ImageCollator, ImageData
from hf_vit.environment import pick_device
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.dense.detection import DetectionResult
from hf_vit.evaluation.protocols.dense.segmentation import SegmentationResult
from hf_vit.evaluation.protocols.multi_label import MultiLabelResult, judge, multi_label
from hf_vit.evaluation.protocols.registry import ProtocolRun
from hf_vit.evaluation.protocols.top1 import OF_CLASSES, ClassificationResult, top1
from hf_vit.evaluation.saving import save_protocol
from hf_vit.hub.push_result import PushResult
from hf_vit.loading.model import label_names_of, load_model
from hf_vit.loading.start import ModelSource, build_classifier, build_processor, rows_of_head
from hf_vit.results.facts import Record
from hf_vit.training.plan import Run, weights_of
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.record import recipe_values
from hf_vit.training.tasks.task import Task, TrainingResult
from hf_vit.training.trainer.callbacks import Patience

# What remains between two checkpoints of equal accuracy; below the smallest difference of accuracies.
_LOSS_WEIGHT = 1e-6


@dataclass(frozen=True, repr=False)
class FinetuneResult(TrainingResult):
    """A finished classifier, or model for masks or boxes, with the weights of the best checkpoint by its validation.

    Attributes:
        validation: accuracy (mIoU, AP) and loss of that checkpoint on the validation split.
        test: measured once, on the untouched test split; of a run that was found finished without pictures and matrix.
        chance: the highest accuracy on the validation split that chance explains (see `accuracy_of_chance`).
        best_step: the optimizer step the best checkpoint was taken after.
        trials: every learning rate of a sweep and what it gave on the validation split (see `sweeping.Trial`).
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


class ClassifierTask(Task[FinetuneResult]):
    """Abstract: a classifier of the data's classes, whatever it learns them from."""

    auto_class = AutoModelForImageClassification

    def collator(self, run: Run) -> ImageCollator:
        augmentation = run.recipe.augmentation
        return ImageCollator(
            len(run.data.label_names), augmentation.mixup_alpha, augmentation.cutmix_alpha, seed=run.options.seed
        )

    def describe(self, run: Run) -> str:
        kept = "; the head for these classes is kept (--new-head starts with a new one)" if _keeps_head(run) else ""
        return run.describe() + kept

    def remark(self, result: FinetuneResult) -> str | None:
        if "accuracy" not in result.validation or result.validation["accuracy"] > result.chance:
            return None
        return (
            f"the released model has hardly learnt: its validation accuracy, {result.validation['accuracy']:.2%}, is "
            f"within what chance gives (up to {result.chance:.2%}); train longer, or with another learning rate"
        )

    def callbacks(self, run: Run) -> list[TrainerCallback]:
        return [] if run.recipe.patience is None else [Patience(run.recipe.patience)]

    def trainer_values(self, run: Run) -> dict[str, Any]:
        metrics: dict[str, Any] = {
            "compute_metrics": compute_metrics,
            "preprocess_logits_for_metrics": summarize_logits,
        }
        if run.data.multi_label:
            metrics = {"compute_metrics": multi_label_metrics}
        return metrics | weights_of(run)

    def conclude(self, run: Run, model: PreTrainedModel, state: TrainerState, seconds: float) -> FinetuneResult:
        cast(nn.Module, model).to(pick_device(run.options.device))
        judged = _test_images(run, model)
        test = multi_label(judged) if run.data.multi_label else top1(judged)
        best = best_evaluation(state)
        score = "mean_average_precision" if run.data.multi_label else "accuracy"
        return FinetuneResult(
            folder=run.output,
            model=model,
            processor=run.processor,
            recipe=run.recipe,
            validation={score: best[f"eval_{score}"], "loss": best["eval_loss"]},
            test=test,
            steps=state.global_step,
            best_step=int(best["step"]),
            chance=best.get("eval_chance", 0.0),
            seconds=seconds,
            history=state.log_history,
            trials=run.trials,
        )

    def values(self, run: Run, result: FinetuneResult) -> dict[str, Any]:
        is_kept = _keeps_head(run)
        head_bias = None if is_kept else run.recipe.initial_head_bias(len(run.data.label_names))
        sweep = {"learning_rate_sweep": [dict(trial) for trial in run.trials]} if run.trials else {}
        return {
            "recipe": recipe_values(run) | {"new_head": not is_kept, "head_bias": head_bias} | _unused(run),
            **sweep,
            **run.task,
            "best_step": result.best_step,
            **{f"validation_{name}": value for name, value in result.validation.items()},
            **({} if run.data.multi_label else {"chance_accuracy": result.chance}),
        }

    def write(self, run: Run, result: FinetuneResult, folder: Path) -> None:
        name = "multi-label" if run.data.multi_label else "top1"
        test = ProtocolRun(name, result.test, _test_images(run, result.model), {}, result.test.seconds)
        save_protocol(test, folder=folder, command=run.command, device=run.options.device)

    def recall(self, folder: Path, recipe: Recipe) -> FinetuneResult:
        shared, values, later = self.recalled(folder, recipe, "best_step")
        judged = next(record for record in later if record.kind == "evaluation")
        names = ("accuracy", "mean_average_precision", "loss")
        return FinetuneResult(
            **shared,
            validation={name: values[f"validation_{name}"] for name in names if f"validation_{name}" in values},
            test=_recalled_test(judged, label_names_of(shared["model"])),
            best_step=values["best_step"],
            chance=values.get("chance_accuracy", 0.0),
            trials=values.get("learning_rate_sweep", ()),
        )


def _recalled_test(judged: Record, label_names: list[str]) -> ClassificationResult | MultiLabelResult:
    """What a record says of the test; without pictures and matrix."""
    test, size = cast(dict[str, Any], judged.values), (judged.data and judged.data.size) or 0
    if "top1" not in test:
        known = {name: test[name] for name in ("thresholds", "f1_micro", "loss")}
        return MultiLabelResult(size, **test["classes"], **known, seconds=judged.seconds or 0.0)
    return ClassificationResult(
        num_images=size,
        label_names=label_names,
        top1=test["top1"],
        top5=test.get("top5"),
        loss=test["loss"],
        ece=test["ece"],
        per_class=test.get("per_class", {}),
        confusion_matrix=None,
        seconds=judged.seconds or 0.0,
        num_wrong=round((1 - test["top1"]) * size),
        wrong=[],
        **{name: test[name] for name in OF_CLASSES if name in test},
    )


@final
class Classification(ClassifierTask):
    """The labels alone."""

    multi_label = True

    def settings(self) -> dict[str, Any]:
        return {}

    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        if not data.multi_label:
            return build_for_classes(source, data, image_size, recipe)
        augmentation = recipe.augmentation
        if recipe.class_weights or recipe.balanced_sampling or augmentation.mixup_alpha or augmentation.cutmix_alpha:
            raise UserError("images with several classes each are neither balanced nor mixed; leave that out")
        return build_for_classes(source, data, image_size, recipe, problem_type="multi_label_classification")


def build_for_classes(
    source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe, **fields: Any
) -> tuple[PreTrainedModel, ViTImageProcessor]:
    """A classifier of the data's classes, and its image processor.

    `fields` of the classifier's configuration win over the recipe's architecture, which is for fresh weights alone.

    Raises:
        UserError: the family has no such fields, or see `build_classifier`.
    """
    if not source.has_weights:
        if absent := [name for name in recipe.architecture if not hasattr(source.config, name)]:
            raise UserError(
                f"{source.name} has no {' and '.join(absent)}, which the recipe {recipe.name} sets; choose another"
            )
        fields = recipe.architecture | fields
    classifier = build_classifier(
        source,
        data.label_names,
        image_size=image_size,
        dropout=recipe.dropout,
        drop_path=recipe.drop_path,
        new_head=recipe.new_head,
        head_bias=recipe.initial_head_bias(len(data.label_names)),
        **fields,
    )
    return classifier, build_processor(source, classifier.config)


def _keeps_head(run: Run) -> bool:
    return not run.recipe.new_head and rows_of_head(run.source, run.data.label_names) is not None


def _test_images(run: Run, model: PreTrainedModel) -> Examination:
    """The model and the images that it is judged by once."""
    subject = load_model((model, run.processor))
    return Examination(subject, run.data, batch_size=run.micro_batch_size, progress=False)


def best_evaluation(state: TrainerState) -> dict[str, Any]:
    """The log entry of the evaluation the best checkpoint was chosen by."""
    entries = [entry for entry in state.log_history if "eval_score" in entry]
    return next((entry for entry in entries if entry["step"] == state.best_global_step), entries[-1])


def summarize_logits(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """What the metrics need of logits [B, K]: [B, 2], whether the first guess is right, and the log-likelihood."""
    first: torch.Tensor = logits[0] if isinstance(logits, tuple) else logits
    right = (first.argmax(-1) == labels).float()
    return torch.stack([right, F.cross_entropy(first.float(), labels, reduction="none")], dim=-1)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy, and the score by which the best checkpoint is chosen: accuracy first, then the smaller loss.

    And that loss, of every image once: the Trainer's own is a mean over what several processes fill their batches with.
    """
    right, losses = np.asarray(prediction.predictions).T
    accuracy, loss = float(right.mean()), float(losses.mean())
    return {
        "accuracy": accuracy,
        "loss": loss,
        "score": accuracy - _LOSS_WEIGHT * loss,
        "chance": accuracy_of_chance(np.asarray(prediction.label_ids)),
    }


def multi_label_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Mean average precision of logits [n, K] for labels [n, K], and the score: the same, then the smaller loss."""
    logits, truth = np.asarray(prediction.predictions, np.float64), np.asarray(prediction.label_ids) > 0
    names = [str(number) for number in range(truth.shape[1])]
    result = judge(logits, truth, names, dict.fromkeys(names, 0.5))
    precision = result.mean_average_precision
    score = precision - _LOSS_WEIGHT * result.loss
    return {"mean_average_precision": precision, "loss": result.loss, "score": score}


def _unused(run: Run) -> dict[str, Any]:
    """What a recipe asks for and images with several classes each do not have."""
    return {"label_smoothing": 0.0} if run.data.multi_label else {}


def accuracy_of_chance(labels: NDArray[np.int64]) -> float:
    """The highest accuracy on images with these labels [B] that chance explains, in 0..1.

    Who always names the most frequent class is right in its share of them, p; by chance he may be by three standard
    errors, sqrt(p (1 - p) / B), more. On few images that would be all of them: then half of the rest.
    """
    share = float(np.bincount(labels).max()) / len(labels)
    return min(share + 3 * math.sqrt(share * (1 - share) / len(labels)), (1 + share) / 2)
