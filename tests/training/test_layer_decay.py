"""The rate of every parameter under layer-wise decay, by a second reading of its name, for every family."""

import pytest
import torch
from torch import nn

from hf_vit import (
    HfAxialViTConfig,
    HfAxialViTForImageClassification,
    HfHybridViTConfig,
    HfHybridViTForImageClassification,
    HfViTForImageClassification,
    UserError,
)
from hf_vit.training.trainer.layer_decay import layer_numbers, parameter_groups

SIZES = dict(image_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16)


def models(tiny_config):
    yield HfViTForImageClassification(tiny_config(num_hidden_layers=4, layer_scale_init_value=0.1))
    yield HfViTForImageClassification(tiny_config(num_hidden_layers=4, pooling="map", representation_size=8))
    towers = {"num_register_tokens": 2, "norm_before_layers": True, "norm_after_pooling": True, "mlp_type": "swiglu"}
    yield HfViTForImageClassification(tiny_config(num_hidden_layers=4, **towers))
    yield HfHybridViTForImageClassification(HfHybridViTConfig(**SIZES, stage_depths=(1,), stem_width=32))
    yield HfAxialViTForImageClassification(HfAxialViTConfig(**SIZES, patch_size=8))


def test_rates_of_every_family(tiny_config):
    for model in models(tiny_config):
        decaying = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
        groups = parameter_groups(model, decaying, learning_rate=2.0, weight_decay=0.3, layer_decay=0.5)
        found = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
        for name, parameter in model.named_parameters():
            words = name.split(".")
            if "layers" in words:
                above = 4 - int(words[words.index("layers") + 1])
            else:
                above = 5 if words[1] == "embeddings" else 0
            assert found[id(parameter)] == (2.0 / 2**above, 0.3 if name in decaying else 0.0), name
        assert groups[0]["lr"] == 2.0  # what the Trainer logs


def test_shared_blocks_have_the_number_of_the_highest_layer(tiny_config):
    model = HfViTForImageClassification(tiny_config(num_hidden_layers=6, num_hidden_groups=2))
    numbers = layer_numbers(model)
    by_block = {name.split(".")[2]: number for name, number in numbers.items() if ".layers." in name}
    blocks = list(model.vit.layers)
    order = [blocks.index(layer) for layer in model.vit.layer_sequence()]
    assert by_block == {str(group): 1 + max(i for i, own in enumerate(order) if own == group) for group in (0, 1)}
    assert numbers["classifier.weight"] == 7


def test_frozen_parameters_are_left_out(tiny_config):
    model = HfViTForImageClassification(tiny_config())
    model.vit.requires_grad_(False)
    groups = parameter_groups(model, [], learning_rate=1.0, weight_decay=0.0, layer_decay=0.5)
    assert [len(group["params"]) for group in groups] == [2]


def test_a_model_without_layers_is_refused():
    model = nn.Linear(2, 2)
    model.config = type("Config", (), {"num_hidden_layers": 2})()
    with pytest.raises(UserError, match="leave --layer-decay out"):
        layer_numbers(model)


def test_the_trainer_moves_lower_layers_less(tiny_config, make_trainer):
    torch.manual_seed(0)
    model = HfViTForImageClassification(tiny_config(num_hidden_layers=4))
    nn.init.normal_(model.classifier.weight)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = make_trainer(model, extras=dict(layer_decay=0.5), max_grad_norm=0.0, weight_decay=0.0, logging_steps=1)
    trainer.train()
    moved = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    numbers = layer_numbers(model)

    torch.manual_seed(0)
    plain = HfViTForImageClassification(tiny_config(num_hidden_layers=4))
    plain.load_state_dict(before)
    make_trainer(plain, max_grad_norm=0.0, weight_decay=0.0).train()
    for name, parameter in plain.named_parameters():
        expected = (parameter.detach() - before[name]) * 0.5 ** (5 - numbers[name])
        torch.testing.assert_close(moved[name], expected, rtol=1e-3, atol=1e-7)
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(0.1)
