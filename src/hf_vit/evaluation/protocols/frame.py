"""Results of protocols: metrics, tables and plots. `registry.py` lists all protocols."""

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

from hf_vit.display import Displayed
from hf_vit.evaluation.reading import THUMBNAIL_PX
from hf_vit.results.figures import make_figure, set_integer_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

_MAX_INSIDE = 4  # entries of a legend inside the plot; longer legends are beside it
_MAX_BARS = 200  # classes in a plot; of 1,816 and more it has 65,536 px, which matplotlib below 3.10 refuses
T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """Rows of text with a header (which may be empty) for the terminal."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


class ProtocolResult(Displayed, ABC):
    """Base class of protocol results. Accuracies and errors are fractions in [0, 1].

    Attributes:
        title: name of the protocol for tables and the model card.
        source: the paper of the protocol.
        num_images: number of evaluated images.
    """

    title: ClassVar[str]
    source: ClassVar[str]
    num_images: int

    def values(self) -> dict[str, Any]:
        """Return the metrics as numbers, text, lists and dictionaries, for JSON files."""
        names = [field.name for field in fields(cast(Any, self)) if field.name != "num_images"]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def restore(cls, values: Mapping[str, Any], **others: Any) -> Self:
        """Restore a result, without pictures, from the `values` of its record; `others` are fields it may have."""
        stored = {**values, **values.get("classes", {}), **others}
        return cls(**{field.name: stored[field.name] for field in fields(cast(Any, cls)) if field.name in stored})

    @abstractmethod
    def headline(self) -> dict[str, float]:
        """Return the main metrics by name, as fractions, for the model card."""

    def overview(self) -> dict[str, object]:
        """Return the lines that `print` shows."""
        return {"images": f"{self.num_images:,}", **{name: percent(value) for name, value in self.headline().items()}}

    @abstractmethod
    def tables(self, judged: str) -> list[Table]:
        """Return tables for the terminal; `judged` describes the evaluated images for the titles."""

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        """Return file name -> plot; None deletes the plot of an earlier run that has no successor."""
        return {}

    def record(self, protocol: str, settings: dict[str, Any], pictures: list[str]) -> dict[str, Any]:
        """Return the values of a record in facts.json; `pictures` are the files of plots beside the weights."""
        values = {"protocol": protocol, "settings": settings, **self.values(), "headline": self.headline()}
        return values | {"pictures": dict.fromkeys(pictures, self.title)}


@dataclass(frozen=True, repr=False)
class SingleTableResult(ProtocolResult):
    """Base class of results with one table and one plot."""

    num_images: int

    @abstractmethod
    def table(self) -> Table:
        """Return the table for the terminal."""

    def tables(self, judged: str) -> list[Table]:
        return [replace(self.table(), title=f"{self.title}: {judged}")]

    @abstractmethod
    def draw(self) -> "Figure":
        """Draw the plot."""

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        return {f"{stem}.png": self.draw()}


def percent(value: float | None) -> str:
    """Format a fraction in percent, such as "93.06%"; "-" for None."""
    return "-" if value is None else f"{value:.2%}"


def sort_worst_first(fractions: Mapping[str, float], most: int | None = None) -> list[list[str]]:
    """Return rows (name, percentage) from the lowest fraction up, at most `most`."""
    return [[name, percent(value)] for name, value in sorted(fractions.items(), key=lambda item: item[1])[:most]]


@dataclass(frozen=True)
class Line:
    """A line of fractions `y` over `x` with its name in the legend, and optional standard deviations as error bars."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    deviation: Sequence[float] | None = None


def draw_curves(
    lines: Sequence[Line],
    x_label: str,
    y_label: str = "accuracy (%)",
    *,
    log_x: bool = False,
    level: tuple[str, float] | None = None,
) -> "Figure":
    """Draw lines of fractions in percent with a marker at every point; `level` is a horizontal (name, fraction)."""
    has_legend_beside = len(lines) > _MAX_INSIDE
    figure = make_figure(7.5 if has_legend_beside else 6, 4)
    axes = figure.add_subplot()
    for line in lines:
        deviation = None if line.deviation is None else [100 * value for value in line.deviation]
        marks: dict[str, Any] = {"yerr": deviation, "marker": "o", "markersize": 4, "capsize": 3}
        axes.errorbar(line.x, [100 * value for value in line.y], label=line.name or None, **marks)
    if level is not None:
        level_name, fraction = level
        axes.axhline(100 * fraction, color="gray", linestyle="--", linewidth=1, label=level_name)
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
    if has_legend_beside:
        figure.legend(fontsize=8, loc="outside right upper")
    elif level is not None or any(line.name for line in lines):
        axes.legend(fontsize=8)
    return figure


def draw_classes(fractions: Mapping[str, float], measure: str) -> "Figure":
    """Draw the fraction of every class as a horizontal bar; of more than `_MAX_BARS` only the lowest ones."""
    if len(fractions) > _MAX_BARS:
        fractions = dict(sorted(fractions.items(), key=lambda item: item[1])[:_MAX_BARS])
        measure = f"{measure}, the {_MAX_BARS} lowest"
    names = [shorten_list(name) for name in fractions]
    figure = make_figure(6, 1.5 + 0.3 * len(names))
    axes = figure.add_subplot()
    axes.barh(range(len(names)), [100 * value for value in fractions.values()])
    axes.set_yticks(range(len(names)), labels=names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"{measure} (%)")
    return figure


class Extremes(Generic[T]):
    """Collects the `limit` entries with the highest scores, in descending order; of equal scores the first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._scored_entries: list[tuple[float, T]] = []

    def add(self, score: float, make: Callable[..., T], *arguments: Any) -> None:
        """Add an entry, `make(*arguments)`, which is made only if its score is high enough; NaN never is."""
        is_high = len(self._scored_entries) < self.limit or (self.limit > 0 and score > self._scored_entries[-1][0])
        if is_high and not math.isnan(score):
            bisect.insort(self._scored_entries, (score, make(*arguments)), key=lambda entry: -entry[0])
            del self._scored_entries[self.limit :]

    @property
    def entries(self) -> list[T]:
        """The entries in descending order of their scores."""
        return [entry for _, entry in self._scored_entries]


def draw_images(
    images: "Sequence[Image | None]",
    titles: Sequence[str],
    columns: int = 5,
    cell: tuple[float, float] = (2.2, 2.5),
    fontsize: int = 8,
) -> "Figure":
    """Draw images with titles in a grid; `cell` is the (width, height) of an image in inches."""
    columns = min(columns, max(len(images), 1))
    rows = math.ceil(len(images) / columns) or 1
    figure = make_figure(cell[0] * columns, cell[1] * rows)
    for index, (image, title) in enumerate(zip(images, titles, strict=True)):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.imshow(cast(Any, image), interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(title, fontsize=fontsize, parse_math=False)
    return figure


def make_thumbnail(image: "Image", side: int = THUMBNAIL_PX) -> "Image":
    """Return a copy of at most `side` px a side."""
    small = image.copy()
    small.thumbnail((side, side))
    return small


def shorten_list(name: str, limit: int = 24) -> str:
    """Shorten a name for a plot."""
    name = " ".join(name.split())
    return name if len(name) <= limit else name[: limit - 1] + "…"
