"""Classification metrics as `evaluate.Metric`s that need no network and keep only running sums.

`evaluate.load` fetches a script, and its metrics store every prediction in a locked cache file; these fold each batch
into counts at once. Columns have the same names everywhere, so that `evaluate.combine` can feed all metrics at once:

| column        | shape  | meaning                                        |
|---------------|--------|------------------------------------------------|
| predictions   | [B]    | class of the largest logit                     |
| references    | [B]    | true class                                     |
| top_k         | [B, k] | classes of the k largest logits, best first    |
| confidences   | [B]    | probability of the predicted class             |
| probabilities | [B, K] | probability of every class                     |
| losses        | [B]    | loss of every image                            |
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import evaluate
import numpy as np
from datasets import Features, List, Value
from numpy.typing import NDArray
from sklearn.metrics import precision_recall_fscore_support, roc_auc_score

from hf_vit.evaluation.protocols.calibration import ConfidenceBins

_COLUMNS: dict[str, Any] = {
    "predictions": Value("int64"),
    "references": Value("int64"),
    "top_k": List(Value("int64")),
    "confidences": Value("float64"),
    "probabilities": List(Value("float32")),
    "losses": Value("float64"),
}


class RunningMetric(evaluate.Metric):
    """An `evaluate.Metric` that folds batches into running sums; `compute` returns the result and starts anew."""

    description_text: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    count: int

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(keep_in_memory=True, **kwargs)
        self.reset()

    def reset(self) -> None:
        """Forget everything that was added."""
        self.count = 0
        self._start()

    def add_batch(self, *, predictions: object = None, references: object = None, **kwargs: object) -> None:
        """Add a batch; every column this metric reads has one row an image."""
        given = {"predictions": predictions, "references": references, **kwargs}
        if unknown := sorted(set(given) - set(_COLUMNS)):
            raise ValueError(f"{self.name} does not know {unknown}; it reads {list(self.columns)}")
        if missing := [name for name in self.columns if given.get(name) is None]:
            raise ValueError(f"{self.name} also needs {missing}")
        arrays = {name: np.asarray(given[name]) for name in self.columns}
        if len({len(array) for array in arrays.values()}) > 1:
            raise ValueError(f"{self.name} got columns of unequal length: { {n: len(a) for n, a in arrays.items()} }")
        size = len(arrays[self.columns[0]])
        if size:
            self._update(**arrays)
        self.count += size

    def add(self, *, prediction: object = None, reference: object = None, **kwargs: object) -> None:
        """Add one image."""
        given = {"predictions": prediction, "references": reference, **kwargs}
        self.add_batch(**{name: None if value is None else [value] for name, value in given.items()})

    def compute(self, *, predictions: object = None, references: object = None, **kwargs: object) -> dict[str, Any]:
        """Return the result over everything that was added (and the columns given here), and start anew."""
        if predictions is not None or references is not None or kwargs:
            self.add_batch(predictions=predictions, references=references, **kwargs)
        if not self.count:
            raise ValueError(f"{self.name} has seen no image yet; call add_batch first")
        result = self._result()
        self.reset()
        return result

    def __len__(self) -> int:
        return self.count

    def _info(self) -> evaluate.EvaluationModuleInfo:
        return evaluate.EvaluationModuleInfo(
            description=self.description_text,
            citation="",
            inputs_description="\nColumns: " + ", ".join(self.columns),
            features=Features({name: _COLUMNS[name] for name in self.columns}),
        )

    def _build_data_dir(self) -> str:
        # The base class makes a folder here; nothing of ours is ever stored in one.
        return str(self._data_dir_root)

    @abstractmethod
    def _start(self) -> None:
        """Set the sums to zero."""

    @abstractmethod
    def _update(self, **columns: NDArray[Any]) -> None:
        """Fold one batch, [B] or [B, k] a column, into the sums."""

    @abstractmethod
    def _result(self) -> dict[str, Any]:
        """The result of all sums."""


class Top1Accuracy(RunningMetric):
    """Share of images whose most likely class is the true one: `{"accuracy": float}`."""

    description_text = "Share of images whose most likely class is the true one."
    columns = ("predictions", "references")

    def _start(self) -> None:
        self._hits = 0

    def _update(self, **columns: NDArray[Any]) -> None:
        self._hits += int((columns["predictions"] == columns["references"]).sum())

    def _result(self) -> dict[str, Any]:
        return {"accuracy": self._hits / self.count}


class TopKAccuracy(RunningMetric):
    """Share of images whose true class is among the k most likely: `{"top5_accuracy": float}` for k = 5."""

    description_text = "Share of images whose true class is among the k most likely ones."
    columns = ("top_k", "references")

    def __init__(self, k: int = 5, **kwargs: Any) -> None:
        self.k = k
        super().__init__(**kwargs)

    def _start(self) -> None:
        self._hits = 0

    def _update(self, **columns: NDArray[Any]) -> None:
        best = columns["top_k"]
        if best.ndim != 2 or best.shape[1] < self.k:
            raise ValueError(f"top-{self.k} accuracy needs top_k of shape [B, {self.k}] or wider, not {best.shape}")
        self._hits += int((best[:, : self.k] == columns["references"][:, None]).any(axis=1).sum())

    def _result(self) -> dict[str, Any]:
        return {f"top{self.k}_accuracy": self._hits / self.count}


class PerClassAccuracy(RunningMetric):
    """Accuracy (recall) of each class: `{"per_class_accuracy": {name: float}}`; a class without images is absent."""

    description_text = "Top-1 accuracy of the images of each class."
    columns = ("predictions", "references")

    def __init__(self, label_names: Sequence[str], **kwargs: Any) -> None:
        self.label_names = list(label_names)
        super().__init__(**kwargs)

    def _start(self) -> None:
        self._hits = np.zeros(len(self.label_names), dtype=np.int64)
        self._images = np.zeros(len(self.label_names), dtype=np.int64)

    def _update(self, **columns: NDArray[Any]) -> None:
        references = _checked(columns["references"], len(self.label_names), "references")
        self._images += np.bincount(references, minlength=len(self.label_names))
        right = references[columns["predictions"] == references]
        self._hits += np.bincount(right, minlength=len(self.label_names))

    def _result(self) -> dict[str, Any]:
        rows = zip(self.label_names, self._hits.tolist(), self._images.tolist(), strict=True)
        return {"per_class_accuracy": {name: hits / images for name, hits, images in rows if images}}


class PrecisionRecall(RunningMetric):
    """`{"precision", "recall", "f1"}`, each the mean over the classes that have images (scikit-learn's "macro")."""

    description_text = "Precision, recall and F1 of each class against the others, averaged over the classes."
    columns = ("predictions", "references")

    def _start(self) -> None:
        self._pairs: Counter[tuple[int, int]] = Counter()

    def _update(self, **columns: NDArray[Any]) -> None:
        self._pairs.update(zip(columns["references"].tolist(), columns["predictions"].tolist(), strict=True))

    def _result(self) -> dict[str, Any]:
        references, predictions = np.array(list(self._pairs)).T
        values = precision_recall_fscore_support(
            references,
            predictions,
            labels=np.unique(references),
            average="macro",
            sample_weight=list(self._pairs.values()),
            zero_division=0,  # pyright: ignore[reportArgumentType] - its hint is of a default alone
        )
        return dict(zip(("precision", "recall", "f1"), map(float, values[:3]), strict=True))


class AreaUnderRoc(RunningMetric):
    """`{"auc": float}`: area under the ROC curve of each class against the others, averaged over those with images.

    None where all images are of one class, and where the probabilities would take more than `MOST_PROBABILITIES`: to be
    exact it keeps them all.
    """

    description_text = "Area under the ROC curve of each class against the others, averaged over the classes."
    columns = ("references", "probabilities")
    MOST_PROBABILITIES: ClassVar[int] = 20_000_000  # 160 MB; of the 50,000 images and 1,000 classes of ImageNet none

    def _start(self) -> None:
        self._kept: list[tuple[NDArray[Any], NDArray[Any]]] | None = []
        self._size = 0

    def _update(self, **columns: NDArray[Any]) -> None:
        self._size += columns["probabilities"].size
        if self._kept is None or self._size > self.MOST_PROBABILITIES:
            self._kept = None
            return
        self._kept.append((columns["references"], columns["probabilities"]))

    def _result(self) -> dict[str, Any]:
        if self._kept is None:
            return {"auc": None}
        references, probabilities = map(np.concatenate, zip(*self._kept, strict=True))
        classes = np.unique(references)
        if len(classes) < 2:
            return {"auc": None}
        return {"auc": float(roc_auc_score(references[:, None] == classes, probabilities[:, classes]))}


class ConfidenceThresholds(RunningMetric):
    """`{"thresholds": [...]}`: what comes of answering only where the predicted class has at least some probability.

    For every threshold a dict of it, "answered" (share of the images), "precision" (share of the answers that are
    right), "recall" (share of the images that are answered rightly) and "f1" of the two.
    """

    description_text = "Precision, recall and F1 of answers above a probability."
    columns = ("predictions", "references", "confidences")
    THRESHOLDS: ClassVar[tuple[float, ...]] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

    def _start(self) -> None:
        self._right, self._wrong = np.zeros((2, len(self.THRESHOLDS)), dtype=np.int64)

    def _update(self, **columns: NDArray[Any]) -> None:
        is_right = columns["predictions"] == columns["references"]
        is_answered = columns["confidences"][:, None] >= np.array(self.THRESHOLDS)
        self._right += is_answered[is_right].sum(0)
        self._wrong += is_answered[~is_right].sum(0)

    def _result(self) -> dict[str, Any]:
        rows: list[dict[str, float]] = []
        for threshold, right, wrong in zip(self.THRESHOLDS, self._right.tolist(), self._wrong.tolist(), strict=True):
            rows.append(
                {
                    "threshold": threshold,
                    "answered": (right + wrong) / self.count,
                    "precision": right / (right + wrong) if right else 0.0,
                    "recall": right / self.count,
                    "f1": 2 * right / (self.count + right + wrong),
                }
            )
        return {"thresholds": rows}


class ConfusionMatrix(RunningMetric):
    """`{"confusion_matrix": [K, K] int64}`: row = true class, column = predicted class."""

    description_text = "Number of images of each true class (row) that were taken for each class (column)."
    columns = ("predictions", "references")

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        self.num_classes = num_classes
        super().__init__(**kwargs)

    def _start(self) -> None:
        self._matrix = np.zeros((self.num_classes, self.num_classes), dtype=np.int64)

    def _update(self, **columns: NDArray[Any]) -> None:
        references = _checked(columns["references"], self.num_classes, "references")
        predictions = _checked(columns["predictions"], self.num_classes, "predictions")
        np.add.at(self._matrix, (references, predictions), 1)

    def _result(self) -> dict[str, Any]:
        return {"confusion_matrix": self._matrix.copy()}


class ExpectedCalibrationError(RunningMetric):
    """`{"expected_calibration_error": float}`: mean gap between confidence and accuracy (arXiv 1706.04599, equation 3).

    Images are put into `num_bins` bins of equal width, (0, 1/M], (1/M, 2/M] …, by the probability of the predicted
    class; the gaps |accuracy - mean confidence| of the bins are averaged, weighted by their number of images.
    """

    description_text = "Gap between confidence and accuracy over equal-width bins (arXiv 1706.04599)."
    columns = ("predictions", "references", "confidences")

    def __init__(self, num_bins: int = 15, **kwargs: Any) -> None:
        self.num_bins = num_bins
        super().__init__(**kwargs)

    def _start(self) -> None:
        self._bins = ConfidenceBins(self.num_bins)

    def _update(self, **columns: NDArray[Any]) -> None:
        confidences = columns["confidences"].astype(np.float64)
        if not ((confidences >= 0) & (confidences <= 1 + 1e-6)).all():
            raise ValueError("confidences are probabilities in [0, 1]; apply a softmax to the logits first")
        self._bins.add(confidences, columns["predictions"] == columns["references"])

    def _result(self) -> dict[str, Any]:
        return {"expected_calibration_error": self._bins.expected_error()}


class MeanLoss(RunningMetric):
    """Mean of the images' losses: `{"loss": float}`."""

    description_text = "Mean of the images' losses."
    columns = ("losses",)

    def _start(self) -> None:
        self._sum = 0.0

    def _update(self, **columns: NDArray[Any]) -> None:
        self._sum += float(columns["losses"].astype(np.float64).sum())

    def _result(self) -> dict[str, Any]:
        return {"loss": self._sum / self.count}


def _checked(classes: NDArray[Any], num_classes: int, column: str) -> NDArray[np.int64]:
    """Class indices, all of them below `num_classes`."""
    if classes.min() < 0 or classes.max() >= num_classes:
        bad = classes[(classes < 0) | (classes >= num_classes)][0]
        raise ValueError(f"{column} holds class {bad}, outside the {num_classes} classes 0 to {num_classes - 1}")
    return classes.astype(np.int64)
