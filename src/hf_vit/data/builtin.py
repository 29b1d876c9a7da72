"""Built-in data sets of real images that installed libraries contain, so that nothing is downloaded.

`digits`: the 1,797 handwritten digits of 8x8 px in scikit-learn (test part of UCI "Optical Recognition of Handwritten
Digits").

`photos`: crops of the eight color photographs in the scikit-image wheel; the class is the photograph. Every photograph
is divided into 4x4 tiles, and a crop lies within one tile. Training, validation and test use different tiles (8, 4 and
4 of each photograph, one or two in every row and column), so training sees no pixel of a test crop. Of the retina only
the square inside the round picture is used, without the black corners.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hf_vit.data.fingerprints import hash_content, hash_text
from hf_vit.data.image_data import ImageData
from hf_vit.data.images import ImageScan, decode_image
from hf_vit.environment import require
from hf_vit.errors import UserError

# Numbers of the splits in the random keys of synthetic data sets.
SPLIT_NUMBERS = {"train": 1, "validation": 2, "test": 3}
# Limit of a table in memory, in bytes; Arrow's offsets end at twice that.
_LARGEST_TABLE = 1 << 30


Row = tuple[ImageScan, int, bytes]  # the scan of an image, its class number and its file


def make_data(
    name: str, rows: Mapping[str, Iterable[Row]], label_names: list[str], fingerprint: str | None = None
) -> ImageData:
    """Return the images of all splits in memory; the fingerprint is by default a hash of their content."""
    import pyarrow as pa
    from datasets import ClassLabel, Dataset, DatasetInfo, Features
    from datasets import Image as ImageFeature
    from datasets.table import InMemoryTable

    features = Features({"image": ImageFeature(), "label": ClassLabel(names=label_names)})
    splits: dict[str, Dataset] = {}
    seen: dict[str, list[ImageScan]] = {}
    for split, rows_of_split in rows.items():
        scans, labels, files = map(list, zip(*rows_of_split, strict=True))
        seen[split] = scans
        image_fields = [pa.array(files, pa.binary()), pa.array([scan.name for scan in scans], pa.string())]
        columns = [pa.StructArray.from_arrays(image_fields, ["bytes", "path"]), pa.array(labels, pa.int64())]
        table = InMemoryTable(pa.table(columns, schema=features.arrow_schema))
        # Dataset.from_dict would encode, copy and hash every byte again: 20 s instead of 2 s for the photos at 384 px.
        splits[split] = Dataset(table, info=DatasetInfo(features=features), fingerprint=hash_text(repr(scans)))
    fingerprint = fingerprint or hash_content(splits, seen, label_names)
    return ImageData(name, fingerprint, splits, label_names, seen=seen)


def encode_netpbm(pixels: bytes, size: tuple[int, int], mode: str = "RGB") -> bytes:
    """Encode pixels as an uncompressed image file of (width, height) px."""
    # At 224 px PNG takes 21 ms to write and 1.4 ms to read, this format 0.07 and 0.06 ms.
    return (b"P5" if mode == "L" else b"P6") + b" %d %d 255\n" % size + pixels


def refuse_large(name: str, count: int, size: int, remedy: str) -> None:
    """Raise UserError if a table of `count` images of `size` px a side would be too large for memory."""
    total = count * 3 * size * size
    if total > _LARGEST_TABLE:
        raise UserError(f"{count:,} images of {size}x{size} px of {name} need {total / 2**30:.1f} GiB; {remedy}")


def parse_numbers(name: str, limits: Mapping[str, tuple[int, int]], example: str) -> dict[str, int]:
    """Parse the options of a built-in data set's name, such as "fractals:classes=10,seed=1", within the limits."""
    values: dict[str, int] = {}
    for part in filter(None, name.partition(":")[2].split(",")):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,12})\s*", part)
        if match is None or match[1] not in limits:
            raise UserError(f"'{name}' has the unknown option '{part}'; write {example}, or leave options out")
        option, value = match[1], int(match[2])
        lowest, highest = limits[option]
        if not lowest <= value <= highest:
            raise UserError(
                f"'{name}' sets {option} to {value}, but it must be from {lowest} to {highest}; choose a value in this "
                "range"
            )
        values[option] = value
    return values


# Class name, file in skimage/data, and the part used (left, top, right, bottom), or None for the whole photograph.
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
# t: train, v: validation, e: test; every row and every column has two t, one v and one e.
TILES = ("tvte", "ettv", "vtet", "tetv")
_CROPS = {"train": ("t", 100), "validation": ("v", 20), "test": ("e", 40)}
_DIGIT_PARTS = {"validation": 180, "test": 360}
MAX_PHOTO_SIDE = 384


def digits(image_size: tuple[int, int] | None = None) -> ImageData:
    """Return the 1,797 digits in stratified splits: 1,257 train, 180 validation, 360 test.

    With `image_size`, (height, width) px, the digits are resized bilinearly, as the image processor does.
    """
    require("sklearn", purpose="the data set digits")
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    labels = np.asarray(bunch.target, dtype=np.int64)
    # The source has gray levels 0..16.
    pixels = np.rint(np.asarray(bunch.images) * (255 / 16)).astype(np.uint8)

    def make_row(row: int) -> Row:
        image = Image.fromarray(pixels[row])
        return _make_row(f"digit-{row:04d}.pgm", pixels[row].tobytes(), image, int(labels[row]), image_size)

    rows = {split: map(make_row, of_split.tolist()) for split, of_split in _split_digits(labels).items()}
    return make_data("digits", rows, [str(digit) for digit in range(10)])


def _split_digits(labels: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Return the rows of every split, with every digit in proportion: shares are rounded by largest remainders.

    NumPy's RandomState is frozen across versions and platforms, so the rows are the same on every machine.
    """
    random = np.random.RandomState(0)
    remaining = [random.permutation(np.flatnonzero(labels == label)) for label in range(10)]
    shares = np.bincount(labels) / len(labels)
    parts: dict[str, NDArray[np.int64]] = {}
    for name, size in _DIGIT_PARTS.items():
        counts = np.floor(shares * size).astype(np.int64)
        counts[np.argsort(counts - shares * size, kind="stable")[: size - counts.sum()]] += 1
        parts[name] = np.sort(np.concatenate([rows[:count] for rows, count in zip(remaining, counts, strict=True)]))
        remaining = [rows[count:] for rows, count in zip(remaining, counts, strict=True)]
    return {"train": np.sort(np.concatenate(remaining)), **parts}


def photos(image_size: tuple[int, int] | None = None) -> ImageData:
    """Return crops of eight color photographs from disjoint tiles: 800 train, 160 validation, 320 test.

    `image_size` is (height, width) px of the crops, at most 384 px a side; None keeps the original resolution (squares
    of 45 to 247 px), which the image processor then resizes.
    """
    if image_size is not None and max(image_size) > MAX_PHOTO_SIDE:
        raise UserError(
            f"photos cannot be loaded at {image_size[0]}x{image_size[1]} px; "
            f"choose an --image-size of at most {MAX_PHOTO_SIDE} px a side"
        )
    crops: dict[str, list[tuple[str, bytes, Image.Image, int]]] = {split: [] for split in _CROPS}
    for label, (name, file, frame) in enumerate(PHOTOGRAPHS):
        path = _find_photograph(file)
        source = hashlib.sha256(path.read_bytes()).hexdigest()
        photograph = decode_image(path)
        for split, number, box in crop_boxes(frame or (0, 0, *photograph.size), seed=label):
            image_name = f"{name}-{split}-{number:03d}.ppm"
            crops[split].append((image_name, f"{source} {box}".encode(), photograph.crop(box), label))
    # The crops are enlarged and encoded when their split is made.
    rows = {split: starmap(partial(_make_row, image_size=image_size), of_split) for split, of_split in crops.items()}
    return make_data("photos", rows, [name for name, _, _ in PHOTOGRAPHS])


def _make_row(name: str, identity: bytes, image: Image.Image, label: int, image_size: tuple[int, int] | None) -> Row:
    """Encode an image, resized to `image_size`, (height, width) px; its digest is that of the bytes `identity`."""
    if image_size is not None:
        image = image.resize((image_size[1], image_size[0]), Image.Resampling.BILINEAR)
    scan = ImageScan(name, hashlib.sha256(identity).hexdigest(), image.height, image.width)
    return scan, label, encode_netpbm(image.tobytes(), image.size, image.mode)


def crop_boxes(frame: tuple[int, int, int, int], seed: int) -> Iterator[tuple[str, int, tuple[int, int, int, int]]]:
    """Yield the crops of one photograph as (split, number, (left, top, right, bottom) in px), in a fixed order.

    A crop is a square with 60 to 100% of the shorter side of a tile. NumPy's RandomState is frozen, so the crops are
    the same on every machine. `frame` is the used part of the photograph (left, top, right, bottom) in px.
    """
    random = np.random.RandomState(seed)
    left, top, right, bottom = frame
    columns, rows = _find_tile_edges(frame)
    shorter = min((right - left) // 4, (bottom - top) // 4)
    for split, (letter, count) in _CROPS.items():
        tiles = [(row, column) for row in range(4) for column in range(4) if TILES[row][column] == letter]
        for number in range(count):
            row, column = tiles[number % len(tiles)]
            side = int(random.randint(math.ceil(shorter * 6 / 10), shorter + 1))
            x = int(random.randint(columns[column], columns[column + 1] - side + 1))
            y = int(random.randint(rows[row], rows[row + 1] - side + 1))
            yield split, number, (x, y, x + side, y + side)


def cut_photographs(split: str) -> Iterator[Image.Image]:
    """Yield the tiles of all photographs that belong to a split, as RGB."""
    letter, _ = _CROPS[split]
    for _, file, frame in PHOTOGRAPHS:
        photograph = decode_image(_find_photograph(file))
        columns, rows = _find_tile_edges(frame or (0, 0, *photograph.size))
        for row, letters in enumerate(TILES):
            for column in (index for index, tile_letter in enumerate(letters) if tile_letter == letter):
                yield photograph.crop((columns[column], rows[row], columns[column + 1], rows[row + 1]))


def _find_tile_edges(frame: tuple[int, int, int, int]) -> tuple[list[int], list[int]]:
    """Return the edges of the columns and of the rows of tiles, 5 positions in px each."""
    left, top, right, bottom = frame
    columns = [left + (right - left) * column // 4 for column in range(5)]
    return columns, [top + (bottom - top) * row // 4 for row in range(5)]


def _find_photograph(file: str) -> Path:
    """Return the path of a photograph in the installed scikit-image."""
    require("skimage", purpose="a photograph of scikit-image")
    import skimage

    path = Path(str(skimage.__file__)).parent / "data" / file
    if not path.is_file():
        raise UserError(
            f"the installed scikit-image lacks the photo {file}; install it from PyPI: pip install "
            "--force-reinstall scikit-image"
        )
    return path
