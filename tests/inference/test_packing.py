"""Packed products against the formula, and what is left of them where torch has other names."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.families import FAMILIES, RESNETS, assert_near
from torch.nn import functional as F

import hf_vit
from hf_vit.inference import memory, packing
from hf_vit.inference.packing import PackedConv2d, PackedDense, PackedPointwise, pack
from hf_vit.models.resnet_hf_vit import STANDARDIZATIONS, StdConv2d
from hf_vit.rewriting.convolutions import StandardizedConv2d
from hf_vit.rewriting.dense import Dense

PLAIN = FAMILIES["plain"]
# Where oneDNN has no bfloat16, nothing in it is packed.
CAN_PACK = pytest.mark.skipif(not packing._TAKES_BFLOAT16(), reason="oneDNN has no bfloat16 on this processor")
DTYPES = pytest.mark.parametrize(
    ("dtype", "packs_bfloat16"),
    [(torch.float32, False), (torch.bfloat16, False), pytest.param(torch.bfloat16, True, marks=CAN_PACK)],
)


@DTYPES
@pytest.mark.parametrize("fuses_gelu", [True, False])
@pytest.mark.parametrize("then", ["nothing", "tanh", "none", "residual"])
@torch.no_grad()
def test_dense_layers_equal_the_formula(
    then: str, fuses_gelu: bool, dtype: torch.dtype, packs_bfloat16: bool, processor: Callable[..., None], monkeypatch
):
    """With and without a bias, for any number of axes, and of weights in float32 for bfloat16 inputs."""
    processor("AVX512" if fuses_gelu else "AVX2")
    monkeypatch.setattr(packing, "_TAKES_BFLOAT16", lambda: packs_bfloat16)
    approximate = then if then in ("tanh", "none") else None
    for bias, shape, wide in ((True, (3, 8), dtype), (False, (2, 5, 8), torch.float32), (True, (2, 3, 4, 8), dtype)):
        weight, inputs = torch.randn(6, 8).to(wide), torch.randn(shape).to(dtype)
        offset = torch.randn(6).to(wide) if bias else None
        residual = torch.randn(*shape[:-1], 6).to(dtype) if then == "residual" else None
        exact = F.linear(inputs.double(), weight.double(), None if offset is None else offset.double())
        exact = exact if approximate is None else F.gelu(exact, approximate=approximate)
        exact = exact if residual is None else exact + residual.double()
        plain = Dense(weight, offset, approximate)
        packed = pack(copy.deepcopy(plain))
        assert isinstance(packed, PackedDense) == (wide == torch.float32 or packs_bfloat16)
        for dense in (plain, packed):
            outputs = dense(inputs, residual)
            assert outputs.dtype == dtype
            tolerance = 1e-6 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(outputs.double(), exact, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("padding", ["same", "even"])
@pytest.mark.parametrize(
    ("side", "stride", "groups"), [(1, 1, 1), (1, 2, 1), (3, 1, 1), (3, 2, 1), (7, 2, 1), (3, 1, 2)]
)
@torch.no_grad()
def test_convolutions_equal_the_formula(
    side: int, stride: int, groups: int, padding: str, dtype: torch.dtype, packs_bfloat16: bool, monkeypatch
):
    """Of one map and of several, of uneven sides, in both layouts of memory."""
    monkeypatch.setattr(packing, "_TAKES_BFLOAT16", lambda: packs_bfloat16)
    plain = StdConv2d(8, 6, side, stride, padding, groups, bias=True, standardization="paper").to(dtype)
    exact, packed = copy.deepcopy(plain).double(), pack(StandardizedConv2d.of(plain, dtype))
    is_packed = isinstance(packed, PackedPointwise if side == 1 else PackedConv2d)
    assert is_packed == (dtype == torch.float32 or packs_bfloat16)
    for batch, layout in ((1, torch.contiguous_format), (3, torch.channels_last)):
        maps = torch.randn(batch, 8, 9, 12).to(dtype).contiguous(memory_format=layout)
        outputs = packed(maps)
        assert outputs.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(outputs.double(), exact(maps.double()), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_kernels_are_packed_for_the_size_that_comes_first(capfd):
    """oneDNN tells of every kernel that it brings into another order before it multiplies."""
    conv = StdConv2d(128, 128, 3, 2, standardization="paper")
    packed, maps = pack(StandardizedConv2d.of(conv, torch.float32)), torch.randn(1, 128, 56, 56)
    maps = maps.contiguous(memory_format=torch.channels_last)
    wanted = packed(maps)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        again = packed(maps)
    told = capfd.readouterr().out
    assert "exec,cpu,convolution" in told
    assert "128x128x3x3" not in told
    assert torch.equal(again, wanted)
    other = torch.randn(3, 128, 20, 30)
    assert_near(packed(other), conv(other), 1e-5)


def test_standardised_kernels_equal_the_formula():
    """And a kernel that is nought stays so, with gradients that are finite."""
    kernel = torch.randn(4, 3, 2, 2)
    kernel[1] = 0
    rows = kernel.double().numpy().reshape(4, -1)
    centred = rows - rows.mean(1, keepdims=True)
    formulas = {
        "std": centred / (rows.std(1, keepdims=True) + 1e-5),
        "variance": centred / (rows.var(1, keepdims=True) + 1e-8) ** 0.5,
        "paper": centred / (rows.var(1, keepdims=True) + 1e-10) ** 0.5,
    }
    for name, formula in formulas.items():
        given = STANDARDIZATIONS[name](leaf := kernel.clone().requires_grad_())
        torch.testing.assert_close(given.detach(), torch.from_numpy(formula).view_as(kernel).float())
        given.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(
    ("model_type", "name", "kind", "tolerance"),
    [
        ("hybrid", "_REORDER_KERNEL", PackedConv2d, 6e-5),
        ("hybrid", "_CONVOLUTION", PackedConv2d, 6e-5),
        ("plain", "_REORDER", PackedDense, 1e-5),
        ("plain", "_LINEAR", PackedDense, 1e-5),
    ],
)
@torch.no_grad()
def test_without_the_names_of_this_torch_nothing_is_packed(
    model_type: str, name: str, kind: type, tolerance: float, monkeypatch
):
    """A torch without oneDNN, or of a later year."""
    model = FAMILIES[model_type].build("classification")
    images = FAMILIES[model_type].images(model.config)
    wanted = model(images).logits
    monkeypatch.setattr(packing, name, None)
    fast = hf_vit.optimize_for_inference(model, engine="torch")
    assert not any(isinstance(module, kind) for module in fast.modules())
    torch.testing.assert_close(fast(images).logits, wanted, rtol=0, atol=tolerance)


@torch.no_grad()
def test_packed_weights_are_the_only_ones():
    model = PLAIN.build("classification")
    before = sum(p.numel() for p in model.parameters())
    fast = hf_vit.optimize_for_inference(model, engine="torch")
    dense = [module for module in fast.modules() if isinstance(module, PackedDense)]
    assert len(dense) == 1 + 4 * PLAIN.config().num_hidden_layers
    packed = sum(m.packed_weight.numel() + m.packed_bias.numel() for m in dense)
    tables = sum(t.numel() for name, t in fast.vit.embeddings.tables[0].named_parameters() if "position" in name)
    assert packed + tables + sum(t.numel() for t in [*fast.parameters(), *fast.buffers()]) == before


@torch.no_grad()
def test_position_tables_are_kept_a_grid(monkeypatch):
    """Computed once a grid, for a limited number of grids; equal all along."""
    model = PLAIN.build("classification", "bicubic")
    fast = hf_vit.optimize_for_inference(copy.deepcopy(model), engine="torch")
    computed: list[Any] = []
    resample = type(model.vit.embeddings).position_table

    def watched(self: Any, grid: Any, like: torch.Tensor) -> Any:
        computed.append(grid)
        return resample(self, grid, like)

    monkeypatch.setattr(type(model.vit.embeddings), "position_table", watched)
    monkeypatch.setattr(memory, "KEPT_GRIDS", 2)
    grids = [(2, 3), (4, 4), (2, 3), (3, 2), (2, 3)]  # the fourth pushes out the first
    for grid in grids:
        images = PLAIN.images(model.config, grid=grid)
        given = fast(images).logits
        with monkeypatch.context() as plain:
            plain.setattr(type(model.vit.embeddings), "position_table", resample)
            torch.testing.assert_close(given, model(images).logits, rtol=0, atol=1e-5)
    assert computed == [(2, 3), (4, 4), (3, 2), (2, 3)]
    with torch.inference_mode():
        fast(PLAIN.images(model.config, grid=(5, 5)))
    assert fast(PLAIN.images(model.config, grid=(5, 5))).logits.isfinite().all()


@torch.no_grad()
def test_axial_attention_in_portions_is_the_same(monkeypatch):
    family = RESNETS["axial_resnet"]
    model = family.build("classification", dtype=torch.float64)
    images = family.images(model.config, grid=(3, 5), dtype=torch.float64)
    wanted = model(images).logits
    fast = hf_vit.optimize_for_inference(model, engine="torch")
    for limit in (1, 500, 2**18):  # a line, some, all at a time
        monkeypatch.setattr(memory, "CACHED_LOGITS", limit)
        torch.testing.assert_close(fast(images).logits, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("channels", [64, 512])
@torch.no_grad()
def test_norms_of_small_maps_equal_the_formula(monkeypatch, channels: int):
    """Few channels a group and many, in another order of memory or not; what is given back has channels last."""
    norm = torch.nn.GroupNorm(32, channels, 1e-6)
    norm.weight.uniform_()
    norm.bias.normal_()
    features = torch.randn(2, channels, 5, 7).bfloat16().contiguous(memory_format=torch.channels_last)
    exact = copy.deepcopy(norm).double()(features.double().contiguous())
    for small in (0, 1024):
        monkeypatch.setattr(memory, "SMALL_MAP", small)
        normed = memory._normed(norm.bfloat16(), features)
        assert normed.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(normed.double(), exact, rtol=1e-2, atol=2e-2)
