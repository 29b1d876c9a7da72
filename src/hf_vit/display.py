"""How data and results show themselves: in one line, as a small table in a notebook; and progress on a terminal."""

import html
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Displayed:
    """Abstract: an object that says in a few words what it is. A dataclass of it is one with `repr=False`."""

    @abstractmethod
    def overview(self) -> Mapping[str, object]:
        """Return what a reader wants to know first, by name."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {value}' for name, value in self.overview().items())})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        cells = ((html.escape(name), html.escape(str(value))) for name, value in self.overview().items())
        rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells)
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def shorten_list(names: list[str], most: int = 10) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 image" or "2,000 images"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_amount(number: float | None) -> str:
    """Return a number as people read it: 139.9k, 4.02M, 17.6G; "" for None."""
    if number is None:
        return ""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)


def make_progress_bar(title: str, unit: str = "", is_hidden: bool = False) -> "Progress":
    """Return a bar on standard error that disappears at the end; hidden where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=is_hidden or not console.is_terminal)
