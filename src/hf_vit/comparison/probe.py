"""A linear probe as a head: a model without one for the data's classes answers through it, and can be attacked.

Legend: B batch, C channels, H x W px, D features, K classes, n images.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.probes import STRENGTHS, Probe
from hf_vit.subjects.features import pre_logits

if TYPE_CHECKING:
    from hf_vit.evaluation.examination import Examination

# A class without a training image is never the answer.
_NEVER = -1e9


@final
class ProbedForImageClassification(nn.Module):
    """Frozen features and a linear head: pixels [B, C, H, W] -> logits [B, K].

    Args:
        body: a model that `pre_logits` reads.
        head: on its features.
        label_names: the classes, in the order of the logits.
    """

    def __init__(self, body: nn.Module, head: nn.Linear, label_names: list[str]) -> None:
        super().__init__()
        self.body, self.head = body, head
        image_size: Any = getattr(getattr(body, "config", None), "image_size", None)
        self.config = SimpleNamespace(
            num_labels=len(label_names), id2label=dict(enumerate(label_names)), image_size=image_size
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Logits [B, K]."""
        return self.head(pre_logits(self.body, pixel_values).to(self.head.weight.dtype))


def fit_probe(examination: "Examination", num_images: int | None = None) -> tuple[nn.Linear, float]:
    """The logistic regression of scikit-learn on standardised features of the training images, as a linear layer.

    Its strength is the one of `STRENGTHS` that answers best on the validation images; of equals the smallest.

    Args:
        examination: the model and the data.
        num_images: learn from so many training images at most, drawn by the examination's seed.

    Returns:
        The layer, on the model's device, and scikit-learn's C.

    Raises:
        UserError: there is no train or validation split, or one of them judges.
    """
    train, validation = (examination.learning_split(name) for name in ("train", "validation"))
    labels = examination.labels(train)
    rows = np.random.default_rng(examination.seed).permutation(len(labels))[:num_images]
    features, learned = examination.features(train, sorted(rows.tolist()))
    if len(np.unique(learned)) < 2:
        raise UserError(f"split '{train}' has images of one class only; a probe needs at least two")
    judged, truth = examination.features(validation)
    probes = [Probe.fit(features, learned, strength) for strength in STRENGTHS]
    best = max(probes, key=lambda probe: probe.score(judged, truth))
    weight, bias = _folded(best.pipeline, len(examination.data.label_names))
    head = nn.Linear(weight.shape[1], len(bias))
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(weight))
        head.bias.copy_(torch.from_numpy(bias))
    return head.to(next(examination.subject.model.parameters()).device), best.strength


def _folded(pipeline: Any, num_classes: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weights [K, D] and biases [K] on raw features of a regression on standardised ones."""
    scaler, regression = pipeline[0], pipeline[-1]
    slopes, offsets = regression.coef_, regression.intercept_
    if len(slopes) == 1:  # two classes share one row: that of the second, against the first
        slopes, offsets = np.concatenate([0 * slopes, slopes]), np.concatenate([0 * offsets, offsets])
    weight, bias = np.zeros((num_classes, slopes.shape[1])), np.full(num_classes, _NEVER)
    weight[regression.classes_] = slopes / scaler.scale_
    bias[regression.classes_] = offsets - (slopes / scaler.scale_) @ scaler.mean_
    return weight, bias
