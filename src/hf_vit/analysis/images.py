"""The images of an analysis: drawn once by seed, read again by every pass, so that their number costs no memory.

Among them images with the shape of one class and the texture of another (Geirhos et al., arXiv 1811.12231).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast, final

import numpy as np

from hf_vit.data import ImageData, load_data, to_rgb
from hf_vit.data.files import is_image, list_images, walk
from hf_vit.data.images import open_image, short_name
from hf_vit.errors import UserError
from hf_vit.families import refuse_regression
from hf_vit.loading.model import LoadedModel
from hf_vit.results.facts import DataFact

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from PIL.Image import Image


@final
@dataclass(frozen=True)
class AnalysisImages:
    """Readable images in a fixed order.

    Attributes:
        fingerprint: 16 hexadecimal digits of a hash over the images' contents, in order.
        size: number of images.
        read: index -> the image, RGB; read anew at every call.
        split: of a data set.
        skipped: unreadable images that were left out, by name.
        notes: for the user.
        labels: the true class of each, by name; empty if unknown.
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
        """Yield the (first `limit`) images in lists of `size`; the last one may be shorter."""
        total = self.size if limit is None else min(limit, self.size)
        for start in range(0, total, size):
            yield [self.read(index) for index in range(start, min(start + size, total))]

    def fact(self) -> DataFact:
        """Return the data as facts.json names them."""
        return DataFact(name=self.name, fingerprint=self.fingerprint, split=self.split, size=self.size)


def open_images(source: object, num_images: int = 128, *, split: str = "test", seed: int = 0) -> AnalysisImages:
    """Draw images from a source.

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
        inside, notes = list_images(place)
        if inside:
            order = np.random.default_rng(seed).permutation(len(inside)).tolist()
            images = images_of_files(place.resolve().name, [inside[index] for index in order], num_images)[0]
            images.notes.extend(notes)
            return images
    return _of_data(load_data(str(source), skip_bad_images=True), num_images, split, seed)


def images_of_files(name: str, files: Sequence[Path], limit: int | None = None) -> tuple[AnalysisImages, list[Path]]:
    """Return the (first `limit`) readable images, in the order of `files`, and their files.

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
        raise UserError(f"none of the {len(files)} images in {name} can be read; convert them to PNG or JPEG")
    images = AnalysisImages(name, _hash(digests), len(good), lambda index: _read(good[index]), skipped=sorted(skipped))
    return images, good


def _of_data(data: ImageData, num_images: int, split: str, seed: int) -> AnalysisImages:
    table: Any = data.split(split)
    notes, labels = list(data.notes), list[str]()
    if data.readers:  # a stream: every pass reads its beginning again
        digests = [_digest(row["image"]) for row in islice(table, num_images)]
        if not digests:
            raise UserError(f"split '{split}' of '{data.name}' holds no readable image")
        notes.append(f"'{data.name}' is a stream: its first {len(digests)} images were taken, whatever the seed is")
        read = _Rereader(table).read
    else:
        rows = np.random.default_rng(seed).permutation(len(table))[:num_images].tolist()
        seen = data.seen.get(split)
        digests = [seen[row].digest for row in rows] if seen else [_digest(table[row]["image"]) for row in rows]
        labels = [data.label_names[number] for number in table.select_columns(["label"])[rows]["label"]]

        def read(index: int) -> "Image":
            return to_rgb(table[rows[index]]["image"])

    skipped = list(data.skipped)
    return AnalysisImages(data.name, _hash(digests), len(digests), read, split, skipped, notes, labels)


@final
class _Rereader:
    """Reads images of a stream by index: in order that is one pass; a step back begins another."""

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
    digests = [_digest(image) for image in chosen]
    return AnalysisImages("images", _hash(digests), len(chosen), lambda index: to_rgb(chosen[index]))


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


_NAME = re.compile(r"(?P<shape>[^\d\W][^\-]*?)\d*-(?P<texture>[^\d\W][^\-]*?)\d*")


@final
@dataclass(frozen=True)
class CueConflicts:
    """Images whose shape and texture disagree.

    Attributes:
        images: all of them, in the order of their names.
        shapes, textures: class of every image, as its index in `classes`.
        classes: names, sorted.
        labels: for every class the indices of a model's logits that stand for it; empty before `for_model`.
    """

    images: AnalysisImages
    shapes: list[int]
    textures: list[int]
    classes: list[str]
    labels: tuple[tuple[int, ...], ...] = ()

    def for_model(
        self, subject: LoadedModel, class_map: str | Path | Mapping[str, Sequence[str]] | None = None
    ) -> Self:
        """Return the same with `labels`: of the class's own name, or as `class_map` (a dict or a JSON file) says.

        Raises:
            UserError: the model is no classifier with named classes, or lacks one, or the map cannot be read.
        """
        if not subject.label_sets:
            raise UserError(f"{subject.name} names no classes; cue conflicts need a classifier whose labels have names")
        refuse_regression(subject.model, subject.name, "shape_bias")
        chosen, lacking = _read_map(class_map), [""]
        for names in subject.label_sets:
            places = _places(names)
            wanted = {name: [_plain(label) for label in chosen.get(name, [name])] for name in self.classes}
            lacking = [f"'{label}' (class {name})" for name in wanted for label in wanted[name] if label not in places]
            if not lacking:
                labels = tuple(tuple(places[label] for label in wanted[name]) for name in self.classes)
                # What is measured depends on the names and the classes they stand for as much as on the pixels.
                told = (self.images.fingerprint, self.classes, self.shapes, self.textures, labels)
                fingerprint = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
                return replace(self, labels=labels, images=replace(self.images, fingerprint=fingerprint))
        shown = ", ".join(lacking[:3]) + ", ..." * (len(lacking) > 3)
        raise UserError(
            f"{subject.name} has no label {shown}; give --class-map FILE, "
            'a JSON object of every class and its labels, {"cat": ["tabby", "tiger cat"], ...}'
        )


def open_cue_conflicts(folder: str | os.PathLike[str]) -> CueConflicts:
    """Read a folder of class folders (or of images) named `<shape><number>-<texture><number>.<suffix>`.

    Images of one class for both are left out, and `images.notes` says so.

    Raises:
        UserError: no such folder, no readable image, a name of another form, or a folder that is not the shape's.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise UserError(f"{place} is not a folder; give a folder of images named like cat/cat7-elephant1.png")
    files = [place.joinpath(*parts) for parts in walk(place)[0] if is_image(parts[-1])]
    cues = {path: _cues(path, place) for path in files}
    disagreeing = [path for path in files if cues[path][0] != cues[path][1]]
    if not disagreeing:
        raise UserError(
            f"{place} holds no image whose shape and texture disagree; name them like cat/cat7-elephant1.png"
        )
    images, kept = images_of_files(place.resolve().name, disagreeing)
    if same := len(files) - len(disagreeing):
        images.notes.append(f"{same} images of one class in shape and texture are left out of the cue conflicts")
    classes = sorted({name for path in kept for name in cues[path]})
    shapes, textures = ([classes.index(cues[path][cue]) for path in kept] for cue in (0, 1))
    return CueConflicts(images, shapes, textures, classes)


def _cues(path: Path, top: Path) -> tuple[str, str]:
    """Return (shape, texture) from a file's name."""
    match = _NAME.fullmatch(path.stem)
    if match is None:
        raise UserError(f"{path.name} does not name its shape and texture; needed: a name like cat7-elephant1.png")
    if path.parent != top and path.parent.name != match["shape"]:
        raise UserError(f"{path.name} lies in folder {path.parent.name}, but the shape it names is {match['shape']}")
    return match["shape"], match["texture"]


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()


def _places(labels: Sequence[str]) -> dict[str, int]:
    """Return every label's index, by its whole name and by each synonym ("tabby, tabby cat"); the first one counts."""
    found = {_plain(label): place for place, label in reversed(list(enumerate(labels)))}
    for place, label in enumerate(labels):
        for synonym in label.split(","):
            found.setdefault(_plain(synonym), place)
    return found


def _read_map(source: str | Path | Mapping[str, Sequence[str]] | None) -> Mapping[str, Sequence[str]]:
    if source is None or isinstance(source, Mapping):
        return source or {}
    try:
        found = json.loads(Path(source).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no class map {source}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not valid JSON ({error}); write it again") from error
    lists = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(labels, list) and labels and all(isinstance(one, str) for one in labels) for labels in lists):
        raise UserError(f'{source} must hold a JSON object of classes and their labels, {{"cat": ["tabby"], ...}}')
    return found
