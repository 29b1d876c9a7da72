"""`optimize_for_inference(model, quantize="int8")`: the sums that int8 means, and answers close to the model's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models.families import FAMILIES, OTHERS

import hf_vit
from hf_vit import environment
from hf_vit.inference.int8 import QuantizedDense
from hf_vit.rewriting.dense import Dense


def by_definition(inputs: np.ndarray, weight: np.ndarray, bias: np.ndarray, levels: int) -> np.ndarray:
    """Both rounded to steps of their range, weights row by row; whole numbers multiplied, then scaled."""
    low, high = min(inputs.min(), 0), max(inputs.max(), 0)
    step = (high - low) / 254
    zero = np.round(-low / step)
    whole = np.floor(inputs.astype(np.float64) / step + zero + 0.5) - zero
    steps = abs(weight).max(axis=1, keepdims=True) / levels
    return (whole @ np.round(weight / steps).T) * step * steps.T + bias


@pytest.mark.parametrize("narrow", [None, True], ids=["this processor", "without VNNI"])
@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0])
def test_a_layer_is_what_int8_means(shift: float, narrow: bool | None, processor: Callable[..., None]):
    """On every processor: where two products have to fit into 16 bits, weights are of fewer steps."""
    if narrow:
        processor()
    levels = 64 if environment.sums_int8_in_16_bits() else 127
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 7, 24, generator=generator) + shift
    weight, bias = torch.randn(40, 24, generator=generator), torch.randn(40, generator=generator)
    given = QuantizedDense(Dense(weight, bias))(inputs)
    wanted = by_definition(inputs.numpy().reshape(14, 24), weight.numpy(), bias.numpy(), levels).reshape(2, 7, 40)
    np.testing.assert_allclose(given.numpy(), wanted, rtol=0, atol=1e-4)
    residual = torch.randn(2, 7, 40, generator=generator)
    added = QuantizedDense(Dense(weight, bias))(inputs, residual)
    np.testing.assert_allclose(added.numpy(), wanted + residual.numpy(), rtol=0, atol=1e-4)
    smooth = QuantizedDense(Dense(weight, bias, "none"))(inputs)
    gelu = torch.nn.functional.gelu(torch.from_numpy(wanted)).numpy()
    np.testing.assert_allclose(smooth.numpy(), gelu, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("machine", "known", "is_narrow"),
    [
        ("x86_64", {"avx2": True, "avx512_bw": True}, True),
        ("x86_64", {"avx512_vnni": True}, False),
        ("x86_64", {"avx_vnni": True}, False),
        ("x86_64", {}, True),  # of torch 2.11, which does not know
        ("aarch64", {}, False),
    ],
)
def test_which_processors_sum_in_16_bits(machine: str, known: dict[str, bool], is_narrow: bool, processor):
    processor(machine=machine, **known)
    assert environment.sums_int8_in_16_bits() == is_narrow


@pytest.mark.parametrize("name", ["plain", "hybrid", "axial", "mixer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_are_close_to_the_models(name: str, dtype: torch.dtype):
    model: Any = {**FAMILIES, **OTHERS}[name].build("classification").eval().to(dtype)
    images = torch.randn(3, 3, *model.config.nominal_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        wanted = model(images).logits.float()
        quantized = hf_vit.optimize_for_inference(model, quantize="int8")
        given = quantized(images).logits
        assert given.dtype == dtype
        difference = (given.float() - wanted).norm() / wanted.norm()
    assert sum(isinstance(module, QuantizedDense) for module in quantized.modules()) >= 4
    assert 1e-4 < difference < 0.15
    with pytest.raises(hf_vit.UserError, match="cannot be saved"):
        quantized.state_dict()


def test_a_batch_of_no_images():
    family = OTHERS["mixer"]  # attention takes none in float either
    model = family.build("classification")
    with torch.no_grad():
        quantized = hf_vit.optimize_for_inference(model, quantize="int8")
        assert quantized(family.images(model.config)[:0]).logits.shape == (0, 3)


def test_what_is_not_finite_stays_so():
    model: Any = FAMILIES["plain"].build("classification").eval()
    images = torch.zeros(2, 3, *model.config.nominal_size)
    images[0, 0, 1, 1] = torch.nan
    with torch.no_grad():
        quantized = hf_vit.optimize_for_inference(model, quantize="int8")
        assert not quantized(images).logits[0].isfinite().any()
        assert quantized(images[1:]).logits.isfinite().all()


def test_a_model_without_dense_layers_is_refused():
    model = OTHERS["bit"].build("classification")
    before = [type(part) for part in model.modules()]
    with pytest.raises(hf_vit.UserError, match="dense layers, and a HfBitForImageClassification has none; leave it"):
        hf_vit.optimize_for_inference(model, quantize="int8")
    assert [type(part) for part in model.modules()] == before
