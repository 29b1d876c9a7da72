"""Compiled for inference: one graph, by the library that is fast here, with the model's outputs."""

import warnings
from contextlib import ExitStack

import pytest
import torch
from models.families import FAMILIES, RESNETS, Family

import hf_vit
from hf_vit.inference import optimize
from hf_vit.inference.layers import ChannelwiseGroupNorm

PRECISION = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(family, id=name, marks=[] if name in ("plain", "axial") else pytest.mark.slow)  # 10 s of Dynamo
        for name, family in FAMILIES.items()
    ],
)
def test_a_compiled_model_is_one_graph(row: Family):
    """Nothing that the package adds makes the compiler stop in the middle of a pass."""
    model = row.build("classification")
    images = row.images(model.config)
    wanted = model(images).logits
    fast = hf_vit.optimize_for_inference(model, compile=True)
    compiled = torch.compile(fast.forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images).logits, wanted, rtol=0, atol=2e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("with_norms", [FAMILIES["hybrid"], RESNETS["bit"]], ids=["hybrid", "bit"])
@torch.no_grad()
def test_group_norms_are_computed_in_float32_in_channels_last_layout(with_norms: Family):
    """In bfloat16, too, whose sums over a map would lose what the norm takes away."""
    model = with_norms.build("classification", dtype=torch.bfloat16)
    count = sum(type(part) is torch.nn.GroupNorm for part in model.modules())
    images = with_norms.images(model.config, dtype=torch.bfloat16)
    fast = hf_vit.optimize_for_inference(model, compile=True)
    norms = [part for part in fast.modules() if isinstance(part, ChannelwiseGroupNorm)]
    assert len(norms) == count > 0
    assert fast.forward(images).logits.dtype == torch.bfloat16
    maps, norm = torch.randn(2, 12, 9, 7).bfloat16() + 8, torch.nn.GroupNorm(4, 12)
    exact = norm(maps.float()).bfloat16()
    norm.__class__ = ChannelwiseGroupNorm
    torch.testing.assert_close(norm.bfloat16()(maps), exact, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("known", "is_slow"),
    [
        ({"cpu_name": "AMD EPYC"}, True),
        ({"cpu_name": "AMD EPYC", "amx_tile": True}, False),
        ({"cpu_name": "Intel(R) Xeon(R)"}, False),
        ({}, False),
    ],
)
def test_products_by_onednn_are_of_processors_without_lower_precision(
    monkeypatch, processor, known: dict[str, object], is_slow
):
    """And the setting, which is the process's, lasts as long as a pass, one that fails too."""
    processor(**known)
    before, seen = PRECISION.fp32_precision, []

    def passed(images: torch.Tensor) -> None:
        assert not images.requires_grad
        seen.append(PRECISION.fp32_precision)
        if len(seen) == 2:
            raise ValueError("no image")

    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(model, "compile", lambda **_: setattr(model, "_compiled_call_impl", passed))
    optimize.compile_frozen(model)
    model(torch.ones(2))
    with pytest.raises(ValueError, match="no image"):
        model(torch.ones(2))
    with pytest.raises(hf_vit.UserError, match="computes no gradients"):
        model(torch.ones(2, requires_grad=True))
    assert seen == ["tf32" if is_slow else before] * 2
    assert PRECISION.fp32_precision == before


def test_passes_that_overlap_leave_the_setting_as_it_was():
    """As those of several threads do: the second began when it was set already."""
    before, first, second = PRECISION.fp32_precision, ExitStack(), ExitStack()
    for each in (first, second):
        each.enter_context(optimize._use_onednn_products())
    first.close()
    assert PRECISION.fp32_precision == "tf32" != before
    second.close()
    assert PRECISION.fp32_precision == before


@pytest.mark.slow
def test_frozen_compilation():
    """Same outputs, with gradients switched on too, and weights that were folded into the graph."""
    for family in (FAMILIES["plain"], FAMILIES["hybrid"], RESNETS["bit"]):
        model = family.build("classification")
        images = family.images(model.config)
        wanted = model(images).logits.detach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler
            fast = hf_vit.optimize_for_inference(model, compile=True)
            torch.testing.assert_close(fast(images).logits, wanted, rtol=0, atol=2e-5)
            with torch.no_grad():
                model.classifier.bias.add_(1.0)
            torch.testing.assert_close(fast(images).logits, wanted, rtol=0, atol=2e-5)
        with pytest.raises(hf_vit.UserError, match="cannot be trained"):
            fast.train()
        torch._dynamo.reset()
