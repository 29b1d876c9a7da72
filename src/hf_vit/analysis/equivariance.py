"""Equivariance: whether features move along when the image moves.

Legend: B batch, C channels, D feature channels, H x W px, h x w positions of a feature map.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.nn import functional as F

from hf_vit.analysis.analysis import (
    Arrays,
    FeatureAnalysis,
    MapComparison,
    Pictures,
    describe_arrays,
    draw_curves,
    round_values,
)

Size = tuple[int, int]
ROTATIONS = (10.0, 45.0, 90.0, 180.0)  # degrees, counterclockwise
SCALES = (0.75, 1.25, 1.5)
_FULL_WEIGHT = 0.999  # above this an interpolation weight counts as 1, up to rounding


def shift_maps(maps: torch.Tensor, down: float, right: float) -> torch.Tensor:
    """Shift maps [B, C, h, w] cyclically by a number of positions; fractions are interpolated linearly."""
    for dim, distance in ((-2, down), (-1, right)):
        whole = math.floor(distance)
        fraction = distance - whole
        near, far = maps.roll(whole, dim), maps.roll(whole + 1, dim)
        maps = near if fraction == 0 else (1 - fraction) * near + fraction * far
    return maps


def warp_maps(
    maps: torch.Tensor, angle: float, scale: float, image_px: Size, padding: str = "reflection"
) -> torch.Tensor:
    """Rotate maps [B, C, h, w] by degrees counterclockwise about their center and scale them, interpolated bilinearly.

    The maps cover an image of (H, W) px; `padding` is a mode of `grid_sample`.
    """
    cos = math.cos(math.radians(angle)) / scale
    sin = math.sin(math.radians(angle)) / scale
    height, width = image_px
    # The matrix maps coordinates of the result to the source. Each side of the image runs from -1 to 1, so a distance
    # along one side is another number along the other side if they have different lengths.
    matrix = maps.new_tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]]).expand(len(maps), 2, 3)
    grid = F.affine_grid(matrix, list(maps.shape), align_corners=False)
    return F.grid_sample(maps, grid, mode="bilinear", padding_mode=padding, align_corners=False)


@final
@dataclass(frozen=True)
class Move:
    """A movement of an image.

    Attributes:
        kind: "pixel_shift", "patch_shift", "rotation" or "scale".
        value: (down, right) in px, an angle in degrees, or a factor.
    """

    kind: str
    value: tuple[float, ...]

    def __call__(self, maps: torch.Tensor, image: Size) -> torch.Tensor:
        """Return maps [B, C, h, w] moved like the image of (H, W) px that they cover."""
        h, w = maps.shape[-2:]
        if self.kind.endswith("shift"):
            return shift_maps(maps, self.value[0] * h / image[0], self.value[1] * w / image[1])
        return self._warp(maps, image)

    def _warp(self, maps: torch.Tensor, image: Size, padding: str = "reflection") -> torch.Tensor:
        """Rotate or scale maps."""
        angle, scale = (self.value[0], 1.0) if self.kind == "rotation" else (0.0, self.value[0])
        return warp_maps(maps, angle, scale, image, padding)

    def make_valid_mask(self, grid: Size, image: Size) -> torch.Tensor:
        """Return [h, w] bool: positions that depend only on pixels of the image and on known features."""
        if self.kind.endswith("shift"):
            down, right = self.value
            first_row, first_column = math.ceil(down * grid[0] / image[0]), math.ceil(right * grid[1] / image[1])
            return (torch.arange(grid[0]) >= first_row)[:, None] & (torch.arange(grid[1]) >= first_column)
        known_features = self._warp(torch.ones(1, 1, *grid), image, "zeros")[0, 0]
        known_pixels = self._warp(torch.ones(1, 1, *image), image, "zeros")
        pixel_coverage = -F.adaptive_max_pool2d(-known_pixels, grid)[0, 0]
        return (known_features > _FULL_WEIGHT) & (pixel_coverage > _FULL_WEIGHT)


@functools.cache
def make_moves(patch_px: Size) -> tuple[Move, ...]:
    """Return all moves for patches of (height, width) px.

    Shifts go down and right together: by 1 px, a quarter and half of a patch, and by one and two patches.
    """

    def scale_patch(factor: float) -> tuple[float, float]:
        return max(1.0, float(round(patch_px[0] * factor))), max(1.0, float(round(patch_px[1] * factor)))

    pixels = sorted({(1.0, 1.0), scale_patch(0.25), scale_patch(0.5)})
    return (
        *(Move("pixel_shift", px) for px in pixels),
        *(Move("patch_shift", scale_patch(patches)) for patches in (1, 2)),
        *(Move("rotation", (angle,)) for angle in ROTATIONS),
        *(Move("scale", (factor,)) for factor in SCALES),
    )


KINDS = {
    "pixel_shift": ("px", "down and right, within a patch"),
    "patch_shift": ("px", "down and right, by whole patches"),
    "rotation": ("degrees", "counterclockwise, around the center"),
    "scale": ("1", "factor by which the image is zoomed in, around the center"),
}


def _describe_kind(kind: str, unit: str, meaning: str) -> dict[str, tuple[str, str, str]]:
    """Return the descriptions of the arrays of one kind of move."""
    cosine = "between the features and the moved features, without their mean"
    return {
        kind: ("move axis" if unit == "px" else "move", unit, meaning),
        f"{kind}_error": ("move depth", "1", "0: features move along; 1: no better than their mean"),
        f"{kind}_cosine": ("move depth", "cosine", cosine),
    }


@final
class Equivariance(FeatureAnalysis):
    """Features of moved images compared with moved features, by depth."""

    name = "equivariance"
    title = "Equivariance to shifts, rotation and scale"
    source = "features of the moved image against moved features, as equivariance is defined (arXiv 1411.5908)"
    shows = (
        "One line per move: how far the features of a moved image are from the moved features of the "
        "image, by depth, where the two overlap; an error of 0 is exact, 1 no better than the same feature "
        "everywhere. Maps are moved by bilinear interpolation, which has an error of its own for all but "
        "whole positions; what enters at the borders (shifts: the other side, else a reflection) is another "
        "image to a model that sees all of it."
    )
    arrays = describe_arrays(
        **{name: texts for kind in KINDS for name, texts in _describe_kind(kind, *KINDS[kind]).items()}
    )

    def measure(self) -> Arrays:
        comparison = MapComparison()
        moves: tuple[Move, ...] = ()
        for pixel_values in self.batches():
            moves = self._compare(pixel_values, comparison)  # the same for every batch
        results = comparison.arrays()
        arrays = Arrays()
        for kind in KINDS:
            cases = [case for case, move in enumerate(moves) if move.kind == kind]
            values = np.array([moves[case].value for case in cases], dtype=np.float32)
            arrays[kind] = values if kind.endswith("shift") else values[:, 0]
            arrays |= {f"{kind}_{measure}": results[measure][cases] for measure in results}
        return arrays

    @torch.inference_mode()
    def _compare(self, pixel_values: torch.Tensor, comparison: MapComparison) -> tuple[Move, ...]:
        """Compare the features of a batch [B, C, H, W] under all moves, and return the moves."""
        image = pixel_values.shape[2], pixel_values.shape[3]
        original_maps, _ = self.read_maps(pixel_values)
        moves = make_moves(self.compute_patch_px(pixel_values, original_maps[-1]))
        for case, move in enumerate(moves):
            moved_maps, _ = self.read_maps(move(pixel_values.float(), image).to(pixel_values.dtype))
            for depth, features in enumerate(moved_maps):
                valid_mask = move.make_valid_mask((features.shape[2], features.shape[3]), image).to(features.device)
                comparison.add(case, depth, features, move(original_maps[depth].float(), image), valid_mask)
        return moves

    def draw(self, arrays: Arrays) -> Pictures:
        """Return a plot of the errors by depth, with a panel per kind of move."""
        panels = {}
        for kind, (unit, _) in KINDS.items():
            values = arrays[kind].reshape(len(arrays[kind]), -1)[:, 0]
            label = {"px": "{:g} px", "degrees": "{:g} degrees"}.get(unit, "x {:g}")
            errors = zip(map(label.format, values), arrays[f"{kind}_error"], strict=True)
            panels[kind.replace("_", " ")] = dict(errors)
        return {"Error of equivariance by depth": draw_curves(panels, "depth", "relative error")}

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        # -1 is the largest shift within a patch, 0 the shift by one patch.
        cases = {
            "half_patch_shift_error_by_depth": ("pixel_shift", -1),
            "patch_shift_error_by_depth": ("patch_shift", 0),
        }
        return {name: round_values(arrays[f"{kind}_error"][case]) for name, (kind, case) in cases.items()}
