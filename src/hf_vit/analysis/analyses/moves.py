"""Moving images and feature maps alike: shifts that come in again at the other side, turns and zooms about the centre.

Legend: B batch, C channels, H x W px, h x w places of a map.
"""

import functools
import math
from dataclasses import dataclass
from typing import final

import torch
from torch.nn import functional as F

Size = tuple[int, int]
ROTATIONS = (10.0, 45.0, 90.0, 180.0)  # degrees, counterclockwise
SCALES = (0.75, 1.25, 1.5)
_WHOLE = 0.999  # of a weight that is 1 but for rounding


def shift(maps: torch.Tensor, down: float, right: float) -> torch.Tensor:
    """Move [B, C, h, w] by places, not necessarily whole ones (linear in between); what leaves enters opposite."""
    for dim, places in ((-2, down), (-1, right)):
        whole = math.floor(places)
        part, moved = places - whole, maps.roll(whole, dim)
        maps = moved if part == 0 else (1 - part) * moved + part * maps.roll(whole + 1, dim)
    return maps


def warp(maps: torch.Tensor, angle: float, scale: float, image: Size, padding: str = "reflection") -> torch.Tensor:
    """Turn (degrees, counterclockwise) and zoom (factor) [B, C, h, w] about its centre, bilinear.

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
    """One way to move an image.

    Attributes:
        kind: "pixel_shift", "patch_shift", "rotation" or "scale".
        value: (down, right) in px, degrees or factor.
    """

    kind: str
    value: tuple[float, ...]

    def __call__(self, maps: torch.Tensor, image: Size) -> torch.Tensor:
        """[B, C, h, w] that covers an image of (H, W) px, moved."""
        h, w = maps.shape[-2:]
        if self.kind.endswith("shift"):
            return shift(maps, self.value[0] * h / image[0], self.value[1] * w / image[1])
        return self._warped(maps, image)

    def _warped(self, maps: torch.Tensor, image: Size, padding: str = "reflection") -> torch.Tensor:
        angle, scale = (self.value[0], 1.0) if self.kind == "rotation" else (0.0, self.value[0])
        return warp(maps, angle, scale, image, padding)

    def inside(self, grid: Size, image: Size) -> torch.Tensor:
        """[h, w] bool: the places whose pixels all come from inside the image, and their features from known ones."""
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
    """All moves that are looked at, for patches of (height, width) px.

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
