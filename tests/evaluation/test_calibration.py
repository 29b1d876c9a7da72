"""Reliability and temperature beside loops and a search over a grid."""

import numpy as np
import pytest
import torch
from evaluation.tiny import examine, make_classifier, make_data, make_processor
from scipy.special import log_softmax

from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.calibration import ReliabilitySums, calibration, fit_temperature
from hf_vit.evaluation.protocols.top1 import top1


def draws(images: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits [n, 5], and classes drawn from their own softmax: perfectly calibrated."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 2, (images, 5))
    return logits, np.array([generator.choice(5, p=np.exp(row)) for row in log_softmax(logits, axis=1)])


def test_the_diagram_equals_a_loop() -> None:
    logits, labels = draws(300)
    sums = ReliabilitySums(10)
    for start in range(0, 300, 77):
        sums.add(logits[start : start + 77], labels[start : start + 77])
    found = sums.result()
    probabilities = np.exp(log_softmax(logits, axis=1))
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    gaps, sizes = [], []
    for place in range(10):
        inside = (confidence > place / 10) & (confidence <= (place + 1) / 10)
        assert found.images[place] == inside.sum()
        if inside.any():
            assert found.accuracy[place] == pytest.approx(right[inside].mean())
            assert found.confidence[place] == pytest.approx(confidence[inside].mean())
            gaps.append(abs(right[inside].mean() - confidence[inside].mean()))
            sizes.append(inside.sum())
    assert found.images[:2] == [0, 0]
    assert found.ece == pytest.approx(np.average(gaps, weights=sizes))
    assert found.mce == pytest.approx(max(gaps))
    assert found.loss == pytest.approx(-np.log(probabilities[np.arange(300), labels]).mean())


def test_the_temperature_is_the_best_of_a_grid() -> None:
    logits, labels = draws(400)
    found = fit_temperature(3 * logits, labels)
    grid = np.linspace(1.5, 6, 2000)
    losses = [-log_softmax(3 * logits / one, axis=1)[np.arange(400), labels].mean() for one in grid]
    assert found == pytest.approx(grid[int(np.argmin(losses))], abs=2 * (grid[1] - grid[0]))
    # Twice as sure needs twice the temperature; and calibrated logits need none.
    assert fit_temperature(6 * logits, labels) == pytest.approx(2 * found, rel=1e-4)
    assert fit_temperature(*draws(20_000)) == pytest.approx(1, abs=0.03)


def test_a_classifier_before_and_after() -> None:
    data, model = make_data(validation=60, test=50), make_classifier()
    result = calibration(examine(model, data, batch_size=9))
    whole = top1(examine(model, data))
    assert (result.top1, result.num_images) == (whole.top1, 50)
    assert result.plain.ece == pytest.approx(whole.ece)
    assert result.plain.loss == pytest.approx(whole.loss)
    logits, labels = {}, {}
    for split in ("validation", "test"):
        pixels = make_processor()(images=list(data.splits[split]["image"]), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            logits[split] = model(pixels).logits.double().numpy()
        labels[split] = np.array(data.splits[split]["label"])
    assert result.temperature == pytest.approx(fit_temperature(logits["validation"], labels["validation"]), rel=1e-5)
    scaled = log_softmax(logits["test"] / result.temperature, axis=1)
    assert result.scaled is not None
    assert result.scaled.loss == pytest.approx(-scaled[np.arange(50), labels["test"]].mean(), rel=1e-5)
    assert result.scaled.loss < result.plain.loss, "random answers given with confidence"


def test_misuse() -> None:
    data = make_data()
    with pytest.raises(UserError, match=r"cannot be fitted: split 'validation' .* judge as well.*--no-temperature"):
        calibration(examine(data=data, split="validation"))
    del data.splits["validation"]  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"cannot be fitted: .*no split 'validation'.*--no-temperature"):
        calibration(examine(data=data))
    plain = calibration(examine(data=data), temperature=False)
    assert (plain.temperature, plain.scaled) == (None, None)
    with pytest.raises(UserError, match="0 bins"):
        calibration(examine(data=data), temperature=False, bins=0)
