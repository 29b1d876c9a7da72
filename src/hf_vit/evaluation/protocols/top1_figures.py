"""The pictures of top-1: the confusion matrix, and the images that were classified wrongly."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_vit.results.facts import DataFact
from hf_vit.results.figures import new_figure, save_figure

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hf_vit.evaluation.protocols.top1 import ClassificationResult, WrongImage

CONFUSION_MATRIX_NAME = "confusion_matrix.png"
WRONG_IMAGES_NAME = "wrong_images.png"

_MAX_NAMED_CLASSES = 40
_MAX_COUNTED_CLASSES = 20


def draw_evaluation(folder: str | os.PathLike[str], result: "ClassificationResult", data: DataFact) -> list[str]:
    """Write the confusion matrix and the wrongly classified images as PNG; a picture of an earlier run is replaced.

    Returns:
        The names of the files written: no matrix above 1,000 classes, no images where none was wrong.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    if result.confusion_matrix is not None:
        title = " ".join(part for part in (data.name, data.split) if part)
        plot_confusion_matrix(
            result.confusion_matrix, result.label_names, Path(folder) / CONFUSION_MATRIX_NAME, title=title
        )
        written.append(CONFUSION_MATRIX_NAME)
    if result.wrong:
        plot_wrong_images(result.wrong, Path(folder) / WRONG_IMAGES_NAME)
        written.append(WRONG_IMAGES_NAME)
    for name in {CONFUSION_MATRIX_NAME, WRONG_IMAGES_NAME} - set(written):
        (Path(folder) / name).unlink(missing_ok=True)
    return written


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


def _short(name: str, limit: int = 24) -> str:
    name = " ".join(name.split())
    return name if len(name) <= limit else name[: limit - 1] + "…"
