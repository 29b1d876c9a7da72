"""A folder of dense prediction opened as any other model: what it is, and what it says in the image's coordinates."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from dense_heads import batch_for, build
from PIL import Image

import hf_vit
from hf_vit.data import ImageData
from hf_vit.evaluation import evaluate_protocol
from hf_vit.evaluation.dense_prediction import each_dense_prediction, write_dense_predictions
from hf_vit.families import DENSE_HEADS
from hf_vit.subjects.dense import dense_task_of, detect, segment
from hf_vit.subjects.subject import open_subject


@pytest.mark.parametrize("head", DENSE_HEADS)
def test_a_folder_is_opened_with_its_head(head: str, tmp_path: Path) -> None:
    model, processor = build("plain", head)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    subject = open_subject(tmp_path, "cpu")
    assert type(subject.model) is DENSE_HEADS[head].model_class
    assert type(subject.processor) is type(processor)
    assert dense_task_of(subject.model) == DENSE_HEADS[head].task
    assert subject.image_size == subject.input_size == (64, 64)
    assert subject.pixel_values([Image.new("RGB", (90, 50))]).shape == (1, 3, 64, 64)
    with pytest.raises(hf_vit.UserError, match="not an image classifier"):
        open_subject(tmp_path, "cpu", as_classifier=True)


def test_transformers_own_segmenters_are_known(tmp_path: Path) -> None:
    config = transformers.SegformerConfig(
        depths=[1, 1], hidden_sizes=[8, 8], num_encoder_blocks=2, num_attention_heads=[1, 1], sr_ratios=[1, 1],
        patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[1, 1], decoder_hidden_size=8,
    )  # fmt: skip
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(tmp_path)
    transformers.SegformerImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    subject = open_subject(tmp_path, "cpu")
    assert dense_task_of(subject.model) == "segmentation"
    (classes,) = segment(subject.model, subject.processor, torch.randn(1, 3, 32, 32), [(20, 50)])
    assert classes.shape == (20, 50)


def test_other_models_are_not_dense() -> None:
    assert dense_task_of(torch.nn.Identity()) is None
    tiny = hf_vit.HfViTConfig(image_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    assert dense_task_of(hf_vit.HfViTForImageClassification(tiny)) is None


@torch.no_grad()
def test_class_maps_are_the_likeliest_classes_of_the_image() -> None:
    model, processor = build("plain", "linear")
    pixel_values, sizes = batch_for("linear")["pixel_values"], [(32, 128), (9, 9)]
    logits = model.eval()(pixel_values).logits
    for given, each, size in zip(segment(model, processor, pixel_values, sizes), logits, sizes, strict=True):
        wanted = torch.nn.functional.interpolate(each[None], size, mode="bilinear", align_corners=False)
        assert torch.equal(given, wanted[0].argmax(0))


@pytest.mark.parametrize("head", ["mask-rcnn", "detr", "deformable-detr"])
def test_objects_are_in_the_images_coordinates(head: str) -> None:
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


def test_mask_rcnn_is_torchvisions() -> None:
    """Against torchvision's own MaskRCNN around the same parts, which resizes by 1 and normalises by nothing."""
    from collections import OrderedDict

    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    model, _ = build("plain", "mask-rcnn")
    batch = batch_for("mask-rcnn")

    class Maps(torch.nn.Module):
        out_channels = 16

        def __init__(self) -> None:
            super().__init__()
            self.backbone = model.backbone

        def forward(self, pixel_values: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
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


def test_more_classes_than_eight_bits_tell(tmp_path: Path) -> None:
    """A mask in 16 bits; of masks in 8 bits 255 judges nothing, so that such a model cannot be judged by them."""
    names = {number: f"class {number}" for number in range(300)}
    model, processor = build("plain", "linear", id2label=names)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.arange(300) == 299)
    subject = open_subject((model, processor))
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    write_dense_predictions(each_dense_prediction(subject, [tmp_path / "a.png"]), tmp_path / "out")
    with Image.open(tmp_path / "out" / "masks" / "a.png") as mask:
        assert set(np.asarray(mask).flatten().tolist()) == {299}
    rows = Dataset.from_dict({"image": [], "mask": [], "label": []})
    data = ImageData("shapes", "0", {"test": rows}, [names[0]], target="mask")
    with pytest.raises(hf_vit.UserError, match="has 300 classes; masks tell 255 apart"):
        evaluate_protocol("segmentation", (model, processor), data, split="test", progress=False)
