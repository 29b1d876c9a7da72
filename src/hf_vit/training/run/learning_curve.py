"""The picture of a training: loss and the score of the validation split over the epochs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_vit.results.figures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEARNING_CURVE_NAME = "learning_curve.png"
# What is logged of the validation split -> what the axis calls it.
_SCORES = {
    "eval_accuracy": "accuracy",
    "eval_top1": "accuracy",
    "eval_mean_iou": "mean intersection over union",
    "eval_ap50": "AP50",
}


def plot_learning_curve(log_history: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw loss and score over the epochs from a Trainer's `state.log_history`.

    Returns:
        Whether there was anything to draw; without a loss no file is written.
    """
    losses = {"training": _series(log_history, "loss"), "validation": _series(log_history, "eval_loss")}
    scores = {name: points for key, name in _SCORES.items() if (points := _series(log_history, key))}
    if not any(losses.values()):
        return False
    figure = new_figure(9 if scores else 5, 3.6)
    axes = figure.add_subplot(1, 2 if scores else 1, 1)
    for name, points in losses.items():
        _draw(axes, points, name)
    axes.set_ylabel("loss (nats)")
    axes.legend()
    for name, points in list(scores.items())[:1]:
        axes = figure.add_subplot(1, 2, 2)
        _draw(axes, [(epoch, 100 * value) for epoch, value in points], "validation")
        axes.set_ylabel(f"{name} (%)")
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
