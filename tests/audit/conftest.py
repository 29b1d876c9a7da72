"""A model with results as `hf-vit evaluate` records them, on images of a folder."""

import shutil
from pathlib import Path

import pytest
from hub.conftest import save_model
from training.conftest import COLOURS, make_colour_folder

from hf_vit.evaluation import evaluate_protocol, save_protocol
from hf_vit.hub.card import write_card

NAMES = sorted(COLOURS)
LABELS = {"id2label": dict(enumerate(NAMES)), "label2id": {name: number for number, name in enumerate(NAMES)}}


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images in `colours`, and in `my-vit` a model that was measured by two protocols. Not to be changed."""
    root = tmp_path_factory.mktemp("measured")
    colours = make_colour_folder(root / "colours", count=40)
    folder = save_model(root / "my-vit", **LABELS)
    for protocol, options in (("top1", {}), ("knn", {"neighbors": (3,)})):
        run = evaluate_protocol(protocol, str(folder), str(colours), split="test", progress=False, **options)
        save_protocol(run, folder=folder, command=f"hf-vit evaluate my-vit --protocol {protocol}")
    write_card(folder)
    return root


@pytest.fixture
def colours(measured: Path, tmp_path: Path) -> Path:
    """Images of single colours, a folder a class. To be changed, as the model."""
    return shutil.copytree(measured / "colours", tmp_path / "colours")


@pytest.fixture
def judged(measured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured / "my-vit", tmp_path / "my-vit")
