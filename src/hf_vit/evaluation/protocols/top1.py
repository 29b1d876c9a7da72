"""Evaluating an image classifier in one pass over a data set, in memory that does not depend on its size."""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from hf_vit.errors import UserError
from hf_vit.evaluation.reading import Collate, evaluating, finite_logits, image_batches, shown
from hf_vit.subjects.device import pick_device
from hf_vit.subjects.labels import label_names_of, match_labels, unique_names

if TYPE_CHECKING:
    import evaluate
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from PIL.Image import Image
    from transformers import PreTrainedModel

# A dense confusion matrix of more classes than this costs memory (21,841 classes: 3.8 GB) and shows nothing.
MAX_MATRIX_CLASSES = 1000
MAX_WRONG = 64
_THUMBNAIL_PX = 160


@dataclass(frozen=True, order=True)
class WrongImage:
    """A wrongly classified image: its place in the data set, true and predicted class, probability of the latter."""

    confidence: float
    index: int
    label: str
    prediction: str
    thumbnail: "Image | None" = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ClassificationResult:
    """What `evaluate_classifier` measured. Accuracies and errors are fractions in [0, 1].

    Attributes:
        num_images: images evaluated.
        label_names: the model's classes; names that occur twice carry their index.
        top1: share of images whose most likely class is right.
        top5: share of images whose class is among the five most likely; None below five classes.
        loss: mean negative log-likelihood of the true class, in nats.
        ece: expected calibration error, 15 bins (arXiv 1706.04599).
        per_class: top-1 accuracy of every class that has images.
        confusion_matrix: [K, K], row = true class, column = predicted; None above `MAX_MATRIX_CLASSES` classes.
        seconds: wall time of the pass, reading and preparing the images included.
        num_wrong: wrongly classified images.
        wrong: the most confident of them, most confident first, with small copies of the images.
    """

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

    @property
    def images_per_second(self) -> float:
        """Throughput of the whole pass."""
        return self.num_images / self.seconds

    def values(self) -> dict[str, Any]:
        """The measurements as facts.json keeps them; what does not apply is absent."""
        values: dict[str, Any] = {"top1": self.top1}
        if self.top5 is not None:
            values["top5"] = self.top5
        values |= {
            "loss": self.loss,
            "ece": self.ece,
            "num_classes": len(self.label_names),
            "images_per_second": round(self.images_per_second, 2),
        }
        if len(self.per_class) <= MAX_MATRIX_CLASSES:
            values["per_class"] = self.per_class
        return values


def evaluate_classifier(
    model: "PreTrainedModel",
    processor: Any,
    dataset: Any,
    *,
    label_names: Sequence[str],
    batch_size: int = 32,
    device: str | None = None,
    progress: bool = True,
    max_wrong: int = MAX_WRONG,
    num_workers: int = 0,
) -> ClassificationResult:
    """Measure a classifier on a labelled data set.

    Only running sums and the `max_wrong` most confident mistakes are kept, so a stream of any length fits in memory.
    Data and model are matched by the NAMES of their classes: the data may hold fewer classes, in any order.

    Args:
        model: hf_vit or transformers image classifier; runs in the dtype of its weights.
        processor: its image processor, or a transform: {"image": [PIL RGB], "label": [int]} -> {"pixel_values": [...]}.
        dataset: `datasets.Dataset` or `IterableDataset` with columns "image" (PIL) and "label" (int).
        label_names: the data's classes, in the order of its labels.
        batch_size: images a step.
        device: torch device string; by default CUDA where there is one, else the CPU.
        progress: show a progress bar on standard error.
        max_wrong: wrongly classified images to keep.
        num_workers: processes that read and prepare images; used for data sets that are not streamed.

    Raises:
        UserError: classes the model does not know, labels outside the classes, no images, outputs that are not finite.
    """
    import torch

    if batch_size < 1:
        raise UserError(f"batch size {batch_size} must be at least 1")
    names = unique_names(label_names_of(model))
    mapping = match_labels(label_names, label_names_of(model))
    place = pick_device(device)
    metrics = _metrics(names)
    mistakes = _Mistakes(names, max_wrong)
    batches = image_batches(dataset, batch_size, Collate(_prepare(processor), mapping), num_workers)
    total = len(dataset) if hasattr(dataset, "__len__") else None
    start, seen = time.perf_counter(), 0
    with evaluating(model, place), torch.inference_mode():
        for pixel_values, labels, images in shown(batches, total, progress=progress):
            logits = finite_logits(model, pixel_values.to(place))
            columns = _columns(logits.cpu(), labels)
            metrics.add_batch(**columns)
            mistakes.add(seen, columns, images)
            seen += len(images)
    if not seen:
        raise UserError("the data set holds no image; choose another split")
    return _result(metrics.compute(), mistakes, names, seen, time.perf_counter() - start)


def _prepare(processor: Any) -> "Callable[[list[Image], list[int]], torch.Tensor]":
    """What an image processor or a transform makes of images and labels: [B, C, H, W]."""
    import torch
    from transformers.image_processing_base import ImageProcessingMixin

    if isinstance(processor, ImageProcessingMixin):
        return lambda images, labels: cast(Any, processor)(images=images, return_tensors="pt")["pixel_values"]
    return lambda images, labels: torch.stack(list(processor({"image": images, "label": labels})["pixel_values"]))


class _Mistakes:
    """Counts the wrongly classified images and keeps the most confident ones."""

    def __init__(self, names: Sequence[str], limit: int) -> None:
        self.names, self.limit, self.count = names, limit, 0
        self._heap: list[WrongImage] = []

    def add(self, offset: int, columns: "dict[str, NDArray[Any]]", images: "list[Image]") -> None:
        wrong = (columns["predictions"] != columns["references"]).nonzero()[0]
        self.count += len(wrong)
        for row in wrong.tolist():
            confidence = float(columns["confidences"][row])
            if len(self._heap) >= self.limit and (not self._heap or confidence <= self._heap[0].confidence):
                continue
            label, prediction = (self.names[int(columns[name][row])] for name in ("references", "predictions"))
            entry = WrongImage(confidence, offset + row, label, prediction, _thumbnail(images[row]))
            heapq.heappush(self._heap, entry)
            if len(self._heap) > self.limit:
                heapq.heappop(self._heap)

    def kept(self) -> list[WrongImage]:
        return sorted(self._heap, key=lambda entry: (-entry.confidence, entry.index))


def _metrics(names: Sequence[str]) -> "evaluate.CombinedEvaluations":
    import evaluate

    from hf_vit.evaluation import metrics

    chosen: list[metrics.RunningMetric] = [
        metrics.Top1Accuracy(),
        metrics.PerClassAccuracy(names),
        metrics.ExpectedCalibrationError(),
        metrics.MeanLoss(),
    ]
    if len(names) >= 5:
        chosen.append(metrics.TopKAccuracy(5))
    if len(names) <= MAX_MATRIX_CLASSES:
        chosen.append(metrics.ConfusionMatrix(len(names)))
    return evaluate.combine(chosen)


def _columns(logits: "torch.Tensor", labels: "torch.Tensor") -> "dict[str, NDArray[Any]]":
    """The columns of `hf_vit.evaluation.metrics`: a few numbers an image instead of K logits."""
    import torch

    log_probabilities = torch.log_softmax(logits.double(), dim=-1)
    best = log_probabilities.topk(min(5, logits.shape[-1]), dim=-1)
    return {
        "predictions": best.indices[:, 0].numpy(),
        "references": labels.numpy(),
        "top_k": best.indices.numpy(),
        "confidences": best.values[:, 0].exp().numpy(),
        "losses": -log_probabilities.gather(1, labels[:, None])[:, 0].numpy(),
    }


def _result(
    values: dict[str, Any], mistakes: _Mistakes, names: list[str], num_images: int, seconds: float
) -> ClassificationResult:
    return ClassificationResult(
        num_images=num_images,
        label_names=names,
        top1=values["accuracy"],
        top5=values.get("top5_accuracy"),
        loss=values["loss"],
        ece=values["expected_calibration_error"],
        per_class=values["per_class_accuracy"],
        confusion_matrix=values.get("confusion_matrix"),
        seconds=seconds,
        num_wrong=mistakes.count,
        wrong=mistakes.kept(),
    )


def _thumbnail(image: "Image") -> "Image":
    small = image.copy()
    small.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
    return small
