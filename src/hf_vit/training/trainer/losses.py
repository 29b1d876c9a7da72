"""Losses of classifiers besides the models' own: label smoothing, class weights, and binary cross-entropy."""

from abc import ABC, abstractmethod
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


def soft_cross_entropy(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return the cross-entropy of class indices [B] or probabilities [B, K]; a `compute_loss_func` for any model."""
    return compute_classification_loss(outputs.logits, labels, None, num_items_in_batch)


class TargetLoss(ABC):
    """Abstract: a `compute_loss_func` to which `HfViTTrainer` passes `targets` in training, and indices otherwise."""

    @abstractmethod
    def compute_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of every image, [B], for logits and targets [B, K]."""

    def targets(self, labels: torch.Tensor, num_labels: int, smoothing: float = 0.0) -> torch.Tensor:
        """Convert class indices [B] or probabilities [B, K] to smoothed probabilities [B, K]."""
        return smooth_labels(labels, num_labels, smoothing)

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return the loss of logits [B, K] under targets [B, K], or the plain cross-entropy of class indices [B]."""
        if labels.ndim == 1:
            return soft_cross_entropy(outputs, labels, num_items_in_batch)
        logits = outputs.logits.float()
        losses = self.compute_losses(logits, labels.to(logits))
        if num_items_in_batch is None:
            return losses.mean()
        # The Trainer counts all elements of the labels of accumulated batches, K per image.
        return losses.sum() * labels[0].numel() / num_items_in_batch


@final
@dataclass(frozen=True)
class BinaryCrossEntropy(TargetLoss):
    """Binary cross-entropy, summed over the classes.

    The sum is that of arXiv 2106.10270's code; for LAMB, the optimizer of 2110.00476, its mean differs only by
    clipping and epsilon. Targets above `threshold` become 1 and all others 0 (2110.00476); None keeps them.
    """

    threshold: float | None = None

    def targets(self, labels: torch.Tensor, num_labels: int, smoothing: float = 0.0) -> torch.Tensor:
        """Convert class indices [B] or probabilities [B, K] to a target for every class, [B, K]."""
        targets = smooth_labels(labels, num_labels, smoothing)
        if self.threshold is None:
            return targets
        is_label = smooth_labels(labels, num_labels, 0.0) > 0  # smoothing may lift all classes above the threshold
        return ((targets > self.threshold) & is_label).float()

    def compute_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)


@final
@dataclass(frozen=True)
class WeightedCrossEntropy(TargetLoss):
    """Cross-entropy with a weight for every class [K].

    It is the mean over images, not over their weights, so images of rare classes count more.
    """

    weights: tuple[float, ...]

    @classmethod
    def balanced(cls, labels: Sequence[int], num_labels: int) -> "WeightedCrossEntropy":
        """Weight class k, which has n_k of n images, by n / (K n_k), as scikit-learn's "balanced"; 1 without images."""
        counts = np.bincount(labels, minlength=num_labels)
        weights = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return cls(tuple(np.where(counts, weights, 1.0).tolist()))

    def compute_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor(self.weights, device=logits.device)
        return F.cross_entropy(logits, targets, weight=weights, reduction="none")
