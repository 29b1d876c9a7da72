"""Pictures of an evaluation and of a training, as PNG files; drawn off screen, without pyplot's global state."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_vit.results.facts import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from hf_vit.evaluation.protocols.top1 import WrongImage

CONFUSION_MATRIX_NAME = "confusion_matrix.png"
WRONG_IMAGES_NAME = "wrong_images.png"
LEARNING_CURVE_NAME = "learning_curve.png"

_MAX_NAMED_CLASSES = 40
_MAX_COUNTED_CLASSES = 20
_DPI = 120


def plot_confusion_matrix(matrix: "NDArray[np.int64]", label_names: Sequence[str], path: Path, title: str = "") -> None:
    """Draw [K, K] counts, row = true class, column = predicted; the colour is the share of the row.

    Names are written up to 40 classes, counts up to 20.
    """
    import numpy as np

    size = len(label_names)
    side = float(np.clip(0.45 * size + 2.5, 4.5, 14))
    figure = new_figure(side, side)
    axes = figure.add_subplot()
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    picture = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, ax=axes, label="share of the true class", fraction=0.046, pad=0.04)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if size <= _MAX_NAMED_CLASSES:
        names = [_short(name) for name in label_names]
        axes.set_xticks(range(size), labels=names, rotation=90, parse_math=False)
        axes.set_yticks(range(size), labels=names, parse_math=False)
    if size <= _MAX_COUNTED_CLASSES:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            colour = "white" if share[row, column] > 0.5 else "black"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=colour, fontsize=8)
    if title:
        axes.set_title(title, parse_math=False)
    save_figure(figure, path)


def plot_wrong_images(wrong: "Sequence[WrongImage]", path: Path, limit: int = 25) -> None:
    """Draw the most confident mistakes as a grid: image, "true → predicted", probability of the predicted class."""
    shown = [entry for entry in wrong if entry.thumbnail is not None][:limit]
    columns = min(5, max(len(shown), 1))
    rows = -(-len(shown) // columns) or 1
    figure = new_figure(2.2 * columns, 2.5 * rows)
    for place, entry in enumerate(shown):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.imshow(cast(Any, entry.thumbnail), interpolation="nearest")
        axes.set_axis_off()
        title = (
            f"{_short(entry.label, 16)} → {_short(entry.prediction, 16)}\n{entry.confidence:.0%} · image {entry.index}"
        )
        axes.set_title(title, fontsize=8, parse_math=False)
    save_figure(figure, path)


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


def new_figure(width: float, height: float) -> "Figure":
    """A figure of this size in inches, outside of pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG in one move."""
    import warnings

    content = io.BytesIO()
    with warnings.catch_warnings():
        # A class name in a script the font lacks is drawn as boxes: not worth a warning in a user's terminal.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        # The software version stays out of the file: the same evaluation gives the same bytes.
        figure.savefig(content, format="png", dpi=_DPI, metadata={"Software": None})
    write_atomically(path, content.getvalue())


def _short(name: str, limit: int = 24) -> str:
    name = " ".join(name.split())
    return name if len(name) <= limit else name[: limit - 1] + "…"
