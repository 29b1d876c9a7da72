"""Read images with masks or objects from any source into tables, and check every annotation against its image."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from hf_vit.data.annotations import LABELED, Target, encode_mask, summarize_mask, summarize_objects
from hf_vit.data.files import FileNames
from hf_vit.data.images import ImageScan, describe_image_problem
from hf_vit.data.labels import list_column, normalize_label, normalize_name, summarize_names
from hf_vit.data.pixels import encode_images
from hf_vit.data.reading import NamedColumns, RawTables, make_image_table, refuse_foreign_images
from hf_vit.data.sources import DataSource
from hf_vit.data.splits import SPLITS, split_name
from hf_vit.environment import require
from hf_vit.errors import UnlabeledError, UserError

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
# Required keys of the entries in a COCO file's lists, with their types.
_ENTRIES: dict[str, dict[str, tuple[type, ...]]] = {
    "images": {"id": (int, str), "file_name": (str,)},
    "annotations": {"image_id": (int, str), "category_id": (int, str), "bbox": (list,)},
    "categories": {"id": (int,), "name": (str, int)},
}
_TYPE_NAMES = {int: "a whole number", str: "text", list: "a list"}
# A box may extend this far outside of its image, px, because of rounding; it is cut at the border.
_ROUNDING = 1.0
RawObjects = dict[str, list[Any]]


@dataclass
class ImageTables:
    """Splits of images with a class or a list of classes; the subclasses have masks or objects instead.

    Attributes:
        images: split -> table with the undecoded column "image", and "label".
        label_names: the classes; None if they are known only after all images are scanned.
        notes: for the user.
        revision: commit of a Hub data set.
        multi_label: labels are lists of classes.
    """

    target: ClassVar[Target] = "label"
    images: "dict[str, Dataset]"
    label_names: list[str] | None
    notes: list[str] = field(default_factory=list[str])
    revision: str | None = None
    multi_label: bool = False

    def annotate(self, split: str, row: int, scan: ImageScan) -> ImageScan:
        """Return the scan of a readable image with its annotation, or with the problem of the annotation."""
        return scan

    def select_rows(self, split: str, rows: Sequence[int]) -> "Dataset":
        """Return a table with the columns of `ImageData`, "image" undecoded, for the rows of good images."""
        table = self.images[split]
        return table if len(rows) == len(table) else table.select(np.asarray(rows))

    def conclude(self, scans: Mapping[str, Sequence[ImageScan]]) -> None:
        """Complete the classes and notes from the scans of all good images.

        Raises UserError if no training image has an object or a pixel with a class.
        """
        if self.target == "label":
            return
        classes = {split: _find_classes(images) for split, images in scans.items()}
        if self.label_names is None:
            highest = max(set().union(*classes.values()), default=0)
            self.label_names = [str(number) for number in range(highest + 1)]
            self.notes.append(f"the data has no class names, so the classes are named 0 to {highest}")
        if not classes.get("train", {0}):
            raise UserError(f"no training image has {LABELED[self.target]}; annotate some of the training images")
        num_turned = sum(scan.is_turned for images in scans.values() for scan in images)
        if num_turned:
            share = "1 image was" if num_turned == 1 else f"{num_turned:,} images were"
            self.notes.append(f"{share} rotated as the EXIF orientation says; annotations must fit the rotated images")


@dataclass
class MaskTables(ImageTables):
    """Splits of images with a mask of class numbers.

    Attributes:
        masks: split -> table with the column "mask" (`ClassMask`), which is None for images without a mask.
    """

    target: ClassVar[Target] = "mask"
    masks: "dict[str, Dataset]" = field(default_factory=dict[str, "Dataset"])

    def annotate(self, split: str, row: int, scan: ImageScan) -> ImageScan:
        """Add the classes of its mask to the scan of an image, or the problem of the mask."""
        try:
            mask = self.masks[split][row]["mask"]
        except UserError as error:  # its text names the mask
            return replace(scan, problem=f"has {describe_image_problem(error)}")
        except Exception as error:
            return replace(scan, problem=f"has a mask that {describe_image_problem(error)}")
        if mask is None:
            return replace(scan, problem="has no mask; add a mask with the same name")
        if (mask.height, mask.width) != (scan.height, scan.width):
            contrast = f"{mask.height}x{mask.width} px, but is {scan.height}x{scan.width} px{_explain_size(scan)}"
            return replace(scan, problem=f"has a mask of {contrast}; both must have the same size")
        annotation = summarize_mask(np.asarray(mask))
        names = self.label_names
        highest = max(annotation.amounts, default=0)
        if names and highest >= len(names):  # without names every number is a class
            class_range = f"classes 0 to {len(names) - 1} ({summarize_names(names)}), and 255 for ignored pixels"
            return replace(scan, problem=f"has a mask with the class {highest}; there are {class_range}")
        return replace(scan, annotation=annotation)

    def select_rows(self, split: str, rows: Sequence[int]) -> "Dataset":
        from datasets import concatenate_datasets

        return concatenate_datasets([super().select_rows(split, rows), self.masks[split].select(rows)], axis=1)

    def conclude(self, scans: Mapping[str, Sequence[ImageScan]]) -> None:
        """Raise a UserError if the training masks hold only one class."""
        super().conclude(scans)
        train = scans.get("train", ())
        classes = _find_classes(train)
        if len(classes) == 1:
            labeled = ((sum(scan.annotation.amounts.values()), scan) for scan in train if scan.annotation)
            has_ignored = any(num_pixels < scan.height * scan.width for num_pixels, scan in labeled)
            remedy = "255 is ignored, so write objects with 1 instead" if has_ignored else "annotate a second class"
            raise UserError(f"the training masks hold only one class ({classes.pop()}); {remedy}")


@dataclass
class ObjectTables(ImageTables):
    """Splits of images with any number of objects.

    Attributes:
        objects: split -> for every image {"bbox": [x, y, width, height] px, "category": raw label, "area", "iscrowd"}
            and "segmentation" (polygons, run lengths or image files); or the problem of its annotations.
        numbers: raw category -> class number.
        sizes: split -> (height, width) px that the annotations were made for, or None.
        with_masks: whether all objects have masks; if only some have, a note says that masks are not used.
    """

    target: ClassVar[Target] = "objects"
    objects: dict[str, list[RawObjects | str]] = field(default_factory=dict[str, list[RawObjects | str]])
    numbers: dict[Any, int] = field(default_factory=dict[Any, int])
    sizes: dict[str, list[tuple[int, int] | None]] = field(default_factory=dict[str, list[tuple[int, int] | None]])
    with_masks: bool = field(default=False, init=False)
    # (split, row) -> checked objects of a good image.
    _checked: dict[tuple[str, int], RawObjects] = field(default_factory=dict[tuple[str, int], RawObjects], repr=False)

    def __post_init__(self) -> None:
        """Set `with_masks`, and note how many objects lack a mask."""
        images = [row for rows in self.objects.values() for row in rows if isinstance(row, dict)]
        masks = [mask for row in images for mask in row["segmentation"]]
        missing = sum(mask in (None, [], {}) for mask in masks)
        self.with_masks = bool(masks) and not missing
        if self.with_masks:
            require("pycocotools", purpose="reading masks of objects")
        if 0 < missing < len(masks):
            self.notes.append(f"{missing:,} of {len(masks):,} objects have no mask, so only the boxes are used")

    def annotate(self, split: str, row: int, scan: ImageScan) -> ImageScan:
        """Add the classes of its objects to the scan of an image, or the problem of its annotations."""
        raw = self.objects[split][row]
        size = self.sizes[split][row] if split in self.sizes else None
        if isinstance(raw, str):
            return replace(scan, problem=raw)
        if size is not None and size != (scan.height, scan.width):
            problem = f"is {scan.height}x{scan.width} px{_explain_size(scan)}, but its annotations are for"
            return replace(scan, problem=f"{problem} {size[0]}x{size[1]} px; use the images that were annotated")
        try:
            objects = self._check(raw, scan)
        except UserError as error:
            return replace(scan, problem=f"has {error}")
        self._checked[split, row] = objects
        masks = [mask["counts"] for mask in objects["segmentation"]] if self.with_masks else None
        return replace(scan, annotation=summarize_objects(objects, masks))

    def _check(self, raw: RawObjects, scan: ImageScan) -> RawObjects:
        """Return the objects of an image with class numbers, areas and encoded masks; raise UserError for a bad one."""
        objects: RawObjects = {"bbox": [_check_box(box, i, scan) for i, box in enumerate(raw["bbox"], start=1)]}
        for number, category in enumerate(raw["category"], start=1):
            if category not in self.numbers:
                classes = f"{len(self.numbers)} classes ({summarize_names(list(map(str, self.numbers)))})"
                raise UserError(f"object {number} of the unknown class {category!r}; use one of {classes}")
        objects["category"] = [self.numbers[category] for category in raw["category"]]
        covered_areas = [width * height for _, _, width, height in objects["bbox"]]
        if self.with_masks:
            masks = enumerate(raw["segmentation"], start=1)
            pairs = [encode_mask(mask, scan.height, scan.width, f"object {i}") for i, mask in masks]
            objects["segmentation"], covered_areas = [mask for mask, _ in pairs], [area for _, area in pairs]
        objects["area"], objects["iscrowd"] = [], []
        fields = zip(covered_areas, raw["area"], raw["iscrowd"], strict=True)
        for number, (covered_area, area, crowd) in enumerate(fields, start=1):
            size = covered_area if area is None else _to_float(area)
            if not math.isfinite(size) or crowd not in (None, 0, 1):
                values = f"area {area!r:.40} and iscrowd {crowd!r:.40}"
                raise UserError(f"object {number} with the {values}; write a number for area, and 0 or 1 for iscrowd")
            objects["area"].append(size)
            objects["iscrowd"].append(int(bool(crowd)))
        return objects

    def select_rows(self, split: str, rows: Sequence[int]) -> "Dataset":
        """Return these rows of a split with their checked objects in the column "objects"."""
        from datasets import Dataset, Features, concatenate_datasets

        from hf_vit.data.mask_features import RunLengthMask, make_object_features

        mask_type = RunLengthMask() if self.with_masks else None
        features = Features({"objects": make_object_features(self.label_names or [], mask_type)})
        objects = Dataset.from_dict({"objects": [self._checked[split, row] for row in rows]}, features=features)
        return concatenate_datasets([super().select_rows(split, rows), objects], axis=1)

    def conclude(self, scans: Mapping[str, Sequence[ImageScan]]) -> None:
        """Raise a UserError for boxes that look like shares, and note how many images have no objects."""
        super().conclude(scans)
        for split, images in scans.items():
            objects = [row for (row_split, _), row in self._checked.items() if row_split == split]
            ends = [max(x + width, y + height) for row in objects for x, y, width, height in row["bbox"]]
            if ends and max(ends) <= 2:  # the sum of two shares, where they are centers (YOLO) or two corners
                raise UserError(
                    f"all boxes of {split} are in the first two pixels, as if they were shares of width and height; "
                    "write x, y, width and height in px"
                )
            if crowds := sum(sum(row["iscrowd"]) for row in objects):  # CVAT exports each mask as one
                share = f"{crowds:,} of {len(ends):,} objects in {split} are crowds (iscrowd 1)"
                self.notes.append(f"{share}, which a training leaves out and AP ignores")
            empty = sum(image.annotation is not None and not image.annotation.amounts for image in images)
            if empty:
                self.notes.append(f"{empty:,} of {len(images):,} images in {split} have no objects")


def _explain_size(scan: ImageScan) -> str:
    """Return a remark on a size that the EXIF orientation changed, else ""."""
    return " after its EXIF orientation rotated it" if scan.is_turned else ""


def note_missing_classes(train: Sequence[ImageScan], label_names: Sequence[str]) -> list[str]:
    """Return a note on the classes without a training image, if there are any."""
    present = _find_classes(train)
    missing = [name for number, name in enumerate(label_names) if number not in present]
    share = f"{len(missing)} of {len(label_names)} classes ({summarize_names(missing)})"
    return [f"{share} are in no training image"] if train and missing else []


def _find_classes(scans: Sequence[ImageScan]) -> set[int]:
    """Return the classes that occur in the annotations of images."""
    return {number for image in scans if image.annotation for number in image.annotation.amounts}


def _to_float(value: Any) -> float:
    """Convert a number to a float; anything else, or a number that is too large, gives NaN."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _check_box(box: Any, number: int, scan: ImageScan) -> list[float]:
    """Return a box [x, y, width, height] px, cut at the image's border if rounding put it slightly outside.

    Raises UserError if it is empty, not four finite numbers, or farther outside; the text continues "image NAME has".
    """
    try:
        left, top, width, height = map(_to_float, box)
    except (TypeError, ValueError):
        left, top, width, height = (math.nan,) * 4
    if not all(map(math.isfinite, (left, top, width, height))):
        raise UserError(f"object {number} with the box {box!r:.80}; write x, y, width and height in px")
    if width <= 0 or height <= 0:
        raise UserError(
            f"object {number} with an empty box of {width:g}x{height:g} px (width x height); correct or remove the box"
        )
    right, bottom = left + width, top + height
    excess = max(-left, -top, right - scan.width, bottom - scan.height)
    is_visible = min(right, scan.width) > max(left, 0) and min(bottom, scan.height) > max(top, 0)
    if excess > _ROUNDING or not is_visible:
        raise UserError(
            f"object {number} with a box from ({left:g}, {top:g}) to ({right:g}, {bottom:g}) px, outside the "
            f"image of {scan.width}x{scan.height} px (width x height); write boxes as x, y, width and height "
            "in px, not as two corners"
        )
    if excess <= 0:
        return [left, top, width, height]
    left, top = max(left, 0.0), max(top, 0.0)
    return [left, top, min(right, float(scan.width)) - left, min(bottom, float(scan.height)) - top]


# ---- reading


def find_target(source: DataSource, target: Target | None) -> Target | None:
    """Return what to learn from a source, or None if only the columns of its tables show that."""
    if source.kind in ("masks", "coco"):
        available: Target = "mask" if source.kind == "masks" else "objects"
        if target not in (None, available):
            layout = "images and masks" if available == "mask" else "COCO"
            raise UnlabeledError(
                f"'{source.name}' is a folder for {_TASKS[available]} ({layout}), not for {_TASKS[target]}; choose "
                f"--task {_TASKS[available]}, or give other data"
            )
        return available
    if source.kind in ("parquet", "hub"):
        return target
    if target in ("mask", "objects"):
        remedies = {
            "mask": "a folder of images and masks (ADE20K), or parquet files with a column of masks",
            "objects": "a folder with COCO annotations, or parquet files with a column of objects",
        }
        problem = f"'{source.name}' ({source.kind}) has labels, but no annotations for {_TASKS[target]}"
        raise UserError(f"{problem}; give {remedies[target]}")
    return "label"


def read_dense(source: DataSource, opened: RawTables | None, selection: NamedColumns, target: Target) -> ImageTables:
    """Return the tables of a source of masks or objects; `selection.label` is the column of masks or objects."""
    if opened is None:
        return _read_mask_folder(source) if target == "mask" else _read_coco(source)
    selection.check(opened.features or (), source.name)
    read = _read_masks if target == "mask" else _read_objects
    tables = read(opened, source.name, selection)
    tables.revision = opened.revision
    masks = tables.masks if isinstance(tables, MaskTables) else {}
    for column, splits in (("image", tables.images), ("mask", masks)):
        for table in splits.values():
            refuse_foreign_images(table, column, source)
    return tables


# ---- columns of parquet files and data sets of the Hub


def infer_target(features: "Features | None", selection: NamedColumns) -> Target:
    """Infer from the columns of a table, or the one that is named, whether it has objects, masks or labels."""
    columns = cast("Features", features or {})
    with suppress(UserError, KeyError):  # KeyError if the named column does not exist
        _find_objects_column(columns, "", selection)
        return "objects"
    with suppress(UserError):
        _find_mask_columns(columns, "", selection)
        return "mask"
    return "label"


def _read_masks(opened: RawTables, name: str, selection: NamedColumns) -> MaskTables:
    """Return the images and masks of tables with a column of masks."""
    from hf_vit.data.mask_features import ClassMask

    image, mask = _find_mask_columns(cast("Features", opened.features), name, selection)
    splits, notes = _select_annotated(opened, mask, name)
    masks = {split: extract_column(table, mask, "mask") for split, table in splits.items()}
    if not isinstance((opened.features or {})[mask], ClassMask):  # which says how the masks number their classes
        masks = {split: table.cast_column("mask", ClassMask()) for split, table in masks.items()}
    images = {split: extract_column(table, image, "image") for split, table in splits.items()}
    return MaskTables(encode_images(images, "image", name, notes), None, notes, masks=masks)


def _read_objects(opened: RawTables, name: str, selection: NamedColumns) -> ObjectTables:
    """Return the images and objects of tables with a column of objects."""
    features = cast("Features", opened.features)
    column, fields = _find_objects_column(features, name, selection)
    image = selection.image or _find_column(_IMAGES, features, name, "--image-column")
    splits, notes = _select_annotated(opened, column, name)
    raw = {
        split: [_read_objects_of_row(row, fields) for row in list_column(table, column)]  # masks stay undecoded
        for split, table in splits.items()
    }
    names = getattr(fields["category"][1], "names", None)
    used_categories = _list_categories(raw, name)
    categories: list[Any] = used_categories if names is None else list(range(len(names)))
    images = {split: extract_column(table, image, "image") for split, table in splits.items()}
    images = encode_images(images, "image", name, notes)
    numbers = {category: number for number, category in enumerate(categories)}
    label_names = normalize_label(list(map(str, names or categories)))
    return ObjectTables(images, label_names, notes, objects=raw, numbers=numbers)


def _list_categories(raw: Mapping[str, list[RawObjects | str]], name: str) -> list[Any]:
    """Return the distinct categories of all objects, sorted; raise UserError if they mix numbers and names."""
    values = [value for rows in raw.values() for row in rows if isinstance(row, dict) for value in row["category"]]
    kinds = {type(value) for value in values}
    if len(kinds) > 1 or not kinds <= {int, str}:
        types = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"the categories of '{name}' have the type {types}; write whole numbers or names")
    return sorted(set(values))


def _select_annotated(opened: RawTables, column: str, name: str) -> "tuple[dict[str, Dataset], list[str]]":
    """Return the splits that have values in `column` and the notes; published test splits often have none."""
    splits, notes = dict(opened.splits), [*opened.notes]
    for split, table in opened.splits.items():
        values = table.select_columns([column]).with_format("arrow").iter(100)
        if split != "train" and all(batch.column(column).null_count == len(batch) for batch in values):
            notes.append(f"split '{split}' of '{name}' was left out, because '{column}' is empty there")
            del splits[split]
    return splits, notes


def extract_column(table: "Dataset", column: str, name: str) -> "Dataset":
    """Return a table with this column alone, under another name."""
    return table.select_columns([column]).rename_columns({} if column == name else {column: name})


def _read_objects_of_row(objects: Any, fields: Mapping[str, tuple[str, Any]]) -> RawObjects | str:
    """Return the objects of a row (dictionaries, or a dictionary of lists) as `RawObjects`, or the row's problem.

    `fields` maps keys of `RawObjects` to (name, type) of the row's fields.
    """
    columns: RawObjects = {}
    for key, (column, _) in fields.items():
        if isinstance(objects, Mapping):
            columns[key] = list(objects[column] or [])
        else:
            columns[key] = [entry.get(column) for entry in objects or []]
    columns["category"] = normalize_label(columns["category"])
    count = len(columns["bbox"])
    for key in _FIELDS:
        if len(columns.setdefault(key, [None] * count)) != count:
            return f"has {count} boxes, but {len(columns[key])} of '{key}'"
    return columns


def _find_mask_columns(features: "Features", name: str, selection: NamedColumns) -> tuple[str, str]:
    """Return the columns of images and of masks."""
    from datasets import Image, Value

    def is_picture(feature: Any) -> bool:
        """Return whether a column holds image files, as `datasets` or other programs store them."""
        if isinstance(feature, Value):
            return feature.dtype in ("binary", "large_binary")
        return isinstance(feature, Image) or (isinstance(feature, Mapping) and "bytes" in feature)

    pictures = [column for column, feature in features.items() if is_picture(feature)]
    usual_masks = (column for column in _MASKS if column in pictures and column != selection.image)
    mask = selection.label or next(usual_masks, None)
    image = selection.image or next((column for column in _IMAGES if column in pictures and column != mask), None)
    if mask is None and image is not None and len(pictures) == 2:  # the other one holds the masks
        mask = next(column for column in pictures if column != image)
    if mask is None or image is None or not {mask, image} <= {*pictures}:
        raise UserError(
            f"'{name}' has the columns {', '.join(features)}, but which ones hold images and masks is unclear; name "
            "them 'image' and 'mask', or give their names with --image-column and --label-column"
        )
    return image, mask


def _find_objects_column(
    features: "Features", name: str, selection: NamedColumns
) -> tuple[str, dict[str, tuple[str, Any]]]:
    """Return the column of objects, and the name and type of every field inside it."""
    column = selection.label or _find_column(_OBJECTS, features, name, "--label-column")
    item_features: Any = getattr(features[column], "feature", features[column])
    if isinstance(item_features, list | tuple):
        item_features = item_features[0]
    available: dict[str, Any] = dict(item_features) if isinstance(item_features, Mapping) else {}
    fields: dict[str, tuple[str, Any]] = {}
    for key, usual_names in _FIELDS.items():
        field_name = next((usual for usual in usual_names if usual in available), None)
        if field_name is not None:
            feature = available[field_name]
            fields[key] = field_name, getattr(feature, "feature", feature)  # of a list the type of its entries
    if not {"bbox", "category"} <= fields.keys():
        raise UserError(
            f"the column '{column}' of '{name}' has the fields {', '.join(available) or 'none'}, but every "
            "object needs 'bbox' (x, y, width and height in px) and 'category'; rename or add them"
        )
    return column, fields


def _find_column(names: tuple[str, ...], features: "Features", name: str, option: str) -> str:
    """Return the first of the usual names that is a column; raise UserError if there is none."""
    column = next((column for column in names if column in features), None)
    if column is None:
        raise UserError(
            f"'{name}' has the columns {', '.join(features)}, but none is named '{names[0]}'; choose one with {option}"
        )
    return column


# ---- folders of images and masks that are laid out as ADE20K


def _read_mask_folder(source: DataSource) -> MaskTables:
    """Return tables whose rows name the image and mask files of a folder; nothing is decoded or copied.

    The class names are in objectInfo*.txt (ADE20K: mask values from 1, and 0 is ignored), in classes.txt (one name per
    line, mask values from 0) or in id2label.json ({"0": name, ...}).
    """
    from datasets import Dataset, Features

    from hf_vit.data.mask_features import ClassMask

    assert source.root is not None
    names, reduce_labels = _read_class_names(source.root)
    feature = Features({"mask": ClassMask(reduce_labels=reduce_labels)})
    images: dict[str, Dataset] = {}
    masks: dict[str, Dataset] = {}
    notes: list[str] = []
    for split in (name for name in SPLITS if name in source.folder):
        image_files, mask_files = source.folder[split]["images"], source.folder[split]["annotations"]
        get_key = _make_key(source.root, image_files, mask_files)
        spare_masks = {get_key(path): path for path in mask_files}
        mask_paths = [spare_masks.pop(get_key(path), None) for path in image_files]
        if spare_masks:
            example = min(spare_masks.values()).name
            notes.append(f"{len(spare_masks)} masks of {split} have no image of the same name, such as {example}")
        images[split] = make_image_table(image_files)
        mask_fields = [None if path is None else {"bytes": None, "path": str(path)} for path in mask_paths]
        masks[split] = Dataset.from_dict({"mask": mask_fields}, features=feature)
    return MaskTables(images, names, notes, masks=masks)


def _make_key(root: Path, *folders: Sequence[Path]) -> Callable[[Path], str]:
    """Return a function that gives an image and its mask the same key: the name, and the folders if names repeat."""
    if all(len({normalize_name(path.stem) for path in paths}) == len(paths) for paths in folders):
        return lambda path: normalize_name(path.stem)
    return lambda path: normalize_name("/".join(path.relative_to(root).with_suffix("").parts[1:]))


def _read_class_names(root: Path) -> tuple[list[str] | None, bool]:
    """Return the class names, or None, and whether the masks number classes from 1 as ADE20K does."""
    info_files = sorted(root.glob("objectInfo*.txt"))
    if info_files:
        return _read_object_info(info_files[0]), True
    if (root / "classes.txt").is_file():
        names = list(filter(None, map(normalize_name, _read_text(root / "classes.txt").splitlines())))
    elif (root / "id2label.json").is_file():
        try:
            names_by_number: Any = json.loads(_read_text(root / "id2label.json"))
            names = [normalize_name(str(names_by_number[str(number)])) for number in range(len(names_by_number))]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                'id2label.json cannot be read; write {"0": name, "1": name, ...} without a missing number'
            ) from error
    else:
        return None, False
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two classes of '{root.name}' are named '{duplicate}'; give them different names")
    return names, False


def _read_object_info(path: Path) -> list[str]:
    """Return the class names of ADE20K's table: of every numbered row the first of the synonyms in the last column."""
    rows = [line.rstrip().split("\t") for line in _read_text(path).splitlines() if line.strip()]
    names = [normalize_name(row[-1].split(",")[0]) for row in rows if row[0].strip().isdigit()]
    if not names:
        raise UserError(f"{path.name} names no classes; write one line per class, with its number first and name last")
    return names


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} cannot be read as text; save it as UTF-8") from error


# ---- COCO annotation files


def _read_coco(source: DataSource) -> ObjectTables:
    """Read the annotation files of all splits and find their images."""
    assert source.root is not None
    images: dict[str, Any] = {}
    objects: dict[str, list[RawObjects | str]] = {}
    sizes: dict[str, list[tuple[int, int] | None]] = {}
    categories: dict[Any, str] = {}
    names = FileNames()
    for split in (name for name in SPLITS if name in source.files):
        path = source.files[split][0]
        file_name = path.name if path.name == source.name else f"{path.name} of '{source.name}'"
        lists = _parse_coco(path, file_name)
        _add_categories(categories, lists["categories"], file_name)
        image_entries = _index_images(lists["images"], file_name)
        files = [image["file_name"] for image in image_entries.values()]
        folder = _find_image_folder(source.root, path, split, files, file_name, names)
        paths = [names.find(folder / file) for file in files]
        source.folder[split] = {"": paths}
        images[split] = make_image_table(paths)
        objects[split] = _group_objects(lists["annotations"], image_entries, file_name)
        sizes[split] = list(map(_get_size, image_entries.values()))
    numbers = {category: number for number, category in enumerate(sorted(categories))}
    label_names = [categories[category] for category in sorted(categories)]
    return ObjectTables(images, label_names, objects=objects, numbers=numbers, sizes=sizes)


def _get_size(image: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (height, width) px of an image's entry, or None if it gives no size."""
    height, width = image.get("height"), image.get("width")
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def _parse_coco(path: Path, file_name: str) -> Mapping[str, list[Any]]:
    """Read an annotation file; raise UserError if a list, or a required key of an entry, is missing."""
    try:
        lists: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file_name} cannot be read as JSON: {error!s:.120}; export the annotations again") from error
    if not isinstance(lists, dict) or not all(isinstance(lists.get(key), list) for key in _ENTRIES):
        raise UserError(
            f"{file_name} is not a COCO annotation file, which is an object with the lists "
            f"{', '.join(_ENTRIES)}; export it in COCO's format"
        )
    for key, required_fields in _ENTRIES.items():
        for row, entry in enumerate(lists[key]):
            for name, types in required_fields.items():
                if not isinstance(entry, dict) or name not in entry:
                    raise UserError(f"entry {row} of '{key}' in {file_name} has no {name}; add it, or remove the entry")
                if not isinstance(entry[name], types):
                    needed = " or ".join(_TYPE_NAMES[kind] for kind in types)
                    raise UserError(
                        f"entry {row} of '{key}' in {file_name} has the {name} {entry[name]!r:.80}; write {needed}"
                    )
    return lists


def _add_categories(categories: dict[Any, str], entries: Sequence[Mapping[str, Any]], file_name: str) -> None:
    """Add the categories of a split; raise UserError if two splits disagree on a name or two ids share one."""
    for entry in entries:
        number = entry["id"]
        name = normalize_name(str(entry["name"]))
        if categories.setdefault(number, name) != name:
            raise UserError(
                f"category {number} is named '{name}' in {file_name}, but '{categories[number]}' in another file; "
                "use one name"
            )
    duplicates = [name for name, count in Counter(categories.values()).items() if count > 1]
    if duplicates:
        raise UserError(f"two categories in {file_name} are named '{duplicates[0]}'; give them different names")


def _index_images(entries: Sequence[dict[str, Any]], file_name: str) -> dict[Any, dict[str, Any]]:
    """Return the image entries of an annotation file by id; raise UserError for a bad or repeated id."""
    images: dict[Any, dict[str, Any]] = {}
    for entry in entries:
        if entry["id"] in images:
            raise UserError(f"two images in {file_name} have the id {entry['id']}; give them different ids")
        images[entry["id"]] = entry
    if not images:
        raise UserError(f"{file_name} lists no images; add entries to 'images'")
    return images


def _group_objects(
    entries: Sequence[Mapping[str, Any]], images: Mapping[Any, Any], file_name: str
) -> list[RawObjects | str]:
    """Return the objects of every image of an annotation file, in the order of the images."""
    rows: dict[Any, RawObjects] = {number: {key: [] for key in _FIELDS} for number in images}
    for position, entry in enumerate(entries):
        row = rows.get(entry["image_id"])
        if row is None:
            raise UserError(
                f"entry {position} of 'annotations' in {file_name} has the image_id {entry['image_id']}, which "
                "'images' does not list; list the image, or remove the entry"
            )
        row["category"].append(entry["category_id"])
        row["iscrowd"].append(entry.get("iscrowd", 0))
        for key in ("bbox", "area", "segmentation"):
            row[key].append(entry.get(key))
    return list(rows.values())


def _find_image_folder(
    root: Path, path: Path, split: str, files: Sequence[str], file_name: str, names: FileNames
) -> Path:
    """Return the folder that has most of the first hundred `files` that the annotation file `path` lists.

    `root` is the folder of the data set, and `file_name` names the annotation file in errors.
    """
    candidates = [path.parent, root, root / "images", path.parent / "images"]
    for parent in (root, root / "images", root.parent):
        for folder in sorted(parent.glob("*/")):  # val2017 for instances_val2017.json
            if folder.name in path.stem or split_name(folder.name) == split:
                candidates.append(folder)
    counts = {folder: sum(names.find(folder / file).is_file() for file in files[:100]) for folder in candidates}
    best = max(counts, key=lambda folder: counts[folder])
    if not counts[best]:
        raise UserError(
            f"the images of {file_name}, such as {files[0]}, do not exist; put them beside it, or into images/ or "
            f"{split}/ of '{root.name}'"
        )
    return best
