"""COCO's files of annotations, into tables."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_vit.data.dense.tables import ObjectTables, RawObjects
from hf_vit.data.labels import plain_name
from hf_vit.data.sources.data_source import DataSource, Listing, find_file
from hf_vit.data.sources.reading import image_table
from hf_vit.data.splits import SPLITS, split_name
from hf_vit.errors import UserError


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
        objects[split] = _objects(read["annotations"], listed, where)
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


def _objects(entries: Sequence[Mapping[str, Any]], listed: Mapping[Any, Any], where: str) -> list[RawObjects | str]:
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
