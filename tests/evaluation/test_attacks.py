"""Attacks on linear models, whose closed forms are known, in pixels behind an odd normalisation."""

import numpy as np
import pytest
import timm
import torch
from evaluation.tiny import examine, make_classifier, make_data, make_images, our_subject
from models.families import FAMILIES
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform
from torch import nn
from transformers import ViTImageProcessor

from hf_vit.data import eval_transform
from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.attacks import fgsm, pgd, random_start, robustness
from hf_vit.evaluation.protocols.top1 import top1
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.pixels import PixelScale

MEAN, STD = (0.3, 0.45, 0.6), (0.2, 0.25, 0.5)


class Linear(nn.Module):
    """Logits [B, K] of flattened images; a class of its own so that its config can name the classes."""

    def __init__(self, classes=2, side=6):
        super().__init__()
        self.head = nn.Linear(3 * side * side, classes, dtype=torch.float64)

    def forward(self, pixel_values):
        return self.head(pixel_values.flatten(1))


@pytest.fixture
def linear():
    processor = ViTImageProcessor(size={"height": 6, "width": 6}, image_mean=MEAN, image_std=STD)
    return LoadedModel(Linear(), lambda images: torch.stack(eval_transform(processor).prepare(images)), "linear")


def pixel_weights(model):
    """[3, 6, 6]: how fast the margin of class 0 over class 1 grows with each pixel in 0..1, worked out by hand."""
    weight = model.head.weight[0] - model.head.weight[1]
    return weight.detach().view(3, 6, 6) / torch.tensor(STD, dtype=torch.float64)[:, None, None]


def margin(subject, scale, pixels):
    logits = subject.model(scale.values(pixels))
    return logits[:, 1] - logits[:, 0]


def test_the_scale_is_the_processor_s(linear):
    scale = PixelScale.of(linear)
    assert scale.mean == pytest.approx(MEAN, rel=1e-6)
    assert scale.std == pytest.approx(STD, rel=1e-6)
    assert scale.factor == 1
    one = PixelScale.of_processor(ViTImageProcessor(image_mean=0.5, image_std=0.25))  # a number for all channels
    assert (one.mean, one.std) == ((0.5,) * 3, (0.25,) * 3)
    images = make_images(3, side=6)
    wanted = torch.tensor(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 255
    found = scale.pixels(linear.prepare(images).double())
    torch.testing.assert_close(found, wanted.double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(scale.values(found), linear.prepare(images).double(), atol=1e-6, rtol=0)


def test_the_scale_of_a_timm_model():
    model = timm.create_model("resnet10t", num_classes=3)
    config = resolve_model_data_config(model)
    transform = create_transform(**config, is_training=False)
    scale = PixelScale.of(
        LoadedModel(model, lambda images: torch.stack([transform(image) for image in images]), "timm")
    )
    assert scale.mean == pytest.approx(config["mean"], rel=1e-5)
    assert scale.std == pytest.approx(config["std"], rel=1e-5)


def test_processors_that_do_more_than_scale(linear):
    def squared(images):
        return linear.prepare(images) ** 2

    def constant(images):
        return linear.prepare(images) * 0

    def swapped(images):
        return linear.prepare(images).flip(1)  # MobileViT's processor does

    for prepare in (squared, constant, swapped):
        with pytest.raises(UserError, match="does more to a pixel than scale it"):
            PixelScale.of(LoadedModel(linear.model, prepare, "odd"))


def test_at_the_border_only_what_is_left_counts(linear):
    """Some pixels are black or white, or nearer to it than epsilon: the best is still known in closed form."""
    scale, epsilon = PixelScale.of(linear), 20 / 255
    pixels = torch.randint(0, 256, (4, 3, 6, 6)).double() / 255
    pixels[:, :, :2] = pixels[:, :, :2].round()
    uphill = -pixel_weights(linear.model)
    room = torch.where(uphill > 0, (1 - pixels).clamp(max=epsilon), pixels.clamp(max=epsilon))
    expected = (uphill.abs() * room).sum(dim=(1, 2, 3))

    def loss(moved):
        return margin(linear, scale, moved)

    start = random_start(pixels, 3)
    for attacked in (fgsm(loss, pixels, epsilon), pgd(loss, pixels, epsilon, steps=8, start=start)):
        torch.testing.assert_close(loss(attacked) - loss(pixels), expected, rtol=1e-6, atol=0)
        assert float(attacked.min()) >= 0
        assert float(attacked.max()) <= 1
        assert float((attacked - pixels).abs().max()) <= epsilon + 1e-12


def test_pgd_stays_in_the_ball_and_beats_fgsm_on_a_curved_loss():
    model = make_classifier().double()
    pixels, labels = torch.rand(8, 3, 8, 8, dtype=torch.float64), torch.arange(8) % 6

    def loss(moved):
        return nn.functional.cross_entropy(model(moved * 2 - 1).logits, labels, reduction="none")

    epsilon, start = 16 / 255, random_start(pixels, 0)
    assert float(start.abs().max()) <= 1
    once, often = fgsm(loss, pixels, epsilon), pgd(loss, pixels, epsilon, steps=20)
    begun = pgd(loss, pixels, epsilon, steps=1, start=start)
    for attacked in (once, often, begun):
        assert float((attacked - pixels).abs().max()) <= epsilon + 1e-12
        assert 0 <= float(attacked.min()) <= float(attacked.max()) <= 1
    with torch.no_grad():
        assert float(loss(often).mean()) > float(loss(once).mean()) > float(loss(pixels).mean())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_random_start_belongs_to_the_image():
    pixels = torch.rand(3, 3, 4, 4)
    found = random_start(pixels, 7)
    assert torch.equal(random_start(pixels.flip(0), 7).flip(0), found)
    assert not torch.equal(random_start(pixels, 8), found)
    assert not torch.equal(found[0], found[1])


class Named(Linear):
    """A linear classifier that transformers' naming makes a classifier with named classes."""


Named.__name__ = "LinearForImageClassification"


def test_accuracy_under_attack_equals_the_closed_form():
    """Of a linear classifier of two classes, exactly the images whose margin exceeds epsilon ||w||_1 survive."""
    model = Named()
    model.config = type("Config", (), {"id2label": {0: "ant", 1: "bee"}, "num_labels": 2})()
    processor = ViTImageProcessor(size={"height": 6, "width": 6}, image_mean=MEAN, image_std=STD)
    subject = LoadedModel(model, lambda images: torch.stack(eval_transform(processor).prepare(images)), "linear")
    data = make_data(test=60, side=6)
    two = data.splits["test"].map(
        lambda row: {"image": row["image"].point(lambda value: 60 + value // 2), "label": row["label"] % 2}
    )
    data.splits["test"], data.label_names = two, ["ant", "bee"]
    epsilons = (0.5, 1.0, 2.0, 4.0)
    result = robustness(examine(subject, data, batch_size=13), epsilons=epsilons, steps=3)
    with torch.no_grad():
        logits = model(subject.prepare(two["image"]).double())
    sign = 1 - 2 * torch.tensor(two["label"])
    margins = (logits[:, 0] - logits[:, 1]) * sign
    norm = pixel_weights(model).abs().sum()
    wanted = [float((margins > epsilon / 255 * norm).double().mean()) for epsilon in epsilons]
    assert result.clean == float((margins > 0).double().mean())
    assert result.fgsm == result.pgd == wanted
    assert 0 < wanted[-1] < wanted[0] < result.clean


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_after_an_ordinary_evaluation(family):
    """Derived tables and kernels that an evaluation without gradients keeps do not stand in the way."""
    subject, data = our_subject(family), make_data(test=12)
    top1(examine(subject, data))
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    result = robustness(examine(subject, data), epsilons=(8.0,), steps=2)
    assert result == robustness(examine(subject, data, batch_size=5), epsilons=[8.0], steps=2)
    assert all(torch.equal(before[name], value) for name, value in subject.model.state_dict().items())


def test_a_classifier_in_half_precision_is_attacked_in_full_pixels():
    full = robustness(examine(), epsilons=(16.0,), steps=4)
    half = robustness(examine(make_classifier().to(torch.bfloat16)), epsilons=(16.0,), steps=4)
    assert full.pgd[0] < full.clean
    assert half.pgd[0] == pytest.approx(full.pgd[0], abs=0.1)


@pytest.mark.parametrize("options", [{"epsilons": ()}, {"epsilons": (0,)}, {"epsilons": (300,)}, {"steps": 0}])
def test_misuse(options):
    with pytest.raises(UserError, match="must lie in 0 < epsilon <= 255"):
        robustness(examine(), **options)
