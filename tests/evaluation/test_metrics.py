"""The metrics against scikit-learn and against values computed by hand."""

import os
import socket
from pathlib import Path

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
    RunningMetric,
    Top1Accuracy,
    TopKAccuracy,
)

CLASSES = 7


def _columns(count: int = 200, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, CLASSES)) * 2
    references = generator.integers(0, CLASSES, count)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    columns = {
        "predictions": logits.argmax(1),
        "references": references,
        "top_k": np.argsort(-logits, axis=1)[:, :5],
        "confidences": probabilities.max(1),
        "losses": -np.log(probabilities[np.arange(count), references]),
    }
    return columns, probabilities


def _metrics() -> list[RunningMetric]:
    names = [f"class {index}" for index in range(CLASSES)]
    return [
        Top1Accuracy(), TopKAccuracy(5), PerClassAccuracy(names), ConfusionMatrix(CLASSES),
        ExpectedCalibrationError(), MeanLoss(),
    ]  # fmt: skip


def _bin_by_bin(columns: dict[str, np.ndarray], bins: int) -> float:
    """The formula of arXiv 1706.04599, read aloud."""
    total, hits = 0.0, columns["predictions"] == columns["references"]
    for index in range(bins):
        low, high = index / bins, (index + 1) / bins
        inside = (columns["confidences"] > low) & (columns["confidences"] <= high)
        if inside.any():
            gap = abs(hits[inside].mean() - columns["confidences"][inside].mean())
            total += inside.sum() / len(hits) * gap
    return total


@pytest.mark.parametrize("batch_size", [1, 13, 200])
def test_combined_metrics_equal_scikit_learn(batch_size: int) -> None:
    columns, probabilities = _columns()
    combined = evaluate.combine(_metrics())
    for start in range(0, 200, batch_size):
        combined.add_batch(**{name: values[start : start + batch_size] for name, values in columns.items()})
    result = combined.compute()
    references, predictions = columns["references"], columns["predictions"]
    every = list(range(CLASSES))
    assert result["accuracy"] == pytest.approx(accuracy_score(references, predictions), abs=1e-12)
    expected = top_k_accuracy_score(references, probabilities, k=5, labels=every)
    assert result["top5_accuracy"] == pytest.approx(expected, abs=1e-12)
    recalls = recall_score(references, predictions, average=None, labels=every)
    assert list(result["per_class_accuracy"].values()) == pytest.approx(list(recalls), abs=1e-12)
    assert (result["confusion_matrix"] == confusion_matrix(references, predictions, labels=every)).all()
    assert result["loss"] == pytest.approx(log_loss(references, probabilities, labels=every), abs=1e-12)
    assert result["expected_calibration_error"] == pytest.approx(_bin_by_bin(columns, 15), abs=1e-12)


def test_calibration_error_by_hand() -> None:
    # Two bins: (0, .5] holds .4 (right) and .5 (wrong): |1 - .9| = .1; (.5, 1] holds .9 and .8 (one right):
    # |1 - 1.7| = .7; over four images: .8 / 4.
    metric = ExpectedCalibrationError(num_bins=2)
    result = metric.compute(predictions=[0, 0, 1, 1], references=[0, 1, 1, 0], confidences=[0.4, 0.5, 0.9, 0.8])
    assert result == {"expected_calibration_error": pytest.approx(0.2)}


@pytest.mark.parametrize("bins", [1, 10, 15, 40])
def test_calibration_error_for_other_bins(bins: int) -> None:
    columns, _ = _columns(seed=bins)
    given = {name: columns[name] for name in ("predictions", "references", "confidences")}
    result = ExpectedCalibrationError(num_bins=bins).compute(**given)
    assert result["expected_calibration_error"] == pytest.approx(_bin_by_bin(columns, bins), abs=1e-12)


def test_certain_and_right_is_calibrated_and_certain_and_wrong_is_not() -> None:
    metric = ExpectedCalibrationError()
    assert metric.compute(predictions=[1], references=[1], confidences=[1.0])["expected_calibration_error"] == 0
    assert metric.compute(predictions=[1], references=[0], confidences=[1.0])["expected_calibration_error"] == 1
    assert metric.compute(predictions=[1], references=[0], confidences=[0.0])["expected_calibration_error"] == 0


def test_accuracies_by_hand() -> None:
    assert Top1Accuracy().compute(predictions=[0, 1, 2, 2], references=[0, 1, 1, 0]) == {"accuracy": 0.5}
    ranked = [[0, 1, 2], [2, 0, 1], [1, 0, 2]]
    assert TopKAccuracy(2).compute(top_k=ranked, references=[1, 1, 0]) == {"top2_accuracy": pytest.approx(2 / 3)}
    result = PerClassAccuracy(["a", "b", "never seen"]).compute(predictions=[0, 1, 2], references=[0, 0, 1])
    assert result == {"per_class_accuracy": {"a": 0.5, "b": 0.0}}
    matrix = ConfusionMatrix(2).compute(predictions=[1, 1, 0], references=[0, 0, 0])["confusion_matrix"]
    assert matrix.tolist() == [[1, 2], [0, 0]]


def test_single_images_and_batches_agree() -> None:
    one, many = Top1Accuracy(), Top1Accuracy()
    for prediction, reference in zip([0, 1, 2], [0, 2, 2], strict=True):
        one.add(prediction=prediction, reference=reference)
    many.add_batch(predictions=[0, 1, 2], references=[0, 2, 2])
    assert len(one) == len(many) == 3
    assert one.compute() == many.compute()


def test_a_computed_metric_starts_anew() -> None:
    for metric in _metrics():
        columns, _ = _columns(20)
        given = {name: columns[name] for name in metric.columns}
        first = metric.compute(**given)
        assert len(metric) == 0
        assert str(metric.compute(**given)) == str(first)
        with pytest.raises(ValueError, match="seen no image"):
            metric.compute()


def test_instances_side_by_side_do_not_disturb_each_other() -> None:
    metrics = [Top1Accuracy() for _ in range(5)]
    for turn in range(3):
        for index, metric in enumerate(metrics):
            metric.add_batch(predictions=[index] * 5, references=list(range(5)) if turn else [index] * 5)
    assert [metric.compute()["accuracy"] for metric in metrics] == [pytest.approx(7 / 15)] * 5


def test_nothing_is_written_and_no_network_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    columns, _ = _columns()
    combined = evaluate.combine(_metrics())
    combined.add_batch(**columns)
    assert os.listdir(tmp_path) == []
    combined.compute()
    assert os.listdir(tmp_path) == []


def test_memory_does_not_grow_with_the_data() -> None:
    def size(metric: RunningMetric) -> int:
        return sum(value.nbytes if isinstance(value, np.ndarray) else 32 for value in vars(metric).values())

    columns, _ = _columns(1000)
    for metric in _metrics():
        given = {name: columns[name] for name in metric.columns}
        metric.add_batch(**given)
        before = size(metric)
        for _ in range(20):
            metric.add_batch(**given)
        assert size(metric) == before
        assert len(metric) == 21_000


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
def test_wrong_columns_are_told(metric: RunningMetric, columns: dict[str, list[object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric.add_batch(**columns)
    assert len(metric) == 0


def test_precision_recall_and_area_equal_scikit_learn_on_all_images_at_once() -> None:
    columns, probabilities = _columns()
    metrics = evaluate.combine([PrecisionRecall(), AreaUnderRoc(), ConfidenceThresholds()])
    for start in range(0, 200, 13):
        batch = {name: values[start : start + 13] for name, values in columns.items()}
        metrics.add_batch(**batch, probabilities=probabilities[start : start + 13])
    result = metrics.compute()
    references, predictions = columns["references"], columns["predictions"]
    for name, function in (("precision", precision_score), ("recall", recall_score), ("f1", f1_score)):
        assert result[name] == pytest.approx(function(references, predictions, average="macro"), abs=1e-12)
    area = roc_auc_score(references, probabilities, multi_class="ovr", average="macro")
    assert result["auc"] == pytest.approx(area, abs=1e-12)
    for row in result["thresholds"]:
        answered = columns["confidences"] >= row["threshold"]
        right = answered & (predictions == references)
        assert row["answered"] == pytest.approx(answered.mean())
        assert row["recall"] == pytest.approx(right.mean())
        assert row["precision"] == pytest.approx(right.sum() / answered.sum() if answered.any() else 0)
        assert row["f1"] == pytest.approx(2 * right.sum() / (answered.sum() + 200))


def test_classes_without_images_do_not_count_and_one_class_has_no_area() -> None:
    result = PrecisionRecall().compute(predictions=[0, 0, 2], references=[0, 0, 1])
    assert result == {"precision": 0.5, "recall": 0.5, "f1": 0.5}
    few = {"references": [0, 0, 1], "probabilities": [[0.9, 0.1, 0.0], [0.2, 0.1, 0.7], [0.5, 0.4, 0.1]]}
    # Class 0 outranks the other in one of two pairs, class 1 in both of two.
    assert AreaUnderRoc().compute(**few) == {"auc": 0.75}
    assert AreaUnderRoc().compute(references=[0, 0], probabilities=[[0.9, 0.1], [0.2, 0.8]]) == {"auc": None}


def test_an_area_that_would_need_too_much_memory_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AreaUnderRoc, "MOST_PROBABILITIES", 3)
    metric = AreaUnderRoc()
    for _ in range(2):
        metric.add_batch(references=[0], probabilities=[[0.9, 0.1]])
    assert metric.compute() == {"auc": None}
