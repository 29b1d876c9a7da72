"""The families and choices of the contract tests, here too; models with answers, and what engines are given once."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from models.conftest import pytest_generate_tests  # noqa: F401 (a hook of pytest)
from models.families import FAMILIES, Family, assert_near, tensors_of
from transformers import AttentionInterface

import hf_vit
from hf_vit.inference import engines
from hf_vit.models.modeling_hf_vit import eager_attention_forward

PLAIN = FAMILIES["plain"]


@torch.no_grad()
def build(
    choice: str = "default",
    head: str = "classification",
    family: Family = PLAIN,
    random_head: bool = True,
    **settings: Any,
) -> Any:
    """A model with answers: batch norms have seen images."""
    model = family.build(head, choice, **settings)
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if "running" in name:
            tensor.copy_(torch.rand_like(tensor) + 0.5)
        if "classifier" in name and random_head:
            tensor.copy_(torch.randn_like(tensor))
    return model


def optimize(model: Any, engine: str = "torch", **options: Any) -> Any:
    return hf_vit.optimize_for_inference(copy.deepcopy(model), engine=engine, **options)


def all_tensors(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, tuple):
        return [tensor for each in outputs for tensor in all_tensors(each)]
    return tensors_of(outputs)


def assert_same(given: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    assert type(given) is type(wanted)
    if not isinstance(given, tuple | torch.Tensor):
        assert list(given) == list(wanted)
    for fast, plain in zip(all_tensors(given), all_tensors(wanted), strict=True):
        assert_near(fast, plain, tolerance)


def attend_to_twice_the_values(model: Any) -> None:
    """Give a model an attention function of one's own."""

    def attend(module: Any, query: Any, key: Any, value: Any, *given: Any, **options: Any) -> Any:
        return eager_attention_forward(module, query, key, value * 2, *given, **options)

    AttentionInterface.register("twice_the_values", attend)
    model.set_attn_implementation("twice_the_values")


@pytest.fixture(autouse=True, scope="module")
def _exported_once(exported_once: None) -> None:
    """Exporting takes seconds."""


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A plain classifier, and its form by OpenVINO."""
    torch.manual_seed(0)
    model = build()
    return model, optimize(model, "openvino")


def calls_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that engines computed, from now on."""
    seen: list[tuple[int, ...]] = []
    for encoder in model.modules():
        if isinstance(encoder, engines.EngineEncoder):

            def run(images: torch.Tensor, names: Any, run: Any = encoder.graph.run) -> Any:
                seen.append(tuple(images.shape))
                return run(images, names)

            monkeypatch.setattr(encoder, "graph", dataclasses.replace(encoder.graph, run=run))
    return seen
