"""The hybrids of Google's vision_transformer (vit_jax): a ResNet stem before the Transformer of `vit_jax.py`.

Files of arXiv 2010.11929 (R50, R26) and AugReg (2106.10270: R26, R50, and R+Ti, whose stem is the root alone). Depths,
width and patch of the stem follow from names and shapes.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hf_vit.conversion.origins.google import vit_jax
from hf_vit.conversion.origins.origin import Dims, KeyRule, Origin
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import Patches, table_size
from hf_vit.errors import UserError

STEM = "embeddings.patch_embeddings.stem"
_UNIT = "block{s}/unit{u}"
_MODULES = f"{STEM}.stages.{{s-1}}.{{u-1}}"
FIRST = ("conv_proj", "gn_proj")  # in the first unit of every stage only
MAX_STAGES = 16  # absurd numbers would make absurd lists of missing keys; such keys are left over instead
MAX_UNITS = 1000


def norm_rules(source: str, width: str, target: str) -> tuple[KeyRule, ...]:
    """Scale and bias of a GroupNorm."""
    return (
        KeyRule(f"{source}/scale", (width,), "flatten", f"{target}.weight"),
        KeyRule(f"{source}/bias", (width,), "flatten", f"{target}.bias"),
    )


ROOT_RULES = (
    KeyRule("conv_root/kernel", ("7", "7", "C", "W"), "conv", f"{STEM}.root_conv.weight"),
    *norm_rules("gn_root", "W", f"{STEM}.root_norm"),
)

UNIT_RULES = (
    KeyRule(f"{_UNIT}/conv1/kernel", ("1", "1", "I", "U"), "conv", f"{_MODULES}.conv1.weight"),
    *norm_rules(f"{_UNIT}/gn1", "U", f"{_MODULES}.norm1"),
    KeyRule(f"{_UNIT}/conv2/kernel", ("3", "3", "U", "U"), "conv", f"{_MODULES}.conv2.weight"),
    *norm_rules(f"{_UNIT}/gn2", "U", f"{_MODULES}.norm2"),
    KeyRule(f"{_UNIT}/conv3/kernel", ("1", "1", "U", "O"), "conv", f"{_MODULES}.conv3.weight"),
    *norm_rules(f"{_UNIT}/gn3", "O", f"{_MODULES}.norm3"),
    KeyRule(f"{_UNIT}/conv_proj/kernel", ("1", "1", "I", "O"), "conv", f"{_MODULES}.projection.weight"),
    *norm_rules(f"{_UNIT}/gn_proj", "O", f"{_MODULES}.projection_norm"),
)

_PATCHES = KeyRule("embedding/kernel", ("P", "P", "F", "D"), "conv", "embeddings.patch_embeddings.projection.weight")

RULES = (
    *ROOT_RULES,
    *UNIT_RULES,
    *(_PATCHES if rule.key == _PATCHES.key else rule for rule in vit_jax.RULES),
)

LEGEND = {
    **{letter: meaning for letter, meaning in vit_jax.LEGEND.items() if letter != "P, Q"},
    "P": "side of a patch of the stem's feature map, in places of that map",
    "W": "width of the stem",
    "U": "width of a stage: W in the first, doubled with every further one",
    "O": "channels that a stage gives: 4U",
    "I": "channels that a unit gets: O, in the first unit those of the stage before, or of the root",
    "F": "channels that the stem gives",
}


def recognises(shapes: Mapping[str, Shape]) -> bool:
    return vit_jax.has_position_table(shapes) and vit_jax.has_stem(shapes)


def stage_depths(names: Iterable[str]) -> tuple[int, ...]:
    """Units in every stage: as many as the highest number says, so that a gap is noticed."""
    depths: dict[int, int] = {}
    for name in names:
        found = re.match(r"block([1-9]\d{0,3})/unit([1-9]\d{0,3})/", name)
        if found and int(found[1]) <= MAX_STAGES and int(found[2]) <= MAX_UNITS:
            depths[int(found[1])] = max(depths.get(int(found[1]), 1), int(found[2]))
    return tuple(depths.get(stage, 1) for stage in range(1, max(depths, default=0) + 1))


def rules_of(rules: tuple[KeyRule, ...], shapes: Mapping[str, Shape]) -> tuple[KeyRule, ...]:
    """One rule a key of the stem, its axes in multiples of the stem's width W.

    GroupNorm's parameters are (C,) or, in older files, (1, 1, 1, C): each is taken as it is.
    """
    return with_leading_ones(expanded(rules, UNIT_RULES, stage_depths(shapes), FIRST), shapes)


def with_leading_ones(rules: Iterable[KeyRule], shapes: Mapping[str, Shape]) -> tuple[KeyRule, ...]:
    """The rules with axes of size 1 before the others, where the file has arrays of four axes for fewer."""
    return tuple(
        replace(rule, axes=("1",) * (4 - len(rule.axes)) + tuple(rule.axes))
        if rule.transform in ("flatten", "pointwise") and len(shapes.get(rule.key, ())) == 4
        else rule
        for rule in rules
    )


def expanded(
    rules: tuple[KeyRule, ...], unit_rules: tuple[KeyRule, ...], depths: Iterable[int], first: tuple[str, ...]
) -> list[KeyRule]:
    """One rule a key of a stem of these depths; names in `first` are in the first unit of a stage only."""
    found: list[KeyRule] = []
    channels = "W"
    for stage, depth in enumerate(depths, start=1):
        width, output = f"{2 ** (stage - 1)}W", f"{4 * 2 ** (stage - 1)}W"
        for unit in range(1, depth + 1):
            sizes = {"U": width, "O": output, "I": channels}
            templates = [rule for rule in unit_rules if unit == 1 or not any(name in rule.key for name in first)]
            found += [_with_axes(rule, sizes).in_unit(stage, unit) for rule in templates]
            channels = output
    return found + [_with_axes(rule, {"F": channels}) for rule in rules if rule not in unit_rules]


def _with_axes(rule: KeyRule, sizes: Mapping[str, str]) -> KeyRule:
    return replace(rule, axes=tuple(sizes.get(axis, axis) for axis in rule.axes))


def stem_fields(dims: Dims, depths: tuple[int, ...]) -> tuple[dict[str, Any], Patches]:
    """(what the stem tells of the config, how its map is cut into patches)."""
    if dims["W"] % 32:
        raise UserError(
            f"the stem is {dims['W']} wide, which GroupNorm's 32 groups do not divide; the file is damaged or of "
            "another kind"
        )
    patches = Patches((dims["P"], dims["P"]), stem_stride=4 * 2 ** max(len(depths) - 1, 0))
    return {"stage_depths": depths, "stem_width": dims["W"], "stem_patch_size": dims["P"]}, patches


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: tuple[int, int] | None
) -> dict[str, Any]:
    """Fields of `HfHybridViTConfig`."""
    stem, patches = stem_fields(dims, stage_depths(shapes))
    size = table_size(dims["T"] - ("cls" in parts), patches, image_size)
    return {**stem, **vit_jax.common_fields(dims, parts, size)}


ORIGIN = Origin(
    name="vit_jax_hybrid",
    title="Hybrids of Google vision_transformer (vit_jax) .npz: R50 and R26 of ImageNet-21k, AugReg's, R+Ti",
    legend=LEGEND,
    rules=RULES,
    block_pattern=vit_jax.ORIGIN.block_pattern,
    without=vit_jax.ORIGIN.without,
    ignored=vit_jax.IGNORED,
    recognises=recognises,
    names=vit_jax.names,
    configure=configure,
    family="hybrid",
    rules_of=rules_of,
    assumed=vit_jax.ASSUMED,
    told=vit_jax.ORIGIN.told,
    first_patch=True,
    notes=(
        "`{s}` and `{u}` are the numbers of a stage and of a unit in it, counted from 1; without any, the stem is the "
        "root alone (R+Ti/16, whose true stride is 32 px).",
        "`conv_proj` and `gn_proj` are in the first unit of every stage.",
        "GroupNorm's parameters are (C,) or (1, 1, 1, C).",
        "Convolutions of the stem have standardised kernels and no bias; what is stored is the kernel before that.",
        *vit_jax.ORIGIN.notes,
    ),
)
