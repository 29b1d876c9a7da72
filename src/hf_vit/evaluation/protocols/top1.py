"""Accuracy, precision, calibration, loss, accuracy per class and mistakes, in one pass with one batch in memory."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

import numpy as np
import torch

from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.metrics import MAX_MATRIX_CLASSES, ClassificationMetrics
from hf_vit.evaluation.protocols.frame import (
    Extremes,
    ProtocolResult,
    Table,
    draw_images,
    make_thumbnail,
    percent,
    shorten_list,
    sort_worst_first,
)
from hf_vit.loading.model import make_names_unique
from hf_vit.results.figures import make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from PIL.Image import Image

MAX_WRONG = 64
_MAX_CLASS_ROWS, _MAX_NAMED_CLASSES, _MAX_COUNTED_CLASSES = 20, 40, 20
# Metrics of `ClassificationMetrics`: means over the classes, and metrics by confidence threshold.
OF_CLASSES = ("precision", "recall", "f1", "auc", "thresholds")
_NAMES = {"precision": "precision", "recall": "recall", "f1": "F1", "auc": "area under the ROC curve"}


@final
@dataclass(frozen=True, order=True)
class WrongImage:
    """A wrongly classified image.

    Attributes:
        confidence: probability of the predicted class.
        index: position among the evaluated images.
        label, prediction: true and predicted class.
        thumbnail: small copy of the image.
        file: file name, if the image is a file.
    """

    confidence: float
    index: int
    label: str
    prediction: str
    thumbnail: "Image | None" = field(default=None, compare=False, repr=False)
    file: str | None = field(default=None, compare=False)


def plot_confusion_matrix(matrix: "NDArray[np.int64]", label_names: Sequence[str], title: str = "") -> "Figure":
    """Draw a confusion matrix [K, K] (row: true class, column: predicted class), colored by the share of the row.

    Names are drawn for up to 40 classes, counts for up to 20.
    """
    size = len(label_names)
    side = float(np.clip(0.45 * size + 2.5, 4.5, 14))
    figure = make_figure(side, side)
    axes = figure.add_subplot()
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    heatmap = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(heatmap, ax=axes, label="share of the true class", fraction=0.046, pad=0.04)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if size <= _MAX_NAMED_CLASSES:
        names = [shorten_list(name) for name in label_names]
        axes.set_xticks(range(size), labels=names, rotation=90, parse_math=False)
        axes.set_yticks(range(size), labels=names, parse_math=False)
    if size <= _MAX_COUNTED_CLASSES:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            color = "white" if share[row, column] > 0.5 else "black"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=color, fontsize=8)
    if title:
        axes.set_title(title, parse_math=False)
    return figure


def plot_wrong_images(wrong: Sequence[WrongImage], limit: int = 25) -> "Figure":
    """Draw the most confident mistakes as a grid of images with "true → predicted" and the confidence."""
    entries = [entry for entry in wrong if entry.thumbnail is not None][:limit]
    return draw_images([entry.thumbnail for entry in entries], [_make_title(entry) for entry in entries])


def _make_title(entry: WrongImage) -> str:
    """Return the title of a mistake in the grid."""
    name = f"image {entry.index}" if entry.file is None else shorten_list(entry.file)
    answers = f"{shorten_list(entry.label, 16)} → {shorten_list(entry.prediction, 16)}"
    return f"{answers}\n{entry.confidence:.0%} · {name}"


@final
@dataclass(frozen=True, repr=False)
class ClassificationResult(ProtocolResult):
    """The result of `top1`.

    Attributes:
        num_images: number of evaluated images.
        label_names: the model's classes; names that occur twice have their index appended.
        top1: top-1 accuracy.
        top5: top-5 accuracy; None for fewer than five classes.
        loss: mean negative log-likelihood of the true class, nats.
        ece: expected calibration error with 15 bins (arXiv 1706.04599).
        per_class: top-1 accuracy of every class with images.
        confusion_matrix: [K, K] (row: true class, column: predicted class); None above `MAX_MATRIX_CLASSES` classes.
        seconds: wall time, including reading and preparing images.
        num_wrong: number of wrongly classified images.
        wrong: the most confident mistakes in descending order, with thumbnails.
        precision, recall, f1: means over the classes with images; None in records of version 0.1.
        auc: see `ClassificationMetrics`; None if it is unknown.
        thresholds: see `ClassificationMetrics`.
    """

    title: ClassVar[str] = "Accuracy"
    source: ClassVar[str] = "calibration error: arXiv 1706.04599"
    num_images: int
    label_names: list[str]
    top1: float
    top5: float | None
    loss: float
    ece: float
    per_class: dict[str, float]
    confusion_matrix: "NDArray[np.int64] | None"
    seconds: float
    num_wrong: int
    wrong: list[WrongImage]
    precision: float | None = None
    recall: float | None = None
    f1: float | None = None
    auc: float | None = None
    thresholds: Sequence[Mapping[str, float]] = ()

    @property
    def images_per_second(self) -> float:
        """Throughput including reading and preparing images."""
        return self.num_images / self.seconds

    def values(self) -> dict[str, Any]:
        """Return the metrics as facts.json records them; results per class only for few classes."""
        values: dict[str, Any] = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "ece": self.ece}
        values |= {"num_classes": len(self.label_names), **{name: getattr(self, name) for name in _NAMES}}
        values["thresholds"] = list(self.thresholds) or None
        values["per_class"] = self.per_class if len(self.per_class) <= MAX_MATRIX_CLASSES else None
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def restore(cls, values: Mapping[str, Any], **others: Any) -> Self:
        num_wrong = round((1 - values["top1"]) * others["num_images"])
        pictured: dict[str, Any] = {"confusion_matrix": None, "num_wrong": num_wrong, "wrong": []}
        return super().restore({"top5": None, "per_class": {}, **values}, **pictured, **others)

    def record(self, protocol: str, settings: dict[str, Any], pictures: list[str]) -> dict[str, Any]:
        """Return the values of a record as in version 0.1: a record without a protocol is of this one."""
        values = self.values() | {"images_per_second": round(self.images_per_second, 2)}
        return values | ({"pictures": pictures} if pictures else {})

    def headline(self) -> dict[str, float]:
        top5 = {} if self.top5 is None else {"top-5 accuracy": self.top5}
        return {"top-1 accuracy": self.top1, **top5, "expected calibration error": self.ece}

    def tables(self, judged: str) -> list[Table]:
        """Return the metrics, the classes from the worst up (of more than 20 only 10), and the thresholds."""
        rows = [[name, percent(value)] for name, value in self.headline().items()]
        means = ((f"{title} (macro)", getattr(self, name)) for name, title in _NAMES.items())
        rows += [[title, percent(value)] for title, value in means if value is not None]
        rows += [
            ["loss (nats)", f"{self.loss:.4f}"],
            ["misclassified", f"{self.num_wrong:,}"],
            ["images/s", f"{self.images_per_second:,.1f}"],
        ]
        classes = sort_worst_first(self.per_class)
        title = "accuracy per class"
        if len(classes) > _MAX_CLASS_ROWS:
            classes = classes[: _MAX_CLASS_ROWS // 2]
            title = f"the {len(classes)} worst of {len(self.per_class)} classes"
        header = ["confidence at least", "share of images", "precision", "recall", "F1"]
        # Of thresholds with the same images only the last, and none without images.
        distinct = {row["answered"]: row for row in self.thresholds if row["answered"]}.values()
        thresholds = [[percent(value) for value in row.values()] for row in distinct]
        tables = [Table([], rows, judged), Table(["class", "top-1 accuracy"], classes, title)]
        if thresholds:
            tables.append(Table(header, thresholds, "by confidence threshold"))
        return tables

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        """Draw the confusion matrix of up to 1,000 classes, and the mistakes if there are any."""
        matrix = self.confusion_matrix
        return {
            "confusion_matrix.png": None if matrix is None else plot_confusion_matrix(matrix, self.label_names, judged),
            "wrong_images.png": plot_wrong_images(self.wrong) if self.wrong else None,
        }


def top1(examination: Examination, *, max_wrong: int = MAX_WRONG) -> ClassificationResult:
    """Measure accuracy, calibration, loss and accuracy per class, and collect confident mistakes.

    Only running sums and the `max_wrong` most confident mistakes are in memory, so streams may have any length. Classes
    of data and model are matched by name, so the data may have fewer classes in any order.

    Raises:
        UserError: the model lacks a class, a label is not a class, there are no images, or outputs are NaN or infinite.
    """
    names = make_names_unique(examination.model_label_names)
    sums = ClassificationMetrics(names)
    mistakes = Extremes[WrongImage](max_wrong)
    start = time.perf_counter()
    num_images = num_wrong = 0
    for logits, labels, images in examination.iterate_logits_with_images():
        log_probabilities = torch.log_softmax(logits.double(), dim=-1)
        sums.add_batch(predictions=log_probabilities, references=labels)
        predictions = log_probabilities.numpy().argmax(axis=1)
        confidences = log_probabilities.amax(dim=1).exp().tolist()
        wrong = np.flatnonzero(predictions != labels.numpy()).tolist()
        num_wrong += len(wrong)
        for row in wrong:
            label, prediction = names[int(labels[row])], names[predictions[row]]
            index = num_images + row
            mistakes.add(confidences[row], _make_wrong_image, confidences[row], index, label, prediction, images[row])
        num_images += len(images)
    values = sums.compute()
    return ClassificationResult(
        num_images=num_images,
        label_names=names,
        top1=values["accuracy"],
        top5=values.get("top5_accuracy"),
        loss=values["loss"],
        ece=values["expected_calibration_error"],
        per_class=values["per_class_accuracy"],
        confusion_matrix=values.get("confusion_matrix"),
        seconds=time.perf_counter() - start,
        num_wrong=num_wrong,
        wrong=[replace(entry, file=examination.file_name(entry.index)) for entry in mistakes.entries],
        **{name: values[name] for name in OF_CLASSES},
    )


def _make_wrong_image(confidence: float, index: int, label: str, prediction: str, image: "Image") -> WrongImage:
    return WrongImage(confidence, index, label, prediction, make_thumbnail(image))
