"""Folders that are laid out for segmentation or detection, by their files alone; nothing is decoded.

ADE20K: images/{training,validation}/NAME.jpg and annotations/{training,validation}/NAME.png, or both without splits;
"masks" for "annotations" will do. COCO: a file of JSON with "images", "annotations" and "categories" a split, in the
folder, in annotations/, or beside the images of its split.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hf_vit.data.splits import split_name
from hf_vit.errors import UserError

_MASK_FOLDERS = ("annotations", "masks")
# Files of COCO that tell of something else.
_OTHER_JSON = re.compile(r"caption|keypoint|panoptic|stuff|image_info", re.IGNORECASE)
_COCO_KEYS = (b'"images"', b'"annotations"', b'"categories"')


@dataclass(frozen=True)
class Layout:
    """A folder, or file, of images with masks or objects.

    Attributes:
        kind: "masks" as ADE20K has them, or "coco".
        root: the folder.
        files: split -> its file of annotations (coco).
        folder: split -> "images" and "annotations" -> files (masks).
        notes: what the user should be told.
    """

    kind: Literal["coco", "masks"]
    root: Path
    files: dict[str, list[Path]] = field(default_factory=dict[str, list[Path]])
    folder: dict[str, dict[str, list[Path]]] = field(default_factory=dict[str, dict[str, list[Path]]])
    notes: list[str] = field(default_factory=list[str])


def dense_layout(root: Path, suffixes: Sequence[str]) -> Layout | None:
    """How a folder is laid out; None if neither as ADE20K nor as COCO.

    Args:
        root: a folder.
        suffixes: of images, in small letters.

    Raises:
        UserError: a split has several files of annotations.
    """
    listed = [path for path in _candidates(root) if is_coco(path)]
    if listed:
        return coco_layout(root, listed)
    masks = next((root / name for name in _MASK_FOLDERS if (root / name).is_dir()), None)
    if masks is None or not (root / "images").is_dir():
        return None
    images, annotations = (_by_split(folder, suffixes) for folder in (root / "images", masks))
    if not images or not annotations:
        return None
    folder = {
        split: {"images": images[split], "annotations": annotations.get(split, [])}
        for split in images
        if split in annotations
    }
    notes = [
        f"split '{split}' of '{root.resolve().name}' has no masks and was left out" for split in images.keys() - folder
    ]
    return Layout("masks", root, folder=folder, notes=notes) if folder else None


def coco_layout(root: Path, listed: Sequence[Path]) -> Layout:
    """Files of annotations by their splits, which their names tell, or the folders that they are in."""
    files: dict[str, list[Path]] = {}
    for path in listed:
        words = re.split(r"[^A-Za-z]+", "/".join(path.relative_to(root).parts))
        named = [name for name in map(split_name, words) if name]
        files.setdefault(named[-1] if named else "train", []).append(path)
    for split, paths in files.items():
        if len(paths) > 1:
            names = " and ".join(path.name for path in paths[:2])
            raise UserError(f"'{root.name}' has several files of annotations for {split}: {names}; keep one of them")
    return Layout("coco", root, files=files)


def is_coco(path: Path) -> bool:
    """Whether a file of JSON may be one of COCO's, by the words in it."""
    content = path.read_bytes()
    return all(key in content for key in _COCO_KEYS)


def _candidates(root: Path) -> list[Path]:
    places = [*root.glob("*.json"), *root.glob("annotations/*.json"), *root.glob("*/_annotations.coco.json")]
    return sorted(path for path in places if path.is_file() and not _OTHER_JSON.search(path.name))


def _by_split(folder: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        if path.suffix.lower() in suffixes and not any(part.startswith(".") for part in inside) and path.is_file():
            split = split_name(inside[0]) if len(inside) > 1 else None
            splits.setdefault(split or "train", []).append(path)
    return splits
