"""Encode lists of pixels in the tables of a source as image files."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hf_vit.data.images import WHITE, note_dark_images
from hf_vit.errors import UserError

# Red, green, blue and opacity.
_CHANNELS = 4


def encode_images(
    splits: Mapping[str, Any], column: str, name: str, notes: list[str], *, may_read_twice: bool = True
) -> dict[str, Any]:
    """Return tables or streams whose image column is undecoded; lists of pixels are encoded as PNG or TIFF files.

    A first pass, if `may_read_twice`, finds the lowest and highest value of all splits. Values within 0..255 count as
    8-bit values, whatever their type is, and floats within 0..1 as fractions of 255. A note on images that would be
    almost black is appended to `notes`.
    """
    import pyarrow as pa
    from datasets import Dataset, Features, Image
    from pyarrow import types

    features: Features = next(iter(splits.values())).features
    column_type: Any = features.arrow_schema.field(column).type
    list_type: Any = getattr(column_type, "storage_type", column_type)  # Array2D and Array3D have one
    number_type = list_type
    while types.is_list(number_type) or types.is_large_list(number_type) or types.is_fixed_size_list(number_type):
        number_type = number_type.value_type
    image = Image(decode=False)
    location = f"the column '{column}' of '{name}'"
    if types.is_primitive(list_type):
        raise UserError(f"{location} holds {list_type} instead of images; give their column with --image-column")
    if number_type == list_type:  # no lists of pixels
        return {split: table.cast_column(column, image) for split, table in splits.items()}
    low, high = 0, 255
    if may_read_twice and (types.is_integer(number_type) or types.is_floating(number_type)):
        low, high = _find_extremes(splits, column, list_type, is_floating=types.is_floating(number_type))
        notes += note_dark_images(high, 8) if types.is_integer(number_type) else []
    elif not (may_read_twice or number_type == pa.uint8() or types.is_boolean(number_type)):
        raise UserError(
            f"{location} holds pixels as {number_type}, whose range is unknown before all are read; leave "
            "--streaming out"
        )
    encode = functools.partial(_encode_pixels, column=column, location=location, low=low, high=high)
    encoded: dict[str, Any] = {}
    for split, table in splits.items():
        if isinstance(table, Dataset):
            batches: Any = table.iter(100)
            encoded_images = [encoded_image for batch in batches for encoded_image in encode(batch)[column]]
            encoded[split] = table.remove_columns([column]).add_column(column, encoded_images, feature=image)  # pyright: ignore[reportArgumentType]
        else:
            encoded[split] = table.map(encode, batched=True, features=Features({**features, column: image}))
    return encoded


def _find_extremes(splits: Mapping[str, Any], column: str, list_type: Any, *, is_floating: bool) -> tuple[Any, Any]:
    """Return the lowest and highest pixel of all splits; (0, 0) without pixels."""
    import pyarrow as pa
    import pyarrow.compute

    pc: Any = pyarrow.compute  # Any: its functions are created at import
    extremes: list[Any] = []
    for table in splits.values():
        for batch in table.with_format("arrow").iter(100):
            numbers = pc.list_flatten(batch.column(column).cast(list_type), recursive=True)
            ends = pc.min_max(numbers.cast(pa.float64()) if is_floating else numbers).as_py()
            extremes += [end for end in ends.values() if end is not None]
    return min(extremes, default=0), max(extremes, default=0)


def _encode_pixels(
    batch: Mapping[str, Any], *, column: str, location: str, low: int, high: int
) -> dict[str, list[Any]]:
    """Encode the pixel lists of a batch as image files; `low` and `high` are the extreme values of the data set."""
    from datasets.features.image import encode_np_array

    images: list[Any] = []
    are_bytes = low >= 0 and high <= 255
    for numbers in batch[column]:
        if numbers is None:
            images.append({"bytes": None, "path": None})
            continue
        pixels = _arrange_pixels(numbers)
        if pixels.dtype.kind == "f" and are_bytes and np.isfinite(pixels).all():
            pixels = np.rint(pixels * (255 if high <= WHITE else 1)).astype(np.uint8)
        is_gray = pixels.ndim == 2 and pixels.dtype.kind in "uifb"
        has_colors = pixels.ndim == 3 and pixels.shape[2] <= _CHANNELS and pixels.dtype.kind in "ui" and are_bytes
        if not (has_colors or is_gray) or not pixels.size:
            _refuse_pixels(pixels, location, low, high)
        if pixels.dtype.kind in "ui":  # the types that image files hold
            pixels = pixels.astype(np.uint8) if are_bytes else pixels.clip(-(2**31), 2**31 - 1).astype(np.int32)
        images.append(encode_np_array(pixels))
    return {column: images}


def _refuse_pixels(pixels: NDArray[Any], location: str, low: int, high: int) -> NoReturn:
    """Raise UserError for an array that is no image; for flat lists with a square shape that would fit."""
    shape = "x".join(map(str, pixels.shape)) or "different lengths"
    values = f" with numbers from {low:,} to {high:,}" if pixels.dtype.kind in "uif" else f" ({pixels.dtype})"
    example = ""
    for channels in (1, 3) if pixels.ndim == 1 else ():
        side = math.isqrt(pixels.size // channels)
        if side * side * channels == pixels.size:
            example = f", such as {side}x{side}x{channels}"
            break
    raise UserError(
        f"{location} holds lists of {shape}{values}; save them as height x width numbers, or as height x width x "
        f"1 or 3 channels (with opacity 2 or 4) of numbers from 0 to 255 or 0 to 1{example}"
    )


def _arrange_pixels(numbers: object) -> NDArray[Any]:
    """Return nested lists as an array [H, W, C], or [H, W] for one channel; an empty shape for unequal rows."""
    try:
        pixels = np.array(numbers)
    except ValueError:  # rows of different lengths
        return np.array(None)
    if pixels.ndim == 3 and pixels.shape[2] > _CHANNELS and pixels.shape[0] in (1, 3, _CHANNELS):
        pixels = np.moveaxis(pixels, 0, 2)
    return pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
