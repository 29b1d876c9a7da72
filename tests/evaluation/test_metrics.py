"""The running metrics against scikit-learn and against values computed by hand."""

import os
import socket

import evaluate
import numpy as np
import pytest
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_score,
    recall_score,
    roc_auc_score,
    top_k_accuracy_score,
)

from hf_vit.evaluation.metrics import (
    AreaUnderRoc,
    ConfidenceThresholds,
    ConfusionMatrix,
    ExpectedCalibrationError,
    MeanLoss,
    PerClassAccuracy,
    PrecisionRecall,
    Top1Accuracy,
    TopKAccuracy,
)

CLASSES = 7


def columns_of(count=200):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(count, CLASSES)) * 2
    references = generator.integers(0, CLASSES, count)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return {
        "predictions": logits.argmax(1),
        "references": references,
        "top_k": np.argsort(-logits, axis=1)[:, :5],
        "confidences": probabilities.max(1),
        "losses": -np.log(probabilities[np.arange(count), references]),
        "probabilities": probabilities,
    }


def metrics(bins=15):
    names = [f"class {index}" for index in range(CLASSES)]
    return [
        Top1Accuracy(), TopKAccuracy(5), PerClassAccuracy(names), ConfusionMatrix(CLASSES), MeanLoss(),
        ExpectedCalibrationError(num_bins=bins), PrecisionRecall(), AreaUnderRoc(), ConfidenceThresholds(),
    ]  # fmt: skip


def bin_by_bin(columns, bins):
    """The formula of arXiv 1706.04599."""
    total, hits, sure = 0.0, columns["predictions"] == columns["references"], columns["confidences"]
    for index in range(bins):
        inside = (sure > index / bins) & (sure <= (index + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(hits[inside].mean() - sure[inside].mean())
    return total


@pytest.mark.parametrize(("batch_size", "bins"), [(1, 15), (13, 1), (200, 40)])
def test_combined_metrics_equal_scikit_learn(batch_size, bins, tmp_path, monkeypatch):
    """No file is written and no network asked, as the base class of `evaluate` would."""

    def no_network(*_):
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    columns, every = columns_of(), list(range(CLASSES))
    combined = evaluate.combine(metrics(bins))
    for start in range(0, 200, batch_size):
        combined.add_batch(**{name: values[start : start + batch_size] for name, values in columns.items()})
    result = combined.compute()
    assert os.listdir(tmp_path) == []
    references, predictions, probabilities = (columns[name] for name in ("references", "predictions", "probabilities"))
    expected = {
        "accuracy": accuracy_score(references, predictions),
        "top5_accuracy": top_k_accuracy_score(references, probabilities, k=5, labels=every),
        "loss": log_loss(references, probabilities, labels=every),
        "expected_calibration_error": bin_by_bin(columns, bins),
        "precision": precision_score(references, predictions, average="macro"),
        "recall": recall_score(references, predictions, average="macro"),
        "f1": f1_score(references, predictions, average="macro"),
        "auc": roc_auc_score(references, probabilities, multi_class="ovr", average="macro"),
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    recalls = recall_score(references, predictions, average=None, labels=every)
    assert list(result["per_class_accuracy"].values()) == pytest.approx(list(recalls), abs=1e-12)
    assert (result["confusion_matrix"] == confusion_matrix(references, predictions, labels=every)).all()
    for row in result["thresholds"]:
        answered = columns["confidences"] >= row["threshold"]
        right = answered & (predictions == references)
        assert row["answered"] == pytest.approx(answered.mean())
        assert row["recall"] == pytest.approx(right.mean())
        assert row["precision"] == pytest.approx(right.sum() / answered.sum() if answered.any() else 0)
        assert row["f1"] == pytest.approx(2 * right.sum() / (answered.sum() + 200))


RANKED = [[0, 1, 2], [2, 0, 1], [1, 0, 2]]
FEW = {"references": [0, 0, 1], "probabilities": [[0.9, 0.1, 0.0], [0.2, 0.1, 0.7], [0.5, 0.4, 0.1]]}
ONE = {"references": [0, 0], "probabilities": [[0.9, 0.1], [0.2, 0.8]]}
# Two bins: (0, .5] holds .4 (right) and .5 (wrong): |1 - .9| = .1; (.5, 1] holds .9 and .8 (one right): .7; .8 / 4.
SURE = {"predictions": [0, 0, 1, 1], "references": [0, 1, 1, 0], "confidences": [0.4, 0.5, 0.9, 0.8]}


@pytest.mark.parametrize(
    ("metric", "columns", "value"),
    [
        (Top1Accuracy(), {"predictions": [0, 1, 2, 2], "references": [0, 1, 1, 0]}, 0.5),
        (TopKAccuracy(2), {"top_k": RANKED, "references": [1, 1, 0]}, pytest.approx(2 / 3)),
        (PerClassAccuracy(["a", "b", "none"]), {"predictions": [0, 1, 2], "references": [0, 0, 1]}, {"a": 0.5, "b": 0}),
        (ConfusionMatrix(2), {"predictions": [1, 1, 0], "references": [0, 0, 0]}, [[1, 2], [0, 0]]),
        (ExpectedCalibrationError(num_bins=2), SURE, pytest.approx(0.2)),
        (ExpectedCalibrationError(), {"predictions": [1], "references": [1], "confidences": [1.0]}, 0),
        (ExpectedCalibrationError(), {"predictions": [1], "references": [0], "confidences": [1.0]}, 1),
        (ExpectedCalibrationError(), {"predictions": [1], "references": [0], "confidences": [0.0]}, 0),
        # Class 0 outranks the other in one of two pairs, class 1 in both of two; one class alone has no area.
        (AreaUnderRoc(), FEW, 0.75),
        (AreaUnderRoc(), ONE, None),
    ],
)
def test_values_by_hand(metric, columns, value):
    (found,) = metric.compute(**columns).values()
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == value


def test_classes_without_images_do_not_count():
    result = PrecisionRecall().compute(predictions=[0, 0, 2], references=[0, 0, 1])
    assert result == {"precision": 0.5, "recall": 0.5, "f1": 0.5}


def test_a_metric_starts_anew_and_holds_no_images():
    """What it holds does not grow with the data, but for the area, which needs every probability."""

    def size(metric):
        return sum(value.nbytes if isinstance(value, np.ndarray) else 32 for value in vars(metric).values())

    columns = columns_of(100)
    for metric in metrics():
        given = {name: columns[name] for name in metric.columns}
        first = metric.compute(**given)
        with pytest.raises(ValueError, match="seen no image"):
            metric.compute()
        metric.add_batch(**given)
        before = size(metric)
        for _ in range(5):
            metric.add_batch(**given)
        assert size(metric) == before
        assert len(metric) == 600
        metric.compute()
        assert str(metric.compute(**given)) == str(first)


def test_an_area_that_would_need_too_much_memory_is_not_measured(monkeypatch):
    monkeypatch.setattr(AreaUnderRoc, "MOST_PROBABILITIES", 3)
    metric = AreaUnderRoc()
    for _ in range(2):
        metric.add_batch(references=[0], probabilities=[[0.9, 0.1]])
    assert metric.compute() == {"auc": None}


@pytest.mark.parametrize(
    ("metric", "columns", "message"),
    [
        (Top1Accuracy(), {"predictions": [0]}, r"also needs \['references'\]"),
        (Top1Accuracy(), {"predictions": [0, 1], "references": [0]}, "unequal length"),
        (Top1Accuracy(), {"predictions": [0], "references": [0], "reference": [0]}, r"does not know \['reference'\]"),
        (TopKAccuracy(3), {"top_k": [[0, 1]], "references": [0]}, r"\[B, 3\] or wider, not \(1, 2\)"),
        (ConfusionMatrix(2), {"predictions": [2], "references": [0]}, "predictions holds class 2, outside the 2"),
        (PerClassAccuracy(["a"]), {"predictions": [0], "references": [-1]}, "references holds class -1"),
        (ExpectedCalibrationError(), {"predictions": [0], "references": [0], "confidences": [3.0]}, "softmax"),
        (ExpectedCalibrationError(), {"predictions": [0], "references": [0], "confidences": [np.nan]}, "softmax"),
    ],
)
def test_wrong_columns_are_refused(metric, columns, message):
    with pytest.raises(ValueError, match=message):
        metric.add_batch(**columns)
    assert len(metric) == 0
