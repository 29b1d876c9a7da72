"""transformers' own Trainer on our models: accumulated micro-batches make the step of one large batch, exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, Family
from transformers import Trainer, TrainingArguments

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
    wanted = {
        name: (parameter.detach().clone(), parameter.grad.clone()) for name, parameter in model.named_parameters()
    }
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
