"""Sizes as people read them, and how images are cut into patches."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hf_vit.errors import UserError

Pair = tuple[int, int]


def square_or_pair(pair: Pair) -> int | Pair:
    """One number for a square, as configs are usually written."""
    return pair[0] if pair[0] == pair[1] else pair


def size_text(sides: Iterable[int]) -> str:
    """(224, 224) -> "224x224"; a scalar's shape -> "scalar"."""
    return "x".join(str(side) for side in sides) or "scalar"


@dataclass(frozen=True)
class Patches:
    """How an image becomes a grid of patches.

    Attributes:
        sides: (height, width) of a patch, in px or in places of a stem's feature map.
        stem_stride: px of the image behind one place of that map; 1 without a stem.
    """

    sides: Pair
    stem_stride: int = 1

    @property
    def stride(self) -> Pair:
        """(height, width) in px behind one patch."""
        return self.sides[0] * self.stem_stride, self.sides[1] * self.stem_stride

    def grid_of(self, image_size: Pair) -> Pair:
        """(h, w) of an image, as the originals cut it: a stem rounds up (SAME), what makes no whole patch is left out.

        Raises:
            UserError: the image is smaller than a patch.
        """
        places = (-(-side // self.stem_stride) for side in image_size)
        h, w = (place // side for place, side in zip(places, self.sides, strict=True))
        if not (h and w):
            raise UserError(
                f"{size_text(image_size)} px hold no patch of {size_text(self.stride)} px; give a larger image size"
            )
        return h, w


def table_size(rows: int, patches: Patches, image_size: Pair | None, what: str = "position table") -> Pair:
    """(height, width) in px of the images that a table of `rows` patch rows is made for: as declared, or square.

    `what` messages call the table.

    Raises:
        UserError: the declared size does not fit, or none is declared and the table is not square.
    """
    if rows < 1:
        raise UserError(f"the {what} has no row for any patch; the file is damaged or of another kind")
    if image_size is not None:
        h, w = patches.grid_of(image_size)
        if h * w != rows:
            raise UserError(
                f"--image-size {size_text(image_size)} makes {h}x{w} = {h * w} patches of {size_text(patches.stride)} "
                f"px, but the {what} has {rows}; {_fitting(rows, patches)}"
            )
        return image_size
    side = math.isqrt(rows)
    if side * side != rows:
        raise UserError(
            f"the {what} has rows for {rows} patches, which make no square; declare the image size the "
            f"checkpoint was trained at with --image-size HxW: {_fitting(rows, patches)}"
        )
    return side * patches.stride[0], side * patches.stride[1]


def fits(rows: int, patches: Patches, image_size: Pair | None) -> bool:
    """Whether a table of `rows` patch rows is one of the declared size, or square; see `table_size`."""
    if image_size is None:
        return math.isqrt(max(rows, 0)) ** 2 == rows > 0
    return math.prod(patches.grid_of(image_size)) == rows


def table_size_and_prefix(rows: int, special: int, patches: Patches, image_size: Pair | None) -> tuple[Pair, bool]:
    """(as `table_size`, whether the table has rows for the special tokens before those of the patches).

    Raises:
        UserError: as `table_size`.
    """
    with_special = fits(rows - special, patches, image_size) or not fits(rows, patches, image_size)
    return table_size(rows - (special if with_special else 0), patches, image_size), with_special


def _fitting(rows: int, patches: Patches) -> str:
    """The image sizes that fit, most square first."""
    heights = [h for h in range(1, rows + 1) if rows % h == 0]
    heights.sort(key=lambda h: max(h, rows // h))
    sizes = [size_text((h * patches.stride[0], rows // h * patches.stride[1])) for h in heights[:6]]
    return "sizes that fit: " + ", ".join(sizes)
