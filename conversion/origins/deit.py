"""Define the origins DeiT III (arXiv 2204.07118), RoPE-ViT (2403.13298) and ViT-5 (wangf3014/ViT-5).

Their code derives from DeiT's, and their blocks have timm's names except for LayerScale.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from hf_vit.conversion.origins import timm
from hf_vit.conversion.origins.beside import IMAGENET_PIXELS
from hf_vit.conversion.origins.origin import Declared, Fields, KeyNames, KeyRule, Network, dense, find_heads, weights
from hf_vit.conversion.origins.wrapped import make_recognizer, rename_keys, unwrap
from hf_vit.conversion.readers import Shapes

_BLOCK, _TARGET = "blocks.{i}", "layers.{i}"
_SCALES = {".ls1.gamma": ".gamma_1", ".ls2.gamma": ".gamma_2"}  # timm's names -> these codes'
_START = (
    *dense(timm.PATCHES.removesuffix(".weight"), "DCPQ", "embeddings.patch_embeddings.projection"),
    KeyRule("cls_token", "11D", "keep", "embeddings.cls_token"),
    KeyRule("pos_embed", "1TD", "keep", "embeddings.position_embeddings", "table"),
)
_END = (*dense("norm", "D", "layernorm", bias_part="layernorm"), *dense("head", "LD", "classifier", "head"))


def _names(ignored: Mapping[str, str], shapes: Shapes) -> KeyNames:
    """Return the names of the keys, with timm's names for LayerScale."""
    return rename_keys(unwrap(shapes, timm.PATCHES, ignored), _SCALES)


def _make_deit_names(shapes: Shapes) -> KeyNames:
    """Return the names of the keys; rows and columns of patches are ignored if their frequencies are in the file."""
    computed = {r"freqs_t_[xy]": "rows and columns of rotary positions, which are computed"}
    return _names(computed if any(key.endswith("freqs") for key in shapes) else {}, shapes)


def _fields(network: Network) -> Fields:
    """Return the fields that all of them share."""
    parts, size = network.parts, network.image_size
    return network.sizes(network.patches.find_table_size(network.dims["T"], size) if "table" in parts else size) | {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": "qkv_bias" in parts,
        "layer_scale_init_value": 1e-4,
        "position_embedding": "learned" if "table" in parts else "none",
        "position_on_class_token": False,
        "position_interpolation": "bicubic",
        "rotary_embedding": "axial",
    }


def _configure_deit(network: Network) -> Fields:
    """Return the fields of the config.

    A table without learned frequencies is taken for DeiT III's, which has no rotary positions.
    """
    fields = _fields(network)
    if "table" in network.parts:
        fields["rotary_embedding"] = None
    if "mixed" in network.parts:
        fields |= {"rotary_embedding": "mixed", "rotary_base": 10.0}
    return fields | find_heads(network.dims["D"]) | {"rotary_axis_order": "column_row"}


DEIT = replace(
    timm.VIT,
    name="deit",
    rules=(
        *_START,
        KeyRule("freqs", "2NV", "keep", f"{_TARGET}.attention.rotary_frequencies", "mixed", stacked=True),
        *timm.BLOCK_RULES,
        *_END,
    ),
    recognizes=make_recognizer(
        timm.PATCHES, ("",), r"(^|\.)blocks\.\d+\.gamma_1$", r"\.attn\.qkv\.bias$", lacks=r"rel_pos|\.q_norm"
    ),
    names=_make_deit_names,
    configure=_configure_deit,
    declared=lambda companions, shapes: Declared(processor=IMAGENET_PIXELS),
    assumed={
        "num_attention_heads": timm.VIT.assumed["num_attention_heads"],
        "rotary_embedding": "no rotary positions beside a table, unless their frequencies are learned",
        "processor": "ImageNet's mean and deviation, resized bicubically",
    },
    parts_that_tell={"rotary_embedding": frozenset({"mixed"})},
    refused={r"rope\.freqs": "rotary positions of timm's class Eva, whose config.json is missing"},
    lacking={},
    package="its own code",
)


def _configure_vit5(network: Network) -> Fields:
    dims = network.dims
    return _fields(network) | {
        "num_attention_heads": dims["D"] // (4 * dims["F"]),
        "num_register_tokens": dims["G"],
        "norm_type": "rmsnorm",
        "use_qk_norm": "qk_norm" in network.parts,
        "rotary_base": 10_000.0,
        "rotary_register_base": 100.0,
    }


_FIRST_ATTENTION = "blocks.0.attn"
VIT5 = replace(
    DEIT,
    name="vit5",
    rules=(
        *_START,
        KeyRule("reg_token", "1GD", "keep", "embeddings.register_tokens"),
        KeyRule(f"{_FIRST_ATTENTION}.rope.freqs", "F", "base", "rotary_base"),
        KeyRule(f"{_FIRST_ATTENTION}.rope_reg.freqs", "F", "base", "rotary_register_base"),
        *weights(f"{_BLOCK}.attn.{{q,k}}_norm", "K", f"{_TARGET}.attention.{{q,k}}_layernorm", "qk_norm"),
        *(
            replace(rule, part="layernorm") if rule.key.endswith(("norm1.bias", "norm2.bias")) else rule
            for rule in timm.BLOCK_RULES
        ),
        *_END,
    ),
    recognizes=make_recognizer(timm.PATCHES, ("",), r"\.attn\.rope\.freqs$", r"(^|\.)reg_token$"),
    names=partial(
        _names, {r"blocks\.[1-9]\d*\.attn\.rope(_reg)?\.freqs": "frequencies, the same as in the first block"}
    ),
    configure=_configure_vit5,
    assumed={"processor": DEIT.assumed["processor"]},
    parts_that_tell={},
    refused={r".*norm\d?\.bias": "norms with a bias"},
)
