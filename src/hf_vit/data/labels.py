"""Raw labels (class numbers, plain integers or names) made class numbers, or one clear error."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_vit.errors import UserError

# Text that is str(int(text)), as far as 64 bits reach; and text of any number.
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
# Blanks that are not U+0020 but look so, and what nobody sees: soft hyphen, zero-width space, marks of direction, BOM.
_BLANK = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
_NO_WIDTH = re.compile("[\u00ad\u200b\u200e\u200f\u2060\ufeff]")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def plain_name(text: str) -> str:
    """Return the one spelling of names that look alike: composed (Unicode's NFC), with plain blanks, none around it.

    Signs without width are left out, except the joiners that words of some scripts need.
    """
    return _BLANK.sub(" ", _NO_WIDTH.sub("", unicodedata.normalize("NFC", text))).strip()


def tell_alike(names: Sequence[str]) -> list[str]:
    """Return a note on classes whose names differ by case, width, or kind of separator alone."""
    spellings: dict[str, str] = {}
    for name in names:
        key = re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFKC", name).casefold())
        if (other := spellings.setdefault(key, name)) != name:
            return [f"classes '{other}' and '{name}' look alike; give both one name if they are one class"]
    return []


def plain_label(raw: Any) -> Any:
    """Return a raw label, or a list of them, with its names in their plain spelling; None for an empty name."""
    if isinstance(raw, list):
        return [plain_label(each) for each in raw]  # pyright: ignore[reportUnknownVariableType]
    return plain_name(raw) or None if isinstance(raw, str) else raw


def typed_labels(splits: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Type the labels that lists hold as text, all splits alike.

    Whole numbers become integers where every label is written as Python writes it ("1", not "01"). Other numbers become
    floats, which no class is, where every label is a number and one has a decimal point. All else stays text. Where an
    image has a list of labels, every image gets one.
    """
    each = [one for labels in splits.values() for one in _flat(labels) if one is not None]
    kind: type = str
    if all(isinstance(one, str) and _NUMBER.fullmatch(one) for one in each):
        kind = int if all(map(_WHOLE.fullmatch, each)) else float if any("." in one for one in each) else str
    is_multi = any(map(is_multi_label, splits.values()))

    def typed(label: Any) -> Any:
        if isinstance(label, list):
            return list(map(typed, label))  # pyright: ignore[reportUnknownArgumentType]
        return kind(label) if isinstance(label, str) else label

    return {
        split: [typed([label] if is_multi and not isinstance(label, list) else label) for label in labels]
        for split, labels in splits.items()
    }


@dataclass(frozen=True)
class LabelMap:
    """The classes of a data set in the order of their numbers, and raw label -> class number."""

    names: list[str]
    numbers: dict[Any, int]

    @classmethod
    def of_names(cls, names: Sequence[str]) -> "LabelMap":
        """Make the labels of a source that names its classes: raw labels are numbers or names."""
        plain = [plain_name(name) or name for name in names]
        numbers: dict[Any, int] = {name: number for number, name in enumerate(dict.fromkeys(plain))}
        return cls(list(numbers), numbers | {number: numbers[name] for number, name in enumerate(plain)})

    @classmethod
    def of_values(cls, values: Sequence[Any], data_name: str) -> "LabelMap":
        """Make the labels of a source without class names: the distinct integers, or the distinct names, sorted."""
        each = _flat(values)
        if any(value is None for value in each):
            raise UserError(f"'{data_name}' has images without a label; label them or remove them")
        kinds = {type(value) for value in each}
        if len(kinds) > 1 or not kinds <= {int, str, bool}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            remedy = " (write 1 for 1.0, or names such as 'grade 1.5')" if float in kinds else ""
            raise UserError(f"the labels of '{data_name}' are of type {names}; needed: whole numbers or names{remedy}")
        ordered = sorted(set(each))
        if ordered and not isinstance(ordered[0], str) and ordered[0] < 0:
            raise UserError(f"'{data_name}' has the label {ordered[0]}; classes are numbered from 0")
        return cls([str(value) for value in ordered], {value: number for number, value in enumerate(ordered)})

    def number(self, raw: Any, place: str) -> Any:
        """Return the class number of one raw label; of a list of them the numbers, ascending."""
        if isinstance(raw, list):
            return sorted({self.number(each, place) for each in raw})  # pyright: ignore[reportUnknownVariableType]
        number = self.numbers.get(raw)
        if number is None:
            what = "no label" if raw is None else f"the label {raw!r}"
            raise UserError(
                f"{place} has {what}, which is not among the {len(self.names)} classes "
                f"({first_of(self.names)}); correct the label, or add an image of that class to the "
                "training images"
            )
        return number


def is_multi_label(labels: Sequence[Any]) -> bool:
    """Return whether images have several classes, or none: a list each."""
    return any(isinstance(label, list) for label in labels)


def _flat(labels: Sequence[Any]) -> list[Any]:
    return [one for label in labels for one in (label if isinstance(label, list) else [label])]


def classes_of(label: "int | Sequence[int]") -> list[int]:
    """Return the classes of one image: its label, or those of the list that is its label."""
    return [label] if isinstance(label, int) else list(label)


def is_unlabelled(raw_labels: Sequence[Any]) -> bool:
    """Return whether a split hides its labels, as published test splits do: all of them -1 or missing."""
    return all(label in (None, -1, "-1") for label in raw_labels)


def first_of(names: Sequence[str]) -> str:
    """Class names for a message, the first few where there are many."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
