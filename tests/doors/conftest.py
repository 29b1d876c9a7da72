"""Tiny models and the one training loop that every door walks through."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_vit import HfViTConfig

TINY = {
    "image_size": 64,
    "patch_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_labels": 3,
}


@pytest.fixture
def tiny_config() -> Callable[..., HfViTConfig]:
    return lambda **overrides: HfViTConfig(**{**TINY, **overrides})


@pytest.fixture
def train() -> Callable[..., list[float]]:
    """Steps of AdamW on one batch; returns the losses, the one before the first step first."""

    def run(model: torch.nn.Module, loss: Callable[[], torch.Tensor], steps: int = 8, lr: float = 2e-3) -> list[float]:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        losses: list[float] = []
        for _ in range(steps):
            optimizer.zero_grad()
            value: Any = loss()
            value.backward()
            optimizer.step()
            losses.append(float(value))
        model.eval()
        return losses

    return run
