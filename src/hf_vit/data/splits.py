"""Dealing images to training, validation and test: by their content, the same on every machine.

An image's place is a hash of its file's bytes, not of its pixels: bytes are the same whatever decodes them, and a
stream need not decode an image to know that it is not wanted.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hf_vit.data.labels import classes_of
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLITS = ("train", "validation", "test")
# The part of all hashes that a missing split gets. Training has the rest, and that of a split which is there.
_BANDS = {"validation": (0.0, 0.1), "test": (0.1, 0.2)}
# The split of data that comes without validation or test is part of the data, not of a run: every seed of a training,
# and every evaluation later, has the same test images.
SPLIT_SEED = 0
_SYNONYMS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def split_name(text: str) -> str | None:
    """Return the split that a folder's or a Hub split's name means ("Val" is "validation"), or None."""
    return _SYNONYMS.get(text.strip().lower())


def stratified_parts(
    labels: "NDArray[np.int64]", sizes: Mapping[str, int], *, seed: int
) -> "dict[str, NDArray[np.int64]]":
    """Deal the rows out: `sizes` images to each named part, the rest to "train", every class in proportion.

    Shares are rounded by largest remainders, every class gets at least one image, and one of it stays in "train".
    NumPy's RandomState is frozen across versions and platforms, hence the same rows on every machine. `labels` are the
    classes [rows], `seed` shuffles within every class; the rows of every part are ascending, "train" comes first.
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
    """Return the splits that have to be cut from "train"; none when there is no "train" to cut from."""
    return [name for name in SPLITS if name not in present] if "train" in present else []


def part_of(digest: str, missing: Sequence[str], *, seed: int) -> str:
    """Return the split that an image falls to by its content: of each missing one 10% of all images, in expectation.

    Needs no knowledge of the other images, and gives the same answer in every worker and on every machine. `digest` is
    the SHA-256 of its file; another seed gives another cut.
    """
    place = _place(digest, seed)
    return next((name for name in missing if _BANDS[name][0] <= place < _BANDS[name][1]), "train")


def _place(digest: str, seed: int) -> float:
    """Return a number in [0, 1), uniform over hashes."""
    return int.from_bytes(hashlib.sha256(f"{seed} {digest}".encode()).digest()[:6]) / 2**48


def cut_rows(
    digests: Sequence[str],
    labels: "Sequence[int] | Sequence[Sequence[int]]",
    label_names: Sequence[str],
    missing: Sequence[str],
    *,
    seed: int,
) -> "tuple[dict[str, NDArray[np.int64]], list[str]]":
    """Return the rows of "train" and of every missing split, by content (`part_of`), and notes where that cannot be.

    Images of equal content stay together. Where a class would have no training image, one goes there; where a split
    would have no image at all, every class gives one that it can spare.

    Raises:
        UserError: a class has fewer different images than there are splits.
    """
    contents_of: dict[int, set[str]] = {}
    for digest, label in zip(digests, labels, strict=True):
        for each in classes_of(label):
            contents_of.setdefault(each, set()).add(digest)
    needed = len(missing) + 1
    short = sorted(label for label, contents in contents_of.items() if len(contents) < needed)
    if short:
        count = len(contents_of[short[0]])
        more = f" ({len(short)} classes are that small)" if len(short) > 1 else ""
        images = "1 image" if count == 1 else f"{count} different images"
        raise UserError(
            f"class '{label_names[short[0]]}' has {images}{more}; to cut {' and '.join(missing)} from the training "
            f"images every class needs at least {needed}: add images, or give the splits as folders train, validation "
            "and test"
        )
    classes = {
        label: sorted(contents_of[label], key=lambda digest: (_place(digest, seed), digest))
        for label in sorted(contents_of)
    }
    parts = {digest: part_of(digest, missing, seed=seed) for digest in digests}
    notes: list[str] = []
    for label, contents in classes.items():
        if all(parts[digest] != "train" for digest in contents):
            parts[contents[-1]] = "train"
            notes.append(f"by content class '{label_names[label]}' had no training image, so one was moved there")
    owners = Counter(digest for contents in classes.values() for digest in contents)
    for name in missing:
        if name in parts.values():
            continue
        spared = [[digest for digest in contents if parts[digest] == "train"] for contents in classes.values()]
        parts |= {contents[0]: name for contents in spared if len(contents) > 1 and owners[contents[0]] == 1}
        notes.append(f"by content no image was for {name}; one of each class was moved there")
    dealt = np.asarray([parts[digest] for digest in digests])
    return {name: np.flatnonzero(dealt == name) for name in ("train", *missing)}, notes
