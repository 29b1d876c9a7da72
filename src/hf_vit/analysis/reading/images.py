"""The images of an analysis: drawn once by seed, read again by every pass, so that their number costs no memory."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np

from hf_vit.data import ImageData, load_data, to_rgb
from hf_vit.data.images import open_image, short_name
from hf_vit.data.sources import IMAGE_SUFFIXES
from hf_vit.errors import UserError
from hf_vit.results.facts import DataFact

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from PIL.Image import Image


@final
@dataclass(frozen=True)
class AnalysisImages:
    """Readable images in a fixed order.

    Attributes:
        name: for people and facts.
        fingerprint: 16 hexadecimal digits of a hash over the images' contents, in order.
        size: number of images.
        read: index -> the image, RGB; read anew at every call.
        split: of a data set.
        skipped: unreadable images that were left out, by name.
        notes: what a user should be told.
        labels: the true class of each, by name; empty where nobody says it.
    """

    name: str
    fingerprint: str
    size: int
    read: "Callable[[int], Image]"
    split: str | None = None
    skipped: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    labels: list[str] = field(default_factory=list[str])

    def batches(self, size: int, limit: int | None = None) -> "Iterator[list[Image]]":
        """The (first `limit`) images in lists of `size`, the last one perhaps shorter."""
        total = self.size if limit is None else min(limit, self.size)
        for start in range(0, total, size):
            yield [self.read(index) for index in range(start, min(start + size, total))]

    def fact(self) -> DataFact:
        """As facts.json names it."""
        return DataFact(name=self.name, fingerprint=self.fingerprint, split=self.split, size=self.size)


def open_images(source: object, num_images: int = 128, *, split: str = "test", seed: int = 0) -> AnalysisImages:
    """Draw images from wherever they are.

    Args:
        source: a folder with images directly inside, whatever `hf_vit.data.load_data` takes, an `ImageData`, a
            sequence of Pillow images (taken in their order), or an `AnalysisImages`.
        num_images: draw so many (of a stream, take the first); all where there are fewer.
        split: of a data set.
        seed: of the draw.

    Raises:
        UserError: there is no such source, or no readable image in it.
    """
    if isinstance(source, AnalysisImages):
        return source
    if isinstance(source, ImageData):
        return _of_data(source, num_images, split, seed)
    if not isinstance(source, str | os.PathLike):
        return _of_pictures(cast("Sequence[Image]", source), num_images)
    place = Path(source).expanduser()
    if place.is_dir():
        inside = sorted(path for path in place.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
        if inside:
            order = np.random.default_rng(seed).permutation(len(inside)).tolist()
            return images_of_files(place.resolve().name, [inside[index] for index in order], num_images)[0]
    return _of_data(load_data(str(source), skip_bad_images=True), num_images, split, seed)


def images_of_files(name: str, files: Sequence[Path], limit: int | None = None) -> tuple[AnalysisImages, list[Path]]:
    """The (first `limit`) readable images, in the order of `files`, and their files.

    Raises:
        UserError: none can be read.
    """
    good: list[Path] = []
    digests: list[str] = []
    skipped: list[str] = []
    for file in files:
        if len(good) == limit:
            break
        seen, image = open_image({"path": str(file)}, file.name)
        if image is None:
            skipped.append(short_name(seen.name))
        else:
            good.append(file)
            digests.append(seen.digest)
    if not good:
        raise UserError(f"none of the {len(files)} images in {name} can be read; save them again as PNG or JPEG")
    images = AnalysisImages(name, _hash(digests), len(good), lambda index: _read(good[index]), skipped=sorted(skipped))
    return images, good


def _of_data(data: ImageData, num_images: int, split: str, seed: int) -> AnalysisImages:
    table: Any = data.split(split)
    if data.readers:
        return _of_stream(data, num_images, split)
    rows = np.random.default_rng(seed).permutation(len(table))[:num_images].tolist()
    seen = data.seen.get(split)
    digests = [seen[row].digest for row in rows] if seen else [_digest(table[row]["image"]) for row in rows]
    return AnalysisImages(
        data.name,
        _hash(digests),
        len(rows),
        lambda index: to_rgb(table[rows[index]]["image"]),
        split=split,
        skipped=list(data.skipped),
        notes=list(data.notes),
        labels=[data.label_names[number] for number in table.select_columns(["label"])[rows]["label"]],
    )


def _of_stream(data: ImageData, num_images: int, split: str) -> AnalysisImages:
    """The first images that flow; every pass reads the stream's beginning anew."""
    stream = data.split(split)
    digests = [_digest(row["image"]) for row in islice(stream, num_images)]
    if not digests:
        raise UserError(f"split '{split}' of '{data.name}' holds no readable image")
    note = f"'{data.name}' is a stream: its first {len(digests)} images were taken, whatever the seed is"
    return AnalysisImages(
        data.name,
        _hash(digests),
        len(digests),
        _Rereader(stream).read,
        split=split,
        skipped=list(data.skipped),
        notes=[*data.notes, note],
    )


@final
class _Rereader:
    """Reads images of a stream by their place; in their order that is one pass, a step back begins another."""

    def __init__(self, stream: "Dataset | IterableDataset") -> None:
        self._stream = stream
        self._flow: Iterator[Any] = iter(())
        self._next = 0

    def read(self, index: int) -> "Image":
        if index < self._next or not self._next:
            self._flow, self._next = iter(self._stream), 0
        row = next(islice(self._flow, index - self._next, None))
        self._next = index + 1
        return to_rgb(row["image"])


def _of_pictures(pictures: "Sequence[Image]", num_images: int) -> AnalysisImages:
    chosen = list(pictures)[:num_images]
    if not chosen:
        raise UserError("no images were given; give at least one")
    return AnalysisImages(
        "images", _hash([_digest(image) for image in chosen]), len(chosen), lambda i: to_rgb(chosen[i])
    )


def _read(path: Path) -> "Image":
    seen, image = open_image({"path": str(path)}, path.name)
    if image is None:
        raise UserError(f"image {short_name(seen.name)} could be read before and no longer can: {seen.problem}")
    return image


def _digest(image: "Image") -> str:
    rgb = to_rgb(image)
    return hashlib.sha256(f"{rgb.size}".encode() + rgb.tobytes()).hexdigest()


def _hash(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]
