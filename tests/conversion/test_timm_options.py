"""timm's options of a ViT, drawn at random: converted with its numbers, there and back, or refused by name."""

import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from originals.pytorch import of_timm, save_timm

import hf_vit.conversion as conversion
from hf_vit.errors import UserError

CHOICES: dict[str, tuple[Any, ...]] = {
    "global_pool": ("token", "avg", "map", "avgmax", "max", "prr", ""),
    "class_token": (True, False),
    "reg_tokens": (0, 2),
    "no_embed_class": (True, False),
    "pool_include_prefix": (True, False),
    "fc_norm": (None, True, False),
    "final_norm": (True, True, False),
    "pre_norm": (False, True),
    "qkv_bias": (True, False),
    "init_values": (None, 0.1),
    "act_layer": ("gelu", "quick_gelu", "gelu_tanh"),
    "img_size": (12, 14),  # 14 px hold three patches of 4 px, and two more px
    "num_classes": (5, 0),
}
# Every way to pool with every kind of token; the rest at random.
POOLED = list(itertools.product(*list(CHOICES.values())[:5]))


def drawn(seed: int, pooled: tuple[Any, ...]) -> dict[str, Any]:
    draw = random.Random(seed)
    rest = list(CHOICES.items())[5:]
    return dict(zip(CHOICES, pooled, strict=False)) | {name: draw.choice(values) for name, values in rest}


def reason_to_refuse(options: dict[str, Any]) -> str | None:
    """What a message has to name, judged by timm's code alone; None where the numbers have a place here."""
    special = options["class_token"] or options["reg_tokens"]
    if options["global_pool"] in ("avgmax", "max", "prr", ""):
        return f"global_pool='{options['global_pool']}'"
    if options["global_pool"] == "avg" and options["pool_include_prefix"] and special:
        return "pool_include_prefix=True"
    if options["global_pool"] == "map" and not options["pool_include_prefix"] and options["class_token"]:
        return "pooling leaves out cls_token"
    return None


@pytest.mark.filterwarnings("ignore:images of 14x14 px hold 3x3 patches:UserWarning")
@pytest.mark.parametrize("seed", range(len(POOLED)))
@torch.no_grad()
def test_options_are_converted_exactly_or_refused_by_name(seed: int, tmp_path: Path):
    options = drawn(seed, POOLED[seed])
    if options["global_pool"] == "token" and not options["class_token"]:
        return  # timm has no such model
    model = of_timm(embed_dim=64, num_heads=2, **options)
    source = save_timm(model, tmp_path / "saved", model_args={"embed_dim": 64, "num_heads": 2, **options})
    reason = reason_to_refuse(options)
    if reason is not None:
        with pytest.raises(UserError, match=re.escape(reason)) as refused:
            conversion.convert(source, tmp_path / "out")
        assert "\n" not in str(refused.value)
        return
    result = conversion.convert(source, tmp_path / "out")
    ours = result.plan.model_class.from_pretrained(result.output).double().eval()
    images = torch.randn(2, 3, *model.patch_embed.img_size, dtype=torch.float64)
    output, expected = ours(images), model.double()(images)
    found = output.logits if result.plan.has_head else output.pooler_output
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * expected.abs().max().item())
    assert conversion.export(result.output, tmp_path / "back", "timm").difference <= 1e-5


RELATIVE = "vit_relpos_small_patch16_224"


def of_relpos(**arguments: Any) -> Any:
    """A model of timm with relative positions, whose MLP gives biases that matter."""
    model = of_timm(RELATIVE, embed_dim=64, num_heads=2, init_values=0.1, **arguments)
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:
            parameter.data.mul_(3)
    return model


def assert_same(model: Any, ours: Any) -> None:
    """In float32: what the MLP gives is rounded when it is written."""
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    expected = model(images)
    torch.testing.assert_close(ours(images).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


RELATIVES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "rectangular": {"img_size": (12, 20)},
    "class token": {"class_token": True, "global_pool": "token", "fc_norm": False},
    "shared": {"shared_rel_pos": True, "rel_pos_dim": 48},
    "table": {"rel_pos_type": "bias"},
}


@pytest.mark.parametrize("case", RELATIVES)
@torch.no_grad()
def test_relative_positions(case: str, tmp_path: Path):
    options = {"embed_dim": 64, "num_heads": 2, "init_values": 0.1, **RELATIVES[case]}
    model = of_relpos(**RELATIVES[case])
    if case == "rectangular":
        model.pretrained_cfg["crop_mode"] = "squash"
    source = save_timm(model, tmp_path / "saved", model_args=options)
    result = conversion.convert(source, tmp_path / "out", report=tmp_path / "report.json")
    assert not result.plan.ignored
    assert result.plan.config.position_embedding == "relative_bias"
    named = (tmp_path / "report.json").read_text()
    assert all(name in named for name in model.state_dict())
    assert_same(model, result.plan.model_class.from_pretrained(result.output).eval())
    with pytest.raises(UserError, match="cannot express position_embedding='relative_bias'"):
        conversion.export(result.output, tmp_path / "back", "timm")
    if case == "table":
        with pytest.raises(UserError, match=r"relative positions keeps its size here; leave out --resize-to"):
            conversion.convert(source, tmp_path / "large", resize_to=(20, 16))
        return
    large = conversion.convert(source, tmp_path / "large", resize_to=(20, 16))
    model.set_input_size((20, 16))
    assert_same(model, large.plan.model_class.from_pretrained(large.output).eval())


def test_what_weights_do_not_tell_of_relative_positions(tmp_path: Path):
    shapes = {name: tuple(value.shape) for name, value in of_relpos().state_dict().items()}
    with pytest.raises(UserError, match=r"do not tell the image size .*; declare it with --image-size HxW"):
        conversion.plan(shapes)
    assert conversion.plan(shapes, image_size=(12, 12)).config.num_attention_heads == 2
    without_scale = {name: shape for name, shape in shapes.items() if ".ls" not in name}
    with pytest.raises(UserError, match=r"before or after attention and MLP; give the folder with the config\.json"):
        conversion.plan(without_scale, image_size=(12, 12))
    less = {name: shape for name, shape in shapes.items() if name != "blocks.1.attn.rel_pos.mlp.fc2.bias"}
    with pytest.raises(UserError, match=r"1 keys missing: blocks\.1\.attn\.rel_pos\.mlp\.fc2\.bias"):
        conversion.plan(less, image_size=(12, 12))
    beside_token = of_relpos(rel_pos_type="bias", class_token=True, global_pool="avg").state_dict()
    with pytest.raises(UserError, match="a bias between the patches and a class token has no place here"):
        conversion.plan({name: tuple(value.shape) for name, value in beside_token.items()}, image_size=(12, 12))
