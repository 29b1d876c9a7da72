"""Images that occur more than once: told by the hashes of their files."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_vit.data.checks import Seen, short_name
from hf_vit.data.fingerprints import borne

if TYPE_CHECKING:
    from datasets import Dataset


def tell_copies(
    splits: "Mapping[str, Dataset]", seen: Mapping[str, Sequence[Seen]], label_names: Sequence[str]
) -> list[str]:
    """What a user should know of equal files: how many, under several classes, in training and beside it.

    Args:
        splits: tables with the column "label", or with masks or objects.
        seen: what the scan saw, row by row; empty where nothing was looked at.
        label_names: the classes.
    """
    places: dict[str, list[tuple[str, str, str]]] = {}
    for split, images in seen.items():
        for image, names in zip(images, borne(splits[split], images, label_names), strict=True):
            places.setdefault(image.digest, []).append((short_name(image.name), names, split))
    several = [found for found in places.values() if len(found) > 1]
    notes: list[str] = []
    if several:
        notes.append(f"{_images(several)} more than once: {_first(several)}")
    what = "classes" if all("label" in table.column_names for table in splits.values()) else "annotations"
    torn = [found for found in several if len({label for _, label, _ in found}) > 1]
    if torn:
        notes.append(f"{_images(torn)} under several {what}, which nothing can learn: {_first(torn)}")
    leaked = [found for found in several if {"train"} < {split for *_, split in found}]
    if leaked:
        notes.append(f"{_images(leaked)} in train and outside of it, where results are too good then: {_first(leaked)}")
    return notes


def _images(several: Sequence[object]) -> str:
    return "1 image is there" if len(several) == 1 else f"{len(several)} images are there"


def _first(several: Sequence[Sequence[tuple[str, str, str]]]) -> str:
    """The names of the first image's files; two are enough."""
    return " = ".join(name for name, *_ in several[0][:2]) + (
        ", ..." if len(several) > 1 or len(several[0]) > 2 else ""
    )
