"""The picture of a comparison: one row a model, one panel a question; and accuracy against compute."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_vit.comparison.result_files import ModelResult, SpeedResult
from hf_vit.results.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_comparison(results: Sequence[ModelResult], speed: SpeedResult | None) -> "Figure":
    """Accuracy with its interval, calibration, robustness and speed by model; below, accuracy against FLOPs."""
    robust = any(result.clean is not None for result in results)
    panels = 2 + robust + (speed is not None)
    figure = new_figure(3.1 * panels + 2, 1.2 + 0.32 * len(results) + 3.4)
    grid = figure.add_gridspec(2, panels, height_ratios=[0.8 + 0.32 * len(results), 3.4])
    axes = [figure.add_subplot(grid[0, place]) for place in range(panels)]
    _accuracy(axes[0], results)
    _calibration(axes[1], results)
    if robust:
        _robustness(axes[2], results)
    if speed is not None:
        _speed(axes[-1], results, speed)
    for place, one in enumerate(axes):
        names = [result.name for result in results] if place == 0 else [""] * len(results)
        one.set_yticks(range(len(results)), labels=names, parse_math=False)
        one.set_ylim(len(results) - 0.5, -0.5)
        one.grid(visible=True, axis="x", alpha=0.3)
    _compute(figure.add_subplot(grid[1, :]), results)
    return figure


def _accuracy(axes: "Axes", results: Sequence[ModelResult]) -> None:
    for place, result in enumerate(results):
        found = result.top1
        axes.plot([100 * found.low, 100 * found.high], [place, place], color="tab:blue")
        axes.plot(100 * found.value, place, marker="o", color="tab:blue")
    axes.set_xlabel("top-1 accuracy (%), 95% interval")


def _calibration(axes: "Axes", results: Sequence[ModelResult]) -> None:
    axes.barh(range(len(results)), [100 * result.ece for result in results], color="tab:gray", height=0.6)
    axes.set_xlabel("calibration error (%)")


def _robustness(axes: "Axes", results: Sequence[ModelResult]) -> None:
    series = {"clean": [result.clean for result in results], "corrupted": [result.mean_corrupted for result in results]}
    for epsilon in dict.fromkeys(epsilon for result in results for epsilon in result.fgsm or {}):
        series[f"FGSM {epsilon}/255"] = [(result.fgsm or {}).get(epsilon) for result in results]
    for name, marker in zip(series, "os<>v^dP*X", strict=False):
        points = [(100 * value, place) for place, value in enumerate(series[name]) if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, markersize=5, label=name)
    axes.set_xlabel("accuracy, corrupted and attacked (%)")
    axes.legend(fontsize=7)


def _speed(axes: "Axes", results: Sequence[ModelResult], speed: SpeedResult) -> None:
    for place, result in enumerate(results):
        ratio = speed.rows[result.name].times_as_fast
        axes.plot([ratio.lower, ratio.upper], [place, place], color="tab:orange")
        axes.plot(ratio.median, place, marker="o", color="tab:orange")
    axes.axvline(1, color="black", linewidth=0.6)
    _logarithmic(axes)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("times as fast as the first" + ("" if speed.quiet else " (busy machine)"))


def _compute(axes: "Axes", results: Sequence[ModelResult]) -> None:
    for result in results:
        if result.flops is None:
            continue
        axes.plot(result.flops, 100 * result.top1.value, marker="o", color="tab:blue")
        axes.annotate(
            f" {result.name}", (result.flops, 100 * result.top1.value), fontsize=8, va="center", parse_math=False
        )
    _logarithmic(axes)
    axes.margins(x=0.15)
    axes.set_xlabel("FLOPs of a forward, one image")
    axes.set_ylabel("top-1 accuracy (%)")
    axes.grid(visible=True, alpha=0.3)


def _logarithmic(axes: "Axes") -> None:
    """Ticks at 1, 2 and 5 of every decade, as people read them: 500 k, 2 M."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
