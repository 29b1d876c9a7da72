"""What a protocol gives: numbers with documented shapes, tables, pictures; all protocols stand in `registry.py`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hf_vit.display import Displayed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """Rows of text under a header (none where it is empty), as they are printed."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


class ProtocolResult(Displayed, ABC):
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

    def overview(self) -> dict[str, object]:
        return {"images": f"{self.num_images:,}", **{name: percent(value) for name, value in self.headline().items()}}

    @abstractmethod
    def tables(self, judged: str) -> list[Table]:
        """What a terminal shows; `judged`: the images, for a title."""

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        """File -> picture; None where there is nothing to draw, so that one of an earlier run goes.

        Args:
            stem: of the file of a protocol that has one picture.
            judged: the images, for a title.
        """
        return {}

    def record(self, protocol: str, settings: dict[str, Any], pictures: list[str]) -> dict[str, Any]:
        """The values of a record in facts.json; `pictures`: the files that lie beside the weights."""
        values = {"protocol": protocol, "settings": settings, **self.values(), "headline": self.headline()}
        return values | {"pictures": dict.fromkeys(pictures, self.title)}


class OneTableResult(ProtocolResult):
    """Abstract: a result with one table and one picture."""

    @abstractmethod
    def table(self) -> Table:
        """What a terminal shows."""

    def tables(self, judged: str) -> list[Table]:
        return [replace(self.table(), title=f"{self.title}: {judged}")]

    @abstractmethod
    def draw(self) -> "Figure":
        """The picture."""

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        return {f"{stem}.png": self.draw()}


def percent(value: float) -> str:
    """A fraction as people read it, "93.06%"."""
    return f"{value:.2%}"
