"""Tiny models and the one training loop that every door walks through."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_vit

SMALL = {
    **{"image_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2},
    **{"intermediate_size": 64, "num_labels": 3},
}
TINY = {
    "HfViT": {**SMALL, "patch_size": 16},
    "HfHybridViT": {**SMALL, "stage_depths": (1, 1, 1), "stem_width": 32},
    "HfAxialViT": {**SMALL, "patch_size": 16, "pooling": "gap"},
    "HfLocalViT": {**SMALL, "patch_size": 16, "attention_window": 3},
}


@pytest.fixture(params=list(TINY))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny_config() -> Callable[..., Any]:
    """The config of a family of `TINY` for 64x64 px, 4 layers, stride 16 px."""

    def build(family: str = "HfViT", **overrides: Any) -> Any:
        return getattr(hf_vit, f"{family}Config")(**{**TINY[family], **overrides})

    return build


@pytest.fixture
def learn() -> Callable[..., None]:
    """Every parameter of the backbone gets a gradient; the loss of "HfViT", which takes all steps, falls."""

    def run(
        family: str,
        model: torch.nn.Module,
        backbone: torch.nn.Module,
        loss: Callable[[], torch.Tensor],
        *,
        to: float = 0.7,
        steps: int = 25,
        lr: float = 3e-3,
    ) -> None:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        losses: list[float] = []
        for _ in range(steps if family == "HfViT" else 1):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            if not losses:
                assert not [name for name, parameter in backbone.named_parameters() if parameter.grad is None]
            optimizer.step()
            losses.append(value.item())
        model.eval()
        if family == "HfViT":
            assert losses[-1] < to * losses[0]

    return run
