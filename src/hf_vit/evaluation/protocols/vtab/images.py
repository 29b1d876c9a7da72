"""What a reader of a task gives: labelled images that are decoded when they are asked for, in up to three parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hf_vit.data.images import decode_image
from hf_vit.errors import UserError

# Of the cuts that were never published as a list of files: the same on every machine, whatever --seed is.
CUT_SEED = 0


class LabelledImages(Protocol):
    """A row is (Pillow image, class number): what torchvision's data sets of classes are."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> tuple[Image.Image, int]: ...


@final
@dataclass(frozen=True)
class Parts:
    """The images of a task.

    Attributes:
        train: those to learn from.
        validation: those to choose by, where the paper's code takes them from elsewhere; None: of `train`, too.
        test: those that judge.
    """

    train: LabelledImages
    validation: LabelledImages | None
    test: LabelledImages


def _as_it_is(image: Image.Image) -> Image.Image:
    return image


@final
class ImageFiles:
    """Images that are files of their own, with their classes; `shown` makes the picture of the decoded file."""

    def __init__(
        self, files: Sequence[Path], labels: Sequence[int], shown: Callable[[Image.Image], Image.Image] = _as_it_is
    ) -> None:
        self.files = files
        self.labels = labels
        self.shown = shown

    @classmethod
    def listed(cls, dataset: Any) -> "ImageFiles":
        """Those of a data set of torchvision that was opened with `loader=Path`: it tells the files, decoding none."""
        pairs = sorted((Path(path), int(label)) for path, label in (dataset[row] for row in range(len(dataset))))
        return cls([path for path, _ in pairs], [label for _, label in pairs])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int, /) -> tuple[Image.Image, int]:
        try:
            return self.shown(decode_image(self.files[row])), self.labels[row]
        except OSError as error:
            raise UserError(f"{self.files[row]} is no readable image ({error}); copy it again") from error

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> "ImageFiles":
        """Those of some rows."""
        return ImageFiles([self.files[row] for row in rows], [self.labels[row] for row in rows], self.shown)

    def cut(self, percent: int) -> Parts:
        """So many percent judge, drawn once and for all; the others are to learn from."""
        test, train = cut_rows(len(self), len(self) * percent // 100)
        return Parts(self.take(train), None, self.take(test))


def cut_rows(total: int, first: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(`first` rows of `total`, the others), drawn, each ascending."""
    rows = np.random.default_rng(CUT_SEED).permutation(total)
    return np.sort(rows[:first]), np.sort(rows[first:])
