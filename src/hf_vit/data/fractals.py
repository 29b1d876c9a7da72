"""Synthetic images of any number from a formula: attractors of iterated function systems, as in FractalDB.

A class is a set of affine maps (arXiv 2101.08515, section 3), drawn so that it contracts and fills the plane well
(arXiv 2110.03091, section 3). An image is a chaos game with its maps: every image varies one coefficient by up to a
fifth, the colour, and whether it is mirrored; with a jitter also how it is turned, how large and where it is. Nothing
is photographed, so nothing that a model learns of these classes is a statement about photographs.

All chance comes from SplitMix64 and all arithmetic is that of IEEE 754 (no sine, no logarithm), so the same name means
the same images in every process, on every machine and under every version of NumPy.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_vit.data.augmentation import random_keys, uniforms
from hf_vit.data.builtin import SPLIT_NUMBERS, Builtin, make_table, netpbm, read_numbers, refuse_large
from hf_vit.data.images import Seen

if TYPE_CHECKING:
    from datasets import IterableDataset
    from numpy.typing import NDArray

    _Floats = NDArray[np.float64]

# Images a class of validation and of test.
HELD_OUT = 20
_MAPS = 8  # at most; at least 2
_LARGEST_FACTOR = 1.2  # of the coefficient that an image varies
_FIRST = 16  # points of a walk before it has reached the attractor
_FULL = 16  # points on a pixel that make it as bright as can be
_LEVELS = np.asarray([math.floor(255 * math.sqrt(points / _FULL) + 0.5) for points in range(_FULL + 1)], dtype=np.int64)
_LEAST_FILLED = 0.1  # share of a class' image at 32 px
_POINTS_AT_ONCE = 1 << 19
_SHARDS = 16
_LIMITS = dict(classes=(2, 10_000), images=(1, 10**9), size=(8, 512), seed=(0, 2**31 - 1), jitter=(0, 100))
_EXAMPLE = "fractals:classes=100,images=1000,size=32,seed=0,jitter=0"


@dataclass(frozen=True)
class Fractals:
    """A data set of fractals, as its name says.

    Attributes:
        classes: how many.
        images: of each in training; validation and test have `HELD_OUT` of each. More images go on where fewer end.
        size: px a side; None: as asked for when they are loaded, else 32.
        seed: of classes and images.
        jitter: percent of the most that an image is turned (by 90 degrees either way), shrunk (to half its sides) and
            moved (as far as it then can). More of it takes more images to learn.
    """

    classes: int = 100
    images: int = 100
    size: int | None = None
    seed: int = 0
    jitter: int = 0

    @classmethod
    def parse(cls, name: str) -> "Fractals":
        """Read "fractals" or "fractals:classes=100,images=1000,size=32,seed=0,jitter=0", or a part of it."""
        return cls(**read_numbers(name, _LIMITS, _EXAMPLE))

    @property
    def name(self) -> str:
        """As it is parsed, but for the size, which changes pixels and not what they show."""
        return f"fractals:classes={self.classes},images={self.images},seed={self.seed}{self._jittered}"

    @property
    def _jittered(self) -> str:
        return f",jitter={self.jitter}" if self.jitter else ""

    @property
    def label_names(self) -> list[str]:
        return [f"fractal-{label:05d}" for label in range(self.classes)]

    def count(self, split: str) -> int:
        """Return the number of images of a split; the classes take turns."""
        return self.classes * (self.images if split == "train" else HELD_OUT)

    @cached_property
    def systems(self) -> "tuple[_Floats, NDArray[np.uint8]]":
        """Of every class its maps [K, 8, 6], each (a, b, c, d, e, f), and the map of each of 256 draws [K, 256]."""
        drawn = [
            _draw_system(key) for key in random_keys(self.seed, 0, np.arange(self.classes, dtype=np.uint64)).tolist()
        ]
        return np.stack([maps for maps, _ in drawn]), np.stack([chosen for _, chosen in drawn])

    def render(self, split: str, numbers: "NDArray[np.int64]", size: int) -> "NDArray[np.uint8]":
        """Return the images with these numbers, [B, size, size, 3]; the same however many classes and images there
        are.
        """
        maps, chosen = self.systems
        labels, indices = numbers % self.classes, numbers // self.classes
        keys = random_keys(self.seed, SPLIT_NUMBERS[split], ((labels << 32) + indices).astype(np.uint64))
        at_once = max(1, _POINTS_AT_ONCE // (4 * size * size))
        parts: list[NDArray[np.uint8]] = []
        for start in range(0, len(numbers), at_once):
            rows = labels[start : start + at_once]
            parts.append(_render(maps[rows], chosen[rows], keys[start : start + at_once], size, self.jitter / 100))
        return np.concatenate(parts)

    def rows(self, split: str, first: int, last: int, size: int) -> Iterator[tuple[Seen, int, bytes]]:
        """Yield what is known of every image from number `first` to before `last`, its class, and its file."""
        step = max(1, 256 * 32 * 32 // (size * size))
        for start in range(first, last, step):
            numbers = np.arange(start, min(last, start + step), dtype=np.int64)
            for number, image in zip(numbers.tolist(), self.render(split, numbers, size), strict=True):
                label, index = number % self.classes, number // self.classes
                place = f"{split}-{label:05d}-{index:09d}.ppm"
                digest = hashlib.sha256(f"fractal {self.seed}{self._jittered} {place}".encode()).hexdigest()
                yield Seen(place, digest, size, size), label, netpbm(image.tobytes(), (size, size))

    def load(self, size: int) -> Builtin:
        """Return all splits in memory, `size` px a side, unless they are too large for that."""
        remedy = "read them with --streaming, which makes them as they are needed, or ask for fewer"
        refuse_large(self.name, self.count("train"), size, remedy)
        rows = {split: list(self.rows(split, 0, self.count(split), size)) for split in SPLIT_NUMBERS}
        seen = {split: [image for image, _, _ in part] for split, part in rows.items()}
        splits = {
            split: make_table([each for *_, each in part], seen[split], [each for _, each, _ in part], self.label_names)
            for split, part in rows.items()
        }
        return Builtin(splits, self.label_names, seen)

    def stream(self, split: str, size: int) -> "IterableDataset":
        """Return a split as an undecoded stream whose images are made when they are asked for."""
        from datasets import ClassLabel, Features, Image, IterableDataset

        features = Features({"image": Image(decode=False), "label": ClassLabel(names=self.label_names)})
        edges = [self.count(split) * shard // _SHARDS for shard in range(_SHARDS + 1)]
        parts = [(first, last) for first, last in pairwise(edges) if last > first]
        return IterableDataset.from_generator(
            _stored_rows, features=features, gen_kwargs={"fractals": self, "split": split, "parts": parts, "size": size}
        )


def _stored_rows(fractals: Fractals, split: str, parts: list[tuple[int, int]], size: int) -> Iterator[dict[str, Any]]:
    """Yield rows of a stream; `parts` are its shards, which loader workers and processes share."""
    for first, last in parts:
        for image, label, encoded in fractals.rows(split, first, last, size):
            yield {"image": {"bytes": encoded, "path": image.name}, "label": label}


def _draw_system(key: int) -> "tuple[_Floats, NDArray[np.uint8]]":
    """Maps [8, 6] and the choices [256] of the first try that fills enough of its image."""
    for attempt in range(1_000_000):
        drawn = uniforms(random_keys(key, attempt, np.zeros(1, dtype=np.uint64)), 2 + 6 * _MAPS)[0]
        system = _system_of(drawn.tolist())
        if system is None:
            continue
        picture = _render(system[0][None], system[1][None], np.asarray([key], dtype=np.uint64), 32)
        if np.count_nonzero(picture[0, :, :, 0]) >= _LEAST_FILLED * 32 * 32:
            return system
    raise AssertionError("no iterated function system found in a million tries")


def _system_of(drawn: Sequence[float]) -> "tuple[_Floats, NDArray[np.uint8]] | None":
    """Maps and choices of 50 uniform numbers; None where they do not contract well enough.

    The matrices are scaled to a drawn sum of s1 + 2 s2 over their singular values, between (5 + N) / 2 and (6 + N) / 2,
    outside of which attractors are thin or shapeless (arXiv 2110.03091, section 3.2).
    """
    number = 2 + int(drawn[0] * (_MAPS - 1))
    maps = [[2 * value - 1 for value in drawn[2 + 6 * row : 8 + 6 * row]] for row in range(number)]
    total, largest = 0.0, 0.0
    for a, b, c, d, _, _ in maps:
        squares, area = a * a + b * b + c * c + d * d, abs(a * d - b * c)
        root = math.sqrt(max(0.0, squares * squares - 4 * area * area))
        first, second = math.sqrt((squares + root) / 2), math.sqrt(max(0.0, squares - root) / 2)
        total, largest = total + first + 2 * second, max(largest, first)
    scale = (5 + number + drawn[1]) / 2 / total
    if scale * largest * _LARGEST_FACTOR >= 1:
        return None
    scaled = np.zeros((_MAPS, 6))
    areas: list[float] = []
    for row, (a, b, c, d, e, f) in enumerate(maps):
        scaled[row] = (a * scale, b * scale, c * scale, d * scale, e, f)
        areas.append(abs(a * d - b * c))
    edges = np.cumsum(np.asarray(areas))
    chosen = np.searchsorted(edges / edges[-1] * 256, np.arange(256), side="right")
    return scaled, np.minimum(chosen, number - 1).astype(np.uint8)


def _render(
    maps: "_Floats", chosen: "NDArray[np.uint8]", keys: "NDArray[np.uint64]", size: int, jitter: float = 0.0
) -> "NDArray[np.uint8]":
    """Return an image a system: maps [B, 8, 6], choices [B, 256], keys [B] -> [B, size, size, 3], 4 points a pixel."""
    walkers = steps = 2 * size
    last = 7 + (_FIRST + steps) * walkers
    draws = uniforms(keys, last + 4)
    batch = np.arange(len(keys))
    varied = maps.copy()
    factors = 2 - _LARGEST_FACTOR + draws[:, 1] * (2 * _LARGEST_FACTOR - 2)
    varied[batch, :, np.floor(draws[:, 0] * 6).astype(np.int64)] *= factors[:, None]
    bytes_ = (draws[:, 7:last] * 256).astype(np.uint8).reshape(len(keys), _FIRST + steps, walkers)
    taken = np.take_along_axis(chosen, bytes_.reshape(len(keys), -1), axis=1).reshape(bytes_.shape)
    x, y = np.zeros((len(keys), walkers)), np.zeros((len(keys), walkers))
    across, down = np.empty((2, len(keys), steps, walkers))
    for step in range(_FIRST + steps):
        a, b, c, d, e, f = np.moveaxis(varied[batch[:, None], taken[:, step]], -1, 0)
        x, y = a * x + b * y + e, c * x + d * y + f
        if step >= _FIRST:
            across[:, step - _FIRST], down[:, step - _FIRST] = x, y
    columns, rows = _pixels(across, down, size, draws[:, last:, None], jitter)
    columns = np.where(draws[:, 2, None] < 0.5, columns, size - 1 - columns)
    rows = np.where(draws[:, 3, None] < 0.5, rows, size - 1 - rows)
    places = (batch[:, None] * size + rows) * size + columns
    counts = np.bincount(places.ravel(), minlength=len(keys) * size * size).reshape(len(keys), size, size)
    colour = 96 + np.floor(draws[:, 4:7] * 160).astype(np.int64)
    return (_LEVELS[np.minimum(counts, _FULL)][..., None] * colour[:, None, None] // 255).astype(np.uint8)


def _pixels(
    across: "_Floats", down: "_Floats", size: int, draws: "_Floats", jitter: float
) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
    """Columns and rows of points [B, ...] in the smallest square around them, the shorter side in its middle.

    Four draws [B, 4, 1] and the jitter, 0..1, decide how they are turned, and how large and where the square is.
    """
    flat = [points.reshape(len(points), -1) for points in (across, down)]
    if jitter:  # else it would cost an eighth of an image
        half = jitter * (2 * draws[:, 0] - 1)  # the tangent of half the angle: no sine is the same everywhere
        cosine, sine = (1 - half * half) / (1 + half * half), 2 * half / (1 + half * half)
        x, y = flat
        flat = [cosine * x - sine * y, sine * x + cosine * y]
    lowest = [points.min(axis=1, keepdims=True) for points in flat]
    spans = [points.max(axis=1, keepdims=True) - low for points, low in zip(flat, lowest, strict=True)]
    longest = np.maximum(*spans)
    side = size * (1 - jitter * draws[:, 1] / 2)
    corners = [(size - side) * (0.5 + jitter * (draws[:, place] - 0.5)) for place in (2, 3)]
    places = [
        np.minimum(size - 1, (corner + (points - low + (longest - span) / 2) / longest * side).astype(np.int64))
        for points, low, span, corner in zip(flat, lowest, spans, corners, strict=True)
    ]
    return places[0], places[1]
