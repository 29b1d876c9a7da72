"""Fixtures of the comparison tests."""

import os
from pathlib import Path

import pytest
from comparison import zoo
from evaluation.tiny import NAMES, make_dataset

from hf_vit.data import ImageData


@pytest.fixture(scope="session")
def data() -> ImageData:
    """Splits of 40, 16 and 24 images of six classes."""
    splits = {name: make_dataset(count, seed=seed) for seed, (name, count) in enumerate(SIZES.items())}
    return ImageData("colours", "0123456789abcdef", splits, list(NAMES))


SIZES = {"train": 40, "validation": 16, "test": 24}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> "Saved":
    return Saved(tmp_path_factory.mktemp("zoo"))


class Saved:
    """Tiny models by kind, each saved once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, kind: str) -> Path:
        folder = self.root / kind
        if not folder.exists():
            zoo.save(kind, folder, NAMES)
        return folder

    def source(self, kind: str) -> str:
        """As it is typed after `hf-vit compare`."""
        return ("timm:" if kind in zoo.TIMM else "") + os.fspath(self.folder(kind))
