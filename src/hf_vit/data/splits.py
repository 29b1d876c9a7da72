"""Assign images to training, validation and test by their content, in the same way on every machine.

The split of an image depends on a hash of its file's bytes, not of its pixels: bytes do not depend on the decoder, and
a stream can skip an image without decoding it.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hf_vit.data.labels import list_classes
from hf_vit.errors import UserError

SPLITS = ("train", "validation", "test")
# The range of hashes that a missing split gets; training gets all other hashes.
_BANDS = {"validation": (0.0, 0.1), "test": (0.1, 0.2)}
# The cut belongs to the data, not to a run: trainings with any seed and later evaluations use the same test images.
SPLIT_SEED = 0
_SYNONYMS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def split_name(text: str) -> str | None:
    """Return the split that the name of a folder or split stands for ("val_2017", "valset": "validation"), or None."""
    return _SYNONYMS.get(re.sub(r"[ _-]?((19|20)\d\d|set|images|data)$", "", text.strip().lower()))


def list_missing_splits(present: Sequence[str]) -> list[str]:
    """Return the splits that have to be cut from "train"; none if "train" itself is missing."""
    return [name for name in SPLITS if name not in present] if "train" in present else []


def assign_split(digest: str, missing: Sequence[str], *, seed: int) -> str:
    """Return the split of an image with this SHA-256; each missing split gets about 10% of all images.

    The result depends on no other image, so every worker and every machine assigns the image to the same split.
    """
    return _find_band(_hash_to_unit(digest, seed), missing)


def _find_band(position: float, missing: Sequence[str]) -> str:
    return next((name for name in missing if _BANDS[name][0] <= position < _BANDS[name][1]), "train")


def _hash_to_unit(digest: str, seed: int) -> float:
    """Map a digest to a number in [0, 1) that is uniform over digests."""
    return int.from_bytes(hashlib.sha256(f"{seed} {digest}".encode()).digest()[:6]) / 2**48


def cut_rows(
    digests: Sequence[str],
    labels: "Sequence[int] | Sequence[Sequence[int]]",
    label_names: Sequence[str],
    missing: Sequence[str],
    *,
    seed: int,
) -> tuple[dict[str, NDArray[np.int64]], list[str]]:
    """Cut the missing splits from "train" by content, see `assign_split`.

    Images of equal content stay in one split. If a class would have no training image, one is moved to "train"; if a
    split would be empty, one image of every class that has several is moved there.

    Returns:
        The rows of "train" and of every missing split, and a note on every moved image.

    Raises:
        UserError: a class has fewer different images than there are splits.
    """
    contents_of: dict[int, set[str]] = {}  # class number -> digests of its images, which stand for their contents
    for digest, label in zip(digests, labels, strict=True):
        for number in list_classes(label):
            contents_of.setdefault(number, set()).add(digest)
    _refuse_small_classes(contents_of, label_names, missing)
    positions = {digest: _hash_to_unit(digest, seed) for digest in digests}
    classes = {
        label: sorted(contents_of[label], key=lambda digest: (positions[digest], digest))
        for label in sorted(contents_of)
    }
    assignment = {digest: _find_band(position, missing) for digest, position in positions.items()}
    notes: list[str] = []
    for label, contents in classes.items():
        if all(assignment[digest] != "train" for digest in contents):
            assignment[contents[-1]] = "train"
            notes.append(
                f"splitting by content left no training image of class '{label_names[label]}', so one was moved there"
            )
    for name in missing:
        if name not in assignment.values():
            count = _fill_split(name, assignment, list(classes.values()))
            notes.append(f"splitting by content left {name} without images; images moved there: {count}")
    split_of_row = np.asarray([assignment[digest] for digest in digests])
    return {name: np.flatnonzero(split_of_row == name) for name in ("train", *missing)}, notes


def _fill_split(split: str, assignment: dict[str, str], classes: Sequence[Sequence[str]]) -> int:
    """Assign one training image of every class that has several to another split, and return how many.

    The images are digests. One with several classes is moved only if there is no other, and alone.
    """
    class_counts = Counter(digest for contents in classes for digest in contents)
    in_train = [[digest for digest in contents if assignment[digest] == "train"] for contents in classes]
    single = [contents[0] for contents in in_train if len(contents) > 1 and class_counts[contents[0]] == 1]
    if single:
        assignment.update(dict.fromkeys(single, split))
        return len(single)
    last_images = {contents[0] for contents in in_train if len(contents) == 1}  # of a class in training
    several = [digest for contents in in_train for digest in contents if digest not in last_images]
    if not several:
        raise UserError(
            f"too few images to cut {split} from the training images: each is the only one of a class there; "
            "add images, or give the splits as folders train, validation and test"
        )
    assignment[several[0]] = split
    return 1


def _refuse_small_classes(
    contents_of: Mapping[int, set[str]], label_names: Sequence[str], missing: Sequence[str]
) -> None:
    """Raise UserError for a class with fewer different images than there are splits."""
    needed = len(missing) + 1
    small_classes = sorted(label for label, contents in contents_of.items() if len(contents) < needed)
    if small_classes:
        first = small_classes[0]
        count = len(contents_of[first])
        more = f" ({len(small_classes)} classes are that small)" if len(small_classes) > 1 else ""
        images = "1 image" if count == 1 else f"{count} different images"
        raise UserError(
            f"class '{label_names[first]}' has {images}{more}; to cut {' and '.join(missing)} from the "
            f"training images, every class needs at least {needed}: add images, or give the splits as folders train, "
            "validation and test"
        )
