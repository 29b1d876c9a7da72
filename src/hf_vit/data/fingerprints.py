"""Fingerprints of data: hashes of images, classes and splits, or of files; and notes on changed and duplicate files."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_vit.data.images import ImageScan, shorten_path
from hf_vit.data.labels import flatten_labels, list_column
from hf_vit.data.sources import DataSource
from hf_vit.errors import UserError
from hf_vit.repositories.stores import read_sizes, to_path

if TYPE_CHECKING:
    from datasets import Dataset

# Files of at most this many bytes together are hashed; of more only the sizes are compared.
HASHED_BYTES = 1 << 30
_MAX_NAMED = 3  # changed files in a message


def hash_text(text: str) -> str:
    """Return the first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_content(
    splits: "Mapping[str, Dataset]", scans: Mapping[str, Sequence[ImageScan]], label_names: Sequence[str]
) -> str:
    """Hash the content, split and labels (or mask or objects) of every image, without file names and order."""
    lines: list[str] = []
    for split, table in splits.items():
        if "label" not in table.column_names:  # digests of masks and objects hold class numbers, not names
            lines.extend(f"{split}\tclass {number}\t{name}" for number, name in enumerate(label_names))
        labels = describe_labels(table, scans[split], label_names)
        lines.extend(f"{split}\t{label}\t{scan.digest}" for label, scan in zip(labels, scans[split], strict=True))
    return hash_text("\n".join(sorted(lines)))


def describe_labels(table: "Dataset", scans: Sequence[ImageScan], label_names: Sequence[str]) -> list[str]:
    """Return for every image the names of its classes, or the digest of its mask or objects."""
    if "label" not in table.column_names:
        return [scan.annotation.digest for scan in scans if scan.annotation is not None]
    # A table that replaced the loaded one may have other labels: -1 or None.
    names: dict[Any, str] = dict(enumerate(label_names))
    labels = list_column(table, "label")
    return [" ".join(names.get(label, str(label)) for label in flatten_labels([each])) for each in labels]


def list_file_states(source: DataSource, contents: bool = True) -> dict[str, str]:
    """Return for every file a text that changes with it: its hash, or its size above `HASHED_BYTES` for all together.

    Missing files are left out.
    """
    named = list(source.name_files())
    file_sizes = read_sizes(path for _, path in named)
    existing = [(name, path) for name, path in named if path in file_sizes]
    is_hashed = contents and sum(file_sizes[path] for _, path in existing) <= HASHED_BYTES
    states: dict[str, list[str]] = {}
    for name, path in existing:  # files in several folders may have the same name
        states.setdefault(name, []).append(hash_file(path) if is_hashed else f"{file_sizes[path]}")
    return {name: " ".join(sorted(texts)) for name, texts in states.items()}


class ChangedImageError(UserError):
    """An image differs from the one that was scanned."""


def shorten_digests(scans: Sequence[ImageScan]) -> NDArray[np.uint64]:
    """Return the first 8 bytes of every image's SHA-256, for `refuse_changed`."""
    return np.array([int(scan.digest[:16], 16) for scan in scans], np.uint64)


def refuse_changed(name: str, digest: str, expected: "np.uint64") -> None:
    """Raise ChangedImageError if an image differs from the one that was scanned."""
    if int(digest[:16], 16) != int(expected):
        raise ChangedImageError(f"image '{name}' has changed since the command began; run the command again")


def hash_states(states: Mapping[str, str]) -> str:
    """Hash names and states of files, see `list_file_states`, to 16 hexadecimal digits."""
    lines = sorted(f"{name}\t{state}" for name, texts in states.items() for state in texts.split())
    return hash_text("\n".join(lines))


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Describe missing, changed and new files, such as "train/a.parquet is missing, ..."; "" if there are none."""
    kinds = {
        "is missing": sorted(before.keys() - now.keys()),
        "has changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
        "is new": sorted(now.keys() - before.keys()),
    }
    changes = [f"{name} {change}" for change, names in kinds.items() for name in names]
    more = f" and {len(changes) - _MAX_NAMED} more" if len(changes) > _MAX_NAMED else ""
    return ", ".join(changes[:_MAX_NAMED]) + more


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    with to_path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def note_duplicates(
    splits: "Mapping[str, Dataset]", scans: Mapping[str, Sequence[ImageScan]], label_names: Sequence[str]
) -> list[str]:
    """Return notes on duplicate images: within one split, with different labels, and in several splits."""
    counts = Counter(image.digest for images in scans.values() for image in images)
    if len(counts) == counts.total():
        return []
    copies_by_content: dict[str, list[tuple[str, str, str]]] = {}  # SHA-256 -> (name, label, split) of every copy
    for split, images in scans.items():
        for image, label in zip(images, describe_labels(splits[split], images, label_names), strict=True):
            if counts[image.digest] > 1:
                copies_by_content.setdefault(image.digest, []).append((shorten_path(image.name), label, split))
    kind = "classes" if all("label" in table.column_names for table in splits.values()) else "annotations"
    names_by_situation: dict[str, list[Sequence[str]]] = {
        "in one split": [],
        f"with different {kind}": [],
        "in several splits, so results are too good": [],
    }
    repeated, mislabeled, leaked = names_by_situation.values()
    for copies in copies_by_content.values():
        names, labels, splits_of_copies = zip(*copies, strict=True)
        images_of_split = Counter(splits_of_copies)
        if len(names) > len(images_of_split):
            repeated.append([name for name, _, split in copies if images_of_split[split] > 1])
        if len(set(labels)) > 1:
            mislabeled.append(names)
        if len(images_of_split) > 1:
            leaked.append(names)
    return [_describe_duplicates(images, situation) for situation, images in names_by_situation.items() if images]


def _describe_duplicates(images: Sequence[Sequence[str]], situation: str) -> str:
    """Return a note such as "2 duplicate images in one split: a.png = b.png, ..."; an image has several names."""
    count = "1 duplicate image" if len(images) == 1 else f"{len(images)} duplicate images"
    more = ", ..." if len(images) > 1 or len(images[0]) > 2 else ""
    return f"{count} {situation}: {' = '.join(images[0][:2])}{more}"
