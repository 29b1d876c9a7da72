"""What was understood of a data set before training: classes, counts, sizes, kinds; and images with what they bear."""

import colorsys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from PIL import Image, ImageDraw

from hf_vit.data.annotations import IGNORED
from hf_vit.data.image_data import ImageData, tables_of
from hf_vit.data.images import to_rgb
from hf_vit.data.labels import classes_of

if TYPE_CHECKING:
    from datasets import Dataset

_LOOKED_INTO = 200
# Where the largest class is that many times the smallest, an accuracy hides the small ones.
_UNEVEN = 3
_MAX_CLASSES, _LINE, _NAME_PX, _NAME_LENGTH = 40, 16, 120, 16
_PAIRS = 24
_GOLDEN = 0.618033988749895  # steps of it around the circle of hues fill it evenly, however many there are
_MASK_STRENGTH = 0.55


@dataclass(frozen=True)
class Overview:
    """What was understood of a data set.

    Attributes:
        counts: class -> split -> images; of data with masks pixels, with objects these.
        sizes: smallest, middle and largest (height, width) px, by the number of pixels.
        modes: Pillow's mode ("RGB", "L", "I;16", ...) -> how many of the images that were looked into.
        unit: what is counted.
    """

    counts: dict[str, dict[str, int]]
    sizes: list[tuple[int, int]]
    modes: dict[str, int]
    unit: str = "images"


def overview(data: ImageData) -> Overview:
    """Look over a data set of tables (`load_data` without streaming)."""
    tables = tables_of(data)
    counts = {name: dict.fromkeys(tables, 0) for name in data.label_names}
    for split in tables:
        for label, number in _amounts(data, split).items():
            counts[data.label_names[label]][split] = number
    sizes = sorted(
        ((image.height, image.width) for seen in data.seen.values() for image in seen),
        key=lambda size: size[0] * size[1],
    )
    modes: Counter[str] = Counter()
    for table in tables.values():  # some images of each, evenly spaced
        images = table.select_columns(["image"])
        modes.update(images[row]["image"].mode for row in range(0, len(images), max(1, len(images) // _LOOKED_INTO)))
    unit = {"label": "images", "mask": "pixels", "objects": "objects"}[data.target]
    return Overview(counts, [sizes[0], sizes[len(sizes) // 2], sizes[-1]], dict(modes), unit)


def tell_uneven(data: ImageData) -> list[str]:
    """Return a note if a class has several times the images of another; none of streams, masks and objects."""
    if data.target != "label" or data.readers:
        return []
    amounts = sum((_amounts(data, split) for split in data.splits), Counter[int]())
    numbers = range(len(data.label_names))
    most, least = max(numbers, key=lambda number: amounts[number]), min(numbers, key=lambda number: amounts[number])
    if amounts[most] <= _UNEVEN * amounts[least]:
        return []
    return [
        f"class '{data.label_names[most]}' has {amounts[most]:,} images and '{data.label_names[least]}' "
        f"{amounts[least]:,}: check the accuracy of every class; --class-weights and --balanced-sampling of "
        "hf-vit finetune can help"
    ]


def _amounts(data: ImageData, split: str) -> Counter[int]:
    """Class -> what there is of it in a split: images, pixels or objects."""
    amounts: Counter[int] = Counter()
    if data.target == "label":
        for row in cast("list[int]", list(cast("Dataset", data.splits[split])["label"])):
            amounts.update(classes_of(row))
    for image in data.seen[split] if data.target != "label" else ():
        amounts.update(image.annotation.amounts if image.annotation else {})
    return amounts


def contact_sheet(data: ImageData, columns: int = 8, side: int = 96) -> Image.Image:
    """Return a row a class (of the first 40) with its first images, as the model will see them, and its name.

    Of data with masks or objects the first images in pairs, as they are and with what they bear drawn over them.

    Args:
        data: tables, see `load_data`.
        columns: images a class, or in a row.
        side: px of an image on the sheet.
    """
    if data.target != "label":
        return _annotated_sheet(data, columns, 2 * side)
    table: Any = data.splits.get("train") or next(iter(data.splits.values()))
    rows: dict[int, list[int]] = {}
    for row, labels in enumerate(cast("Sequence[int]", table["label"])):
        for label in classes_of(labels):
            if label < _MAX_CLASSES and len(rows.setdefault(label, [])) < columns:
                rows[label].append(row)
    sheet = Image.new("RGB", (_NAME_PX + columns * side, max(1, len(rows)) * (side + _LINE)), "white")
    pen = ImageDraw.Draw(sheet)
    for line, label in enumerate(sorted(rows)):
        top = line * (side + _LINE)
        pen.text((4, top + side // 2), data.label_names[label][:18], fill="black")
        for column, row in enumerate(rows[label]):
            small = to_rgb(table[row]["image"])
            small.thumbnail((side - 4, side - 4))
            sheet.paste(small, (_NAME_PX + column * side, top + 2))
    return sheet


def _annotated_sheet(data: ImageData, columns: int, side: int) -> Image.Image:
    """Pairs of pictures, and below the names of the first 40 classes in the colors of their masks and boxes."""
    table: Any = data.splits.get("train") or next(iter(data.splits.values()))
    pairs = [pair for row in table.select(range(min(len(table), _PAIRS))) for pair in _pair(data, row, side)]
    lines = -(-len(pairs) // columns)
    names = data.label_names[:_MAX_CLASSES]
    per_line = max(1, columns * side // _NAME_PX)
    legend = -(-len(names) // per_line)
    sheet = Image.new("RGB", (columns * side, lines * side + legend * _LINE), "white")
    for place, picture in enumerate(pairs):
        sheet.paste(picture, (place % columns * side, place // columns * side))
    pen = ImageDraw.Draw(sheet)
    for number, (name, color) in enumerate(zip(names, _palette(len(data.label_names)), strict=False)):
        left, top = number % per_line * _NAME_PX, lines * side + number // per_line * _LINE
        pen.rectangle((left + 2, top + 2, left + _LINE - 2, top + _LINE - 2), fill=color)
        pen.text((left + _LINE + 2, top + 2), name[:_NAME_LENGTH], fill="black")
    return sheet


def _pair(data: ImageData, row: dict[str, Any], side: int) -> tuple[Image.Image, Image.Image]:
    """Return an image, and the same with its mask or objects, in a square of `side` px less a margin."""
    image = to_rgb(row["image"])
    scale = (side - 4) / max(image.size)
    width, height = (max(1, round(scale * length)) for length in image.size)
    shown = image.resize((width, height), Image.Resampling.BILINEAR)
    if data.target == "mask":
        mask = np.array(row["mask"].resize((width, height), Image.Resampling.NEAREST))
        return shown, paint_classes(shown, torch.from_numpy(mask), len(data.label_names))
    objects = row["objects"]
    corners = torch.tensor([[x, y, x + w, y + h] for x, y, w, h in objects["bbox"]]).reshape(-1, 4)
    scaled = {"boxes": corners * scale, "labels": torch.tensor(objects["category"], dtype=torch.int64)}
    if objects.get("segmentation"):
        masks = [mask.resize((width, height), Image.Resampling.NEAREST) for mask in objects["segmentation"]]
        scaled["masks"] = torch.from_numpy(np.stack([np.array(mask) for mask in masks]))
    return shown, paint_objects(shown, scaled, data.label_names)


# ---- masks and boxes painted over their images, by torchvision


def _palette(count: int) -> list[Any]:
    """Return a color for each of so many classes, those of neighboring numbers far apart."""
    hues = [colorsys.hsv_to_rgb(number * _GOLDEN % 1.0, 0.85, 1.0) for number in range(count)]
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in hues]


def paint_classes(image: Image.Image, classes: torch.Tensor, count: int) -> Image.Image:
    """Return an image with the class of every pixel, [H, W] of 0..count-1 (ignored ones stay as they are), as its
    color.
    """
    from torchvision.transforms.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import draw_segmentation_masks

    there = [number for number in classes.unique().tolist() if number != IGNORED]
    if not there:
        return image
    colors = [_palette(count)[number] for number in there]
    layers = torch.stack([classes == number for number in there])
    return to_pil_image(draw_segmentation_masks(pil_to_tensor(to_rgb(image)), layers, _MASK_STRENGTH, colors))


def paint_objects(image: Image.Image, objects: Mapping[str, torch.Tensor], names: Sequence[str]) -> Image.Image:
    """Return an image with objects: "boxes" [n, 4] x1 y1 x2 y2 px, "labels" [n], and "scores", "masks" [n, H, W] if
    any.
    """
    from torchvision.transforms.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    numbers: list[int] = objects["labels"].tolist()
    if not numbers:
        return image
    palette, pixels = _palette(len(names)), pil_to_tensor(to_rgb(image))
    colors: Any = [palette[number] for number in numbers]
    if "masks" in objects:
        pixels = draw_segmentation_masks(pixels, objects["masks"].cpu().bool(), _MASK_STRENGTH, colors)
    titles = [names[number][:_NAME_LENGTH] for number in numbers]
    if "scores" in objects:
        titles = [f"{title} {score:.0%}" for title, score in zip(titles, objects["scores"].tolist(), strict=True)]
    return to_pil_image(draw_bounding_boxes(pixels, objects["boxes"].cpu(), titles, colors, width=2))
