"""transformers' ViT: `ViTModel`, `ViTForImageClassification`, `ViTForMaskedImageModeling`, and the encoders of its kin.

The names of transformers 5 are those of the models here; older files, and what transformers 5 itself still saves, spell
the blocks otherwise (`OLD_NAMES`). GELU and the LayerNorms' eps come from config.json.
"""

import re
from collections.abc import Mapping
from typing import Any

from hf_vit.conversion.origins.origin import Declared, Dims, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.preprocessing import ORIGINAL_PIXELS
from hf_vit.conversion.origins.transformers.configs import read_config
from hf_vit.conversion.origins.wrapped import BESIDE, prefixes, unwrapped
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair, Patches, square_or_pair, table_size
from hf_vit.errors import UserError

PATCHES = "embeddings.patch_embeddings.projection.weight"
_BLOCK = "layers.{i}"


def _same(name: str, axes: str, part: str = "") -> KeyRule:
    return KeyRule(name, axes, "keep", name, part=part)


def _dense(name: str, axes: str, part: str = "", bias_part: str | None = None) -> tuple[KeyRule, ...]:
    """Weight and bias of a dense layer or a norm, which keep their names; `axes` of the weight, output first."""
    return (
        _same(f"{name}.weight", axes, part),
        _same(f"{name}.bias", axes[0], part if bias_part is None else bias_part),
    )


BLOCK_RULES = (
    *_dense(f"{_BLOCK}.layernorm_before", "D"),
    *(
        rule
        for name in ("q_proj", "k_proj", "v_proj")
        for rule in _dense(f"{_BLOCK}.attention.{name}", "DD", bias_part="qkv_bias")
    ),
    *_dense(f"{_BLOCK}.attention.o_proj", "DD"),
    *_dense(f"{_BLOCK}.layernorm_after", "D"),
    *_dense(f"{_BLOCK}.mlp.fc1", "MD"),
    *_dense(f"{_BLOCK}.mlp.fc2", "DM"),
)

RULES = (
    _same(PATCHES, "DCPQ"),
    _same("embeddings.patch_embeddings.projection.bias", "D"),
    _same("embeddings.cls_token", "11D"),
    _same("embeddings.position_embeddings", "1TD"),
    *BLOCK_RULES,
    *_dense("layernorm", "D"),
    *_dense("pooler.dense", "RD", part="pooler"),
    *_dense("classifier", "LD", part="head"),
)

LEGEND = {
    "P, Q": "height and width of a patch in px",
    "C": "channels",
    "D": "hidden size",
    "T": "rows of the position table: the special tokens', then the patch grid's row by row",
    "M": "width of the MLP",
    "R": "size of the pooler",
    "L": "labels",
}

_BASE = r"(?:(?:vit|deit)\.)?"  # the bare model inside another
IGNORED = {
    rf"{_BASE}embeddings\.mask_token": "mask token of masked image modelling",
    r"decoder\.(0\.(weight|bias)|mask_token|decoder_\w+(\..+)?)": "decoder of masked image modelling",
}
UNUSED_POOLER = "pooler that the classifier does not use"

# Old name -> today's, inside a block; an old block is `encoder.layer.{i}`.
OLD_NAMES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layernorm_before": "layernorm_before",
    "layernorm_after": "layernorm_after",
}
_OLD_BLOCK = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(\w+)")
_NEW_BLOCK = re.compile(r"layers\.(\d+)\.(.+)\.(\w+)")
_HEAD = re.compile(r"((?:cls_|distillation_)?classifier)\..+")

MODEL_TYPES = ("vit", "vit_mae", "vit_msn")
ASSUMED = {
    "num_attention_heads": "heads of 64",
    "hidden_act": "the exact GELU",
    "layer_norm_eps": "eps 1e-12",
    "processor": ORIGINAL_PIXELS,
}


def recognises(shapes: Mapping[str, Shape]) -> bool:
    marks = ("embeddings.distillation_token", "embeddings.patch_embeddings.backbone.", ".layer_scale1.lambda1")
    return find_base(shapes) is not None and not any(mark in key for key in shapes for mark in marks)


def find_base(shapes: Mapping[str, Shape]) -> str | None:
    """Name of the bare model inside the file's, with its dot; "" where it stands alone, None where there is none."""
    return next((base for base in ("", "vit.", "deit.") if prefixes(shapes, base + PATCHES)), None)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """Strip what is around the bare model, sort out what is no weight, and spell blocks and heads as today."""
    base = find_base(shapes) or ""
    found = unwrapped(shapes, base + PATCHES, IGNORED)
    old = any(_OLD_BLOCK.fullmatch(name.removeprefix(base)) for name in found.normal)
    with_head = any(_HEAD.fullmatch(name) for name in found.normal)
    two_heads = any(name.startswith("cls_classifier.") for name in found.normal)
    normal: dict[str, str] = {}
    for name, key in found.normal.items():
        today = todays_name(name.removeprefix(base)).removeprefix("cls_")
        if with_head and today.startswith("pooler."):
            found.ignored[key] = UNUSED_POOLER
        elif today in normal:
            raise UserError(f"'{key}' and '{normal[today]}' are one weight in two spellings; which counts is unknown")
        else:
            normal[today] = key

    def spell(name: str) -> str:
        if _HEAD.fullmatch(name):
            return found.spell(f"cls_{name}" if two_heads and name.startswith("classifier.") else name)
        return found.spell(base + (old_name(name) if old else name))

    return KeyNames(normal, found.ignored, spell)


def todays_name(name: str) -> str:
    block = _OLD_BLOCK.fullmatch(name)
    return name if block is None else f"layers.{block[1]}.{OLD_NAMES.get(block[2], block[2])}.{block[3]}"


def old_name(name: str) -> str:
    block = _NEW_BLOCK.fullmatch(name)
    olds = {today: old for old, today in OLD_NAMES.items()}
    return name if block is None else f"encoder.layer.{block[1]}.{olds.get(block[2], block[2])}.{block[3]}"


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`."""
    patches = Patches((dims["P"], dims["Q"]))
    size = table_size(dims["T"] - 1, patches, image_size)
    return common_fields(dims, parts, size) | {"patch_size": square_or_pair(patches.sides)}


def common_fields(dims: Dims, parts: frozenset[str], image_size: Pair) -> dict[str, Any]:
    """What shapes tell of the config, and what is assumed where config.json does not say otherwise."""
    heads = {"num_attention_heads": dims["D"] // 64} if dims["D"] % 64 == 0 else {}
    return heads | {
        "image_size": square_or_pair(image_size),
        "num_channels": dims["C"],
        "hidden_size": dims["D"],
        "intermediate_size": dims["M"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "qkv_bias": "qkv_bias" in parts,
        "position_embedding": "learned",
        "position_interpolation": "bicubic",
        "pooling": "token",
        "representation_size": dims["R"] if "pooler" in parts else None,
    }


def declared(companions: Companions, shapes: Mapping[str, Shape]) -> Declared:
    """See `read_vit_config`."""
    return read_vit_config(companions, shapes, MODEL_TYPES)


def read_vit_config(companions: Companions, shapes: Mapping[str, Shape], model_types: tuple[str, ...]) -> Declared:
    """See `configs.read_config`.

    Raises:
        UserError: the model is of another kind, or asks for what no model here does; a file that stands alone may be of
            hf_vit as well.
    """
    config = companions.config
    if config is None and any(_NEW_BLOCK.search(key) for key in shapes):
        raise UserError(
            "the keys are those of transformers 5 and of hf_vit alike, whose numbers differ; give the folder with the "
            "config.json that lies beside the weights"
        )
    found = read_config(companions, model_types)
    activation = (config or {}).get("pooler_act") or "tanh"
    if activation != "tanh" and any("pooler." in key for key in shapes):
        raise UserError(f"config.json says pooler_act {activation!r:.80}; the representation layer here has tanh")
    return found


ORIGIN = Origin(
    name="transformers_vit",
    title="transformers' ViT (vit, and the encoders of vit_mae and vit_msn), .safetensors or .bin",
    legend=LEGEND,
    rules=RULES,
    block_pattern=r"layers\.(0|[1-9]\d*)\.",
    without={},
    ignored=IGNORED | BESIDE,
    recognises=recognises,
    names=names,
    configure=configure,
    declared=declared,
    assumed=ASSUMED,
    notes=(
        "Prefixes that are taken off: `vit.`, and what is wrapped around a model (`model.`, `state_dict.`, ...).",
        "Older files, and those that transformers 5 still writes, name the blocks otherwise: `encoder.layer.{i}.` with "
        + ", ".join(f"`{old}` = `{new}`" for old, new in OLD_NAMES.items() if old != new)
        + ".",
        "GELU, eps, heads, dropout, image size and labels come from config.json, pixels from preprocessor_config.json.",
        "The pooler of a bare `ViTModel` (dense, tanh) is the representation layer here, and `pooler_output` the same. "
        "A classifier of transformers does not use it.",
        "Of masked image modelling the encoder is converted. `vit_mae` masks three quarters of the patches whenever it "
        "runs; its encoder here sees all of them.",
        "Positions are resampled bicubically, as transformers does with `interpolate_pos_encoding=True`.",
    ),
)
