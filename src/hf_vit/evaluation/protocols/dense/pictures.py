"""What is drawn of dense predictions: the truth beside the answer, the worst first; and a bar for each class."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import numpy as np

from hf_vit.evaluation.protocols.top1_figures import shortened
from hf_vit.results.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

_SIDE_PX = 320  # of an image in a picture of several


@final
@dataclass(frozen=True, order=True)
class WorstImage:
    """An image that was answered badly: its score, its place among those that judge, truth and answer as pictures."""

    score: float
    index: int
    truth: "Image" = field(compare=False, repr=False)
    answer: "Image" = field(compare=False, repr=False)


@final
class WorstImages:
    """Keeps the images with the lowest scores.

    Args:
        limit: how many.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._heap: list[tuple[float, int, WorstImage]] = []  # the best of them on top

    def add(self, score: float, index: int, paint: "Callable[[], tuple[Image, Image]]") -> None:
        """Consider an image; NaN is no score. `paint` gives truth and answer, and is asked only if it is kept."""
        if score != score or (len(self._heap) >= self.limit and (not self._heap or -score <= self._heap[0][0])):
            return
        truth, answer = map(_smaller, paint())
        heapq.heappush(self._heap, (-score, -index, WorstImage(score, index, truth, answer)))
        if len(self._heap) > self.limit:
            heapq.heappop(self._heap)

    def kept(self) -> list[WorstImage]:
        """The worst first."""
        return sorted(entry for _, _, entry in self._heap)


def _smaller(image: "Image") -> "Image":
    small = image.copy()
    small.thumbnail((_SIDE_PX, _SIDE_PX))
    return small


def draw_worst(worst: Sequence[WorstImage], measure: str) -> "Figure":
    """The truth on the left of the answer, an image a row, the worst first; `measure`: what its score is called."""
    figure = new_figure(6.4, 3.2 * len(worst))
    for row, entry in enumerate(worst):
        titles = (f"image {entry.index}: truth", f"answer, {measure} {entry.score:.2%}")
        for column, (picture, title) in enumerate(zip((entry.truth, entry.answer), titles, strict=True)):
            axes = figure.add_subplot(len(worst), 2, 2 * row + column + 1)
            axes.imshow(np.asarray(picture), interpolation="nearest")
            axes.set_axis_off()
            axes.set_title(title, fontsize=9, parse_math=False)
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
