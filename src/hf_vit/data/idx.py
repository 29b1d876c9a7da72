"""Read images and labels in the IDX format of MNIST, Fashion-MNIST, KMNIST, QMNIST and EMNIST.

A file begins with two zero bytes, a byte for the type of its values, the number of dimensions, and the length of every
dimension as a big-endian integer of 4 bytes. The values follow, row by row.
"""

import functools
import gzip
import io
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hf_vit.data.files import walk
from hf_vit.data.splits import SPLITS, split_name
from hf_vit.errors import UserError
from hf_vit.repositories.reading import refuse_pointer
from hf_vit.repositories.stores import is_folder

if TYPE_CHECKING:
    from datasets import Dataset

_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_KINDS = {**dict.fromkeys(("images", "image", "patterns"), "images"), **dict.fromkeys(("labels", "label"), "labels")}
_SEPARATORS = re.compile("[-_.]")
_GZIP = b"\x1f\x8b"
_MOST_COMPRESSED = 1032  # zlib's highest ratio of decompressed to compressed bytes
_NIST_COLUMNS = 8  # of QMNIST's labels; the first one is the class
_ROWS = 100_000  # images of one Arrow array, whose offsets have 32 bits
IdxName = tuple[str, str | None, str]


def parse_idx_name(name: str) -> IdxName | None:
    """Return (data set, split or None, "images" or "labels") of the name of an IDX file; None for other names.

    "emnist-letters-train-images-idx3-ubyte.gz" gives ("emnist-letters", "train", "images").
    """
    name = name.lower()
    if "idx" not in name:  # folders may hold a million other files
        return None
    parts = _SEPARATORS.split(name.removesuffix(".gz"))
    idx_index = next((index for index, part in enumerate(parts) if re.fullmatch("idx[0-9]?", part)), 0)
    if idx_index == 0 or len(parts) > idx_index + 2:
        return None
    kind = _KINDS.get(parts[idx_index - 1])
    if kind is None:
        return None
    name_parts = parts[: idx_index - 1]
    split = _split_of(name_parts[-1]) if name_parts else None
    return "-".join(name_parts[:-1] if split else name_parts), split, kind


def is_mapping_name(name: str) -> bool:
    """Return whether a file name is that of EMNIST's table of classes."""
    return name.lower().endswith("mapping.txt")


def _parse_mapping_name(name: str) -> str:
    """Return the data set in the name of a table of classes, as `parse_idx_name` writes it."""
    return "-".join(_SEPARATORS.split(name.lower().removesuffix("mapping.txt"))[:-1])


def _split_of(name: str) -> str | None:
    return "test" if name.lower() == "t10k" else split_name(name)


def group_idx_files(paths: Iterable[Path], source: str) -> tuple[dict[str, list[Path]], list[str]]:
    """Return split -> [images, labels if there are any, the table of classes if there is one], and notes.

    A folder with the name of an IDX file, into which some archives unpack, stands for the files in it. Raises UserError
    for files of several data sets, and for labels without images.
    """
    opened_paths = list(_open_folders(paths))
    data_sets = _group_by_data_set(opened_paths)
    if len(data_sets) > 1:
        _refuse_several(data_sets, source)
    (_, prefix), members = next(iter(data_sets.items()))
    mappings = {_parse_mapping_name(path.name): path for path in opened_paths if is_mapping_name(path.name)}
    notes: list[str] = []
    files: dict[str, list[Path]] = {}
    present = {split for split, _ in members}
    for split in (name for name in SPLITS if name in present):
        for kind in ("images", "labels"):
            # The one in the highest folder, and the plain one beside the compressed one.
            choices = sorted(members.get((split, kind), ()), key=lambda path: (len(path.parts), path.suffix == ".gz"))
            if choices:
                files.setdefault(split, []).append(choices[0])
                notes += [f"{path.name} was ignored, as {choices[0].name} holds the same split" for path in choices[1:]]
            elif kind == "images":
                labels = members[split, "labels"][0].name
                images = labels.lower().replace("label", "image").replace("idx1", "idx3")
                raise UserError(
                    f"'{source}' holds the labels {labels} without images; put {images} into the same folder"
                )
        mapping = (mappings.get(prefix) or _find_mapping(prefix, files[split][0].parent)) if prefix else None
        if mapping:
            files[split].append(mapping)
    return files, notes


def _group_by_data_set(paths: Iterable[Path]) -> dict[tuple[str, str], dict[tuple[str, str], list[Path]]]:
    """Return (folder, data set) -> (split, "images" or "labels") -> files; the split is train if none is named."""
    data_sets: dict[tuple[str, str], dict[tuple[str, str], list[Path]]] = {}
    for path in paths:
        parsed_name = parse_idx_name(path.name)
        if parsed_name is None:
            continue
        prefix, split, kind = parsed_name
        folder = path.parent
        if parse_idx_name(folder.name):  # some archives unpack into a folder with the name of the file
            folder = folder.parent
        if split is None:
            split = _split_of(folder.name)
            folder = folder if split is None else folder.parent
        data_sets.setdefault((str(folder), prefix), {}).setdefault((split or "train", kind), []).append(path)
    return data_sets


def _find_mapping(prefix: str, folder: Path) -> Path | None:
    """Return the table of classes of a data set in a folder, which a pattern of images and labels leaves out."""
    names = [parts[-1] for parts in walk(folder, 1)[0] if is_mapping_name(parts[-1])]
    return next((folder / name for name in names if _parse_mapping_name(name) == prefix), None)


def _open_folders(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths; for a folder with the name of an IDX file the files in it."""
    for path in paths:
        if parse_idx_name(path.name) and is_folder(path):
            yield from (path.joinpath(*parts) for parts in walk(path)[0])
        else:
            yield path


def _refuse_several(data_sets: Mapping[tuple[str, str], Mapping[Any, Sequence[Path]]], source: str) -> NoReturn:
    """Raise UserError for files of several data sets; it names one that can be given instead."""
    places: list[str] = []
    for (folder, prefix), members in data_sets.items():
        file = next(iter(members.values()))[0]
        places.append(f"{folder}/{file.name[: len(prefix) + 1]}*" if prefix else folder)
    shared = os.path.commonpath([folder for folder, _ in data_sets]) + "/"
    names = sorted(place.removeprefix(shared) for place in places)
    examples = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
    # A pattern, else the deepest folder: a folder above another one would hold several data sets again.
    best = min((place for place in places if place.endswith("*")), default=max(places, key=len))
    raise UserError(
        f"'{source}' holds {len(names)} data sets in IDX format ({examples}); give one of them, such as '{best}'"
    )


def list_companions(path: Path) -> list[Path]:
    """Return an IDX file and the one beside it that belongs to it: images or labels of its split."""
    prefix, split, kind = parse_idx_name(path.name) or ("", None, "")
    other = (prefix, split, "labels" if kind == "images" else "images")
    # Some archives unpack every file into a folder with its name.
    root, depth = (path.parent.parent, 2) if parse_idx_name(path.parent.name) else (path.parent, 1)
    files, _ = walk(root, depth)
    return [path, *(root.joinpath(*parts) for parts in files if parse_idx_name(parts[-1]) == other)]


def read_idx(path: Path) -> NDArray[Any]:
    """Return the array in an IDX file, plain or compressed; raise UserError if it is damaged."""
    refuse_pointer(path, f"the file {path.name}")
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            is_compressed = file.read(2) == _GZIP
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if is_compressed else file as stream:
                dtype, rank = _read_type(stream, path.name)
                lengths = stream.read(4 * rank)  # fewer bytes of a truncated file
                shape = tuple(int(side) for side in np.frombuffer(lengths[: len(lengths) // 4 * 4], ">u4"))
                expected = math.prod(shape) * dtype.itemsize
                # Checked before memory is taken.
                is_short = len(shape) < rank or expected > size * (_MOST_COMPRESSED if is_compressed else 1)
                content = b"" if is_short else stream.read(expected + 1)  # one more shows that the file is too long
    except UserError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path.name} cannot be read ({error}); it may be truncated: download it again") from error
    if len(content) != expected or is_short:
        contrast = "more" if len(content) > expected else "less"
        sides = "x".join(map(str, shape))
        raise UserError(
            f"the header of {path.name} announces {sides} values, but the file holds {contrast}; download it again"
        )
    return np.frombuffer(content, dtype).reshape(shape)


def _read_type(stream: "IO[bytes] | gzip.GzipFile", name: str) -> "tuple[np.dtype[Any], int]":
    """Read the type of the values and the number of dimensions at the beginning of a file."""
    header = stream.read(4)
    if len(header) < 4 or header[:2] != b"\0\0" or header[2] not in _TYPES or not 1 <= header[3] <= 4:
        raise UserError(f"{name} is not an IDX file (it begins with {header!r}); download it again from its source")
    return np.dtype(_TYPES[header[2]]), header[3]


def read_idx_images(path: Path) -> NDArray[np.uint8]:
    """Return the images of an IDX file, upright, uint8 [images, H, W] (height, width)."""
    pixels = read_idx(path)
    if pixels.ndim != 3 or pixels.dtype != np.uint8 or not pixels.size:
        shape = "x".join(map(str, pixels.shape))
        raise UserError(
            f"{path.name} holds {shape} values of type {pixels.dtype.newbyteorder('=')}; images need images x height x "
            "width bytes (uint8)"
        )
    return pixels.swapaxes(1, 2) if path.name.lower().startswith("emnist") else pixels


@functools.lru_cache(maxsize=2)
def _read_cached(path: Path, size: int, changed: int) -> NDArray[np.uint8]:
    return read_idx_images(path)


@dataclass(frozen=True)
class IdxImage:
    """One image of an IDX file, to be read like an image file."""

    path: Path
    index: int

    def __str__(self) -> str:
        return f"{self.path}#{self.index}"

    def read(self) -> "Image.Image":
        """Return the image as RGB."""
        status = self.path.stat()
        return Image.fromarray(_read_cached(self.path, status.st_size, status.st_mtime_ns)[self.index]).convert("RGB")

    @classmethod
    def list_all(cls, path: Path) -> "list[IdxImage]":
        """Return all images of a file of images."""
        status = path.stat()
        return [cls(path, index) for index in range(len(_read_cached(path, status.st_size, status.st_mtime_ns)))]


def read_idx_split(files: Sequence[Path]) -> "tuple[Dataset, list[Any], list[str] | None]":
    """Return table, raw labels and class names (None without a table of classes) of one split."""
    labels_file = next((path for path in files[1:] if parse_idx_name(path.name)), None)
    if labels_file is None:
        name = re.sub("images?|patterns", "labels", files[0].name.lower()).replace("idx3", "idx1")
        raise UserError(f"{files[0].name} has no file of labels; put {name} beside it")
    pixels, labels = read_idx_images(files[0]), read_idx(labels_file)
    if labels.ndim == 2 and labels.shape[1] == _NIST_COLUMNS:
        labels = labels[:, 0]  # the class
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        shape = "x".join(map(str, labels.shape))
        raise UserError(f"{labels_file.name} holds {shape} values; labels need one whole number per image")
    if len(labels) != len(pixels):
        raise UserError(
            f"{files[0].name} holds {len(pixels):,} images but {labels_file.name} {len(labels):,} labels; use files "
            "that belong together"
        )
    raw: list[Any] = labels.tolist()
    names = _read_mapping(files[-1]) if is_mapping_name(files[-1].name) else None
    if names is None:
        return _make_table(pixels), raw, None
    unknown = sorted(set(raw) - names.keys())
    if unknown:
        raise UserError(
            f"{labels_file.name} has the label {unknown[0]}, which {files[-1].name} does not list; add it there"
        )
    return _make_table(pixels), [names[label] for label in raw], list(names.values())


def _read_mapping(path: Path) -> Mapping[int, str]:
    """Return class number -> character of EMNIST's table, whose lines are "number code" with codes of characters.

    Classes that join capital and small letters have both codes; the first one names them.
    """
    try:
        lines = [list(map(int, line.split())) for line in path.read_text("ascii").splitlines() if line.strip()]
        names = {number: chr(codes[0]) for number, *codes in sorted(lines)}
    except (OSError, ValueError, IndexError, OverflowError) as error:
        raise UserError(f"{path.name} is not a table of classes; download it again, or move it away") from error
    if len(set(names.values())) < len(lines):
        raise UserError(f"{path.name} names a class twice; download it again, or move it away")
    return names


def store_images(contents: Sequence[Any], paths: Sequence[Any]) -> "Dataset":
    """Return a table with the undecoded column "image" from Arrow arrays of bytes and of paths, part by part."""
    import datasets
    import pyarrow as pa

    features = datasets.Features({"image": datasets.Image(decode=False)})
    columns = zip(contents, paths, strict=True)
    parts = [pa.StructArray.from_arrays(list(arrays), ["bytes", "path"]) for arrays in columns]
    table: Any = pa.table({"image": pa.chunked_array(parts)}).cast(features.arrow_schema)
    return datasets.Dataset(table)


def _make_table(pixels: NDArray[np.uint8]) -> "Dataset":
    """Return a table with the undecoded column "image" of gray images, without a copy of each in Python."""
    import pyarrow as pa

    contents: list[Any] = []
    _, height, width = pixels.shape
    header = np.frombuffer(f"P5\n{width} {height}\n255\n".encode(), np.uint8)
    for start in range(0, len(pixels), _ROWS):
        part = pixels[start : start + _ROWS]
        # PGM files store pixels as they are, so the hash of an image is the same on every machine.
        files = np.empty((len(part), len(header) + height * width), np.uint8)
        files[:, : len(header)] = header
        files[:, len(header) :].reshape(part.shape)[:] = part
        offsets = np.arange(len(files) + 1, dtype=np.int64) * files.shape[1]
        arrays: list[Any] = [None, pa.py_buffer(offsets), pa.py_buffer(files)]
        contents.append(pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(files), arrays).cast(pa.binary()))
    return store_images(contents, [pa.nulls(len(content), pa.string()) for content in contents])
