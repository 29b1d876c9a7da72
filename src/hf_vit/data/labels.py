"""Convert raw labels (class numbers, other integers or names) to class numbers."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_vit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

# Whole numbers as Python prints them, up to 64 bits; and numbers in any notation.
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# Spaces that look like U+0020; and invisible characters: soft hyphen, zero-width space, direction marks, BOM.
_BLANK = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_WIDTH = re.compile("[\u00ad\u200b\u200e\u200f\u2060\ufeff]")


def normalize_name(text: str) -> str:
    """Return a name in Unicode form NFC with plain spaces and none around it, so that names that look alike are equal.

    Invisible characters are removed, except the joiners that words of some scripts need.
    """
    return _BLANK.sub(" ", _NO_WIDTH.sub("", unicodedata.normalize("NFC", text))).strip()


def refuse_surrogates(names: Sequence[str]) -> Sequence[str]:
    """Return class names; raise UserError for half a character, which JSON can hold, but no other file."""
    if name := next(filter(_SURROGATE.search, names), None):
        raise UserError(f"the class name {name!a} has half of a character (a surrogate); correct the name")
    return names


def note_similar_names(names: Sequence[str]) -> list[str]:
    """Return a note on two classes whose names differ only in case, width or separators, if there are any."""
    names_by_key: dict[str, str] = {}
    for name in names:
        key = re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFKC", name).casefold())
        if (other := names_by_key.setdefault(key, name)) != name:
            return [f"classes '{other}' and '{name}' look alike; use one name if they are the same class"]
    return []


def normalize_label(raw: Any) -> Any:
    """Return a raw label, or a list of labels, with normalized names; None for an empty name."""
    if isinstance(raw, list):
        return [normalize_label(each) for each in raw]  # pyright: ignore[reportUnknownVariableType]
    return normalize_name(raw) or None if isinstance(raw, str) else raw


def convert_labels(splits: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Convert labels that were read as text to one type for all splits.

    Labels become integers if Python prints every one of them in the same way ("1", not "01"). They become floats, which
    `LabelMap` refuses, if every label is a number and one has a decimal point. Otherwise they stay text. If one image
    has a list of labels, every image gets a list.
    """
    flat = [label for labels in splits.values() for label in flatten_labels(labels) if label is not None]
    to_type: type = str
    if all(isinstance(label, str) and _NUMBER.fullmatch(label) for label in flat):
        if all(map(_WHOLE.fullmatch, flat)):
            to_type = int
        elif any("." in label for label in flat):
            to_type = float
    is_multi = any(map(is_multi_label, splits.values()))

    def convert_one(label: Any) -> Any:
        return to_type(label) if isinstance(label, str) else label  # a missing label is None

    def convert(label: Any) -> Any:
        return list(map(convert_one, flatten_labels([label]))) if is_multi else convert_one(label)

    return {split: list(map(convert, labels)) for split, labels in splits.items()}


@dataclass(frozen=True)
class LabelMap:
    """The class names of a data set in the order of their numbers, and the class number of every raw label."""

    names: list[str]
    numbers: dict[Any, int]

    def __post_init__(self) -> None:
        refuse_surrogates(self.names)

    @classmethod
    def from_names(cls, names: Sequence[str]) -> "LabelMap":
        """Build the map of a source that names its classes: its raw labels are numbers or names."""
        normalized = [normalize_name(name) or name for name in names]
        distinct = list(dict.fromkeys(normalized))  # two names of a source may be equal once they are normalized
        numbers: dict[Any, int] = {name: number for number, name in enumerate(distinct)}
        return cls(distinct, numbers | {raw_number: numbers[name] for raw_number, name in enumerate(normalized)})

    @classmethod
    def from_values(cls, values: Sequence[Any], data_name: str) -> "LabelMap":
        """Build the map of a source without class names: its classes are the sorted distinct integers or names."""
        flat = flatten_labels(values)
        if any(value is None for value in flat):
            raise UserError(f"'{data_name}' has images without a label; add the labels, or remove these images")
        types = {type(value) for value in flat}
        if len(types) > 1 or not types <= {int, str, bool}:
            type_names = ", ".join(sorted(kind.__name__ for kind in types))
            remedy = " (write 1 for 1.0, or names such as 'grade 1.5')" if float in types else ""
            raise UserError(
                f"the labels of '{data_name}' have the type {type_names}; write whole numbers or names{remedy}"
            )
        classes = sorted(set(flat))
        if classes and not isinstance(classes[0], str) and classes[0] < 0:
            raise UserError(
                f"'{data_name}' has the label {classes[0]}, but class numbers begin at 0; number the classes from "
                "0, or remove images with this label"
            )
        return cls([str(value) for value in classes], {value: number for number, value in enumerate(classes)})

    def get_number(self, raw: Any, image: str) -> Any:
        """Return the class number of a raw label, or the sorted numbers of a list; the error names the image."""
        if isinstance(raw, list):
            return sorted({self.get_number(label, image) for label in raw})  # pyright: ignore[reportUnknownVariableType]
        if raw is None:
            raise UserError(f"{image} has no label; label it, or remove it")
        number = self.numbers.get(raw)
        if number is None:
            raise UserError(
                f"{image} has the label {raw!r}, which is not among the {len(self.names)} classes "
                f"({summarize_names(self.names)}); correct the label, or add an image of that class to the "
                "training images"
            )
        return number


def is_multi_label(labels: Sequence[Any]) -> bool:
    """Return whether any label is a list of classes."""
    return any(isinstance(label, list) for label in labels)


def flatten_labels(labels: Sequence[Any]) -> list[Any]:
    """Return all labels of all images in one list."""
    return [item for label in labels for item in (label if isinstance(label, list) else [label])]


def list_column(table: "Dataset", name: str) -> list[Any]:
    """Return all values of a column; `table[name]` converts them one by one, which takes a hundred times as long."""
    column: Any = table.select_columns([name]).with_format("arrow")[:]
    return column.column(name).to_pylist()


def list_classes(label: "int | Sequence[int]") -> list[int]:
    """Return the class numbers of one image, whose label is a number or a list of numbers."""
    return [label] if isinstance(label, int) else list(label)


def is_unlabeled(raw_labels: Sequence[Any]) -> bool:
    """Return whether every label of a split is -1 or missing, as in published test splits."""
    return all(label in (None, -1, "-1") for label in flatten_labels(raw_labels))


def summarize_names(names: Sequence[str]) -> str:
    """Join the first five class names for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
