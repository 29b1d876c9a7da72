"""Images for analyses: drawn once by seed and read again in every pass, so that memory does not grow with them.

`CueConflicts` are images with the shape of one class and the texture of another (Geirhos et al., arXiv 1811.12231).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast, final

import numpy as np
from PIL.Image import Image

from hf_vit.data import ImageData, load_data
from hf_vit.data.files import is_image, list_images, walk
from hf_vit.data.fingerprints import hash_text
from hf_vit.data.image_data import match_scans
from hf_vit.data.images import decode_image, open_image, shorten_path, undecode_images
from hf_vit.errors import UserError
from hf_vit.evaluation.prediction import read_image
from hf_vit.families import refuse_regression
from hf_vit.loading.model import LoadedModel
from hf_vit.results.facts import DataFact

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@final
@dataclass(frozen=True)
class AnalysisImages:
    """Readable images in a fixed order.

    Attributes:
        name: name of the folder or data set.
        fingerprint: 16 hexadecimal digits of a hash over the images' contents in order.
        size: number of images.
        read: returns the RGB image of an index, read anew at every call.
        split: split of a data set.
        skipped: names of unreadable images, which were skipped.
        notes: notes for the user.
        labels: class name of every image; empty if unknown.
    """

    name: str
    fingerprint: str
    size: int
    read: Callable[[int], Image]
    split: str | None = None
    skipped: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    labels: list[str] = field(default_factory=list[str])

    def batches(self, size: int, limit: int | None = None) -> Iterator[list[Image]]:
        """Yield lists of `size` images, up to `limit` images in all; the last list may be shorter."""
        total = self.size if limit is None else min(limit, self.size)
        for start in range(0, total, size):
            yield [self.read(index) for index in range(start, min(start + size, total))]

    def fact(self) -> DataFact:
        """Return the data as facts.json records it."""
        return DataFact(name=self.name, fingerprint=self.fingerprint, split=self.split, size=self.size)


def open_images(source: object, num_images: int = 128, *, split: str = "test", seed: int = 0) -> AnalysisImages:
    """Draw images from a source.

    Args:
        source: a folder of images, any source of `hf_vit.data.load_data`, an `ImageData`, a sequence of Pillow images
            or files (used in their order), or an `AnalysisImages`.
        num_images: number of images to draw; from a stream the first ones are used. If there are fewer, all are used.
        split: split of a data set.
        seed: random seed of the draw.

    Raises:
        UserError: the source does not exist or has no readable image.
    """
    if isinstance(source, AnalysisImages):
        return source
    if isinstance(source, ImageData):
        return _draw_from_data(source, num_images, split, seed)
    if isinstance(source, Image):
        source = [source]
    if isinstance(source, Sequence | Iterator) and not isinstance(source, str):
        return _take_pictures(cast("Iterable[Any]", source), num_images)
    path = Path(source).expanduser() if isinstance(source, str | os.PathLike) else None
    if path is not None and path.is_dir():
        files, notes = list_images(path)
        if files:
            order = np.random.default_rng(seed).permutation(len(files)).tolist()
            images = read_image_files(path.resolve().name, [files[index] for index in order], num_images)[0]
            images.notes.extend(notes)
            return images
    data = load_data(cast(Any, source), skip_bad_images=True, splits=[split], multi_label=True)
    return _draw_from_data(data, num_images, split, seed)


def read_image_files(name: str, files: Sequence[Path], limit: int | None = None) -> tuple[AnalysisImages, list[Path]]:
    """Return the readable images among files, at most `limit` in their order, and their paths; `name` names them."""
    readable: list[Path] = []
    digests: list[str] = []
    skipped: list[str] = []
    for file in files:
        if len(readable) == limit:
            break
        scan, image = open_image({"path": str(file)}, file.name)
        if image is None:
            skipped.append(shorten_path(scan.name))
        else:
            readable.append(file)
            digests.append(scan.digest)
    if not readable:
        raise UserError(f"none of the {len(files)} images in {name} can be read; replace them with PNG or JPEG files")
    fingerprint, count = hash_text("\n".join(digests)), len(readable)
    images = AnalysisImages(name, fingerprint, count, lambda index: _read(readable[index]), skipped=sorted(skipped))
    return images, readable


def _draw_from_data(data: ImageData, num_images: int, split: str, seed: int) -> AnalysisImages:
    """Draw images from a data set; from a stream, take the first ones."""
    table: Any = undecode_images(data.split(split))
    notes = list(data.notes)
    labels = list[str]()
    if data.readers:  # a stream: every pass reads from its start
        digests = [_digest(row["image"]) for row in islice(table, num_images)]
        if not digests:
            raise UserError(f"split '{split}' of '{data.name}' has no readable image; choose another split or data set")
        notes.append(
            f"'{data.name}' is a stream, so its first {len(digests)} images are used and the seed has no effect"
        )
        read = _Rereader(table).read
    else:
        rows = np.random.default_rng(seed).permutation(len(table))[:num_images].tolist()
        scans = match_scans(data, split)  # none of a table that replaced the one scanned
        digests = [scans[row].digest for row in rows] if scans else [_digest(table[row]["image"]) for row in rows]
        if data.target == "label" and not data.multi_label:
            labels = [data.label_names[number] for number in table.select_columns(["label"])[rows]["label"]]

        def read(index: int) -> Image:
            return decode_image(table[rows[index]]["image"])

    skipped = list(data.skipped)
    return AnalysisImages(data.name, hash_text("\n".join(digests)), len(digests), read, split, skipped, notes, labels)


@final
class _Rereader:
    """Reads images of a stream by index; an index lower than the last one starts the stream again."""

    def __init__(self, stream: "Dataset | IterableDataset") -> None:
        self._stream = stream
        self._iterator: Iterator[Any] = iter(())
        self._next_index = 0

    def read(self, index: int) -> Image:
        """Return the image at an index as RGB."""
        if index < self._next_index or not self._next_index:
            self._iterator = iter(self._stream)
            self._next_index = 0
        row = next(islice(self._iterator, index - self._next_index, None))
        self._next_index = index + 1
        return decode_image(row["image"])


def _take_pictures(pictures: Iterable[Any], num_images: int) -> AnalysisImages:
    """Return the first of some Pillow images or files."""
    images = list(islice(pictures, num_images))
    if not images:
        raise UserError("the list of images is empty; give at least one image")

    def read(index: int) -> Image:
        image = images[index]
        return read_image(image) if isinstance(image, str | os.PathLike) else decode_image(image)

    digests = [_digest(read(index)) for index in range(len(images))]
    return AnalysisImages("images", hash_text("\n".join(digests)), len(images), read)


def _read(path: Path) -> Image:
    """Return the image in a file that was readable before."""
    scan, image = open_image({"path": str(path)}, path.name)
    if image is None:
        raise UserError(
            f"image {shorten_path(scan.name)} became unreadable during the run ({scan.problem}); restore it, "
            "and run the same command again"
        )
    return image


def _digest(image: Any) -> str:
    """Return the SHA-256 of an image's size and RGB pixels."""
    rgb = decode_image(image)
    return hashlib.sha256(f"{rgb.size}".encode() + rgb.tobytes()).hexdigest()


_FILE_NAME = re.compile(r"(?P<shape>[^\d\W][^\-]*?)\d*-(?P<texture>[^\d\W][^\-]*?)\d*")


@final
@dataclass(frozen=True)
class CueConflicts:
    """Images whose shape and texture belong to different classes.

    Attributes:
        images: the images, sorted by file name.
        shapes, textures: index in `classes` of every image's shape and texture.
        classes: sorted class names.
        labels: for every class the indices of the model's logits that stand for it; empty before `for_model`.
    """

    images: AnalysisImages
    shapes: list[int]
    textures: list[int]
    classes: list[str]
    labels: tuple[tuple[int, ...], ...] = ()

    def for_model(
        self, subject: LoadedModel, class_map: str | Path | Mapping[str, Sequence[str]] | None = None
    ) -> Self:
        """Return a copy with `labels` for a model.

        Args:
            subject: the model.
            class_map: class -> labels, as a dict or a JSON file; by default a class's label has the same name.

        Raises:
            UserError: the model is not a classifier with named classes, or lacks a class, or the map cannot be read.
        """
        if not subject.label_sets:
            raise UserError(
                f"{subject.name} has no class names, which --cue-conflict needs; give a classifier with names in "
                "id2label"
            )
        refuse_regression(subject.model, subject.name, "shape_bias")
        label_map = _read_map(class_map)
        labels_by_class = {name: list(map(_normalize_name, label_map.get(name, [name]))) for name in self.classes}
        missing: list[str] = []
        for names in subject.label_sets:  # the first set that has all labels counts
            indices = _index_labels(names)
            missing = []
            for name, class_labels in labels_by_class.items():
                missing += [f"'{label}' (class {name})" for label in class_labels if label not in indices]
            if not missing:
                rows = [[indices[label] for label in class_labels] for class_labels in labels_by_class.values()]
                labels = tuple(tuple(dict.fromkeys(row)) for row in rows)  # synonyms of one label count once
                # The fingerprint includes classes and labels, as the result depends on them as much as on the pixels.
                content = (self.images.fingerprint, self.classes, self.shapes, self.textures, labels)
                fingerprint = hash_text(repr(content))
                return replace(self, labels=labels, images=replace(self.images, fingerprint=fingerprint))
        missing_text = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UserError(
            f"{subject.name} has no label {missing_text}; give --class-map FILE, a JSON object that maps every "
            'class to its labels: {"cat": ["tabby", "tiger cat"], ...}'
        )


def open_cue_conflicts(folder: str | os.PathLike[str]) -> CueConflicts:
    """Read a folder of images, or of class folders, with file names like `<shape><number>-<texture><number>.<suffix>`.

    Images whose shape and texture have the same class are skipped; `images.notes` says so.

    Raises:
        UserError: the folder does not exist or has no readable image, a file name has another form, or a class folder's
            name differs from the shape.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give a folder of images named like cat/cat7-elephant1.png")
    files = [root.joinpath(*parts) for parts in walk(root)[0] if is_image(parts[-1])]
    cues = {path: _parse_cues(path, root) for path in files}
    conflicting = [path for path, (shape, texture) in cues.items() if shape != texture]
    if not conflicting:
        raise UserError(
            f"{root} holds no image whose shape and texture have different classes; add images named like "
            "cat/cat7-elephant1.png"
        )
    images, paths = read_image_files(root.resolve().name, conflicting)
    num_skipped = len(files) - len(conflicting)
    if num_skipped:
        images.notes.append(f"{num_skipped} images whose shape and texture have the same class were skipped")
    shape_names, texture_names = zip(*(cues[path] for path in paths), strict=True)
    classes = sorted({*shape_names, *texture_names})
    return CueConflicts(images, list(map(classes.index, shape_names)), list(map(classes.index, texture_names)), classes)


def _parse_cues(path: Path, root: Path) -> tuple[str, str]:
    """Return (shape, texture) from a file's name."""
    match = _FILE_NAME.fullmatch(path.stem)
    if match is None:
        raise UserError(
            f"the file name {path.name} does not state shape and texture; rename it like cat7-elephant1.png"
        )
    if path.parent != root and path.parent.name != match["shape"]:
        raise UserError(
            f"{path.name} is in the folder {path.parent.name}, but its name states the shape {match['shape']}; "
            "move or rename it"
        )
    return match["shape"], match["texture"]


def _normalize_name(name: str) -> str:
    """Return a class name in lower case with single spaces instead of underscores."""
    return " ".join(name.replace("_", " ").split()).casefold()


def _index_labels(labels: Sequence[str]) -> dict[str, int]:
    """Return the index of every label, by full name and by each synonym ("tabby, tabby cat"); the first one counts."""
    indices: dict[str, int] = {}
    for index, label in enumerate(labels):
        indices.setdefault(_normalize_name(label), index)
    for index, label in enumerate(labels):  # after all full names, which take precedence
        for synonym in label.split(","):
            indices.setdefault(_normalize_name(synonym), index)
    return indices


def _read_map(source: str | Path | Mapping[str, Sequence[str]] | None) -> Mapping[str, Sequence[str]]:
    """Return a class map from a JSON file or a mapping."""
    if source is None or isinstance(source, Mapping):
        return source or {}
    try:
        class_map = json.loads(Path(source).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"the class map {source} does not exist; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the class map {source} is not valid JSON; correct the file ({error})") from error

    def is_label_list(labels: Any) -> bool:
        return isinstance(labels, list) and bool(labels) and all(isinstance(label, str) for label in labels)

    if not isinstance(class_map, dict) or not all(map(is_label_list, class_map.values())):
        raise UserError(
            f"the class map {source} is not a JSON object that maps every class to a list of labels; write it like "
            '{"cat": ["tabby"], ...}'
        )
    return class_map
