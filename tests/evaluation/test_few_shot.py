"""The closed form beside a direct solve, and how shots are drawn."""

import numpy as np
import pytest
import torch
from evaluation.tiny import NAMES, examine, make_classifier, make_data, make_processor

from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.few_shot import FewShotRegression, draw_shots, few_shot


def direct_scores(train: np.ndarray, labels: np.ndarray, test: np.ndarray, classes: int, l2: float) -> np.ndarray:
    """Least squares on rows that hold the penalty, by numpy, without a normal equation."""
    mean, std = train.mean(0), train.std(0) + 1e-5
    rows = np.column_stack([(train - mean) / std, 100 * np.ones(len(train))])
    size = rows.shape[1]
    targets = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)
    stacked = np.concatenate([rows, np.sqrt(l2) * np.eye(size)])
    weights = np.linalg.lstsq(stacked, np.concatenate([targets, np.zeros((size, classes))]), rcond=None)[0]
    return np.column_stack([(test - mean) / std, 100 * np.ones(len(test))]) @ weights


@pytest.mark.parametrize("images", [5, 33, 34, 200], ids="{} images".format)
@pytest.mark.parametrize("l2", [2.0**10, 1.0])
def test_the_regression_equals_a_direct_solve(images: int, l2: float) -> None:
    """32 features and a constant: fewer, as many, and more images than unknowns."""
    generator = np.random.default_rng(images)
    train, test = generator.normal(3, 5, (images, 32)), generator.normal(3, 5, (50, 32))
    labels = generator.integers(0, 4, images)
    found = FewShotRegression.fit(train, labels, 4, l2).scores(test)
    np.testing.assert_allclose(found, direct_scores(train, labels, test, 4, l2), rtol=0, atol=1e-8)


def test_a_feature_that_never_changes_does_no_harm() -> None:
    features = np.column_stack([np.full(20, 7.0), np.arange(20.0)])
    labels = (np.arange(20) >= 10).astype(np.int64)
    scores = FewShotRegression.fit(features, labels, 2, 1.0).scores(features)
    assert (scores.argmax(1) == labels).all()


def test_shots_are_drawn_by_class_and_seed() -> None:
    labels = np.random.default_rng(0).integers(0, 6, 400)
    few, more = draw_shots(labels, NAMES, 3, seed=1), draw_shots(labels, NAMES, 10, seed=1)
    assert few.shape == (6, 3)
    assert (labels[more] == np.arange(6)[:, None]).all()
    assert len(set(more.ravel().tolist())) == 60
    assert (more[:, :3] == few).all()
    assert (draw_shots(labels, NAMES, 10, seed=2) != more).any()


def test_the_protocol_equals_its_parts() -> None:
    data, model = make_data(), make_classifier()
    result = few_shot(examine(model, data, seed=5), shots=(4, 1), trials=2)
    features = {}
    for split in ("train", "test"):
        pixels = make_processor()(images=list(data.splits[split]["image"]), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            features[split] = model.vit(pixels).last_hidden_state[:, 0].double().numpy()
    labels, truth = (np.array(data.splits[split]["label"]) for split in ("train", "test"))
    assert result.shots == [1, 4]
    for shots, row in zip(result.shots, result.accuracy, strict=True):
        for trial, accuracy in enumerate(row):
            rows = draw_shots(labels, NAMES, 4, seed=5 + trial)[:, :shots].ravel()
            scores = direct_scores(features["train"][rows], labels[rows], features["test"], 6, 1024)
            assert accuracy == pytest.approx((scores.argmax(1) == truth).mean())
    assert result.num_images == 30
    assert result.headline()["4-shot accuracy"] == pytest.approx(np.mean(result.accuracy[1]))


def test_misuse() -> None:
    data = make_data()
    fewest = int(np.bincount(data.splits["train"]["label"]).min())
    with pytest.raises(UserError, match=rf"has {fewest} images to learn from, 25 shots need 25 a class.*--shots"):
        few_shot(examine(data=data))
    with pytest.raises(UserError, match="split 'train' is fitted on and cannot judge as well"):
        few_shot(examine(data=data, split="train"), shots=(1,))
    with pytest.raises(UserError, match="at least 1"):
        few_shot(examine(data=data), shots=(0,))
    data.splits["train"] = data.splits["train"].to_iterable_dataset()  # type: ignore[index]
    with pytest.raises(UserError, match="is a stream, whose images cannot be chosen"):
        few_shot(examine(data=data), shots=(1,))
