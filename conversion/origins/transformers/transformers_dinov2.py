"""transformers' DINOv2 (arXiv 2304.07193), with and without registers (2309.16588)."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_vit.conversion.origins.origin import Declared, Dims, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.transformers import transformers_vit
from hf_vit.conversion.origins.transformers.configs import read_config
from hf_vit.conversion.origins.transformers.transformers_clip import dense
from hf_vit.conversion.origins.transformers.transformers_vit import PATCHES
from hf_vit.conversion.origins.wrapped import BESIDE, prefixes, renamed, unwrapped
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair, Patches, square_or_pair, table_size

_BLOCK, _TARGET = "encoder.layer.{i}", "layers.{i}"
_BASES = ("", "dinov2.", "dinov2_with_registers.")
_LAYER_SCALE = re.compile(r"(.*\.)?encoder\.layer\.\d+\.layer_scale1\.lambda1")


def _scale(number: int) -> KeyRule:
    name = f"layer_scale{number}.lambda1"
    return KeyRule(f"{_BLOCK}.{name}", "D", "keep", f"{_TARGET}.{name}")


def _projection(name: str) -> tuple[KeyRule, ...]:
    weight, bias = dense(f"{_BLOCK}.attention.{name}", ("D", "D"), f"{_TARGET}.attention.{name}")
    return weight, KeyRule(bias.key, bias.axes, "keep", bias.parameter, part="qkv_bias")


RULES = (
    *transformers_vit.RULES[:4],  # patches, class token and positions
    KeyRule("embeddings.register_tokens", "1GD", "keep", "embeddings.register_tokens", part="registers"),
    *dense(f"{_BLOCK}.norm1", ("D",), f"{_TARGET}.layernorm_before"),
    *(rule for name in ("q_proj", "k_proj", "v_proj") for rule in _projection(name)),
    *dense(f"{_BLOCK}.attention.o_proj", ("D", "D"), f"{_TARGET}.attention.o_proj"),
    _scale(1),
    *dense(f"{_BLOCK}.norm2", ("D",), f"{_TARGET}.layernorm_after"),
    *dense(f"{_BLOCK}.mlp.fc1", ("M", "D"), f"{_TARGET}.mlp.fc1", "dense"),
    *dense(f"{_BLOCK}.mlp.fc2", ("D", "M"), f"{_TARGET}.mlp.fc2", "dense"),
    *dense(f"{_BLOCK}.mlp.gate_proj", ("M", "D"), f"{_TARGET}.mlp.gate_proj", "swiglu"),
    *dense(f"{_BLOCK}.mlp.up_proj", ("M", "D"), f"{_TARGET}.mlp.up_proj", "swiglu"),
    *dense(f"{_BLOCK}.mlp.weights_in", ("2M", "D"), f"{_TARGET}.mlp.{{gate,up}}_proj", "packed_swiglu"),
    *dense(f"{_BLOCK}.mlp.down_proj", ("D", "M"), f"{_TARGET}.mlp.down_proj", "swiglu_out"),
    _scale(2),
    *dense("layernorm", ("D",), "layernorm"),
)
# Today's spelling -> that of older files, which transformers 5 still writes.
_OLD = {
    ".attention.q_proj.": ".attention.attention.query.",
    ".attention.k_proj.": ".attention.attention.key.",
    ".attention.v_proj.": ".attention.attention.value.",
    ".attention.o_proj.": ".attention.output.dense.",
    ".mlp.down_proj.": ".mlp.weights_out.",
}
IGNORED = {r"(dinov2(_with_registers)?\.)?embeddings\.mask_token": "mask token of DINOv2's training"}
FOREIGN_HEADS = {
    r"classifier\..+": "a classifier on the class token beside the mean of the patches (Dinov2ForImageClassification)"
}


def recognises(shapes: Mapping[str, Shape]) -> bool:
    return _find_base(shapes) is not None and any(map(_LAYER_SCALE.fullmatch, shapes))


def _find_base(shapes: Mapping[str, Shape]) -> str | None:
    return next((base for base in _BASES if prefixes(shapes, base + PATCHES)), None)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """Strip what is around the bare model, and spell everything as today."""
    base = _find_base(shapes) or ""
    found = unwrapped(shapes, base + PATCHES, IGNORED)
    inner = {name.removeprefix(base): key for name, key in found.normal.items()}
    bare = KeyNames(
        inner, found.ignored, lambda name: found.spell(name if name.startswith("classifier.") else f"{base}{name}")
    )
    is_old = any(old in name for name in inner for old in _OLD.values())
    return renamed(bare, _OLD) if is_old else bare


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`."""
    patches = Patches((dims["P"], dims["Q"]))
    return transformers_vit.common_fields(dims, parts, table_size(dims["T"] - 1, patches, image_size)) | {
        "patch_size": square_or_pair(patches.sides),
        "layer_norm_eps": 1e-6,
        "layer_scale_init_value": 1.0,
        "mlp_type": "dense" if "dense" in parts else "swiglu",
        "num_register_tokens": dims["G"] if "registers" in parts else 0,
        "position_interpolation": "bicubic_antialias" if "registers" in parts else "bicubic",
    }


def declared(companions: Companions, shapes: Mapping[str, Shape]) -> Declared:
    """See `configs.read_config`; the width of the MLP follows from `mlp_ratio`, and is in the weights."""
    found = read_config(companions, ("dinov2", "dinov2_with_registers"))
    return replace(found, fields={name: value for name, value in found.fields.items() if name != "intermediate_size"})


ORIGIN = Origin(
    name="transformers_dinov2",
    title="transformers' DINOv2 (dinov2, dinov2_with_registers), .safetensors or .bin",
    legend={name: meaning for name, meaning in transformers_vit.LEGEND.items() if name not in "RL"}
    | {"G": "register tokens"},
    rules=RULES,
    block_pattern=r"encoder\.layer\.(0|[1-9]\d*)\.",
    without={},
    ignored=IGNORED | BESIDE,
    recognises=recognises,
    names=names,
    configure=configure,
    declared=declared,
    assumed=transformers_vit.ASSUMED | {"layer_norm_eps": "eps 1e-6"},
    foreign_heads=FOREIGN_HEADS,
    package="transformers",
    notes=(
        "Prefixes that are taken off: `dinov2.`, `dinov2_with_registers.`, and what is wrapped around a model.",
        "Older files, and those that transformers 5 still writes, spell "
        + ", ".join(f"`{new[1:-1]}` as `{old[1:-1]}`" for new, old in _OLD.items())
        + ", and hold gate and values of a SwiGLU in `mlp.weights_in`.",
        "The model of registers stretches its positions by an antialiased filter, the other by a plain one.",
        "Where the file of the processor is missing: the shortest edge resized bicubically to 256 px, 224x224 px "
        "cropped from the centre, ImageNet's mean and deviation.",
    ),
)
