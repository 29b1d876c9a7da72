"""Standardised kernels are kept in evaluation, and never outlive the weights they come from.

Every way of changing weights runs twice: the model must follow it, and a model whose kernels were kept for ever must
not, which shows that the check would notice.
"""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models.families import randomise

from hf_vit import HfHybridViTConfig, HfHybridViTModel
from hf_vit.models import linear_hf_vit
from hf_vit.models.resnet_hf_vit import StdConv2d

TOLERANCE = 1e-5


def make_model(seed: int = 0) -> HfHybridViTModel:
    config = HfHybridViTConfig(
        image_size=16,
        stage_depths=(1,),
        stem_width=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    return randomise(HfHybridViTModel(config), seed).eval()


@pytest.fixture
def model() -> HfHybridViTModel:
    return make_model()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 24, 24)  # not the nominal size, so that a position table is derived and kept too


@torch.no_grad()
def run(model, images: torch.Tensor) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(images.to(dtype)).last_hidden_state.float()


def stale_by(model, images: torch.Tensor) -> float:
    """How far the outputs are from those of a new model with these weights."""
    fresh = make_model(seed=9)
    fresh.load_state_dict(model.state_dict())
    fresh.to(next(model.parameters()).dtype).load_state_dict(model.state_dict())
    return float((run(model, images) - run(fresh, images)).abs().max())


def other_state(model) -> dict[str, torch.Tensor]:
    """The weights of a model that is like none before."""
    seed = int(torch.randint(100, 10_000, ()))
    return {name: value.clone() for name, value in make_model(seed).to(model.dtype).state_dict().items()}


@torch.no_grad()
def in_place(model) -> None:
    for name, parameter in model.named_parameters():
        if "stem" in name:
            parameter.add_(torch.randn_like(parameter))


def load_state_dict(model) -> None:
    model.load_state_dict(other_state(model))


def load_and_assign(model) -> None:
    model.load_state_dict(other_state(model), assign=True)


def data_then_mode(switch: str) -> Callable:
    def change(model) -> None:
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter))  # not counted by autograd's versions
        getattr(model, switch)()
        model.eval()

    return change


def data_replaced(model) -> None:
    for name, value in other_state(model).items():
        model.get_parameter(name).data = value


def step_with(make: Callable) -> Callable:
    """A training step in evaluation mode, so that no switch of mode helps."""

    def change(model) -> None:
        optimizer = make(model.parameters())
        model(torch.randn(2, 3, 16, 16)).last_hidden_state.square().mean().backward()
        optimizer.step()

    return change


def moved_there_and_back(model) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def parameter_replaced(model) -> None:
    """Another parameter at the same address and with the same version as the one before."""
    for module in model.modules():
        if isinstance(module, StdConv2d):
            memory = module.weight.detach().numpy()
            memory[...] = torch.randn(memory.shape).numpy()
            module.weight = torch.nn.Parameter(torch.from_numpy(memory))


CHANGES = {
    "in place": in_place,
    "load_state_dict": load_state_dict,
    "load_state_dict(assign=True)": load_and_assign,
    "data, then eval": data_then_mode("eval"),
    "data, then train and eval": data_then_mode("train"),
    "data replaced": data_replaced,
    "SGD": step_with(lambda parameters: torch.optim.SGD(parameters, lr=1.0, foreach=False)),
    "SGD foreach": step_with(lambda parameters: torch.optim.SGD(parameters, lr=1.0, foreach=True)),
    "SGD fused": step_with(lambda parameters: torch.optim.SGD(parameters, lr=1.0, fused=True)),
    "AdamW": step_with(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False)),
    "AdamW foreach": step_with(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True)),
    "AdamW fused": step_with(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True)),
    "parameter replaced": parameter_replaced,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_outputs_follow_every_change_of_weights(change, model, images):
    for _ in range(2):
        before = run(model, images)  # fills the cache
        change(model)
        assert stale_by(model, images) <= TOLERANCE
        assert not torch.allclose(run(model, images), before, atol=1e-3)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_check_notices_kernels_kept_for_ever(change, model, images, monkeypatch):
    kept: dict[int, torch.Tensor] = {}

    def for_ever(self: StdConv2d) -> torch.Tensor:
        if torch.is_grad_enabled() or self not in of_this_model:
            return self.standardized()
        return kept.setdefault(id(self), self.standardized())

    of_this_model = {module for module in model.modules() if isinstance(module, StdConv2d)}
    monkeypatch.setattr(StdConv2d, "kernel", for_ever)
    run(model, images)
    change(model)
    assert stale_by(model, images) > 1e-3


def kernels(model) -> list[torch.Tensor]:
    with torch.no_grad():
        return [module.kernel() for module in model.modules() if isinstance(module, StdConv2d)]


def test_kernels_are_computed_once_in_evaluation(model, images):
    run(model, images)
    first = kernels(model)
    run(model, images)
    assert all(one is other for one, other in zip(first, kernels(model), strict=True))
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in first)
    with torch.inference_mode():
        model(images)
    assert all(one is other for one, other in zip(first, kernels(model), strict=True))


def test_training_and_gradients_compute_them_anew(model, images):
    run(model, images)
    kept = model.embeddings.patch_embeddings.stem.root_conv
    assert kept.kernel() is not kept.kernel()
    model(images).last_hidden_state.sum().backward()
    assert all(module.weight.grad is not None for module in model.modules() if isinstance(module, StdConv2d))
    model.train()
    with torch.no_grad():
        assert kept.kernel() is not kept.kernel()


def test_cache_of_inference_mode_does_not_break_training(images, model):
    with torch.inference_mode():
        model(images)
    model(images).last_hidden_state.sum().backward()
    model.requires_grad_(False)
    leaf = images.clone().requires_grad_()
    model(leaf).last_hidden_state.sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("emulated", [False, True])
def test_moved_model_computes_in_its_dtype(emulated: bool, model, images, monkeypatch):
    """Where the processor only emulates bfloat16, in float32."""
    monkeypatch.setattr(linear_hf_vit, "EMULATES_BFLOAT16", emulated)
    run(model, images)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        used = torch.float32 if emulated and dtype == torch.bfloat16 else dtype
        assert all(kernel.dtype == used for kernel in kernels(model))
        assert model(images.to(dtype)).last_hidden_state.dtype == dtype
        assert stale_by(model, images) <= TOLERANCE
    run(model, images)
    moved_there_and_back(model)
    assert stale_by(model, images) <= TOLERANCE


@pytest.mark.gpu
def test_moved_to_another_device_and_back(model, images):
    expected = run(model, images)
    model.cuda()
    assert all(kernel.is_cuda for kernel in kernels(model))
    assert float((run(model, images.cuda()).cpu() - expected).abs().max()) <= 1e-3
    in_place(model)
    on_gpu = run(model, images.cuda()).cpu()
    model.cpu()
    assert stale_by(model, images) <= TOLERANCE
    assert float((run(model, images) - on_gpu).abs().max()) <= 1e-2


def test_weights_made_in_inference_mode_may_change(images):
    """Their versions are not counted, so that nothing may be kept."""
    with torch.inference_mode():
        model = make_model()
        run(model, images)
        for parameter in model.parameters():
            parameter.mul_(1.1).add_(torch.randn_like(parameter))
        found = run(model, images)
    fresh = make_model(seed=5)
    fresh.load_state_dict(model.state_dict())
    assert float((found - run(fresh, images)).abs().max()) <= TOLERANCE


def test_from_pretrained_and_saved_files(model, images, tmp_path: Path):
    run(model, images)
    model.save_pretrained(tmp_path)
    loaded = HfHybridViTModel.from_pretrained(tmp_path).eval()
    assert torch.equal(run(loaded, images), run(model, images))
    assert not [name for name in model.state_dict() if "cache" in name]
    in_place(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(run(HfHybridViTModel.from_pretrained(tmp_path).eval(), images), run(model, images))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_have_kernels_of_their_own(duplicate, model, images):
    expected = run(model, images)
    other = duplicate(model)
    assert torch.equal(run(other, images), expected)
    in_place(other)
    assert stale_by(other, images) <= TOLERANCE
    assert torch.equal(run(model, images), expected)
    in_place(model)
    assert stale_by(model, images) <= TOLERANCE


def test_cache_is_not_pickled(model, images):
    empty = len(pickle.dumps(model))
    run(model, images)
    assert len(pickle.dumps(model)) <= empty + 100


@torch.no_grad()
def test_functional_call_uses_the_given_weights(model, images):
    run(model, images)
    given = {name: torch.nn.Parameter(value) for name, value in make_model(seed=1).state_dict().items()}
    found = torch.func.functional_call(model, given, images).last_hidden_state
    assert torch.equal(found, run(make_model(seed=1), images))
    assert stale_by(model, images) <= TOLERANCE


@torch.no_grad()
def test_vmap_over_an_ensemble(images):
    convs = [StdConv2d(3, 4, 3).eval() for _ in range(3)]
    stacked = torch.stack([conv.weight for conv in convs])
    found = torch.vmap(lambda weight: torch.func.functional_call(convs[0], {"weight": weight}, images))(stacked)
    for conv, output in zip(convs, found, strict=True):
        torch.testing.assert_close(output, conv(images), rtol=0, atol=1e-5)


@torch.no_grad()
def test_compiled_model_follows_its_weights(model, images):
    run(model, images)  # a kept kernel must not be baked into the graph
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in (1, 2):
        model.load_state_dict(make_model(seed=seed).state_dict())
        found = compiled(images).last_hidden_state
        assert float((found - run(make_model(seed=seed), images)).abs().max()) <= TOLERANCE
    in_place(model)
    assert float((compiled(images).last_hidden_state - run(model, images)).abs().max()) <= TOLERANCE


@torch.no_grad()
def test_exported_model_follows_its_weights(model, images):
    run(model, images)
    exported = torch.export.export(model, (images,)).module()
    assert float((exported(images).last_hidden_state - run(model, images)).abs().max()) <= TOLERANCE
    exported.load_state_dict(make_model(seed=1).state_dict())
    assert float((exported(images).last_hidden_state - run(make_model(seed=1), images)).abs().max()) <= TOLERANCE
