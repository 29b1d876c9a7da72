"""Images with masks or objects: read from sources of any kind into tables, and each held against its image."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from hf_vit.data.annotations import Target, mask_annotation, object_annotation, run_lengths
from hf_vit.data.files import FileNames
from hf_vit.data.images import Seen, image_problem
from hf_vit.data.labels import first_of, plain_label, plain_name
from hf_vit.data.reading import NamedColumns, RawTables, image_table, refuse_places, undecoded
from hf_vit.data.sources import DataSource
from hf_vit.data.splits import SPLITS, split_name
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, Features

_TASKS = {"label": "classification", "mask": "segmentation", "objects": "detection"}
_IMAGES = ("image", "img", "picture", "pixel_values")
_MASKS = ("mask", "annotation", "segmentation_mask", "semantic_mask", "label", "labels", "seg", "gt")
_OBJECTS = ("objects", "annotations", "bboxes")
_FIELDS = {
    "bbox": ("bbox", "boxes", "box", "bboxes"),
    "category": ("category", "categories", "category_id", "label", "labels", "class", "class_id"),
    "area": ("area", "areas"),
    "iscrowd": ("iscrowd", "is_crowd", "crowd"),
    "segmentation": ("segmentation", "segmentations", "mask", "masks"),
}
# What entries of the lists in a file of COCO have at least, with its types.
_ENTRIES: dict[str, dict[str, tuple[type, ...]]] = {
    "images": {"id": (int, str), "file_name": (str,)},
    "annotations": {"image_id": (int, str), "category_id": (int, str), "bbox": (list,)},
    "categories": {"id": (int,), "name": (str, int)},
}
_KINDS = {int: "a whole number", str: "text", list: "a list"}
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
        if turned := sum(image.is_turned for images in seen.values() for image in images):
            many = "1 image is" if turned == 1 else f"{turned:,} images are"
            self.notes.append(
                f"{many} turned upright by the EXIF orientation; what was annotated without it belongs elsewhere"
            )


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
            sizes = f"{mask.height}x{mask.width} px, but is {seen.height}x{seen.width} px{_cause(seen)}"
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

    def conclude(self, seen: Mapping[str, Sequence[Seen]]) -> None:
        super().conclude(seen)
        train = [(image, image.annotation.amounts) for image in seen.get("train", ()) if image.annotation]
        if len(classes := {number for _, amounts in train for number in amounts}) == 1:
            ignored = any(sum(amounts.values()) < image.height * image.width for image, amounts in train)
            remedy = "255 is ignored, so save objects as 1 where they are 255" if ignored else "annotate another one"
            raise UserError(f"the training masks hold one class only ({classes.pop()}); {remedy}")


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
            what = f"is {seen.height}x{seen.width} px{_cause(seen)}, but its annotations are for {size[0]}x{size[1]} px"
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
        objects["area"], objects["iscrowd"] = [], []
        fields = zip(objects["bbox"], raw["area"], raw["iscrowd"], strict=True)
        for number, (box, area, crowd) in enumerate(fields, start=1):
            size = box[2] * box[3] if area is None else _float(area)
            if not math.isfinite(size) or crowd not in (None, 0, 1):
                given = f"area {area!r:.40} and iscrowd {crowd!r:.40}"
                raise UserError(f"object {number} with the {given}; needed: a number, and 0 or 1")
            objects["area"].append(size)
            objects["iscrowd"].append(int(bool(crowd)))
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
        for split in seen:
            boxes = [box for (of_split, _), row in self._good.items() if of_split == split for box in row["bbox"]]
            if boxes and max(max(box[0] + box[2], box[1] + box[3]) for box in boxes) <= 1:
                raise UserError(
                    f"all boxes of {split} lie in the first pixel, as shares of width and height do; needed: px"
                )
        for split, images in seen.items():
            without = sum(image.annotation is not None and not image.annotation.amounts for image in images)
            if without:
                self.notes.append(f"{without:,} of {len(images):,} images of {split} have no objects")


def _cause(seen: Seen) -> str:
    return " after its EXIF orientation turned it" if seen.is_turned else ""


def tell_unseen(train: Sequence[Seen], label_names: Sequence[str]) -> list[str]:
    """Return a note on the classes that no training image has, if there are any."""
    learnt = _numbers(train)
    unseen = [name for number, name in enumerate(label_names) if number not in learnt]
    many = f"{len(unseen)} of {len(label_names)} classes ({first_of(unseen)})"
    return [f"{many} are in no training image"] if train and unseen else []


def _numbers(seen: Sequence[Seen]) -> set[int]:
    """Return the classes that some images have."""
    return {number for image in seen if image.annotation for number in image.annotation.amounts}


def _float(value: Any) -> float:
    """Return a number as a float; NaN for what is none, or too large."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _box(box: Any, number: int, seen: Seen) -> list[float]:
    """Return [x, y, width, height] px inside the image, cut where rounding put it outside; refuse any other box."""
    try:
        left, top, width, height = map(_float, box)
    except (TypeError, ValueError):
        left, top, width, height = (math.nan,) * 4
    if not all(map(math.isfinite, (left, top, width, height))):
        raise UserError(f"object {number} with the box {box!r:.80}; needed: x, y, width and height in px")
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


# ---- reading


def find_target(source: DataSource, target: Target | None) -> Target | None:
    """Return what is learnt from a source where it tells that unopened; None where the columns of its tables tell."""
    if source.kind in ("masks", "coco"):
        has: Target = "mask" if source.kind == "masks" else "objects"
        if target not in (None, has):
            raise UserError(
                f"'{source.name}' is a folder for {_TASKS[has]} ({'images and masks' if has == 'mask' else 'COCO'}), "
                f"not for {_TASKS[target]}; choose --task {_TASKS[has]}, or give other data"
            )
        return has
    if source.kind in ("parquet", "hub"):
        return target
    if target in ("mask", "objects"):
        raise UserError(
            f"'{source.name}' ({source.kind}) has labels, but nothing for {_TASKS[target]}; give a folder as ADE20K's "
            "or COCO's, parquet files or a Hub data set with a column of masks or objects, or 'scenes'"
        )
    return "label"


def read_dense(source: DataSource, opened: RawTables | None, named: NamedColumns, target: Target) -> ImageTables:
    """Return the tables of a source of masks or objects; the label column that the user named is theirs."""
    if opened is None:
        return _read_mask_folder(source) if target == "mask" else _read_coco(source)
    named.check(opened.features or (), source.name)
    tables = (_read_masks if target == "mask" else _read_objects)(opened, source.name, named)
    tables.revision = opened.revision
    for table in tables.images.values():
        refuse_places(table, "image", source)
    for table in tables.masks.values() if isinstance(tables, MaskTables) else ():
        refuse_places(table, "mask", source)
    return tables


# ---- columns of parquet files and data sets of the Hub


def target_of_columns(features: "Features | None") -> Target:
    """Return what the columns of a table are for, where nobody says: objects, a mask, or a label."""
    for target, columns in (("objects", _objects_column), ("mask", _mask_columns)):
        with suppress(UserError):
            columns(features or {}, "", NamedColumns())  # pyright: ignore[reportArgumentType]
            return target  # pyright: ignore[reportReturnType]
    return "label"


def _read_masks(opened: RawTables, name: str, named: NamedColumns) -> MaskTables:
    from hf_vit.data.mask_features import ClassMask

    image, mask = _mask_columns(cast("Features", opened.features), name, named)
    splits, notes = _annotated(opened, mask, name)
    masks = {split: _only(table, mask, "mask").cast_column("mask", ClassMask()) for split, table in splits.items()}
    images = undecoded({split: _only(table, image, "image") for split, table in splits.items()}, "image", name, notes)
    return MaskTables(images, None, notes, masks=masks)


def _read_objects(opened: RawTables, name: str, named: NamedColumns) -> ObjectTables:
    features = cast("Features", opened.features)
    column, fields = _objects_column(features, name, named)
    image = named.image or _first(_IMAGES, features, name, "--image-column")
    splits, notes = _annotated(opened, column, name)
    stored = _stored(features[column])
    columns = {split: table.select_columns([column]).cast_column(column, stored) for split, table in splits.items()}
    raw = {split: [_row(row, fields) for row in table[column]] for split, table in columns.items()}
    values = [value for rows in raw.values() for row in rows if isinstance(row, dict) for value in row["category"]]
    kinds = {type(value) for value in values}
    if len(kinds) > 1 or not kinds <= {int, str}:
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"the categories of '{name}' are of type {shown}; needed: whole numbers or names")
    names = getattr(fields["category"][1], "names", None)
    ordered: list[Any] = sorted(set(values)) if names is None else list(range(len(names)))
    images = undecoded({split: _only(table, image, "image") for split, table in splits.items()}, "image", name, notes)
    numbers = {value: number for number, value in enumerate(ordered)}
    return ObjectTables(images, plain_label(list(map(str, names or ordered))), notes, objects=raw, numbers=numbers)


def _annotated(opened: RawTables, column: str, name: str) -> "tuple[dict[str, Dataset], list[str]]":
    """Return the splits and notes, without splits that hide what is to be learnt, as published test splits do."""
    hidden = [
        split
        for split, table in opened.splits.items()
        if split != "train" and table.data.column(column).null_count == len(table)
    ]
    notes = [f"split '{split}' of '{name}' has nothing in '{column}' and was left out" for split in hidden]
    kept = {split: table for split, table in opened.splits.items() if split not in hidden}
    return kept, [*opened.notes, *notes]


def _only(table: "Dataset", column: str, name: str) -> "Dataset":
    return table.select_columns([column]).rename_columns({} if column == name else {column: name})


def _stored(feature: Any) -> Any:
    """Return a column's type, with pictures as the bytes of their files."""
    from datasets import Image, List

    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, List):
        return List(_stored(feature.feature), length=feature.length)
    return {key: _stored(value) for key, value in feature.items()} if isinstance(feature, Mapping) else feature


def _row(objects: Any, fields: Mapping[str, tuple[str, Any]]) -> RawObjects | str:
    """Return the objects of a row, kept as a list of dictionaries or as a dictionary of lists; or what is wrong
    with them.
    """
    lists: RawObjects
    if isinstance(objects, Mapping):
        lists = {key: list(objects[column] or []) for key, (column, _) in fields.items()}
    else:
        lists = {key: [entry.get(column) for entry in objects or []] for key, (column, _) in fields.items()}
    lists["category"] = plain_label(lists["category"])
    count = len(lists["bbox"])
    for key in _FIELDS:
        if len(lists.setdefault(key, [None] * count)) != count:
            return f"has {count} boxes, but {len(lists[key])} of '{key}'"
    return lists


def _mask_columns(features: "Features", name: str, named: NamedColumns) -> tuple[str, str]:
    """Return the columns of images and of masks."""
    from datasets import Image, Value

    def is_picture(feature: Any) -> bool:
        """Return whether a column holds files, as `datasets` or other programs write them."""
        if isinstance(feature, Value):
            return feature.dtype in ("binary", "large_binary")
        return isinstance(feature, Image) or (isinstance(feature, Mapping) and "bytes" in feature)

    pictures = [column for column, feature in features.items() if is_picture(feature)]
    if named.image and named.label:
        return named.image, named.label
    mask = named.label or next((column for column in _MASKS if column in pictures and column != named.image), None)
    others = [column for column in pictures if column != mask]
    image = named.image or next((column for column in _IMAGES if column in others), None)
    if mask is None and image is not None and len(pictures) == 2:
        mask = next(column for column in pictures if column != image)
    if mask is None or image is None:
        raise UserError(
            f"'{name}' has the columns {', '.join(features)}; needed: one with images and one with masks, "
            "best named 'image' and 'mask', or named with --image-column and --label-column"
        )
    return image, mask


def _objects_column(features: "Features", name: str, named: NamedColumns) -> tuple[str, dict[str, tuple[str, Any]]]:
    """Return the column of objects, and of each of their fields its name and type."""
    column = named.label or _first(_OBJECTS, features, name, "--label-column")
    inside: Any = getattr(features[column], "feature", features[column])
    if isinstance(inside, list | tuple):
        inside = inside[0]
    have: dict[str, Any] = dict(inside) if isinstance(inside, Mapping) else {}
    known = {key: next((field for field in names if field in have), None) for key, names in _FIELDS.items()}
    fields = {key: (field, getattr(have[field], "feature", have[field])) for key, field in known.items() if field}
    if not {"bbox", "category"} <= fields.keys():
        raise UserError(
            f"the column '{column}' of '{name}' has the fields {', '.join(have) or 'none'}; needed: 'bbox' (x, y, "
            "width and height in px) and 'category' of every object"
        )
    return column, fields


def _first(names: tuple[str, ...], features: "Features", name: str, option: str) -> str:
    column = next((column for column in names if column in features), None)
    if column is None:
        raise UserError(
            f"'{name}' has the columns {', '.join(features)}; needed: a column such as '{names[0]}'; or "
            f"name one with {option}"
        )
    return column


# ---- folders of images and masks as ADE20K has them


def _read_mask_folder(source: DataSource) -> MaskTables:
    """Return tables of a folder of images and masks; nothing is decoded or copied, the rows name the files.

    A file objectInfo*.txt names ADE20K's classes, from 1 on, and 0 is not judged. Otherwise classes.txt has a name a
    line for the values from 0 on, or id2label.json {"0": name, ...}.
    """
    from datasets import Dataset, Features

    from hf_vit.data.mask_features import ClassMask

    assert source.root is not None
    names, reduce_labels = _class_names(source.root)
    feature = Features({"mask": ClassMask(reduce_labels=reduce_labels)})
    images: dict[str, Dataset] = {}
    masks: dict[str, Dataset] = {}
    notes: list[str] = []
    for split in (name for name in SPLITS if name in source.folder):
        pictures, drawn = source.folder[split]["images"], source.folder[split]["annotations"]
        key = _key_of(source.root, pictures, drawn)
        beside = {key(path): path for path in drawn}
        paths = [beside.pop(key(path), None) for path in pictures]
        if beside:
            notes.append(f"{len(beside)} masks of {split} have no image, such as {min(beside.values()).name}")
        images[split] = image_table(pictures)
        stored = [None if path is None else {"bytes": None, "path": str(path)} for path in paths]
        masks[split] = Dataset.from_dict({"mask": stored}, features=feature)
    return MaskTables(images, names, notes, masks=masks)


def _key_of(root: Path, *folders: Sequence[Path]) -> Callable[[Path], str]:
    """Return what an image and its mask share: the name without its suffix; with the folders above where names
    repeat.
    """
    if all(len({plain_name(path.stem) for path in paths}) == len(paths) for paths in folders):
        return lambda path: plain_name(path.stem)
    return lambda path: plain_name("/".join(path.relative_to(root).with_suffix("").parts[1:]))


def _class_names(root: Path) -> tuple[list[str] | None, bool]:
    """Return the names of the classes, or None; and whether masks count as ADE20K does."""
    if listed := sorted(root.glob("objectInfo*.txt")):
        lines = [line.rstrip().split("\t") for line in _text(listed[0]).splitlines() if line.strip()]
        # Of a class the first of its names, in the last column.
        names = [plain_name(line[-1].split(",")[0]) for line in lines if line[0].strip().isdigit()]
        if not names:
            needed = "needed: one line per class, with its number first and its name last"
            raise UserError(f"{listed[0].name} names no classes; {needed}")
        return names, True
    if (root / "classes.txt").is_file():
        names = [plain_name(line) for line in _text(root / "classes.txt").splitlines()]
        return [name for name in names if name], False
    if (root / "id2label.json").is_file():
        try:
            read: Any = json.loads(_text(root / "id2label.json"))
            return [plain_name(str(read[str(number)])) for number in range(len(read))], False
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                'id2label.json cannot be read; needed: {"0": name, "1": name, ...} without a gap'
            ) from error
    return None, False


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} cannot be read as text; save it in UTF-8") from error


# ---- COCO's files of annotations


def _read_coco(source: DataSource) -> ObjectTables:
    """Read files of annotations; the images lie where the layout has them."""
    assert source.root is not None
    images: dict[str, Any] = {}
    objects: dict[str, list[RawObjects | str]] = {}
    sizes: dict[str, list[tuple[int, int] | None]] = {}
    categories: dict[Any, str] = {}
    names = FileNames()
    for split in (name for name in SPLITS if name in source.files):
        place = source.files[split][0]
        where = place.name if place.name == source.name else f"{place.name} of '{source.name}'"
        read = _parsed(place, where)
        _add_categories(categories, read["categories"], where)
        listed = _listed_images(read["images"], where)
        files = [image["file_name"] for image in listed.values()]
        folder = _image_folder(source.root, place, split, files, where, names)
        paths = [names.find(folder / file) for file in files]
        source.folder[split] = {"": paths}
        images[split] = image_table(paths)
        objects[split] = _listed_objects(read["annotations"], listed, where)
        both = [(image.get("height"), image.get("width")) for image in listed.values()]
        sizes[split] = [(h, w) if isinstance(h, int) and isinstance(w, int) else None for h, w in both]
    numbers = {category: number for number, category in enumerate(sorted(categories))}
    label_names = [categories[category] for category in sorted(categories)]
    return ObjectTables(images, label_names, objects=objects, numbers=numbers, sizes=sizes)


def _parsed(place: Path, where: str) -> Mapping[str, list[Any]]:
    try:
        read: Any = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read as JSON: {error!s:.120}; write it again") from error
    if not isinstance(read, dict) or not all(isinstance(read.get(key), list) for key in _ENTRIES):
        raise UserError(f"{where} is not a COCO annotation file; needed: lists of {', '.join(_ENTRIES)}")
    for key, needed in _ENTRIES.items():
        for row, entry in enumerate(read[key]):
            for name, kinds in needed.items():
                if not isinstance(entry, dict) or name not in entry:
                    raise UserError(f"{where}: entry {row} of '{key}' has no {name}; add it, or remove the entry")
                if not isinstance(entry[name], kinds):
                    kind = " or ".join(_KINDS[each] for each in kinds)
                    raise UserError(
                        f"{where}: entry {row} of '{key}' has the {name} {entry[name]!r:.80}; needed: {kind}"
                    )
    return read


def _add_categories(categories: dict[Any, str], entries: Sequence[Mapping[str, Any]], where: str) -> None:
    """Add a split's categories; an id has one name, and a name one id, over all splits."""
    for entry in entries:
        number, name = entry["id"], plain_name(str(entry["name"]))
        if categories.setdefault(number, name) != name:
            raise UserError(
                f"{where}: category {number} is '{name}' here and '{categories[number]}' before; use one name"
            )
    twice = [name for name, count in Counter(categories.values()).items() if count > 1]
    if twice:
        raise UserError(f"{where}: two categories are named '{twice[0]}'; give them different names")


def _listed_images(entries: Sequence[dict[str, Any]], where: str) -> dict[Any, dict[str, Any]]:
    listed: dict[Any, dict[str, Any]] = {}
    for entry in entries:
        if entry["id"] in listed:
            raise UserError(f"{where}: two images have the id {entry['id']}; give each its own")
        listed[entry["id"]] = entry
    if not listed:
        raise UserError(f"{where} lists no images; add some")
    return listed


def _listed_objects(
    entries: Sequence[Mapping[str, Any]], listed: Mapping[Any, Any], where: str
) -> list[RawObjects | str]:
    rows: dict[Any, RawObjects] = {number: {key: [] for key in _FIELDS} for number in listed}
    for position, entry in enumerate(entries):
        row = rows.get(entry["image_id"])
        if row is None:
            raise UserError(
                f"{where}: entry {position} of 'annotations' is of the image {entry['image_id']}, which is not "
                "listed; list the image, or remove the entry"
            )
        row["category"].append(entry["category_id"])
        row["iscrowd"].append(entry.get("iscrowd", 0))
        for key in ("bbox", "area", "segmentation"):
            row[key].append(entry.get(key))
    return list(rows.values())


def _image_folder(root: Path, place: Path, split: str, files: Sequence[str], where: str, names: FileNames) -> Path:
    """Find where the images of a file of annotations lie: the place that has most of the first hundred."""
    beside = [place.parent, root, root / "images", place.parent / "images"]
    inside = [folder for parent in (root, root / "images", root.parent) for folder in sorted(parent.glob("*/"))]
    named = [
        folder
        for folder in inside
        if folder.name in place.stem or split_name(folder.name.rstrip("0123456789")) == split
    ]
    counts = {folder: sum(names.find(folder / file).is_file() for file in files[:100]) for folder in (*beside, *named)}
    best = max(counts, key=lambda folder: counts[folder])
    if not counts[best]:
        raise UserError(
            f"the images of {where}, such as {files[0]}, are not there; put them beside it, or into images/ or "
            f"{split}/ of '{root.name}'"
        )
    return best
