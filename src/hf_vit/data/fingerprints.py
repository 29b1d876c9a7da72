"""What tells data from other data: hashes of images, classes and splits, or of the files, and what became of these."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_vit.data.images import Seen, short_name
from hf_vit.data.labels import classes_of
from hf_vit.data.sources import DataSource
from hf_vit.errors import UserError
from hf_vit.repositories.stores import place_of, sizes

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray

# Files are hashed whole up to this many bytes together; beyond, their sizes must do.
HASHED_BYTES = 1 << 30
_NAMED = 3


def content_fingerprint(
    splits: "Mapping[str, Dataset]", seen: Mapping[str, Sequence[Seen]], label_names: Sequence[str]
) -> str:
    """Hash of which contents bear which class, mask or objects in which split; order and names of files left out."""
    lines: list[str] = []
    for split, table in splits.items():
        if "label" not in table.column_names:  # masks and objects have numbers, not names
            lines.extend(f"{split}\tclass {number}\t{name}" for number, name in enumerate(label_names))
        lines.extend(
            f"{split}\t{bears}\t{image.digest}"
            for bears, image in zip(borne(table, seen[split], label_names), seen[split], strict=True)
        )
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def borne(table: "Dataset", seen: Sequence[Seen], label_names: Sequence[str]) -> list[str]:
    """Return what every image bears: the names of its classes, or the hash of its mask or objects."""
    if "label" not in table.column_names:
        return [image.annotation.digest for image in seen if image.annotation is not None]
    labels: list[int] = list(table["label"])
    return [" ".join(label_names[each] for each in classes_of(label)) for label in labels]


def file_states(source: DataSource, contents: bool = True) -> dict[str, str]:
    """Name -> what changes with a file that is there: its size, or a hash where all have at most `HASHED_BYTES`."""
    large = sizes(path for _, path in source.named_files())
    there = [(name, path) for name, path in source.named_files() if path in large]
    whole = contents and sum(large[path] for _, path in there) <= HASHED_BYTES
    states: dict[str, list[str]] = {}
    for name, path in there:  # files of several folders may share a name
        states.setdefault(name, []).append(digest_of(path) if whole else f"{large[path]}")
    return {name: " ".join(sorted(several)) for name, several in states.items()}


def digests_of(table: "Dataset") -> list[str]:
    """SHA-256 of every image's file, of a table that names the files; nothing is decoded."""
    paths = [stored["path"] for stored in table["image"]]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(digest_of, paths))


class ChangedImageError(UserError):
    """An image is not the one that was looked at."""


def short_digests(seen: Sequence[Seen]) -> "NDArray[np.uint64]":
    """Return the first 8 bytes of every image's SHA-256, for `refuse_changed`."""
    return np.array([int(image.digest[:16], 16) for image in seen], np.uint64)


def refuse_changed(name: str, digest: str, wanted: "np.uint64") -> None:
    """Raise ChangedImageError where an image is not the one that was looked at."""
    if int(digest[:16], 16) != int(wanted):
        raise ChangedImageError(f"image '{name}' has changed since the command began")


def states_fingerprint(states: Mapping[str, str]) -> str:
    """16 hexadecimal digits of a hash over names and states."""
    lines = sorted(f"{name}\t{state}" for name, several in states.items() for state in several.split())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def tell_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return which files are missing, changed or new, as "train/a.parquet is missing, ..."; empty if none is."""
    kinds = {
        "is missing": sorted(before.keys() - now.keys()),
        "has changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
        "is new": sorted(now.keys() - before.keys()),
    }
    changes = [f"{name} {what}" for what, names in kinds.items() for name in names]
    more = f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    return ", ".join(changes[:_NAMED]) + more


def digest_of(path: str | Path) -> str:
    """SHA-256 of a file."""
    with place_of(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tell_copies(
    splits: "Mapping[str, Dataset]", seen: Mapping[str, Sequence[Seen]], label_names: Sequence[str]
) -> list[str]:
    """Return notes on equal files: how many there are, under several classes, in training and beside it."""
    places: dict[str, list[tuple[str, str, str]]] = {}
    for split, images in seen.items():
        for image, names in zip(images, borne(splits[split], images, label_names), strict=True):
            places.setdefault(image.digest, []).append((short_name(image.name), names, split))
    several = [copies for copies in places.values() if len(copies) > 1]
    what = "classes" if all("label" in table.column_names for table in splits.values()) else "annotations"
    torn = [copies for copies in several if len({label for _, label, _ in copies}) > 1]
    leaked = [copies for copies in several if {"train"} < {split for *_, split in copies}]
    kinds = (
        (several, "in one split"),
        (torn, f"with different {what}"),
        (leaked, "in train and in other splits, so results are too good"),
    )
    notes: list[str] = []
    for copies, where in kinds:
        if copies:
            count = "1 duplicate image" if len(copies) == 1 else f"{len(copies)} duplicate images"
            more = ", ..." if len(copies) > 1 or len(copies[0]) > 2 else ""
            notes.append(f"{count} {where}: {' = '.join(name for name, *_ in copies[0][:2])}{more}")
    return notes
