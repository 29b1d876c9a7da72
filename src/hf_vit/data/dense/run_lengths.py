"""An object's mask in any of COCO's ways as run lengths; by pycocotools."""

import io
from typing import Any

import numpy as np
from PIL import Image

from hf_vit.errors import UserError


def run_lengths(mask: Any, height: int, width: int, place: str) -> dict[str, Any]:
    """{"size": [H, W], "counts": bytes} of an object's mask.

    Args:
        mask: polygons [[x1, y1, x2, y2, ...], ...] in px, run lengths {"size", "counts"}, or {"bytes": a file} of
            a picture that is 0 outside of the object.
        height, width: of its image, px.
        place: which object, for the error.

    Raises:
        UserError: it is none of these, of another size, or empty; or pycocotools is not installed.
    """
    coded = require_pycocotools()
    if isinstance(mask, dict) and "bytes" in mask:
        encoded = _of_file(mask["bytes"], height, width, place)
    elif isinstance(mask, dict):
        encoded = _of_run_lengths(mask, height, width, place)
    else:
        encoded = _of_polygons(mask, height, width, place)
    if not coded.area(encoded):
        raise UserError(f"{place} with an empty mask")
    return {"size": [height, width], "counts": encoded["counts"]}


def require_pycocotools() -> Any:
    """pycocotools' masks.

    Raises:
        UserError: it is not installed.
    """
    try:
        from pycocotools import mask
    except ImportError as error:
        raise UserError("masks of objects need pycocotools; pip install 'hf-vit[dense]'") from error
    return mask


def _of_file(content: bytes | None, height: int, width: int, place: str) -> Any:
    if content is None:
        raise UserError(f"{place} with a mask that is not in the table, but elsewhere")
    try:
        with Image.open(io.BytesIO(content)) as opened:
            mask = np.asarray(opened)
    except Exception as error:  # Pillow's plug-ins raise OSError, SyntaxError, ValueError, struct.error, ...
        raise UserError(f"{place} with a mask that is corrupt or no image") from error
    if mask.ndim != 2:
        raise UserError(f"{place} with a mask in colour; needed: one channel, 0 outside of the object")
    _same_size(mask.shape, height, width, place)
    return require_pycocotools().encode(np.asfortranarray(mask != 0, dtype=np.uint8))


def _of_run_lengths(mask: dict[str, Any], height: int, width: int, place: str) -> Any:
    coded = require_pycocotools()
    size, counts = mask.get("size"), mask.get("counts")
    if not isinstance(size, list | tuple) or len(size) != 2 or not isinstance(counts, list | str | bytes):
        raise UserError(f"{place} with a mask that is neither polygons nor run lengths")
    _same_size((size[0], size[1]), height, width, place)
    try:
        if isinstance(counts, list):
            if sum(counts) != height * width:
                raise ValueError
            return coded.frPyObjects({"size": [height, width], "counts": counts}, height, width)
        whole = {"size": [height, width], "counts": counts.encode() if isinstance(counts, str) else counts}
        return coded.encode(np.asfortranarray(coded.decode(whole)))  # decoding checks that they fill the image
    except (ValueError, TypeError) as error:
        raise UserError(f"{place} with run lengths that do not fill {height}x{width} px") from error


def _of_polygons(mask: Any, height: int, width: int, place: str) -> Any:
    coded = require_pycocotools()
    polygons = mask if isinstance(mask, list) and mask and isinstance(mask[0], list) else [mask]
    try:
        corners = [np.asarray(polygon, dtype=np.float64).ravel() for polygon in polygons]
    except (TypeError, ValueError):
        corners = [np.zeros(0)]
    if any(len(each) < 6 or len(each) % 2 or not np.isfinite(each).all() for each in corners):
        raise UserError(f"{place} with a polygon that is not three or more corners x, y")
    return coded.merge(coded.frPyObjects([each.tolist() for each in corners], height, width))


def _same_size(size: tuple[Any, ...], height: int, width: int, place: str) -> None:
    if tuple(size) != (height, width):
        raise UserError(f"{place} with a mask of {size[0]}x{size[1]} px, where the image is {height}x{width} px")
