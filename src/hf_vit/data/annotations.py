"""What a picture bears beside one label: a mask of classes, or objects with boxes; what is known of either."""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from hf_vit.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def class_numbers(mask: Image.Image, reduce_labels: bool = False) -> "NDArray[np.uint8]":
    """Return [H, W] class numbers, or `IGNORED`, of a mask as it was saved; of a palette the indices count.

    Args:
        mask: of mode "1", "L", "P" or of 16 or 32 bits.
        reduce_labels: 0 becomes `IGNORED` and every other number one less, as transformers' `do_reduce_labels` has it.

    Raises:
        UserError: it is in color, or has numbers that are no classes.
    """
    if mask.format == "JPEG":
        raise UserError("a mask saved as JPEG, which changes class numbers; save it as PNG")
    if mask.mode not in ("1", "L", "P") and not mask.mode.startswith("I"):
        raise UserError(f"a color mask (mode {mask.mode}); needed: one channel of class numbers, such as mode L")
    numbers = np.asarray(mask).astype(np.int64)
    if numbers.min() < 0 or numbers.max() > IGNORED:
        worst = int(numbers.min() if numbers.min() < 0 else numbers.max())
        raise UserError(f"a mask with the value {worst}; needed: classes 0 to 254, or 255 for ignored pixels")
    if reduce_labels:
        numbers = np.where((numbers == 0) | (numbers == IGNORED), IGNORED, numbers - 1)
    return numbers.astype(np.uint8)


def mask_annotation(mask: "NDArray[np.generic]") -> Annotation:
    """Return the annotation of a mask [H, W] of class numbers."""
    values, counts = np.unique(mask, return_counts=True)
    content = f"{mask.shape[0]} {mask.shape[1]} ".encode() + mask.astype(np.uint8).tobytes()
    amounts = {int(value): int(count) for value, count in zip(values, counts, strict=True) if value != IGNORED}
    return Annotation(hashlib.sha256(content).hexdigest(), amounts)


def object_annotation(objects: Mapping[str, Sequence[Any]], masks: Sequence[bytes] | None) -> Annotation:
    """Of the objects of one image: {"bbox", "category", "iscrowd", ...}, and of their masks' bytes, if there are."""
    digests = [None] * len(objects["bbox"]) if masks is None else [hashlib.sha256(mask).hexdigest() for mask in masks]
    fields = zip(objects["bbox"], objects["category"], objects["iscrowd"], digests, strict=True)
    lines = sorted(
        json.dumps([list(map(float, box)), int(label), int(crowd), mask]) for box, label, crowd, mask in fields
    )
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Annotation(digest, dict(Counter(map(int, objects["category"]))))


def tight_box(mask: "NDArray[np.bool_]") -> list[float]:
    """Return [x, y, width, height] px around what is true in a mask [H, W], where anything is."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    left, top = int(columns[0]), int(rows[0])
    return [float(left), float(top), float(columns[-1] + 1 - left), float(rows[-1] + 1 - top)]


def run_lengths(mask: Any, height: int, width: int, place: str) -> dict[str, Any]:
    """{"size": [H, W], "counts": bytes} of an object's mask in any of COCO's ways, by pycocotools.

    Args:
        mask: polygons [[x1, y1, x2, y2, ...], ...] in px, run lengths {"size", "counts"}, or {"bytes": a file} of
            a picture that is 0 outside of the object.
        height, width: of its image, px.
        place: which object, for the error.
    """
    try:
        from pycocotools import mask as coded
    except ImportError as error:
        raise UserError("masks of objects need pycocotools; pip install 'hf-vit[dense]'") from error
    kind = _encode_polygons if not isinstance(mask, dict) else _encode_file if "bytes" in mask else _encode_lengths
    try:
        encoded = kind(coded, mask, height, width)
        if not coded.area(encoded):
            raise UserError("an empty mask")
    except UserError as error:
        raise UserError(f"{place} with {error}") from error
    return {"size": [height, width], "counts": encoded["counts"]}


def _encode_file(coded: Any, mask: dict[str, Any], height: int, width: int) -> Any:
    if mask["bytes"] is None:
        raise UserError("a mask that is a reference to another file")
    try:
        with Image.open(io.BytesIO(mask["bytes"])) as opened:
            drawn = np.asarray(opened)
    except Exception as error:  # Pillow's plug-ins raise OSError, SyntaxError, ValueError, struct.error, ...
        raise UserError("a mask that is corrupt or no image") from error
    if drawn.ndim != 2:
        raise UserError("a color mask; needed: one channel, 0 outside of the object")
    _refuse_other_size(drawn.shape, height, width)
    return coded.encode(np.asfortranarray(drawn != 0, dtype=np.uint8))


def _encode_lengths(coded: Any, mask: dict[str, Any], height: int, width: int) -> Any:
    size, counts = mask.get("size"), mask.get("counts")
    if not isinstance(size, list | tuple) or len(size) != 2 or not isinstance(counts, list | str | bytes):
        raise UserError("a mask that is neither polygons nor run lengths")
    _refuse_other_size(tuple(size), height, width)
    whole = {"size": [height, width], "counts": counts.encode() if isinstance(counts, str) else counts}
    try:
        if isinstance(counts, list):
            if not all(type(each) is int and each >= 0 for each in counts) or sum(counts) != height * width:
                raise ValueError
            return coded.frPyObjects(whole, height, width)
        return coded.encode(np.asfortranarray(coded.decode(whole)))  # decoding checks that they fill the image
    except (ValueError, TypeError) as error:
        raise UserError(f"run lengths that do not fill {height}x{width} px") from error


def _encode_polygons(coded: Any, mask: Any, height: int, width: int) -> Any:
    polygons = mask if isinstance(mask, list) and mask and isinstance(mask[0], list) else [mask]
    try:
        corners = [np.asarray(polygon, dtype=np.float64).ravel() for polygon in polygons]
    except (TypeError, ValueError, OverflowError):
        corners = [np.zeros(0)]
    if any(len(each) < 6 or len(each) % 2 or not np.isfinite(each).all() for each in corners):
        raise UserError("a polygon that is not three or more corners x, y")
    if any(np.abs(each).max() > 10 * (height + width) for each in corners):  # whose memory grows with its length
        raise UserError(f"a polygon far outside the image of {height}x{width} px")
    return coded.merge(coded.frPyObjects([each.tolist() for each in corners], height, width))


def _refuse_other_size(size: tuple[Any, ...], height: int, width: int) -> None:
    if size != (height, width):
        raise UserError(f"a mask of {size[0]}x{size[1]} px, where the image is {height}x{width} px")
