"""Fast paths of inference against the plain model: the same outputs, maps and sizes; no training, saving or moving."""

import copy
import warnings

import pytest
import torch
from hf_vit.models.linear_hf_vit import HfViTLinear, can_fuse_gelu, dense_gelu
from models.families import FAMILIES, Family, pad, tensors_of
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import hf_vit
from hf_vit import inference
from hf_vit.models import blocks_hf_vit, linear_hf_vit

# float64 goes through the plain product, float32 and bfloat16 through oneDNN's.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


def both(family: Family, head: str, choice: str = "default", **options):
    """A model and its optimized copy."""
    model = family.build(head, choice, **options)
    return model, hf_vit.optimize_for_inference(copy.deepcopy(model))


def assert_same(given, wanted, tolerance: float) -> None:
    for own, other in zip(tensors_of(given), tensors_of(wanted), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=tolerance * max(1.0, float(other.abs().max())))


@torch.no_grad()
def test_every_choice_has_the_same_outputs(family: Family, choice: str):
    for dtype, tolerance in TOLERANCES.items():
        model, fast = both(family, "model", choice, dtype=dtype)
        images = family.images(model.config, grid=(3, 5), dtype=dtype)
        assert_same(fast(images, output_hidden_states=True), model(images, output_hidden_states=True), tolerance)


@torch.no_grad()
def test_every_head_has_the_same_outputs(family: Family, head: str):
    model, fast = both(family, head)
    images = family.images(model.config)
    assert_same(fast(images), model(images), TOLERANCES[torch.float32])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_every_choice_of_a_classifier_has_the_same_outputs(family: Family, choice: str, implementation: str):
    """Mixed sizes, and the hidden states where they are asked for."""
    options = {"dtype": torch.float64, "attn_implementation": implementation}
    model, fast = both(family, "classification", choice, **options)
    images = family.images(model.config, grid=(3, 5), dtype=torch.float64)
    assert_same(fast(images), model(images), 1e-12)
    assert_same(fast(images, output_hidden_states=True), model(images, output_hidden_states=True), 1e-12)
    assert_same(fast.vit(images), model.vit(images), 1e-12)
    grids = [(1, 1), (2, 1)] if family.any_size else [(2, 3), (4, 2)]
    singles = [family.images(model.config, batch=1, grid=grid, dtype=torch.float64) for grid in grids]
    images, mask = pad(model.config, singles, grids, (4, 4))
    assert_same(fast(images, patch_attention_mask=mask), model(images, patch_attention_mask=mask), 1e-12)


@pytest.mark.parametrize(("choice", "num_read"), [("default", 1), ("distillation", 2), ("gap", None), ("causal", None)])
@torch.no_grad()
def test_the_last_layer_computes_what_the_head_reads(choice: str, num_read: int | None):
    """Special tokens alone, but for the base model, and where hidden states or attentions are asked for."""
    family, seen = FAMILIES["plain"], []
    fast = both(family, "classification", choice, attn_implementation="eager")[1]
    fast.vit.layernorm.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    images = family.images(fast.config)
    fast(images)
    fast.vit(images)
    fast(images, output_hidden_states=True)
    fast(images, output_attentions=True)
    fast.config.output_hidden_states = True
    fast(images)
    assert len(set(seen[1:])) == 1
    assert seen[0] == (num_read or seen[1])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_same_maps_and_attentions(family: Family, implementation: str):
    model, fast = both(family, "classification", dtype=torch.float64, attn_implementation=implementation)
    images = family.images(model.config, dtype=torch.float64)
    for own, other in zip(*(made.attention_maps(images).maps.values() for made in (fast, model)), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)
    if implementation == "eager":
        assert_same(fast(images, output_attentions=True), model(images, output_attentions=True), 1e-12)


@torch.no_grad()
def test_same_padded_batches(family: Family):
    grids = [(1, 1), (2, 1)] if family.any_size else [(2, 3), (4, 2)]
    model, fast = both(family, "model", dtype=torch.float64)
    singles = [family.images(model.config, batch=1, grid=grid, dtype=torch.float64) for grid in grids]
    images, mask = pad(model.config, singles, grids, (4, 4))
    assert_same(fast(images, patch_attention_mask=mask), model(images, patch_attention_mask=mask), 1e-12)


@pytest.mark.parametrize("emulated", [False, True])
@torch.no_grad()
def test_bfloat16_is_as_near_to_float64_as_the_plain_model(family: Family, emulated: bool, monkeypatch):
    """Where the processor only emulates bfloat16, products in float32 are nearer."""
    monkeypatch.setattr(inference, "EMULATES_BFLOAT16", emulated)
    model, fast = both(family, "classification", dtype=torch.bfloat16)
    packed = [module for module in fast.modules() if isinstance(module, inference.PackedDense)]
    assert {module.weight.dtype for module in packed} == {torch.float32 if emulated else torch.bfloat16}
    images = family.images(model.config, batch=8)
    exact = family.build("classification").bfloat16().double()(images.double()).logits
    plain, own = ((made(images.bfloat16()).logits.double() - exact).abs().mean() for made in (model, fast))
    assert own <= 1.5 * plain + 1e-3


def test_training_saving_moving_and_a_second_time_are_refused(tmp_path):
    family = FAMILIES["plain"]
    fast = both(family, "classification")[1]
    images = family.images(fast.config)
    with pytest.raises(hf_vit.UserError, match="cannot be trained; load the model again"):
        fast.train()
    with pytest.raises(hf_vit.UserError, match="cannot be saved"):
        fast.save_pretrained(tmp_path)
    with pytest.raises(hf_vit.UserError, match=r"stays torch.float32 on cpu"):
        fast.to(torch.bfloat16)
    with pytest.raises(hf_vit.UserError, match="no gradients"):
        fast(images.requires_grad_())
    with pytest.raises(hf_vit.UserError, match=r"keeps its patch of \(4, 4\) px"):
        fast.resize_to(patch_size=2)
    with pytest.raises(hf_vit.UserError, match="was not optimized before"):
        hf_vit.optimize_for_inference(fast)
    with pytest.raises(hf_vit.UserError, match="Linear has no layers to optimize"):
        hf_vit.optimize_for_inference(nn.Linear(2, 2))
    fast.to(torch.float32).eval()  # what changes nothing may stay in a user's code


@pytest.mark.slow
def test_frozen_compilation():
    """Same outputs, with gradients switched on too, and weights that were folded into the graph."""
    family = FAMILIES["plain"]
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
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8), (2, 3, 4, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@torch.no_grad()
def test_dense_with_gelu_equals_the_formula(shape: tuple[int, ...], bias: bool, approximate: str):
    torch.manual_seed(0)
    dense, inputs = HfViTLinear(8, 6, bias=bias), torch.randn(shape)
    assert can_fuse_gelu(dense, inputs)
    exact = F.gelu(copy.deepcopy(dense).double()(inputs.double()), approximate=approximate)
    torch.testing.assert_close(dense_gelu(dense, inputs, approximate).double(), exact, rtol=0, atol=1e-6)


def test_the_fused_gelu_keeps_out_of_what_it_cannot_do(monkeypatch):
    """Gradients, hooks, other tensors, autocast and counters see the layer itself."""
    dense, inputs = HfViTLinear(4, 4), torch.randn(2, 4)
    assert not can_fuse_gelu(dense, inputs)
    with torch.no_grad():
        assert can_fuse_gelu(dense, inputs)
        assert not can_fuse_gelu(dense, inputs.double())
        assert not can_fuse_gelu(nn.Sequential(dense), inputs)
        with torch.autocast("cpu"):
            assert not can_fuse_gelu(dense, inputs)
        with FlopCounterMode(display=False) as counter:
            blocks_hf_vit.HfViTMLP(hf_vit.HfViTConfig(hidden_size=32, num_attention_heads=2, intermediate_size=48))(
                torch.randn(5, 32)
            )
        assert counter.get_total_flops() == 2 * 2 * 5 * 32 * 48
        with monkeypatch.context() as patched:
            patched.setattr(linear_hf_vit, "_DENSE_POINTWISE", None)  # torch without oneDNN
            assert not can_fuse_gelu(dense, inputs)
        handle = dense.register_forward_hook(lambda *_: None)
        assert not can_fuse_gelu(dense, inputs)
        handle.remove()
        monkeypatch.setattr(dense, "forward", dense.forward)  # as accelerate's hooks do
        assert not can_fuse_gelu(dense, inputs)
