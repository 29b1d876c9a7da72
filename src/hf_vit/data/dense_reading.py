"""Reading a source of images with masks or objects, whatever its kind."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_vit.data.annotations import Target
from hf_vit.data.dense_tables import DenseTables, MaskTables, ObjectTables, RawObjects
from hf_vit.data.labels import plain_label, plain_name
from hf_vit.data.reading import NamedColumns, image_table, open_files, open_hub, refuse_places, undecoded
from hf_vit.data.sources import DataSource, Listing, find_file
from hf_vit.data.splits import SPLITS, split_name
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, Features

_TASKS = {"label": "classification", "mask": "segmentation", "objects": "detection"}


def read_dense(source: DataSource, named: NamedColumns, target: Target | None) -> DenseTables | None:
    """Tables of a source, or None where it is one of labels.

    Args:
        source: understood.
        named: the columns that the user named.
        target: what is wanted; None for what there is.

    Raises:
        UserError: the source has something else, or there is something wrong with it.
    """
    if source.kind in ("masks", "coco"):
        has: Target = "mask" if source.kind == "masks" else "objects"
        if target not in (None, has):
            raise UserError(
                f"'{source.name}' is a folder for {_TASKS[has]} ({'images and masks' if has == 'mask' else 'COCO'}), "
                f"not for {_TASKS[target]}; choose --task {_TASKS[has]}, or give other data"
            )
        return read_mask_folder(source) if source.kind == "masks" else read_coco(source)
    if target == "label":
        return None
    if source.kind not in ("parquet", "hub"):
        if target is None:
            return None
        raise UserError(
            f"'{source.name}' ({source.kind}) has labels, but nothing for {_TASKS[target]}; give a folder as ADE20K's "
            "or COCO's, parquet files or a Hub data set with a column of masks or objects, or 'scenes'"
        )
    return _read_columns(source, named, target)


def _read_columns(source: DataSource, named: NamedColumns, target: Target | None) -> DenseTables | None:
    notes: list[str] = []
    commit: str | None = None
    read: dict[str, Any]
    if source.kind == "hub":
        read, notes, commit = open_hub(source, streaming=False)
    else:
        read = open_files(source, streaming=False)
    splits: dict[str, Dataset] = {split: read[split] for split in SPLITS if split in read}
    has = target or column_target(next(iter(splits.values())).features)
    if has == "label":
        return None
    tables = read_columns(splits, source.name, named, has, notes)
    tables.revision = commit
    for table in tables.images.values():
        refuse_places(table, "image", source)
    for table in tables.masks.values() if isinstance(tables, MaskTables) else ():
        refuse_places(table, "mask", source)
    return tables


def read_coco(source: DataSource) -> ObjectTables:
    """Tables of files of annotations; the images lie where the layout has them.

    Raises:
        UserError: a file is not as COCO's, or the images are not there.
    """
    assert source.root is not None
    images: dict[str, Any] = {}
    objects: dict[str, list[RawObjects | str]] = {}
    sizes: dict[str, list[tuple[int, int] | None]] = {}
    categories: dict[Any, str] = {}
    folders: dict[Path, Listing] = {}
    for split in (name for name in SPLITS if name in source.files):
        place = source.files[split][0]
        where = place.name if place.name == source.name else f"{place.name} of '{source.name}'"
        read = _parsed(place, where)
        _add_categories(categories, read["categories"], where)
        listed = _listed_images(read["images"], where)
        names = [image["file_name"] for image in listed.values()]
        folder = _image_folder(source.root, place, split, names, where, folders)
        paths = [find_file(folder / name, folders) for name in names]
        source.folder[split] = {"": paths}
        images[split] = image_table(paths)
        objects[split] = _coco_objects(read["annotations"], listed, where)
        sizes[split] = [_size(image) for image in listed.values()]
    numbers = {category: number for number, category in enumerate(sorted(categories))}
    names = [categories[category] for category in sorted(categories)]
    tables = ObjectTables(images, names, objects=objects, numbers=numbers, sizes=sizes)
    decide_on_masks(tables)
    return tables


def decide_on_masks(tables: ObjectTables) -> None:
    """Masks are taken where every object has one; where only some have, that is told."""
    told = [
        mask
        for rows in tables.objects.values()
        for row in rows
        if isinstance(row, dict)
        for mask in row["segmentation"]
    ]
    missing = sum(not _has_mask(mask) for mask in told)
    tables.with_masks = bool(told) and not missing
    if 0 < missing < len(told):
        tables.notes.append(f"{missing:,} of {len(told):,} objects have no mask, so boxes alone are used")


def _has_mask(mask: Any) -> bool:
    return mask is not None and (not isinstance(mask, list | dict) or bool(mask))


def _parsed(place: Path, where: str) -> Mapping[str, list[Any]]:
    try:
        read: Any = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{where} cannot be read as JSON: {' '.join(str(error).split()):.120}; write it again"
        ) from error
    wanted = ("images", "annotations", "categories")
    if not isinstance(read, dict) or not all(isinstance(read.get(key), list) for key in wanted):
        raise UserError(f"{where} is no file of COCO annotations; needed: lists of {', '.join(wanted)}")
    for key in wanted:
        for row, entry in enumerate(read[key]):
            needed = {"images": ("id", "file_name"), "annotations": ("image_id", "category_id", "bbox")}
            missing = [
                name for name in needed.get(key, ("id", "name")) if not isinstance(entry, dict) or name not in entry
            ]
            if missing:
                raise UserError(f"{where}: entry {row} of '{key}' has no {missing[0]}; add it, or remove the entry")
    return read


def _add_categories(categories: dict[Any, str], entries: Sequence[Mapping[str, Any]], where: str) -> None:
    """Of all splits together: an id has one name, and a name one id."""
    for entry in entries:
        number, name = entry["id"], plain_name(str(entry["name"]))
        if not isinstance(number, int):
            raise UserError(f"{where}: the category '{name}' has the id {number!r}; needed: a whole number")
        if categories.setdefault(number, name) != name:
            raise UserError(
                f"{where}: category {number} is '{name}' here and '{categories[number]}' before; name it once"
            )
    twice = [name for name, count in Counter(categories.values()).items() if count > 1]
    if twice:
        raise UserError(f"{where}: two categories are called '{twice[0]}'; give them different names")


def _listed_images(entries: Sequence[dict[str, Any]], where: str) -> dict[Any, dict[str, Any]]:
    listed: dict[Any, dict[str, Any]] = {}
    for entry in entries:
        if not isinstance(entry["file_name"], str) or not isinstance(entry["id"], int | str):
            raise UserError(f"{where}: the image {entry['id']!r} has no usable id or file_name; correct it")
        if entry["id"] in listed:
            raise UserError(f"{where}: two images have the id {entry['id']}; give each its own")
        listed[entry["id"]] = entry
    if not listed:
        raise UserError(f"{where} lists no images; add some")
    return listed


def _size(image: Mapping[str, Any]) -> tuple[int, int] | None:
    height, width = image.get("height"), image.get("width")
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def _coco_objects(
    entries: Sequence[Mapping[str, Any]], listed: Mapping[Any, Any], where: str
) -> list[RawObjects | str]:
    rows: dict[Any, RawObjects] = {
        number: {"bbox": [], "category": [], "area": [], "iscrowd": [], "segmentation": []} for number in listed
    }
    for position, entry in enumerate(entries):
        row = rows.get(entry["image_id"])
        if row is None:
            raise UserError(
                f"{where}: entry {position} of 'annotations' is of the image {entry['image_id']}, which is not "
                "listed; list the image, or remove the entry"
            )
        row["bbox"].append(entry["bbox"])
        row["category"].append(entry["category_id"])
        row["area"].append(entry.get("area"))
        row["iscrowd"].append(entry.get("iscrowd", 0))
        row["segmentation"].append(entry.get("segmentation"))
    return list(rows.values())


def _image_folder(
    root: Path, place: Path, split: str, names: Sequence[str], where: str, folders: dict[Path, Listing]
) -> Path:
    """Where the images of a file of annotations lie: the place that has most of the first hundred.

    Raises:
        UserError: none has any.
    """
    beside = [place.parent, root, root / "images", place.parent / "images"]
    inside = [folder for parent in (root, root / "images", root.parent) for folder in sorted(parent.glob("*/"))]
    named = [
        folder
        for folder in inside
        if folder.name in place.stem or split_name(folder.name.rstrip("0123456789")) == split
    ]
    counts = {
        folder: sum(find_file(folder / name, folders).is_file() for name in names[:100]) for folder in (*beside, *named)
    }
    best = max(counts, key=lambda folder: counts[folder])
    if not counts[best]:
        raise UserError(
            f"the images of {where}, such as {names[0]}, are not there; put them beside it, or into images/ or "
            f"{split}/ of '{root.name}'"
        )
    return best


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
    return (_mask_tables if target == "mask" else _object_tables)(splits, features, name, named, notes)


def _mask_tables(
    splits: "Mapping[str, Dataset]", features: "Features", name: str, named: NamedColumns, notes: list[str]
) -> MaskTables:
    from hf_vit.data.mask_features import mask_features

    image, mask = _mask_columns(features, name, named)
    splits = _annotated(splits, mask, name, notes)
    masks = {
        split: table.select_columns([mask]).rename_columns({} if mask == "mask" else {mask: "mask"})
        for split, table in splits.items()
    }
    decoded = {split: table.cast_column("mask", mask_features()["mask"]) for split, table in masks.items()}
    return MaskTables(_images(splits, image, name, notes), None, notes, masks=decoded)


def _object_tables(
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


def read_mask_folder(source: DataSource) -> MaskTables:
    """Tables of a folder of images and masks; nothing is decoded or copied, the rows name the files.

    A file objectInfo*.txt names ADE20K's classes, from 1 on, and 0 is not judged. Otherwise classes.txt has a name a
    line for the values from 0 on, or id2label.json {"0": name, ...}.

    Raises:
        UserError: the file of classes cannot be read.
    """
    from datasets import Dataset, Features

    from hf_vit.data.mask_features import mask_features

    names, reduce_labels = _class_names(source.root)
    features = mask_features(reduce_labels)
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
        masks[split] = Dataset.from_dict({"mask": stored}, features=Features({"mask": features["mask"]}))
    return MaskTables(images, names, notes, masks=masks)


def _key_of(root: Path | None, *folders: Sequence[Path]) -> Callable[[Path], str]:
    """What an image and its mask share: the name without its suffix; with the folders above where names repeat."""
    if all(len({plain_name(path.stem) for path in paths}) == len(paths) for paths in folders):
        return lambda path: plain_name(path.stem)
    return lambda path: plain_name("/".join(path.relative_to(root or "").with_suffix("").parts[1:]))


def _class_names(root: Path | None) -> tuple[list[str] | None, bool]:
    """Names of the classes, or None; and whether masks count as ADE20K does."""
    assert root is not None
    told = sorted(root.glob("objectInfo*.txt"))
    if told:
        return _ade20k_names(told[0]), True
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


def _ade20k_names(path: Path) -> list[str]:
    """The first of the names in the last column, line by line below the heading."""
    lines = [line.rstrip().split("\t") for line in _text(path).splitlines() if line.strip()]
    names = [plain_name(line[-1].split(",")[0]) for line in lines if line[0].strip().isdigit()]
    if not names:
        raise UserError(f"{path.name} names no classes; needed: a line a class, its number first and its name last")
    return names


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} cannot be read as text; save it in UTF-8") from error
