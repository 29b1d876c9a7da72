"""Dense layers where bfloat16 is emulated: at least as exact as torch's, the same dtypes, nothing of it in exports."""

import copy

import pytest
import torch
from hf_vit.models.linear_hf_vit import HfViTLinear, can_fuse_gelu, dense_gelu, is_emulated
from torch import nn

import hf_vit
from hf_vit.models import linear_hf_vit

AUTOCAST = {"as they are": False, "autocast": True}


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Every processor behaves like one without instructions for bfloat16."""
    monkeypatch.setattr(linear_hf_vit, "EMULATES_BFLOAT16", True)


def run(layer: nn.Linear, inputs: torch.Tensor, *, autocast: bool) -> dict[str, torch.Tensor]:
    """Outputs, and the gradients of the sum of their squares."""
    inputs = inputs.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = layer(inputs)
    outputs.double().square().sum().backward()
    gradients = {name: value.grad for name, value in layer.named_parameters()}
    return {"outputs": outputs.detach(), "inputs": inputs.grad, **gradients}


@pytest.mark.parametrize("autocast", AUTOCAST.values(), ids=AUTOCAST)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 7, 64), (2, 3, 4, 64), (0, 64)], ids=str)
def test_as_exact_as_torch_and_of_its_dtypes(shape: tuple[int, ...], bias: bool, autocast: bool):
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    own, inputs = HfViTLinear(64, 48, bias=bias, dtype=dtype), torch.randn(shape, dtype=dtype)
    plain, exact = nn.Linear(64, 48, bias=bias, dtype=dtype), nn.Linear(64, 48, bias=bias, dtype=torch.float64)
    for other in (plain, exact):
        other.load_state_dict(own.state_dict())
    given, torchs = run(own, inputs, autocast=autocast), run(plain, inputs, autocast=autocast)
    wanted = run(exact, inputs.double(), autocast=False)
    for name, value in given.items():
        assert (value.dtype, value.shape) == (torchs[name].dtype, torchs[name].shape), name
        if value.numel():
            errors = [float((made.double() - wanted[name]).square().mean()) for made in (value, torchs[name])]
            assert errors[0] <= 1.05 * errors[1], (name, errors)


def test_nothing_is_computed_for_what_is_frozen():
    layer = HfViTLinear(8, 4, dtype=torch.bfloat16).requires_grad_(False)
    layer.bias.requires_grad_()
    layer(torch.randn(3, 8, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 3.0, dtype=torch.bfloat16))


def test_second_derivatives_and_vmap():
    torch.manual_seed(0)
    layer, inputs = HfViTLinear(8, 4, dtype=torch.bfloat16), torch.randn(3, 8, dtype=torch.bfloat16)
    wide = copy.deepcopy(layer).float()

    def of_second_order(one: nn.Module, given: torch.Tensor) -> torch.Tensor:
        given = given.clone().requires_grad_()
        (first,) = torch.autograd.grad(one(given).float().pow(3).sum(), given, create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), given)[0].float()

    first, second = of_second_order(layer, inputs), of_second_order(wide, inputs.float())
    torch.testing.assert_close(first, second, rtol=0.1, atol=0.02 * float(second.abs().max()))
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(layer)(inputs), layer(inputs))


@torch.no_grad()
def test_what_is_not_emulated_is_left_to_torch():
    half, full = torch.randn(2, 8, dtype=torch.bfloat16), torch.randn(2, 8)
    of_half, of_full = nn.Parameter(half), nn.Parameter(full)
    assert is_emulated(half, of_half)
    assert not is_emulated(full, of_full)
    assert not is_emulated(full.half(), nn.Parameter(full.half()))
    assert not is_emulated(half, half), "a weight of another class, such as a quantised one"
    assert not is_emulated(half.to("meta"), of_half)
    with torch.autocast("cpu", torch.bfloat16):
        assert is_emulated(full, of_full)
        assert not is_emulated(full.double(), nn.Parameter(full.double()))
        with torch.autocast("cpu", enabled=False):
            assert not is_emulated(full, of_full)
    with torch.autocast("cpu", torch.float16):
        assert not is_emulated(full, of_full)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
@torch.no_grad()
def test_an_export_says_what_the_model_says():
    layer, inputs = HfViTLinear(8, 4, dtype=torch.bfloat16), torch.randn(2, 8, dtype=torch.bfloat16)
    exported = torch.export.export(layer, (inputs,))
    assert {node.meta["val"].dtype for node in exported.graph.nodes if "val" in node.meta} == {torch.bfloat16}
    traced = torch.jit.trace(layer, inputs)
    assert "aten::to" not in str(traced.inlined_graph)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@torch.no_grad()
def test_the_fused_gelu_of_bfloat16(approximate: str):
    torch.manual_seed(0)
    layer, inputs = HfViTLinear(64, 48, dtype=torch.bfloat16), torch.randn(5, 64, dtype=torch.bfloat16)
    assert can_fuse_gelu(layer, inputs)
    made = dense_gelu(layer, inputs, approximate)
    exact = nn.functional.gelu(copy.deepcopy(layer).double()(inputs.double()), approximate=approximate)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), exact, rtol=2**-8, atol=1e-6)  # half a last digit of bfloat16


def tiny() -> hf_vit.HfViTForImageClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return hf_vit.HfViTForImageClassification(hf_vit.HfViTConfig(image_size=16, patch_size=8, num_labels=3, **sizes))


def training_step(model, images: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(images, labels=torch.tensor([0, 2])).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: value.grad for name, value in model.named_parameters()}}


def assert_near(given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(given[name], value, rtol=0, atol=0.02 * float(value.abs().max()) + 1e-6, msg=name)


def test_a_training_step_of_a_model_with_checkpointing_too():
    torch.manual_seed(0)
    images, model, checkpointed = torch.randn(2, 3, 16, 16), tiny(), tiny()
    made = training_step(model, images)
    checkpointed.activation_checkpointing_enable()
    torch.testing.assert_close(training_step(checkpointed.train(), images), training_step(tiny().train(), images))
    exact = tiny()
    loss = exact(images, labels=torch.tensor([0, 2])).loss
    loss.backward()
    assert_near(made, {"loss": loss.detach(), **{name: value.grad for name, value in exact.named_parameters()}})


@pytest.mark.slow
def test_a_compiled_training_step():
    images, model = torch.randn(2, 3, 16, 16), tiny()
    model.compile(fullgraph=True)
    assert_near(training_step(model, images), training_step(tiny(), images))
    torch._dynamo.reset()
