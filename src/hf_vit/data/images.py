"""Images: the one place where they are decoded, as the 8-bit RGB that a model is fed with, and checked."""

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import numpy as np
from PIL import Image, ImageOps

from hf_vit.data.annotations import Annotation
from hf_vit.display import progress_bar
from hf_vit.errors import UserError
from hf_vit.repositories.stores import StoreError, in_store, place_of, read

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray

# Pillow converts these exactly: bilevel, 8-bit gray, palette, CMYK, YCbCr, HSV, padded RGB.
_CONVERTED_BY_PILLOW = ("1", "L", "P", "CMYK", "YCbCr", "HSV", "RGBX")
# Tags of TIFF files and of EXIF.
_BITS, _PHOTOMETRIC, _ORIENTATION = 0x0102, 0x0106, 0x0112
# Below this many images the scan is over before a progress bar would help.
PROGRESS_FROM = 2000
_REMEDY = "replace or remove it, or pass skip_bad_images (--skip-bad-images) to go on without it"
Result = TypeVar("Result")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any photograph to 8-bit RGB as a viewer would show it.

    The EXIF orientation is applied. Transparency (LA, RGBA, palettes, a transparent color) is composited on white, as
    transformers' image processors do. 12-bit and 16-bit gray is scaled to 0..255, where Pillow's own conversion clips
    at 255, and inverted where a TIFF file counts from white. Of animations the first frame counts. An RGB image
    without any of this is returned as it is.

    Raises:
        UserError: a mode without a defined way to RGB (LAB), or numbers outside the 16-bit (mode I) or the 0..1 and
            0..255 ranges (mode F).
    """
    # Some plug-ins know width and height, but no orientation, before the pixels are loaded.
    image.load()
    tags = getattr(image, "tag_v2", {})
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode.startswith("I"):  # I;16, I;16L, I;16B; and I, in which Pillow also opens some 16-bit files
        full = 4095 if tags.get(_BITS) == (12,) else 65535
        values = _black_is_zero(np.asarray(image).astype(np.int64), tags, full)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > full:
            raise UserError(f"an image of mode {image.mode} holds numbers from {low} to {high}; needed: 0..{full}")
        return _gray((values * 255 + full // 2) // full)
    if image.mode == "F":
        values = np.asarray(image).astype(np.float64)
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and high <= 255):
            raise UserError(f"a floating-point image holds numbers from {low:g} to {high:g}; 0..1 or 0..255 is needed")
        return _gray(np.rint(_black_is_zero(values * 255 if high <= 1 else values, tags, 255)))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba).convert("RGB")
    if image.mode not in _CONVERTED_BY_PILLOW:
        raise UserError(f"images of mode {image.mode} cannot be converted to RGB; save them as RGB or grayscale first")
    return image.convert("RGB")


def _black_is_zero(values: Any, tags: Mapping[int, Any], full: int) -> Any:
    """Return the numbers of a TIFF file counted from black: Pillow inverts those of 8 bits alone."""
    return full - values if tags.get(_PHOTOMETRIC) == 0 else values


def _gray(values: "NDArray[np.generic]") -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def decode_image(
    image: Image.Image | Mapping[str, Any] | str | os.PathLike[str] | IO[bytes], draft_side: int | None = None
) -> Image.Image:
    """Return any image as 8-bit RGB, see `to_rgb`.

    Args:
        image: Pillow's, a file by its path, address or content, or {"bytes", "path"} as `datasets` keeps them.
        draft_side: decode JPEG at the smallest of its scales (1, 1/2, 1/4, 1/8) at which both sides have so many px.

    Raises:
        UserError: see `to_rgb`; StoreError where a store does not give it.
        Exception: what Pillow and the disk raise, see `image_problem`.
    """
    if isinstance(image, Image.Image):
        return to_rgb(image)
    if isinstance(image, Mapping):
        image = io.BytesIO(_content(image))
    elif not hasattr(image, "read") and in_store(cast("str | Path", image)):
        image = io.BytesIO(read(place_of(cast("str | Path", image))))
    return _decoded(image, draft_side)[0]


def _decoded(file: "str | os.PathLike[str] | IO[bytes]", draft_side: int | None) -> tuple[Image.Image, int, bool]:
    """Return the image, its brightest pixel if it has 16 bits, and whether its EXIF orientation turned it."""
    with Image.open(file) as picture:
        drafted = None if draft_side is None else picture.draft(None, (draft_side, draft_side))
        if drafted is not None and drafted[1][2:] != picture.size:
            # Of 511 px halved the last is half filling, which would shift and stretch the picture.
            return to_rgb(picture.resize(picture.size, Image.Resampling.BILINEAR, box=drafted[1])), 0, False
        # Pillow keeps the upper 8 bits of colors with 16, and turns TIFF files itself: both shows before pixels alone.
        has_16_bits = any(";16" in str(tile.args) for tile in picture.tile)
        before = picture.getexif().get(_ORIENTATION, 1)
        image = to_rgb(picture)
        turned = {before, picture.getexif().get(_ORIENTATION, 1)} - {0, 1}
        tags = getattr(picture, "tag_v2", {})
        if picture.mode.startswith("I") and tags.get(_PHOTOMETRIC) != 0 and tags.get(_BITS) != (12,):
            return image, int(np.asarray(picture).max()), bool(turned)
        return image, int(np.asarray(image).max()) * 257 if has_16_bits else 0, bool(turned)


def _content(stored: Mapping[str, Any]) -> bytes:
    content, path = stored.get("bytes"), stored.get("path")
    if content is not None:
        return content
    if path is None:
        raise UserError("is missing: its row of the table is empty")
    return read(place_of(path)) if in_store(path) else Path(path).read_bytes()


def image_problem(error: Exception) -> str:
    """Return what is wrong with an image that could not be decoded; a failing store says nothing of it and is
    raised again.
    """
    if isinstance(error, StoreError):
        raise error
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, Image.UnidentifiedImageError):
        return "is not an image, or has a format that Pillow does not support"
    if isinstance(error, FileNotFoundError):
        return "is not there"
    if isinstance(error, Image.DecompressionBombError):
        return f"has more pixels than are decoded ({error}); cut it into smaller images"
    # Pillow's plug-ins raise OSError, SyntaxError, ValueError, struct.error, ...
    detail = " ".join(str(error).split()) or type(error).__name__
    return f"is corrupt or cannot be read ({detail:.200})"


def each_in_threads(function: Callable[..., Result], items: Sequence[Any], *others: Iterable[Any]) -> list[Result]:
    """Map a function over items in as many threads as torch uses: one in a data loading worker.

    Pillow lets others work while it decodes and resizes. An item that is there twice is not for two threads at once.
    """
    import torch

    count = min(torch.get_num_threads(), len(items))
    if count < 2 or len(set(map(id, items))) < len(items):
        return list(map(function, items, *others))
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, items, *others))


def tell_dark(highest: int, bits: int) -> list[str]:
    """Return a note if no pixel of so many bits uses the upper two of them; an image that is all black has none."""
    full = (1 << bits) - 1
    if not 0 < highest <= full >> 2:
        return []
    return [
        f"images of {bits} bits reach {highest:,} of {full:,}, so they look dark ({highest / full:.0%} "
        f"brightness); multiply all by the same number if their full range is less than {bits} bits"
    ]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the scan learned of an image: name, content hash, size in px, what is wrong with it if anything is, of dense
    data its mask or objects, the brightest pixel of 16 bits, and whether its EXIF orientation turned it."""

    name: str
    digest: str
    height: int = 0
    width: int = 0
    problem: str | None = None
    annotation: Annotation | None = None
    peak: int = 0
    is_turned: bool = False

    def problem_below(self, min_size: tuple[int, int]) -> str | None:
        """Return the problem, given that the image must have at least min_size (height, width) px."""
        if self.problem is None and (self.height < min_size[0] or self.width < min_size[1]):
            return (
                f"is {self.height}x{self.width} px, smaller than one patch of {min_size[0]}x{min_size[1]} px; "
                "use larger images or a smaller patch"
            )
        return self.problem


def open_image(
    stored: Mapping[str, Any] | None, place: str, draft_side: int | None = None
) -> tuple[Seen, Image.Image | None]:
    """Read one undecoded image ({"bytes", "path"}), wholly: a truncated file shows only when its pixels are read.

    Args:
        stored, draft_side: see `decode_image`.
        place: the image's name where it has no path.

    Returns:
        What was seen, and the image as RGB; None in its stead where there was a problem.
    """
    stored = stored or {}  # None in an empty row of a table
    name, digest, content = str(stored.get("path") or place), hashlib.sha256(b"").hexdigest(), b""
    try:
        content = _content(stored)
        digest = hashlib.sha256(content).hexdigest()
        image, peak, is_turned = _decoded(io.BytesIO(content), draft_side)
    except Exception as error:
        is_pointer = content.startswith(b"version https://git-lfs")
        problem = "is a pointer of Git LFS; fetch the image by git lfs pull" if is_pointer else image_problem(error)
        return Seen(name, digest, problem=problem), None
    return Seen(name, digest, image.height, image.width, peak=peak, is_turned=is_turned), image


def scan(table: "Dataset", split: str, annotate: Callable[[int, Seen], Seen] | None = None) -> list[Seen]:
    """Decode every image of a table once (several at a time), with a progress bar when there are many.

    Args:
        table: with the column "image".
        split: its name.
        annotate: of a readable image in this row, what it bears; see `DenseTables`.
    """
    import datasets

    undecoded = table.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
    total = len(undecoded)
    seen: list[Seen] = []
    bar = progress_bar(f"Checking {split} images", is_hidden=total < PROGRESS_FROM)
    with bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        task = bar.add_task("", total=total)
        for start in range(0, total, 256):
            rows = undecoded[start : start + 256]["image"]
            places = [f"{split} image {start + offset}" for offset in range(len(rows))]
            looked_at = pool.map(lambda row, place: open_image(row, place)[0], rows, places)
            for row, image in enumerate(looked_at, start=start):
                seen.append(image if annotate is None or image.problem else annotate(row, image))
            bar.advance(task, len(rows))
    return seen


def keep_good(
    scans: Mapping[str, Sequence[Seen]], min_size: tuple[int, int], skip_bad_images: bool
) -> tuple[dict[str, list[int]], list[str]]:
    """Return the rows of the good images of every split, and the names of the bad ones.

    Raises:
        UserError: there is a bad image and skip_bad_images is False; or no good image is left in a split.
    """
    rows: dict[str, list[int]] = {}
    bad: list[str] = []
    first: str | None = None
    for split, seen in scans.items():
        problems = [image.problem_below(min_size) for image in seen]
        rows[split] = [row for row, problem in enumerate(problems) if problem is None]
        for image, problem in zip(seen, problems, strict=True):
            if problem is not None:
                bad.append(image.name)
                first = first or describe(image.name, problem)
    if first and not skip_bad_images:
        more = f" ({len(bad) - 1} more bad images)" if len(bad) > 1 else ""
        raise UserError(f"{first}{more}; {_REMEDY}")
    for split, good in rows.items():
        if not good and scans[split]:
            raise UserError(f"split {split} has no usable image left: {first}; replace it, or give other data")
    return rows, bad


def describe(name: str, problem: str) -> str:
    """Return one image and its problem, as an error begins."""
    return f"image '{name}' {problem}" if problem.startswith(("is ", "has ")) else f"image '{name}': {problem}"


def raise_bad(seen: Seen, problem: str) -> NoReturn:
    """Raise the error of a bad image that is met later, in the same words as before training."""
    raise UserError(f"{describe(seen.name, problem)}; {_REMEDY}")


def short_name(name: str) -> str:
    """Return the last two parts of an image's path: enough to recognize it, nothing of the machine."""
    return "/".join(PurePath(name).parts[-2:])
