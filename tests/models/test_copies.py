"""Copies, replicas, moves and in-place changes: a model answers by the weights it has now, never by older ones."""

import copy
import pickle

import pytest
import torch
from dense_heads import batch_for, build
from models.families import OTHERS, Family, assert_same_bits, tensors_of
from torch import nn
from transformers.initialization import no_init_weights

from hf_vit.training.tasks.dense import make_model_inputs

# Every kind of table, of pooling and of stem.
pytestmark = pytest.mark.choices(
    "learned_2d", "sincos_2d", "relative", "relative_bias", "map", "resnet_stem", "rotary_mixed"
)
OTHER = (6, 5)  # not the nominal grid, so that learned tables are resampled


@pytest.fixture
def model(family: Family, choice: str):
    return family.build("model", choice, dtype=torch.float64)


@pytest.fixture
def images(family: Family, model):
    return family.images(model.config, grid=OTHER, dtype=torch.float64)


@torch.no_grad()
def change(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "position" in name or "offset" in name or "token" in name or "root_conv" in name or "frequencies" in name:
            parameter.add_(0.3)


@torch.no_grad()
def assert_as_fresh(model: nn.Module, images: torch.Tensor) -> None:
    """A new model with the same numbers, which has computed nothing yet, gives the same."""
    with no_init_weights():
        other = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()
    other.load_state_dict(model.state_dict())
    assert_same_bits(model(images), other(images))


@torch.no_grad()
def test_copies_and_replicas_use_their_own_parameters(model, images):
    wanted = model(images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(other(images), wanted)
        change(other)
        assert_as_fresh(other, images)
    assert_same_bits(model(images), wanted)
    assert_same_bits(replica_of(model, dict(other.named_parameters()))(images), other(images))


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_replicas_of_other_networks(name: str):
    model = OTHERS[name].build("classification")
    images = OTHERS[name].images(model.config)
    assert_same_bits(replica_of(model, dict(model.named_parameters()))(images), model(images))


@pytest.mark.parametrize("head", ["detr", "deformable-detr"])
@torch.no_grad()
def test_replicas_of_detectors(head: str):
    model, _ = build("plain", head)
    pixel_values = make_model_inputs(model.eval(), batch_for(head))["pixel_values"]
    boxes = replica_of(model, dict(model.named_parameters(remove_duplicate=False)))(pixel_values).pred_boxes
    assert torch.equal(boxes, model(pixel_values).pred_boxes)


def replica_of(model: nn.Module, parameters: dict[str, nn.Parameter]) -> nn.Module:
    """What nn.DataParallel makes on each device, by hand: shallow copies whose parameters are replaced."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for prefix, module in model.named_modules():
        replica = replicas[module]
        for name, child in module._modules.items():
            replica._modules[name] = replicas.get(child)
        for name, parameter in module._parameters.items():
            full_name = f"{prefix}.{name}" if prefix else name
            setattr(replica, name, None if parameter is None else parameters[full_name].detach())
    return replicas[model]


def test_every_kind_of_change_is_seen(model, images):
    """After each forward pass in evaluation: in place, loaded, through `.data`, by an optimiser, by a dtype."""

    def through_data() -> None:
        for parameter in model.parameters():
            parameter.data.mul_(0.5)  # not counted by autograd's versions

    def optimiser_step() -> None:
        optimiser = torch.optim.SGD(model.train().parameters(), lr=0.1)
        sum(tensor.square().mean() for tensor in tensors_of(model(images))).backward()
        optimiser.step()
        model.eval()

    changes = (
        lambda: change(model),
        lambda: model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()}),
        through_data,
        optimiser_step,
        lambda: model.bfloat16()(images.bfloat16()),
        lambda: model.double(),
    )
    for apply in changes:
        with torch.no_grad():
            model(images.to(model.dtype))
        apply()
        assert_as_fresh(model, images.to(model.dtype))


def test_inference_mode(family: Family, choice: str):
    """Built, loaded or used under inference_mode, before and after normal use."""
    with torch.inference_mode():
        model = family.build("model", choice, dtype=torch.float64)
        images = family.images(model.config, grid=OTHER, dtype=torch.float64)
        first = model(images)
        assert_same_bits(model(images), first)
    model, images = family.build("model", choice, dtype=torch.float64), images.clone()
    with torch.inference_mode():
        assert_same_bits(model(images), first)
    with torch.no_grad():
        assert_same_bits(model(images), first)
    sum(tensor.square().mean() for tensor in tensors_of(model.train()(images))).backward()


def test_resizing_keeps_what_is_frozen(family: Family):
    model = family.build("model").requires_grad_(False)
    size = tuple(2 * stride * side for stride, side in zip(model.config.patch_stride, OTHER, strict=True))
    model.resize_to(image_size=size)
    assert model.config.image_size == size
    assert not any(parameter.requires_grad for parameter in model.parameters())
