"""The picture of a training: loss and accuracy over the epochs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_vit.results.figures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEARNING_CURVE_NAME = "learning_curve.png"


def plot_learning_curve(log_history: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw loss and accuracy over the epochs from a Trainer's `state.log_history`.

    Returns:
        Whether there was anything to draw; without a loss no file is written.
    """
    losses = {"training": _series(log_history, "loss"), "validation": _series(log_history, "eval_loss")}
    accuracy = _series(log_history, "eval_accuracy") or _series(log_history, "eval_top1")
    if not any(losses.values()):
        return False
    figure = new_figure(9 if accuracy else 5, 3.6)
    axes = figure.add_subplot(1, 2 if accuracy else 1, 1)
    for name, points in losses.items():
        _draw(axes, points, name)
    axes.set_ylabel("loss (nats)")
    axes.legend()
    if accuracy:
        axes = figure.add_subplot(1, 2, 2)
        _draw(axes, [(epoch, 100 * value) for epoch, value in accuracy], "validation")
        axes.set_ylabel("accuracy (%)")
        axes.legend()
    save_figure(figure, path)
    return True


def _series(log_history: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(float(entry["epoch"]), float(entry[key])) for entry in log_history if key in entry and "epoch" in entry]


def _draw(axes: "Axes", points: Sequence[tuple[float, float]], name: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else "")
        axes.set_xlabel("epoch")
        axes.grid(visible=True, alpha=0.3)
