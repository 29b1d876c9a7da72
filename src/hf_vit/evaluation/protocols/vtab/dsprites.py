"""dSprites: the published .npz, 737,280 pictures of 64x64 bits, which unpacked are 3 GB."""

import zipfile
from functools import lru_cache
from pathlib import Path
from typing import IO, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FILE = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
SIZES = (1, 3, 6, 40, 32, 32)  # values of colour, shape, scale, orientation, x, y
_AT_ONCE = 4096


@final
class DSprites:
    """Pictures, white on black, and one of their factors in `num_classes` equal bins."""

    def __init__(self, folder: Path, factor: int, num_classes: int) -> None:
        self.file = folder / FILE
        with zipfile.ZipFile(self.file) as archive:
            with archive.open("imgs.npy") as file:
                shape = _shape(file)
            with archive.open("latents_classes.npy") as file:
                factors: NDArray[np.int64] = np.lib.format.read_array(file, allow_pickle=False)
        self.labels = (factors[:, factor] // (SIZES[factor] / num_classes)).astype(np.int64)
        self.rows = np.arange(len(factors))
        if len(shape) != 3 or shape[0] != len(factors):
            raise ValueError(f"pictures {shape} and {len(factors):,} rows of factors do not belong together")

    def take(self, rows: NDArray[np.int64]) -> "DSprites":
        """Those of some rows."""
        part = object.__new__(DSprites)
        part.file, part.labels, part.rows = self.file, self.labels, self.rows[rows]
        return part

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int, /) -> tuple[Image.Image, int]:
        at = self.rows[row]
        bits, (height, width) = _pictures(self.file)
        pixels = np.unpackbits(bits[at], count=height * width).reshape(height, width) * np.uint8(255)
        return Image.fromarray(pixels), int(self.labels[at])


@lru_cache(maxsize=1)  # two tasks look at the same pictures, and reading them takes a while
def _pictures(path: Path) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """All pictures as bits [n, h * w / 8], and (h, w)."""
    with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        total, height, width = _shape(file)
        parts: list[NDArray[np.uint8]] = []
        for start in range(0, total, _AT_ONCE):
            count = min(_AT_ONCE, total - start)
            pixels = np.frombuffer(file.read(count * height * width), np.uint8).reshape(count, height * width)
            parts.append(np.packbits(pixels, axis=1))
    return np.concatenate(parts), (height, width)


def _shape(file: IO[bytes]) -> tuple[int, ...]:
    """Reads the head of a .npy of bytes."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("imgs.npy is of another version of the format")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if is_fortran or dtype != np.uint8:
        raise ValueError(f"imgs.npy holds {dtype}, bytes in C's order are needed")
    return shape
