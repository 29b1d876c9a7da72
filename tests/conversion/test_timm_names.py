"""Every architecture of timm's ViTs: its name is taken for what timm builds, or refused for a reason."""

import re
from functools import cache
from typing import Any

import pytest
import timm
import torch
from timm.layers import GELUTanh, GluMlp, QuickGELU
from timm.models import model_entrypoint
from timm.models.vision_transformer import Attention, Block, LayerNorm, Mlp
from timm.models.vision_transformer_relpos import RelPosBlock
from torch import nn

import hf_vit.conversion as conversion
from hf_vit.conversion.origins.pytorch.timm_architectures import EXCEPTIONS
from hf_vit.conversion.readers.checkpoint import Companions
from hf_vit.errors import UserError

MODULES = ("vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos", "deit")
ACTIVATIONS = {nn.GELU: "gelu", GELUTanh: "gelu_pytorch_tanh", QuickGELU: "quick_gelu", nn.SiLU: "silu"}


def architectures() -> list[str]:
    """Every name but for its image size, and every size of those that the table of exceptions knows."""
    names = [name for name in timm.list_models() if re.match(r"vit_|deit|flexivit|test_vit|beit3|eva_large|aim", name)]
    names = [name for name in names if model_entrypoint(name).__module__.rpartition(".")[2] in MODULES]
    known = [name for name in names if any(re.fullmatch(exception, name) for exception in EXCEPTIONS)]
    others = {re.sub(r"_\d+$", "", name): name for name in names if name not in known}
    return sorted([*known, *others.values()])


@cache
def built(name: str) -> Any:
    with torch.device("meta"):
        return timm.create_model(name, depth=1, num_classes=3)


def is_expressible(model: Any) -> bool:
    """Whether the models here have all that this one has, judged by timm's modules, not by names of keys."""
    block = model.blocks[0]
    if type(block) is RelPosBlock:
        return True
    if type(block) is not Block or type(block.attn) is not Attention:
        return False
    inside = (block.attn.q_norm, block.attn.norm, block.mlp.norm)
    plain = all(isinstance(norm, nn.Identity) for norm in inside) and type(block.norm1) is LayerNorm
    is_swiglu = type(block.mlp) is GluMlp and isinstance(block.mlp.act, nn.SiLU) and not block.mlp.gate_last
    stem = getattr(model.patch_embed, "backbone", None)
    stems = stem is None or any("StdConv2d" in type(part).__name__ for part in stem.modules())
    norms = all(type(norm) in (LayerNorm, nn.Identity) for norm in (model.norm, model.fc_norm))
    pooled = model.global_pool == "map" or (model.global_pool in ("token", "avg") and not model.pool_include_prefix)
    return plain and (type(block.mlp) is Mlp or is_swiglu) and stems and norms and pooled


def plan_of(name: str) -> conversion.Plan:
    model = built(name)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    size = model.patch_embed.img_size
    pretrained = {"input_size": (3, *size), "interpolation": "bicubic"}
    config = {"architecture": name, "global_pool": model.global_pool, "pretrained_cfg": pretrained}
    return conversion.plan(shapes, companions=Companions(config))


@pytest.mark.parametrize("name", architectures())
def test_architecture_is_understood_or_refused(name: str):
    model = built(name)
    if not is_expressible(model) or not re.match(r"vit_|deit|flexivit|test_vit", name):
        reasons = ("no model here has", r"is none of vit_\*", "no counterpart", "looks like part of a ViT of timm")
        with pytest.raises(UserError, match="|".join(reasons)):
            plan_of(name)
        return
    plan, block = plan_of(name), model.blocks[0]
    config, is_relative = plan.config, type(block) is RelPosBlock
    assert config.num_attention_heads == block.attn.num_heads
    assert config.mlp_type == ("swiglu" if type(block.mlp) is GluMlp else "dense")
    assert config.hidden_act == ACTIVATIONS[type(block.mlp.act)]
    norms = [not isinstance(norm, nn.Identity) for norm in (model.norm, model.fc_norm)]
    assert norms == {False: [True, False], True: [False, True], None: [False, False]}[config.norm_after_pooling]
    assert config.layer_norm_eps == block.norm1.eps
    assert is_relative or config.norm_before_layers == (type(model.norm_pre) is LayerNorm)
    assert config.num_register_tokens == getattr(model, "num_reg_tokens", 0)
    of_registers = config.num_register_tokens and getattr(model, "pool_include_prefix", False)
    of_map = "map_with_registers" if of_registers else "map"
    assert config.pooling == {"token": "token", "avg": "gap", "map": of_map}[model.global_pool]
    assert config.has_class_token == (model.cls_token is not None)
    assert config.use_distillation_token == hasattr(model, "dist_token")
    if is_relative:
        assert config.position_embedding == "relative_bias"
        tables = sum(row.transform == "offset_mlp" for row in plan.rows)
        assert tables == config.num_hidden_layers
        return
    on_special = not model.no_embed_class or model.cls_token is None
    of_registers = config.num_register_tokens and not model.no_embed_class
    assert config.position_on_class_token == ("with_registers" if of_registers else on_special)
    assert config.qkv_bias == (block.attn.qkv.bias is not None)
    assert (config.layer_scale_init_value is not None) == (not isinstance(block.ls1, nn.Identity))
    assert config.grid == tuple(model.patch_embed.grid_size)
    assert sum(torch.Size(row.parameter_shape).numel() for row in plan.rows) == sum(
        p.numel() for p in model.parameters()
    )
    assert not plan.ignored
