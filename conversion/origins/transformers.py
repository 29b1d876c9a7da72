"""Define the origins of transformers: ViT, MAE, MSN, I-JEPA, DeiT, DINOv2, DINOv3, AIMv2, BiT and the former ViTHybrid.

config.json has facts that weights do not show. Current names of transformers are those of the models here; older files,
and some that transformers 5 still saves, spell the blocks differently.
"""

import re
from dataclasses import replace
from functools import partial
from typing import Literal

from pydantic import BaseModel

from hf_vit.conversion.origins import aim
from hf_vit.conversion.origins.beside import ORIGINAL_PIXELS, Count, Number, Positive, read_config, validate_values
from hf_vit.conversion.origins.google import STEM, configure_bit, configure_stem
from hf_vit.conversion.origins.origin import (
    ASSUMED_HEADS,
    Declared,
    Fields,
    KeyNames,
    KeyRule,
    Network,
    Origin,
    Patches,
    dense,
    weights,
)
from hf_vit.conversion.origins.timm import BIT_CONSTANTS, STEM_CONSTANTS, make_resnet_layer_rules
from hf_vit.conversion.origins.wrapped import ignore_keys, make_recognizer, rename_keys, unwrap
from hf_vit.conversion.readers import Companions, Shapes
from hf_vit.errors import UserError

PATCHES = "embeddings.patch_embeddings.projection.weight"
_BASES = ("", "vit.", "deit.", "ijepa.")
_BLOCK = "layers.{i}"
_DISTILLATION_TOKEN = "embeddings.distillation_token"
_LAYER_SCALE = ".layer_scale1.lambda1"
_BACKBONE = "embeddings.patch_embeddings.backbone."

_EMBEDDING_RULES = (
    *dense("embeddings.patch_embeddings.projection", "DCPQ"),
    KeyRule("embeddings.cls_token", "11D", "keep", "embeddings.cls_token"),
    KeyRule("embeddings.position_embeddings", "1TD", "keep", "embeddings.position_embeddings"),
)
BLOCK_RULES = (
    *dense(f"{_BLOCK}.layernorm_before", "D"),
    *dense(f"{_BLOCK}.attention.{{q,k,v}}_proj", "DD", bias_part="qkv_bias"),
    *dense(f"{_BLOCK}.attention.o_proj", "DD"),
    *dense(f"{_BLOCK}.layernorm_after", "D"),
    *dense(f"{_BLOCK}.mlp.fc1", "MD"),
    *dense(f"{_BLOCK}.mlp.fc2", "DM"),
)
_IGNORED = {
    r"(?:(?:vit|deit)\.)?embeddings\.mask_token": "mask token of masked image modelling",
    r"decoder\.(0\.(weight|bias)|mask_token|decoder_\w+(\..+)?)": "decoder of masked image modelling",
}
# Current name inside a block -> its name in older files; an old block is `encoder.layer.{i}`.
OLD_NAMES = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def _select_names(shapes: Shapes) -> KeyNames:
    """Remove prefixes, sort out keys that are not weights, and use current names for blocks and heads."""
    heads = ("cls_classifier.", "distillation_classifier.", "classifier.")
    names = unwrap(shapes, PATCHES, _IGNORED, _BASES, heads)
    if any(name.startswith(heads) for name in names.normal):
        ignore_keys(names, "pooler.", "pooler, which the classifier does not use")
    if any(re.match(r"encoder\.layer\.\d+\.", name) for name in names.normal):
        names = rename_keys(names, {"layers.": "encoder.layer."})
        names = rename_keys(names, {f".{new}.": f".{old}." for new, old in OLD_NAMES.items()})
    if any(name.startswith("cls_classifier.") for name in names.normal):  # DeiT's, beside a distillation head
        names = rename_keys(names, {"classifier.": "cls_classifier."})
    return names


def _derive_common_fields(special: int, network: Network, patches: Patches | None = None) -> Fields:
    """Return the config's fields that shapes show, and defaults for those that only config.json has."""
    return network.read_vit_fields(special, patches) | {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "qkv_bias": "qkv_bias" in network.parts,
        "position_interpolation": "bicubic",
        "pooling": "token",
        "representation_size": network.dims["R"] if "pooler" in network.parts else None,
    }


def _read_vit_config(model_types: tuple[str, ...], companions: Companions, shapes: Shapes) -> Declared:
    """Return the facts in config.json.

    Raises:
        UserError: a file with current names has no config.json, or the representation layer has another activation.
    """
    config = companions.config
    if config is None and any(re.search(r"layers\.(\d+)\.(.+)\.(\w+)", key) for key in shapes):
        raise UserError(
            "a ViT of transformers 5 and one of hf_vit have the same keys, but compute different results; "
            "give the folder with the config.json of the weights"
        )
    declared = read_config(companions, model_types)
    activation = (config or {}).get("pooler_act") or "tanh"
    if activation != "tanh" and any("pooler." in key for key in shapes):
        raise UserError(
            f"config.json has pooler_act={activation!r:.80}, but hf_vit's pooler only has 'tanh'; add "
            "--drop-pre-logits to convert without the pooler, or use the model with transformers"
        )
    return declared


VIT = Origin(
    name="transformers_vit",
    rules=(
        *_EMBEDDING_RULES,
        *BLOCK_RULES,
        *dense("layernorm", "D"),
        *dense("pooler.dense", "RD", part="pooler"),
        *dense("classifier", "LD", part="head"),
    ),
    recognizes=make_recognizer(
        PATCHES, _BASES, lacks="|".join(map(re.escape, (_DISTILLATION_TOKEN, _BACKBONE, _LAYER_SCALE)))
    ),
    names=_select_names,
    configure=partial(_derive_common_fields, 1),
    declared=partial(_read_vit_config, ("vit", "vit_mae", "vit_msn")),
    assumed={
        "num_attention_heads": ASSUMED_HEADS,
        "hidden_act": "the exact GELU",
        "layer_norm_eps": "eps 1e-12",
        "processor": ORIGINAL_PIXELS,
    },
)

# DeiT (arXiv 2012.12877): a distillation token, and usually a head for it.


def _configure_deit(network: Network) -> Fields:
    return _derive_common_fields(2, network) | {
        "use_distillation_token": True,
        "use_distillation_head": False if "head" in network.parts and "second_head" not in network.parts else None,
    }


DEIT = replace(
    VIT,
    name="transformers_deit",
    rules=(
        *VIT.rules,
        KeyRule(_DISTILLATION_TOKEN, "11D", "keep", _DISTILLATION_TOKEN),
        *dense("distillation_classifier", "LD", part="second_head"),
    ),
    recognizes=make_recognizer(PATCHES, _BASES, rf"{_DISTILLATION_TOKEN}$"),
    configure=_configure_deit,
    declared=partial(_read_vit_config, ("deit",)),
)

# ViTHybrid (`vit-hybrid`, until version 4.40): a BiT backbone before the blocks, together timm's hybrid. Backbones with
# other settings (pre-activation, other padding, a stage before the last) are refused.

_BIT = f"{_BACKBONE}bit"
_BIT_UNIT = "encoder.stages.{s-1}.layers.{u-1}"


class Backbone(BaseModel):
    """The settings that the backbone must have; a field without a default has another one in transformers' class."""

    model_type: Literal["bit"] = "bit"
    layer_type: Literal["bottleneck"]
    global_padding: Literal["same", "SAME"]
    embedding_dynamic_padding: Literal[True]
    hidden_act: Literal["relu"] = "relu"
    num_groups: Literal[32] = 32
    output_stride: Literal[32] = 32
    width_factor: Literal[1] = 1
    depths: list[Count] = [3, 4, 6, 3]
    out_features: list[str] | None = None


class HybridConfig(BaseModel):
    """The fields of config.json that are read in addition to `TransformersConfig`."""

    backbone_config: Backbone | None = None


def _read_hybrid_config(companions: Companions, shapes: Shapes) -> Declared:
    declared = _read_vit_config(("vit-hybrid",), companions, shapes)
    if companions.config is None:
        return declared
    backbone = validate_values(HybridConfig, companions.config, "config.json").backbone_config
    last = [] if backbone is None else [f"stage{len(backbone.depths)}"]
    if backbone is not None and backbone.out_features not in (None, last):
        raise UserError(
            f"config.json has backbone_config.out_features={backbone.out_features}, but hf_vit only supports "
            f"{last}; use the model with transformers"
        )
    fields = dict(declared.fields)
    return replace(declared, fields=fields | {"stem_patch_size": fields.pop("patch_size", 1)})


VIT_HYBRID = replace(
    VIT,
    name="transformers_vit_hybrid",
    rules=(
        *make_resnet_layer_rules(f"{_BIT}.embedder.convolution", f"{_BIT}.{_BIT_UNIT}", STEM, f"{_BIT}.embedder.norm"),
        *(replace(rule, axes="DFPP") if rule.key == PATCHES else rule for rule in VIT.rules),
    ),
    recognizes=make_recognizer(PATCHES, _BASES, re.escape(_BACKBONE)),
    configure=partial(configure_stem, STEM_CONSTANTS, partial(_derive_common_fields, 1)),
    family="hybrid",
    declared=_read_hybrid_config,
)

# BiT (arXiv 1912.11370) with pre-activation units: timm's network.


class BitConfig(BaseModel):
    """The settings that a BiT must have, which are the defaults of transformers' class."""

    layer_type: Literal["preactivation"] = "preactivation"
    global_padding: None = None
    embedding_dynamic_padding: Literal[False] = False
    hidden_act: Literal["relu"] = "relu"
    num_groups: Literal[32] = 32
    output_stride: Literal[32] = 32


def _read_bit_config(companions: Companions, shapes: Shapes) -> Declared:
    """Return the facts in a BiT's config.json, after checking it; its image size is that of the preprocessing."""
    if companions.config is None:
        return Declared()
    declared = read_config(companions, ("bit",))
    validate_values(BitConfig, companions.config, "config.json")
    # A BiT's config has sizes under other names, which shapes show, and none of the other fields that are read.
    fields = {name: value for name, value in declared.fields.items() if name in ("initializer_range", "problem_type")}
    crop = (declared.processor or {}).get("crop_size")
    return replace(declared, fields=fields, image_size=(crop["height"], crop["width"]) if crop else None)


BIT = Origin(
    name="transformers_bit",
    rules=(
        *make_resnet_layer_rules("embedder.convolution", _BIT_UNIT, "encoder", "norm", pre_activation=True),
        *dense("classifier.1", "LF", "classifier", "head"),
    ),
    recognizes=make_recognizer(
        "embedder.convolution.weight", ("", "bit."), r"(^|\.)encoder\.stages\.\d+\.layers\.\d+\.norm3\."
    ),
    names=lambda shapes: unwrap(shapes, "embedder.convolution.weight", {}, ("", "bit."), ("classifier.",)),
    configure=partial(configure_bit, BIT_CONSTANTS),
    family="bit",
    declared=_read_bit_config,
    assumed={"processor": ORIGINAL_PIXELS},
    refused={r"embedder\.norm\..+": "units with norms after their convolutions (layer_type='bottleneck')"},
    package="transformers",
)

# DINOv2 (arXiv 2304.07193), with and without registers (2309.16588).

_DINO_BASES = ("", "dinov2.", "dinov2_with_registers.")
_DINO_BLOCK = "encoder.layer.{i}"
_DINO_IGNORED = {r"(dinov2(_with_registers)?\.)?embeddings\.mask_token": "mask token of DINOv2's training"}
# Current part of a name -> its spelling in older files, which transformers 5 still writes.
_DINO_OLD_NAMES = {
    **{f".{new}.": f".{old}." for new, old in OLD_NAMES.items() if new.startswith("attention.")},
    ".mlp.down_proj.": ".mlp.weights_out.",
}


def _select_dino_names(shapes: Shapes) -> KeyNames:
    """Remove prefixes, and use current names."""
    names = unwrap(shapes, PATCHES, _DINO_IGNORED, _DINO_BASES, ("classifier.",))
    is_old = any(old in name for name in names.normal for old in _DINO_OLD_NAMES.values())
    return rename_keys(names, _DINO_OLD_NAMES) if is_old else names


def _configure_dino(network: Network) -> Fields:
    return _derive_common_fields(1, network) | {
        "layer_norm_eps": 1e-6,
        "layer_scale_init_value": 1.0,
        "mlp_type": "dense" if "dense" in network.parts else "swiglu",
        "num_register_tokens": network.dims["G"] if "registers" in network.parts else 0,
        "position_interpolation": "bicubic_antialias" if "registers" in network.parts else "bicubic",
        "pooling": "token_and_gap" if "head" in network.parts else "token",
    }


DINOV2 = Origin(
    name="transformers_dinov2",
    rules=(
        *_EMBEDDING_RULES,
        KeyRule("embeddings.register_tokens", "1GD", "keep", "embeddings.register_tokens", part="registers"),
        *dense(f"{_DINO_BLOCK}.norm1", "D", f"{_BLOCK}.layernorm_before"),
        *(replace(rule, key=rule.key.replace(_BLOCK, _DINO_BLOCK)) for rule in BLOCK_RULES[2:10]),  # its attention
        KeyRule(f"{_DINO_BLOCK}{_LAYER_SCALE}", "D", "keep", f"{_BLOCK}{_LAYER_SCALE}"),
        *dense(f"{_DINO_BLOCK}.norm2", "D", f"{_BLOCK}.layernorm_after"),
        *dense(f"{_DINO_BLOCK}.mlp.fc1", "MD", f"{_BLOCK}.mlp.fc1", "dense"),
        *dense(f"{_DINO_BLOCK}.mlp.fc2", "DM", f"{_BLOCK}.mlp.fc2", "dense"),
        *dense(f"{_DINO_BLOCK}.mlp.{{gate,up}}_proj", "MD", f"{_BLOCK}.mlp.{{gate,up}}_proj", "swiglu"),
        *dense(f"{_DINO_BLOCK}.mlp.weights_in", ("2M", "D"), f"{_BLOCK}.mlp.{{gate,up}}_proj", "packed_swiglu"),
        *dense(f"{_DINO_BLOCK}.mlp.down_proj", "DM", f"{_BLOCK}.mlp.down_proj", "swiglu_out"),
        KeyRule(f"{_DINO_BLOCK}.layer_scale2.lambda1", "D", "keep", f"{_BLOCK}.layer_scale2.lambda1"),
        *dense("layernorm", "D"),
        *dense("classifier", ("L", "2D"), part="head"),
    ),
    recognizes=make_recognizer(PATCHES, _DINO_BASES, r"(^|\.)encoder\.layer\.\d+\.layer_scale1\.lambda1$"),
    names=_select_dino_names,
    configure=_configure_dino,
    # Its MLP's width follows from `mlp_ratio`.
    declared=lambda companions, _: read_config(companions, ("dinov2", "dinov2_with_registers"), {"intermediate_size"}),
    assumed={**VIT.assumed, "layer_norm_eps": "eps 1e-6"},
    package="transformers",
)

# I-JEPA (arXiv 2301.08243): a ViT without class token.

IJEPA = replace(
    VIT,
    name="transformers_ijepa",
    rules=tuple(rule for rule in VIT.rules if not rule.key.startswith(("embeddings.cls_token", "pooler."))),
    recognizes=make_recognizer(
        PATCHES, _BASES, r"(^|\.)embeddings\.position_embeddings$", lacks="cls_token$|layer_scale1"
    ),
    configure=lambda network: _derive_common_fields(0, network) | {"pooling": "gap"},
    declared=partial(_read_vit_config, ("ijepa",)),
)

# DINOv3 (arXiv 2508.10104).

_DINOV3_PATCHES, _DINOV3_BLOCK = "embeddings.patch_embeddings.weight", "model.layer.{i}"


class Dinov3Config(BaseModel):
    """The fields of DINOv3's config.json that `TransformersConfig` lacks, with the defaults of transformers' class."""

    rope_theta: Positive = 100.0
    pos_embed_shift: Number | None = None
    pos_embed_jitter: Number | None = None
    pos_embed_rescale: Number | None = 2.0
    use_gated_mlp: bool = False


def _select_dinov3_names(shapes: Shapes) -> KeyNames:
    """Remove prefixes, and use current names; the first layer of an ungated MLP gets the name that a ViT's has."""
    names = unwrap(shapes, _DINOV3_PATCHES, {r"embeddings\.mask_token": "mask token of DINOv3's training"})
    if not any(name.startswith("model.layer.") for name in names.normal):
        names = rename_keys(names, {"model.layer.": "layer."})
    if 0 in shapes.get(names.normal.get("embeddings.register_tokens", ""), ()):
        ignore_keys(names, "embeddings.register_tokens", "empty array of register tokens")
    if not any(".mlp.gate_proj." in name for name in names.normal):
        names = rename_keys(names, {".mlp.fc1.": ".mlp.up_proj.", ".mlp.fc2.": ".mlp.down_proj."})
    return names


def _configure_dinov3(network: Network) -> Fields:
    dims, parts = network.dims, network.parts
    if ("query_bias" in parts) != ("value_bias" in parts) or ("key_bias" in parts and "query_bias" not in parts):
        biases = ", ".join(name for name in ("query", "key", "value") if f"{name}_bias" in parts)
        raise UserError(
            f"the attention has biases for {biases} only, but hf_vit supports them for query and value, or "
            "for all three; use the model with transformers"
        )
    return network.sizes() | {
        "mlp_type": "dense" if "dense" in parts else "swiglu",
        "qkv_bias": "query_bias" in parts,
        "key_bias": "key_bias" in parts,
        "projection_bias": "projection_bias" in parts,
        "mlp_bias": bool({"dense_bias", "swiglu_bias"} & parts),
        "layer_scale_init_value": 1.0,
        "num_register_tokens": dims["G"] if "registers" in parts else 0,
        "position_embedding": "none",
        "rotary_embedding": "axial",
        "rotary_coordinates": "centered",
        "rotary_pairing": "halves",
    }


def _read_dinov3_config(companions: Companions, shapes: Shapes) -> Declared:
    if companions.config is None:
        raise UserError(
            "config.json with DINOv3's number of heads and rotary periods is missing; give the folder with "
            "the config.json of these weights"
        )
    declared = read_config(companions, ("dinov3_vit",))
    values = validate_values(Dinov3Config, companions.config, "config.json")
    fields = dict(declared.fields) | {
        "rotary_base": values.rope_theta,
        "rotary_shift": values.pos_embed_shift,
        "rotary_jitter": values.pos_embed_jitter,
        "rotary_rescale": values.pos_embed_rescale,
    }
    if values.use_gated_mlp and fields["hidden_act"] != "silu":
        raise UserError(
            f"config.json has hidden_act={fields['hidden_act']!r:.80} in a gated MLP, but hf_vit only supports silu "
            "there; use the model with transformers"
        )
    return replace(declared, fields=fields)


def _make_dinov3_rules(name: str, axes: str, part: str, bias_part: str) -> tuple[KeyRule, ...]:
    """Return the rules for layers of attention or MLP, which have the names of this package."""
    return dense(f"{_DINOV3_BLOCK}.{name}", axes, f"{_BLOCK}.{name}", part, bias_part)


DINOV3 = Origin(
    name="transformers_dinov3",
    rules=(
        KeyRule(_DINOV3_PATCHES, "DCPQ", "keep", PATCHES),
        KeyRule("embeddings.patch_embeddings.bias", "D", "keep", "embeddings.patch_embeddings.projection.bias"),
        KeyRule("embeddings.cls_token", "11D", "keep", "embeddings.cls_token"),
        KeyRule("embeddings.register_tokens", "1GD", "keep", "embeddings.register_tokens", part="registers"),
        *dense(f"{_DINOV3_BLOCK}.norm1", "D", f"{_BLOCK}.layernorm_before"),
        *_make_dinov3_rules("attention.q_proj", "DD", "", "query_bias"),
        *_make_dinov3_rules("attention.k_proj", "DD", "", "key_bias"),
        *_make_dinov3_rules("attention.v_proj", "DD", "", "value_bias"),
        *_make_dinov3_rules("attention.o_proj", "DD", "", "projection_bias"),
        KeyRule(f"{_DINOV3_BLOCK}{_LAYER_SCALE}", "D", "keep", f"{_BLOCK}{_LAYER_SCALE}"),
        *dense(f"{_DINOV3_BLOCK}.norm2", "D", f"{_BLOCK}.layernorm_after"),
        *_make_dinov3_rules("mlp.fc1", "MD", "dense", "dense_bias"),
        *_make_dinov3_rules("mlp.fc2", "DM", "dense", "dense_bias"),
        *_make_dinov3_rules("mlp.{gate,up}_proj", "MD", "swiglu", "swiglu_bias"),
        *_make_dinov3_rules("mlp.down_proj", "DM", "swiglu", "swiglu_bias"),
        KeyRule(f"{_DINOV3_BLOCK}.layer_scale2.lambda1", "D", "keep", f"{_BLOCK}.layer_scale2.lambda1"),
        *dense("norm", "D", "layernorm"),
    ),
    recognizes=make_recognizer(_DINOV3_PATCHES, ("",), r"(^|\.)layer\.\d+\.layer_scale1\.lambda1$"),
    names=_select_dinov3_names,
    configure=_configure_dinov3,
    declared=_read_dinov3_config,
    package="transformers",
)

# AIMv2 (arXiv 2411.14402): Apple's network with separate query, key and value.

_TOWER_BASES = ("", "vision_model.")
_AIMV2_PATCHES, _AIMV2_BLOCK = "embeddings.patch_embed.weight", "encoder.layers.{i}"
_AIMV2_IGNORED = {
    r"text_model\..+|(text|visual)_projection\..+": "the text tower, and projections to its space",
    r"logit_scale": "scale of the contrastive loss",
}


class Aimv2Config(BaseModel):
    """The fields of AIMv2's config.json that `TransformersConfig` lacks, with the defaults of transformers' class."""

    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: Positive = 1e-5
    is_native: bool = False


def _read_aimv2_config(companions: Companions, shapes: Shapes) -> Declared:
    declared = read_config(companions, ("aimv2_vision_model", "aimv2"), {"hidden_act", "qkv_bias"})
    config = companions.config or {}
    tower = config.get("vision_config") if config.get("model_type") == "aimv2" else config
    values = validate_values(Aimv2Config, tower if isinstance(tower, dict) else {}, "config.json")
    if companions.config is None:
        return declared
    positions = "sincos_2d_mae" if values.is_native else "learned"
    fields = {**declared.fields, "layer_norm_eps": values.rms_norm_eps, "position_embedding": positions}
    return replace(declared, fields=fields)


AIMV2 = replace(
    aim.AIMV2,
    name="transformers_aimv2",
    rules=(
        KeyRule(_AIMV2_PATCHES, "DCPQ", "keep", PATCHES),
        KeyRule("embeddings.patch_embed.bias", "D", "keep", "embeddings.patch_embeddings.projection.bias"),
        *weights("embeddings.rms_norm", "D", "embeddings.patch_layernorm"),
        KeyRule("embeddings.position_embedding.weight", "TD", "as_table", "embeddings.position_embeddings", "table"),
        *weights(f"{_AIMV2_BLOCK}.rms_norm1", "D", f"{_BLOCK}.layernorm_before"),
        *weights(f"{_AIMV2_BLOCK}.attention.{{q,k,v}}_proj", "DD", f"{_BLOCK}.attention.{{q,k,v}}_proj"),
        *weights(f"{_AIMV2_BLOCK}.attention.out_proj", "DD", f"{_BLOCK}.attention.o_proj"),
        *weights(f"{_AIMV2_BLOCK}.rms_norm2", "D", f"{_BLOCK}.layernorm_after"),
        *weights(f"{_AIMV2_BLOCK}.ffn.{{gate,up}}_proj", "MD", f"{_BLOCK}.mlp.{{gate,up}}_proj"),
        *weights(f"{_AIMV2_BLOCK}.ffn.down_proj", "DM", f"{_BLOCK}.mlp.down_proj"),
        *weights("rms_norm", "D", "layernorm"),
    ),
    recognizes=make_recognizer(_AIMV2_PATCHES, _TOWER_BASES, r"(^|\.)encoder\.layers\.\d+\.ffn\.gate_proj\.weight$"),
    names=lambda shapes: unwrap(shapes, _AIMV2_PATCHES, _AIMV2_IGNORED, _TOWER_BASES),
    declared=_read_aimv2_config,
    foreign_heads={r"head\..+": "attention pooling without an MLP (use_head)"},
    package="transformers",
)
