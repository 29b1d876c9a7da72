"""Tiny models and the one training loop that every door walks through."""

from collections.abc import Callable

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
    """Steps of AdamW on one batch; returns the losses, that of the untrained model first.

    Asserts that every trainable parameter of `backbone` got a gradient in the first step.
    """

    def run(
        model: torch.nn.Module, backbone: torch.nn.Module, loss: Callable[[], torch.Tensor], steps: int = 25
    ) -> list[float]:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses: list[float] = []
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            if not losses:
                assert not [name for name, parameter in backbone.named_parameters() if parameter.grad is None]
            optimizer.step()
            losses.append(value.item())
        model.eval()
        return losses

    return run
