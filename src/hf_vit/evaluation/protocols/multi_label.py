"""Several classes an image, or none: average precision, and F1 at thresholds of their own, by scikit-learn.

The thresholds are those of the best F1 of every class on the validation split, or what is given.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_expit

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import OneTableResult, Table, draw_classes, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
@dataclass(frozen=True)
class MultiLabelResult(OneTableResult):
    """What `multi_label` measured of every class."""

    title: ClassVar[str] = "Multi-label"
    source: ClassVar[str] = "scikit-learn: average_precision_score, f1_score, precision_recall_curve"
    num_images: int
    average_precision: dict[str, float]  # of the classes that have images: the area under precision over recall
    f1: dict[str, float]  # at the class's threshold
    images: dict[str, int]
    thresholds: dict[str, float]  # the probability from which on the class is answered
    f1_micro: float  # over all classes and images together, at these thresholds
    loss: float  # binary cross-entropy summed over the classes, mean over the images, in nats
    seconds: float = field(default=0.0, compare=False)  # wall time, the fit of the thresholds included

    @property
    def mean_average_precision(self) -> float:
        """The mean over the classes that have images (mAP)."""
        return float(np.mean(list(self.average_precision.values())))

    @property
    def f1_macro(self) -> float:
        """The mean over the classes that have images."""
        return float(np.mean([self.f1[name] for name in self.average_precision]))

    def values(self) -> dict[str, Any]:
        names = ("mean_average_precision", "f1_macro", "f1_micro", "loss", "thresholds")
        per_class = {"average_precision": self.average_precision, "f1": self.f1, "images": self.images}
        return {**{name: getattr(self, name) for name in names}, "classes": per_class}

    def headline(self) -> dict[str, float]:
        return {
            "mean average precision": self.mean_average_precision,
            "F1, mean over classes": self.f1_macro,
            "F1, all answers": self.f1_micro,
        }

    def table(self) -> Table:
        rows = [
            [name, f"{self.images[name]:,}", percent(precision), percent(self.f1[name]), f"{self.thresholds[name]:.3f}"]
            for name, precision in self.average_precision.items()
        ]
        total = ["all", f"{self.num_images:,}", percent(self.mean_average_precision), percent(self.f1_macro), ""]
        return Table(["class", "images", "average precision", "F1", "threshold"], [*rows, total])

    def draw(self) -> "Figure":
        return draw_classes(self.average_precision, "average precision")


def multi_label(
    examination: Examination, *, fit_split: str = "validation", thresholds: Mapping[str, float] | None = None
) -> MultiLabelResult:
    """Measure how well every class is told apart from its absence."""
    if not examination.data.multi_label:
        raise UserError(f"the images of '{examination.data.name}' have one class per image; choose --protocol top1")
    names, start = examination.data.label_names, time.perf_counter()
    if thresholds is None:
        fitted, present = _answers(examination, examination.learning_split(fit_split))
        thresholds = best_thresholds(expit(fitted), present, names)
    logits, truth = _answers(examination, examination.split)
    return replace(judge(logits, truth, names, thresholds), seconds=time.perf_counter() - start)


def judge(
    logits: NDArray[np.float64], truth: NDArray[np.bool_], names: list[str], thresholds: Mapping[str, float]
) -> MultiLabelResult:
    """Return the result of logits [n, K] for classes that are there or not, [n, K]."""
    from sklearn.metrics import average_precision_score, f1_score

    limits = np.asarray([thresholds[name] for name in names])
    answers, counts = expit(logits) >= limits, truth.sum(axis=0)
    there = np.flatnonzero(counts)
    if not there.size:
        raise UserError("no evaluation image has a label; choose another split")
    precision = {names[k]: float(average_precision_score(truth[:, k], logits[:, k])) for k in there}
    f1: Any = partial(f1_score, zero_division=0.0)  # pyright: ignore[reportArgumentType]
    losses = np.where(truth, -log_expit(logits), -log_expit(-logits))
    return MultiLabelResult(
        num_images=len(truth),
        average_precision=precision,
        f1={name: float(f1(truth[:, k], answers[:, k])) for k, name in enumerate(names)},
        images=dict(zip(names, counts.tolist(), strict=True)),
        thresholds={name: float(thresholds[name]) for name in names},
        f1_micro=float(f1(truth.ravel(), answers.ravel())),
        loss=float(losses.mean(axis=0).sum()),
    )


def best_thresholds(probabilities: NDArray[np.float64], truth: NDArray[np.bool_], names: list[str]) -> dict[str, float]:
    """Return for every class the threshold of the best F1, of equals the highest; 0.5 for a class without images."""
    from sklearn.metrics import precision_recall_curve

    chosen = dict.fromkeys(names, 0.5)
    for k in np.flatnonzero(truth.any(axis=0)):
        precision, recall, limits = precision_recall_curve(truth[:, k], probabilities[:, k])
        f1 = 2 * precision[:-1] * recall[:-1] / np.maximum(precision[:-1] + recall[:-1], 1e-12)
        chosen[names[k]] = float(limits[np.flatnonzero(f1 == f1.max())[-1]])
    return chosen


def _answers(examination: Examination, split: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return logits of the data's classes [n, K], and which are there [n, K]."""
    batches = [(logits[:, examination.model_classes], labels) for logits, labels in examination.logits(split)]
    answers, truth = (np.concatenate(column) for column in zip(*batches, strict=True))
    return answers.astype(np.float64), truth > 0
