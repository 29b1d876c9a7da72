"""Small models with facts, saved once, for the tests that share them."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.tiny import NAMES, make_processor

from hf_vit import (
    HfAxialViTConfig,
    HfAxialViTForImageClassification,
    HfHybridViTConfig,
    HfHybridViTForImageClassification,
    HfViTConfig,
    HfViTForImageClassification,
)
from hf_vit.hub.card import write_card
from hf_vit.results.facts import DataFact, Facts, Record

TINY: dict[str, Any] = {
    "image_size": (8, 12), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "pooling": "gap", "id2label": dict(enumerate(NAMES)),
}  # fmt: skip
FAMILIES = {
    "plain": (HfViTConfig, HfViTForImageClassification, {"patch_size": 4}),
    "hybrid": (HfHybridViTConfig, HfHybridViTForImageClassification, {"stage_depths": (), "stem_width": 32}),
    "axial": (HfAxialViTConfig, HfAxialViTForImageClassification, {"patch_size": 4}),
}


def save_model(folder: Path, family: str = "plain", seed: int = 0, **fields: Any) -> Path:
    """A tiny classifier whose head is not zero, with processor, facts, a picture and card."""
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**TINY, **own, **fields}))
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)
    make_processor().save_pretrained(folder)
    (folder / "learning_curve.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    Facts(records=[training_record()]).save(folder)
    write_card(folder, license="apache-2.0")
    return folder


def training_record(**fields: Any) -> Record:
    known: dict[str, Any] = {
        "kind": "training", "command": "hf-vit finetune --data digits", "date": datetime(2031, 2, 3, tzinfo=UTC),
        "seed": 0, "data": DataFact(name="digits", fingerprint="f" * 16, split="train", size=1257),
        "values": {"recipe": {"learning_rate": 0.001}, "steps": 10},
    }  # fmt: skip
    return Record(**{**known, **fields})


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> folder. Not to be changed."""
    root = tmp_path_factory.mktemp("models")
    return {family: save_model(root / family, family) for family in FAMILIES}


@pytest.fixture
def model_folder(saved_models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the plain one, to be changed."""
    return shutil.copytree(saved_models["plain"], tmp_path / "my-vit")


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Save another: (name, family="plain", seed=0, **config)."""
    return lambda name, *arguments, **fields: save_model(tmp_path / name, *arguments, **fields)
