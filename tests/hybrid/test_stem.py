"""The ResNet stem against the slow reference, sizes of every kind, and what the original code prescribes."""

from typing import Any

import numpy as np
import pytest
import torch
from hybrid.reference import max_pool, original_names, stem_forward
from models.families import randomise
from timm.layers import GroupNormAct, StdConv2dSame
from timm.models.vision_transformer_hybrid import _resnetv2

from hf_vit import HfHybridViTConfig, HfHybridViTModel
from hf_vit.models.resnet_hf_vit import ResNetBottleneck, ResNetStem, StdConv2d, max_pool_same

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "stem_width": 32}


def make_stem(depths: tuple[int, ...], width: int = 32, seed: int = 0, **fields: Any) -> ResNetStem:
    stem = ResNetStem(HfHybridViTConfig(stage_depths=depths, stem_width=width, **fields))
    return randomise(stem, seed).double().eval()


def nhwc(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (34, 63), (7, 5), (1, 18)])
@pytest.mark.parametrize("depths", [(), (2,), (1, 2), (1, 1, 1)])
def test_stem_equals_the_slow_reference(depths: tuple[int, ...], size: tuple[int, int]):
    stem = make_stem(depths)
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = stem_forward(original_names(stem), nhwc(images))["features"]
    config = HfHybridViTConfig(stage_depths=depths)
    assert config.grid_of(*size) == expected.shape[1:3]
    with torch.no_grad():
        np.testing.assert_allclose(nhwc(stem(images)), expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(nhwc(stem(images.contiguous())), expected, rtol=0, atol=1e-10)  # cached kernels
    np.testing.assert_allclose(nhwc(stem(images)), expected, rtol=0, atol=1e-10)  # nothing is written in place
    np.testing.assert_allclose(nhwc(stem.train()(images)), expected, rtol=0, atol=1e-10)


def test_max_pool_of_any_size_sees_no_zeros_outside():
    """Behind a ReLU, as in the stem, nobody would notice."""
    for height, width in [(height, width) for height in range(1, 9) for width in range(1, 9)]:
        features = torch.randn(1, 2, height, width, dtype=torch.float64) - 5
        np.testing.assert_array_equal(nhwc(max_pool_same(features)), max_pool(nhwc(features)))


def test_input_is_not_written_to():
    stem, images = make_stem((2,)), torch.randn(1, 3, 16, 16, dtype=torch.float64)
    features = torch.randn(1, 128, 4, 4, dtype=torch.float64)
    given = images.clone(), features.clone()
    with torch.no_grad():
        stem(images)
        stem(images.contiguous(memory_format=torch.channels_last))
        stem.stages[0][1](features)
    assert torch.equal(images, given[0])
    assert torch.equal(features, given[1])


def test_gradients_of_the_standardised_convolution():
    conv = StdConv2d(3, 2, 3, 2, standardization="std").double()
    images = torch.randn(1, 3, 5, 4, dtype=torch.float64, requires_grad=True)

    def run(x, weight):
        return torch.func.functional_call(conv, {"weight": weight}, x)

    assert torch.autograd.gradcheck(run, (images, conv.weight))


def test_last_norm_scale_of_a_unit_begins_at_zero():
    model = HfHybridViTModel(HfHybridViTConfig(image_size=32, stage_depths=(2, 1), **TINY))
    units = [module for module in model.modules() if isinstance(module, ResNetBottleneck)]
    assert len(units) == 3
    for unit in units:
        assert not unit.norm3.weight.any()
        assert bool((unit.norm1.weight == 1).all())
        assert bool((unit.norm2.weight == 1).all())
        if unit.projection_norm is not None:
            assert bool((unit.projection_norm.weight == 1).all())
    # so that at first a unit without a projection is the identity on what a ReLU let through
    features = torch.rand(1, 128, 4, 4)
    torch.testing.assert_close(units[1](features), features, rtol=0, atol=0)


RENAMED = {"root_": "stem.", "projection_norm": "downsample.norm", "projection.": "downsample.conv."}


@torch.no_grad()
@pytest.mark.parametrize("of_timm", [False, True])
def test_stem_is_timms_where_the_formulas_meet(of_timm: bool):
    """timm divides by sqrt(var + 1e-8) and takes 1e-5 in its norms: so does the stem when told."""
    fields = {"group_norm_eps": 1e-5, "weight_standardization": "variance"} if of_timm else {}
    stem, theirs = make_stem((2, 1), width=64, **fields), _resnetv2((2, 1)).double().eval()
    state = {}
    for name, value in stem.state_dict().items():
        for ours, other in RENAMED.items():
            name = name.replace(ours, other)
        parts = name.split(".")
        if parts[0] == "stages":
            parts.insert(2, "blocks")
        state[".".join(parts)] = value
        if value.ndim == 4:
            value.mul_(1e-4 if of_timm else 1e4)
    theirs.load_state_dict(state)
    assert sum(isinstance(module, StdConv2dSame) for module in theirs.modules()) == 12
    for module in theirs.modules():
        if isinstance(module, GroupNormAct):
            assert module.eps == 1e-5
            module.eps = 1e-5 if of_timm else 1e-6
    for height, width in ((64, 64), (63, 50)):
        images = torch.randn(2, 3, height, width, dtype=torch.float64)
        torch.testing.assert_close(stem(images), theirs(images), rtol=0, atol=1e-10 if of_timm else 1e-7)
