"""Equivariance: when the image moves, do the features move along?

Legend: B batch, C channels, D feature channels, H x W px, h x w places of a map.
"""

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.nn import functional as F

from hf_vit.analysis.analysis import (
    Arrays,
    ArraySpec,
    FeatureAnalysis,
    MapComparison,
    Pictures,
    curves,
    describe_arrays,
    rounded,
)

Size = tuple[int, int]
ROTATIONS = (10.0, 45.0, 90.0, 180.0)  # degrees, counterclockwise
SCALES = (0.75, 1.25, 1.5)
_WHOLE = 0.999  # of a weight that is 1 but for rounding


def shift(maps: torch.Tensor, down: float, right: float) -> torch.Tensor:
    """Move [B, C, h, w] by places, also by fractions (linear in between); what leaves enters on the other side."""
    for dim, places in ((-2, down), (-1, right)):
        whole = math.floor(places)
        part, moved = places - whole, maps.roll(whole, dim)
        maps = moved if part == 0 else (1 - part) * moved + part * maps.roll(whole + 1, dim)
    return maps


def warp(maps: torch.Tensor, angle: float, scale: float, image: Size, padding: str = "reflection") -> torch.Tensor:
    """Turn (degrees, counterclockwise) and zoom (factor) [B, C, h, w] about its center, bilinear.

    `image` is the (H, W) in px that it covers.
    """
    cos, sin = math.cos(math.radians(angle)) / scale, math.sin(math.radians(angle)) / scale
    height, width = image
    # From places of the result to places of the source, each side of the image running from -1 to 1.
    matrix = maps.new_tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]]).expand(len(maps), 2, 3)
    grid = F.affine_grid(matrix, list(maps.shape), align_corners=False)
    return F.grid_sample(maps, grid, mode="bilinear", padding_mode=padding, align_corners=False)


@final
@dataclass(frozen=True)
class Move:
    """A "pixel_shift", "patch_shift", "rotation" or "scale" of an image, by (down, right) px, degrees or a factor."""

    kind: str
    value: tuple[float, ...]

    def __call__(self, maps: torch.Tensor, image: Size) -> torch.Tensor:
        """Move [B, C, h, w] that covers an image of (H, W) px."""
        h, w = maps.shape[-2:]
        if self.kind.endswith("shift"):
            return shift(maps, self.value[0] * h / image[0], self.value[1] * w / image[1])
        return self._warped(maps, image)

    def _warped(self, maps: torch.Tensor, image: Size, padding: str = "reflection") -> torch.Tensor:
        angle, scale = (self.value[0], 1.0) if self.kind == "rotation" else (0.0, self.value[0])
        return warp(maps, angle, scale, image, padding)

    def inside(self, grid: Size, image: Size) -> torch.Tensor:
        """Return [h, w] bool: places whose pixels all come from the image, and their features from known ones."""
        if self.kind.endswith("shift"):
            first = [math.ceil(px * places / side) for px, places, side in zip(self.value, grid, image, strict=True)]
            rows, columns = (torch.arange(side) >= start for side, start in zip(grid, first, strict=True))
            return rows[:, None] & columns
        known = self._warped(torch.ones(1, 1, *grid), image, "zeros")[0, 0]
        pixels = self._warped(torch.ones(1, 1, *image), image, "zeros")
        whole = -F.adaptive_max_pool2d(-pixels, grid)[0, 0]
        return (known > _WHOLE) & (whole > _WHOLE)


@functools.cache
def moves(patch_px: Size) -> tuple[Move, ...]:
    """Return all moves, for patches of (height, width) px.

    Shifts go down and right at once: by 1 px, a quarter and half a patch, and by one and two patches.
    """

    def share(part: float) -> tuple[float, float]:
        return max(1.0, float(round(patch_px[0] * part))), max(1.0, float(round(patch_px[1] * part)))

    pixels = sorted({(1.0, 1.0), share(0.25), share(0.5)})
    return (
        *(Move("pixel_shift", px) for px in pixels),
        *(Move("patch_shift", share(patches)) for patches in (1, 2)),
        *(Move("rotation", (angle,)) for angle in ROTATIONS),
        *(Move("scale", (factor,)) for factor in SCALES),
    )


KINDS = {
    "pixel_shift": ("px", "down and right, within a patch"),
    "patch_shift": ("px", "down and right, by whole patches"),
    "rotation": ("degrees", "counterclockwise, around the center"),
    "scale": ("1", "factor by which the image is zoomed in, around the center"),
}


def _describe(kind: str, unit: str, meaning: str) -> Mapping[str, ArraySpec]:
    return describe_arrays(
        **{
            kind: ("move axis" if unit == "px" else "move", unit, meaning),
            f"{kind}_error": ("move depth", "1", "0: moves along; 1: no better than their mean"),
            f"{kind}_cosine": (
                "move depth",
                "cosine",
                "between the features and the moved features, without their mean",
            ),
        }
    )


@final
class Equivariance(FeatureAnalysis):
    """Features of the moved image beside the moved features of the image, by depth."""

    name = "equivariance"
    title = "Equivariance to shifts, rotation and scale"
    source = "features of the moved image against moved features, as equivariance is defined (arXiv 1411.5908)"
    shows = (
        "One line per move: how far the features of a moved image are from the moved features of the "
        "image, by depth, where the two overlap; an error of 0 is exact, 1 no better than the same feature "
        "everywhere. Maps are moved by bilinear interpolation, which has an error of its own for all but "
        "whole places; what enters at the borders (shifts: the other side, else a reflection) is another "
        "image to a model that sees all of it."
    )
    arrays = functools.reduce(operator.or_, (_describe(kind, *texts) for kind, texts in KINDS.items()))

    def measure(self) -> Arrays:
        comparison, chosen = MapComparison(), ()
        for pixel_values in self.batches():
            chosen = self._compare(pixel_values, comparison)
        found, arrays = comparison.arrays(), Arrays()
        for kind in KINDS:
            cases = [case for case, move in enumerate(chosen) if move.kind == kind]
            values = np.array([chosen[case].value for case in cases], dtype=np.float32)
            arrays[kind] = values if kind.endswith("shift") else values[:, 0]
            arrays |= {f"{kind}_{measure}": found[measure][cases] for measure in found}
        return arrays

    @torch.inference_mode()
    def _compare(self, pixel_values: torch.Tensor, comparison: MapComparison) -> tuple[Move, ...]:
        """Add a batch [B, C, H, W]; return the moves."""
        image = pixel_values.shape[2], pixel_values.shape[3]
        still, _ = self.maps(pixel_values)
        chosen = moves(self.patch_px(pixel_values, still[-1]))
        for case, move in enumerate(chosen):
            found, _ = self.maps(move(pixel_values.float(), image).to(pixel_values.dtype))
            for depth, features in enumerate(found):
                inside = move.inside((features.shape[2], features.shape[3]), image).to(features.device)
                comparison.add(case, depth, features, move(still[depth].float(), image), inside)
        return chosen

    def draw(self, arrays: Arrays) -> Pictures:
        panels = {}
        for kind, (unit, _) in KINDS.items():
            values = arrays[kind].reshape(len(arrays[kind]), -1)[:, 0]
            label = {"px": "{:g} px", "degrees": "{:g} degrees"}.get(unit, "x {:g}")
            errors = arrays[f"{kind}_error"]
            panels[kind.replace("_", " ")] = {
                label.format(value): error for value, error in zip(values, errors, strict=True)
            }
        return {"Error of equivariance by depth": curves(panels, "depth", "relative error")}

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        # The largest shift within a patch, and one whole patch.
        chosen = {
            "half_patch_shift_error_by_depth": ("pixel_shift", -1),
            "patch_shift_error_by_depth": ("patch_shift", 0),
        }
        return {name: rounded(arrays[f"{kind}_error"][case]) for name, (kind, case) in chosen.items()}
