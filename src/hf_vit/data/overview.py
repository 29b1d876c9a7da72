"""Summarize a data set before training: classes, counts, sizes and modes; and draw images with their annotations."""

import colorsys
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from PIL import Image, ImageDraw

from hf_vit.data.annotations import IGNORED
from hf_vit.data.image_data import ImageData, get_tables
from hf_vit.data.images import decode_image, to_rgb, undecode_images
from hf_vit.data.labels import list_classes, list_column

if TYPE_CHECKING:
    from datasets import Dataset

_MODE_SAMPLE = 200  # images of a split whose mode is read
# If the largest class has more than this many times the images of the smallest, a mean accuracy hides small classes.
_IMBALANCE = 3
_MAX_CLASSES, _ROW_PX, _NAME_PX, _NAME_LENGTH = 40, 16, 120, 16
_COLUMNS, _SIDE = 8, 96  # pictures in a row of a contact sheet, and px of their sides
_SAMPLE_ROWS = 24
_GOLDEN = 0.618033988749895  # steps of the golden ratio spread any number of hues evenly around the color circle
_MASK_STRENGTH = 0.55


@dataclass(frozen=True)
class Overview:
    """Summary of a data set.

    Attributes:
        counts: class -> split -> number of images, of pixels (masks) or of objects.
        sizes: smallest, median and largest (height, width) px, by the number of pixels.
        modes: Pillow's mode ("RGB", "L", "I;16", ...) -> number of images in a sample.
        unit: unit of the counts.
    """

    counts: dict[str, dict[str, int]]
    sizes: list[tuple[int, int]]
    modes: dict[str, int]
    unit: str = "images"


def overview(data: ImageData) -> Overview:
    """Summarize a data set of tables (`load_data` without streaming)."""
    tables = get_tables(data)
    classes = {split: _count_classes(data, split) for split in tables}
    counts = {name: {split: classes[split][label] for split in tables} for label, name in enumerate(data.label_names)}
    sizes = [(image.height, image.width) for scans in data.seen.values() for image in scans]
    sizes.sort(key=lambda size: (size[0] * size[1], size))
    modes: Counter[str] = Counter()
    for table in tables.values():
        images = table.select_columns(["image"])
        every_nth = max(1, len(images) // _MODE_SAMPLE)
        modes.update(images[row]["image"].mode for row in range(0, len(images), every_nth))
    unit = {"label": "images", "mask": "pixels", "objects": "objects"}[data.target]
    return Overview(counts, [sizes[0], sizes[len(sizes) // 2], sizes[-1]], dict(modes), unit)


def note_imbalance(data: ImageData) -> list[str]:
    """Return a note if a class has several times the images of another; no note for streams, masks and objects."""
    if data.target != "label" or data.readers:
        return []
    counts = sum((_count_classes(data, split) for split in data.splits), Counter[int]())
    labels = range(len(data.label_names))
    large = max(labels, key=lambda number: counts[number])
    small = min(labels, key=lambda number: counts[number])
    if counts[large] <= _IMBALANCE * counts[small]:
        return []
    return [
        f"class '{data.label_names[large]}' has {counts[large]:,} images and class '{data.label_names[small]}' only "
        f"{counts[small]:,}; check the accuracy of every class, and try --class-weights or --balanced-sampling of "
        "hf-vit finetune"
    ]


def _count_classes(data: ImageData, split: str) -> Counter[int]:
    """Count the images, pixels or objects of every class in a split."""
    counts: Counter[int] = Counter()
    if data.target == "label":
        for label in list_column(cast("Dataset", data.splits[split]), "label"):
            counts.update(list_classes(label))
        return counts
    for image in data.seen[split]:
        counts.update(image.annotation.amounts if image.annotation else {})
    return counts


def draw_contact_sheet(data: ImageData) -> Image.Image:
    """Draw the first images of a data set of tables on one sheet.

    For data with labels, every row shows the name and images of a class (of the first 40). For data with masks or
    objects, every image is followed by the same image with its annotation, twice as large.
    """
    table = undecode_images(data.splits.get("train") or next(iter(data.splits.values())))
    if data.target != "label":
        return _draw_annotated_sheet(data, table)
    rows: dict[int, list[int]] = {}
    for row, labels in enumerate(list_column(table, "label")):
        for label in list_classes(labels):
            if label < _MAX_CLASSES and len(rows.setdefault(label, [])) < _COLUMNS:
                rows[label].append(row)
    sheet = Image.new("RGB", (_NAME_PX + _COLUMNS * _SIDE, max(1, len(rows)) * (_SIDE + _ROW_PX)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, label in enumerate(sorted(rows)):
        top = index * (_SIDE + _ROW_PX)
        pen.text((4, top + _SIDE // 2), data.label_names[label][:18], fill="black")
        for column, row in enumerate(rows[label]):
            small = decode_image(table[row]["image"])
            small.thumbnail((_SIDE - 4, _SIDE - 4))
            sheet.paste(small, (_NAME_PX + column * _SIDE, top + 2))
    return sheet


def _draw_annotated_sheet(data: ImageData, table: Any) -> Image.Image:
    """Draw the first 24 images, each without and with annotations, above a legend of the first 40 classes."""
    side = 2 * _SIDE
    pictures: list[Image.Image] = []
    for row in table.select(range(min(len(table), _SAMPLE_ROWS))):
        pictures += _draw_pair(data, row, side)
    names = data.label_names[:_MAX_CLASSES]
    names_per_row = _COLUMNS * side // _NAME_PX
    legend_top = math.ceil(len(pictures) / _COLUMNS) * side
    legend_height = math.ceil(len(names) / names_per_row) * _ROW_PX
    sheet = Image.new("RGB", (_COLUMNS * side, legend_top + legend_height), "white")
    for index, picture in enumerate(pictures):
        row_index, column = divmod(index, _COLUMNS)
        sheet.paste(picture, (column * side, row_index * side))
    pen = ImageDraw.Draw(sheet)
    for index, (name, color) in enumerate(zip(names, _make_palette(len(data.label_names)), strict=False)):
        row_index, column = divmod(index, names_per_row)
        left, top = column * _NAME_PX, legend_top + row_index * _ROW_PX
        pen.rectangle((left + 2, top + 2, left + _ROW_PX - 2, top + _ROW_PX - 2), fill=color)  # a margin of 2 px
        pen.text((left + _ROW_PX + 2, top + 2), name[:_NAME_LENGTH], fill="black")
    return sheet


def _draw_pair(data: ImageData, row: dict[str, Any], side: int) -> tuple[Image.Image, Image.Image]:
    """Return an image without and with its mask or objects, scaled to fit a square of `side` px with a margin."""
    image = decode_image(row["image"])
    scale = (side - 4) / max(image.size)
    width, height = (max(1, round(scale * length)) for length in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    if data.target == "mask":
        mask = np.array(row["mask"].resize((width, height), Image.Resampling.NEAREST))
        return resized, paint_classes(resized, torch.from_numpy(mask), len(data.label_names))
    objects = row["objects"]
    corners = torch.tensor([[x, y, x + w, y + h] for x, y, w, h in objects["bbox"]]).reshape(-1, 4)
    scaled_objects = {"boxes": corners * scale, "labels": torch.tensor(objects["category"], dtype=torch.int64)}
    if objects.get("segmentation"):
        masks = [mask.resize((width, height), Image.Resampling.NEAREST) for mask in objects["segmentation"]]
        scaled_objects["masks"] = torch.from_numpy(np.stack([np.array(mask) for mask in masks]))
    return resized, paint_objects(resized, scaled_objects, data.label_names)


# ---- masks and boxes over their images, drawn by torchvision


def _make_palette(count: int) -> list[Any]:
    """Return `count` colors (red, green, blue) of which neighboring ones differ strongly."""
    hues = [colorsys.hsv_to_rgb(number * _GOLDEN % 1.0, 0.85, 1.0) for number in range(count)]
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in hues]


def paint_classes(image: Image.Image, classes: torch.Tensor, count: int) -> Image.Image:
    """Draw the class of every pixel, [H, W], over an image; ignored pixels keep their color, `count` is all classes."""
    from torchvision.transforms.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import draw_segmentation_masks

    present = [number for number in classes.unique().tolist() if number != IGNORED or count > IGNORED]
    if not present:
        return image
    colors = [_make_palette(count)[number] for number in present]
    layers = torch.stack([classes == number for number in present])
    return to_pil_image(draw_segmentation_masks(pil_to_tensor(to_rgb(image)), layers, _MASK_STRENGTH, colors))


def paint_objects(image: Image.Image, objects: Mapping[str, torch.Tensor], names: Sequence[str]) -> Image.Image:
    """Draw objects over an image.

    They have "boxes" [n, 4] x1 y1 x2 y2 px and "labels" [n], and may have "scores" [n] and "masks" [n, H, W].
    """
    from torchvision.transforms.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    numbers: list[int] = objects["labels"].tolist()
    if not numbers:
        return image
    palette = _make_palette(len(names))
    pixels = pil_to_tensor(to_rgb(image))
    colors: Any = [palette[number] for number in numbers]
    if "masks" in objects:
        pixels = draw_segmentation_masks(pixels, objects["masks"].cpu().bool(), _MASK_STRENGTH, colors)
    titles = [names[number][:_NAME_LENGTH] for number in numbers]
    if "scores" in objects:
        titles = [f"{title} {score:.0%}" for title, score in zip(titles, objects["scores"].tolist(), strict=True)]
    width = max(2, max(image.size) // 320)  # px, so that a plot that shrinks a photograph still shows its boxes
    return to_pil_image(draw_bounding_boxes(pixels, objects["boxes"].cpu(), titles, colors, width=width))
