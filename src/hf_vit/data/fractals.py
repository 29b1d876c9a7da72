"""Synthetic images of fractals: attractors of iterated function systems, as in FractalDB.

A class is a set of affine maps (arXiv 2101.08515, section 3), drawn at random so that they contract and fill the plane
well (arXiv 2110.03091, section 3). An image is a chaos game with the maps of its class. Images of a class differ by a
change of up to a fifth in one coefficient, in color and in mirroring, and with jitter also in rotation, size and
position. The images are not photographs, so results on these classes say nothing about photographs.

All random numbers come from SplitMix64, and all arithmetic is IEEE 754 without sine and logarithm, so a name gives the
same images in every process, on every machine and with every version of NumPy.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_vit.data.augmentation import draw_uniforms, make_random_keys
from hf_vit.data.builtin import SPLIT_NUMBERS, Row, encode_netpbm, make_data, parse_numbers, refuse_large
from hf_vit.data.fingerprints import hash_text
from hf_vit.data.image_data import ImageData
from hf_vit.data.images import ImageScan

if TYPE_CHECKING:
    from datasets import IterableDataset

_Floats = NDArray[np.float64]
# Images of a class in validation and in test.
HELD_OUT = 20
_MAPS = 8  # the most maps of a class; the fewest are 2
_LARGEST_FACTOR = 1.2  # of the one coefficient in which an image differs from its class
_FIRST = 16  # points of a walk before it reaches the attractor
_FULL = 16  # points on a pixel that give full brightness
_LEVELS = np.asarray([math.floor(255 * math.sqrt(points / _FULL) + 0.5) for points in range(_FULL + 1)], dtype=np.int64)
_LEAST_FILLED = 0.1  # lowest share of filled pixels of a class at 32 px
_POINTS_AT_ONCE = 1 << 19
_SHARDS = 16
_LIMITS = dict(classes=(2, 10_000), images=(1, 10**9), size=(8, 512), seed=(0, 2**31 - 1), jitter=(0, 100))
_EXAMPLE = "fractals:classes=100,images=1000,size=32,seed=0,jitter=0"


@dataclass(frozen=True)
class Fractals:
    """A data set of fractals.

    Attributes:
        classes: number of classes.
        images: training images of a class; validation and test have `HELD_OUT`. A larger number adds images.
        size: px a side; None for the size of `load_data`, by default 32.
        seed: random seed of classes and images.
        jitter: percentage of the largest rotation (90 degrees either way), reduction (to half the side) and shift
            (within the image). Learning needs more images with more jitter.
    """

    classes: int = 100
    images: int = 100
    size: int | None = None
    seed: int = 0
    jitter: int = 0

    @classmethod
    def parse(cls, name: str) -> "Fractals":
        """Parse "fractals" or "fractals:classes=100,images=1000,size=32,seed=0,jitter=0" with any of these options."""
        return cls(**parse_numbers(name, _LIMITS, _EXAMPLE))

    @property
    def name(self) -> str:
        """The name to parse, without the size, which changes the resolution but not the content."""
        return f"fractals:classes={self.classes},images={self.images},seed={self.seed}{self._jittered}"

    @property
    def _jittered(self) -> str:
        return f",jitter={self.jitter}" if self.jitter else ""

    @property
    def label_names(self) -> list[str]:
        return [f"fractal-{label:05d}" for label in range(self.classes)]

    def count(self, split: str) -> int:
        """Return the number of images of a split; image i has the class i modulo `classes`."""
        return self.classes * (self.images if split == "train" else HELD_OUT)

    @cached_property
    def systems(self) -> tuple[_Floats, NDArray[np.uint8]]:
        """Maps of all K classes, [K, 8, 6] with (a, b, c, d, e, f), and the map for every random byte, [K, 256]."""
        keys = make_random_keys(self.seed, 0, np.arange(self.classes, dtype=np.uint64))
        systems = [_draw_system(key) for key in keys.tolist()]
        return np.stack([maps for maps, _ in systems]), np.stack([choices for _, choices in systems])

    def render(self, split: str, numbers: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
        """Return the images with these B numbers, [B, size, size, 3]; an image depends on its class and index alone."""
        maps, choices = self.systems
        indices, labels = np.divmod(numbers, self.classes)
        keys = make_random_keys(self.seed, SPLIT_NUMBERS[split], ((labels << 32) + indices).astype(np.uint64))
        batch_size = max(1, _POINTS_AT_ONCE // (4 * size * size))
        parts: list[NDArray[np.uint8]] = []
        for start in range(0, len(numbers), batch_size):
            batch = slice(start, start + batch_size)
            systems = maps[labels[batch]], choices[labels[batch]]
            parts.append(_render_images(*systems, keys[batch], size, self.jitter / 100))
        return np.concatenate(parts)

    def rows(self, split: str, first: int, last: int, size: int) -> Iterator[Row]:
        """Yield the rows of the images from number `first` to `last` - 1."""
        step = max(1, 256 * 32 * 32 // (size * size))
        for start in range(first, last, step):
            numbers = np.arange(start, min(last, start + step), dtype=np.int64)
            for number, image in zip(numbers.tolist(), self.render(split, numbers, size), strict=True):
                index, label = divmod(number, self.classes)
                image_name = f"{split}-{label:05d}-{index:09d}.ppm"
                digest = hashlib.sha256(f"fractal {self.seed}{self._jittered} {image_name}".encode()).hexdigest()
                yield ImageScan(image_name, digest, size, size), label, encode_netpbm(image.tobytes(), (size, size))

    def load(self, size: int) -> ImageData:
        """Return all splits in memory with images of `size` px a side; raise UserError if they are too large."""
        remedy = "add --streaming, which creates images when they are needed, or ask for fewer images"
        refuse_large(self.name, self.count("train"), size, remedy)
        rows = {split: self.rows(split, 0, self.count(split), size) for split in SPLIT_NUMBERS}
        return make_data(self.name, rows, self.label_names, hash_text(self.name))

    def stream(self, split: str, size: int) -> "IterableDataset":
        """Return a split as an undecoded stream, which creates images when they are read."""
        from datasets import ClassLabel, Features, Image, IterableDataset

        features = Features({"image": Image(decode=False), "label": ClassLabel(names=self.label_names)})
        edges = [self.count(split) * shard // _SHARDS for shard in range(_SHARDS + 1)]
        parts = [(first, last) for first, last in pairwise(edges) if last > first]
        arguments = {"fractals": self, "split": split, "parts": parts, "size": size}
        return IterableDataset.from_generator(_generate_rows, features=features, gen_kwargs=arguments)


def _generate_rows(fractals: Fractals, split: str, parts: list[tuple[int, int]], size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stream; `parts` are the (first, last) numbers of its shards."""
    for first, last in parts:
        for image, label, encoded in fractals.rows(split, first, last, size):
            yield {"image": {"bytes": encoded, "path": image.name}, "label": label}


def _draw_system(key: int) -> tuple[_Floats, NDArray[np.uint8]]:
    """Return the maps [8, 6] and choices [256] of the first random system that fills enough of its image."""
    for attempt in range(1_000_000):
        draws = draw_uniforms(make_random_keys(key, attempt, np.zeros(1, dtype=np.uint64)), 2 + 6 * _MAPS)[0]
        system = _build_system(draws.tolist())
        if system is None:
            continue
        image = _render_images(system[0][None], system[1][None], np.asarray([key], dtype=np.uint64), 32)
        if np.count_nonzero(image[0, :, :, 0]) >= _LEAST_FILLED * 32 * 32:
            return system
    raise AssertionError("no iterated function system found in a million tries")


def _build_system(draws: Sequence[float]) -> tuple[_Floats, NDArray[np.uint8]] | None:
    """Build a system from 50 uniform random numbers; None if a map does not contract.

    With N maps, the matrices are scaled so that the sum of s1 + 2 s2 over their singular values s1 >= s2 is random
    between (5 + N) / 2 and (6 + N) / 2. Outside of this range attractors are thin or shapeless (arXiv 2110.03091,
    section 3.2).

    Returns:
        maps [8, 6], each (a, b, c, d, e, f) of x' = a x + b y + e, y' = c x + d y + f, and the map for every random
        byte [256], in proportion to the areas.
    """
    map_count = 2 + int(draws[0] * (_MAPS - 1))
    maps = [[2 * value - 1 for value in draws[2 + 6 * row : 8 + 6 * row]] for row in range(map_count)]
    total, largest = 0.0, 0.0
    for a, b, c, d, _, _ in maps:
        squares = a * a + b * b + c * c + d * d
        area = abs(a * d - b * c)
        root = math.sqrt(max(0.0, squares * squares - 4 * area * area))
        first = math.sqrt((squares + root) / 2)
        second = math.sqrt(max(0.0, squares - root) / 2)
        total, largest = total + first + 2 * second, max(largest, first)
    scale = (5 + map_count + draws[1]) / 2 / total
    if scale * largest * _LARGEST_FACTOR >= 1:
        return None
    scaled_maps = np.zeros((_MAPS, 6))
    areas: list[float] = []
    for row, (a, b, c, d, e, f) in enumerate(maps):
        scaled_maps[row] = (a * scale, b * scale, c * scale, d * scale, e, f)
        areas.append(abs(a * d - b * c))
    edges = np.cumsum(np.asarray(areas))
    choices = np.searchsorted(edges / edges[-1] * 256, np.arange(256), side="right")
    return scaled_maps, np.minimum(choices, map_count - 1).astype(np.uint8)


def _render_images(
    maps: _Floats, choices: NDArray[np.uint8], keys: NDArray[np.uint64], size: int, jitter: float = 0.0
) -> NDArray[np.uint8]:
    """Play the chaos game with 4 points per pixel, and return the images [B, size, size, 3].

    `maps` [B, 8, 6] are the maps of B images, `choices` [B, 256] the map for every random byte; jitter is 0..1.
    """
    walkers = steps = 2 * size
    end_of_bytes = 7 + (_FIRST + steps) * walkers
    # Of an image's numbers, 0 and 1 vary a coefficient, 2 and 3 mirror it, 4 to 6 set its color, and the last 4 are for
    # the jitter; those between choose the maps.
    draws = draw_uniforms(keys, end_of_bytes + 4)
    batch = np.arange(len(keys))
    varied_maps = maps.copy()
    factors = 2 - _LARGEST_FACTOR + draws[:, 1] * (2 * _LARGEST_FACTOR - 2)
    varied_maps[batch, :, np.floor(draws[:, 0] * 6).astype(np.int64)] *= factors[:, None]
    random_bytes = (draws[:, 7:end_of_bytes] * 256).astype(np.uint8).reshape(len(keys), _FIRST + steps, walkers)
    map_indices = np.take_along_axis(choices, random_bytes.reshape(len(keys), -1), axis=1).reshape(random_bytes.shape)
    x, y = np.zeros((len(keys), walkers)), np.zeros((len(keys), walkers))
    across, down = np.empty((2, len(keys), steps, walkers))
    for step in range(_FIRST + steps):
        a, b, c, d, e, f = np.moveaxis(varied_maps[batch[:, None], map_indices[:, step]], -1, 0)
        x, y = a * x + b * y + e, c * x + d * y + f
        if step >= _FIRST:
            across[:, step - _FIRST], down[:, step - _FIRST] = x, y
    columns, rows = _locate_points(across, down, size, draws[:, end_of_bytes:, None], jitter)
    columns = np.where(draws[:, 2, None] < 0.5, columns, size - 1 - columns)
    rows = np.where(draws[:, 3, None] < 0.5, rows, size - 1 - rows)
    pixel_indices = (batch[:, None] * size + rows) * size + columns
    counts = np.bincount(pixel_indices.ravel(), minlength=len(keys) * size * size).reshape(len(keys), size, size)
    color = 96 + np.floor(draws[:, 4:7] * 160).astype(np.int64)
    return (_LEVELS[np.minimum(counts, _FULL)][..., None] * color[:, None, None] // 255).astype(np.uint8)


def _locate_points(
    across: _Floats, down: _Floats, size: int, draws: _Floats, jitter: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Map points [B, ...] of B images to pixel columns and rows, centered in the smallest square around them.

    `jitter`, 0..1, is the strength of random changes of the square's rotation, size and position by `draws` [B, 4, 1].
    """
    coordinates = [points.reshape(len(points), -1) for points in (across, down)]
    if jitter:  # without jitter the rotation would waste an eighth of the time
        half = jitter * (2 * draws[:, 0] - 1)  # tangent of half the angle, as sine differs between machines
        cosine, sine = (1 - half * half) / (1 + half * half), 2 * half / (1 + half * half)
        x, y = coordinates
        coordinates = [cosine * x - sine * y, sine * x + cosine * y]
    lowest = [points.min(axis=1, keepdims=True) for points in coordinates]
    spans = [points.max(axis=1, keepdims=True) - low for points, low in zip(coordinates, lowest, strict=True)]
    longest = np.maximum(*spans)
    side = size * (1 - jitter * draws[:, 1] / 2)
    offsets = [(size - side) * (0.5 + jitter * (draws[:, index] - 0.5)) for index in (2, 3)]
    positions = [
        np.minimum(size - 1, (corner + (points - low + (longest - span) / 2) / longest * side).astype(np.int64))
        for points, low, span, corner in zip(coordinates, lowest, spans, offsets, strict=True)
    ]
    return positions[0], positions[1]
