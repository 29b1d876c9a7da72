"""The ResNetV2 of the BiT paper (arXiv 1912.11370): big_vision's models/bit_paper.py, and big_transfer's own files.

big_transfer's names (`resnet/block1/unit01/a/standardized_conv2d_4/kernel`) are told in those of big_vision
(`block1/unit01/conv1/kernel`), as big_vision's loader does.
"""

import re
from collections.abc import Mapping
from functools import partial

from hf_vit.conversion.origins.google import vit_jax
from hf_vit.conversion.origins.google.bit import IMAGE_SIZE, LEGEND, configure, only_prefix, rules_of
from hf_vit.conversion.origins.google.vit_jax_hybrid import norm_rules
from hf_vit.conversion.origins.origin import NO_BLOCKS, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.preprocessing import ORIGINAL_PIXELS
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.errors import UserError

ROOT = "root_block/conv_root/kernel"
BIG_TRANSFER = "resnet/"
_ROOT_THERE = re.compile(rf"{BIG_TRANSFER}root_block/standardized_conv2d(_\d+)?/kernel")
_NUMBERED = re.compile(r"standardized_conv2d_\d+/")
_UNIT = re.compile(r"(block[1-9]\d*/unit)(0[1-9]|[1-9]\d+)/(.+)")
_GROUPS = tuple(enumerate("abc", start=1))
# big_transfer's name of what big_vision calls otherwise, within a unit or outside of all.
_THERE = {
    ROOT: "root_block/standardized_conv2d/kernel",
    "norm-pre-head/scale": "group_norm/gamma",
    "norm-pre-head/bias": "group_norm/beta",
    "head/kernel": "head/conv2d/kernel",
    "head/bias": "head/conv2d/bias",
    **{f"conv{number}/kernel": f"{group}/standardized_conv2d/kernel" for number, group in _GROUPS},
    **{f"gn{number}/scale": f"{group}/group_norm/gamma" for number, group in _GROUPS},
    **{f"gn{number}/bias": f"{group}/group_norm/beta" for number, group in _GROUPS},
    "conv_proj/kernel": "a/proj/standardized_conv2d/kernel",
}
_HERE = {there: here for here, there in _THERE.items()}

_NAME = "block{s}/unit{u}"
_MODULES = "encoder.stages.{s-1}.{u-1}"
UNIT_RULES = (
    *norm_rules(f"{_NAME}/gn1", "I", f"{_MODULES}.norm1"),
    KeyRule(f"{_NAME}/conv1/kernel", ("1", "1", "I", "U"), "conv", f"{_MODULES}.conv1.weight"),
    *norm_rules(f"{_NAME}/gn2", "U", f"{_MODULES}.norm2"),
    KeyRule(f"{_NAME}/conv2/kernel", ("3", "3", "U", "U"), "conv", f"{_MODULES}.conv2.weight"),
    *norm_rules(f"{_NAME}/gn3", "U", f"{_MODULES}.norm3"),
    KeyRule(f"{_NAME}/conv3/kernel", ("1", "1", "U", "O"), "conv", f"{_MODULES}.conv3.weight"),
    KeyRule(f"{_NAME}/conv_proj/kernel", ("1", "1", "I", "O"), "conv", f"{_MODULES}.projection.weight"),
)
RULES = (
    KeyRule(ROOT, ("7", "7", "C", "W"), "conv", "encoder.root_conv.weight"),
    *UNIT_RULES,
    *norm_rules("norm-pre-head", "F", "encoder.norm"),
    KeyRule("head/kernel", "FL", "pointwise", "classifier.weight", part="head"),
    KeyRule("head/bias", "L", "keep", "classifier.bias", part="head"),
)


def recognises(shapes: Mapping[str, Shape]) -> bool:
    """A root under either code's name, and no Transformer."""
    here = any(f"{prefix}{ROOT}" in shapes for prefix in vit_jax.PREFIXES)
    return (here or _is_big_transfers(shapes)) and not any("Transformer/" in key for key in shapes)


def _is_big_transfers(shapes: Mapping[str, Shape]) -> bool:
    return any(_ROOT_THERE.fullmatch(key) for key in shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """Strip the prefix, sort out what is no weight, and tell big_transfer's names in those of big_vision."""
    there = _is_big_transfers(shapes)
    prefix = BIG_TRANSFER if there else only_prefix(shapes, ROOT)
    weights, ignored = vit_jax.sorted_out(shapes, prefix, vit_jax.IGNORED)
    normal: dict[str, str] = {}
    for name, key in weights.items():
        told = _normal(name, there)
        if told in normal:
            raise UserError(f"the file holds '{normal[told]}' and '{key}', which are the same array's; one is needed")
        normal[told] = key
    return KeyNames(normal, ignored, lambda name: prefix + _spelt(name, there))


def _normal(name: str, there: bool) -> str:
    """The name in its normal form: big_vision's, units without a leading zero; `/name` where that code has none."""
    unit = _UNIT.fullmatch(name)
    scope, end = (f"{unit[1]}{int(unit[2])}/", unit[3]) if unit else ("", name)
    if there:
        end = _HERE.get(_NUMBERED.sub("standardized_conv2d/", end), "")
    return scope + end if end and (unit or not end.startswith("block")) else f"/{name}"


def _spelt(name: str, there: bool) -> str:
    unit = re.fullmatch(r"(block\d+/unit)(\d+)/(.+)", name)
    scope, end = (f"{unit[1]}{int(unit[2]):02d}/", unit[3]) if unit else ("", name)
    return scope + (_THERE[end] if there else end)


ORIGIN = Origin(
    name="bit_paper",
    title="BiT ResNetV2 .npz, pre-activation: files of big_transfer (BiT-S, -M) and big_vision (models/bit_paper.py)",
    legend=LEGEND,
    rules=RULES,
    block_pattern=NO_BLOCKS,
    without={},
    ignored=vit_jax.IGNORED,
    recognises=recognises,
    names=names,
    configure=partial(configure, pre_activation=True),
    family="bit",
    rules_of=partial(rules_of, unit_rules=UNIT_RULES),
    assumed={
        "zero_padded_pool": "the root pools what lies within the map, as in big_vision (big_transfer pads with zeros: "
        "from_pretrained(folder, zero_padded_pool=True))",
        "processor": ORIGINAL_PIXELS,
    },
    notes=(
        "Becomes an `HfBitForImageClassification`.",
        "big_transfer's keys begin with `resnet/` and are named `a`, `b`, `c`, `standardized_conv2d` or "
        "`standardized_conv2d_<n>`, `gamma` and `beta`; the table has big_vision's names for them. Numbers of units "
        "have two digits, `unit01`.",
        "GroupNorm's parameters are (C,) or (1, 1, 1, C), the head's kernel [F, L] or [1, 1, F, L].",
        "The numbers are those of big_vision, whose root pools what lies within the map. The released weights were "
        "trained with zeros around it (big_transfer; timm and transformers do so too): "
        "`from_pretrained(folder, zero_padded_pool=True)` gives that.",
        f"The file does not tell its image size: {IMAGE_SIZE} px, unless `--image-size` declares another.",
    ),
)
