"""The golden data, and small checkpoints as numpy writes them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from originals.google import make_checkpoint, save_npz


@pytest.fixture(scope="session")
def golden() -> Path:
    return Path(__file__).parents[1] / "golden"


@pytest.fixture
def write_npz(tmp_path: Path) -> Callable[..., Path]:
    return lambda arrays, name="model.npz", stored=True: save_npz(arrays, tmp_path / name, stored)


@pytest.fixture
def source(write_npz: Callable[..., Path]) -> Path:
    """A small encoder without a head."""
    return write_npz(make_checkpoint(labels=None))
