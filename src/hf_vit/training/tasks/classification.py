"""Classification of images by their labels, measured once on the test split."""

import math
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForImageClassification, EvalPrediction, PreTrainedModel, ViTImageProcessor

from hf_vit.data import ImageCollator, ImageData
from hf_vit.data.transforms import OwnShapeEvalTransform, OwnShapeTrainTransform, keeps_shapes
from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.multi_label import compute_multi_label_metrics
from hf_vit.loading.start import build_classifier, build_processor, match_head_rows
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.training.plan import Run, Start, configure_weights
from hf_vit.training.tasks.task import FinetuneResult, MeasuredTask
from hf_vit_settings import Recipe

# Decides between checkpoints of equal accuracy; it is too small to outweigh a difference of accuracies.
_LOSS_WEIGHT = 1e-6


class ClassifierTask(MeasuredTask):
    """Abstract: a task that trains a classifier of the data's classes."""

    auto_class = AutoModelForImageClassification
    metrics = ("accuracy", "mean_average_precision")

    def protocol(self, data: ImageData) -> str:
        return "multi-label" if data.multi_label else "top1"

    def make_collator(self, run: Run) -> ImageCollator:
        """Return the collator, which mixes images as the recipe says and pads images of different shapes."""
        augmentation = run.recipe.augmentation
        mixing = augmentation.mixup_alpha, augmentation.cutmix_alpha
        has_sizes = keeps_shapes(run.processor) and not run.options.cache_features
        patch = run.config.patch_stride if has_sizes else None
        return ImageCollator(len(run.data.label_names), *mixing, seed=run.options.seed, patch=patch)

    def describe(self, run: Run) -> str:
        note = "; the checkpoint's head for these classes is kept (--new-head starts a new one)"
        return run.describe() + (note if _keeps_head(run) else "")

    def make_warning(self, result: FinetuneResult) -> str | None:
        if "accuracy" not in result.validation or result.validation["accuracy"] > result.chance:
            return None
        return (
            f"the validation accuracy of {result.validation['accuracy']:.2%} could be chance (up to "
            f"{result.chance:.2%}), so the model has hardly learned; train longer (--epochs), or with another "
            "--learning-rate"
        )

    def prepare_trainer(self, run: Run) -> dict[str, Any]:
        """Return the metrics for the kind of labels, and the arguments for weights, loss and sampling."""
        metrics = compute_multi_label_scores if run.data.multi_label else compute_metrics
        functions = {"compute_metrics": metrics, "preprocess_logits_for_metrics": summarize_logits}
        return functions | configure_weights(run)

    def values(self, run: Run, result: FinetuneResult, shared: dict[str, Any]) -> dict[str, Any]:
        """Add what the record says about the head, and the accuracy of guessing."""
        values = super().values(run, result, shared)
        keeps_head = _keeps_head(run)
        head_bias = None if keeps_head else run.recipe.initial_head_bias(len(run.data.label_names))
        values["recipe"] |= {"new_head": not keeps_head, "head_bias": head_bias}
        if run.data.multi_label:
            values["recipe"]["label_smoothing"] = 0.0
        else:
            values["chance_accuracy"] = result.chance
        return values


@final
class Classification(ClassifierTask):
    """Supervised classification: learns from the labels only."""

    multi_label = True
    caches_features = True

    def settings(self) -> dict[str, Any]:
        return {}

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        """Build the model with a head for the classes; refuse settings that do not work with multi-label data."""
        if not start.data.multi_label:
            return build_for_classes(start, recipe, own_shapes=True)
        augmentation = recipe.augmentation
        if recipe.class_weights or recipe.balanced_sampling or augmentation.mixup_alpha or augmentation.cutmix_alpha:
            raise UserError(
                "--class-weights, --balanced-sampling, mixup and cutmix do not work with multi-label data; leave "
                "them out, or choose a recipe without them"
            )
        return build_for_classes(start, recipe, own_shapes=True, problem_type="multi_label_classification")

    def make_transforms(self, run: Run) -> tuple[Any, Any]:
        """Return the transforms of training and evaluation; they keep the shape of images if the processor does."""
        if not keeps_shapes(run.processor):
            return super().make_transforms(run)
        own = run.processor, run.config.patch_stride
        training = OwnShapeTrainTransform(*own, run.recipe.augmentation, run.options.seed)
        return training, OwnShapeEvalTransform(*own)


def build_for_classes(
    start: Start, recipe: Recipe, own_shapes: bool = False, **fields: Any
) -> tuple[PreTrainedModel, ViTImageProcessor]:
    """Build a classifier of the data's classes, and its image processor.

    With `own_shapes` a processor that keeps the shape of images does so, unless another size is requested. `fields` of
    the configuration have precedence over the recipe's architecture, which applies to new weights only.
    """
    source = start.source
    label_names = start.data.label_names
    if not source.has_weights:
        fields = recipe.architecture | fields
    classifier = build_classifier(
        source,
        label_names,
        image_size=start.image_size,
        dropout=recipe.dropout,
        drop_path=recipe.drop_path,
        new_head=recipe.new_head,
        head_bias=recipe.initial_head_bias(len(label_names)),
        **fields,
    )
    own_shapes = own_shapes and start.image_size == as_pair(source.config.image_size)
    return classifier, build_processor(source, classifier.config, own_shapes)


def _keeps_head(run: Run) -> bool:
    """Return whether training continues with the head of the checkpoint, whose classes match those of the data."""
    return not run.recipe.new_head and match_head_rows(run.source, run.data.label_names) is not None


def summarize_logits(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Reduce logits [B, K] to [B, 2] for `compute_metrics`: 1 if the most likely class is right, else 0; the loss.

    Of multi-label data, with labels [B, K], return the logits alone.
    """
    scores: torch.Tensor = logits[0] if isinstance(logits, tuple) else logits  # a model may return hidden states too
    if labels.ndim > 1:
        return scores
    is_right = (scores.argmax(-1) == labels).float()
    return torch.stack([is_right, F.cross_entropy(scores.float(), labels, reduction="none")], dim=-1)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Compute accuracy, loss, and the score that chooses the best checkpoint: accuracy first, then the smaller loss.

    This loss counts every image once. The Trainer's is a mean over batches, which several processes pad by repetition.
    """
    is_right, losses = np.asarray(prediction.predictions).T
    accuracy, loss = float(is_right.mean()), float(losses.mean())
    return {
        "accuracy": accuracy,
        "loss": loss,
        "score": accuracy - _LOSS_WEIGHT * loss,
        "chance": compute_chance_accuracy(np.asarray(prediction.label_ids)),
    }


def compute_multi_label_scores(prediction: EvalPrediction) -> dict[str, float]:
    """Compute mean average precision, loss and score of logits [n, K] for labels [n, K]: n images, K classes."""
    logits = np.asarray(prediction.predictions, np.float64)
    truth = np.asarray(prediction.label_ids) > 0
    names = [str(number) for number in range(truth.shape[1])]
    result = compute_multi_label_metrics(logits, truth, names, dict.fromkeys(names, 0.5))
    precision, loss = result.mean_average_precision, result.loss
    return {"mean_average_precision": precision, "loss": loss, "score": precision - _LOSS_WEIGHT * loss}


def compute_chance_accuracy(labels: NDArray[np.int64]) -> float:
    """Compute the highest accuracy, in 0..1, that chance explains on n images with these labels [n].

    It is the share p of the most frequent class plus three standard errors sqrt(p (1 - p) / n), and at most p plus half
    of the remaining 1 - p.
    """
    share = float(np.bincount(labels).max()) / len(labels)
    return min(share + 3 * math.sqrt(share * (1 - share) / len(labels)), (1 + share) / 2)
