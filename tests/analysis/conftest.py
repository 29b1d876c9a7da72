"""Fixtures of the analysis tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluation.tiny import make_images
from models.families import FAMILIES
from training.conftest import save_model

from hf_vit.data import make_processor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT classifier with its processor, in a folder "tiny"."""
    return save_model(FAMILIES["plain"].build("classification"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder "photos" of nine images and a broken one."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    folder.mkdir()
    for index, image in enumerate(make_images(9, side=20)):
        image.save(folder / f"{index}.png")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nand no more")
    return folder


@pytest.fixture
def with_processor() -> Callable[[Any], tuple[Any, Any]]:
    """A model of ours with a processor of its size."""
    return lambda model: (model, make_processor(model.config))
