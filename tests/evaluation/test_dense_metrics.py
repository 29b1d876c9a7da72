"""The metrics of masks and boxes against computations of other making, on predictions made by hand and by chance."""

import numpy as np
import pytest
import torch

from hf_vit import UserError
from hf_vit.evaluation.protocols.dense.meters import IGNORED, DetectionMeter, SegmentationMeter

NAMES = ["sky", "tree", "road", "lamp"]


def test_segmentation_by_hand() -> None:
    """Two images of two by two pixels: unions and intersections counted on paper."""
    meter = SegmentationMeter(4)
    meter.update(torch.tensor([[0, 0], [1, 1]]), torch.tensor([[0, 1], [1, 1]]))
    meter.update(torch.tensor([[0, 2], [2, 2]]), torch.tensor([[0, IGNORED], [2, 0]]))
    values = meter.values(NAMES)
    # sky: both 2 of 4 (truth 3, answered 3); tree: 2 of 3; road: 1 of 2; the lamp is nowhere.
    assert values["iou"] == pytest.approx({"sky": 2 / 4, "tree": 2 / 3, "road": 1 / 2})
    assert values["mean_iou"] == pytest.approx((2 / 4 + 2 / 3 + 1 / 2) / 3)
    assert values["pixel_accuracy"] == pytest.approx(5 / 7)
    assert values["accuracy"] == pytest.approx({"sky": 2 / 3, "tree": 2 / 3, "road": 1.0})
    assert values["mean_accuracy"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert values["pixels"] == {"sky": 3, "tree": 3, "road": 1}


def test_segmentation_as_numpy_counts() -> None:
    """Images of several sizes; a class that is answered and never true counts, one that is neither does not."""
    random, meter = np.random.default_rng(0), SegmentationMeter(5)
    pairs = []
    for side in (5, 8, 13):
        truth = random.choice([0, 1, 2, IGNORED], (side, side + 2))
        predicted = np.where(random.random(truth.shape) < 0.6, np.where(truth == IGNORED, 0, truth), 3)
        meter.update(torch.from_numpy(predicted), torch.from_numpy(truth))
        pairs.append((predicted.ravel()[truth.ravel() != IGNORED], truth.ravel()[truth.ravel() != IGNORED]))
    predicted, truth = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    names = [*NAMES, "none"]
    expected = {
        name: np.sum((predicted == k) & (truth == k)) / union
        for k, name in enumerate(names)
        if (union := np.sum((predicted == k) | (truth == k)))
    }
    values = meter.values(names)
    assert values["iou"] == pytest.approx(expected)
    assert values["iou"]["lamp"] == 0
    assert values["mean_iou"] == pytest.approx(np.mean(list(expected.values())))
    assert values["pixel_accuracy"] == pytest.approx(np.mean(predicted == truth))
    one = meter.image_score(torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1]]))
    assert one == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert np.isnan(meter.image_score(torch.tensor([[0]]), torch.tensor([[IGNORED]])))


def objects(boxes: list[list[float]], labels: list[int], scores: list[float] | None = None) -> dict[str, torch.Tensor]:
    made = {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), "labels": torch.tensor(labels).long()}
    return made | ({} if scores is None else {"scores": torch.tensor(scores, dtype=torch.float32)})


def test_detection_by_hand() -> None:
    """One class: a hit, a miss, a false alarm between them. Precision is 1 up to a recall of a half, then 2/3."""
    meter = DetectionMeter()
    truth = objects([[0, 0, 10, 10], [20, 20, 40, 40]], [0, 0])
    answer = objects([[0, 0, 10, 10], [60, 60, 70, 70], [20, 20, 40, 40]], [0, 0, 0], [0.9, 0.8, 0.7])
    meter.update(answer, truth)
    values = meter.values(["box"])
    expected = (51 * 1.0 + 50 * 2 / 3) / 101  # COCO asks at 101 recalls, 0 to .5 and from .51 on
    assert values["ap50"] == pytest.approx(expected, abs=1e-6)
    assert values["ap"] == pytest.approx(expected, abs=1e-6)
    assert values["ar100"] == pytest.approx(1.0)
    assert values["ap_of_class"] == pytest.approx({"box": expected})
    assert values["ap_large"] is None
    assert meter.image_score(answer, truth) == pytest.approx(expected, abs=1e-6)
    assert meter.image_score(answer, objects([], [])) == 0
    assert np.isnan(meter.image_score(objects([], [], []), objects([], [])))


def iou_of(one: np.ndarray, other: np.ndarray) -> float:
    low, high = np.maximum(one[:2], other[:2]), np.minimum(one[2:], other[2:])
    both = np.prod(np.clip(high - low, 0, None))
    return both / (np.prod(one[2:] - one[:2]) + np.prod(other[2:] - other[:2]) - both)


def average_precision(images: list[tuple[dict, dict]], label: int, threshold: float) -> float:
    """Of one class at one overlap, from the definition: the best free object of each answer, the surest first."""
    answers, total = [], 0
    for answer, truth in images:
        boxes = truth["boxes"].numpy()[truth["labels"].numpy() == label]
        free, total = [True] * len(boxes), total + len(boxes)
        chosen = np.flatnonzero(answer["labels"].numpy() == label)
        for k in sorted(chosen, key=lambda k: -float(answer["scores"][k])):
            overlaps = [iou_of(answer["boxes"][k].numpy(), box) if free[i] else 0 for i, box in enumerate(boxes)]
            best = int(np.argmax(overlaps)) if overlaps else -1
            hit = best >= 0 and overlaps[best] >= threshold
            if hit:
                free[best] = False
            answers.append((float(answer["scores"][k]), hit))
    hits = np.cumsum([hit for _, hit in sorted(answers, key=lambda each: -each[0])])
    precision, recall = hits / np.arange(1, len(hits) + 1), hits / total
    return float(np.mean([max(precision[recall >= r - 1e-9], default=0.0) for r in np.linspace(0, 1, 101)]))


@pytest.mark.parametrize("seed", range(3))
def test_detection_as_its_definition(seed: int) -> None:
    random, meter = np.random.default_rng(seed), DetectionMeter()
    images = []
    for _ in range(6):
        count = int(random.integers(1, 6))
        corners = random.uniform(0, 60, (count, 2))
        boxes = np.concatenate([corners, corners + random.uniform(8, 40, (count, 2))], axis=1)
        labels = random.integers(0, 2, count)
        moved = np.concatenate([boxes + random.normal(0, 2.0, boxes.shape), boxes[:1] + 5])
        guesses = np.where(random.random(count + 1) < 0.85, [*labels, labels[0]], 1 - np.array([*labels, labels[0]]))
        scores = random.permutation(count + 1) / 10 + random.random() / 20
        truth = objects(boxes.tolist(), labels.tolist())
        answer = objects(moved.tolist(), guesses.tolist(), scores.tolist())
        images.append((answer, truth))
        meter.update(answer, truth)
    values = meter.values(["one", "other"])
    thresholds = np.linspace(0.5, 0.95, 10)
    expected = np.array([[average_precision(images, label, t) for t in thresholds] for label in range(2)])
    assert values["ap"] == pytest.approx(expected.mean(), abs=1e-5)
    assert values["ap50"] == pytest.approx(expected[:, 0].mean(), abs=1e-5)
    assert values["ap75"] == pytest.approx(expected[:, 5].mean(), abs=1e-5)
    assert list(values["ap_of_class"].values()) == pytest.approx(expected.mean(axis=1).tolist(), abs=1e-5)


def test_masks_are_judged_beside_boxes() -> None:
    """Equal boxes whose masks are apart: boxes all right, masks all wrong; a crowd is no miss."""
    meter = DetectionMeter(with_masks=True)
    left, right = torch.zeros(1, 12, 12, dtype=torch.bool), torch.zeros(1, 12, 12, dtype=torch.bool)
    left[:, :, :6], right[:, :, 6:] = True, True
    box = objects([[0, 0, 12, 12]], [0], [0.9])
    truth = objects([[0, 0, 12, 12], [0, 0, 12, 12]], [0, 0]) | {"iscrowd": torch.tensor([0, 1])}
    meter.update(box | {"masks": left}, truth | {"masks": torch.cat([right, right])})
    values = meter.values(["box"])
    assert values["ap50"] == pytest.approx(1.0)
    assert values["mask_ap50"] == 0
    assert values["mask_ap_of_class"] == {"box": 0}


def test_crowds_alone_are_nothing_to_judge_by() -> None:
    """Not an image whose precision is -1, the worst of all, nor a split of which nothing is known."""
    meter, crowd = DetectionMeter(), objects([[0, 0, 9, 9]], [0]) | {"iscrowd": torch.tensor([1])}
    answer = objects([[0, 0, 9, 9]], [0], [0.9])
    assert np.isnan(meter.image_score(answer, crowd))
    meter.update(answer, crowd)
    with pytest.raises(UserError, match="none of the 1 images has an object"):
        meter.values(["one"])
    meter.update(answer, objects([[0, 0, 9, 9]], [0]))
    assert meter.values(["one"])["ap"] == pytest.approx(1.0)


def test_nothing_to_judge_by_is_said() -> None:
    meter, detections = SegmentationMeter(2), DetectionMeter()
    meter.update(torch.tensor([[0]]), torch.tensor([[IGNORED]]))
    with pytest.raises(UserError, match="no pixel of the 1 images"):
        meter.values(["one", "other"])
    detections.update(objects([[0, 0, 1, 1]], [0], [0.5]), objects([], []))
    with pytest.raises(UserError, match="none of the 1 images has an object"):
        detections.values(["one"])


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_vit.evaluation.protocols.dense.meters.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"torchmetrics and pycocotools, not installed here: pip install 'hf-vit\[dense"
    ):
        SegmentationMeter(2)
