"""Folders of images and masks as ADE20K has them, into tables."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_vit.data.dense.tables import MaskTables
from hf_vit.data.labels import plain_name
from hf_vit.data.sources.data_source import DataSource
from hf_vit.data.sources.reading import image_table
from hf_vit.data.splits import SPLITS
from hf_vit.errors import UserError


def read_mask_folder(source: DataSource) -> MaskTables:
    """Tables of a folder of images and masks; nothing is decoded or copied, the rows name the files.

    A file objectInfo*.txt names ADE20K's classes, from 1 on, and 0 is not judged. Otherwise classes.txt has a name a
    line for the values from 0 on, or id2label.json {"0": name, ...}.

    Raises:
        UserError: the file of classes cannot be read.
    """
    from datasets import Dataset, Features

    from hf_vit.data.dense.features import mask_features

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
