"""A loss that is no number leaves its batch and its weights, and doing the step again tells where it comes from."""

import math
import re

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

from hf_vit import HfViTForImageClassification, UserError
from hf_vit.training import HfViTTrainer, replay


class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.pixels = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "labels": index % 3}


@pytest.fixture
def broken(tmp_path):
    """Train until it breaks: the error's message and the folder that it names."""

    def run(model, data=None):
        settings = dict(output_dir=str(tmp_path / "work"), report_to="none", use_cpu=True, max_steps=3, optim="sgd")
        arguments = TrainingArguments(**settings, per_device_train_batch_size=4, learning_rate=0.1)
        trainer = HfViTTrainer(model, arguments, train_dataset=data or Images())
        with pytest.raises(UserError) as error:
            trainer.train()
        named = re.search(r"hf_vit\.training\.replay\('(.*?)'\)", str(error.value))
        return str(error.value), named and named[1]

    return run


def test_a_bad_image_is_found(tiny_config, broken, tmp_path):
    data, model = Images(), HfViTForImageClassification(tiny_config())
    data.pixels[5, 1, 2, 3] = float("inf")
    message, folder = broken(model, data)
    assert re.match(r"the loss became nan at step [123] \(learning rate ", message)
    assert "\n" not in message
    batch = load_file(f"{folder}/batch.safetensors")
    row = next(row for row, image in enumerate(batch["pixel_values"]) if not image.isfinite().all())
    assert int(batch["labels"][row]) == 5 % 3
    assert torch.equal(batch["pixel_values"][row], data.pixels[5])
    found = replay(folder, device="cpu")
    assert (found.bad_inputs, found.bad_images, found.bad_weights) == (["pixel_values"], [row], [])
    assert found.first_bad_module == "vit.embeddings.patch_embeddings.projection"
    assert found.learning_rate == pytest.approx(0.1 * (4 - found.step) / 3)
    assert math.isnan(found.loss_then)
    assert math.isnan(found.loss)
    assert "pixel_values of images" in str(found)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    assert not list((tmp_path / "work").glob(".*"))


def test_the_first_layer_that_fails_is_found(tiny_config, broken):
    model = HfViTForImageClassification(tiny_config())
    with torch.no_grad():
        model.vit.layers[1].mlp.fc1.bias[3] = float("nan")
    _, folder = broken(model)
    found = replay(folder, device="cpu")
    assert (found.step, found.bad_inputs) == (1, [])
    assert found.bad_weights == ["vit.layers.1.mlp.fc1.bias"]
    assert found.first_bad_module.startswith("vit.layers.1.")
    assert "vit.layers.1.mlp.fc1.bias" in str(found)


def test_a_loss_of_the_trainer_alone_is_told_apart(tiny_config, broken, monkeypatch):
    """The replayed loss is the model's own, as it was in the step that was not made."""
    torch.manual_seed(0)
    model, compute = HfViTForImageClassification(tiny_config()), HfViTTrainer.compute_loss
    nn.init.normal_(model.classifier.weight)
    monkeypatch.setattr(HfViTTrainer, "compute_loss", lambda *args, **kwargs: compute(*args) * float("nan"))
    _, folder = broken(model)
    found, batch = replay(folder, device="cpu"), load_file(f"{folder}/batch.safetensors")
    with torch.no_grad():
        own = nn.functional.cross_entropy(model.train()(batch["pixel_values"]).logits, batch["labels"])
    assert found.loss == pytest.approx(own.item(), rel=1e-6)
    assert found.first_bad_module is None
    assert "everything is finite here" in str(found)


def test_models_of_transformers_and_of_ones_own(broken):
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3)
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))
    nn.init.constant_(model.classifier.bias, float("nan"))
    assert replay(broken(model)[1], device="cpu").bad_weights == ["classifier.bias"]

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(3 * 64, 3)

        def forward(self, pixel_values, labels):
            loss = nn.functional.cross_entropy(self.dense(pixel_values.flatten(1)), labels)
            return {"loss": loss}

    model = Own()
    nn.init.constant_(model.dense.bias, float("nan"))
    _, folder = broken(model)
    with pytest.raises(UserError, match="of a Own, which cannot be built from here; give the model"):
        replay(folder)
    assert replay(folder, Own(), device="cpu").first_bad_module == "dense"
    with pytest.raises(UserError, match="do not fit"):
        replay(folder, nn.Linear(1, 1), device="cpu")


def test_without_room_the_message_stays(tiny_config, broken, monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("hf_vit.training.trainer.replaying.save_model", full)
    model = HfViTForImageClassification(tiny_config())
    nn.init.constant_(model.classifier.bias, float("nan"))
    message, folder = broken(model)
    assert folder is None
    assert list((tmp_path / "work").iterdir()) == []
    assert message.endswith("clip gradients (1.0)")


def test_a_folder_of_something_else(tmp_path):
    with pytest.raises(UserError, match="holds no step to replay"):
        replay(tmp_path)
