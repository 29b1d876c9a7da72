"""The pictures of top-1: the confusion matrix, and the images that were classified wrongly."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, final

from hf_vit.evaluation.reading import PICTURED_PX
from hf_vit.results.figures import new_figure

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from PIL.Image import Image

_MAX_NAMED_CLASSES = 40
_MAX_COUNTED_CLASSES = 20


@final
@dataclass(frozen=True, order=True)
class WrongImage:
    """A wrongly classified image: its place among those that judge, its true and its predicted class.

    `confidence` is the probability of the latter, `file` the name it has where the data is made of files.
    """

    confidence: float
    index: int
    label: str
    prediction: str
    thumbnail: "Image | None" = field(default=None, compare=False, repr=False)
    file: str | None = field(default=None, compare=False)


def plot_confusion_matrix(matrix: "NDArray[np.int64]", label_names: Sequence[str], title: str = "") -> "Figure":
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
        names = [shortened(name) for name in label_names]
        axes.set_xticks(range(size), labels=names, rotation=90, parse_math=False)
        axes.set_yticks(range(size), labels=names, parse_math=False)
    if size <= _MAX_COUNTED_CLASSES:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            colour = "white" if share[row, column] > 0.5 else "black"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=colour, fontsize=8)
    if title:
        axes.set_title(title, parse_math=False)
    return figure


def plot_wrong_images(wrong: Sequence[WrongImage], limit: int = 25) -> "Figure":
    """Draw the most confident mistakes as a grid: image, "true → predicted", probability of the predicted class."""
    shown = [entry for entry in wrong if entry.thumbnail is not None][:limit]
    return draw_images([entry.thumbnail for entry in shown], [_title_of(entry) for entry in shown])


def _title_of(entry: WrongImage) -> str:
    name = f"image {entry.index}" if entry.file is None else shortened(entry.file)
    answers = f"{shortened(entry.label, 16)} → {shortened(entry.prediction, 16)}"
    return f"{answers}\n{entry.confidence:.0%} · {name}"


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


def thumbnail_of(image: "Image") -> "Image":
    """A small copy."""
    small = image.copy()
    small.thumbnail((PICTURED_PX, PICTURED_PX))
    return small


def shortened(name: str, limit: int = 24) -> str:
    """A name as it fits a picture."""
    name = " ".join(name.split())
    return name if len(name) <= limit else name[: limit - 1] + "…"
