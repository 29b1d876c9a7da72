"""Cutting validation and test from the training images: stratified, seeded, the same on every machine."""

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hf_vit.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLITS = ("train", "validation", "test")
# Share of all training images that a missing split gets.
CUT_SHARE = 0.1
_SYNONYMS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "testing": "test",
}


def split_name(text: str) -> str | None:
    """The split that a folder's or a Hub split's name means ("Val" is "validation"), or None."""
    return _SYNONYMS.get(text.lower())


def stratified_parts(
    labels: "NDArray[np.int64]", sizes: Mapping[str, int], *, seed: int
) -> "dict[str, NDArray[np.int64]]":
    """Deal the rows out: `sizes` images to each named part, the rest to "train", every class in proportion.

    Shares are rounded by largest remainders, every class gets at least one image, and one of it stays in "train".
    NumPy's RandomState is frozen across versions and platforms, hence the same rows on every machine.

    Args:
        labels: [rows] class of every row.
        sizes: images a part, in the order in which the parts are dealt.
        seed: of the shuffle within every class.

    Returns:
        The rows of every part, ascending; "train" first.
    """
    random = np.random.RandomState(seed)
    classes = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    taken = [0] * len(classes)
    parts: dict[str, NDArray[np.int64]] = {}
    for name, size in sizes.items():
        room = [len(rows) - t for rows, t in zip(classes, taken, strict=True)]
        counts = _proportional([len(rows) for rows in classes], size, room)
        chosen = [rows[t : t + n] for rows, t, n in zip(classes, taken, counts, strict=True)]
        taken = [t + n for t, n in zip(taken, counts, strict=True)]
        parts[name] = np.sort(np.concatenate(chosen))
    rest = [rows[t:] for rows, t in zip(classes, taken, strict=True)]
    return {"train": np.sort(np.concatenate(rest)), **parts}


def _proportional(weights: Sequence[int], total: int, room: Sequence[int]) -> list[int]:
    """`total` divided in proportion to `weights`: at least one each, and one left of everybody's `room`."""
    ideal = [weight * total / sum(weights) for weight in weights]
    counts = [min(max(1, int(share)), space - 1) for share, space in zip(ideal, room, strict=True)]
    while sum(counts) < total:
        open_ones = [i for i, space in enumerate(room) if counts[i] < space - 1]
        if not open_ones:
            break
        best = max(open_ones, key=lambda i: (ideal[i] - counts[i], -i))
        counts[best] += 1
    while sum(counts) > total and max(counts) > 1:
        counts[max((i for i in range(len(counts)) if counts[i] > 1), key=lambda i: counts[i] - ideal[i])] -= 1
    return counts


def missing_splits(present: Sequence[str]) -> list[str]:
    """The splits that have to be cut from "train"; none when there is no "train" to cut from."""
    return [name for name in SPLITS if name not in present] if "train" in present else []


def cut_rows(
    labels: "NDArray[np.int64]", label_names: Sequence[str], missing: Sequence[str], *, seed: int
) -> "dict[str, NDArray[np.int64]]":
    """Rows of "train" and of every missing split, 10% of the images each and at least one image a class.

    Raises:
        UserError: a class has too few images to be in every split.
    """
    counts: list[int] = np.bincount(labels, minlength=len(label_names)).tolist()
    needed = len(missing) + 1
    # A class without any image is one that a bigger data set named and this part of it lacks.
    short = [i for i, count in enumerate(counts) if 0 < count < needed]
    if short:
        first = short[0]
        more = f" ({len(short)} classes are that small)" if len(short) > 1 else ""
        images = "1 image" if counts[first] == 1 else f"{counts[first]} images"
        raise UserError(
            f"class '{label_names[first]}' has {images}{more}; to cut {' and '.join(missing)} from the training images "
            f"every class needs at least {needed}: add images, or give the splits as folders train, validation and test"
        )
    size = max(int(np.count_nonzero(counts)), round(CUT_SHARE * len(labels)))
    return stratified_parts(labels, dict.fromkeys(missing, size), seed=seed)


def streamed_part(content: bytes, missing: Sequence[str], *, seed: int) -> str:
    """The split an image of a stream belongs to: by a hash of its file, so in expectation 10% of every class.

    Needs no knowledge of the other images, and gives the same answer in every worker and on every machine.
    """
    position = zlib.crc32(content, seed) / 2**32
    index = int(position / CUT_SHARE)
    return missing[index] if index < len(missing) else "train"
