"""The MLP-Mixer's own: initialisation, stochastic depth, checkpointed activations, and what it refuses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import MIXERS, checkpoint_activations, training_loss
from torch import nn

from hf_vit import HfMixerForImageClassification, UserError
from hf_vit.analysis import AttentionReader
from hf_vit.loading.start import build_classifier, find_model

MIXER = MIXERS["mixer"]
WIDE = {"image_size": 64, "hidden_size": 96, "token_intermediate_size": 120, "intermediate_size": 160}


def test_weights_begin_as_flaxs():
    """LeCun's kernels, zero biases, a head of zeros (vit_jax/models_mixer.py keeps to Flax's defaults)."""
    torch.manual_seed(0)
    model = HfMixerForImageClassification(MIXER.config(**WIDE))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and name != "classifier":
            wanted = math.sqrt(1 / module.weight[0].numel())
            assert module.weight.std().item() == pytest.approx(wanted, rel=0.05), name
            assert module.weight.abs().max() < 2.3 * wanted, "truncated at two deviations"
            assert not module.bias.any()
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert not module.bias.any()
    assert not model.classifier.weight.any()


@torch.no_grad()
def test_a_block_is_the_papers_equation():
    """U = X + W2 s(W1 LN(X)), then Y = U + W4 s(W3 LN(U)'): written out column by column and row by row."""
    model = MIXER.build("model", dtype=torch.float64)
    layer, tokens = model.layers[0], torch.randn(16, 32, dtype=torch.float64)

    def mlp(part: Any, vector: torch.Tensor) -> torch.Tensor:
        hidden = part.fc1.weight @ vector + part.fc1.bias
        hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        return part.fc2.weight @ hidden + part.fc2.bias

    def norm(part: Any, rows: torch.Tensor) -> torch.Tensor:
        centred = rows - rows.mean(dim=1, keepdim=True)
        return centred / (centred.var(dim=1, keepdim=True, unbiased=False) + 1e-6).sqrt() * part.weight + part.bias

    normed, mixed = norm(layer.layernorm_before, tokens), tokens.clone()
    for channel in range(32):
        mixed[:, channel] += mlp(layer.token_mlp, normed[:, channel])
    normed, wanted = norm(layer.layernorm_after, mixed), mixed.clone()
    for token in range(16):
        wanted[token] += mlp(layer.mlp, normed[token])
    torch.testing.assert_close(layer(tokens[None])[0], wanted, rtol=0, atol=1e-12)


def test_stochastic_depth_drops_whole_branches_and_keeps_their_mean():
    """The first block drops nothing, the last at the full rate, each of its two branches by itself; evaluation none."""
    model = MIXER.build("model", drop_path_rate=0.5)
    assert [layer.drop_path_rate for layer in model.layers] == [0.0, 0.5]
    layer, zeros, ones = model.layers[1].train(), torch.zeros(4000, 1, 1), torch.ones(4000, 1, 1)
    torch.manual_seed(0)
    dropped = layer.add(zeros, ones).flatten()
    assert sorted(dropped.unique().tolist()) == [0.0, 2.0]
    assert dropped.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(layer.eval().add(zeros, ones), ones)


def test_checkpointed_activations_give_the_same_gradients():
    plain, saving = (MIXER.build("classification").train() for _ in range(2))
    checkpoint_activations(saving)
    for model in (plain, saving):
        training_loss(MIXER, "classification", model, MIXER.images(model.config)).backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-7, msg=name)


def test_a_training_at_another_size_is_refused_in_one_line(tmp_path: Path):
    MIXER.build("classification").save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    assert build_classifier(source, ["a", "b"], image_size=(16, 16)).config.image_size == 16
    with pytest.raises(UserError, match="only, as its token MLP has a weight for every patch") as error:
        build_classifier(source, ["a", "b"], image_size=(32, 32))
    assert "\n" not in str(error.value)
    fresh = build_classifier(find_model("Mixer-S/16"), ["a", "b"], image_size=(32, 32))
    assert fresh.config.grid == (2, 2), "fresh weights are of any size"


def test_it_has_no_attention_to_read():
    with pytest.raises(UserError, match=r"attention cannot be analyzed: it needs attention maps.*not from hf_mixer"):
        AttentionReader(MIXER.shared("classification"))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@torch.no_grad()
def test_lora_on_every_layer():
    """Also on the patch projection, in whose place peft puts a module of its own."""
    peft = pytest.importorskip("peft")
    base = MIXER.build("classification")
    images = MIXER.images(base.config)
    names = [name for name, module in base.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)).eval()
    logits = model(images).logits
    torch.testing.assert_close(model.merge_and_unload()(images).logits, logits, rtol=0, atol=1e-5)
