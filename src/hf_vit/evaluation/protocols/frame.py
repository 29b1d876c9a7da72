"""What a protocol gives: numbers, tables, pictures; all protocols stand in `registry.py`."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from hf_vit.display import Displayed
from hf_vit.evaluation.reading import PICTURED_PX
from hf_vit.results.figures import integer_ticks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

# A legend of more lines stands beside the picture.
_MAX_INSIDE = 4
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
        """The measurements as facts.json and the JSON file keep them: plain numbers, text, lists and dicts."""
        return {each.name: getattr(self, each.name) for each in fields(cast(Any, self)) if each.name != "num_images"}

    @abstractmethod
    def headline(self) -> dict[str, float]:
        """The few fractions that a card shows, by name."""

    def overview(self) -> dict[str, object]:
        return {"images": f"{self.num_images:,}", **{name: percent(value) for name, value in self.headline().items()}}

    @abstractmethod
    def tables(self, judged: str) -> list[Table]:
        """What a terminal shows; `judged`: the images, for a title."""

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        """File -> picture; None where there is nothing to draw, so that one of an earlier run goes."""
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


@dataclass(frozen=True)
class Line:
    """A named line, with bars of one deviation where they are given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    deviation: Sequence[float] | None = None


def curves(
    lines: Sequence[Line], x_label: str, y_label: str, *, log_x: bool = False, level: tuple[str, float] | None = None
) -> "Figure":
    """Lines with a marker at every measurement."""
    figure = new_figure(6 if len(lines) <= _MAX_INSIDE else 7.5, 4)
    axes = figure.add_subplot()
    for line in lines:
        axes.errorbar(line.x, line.y, yerr=line.deviation, marker="o", markersize=4, capsize=3, label=line.name or None)
    if level is not None:
        axes.axhline(level[1], color="gray", linestyle="--", linewidth=1, label=level[0])
    if log_x:
        axes.set_xscale("log")
        ticks = sorted({x for line in lines for x in line.x})
        axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, alpha=0.3)
    if all(float(x).is_integer() for line in lines for x in line.x) and not log_x:
        integer_ticks(axes.xaxis)
    if len(lines) > _MAX_INSIDE:
        figure.legend(fontsize=8, loc="outside right upper")
    elif level is not None or any(line.name for line in lines):
        axes.legend(fontsize=8)
    return figure


def named_curve(names: Sequence[str], lines: Sequence[Line], x_label: str, y_label: str) -> "Figure":
    """Lines over 0, 1, ... that have names: the layers of a model."""
    figure = curves(lines, x_label, y_label)
    axes = figure.axes[0]
    axes.set_xticks(range(len(names)), labels=list(names), rotation=60, ha="right", fontsize=7, parse_math=False)
    return figure


def draw_classes(fractions: Mapping[str, float], measure: str) -> "Figure":
    """A bar for each class."""
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
        """The highest first."""
        return [entry for *_, entry in sorted(self._heap, key=lambda each: (-each[0], -each[1]))]


def draw_images(images: "Sequence[Image | None]", titles: Sequence[str]) -> "Figure":
    """A grid of images, each below its title of two lines."""
    columns = min(5, max(len(images), 1))
    rows = -(-len(images) // columns) or 1
    figure = new_figure(2.2 * columns, 2.5 * rows)
    for place, (image, title) in enumerate(zip(images, titles, strict=True)):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.imshow(cast(Any, image), interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(title, fontsize=8, parse_math=False)
    return figure


def thumbnail_of(image: "Image", side: int = PICTURED_PX) -> "Image":
    """A small copy."""
    small = image.copy()
    small.thumbnail((side, side))
    return small


def shortened(name: str, limit: int = 24) -> str:
    """A name as it fits a picture."""
    name = " ".join(name.split())
    return name if len(name) <= limit else name[: limit - 1] + "…"
