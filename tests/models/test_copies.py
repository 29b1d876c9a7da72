"""Copies, replicas, moves and in-place changes: derived tables and bound methods never point at something stale."""

import copy
import pickle

import pytest
import torch
from models.families import Family, tensors_of
from torch import nn

# Those that differ in what is derived from parameters, or in which method is picked at construction.
ONLY_CHOICES = (
    *("default", "learned", "learned_2d", "sincos_1d", "sincos_2d", "relative", "no_position"),
    *("bicubic", "table_before_class_token", "gap", "map", "map_with_class_token", "causal_map_2d", "distillation"),
)
OTHER = (6, 5)  # not the nominal grid, so that learned tables are resampled


@pytest.fixture
def model(family: Family, choice: str):
    return family.build("model", choice, dtype=torch.float64)


@pytest.fixture
def images(family: Family, model):
    return family.images(model.config, grid=OTHER, dtype=torch.float64)


@torch.no_grad()
def changed(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "position" in name or "offset" in name or "token" in name:
            parameter.add_(0.3)


@torch.no_grad()
def test_deep_copy_and_pickle(model, images):
    model(images)  # fills the caches
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(other(images), model(images))
        changed(other)
        assert_same(other(images), fresh(other)(images))
    assert_same(model(images), fresh(model)(images))


@torch.no_grad()
def test_replicas_use_their_own_parameters(model, images):
    """What nn.DataParallel does on several devices, by hand: shallow copies whose parameters are replaced."""
    wanted_model = copy.deepcopy(model)
    changed(wanted_model)
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    parameters = dict(wanted_model.named_parameters())
    for prefix, module in model.named_modules():
        replica = replicas[module]
        for name, child in module._modules.items():
            replica._modules[name] = replicas.get(child)
        for name, parameter in module._parameters.items():
            own = f"{prefix}.{name}" if prefix else name
            setattr(replica, name, None if parameter is None else parameters[own].detach())
    assert_same(replicas[model](images), wanted_model(images))


def test_no_cached_table_outlives_a_change(model, images):
    with torch.no_grad():
        model(images)
        changed(model)
        assert_same(model(images), fresh(model)(images))
        model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})
        assert_same(model(images), fresh(model)(images))
    # Writing through .data is not counted by autograd's versions; a switch of mode is what such code does around it.
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    model.train()
    model.eval()
    with torch.no_grad():
        assert_same(model(images), fresh(model)(images))


def test_a_training_step_changes_what_evaluation_sees(model, images):
    with torch.no_grad():
        model(images)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sum(tensor.square().mean() for tensor in tensors_of(model(images))).backward()
    optimizer.step()
    with torch.no_grad():
        assert_same(model.eval()(images), fresh(model)(images))


def test_inference_mode(family: Family, choice: str):
    """Built, loaded or used under inference_mode, before and after normal use."""
    with torch.inference_mode():
        model = family.build("model", choice, dtype=torch.float64)
        images = family.images(model.config, grid=OTHER, dtype=torch.float64)
        first = model(images)
        assert_same(model(images), first)
    model = family.build("model", choice, dtype=torch.float64)
    images = images.clone()
    with torch.inference_mode():
        assert_same(model(images), first)
    with torch.no_grad():
        assert_same(model(images), first)
    model.train()
    sum(tensor.square().mean() for tensor in tensors_of(model(images))).backward()


def test_dtype_moves_do_not_mix_tables(family: Family, choice: str):
    model = family.build("model", choice)
    images = family.images(model.config, grid=OTHER)
    with torch.no_grad():
        wanted = model(images)
        model.bfloat16()(images)
        # Back in float32 with rounded weights: the tables must be those of the weights, not of the first call.
        assert_same(model.float()(images), fresh(model)(images))
        assert model(images).last_hidden_state.dtype == wanted.last_hidden_state.dtype


def test_resizing_keeps_what_is_frozen(model):
    model.requires_grad_(False)
    model.resize_to(
        image_size=tuple(2 * stride * side for stride, side in zip(model.config.patch_stride, OTHER, strict=True))
    )
    assert not any(parameter.requires_grad for parameter in model.parameters())


def fresh(model: nn.Module) -> nn.Module:
    """A new model with the same parameters, which has computed nothing yet."""
    other = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()
    other.load_state_dict(model.state_dict())
    return other


def assert_same(given, wanted) -> None:
    for left, right in zip(tensors_of(given), tensors_of(wanted), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
