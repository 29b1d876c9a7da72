"""HfViTBackbone: its maps are the model's hidden states, its pyramid is ViTDet's, its folders load everywhere."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from models.families import FAMILIES, OTHERS, randomise
from torch.nn import functional as F
from transformers import AutoBackbone, AutoConfig

import hf_vit
from hf_vit import HfViTBackbone, HfViTForImageClassification, HfViTModel

# How maps of other choices are read: models/test_forward.py.
CHOICES = {
    "token": {}, "gap": {"pooling": "gap", "position_embedding": "sincos_2d"},
    "map": {"pooling": "map", "representation_size": 8},
    "causal distilled": {"is_causal": True, "use_distillation_token": True},
    "relative, layer scale": {"position_embedding": "relative", "layer_scale_init_value": 0.1},
    "shared layers": {"num_hidden_groups": 2, "position_embedding": "learned_2d"}, "hybrid": {"family": "HfHybridViT"},
    "axial": {"family": "HfAxialViT"}, "local": {"family": "HfLocalViT"},
    "rotary": {"rotary_embedding": "axial", "position_embedding": "none"},
}  # fmt: skip


def classes(config) -> tuple[type, type, type]:
    """(backbone, model, classifier) of a config's family."""
    family = type(config).__name__.removesuffix("Config")
    return tuple(getattr(hf_vit, family + kind) for kind in ("Backbone", "Model", "ForImageClassification"))


def expected_maps(model: HfViTModel, pixel_values: torch.Tensor) -> list[torch.Tensor]:
    """Written out place by place from the model's own hidden states."""
    config, outputs = model.config, model(pixel_values, output_hidden_states=True)
    h, w = (side // patch for side, patch in zip(pixel_values.shape[2:], config.patch_stride, strict=True))
    first = 0 if config.is_causal else config.num_special_tokens
    maps = []
    for hidden_state in outputs.hidden_states:
        normed = F.layer_norm(
            hidden_state, (config.hidden_size,), model.layernorm.weight, model.layernorm.bias, config.layer_norm_eps
        )
        feature_map = torch.zeros(pixel_values.shape[0], config.hidden_size, h, w)
        for y in range(h):
            for x in range(w):
                feature_map[:, :, y, x] = normed[:, first + y * w + x]
        maps.append(feature_map)
    return maps


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
@torch.no_grad()
def test_maps_are_the_models_hidden_states(choice, tiny_config, tmp_path):
    backbone_class, model_class, _ = classes(tiny_config(**choice))
    model = model_class(tiny_config(**choice)).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    stages = ["stem", "stage1", "stage2", "stage3", "stage4"]
    backbone, info = backbone_class.from_pretrained(tmp_path, out_features=stages, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert backbone.channels == [32] * 5
    pixel_values = torch.randn(2, 3, 48, 80)  # neither square nor the nominal 64 px
    maps = backbone(pixel_values).feature_maps
    assert [tuple(feature_map.shape) for feature_map in maps] == [(2, 32, 3, 5)] * 5
    for ours, reference in zip(maps, expected_maps(model, pixel_values), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-5)


@torch.no_grad()
def test_selection_norm_and_tokens(tiny_config):
    pixel_values = torch.randn(1, 3, 64, 64)
    backbone = HfViTBackbone(tiny_config(out_indices=[0, -2], apply_layernorm=False, reshape_hidden_states=False))
    outputs = backbone.eval()(pixel_values, output_hidden_states=True)
    assert backbone.out_features == ["stem", "stage3"]
    assert torch.equal(outputs.feature_maps[0], outputs.hidden_states[0])
    assert torch.equal(outputs.feature_maps[1], outputs.hidden_states[3])
    assert outputs.feature_maps[1].shape == (1, 17, 32)  # the class token is among them
    assert len(outputs.hidden_states) == 5
    assert "hidden_states" not in backbone(pixel_values)
    backbone.out_features = ["stage4"]
    assert torch.equal(backbone(pixel_values).feature_maps[0], outputs.hidden_states[4])
    assert HfViTBackbone(tiny_config()).out_features == ["stage4"]


@pytest.mark.parametrize("family", FAMILIES | OTHERS)
@torch.no_grad()
def test_strides_are_those_of_the_maps(family):
    """Of stages that are counted from the end."""
    tiny = (FAMILIES | OTHERS)[family]
    backbone = tiny.build("backbone", out_indices=[-2, -1])
    images = tiny.images(backbone.config)
    maps = backbone(images).feature_maps
    assert backbone.strides == [images.shape[2] // each.shape[2] for each in maps]
    assert backbone.channels == [each.shape[1] for each in maps]


@pytest.mark.parametrize("choice", ["token", "map", "hybrid", "axial", "local"])
def test_every_parameter_of_a_pyramid_learns_and_checkpointing_changes_nothing(choice, tiny_config):
    pixel_values = torch.randn(2, 3, 64, 64)
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        config = tiny_config(**CHOICES[choice], use_feature_pyramid=True, fpn_hidden_size=8)
        backbone = classes(config)[0](config).train()
        randomise(backbone)
        if checkpointing:
            backbone.activation_checkpointing_enable()
        sum(feature_map.pow(3).sum() for feature_map in backbone(pixel_values).feature_maps).backward()
        # The class token leaves the last stage's map by way of attention alone: its gradient is there, and small.
        assert all(parameter.grad is not None for parameter in backbone.parameters())
        zero = [name for name, parameter in backbone.named_parameters() if not parameter.grad.abs().sum()]
        assert not zero
        gradients.append({name: parameter.grad for name, parameter in backbone.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def norm(feature_map: torch.Tensor, module: torch.nn.LayerNorm) -> torch.Tensor:
    mean = feature_map.mean(dim=1, keepdim=True)
    variance = feature_map.var(dim=1, keepdim=True, unbiased=False)
    scaled = (feature_map - mean) / torch.sqrt(variance + module.eps)
    return scaled * module.weight[:, None, None] + module.bias[:, None, None]


@torch.no_grad()
def test_pyramid_is_the_papers_formula(tiny_config):
    """arXiv 2203.16527, section 3, for a patch of 16 px, from the functional operations."""
    config = tiny_config(use_feature_pyramid=True, fpn_hidden_size=12)
    backbone = HfViTBackbone(config).double().eval()
    randomise(backbone)
    assert backbone.channels == [12] * 4
    pixel_values = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    plain = HfViTBackbone(tiny_config()).double().eval()
    plain.load_state_dict({k: v for k, v in backbone.state_dict().items() if not k.startswith("pyramid.")})
    last = plain(pixel_values).feature_maps[0]
    up, levels = F.conv_transpose2d, backbone.pyramid.levels
    first, middle, _, second = levels[0].resize
    quarter = up(last, first.weight, first.bias, stride=2)
    quarter = up(F.gelu(norm(quarter, middle)), second.weight, second.bias, stride=2)
    eighth = up(last, levels[1].resize[0].weight, levels[1].resize[0].bias, stride=2)
    scales = [quarter, eighth, last, F.max_pool2d(last, 2)]
    maps = backbone(pixel_values).feature_maps
    assert [tuple(m.shape) for m in maps] == [(2, 12, 16, 24), (2, 12, 8, 12), (2, 12, 4, 6), (2, 12, 2, 3)]
    for level, scale, ours in zip(levels, scales, maps, strict=True):
        reference = norm(F.conv2d(scale, level.projection.weight), level.projection_norm)
        reference = norm(F.conv2d(reference, level.convolution.weight, padding=1), level.convolution_norm)
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)


@torch.no_grad()
def test_pyramid_has_the_same_strides_for_every_patch(tiny_config):
    """And keeps the rest of an odd grid."""
    odd = (16, 48), [(4, 12), (2, 6), (1, 3), (1, 2)]
    for patch_size in (2, 4, 8, 16, 32):
        backbone = HfViTBackbone(tiny_config(patch_size=patch_size, use_feature_pyramid=True, fpn_hidden_size=8)).eval()
        for size, shapes in (((96, 64), [(24, 16), (12, 8), (6, 4), (3, 2)]), *([odd] if patch_size == 16 else [])):
            assert [tuple(m.shape[2:]) for m in backbone(torch.randn(1, 3, *size)).feature_maps] == shapes


@torch.no_grad()
def test_pyramid_of_a_plain_checkpoint_is_new_and_initialised(tiny_config, tmp_path):
    HfViTForImageClassification(tiny_config(hidden_size=64)).save_pretrained(tmp_path / "plain")
    backbone, info = HfViTBackbone.from_pretrained(
        tmp_path / "plain", use_feature_pyramid=True, output_loading_info=True
    )
    assert info["missing_keys"] == {name for name in backbone.state_dict() if name.startswith("pyramid.")}
    assert not info["unexpected_keys"]
    first = backbone.pyramid.levels[0].resize[0]
    assert first.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert not first.bias.any()
    raised = HfViTBackbone(tiny_config(hidden_size=256, use_feature_pyramid=True)).pyramid.levels[1].resize
    assert raised(torch.randn(4, 256, 8, 8)).std().item() == pytest.approx(1.0, rel=0.05), "it keeps the variance"


@torch.no_grad()
def test_another_size_resamples_and_a_pyramid_stays_with_its_patch(tiny_config, tmp_path):
    HfViTModel(tiny_config()).save_pretrained(tmp_path / "plain")
    backbone = HfViTBackbone.from_pretrained(tmp_path / "plain", image_size=(32, 96), patch_size=8)
    assert backbone.config.grid == (4, 12)
    assert backbone(torch.randn(1, 3, 32, 96)).feature_maps[0].shape == (1, 32, 4, 12)
    with pytest.raises(ValueError, match=r"needs patch_size=16, got 8; load .* patch_size=8 and use_feature_pyramid"):
        HfViTBackbone.from_pretrained(tmp_path / "plain", patch_size=8, use_feature_pyramid=True)
    built = HfViTBackbone(tiny_config(use_feature_pyramid=True))
    with pytest.raises(ValueError, match=r"needs patch_size=16, got 8"):
        built.resize_to(patch_size=8)
    assert built.config.patch_size == 16
    assert built.vit.embeddings.patch_embeddings.projection.weight.shape[2:] == (16, 16), "before anything changes"
    built.config.out_features = ["stage1", "stage4"]
    with pytest.raises(StrictDataclassError, match="one stage"):
        HfViTBackbone(built.config)
    backbone.save_pretrained(tmp_path / "patch8")  # the remedy that the message names
    pyramid = HfViTBackbone.from_pretrained(tmp_path / "patch8", use_feature_pyramid=True)
    assert [m.shape[2] for m in pyramid(torch.randn(1, 3, 32, 96)).feature_maps] == [8, 4, 2, 1]


def test_maps_of_a_stem_are_of_one_size(tiny_config):
    backbone = hf_vit.HfHybridViTBackbone(tiny_config(family="HfHybridViT", stem_stages=(1,))).eval()
    images, mask = torch.randn(2, 3, 64, 64), torch.ones(2, *backbone.config.grid)
    mask[1, 1:] = 0
    with pytest.raises(ValueError, match=r"patch_attention_mask cannot be combined with stem_stages=\(1,\)"):
        backbone(images, patch_attention_mask=mask)


@torch.no_grad()
def test_a_shortened_model_has_the_stages_of_its_layers(family, tiny_config, tmp_path):
    """`num_hidden_layers` by keyword is set after the config was made, and was."""
    backbone_class, model_class, _ = classes(tiny_config(family))
    model_class(tiny_config(family)).save_pretrained(tmp_path / "long")
    model = model_class.from_pretrained(tmp_path / "long", num_hidden_layers=2)
    assert model.config.stage_names == ["stem", "stage1", "stage2"]
    model.save_pretrained(tmp_path / "short")
    pixel_values = torch.randn(1, 3, 64, 64)
    (wanted,) = backbone_class.from_pretrained(tmp_path / "long", out_features=["stage2"])(pixel_values).feature_maps
    for backbone in (
        backbone_class.from_pretrained(tmp_path / "long", num_hidden_layers=2),
        backbone_class.from_pretrained(tmp_path / "short"),
    ):
        assert (backbone.out_features, backbone.out_indices, backbone.channels) == (["stage2"], [2], [32])
        assert torch.equal(backbone(pixel_values).feature_maps[0], wanted)
    backbone_class(tiny_config(family, out_features=["stage3"])).save_pretrained(tmp_path / "third")
    with pytest.raises(StrictDataclassError, match=r"'stage2'\] got \['stage3'\]"):
        model_class.from_pretrained(tmp_path / "third", num_hidden_layers=2)


@pytest.mark.parametrize("family", ["hf_bit", "hf_axial_resnet"])
def test_a_root_alone_is_no_backbone(family: str) -> None:
    backbone = AutoBackbone.from_config(AutoConfig.for_model(family, stage_depths=()))
    with pytest.raises(ValueError, match=r"stage_depths=\(\) has no stages; give at least one"):
        backbone(torch.zeros(1, 3, 32, 32))
