"""`AttentionReader` beside the models' own maps: every family of ours, and transformers' with prefix tokens."""

import pytest
import torch
from models.families import FAMILIES
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTForImageClassification,
)

from hf_vit.analysis import AttentionReader
from hf_vit.errors import UserError

TINY = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
THEIRS = {
    "vit": (ViTConfig, ViTForImageClassification, 1),
    "deit": (DeiTConfig, DeiTForImageClassification, 2),
    "dinov2": (Dinov2Config, Dinov2Model, 1),
    "registers": (Dinov2WithRegistersConfig, Dinov2WithRegistersForImageClassification, 5),
}


def read(model, pixel_values):
    """Layer -> map, and the last AttentionMaps."""
    found, last = {}, None

    def receive(layer, maps):
        nonlocal last
        found[layer], last = maps[layer], maps

    with torch.inference_mode():
        AttentionReader(model).read(pixel_values, receive)
    return found, last


CASES = [
    *((family, "default", head) for family in FAMILIES for head in ("model", "classification", "masked_prediction")),
    *(
        (family, choice, "model")
        for family in FAMILIES
        for choice in ("representation", "two_groups_of_three", "relative", "causal", "gap", "registers", "swiglu")
        if choice in FAMILIES[family].choices
    ),
]


@pytest.mark.parametrize(("family", "choice", "head"), CASES)
def test_ours_equal_attention_maps(family, choice, head):
    model = FAMILIES[family].build(head, choice)
    pixel_values = FAMILIES[family].images(model.config)
    with torch.inference_mode():
        wanted = model.base_model.attention_maps(pixel_values)
    found, last = read(model, pixel_values)
    assert list(found) == list(wanted)
    assert last.grid == wanted.grid
    assert last.patch_tokens == wanted.patch_tokens
    for layer in found:
        torch.testing.assert_close(found[layer], wanted[layer], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers' call
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_every_implementation_gives_the_same(implementation):
    plain = FAMILIES["plain"]
    model = plain.build("classification", attn_implementation=implementation)
    with torch.compiler.set_stance("force_eager"):  # compiling flex takes a minute on a CPU
        found, _ = read(model, plain.images(model.config))
    wanted, _ = read(plain.build("classification", attn_implementation="eager"), plain.images(model.config))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", THEIRS)
def test_theirs_equal_output_attentions(kind):
    """Of another size than nominal too: then ViT and DeiT have to be told."""
    config_class, model_class, prefix = THEIRS[kind]
    model = model_class(config_class(**TINY)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.7)
    pixel_values = torch.randn(2, 3, 12, 8)
    keywords = {"interpolate_pos_encoding": True} if kind in ("vit", "deit") else {}
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        wanted = model(pixel_values, output_attentions=True, **keywords).attentions
    model.set_attn_implementation("sdpa")
    found, last = read(model, pixel_values)
    assert last.grid == (3, 2)
    assert last.patch_tokens == slice(prefix, None)
    assert AttentionReader(model).layout.class_token == 0
    assert wanted[0].std() > 0.05  # maps that are all alike would prove nothing
    torch.testing.assert_close(tuple(found.values()), tuple(wanted))


def test_hooks_are_gone_afterwards_even_after_an_error():
    model = FAMILIES["plain"].build()
    pixel_values = FAMILIES["plain"].images(model.config)

    def fail(layer, maps):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        AttentionReader(model).read(pixel_values, fail)
    model(pixel_values)  # would stop again


def test_other_models_are_refused():
    model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    with pytest.raises(UserError, match=r"not from resnet; choose other analyses with --only"):
        AttentionReader(model)
