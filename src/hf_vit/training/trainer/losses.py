"""Losses of classifiers besides the models' own: label smoothing, class weights, and binary cross-entropy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.nn import functional as F

from hf_vit.models.pretrained_hf_vit import compute_classification_loss


def smooth_labels(labels: torch.Tensor, num_labels: int, smoothing: float) -> torch.Tensor:
    """Smooth class indices [B] or probabilities [B, K] to probabilities [B, K] (batch, classes).

    A share of 0 <= smoothing < 1 is distributed evenly over all classes (arXiv 1512.00567, section 7).
    """
    soft = labels.float() if labels.is_floating_point() else F.one_hot(labels, num_labels).float()
    return soft * (1 - smoothing) + smoothing / num_labels


def _average(losses: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
    """Return the mean of losses [B] of images with labels [B, K], or their share in the mean of accumulated batches."""
    if num_items_in_batch is None:
        return losses.mean()
    # The Trainer counts all elements of the labels, K per image.
    return losses.sum() * labels[0].numel() / num_items_in_batch


def soft_cross_entropy(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return the cross-entropy of class indices [B] or probabilities [B, K]; a `compute_loss_func` for any model."""
    return compute_classification_loss(outputs.logits, labels, None, num_items_in_batch)


@final
@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Binary cross-entropy, summed over the classes, as `compute_loss_func` of an `HfViTTrainer`.

    The sum is that of arXiv 2106.10270's code; for LAMB, the optimizer of 2110.00476, its mean differs only by
    clipping and epsilon. In training, `HfViTTrainer` passes `targets`; in an evaluation, class indices get the plain
    cross-entropy. Targets above `threshold` become 1 and all others 0 (2110.00476); None keeps them.
    """

    threshold: float | None = None

    def targets(self, labels: torch.Tensor, num_labels: int, smoothing: float = 0.0) -> torch.Tensor:
        """Convert class indices [B] or probabilities [B, K] to a target for every class, [B, K]."""
        targets = smooth_labels(labels, num_labels, smoothing)
        if self.threshold is None:
            return targets
        is_label = smooth_labels(labels, num_labels, 0.0) > 0  # smoothing may lift all classes above the threshold
        return ((targets > self.threshold) & is_label).float()

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return the loss of logits [B, K] under targets [B, K], or under class indices [B]."""
        if labels.ndim == 1:
            return soft_cross_entropy(outputs, labels, num_items_in_batch)
        logits = outputs.logits.float()
        losses = F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none").sum(dim=1)
        return _average(losses, labels, num_items_in_batch)


@final
@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Cross-entropy with a weight for every class [K], as `compute_loss_func` of an `HfViTTrainer`.

    It is the mean over images, not over their weights, so images of rare classes count more. For its arguments see
    `BinaryCrossEntropy`.
    """

    weights: tuple[float, ...]

    @classmethod
    def balanced(cls, labels: Sequence[int], num_labels: int) -> "WeightedCrossEntropy":
        """Weight class k, which has n_k of n images, by n / (K n_k), as scikit-learn's "balanced"; 1 without images."""
        from sklearn.utils.class_weight import compute_class_weight

        present = np.unique(labels)
        weights_by_class = dict(
            zip(present.tolist(), compute_class_weight("balanced", classes=present, y=labels).tolist(), strict=True)
        )
        return cls(tuple(weights_by_class.get(label, 1.0) for label in range(num_labels)))

    def targets(self, labels: torch.Tensor, num_labels: int, smoothing: float = 0.0) -> torch.Tensor:
        """Convert class indices [B] or probabilities [B, K] to smoothed probabilities [B, K]."""
        return smooth_labels(labels, num_labels, smoothing)

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return the loss of logits [B, K] under probabilities [B, K], or under class indices [B]."""
        if labels.ndim == 1:
            return soft_cross_entropy(outputs, labels, num_items_in_batch)
        logits = outputs.logits.float()
        weights = torch.tensor(self.weights, device=logits.device)
        losses = F.cross_entropy(logits, labels.to(logits), weight=weights, reduction="none")
        return _average(losses, labels, num_items_in_batch)
