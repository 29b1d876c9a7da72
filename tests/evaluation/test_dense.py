"""Segmentation and detection: metrics against other computations, answers in the image's coordinates, tiles."""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from data.conftest import picture
from datasets import Dataset
from dense_heads import batch_for, build
from PIL import Image
from torch import nn
from transformers import (
    DetrImageProcessor,
    EomtImageProcessor,
    Mask2FormerImageProcessor,
    MobileNetV2ImageProcessor,
    SegformerImageProcessor,
    ViTImageProcessor,
    YolosImageProcessor,
)
from transformers.modeling_outputs import SemanticSegmenterOutput

import hf_vit
from hf_vit import UserError
from hf_vit.data import ImageData
from hf_vit.evaluation import evaluate, evaluate_protocol, predict
from hf_vit.evaluation.prediction import iterate_predictions, write_dense_predictions
from hf_vit.evaluation.protocols.dense import IGNORED, DetectionMeter, SegmentationMeter
from hf_vit.hub.card import render_card
from hf_vit.loading.model import load_model
from hf_vit.loading.outputs import detect, get_dense_task, segment

NAMES = ["sky", "tree", "road", "lamp"]


def test_segmentation_as_numpy_counts():
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
    accuracy = {name: np.mean(predicted[truth == k] == k) for k, name in enumerate(names[:3])}
    assert values["accuracy"] == pytest.approx(accuracy)
    assert values["mean_accuracy"] == pytest.approx(np.mean(list(accuracy.values())))
    assert values["pixels"] == {name: int((truth == k).sum()) for k, name in enumerate(names[:3])}
    one = meter.score_image(torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1]]))
    assert one == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert np.isnan(meter.score_image(torch.tensor([[0]]), torch.tensor([[IGNORED]])))


def objects(boxes, labels, scores=None):
    made = {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), "labels": torch.tensor(labels).long()}
    return made | ({} if scores is None else {"scores": torch.tensor(scores, dtype=torch.float32)})


def test_detection_by_hand():
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
    assert meter.score_image(answer, truth) == pytest.approx(expected, abs=1e-6)
    assert meter.score_image(answer, objects([], [])) == 0
    assert np.isnan(meter.score_image(objects([], [], []), objects([], [])))


def test_overlap_and_recall_at_a_threshold_reach_it():
    """COCO's thresholds are those of float64: an IoU of 0.6 counts at 0.6, and a recall of 0.1 at 0.1."""
    meter = DetectionMeter()
    meter.update(objects([[0, 0, 10, 6]], [0], [0.9]), objects([[0, 0, 10, 10]], [0]))
    assert meter.values(["box"])["ap"] == pytest.approx(3 / 10)
    meter = DetectionMeter()
    truth = [[20 * k, 0, 20 * k + 10, 10] for k in range(10)]
    meter.update(objects([truth[0], [0, 60, 10, 70], truth[1]], [0] * 3, [0.9, 0.8, 0.7]), objects(truth, [0] * 10))
    assert meter.values(["box"])["ap50"] == pytest.approx((11 + 10 * 2 / 3) / 101)  # recalls 0 to .1, and .11 to .2


def iou_of(one, other):
    low, high = np.maximum(one[:2], other[:2]), np.minimum(one[2:], other[2:])
    both = np.prod(np.clip(high - low, 0, None))
    return both / (np.prod(one[2:] - one[:2]) + np.prod(other[2:] - other[:2]) - both)


def average_precision(images, label, threshold):
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
def test_detection_as_its_definition(seed):
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


def test_masks_are_judged_beside_boxes():
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


def test_what_gives_nothing_to_judge_by_is_refused(monkeypatch):
    """Crowds alone are no image whose precision is -1, the worst of all, nor a split of which nothing is known."""
    meter, crowd = DetectionMeter(), objects([[0, 0, 9, 9]], [0]) | {"iscrowd": torch.tensor([1])}
    answer = objects([[0, 0, 9, 9]], [0], [0.9])
    assert np.isnan(meter.score_image(answer, crowd))
    nothing, pixels = DetectionMeter(), SegmentationMeter(2)
    meter.update(answer, crowd)
    nothing.update(answer, objects([], []))
    pixels.update(torch.tensor([[0]]), torch.tensor([[IGNORED]]))
    no_object = "none of the 1 images has an annotated object"
    for each, said in ((meter, no_object), (nothing, no_object), (pixels, "no pixel of the 1 images")):
        with pytest.raises(UserError, match=said):
            each.values(["one", "other"])
    meter.update(answer, objects([[0, 0, 9, 9]], [0]))
    assert meter.values(["one"])["ap"] == pytest.approx(1.0)
    for package in ("torchmetrics", "pycocotools"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r'needs torchmetrics and pycocotools; install with pip install "hf-vit\[dense'):
        SegmentationMeter(2)


def test_transformers_own_segmenters_are_known_and_classifiers_are_not_dense(tmp_path):
    tiny = hf_vit.HfViTConfig(image_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    for other in (torch.nn.Identity(), hf_vit.HfViTForImageClassification(tiny)):
        assert get_dense_task(other) is None
    config = transformers.SegformerConfig(
        depths=[1, 1], hidden_sizes=[8, 8], num_encoder_blocks=2, num_attention_heads=[1, 1], sr_ratios=[1, 1],
        patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[1, 1], decoder_hidden_size=8,
    )  # fmt: skip
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(tmp_path)
    transformers.SegformerImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    subject = load_model(tmp_path, "cpu")
    assert get_dense_task(subject.model) == "segmentation"
    (classes,) = segment(subject.model, subject.processor, torch.randn(1, 3, 32, 32), [(20, 50)])
    assert classes.shape == (20, 50)
    image = Image.new("RGB", (50, 20))
    assert (predict(str(tmp_path), image)[0].mask == predict(subject, image)[0].mask).all()
    with pytest.raises(UserError, match="the data has classes that the model does not have"):
        evaluate(str(tmp_path), "scenes:images=40,size=32")
    card = render_card(tmp_path)
    assert "pipeline_tag: image-segmentation\n" in card
    assert "model = AutoModelForSemanticSegmentation.from_pretrained(repo)" in card
    assert "post_process_semantic_segmentation" in card


def test_a_batch_moves_no_boxes(tmp_path):
    """A processor that pads images to the largest of a batch, without whose mask boxes would be of the padded image."""
    model, _ = build("plain", "detr")
    processor = DetrImageProcessor(size={"shortest_edge": 32, "longest_edge": 64})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = [picture(seed, (width, 32)) for seed, width in enumerate((32, 64))]
    files = [tmp_path / f"{image.width}.png" for image in images]
    for file, image in zip(files, images, strict=True):
        image.save(file)
    alone, together = (predict((model, processor), files, threshold=0.0, batch_size=count) for count in (1, 2))
    rows = []
    for one, two in zip(alone, together, strict=True):
        left, top, right, bottom = one.answers[0]["box"]
        assert [answer["box"] for answer in two.answers] == [pytest.approx(answer["box"]) for answer in one.answers]
        category = ["sky", "cat"].index(one.answers[0]["label"])
        rows.append({"bbox": [[left, top, right - left, bottom - top]], "category": [category], "iscrowd": [0]})
    table = {"test": Dataset.from_dict({"image": images, "objects": rows})}
    data = ImageData("two", "0" * 16, table, ["sky", "cat"], target="objects")
    runs = (evaluate_protocol("detection", (model, processor), data, batch_size=n, progress=False) for n in (1, 2))
    alone, together = (run.result.measures for run in runs)
    assert alone == together
    assert alone["ap75"] > 0
    crowded = {"image": images, "objects": [rows[0], rows[1] | {"iscrowd": [1]}]}
    data = ImageData("two", "1" * 16, {"test": Dataset.from_dict(crowded)}, ["sky", "cat"], target="objects")
    measures = evaluate_protocol("detection", (model, processor), data, progress=False).result.measures
    assert measures["ap75"] > alone["ap75"], "answers inside a crowd are no mistakes"


def test_a_batch_moves_no_pixels():
    """Mask2Former's processor has no option for the padding."""
    model, _ = build("plain", "mask2former")
    processor = Mask2FormerImageProcessor(size={"shortest_edge": 64, "longest_edge": 128})
    torch.manual_seed(3)  # which gives both classes
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1.0)
    images = [picture(seed, (width, 64)) for seed, width in enumerate((64, 128))]
    alone, together = (predict((model, processor), images, batch_size=count) for count in (1, 2))
    assert len(np.unique(alone[0].mask)) == 2
    for one, two in zip(alone, together, strict=True):
        assert (one.mask == two.mask).all()


@torch.no_grad()
def test_class_maps_are_the_likeliest_classes_of_the_image():
    model, processor = build("plain", "linear")
    pixel_values, sizes = batch_for("linear")["pixel_values"], [(32, 128), (9, 9)]
    logits = model.eval()(pixel_values).logits
    for given, each, size in zip(segment(model, processor, pixel_values, sizes), logits, sizes, strict=True):
        wanted = torch.nn.functional.interpolate(each[None], size, mode="bilinear", align_corners=False)
        assert torch.equal(given, wanted[0].argmax(0))


@pytest.mark.parametrize("head", ["mask-rcnn", "detr", "deformable-detr"])
def test_objects_are_in_the_images_coordinates(head):
    """The same pixels said to be of an image twice as wide and half as high: boxes and masks follow."""
    model, processor = build("plain", head)
    model.eval()
    pixel_values = batch_for(head)["pixel_values"][:1]
    (square,), (wide,) = (detect(model, processor, pixel_values, [size]) for size in ((64, 64), (32, 128)))
    assert len(square["boxes"]) > 0
    torch.testing.assert_close(wide["boxes"], square["boxes"] * torch.tensor([2.0, 0.5, 2.0, 0.5]), rtol=0, atol=1e-3)
    assert torch.equal(wide["labels"], square["labels"])
    assert set(square["labels"].tolist()) <= {0, 1}
    assert (square["scores"].diff() <= 0).all()
    if head == "mask-rcnn":
        assert square["masks"].shape == (len(square["boxes"]), 64, 64)
        assert wide["masks"].shape == (len(square["boxes"]), 32, 128)
    best = square["scores"][0].item()
    (surer,) = detect(model, processor, pixel_values, [(64, 64)], threshold=best - 1e-6)
    assert 0 < len(surer["boxes"]) <= len(square["boxes"])


def test_mask_rcnn_is_torchvisions():
    """Against torchvision's own MaskRCNN around the same parts, which resizes by 1 and normalises by nothing."""
    from collections import OrderedDict

    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    model, _ = build("plain", "mask-rcnn")
    batch = batch_for("mask-rcnn")

    class Maps(torch.nn.Module):
        out_channels = 16

        def __init__(self):
            super().__init__()
            self.backbone = model.backbone

        def forward(self, pixel_values):
            return OrderedDict((str(i), each) for i, each in enumerate(self.backbone(pixel_values).feature_maps))

    anchors = AnchorGenerator(((32,), (64,), (128,), (256,)), ((0.5, 1.0, 2.0),) * 4)
    unchanged = {"min_size": 64, "max_size": 64, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    peer = MaskRCNN(Maps(), num_classes=3, rpn_anchor_generator=anchors, box_score_thresh=0.0, **unchanged)
    peer.rpn.head = model.rpn.head
    for name in ("box_head", "box_predictor", "mask_head", "mask_predictor"):
        setattr(peer.roi_heads, name, getattr(model.roi_heads, name))
    targets = [
        {"boxes": each["boxes"], "labels": each["class_labels"] + 1, "masks": each["masks"]} for each in batch["labels"]
    ]
    torch.manual_seed(3)
    wanted = peer.train()(list(batch["pixel_values"]), targets)
    torch.manual_seed(3)
    for _ in targets:
        torch.empty(1).uniform_()  # torchvision draws a size for every image; then both sample the same anchors
    given = model.train()(**batch)
    assert given.loss_dict.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(given.loss_dict[name], value, rtol=0, atol=1e-5)
    with torch.no_grad():
        found, objects = model.eval()(batch["pixel_values"]).detections, peer.eval()(list(batch["pixel_values"]))
    for ours, theirs in zip(found, objects, strict=True):
        assert torch.equal(ours["labels"] + 1, theirs["labels"])
        for name in ("boxes", "scores", "masks"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("number", [255, 299])
def test_more_classes_than_eight_bits_tell(tmp_path, number):
    """A mask in 16 bits; of masks in 8 bits 255 judges nothing, so that such a model cannot be judged by them."""
    names = {number: f"class {number}" for number in range(300)}
    model, processor = build("plain", "linear", id2label=names)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.arange(300) == number)
    subject = load_model((model, processor))
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    write_dense_predictions(iterate_predictions(subject, [tmp_path / "a.png"]), tmp_path / "out")
    with Image.open(tmp_path / "out" / "masks" / "a.png") as mask:
        assert set(np.asarray(mask).flatten().tolist()) == {number}
    with Image.open(tmp_path / "out" / "pictures" / "a.png") as painted:
        assert np.asarray(painted).any()  # over a black image
    rows = Dataset.from_dict({"image": [], "mask": [], "label": []})
    data = ImageData("shapes", "0", {"test": rows}, [names[0]], target="mask")
    with pytest.raises(UserError, match="has 300 classes, but masks hold at most 255"):
        evaluate_protocol("segmentation", (model, processor), data, split="test", progress=False)


def test_more_objects_than_eight_bits_tell():
    """Each of 300 objects has one pixel."""
    dots = torch.eye(300).reshape(300, 1, 15, 20)
    objects = {"boxes": torch.ones(300, 4), "labels": torch.zeros(300, dtype=torch.int64), "masks": dots}
    model, processor = build("plain", "mask-rcnn")
    output = model.eval()(torch.zeros(1, 3, 32, 32))
    output.detections = [{**objects, "scores": torch.linspace(0.9, 0.6, 300)}]
    model.forward = lambda **_: output
    (found,) = predict((model, processor), Image.new("RGB", (20, 15)))
    assert (found.mask == np.arange(1, 301).reshape(15, 20)).all()


SIDE = 32
TILED = dict(
    size={"height": SIDE, "width": SIDE}, image_mean=[0.0] * 3, image_std=[1.0] * 3, do_pad=False, do_normalize=True
)
COLORS = {0: "red", 1: "green", 2: "blue"}


class OfThreeColours(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(id2label=COLORS, num_labels=3)
        self.scale = nn.Parameter(torch.ones(()))


class ColourForSemanticSegmentation(OfThreeColours):
    """The strongest colour of every pixel."""

    def forward(self, pixel_values):
        return SemanticSegmenterOutput(logits=self.scale * pixel_values)


class BrightForObjectDetection(OfThreeColours):
    """One box around what is bright, of the class "green"; nothing where nothing is."""

    def forward(self, pixel_values, pixel_mask=None):
        height, width = pixel_values.shape[2:]
        if pixel_mask is not None:  # what is padding is 0 anyway
            assert (pixel_values[~pixel_mask[:, None].bool().expand_as(pixel_values)] == 0).all()
        logits = torch.tensor([0.0, 0.0, 0.0, 9.0]).repeat(len(pixel_values), 1, 1)
        boxes = torch.zeros(len(pixel_values), 1, 4)
        for index, image in enumerate(pixel_values):
            rows, columns = torch.where(image.mean(0) > 0.5)
            if len(rows):
                logits[index, 0] = torch.tensor([0.0, 9.0, 0.0, 0.0])
                x1, y1, x2, y2 = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
                sides = torch.tensor([width, height, width, height])
                boxes[index, 0] = torch.stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]) / sides
        return SimpleNamespace(logits=self.scale * logits, pred_boxes=boxes)


@pytest.mark.parametrize("size", [(100, 70), (33, 32), (20, 90), (32, 32), (10, 12)])
def test_pixels_of_tiles_are_those_of_the_image(tmp_path, size):
    """Seen at its own scale, every pixel has its colour's class; an image made smaller loses that."""
    width, height = size
    array = np.random.RandomState(0).randint(0, 256, (height, width, 3)).astype(np.uint8)
    Image.fromarray(array).save(tmp_path / "image.png")
    model = ColourForSemanticSegmentation(), SegformerImageProcessor(**TILED)
    (answer,), (again,) = (predict(model, tmp_path / "image.png", tiles=True, batch_size=each) for each in (1, 5))
    assert np.array_equal(answer.mask, again.mask)
    assert answer.mask.shape == (height, width)
    if min(size) >= SIDE:
        assert np.array_equal(answer.mask, array.argmax(-1))
        shares = {COLORS[k]: float((array.argmax(-1) == k).mean()) for k in range(3)}
        assert {each["label"]: each["share"] for each in answer.answers} == pytest.approx(shares)
    (smaller,) = predict(model, tmp_path / "image.png")
    fits = max(size) <= SIDE
    assert np.array_equal(smaller.mask, answer.mask) == fits, "without tiles the image is made as small as the model's"


@pytest.mark.parametrize(
    "box", [(4, 6, 12, 14), (22, 20, 30, 26), (24, 24, 32, 32), (52, 46, 59, 54), (100, 70, 108, 78)]
)
def test_an_object_is_one_box(tmp_path, box):
    """No larger than the overlap, it is seen whole by a tile; what others see of it is dropped."""
    array = np.zeros((80, 110, 3), dtype=np.uint8)
    array[box[1] : box[3], box[0] : box[2]] = 255
    Image.fromarray(array).save(tmp_path / "image.png")
    model = BrightForObjectDetection(), DetrImageProcessor(**TILED)
    (answer,) = predict(model, tmp_path / "image.png", tiles=True)
    (only,) = answer.answers
    assert (only["label"], only["box"]) == ("green", pytest.approx(box, abs=1e-3))
    assert answer.mask is None


def test_boxes_are_seen_when_a_photograph_is_shrunk_for_a_plot():
    array = np.zeros((1536, 2048, 3), dtype=np.uint8)
    array[384:768, 512:1024] = 255
    (answer,) = predict((BrightForObjectDetection(), DetrImageProcessor(**TILED)), Image.fromarray(array))
    answer.picture.thumbnail((320, 320))
    row = np.asarray(answer.picture)[100].astype(int)  # black and white, but for the sides of the box
    assert (row.max(-1) - row.min(-1)).max() > 150


@pytest.mark.parametrize("kind", [DetrImageProcessor, YolosImageProcessor])
def test_boxes_in_a_padded_image_are_those_of_the_image(kind):
    """As transformers' guide to object detection prepares images: the longer side fills a square."""
    array = np.zeros((64, 128, 3), dtype=np.uint8)
    array[24:48, 32:96] = 255
    fitted = dict(size={"max_height": SIDE, "max_width": SIDE}, pad_size={"height": SIDE, "width": SIDE}, do_pad=True)
    model = BrightForObjectDetection(), kind(**{**TILED, **fitted})
    (answer,) = predict(model, Image.fromarray(array))
    assert [each["box"] for each in answer.answers] == [pytest.approx((32, 24, 96, 48), abs=1e-3)]


def test_corners_of_half_precision_are_computed_in_full():
    """The center 129/256 and the width 85/256 have few enough digits for bfloat16, but not the corner 343/512."""
    model = BrightForObjectDetection()
    boxes = torch.tensor([[[129.0, 129.0, 85.0, 85.0]]]) / 256
    outputs = {"logits": torch.tensor([[[0.0, 9.0, 0.0, 0.0]]]).bfloat16(), "pred_boxes": boxes.bfloat16()}
    model.forward = lambda **inputs: SimpleNamespace(**outputs)
    (found,) = detect(model, DetrImageProcessor(**TILED), torch.zeros(1, 3, SIDE, SIDE), [(512, 512)])
    assert found["boxes"].tolist() == [[173.0, 173.0, 343.0, 343.0]]


class ColourForUniversalSegmentation(OfThreeColours):
    """A query for every colour, whose mask is where it is strong."""

    def forward(self, pixel_values):
        classes = 20 * self.scale * torch.eye(3, 4).repeat(len(pixel_values), 1, 1)
        masks = 40 * (pixel_values - 0.5)
        return SimpleNamespace(class_queries_logits=classes, masks_queries_logits=masks, patch_offsets=None)


@pytest.mark.parametrize("size", [(96, 48), (48, 144), (96, 96)])
@pytest.mark.parametrize("step", ["do_split_image", "do_pad", "pad_size"])
def test_parts_of_an_image_or_a_padded_one_are_seen(step, size):
    """As EoMT's processor makes them; Mask2Former's has a size for padded images."""
    rows, columns = np.indices(size) // 48
    colors = (rows + columns) % 3
    image = Image.fromarray((255 * np.eye(3, dtype=np.uint8))[colors])
    settings = {"shortest_edge": SIDE, "longest_edge": SIDE if step == "do_pad" else None}
    if step == "pad_size":
        fitted = {"size": {"max_height": SIDE, "max_width": SIDE}, "pad_size": {"height": SIDE, "width": SIDE}}
        processor: Any = Mask2FormerImageProcessor(**{**TILED, **fitted, "size_divisor": 0})
    else:
        processor = EomtImageProcessor(**{**TILED, "size": settings, step: True})
    (answer,) = predict((ColourForUniversalSegmentation(), processor), image)
    assert answer.mask.shape == size
    assert float(np.mean(answer.mask == colors)) > 0.9


@pytest.mark.parametrize("head", ["linear", "mask2former", "detr", "mask-rcnn"])
def test_a_model_whose_outputs_are_not_numbers_is_refused(head):
    """Of NaN the processors make the first class, or no object."""
    model, processor = build("plain", head)
    nn.init.constant_(next(model.parameters()), torch.nan)
    image, is_map = Image.new("RGB", (64, 64)), head in ("linear", "mask2former")
    labels = {"mask": [Image.new("L", (64, 64))]}
    if not is_map:
        labels = {"objects": [{"bbox": [[0.0, 0.0, 9.0, 9.0]], "category": [1], "iscrowd": [0]}]}
    table = {"test": Dataset.from_dict({"image": [image], **labels})}
    data = ImageData("one", "0" * 16, table, ["sky", "cat"], target="mask" if is_map else "objects")
    with pytest.raises(UserError, match="are NaN or infinite"):
        evaluate((model, processor), data, progress=False)
    with pytest.raises(UserError, match="are NaN or infinite"):
        predict((model, processor), image)


def test_a_processor_that_crops_images_or_reads_no_outputs_is_refused():
    """MobileViT's and MobileNetV2's crop: the classes of the crop would be stretched over the image."""
    image, model = Image.new("RGB", (2 * SIDE, SIDE), "red"), ColourForSemanticSegmentation()
    kind, side = MobileNetV2ImageProcessor, {"height": SIDE, "width": SIDE}
    cropping, whole = kind(size={"shortest_edge": SIDE}, crop_size=side), kind(size=side, do_center_crop=False)
    table = {"test": Dataset.from_dict({"image": [image], "mask": [Image.new("L", image.size)]})}
    data = ImageData("one", "0" * 16, table, list(COLORS.values()), target="mask")
    for run in (predict, partial(evaluate_protocol, "segmentation")):
        with pytest.raises(UserError, match="crops images, but not their masks and boxes; set its do_center_crop"):
            run((model, cropping), image if run is predict else data)
        with pytest.raises(UserError, match="a ViTImageProcessor cannot read the outputs of a ColourForSemanticSegm"):
            run((model, ViTImageProcessor(size=side)), image if run is predict else data)
    assert predict((model, whole), image)[0].mask.shape == (SIDE, 2 * SIDE)
