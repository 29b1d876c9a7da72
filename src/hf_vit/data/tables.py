"""Images and what they bear, as they were read: labels, masks or objects, each held against its image."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hf_vit.data.annotations import Target, mask_annotation, object_annotation, run_lengths
from hf_vit.data.images import Seen, image_problem
from hf_vit.data.labels import first_of
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

# What rounding may put a box outside of its image, px; it is cut off.
_ROUNDING = 1.0
RawObjects = dict[str, list[Any]]


@dataclass
class ImageTables:
    """Splits of images with a class each, or a list of classes; of those with masks or objects see below.

    Attributes:
        images: split -> table with the column "image", undecoded, and "label".
        label_names: the classes; None where nothing names them before all was looked at.
        notes: what the user should be told.
        revision: the commit of a data set of the Hub.
    """

    target: ClassVar[Target] = "label"
    images: "dict[str, Dataset]"
    label_names: list[str] | None
    notes: list[str] = field(default_factory=list[str])
    revision: str | None = None
    multi_label: bool = False

    def annotated(self, split: str, row: int, seen: Seen) -> Seen:
        """Return what was seen of a readable image with its annotation, or with what is wrong with that."""
        return seen

    def table(self, split: str, rows: Sequence[int]) -> "Dataset":
        """Return the columns of `ImageData`, "image" undecoded, of the rows that are good."""
        return self.images[split].select(rows)

    def conclude(self, seen: Mapping[str, Sequence[Seen]]) -> None:
        """Complete classes and notes once everything good was seen; refuse data without anything to learn."""
        if self.target == "label":
            return
        there = {split: _numbers(images) for split, images in seen.items()}
        if self.label_names is None:
            highest = max((number for numbers in there.values() for number in numbers), default=0)
            self.label_names = [str(number) for number in range(highest + 1)]
            self.notes.append(f"there are no class names, so classes are named 0 to {highest}")
        if not there.get("train", {0}):
            things = "objects" if self.target == "objects" else "pixels of any class"
            raise UserError(f"no training image has {things}; annotate some")


@dataclass
class MaskTables(ImageTables):
    """Images with a mask each: class numbers, of the image's size.

    Attributes:
        masks: split -> table with the column "mask" (`ClassMask`); a row without a mask has None.
    """

    target: ClassVar[Target] = "mask"
    masks: "dict[str, Dataset]" = field(default_factory=dict[str, "Dataset"])

    def annotated(self, split: str, row: int, seen: Seen) -> Seen:
        try:
            mask = self.masks[split][row]["mask"]
        except Exception as error:
            problem = image_problem(error)
            return replace(seen, problem=f"has {'' if isinstance(error, UserError) else 'a mask that '}{problem}")
        if mask is None:
            return replace(seen, problem="has no mask; add one of the same name")
        if (mask.height, mask.width) != (seen.height, seen.width):
            sizes = f"{mask.height}x{mask.width} px, but is {seen.height}x{seen.width} px"
            return replace(seen, problem=f"has a mask of {sizes}; both must be of one size")
        annotation = mask_annotation(np.asarray(mask))
        names = self.label_names or []
        unknown = [value for value in annotation.amounts if value >= len(self.label_names or range(255))]
        if unknown:
            classes = f"classes 0 to {len(names) - 1} ({first_of(names)}), and 255 for ignored pixels"
            return replace(seen, problem=f"has a mask with the class {max(unknown)}; there are {classes}")
        return replace(seen, annotation=annotation)

    def table(self, split: str, rows: Sequence[int]) -> "Dataset":
        from datasets import concatenate_datasets

        return concatenate_datasets([super().table(split, rows), self.masks[split].select(rows)], axis=1)


@dataclass
class ObjectTables(ImageTables):
    """Images with any number of objects each.

    Attributes:
        objects: split -> for every image {"bbox": [x, y, width, height] px, "category": raw, "area", "iscrowd"} and,
            where `with_masks`, "segmentation": polygons, run lengths or Pillow images as they came; or what is wrong.
        numbers: raw category -> class number.
        sizes: split -> (height, width) px that the annotations were made for, where they tell.
        with_masks: all objects have masks; where only some have, a note tells it.
    """

    target: ClassVar[Target] = "objects"
    objects: dict[str, list[RawObjects | str]] = field(default_factory=dict[str, list[RawObjects | str]])
    numbers: dict[Any, int] = field(default_factory=dict[Any, int])
    sizes: dict[str, list[tuple[int, int] | None]] = field(default_factory=dict[str, list[tuple[int, int] | None]])
    with_masks: bool = field(default=False, init=False)
    # Of every good image what the table will hold.
    _good: dict[tuple[str, int], RawObjects] = field(default_factory=dict[tuple[str, int], RawObjects], repr=False)

    def __post_init__(self) -> None:
        images = [row for rows in self.objects.values() for row in rows if isinstance(row, dict)]
        masks = [mask for row in images for mask in row["segmentation"]]
        missing = sum(mask is None or (isinstance(mask, list | dict) and not mask) for mask in masks)
        self.with_masks = bool(masks) and not missing
        if 0 < missing < len(masks):
            self.notes.append(f"{missing:,} of {len(masks):,} objects have no mask, so boxes alone are used")

    def annotated(self, split: str, row: int, seen: Seen) -> Seen:
        raw = self.objects[split][row]
        size = self.sizes[split][row] if split in self.sizes else None
        if isinstance(raw, str):
            return replace(seen, problem=raw)
        if size is not None and size != (seen.height, seen.width):
            what = f"is {seen.height}x{seen.width} px, but its annotations are for {size[0]}x{size[1]} px"
            return replace(seen, problem=f"{what}; use the images that were annotated")
        try:
            objects = self._checked(raw, seen)
        except UserError as error:
            return replace(seen, problem=f"has {error}")
        self._good[split, row] = objects
        masks = [mask["counts"] for mask in objects["segmentation"]] if self.with_masks else None
        return replace(seen, annotation=object_annotation(objects, masks))

    def _checked(self, raw: RawObjects, seen: Seen) -> RawObjects:
        objects: RawObjects = {"bbox": [_box(box, number, seen) for number, box in enumerate(raw["bbox"], start=1)]}
        for number, category in enumerate(raw["category"], start=1):
            if category not in self.numbers:
                classes = f"{len(self.numbers)} ({first_of(list(map(str, self.numbers)))})"
                raise UserError(f"object {number} of the unknown class {category!r}; there are {classes}")
        objects["category"] = [self.numbers[category] for category in raw["category"]]
        areas = zip(objects["bbox"], raw["area"], strict=True)
        objects["area"] = [box[2] * box[3] if area is None else float(area) for box, area in areas]
        objects["iscrowd"] = [int(bool(crowd)) for crowd in raw["iscrowd"]]
        if self.with_masks:
            objects["segmentation"] = [
                run_lengths(mask, seen.height, seen.width, f"object {number}")
                for number, mask in enumerate(raw["segmentation"], start=1)
            ]
        return objects

    def table(self, split: str, rows: Sequence[int]) -> "Dataset":
        from datasets import Dataset, Features, concatenate_datasets

        from hf_vit.data.mask_features import RunLengthMask, object_features

        features = Features(
            {"objects": object_features(self.label_names or [], RunLengthMask() if self.with_masks else None)}
        )
        objects = Dataset.from_dict({"objects": [self._good[split, row] for row in rows]}, features=features)
        return concatenate_datasets([super().table(split, rows), objects], axis=1)

    def conclude(self, seen: Mapping[str, Sequence[Seen]]) -> None:
        super().conclude(seen)
        for split, images in seen.items():
            without = sum(image.annotation is not None and not image.annotation.amounts for image in images)
            if without:
                self.notes.append(f"{without:,} of {len(images):,} images of {split} have no objects")


def tell_unseen(train: Sequence[Seen], label_names: Sequence[str]) -> list[str]:
    """Return a note on the classes that no training image has, if there are any."""
    learnt = _numbers(train)
    unseen = [name for number, name in enumerate(label_names) if number not in learnt]
    many = f"{len(unseen)} of {len(label_names)} classes ({first_of(unseen)})"
    return [f"{many} are in no training image"] if train and unseen else []


def _numbers(seen: Sequence[Seen]) -> set[int]:
    """Return the classes that some images have."""
    return {number for image in seen if image.annotation for number in image.annotation.amounts}


def _box(box: Any, number: int, seen: Seen) -> list[float]:
    """Return [x, y, width, height] px inside the image, cut where rounding put it outside; refuse any other box."""
    try:
        left, top, width, height = (float(value) for value in box)
    except (TypeError, ValueError):
        left, top, width, height = (math.nan,) * 4
    if not all(map(math.isfinite, (left, top, width, height))):
        raise UserError(f"object {number} with the box {box}; needed: x, y, width and height in px")
    if width <= 0 or height <= 0:
        raise UserError(f"object {number} with an empty box of {width:g}x{height:g} px (width x height)")
    right, bottom = left + width, top + height
    outside = max(-left, -top, right - seen.width, bottom - seen.height)
    inside = min(right, seen.width) > max(left, 0) and min(bottom, seen.height) > max(top, 0)
    if outside > _ROUNDING or not inside:
        raise UserError(
            f"object {number} with a box from ({left:g}, {top:g}) to ({right:g}, {bottom:g}) px, outside the image of "
            f"{seen.width}x{seen.height} px (width x height)"
        )
    if outside <= 0:
        return [left, top, width, height]
    left, top = max(left, 0.0), max(top, 0.0)
    return [left, top, min(right, float(seen.width)) - left, min(bottom, float(seen.height)) - top]
