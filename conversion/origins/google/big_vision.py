"""Google's big_vision: plain ViT with token, GAP or MAP pooling, also as the image tower of a contrastive model.

The blocks are those of `vit_jax.py`; what differs is around them. Positions are added before the class token is
attached, and a file without a position table has sincos2d positions. Layers that ran in a scan are stacked in one
array. The forms of older files are those that the original's own loader mends (big_vision/models/vit.py). FlexiViT
(arXiv 2212.08013) files have the same layout.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_vit.conversion.origins.google import vit_jax
from hf_vit.conversion.origins.origin import BLOCK, Dims, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.preprocessing import ORIGINAL_PIXELS
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import Pair, Patches, fits, square_or_pair, table_size
from hf_vit.errors import UserError

_HEAD = "MAPHead_0"
_TABLE = "pos_embedding"
_STACKED = "Transformer/encoderblock/"

# The MAP head has the parts of a block, and a probe in the place of the first LayerNorm.
MAP_RULES = (
    KeyRule(f"{_HEAD}/probe", "11D", "keep", "pooler.map.probe", part="map"),
    *(
        replace(
            rule,
            key=rule.key.replace(f"Transformer/encoderblock_{BLOCK}", _HEAD),
            parameter=rule.parameter.replace(f"layers.{BLOCK}", "pooler.map").replace("layernorm_before", "layernorm"),
            part="map",
        )
        for rule in vit_jax.RULES
        if rule.in_block and "LayerNorm_1" not in rule.key
    ),
)

_POSITIONS = KeyRule(_TABLE, "1TD", "keep", "embeddings.position_embeddings", part="table")

RULES = (
    *(_POSITIONS if rule.key == vit_jax.TABLE else rule for rule in vit_jax.RULES),
    *MAP_RULES,
)

LEGEND = vit_jax.LEGEND | {
    "T": "rows of the position table: the patch grid's row by row; in older files the class token's before them",
    "N": "blocks, where they are stacked",
}

# Of a contrastive model, below the prefix of both towers.
OTHER_TOWER = {r"txt/.+": "the text tower", r"[tb]": "temperature and bias of the contrastive loss"}

PREFIXES = (*vit_jax.PREFIXES, *(f"{prefix}img/" for prefix in vit_jax.PREFIXES))
_ENCODER = re.compile(r"((?:.*/)?)Transformer/(?:encoderblock(?:_\d+)?|encoder_norm)/.+")
# Where older files have the table (the last is vit_jax's own place), and parts of the MAP head.
_OLD_TABLES = ("Transformer/pos_embedding", vit_jax.TABLE)
_INLINED = re.compile(r"probe|(LayerNorm|MultiHeadDotProductAttention|MlpBlock)_\d+/.+")


def recognises(shapes: Mapping[str, Shape]) -> bool:
    """An encoder under the names of Google's code, without a stem; vit_jax's table place is a mark of that origin."""
    if not any(map(_ENCODER.fullmatch, shapes)) or vit_jax.has_stem(shapes):
        return False
    return not vit_jax.has_position_table(shapes) or vit_jax.has_parts_of_big_vision(shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """Strip the prefix, sort out what is no weight of the image model, and name everything as files of today do."""
    prefix = _prefix(shapes)
    reasons = dict(vit_jax.IGNORED)
    if prefix.endswith("img/"):
        above = re.escape(prefix.removesuffix("img/"))
        reasons |= {above + pattern: reason for pattern, reason in OTHER_TOWER.items()}
    weights, ignored = vit_jax.sorted_out(shapes, prefix, reasons)
    moved = _moved(weights)
    found = vit_jax.renumbered({moved.get(name, name): key for name, key in weights.items()}, ignored, prefix)
    old = {new: name for name, new in moved.items()}

    def spell(name: str) -> str:
        spelt = found.spell(name).removeprefix(prefix)
        inlined = "probe" in moved and spelt.startswith(f"{_HEAD}/")
        return prefix + old.get(spelt, spelt.removeprefix(f"{_HEAD}/") if inlined else spelt)

    return replace(found, spell=spell)


def _prefix(shapes: Mapping[str, Shape]) -> str:
    found = sorted({match[1] for key in shapes if (match := _ENCODER.fullmatch(key))} & set(PREFIXES))
    if len(found) != 1:
        raise UserError(
            f"the file holds encoders under {len(found)} of the prefixes {', '.join(map(repr, PREFIXES))}; "
            "exactly one set of weights is needed"
        )
    return found[0]


def _moved(weights: Mapping[str, str]) -> dict[str, str]:
    """Old place -> today's, for the position table and a MAP head that is not in a module of its own."""
    moved = {old: _TABLE for old in _OLD_TABLES if old in weights}
    if "probe" in weights:
        moved |= {name: f"{_HEAD}/{name}" for name in weights if _INLINED.fullmatch(name)}
    places = [moved.get(name, name) for name in weights]
    twice = sorted({place for place in places if places.count(place) > 1})
    if twice:
        raise UserError(
            f"the file holds {', '.join(twice[:3])} in an older place and in today's; one of them is needed"
        )
    return moved


def rules_of(rules: tuple[KeyRule, ...], shapes: Mapping[str, Shape]) -> tuple[KeyRule, ...]:
    """The rules of the blocks, for one array a block or for one of all blocks."""
    if not any(name.startswith(_STACKED) for name in shapes):
        return rules
    return tuple(_stacked(rule) if rule.in_block else rule for rule in rules)


def _stacked(rule: KeyRule) -> KeyRule:
    return replace(rule, key=rule.key.replace(f"_{BLOCK}/", "/", 1), axes=("N", *rule.axes), stacked=True)


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`."""
    if {"cls", "map"} <= parts:
        raise UserError(f"the file holds a class token and a MAP head ({_HEAD}), of which big_vision has one at a time")
    patches = Patches((dims["P"], dims["Q"]))
    size, has_class_row = _table(dims.get("T"), "cls" in parts, patches, image_size)
    return {
        **vit_jax.common_fields(dims, parts, size),
        "patch_size": square_or_pair(patches.sides),
        "position_embedding": "learned" if "table" in parts else "sincos_2d",
        "position_on_class_token": has_class_row,
        "pooling": next((kind for part, kind in {"cls": "token", "map": "map"}.items() if part in parts), "gap"),
    }


def _table(rows: int | None, token: bool, patches: Patches, image_size: Pair | None) -> tuple[Pair, bool]:
    """(nominal image size, whether the position table begins with the class token's row, as in older files)."""
    if rows is None:
        if image_size is None:
            raise UserError(
                "the file holds no position table, so its positions are sincos2d (or none: --position-embedding none; "
                "or it is damaged); declare the image size the checkpoint was trained at with --image-size HxW"
            )
        patches.grid_of(image_size)
        return image_size, False
    has_class_row = token and fits(rows - 1, patches, image_size)
    return table_size(rows - has_class_row, patches, image_size), has_class_row


ORIGIN = Origin(
    name="big_vision",
    title="Google big_vision .npz: ViT, FlexiViT, and image towers of contrastive models (LiT, SigLIP)",
    legend=LEGEND,
    rules=RULES,
    block_pattern=vit_jax.ORIGIN.block_pattern,
    without=vit_jax.ORIGIN.without,
    ignored=vit_jax.IGNORED | {f"({'|'.join(p for p in vit_jax.PREFIXES)}){k}": v for k, v in OTHER_TOWER.items()},
    recognises=recognises,
    names=names,
    configure=configure,
    rules_of=rules_of,
    assumed={
        "position_embedding": "sincos2d positions, as there is no table",
        "pooling": "the mean of the patches, as there is neither class token nor MAP head",
        "processor": ORIGINAL_PIXELS,
    },
    told={"position_embedding": frozenset({"table"}), "pooling": frozenset({"cls", "map"})},
    first_patch=True,
    notes=(
        "Prefixes that are taken off: " + ", ".join(f"`{prefix}`" for prefix in PREFIXES if prefix) + ". Below `img/` "
        "is the image tower of a contrastive model; its `head` gives the embedding that is compared with the text's.",
        "`cls` or `MAPHead_0` decide about the pooling; without either it is the mean (GAP), unless `--pooling token` "
        'declares the first patch\'s token (`pool_type="0"`).',
        "The position table is added before the class token is attached. A table that has a row more than a square is "
        "of an older file whose first row is the class token's; it stays in its place.",
        "Without a position table the positions are sincos2d, unless `--position-embedding none` declares that there "
        "are none (vit_jax's `add_position_embedding=False`); `--image-size` declares the size.",
        "Blocks that are stacked in one array (`Transformer/encoderblock/...`, first axis N) are taken apart.",
        "Older places: `Transformer/pos_embedding` and `Transformer/posembed_input/pos_embedding` for the table, and "
        "the parts of `MAPHead_0` outside of it. Modules are renumbered as those of vit_jax.",
        "bfloat16 comes as `|V2`.",
        "FlexiViT's files hold one model, of patches of 32 px on a grid of 7x7, which is converted as it is; the file "
        "does not tell that it is one. `from_pretrained(folder, patch_size=16, image_size=240, "
        'position_interpolation="flexivit")` is that model at another patch, by FlexiViT\'s own resampling of kernel '
        "and positions. `--resize-to` stretches the positions as its loader does for fine-tuning, corners aligned.",
    ),
)
