"""Fixtures of the evaluation tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluation.tiny import NAMES, make_classifier, make_processor


@pytest.fixture
def save_classifier(tmp_path: Path) -> Callable[..., Path]:
    """Save a tiny transformers classifier with its processor into a new folder."""

    def save(name: str = "model", names: Sequence[str] = NAMES, **fields: Any) -> Path:
        folder = tmp_path / name
        make_classifier(names, **fields).save_pretrained(folder)
        make_processor().save_pretrained(folder)
        return folder

    return save
