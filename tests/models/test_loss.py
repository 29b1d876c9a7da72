"""The classification loss against the same by hand, and its division over accumulated batches, by Trainer too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, Family
from torch import nn
from torch.func import functional_call, grad, vmap
from transformers import Trainer, TrainingArguments

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
    for count in (None, 0, torch.tensor(0)):
        assert model(images, labels=torch.full((4,), -100), num_items_in_batch=count).loss == 0
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


def test_distillation_averages_both_heads(tmp_path: Path):
    model = FAMILIES["plain"].build("classification", "distillation", dtype=torch.float64)
    images = FAMILIES["plain"].images(model.config, batch=4, dtype=torch.float64)
    outputs = model(images, labels=HARD)
    torch.testing.assert_close(outputs.logits, (outputs.cls_logits + outputs.distillation_logits) / 2)
    assert (outputs.cls_logits - outputs.distillation_logits).abs().max() > 0.1
    torch.testing.assert_close(outputs.loss, by_hand(outputs.logits, HARD, None).mean(), rtol=0, atol=1e-12)
    trainer = trainer_of(model, images, HARD, tmp_path)
    assert trainer.predict(trainer.eval_dataset).predictions.shape == outputs.logits.shape


PLAIN = FAMILIES["plain"]
LABELS = {
    "hard": (torch.tensor([2, 0, 1, 1, 0, 2, 2, 0]), None),
    "ignored": (torch.tensor([2, -100, -100, -100, 0, 2, -100, 0]), None),
    "soft": (torch.rand(8, 3, generator=torch.Generator().manual_seed(3)).softmax(dim=1), None),
    "multi-label": ((torch.arange(24).reshape(8, 3) % 5 < 2).float(), "multi_label_classification"),
    "regression": (torch.linspace(-1, 1, 24).reshape(8, 3), "regression"),
}


def trainer_of(model: Any, images: torch.Tensor, labels: torch.Tensor, folder: Path, **settings: Any) -> Trainer:
    quiet = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    data = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    sgd = torch.optim.SGD(model.parameters(), lr=1.0) if "max_steps" in settings else None
    arguments = TrainingArguments(output_dir=str(folder), **quiet, **settings)
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, optimizers=(sgd, None))


@pytest.mark.parametrize(("kind", "batch"), [("hard", 8), *((kind, 2) for kind in LABELS)])
def test_accumulated_step(kind: str, batch: int, tmp_path: Path):
    """The gradients that its one optimiser step saw, read off plain SGD with learning rate 1."""
    labels, problem_type = LABELS[kind]
    model = PLAIN.build("classification", dtype=torch.float64, problem_type=problem_type).train()
    images = PLAIN.images(model.config, batch=8, dtype=torch.float64)
    model(images, labels=labels).loss.backward()
    wanted = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters()}
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 8 // batch, "max_grad_norm": 0.0}
    trainer = trainer_of(model, images, labels, tmp_path, **settings, max_steps=1, lr_scheduler_type="constant")
    assert trainer.train().global_step == 1
    for name, parameter in model.named_parameters():
        before, gradient = wanted[name]
        torch.testing.assert_close(before - parameter, gradient, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_every_family_trains_evaluates_and_reloads(family: Family, tmp_path: Path):
    model = family.build("classification")
    images = family.images(model.config, batch=6)
    settings = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 4, "num_train_epochs": 12}
    trainer = trainer_of(model, images, torch.arange(6) % 3, tmp_path, **settings, learning_rate=3e-3)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.5 * before
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (6, 3)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = family.classes["classification"].from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        torch.testing.assert_close(loaded(images).logits, model.eval()(images).logits, rtol=0, atol=0)
