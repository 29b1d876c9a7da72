"""Multi-label classification: average precision, and F1 with a threshold for every class, by scikit-learn.

The thresholds are given, or those with the best F1 of every class on the validation split.
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
from hf_vit.evaluation.protocols.frame import SingleTableResult, Table, draw_classes, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
@dataclass(frozen=True, repr=False)
class MultiLabelResult(SingleTableResult):
    """The result of `multi_label`.

    Attributes:
        average_precision: class -> area under the precision-recall curve, for the classes with images.
        f1: class -> F1 at its threshold.
        images: class -> number of images.
        thresholds: class -> probability from which the class is predicted.
        f1_micro: F1 over all classes and images together.
        loss: binary cross-entropy, summed over the classes and averaged over the images, nats.
        seconds: wall time, including the fit of the thresholds.
    """

    title: ClassVar[str] = "Multi-label"
    source: ClassVar[str] = "scikit-learn: average_precision_score, f1_score, precision_recall_curve"
    average_precision: dict[str, float]
    f1: dict[str, float]
    images: dict[str, int]
    thresholds: dict[str, float]
    f1_micro: float
    loss: float
    seconds: float = field(default=0.0, compare=False)

    @property
    def mean_average_precision(self) -> float:
        """Mean average precision over the classes with images (mAP)."""
        return float(np.mean(list(self.average_precision.values())))

    @property
    def f1_macro(self) -> float:
        """Mean F1 over the classes with images."""
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
    """Measure average precision and F1 of a multi-label model."""
    if not examination.data.multi_label:
        raise UserError(
            f"the images of '{examination.data.name}' have one class each, but --protocol multi-label needs "
            "several; choose --protocol top1"
        )
    names = [examination.model_label_names[number] for number in examination.model_classes]
    start = time.perf_counter()
    if thresholds is None:
        fit_logits, present = _collect_logits(examination, examination.require_fit_split(fit_split))
        thresholds = pick_thresholds(expit(fit_logits), present, names)
    elif missing := set(names) - set(thresholds):
        raise UserError(f"thresholds has no value for {sorted(missing)}; give one for every class")
    logits, truth = _collect_logits(examination, examination.split)
    return replace(compute_multi_label_metrics(logits, truth, names, thresholds), seconds=time.perf_counter() - start)


def compute_multi_label_metrics(
    logits: NDArray[np.float64], truth: NDArray[np.bool_], names: list[str], thresholds: Mapping[str, float]
) -> MultiLabelResult:
    """Compute the metrics of logits [n, K] for n images and K classes whose presence is `truth`, [n, K]."""
    from sklearn.metrics import average_precision_score, f1_score

    is_predicted = expit(logits) >= np.asarray([thresholds[name] for name in names])
    counts = truth.sum(axis=0)
    present = np.flatnonzero(counts)
    if not present.size:
        raise UserError("no evaluated image has a label; evaluate another --split")
    precision = {names[k]: float(average_precision_score(truth[:, k], logits[:, k])) for k in present}
    f1: Any = partial(f1_score, zero_division=0.0)  # pyright: ignore[reportArgumentType]
    losses = np.where(truth, -log_expit(logits), -log_expit(-logits))
    return MultiLabelResult(
        num_images=len(truth),
        average_precision=precision,
        f1={name: float(f1(truth[:, k], is_predicted[:, k])) for k, name in enumerate(names)},
        images=dict(zip(names, counts.tolist(), strict=True)),
        thresholds={name: float(thresholds[name]) for name in names},
        f1_micro=float(f1(truth.ravel(), is_predicted.ravel())),
        loss=float(losses.mean(axis=0).sum()),
    )


def pick_thresholds(probabilities: NDArray[np.float64], truth: NDArray[np.bool_], names: list[str]) -> dict[str, float]:
    """Return for every class the highest threshold with the best F1; 0.5 for a class without images."""
    from sklearn.metrics import precision_recall_curve

    thresholds = dict.fromkeys(names, 0.5)
    for k in np.flatnonzero(truth.any(axis=0)):
        precision, recall, limits = precision_recall_curve(truth[:, k], probabilities[:, k])
        f1 = 2 * precision[:-1] * recall[:-1] / np.maximum(precision[:-1] + recall[:-1], 1e-12)
        thresholds[names[k]] = float(limits[np.flatnonzero(f1 == f1.max())[-1]])
    return thresholds


def _collect_logits(examination: Examination, split: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the logits of the data's classes, [n, K], and which classes every image has, [n, K]."""
    batches = [(logits[:, examination.model_classes], labels) for logits, labels in examination.iterate_logits(split)]
    logits_of_images, truth = (np.concatenate(column) for column in zip(*batches, strict=True))
    return logits_of_images.astype(np.float64), truth > 0
