"""Decode images to the 8-bit RGB that models take, and check them."""

import hashlib
import io
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps

from hf_vit.data.annotations import Annotation
from hf_vit.display import make_progress_bar
from hf_vit.errors import UserError
from hf_vit.repositories.reading import POINTER
from hf_vit.repositories.stores import StoreError, is_store_url, read_bytes, to_path

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

# Modes that Pillow converts exactly: bilevel, 8-bit gray, palette, CMYK, YCbCr, HSV, padded RGB.
_CONVERTED_BY_PILLOW = ("1", "L", "P", "CMYK", "YCbCr", "HSV", "RGBX")
# Tags of TIFF files and of EXIF.
_BITS, _PHOTOMETRIC, _ORIENTATION = 0x0102, 0x0106, 0x0112
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap height and width
# Floats up to this value are shares of white; resizing may lift white a little above 1.
WHITE = 1.001
# What the last bytes of a complete file contain; other bytes may follow it.
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}
_TAIL = 64
# With fewer images the scan is too short for a progress bar.
PROGRESS_FROM = 2000
_SCANNED_AT_ONCE, _PER_THREAD = 1024, 16
# Two threads decode images of fewer pixels more slowly than one, as they wait for each other.
_ALONE_PIXELS = 48 * 48
_WAITING = 5  # a thread waits for a slow disk or a store if it takes so many times the seconds that it computes
_LARGE = 1 << 18  # bytes of a file
_PHOTOGRAPH = 1 << 20  # bytes of a JPEG whose pixels are too many to keep
_KEPT_OF_MEAN = 2  # an image of more than so many times the mean that fits is not kept
_REMEDY = "replace or remove such images, or add --skip-bad-images (skip_bad_images=True) to leave them out"
Result = TypeVar("Result")
# How much of an image is looked at. Hash, header and end of PNG and JPEG files show truncation, but not damaged pixels.
ScanDepth = Literal["pixels", "header", "hash"]


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any photograph to 8-bit RGB as a viewer would show it.

    The EXIF orientation is applied. Transparency (LA, RGBA, palettes, a transparent color) is composited on white, as
    transformers' image processors do. 12-bit and 16-bit gray is scaled to 0..255, where Pillow's own conversion clips
    at 255, and inverted if 0 is white in a TIFF file. An animation gives its first frame. An RGB image without
    orientation and transparency is returned unchanged.

    Raises:
        UserError: the mode has no defined conversion to RGB (LAB), or values are outside 12 or 16 bits (mode I) or
            0..255 (mode F).
    """
    # Some Pillow plug-ins read the orientation only when the pixels are loaded.
    image.load()
    tags = getattr(image, "tag_v2", {})
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode.startswith("I"):  # I;16, I;16L, I;16B; and I, in which Pillow also opens some 16-bit files
        return _integers_to_gray(image, tags)
    if image.mode == "F":
        return _floats_to_gray(image, tags)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba).convert("RGB")
    if image.mode not in _CONVERTED_BY_PILLOW:
        raise UserError(f"an image of mode {image.mode} cannot be converted to RGB; save it as RGB or grayscale")
    return image.convert("RGB")


def _integers_to_gray(image: Image.Image, tags: Mapping[int, Any]) -> Image.Image:
    full = 4095 if tags.get(_BITS) == (12,) else 65535
    values = _invert_from_white(np.asarray(image).astype(np.int64), tags, full)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > full:
        raise UserError(
            f"an image of mode {image.mode} holds values from {low} to {high}; save it with values from 0 to {full}"
        )
    return _to_gray((values * 255 + full // 2) // full)  # rounded to the nearest


def _floats_to_gray(image: Image.Image, tags: Mapping[int, Any]) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255):  # also for NaN
        raise UserError(
            f"a floating-point image holds values from {low:g} to {high:g}; save it with values from 0 to 1, or "
            "from 0 to 255"
        )
    return _to_gray(np.rint(_invert_from_white(values * 255 if high <= WHITE else values, tags, 255)))


def _invert_from_white(values: Any, tags: Mapping[int, Any], full: int) -> Any:
    """Invert the values of a TIFF file in which 0 is white; Pillow does so for 8 bits only."""
    return full - values if tags.get(_PHOTOMETRIC) == 0 else values


def _to_gray(values: NDArray[np.generic]) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def decode_image(
    image: Image.Image | Mapping[str, Any] | str | os.PathLike[str] | IO[bytes], draft_side: int | None = None
) -> Image.Image:
    """Decode an image to 8-bit RGB, see `to_rgb`.

    Args:
        image: a Pillow image, a path or URL, an open file, or {"bytes", "path"} as `datasets` stores images.
        draft_side: decode JPEG at the smallest scale (1, 1/2, 1/4, 1/8) at which both sides have at least so many px.

    Raises:
        UserError: see `to_rgb`; or it is none of these.
        StoreError: an object store cannot read the image.
        Exception: any error of Pillow or the disk, see `describe_image_problem`.
    """
    if isinstance(image, Image.Image):
        return to_rgb(image)
    if isinstance(image, Mapping):
        image = io.BytesIO(_read_content(image))
    elif not hasattr(image, "read") and is_store_url(cast("str | Path", image)):
        image = io.BytesIO(read_bytes(to_path(cast("str | Path", image))))
    elif not (hasattr(image, "read") or isinstance(image, str | os.PathLike)):
        raise UserError(
            f"an image is a {type(image).__name__}; give a file or a Pillow image (PIL.Image.fromarray makes one)"
        )
    return _decode(image, draft_side)[0]


def undecode_images(table: Any) -> Any:
    """Return a table with undecoded images {"bytes", "path"}, for `decode_image`; streams and lists are unchanged."""
    import datasets

    if not isinstance(table, datasets.Dataset) or not isinstance(table.features.get("image"), datasets.Image):
        return table
    return table.cast_column("image", datasets.Image(decode=False))


def _decode(file: "str | os.PathLike[str] | IO[bytes]", draft_side: int | None) -> tuple[Image.Image, int, bool]:
    """Return the image as RGB, its highest value if it has 16 bits (else 0), and whether EXIF rotated it."""
    with Image.open(file) as picture:
        draft = None if draft_side is None else picture.draft(None, (draft_side, draft_side))
        if draft is not None and draft[1][2:] != picture.size:
            # Half of 511 px ends in a pixel that is half padding; without `box` the picture would shift and stretch.
            return to_rgb(picture.resize(picture.size, Image.Resampling.BILINEAR, box=draft[1])), 0, False
        # Read before decoding: Pillow keeps 8 of 16 bits of colors, and rotates TIFF files itself.
        has_16_bit_colors = _stores_16_bits(picture)
        # Other plug-ins may rotate the image, and forget its orientation, when they load it.
        orientation = 1 if picture.format in ("PNG", "JPEG") else picture.getexif().get(_ORIENTATION, 1)
        image = to_rgb(picture)
        rotations = {orientation, picture.getexif().get(_ORIENTATION, 1)} - {0, 1}
        tags = getattr(picture, "tag_v2", {})
        if picture.mode.startswith("I") and tags.get(_PHOTOMETRIC) != 0 and tags.get(_BITS) != (12,):
            peak = int(np.asarray(picture).max())
        else:  # of colors about the highest value: 255 * 257 = 65535
            peak = int(np.asarray(image).max()) * 257 if has_16_bit_colors else 0
        return image, peak, bool(rotations)


def _stores_16_bits(picture: ImageFile.ImageFile) -> bool:
    return any(";16" in str(tile.args) for tile in picture.tile)


def _read_content(stored_image: Mapping[str, Any]) -> bytes:
    """Return the bytes of an image that are stored in a table, in a file or in an object store."""
    content, path = stored_image.get("bytes"), stored_image.get("path")
    if content is not None:
        return content
    if path is None:
        raise UserError("is missing, because its row in the table is empty")
    if is_store_url(path):
        return read_bytes(to_path(path))
    with open(path, "rb") as file:
        return file.read()


def describe_image_problem(error: Exception) -> str:
    """Describe why an image could not be decoded; raise the error of an object store again."""
    if isinstance(error, StoreError):
        raise error
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, Image.UnidentifiedImageError):
        return "is not an image in a format that Pillow supports, such as JPEG or PNG"
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, Image.DecompressionBombError):
        return f"is larger than the limit for decoding ({error}); cut it into smaller images"
    # Pillow's plug-ins raise OSError, SyntaxError, ValueError, struct.error, ...
    detail = " ".join(str(error).split()) or type(error).__name__
    return f"is damaged or cannot be read ({detail:.200})"


def map_in_threads(function: Callable[..., Result], items: Sequence[Any], *others: Iterable[Any]) -> list[Result]:
    """Map a function over items in as many threads as torch uses (one in a data loading worker).

    Pillow releases the interpreter while it decodes and resizes. If an item or its `image` occurs twice, one thread
    does all the work: two threads must not load the same Pillow image.
    """
    import torch

    count = min(torch.get_num_threads(), len(items))
    if count < 2 or len({id(getattr(item, "image", item)) for item in items}) < len(items):
        return list(map(function, items, *others))
    rows = list(zip(items, *others, strict=True))
    size = math.ceil(len(rows) / (4 * count))  # a task of one small image takes longer to hand over than to do

    def map_part(start: int) -> list[Result]:
        return [function(*row) for row in rows[start : start + size]]

    with ThreadPoolExecutor(count) as pool:
        return list(chain.from_iterable(pool.map(map_part, range(0, len(rows), size))))


def note_dark_images(peak: int, bits: int) -> list[str]:
    """Return a note if the highest pixel value leaves the upper two bits unused; no note for an all-black image."""
    full = (1 << bits) - 1
    if not 0 < peak <= full >> 2:
        return []
    return [
        f"the {bits}-bit images look dark ({peak / full:.0%} brightness): their highest value is {peak:,} "
        f"of {full:,}; if the camera used fewer bits, multiply all pixels by the same number"
    ]


@dataclass(frozen=True, slots=True)
class ImageScan:
    """The result of scanning one image.

    Attributes:
        name: path or position of the image.
        digest: SHA-256 of its file.
        height, width: px.
        problem: why it cannot be used, or None.
        annotation: summary of its mask or objects, for dense prediction.
        peak: highest pixel value of a 16-bit image.
        is_turned: its EXIF orientation rotated or mirrored it.
        pixels: the decoded image, height x width x RGB, of small data that are about to be trained on.
    """

    name: str
    digest: str
    height: int = 0
    width: int = 0
    problem: str | None = None
    annotation: Annotation | None = None
    peak: int = 0
    is_turned: bool = False
    pixels: bytes | None = field(default=None, compare=False, repr=False)

    def stored_image(self) -> Image.Image | None:
        """Return the image if its pixels were kept."""
        return None if self.pixels is None else Image.frombuffer("RGB", (self.width, self.height), self.pixels)

    def find_problem(self, min_size: tuple[int, int]) -> str | None:
        """Return the problem, which may be a size below `min_size` (height, width) px; None for a good image."""
        if self.problem is None and (self.height < min_size[0] or self.width < min_size[1]):
            return (
                f"is {self.height}x{self.width} px, smaller than one patch of {min_size[0]}x{min_size[1]} px; "
                "use larger images or a smaller patch"
            )
        return self.problem


def open_image(
    stored_image: Mapping[str, Any] | None, default_name: str, draft_side: int | None = None
) -> tuple[ImageScan, Image.Image | None]:
    """Read one stored image {"bytes", "path"} with all of its pixels, because only that reveals a truncated file.

    Returns the scan, and the image as RGB, or None if it has a problem. An image without a path has the default name;
    for `draft_side` see `decode_image`.
    """
    return decode_scanned(*hash_image(stored_image or {}, default_name), draft_side)


def view_pixels(content: bytes, height: int, width: int) -> "torch.Tensor":
    """Return uint8 [3, height, width] of the bytes of an RGB image, without a copy; it must not be written to."""
    import pyarrow
    import torch

    # NumPy would give torch read-only memory, at which torch warns.
    values = pyarrow.UInt8Array.from_buffers(pyarrow.uint8(), len(content), [None, pyarrow.py_buffer(content)])
    return torch.from_dlpack(values).view(height, width, 3).permute(2, 0, 1)


def decode_scanned(
    scan: ImageScan, content: bytes, draft_side: int | None = None
) -> tuple[ImageScan, Image.Image | None]:
    """Complete the scan of `hash_image`, and return it with the image as RGB, or None if it has a problem."""
    if scan.problem is not None:
        return scan, None
    try:
        image, peak, is_turned = _decode(io.BytesIO(content), draft_side)
    except Exception as error:
        return replace(scan, problem=describe_image_problem(error)), None
    return ImageScan(scan.name, scan.digest, image.height, image.width, peak=peak, is_turned=is_turned), image


def hash_image(stored: Mapping[str, Any], default_name: str) -> tuple[ImageScan, bytes]:
    """Read one stored image without decoding it; return the scan, which has no size, and the bytes."""
    name = str(stored.get("path") or default_name)
    try:
        content = _read_content(stored)
    except Exception as error:
        return ImageScan(name, hashlib.sha256(b"").hexdigest(), problem=describe_image_problem(error)), b""
    is_pointer = content.startswith(POINTER)
    problem = "is a Git LFS pointer instead of the image; download it with git lfs pull" if is_pointer else None
    return ImageScan(name, hashlib.sha256(content).hexdigest(), problem=problem), content


def _scan_quickly(scan: ImageScan, content: bytes, depth: ScanDepth) -> ImageScan | None:
    """Scan a good file without computing all pixels; None if only these show whether it is a good image.

    At the depth "header" its header and end are looked at. Otherwise a large JPEG is decoded at an eighth of its size:
    all of its data is read, so that damage is found.
    """
    try:
        with Image.open(io.BytesIO(content)) as picture:
            width, height = picture.size
            if depth == "header":
                end = _ENDS.get(picture.format or "")
                if end is None or end not in content[-_TAIL:] or _stores_16_bits(picture):
                    return None
            elif picture.format not in ("JPEG", "MPO") or picture.draft(None, (1, 1)) is None:
                return None
            else:
                to_rgb(picture)
            # PNG's own method decodes the image to look for tags behind the pixels.
            orientation = Image.Image.getexif(picture).get(_ORIENTATION, 1)
    except Exception:  # decoding all of it finds the words for the problem
        return None
    if orientation in _SIDEWAYS:
        width, height = height, width
    return replace(scan, height=height, width=width, is_turned=orientation not in (0, 1))


def scan_images(
    table: "Dataset",
    split: str,
    annotate: Callable[[int, ImageScan], ImageScan] | None = None,
    *,
    depth: ScanDepth = "pixels",
    kept_bytes: int = 0,
    recall: Callable[[int, Mapping[str, Any], str, int], ImageScan | None] | None = None,
) -> list[ImageScan]:
    """Decode every image of a table once and return the scans; show a progress bar if there are many.

    Args:
        table: with the column "image".
        split: for names and the progress bar.
        annotate: adds the annotation of a row to the scan of a readable image, see `ImageTables.annotate`.
        depth: what is looked at; hashes alone give scans without a size.
        kept_bytes: the scans keep the pixels of all images if these are at most so many bytes.
        recall: returns an earlier scan of a stored image, given its row, itself, its default name and the bytes of an
            image that is kept, or None.
    """
    undecoded_table = undecode_images(table.select_columns(["image"]))
    total = len(undecoded_table)
    scans: list[ImageScan] = []
    used = 0

    def scan_rows(rows: Sequence[Any], start: int, kept_bytes: int, part: range) -> list[ImageScan]:
        """Scan a part of the rows, which begin at row `start` of the table; keep pixels of at most `kept_bytes`."""
        part_scans: list[ImageScan] = []
        for index in part:
            stored, default_name = rows[index] or {}, f"{split} image {start + index}"
            recalled_scan = recall(start + index, stored, default_name, kept_bytes) if recall else None
            part_scans.append(recalled_scan or _scan_stored(stored, default_name, depth, kept_bytes))
        return part_scans

    # Of photographs in the table each is read by itself, as many of them would fill the memory.
    is_large = undecoded_table.data.nbytes > _LARGE * total
    bar = make_progress_bar(f"Checking {split} images", is_hidden=total < PROGRESS_FROM)
    with bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        task = bar.add_task("", total=total)
        for start in range(0, total, _SCANNED_AT_ONCE):
            part = undecoded_table.select(range(start, min(total, start + _SCANNED_AT_ONCE)))
            rows = part["image"] if is_large else part[:]["image"]
            parts = [range(first, min(len(rows), first + _PER_THREAD)) for first in range(0, len(rows), _PER_THREAD)]
            # The pixels of a few photographs fill the memory before the mean of all images shows that they do not fit.
            largest = _KEPT_OF_MEAN * kept_bytes // total
            scan_part = partial(scan_rows, rows, start, largest)
            first, is_alone = _scan_first(scan_part, parts[0])
            others = map(scan_part, parts[1:]) if is_alone else pool.map(scan_part, parts[1:])
            for row, scan in enumerate(chain(first, chain.from_iterable(others)), start=start):
                scans.append(scan if annotate is None or scan.problem else annotate(row, scan))
            used += sum(len(scan.pixels or b"") for scan in scans[start:])
            is_whole = all(scan.pixels is not None or scan.problem for scan in scans[start:])
            expected_bytes = used / len(scans) * total
            if kept_bytes > 0 and (not is_whole or expected_bytes > kept_bytes):  # the pixels of all or of none
                kept_bytes = 0
                scans = [replace(scan, pixels=None) for scan in scans]
            bar.advance(task, len(rows))
    return scans


def _scan_first(scan_part: Callable[[range], list[ImageScan]], part: range) -> tuple[list[ImageScan], bool]:
    """Return the scans of a part, and whether one thread scans such images fastest: small ones of a quick disk."""
    wall, busy = time.perf_counter(), time.thread_time()
    scans = scan_part(part)
    is_waiting = time.perf_counter() - wall > _WAITING * (time.thread_time() - busy)
    return scans, not is_waiting and sum(scan.height * scan.width for scan in scans) < _ALONE_PIXELS * len(scans)


def _scan_stored(stored: Mapping[str, Any], default_name: str, depth: ScanDepth, kept_bytes: int) -> ImageScan:
    """Scan one stored image, in a quick way if the depth and the file allow it, else by decoding all of it."""
    scan, content = hash_image(stored, default_name)
    if depth == "hash" or scan.problem is not None:
        return scan
    if depth == "header" or len(content) >= _PHOTOGRAPH:
        quick_scan = _scan_quickly(scan, content, depth)
        if quick_scan is not None:
            return quick_scan
    decoded_scan, image = decode_scanned(scan, content)
    if image is not None and 3 * image.width * image.height <= kept_bytes:
        return replace(decoded_scan, pixels=image.tobytes())
    return decoded_scan


def keep_good(
    scans: Mapping[str, Sequence[ImageScan]], min_size: tuple[int, int], skip_bad_images: bool
) -> tuple[dict[str, list[int]], list[str]]:
    """Return the rows of the good images of every split, and the names of the bad images.

    Raises UserError for a bad image unless it may be skipped, and for a split without good images.
    """
    rows: dict[str, list[int]] = {}
    bad: list[str] = []
    first_bad: str | None = None
    for split, split_scans in scans.items():
        rows[split] = []
        for row, scan in enumerate(split_scans):
            problem = scan.find_problem(min_size)
            if problem is None:
                rows[split].append(row)
            else:
                bad.append(scan.name)
                first_bad = first_bad or describe_problem(scan.name, problem)
    if first_bad and not skip_bad_images:
        more = f" ({len(bad) - 1} more bad images)" if len(bad) > 1 else ""
        raise UserError(f"{first_bad}{more}; {_REMEDY}")
    for split, good in rows.items():
        if not good and scans[split]:
            raise UserError(f"split {split} has no usable image: {first_bad}; replace images, or give other data")
    return rows, bad


def describe_problem(name: str, problem: str) -> str:
    """Return the beginning of an error about an image, with or without a colon before the problem."""
    return f"image '{name}' {problem}" if problem.startswith(("is ", "has ")) else f"image '{name}': {problem}"


def raise_bad_image(scan: ImageScan, problem: str) -> NoReturn:
    """Raise the same error for a bad image in a stream as `keep_good` raises before training."""
    raise UserError(f"{describe_problem(scan.name, problem)}; {_REMEDY}")


def shorten_path(name: str) -> str:
    """Return the last two parts of an image's path, so that results do not record local paths."""
    return "/".join(PurePath(name).parts[-2:])
