"""Masks of classes and objects with boxes: decode them, summarize them, and encode masks of objects."""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hf_vit.errors import UserError

Target = Literal["label", "mask", "objects"]
# What a split needs, for messages.
LABELED = {"mask": "pixels of any class", "objects": "objects besides crowds (iscrowd 1)"}
# Mask value of pixels that losses and metrics ignore, as in transformers and torchvision.
IGNORED = 255


@dataclass(frozen=True, slots=True)
class Annotation:
    """Summary of the mask or objects of one image.

    Attributes:
        digest: SHA-256 of the content, independent of the storage format.
        amounts: class number -> number of its pixels (mask), or of its objects without crowds.
    """

    digest: str
    amounts: dict[int, int]


def read_class_numbers(mask: Image.Image, reduce_labels: bool) -> NDArray[np.uint8]:
    """Return the class numbers of a saved mask, [H, W], with `IGNORED` for ignored pixels.

    The palette indices of a mask of mode "P" are its classes. With `reduce_labels` 0 becomes `IGNORED` and every other
    number is reduced by 1, as transformers' `do_reduce_labels` does. Raises UserError for a mask in color or with
    values outside 0..255; its text continues "image NAME has".
    """
    if mask.format == "JPEG":
        raise UserError("a mask saved as JPEG, which changes class numbers; save masks as PNG")
    if mask.mode not in ("1", "L", "P") and not mask.mode.startswith("I"):
        raise UserError(f"a color mask (mode {mask.mode}); save masks with one channel of class numbers (mode L)")
    numbers = np.asarray(mask).astype(np.int64)
    if numbers.min() < 0 or numbers.max() > IGNORED:
        invalid = int(numbers.min() if numbers.min() < 0 else numbers.max())
        raise UserError(f"a mask with the value {invalid}; write classes as 0 to 254, and ignored pixels as 255")
    if reduce_labels:
        numbers = np.where((numbers == 0) | (numbers == IGNORED), IGNORED, numbers - 1)
    return numbers.astype(np.uint8)


def summarize_mask(mask: NDArray[np.generic]) -> Annotation:
    """Summarize a mask of class numbers, [H, W] (height, width)."""
    values, counts = np.unique(mask, return_counts=True)
    content = f"{mask.shape[0]} {mask.shape[1]} ".encode() + mask.astype(np.uint8).tobytes()
    amounts = {int(value): int(count) for value, count in zip(values, counts, strict=True) if value != IGNORED}
    return Annotation(hashlib.sha256(content).hexdigest(), amounts)


def summarize_objects(objects: Mapping[str, Sequence[Any]], masks: Sequence[bytes] | None) -> Annotation:
    """Summarize the objects of one image: lists "bbox", "category" and "iscrowd", and the encoded masks if any."""
    digests = [None] * len(objects["bbox"]) if masks is None else [hashlib.sha256(mask).hexdigest() for mask in masks]
    fields = zip(objects["bbox"], objects["category"], objects["iscrowd"], digests, strict=True)
    lines = [json.dumps([list(map(float, box)), int(label), int(crowd), mask]) for box, label, crowd, mask in fields]
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()  # sorted, as their order does not matter
    pairs = zip(objects["category"], objects["iscrowd"], strict=True)
    return Annotation(digest, dict(Counter(label for label, is_crowd in pairs if not is_crowd)))


def find_tight_box(mask: NDArray[np.bool_]) -> list[float]:
    """Return the box [x, y, width, height] px around the true pixels of a mask [H, W] that has at least one."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    left, top = int(columns[0]), int(rows[0])
    return [float(left), float(top), float(columns[-1] + 1 - left), float(rows[-1] + 1 - top)]


def encode_mask(mask: Any, height: int, width: int, object_name: str) -> tuple[dict[str, Any], float]:
    """Encode an object's mask as COCO's compressed run lengths {"size": [H, W], "counts": bytes}; also return its area.

    The mask is polygons [[x1, y1, x2, y2, ...], ...] in px, run lengths {"size", "counts"}, or {"bytes": an image file
    that is 0 outside of the object}. Raises UserError if it is empty, damaged or of another size than the image. The
    functions below raise the end of that message, after "OBJECT with".
    """
    from pycocotools import mask as mask_api

    encode = _encode_polygons
    if isinstance(mask, dict):
        encode = _encode_file if "bytes" in mask else _encode_lengths
    try:
        encoded = encode(mask_api, mask, height, width)
        area = float(mask_api.area(encoded))
        if not area:
            raise UserError("an empty mask; draw it again, or remove the object")
    except UserError as error:
        raise UserError(f"{object_name} with {error}") from error
    return {"size": [height, width], "counts": encoded["counts"]}, area


def _encode_file(mask_api: Any, mask: dict[str, Any], height: int, width: int) -> Any:
    """Encode the mask in an image file as run lengths."""
    if mask["bytes"] is None:
        raise UserError("a mask that only names another file; store the mask's own bytes in the column")
    try:
        with Image.open(io.BytesIO(mask["bytes"])) as picture:
            pixels = np.asarray(picture)
    except Exception as error:  # Pillow's plug-ins raise OSError, SyntaxError, ValueError, struct.error, ...
        raise UserError("a mask that is damaged or not an image; save it again as PNG") from error
    if pixels.ndim != 2:
        raise UserError("a color mask; save masks with one channel that is 0 outside the object")
    _refuse_other_size(pixels.shape, height, width)
    return mask_api.encode(np.asfortranarray(pixels != 0, dtype=np.uint8))


def _encode_lengths(mask_api: Any, mask: dict[str, Any], height: int, width: int) -> Any:
    """Check run lengths and return them in compressed form."""
    size, counts = mask.get("size"), mask.get("counts")
    if not isinstance(size, list | tuple) or len(size) != 2 or not isinstance(counts, list | str | bytes):
        raise UserError(
            "a mask that is neither polygons nor a run-length encoding; write it in one of COCO's two forms"
        )
    _refuse_other_size(tuple(size), height, width)
    encoded = {"size": [height, width], "counts": counts.encode() if isinstance(counts, str) else counts}
    try:
        if isinstance(counts, list):
            if not all(type(count) is int and count >= 0 for count in counts) or sum(counts) != height * width:
                raise ValueError
            return mask_api.frPyObjects(encoded, height, width)
        return mask_api.encode(np.asfortranarray(mask_api.decode(encoded)))  # decoding checks that they fill the image
    except (ValueError, TypeError) as error:
        raise UserError(
            f"a run-length encoded mask that does not fill {height}x{width} px; encode it again for this image size"
        ) from error


def _encode_polygons(mask_api: Any, mask: Any, height: int, width: int) -> Any:
    """Encode the area of one polygon [x1, y1, x2, y2, ...], or of several in a list, as run lengths."""
    has_several = isinstance(mask, list) and mask and isinstance(mask[0], list)
    no_polygon = UserError("a polygon with fewer than three corners; write at least three pairs x, y")
    try:
        polygons = [np.asarray(polygon, dtype=np.float64).ravel() for polygon in (mask if has_several else [mask])]
    except (TypeError, ValueError, OverflowError) as error:
        raise no_polygon from error
    for polygon in polygons:
        if len(polygon) < 6 or len(polygon) % 2 or not np.isfinite(polygon).all():
            raise no_polygon
    if any(np.abs(polygon).max() > 10 * (height + width) for polygon in polygons):  # its encoding would fill the memory
        raise UserError(f"a polygon that is far outside the image of {height}x{width} px; write corners as x, y in px")
    return mask_api.merge(mask_api.frPyObjects([polygon.tolist() for polygon in polygons], height, width))


def _refuse_other_size(size: tuple[Any, ...], height: int, width: int) -> None:
    if size != (height, width):
        raise UserError(f"a mask of {size[0]}x{size[1]} px for an image of {height}x{width} px; make their sizes equal")
