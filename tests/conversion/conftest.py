"""Small checkpoints in the original's layout, and the golden data."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from originals.google import Arrays, make_checkpoint, reference_forward


@pytest.fixture(scope="session")
def golden() -> Path:
    return Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def checkpoint() -> Callable[..., Arrays]:
    return make_checkpoint


@pytest.fixture
def reference() -> Callable[..., Arrays]:
    return reference_forward


@pytest.fixture
def write_npz(tmp_path: Path) -> Callable[..., Path]:
    """Write arrays as numpy does; `stored` without compression, as np.savez."""

    def write(arrays: Mapping[str, np.ndarray], name: str = "model.npz", stored: bool = True) -> Path:
        path = tmp_path / name
        (np.savez if stored else np.savez_compressed)(path, **arrays)
        return path

    return write
