"""A model with results as `hf-vit evaluate` records them, on images of a folder."""

from pathlib import Path

import pytest
from hub.conftest import save_model
from training.conftest import COLOURS, make_colour_folder

from hf_vit.evaluation import evaluate_protocol, save_protocol
from hf_vit.hub.card import write_card


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Images of single colours, a folder a class."""
    make_colour_folder(tmp_path / "colours", count=40)
    return tmp_path / "colours"


@pytest.fixture
def judged(tmp_path: Path, colours: Path) -> Path:
    """A model that was measured by two protocols."""
    names = sorted(COLOURS)
    fields = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    folder = save_model(tmp_path / "my-vit", **fields)
    for protocol, options in (("top1", {}), ("knn", {"neighbors": (3,)})):
        run = evaluate_protocol(protocol, str(folder), str(colours), split="test", progress=False, **options)
        save_protocol(run, folder=folder, command=f"hf-vit evaluate my-vit --protocol {protocol}")
    write_card(folder)
    return folder
