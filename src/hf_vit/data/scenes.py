"""Synthetic scenes of any number with exact masks and boxes: shapes over photographs and textures.

A scene has one to three shapes, each of a class, in places, sizes, turns and colors of chance, over a crop of a
photograph (those of `photos`) or a texture: large, whole, of one color, and apart. With clutter they are up to four,
smaller, many in stripes or checks, cut by the border, and a later one hides what lies under it; masks and boxes are
those of what is seen. Nothing in the photographs is annotated, so the scenes say whether a model can learn to find and
to outline, and nothing about photographs.

Training, validation and test take their photographs from different tiles, as `photos` does. All chance comes from
SplitMix64, and masks from the arithmetic of IEEE 754 (no sine), so the same name means the same masks on every machine.
"""

import functools
import hashlib
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from hf_vit.data.annotations import Annotation, Target, mask_annotation, object_annotation, tight_box
from hf_vit.data.augmentation import random_keys, uniforms
from hf_vit.data.builtin import SPLIT_NUMBERS, Builtin, netpbm, photograph_tiles, read_numbers, refuse_large
from hf_vit.data.images import Seen
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    _Floats = NDArray[np.float64]

SHAPES: tuple[str, ...] = ("disc", "square", "triangle", "cross", "ring")
# Scenes of validation and of test.
HELD_OUT = 200
# Without and with clutter: shapes that a scene has at most, and that it tries to put down; the share of an earlier one
# that a later one must leave to be seen; radii as shares of the scene's side.
_MOST = (3, 4)
_TRIES = (20, 8)
_SEEN = (1.0, 0.5)
_RADII = ((0.16, 0.3), (0.13, 0.27))
_REACH = 1.21  # of a shape's corners, in radii
_DRAWS, _GROUND_DRAWS = 20, 64
_LIMITS = dict(images=(1, 10**6), size=(32, 1024), clutter=(0, 1), seed=(0, 2**31 - 1))
_GRID = 5  # colors of a clouded texture along a side


@dataclass(frozen=True)
class Scene:
    """One scene.

    Attributes:
        image: [H, W, 3] uint8.
        instances: [H, W] uint8: 0 for the ground, k + 1 for the k-th shape.
        shapes: index into `SHAPES` of every shape.
    """

    image: "NDArray[np.uint8]"
    instances: "NDArray[np.uint8]"
    shapes: list[int]

    @property
    def classes(self) -> "NDArray[np.uint8]":
        """[H, W] class numbers of the segmentation: 0 for the ground, 1 + index of the shape."""
        return np.asarray([0, *(shape + 1 for shape in self.shapes)], dtype=np.uint8)[self.instances]

    @property
    def masks(self) -> "list[NDArray[np.bool_]]":
        """[H, W] of every shape, what is seen of it."""
        return [self.instances == number for number in range(1, 1 + len(self.shapes))]


@dataclass(frozen=True)
class Scenes:
    """A data set of scenes, as its name says.

    Attributes:
        images: of training; validation and test have `HELD_OUT`. More go on where fewer end.
        size: px a side; None: as asked for when they are loaded, else 64.
        clutter: 1 for shapes that are small and many, patterned, cut by the border and hidden by each other.
        seed: of everything in them.
    """

    images: int = 1000
    size: int | None = None
    clutter: int = 0
    seed: int = 0

    @classmethod
    def parse(cls, name: str) -> "Scenes":
        """Read "scenes" or "scenes:images=1000,size=64,clutter=0,seed=0", each of which may be left out."""
        return cls(**read_numbers(name, _LIMITS, "scenes:images=1000,size=64,clutter=0,seed=0"))

    @property
    def name(self) -> str:
        """As it is parsed, but for the size, which changes pixels and not what they show."""
        return f"scenes:images={self.images},clutter={self.clutter},seed={self.seed}"

    def count(self, split: str) -> int:
        """Scenes of a split."""
        return self.images if split == "train" else HELD_OUT

    def render(self, split: str, number: int, size: int) -> Scene:
        """Return the scene with this number, `size` px a side; the same however many there are, and at any size."""
        key = random_keys(self.seed, SPLIT_NUMBERS[split], np.asarray([number], dtype=np.uint64))
        draws = uniforms(key, _GROUND_DRAWS + _TRIES[self.clutter] * _DRAWS)[0].tolist()
        image = _ground(split, draws[:_GROUND_DRAWS], size)
        wanted = 1 + int(draws[0] * _MOST[self.clutter])
        places = [draws[start : start + _DRAWS] for start in range(_GROUND_DRAWS, len(draws), _DRAWS)]
        instances = np.zeros((size, size), dtype=np.uint8)
        shapes: list[int] = []
        areas: list[int] = []
        for drawn in places:
            shape = int(drawn[0] * len(SHAPES))
            mask, across, down = _shape(SHAPES[shape], drawn, size, self.clutter)
            tried = np.where(mask, len(shapes) + 1, instances)
            left = [int(np.count_nonzero(tried == number)) for number in range(1, 1 + len(shapes))]
            if any(seen < _SEEN[self.clutter] * area for seen, area in zip(left, areas, strict=True)):
                continue
            instances = tried.astype(np.uint8)
            image[mask] = _fill(drawn, across, down, self.clutter)[mask]
            shapes.append(shape)
            areas.append(int(np.count_nonzero(mask)))
            if len(shapes) == wanted:
                break
        return Scene(image, instances, shapes)

    def load(self, size: int, target: Target) -> Builtin:
        """Return all splits in memory, `size` px a side, with the column "mask" or "objects", unless they are too
        large.
        """
        from datasets import Dataset, Features
        from datasets import Image as ImageFeature

        from hf_vit.data.mask_features import ClassMask, object_features

        if target == "label":
            raise UserError("scenes have no image labels; use them with --task segmentation or --task detection")
        refuse_large(self.name, self.count("train"), size, "ask for fewer or smaller ones")
        names = ["background", *SHAPES] if target == "mask" else list(SHAPES)
        borne = ClassMask() if target == "mask" else object_features(names, ImageFeature())
        features = Features({"image": ImageFeature(), target: borne})
        row_of = _mask_row if target == "mask" else _object_row
        splits: dict[str, Dataset] = {}
        seen: dict[str, list[Seen]] = {}
        for split in SPLIT_NUMBERS:
            seen[split] = []
            rows: list[dict[str, Any]] = []
            for number in range(self.count(split)):
                scene = self.render(split, number, size)
                row, annotation = row_of(scene)
                place = f"{split}-{number:07d}.ppm"
                digest = hashlib.sha256(f"scene {self.seed} {place}".encode()).hexdigest()
                seen[split].append(Seen(place, digest, size, size, annotation=annotation))
                rows.append({"image": {"bytes": netpbm(scene.image.tobytes(), (size, size)), "path": place}, **row})
            splits[split] = Dataset.from_list(rows, features=features)
        return Builtin(splits, names, seen)


def _mask_row(scene: Scene) -> "tuple[dict[str, Any], Annotation]":
    stored = {"bytes": netpbm(scene.classes.tobytes(), scene.classes.shape[::-1], "L"), "path": None}
    return {"mask": stored}, mask_annotation(scene.classes)


def _object_row(scene: Scene) -> "tuple[dict[str, Any], Annotation]":
    def encoded(mask: "NDArray[np.bool_]") -> dict[str, Any]:
        file = io.BytesIO()
        Image.fromarray(mask).save(file, "PPM")
        return {"bytes": file.getvalue(), "path": None}

    objects: dict[str, list[Any]] = {
        "bbox": [tight_box(mask) for mask in scene.masks],
        "category": list(scene.shapes),
        "area": [float(np.count_nonzero(mask)) for mask in scene.masks],
        "iscrowd": [0] * len(scene.shapes),
    }
    annotation = object_annotation(objects, [np.packbits(mask).tobytes() for mask in scene.masks])
    objects["segmentation"] = list(map(encoded, scene.masks))
    return {"objects": objects}, annotation


def _grid(size: int) -> "tuple[_Floats, _Floats]":
    """Column and row of every pixel's middle, [H, W] each, from 0 to 1."""
    middles = (np.arange(size) + 0.5) / size
    return np.broadcast_to(middles[None, :], (size, size)), np.broadcast_to(middles[:, None], (size, size))


def _turned(x: "_Floats", y: "_Floats", turn: float) -> "tuple[_Floats, _Floats]":
    """Turned by `turn` quarter circles, 0 to 4; the fraction goes by the rational points of the circle."""
    quarters, part = int(turn) % 4, turn % 1
    cosine, sine = (1 - part * part) / (1 + part * part), 2 * part / (1 + part * part)
    for _ in range(quarters):
        cosine, sine = -sine, cosine
    return cosine * x + sine * y, cosine * y - sine * x


def _shape(name: str, drawn: list[float], size: int, clutter: int) -> "tuple[NDArray[np.bool_], _Floats, _Floats]":
    """Return which pixels a shape covers [H, W], and every pixel's place across and down in it (1 is its radius)."""
    x, y = _grid(size)
    smallest, largest = _RADII[clutter]
    radius = smallest + (largest - smallest) * drawn[1]
    border = 0.1 if clutter else _REACH * radius
    centre_x, centre_y = (border + (1 - 2 * border) * draw for draw in drawn[2:4])
    across, down = _turned((x - centre_x) / radius, (y - centre_y) / radius, 4 * drawn[4])
    squares = across * across + down * down
    if name == "disc":
        return squares <= 1, across, down
    if name == "ring":
        return (squares <= 1) & (squares >= 0.3), across, down
    widest, narrowest = np.maximum(abs(across), abs(down)), np.minimum(abs(across), abs(down))
    if name == "square":
        return widest <= 0.85, across, down
    if name == "cross":
        return (widest <= 1) & (narrowest <= 0.3), across, down
    # A triangle of equal sides around its middle, of which the corners are 1.2 away.
    return (down <= 0.6) & (math.sqrt(3) * abs(across) - down <= 1.2), across, down


def _fill(drawn: list[float], across: "_Floats", down: "_Floats", clutter: int) -> "NDArray[np.uint8]":
    """Return [H, W, 3]: one color, or, with clutter, two in stripes or checks."""
    kind, period = int(drawn[5] * 4) * clutter, 0.3 + 0.5 * drawn[6]
    first, second = (np.asarray([int(256 * value) for value in drawn[start : start + 3]]) for start in (7, 10))
    stripes = np.floor(across / period).astype(np.int64)
    checks = stripes + np.floor(down / period).astype(np.int64)
    chosen = {2: stripes % 2, 3: checks % 2}.get(kind, np.zeros(across.shape, dtype=np.int64))
    return np.where(chosen[..., None] == 1, second, first).astype(np.uint8)


def _ground(split: str, drawn: list[float], size: int) -> "NDArray[np.uint8]":
    """Return [H, W, 3]: in seven of ten scenes a crop of a photograph, else a clouded or striped texture."""
    if drawn[1] < 0.7:
        tiles = _tiles(split)
        tile = tiles[int(drawn[2] * len(tiles))]
        shorter = min(tile.size)
        side = max(1, int(shorter * (0.5 + 0.5 * drawn[3])))
        left, top = int((tile.width - side + 1) * drawn[4]), int((tile.height - side + 1) * drawn[5])
        crop = tile.crop((left, top, left + side, top + side))
        return np.array(crop.resize((size, size), Image.Resampling.BILINEAR))
    if drawn[1] < 0.85:
        x, y = _grid(size)
        first, second = (np.asarray([int(256 * value) for value in drawn[start : start + 3]]) for start in (2, 5))
        across, _ = _turned(x, y, 4 * drawn[8])
        stripes = np.floor(across / (0.05 + 0.2 * drawn[9])).astype(np.int64) % 2
        return np.where(stripes[..., None] == 1, second, first).astype(np.uint8)
    shades = np.asarray([int(256 * value) for value in drawn[2 : 2 + 2 * _GRID * _GRID]], dtype=np.uint8)
    layers = shades.reshape(2, _GRID, _GRID)
    smooth = [np.asarray(Image.fromarray(layer).resize((size, size), Image.Resampling.BICUBIC)) for layer in layers]
    return np.stack([smooth[0], smooth[1], (smooth[0] // 2 + smooth[1] // 2)], axis=-1)


@functools.lru_cache(maxsize=len(SPLIT_NUMBERS))
def _tiles(split: str) -> list[Image.Image]:
    return list(photograph_tiles(split))
