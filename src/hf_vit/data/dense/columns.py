"""Parquet files and data sets of the Hub with a column of masks or of objects, into tables."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_vit.data.dense.annotations import Target
from hf_vit.data.dense.coco import decide_on_masks
from hf_vit.data.dense.tables import DenseTables, MaskTables, ObjectTables, RawObjects
from hf_vit.data.labels import plain_label
from hf_vit.data.sources.reading import NamedColumns, undecoded
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, Features

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


def column_target(features: "Features") -> Target:
    """What the columns of a table are for, where nobody says: objects, a mask, or a label."""
    try:
        _objects_column(features, "", NamedColumns())
        return "objects"
    except UserError:
        pass
    try:
        _mask_columns(features, "", NamedColumns())
        return "mask"
    except UserError:
        return "label"


def read_columns(
    splits: "Mapping[str, Dataset]", name: str, named: NamedColumns, target: Target, notes: list[str]
) -> DenseTables:
    """Tables of rows that hold everything.

    Args:
        splits: as `datasets` reads them.
        name: of the data, for errors.
        named: the columns that the user named; the label column is that of the masks or objects.
        target: "mask" or "objects".
        notes: what is to be told of them.

    Raises:
        UserError: a column is missing, or the classes are.
    """
    features = next(iter(splits.values())).features
    named.check(features, name)
    return (_masks if target == "mask" else _objects)(splits, features, name, named, notes)


def _masks(
    splits: "Mapping[str, Dataset]", features: "Features", name: str, named: NamedColumns, notes: list[str]
) -> MaskTables:
    from hf_vit.data.dense.features import mask_features

    image, mask = _mask_columns(features, name, named)
    splits = _annotated(splits, mask, name, notes)
    masks = {
        split: table.select_columns([mask]).rename_columns({} if mask == "mask" else {mask: "mask"})
        for split, table in splits.items()
    }
    decoded = {split: table.cast_column("mask", mask_features()["mask"]) for split, table in masks.items()}
    return MaskTables(_images(splits, image, name, notes), None, notes, masks=decoded)


def _objects(
    splits: "Mapping[str, Dataset]", features: "Features", name: str, named: NamedColumns, notes: list[str]
) -> ObjectTables:
    column, fields = _objects_column(features, name, named)
    image = named.image or _first(_IMAGES, features, name, "--image-column")
    splits = _annotated(splits, column, name, notes)
    undecoded = _undecoded(features[column])
    columns = {split: table.select_columns([column]).cast_column(column, undecoded) for split, table in splits.items()}
    raw = {split: [_row(row, fields) for row in table[column]] for split, table in columns.items()}
    category: Any = fields["category"][1]
    told = [value for rows in raw.values() for row in rows if isinstance(row, dict) for value in row["category"]]
    kinds = {type(value) for value in told}
    if len(kinds) > 1 or not kinds <= {int, str}:
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"the categories of '{name}' are of type {shown}; needed: whole numbers or names")
    names = getattr(category, "names", None)
    numbers: dict[Any, int]
    if names is None:
        ordered = sorted(set(told))
        names, numbers = [str(value) for value in ordered], {value: number for number, value in enumerate(ordered)}
    else:
        numbers = {number: number for number in range(len(names))}
    tables = ObjectTables(
        _images(splits, image, name, notes), plain_label(list(names)), notes, objects=raw, numbers=numbers
    )
    decide_on_masks(tables)
    return tables


def _annotated(splits: "Mapping[str, Dataset]", column: str, name: str, notes: list[str]) -> "dict[str, Dataset]":
    """The splits but those that hide what is to be learnt, as published test splits do."""
    hidden = [
        split
        for split, table in splits.items()
        if split != "train" and table.data.column(column).null_count == len(table)
    ]
    notes.extend(f"split '{split}' of '{name}' has nothing in '{column}' and was left out" for split in hidden)
    return {split: table for split, table in splits.items() if split not in hidden}


def _undecoded(feature: Any) -> Any:
    """A column's type, with pictures as the bytes of their files."""
    from datasets import Image, List

    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, List):
        return List(_undecoded(feature.feature), length=feature.length)
    return {key: _undecoded(value) for key, value in feature.items()} if isinstance(feature, Mapping) else feature


def _row(objects: Any, fields: Mapping[str, tuple[str, Any]]) -> RawObjects | str:
    """The objects of a row, kept as a list of dictionaries or as a dictionary of lists."""
    if objects is None:
        objects = []
    if isinstance(objects, Mapping):
        lists = {key: list(objects[column] or []) for key, (column, _) in fields.items()}
    else:
        lists = {key: [entry.get(column) for entry in objects] for key, (column, _) in fields.items()}
    lists["category"] = plain_label(lists["category"])
    count = len(lists["bbox"])
    for key in _FIELDS:
        lists.setdefault(key, [None] * count)
        if len(lists[key]) != count:
            return f"has {count} boxes, but {len(lists[key])} of '{key}'"
    return lists


def _images(splits: "Mapping[str, Dataset]", column: str, name: str, notes: list[str]) -> "dict[str, Dataset]":
    renamed = {
        split: table.select_columns([column]).rename_columns({} if column == "image" else {column: "image"})
        for split, table in splits.items()
    }
    return undecoded(renamed, "image", name, notes)


def _mask_columns(features: "Features", name: str, named: NamedColumns) -> tuple[str, str]:
    """The columns of images and of masks."""
    pictures = [column for column, feature in features.items() if _is_picture(feature)]
    if named.image and named.label:
        return named.image, named.label
    mask = named.label or next((column for column in _MASKS if column in pictures and column != named.image), None)
    others = [column for column in pictures if column != mask]
    image = named.image or next((column for column in _IMAGES if column in others), None)
    if mask is None and image is not None and len(pictures) == 2:
        mask = next(column for column in pictures if column != image)
    if mask is None or image is None:
        raise UserError(
            f"'{name}' has the columns {', '.join(features)}; needed: one of images and one of masks, best called "
            "'image' and 'mask', or named by --image-column and --label-column"
        )
    return image, mask


def _is_picture(feature: Any) -> bool:
    """Whether a column holds files, as `datasets` or other programs write them."""
    from datasets import Image, Value

    if isinstance(feature, Value):
        return feature.dtype in ("binary", "large_binary")
    return isinstance(feature, Image) or (isinstance(feature, Mapping) and "bytes" in feature)


def _objects_column(features: "Features", name: str, named: NamedColumns) -> tuple[str, dict[str, tuple[str, Any]]]:
    """The column of objects, and of each of their fields its name and type."""
    column = named.label or _first(_OBJECTS, features, name, "--label-column")
    feature: Any = features[column]
    inside: Any = getattr(feature, "feature", feature)
    if isinstance(inside, list | tuple):
        inside = inside[0]
    have: dict[str, Any] = dict(inside) if isinstance(inside, Mapping) else {}
    known = {key: next((field for field in names if field in have), None) for key, names in _FIELDS.items()}
    fields = {key: (field, getattr(have[field], "feature", have[field])) for key, field in known.items() if field}
    missing = [key for key in ("bbox", "category") if key not in fields]
    if missing:
        raise UserError(
            f"the column '{column}' of '{name}' has the fields {', '.join(have) or 'none'}; needed: 'bbox' (x, y, "
            "width and height in px) and 'category' of every object"
        )
    return column, fields


def _first(names: tuple[str, ...], features: "Features", name: str, option: str) -> str:
    column = next((column for column in names if column in features), None)
    if column is None:
        raise UserError(
            f"'{name}' has the columns {', '.join(features)}; needed: one such as '{names[0]}', or name it by {option}"
        )
    return column
