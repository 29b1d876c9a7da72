"""What answers for a model: its head where it knows the data's classes, else a linear probe, which can be attacked too.

Legend: B batch, C channels, H x W px, D features, K classes, n images.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.probes import STRENGTHS, Probe
from hf_vit.evaluation.result_warnings import EACH_BY_ITSELF
from hf_vit.families import problem_type_of
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.outputs import pre_logits

HEAD, PROBE = "head", "linear probe"
# The logit of a class without a training image, which is never the answer.
NEVER = -1e9


def judged_by(subject: LoadedModel, data: ImageData, probe: bool) -> str:
    """`HEAD` where the model's own head knows the data's classes, else `PROBE`.

    Args:
        subject: the model.
        data: its class names decide.
        probe: let a linear probe answer where the head cannot.

    Raises:
        UserError: the model has no head for these classes, and no probe was asked for.
    """
    try:
        subject.classes_of(data.label_names)
    except UserError as error:
        if not probe:
            raise UserError(f"{subject.name}: {error}; or let a linear probe answer (--probe)") from error
        return PROBE
    return HEAD


def answering(
    subject: LoadedModel, judge: str, examination: Examination, probe_images: int | None
) -> tuple[LoadedModel, list[str]]:
    """The subject that answers with the data's classes, and what must be said about it.

    For `PROBE` the probe is trained here, on the train split.
    """
    if judge == HEAD:
        is_multi_label = problem_type_of(subject.model) == "multi_label_classification"
        return subject, [EACH_BY_ITSELF] if is_multi_label else []
    head, strength = fit_probe(examination, probe_images)
    note = f"a linear probe (C = {strength:g}) of {head.in_features} features answers"
    return _probed(subject, head, examination.data.label_names), [note]


def untrained(subject: LoadedModel, judge: str, data: ImageData, sample: torch.Tensor) -> LoadedModel:
    """As `answering`, for timing alone: a probe, if it takes one, has not learned anything.

    Args:
        subject: the model.
        judge: `HEAD` or `PROBE`.
        data: tells the number of classes.
        sample: images as the model takes them, [B, C, H, W].
    """
    if judge == HEAD:
        return subject
    with torch.inference_mode():
        size = pre_logits(subject.model, sample).shape[1]
    return _probed(subject, nn.Linear(size, len(data.label_names)).to(sample.device), data.label_names)


def _probed(subject: LoadedModel, head: nn.Linear, label_names: list[str]) -> LoadedModel:
    return replace(subject, model=ProbedForImageClassification(subject.model, head, label_names).eval())


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
        image_size = getattr(getattr(body, "config", None), "image_size", None)
        self.config = SimpleNamespace(
            num_labels=len(label_names), id2label=dict(enumerate(label_names)), image_size=image_size
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Logits [B, K]."""
        return self.head(pre_logits(self.body, pixel_values).to(self.head.weight.dtype))


def fit_probe(examination: Examination, num_images: int | None = None) -> tuple[nn.Linear, float]:
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
    weight, bias = np.zeros((num_classes, slopes.shape[1])), np.full(num_classes, NEVER)
    weight[regression.classes_] = slopes / scaler.scale_
    bias[regression.classes_] = offsets - (slopes / scaler.scale_) @ scaler.mean_
    return weight, bias
