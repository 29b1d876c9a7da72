"""What an origin is: a table from its key names to the model's, and the little that a table cannot say.

One module an origin (`vit_jax.py`, ...) defines an `Origin`; `planning.py` applies it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .checkpoint import Shape

BLOCK = "{i}"  # stands for the number of a block in source and target names
Dims = Mapping[str, int]


@dataclass(frozen=True)
class KeyRule:
    """One line of a key table.

    Attributes:
        source: the key in its normal form, `{i}` for the block's number.
        axes: a letter of the origin's legend for every axis, with a factor before it ("4W") or not; a number alone is
            that very size.
        transform: name in `transforms.TRANSFORMS`.
        target: parameter of the bare model, or of its classifier.
        part: "" for keys that are always there; otherwise the optional part they belong to, present as a whole or not.
        stacked: whether the one array holds all blocks, a block for every step of its first axis "N" (layers that ran
            in a scan); `{i}` is then in the target only.
    """

    source: str
    axes: Sequence[str]
    transform: str
    target: str
    part: str = ""
    stacked: bool = False

    @property
    def in_block(self) -> bool:
        """Whether the rule stands for one key in every block."""
        return BLOCK in self.source

    def at(self, block: int) -> "KeyRule":
        """The same rule for one block."""
        source, target = (name.replace(BLOCK, str(block)) for name in (self.source, self.target))
        return replace(self, source=source, target=target)


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
class Origin:
    """A kind of checkpoint that can be converted.

    Attributes:
        name: short name, as reports and facts say it.
        title: one line for the documentation.
        legend: axis letter -> meaning.
        rules: the key table.
        block_pattern: regular expression that finds a block's number (group 1) in a normal key.
        without: part -> axes that mean another axis when the part is absent.
        ignored: regular expression of a key -> why it is ignored.
        recognises: whether a file with these shapes is of this origin.
        names: spelling of the file's keys.
        configure: (axis sizes, parts present, normal key -> shape, declared image (height, width) in px or None) ->
            fields of the config. Raises UserError where the sizes make no model.
        family: of the models that the files become, a key of `planning.MODELS`.
        rules_of: (rules, normal key -> shape) -> the rules of that file, where a line of the table stands for more than
            a block's number says. None: they are the same for every file.
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
