"""What was understood of a data set, before anything is trained on it: classes, counts, sizes, kinds, and a look."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image, ImageDraw

from hf_vit.data.image_data import ImageData
from hf_vit.data.images import to_rgb
from hf_vit.data.labels import classes_of

if TYPE_CHECKING:
    from datasets import Dataset

_LOOKED_INTO = 200
# Where the largest class is that many times the smallest, an accuracy hides the small ones.
_UNEVEN = 3
_MAX_CLASSES, _LINE, _NAME_PX = 40, 16, 120


@dataclass(frozen=True)
class Overview:
    """What was understood of a data set.

    Attributes:
        counts: class -> split -> images.
        sizes: smallest, middle and largest (height, width) px, by the number of pixels.
        modes: Pillow's mode ("RGB", "L", "I;16", ...) -> how many of the images that were looked into.
        remarks: what may surprise.
    """

    counts: dict[str, dict[str, int]]
    sizes: list[tuple[int, int]]
    modes: dict[str, int]
    remarks: list[str] = field(default_factory=list[str])


def overview(data: ImageData) -> Overview:
    """Look over a data set of tables (`load_data` without streaming)."""
    tables = cast("dict[str, Dataset]", data.splits)
    counts = {name: dict.fromkeys(tables, 0) for name in data.label_names}
    for split, table in tables.items():
        rows = cast("list[int]", list(table["label"]))
        for label, number in Counter(each for row in rows for each in classes_of(row)).items():
            counts[data.label_names[label]][split] = number
    sizes = sorted(
        ((image.height, image.width) for seen in data.seen.values() for image in seen),
        key=lambda size: size[0] * size[1],
    )
    modes, remarks = _look_into(list(tables.values()))
    totals = {name: sum(parts.values()) for name, parts in counts.items()}
    most, least = max(totals, key=lambda name: totals[name]), min(totals, key=lambda name: totals[name])
    if totals[most] > _UNEVEN * totals[least]:
        remarks.append(
            f"class '{most}' has {totals[most]:,} images and '{least}' {totals[least]:,}: look at every class, "
            "and see --class-weights and --balanced-sampling of hf-vit finetune"
        )
    return Overview(counts, [sizes[0], sizes[len(sizes) // 2], sizes[-1]], modes, remarks)


def _look_into(tables: "Sequence[Dataset]") -> tuple[dict[str, int], list[str]]:
    """The modes of some images of each table, evenly spaced; and whether those of 16 bits use them."""
    modes: Counter[str] = Counter()
    brightest = 0
    chosen = [(table, row) for table in tables for row in range(0, len(table), max(1, len(table) // _LOOKED_INTO))]
    for table, row in chosen:
        image: Image.Image = table[row]["image"]
        modes[image.mode] += 1
        if image.mode.startswith("I"):
            brightest = max(brightest, int(np.asarray(image).max()))
    remarks: list[str] = []
    if 0 < brightest < 1 << 14:
        remarks.append(
            f"images of 16 bits reach {brightest:,} of 65,535, so they are seen in {brightest / 65535:.0%} of the "
            "brightness; multiply them (all by the same number) if their full range is less than 16 bits"
        )
    return dict(modes), remarks


def contact_sheet(data: ImageData, columns: int = 8, side: int = 96) -> Image.Image:
    """A row a class (of the first 40) with its first images, as the model will see them, and its name.

    Args:
        data: tables, see `load_data`.
        columns: images a class.
        side: px of an image on the sheet.
    """
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
