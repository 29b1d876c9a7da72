"""The metrics of a classifier as one `evaluate.Metric`, which needs no network and keeps only running sums.

`evaluate.load` would download a script, and its metrics store every prediction in a locked cache file.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import evaluate
import numpy as np
import torch
from datasets import Features, List, Value
from numpy.typing import NDArray
from sklearn.metrics import precision_recall_fscore_support, roc_auc_score

from hf_vit.evaluation.protocols.calibration import ReliabilitySums
from hf_vit.evaluation.reading import find_largest

# A larger confusion matrix is unreadable and needs much memory (21,841 classes: 3.8 GB).
MAX_MATRIX_CLASSES = 1000


class ClassificationMetrics(evaluate.Metric):
    """Accuracy, precision, recall, calibration and loss of a classifier; `compute` returns them and resets the sums.

    `predictions` are the logarithms of the probabilities of K classes, [B, K], `references` the true classes, [B].

    The result has accuracy, loss and expected_calibration_error; top5_accuracy for five or more classes;
    per_class_accuracy (name -> recall) for classes with images, and the means of precision, recall, f1 and auc
    (`compute_area_under_roc`) over these classes; thresholds, the metrics of answering only above a probability; and
    for up to 1,000 classes confusion_matrix [K, K] (row: true class).
    """

    THRESHOLDS: ClassVar[tuple[float, ...]] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
    MOST_PROBABILITIES: ClassVar[int] = 20_000_000  # 160 MB; more, as for ImageNet, are not stored and give no auc

    def __init__(self, label_names: Sequence[str]) -> None:
        self.label_names = list(label_names)
        self.k = min(5, len(label_names))
        super().__init__(keep_in_memory=True)
        self.reset()

    def reset(self) -> None:
        """Reset all sums."""
        self.count = self._hits = 0
        self._reliability = ReliabilitySums()
        self._pairs: Counter[tuple[int, int]] = Counter()  # (true class, predicted class) -> images
        self._right, self._wrong = np.zeros((2, len(self.THRESHOLDS)), dtype=np.int64)
        self._stored: list[tuple[NDArray[Any], NDArray[Any]]] | None = []

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: object) -> None:
        """Add a batch; raise ValueError if the shapes do not fit the classes, or values are out of range."""
        size = len(self.label_names)
        shapes = np.shape(predictions), np.shape(references)
        if kwargs or len(shapes[1]) != 1 or shapes[0] != (*shapes[1], size):
            others = f" and {', '.join(kwargs)}" if kwargs else ""
            raise ValueError(
                f"the batch has predictions of the shape {shapes[0]} and references of {shapes[1]}{others}; give "
                f"logarithms of probabilities [B, {size}] and classes [B] alone"
            )
        if not shapes[1][0]:
            return
        log_probabilities, classes = torch.as_tensor(predictions), np.asarray(references)
        if classes.min() < 0 or classes.max() >= size:
            raise ValueError(
                f"references has classes from {classes.min()} to {classes.max()}, but the model's classes are 0 to "
                f"{size - 1}; give class numbers of this model"
            )
        if not log_probabilities.max() <= 1e-6:
            raise ValueError(
                f"predictions reach {log_probabilities.max():g}, but logarithms of probabilities are at most 0; apply "
                "log_softmax to the logits first"
            )
        top_classes = find_largest(log_probabilities, self.k).numpy()
        predicted = top_classes[:, 0]
        confidences = log_probabilities.amax(dim=1).exp().numpy()
        losses = -log_probabilities.numpy()[np.arange(len(classes)), classes]
        is_right = predicted == classes
        self._pairs.update(zip(classes.tolist(), predicted.tolist(), strict=True))
        self._hits += int((top_classes == classes[:, None]).sum())
        self._reliability.add_confidences(confidences, is_right, losses)
        is_answered = confidences[:, None] >= np.array(self.THRESHOLDS)
        self._right += is_answered[is_right].sum(0)
        self._wrong += is_answered[~is_right].sum(0)
        self.count += len(classes)
        if self.count * size > self.MOST_PROBABILITIES:
            self._stored = None
        if self._stored is not None:
            self._stored.append((classes, log_probabilities.exp().numpy()))

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: object) -> None:
        """Add one image."""
        self.add_batch(predictions=np.asarray(prediction)[None], references=np.asarray(reference)[None], **kwargs)

    def compute(self, *, predictions: Any = None, references: Any = None, **kwargs: object) -> dict[str, Any]:
        """Add the given images, return the metrics of all images, and reset all sums."""
        if predictions is not None or references is not None or kwargs:
            self.add_batch(predictions=predictions, references=references, **kwargs)
        if not self.count:
            raise ValueError("no image was added yet; call add_batch before the results are read")
        result = self._compute_result()
        self.reset()
        return result

    def __len__(self) -> int:
        return self.count

    def _info(self) -> evaluate.EvaluationModuleInfo:
        features = Features({"predictions": List(Value("float64")), "references": Value("int64")})
        return evaluate.EvaluationModuleInfo(
            description=self.__doc__ or "", citation="", inputs_description="", features=features
        )

    def _build_data_dir(self) -> str:
        return str(self._data_dir_root)  # the base class would create an unused folder

    def _compute_result(self) -> dict[str, Any]:
        """Compute all metrics from the sums."""
        size = len(self.label_names)
        images, hits = np.zeros((2, size), dtype=np.int64)
        for (true, predicted), number in self._pairs.items():
            images[true] += number
            hits[true] += number * (true == predicted)
        per_class = {self.label_names[k]: int(hits[k]) / int(images[k]) for k in images.nonzero()[0]}
        # Every pair of a true and a predicted class occurs once, with the number of its images as weight.
        references, predictions = np.array(list(self._pairs)).T
        reliability = self._reliability.result()
        result: dict[str, Any] = {
            "accuracy": int(hits.sum()) / self.count,
            "loss": reliability.loss,
            "expected_calibration_error": reliability.ece,
            "per_class_accuracy": per_class,
            **compute_macro_averages(references, predictions, list(self._pairs.values())),
            "auc": None,
            "thresholds": [],
        }
        if self._stored is not None:
            result["auc"] = compute_area_under_roc(*map(np.concatenate, zip(*self._stored, strict=True)))
        counts = zip(self.THRESHOLDS, self._right.tolist(), self._wrong.tolist(), strict=True)
        for threshold, right, wrong in counts:
            metrics = {
                "threshold": threshold,
                "answered": (right + wrong) / self.count,  # share of images above the threshold
                "precision": right / (right + wrong) if right else 0.0,
                "recall": right / self.count,  # share of all images
                "f1": 2 * right / (self.count + right + wrong),
            }
            result["thresholds"].append(metrics)
        if size >= 5:
            result["top5_accuracy"] = self._hits / self.count
        if size <= MAX_MATRIX_CLASSES:
            result["confusion_matrix"] = np.zeros((size, size), dtype=np.int64)
            np.add.at(result["confusion_matrix"], (references, predictions), list(self._pairs.values()))
        return result


def compute_macro_averages(
    references: NDArray[Any], predictions: NDArray[Any], weights: Sequence[int] | None = None
) -> dict[str, float]:
    """Return the means of precision, recall and f1 over the classes with images (scikit-learn's "macro")."""
    values = precision_recall_fscore_support(
        references,
        predictions,
        labels=np.unique(references),
        average="macro",
        sample_weight=weights,
        zero_division=0,  # pyright: ignore[reportArgumentType] - its type hint is too narrow
    )
    return dict(zip(("precision", "recall", "f1"), map(float, values[:3]), strict=True))


def compute_area_under_roc(references: NDArray[Any], probabilities: NDArray[Any]) -> float | None:
    """Return the mean area under the ROC curve of every class with images against all others; None for one class.

    `references` are the true classes [n] of n images, `probabilities` [n, K] those of K classes.
    """
    classes = np.unique(references)
    if len(classes) < 2:
        return None
    return float(roc_auc_score(references[:, None] == classes, probabilities[:, classes]))
