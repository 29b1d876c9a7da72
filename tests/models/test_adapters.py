"""Adapters and quantisation by other libraries: peft's LoRA, torchao's int8 weights."""

from pathlib import Path

import pytest
import torch
from models.families import Family, checkpoint_activations, training_loss

# Upstream: peft 0.21 asks for `is_gradient_checkpointing`, which transformers 5.23 renames.
renamed = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@renamed
def test_lora(family: Family, tmp_path: Path):
    """Train a step on q and v, save, load onto a fresh base, merge: the same logits all along."""
    from peft import LoraConfig, PeftModel, get_peft_model

    images = family.images(family.config())
    base = family.build("classification")
    before = base(images).logits.detach()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    model = get_peft_model(base, config)
    torch.testing.assert_close(model(images).logits, before, rtol=0, atol=0)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    blocks = 2 * len(family.attentions_of(torch.zeros(1, 1), (1, 1)))
    assert len(trainable) == blocks * 2 * 2 + 2, "A and B of q and v in every attention, and the head"
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    for _ in range(2):  # B starts at zero, so that A moves in the second step
        loss = model(images, labels=torch.tensor([0, 1])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = model.eval()(images).logits.detach()
    assert (after - before).abs().max() > 0.1
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors", ".md"}
    again = PeftModel.from_pretrained(family.build("classification"), tmp_path).eval()
    torch.testing.assert_close(again(images).logits, after, rtol=0, atol=0)
    merged = again.merge_and_unload()
    assert type(merged) is family.classes["classification"]
    torch.testing.assert_close(merged(images).logits, after, rtol=0, atol=1e-5)


def test_arguments_of_text_models_that_are_none_change_nothing(family: Family):
    """peft passes them with task_type="FEATURE_EXTRACTION", as transformers' ViT takes them."""
    model = family.build("classification")
    images = family.images(model.config)
    nothing = dict.fromkeys(("input_ids", "attention_mask", "inputs_embeds"))
    torch.testing.assert_close(model(pixel_values=images, **nothing).logits, model(images).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"give patch_attention_mask \[B, h, w\] for padding"):
        model(images, attention_mask=torch.ones(2, 4))


@renamed
def test_lora_in_a_model_with_checkpointing(family: Family):
    from peft import LoraConfig, get_peft_model

    base = family.build("classification").train()
    checkpoint_activations(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    training_loss(family, "classification", model, family.images(base.config)).backward()
    gradients = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert gradients
    assert all(gradient is not None and gradient.any() for gradient in gradients)


def test_torchao_int8_weights(family: Family, tmp_path: Path):
    """Quantised when loaded, saved, loaded again: the same logits, close to the full ones, in a smaller file."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    model = family.build("classification", hidden_size=64, intermediate_size=128)
    images = family.images(model.config)
    model.save_pretrained(tmp_path / "full")
    quantization = TorchAoConfig(Int8WeightOnlyConfig())
    loader = family.classes["classification"]
    quantised = loader.from_pretrained(tmp_path / "full", quantization_config=quantization).eval()
    with torch.no_grad():
        wanted, given = model(images).logits, quantised(images).logits
    assert 0 < (given - wanted).norm() < 0.05 * wanted.norm()
    quantised.save_pretrained(tmp_path / "int8")
    full, int8 = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("full", "int8"))
    dense = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert full - int8 > 0.8 * 3 * dense, "three of four bytes are gone, but for the scales"
    again = loader.from_pretrained(tmp_path / "int8").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(images).logits, given, rtol=0, atol=0)
