"""Looking at every image once, before any training: is it readable, how large is it, what is its content's hash."""

import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from PIL import Image

from hf_vit.data.dense.annotations import Annotation
from hf_vit.data.images import opened, to_rgb
from hf_vit.errors import UserError
from hf_vit.repositories.stores import StoreError, in_store, place_of, read

if TYPE_CHECKING:
    from datasets import Dataset

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
