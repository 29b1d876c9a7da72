"""Attention by explicit products in bfloat16: the formula's numbers for any batch, and elsewhere torch's kernel."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inference.test_packing import CAN_PACK
from models.families import FAMILIES

import hf_vit
from hf_vit.inference import attention
from hf_vit.inference.attention import ProductAttention, attend_by_products
from hf_vit.rewriting.transformer import FusedAttention

BFLOAT16 = {"avx512_bf16": True, "amx_bf16": False}


@pytest.fixture
def products(processor: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a processor with instructions for bfloat16; how many images each portion had."""
    portions: list[int] = []
    attended = attention._attended

    def watched(query: torch.Tensor, *others: Any) -> torch.Tensor:
        portions.append(len(query))
        return attended(query, *others)

    processor(**BFLOAT16)
    monkeypatch.setattr(attention, "_attended", watched)
    monkeypatch.setattr(attention, "_FEWEST_PAIRS", 0)
    return portions


def fused(**fields: Any) -> tuple[Any, Any]:
    """An attention of the plain family, and its form by products."""
    layer = FAMILIES["plain"].build("model", **fields).layers[0].attention
    part = FusedAttention.of(layer, None, torch.float32)
    other = copy.copy(part)
    assert attend_by_products(other)
    return part, other


@pytest.mark.parametrize("portion", [1, 2**20])
@torch.no_grad()
def test_the_formula_in_portions(products: list[int], monkeypatch: pytest.MonkeyPatch, portion: int):
    monkeypatch.setattr(attention, "_PORTION", portion)
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
            bounds.setattr(attention, name, value)
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


@pytest.mark.parametrize(
    ("choices", "implementation", "dtype", "asked"),
    [
        ({"position_embedding": "relative"}, "sdpa", torch.float32, {}),
        ({}, "sdpa", torch.float64, {"merge_tokens": 1}),
        ({}, "eager", torch.float64, {}),
    ],
    ids=["relative positions", "merged tokens", "eager"],
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
