"""Define the origin EVA: EVA-01 and EVA-02 in files of the original code, fine-tuned (asuka) or as EVA-CLIP's towers.

Sources: EVA, arXiv 2211.07636; EVA-02, 2303.11331; EVA-CLIP, 2303.15389.
"""

import re

from hf_vit.conversion.origins.beside import CLIP_PIXELS
from hf_vit.conversion.origins.origin import (
    ASSUMED_HEADS,
    Declared,
    Fields,
    KeyNames,
    KeyRule,
    Network,
    Origin,
    dense,
    weights,
)
from hf_vit.conversion.origins.wrapped import find_prefixes, make_recognizer, unwrap
from hf_vit.conversion.readers import Shapes
from hf_vit.errors import UserError

_PATCHES = "patch_embed.proj.weight"
_BASES = ("visual.", "")
_BLOCK, _TARGET = "blocks.{i}", "layers.{i}"
_POST_NORM_WIDTH = 1792  # EVA-02-CLIP-E's; other released models without rotation or LayerScale have pre-norms
_COMPUTED_TABLES = "tables of rotary positions, which are computed"
_IGNORED = {
    r"(visual\.)?rope\.freqs_cos": _COMPUTED_TABLES,
    r"(visual\.)?blocks\.\d+\.attn\.rope\.freqs_(cos|sin)": _COMPUTED_TABLES,
    r"mask_token": "mask token of the pre-training",
    r"lm_head\..+": "head of the pre-training",
}
_OTHER_TOWER = {r"text\..+": "the text tower", r"logit_scale": "scale of the contrastive loss"}


def _select_names(shapes: Shapes) -> KeyNames:
    is_clip = bool(find_prefixes(shapes, _BASES[0] + _PATCHES))
    names = unwrap(shapes, _PATCHES, _IGNORED | (_OTHER_TOWER if is_clip else {}), _BASES)
    is_rotary = any(re.search(r"\.mlp\.w(1|12)\.|(^|\.)rope\.freqs", key) for key in shapes)
    if is_rotary and "rope.freqs_sin" not in names.normal:
        raise UserError(
            f"the weights lack '{names.spell('rope.freqs_sin')}', the table with the scale of the rotary "
            "positions; give the original file of EVA's release, which has it"
        )
    return names


def _configure(network: Network) -> Fields:
    dims, parts = network.dims, network.parts
    is_rotary, after_pooling = "rope" in parts, "norm_after" in parts
    fields: Fields = {
        "mlp_type": "dense" if "dense" in parts else "swiglu",
        "hidden_act": "gelu",
        "qkv_bias": "qv_bias" in parts,
        "key_bias": "qv_bias" not in parts,
        "layer_scale_init_value": 0.1 if "layer_scale" in parts else None,
        "norm_in_attention": "norm_in_attention" in parts,
        "norm_in_mlp": "norm_in_mlp" in parts,
        "norm_after_branches": not is_rotary and dims["D"] == _POST_NORM_WIDTH,
        "pooling": "gap" if after_pooling else "token",
        "use_class_token": True,
        "norm_after_pooling": after_pooling,
        "position_interpolation": "bicubic",
    }
    if is_rotary:
        fields |= {"num_attention_heads": dims["D"] // dims["K"], "rotary_embedding": "axial", "rotary_base": 10_000.0}
    return network.read_vit_fields(1) | fields


EVA = Origin(
    name="eva",
    rules=(
        *dense("patch_embed.proj", "DCPQ", "embeddings.patch_embeddings.projection"),
        KeyRule("cls_token", "11D", "keep", "embeddings.cls_token"),
        KeyRule("pos_embed", "1TD", "keep", "embeddings.position_embeddings"),
        KeyRule("rope.freqs_sin", "YK", "reference_grid", "rotary_reference_grid", "rope"),
        *dense(f"{_BLOCK}.norm1", "D", f"{_TARGET}.layernorm_before"),
        KeyRule(f"{_BLOCK}.attn.q_bias", "D", "keep", f"{_TARGET}.attention.q_proj.bias", "qv_bias"),
        KeyRule(f"{_BLOCK}.attn.v_bias", "D", "keep", f"{_TARGET}.attention.v_proj.bias", "qv_bias"),
        *weights(f"{_BLOCK}.attn.qkv", ("3D", "D"), f"{_TARGET}.attention.{{q,k,v}}_proj", "qkv"),
        *weights(f"{_BLOCK}.attn.{{q,k,v}}_proj", "DD", f"{_TARGET}.attention.{{q,k,v}}_proj", "without qkv"),
        *dense(f"{_BLOCK}.attn.inner_attn_ln", "D", f"{_TARGET}.attention.inner_layernorm", "norm_in_attention"),
        *dense(f"{_BLOCK}.attn.proj", "DD", f"{_TARGET}.attention.o_proj"),
        KeyRule(f"{_BLOCK}.gamma_1", "D", "keep", f"{_TARGET}.layer_scale1.lambda1", "layer_scale"),
        *dense(f"{_BLOCK}.norm2", "D", f"{_TARGET}.layernorm_after"),
        *dense(f"{_BLOCK}.mlp.fc1", "MD", f"{_TARGET}.mlp.fc1", "dense"),
        *dense(f"{_BLOCK}.mlp.fc2", "DM", f"{_TARGET}.mlp.fc2", "dense"),
        *dense(f"{_BLOCK}.mlp.w12", ("2M", "D"), f"{_TARGET}.mlp.{{gate,up}}_proj", "packed_swiglu"),
        *dense(f"{_BLOCK}.mlp.w1", "MD", f"{_TARGET}.mlp.gate_proj", "swiglu"),
        *dense(f"{_BLOCK}.mlp.w2", "MD", f"{_TARGET}.mlp.up_proj", "swiglu"),
        *dense(f"{_BLOCK}.mlp.ffn_ln", "M", f"{_TARGET}.mlp.inner_layernorm", "norm_in_mlp"),
        *dense(f"{_BLOCK}.mlp.w3", "DM", f"{_TARGET}.mlp.down_proj", "without dense"),
        KeyRule(f"{_BLOCK}.gamma_2", "D", "keep", f"{_TARGET}.layer_scale2.lambda1", "layer_scale"),
        *dense("fc_norm", "D", "layernorm", "norm_after"),
        *dense("norm", "D", "layernorm", "without norm_after"),
        *dense("head", "LD", "classifier", "head"),
    ),
    recognizes=make_recognizer(
        _PATCHES, _BASES, r"(^|\.)blocks\.\d+\.attn\.q_bias$", lacks=r"relative_position|rel_pos_bias"
    ),
    names=_select_names,
    configure=_configure,
    declared=lambda companions, shapes: Declared(processor=CLIP_PIXELS),
    assumed={
        "num_attention_heads": ASSUMED_HEADS,
        "norm_after_branches": "norms before attention and MLP (after them at a width of 1792, as in EVA-02-CLIP-E)",
        "layer_norm_eps": "eps 1e-6",
        "processor": "CLIP's mean and deviation, resized bicubically",
    },
    parts_that_tell={
        "norm_after_branches": frozenset({"rope", "layer_scale"}),
        "num_attention_heads": frozenset({"rope"}),
    },
    package="baaivision/EVA",
)
