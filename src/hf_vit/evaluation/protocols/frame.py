"""What a protocol gives: numbers with documented shapes, a table, a picture; all protocols stand in `protocols.py`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """Rows of text under a header, as they are printed."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class ProtocolResult(ABC):
    """Abstract: what one protocol measured. Accuracies and errors are fractions in [0, 1].

    Attributes:
        title: for people.
        source: the paper it follows.
        num_images: images that judged.
    """

    title: ClassVar[str]
    source: ClassVar[str]
    num_images: int

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """The measurements as facts.json and the JSON file keep them: plain numbers, text, lists and dicts."""

    @abstractmethod
    def headline(self) -> dict[str, float]:
        """The few fractions that a card shows, by name."""

    @abstractmethod
    def table(self) -> Table:
        """What a terminal shows."""

    @abstractmethod
    def draw(self) -> "Figure":
        """The picture."""


def percent(value: float) -> str:
    """A fraction as people read it, "93.06%"."""
    return f"{value:.2%}"
