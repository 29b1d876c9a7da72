"""Define timm's origin for its class `Eva`: EVA, EVA-02, DINOv3, Perception Encoder, RoPE-ViT and its own ViTs with
rotary positions; and for BEiT-3, whose blocks have the same norms.

The settings of rotary positions are not in the weights: they come from the architecture in config.json.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_vit.conversion.origins import timm
from hf_vit.conversion.origins.origin import Declared, Fields, KeyNames, KeyRule, Network, dense, find_heads, weights
from hf_vit.conversion.origins.wrapped import rename_keys, strip_wrappers, unwrap
from hf_vit.conversion.readers import Companions, Shapes
from hf_vit.errors import UserError

_BLOCK, _TARGET = "blocks.{i}", "layers.{i}"
_AXIAL: Fields = {"rotary_embedding": "axial", "rotary_base": 10_000.0}
_ENCODER = {**_AXIAL, "rotary_axis_order": "column_row", "layer_norm_eps": 1e-5, "pooling_num_heads": 8}
_DINO = {**_AXIAL, "rotary_base": 100.0, "rotary_coordinates": "centered", "rotary_pairing": "halves"}
_NO_TABLE = {"position_embedding": "none"}
_ROPE_VIT = {"rotary_embedding": "axial", "rotary_axis_order": "column_row"}
# Architecture -> fields of the config that its weights do not show (all matches count, later ones win).
_FIELDS: dict[str, Fields] = {
    r"eva02_.+": {**_AXIAL, "rotary_reference_grid": 16},
    r"eva02_enormous_.+": {"rotary_embedding": None, "rotary_reference_grid": None, "norm_after_branches": True},
    r"(eva_giant|beit3_giant|eva02_enormous|vit_pe_\w+_gigantic)_.+": {"num_attention_heads": 16},
    r"beit3_.+": {"layer_norm_eps": 1e-5},
    r"eva02_(tiny|small|base|large)_.+": {"mlp_type": "swiglu"},
    r"vit_\w+_rope_reg\d_gap_\d+": {**_AXIAL, "rotary_reference_grid": 16, **_NO_TABLE},
    r"vit_\w+_rope_reg1_\w+": {"num_register_tokens": 1},
    r"vit_\w+_(rope_reg4|dinov3|lingbot)(_\w+)?": {"num_register_tokens": 4},
    r"vit_pe_\w+": {**_ENCODER, "rotary_offset": 1, "rotary_reference_grid": 32, "norm_before_layers": True},
    r"vit_pe_\w+_gigantic_\w+": {"rotary_offset": 0},
    r"vit_pe_core_(tiny|small|large)_\w+": {"rotary_reference_grid": 24},
    r"vit_pe_core_base_\w+": {"rotary_reference_grid": 14},
    r"vit_pe_(lang|spatial)_\w+": {"pooling_num_heads": None},
    r"vit_\w+_rope(_ape)?_224": {**_ROPE_VIT, "rotary_base": 100.0},
    r"vit_\w+_rope_mixed(_ape)?_224": {**_ROPE_VIT, "rotary_embedding": "mixed", "rotary_base": 10.0},
    r"vit_\w+_rope(_mixed)?_224": _NO_TABLE,
    r"vit_\w+_(dinov3|lingbot)(_\w+)?": {**_DINO, "layer_norm_eps": 1e-5, **_NO_TABLE},
    r"vit_7b_.+": {"num_attention_heads": 32},
    r"vit_\w+_dinov3(_\w+)?|vit_pe_(lang|spatial)_\w+": {"pooling": "gap"},  # beside a class token
}
# Argument in config.json -> field, and timm's value -> the field's where they differ. Exports write all of them.
_SWITCH = {True: True, False: False}
ARGUMENTS: dict[str, tuple[str, dict[Any, Any] | None]] = {
    "use_abs_pos_emb": ("position_embedding", {True: "learned", False: "none"}),
    "use_pre_transformer_norm": ("norm_before_layers", _SWITCH),
    "use_post_norm": ("norm_after_branches", _SWITCH),
    "num_reg_tokens": ("num_register_tokens", None),
    "attn_pool_num_heads": ("pooling_num_heads", None),
    "rope_temperature": ("rotary_base", None),
    "rope_grid_offset": ("rotary_offset", None),
    "rope_grid_indexing": ("rotary_axis_order", {"ij": "row_column", "xy": "column_row"}),
    "rope_rotate_half": ("rotary_pairing", {True: "halves", False: "interleaved"}),
    "rope_shift_coords": ("rotary_shift", None),
    "rope_jitter_coords": ("rotary_jitter", None),
    "rope_rescale_coords": ("rotary_rescale", None),
    "ref_feat_shape": ("rotary_reference_grid", None),
}
# Kind of rotary positions in timm -> fields `rotary_embedding` and `rotary_coordinates`.
ROTATIONS = {"cat": ("axial", "index"), "mixed": ("mixed", "index"), "dinov3": ("axial", "centered")}
_SHOWN_ARGUMENTS = re.compile(  # by names and shapes
    r"swiglu_(mlp|align_to)|scale_(mlp|attn_inner)|attn_type|qkv_fused|use_(fc|post_transformer)_norm|"
    r"attn_pool_mlp_ratio|head_init_scale"
)
_NAMES = re.compile(r"eva(02)?_\w+|beit3_\w+|vit_\w+_(rope|dinov3|lingbot)(_\w+)?|vit_pe_(core|lang|spatial)_\w+")
SCALES = {".ls1.gamma": ".gamma_1", ".ls2.gamma": ".gamma_2"}  # timm's names in its ViT -> in this class


def has_architecture(name: str) -> bool:
    return _NAMES.fullmatch(name) is not None


def _names(shapes: Shapes) -> KeyNames:
    """Return the names of the keys, with the names that timm's ViT has for LayerScale, and DINOv2 for a SwiGLU."""
    return rename_keys(timm.with_swiglu(unwrap(shapes, timm.PATCHES, {}), shapes), SCALES)


def _configure(network: Network) -> Fields:
    dims, parts = network.dims, network.parts
    fields: Fields = {
        **network.sizes(),
        **find_heads(dims["D"], {}),
        **timm.read_shown_fields(network),
        "layer_norm_eps": 1e-6,
        "qkv_bias": bool({"qkv_bias", "qv_bias", "separate_bias"} & parts),
        "key_bias": not {"qv_bias", "separate_bias"} & parts,
        "norm_in_attention": "norm_in_attention" in parts,
        "norm_in_mlp": "norm_in_mlp" in parts,
        "pooling_intermediate_size": dims["X"] if "map" in parts else None,
    }
    if "table" not in parts:
        return fields | {"position_embedding": "none"}
    return (
        fields | timm.derive_position_fields(network, network.patches) | {"position_interpolation": "bicubic_antialias"}
    )


def _read_timm_config(companions: Companions, shapes: Shapes) -> Declared:
    """Return the facts about architecture, arguments and preprocessing in timm's config.json, which must be there."""
    config_file, architecture, arguments = timm.read_config_file(companions)
    if not has_architecture(architecture):
        raise UserError(
            "the weights do not record how their rotary positions are computed; give the folder with timm's config.json"
        )
    fields = timm.find_fields(_FIELDS, architecture)
    is_rotary = arguments.get("use_rot_pos_emb", fields.get("rotary_embedding") is not None)
    if is_rotary and fields.get("rotary_embedding") is None:
        fields |= _AXIAL
    fields |= _read_arguments(arguments)
    if not is_rotary:
        fields = {field: value for field, value in fields.items() if not field.startswith("rotary_")}
    elif fields["rotary_embedding"] == "mixed":  # timm's class leaves out both
        fields |= {"rotary_offset": 0, "rotary_reference_grid": None}
    known_names = {*ARGUMENTS, "rope_type", "use_rot_pos_emb", *filter(_SHOWN_ARGUMENTS.fullmatch, arguments)}
    all_arguments = {"global_pool": config_file.global_pool, **arguments}
    common_arguments = {name: value for name, value in all_arguments.items() if name not in known_names}
    # timm's class pools its registers too.
    fields |= timm.convert_arguments(common_arguments, strip_wrappers(shapes), pools_registers=True)
    return timm.declare(config_file, companions, fields)


def _read_arguments(arguments: Mapping[str, Any]) -> Fields:
    """Return the fields that arguments of timm's class alone set."""
    fields: Fields = {}
    for name in arguments.keys() & {*ARGUMENTS, "rope_type"}:
        value = arguments[name]
        field, choices = ARGUMENTS.get(name, ("", dict[Any, Any](ROTATIONS)))
        if choices is not None and not (isinstance(value, str | bool) and value in choices):
            raise UserError(
                f"config.json has timm's argument {name}={value!r:.80}, which hf_vit does not support; use it with timm"
            )
        if name == "rope_type":
            fields["rotary_embedding"], fields["rotary_coordinates"] = ROTATIONS[str(value)]
        else:
            fields[field] = value if choices is None else choices[value]
    return fields


def _adapt(rule: KeyRule) -> KeyRule:
    """Return a rule of timm's ViT for this class, where a part may be missing or have another size."""
    axes = tuple(axis.replace("M", "X") for axis in rule.axes) if rule.key.startswith("attn_pool.mlp.") else rule.axes
    parts = {"pos_embed": "table", f"{_BLOCK}.attn.qkv.weight": "qkv"}
    return replace(rule, axes=axes, part=parts.get(rule.key, rule.part))


_LACKING = ("dist_token", "pre_logits.", "head_dist.", "shared_rel_pos", f"{_BLOCK}.attn.rel_pos")
EVA = replace(
    timm.VIT,
    name="timm_eva",
    rules=(
        *(_adapt(rule) for rule in timm.RULES if not rule.key.startswith(_LACKING)),
        KeyRule("rope.freqs", "2NAF", "dense", f"{_TARGET}.attention.rotary_frequencies", "mixed", stacked=True),
        KeyRule(f"{_BLOCK}.attn.q_bias", "D", "keep", f"{_TARGET}.attention.q_proj.bias", "qv_bias"),
        KeyRule(f"{_BLOCK}.attn.v_bias", "D", "keep", f"{_TARGET}.attention.v_proj.bias", "qv_bias"),
        *weights(f"{_BLOCK}.attn.{{q,k,v}}_proj", "DD", f"{_TARGET}.attention.{{q,k,v}}_proj", "without qkv"),
        KeyRule(f"{_BLOCK}.attn.q_proj.bias", "D", "keep", f"{_TARGET}.attention.q_proj.bias", "separate_bias"),
        KeyRule(f"{_BLOCK}.attn.v_proj.bias", "D", "keep", f"{_TARGET}.attention.v_proj.bias", "separate_bias"),
        *dense(f"{_BLOCK}.attn.norm", "D", f"{_TARGET}.attention.inner_layernorm", "norm_in_attention"),
        *dense(f"{_BLOCK}.mlp.norm", "M", f"{_TARGET}.mlp.inner_layernorm", "norm_in_mlp"),
    ),
    names=_names,
    configure=_configure,
    declared=_read_timm_config,
    refused={
        r"blocks\.\d+\.attn\.([qk]_norm|gate)(\..+)?": "attention with normalized queries and keys, or with gates",
        r"blocks\.\d+\.attn\.k_proj\.bias": "separate biases of query, key and value",
    },
    lacking={},
)
