"""One picture, whatever its mode, as the 8-bit RGB a model is fed with."""

import io
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image, ImageOps

from hf_vit.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WHITE = (255, 255, 255, 255)
# Pillow converts these exactly: bilevel, 8-bit gray, palette, CMYK, YCbCr, HSV, padded RGB.
_CONVERTED_BY_PILLOW = ("1", "L", "P", "CMYK", "YCbCr", "HSV", "RGBX")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any photograph to 8-bit RGB as a viewer would show it.

    The EXIF orientation is applied. Transparency (LA, RGBA, palettes, a transparent colour) is composited on white, as
    transformers' image processors do. 16-bit gray is scaled by 255/65535, where Pillow's own conversion clips at 255.
    Of animations the first frame counts.

    Args:
        image: a Pillow image of any mode.

    Returns:
        An image of mode RGB; the same object when nothing had to change.

    Raises:
        UserError: a mode without a defined way to RGB (LAB), or numbers outside the 16-bit (mode I) or the 0..1 and
            0..255 ranges (mode F).
    """
    # Some plug-ins know width and height, but no orientation, before the pixels are loaded.
    image.load()
    if image.getexif().get(0x0112, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode.startswith("I"):
        return _from_integers(image)
    if image.mode == "F":
        return _from_floats(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, _WHITE), rgba).convert("RGB")
    if image.mode not in _CONVERTED_BY_PILLOW:
        raise UserError(f"images of mode {image.mode} cannot be converted to RGB; save them as RGB or grayscale first")
    return image.convert("RGB")


Made = TypeVar("Made")


def each_in_threads(function: Callable[..., Made], items: Sequence[Any], *others: Iterable[Any]) -> list[Made]:
    """As `map`, in as many threads as torch computes in: in a loader's worker that is one.

    Pillow lets others work while it decodes and resizes. An item that is there twice is not for two threads at once.
    """
    import torch

    count = min(torch.get_num_threads(), len(items))
    if count < 2 or len(set(map(id, items))) < len(items):
        return list(map(function, items, *others))
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, items, *others))


def opened(file: "str | os.PathLike[str] | io.BytesIO", draft_side: int | None = None) -> Image.Image:
    """A picture that nobody has decoded yet, unless there is a part of a pixel at its edge.

    Args:
        file: its path or content.
        draft_side: decode JPEG at the smallest of its scales (1, 1/2, 1/4, 1/8) at which both sides have so many px.
    """
    image = Image.open(file)
    drafted = None if draft_side is None else image.draft(None, (draft_side, draft_side))
    if drafted is None or drafted[1][2:] == image.size:
        return image
    # Of 511 px halved the last is half filling, which would shift and stretch the picture.
    with image:
        return image.resize(image.size, Image.Resampling.BILINEAR, box=drafted[1])


def tell_dark(highest: int, bits: int) -> list[str]:
    """Return a note if no pixel of so many bits uses the upper two of them; an image that is all black has none."""
    full = (1 << bits) - 1
    if not 0 < highest <= full >> 2:
        return []
    return [
        f"images of {bits} bits reach {highest:,} of {full:,}, so they are seen in {highest / full:.0%} of the "
        f"brightness; multiply them (all by the same number) if their full range is less than {bits} bits"
    ]


def _from_integers(image: Image.Image) -> Image.Image:
    # Modes I;16, I;16L, I;16B; and I, in which Pillow also opens some 16-bit files.
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise UserError(f"a {image.mode} image holds numbers from {low} to {high}; 0..65535 is needed (16 bits)")
    return _gray((values * 255 + 32767) // 65535)


def _from_floats(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255):
        raise UserError(f"a floating-point image holds numbers from {low:g} to {high:g}; 0..1 or 0..255 is needed")
    return _gray(np.rint(values * 255 if high <= 1 else values))


def _gray(values: "NDArray[np.generic]") -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")
