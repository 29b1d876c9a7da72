"""transformers' own Trainer on our models: accumulated micro-batches make the step of one large batch, exactly."""

import gc
from pathlib import Path

import pytest
import torch
from models.families import FAMILIES, Family
from transformers import Trainer, TrainingArguments

PLAIN = FAMILIES["plain"]
HARD = torch.tensor([2, 0, 1, 1, 0, 2, 2, 0])
LABELS = {
    "hard": (HARD, None),
    "ignored": (torch.tensor([2, -100, -100, -100, 0, 2, -100, 0]), None),
    "soft": (torch.rand(8, 3, generator=torch.Generator().manual_seed(3)).softmax(dim=1), None),
    "multi-label": ((torch.arange(24).reshape(8, 3) % 5 < 2).float(), "multi_label_classification"),
    "regression": (torch.linspace(-1, 1, 24).reshape(8, 3), "regression"),
}


@pytest.fixture(scope="module", autouse=True)
def _nothing_older_to_collect():
    """A training ends in a full garbage collection: what the files before this one left need not be walked through."""
    gc.collect()
    gc.freeze()


def step(model, images: torch.Tensor, labels: torch.Tensor, batch: int, folder: Path) -> dict[str, torch.Tensor]:
    """The gradients that the Trainer's one optimiser step saw, read off plain SGD with learning rate 1."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=len(images) // batch,
        max_steps=1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)).train()
    assert result.global_step == 1
    return {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("kind", "batch"), [("hard", 8), *((kind, 2) for kind in LABELS)])
def test_accumulated_step(kind: str, batch: int, tmp_path: Path):
    labels, problem_type = LABELS[kind]
    model = PLAIN.build("classification", dtype=torch.float64, problem_type=problem_type).train()
    images = PLAIN.images(model.config, batch=8, dtype=torch.float64)
    model(images, labels=labels).loss.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    given = step(model, images, labels, batch, tmp_path)
    for name in wanted:
        torch.testing.assert_close(given[name], wanted[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_every_family_trains_evaluates_and_reloads(family: Family, tmp_path: Path):
    model = family.build("classification")
    images = family.images(model.config, batch=6)
    data = [{"pixel_values": image, "labels": torch.tensor(i % 3)} for i, image in enumerate(images)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        per_device_eval_batch_size=4,
        num_train_epochs=12,
        learning_rate=3e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.5 * before
    predictions = trainer.predict(data)
    assert predictions.predictions.shape == (6, 3)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = family.classes["classification"].from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        torch.testing.assert_close(loaded(images).logits, model.eval()(images).logits, rtol=0, atol=0)
