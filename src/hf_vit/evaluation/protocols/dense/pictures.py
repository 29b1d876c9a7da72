"""What is drawn of dense predictions: masks and boxes over images, the truth beside the answer, the worst first."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from hf_vit.evaluation.protocols.dense.meters import IGNORED
from hf_vit.evaluation.protocols.top1_figures import shortened
from hf_vit.results.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

_SIDE_PX = 320  # of an image in a picture of several
_MASK_STRENGTH = 0.55


def class_colours(count: int) -> list[tuple[int, int, int]]:
    """A colour for each of so many classes, those of neighbouring numbers far apart."""
    import matplotlib

    table = matplotlib.colormaps["hsv"]
    golden = 0.618033988749895  # steps of it around the circle fill it evenly, however many there are
    return [tuple(round(255 * part) for part in table((k * golden) % 1.0)[:3]) for k in range(count)]  # pyright: ignore[reportReturnType]


def paint_classes(image: "Image", classes: torch.Tensor, count: int) -> "Image":
    """An image with the class of every pixel, [H, W] of 0..count-1 (ignored ones stay as they are), as its colour."""
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import draw_segmentation_masks

    there = [k for k in classes.unique().tolist() if k != IGNORED]
    if not there:
        return image
    colours = class_colours(count)
    layers = torch.stack([classes == k for k in there])
    return to_pil_image(draw_segmentation_masks(_pixels(image), layers, _MASK_STRENGTH, [colours[k] for k in there]))


def paint_objects(image: "Image", objects: Mapping[str, torch.Tensor], names: Sequence[str]) -> "Image":
    """An image with boxes [n, 4] px, their classes and scores where there are any, and masks [n, H, W] likewise."""
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    if not len(objects["labels"]):
        return image
    numbers = objects["labels"].tolist()
    palette = class_colours(len(names))
    colours: Any = [palette[k] for k in numbers]
    pixels = _pixels(image)
    if "masks" in objects:
        pixels = draw_segmentation_masks(pixels, objects["masks"].cpu().bool(), _MASK_STRENGTH, colours)
    titles: list[str] = [shortened(str(names[k]), 16) for k in numbers]
    if "scores" in objects:
        titles = [f"{title} {score:.0%}" for title, score in zip(titles, objects["scores"].tolist(), strict=True)]
    return to_pil_image(draw_bounding_boxes(pixels, objects["boxes"].cpu(), titles, colours))


def _pixels(image: "Image") -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


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
