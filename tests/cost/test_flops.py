"""FLOPs counted from a configuration, beside what torch counts while the model runs."""

from typing import Any

import pytest
import torch
from models.families import FAMILIES, Family
from torch.utils.flop_counter import FlopCounterMode

import hf_vit
from hf_vit import variant_config
from hf_vit.cost import forward_flops, forward_macs, training_flops
from hf_vit.cost.flops import Task
from hf_vit.errors import UserError

Size = tuple[int, int]


def counted(model: Any, size: Size) -> int:
    """What torch counts in a forward pass on one image."""
    model.eval().requires_grad_(False)  # torch's counter looks for gradient functions that `no_grad` leaves out
    pixel_values = torch.zeros(1, model.config.num_channels, *size, device=model.device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(pixel_values=pixel_values)
    return counter.get_total_flops()


def check(model: Any, task: Task, size: Size) -> None:
    ours, theirs = forward_flops(model.config, size, task), counted(model, size)
    assert theirs > 0
    assert ours == pytest.approx(theirs, rel=0.01), f"{task}, {size}: {ours / theirs:.4f} of torch's count"


def nominal(config: Any) -> Size:
    (h, w), (stride_h, stride_w) = config.grid, config.patch_stride
    return h * stride_h, w * stride_w


CHOICES = {f"{name}-{choice}": (family, choice) for name, family in FAMILIES.items() for choice in family.choices}


@pytest.mark.parametrize(("family", "choice"), CHOICES.values(), ids=CHOICES)
def test_every_choice_as_torch_counts_it(family: Family, choice: str) -> None:
    config = family.config(choice)
    model = family.classes["classification"](config)
    height, width = nominal(config)
    check(model, "classification", (height, width))
    check(model, "classification", (height, width + 2 * config.patch_stride[1]))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("task", ["model", "masked_prediction", "backbone"])
def test_every_head_as_torch_counts_it(family: Family, task: Task) -> None:
    for fields in ({}, {"pooling": "map", "representation_size": 20}, {"prediction_target": "downsampled"}):
        config = family.config(**fields)
        check(family.classes[task](config), task, nominal(config))


@pytest.mark.parametrize("patch_size", [4, 16, 64])
def test_the_feature_pyramid_as_torch_counts_it(patch_size: int) -> None:
    config = FAMILIES["plain"].config(
        patch_size=patch_size, image_size=3 * patch_size, hidden_size=24, fpn_hidden_size=20,
        use_feature_pyramid=True, out_features=["stage2"],
    )  # fmt: skip
    check(hf_vit.HfViTBackbone(config), "backbone", nominal(config))


@pytest.mark.parametrize("stage_depths", [(), (1,), (2, 1, 2)])
def test_stems_of_odd_images_as_torch_counts_them(stage_depths: tuple[int, ...]) -> None:
    """Every halving rounds up: SAME padding in the hybrid, even paddings in AxialResNet and BiT."""
    hybrid = FAMILIES["hybrid"].config(stage_depths=stage_depths, image_size=48)
    axial = hf_vit.HfAxialResNetConfig(stage_depths=stage_depths, stem_width=16, image_size=48, num_labels=5)
    bit = hf_vit.HfBitConfig(stage_depths=stage_depths, stem_width=32, image_size=48, num_labels=5)
    for model in (
        hf_vit.HfHybridViTForImageClassification(hybrid),
        hf_vit.HfAxialResNetForImageClassification(axial),
        hf_vit.HfBitForImageClassification(bit),
    ):
        for size in ((48, 48), (45, 70), (33, 49)):
            check(model, "classification", size)
    check(hf_vit.HfAxialResNetModel(axial), "model", (45, 70))


def test_an_axial_stem_as_torch_counts_it() -> None:
    for depths, patch in (((), 8), ((1, 2), 8), ((1, 1), (16, 8))):
        config = FAMILIES["axial"].config(stage_depths=depths, stem_width=16, image_size=32, patch_size=patch)
        check(hf_vit.HfAxialViTForImageClassification(config), "classification", nominal(config))


PUBLISHED = {
    "B/16": (224, 224),
    "L/32": (384, 352),
    "R50+B/16": (230, 200),
    "R+Ti/16": (384, 384),
    "Axial-B/16": (224, 320),
}


@pytest.mark.parametrize(("name", "size"), PUBLISHED.items(), ids=PUBLISHED)
def test_published_sizes_as_torch_counts_them(name: str, size: Size) -> None:
    with torch.device("meta"):
        model = hf_vit.AutoModelForImageClassification.from_config(variant_config(name, num_labels=1000))
    check(model, "classification", size)


@pytest.mark.parametrize(
    ("name", "epochs", "published"),
    [("B/32", 7, 55), ("B/16", 7, 224), ("L/32", 7, 196), ("L/16", 14, 1567), ("H/14", 14, 4262)],
)
def test_training_compute_of_the_paper(name: str, epochs: int, published: int) -> None:
    """arXiv 2010.11929, table 6: exaFLOPs of pre-training on the 303 million images of JFT."""
    found = training_flops(variant_config(name), images=303e6 * epochs)
    assert found / 1e18 == pytest.approx(published, rel=0.025)


def test_parts_by_hand() -> None:
    """A ViT of 2 layers on 3 x 2 patches, and the same as an axial model."""
    width, tokens, mlp, layers = 32, 6 + 1, 48, 2
    macs = forward_macs(FAMILIES["plain"].config(image_size=(12, 8)))
    assert macs == {
        "patch embeddings": 6 * 3 * 4 * 4 * width,
        "attention projections": layers * 4 * tokens * width**2,
        "attention": layers * 2 * tokens**2 * width,
        "MLPs": layers * 2 * tokens * width * mlp,
        "head": 3 * width,
    }
    axial = forward_macs(FAMILIES["axial"].config(image_size=(12, 8)))
    assert axial["attention"] == layers * (3 * 2 * 2**2 + 2 * 2 * 3**2) * width
    assert axial["MLPs"] == 2 * layers * 2 * 6 * width * mlp


def test_what_cannot_be_counted_is_refused() -> None:
    from transformers import ViTConfig

    config = variant_config("Ti/16")
    with pytest.raises(UserError, match="a 'vit' model"):
        forward_flops(ViTConfig())
    with pytest.raises(UserError, match="not divisible by patch"):
        forward_flops(config, 225)
    with pytest.raises(UserError, match="no AxialResNet for masked prediction"):
        forward_flops(hf_vit.HfAxialResNetConfig(), task="masked_prediction")
    with pytest.raises(UserError, match="no BiT for backbone"):
        forward_flops(hf_vit.HfBitConfig(), task="backbone")
    for images in (0, -1, float("nan")):
        with pytest.raises(UserError, match="above 0"):
            training_flops(config, images)
