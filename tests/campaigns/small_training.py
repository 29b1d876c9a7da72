"""A small training by several processes that something befalls, and what one process makes of it unbroken."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from training.conftest import make_colour_folder
from training.rank_jobs import tiny_config

from hf_vit import HfViTForImageClassification
from hf_vit.data import make_processor
from hf_vit.training import FinetuneOptions, finetune

SILENCE = 30  # seconds that the others wait
# What torchrun gives processes to end before it kills them, and as much for everything else on a busy machine.
BOUND = SILENCE + 30 + 240
SETTINGS: dict[str, Any] = dict(
    steps=8, evaluations=8, batch_size=16, optimizer="sgd", learning_rate=0.1, mixup_alpha=0, dropout=0, drop_path=0
)


def prepare(folder: Path) -> Path:
    """Colours to learn, and a classifier of them."""
    make_colour_folder(folder / "colours", 24)
    torch.manual_seed(0)
    model = HfViTForImageClassification(tiny_config(hidden_dropout_prob=0.0))
    model.save_pretrained(folder / "model")
    make_processor(model.config).save_pretrained(folder / "model")
    return folder


def unbroken(place: Path) -> dict[str, torch.Tensor]:
    """The weights that one process ends with."""
    options = FinetuneOptions(device="cpu", precision="fp32")
    finetune(str(place / "model"), str(place / "colours"), place / "one", options=options, **SETTINGS)
    return load_file(place / "one" / "model.safetensors")


def same_weights(output: Path, weights: dict[str, torch.Tensor]) -> str:
    """Make sure that a training ended with these."""
    found = load_file(output / "model.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0, msg=name)
    return "same weights"
