"""What a protocol gives: numbers, tables, pictures; all protocols stand in `registry.py`."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from hf_vit.display import Displayed
from hf_vit.evaluation.reading import PICTURED_PX
from hf_vit.results.figures import new_figure, set_integer_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

_MAX_INSIDE = 4  # lines of a legend inside a picture; a longer one stands beside it
T = TypeVar("T")


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
    """

    title: ClassVar[str]
    source: ClassVar[str]
    num_images: int

    def values(self) -> dict[str, Any]:
        """Return the measurements as facts.json and the JSON file keep them: plain numbers, text, lists and dicts."""
        return {each.name: getattr(self, each.name) for each in fields(cast(Any, self)) if each.name != "num_images"}

    @abstractmethod
    def headline(self) -> dict[str, float]:
        """Return the few fractions that a card shows, by name."""

    def overview(self) -> dict[str, object]:
        return {"images": f"{self.num_images:,}", **{name: percent(value) for name, value in self.headline().items()}}

    @abstractmethod
    def tables(self, judged: str) -> list[Table]:
        """Return what a terminal shows; `judged`: the images, for a title."""

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        """Return file -> picture; None where there is nothing to draw, so that one of an earlier run goes."""
        return {}

    def record(self, protocol: str, settings: dict[str, Any], pictures: list[str]) -> dict[str, Any]:
        """Return the values of a record in facts.json; `pictures`: the files that lie beside the weights."""
        values = {"protocol": protocol, "settings": settings, **self.values(), "headline": self.headline()}
        return values | {"pictures": dict.fromkeys(pictures, self.title)}


class OneTableResult(ProtocolResult):
    """Abstract: a result with one table and one picture."""

    @abstractmethod
    def table(self) -> Table:
        """Return what a terminal shows."""

    def tables(self, judged: str) -> list[Table]:
        return [replace(self.table(), title=f"{self.title}: {judged}")]

    @abstractmethod
    def draw(self) -> "Figure":
        """Draw the picture."""

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        return {f"{stem}.png": self.draw()}


def percent(value: float | None) -> str:
    """Write a fraction as people read it, "93.06%"; "-" for none."""
    return "-" if value is None else f"{value:.2%}"


def worst_first(fractions: Mapping[str, float], most: int | None = None) -> list[list[str]]:
    """Return rows of name and percentage, at most so many."""
    return [[name, percent(value)] for name, value in sorted(fractions.items(), key=lambda item: item[1])[:most]]


@dataclass(frozen=True)
class Line:
    """A named line of fractions, drawn in percent, with bars of one deviation where they are given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    deviation: Sequence[float] | None = None


def curves(
    lines: Sequence[Line],
    x_label: str,
    y_label: str = "accuracy (%)",
    *,
    log_x: bool = False,
    level: tuple[str, float] | None = None,
) -> "Figure":
    """Draw lines with a marker at every measurement, and a fraction as a level across them."""
    figure = new_figure(6 if len(lines) <= _MAX_INSIDE else 7.5, 4)
    axes = figure.add_subplot()
    for line in lines:
        deviation = None if line.deviation is None else [100 * value for value in line.deviation]
        marks: dict[str, Any] = {"yerr": deviation, "marker": "o", "markersize": 4, "capsize": 3}
        axes.errorbar(line.x, [100 * value for value in line.y], label=line.name or None, **marks)
    if level is not None:
        axes.axhline(100 * level[1], color="gray", linestyle="--", linewidth=1, label=level[0])
    ticks = sorted({x for line in lines for x in line.x})
    if log_x:
        axes.set_xscale("log")
        axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    elif all(float(x).is_integer() for x in ticks):
        set_integer_ticks(axes.xaxis)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, alpha=0.3)
    if len(lines) > _MAX_INSIDE:
        figure.legend(fontsize=8, loc="outside right upper")
    elif level is not None or any(line.name for line in lines):
        axes.legend(fontsize=8)
    return figure


def named_curve(names: Sequence[str], fractions: Sequence[float], x_label: str, y_label: str) -> "Figure":
    """Draw a line over 0, 1, ... that have names: the layers of a model."""
    figure = curves([Line("", range(len(names)), fractions)], x_label, y_label)
    axes = figure.axes[0]
    axes.set_xticks(range(len(names)), labels=list(names), rotation=60, ha="right", fontsize=7, parse_math=False)
    return figure


def draw_classes(fractions: Mapping[str, float], measure: str) -> "Figure":
    """Draw a bar for each class."""
    names = [shortened(name) for name in fractions]
    figure = new_figure(6, 1.5 + 0.3 * len(names))
    axes = figure.add_subplot()
    axes.barh(range(len(names)), [100 * value for value in fractions.values()])
    axes.set_yticks(range(len(names)), labels=names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"{measure} (%)")
    return figure


class Extremes(Generic[T]):
    """The `limit` entries of the highest scores; of equals the first."""

    def __init__(self, limit: int) -> None:
        self.limit, self._heap = limit, list[tuple[float, int, T]]()

    def add(self, score: float, index: int, make: Callable[[], T]) -> None:
        """Consider an entry, which is made only if it is kept; NaN is no score."""
        if score != score or (len(self._heap) >= self.limit and (not self._heap or score <= self._heap[0][0])):
            return
        heapq.heappush(self._heap, (score, -index, make()))
        if len(self._heap) > self.limit:
            heapq.heappop(self._heap)

    def kept(self) -> list[T]:
        """Return the entries, the highest first."""
        return [entry for *_, entry in sorted(self._heap, key=lambda each: (-each[0], -each[1]))]


def draw_images(
    images: "Sequence[Image | None]",
    titles: Sequence[str],
    columns: int = 5,
    cell: tuple[float, float] = (2.2, 2.5),
    fontsize: int = 8,
) -> "Figure":
    """Draw a grid of images, each below its title."""
    columns = min(columns, max(len(images), 1))
    rows = -(-len(images) // columns) or 1
    figure = new_figure(cell[0] * columns, cell[1] * rows)
    for place, (image, title) in enumerate(zip(images, titles, strict=True)):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.imshow(cast(Any, image), interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(title, fontsize=fontsize, parse_math=False)
    return figure


def thumbnail_of(image: "Image", side: int = PICTURED_PX) -> "Image":
    """Return a small copy."""
    small = image.copy()
    small.thumbnail((side, side))
    return small


def shortened(name: str, limit: int = 24) -> str:
    """Shorten a name as it fits a picture."""
    name = " ".join(name.split())
    return name if len(name) <= limit else name[: limit - 1] + "…"
