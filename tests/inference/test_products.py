"""Products: packed, in int8, and those of attention, against the formulas; and what is left of them elsewhere."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models.families import FAMILIES, OTHERS, RESNETS, assert_near
from torch.nn import functional as F

import hf_vit
from hf_vit import environment
from hf_vit.inference import optimize, packing
from hf_vit.inference.layers import Dense, FusedAttention, StandardizedConv2d
from hf_vit.inference.packing import (
    PackedConv2d,
    PackedDense,
    PackedPointwise,
    ProductAttention,
    QuantizedDense,
    attend_by_products,
    pack,
    round_weights,
    smooth,
)
from hf_vit.models.resnet_hf_vit import STANDARDIZATIONS, StdConv2d

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
    exact, packed = copy.deepcopy(plain).double(), pack(StandardizedConv2d.from_conv(plain, dtype))
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
    packed, maps = pack(StandardizedConv2d.from_conv(conv, torch.float32)), torch.randn(1, 128, 56, 56)
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
    """A constant kernel becomes nought, with gradients that are finite."""
    kernel = torch.randn(4, 3, 2, 2)
    kernel[1], kernel[2] = 0, 0.5
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


@pytest.mark.parametrize(("choice", "kept"), [("bicubic", "compute_position_table"), ("rotary", "rotation")])
@torch.no_grad()
def test_positions_are_kept_a_grid(monkeypatch, choice: str, kept: str):
    """Computed once a grid, for a limited number of grids; equal all along."""
    model = PLAIN.build("classification", choice, rotary_jitter=1.5 if kept == "rotation" else None)
    model.train()  # where coordinates move at random
    fast = hf_vit.optimize_for_inference(copy.deepcopy(model), engine="torch")
    model.eval()
    computed: list[Any] = []
    compute = getattr(type(model.vit.embeddings), kept)

    def watched(self: Any, grid: Any, *others: Any) -> Any:
        computed.append(grid)
        return compute(self, grid, *others)

    monkeypatch.setattr(type(model.vit.embeddings), kept, watched)
    more = [(height, 3) for height in range(3, 2 + optimize.KEPT_GRIDS)]
    grids = [(2, 3), (4, 4), (2, 3), *more, (2, 3)]  # the last but one pushes out the first
    for grid in grids:
        images = PLAIN.images(model.config, grid=grid)
        given = fast(images).logits
        with monkeypatch.context() as plain:
            plain.setattr(type(model.vit.embeddings), kept, compute)
            torch.testing.assert_close(given, model(images).logits, rtol=0, atol=1e-5)
    assert computed == [(2, 3), (4, 4), *more, (2, 3)]
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
        monkeypatch.setattr(optimize, "CACHED_LOGITS", limit)
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
        monkeypatch.setattr(optimize, "SMALL_MAP", small)
        normed = optimize._normalize(norm.bfloat16(), features)
        assert normed.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(normed.double(), exact, rtol=1e-2, atol=2e-2)


BFLOAT16 = {"avx512_bf16": True, "amx_bf16": False}


@pytest.fixture
def products(processor: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a processor with instructions for bfloat16; how many images each portion had."""
    portions: list[int] = []
    attended = packing._attend

    def watched(query: torch.Tensor, *others: Any) -> torch.Tensor:
        portions.append(len(query))
        return attended(query, *others)

    processor(**BFLOAT16)
    monkeypatch.setattr(packing, "_attend", watched)
    monkeypatch.setattr(packing, "_FEWEST_PAIRS", 0)
    return portions


def fused(**fields: Any) -> tuple[Any, Any]:
    """An attention of the plain family, and its form by products."""
    layer = FAMILIES["plain"].build("model", **fields).layers[0].attention
    part = FusedAttention.from_attention(layer, None, torch.float32)
    other = copy.copy(part)
    assert attend_by_products(other)
    return part, other


@pytest.mark.parametrize("portion", [1, 2**20])
@torch.no_grad()
def test_the_formula_in_portions(products: list[int], monkeypatch: pytest.MonkeyPatch, portion: int):
    monkeypatch.setattr(packing, "_PORTION", portion)
    part = fused()[1]
    query, key, value = torch.randn(3, 5, 2, 7, part.head_dim, generator=torch.Generator().manual_seed(0))
    given, probabilities = part.interface(query, key, value, None)
    logits = torch.einsum("bank,bamk->banm", query.double(), key.double()) * part.head_dim**-0.5
    wanted = torch.einsum("banm,bamk->bnak", torch.softmax(logits, -1), value.double())
    assert probabilities is None
    assert given.dtype == torch.float32
    assert (given - wanted).norm() / wanted.norm() < 0.01
    assert products == ([1] * 5 if portion == 1 else [5])


@torch.no_grad()
def test_what_is_masked_biased_explicit_large_or_small_is_not_its_matter(products: list[int], monkeypatch):
    part, by_products = fused()
    tokens = torch.randn(2, 5, part.config.hidden_size, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, True, False, True, True])[None, None, None].expand(2, 1, 5, 5)
    for each in (part, by_products):
        each.config._attn_implementation = "sdpa"
    assert torch.equal(part(tokens, mask)[0], by_products(tokens, mask)[0])
    part.is_causal = by_products.is_causal = True
    assert torch.equal(part(tokens)[0], by_products(tokens)[0])
    part.is_causal = by_products.is_causal = False
    pairs_of_an_image = 5 * 5 * part.config.num_attention_heads
    for name, value in (("_MOST_PAIRS", pairs_of_an_image - 1), ("_FEWEST_PAIRS", 2 * pairs_of_an_image + 1)):
        with monkeypatch.context() as bounds:
            bounds.setattr(packing, name, value)
            assert torch.equal(part(tokens)[0], by_products(tokens)[0])
    biased, biased_by_products = fused(position_embedding="relative_bias")
    grids = {"grid": (2, 2)}
    assert torch.equal(biased(tokens, **grids)[0], biased_by_products(tokens, **grids)[0])
    by_products.config._attn_implementation = "eager"
    given, probabilities = by_products(tokens)
    assert probabilities is not None
    assert torch.equal(given, part(tokens)[0])
    assert not products


@pytest.mark.parametrize(
    ("known", "quantize", "dtype", "is_used"),
    [
        pytest.param(BFLOAT16, None, torch.bfloat16, True, marks=CAN_PACK),
        (BFLOAT16, "int8", torch.float32, True),
        (BFLOAT16, None, torch.float32, False),
        (BFLOAT16 | {"amx_bf16": True}, "int8", torch.bfloat16, False),
        ({}, "int8", torch.float32, False),
    ],
)
@torch.no_grad()
def test_where_it_was_measured_to_be_faster(known, quantize, dtype, is_used, processor: Callable[..., None]):
    processor(**known)
    model = FAMILIES["plain"].build("classification", dtype=dtype)
    images = FAMILIES["plain"].images(model.config, dtype=dtype)
    fast = hf_vit.optimize_for_inference(copy.deepcopy(model), engine="torch", quantize=quantize)
    kinds = [isinstance(module, ProductAttention) for module in fast.modules() if isinstance(module, FusedAttention)]
    assert kinds == [is_used] * len(model.vit.layers)
    assert (fast(images).logits - model(images).logits).norm() < 0.15 * model(images).logits.norm()


@torch.no_grad()
def test_calibrated_int8_keeps_attention_in_the_dtype_of_the_model(products: list[int]):
    for dtype, is_used in ((torch.float32, False), (torch.bfloat16, True)):
        products.clear()
        model = FAMILIES["plain"].build("classification", dtype=dtype).eval()
        images = FAMILIES["plain"].images(model.config, dtype=dtype)
        hf_vit.optimize_for_inference(model, engine="torch", quantize="int8", calibrate=images)(images)
        assert bool(products) == is_used, dtype


@pytest.mark.parametrize(
    ("choices", "implementation", "dtype", "asked"),
    [
        ({"position_embedding": "relative"}, "sdpa", torch.float32, {}),
        ({"rotary_embedding": "mixed", "use_qk_norm": True, "mlp_type": "swiglu"}, "sdpa", torch.float32, {}),
        ({}, "sdpa", torch.float64, {"merge_tokens": 1}),
        ({}, "eager", torch.float64, {}),
    ],
    ids=["relative positions", "rotary positions", "merged tokens", "eager"],
)
@torch.no_grad()
@pytest.mark.usefixtures("products")
def test_int8_beside_it(choices: dict[str, Any], implementation: str, dtype: torch.dtype, asked: dict[str, Any]):
    """Where torch's other operators take what its products give; and maps are probabilities."""
    model = FAMILIES["plain"].build("classification", dtype=dtype, **choices)
    model.set_attn_implementation(implementation)
    images = FAMILIES["plain"].images(model.config, dtype=dtype)
    others = {} if asked else {"patch_attention_mask": torch.ones(len(images), *model.config.grid)}
    wanted = model(images, **others).logits
    fast = hf_vit.optimize_for_inference(model, quantize="int8", **asked)
    assert (fast(images, **others).logits - wanted).norm() < 0.15 * wanted.norm()
    for maps in fast.attention_maps(images).maps.values():
        assert maps.dtype == dtype
        torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))


def by_definition(
    inputs: np.ndarray, weight: np.ndarray, bias: np.ndarray, levels: int, per_token: bool = False, gelu: bool = False
) -> np.ndarray:
    """Both rounded to steps of their range, weights row by row; whole numbers multiplied, then scaled.

    Per token, inputs have 127 steps to either side of zero; what a GELU returns has 231 above it and 24 below.
    """
    low, high = min(inputs.min(), 0), max(inputs.max(), 0)
    step = (high - low) / 254
    zero = np.round(-low / step)
    if per_token:
        zero, step = 0, abs(inputs).max(axis=1, keepdims=True).astype(np.float64) / 127
    if gelu:
        zero, step = 0, np.maximum(inputs.max(axis=1, keepdims=True) / 231, 0.1701 / 24)
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
    rows = inputs.numpy().reshape(14, 24)
    per_token = by_definition(rows, weight.numpy(), bias.numpy(), levels, per_token=True).reshape(2, 7, 40)
    np.testing.assert_allclose(added.numpy(), per_token + residual.numpy(), rtol=0, atol=1e-4)
    smooth = QuantizedDense(Dense(weight, bias, "none"))(inputs)
    gelu = torch.nn.functional.gelu(torch.from_numpy(wanted)).numpy()
    np.testing.assert_allclose(smooth.numpy(), gelu, rtol=0, atol=1e-4)


@pytest.mark.parametrize("reads_gelu", [False, True])
def test_a_token_with_large_values_leaves_the_others_alone(reads_gelu: bool):
    """As in pretrained models; each row is rounded by its own range, and what a GELU returns in finer steps."""
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(5, 64, generator=generator), torch.randn(8, 64, generator=generator)
    inputs = torch.nn.functional.gelu(inputs) if reads_gelu else inputs
    dense = QuantizedDense(Dense(weight, None))
    dense.reads_gelu = reads_gelu
    residual = torch.zeros(5, 8)
    alone = dense(inputs, residual)
    inputs[2] *= 100
    assert torch.equal(dense(inputs, residual)[[0, 1, 3, 4]], alone[[0, 1, 3, 4]])
    levels = 64 if environment.sums_int8_in_16_bits() else 127
    wanted = by_definition(inputs.numpy(), weight.numpy(), np.zeros(8), levels, True, reads_gelu)
    np.testing.assert_allclose(dense(inputs, residual).numpy(), wanted, rtol=1e-5, atol=1e-4)


def test_a_packed_mlp_knows_what_its_second_layer_reads():
    for fields, reads_gelu in (({}, True), ({"hidden_act": "quick_gelu"}, True), ({"hidden_act": "silu"}, False)):
        model = hf_vit.optimize_for_inference(FAMILIES["plain"].build("model", **fields), quantize="int8")
        assert [layer.mlp.fc2.reads_gelu for layer in model.layers] == [reads_gelu] * len(model.layers)


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
def test_which_processors_sum_in_16_bits(machine: str, known: dict[str, bool], is_narrow: bool, processor, monkeypatch):
    processor(machine=machine, **known)
    assert environment.sums_int8_in_16_bits() == is_narrow
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")
    assert environment.sums_int8_in_16_bits() == (machine == "x86_64"), "oneDNN uses nothing beyond AVX2"


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
    with pytest.raises(hf_vit.UserError, match="but HfBitForImageClassification has none; leave quantize out"):
        hf_vit.optimize_for_inference(model, quantize="int8")
    assert [type(part) for part in model.modules()] == before


def correlated(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of few directions, as tokens have, and some noise."""
    mixture = torch.randn(rows, 4, generator=generator) @ torch.randn(4, columns, generator=generator)
    return mixture + 0.1 * torch.randn(rows, columns, generator=generator)


def record(rows: torch.Tensor) -> Any:
    """What a calibration records of these inputs of a layer."""
    layer: Any = torch.nn.Linear(rows.shape[1], 1)
    with optimize.record_inputs(layer, rows.float()):
        return layer.inputs


def test_rounding_by_inputs_is_the_greedy_best():
    """Column by column, by solving for the columns that are still free (optimal brain surgeon, dense formula)."""
    generator = torch.Generator().manual_seed(0)
    rows, steps = correlated(300, 24, generator).double(), 20 * torch.randn(5, 24, generator=generator)
    inputs = record(rows)
    hessian = rows.T @ rows
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(24)
    remaining, free = steps.double(), hessian.diagonal().argsort(descending=True).tolist()
    wanted = torch.empty_like(steps)
    while free:
        column, *free = free
        wanted[:, column] = remaining[:, column].round().clamp(-127, 127)
        error = remaining[:, column] - wanted[:, column]
        if free:  # what the free columns have to add, so that the sum over all inputs changes least
            remaining[:, free] += error[:, None] * torch.linalg.solve(hessian[free][:, free], hessian[free, column])
    given = round_weights(steps, 127, inputs)
    assert (given == wanted).double().mean() > 0.95  # float32 decides otherwise between two steps
    plain, best = ((rows @ (steps - rounded).double().T).norm() for rounded in (steps.round(), given))
    assert best < 0.5 * plain


@pytest.mark.parametrize(
    ("fields", "share"),
    [({}, 0.5), ({"mlp_type": "swiglu", "norm_type": "rmsnorm"}, 0.5), ({"norm_after_branches": True}, 1.0)],
)
@torch.no_grad()
def test_calibrated_answers_are_closer(fields: dict[str, Any], share: float):
    """With a channel many times as large as the others, as pretrained models have.

    No norm can divide it where norms follow the branches. The usual token is judged, as few logits differ by chance.
    """
    for seed in range(8):
        model: Any = FAMILIES["plain"].build("classification", seed=seed, **fields).eval()
        for layer in model.vit.layers:
            for norm in (layer.layernorm_before, layer.layernorm_after):
                norm.weight[0] *= 30
        images = torch.randn(80, 3, *model.config.nominal_size, generator=torch.Generator().manual_seed(seed))
        wanted, before = model.vit(images[16:]).last_hidden_state, copy.deepcopy(model.state_dict())
        calibrate = {"quantize": "int8", "calibrate": images[:16]}
        plain = hf_vit.optimize_for_inference(copy.deepcopy(model), quantize="int8").vit(images[16:])
        copied = copy.deepcopy(model).train()
        calibrated = hf_vit.optimize_for_inference(copied, **calibrate).vit(images[16:])
        errors = [(given.last_hidden_state - wanted).norm(dim=-1).median() for given in (calibrated, plain)]
        assert errors[0] < share * errors[1]
    with pytest.raises(ValueError, match="the model needs"):
        hf_vit.optimize_for_inference(model.train(), quantize="int8", calibrate=images[:, :2])
    assert model.training
    assert not any(hasattr(module, "inputs") or module._forward_pre_hooks for module in model.vit.layers.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("kind", "choice"), [("plain", "map"), ("axial_resnet", "default")])
@torch.no_grad()
def test_calibrated_answers_of_other_layers_are_closer(kind: str, choice: str):
    """Of keys and values of attention pooling, and of dense layers with which batch norms are merged."""
    model: Any = (FAMILIES | OTHERS)[kind].build("model", choice).eval()
    if kind == "plain":
        model.layernorm.weight[0] *= 30  # a channel as in the test above
    images = torch.randn(80, 3, *model.config.nominal_size, generator=torch.Generator().manual_seed(0))
    wanted = model(images[16:]).pooler_output
    plain, calibrated = (
        hf_vit.optimize_for_inference(copy.deepcopy(model), quantize="int8", calibrate=chosen)(images[16:])
        for chosen in (None, images[:16])
    )
    errors = [(given.pooler_output - wanted).norm() for given in (calibrated, plain)]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (torch.zeros(0, 3, 16, 16), "calibrate has no images"),
        (torch.full((2, 3, 16, 16), torch.nan), "gives values that are NaN or infinite"),
        ([torch.zeros(3, 16, 16)], "calibrate is a list; give a tensor"),
        ("images", "calibrate is a str; give a tensor"),
    ],
)
def test_what_cannot_calibrate_is_refused(images: Any, told: str):
    model = FAMILIES["plain"].build("classification")
    with pytest.raises(hf_vit.UserError, match=told):
        hf_vit.optimize_for_inference(model, quantize="int8", calibrate=images)
    assert not any(module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_smoothing_changes_no_product():
    generator = torch.Generator().manual_seed(0)
    norm, dense = torch.nn.LayerNorm(16), Dense(torch.randn(8, 16, generator=generator), None)
    norm.weight[3], norm.bias[5] = 40.0, -7.0
    rows = torch.randn(50, 16, generator=generator)
    normalized = norm(rows)
    wanted, dense.inputs = dense(normalized), record(normalized)
    smoothed = smooth(norm, dense)
    assert smoothed is not norm
    torch.testing.assert_close(dense(smoothed(rows)), wanted)
    assert smoothed(rows).abs().max() * 4 < normalized.abs().max()
    torch.testing.assert_close(dense.inputs.products, smoothed(rows).T @ smoothed(rows))
