"""Patches dropped on the right grid, in the right order; accuracy beside a plain loop."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from evaluation.tiny import examine, make_classifier, make_data, make_processor, our_subject
from models.families import FAMILIES, RESNETS
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.occlusion import drop, patch_drop, patch_px, saliency
from hf_vit.evaluation.protocols.top1 import top1


def test_the_grid_is_the_model_s() -> None:
    assert patch_px(make_classifier(), (8, 8), None) == (4, 4)
    assert patch_px(make_classifier(), (8, 8), 2) == (2, 2)
    hybrid = FAMILIES["hybrid"].build("classification")
    assert patch_px(hybrid, (16, 16), None) == hybrid.config.patch_stride
    vit = VisionTransformer(img_size=(12, 32), patch_size=(6, 8), embed_dim=8, depth=1, num_heads=1)  # type: ignore[arg-type]
    assert patch_px(vit, (12, 32), None) == (6, 8)
    resnet = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    assert patch_px(resnet, (224, 280), None) == (16, 16)
    assert patch_px(resnet, (8, 8), None) == (1, 1)
    for name in RESNETS:  # their total stride is no patch
        assert patch_px(RESNETS[name].build("classification"), (224, 280), None) == (16, 16)
    with pytest.raises(UserError, match=r"patches of 9x9 px do not fit images of 8x8 px; give --patch-size"):
        patch_px(resnet, (8, 8), 9)


def test_dropping_replaces_whole_patches_and_more_of_the_same() -> None:
    """12x20 px in patches of 4x8: the last column of patches is cut off by the border."""
    values, ranks = torch.rand(2, 3, 12, 20), torch.stack([torch.randperm(9).view(3, 3) for _ in range(2)])
    filling = torch.full((2, 3, 1, 1), -7.0)
    before = torch.zeros(2, 12, 20, dtype=torch.bool)
    for share in (0.0, 0.3, 0.5, 1.0):
        found = drop(values, ranks, share, filling, (4, 8))
        changed = (found == -7).all(dim=1)
        assert torch.equal(found[:, 0][~changed], values[:, 0][~changed])
        for image in range(2):
            for row in range(3):
                for column in range(3):
                    patch = changed[image, 4 * row : 4 * row + 4, 8 * column : 8 * column + 8]
                    assert bool(patch.all()) == bool(patch.any()) == bool(ranks[image, row, column] < round(9 * share))
        assert bool((before & ~changed).any()) is False
        before = changed


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 12, 4, dtype=torch.float64)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.head(pixel_values.flatten(1))


def test_saliency_of_a_linear_model_is_what_dropping_does() -> None:
    model, values = Linear(), torch.randn(5, 3, 8, 12, dtype=torch.float64)
    filling = values.mean(dim=(2, 3), keepdim=True)
    found = saliency(model, values, filling, (4, 4))
    assert found.shape == (5, 2, 3)

    def margin(changed: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        logits = model(changed)
        return logits[torch.arange(5), predicted] - logits.mean(1)

    with torch.no_grad():
        predicted = model(values).argmax(1)
        for row in range(2):
            for column in range(3):
                ranks = torch.ones(5, 2, 3)
                ranks[:, row, column] = 0
                changed = drop(values, ranks, 1 / 6, filling, (4, 4))
                effect = (margin(values, predicted) - margin(changed, predicted)).abs()
                torch.testing.assert_close(found[:, row, column], effect)


def test_accuracy_equals_a_plain_loop() -> None:
    data, model = make_data(side=8), make_classifier()
    result = patch_drop(examine(model, data, batch_size=8), shares=(0.5, 0, 1), fill="black")
    labels = torch.tensor(data.splits["test"]["label"])
    values = make_processor()(images=list(data.splits["test"]["image"]), return_tensors="pt")["pixel_values"]
    whole = top1(examine(model, data))
    with torch.no_grad():
        black = int(model(torch.full((1, 3, 8, 8), -1.0)).logits.argmax())
        ranks = saliency(model, values, torch.tensor(-1.0), (4, 4)).flatten(1).argsort(dim=1, descending=True)
        places = torch.zeros(30, 4).scatter(1, ranks, torch.arange(4.0).expand(30, 4)).view(30, 2, 2)
        half = model(drop(values, places, 0.5, torch.tensor(-1.0), (4, 4))).logits.argmax(1)
    assert result.shares == [0.0, 0.5, 1.0]
    for found in result.accuracy.values():
        assert found[0] == whole.top1
        assert found[2] == float((labels == black).double().mean())
    assert result.accuracy["salient first"][1] == pytest.approx(float((half == labels).double().mean()))
    assert (result.patch_px, result.fill) == ((4, 4), "black")
    again = patch_drop(examine(model, data, batch_size=30), shares=(0.5, 0, 1), fill="black")
    assert again == result, "an image's order of patches does not depend on its batch"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    subject = our_subject(family)
    result = patch_drop(examine(subject, make_data(test=6)), shares=(0.0, 0.5))
    assert result.patch_px == subject.model.config.patch_stride
    assert set(result.accuracy) == {"random", "salient first", "salient last"}


def test_what_a_model_does_not_see_is_not_dropped() -> None:
    """Patches of 4 px of images of 18 px are those of the images cut to 16 px."""
    results = []
    for side in (18, 16):
        data = make_data(test=9, side=18)
        images = [image.crop((0, 0, side, side)) for image in data.splits["test"]["image"]]
        columns = {"image": images, "label": data.splits["test"]["label"]}
        data.splits["test"] = Dataset.from_dict(columns, features=data.splits["test"].features)
        subject = our_subject("plain", image_size=side)
        results.append(patch_drop(examine(subject, data), shares=(0.3, 0.6)))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": ()}, r"must lie in 0\.\.1"),
        ({"shares": (1.2,)}, r"must lie in 0\.\.1"),
        ({"fill": "white"}, "fill 'white' is not known; choose mean or black"),
        ({"orders": ("best",)}, r"orders \['best'\] are not all known; there are random, salient first"),
        ({"patch_size": 90}, "do not fit images of 8x8 px"),
    ],
)
def test_misuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        patch_drop(examine(), **options)
