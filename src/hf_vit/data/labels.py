"""Raw labels (class numbers, plain integers or names) made class numbers, or one clear error."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_vit.errors import UserError


@dataclass(frozen=True)
class LabelMap:
    """The classes of a data set, and the number of every raw label.

    Attributes:
        names: class names, in the order of their numbers.
        numbers: raw label -> class number.
    """

    names: list[str]
    numbers: dict[Any, int]

    @classmethod
    def of_names(cls, names: Sequence[str]) -> "LabelMap":
        """For a source that names its classes: raw labels are their numbers, or the names themselves."""
        by_number: dict[Any, int] = {number: number for number in range(len(names))}
        return cls(list(names), by_number | {name: number for number, name in enumerate(names)})

    @classmethod
    def of_values(cls, values: Sequence[Any], data_name: str) -> "LabelMap":
        """For a source that does not: the distinct integers in order, or the distinct names in alphabetical order.

        Raises:
            UserError: a missing or negative label, or one that is neither a whole number nor a name.
        """
        each = [value for one in values for value in one] if is_multi_label(values) else values
        if any(value is None for value in each):
            raise UserError(f"'{data_name}' has images without a label; label them or remove them")
        kinds = {type(value) for value in each}
        if len(kinds) > 1 or not kinds <= {int, str, bool}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise UserError(f"the labels of '{data_name}' are of type {names}; needed: whole numbers or names")
        ordered = sorted(set(each))
        if ordered and not isinstance(ordered[0], str) and ordered[0] < 0:
            raise UserError(f"'{data_name}' has the label {ordered[0]}; classes are numbered from 0")
        return cls([str(value) for value in ordered], {value: number for number, value in enumerate(ordered)})

    def number(self, raw: int | str | None, place: str) -> int:
        """The class number of one raw label.

        Args:
            raw: as the source holds it.
            place: which image, for the error.

        Raises:
            UserError: the label is missing or is none of the classes.
        """
        number = self.numbers.get(raw)
        if number is None:
            what = "no label" if raw is None else f"the label {raw!r}"
            raise UserError(
                f"{place} has {what}, which is outside the {len(self.names)} classes ({first_of(self.names)}); "
                "correct the label, or add an image of that class to the training images"
            )
        return number

    def numbers_of(self, raw: Any, place: str) -> Any:
        """The class number of one raw label; of a list of them the numbers, ascending.

        Raises:
            UserError: see `number`.
        """
        if not isinstance(raw, list):
            return self.number(raw, place)
        return sorted({self.number(each, place) for each in raw})  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def is_multi_label(labels: Sequence[Any]) -> bool:
    """Whether images have several classes, or none: a list each."""
    return any(isinstance(label, list) for label in labels)


def classes_of(label: "int | Sequence[int]") -> list[int]:
    """The classes of one image: its label, or those of the list that is its label."""
    return [label] if isinstance(label, int) else list(label)


def is_unlabelled(raw_labels: Sequence[Any]) -> bool:
    """Whether a split hides its labels, as published test splits do: all of them -1 or missing."""
    return all(label is None or (isinstance(label, int) and label == -1) for label in raw_labels)


def first_of(names: Sequence[str]) -> str:
    """Class names for a message, the first few where there are many."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
