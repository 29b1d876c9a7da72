"""What an origin is: a table from its key names to the model's, and the little that a table cannot say.

One module an origin (`vit_jax.py`, ...) defines an `Origin`; `planning/` applies it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_vit.conversion.readers.checkpoint import Companions, Shape

BLOCK = "{i}"  # stands for the number of a block in source and target names
NO_BLOCKS = r"(?!)"  # pattern of a network without a Transformer, which nothing fits
WITHOUT = "without "  # before a part: keys that are there where the part is not
Dims = Mapping[str, int]


@dataclass(frozen=True)
class KeyRule:
    """One line of a key table.

    Attributes:
        key: of the file, in its normal form, `{i}` for the block's number.
        axes: a letter of the origin's legend for every axis, with a factor before it ("4W") or not; a number alone is
            that very size.
        transform: name in `transforms.TRANSFORMS`.
        parameter: of the bare model, or of its classifier. "{q,k,v}_proj" are as many parameters, which get equal parts
            of the array along its first axis, in that order.
        part: "" for keys that are always there; otherwise the optional part they belong to, present as a whole or not;
            or "without PART" for those that only a file without that part has.
        stacked: whether the one array holds all blocks, a block for every step of its first axis "N" (layers that ran
            in a scan); `{i}` is then in the parameter only.
    """

    key: str
    axes: Sequence[str]
    transform: str
    parameter: str
    part: str = ""
    stacked: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that the array fills, in the order of its parts."""
        several = re.search(r"\{(\w+(?:,\w+)+)\}", self.parameter)
        if several is None:
            return (self.parameter,)
        return tuple(self.parameter.replace(several[0], name) for name in several[1].split(","))

    @property
    def in_block(self) -> bool:
        """Whether the rule stands for one key in every block."""
        return BLOCK in self.key

    def at(self, block: int) -> "KeyRule":
        """The same rule for one block."""
        return self._numbered({BLOCK: block})

    def in_unit(self, stage: int, unit: int) -> "KeyRule":
        """The same rule for one unit of a stem: `{s}`, `{u}` are the numbers, `{s-1}`, `{u-1}` those counted from 0."""
        return self._numbered({"{s}": stage, "{u}": unit, "{s-1}": stage - 1, "{u-1}": unit - 1})

    def _numbered(self, numbers: Mapping[str, int]) -> "KeyRule":
        key, parameter = self.key, self.parameter
        for name, number in numbers.items():
            key, parameter = key.replace(name, str(number)), parameter.replace(name, str(number))
        return replace(self, key=key, parameter=parameter)


@dataclass(frozen=True)
class KeyNames:
    """How the keys of one file are spelt.

    Attributes:
        normal: normal form -> key of the file, for all keys that are weights or unknown.
        ignored: key of the file -> why it is no weight of this model.
        spell: normal form -> the key this file would use, for messages about what is missing.
    """

    normal: dict[str, str]
    ignored: dict[str, str]
    spell: Callable[[str], str]


@dataclass(frozen=True)
class Declared:
    """What the files beside the weights, or people, say of a model, and shapes cannot.

    Attributes:
        fields: of the model's config. What the weights' shapes say too must be the same.
        image_size: (height, width) in px that the weights were made for.
        labels: names of the classes.
        processor: fields of the `ViTImageProcessor` that gives the pixels the source was made for; None for the
            original's own: [-1, 1], resized bilinearly.
    """

    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    image_size: tuple[int, int] | None = None
    labels: tuple[str, ...] | None = None
    processor: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Origin:
    """A kind of checkpoint that can be converted.

    Attributes:
        name: short name, as reports and facts say it.
        title: one line for the documentation.
        legend: axis letter -> meaning.
        rules: the key table.
        block_pattern: regular expression that finds a block's number (group 1) in a normal key, or `NO_BLOCKS`.
        without: part -> axes that mean another axis when the part is absent.
        ignored: regular expression of a key -> why it is ignored.
        recognises: whether a file with these shapes is of this origin.
        names: spelling of the file's keys.
        configure: (axis sizes, parts present, normal key -> shape, declared image (height, width) in px or None) ->
            fields of the config. Raises UserError where the sizes make no model.
        family: of the models that the files become, a key of `hf_vit.families.FAMILIES`.
        rules_of: (rules, normal key -> shape) -> the rules of that file, where a line of the table stands for more than
            a block's number says. None: they are the same for every file.
        declared: (what lies beside the weights, key -> shape) -> what it says. Raises UserError where it asks for
            what no model here does.
        assumed: field of the config -> what is assumed of it where neither a config.json nor the parts in `told` tell.
        told: field of the config -> optional parts, each of which tells it.
        first_patch: whether a model without a class token may read its first patch in its place.
        refused: regular expression of a normal key -> what of the source's model has no counterpart here.
        lacking: regular expression of normal keys -> what it means where a file lacks all of them.
        foreign_heads: regular expression of a normal key -> which head it is of, that no model here has; a new one may
            take its place.
        zeros: optional part -> parameters that are zeros in a file that has it, as its model lacks them.
        package: that runs what is refused.
    """

    name: str
    title: str
    legend: Mapping[str, str]
    rules: tuple[KeyRule, ...]
    block_pattern: str
    without: Mapping[str, Mapping[str, str]]
    ignored: Mapping[str, str]
    recognises: Callable[[Mapping[str, Shape]], bool]
    names: Callable[[Mapping[str, Shape]], KeyNames]
    configure: Callable[[Dims, frozenset[str], Mapping[str, Shape], tuple[int, int] | None], dict[str, Any]]
    family: str = "plain"
    rules_of: Callable[[tuple[KeyRule, ...], Mapping[str, Shape]], tuple[KeyRule, ...]] | None = None
    notes: tuple[str, ...] = field(default=())
    declared: Callable[[Companions, Mapping[str, Shape]], Declared] | None = None
    assumed: Mapping[str, str] = field(default_factory=dict[str, str])
    told: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    first_patch: bool = False
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    lacking: Mapping[str, str] = field(default_factory=dict[str, str])
    foreign_heads: Mapping[str, str] = field(default_factory=dict[str, str])
    zeros: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    package: str = ""

    @property
    def has_blocks(self) -> bool:
        """Whether it is a Transformer."""
        return self.block_pattern != NO_BLOCKS
