"""BiT's ResNets (arXiv 1912.11370) as big_vision has them in models/bit.py: the network of a hybrid's stem.

Post-activation units; the ResNetV2 of the paper is in `bit_paper.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_vit.conversion.origins.google import vit_jax, vit_jax_hybrid
from hf_vit.conversion.origins.google.vit_jax_hybrid import (
    FIRST,
    STEM,
    expanded,
    stage_depths,
    stem_fields,
    with_leading_ones,
)
from hf_vit.conversion.origins.origin import NO_BLOCKS, Dims, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.preprocessing import ORIGINAL_PIXELS
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import Pair, square_or_pair
from hf_vit.errors import UserError

LEGEND = {letter: vit_jax_hybrid.LEGEND[letter] for letter in ("C", "W", "U", "O", "I", "F")} | {"L": "labels"}
IMAGE_SIZE = 224  # px; the network takes any, and the file does not tell which it was trained on
EPSILON = 1e-6  # of GroupNorm in the original


def _below_stem(rules: tuple[KeyRule, ...]) -> tuple[KeyRule, ...]:
    return tuple(replace(rule, parameter=rule.parameter.replace(STEM, "encoder")) for rule in rules)


UNIT_RULES = _below_stem(vit_jax_hybrid.UNIT_RULES)
RULES = (
    *_below_stem(vit_jax_hybrid.ROOT_RULES),
    *UNIT_RULES,
    KeyRule("head/kernel", "FL", "transpose", "classifier.weight", part="head"),
    KeyRule("head/bias", "L", "keep", "classifier.bias", part="head"),
)


def recognises(shapes: Mapping[str, Shape]) -> bool:
    """A root under the names of the hybrid's stem, and no Transformer after it."""
    return any(f"{prefix}conv_root/kernel" in shapes for prefix in vit_jax.PREFIXES) and not any(
        "Transformer/" in key for key in shapes
    )


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """Strip the prefix and sort out what is no weight."""
    prefix = only_prefix(shapes, "conv_root/kernel")
    weights, ignored = vit_jax.sorted_out(shapes, prefix, vit_jax.IGNORED)
    return KeyNames(weights, ignored, lambda name: prefix + name)


def only_prefix(shapes: Mapping[str, Shape], root: str, networks: str = "ResNets") -> str:
    """The prefix under which the file has a network.

    Raises:
        UserError: it has more than one.
    """
    found = [prefix for prefix in vit_jax.PREFIXES if f"{prefix}{root}" in shapes]
    if len(found) != 1:
        raise UserError(f"the file holds {len(found)} {networks}, under {found}; exactly one is needed")
    return found[0]


def stem_sizes(dims: Dims, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Depths, width and channels of the network.

    Raises:
        UserError: GroupNorm's groups do not divide the width.
    """
    stem, _ = stem_fields({**dims, "P": 1}, stage_depths(shapes))
    return {name: stem[name] for name in ("stage_depths", "stem_width")} | {"num_channels": dims["C"]}


def rules_of(
    rules: tuple[KeyRule, ...], shapes: Mapping[str, Shape], unit_rules: tuple[KeyRule, ...] = UNIT_RULES
) -> tuple[KeyRule, ...]:
    """One rule a key, its axes in multiples of the root's width W; `unit_rules` are those of `rules` in every unit."""
    return with_leading_ones(expanded(rules, unit_rules, stage_depths(shapes), FIRST), shapes)


def configure(
    dims: Dims,
    parts: frozenset[str],
    shapes: Mapping[str, Shape],
    image_size: Pair | None,
    pre_activation: bool = False,
) -> dict[str, Any]:
    """Fields of `HfBitConfig`."""
    size = IMAGE_SIZE if image_size is None else square_or_pair(image_size)
    return {**stem_sizes(dims, shapes), "image_size": size, "pre_activation": pre_activation}


ORIGIN = Origin(
    name="bit",
    title="BiT ResNets of big_vision (models/bit.py) .npz, post-activation: a classifier, or the stem of a hybrid",
    legend=LEGEND,
    rules=RULES,
    block_pattern=NO_BLOCKS,
    without={},
    ignored=vit_jax.IGNORED,
    recognises=recognises,
    names=names,
    configure=configure,
    family="bit",
    rules_of=rules_of,
    assumed={"processor": ORIGINAL_PIXELS},
    notes=(
        "Becomes an `HfBitForImageClassification`. `hf_vit.conversion.load_stem(model, file)` fills the stem of a "
        "hybrid with it instead; its head is then left out.",
        "Keys, prefixes and shapes are those of the hybrids' stem.",
        f"The file does not tell its image size: {IMAGE_SIZE} px, unless `--image-size` declares another.",
    ),
)
