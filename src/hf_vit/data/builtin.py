"""Real images that come with installed libraries: nothing is downloaded.

`digits`: the 1,797 handwritten digits of 8x8 px that scikit-learn ships (test part of UCI "Optical Recognition of
Handwritten Digits").

`photos`: crops of the eight color photographs inside the scikit-image wheel; which photograph is a crop from? Every
photograph is divided into 4x4 tiles, and a crop lies within one tile. Training, validation and test own different
tiles (8, 4 and 4 a photograph, one or two in every row and column), so no pixel of a test crop was ever seen in
training. Of the retina only the square inside the round picture is used: its black corners belong to no photograph.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from hf_vit.data.images import Seen, decode_image
from hf_vit.data.splits import stratified_parts
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

# The splits of what is made by a formula, as it draws them.
SPLIT_NUMBERS = {"train": 1, "validation": 2, "test": 3}
# What a table in memory may hold; Arrow's offsets end at twice that.
_LARGEST_TABLE = 1 << 30


@dataclass(frozen=True)
class Builtin:
    """Splits of a built-in data set and what is known of every image; hashes are of the original pixels."""

    splits: "dict[str, Dataset]"
    label_names: list[str]
    seen: dict[str, list[Seen]]


def make_table(encoded: Sequence[bytes], seen: Sequence[Seen], labels: Sequence[int], names: list[str]) -> "Dataset":
    """Return a table with the columns "image" and "label" of encoded images."""
    import pyarrow as pa
    from datasets import ClassLabel, Dataset, DatasetInfo, Features
    from datasets import Image as ImageFeature
    from datasets.table import InMemoryTable

    features = Features({"image": ImageFeature(), "label": ClassLabel(names=names)})
    stored = [pa.array(encoded, pa.binary()), pa.array([image.name for image in seen], pa.string())]
    columns = [pa.StructArray.from_arrays(stored, ["bytes", "path"]), pa.array(labels, pa.int64())]
    table = InMemoryTable(pa.table(columns, schema=features.arrow_schema))
    # Dataset.from_dict would encode, copy and hash every byte again: 20 s for the photos at 384 px instead of 2.
    identity = hashlib.sha256(repr(list(seen)).encode()).hexdigest()[:16]
    return Dataset(table, info=DatasetInfo(features=features), fingerprint=identity)


def netpbm(pixels: bytes, size: tuple[int, int], mode: str = "RGB") -> bytes:
    """Return an image file of (width, height) px."""
    # Uncompressed: at 224 px PNG costs 21 ms to write and 1.4 ms to read, this 0.07 and 0.06 ms.
    return (b"P5" if mode == "L" else b"P6") + b" %d %d 255\n" % size + pixels


def refuse_large(name: str, count: int, size: int, remedy: str) -> None:
    """Refuse a table of so many images of `size` px a side where memory does not hold it."""
    total = count * 3 * size * size
    if total > _LARGEST_TABLE:
        raise UserError(f"{name}: {count:,} images of {size}x{size} px are {total / 2**30:.1f} GiB; {remedy}")


def read_numbers(name: str, limits: Mapping[str, tuple[int, int]], example: str) -> dict[str, int]:
    """Return the numbers behind the colon of a name, "fractals:classes=10,seed=1", each of which may be left out."""
    values: dict[str, int] = {}
    for part in filter(None, name.partition(":")[2].split(",")):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,12})\s*", part)
        if match is None or match[1] not in limits:
            raise UserError(f"'{name}': '{part}' is not understood; write {example}, or some of these")
        least, most = limits[match[1]]
        values[match[1]] = int(match[2])
        if not least <= values[match[1]] <= most:
            raise UserError(f"'{name}': {match[1]} is {match[2]}; choose {least} to {most}")
    return values


# Name of the class, file in skimage/data, square or rectangle used (left, top, right, bottom) or None for all of it.
PHOTOGRAPHS: tuple[tuple[str, str, tuple[int, int, int, int] | None], ...] = (
    ("astronaut", "astronaut.png", None),
    ("cat", "chelsea.png", None),
    ("coffee", "coffee.png", None),
    ("galaxies", "hubble_deep_field.jpg", None),
    ("tissue", "ihc.png", None),
    ("motorcycle", "motorcycle_left.png", None),
    ("retina", "retina.jpg", (211, 211, 1200, 1200)),
    ("rocket", "rocket.jpg", None),
)
# t train, v validation, e test: every row and every column holds two t, one v, one e.
TILES = ("tvte", "ettv", "vtet", "tetv")
_CROPS = {"train": ("t", 100), "validation": ("v", 20), "test": ("e", 40)}
_DIGIT_PARTS = {"validation": 180, "test": 360}
MAX_PHOTO_SIDE = 384


def digits(image_size: tuple[int, int] | None = None) -> Builtin:
    """Return the 1,797 digits: 1,257 train, 180 validation, 360 test, stratified, the same on every machine.

    With `image_size`, (height, width) px, they are enlarged (bilinear, as the image processor would).
    """
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    labels = np.asarray(bunch.target, dtype=np.int64)
    # 0..16 ink levels on black.
    pixels = np.rint(np.asarray(bunch.images) * (255 / 16)).astype(np.uint8)
    images: dict[str, list[_Drawn]] = {}
    for split, rows in stratified_parts(labels, _DIGIT_PARTS, seed=0).items():
        images[split] = [
            (f"digit-{row:04d}.pgm", pixels[row].tobytes(), Image.fromarray(pixels[row]), int(labels[row]))
            for row in rows.tolist()
        ]
    return _builtin(images, [str(digit) for digit in range(10)], image_size)


def photos(image_size: tuple[int, int] | None = None) -> Builtin:
    """Crops of eight color photographs: 800 train, 160 validation, 320 test, from disjoint tiles.

    `image_size` is (height, width) px of the crops, at most 384 px a side; None keeps the photographs' own pixels
    (squares of 45 to 247 px), which the image processor then resizes.
    """
    if image_size is not None and max(image_size) > MAX_PHOTO_SIDE:
        raise UserError(
            f"photos in {image_size[0]}x{image_size[1]} px is too large; the limit is {MAX_PHOTO_SIDE} px a "
            "side: choose a smaller image size"
        )
    images: dict[str, list[_Drawn]] = {split: [] for split in _CROPS}
    for label, (name, file, frame) in enumerate(PHOTOGRAPHS):
        path = _photograph(file)
        source, photograph = hashlib.sha256(path.read_bytes()).hexdigest(), decode_image(path)
        for split, number, box in crop_boxes(frame or (0, 0, *photograph.size), seed=label):
            place, identity = f"{name}-{split}-{number:03d}.ppm", f"{source} {box}".encode()
            images[split].append((place, identity, photograph.crop(box), label))
    return _builtin(images, [name for name, _, _ in PHOTOGRAPHS], image_size)


# Name, what its hash is of, picture, class.
_Drawn = tuple[str, bytes, Image.Image, int]


def _builtin(drawn: Mapping[str, list[_Drawn]], names: list[str], image_size: tuple[int, int] | None) -> Builtin:
    """Return tables of pictures, resized where a size is asked for."""
    splits: dict[str, Dataset] = {}
    seen: dict[str, list[Seen]] = {}
    for split, rows in drawn.items():
        size = None if image_size is None else (image_size[1], image_size[0])
        images = [
            image if size in (None, image.size) else image.resize(size, Image.Resampling.BILINEAR)
            for _, _, image, _ in rows
        ]
        seen[split] = [
            Seen(name, hashlib.sha256(identity).hexdigest(), image.height, image.width)
            for (name, identity, _, _), image in zip(rows, images, strict=True)
        ]
        encoded = [netpbm(image.tobytes(), image.size, image.mode) for image in images]
        splits[split] = make_table(encoded, seen[split], [label for *_, label in rows], names)
    return Builtin(splits, names, seen)


def crop_boxes(frame: tuple[int, int, int, int], seed: int) -> Iterator[tuple[str, int, tuple[int, int, int, int]]]:
    """Yield where the crops of one photograph lie: (split, number, (left, top, right, bottom) in px), in a fixed order.

    Squares of 60 to 100% of the shorter side of a tile. NumPy's RandomState is frozen, hence the same on every machine.
    """
    random = np.random.RandomState(seed)
    left, top, right, bottom = frame
    columns, rows = _edges(frame)
    shorter = min((right - left) // 4, (bottom - top) // 4)
    for split, (letter, count) in _CROPS.items():
        tiles = [(row, column) for row in range(4) for column in range(4) if TILES[row][column] == letter]
        for number in range(count):
            row, column = tiles[number % len(tiles)]
            side = int(random.randint(-(-shorter * 6 // 10), shorter + 1))
            x = int(random.randint(columns[column], columns[column + 1] - side + 1))
            y = int(random.randint(rows[row], rows[row + 1] - side + 1))
            yield split, number, (x, y, x + side, y + side)


def photograph_tiles(split: str) -> Iterator[Image.Image]:
    """Yield the tiles of all photographs that a split owns, as RGB."""
    letter, _ = _CROPS[split]
    for _, file, frame in PHOTOGRAPHS:
        photograph = decode_image(_photograph(file))
        columns, rows = _edges(frame or (0, 0, *photograph.size))
        for row, letters in enumerate(TILES):
            for column in (place for place, owner in enumerate(letters) if owner == letter):
                yield photograph.crop((columns[column], rows[row], columns[column + 1], rows[row + 1]))


def _edges(frame: tuple[int, int, int, int]) -> tuple[list[int], list[int]]:
    """Return where the columns and the rows of tiles begin and end, px."""
    left, top, right, bottom = frame
    columns = [left + (right - left) * column // 4 for column in range(5)]
    return columns, [top + (bottom - top) * row // 4 for row in range(5)]


def _photograph(file: str) -> Path:
    import skimage

    path = Path(str(skimage.__file__)).parent / "data" / file
    if not path.is_file():
        raise UserError(f"this installation of scikit-image lacks {file}; install the scikit-image wheel from PyPI")
    return path
