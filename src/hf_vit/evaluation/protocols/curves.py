"""The picture of most protocols: lines over a number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_vit.results.figures import integer_ticks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A legend of more lines stands beside the picture.
_MAX_INSIDE = 4


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
    """Lines with a marker at every measurement.

    Args:
        lines: what to draw; the legend has the names of those that have one.
        x_label: with the unit.
        y_label: with the unit.
        log_x: a logarithmic axis, whose ticks are the measurements.
        level: name and height of a dashed line across.
    """
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
