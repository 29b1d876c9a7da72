"""An optimized model computes what the plain one does: every family, choice, head, size and dtype."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inference.conftest import assert_same, build, optimize
from models.families import FAMILIES, OTHERS, Family, pad

from hf_vit.inference import packing
from hf_vit.inference.layers import Dense
from hf_vit.inference.packing import PackedConv2d, PackedDense
from hf_vit.models.modeling_hf_vit import HfViTPooler

OTHER_FAMILIES = OTHERS


def both(family: Family, head: str = "classification", choice: str = "default", **options: Any):
    model = build(choice, head, family, random_head=False, **options)
    return model, optimize(model)


@torch.no_grad()
def test_every_choice_of_a_classifier(family: Family, choice: str):
    """In float32 by the default attention; in float64 by the formula, at its own size too, and with all it can tell."""
    model, fast = both(family, choice=choice)
    images = family.images(model.config, grid=(3, 5))
    assert_same(fast(images), model(images), 2e-5)
    model, images = model.double(), images.double()
    if family.name in FAMILIES:
        model.set_attn_implementation("eager")
    fast = optimize(model)
    labels = torch.tensor([0, 1]) if model.config.num_labels else None
    for grid in ((3, 5), None):
        images = family.images(model.config, grid=grid, dtype=torch.float64)
        assert_same(fast(images), model(images), 1e-12)
    recorded = {"output_hidden_states": True, "labels": labels}
    assert_same(fast(images, **recorded), model(images, **recorded), 1e-12)


@torch.no_grad()
def test_every_head(family: Family, head: str):
    model, fast = both(family, head)
    images = family.images(model.config)
    assert_same(fast(images), model(images), 2e-5)


VITS = {name: pytest.param(family, id=name) for name, family in FAMILIES.items()}


@pytest.mark.parametrize("vit", VITS.values())
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_attentions_maps_and_padded_batches(vit: Family, implementation: str):
    grids = [(1, 1), (2, 1)] if vit.any_size else [(2, 3), (4, 2)]
    attending = ("gap", "map", "relative", "relative_bias", "registers_map", "map_with_registers", "no_last_norm")
    attending += ("rotary", "rotary_mixed", "rotary_registers", "rotary_causal", "norm_after_branches")
    for choice in {"default", *attending, "causal", "distillation"} & set(vit.choices):
        model, fast = both(vit, choice=choice, dtype=torch.float64, attn_implementation=implementation)
        images = vit.images(model.config, dtype=torch.float64)
        for given, wanted in zip(*(each.attention_maps(images).maps.values() for each in (fast, model)), strict=True):
            torch.testing.assert_close(given, wanted, rtol=0, atol=1e-12)
        if implementation == "eager":
            assert_same(fast(images, output_attentions=True), model(images, output_attentions=True), 1e-12)
        singles = [vit.images(model.config, batch=1, grid=grid, dtype=torch.float64) for grid in grids]
        images, mask = pad(model.config, singles, grids, (4, 4))
        for given, wanted in ((fast, model), (fast.vit, model.vit)):
            assert_same(given(images, patch_attention_mask=mask), wanted(images, patch_attention_mask=mask), 1e-12)


@pytest.mark.parametrize(
    ("choice", "num_read"),
    {"default": 1, "distillation": 2, "registers_distillation": 2, "gap": None, "causal": None, "rotary": 1}.items(),
)
@torch.no_grad()
def test_the_last_layer_computes_what_the_head_reads(choice: str, num_read: int | None, monkeypatch):
    """Special tokens alone, but for the base model, where hidden states or attentions are asked for, and for a hook."""
    family, seen, pool = FAMILIES["plain"], [], HfViTPooler.forward

    def watched(self: Any, hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(hidden_states.shape[1])
        return pool(self, hidden_states, *args)

    monkeypatch.setattr(HfViTPooler, "forward", watched)
    fast = both(family, choice=choice, attn_implementation="eager")[1]
    images = family.images(fast.config)
    fast(images)
    for part in (fast.vit, fast.vit.layers[-1], fast.vit.layers[-1].layernorm_after, fast.vit.layernorm):
        heard: list[int] = []
        hook = part.register_forward_hook(lambda _, args, output, heard=heard: heard.append(args[0].shape[1]))
        fast(images)
        hook.remove()
        assert heard
    fast.vit(images)
    fast(images, output_hidden_states=True)
    fast(images, output_attentions=True)
    fast.config.output_hidden_states = True
    fast(images)
    assert len(set(seen[1:])) == 1
    assert seen[0] == (num_read or seen[1])


@pytest.mark.parametrize("emulated", [False, True])
@torch.no_grad()
def test_bfloat16_is_as_near_to_float64_as_the_plain_model(
    family: Family, emulated: bool, processor: Callable[..., None]
):
    """Where the processor only emulates bfloat16, products and convolutions in float32 are nearer."""
    processor(avx512_bf16=not emulated)
    model, fast = both(family, dtype=torch.bfloat16)
    computed_in = {m.computed_in for m in fast.modules() if isinstance(m, PackedDense | PackedConv2d)}
    assert computed_in == {torch.float32} if emulated else computed_in <= {torch.bfloat16}
    images = family.images(model.config, batch=8)
    exact = copy.deepcopy(model).double()(images.double()).logits
    plain, given = (each(images.bfloat16()).logits for each in (model, fast))
    assert given.dtype == torch.bfloat16
    errors = [(each.double() - exact).abs().mean() for each in (plain, given)]
    assert errors[1] <= 1.5 * errors[0] + 1e-3


@pytest.mark.parametrize("kind", [PackedDense, Dense])
@torch.no_grad()
def test_residuals_stay_in_float32_under_autocast(kind: type, monkeypatch):
    """In a lower dtype the error of deep models doubled, and float16 may overflow."""
    if kind is Dense:
        monkeypatch.setattr(packing, "_REORDER", None)
    model, fast = both(FAMILIES["plain"])
    assert isinstance(fast.vit.layers[0].mlp.fc2, kind)
    images = FAMILIES["plain"].images(model.config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, given = (each(images, output_hidden_states=True).hidden_states for each in (model, fast))
    assert [state.dtype for state in given] == [state.dtype for state in plain]
