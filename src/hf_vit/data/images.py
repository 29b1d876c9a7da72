"""One picture, whatever its mode: decoded, checked, and as the 8-bit RGB that a model is fed with."""

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from PIL import Image, ImageOps

from hf_vit.data.annotations import Annotation
from hf_vit.errors import UserError
from hf_vit.repositories.stores import StoreError, in_store, place_of, read

if TYPE_CHECKING:
    from datasets import Dataset
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


# Below this many images the scan is over before a progress bar would help.
PROGRESS_FROM = 2000
_REMEDY = "replace or remove it, or pass skip_bad_images (--skip-bad-images) to go on without it"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the scan learnt of one image: name, content hash, size in px, what is wrong with it if anything is, of dense
    data its mask or objects, and the brightest pixel of 16 bits."""

    name: str
    digest: str
    height: int = 0
    width: int = 0
    problem: str | None = None
    annotation: Annotation | None = None
    peak: int = 0

    def problem_below(self, min_size: tuple[int, int]) -> str | None:
        """The problem, given that the image must have at least min_size (height, width) px."""
        if self.problem is None and (self.height < min_size[0] or self.width < min_size[1]):
            return (
                f"is {self.height}x{self.width} px, smaller than one patch of {min_size[0]}x{min_size[1]} px; "
                "use larger images or a smaller patch"
            )
        return self.problem


def open_image(stored: Mapping[str, Any], place: str, draft_side: int | None = None) -> tuple[Seen, Image.Image | None]:
    """Read one undecoded image ({"bytes", "path"}), wholly: a truncated file shows only when its pixels are read.

    Args:
        stored: as `datasets` keeps an image with decode=False.
        place: the image's name where it has no path.
        draft_side: see `opened`.

    Returns:
        What was seen, and the image as RGB; None in its stead where there was a problem.

    Raises:
        StoreError: an object store does not give it, which says nothing of the image.
    """
    name = str(stored.get("path") or place)
    digest = hashlib.sha256(b"").hexdigest()
    try:
        content = stored.get("bytes")
        if content is None and in_store(name):
            content = read(place_of(name))
        elif content is None:
            with open(str(stored["path"]), "rb") as file:
                content = file.read()
        digest = hashlib.sha256(content).hexdigest()
        with opened(io.BytesIO(content), draft_side) as picture:
            image = to_rgb(picture)
            peak = int(np.asarray(picture).max()) if picture.mode.startswith("I") else 0
    except Image.UnidentifiedImageError:
        return Seen(name, digest, problem="is not an image, or of a format that Pillow does not know"), None
    except StoreError:
        raise
    except UserError as error:
        return Seen(name, digest, problem=str(error)), None
    except FileNotFoundError:
        return Seen(name, digest, problem="is not there"), None
    except Exception as error:  # Pillow's plug-ins raise OSError, SyntaxError, ValueError, struct.error, ...
        detail = " ".join(str(error).split()) or type(error).__name__
        return Seen(name, digest, problem=f"is corrupt or cannot be read ({detail})"), None
    return Seen(name, digest, image.height, image.width, peak=peak), image


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
    advance, finish = _progress(total, f"Checking {split} images")
    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for start in range(0, total, 256):
                rows = undecoded[start : start + 256]["image"]
                places = [f"{split} image {start + offset}" for offset in range(len(rows))]
                looked_at = pool.map(lambda row, place: open_image(row, place)[0], rows, places)
                for row, image in enumerate(looked_at, start=start):
                    seen.append(image if annotate is None or image.problem else annotate(row, image))
                advance(len(rows))
    finally:
        finish()
    return seen


def keep_good(
    scans: Mapping[str, Sequence[Seen]], min_size: tuple[int, int], skip_bad_images: bool
) -> tuple[dict[str, list[int]], list[str]]:
    """Rows of the good images of every split, and the names of the bad ones.

    Raises:
        UserError: there is a bad image and skip_bad_images is False; or no good image is left in a split.
    """
    rows: dict[str, list[int]] = {}
    bad: list[str] = []
    first: str | None = None
    for split, seen in scans.items():
        rows[split] = []
        for row, image in enumerate(seen):
            problem = image.problem_below(min_size)
            if problem is None:
                rows[split].append(row)
                continue
            bad.append(image.name)
            first = first or describe(image.name, problem)
    if first and not skip_bad_images:
        more = f" ({len(bad) - 1} more bad images)" if len(bad) > 1 else ""
        raise UserError(f"{first}{more}; {_REMEDY}")
    for split, good in rows.items():
        if not good and scans[split]:
            raise UserError(f"split {split} has no usable image left: {first}; mend it, or give other data")
    return rows, bad


def describe(name: str, problem: str) -> str:
    """One image and its problem, as an error begins."""
    return f"image '{name}' {problem}" if problem.startswith(("is ", "has ")) else f"image '{name}': {problem}"


def raise_bad(seen: Seen, problem: str) -> NoReturn:
    """The error of a stream's bad image, in the same words as before training."""
    raise UserError(f"{describe(seen.name, problem)}; {_REMEDY}")


def short_name(name: str) -> str:
    """The last two parts of an image's path: enough to recognise it, nothing of the machine."""
    return "/".join(PurePath(name).parts[-2:])


def _progress(total: int, title: str) -> tuple[Callable[[int], None], Callable[[], None]]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if total < PROGRESS_FROM or not console.is_terminal:
        return (lambda count: None), (lambda: None)
    bar = Progress(
        TextColumn("{task.description}"),
        *Progress.get_default_columns()[1:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(title, total=total)
    bar.start()
    return (lambda count: bar.update(task, advance=count)), bar.stop
