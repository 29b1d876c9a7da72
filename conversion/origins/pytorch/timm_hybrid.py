"""timm's hybrids (`vit_*_r*_s*`): BiT's ResNet before the blocks of `timm_vit.py`.

The stem is that of Google's hybrids but for two constants: kernels are standardised by (w - mean) / sqrt(var + 1e-8),
and GroupNorm's eps is 1e-5. The config says both, so results are timm's own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hf_vit.conversion.origins.google import vit_jax_hybrid
from hf_vit.conversion.origins.google.vit_jax_hybrid import MAX_STAGES, MAX_UNITS, STEM, expanded, stem_fields
from hf_vit.conversion.origins.origin import Dims, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.pytorch import timm_vit
from hf_vit.conversion.origins.wrapped import prefixes, unwrapped
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import Pair

_BACKBONE = "patch_embed.backbone"
_FIRST = ("downsample",)
PATCHES = KeyRule(timm_vit.PATCHES, "DFPP", "keep", "embeddings.patch_embeddings.projection.weight")
# Of timm and transformers, not of the original.
CONSTANTS: dict[str, Any] = {"weight_standardization": "variance", "group_norm_eps": 1e-5}


def stem_rules(root: tuple[str, str], unit: str) -> tuple[tuple[KeyRule, ...], tuple[KeyRule, ...]]:
    """(rules of the root, rules of a unit), for PyTorch's layout of kernels.

    Args:
        root: names of the root's convolution and norm.
        unit: name of a unit, with `{s-1}` and `{u-1}` for the numbers of its stage and of itself.
    """
    at = f"{STEM}.stages.{{s-1}}.{{u-1}}"
    sizes = {"1": ("I", "U", "1"), "2": ("U", "U", "3"), "3": ("U", "O", "1")}
    rules: list[KeyRule] = []
    for n, size in sizes.items():
        rules += _conv_and_norm((f"{unit}.conv{n}", f"{unit}.norm{n}"), (f"{at}.conv{n}", f"{at}.norm{n}"), *size)
    first = f"{unit}.downsample.conv", f"{unit}.downsample.norm"
    rules += _conv_and_norm(first, (f"{at}.projection", f"{at}.projection_norm"), "I", "O", "1")
    return _conv_and_norm(root, (f"{STEM}.root_conv", f"{STEM}.root_norm"), "C", "W", "7"), tuple(rules)


def _conv_and_norm(
    source: tuple[str, str], target: tuple[str, str], given: str, made: str, side: str
) -> tuple[KeyRule, ...]:
    """Rules of a convolution without bias, and of the norm after it; `given` and `made` are its channels."""
    return (
        KeyRule(f"{source[0]}.weight", (made, given, side, side), "keep", f"{target[0]}.weight"),
        KeyRule(f"{source[1]}.weight", (made,), "keep", f"{target[1]}.weight"),
        KeyRule(f"{source[1]}.bias", (made,), "keep", f"{target[1]}.bias"),
    )


ROOT_RULES, UNIT_RULES = stem_rules(
    (f"{_BACKBONE}.stem.conv", f"{_BACKBONE}.stem.norm"), f"{_BACKBONE}.stages.{{s-1}}.blocks.{{u-1}}"
)

LEGEND = {letter: meaning for letter, meaning in timm_vit.LEGEND.items() if letter != "P, Q"} | {
    letter: vit_jax_hybrid.LEGEND[letter] for letter in "PWUOIF"
}


def recognises(shapes: Mapping[str, Shape]) -> bool:
    return bool(prefixes(shapes, timm_vit.PATCHES)) and timm_vit.has_stem(shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """As timm_vit's; a stem that is its root alone has the root's keys without `stem.`."""
    found = unwrapped(shapes, timm_vit.PATCHES, {})
    alone = re.compile(rf"{re.escape(_BACKBONE)}\.((?:conv|norm)\.\w+)")
    if not any(map(alone.fullmatch, found.normal)) or any(f"{_BACKBONE}.st" in name for name in found.normal):
        return found
    normal = {alone.sub(rf"{_BACKBONE}.stem.\1", name): key for name, key in found.normal.items()}
    return KeyNames(normal, found.ignored, lambda name: found.spell(of_root_alone(name)))


def of_root_alone(name: str) -> str:
    """A key of the root as a stem without stages has it."""
    return name.replace(f"{_BACKBONE}.stem.", f"{_BACKBONE}.")


def stage_depths(shapes: Iterable[str]) -> tuple[int, ...]:
    """Units in every stage: as many as the highest number says, so that a gap is noticed."""
    return depths_of(shapes, rf"{re.escape(_BACKBONE)}\.stages\.(\d{{1,3}})\.blocks\.(\d{{1,3}})\.")


def depths_of(shapes: Iterable[str], pattern: str) -> tuple[int, ...]:
    """Units in every stage, both counted from 0 by the pattern's groups."""
    depths: dict[int, int] = {}
    for name in shapes:
        found = re.match(pattern, name)
        if found and int(found[1]) < MAX_STAGES and int(found[2]) < MAX_UNITS:
            depths[int(found[1])] = max(depths.get(int(found[1]), 1), int(found[2]) + 1)
    return tuple(depths.get(stage, 1) for stage in range(max(depths, default=-1) + 1))


def rules_of(rules: tuple[KeyRule, ...], shapes: Mapping[str, Shape]) -> tuple[KeyRule, ...]:
    """One rule a key of the stem, its axes in multiples of the stem's width W."""
    return tuple(expanded(rules, UNIT_RULES, stage_depths(shapes), _FIRST))


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfHybridViTConfig`."""
    stem, patches = stem_fields(dims, stage_depths(shapes))
    return stem | CONSTANTS | timm_vit.common_fields(dims, parts, patches, image_size)


ORIGIN = Origin(
    name="timm_hybrid",
    title="timm's hybrids (vit_*_r*_s*), .safetensors or .pth",
    legend=LEGEND,
    rules=(*ROOT_RULES, *UNIT_RULES, PATCHES, *timm_vit.AFTER_PATCHES),
    block_pattern=timm_vit.ORIGIN.block_pattern,
    without=timm_vit.ORIGIN.without,
    ignored=timm_vit.ORIGIN.ignored,
    recognises=recognises,
    names=names,
    configure=configure,
    family="hybrid",
    rules_of=rules_of,
    declared=timm_vit.declared,
    assumed=timm_vit.ASSUMED,
    refused=timm_vit.REFUSED
    | {rf"{re.escape(_BACKBONE)}\.(?!stem\.|stages\.).+": "another stem than BiT's ResNet (ResNet-D, MobileCLIP, ...)"},
    lacking=timm_vit.LACKING,
    package="timm",
    notes=(
        "`{s-1}` and `{u-1}` are the numbers of a stage and of a unit in it; without any, the stem is the root alone, "
        "and its keys lack `stem.`.",
        "Kernels are standardised by their variance and GroupNorm's eps is 1e-5, unlike Google's: the config says so "
        "(`weight_standardization`, `group_norm_eps`), and results are timm's.",
        *timm_vit.ORIGIN.notes,
    ),
)
