"""What classifiers are trained on beside the models' own loss: smoothed labels, weights, one yes or no a class."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.nn import functional as F

from hf_vit.models.pretrained_hf_vit import classification_loss


def smooth_labels(labels: torch.Tensor, num_labels: int, smoothing: float) -> torch.Tensor:
    """Return [B, K] probabilities of class indices [B] or probabilities [B, K], a share of them moved to all K evenly.

    arXiv 1512.00567, section 7; 0 <= smoothing < 1.
    """
    soft = labels.float() if labels.is_floating_point() else F.one_hot(labels, num_labels).float()
    return soft * (1 - smoothing) + smoothing / num_labels


def _mean(each: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
    """Return the mean of the images [B] of a batch with labels [B, K], or their share of all accumulated batches'."""
    if num_items_in_batch is None:
        return each.mean()
    return each.sum() * labels[0].numel() / num_items_in_batch


def soft_cross_entropy(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return the loss of class indices [B] or probabilities [B, K]: a `compute_loss_func` for any model."""
    return classification_loss(outputs.logits, labels, None, num_items_in_batch)


@final
@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Binary cross-entropy summed over the classes, as a Trainer's `compute_loss_func`; give it to `HfViTTrainer`.

    Summed, as in the code of arXiv 2106.10270; the mean of 2110.00476 differs only by clipping for its optimizer
    (LAMB). While a model trains, `HfViTTrainer` hands over `targets`; an evaluation's class indices get the plain
    cross-entropy. Targets above `threshold` become 1 and the others 0 (2110.00476); None leaves them.
    """

    threshold: float | None = None

    def targets(self, labels: torch.Tensor, num_labels: int, smoothing: float = 0.0) -> torch.Tensor:
        """Return class indices [B] or probabilities [B, K] as one target a class, [B, K]."""
        targets = smooth_labels(labels, num_labels, smoothing)
        return targets if self.threshold is None else (targets > self.threshold).float()

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return the loss of logits [B, K] under targets [B, K], or under class indices [B]."""
        if labels.ndim == 1:
            return soft_cross_entropy(outputs, labels, num_items_in_batch)
        logits = outputs.logits.float()
        each = F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none").sum(dim=1)
        return _mean(each, labels, num_items_in_batch)


@final
@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Cross-entropy with a weight [K] of every class, as a Trainer's `compute_loss_func`; give it to `HfViTTrainer`.

    The mean over the images, not over their weights: steps of rare classes are larger. See `BinaryCrossEntropy` for
    what it is given.
    """

    weights: tuple[float, ...]

    @classmethod
    def balanced(cls, labels: Sequence[int], num_labels: int) -> "WeightedCrossEntropy":
        """Weigh class k, of n_k among n images, by n / (K n_k), as scikit-learn's "balanced"; 1 without images."""
        from sklearn.utils.class_weight import compute_class_weight

        present = np.unique(labels)
        known = dict(
            zip(present.tolist(), compute_class_weight("balanced", classes=present, y=labels).tolist(), strict=True)
        )
        return cls(tuple(known.get(label, 1.0) for label in range(num_labels)))

    def targets(self, labels: torch.Tensor, num_labels: int, smoothing: float = 0.0) -> torch.Tensor:
        """Return class indices [B] or probabilities [B, K] as probabilities [B, K]."""
        return smooth_labels(labels, num_labels, smoothing)

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return the loss of logits [B, K] under probabilities [B, K], or under class indices [B]."""
        if labels.ndim == 1:
            return soft_cross_entropy(outputs, labels, num_items_in_batch)
        logits = outputs.logits.float()
        weights = torch.tensor(self.weights, device=logits.device)
        each = F.cross_entropy(logits, labels.to(logits), weight=weights, reduction="none")
        return _mean(each, labels, num_items_in_batch)
