"""Masks and boxes painted over their images, by torchvision."""

import colorsys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_vit.data.dense.annotations import IGNORED

if TYPE_CHECKING:
    from PIL.Image import Image

_GOLDEN = 0.618033988749895  # steps of it around the circle of hues fill it evenly, however many there are
_MASK_STRENGTH = 0.55
_NAME_LENGTH = 16


def class_palette(count: int) -> list[tuple[int, int, int]]:
    """A colour for each of so many classes, those of neighbouring numbers far apart."""
    hues = [colorsys.hsv_to_rgb(number * _GOLDEN % 1.0, 0.85, 1.0) for number in range(count)]
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in hues]


def paint_classes(image: "Image", classes: torch.Tensor, count: int) -> "Image":
    """An image with the class of every pixel, [H, W] of 0..count-1 (ignored ones stay as they are), as its colour."""
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import draw_segmentation_masks

    there = [number for number in classes.unique().tolist() if number != IGNORED]
    if not there:
        return image
    palette = class_palette(count)
    layers = torch.stack([classes == number for number in there])
    return to_pil_image(draw_segmentation_masks(_pixels(image), layers, _MASK_STRENGTH, [palette[k] for k in there]))


def paint_objects(image: "Image", objects: Mapping[str, torch.Tensor], names: Sequence[str]) -> "Image":
    """An image with objects: "boxes" [n, 4] x1 y1 x2 y2 px, "labels" [n], and "scores", "masks" [n, H, W] if any."""
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    numbers: list[int] = objects["labels"].tolist()
    if not numbers:
        return image
    palette = class_palette(len(names))
    colours: Any = [palette[number] for number in numbers]
    pixels = _pixels(image)
    if "masks" in objects:
        pixels = draw_segmentation_masks(pixels, objects["masks"].cpu().bool(), _MASK_STRENGTH, colours)
    titles = [names[number][:_NAME_LENGTH] for number in numbers]
    if "scores" in objects:
        titles = [f"{title} {score:.0%}" for title, score in zip(titles, objects["scores"].tolist(), strict=True)]
    return to_pil_image(draw_bounding_boxes(pixels, objects["boxes"].cpu(), titles, colours, width=2))


def _pixels(image: "Image") -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
