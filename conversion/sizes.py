"""Sizes as people type and read them: HxW in px, grids in patches."""

import math
import re
from collections.abc import Iterable

from hf_vit.errors import UserError

Pair = tuple[int, int]


def parse_size(text: str, option: str) -> Pair:
    """Read "224" or "384x512" (height x width) in px.

    Raises:
        UserError: the text is neither.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,5})(?:[xX]([1-9][0-9]{0,5}))?", text.strip())
    if found is None:
        raise UserError(f"{option} {text!r} is no size; give HEIGHTxWIDTH in px, such as 224x224, or one number")
    return int(found[1]), int(found[2] or found[1])


def square_or_pair(pair: Pair) -> int | Pair:
    """One number for a square, as configs are usually written."""
    return pair[0] if pair[0] == pair[1] else pair


def size_text(sides: Iterable[int]) -> str:
    """(224, 224) -> "224x224"; a scalar's shape -> "scalar"."""
    return "x".join(str(side) for side in sides) or "scalar"


def grid_of(image_size: Pair, patch: Pair, option: str) -> Pair:
    """(h, w) in patches of an image in px.

    Raises:
        UserError: the image is not a whole number of patches.
    """
    if any(side % stride for side, stride in zip(image_size, patch, strict=True)):
        raise UserError(
            f"{option} {size_text(image_size)} px is not divisible by the patch of {size_text(patch)} px; "
            "give sides that are multiples of the patch"
        )
    return image_size[0] // patch[0], image_size[1] // patch[1]


def declared_grid(rows: int, patch: Pair, image_size: Pair | None) -> Pair:
    """(h, w) of a position table with `rows` patch rows: as declared, or the square.

    Raises:
        UserError: the declared size does not fit, or none is declared and the table is not square.
    """
    if rows < 1:
        raise UserError("the position table has no row for any patch; the file is damaged or of another kind")
    if image_size is not None:
        grid = grid_of(image_size, patch, "--image-size")
        if grid[0] * grid[1] != rows:
            raise UserError(
                f"--image-size {size_text(image_size)} makes {grid[0]}x{grid[1]} = {grid[0] * grid[1]} patches of "
                f"{size_text(patch)} px, but the position table has {rows}; {_fitting(rows, patch)}"
            )
        return grid
    side = math.isqrt(rows)
    if side * side != rows:
        raise UserError(
            f"the position table has rows for {rows} patches, which make no square; declare the image size the "
            f"checkpoint was trained at with --image-size HxW: {_fitting(rows, patch)}"
        )
    return side, side


def table_grid(rows: int, special: int, patch: Pair, image_size: Pair | None) -> tuple[bool, Pair]:
    """(whether a position table has rows for the special tokens before those of the patches, (h, w) patch grid).

    Raises:
        UserError: as `declared_grid`.
    """
    if image_size is None:
        squares = {count: math.isqrt(max(rows - count, 0)) ** 2 == rows - count > 0 for count in (special, 0)}
    else:
        h, w = grid_of(image_size, patch, "--image-size")
        squares = {count: h * w == rows - count for count in (special, 0)}
    with_special = squares[special] or not squares[0]
    return with_special, declared_grid(rows - (special if with_special else 0), patch, image_size)


def _fitting(rows: int, patch: Pair) -> str:
    """The image sizes that fit, most square first."""
    heights = [h for h in range(1, rows + 1) if rows % h == 0]
    heights.sort(key=lambda h: max(h, rows // h))
    sizes = [size_text((h * patch[0], rows // h * patch[1])) for h in heights[:6]]
    return "sizes that fit: " + ", ".join(sizes)
