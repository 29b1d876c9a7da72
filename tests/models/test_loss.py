"""The classification loss against the same written out by hand, and its division over accumulated batches."""

import pytest
import torch
from models.families import FAMILIES, Family
from torch import nn
from torch.func import functional_call, grad, vmap

HARD = torch.tensor([2, 0, 1, 1])
SOFT = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.0, 0.9, 0.1], [0.25, 0.5, 0.25]])
MULTI = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
TARGETS = torch.tensor([[1.5, 0.0, -1.0], [0.0, 0.2, 0.0], [1.0, -3.0, 1.0], [0.0, 1.0, 0.0]])


def by_hand(logits: torch.Tensor, labels: torch.Tensor, problem_type: str | None) -> torch.Tensor:
    """[B]: the loss of each image."""
    if problem_type == "regression":
        return (logits - labels).square().mean(dim=1)
    if problem_type == "multi_label_classification":
        p = 1 / (1 + (-logits).exp())
        return -(labels * p.log() + (1 - labels) * (1 - p).log()).sum(dim=1)
    log_p = logits - logits.exp().sum(dim=1, keepdim=True).log()
    probabilities = nn.functional.one_hot(labels, 3) if labels.ndim == 1 else labels
    return -(probabilities * log_p).sum(dim=1)


CASES = [(HARD, None), (SOFT, None), (MULTI, "multi_label_classification"), (TARGETS, "regression")]


@pytest.mark.parametrize(("labels", "problem_type"), CASES, ids=["hard", "soft", "multi-label", "regression"])
def test_loss(family: Family, labels: torch.Tensor, problem_type: str | None):
    model = family.build("classification", problem_type=problem_type, dtype=torch.float64)
    images = family.images(model.config, batch=4, dtype=torch.float64)
    outputs = model(images, labels=labels)
    wanted = by_hand(outputs.logits, labels, problem_type)
    torch.testing.assert_close(outputs.loss, wanted.mean(), rtol=0, atol=1e-12)
    assert model.config.problem_type == problem_type, "the labels of one batch do not settle the problem for good"
    # Two accumulated halves with the count that transformers' Trainer passes add up to the whole.
    count = int((labels != -100).sum())
    halves = [model(images[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=count).loss for i in (0, 2)]
    torch.testing.assert_close(sum(halves), wanted.mean(), rtol=0, atol=1e-12)


def test_ignored_labels(family: Family):
    model = family.build("classification", dtype=torch.float64)
    images, labels = family.images(model.config, batch=4, dtype=torch.float64), torch.tensor([2, -100, 1, -100])
    outputs = model(images, labels=labels)
    wanted = by_hand(outputs.logits[::2], labels[::2], None).mean()
    torch.testing.assert_close(outputs.loss, wanted, rtol=0, atol=1e-12)
    assert model(images, labels=torch.full((4,), -100)).loss == 0
    with_count = model(images, labels=labels, num_items_in_batch=torch.tensor(2)).loss
    torch.testing.assert_close(with_count, wanted, rtol=0, atol=1e-12)


def test_one_label_is_a_regression(family: Family):
    model = family.build("classification", num_labels=1, dtype=torch.float64)
    images, labels = family.images(model.config, batch=4, dtype=torch.float64), torch.tensor([0.5, 1.0, -2.0, 0.0])
    outputs = model(images, labels=labels)
    wanted = (outputs.logits[:, 0] - labels).square().mean()
    torch.testing.assert_close(outputs.loss, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(images, labels=labels[:, None]).loss, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("labels", [HARD, SOFT], ids=["hard", "soft"])
def test_gradients_of_every_image(family: Family, labels: torch.Tensor):
    """By torch.func, under which nobody can look at values."""
    model = family.build("classification", attn_implementation="eager", dtype=torch.float64)
    images = family.images(model.config, batch=4, dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (image[None],), {"labels": label[None]}).loss

    given = vmap(grad(loss), in_dims=(None, 0, 0))(weights, images, labels)["classifier.bias"]
    classes = nn.functional.one_hot(labels, 3) if labels.ndim == 1 else labels
    torch.testing.assert_close(given, model(images).logits.softmax(dim=1) - classes, rtol=0, atol=1e-7)


def test_loss_is_computed_in_float32_at_least(family: Family):
    model = family.build("classification").bfloat16()
    assert model(family.images(model.config).bfloat16(), labels=torch.tensor([0, 1])).loss.dtype == torch.float32


def test_distillation_averages_both_heads():
    model = FAMILIES["plain"].build("classification", "distillation", dtype=torch.float64)
    images = FAMILIES["plain"].images(model.config, batch=4, dtype=torch.float64)
    outputs = model(images, labels=HARD)
    torch.testing.assert_close(outputs.logits, (outputs.cls_logits + outputs.distillation_logits) / 2)
    assert (outputs.cls_logits - outputs.distillation_logits).abs().max() > 0.1
    torch.testing.assert_close(outputs.loss, by_hand(outputs.logits, HARD, None).mean(), rtol=0, atol=1e-12)
