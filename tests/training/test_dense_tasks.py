"""Segmentation and detection under the one driver: what is learnt, judged, written, resumed and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit import UserError
from hf_vit.data.builtin import scenes
from hf_vit.results.facts import Facts
from hf_vit.training import finetune

SIDE = 32
TINY: dict[str, Any] = dict(
    image_size=SIDE, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
)
DATA = f"scenes:images=16,size={SIDE}"
QUICK: dict[str, Any] = dict(steps=4, evaluations=2, batch_size=8, device="cpu")
TASKS = [("segmentation", "linear"), ("segmentation", "upernet"), ("detection", "mask-rcnn")]


@pytest.fixture(autouse=True)
def few_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "HELD_OUT", 6)


def learn(output: Path, task: str, head: str | None = None, **settings: Any) -> Any:
    chosen = QUICK | dict(head_width=16) | settings
    return finetune(hf_vit.HfViTConfig(**TINY), DATA, output, task=task, head=head, **chosen)


@pytest.mark.parametrize(("task", "head"), TASKS)
def test_a_finished_folder(tmp_path: Path, task: str, head: str) -> None:
    """Model, facts with the test, card with its numbers, curve, pictures; the loss falls; nothing is learnt again."""
    result = learn(tmp_path / "out", task, head)
    losses = [entry["loss"] for entry in result.history if "loss" in entry]
    assert losses[-1] < losses[0]
    training, test = Facts.load(tmp_path / "out").records
    assert (training.values["task"], training.values["head"], training.values["head_width"]) == (task, head, 16)
    measured = "mean_iou" if task == "segmentation" else "ap50"
    assert training.values[f"validation_{measured}"] == result.validation[measured]
    assert (test.values["protocol"], test.data.split, test.data.size) == (task, "test", 6)
    assert result.test.headline() == test.values["headline"]
    for name in ("learning_curve.png", f"evaluation_{task}.png", f"evaluation_{task}_worst_images.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert picture.format == "PNG"
    card = (tmp_path / "out" / "README.md").read_text().replace("\\", "")
    for name, value in test.values["headline"].items():
        assert f"| {name} | {value:.2%} |" in card
    assert "worst_images" not in card, "pictures with images of the data are shared on request alone"
    assert not (tmp_path / "out" / "checkpoints").exists()
    again = learn(tmp_path / "out", task, head, resume=True)
    assert again.test.values() == result.test.values()
    assert again.validation == result.validation
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, result.model.state_dict()[name].cpu())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(task="depth"), "there is no task 'depth'.*classification, segmentation, detection"),
        (dict(task="segmentation", head="detr"), "no head 'detr' for segmentation.*linear, upernet, mask2former"),
        (dict(task="detection", head="linear"), "no head 'linear' for detection.*mask-rcnn, detr, deformable-detr"),
        (dict(task="classification", head="linear"), "are of segmentation and detection"),
        (dict(task="segmentation", head_width=0), "at least 1 channel"),
        (dict(task="segmentation", streaming=True), "are not streamed"),
        (dict(task="segmentation", mixup_alpha=0.2), "mixup_alpha"),
        (dict(task="detection", rotation_degrees=5.0), "rotation_degrees"),
        (dict(task="segmentation", label_smoothing=0.1), "has no --label-smoothing"),
        (dict(task="detection", loss="bce"), "has no --loss"),
        (dict(task="detection", tune="lora"), "has no --tune"),
        (dict(task="segmentation", lr_sweep=True), "leave the sweep out"),
        (dict(task="segmentation", sam_rho=0.05), "has no --sam-rho"),
    ],
)
def test_refused_before_anything_is_read(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        finetune("no/such/model", "no-such-data", tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_labels_are_no_masks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither masks nor objects"):
        finetune(hf_vit.HfViTConfig(**TINY), "digits", tmp_path / "out", task="segmentation")
    assert not (tmp_path / "out").exists()


def test_a_finished_model_of_another_task(tmp_path: Path) -> None:
    learn(tmp_path / "out", "segmentation", steps=1, evaluations=1)
    with pytest.raises(UserError, match="another kind"):
        learn(tmp_path / "out", "detection", resume=True)
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["id2label"]["1"] == scenes.SHAPES[0]
