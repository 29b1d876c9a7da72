"""What an origin is: a table from its key names to the model's, and the little that a table cannot say.

One module an origin (`vit_jax.py`, ...) defines an `Origin`; `planning.py` applies it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .reader import Shape

BLOCK = "{i}"  # stands for the number of a block in source and target names
Dims = Mapping[str, int]


@dataclass(frozen=True)
class KeyRule:
    """One line of a key table.

    Attributes:
        source: the key in its normal form, `{i}` for the block's number.
        axes: one letter an axis, as in the origin's legend; a digit is that very size.
        transform: name in `transforms.TRANSFORMS`.
        target: parameter of the bare model, or of its classifier.
        part: "" for keys that are always there; otherwise the optional part they belong to, present as a whole or not.
    """

    source: str
    axes: str
    transform: str
    target: str
    part: str = ""

    @property
    def in_block(self) -> bool:
        """Whether the rule stands for one key in every block."""
        return BLOCK in self.source

    def at(self, block: int) -> "KeyRule":
        """The same rule for one block."""
        place = {"i": str(block)}
        return KeyRule(self.source.format(**place), self.axes, self.transform, self.target.format(**place), self.part)


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
        without: part -> axis letters that mean another axis when the part is absent.
        ignored: regular expression of a key -> why it is ignored.
        recognises: whether a file with these shapes is of this origin.
        names: spelling of the file's keys.
        configure: (axis sizes, parts present, declared image (height, width) in px or None) -> fields of the config.
            Raises UserError where the sizes make no model.
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
    configure: Callable[[Dims, frozenset[str], tuple[int, int] | None], dict[str, Any]]
    notes: tuple[str, ...] = field(default=())
