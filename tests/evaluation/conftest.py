"""Fixtures of the evaluation tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluation.tiny import NAMES, make_classifier
from training.conftest import save_model


@pytest.fixture
def save_classifier(tmp_path: Path) -> Callable[..., Path]:
    """Save a tiny transformers classifier with its processor into a new folder."""

    def save(name: str = "model", names: Sequence[str] = NAMES, **fields: Any) -> Path:
        return save_model(make_classifier(names, **fields), tmp_path / name)

    return save
