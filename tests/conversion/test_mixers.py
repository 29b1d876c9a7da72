"""MLP-Mixers: the digits of Google's code and of timm's, and the way back bit for bit."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from originals.mixer import make_mixer, mixer_of_timm
from originals.pytorch import save_timm
from safetensors.torch import save_file
from timm.layers import GluMlp
from timm.models.mlp_mixer import Affine, ResBlock
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.errors import UserError
from hf_vit.models.modeling_hf_mixer import HfMixerForImageClassification, HfMixerModel
from hf_vit_cli.main import main


def shapes_of(arrays) -> dict[str, tuple[int, ...]]:
    return {key: value.shape for key, value in arrays.items()}


def test_every_stage_is_the_originals(golden: Path, tmp_path: Path):
    recording = np.load(golden / "mixer.io.npz")
    result = conversion.convert(golden / "mixer.ckpt.npz", tmp_path / "model", recording=golden / "mixer.io.npz")
    assert {one.array for one in result.verification.checks} == set(recording) - {"images"}
    assert not result.verification.skipped
    for one in result.verification.checks:
        assert one.tolerance <= (1e-10 if one.precision == "float64" else 1e-5 * 20)
    model = AutoModelForImageClassification.from_pretrained(result.output)
    assert type(model) is HfMixerForImageClassification
    images = torch.from_numpy(recording["images"]).permute(0, 3, 1, 2)
    with torch.no_grad():
        np.testing.assert_allclose(model(images).logits, recording["logits"], rtol=0, atol=1e-5)
        double = model.double()(images.double()).logits
    np.testing.assert_allclose(double, recording["logits_f64"], rtol=0, atol=1e-10)


def test_config_is_the_originals(golden: Path):
    facts = json.loads((golden / "mixer.json").read_text())
    model, config = facts["model"], conversion.plan(shapes_of(np.load(golden / "mixer.ckpt.npz"))).config
    assert (config.nominal_size, config.patch_stride) == (tuple(facts["image_size"]), tuple(model["patches"]))
    assert (config.hidden_size, config.num_hidden_layers) == (model["hidden_dim"], model["num_blocks"])
    assert config.token_intermediate_size == model["tokens_mlp_dim"]
    assert config.intermediate_size == model["channels_mlp_dim"]
    assert (config.hidden_act, config.layer_norm_eps) == ("gelu_pytorch_tanh", 1e-6)
    assert config.num_labels == model["num_classes"]


def test_the_command_tells_what_it_is(golden: Path, tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(golden / "mixer.ckpt.npz"), str(tmp_path / "model")])
    assert not ended.value.code
    told = "mixer: 3 layers, 64 wide, 32 across the tokens, patch 16x16, 64x64 px, 10 labels"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("name", ["golden", "headless", "not square", "below a prefix"])
def test_the_way_back_is_bit_for_bit(name: str, golden: Path, write_npz, tmp_path: Path):
    options: dict[str, Any] = {"image_size": (4, 6)} if name == "not square" else {}
    others = {
        "headless": {"labels": None},
        "not square": {"grid": (1, 3)},
        "below a prefix": {"prefix": "opt/target/"},
    }
    arrays = dict(np.load(golden / "mixer.ckpt.npz")) if name == "golden" else make_mixer(**others[name])
    result = conversion.convert(write_npz(arrays), tmp_path / "model", **options)
    conversion.export(result.output, tmp_path / "back", "vit_jax")
    back = np.load(tmp_path / "back/model.npz")
    arrays = {key.removeprefix("opt/target/"): array for key, array in arrays.items()}
    assert set(back) == set(arrays)
    for key, array in arrays.items():
        assert (back[key].dtype, back[key].shape) == (array.dtype, array.shape)
        assert back[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"resize_to": (64, 64)}, "An MLP-Mixer has no positions to resample and takes images of one size"),
        ({"num_heads": 4}, "An MLP-Mixer has no num_attention_heads; leave out --num-heads"),
        ({"pooling": "gap"}, "An MLP-Mixer has no pooling; leave out --pooling"),
        ({"hidden_act": "gelu"}, "files of mixer have hidden_act='gelu_pytorch_tanh'"),
        ({"image_size": (8, 8)}, "makes 2x4 = 8 patches of 4x2 px, but the token MLP has 4; sizes that fit: 8x4"),
    ],
)
def test_what_a_mixer_has_not_is_refused(options: dict[str, Any], told: str):
    with pytest.raises(UserError, match=re.escape(told)) as error:
        conversion.plan(shapes_of(make_mixer()), **options)
    assert "\n" not in str(error.value)


def test_a_grid_that_is_no_square_is_declared():
    shapes = shapes_of(make_mixer(grid=(1, 3)))
    with pytest.raises(UserError, match="the token MLP has rows for 3 patches, which make no square; declare"):
        conversion.plan(shapes)
    assert conversion.plan(shapes, image_size=(4, 6)).config.grid == (1, 3)


def hold(theirs: Any, ours: Any, side: int) -> None:
    """Tokens and logits in float64."""
    images = torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, given = theirs.double()(images), ours.double().eval()(images)
        torch.testing.assert_close(given.logits, wanted, rtol=0, atol=1e-10)
        tokens = ours.mixer(images).last_hidden_state
        torch.testing.assert_close(tokens, theirs.forward_features(images), rtol=0, atol=1e-10)


def test_a_mixer_of_timm(tmp_path: Path):
    """With its config: its GELU, its labels and its pixels; and alone, when the GELU is assumed."""
    model = mixer_of_timm()
    arguments = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "num_blocks": 2}
    saved = save_timm(model, tmp_path / "saved", model_args=arguments)
    result = conversion.convert(saved, tmp_path / "model")
    assert (result.plan.origin, result.plan.assumed, result.plan.config.hidden_act) == ("timm_mixer", {}, "gelu")
    hold(model, AutoModelForImageClassification.from_pretrained(result.output), 16)
    stored = json.loads((saved / "config.json").read_text())["pretrained_cfg"]
    assert list(AutoImageProcessor.from_pretrained(result.output).image_mean) == list(stored["mean"])
    save_file(model.float().state_dict(), tmp_path / "alone.safetensors")
    alone = conversion.convert(tmp_path / "alone.safetensors", tmp_path / "alone")
    assert set(alone.plan.assumed) == {"hidden_act", "processor", "image_size", "labels"}
    hold(model, AutoModelForImageClassification.from_pretrained(alone.output), 16)


def test_a_released_name_of_timm(tmp_path: Path):
    """Random weights in the place of the released ones, by the name that timm gives them."""
    model = timm.create_model("mixer_b16_224.goog_in21k_ft_in1k")
    torch.nn.init.normal_(model.head.weight, std=0.02)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    ours = hf_vit.from_hub(f"timm:mixer_b16_224.goog_in21k_ft_in1k@{tmp_path / 'weights.safetensors'}")
    variant = hf_vit.variant_config("Mixer-B/16", num_labels=1000)
    for name in ("hidden_size", "num_hidden_layers", "token_intermediate_size", "intermediate_size", "image_size"):
        assert getattr(ours.config, name) == getattr(variant, name)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(images).logits, model.eval()(images), rtol=0, atol=1e-5)


def test_others_of_timm_are_refused(tmp_path: Path):
    """Gated MLPs (gMixer) and affine norms (ResMLP) are other networks, whatever their keys."""
    gated = save_timm(mixer_of_timm("gmixer_24_224", mlp_layer=GluMlp), tmp_path / "gated")
    with pytest.raises(UserError, match="'gmixer_24_224' is none of mixer_"):
        conversion.convert(gated, tmp_path / "out")
    affine = mixer_of_timm("resmlp_12_224", block_layer=ResBlock, norm_layer=Affine, mlp_ratio=4)
    with pytest.raises(UserError, match="the checkpoint looks like part of a ViT of timm"):
        conversion.plan(shapes_of(affine.state_dict()))
    arguments = {"img_size": 16, "act_layer": "gelu_tanh"}
    tanh = save_timm(mixer_of_timm(), tmp_path / "tanh", model_args=arguments)
    with pytest.raises(UserError, match="gives timm's argument 'act_layer', which no MLP-Mixer here has"):
        conversion.convert(tanh, tmp_path / "out")
    bare = save_timm(mixer_of_timm(), tmp_path / "bare", model_args={"img_size": 16})
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"global_pool": "max", "model_args": {"img_size": 16}}))
    with pytest.raises(UserError, match="gives global_pool='max'; the MLP-Mixers here take the mean"):
        conversion.convert(bare, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mixer_without_head_becomes_the_bare_model():
    assert conversion.plan(shapes_of(make_mixer(labels=None))).model_class is HfMixerModel
