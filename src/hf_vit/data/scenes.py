"""Synthetic scenes with exact masks and boxes: shapes over photographs and textures.

A scene has one to three shapes with random classes, positions, sizes, rotations and colors over a crop of a photograph
(one of `photos`) or a texture. The shapes are large, complete, of one color, and do not overlap. With clutter there are
up to four; they are smaller, may have stripes or checks, may be cut by the border and may hide each other, and masks
and boxes cover only the visible part. The photographs have no annotations, so scenes show whether a model can learn to
detect and segment, and nothing about photographs.

Training, validation and test use different tiles of the photographs, as `photos` does. All random numbers come from
SplitMix64, and masks from IEEE 754 arithmetic without sine, so a name gives the same masks on every machine.
"""

import functools
import hashlib
import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hf_vit.data.annotations import Annotation, Target, find_tight_box, summarize_mask, summarize_objects
from hf_vit.data.augmentation import draw_uniforms, make_random_keys
from hf_vit.data.builtin import SPLIT_NUMBERS, cut_photographs, encode_netpbm, parse_numbers, refuse_large
from hf_vit.data.fingerprints import hash_text
from hf_vit.data.image_data import ImageData
from hf_vit.data.images import ImageScan
from hf_vit.errors import UserError

_Floats = NDArray[np.float64]
SHAPES: tuple[str, ...] = ("disc", "square", "triangle", "cross", "ring")
# Scenes of validation and of test.
HELD_OUT = 200
# Each without and with clutter: the most shapes of a scene, the attempts to place them, the share of an earlier shape
# that must stay visible, and the radii as shares of the scene's side.
_MAX_SHAPES = (3, 4)
_ATTEMPTS = (20, 8)
_VISIBLE_SHARE = (1.0, 0.5)
_RADII = ((0.16, 0.3), (0.13, 0.27))
_CORNER_RADIUS = 1.21  # distance of the farthest corner from a shape's center, in radii
_DRAWS, _BACKGROUND_DRAWS = 20, 64
_LIMITS = dict(images=(1, 10**6), size=(32, 1024), clutter=(0, 1), seed=(0, 2**31 - 1))
_GRID = 5  # random colors along a side of a clouded texture


@dataclass(frozen=True)
class Scene:
    """One scene of H x W px (height, width).

    Attributes:
        image: [H, W, 3] uint8.
        instances: [H, W] uint8: 0 for the background, k + 1 for shape k.
        shapes: index into `SHAPES` of every shape.
    """

    image: NDArray[np.uint8]
    instances: NDArray[np.uint8]
    shapes: list[int]

    @property
    def classes(self) -> NDArray[np.uint8]:
        """[H, W] class numbers of the segmentation: 0 for the background, else 1 + index into `SHAPES`."""
        return np.asarray([0, *(shape + 1 for shape in self.shapes)], dtype=np.uint8)[self.instances]

    @property
    def masks(self) -> list[NDArray[np.bool_]]:
        """[H, W] mask of the visible part of every shape."""
        return [self.instances == number for number in range(1, 1 + len(self.shapes))]


@dataclass(frozen=True)
class Scenes:
    """A data set of scenes.

    Attributes:
        images: number of training images; validation and test have `HELD_OUT` images. A larger number adds images.
        size: px a side; None for the size of `load_data`, by default 64.
        clutter: 1 for more and smaller shapes, with patterns, cut by the border and hidden by each other; else 0.
        seed: random seed.
    """

    images: int = 1000
    size: int | None = None
    clutter: int = 0
    seed: int = 0

    @classmethod
    def parse(cls, name: str) -> "Scenes":
        """Parse "scenes" or "scenes:images=1000,size=64,clutter=0,seed=0" with any of these options."""
        return cls(**parse_numbers(name, _LIMITS, "scenes:images=1000,size=64,clutter=0,seed=0"))

    @property
    def name(self) -> str:
        """The name to parse, without the size, which changes the resolution but not the content."""
        return f"scenes:images={self.images},clutter={self.clutter},seed={self.seed}"

    def count(self, split: str) -> int:
        """Return the number of scenes of a split."""
        return self.images if split == "train" else HELD_OUT

    def render(self, split: str, number: int, size: int) -> Scene:
        """Return a scene of `size` px a side; its content depends neither on the size nor on the number of images."""
        key = make_random_keys(self.seed, SPLIT_NUMBERS[split], np.asarray([number], dtype=np.uint64))
        draws = draw_uniforms(key, _BACKGROUND_DRAWS + _ATTEMPTS[self.clutter] * _DRAWS)[0].tolist()
        image = _draw_background(split, draws[:_BACKGROUND_DRAWS], size)
        # The background's first draw also sets the number of shapes.
        shape_count = 1 + int(draws[0] * _MAX_SHAPES[self.clutter])
        instances = np.zeros((size, size), dtype=np.uint8)
        shapes: list[int] = []
        areas: list[int] = []  # px of the whole shapes
        for start in range(_BACKGROUND_DRAWS, len(draws), _DRAWS):
            shape_draws = draws[start : start + _DRAWS]
            shape = int(shape_draws[0] * len(SHAPES))
            mask, across, down = _place_shape(SHAPES[shape], shape_draws, size, self.clutter)
            new_instances = np.where(mask, len(shapes) + 1, instances)
            visible_areas = [int(np.count_nonzero(new_instances == 1 + index)) for index in range(len(shapes))]
            least_areas = [_VISIBLE_SHARE[self.clutter] * area for area in areas]
            if any(visible < least for visible, least in zip(visible_areas, least_areas, strict=True)):
                continue  # it would hide too much of an earlier shape
            instances = new_instances.astype(np.uint8)
            image[mask] = _color_shape(shape_draws, across, down, self.clutter)[mask]
            shapes.append(shape)
            areas.append(int(np.count_nonzero(mask)))
            if len(shapes) == shape_count:
                break
        return Scene(image, instances, shapes)

    def load(self, size: int, target: Target) -> ImageData:
        """Return all splits in memory with images of `size` px a side and the column "mask" or "objects"."""
        from datasets import Dataset, Features
        from datasets import Image as ImageFeature

        from hf_vit.data.mask_features import ClassMask, make_object_features

        if target == "label":
            raise UserError("scenes have masks and objects, but no labels; add --task segmentation or --task detection")
        refuse_large(self.name, self.count("train"), size, "ask for fewer or smaller ones")
        names = ["background", *SHAPES] if target == "mask" else list(SHAPES)
        annotation_type = ClassMask() if target == "mask" else make_object_features(names, ImageFeature())
        features = Features({"image": ImageFeature(), target: annotation_type})
        make_row = _make_mask_row if target == "mask" else _make_object_row
        splits: dict[str, Dataset] = {}
        scans: dict[str, list[ImageScan]] = {}
        for split in SPLIT_NUMBERS:
            scans[split] = []
            rows: list[dict[str, Any]] = []
            for number in range(self.count(split)):
                scene = self.render(split, number, size)
                row, annotation = make_row(scene)
                image_name = f"{split}-{number:07d}.ppm"
                digest = hashlib.sha256(f"scene {self.seed} {image_name}".encode()).hexdigest()
                scans[split].append(ImageScan(image_name, digest, size, size, annotation=annotation))
                file = encode_netpbm(scene.image.tobytes(), (size, size))
                rows.append({"image": {"bytes": file, "path": image_name}, **row})
            splits[split] = Dataset.from_list(rows, features=features)
        return ImageData(self.name, hash_text(f"{self.name} {target}"), splits, names, seen=scans, target=target)


def _make_mask_row(scene: Scene) -> "tuple[dict[str, Any], Annotation]":
    """Return the column "mask" of a scene, and the summary of the mask."""
    mask_fields = {"bytes": encode_netpbm(scene.classes.tobytes(), scene.classes.shape[::-1], "L"), "path": None}
    return {"mask": mask_fields}, summarize_mask(scene.classes)


def _make_object_row(scene: Scene) -> "tuple[dict[str, Any], Annotation]":
    """Return the column "objects" of a scene, and the summary of the objects."""

    def encode_file(mask: NDArray[np.bool_]) -> dict[str, Any]:
        file = io.BytesIO()
        Image.fromarray(mask).save(file, "PPM")
        return {"bytes": file.getvalue(), "path": None}

    objects: dict[str, list[Any]] = {
        "bbox": [find_tight_box(mask) for mask in scene.masks],
        "category": list(scene.shapes),
        "area": [float(np.count_nonzero(mask)) for mask in scene.masks],
        "iscrowd": [0] * len(scene.shapes),
    }
    annotation = summarize_objects(objects, [np.packbits(mask).tobytes() for mask in scene.masks])
    objects["segmentation"] = list(map(encode_file, scene.masks))
    return {"objects": objects}, annotation


def _compute_pixel_centers(size: int) -> tuple[_Floats, _Floats]:
    """Return the horizontal and vertical position of every pixel center, [H, W] each, from 0 to 1."""
    middles = (np.arange(size) + 0.5) / size
    return np.broadcast_to(middles[None, :], (size, size)), np.broadcast_to(middles[:, None], (size, size))


def _rotate(x: _Floats, y: _Floats, turn: float) -> tuple[_Floats, _Floats]:
    """Rotate coordinates by `turn` quarter circles, 0 to 4.

    Cosine and sine of the fraction are rational points of the circle, because the sine function is not the same on
    every machine.
    """
    quarters, part = int(turn) % 4, turn % 1
    cosine, sine = (1 - part * part) / (1 + part * part), 2 * part / (1 + part * part)
    for _ in range(quarters):
        cosine, sine = -sine, cosine
    return cosine * x + sine * y, cosine * y - sine * x


def _place_shape(name: str, draws: list[float], size: int, clutter: int) -> tuple[NDArray[np.bool_], _Floats, _Floats]:
    """Return the mask of a shape, and coordinates of every pixel across and down the shape, [H, W] each.

    They are counted from the shape's center in units of its radius. Of the shape's random numbers, 1 sets the radius, 2
    and 3 the center, and 4 the rotation.
    """
    x, y = _compute_pixel_centers(size)
    smallest, largest = _RADII[clutter]
    radius = smallest + (largest - smallest) * draws[1]
    border = 0.1 if clutter else _CORNER_RADIUS * radius
    center_x, center_y = (border + (1 - 2 * border) * draw for draw in draws[2:4])
    across, down = _rotate((x - center_x) / radius, (y - center_y) / radius, 4 * draws[4])
    squares = across * across + down * down
    if name == "disc":
        return squares <= 1, across, down
    if name == "ring":
        return (squares <= 1) & (squares >= 0.3), across, down
    larger = np.maximum(abs(across), abs(down))
    smaller = np.minimum(abs(across), abs(down))
    if name == "square":
        return larger <= 0.85, across, down
    if name == "cross":
        return (larger <= 1) & (smaller <= 0.3), across, down
    # An equilateral triangle, whose corners are 1.2 radii from its center.
    return (down <= 0.6) & (math.sqrt(3) * abs(across) - down <= 1.2), across, down


def _color_shape(draws: list[float], across: _Floats, down: _Floats, clutter: int) -> NDArray[np.uint8]:
    """Return the colors of a shape, [H, W, 3]: one color or, with clutter, stripes or checks of two."""
    pattern = int(draws[5] * 4) * clutter  # 0 and 1 are one color, 2 stripes and 3 checks
    period = 0.3 + 0.5 * draws[6]
    stripes = np.floor(across / period).astype(np.int64)
    checks = stripes + np.floor(down / period).astype(np.int64)
    one_color = np.zeros(across.shape, dtype=np.int64)
    return _paint({2: stripes % 2, 3: checks % 2}.get(pattern, one_color), draws[7:13])


def _paint(color_indices: NDArray[np.int64], draws: list[float]) -> NDArray[np.uint8]:
    """Return [H, W, 3] with one of two colors for every index, 0 or 1; `draws` are the six values of the colors."""
    first, second = np.asarray([int(256 * draw) for draw in draws]).reshape(2, 3)
    return np.where(color_indices[..., None] == 1, second, first).astype(np.uint8)


def _draw_background(split: str, draws: list[float], size: int) -> NDArray[np.uint8]:
    """Return a background, [H, W, 3]: a crop of a photograph (70%), stripes (15%) or a clouded texture (15%)."""
    kind = draws[1]  # number 0 sets how many shapes there are
    if kind < 0.7:
        return _crop_photograph(split, draws[2:6], size)
    if kind < 0.85:
        turn, width = draws[8:10]
        across, _ = _rotate(*_compute_pixel_centers(size), 4 * turn)
        return _paint(np.floor(across / (0.05 + 0.2 * width)).astype(np.int64) % 2, draws[2:8])
    shades = np.asarray([int(256 * draw) for draw in draws[2 : 2 + 2 * _GRID * _GRID]], dtype=np.uint8)
    grids = shades.reshape(2, _GRID, _GRID)
    red, green = (np.asarray(Image.fromarray(grid).resize((size, size), Image.Resampling.BICUBIC)) for grid in grids)
    blue = red // 2 + green // 2  # their mean, so that colors vary less
    return np.stack([red, green, blue], axis=-1)


def _crop_photograph(split: str, draws: list[float], size: int) -> NDArray[np.uint8]:
    """Return a random square of a random tile, [H, W, 3], with 50% to 100% of its shorter side."""
    choice, share, across, down = draws
    tiles = _load_tiles(split)
    tile = tiles[int(choice * len(tiles))]
    side = max(1, int(min(tile.size) * (0.5 + 0.5 * share)))
    left = int((tile.width - side + 1) * across)
    top = int((tile.height - side + 1) * down)
    crop = tile.crop((left, top, left + side, top + side))
    return np.array(crop.resize((size, size), Image.Resampling.BILINEAR))


@functools.lru_cache(maxsize=len(SPLIT_NUMBERS))
def _load_tiles(split: str) -> list[Image.Image]:
    return list(cut_photographs(split))
