"""What a picture bears beside one label: a mask of classes, or objects with boxes; what is known of either."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hf_vit.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

Target = Literal["label", "mask", "objects"]
# The value of a mask where nothing is judged, as in transformers and torchvision.
IGNORED = 255


@dataclass(frozen=True, slots=True)
class Annotation:
    """What is known of one image's mask or objects.

    Attributes:
        digest: SHA-256 of what it says, however it is stored.
        amounts: class number -> its pixels (mask) or objects.
    """

    digest: str
    amounts: dict[int, int]


def class_numbers(mask: "Image.Image", reduce_labels: bool = False) -> "NDArray[np.uint8]":
    """[H, W] class numbers, or `IGNORED`, of a mask as it was saved; of a palette the indices count.

    Args:
        mask: of mode "1", "L", "P" or of 16 or 32 bits.
        reduce_labels: 0 becomes `IGNORED` and every other number one less, as transformers' `do_reduce_labels` has it.

    Raises:
        UserError: it is in colour, or has numbers that are no classes.
    """
    if mask.mode not in ("1", "L", "P") and not mask.mode.startswith("I"):
        raise UserError(f"a mask in colour (mode {mask.mode}); needed: one channel of class numbers, such as mode L")
    numbers = np.asarray(mask).astype(np.int64)
    if numbers.min() < 0 or numbers.max() > IGNORED:
        worst = int(numbers.min() if numbers.min() < 0 else numbers.max())
        raise UserError(f"a mask with the value {worst}; needed: classes 0 to 254, or 255 for what is not judged")
    if reduce_labels:
        numbers = np.where((numbers == 0) | (numbers == IGNORED), IGNORED, numbers - 1)
    return numbers.astype(np.uint8)


def mask_annotation(mask: "NDArray[np.generic]") -> Annotation:
    """Of a mask [H, W] of class numbers."""
    values, counts = np.unique(mask, return_counts=True)
    content = f"{mask.shape[0]} {mask.shape[1]} ".encode() + mask.astype(np.uint8).tobytes()
    amounts = {int(value): int(count) for value, count in zip(values, counts, strict=True) if value != IGNORED}
    return Annotation(hashlib.sha256(content).hexdigest(), amounts)


def object_annotation(objects: Mapping[str, Sequence[Any]], masks: Sequence[bytes] | None) -> Annotation:
    """Of the objects of one image: {"bbox", "category", "iscrowd", ...}, and of their masks' bytes, if there are."""
    drawn = [None] * len(objects["bbox"]) if masks is None else [hashlib.sha256(mask).hexdigest() for mask in masks]
    told = zip(objects["bbox"], objects["category"], objects["iscrowd"], drawn, strict=True)
    lines = sorted(
        json.dumps([list(map(float, box)), int(label), int(crowd), mask]) for box, label, crowd, mask in told
    )
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Annotation(digest, dict(Counter(map(int, objects["category"]))))


def tight_box(mask: "NDArray[np.bool_]") -> list[float]:
    """[x, y, width, height] px around what is true in a mask [H, W], where anything is."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    left, top = int(columns[0]), int(rows[0])
    return [float(left), float(top), float(columns[-1] + 1 - left), float(rows[-1] + 1 - top)]
