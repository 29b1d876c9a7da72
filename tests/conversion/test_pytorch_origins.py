"""Models of transformers and timm give the same numbers after their conversion; what cannot be told is said."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from originals.google import shapes_of
from originals.pytorch import (
    bit_of_timm,
    bit_of_transformers,
    hybrid_of_timm,
    largest,
    load,
    mixer_of_timm,
    of_timm,
    of_transformers,
    old_spelling,
    save_timm,
    vit_hybrid_parts,
)
from safetensors.torch import load_file, save_file
from timm.layers import BatchNormAct2d, GluMlp
from timm.models.mlp_mixer import Affine, ResBlock
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import AutoImageProcessor, ViTImageProcessor, ViTModel

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.conversion.readers import Companions
from hf_vit.errors import UserError

# As the golden tests: a hybrid normalises again and again, and float32 rounds otherwise on other processors.
FLOAT32 = {"hf_vit": 1e-5, "hf_hybrid_vit": 6e-5, "hf_mixer": 1e-5, "hf_bit": 6e-5}


def convert(source: Path, **options: Any) -> Any:
    return conversion.convert(source, source.with_name(f"{source.name}.out"), **options)


@torch.no_grad()
def hold(model: Any, ours: Any, size: tuple[int, int], tokens: Callable, outcome: Callable, channels: int = 3) -> None:
    """Tokens and outcome (logits or pooled) agree in both precisions."""
    for dtype, tolerance in {torch.float64: 1e-10, torch.float32: FLOAT32[ours.config.model_type]}.items():
        model.to(dtype), ours.to(dtype)
        images = torch.randn(2, channels, *size, dtype=torch.float64).to(dtype)
        output = ours.base_model(images)
        assert largest(output.last_hidden_state, tokens(model, images)) <= tolerance
        found = ours(images)
        found = found.logits if hasattr(ours, "classifier") else found.pooler_output
        assert largest(found, outcome(model, images)) <= tolerance


def transformers_tokens(model: Any, images: torch.Tensor) -> torch.Tensor:
    return model.base_model(images).last_hidden_state


def transformers_outcome(model: Any, images: torch.Tensor) -> torch.Tensor:
    output = model(images)
    if hasattr(output, "logits"):
        return output.logits
    pooled = getattr(output, "pooler_output", None)
    return model.base_model(images).last_hidden_state[:, 0] if pooled is None else pooled


def without_pooler(config: Any) -> nn.Module:
    return ViTModel(config, add_pooling_layer=False)


# Name -> (model, ignored keys by reason, what else the config must say).
TRANSFORMERS = {
    "classifier": (lambda: of_transformers("ViTForImageClassification"), {}, {"hidden_act": "gelu"}),
    "model": (lambda: of_transformers("ViTModel"), {}, {"representation_size": 24}),
    "no pooler": (lambda: of_transformers("ViTModel", without_pooler), {}, {"representation_size": None}),
    "wide pooler": (lambda: of_transformers("ViTModel", pooler_output_size=9), {}, {"representation_size": 9}),
    "other constants": (lambda: of_transformers("ViTForImageClassification", hidden_act="gelu_new", layer_norm_eps=0.01,
        qkv_bias=False), {}, {"hidden_act": "gelu_new", "layer_norm_eps": 0.01, "qkv_bias": False}),
    "rectangular": (lambda: of_transformers("ViTForImageClassification", image_size=[8, 18], patch_size=[4, 6]), {},
        {"image_size": (8, 18), "patch_size": (4, 6)}),
    "masked": (lambda: of_transformers("ViTForMaskedImageModeling", encoder_stride=4),
        {"mask token of masked image modelling": 1, "decoder of masked image modelling": 2}, {}),
    "msn": (lambda: of_transformers("ViTMSNForImageClassification"), {}, {"layer_norm_eps": 1e-6}),
    "deit with two heads": (lambda: of_transformers("DeiTForImageClassificationWithTeacher"), {},
        {"use_distillation_token": True, "has_distillation_head": True}),
    "deit with one head": (lambda: of_transformers("DeiTForImageClassification"), {}, {"use_distillation_token": True,
        "has_distillation_head": False}),
    "deit model": (lambda: of_transformers("DeiTModel"), {}, {"representation_size": 24}),
}  # fmt: skip


def assert_loaded_as_converted(folder: Path, result: conversion.ConversionResult) -> None:
    """`from_hub` converts in memory: the same class and weights, and the folder stays as it was."""
    before, loaded = sorted(folder.iterdir()), hf_vit.from_hub(folder)
    assert (type(loaded), loaded.training) == (result.plan.model_class, False)
    state = load(result).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_models_of_transformers(case: str, tmp_path: Path):
    """From both spellings of the keys, which are two files and make the same model."""
    build, ignored, fields = TRANSFORMERS[case]
    model, states = build(), []
    for spelling in ("old", "new"):
        model.float().save_pretrained(tmp_path / spelling, save_original_format=spelling == "old")
        result = convert(tmp_path / spelling)
        assert {name: getattr(result.plan.config, name) for name in fields} == fields
        reasons = list(result.plan.ignored.values())
        assert {reason: reasons.count(reason) for reason in reasons} == ignored
        size = tuple(model.base_model.embeddings.image_size)
        hold(model, load(result), size, transformers_tokens, transformers_outcome)
        states.append(load(result).state_dict())
        if "msn" not in case:
            keys = load_file(tmp_path / spelling / "model.safetensors")
            assert any(".attention.attention.query." in key for key in keys) == (spelling == "old")
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert_loaded_as_converted(tmp_path / "old", result)


@torch.no_grad()
def test_other_sizes_are_resampled_as_transformers_does(tmp_path: Path):
    model = of_transformers("ViTModel")
    model.save_pretrained(tmp_path / "saved")
    model.double()
    ours = load(convert(tmp_path / "saved")).double()
    images = torch.randn(1, 3, 20, 24, dtype=torch.float64)
    expected = model(images, interpolate_pos_encoding=True).last_hidden_state
    assert largest(ours(images).last_hidden_state, expected) <= 1e-10
    resized = conversion.convert(tmp_path / "saved", tmp_path / "resized", resize_to=(20, 24))
    assert largest(load(resized).double()(images).last_hidden_state, expected) <= 1e-6  # stored in float32


def test_mae_of_transformers(tmp_path: Path):
    """Its encoder sees all patches here; transformers masks none with a ratio of 0, in the order that noise gives."""
    model = of_transformers(
        "ViTMAEForPreTraining", mask_ratio=0.0, decoder_hidden_size=16, decoder_num_attention_heads=2
    )
    model.save_pretrained(tmp_path / "saved")
    result = convert(tmp_path / "saved")
    assert set(result.plan.ignored.values()) == {"decoder of masked image modelling"}
    noise = torch.arange(9.0).expand(2, 9)
    hold(
        model,
        load(result),
        (12, 12),
        lambda model, images: model.vit(images, noise=noise).last_hidden_state,
        lambda model, images: model.vit(images, noise=noise).last_hidden_state[:, 0],
    )


@pytest.mark.parametrize("form", ["float16", "bfloat16", "parts", "pytorch_model.bin"])
def test_half_precision_parts_and_pytorch_files(form: str, tmp_path: Path):
    model = of_transformers("ViTForImageClassification").to(getattr(torch, form, torch.float32))
    model.save_pretrained(tmp_path / "saved", max_shard_size="10KB" if form == "parts" else "5GB")
    assert (len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1) == (form == "parts")
    if form.endswith(".bin"):
        (tmp_path / "saved" / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "saved" / form)
    result = convert(tmp_path / "saved")
    assert not result.rounded
    hold(model, load(result), (12, 12), transformers_tokens, transformers_outcome)  # which widens theirs, too


def test_file_without_config_says_what_is_assumed(tmp_path: Path):
    model = of_transformers("ViTForImageClassification", hidden_size=64, num_attention_heads=1)
    model.save_pretrained(tmp_path / "saved")
    result = convert(tmp_path / "saved" / "model.safetensors")
    assert (
        "assumed, as the checkpoint does not record it: heads of 64 (16 heads at widths of 1152, 1280, 1408, 1664 and "
        "1792); the exact GELU; eps 1e-12" in conversion.assumption(result.plan)
    )
    facts = json.loads((result.output / "facts.json").read_text())[0]["values"]
    assert set(facts["assumed"]) == {
        *("num_attention_heads", "hidden_act", "layer_norm_eps", "processor", "image_size", "labels")
    }
    hold(model, load(result), (12, 12), transformers_tokens, transformers_outcome)
    assert set(convert(tmp_path / "saved").plan.assumed) == {"processor"}
    ViTImageProcessor().save_pretrained(tmp_path / "saved")
    with_config = convert(tmp_path / "saved", force=True)
    assert not with_config.plan.assumed
    assert conversion.assumption(with_config.plan) is None


@pytest.mark.parametrize(
    ("name", "width"),
    [("ViTForImageClassification", 1280), ("CLIPVisionModel", 1280), ("deit3", 1280), ("SiglipVisionModel", 1536)],
)
def test_a_file_without_config_has_the_heads_of_released_models(name: str, width: int):
    """16 at a width of 1280, as ViT-H/14 of Google, CLIP, MAE, I-JEPA and DeiT III, and in the largest SigLIP 2."""
    with torch.device("meta"):
        if name == "deit3":
            model = timm.create_model("deit3_huge_patch14_224", depth=1)
        else:
            made = getattr(transformers, name)
            model = made(made.config_class(hidden_size=width, num_attention_heads=16, num_hidden_layers=1))
    spell = {"ViTForImageClassification": old_spelling, "deit3": lambda key: re.sub(r"ls(.)\.gamma", r"gamma_\1", key)}
    shapes = {spell.get(name, str)(key): tuple(value.shape) for key, value in model.state_dict().items()}
    assert conversion.plan(shapes).config.num_attention_heads == 16


def test_what_a_bare_file_does_not_say_is_declared(tmp_path: Path, command):
    model = of_timm(global_pool="avg", fc_norm=False, act_layer="quick_gelu")
    torch.save(model.state_dict(), tmp_path / "model.pth")
    options = {"num_heads": 3, "hidden_act": "quick_gelu", "pooling": "gap"}
    result = convert(tmp_path / "model.pth", **options)
    assert set(result.plan.assumed) == {"layer_norm_eps", "position_embedding", "processor", "image_size", "labels"}
    hold(model, load(result), (12, 12), timm_tokens, timm_outcome)
    with pytest.raises(UserError, match=r"do not record the number of attention heads; give it with --num-heads"):
        conversion.convert(tmp_path / "model.pth", tmp_path / "out")
    with pytest.raises(UserError, match="hidden_size=24 is not divisible by num_attention_heads=5"):
        conversion.convert(tmp_path / "model.pth", tmp_path / "out", **options | {"num_heads": 5})
    save_timm(model, tmp_path / "folder")
    with pytest.raises(UserError, match=r"--pooling token contradicts the checkpoint: config.json says pooling='gap'"):
        conversion.convert(tmp_path / "folder", tmp_path / "out", **options | {"pooling": "token"})
    report = tmp_path / "report.json"
    words = (tmp_path / "model.pth", tmp_path / "out", "--report", report)
    code, out, err = command("convert", *words, "--num-heads", 3, "--hidden-act", "quick_gelu")
    assert (code, "assumed" in out) == (0, False)
    assert "pooling by the class token if there is one" in err
    assumed = {"layer_norm_eps", "position_embedding", "pooling", "processor", "image_size", "labels"}
    assert set(json.loads(report.read_text())["assumed"]) == assumed


def test_file_that_may_be_ours_needs_its_config(tmp_path: Path):
    model = of_transformers("ViTForImageClassification", hidden_size=64, num_attention_heads=1)
    model.save_pretrained(tmp_path / "saved", save_original_format=False)
    with pytest.raises(UserError, match="a ViT of transformers 5 and one of hf_vit have the same keys"):
        convert(tmp_path / "saved" / "model.safetensors")


def timm_tokens(model: Any, images: torch.Tensor) -> torch.Tensor:
    return model.forward_features(images)


def timm_outcome(model: Any, images: torch.Tensor) -> torch.Tensor:
    return model(images)


# Name -> (model, what the config must say).
TIMM = {
    "token": (of_timm, {"pooling": "token", "hidden_act": "gelu", "layer_norm_eps": 1e-6}),
    "features": (lambda: of_timm(num_classes=0), {"pooling": "token"}),
    "gap": (lambda: of_timm(global_pool="avg", fc_norm=False, class_token=False, qkv_bias=False), {"pooling": "gap",
        "has_class_token": False, "qkv_bias": False}),
    "gap beside a token": (lambda: of_timm(global_pool="avg", fc_norm=False), {"pooling": "gap",
        "has_class_token": True}),
    "map": (lambda: of_timm(global_pool="map", class_token=False), {"pooling": "map"}),
    "deit3": (lambda: of_timm("deit3_small_patch16_224", no_embed_class=True, init_values=1e-4),
        {"position_on_class_token": False, "layer_scale_init_value": 1e-5}),
    "distilled": (lambda: of_timm("deit_tiny_distilled_patch16_224"), {"use_distillation_token": True,
        "has_distillation_head": True}),
    "tanh": (lambda: of_timm(act_layer="gelu_tanh"), {"hidden_act": "gelu_pytorch_tanh"}),
    "one channel": (lambda: of_timm(in_chans=1), {"num_channels": 1}),
    "rectangular": (lambda: of_timm(img_size=(8, 16)), {"image_size": (8, 16)}),
    "hybrid": (hybrid_of_timm, {"stage_depths": (2, 1), "weight_standardization": "variance"}),
    "pixels left over": (lambda: of_timm(img_size=14), {"image_size": 14, "grid": (3, 3)}),
    "hybrid of patches": (lambda: hybrid_of_timm((2,), 2), {"stage_depths": (2,), "stem_patch_size": 2}),
    "hybrid of an odd size": (lambda: hybrid_of_timm(img_size=36), {"image_size": 36, "grid": (5, 5)}),
    "hybrid of a root": (lambda: hybrid_of_timm((), 2), {"stage_depths": (), "stem_patch_size": 2}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:images of 14x14 px hold 3x3 whole patches:UserWarning")
@pytest.mark.parametrize("case", TIMM)
def test_models_of_timm(case: str, tmp_path: Path):
    build, fields = TIMM[case]
    model = build()
    if case == "rectangular":
        model.pretrained_cfg["crop_mode"] = "squash"
    result = convert(save_timm(model, tmp_path / "saved"))
    assert not result.plan.ignored
    assert not result.plan.assumed
    assert {name: getattr(result.plan.config, name) for name in fields} == fields
    assert_loaded_as_converted(tmp_path / "saved", result)
    size = model.patch_embed.img_size
    hold(model, load(result), size, timm_tokens, timm_outcome, result.plan.config.num_channels)


def test_attention_pooling_beside_a_token(tmp_path: Path):
    """timm pools the patches alone, unless `pool_include_prefix` says otherwise; the MAP head here reads all tokens."""
    alone = of_timm(global_pool="map", embed_dim=64, num_heads=1)
    save_timm(alone, tmp_path / "alone")
    for source in (tmp_path / "alone", tmp_path / "alone" / "model.safetensors"):
        with pytest.raises(UserError, match="timm's attention pooling skips cls_token"):
            convert(source)
    arguments = {"pool_include_prefix": True}
    together = of_timm(global_pool="map", **arguments)
    result = convert(save_timm(together, tmp_path / "together", model_args=arguments))
    hold(together, load(result), (12, 12), timm_tokens, timm_outcome)
    back = conversion.export(result.output, tmp_path / "back", "timm")
    assert back.difference <= 1e-5
    mean = of_timm(global_pool="avg", fc_norm=False, **arguments)
    with pytest.raises(UserError, match="argument pool_include_prefix=True of timm, which hf_vit does not support"):
        convert(save_timm(mean, tmp_path / "mean", model_args=arguments))


@torch.no_grad()
def test_old_spelling_of_a_representation_layer(tmp_path: Path):
    """Of timm before version 0.6: `pre_logits.fc`, a tanh layer before the head."""
    model = of_timm(embed_dim=64, num_heads=1).double()
    layer = nn.Linear(64, 64).double()
    state = model.state_dict() | {f"pre_logits.fc.{name}": value for name, value in layer.state_dict().items()}
    torch.save(state, tmp_path / "model.pth")
    ours = load(convert(tmp_path / "model.pth")).double()
    images = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    expected = model.head(torch.tanh(layer(model.forward_features(images)[:, 0])))
    assert largest(ours(images).logits, expected) <= 1e-6  # stored in float32


def test_former_hybrids_of_transformers(tmp_path: Path):
    model = vit_hybrid_parts()
    pixels = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}, "image_mean": [0.4, 0.5, 0.6]}
    model.save(tmp_path / "saved", **pixels)
    result = convert(tmp_path / "saved")
    assert result.plan.origin == "transformers_vit_hybrid"
    assert (result.plan.config.stage_depths, result.plan.config.stem_width) == ((2, 1), 32)
    hold(model, load(result), (32, 32), lambda model, images: model.tokens(images), lambda model, images: model(images))
    processor = json.loads((result.output / "preprocessor_config.json").read_text())
    assert processor["size"] == {"shortest_edge": 36}
    assert (processor["crop_size"], processor["do_center_crop"]) == ({"height": 32, "width": 32}, True)
    assert (processor["image_mean"], processor["resample"]) == ([0.4, 0.5, 0.6], 3)


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_type": "preactivation"}, {"layer_type": None}, {"global_padding": "valid"},
        {"embedding_dynamic_padding": False}, {"num_groups": 16}, {"hidden_act": "gelu"}, {"out_features": ["stage1"]},
    ],
    ids=str,
)  # fmt: skip
def test_former_hybrids_of_another_network_are_refused(changed: dict[str, Any]):
    model, ((name, value),) = vit_hybrid_parts(), changed.items()
    config = model.json()
    config["backbone_config"] |= changed
    with pytest.raises(UserError, match=re.escape(f"config.json has backbone_config.{name}={value!r}")):
        conversion.plan(shapes_of(model.state_dict()), companions=Companions(config))


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_bit_of_other_libraries(library: str, has_head: bool, tmp_path: Path):
    """Their network is the paper's but for the standardization and zeros around the root's pool; sizes are odd."""
    if library == "timm":
        model = bit_of_timm(**({} if has_head else {"num_classes": 0}))
        save_timm(model, tmp_path / "saved")
        saved = json.loads((tmp_path / "saved/config.json").read_text())
        (tmp_path / "saved/config.json").write_text(json.dumps(saved | {"architecture": "resnetv2_50x1_bit"}))
    else:
        model = bit_of_transformers("BitForImageClassification" if has_head else "BitModel")
        model.save_pretrained(tmp_path / "saved")
        pixels = {"size": {"shortest_edge": 48}, "crop_size": {"height": 40, "width": 40}}
        processor = {"image_processor_type": "BitImageProcessor", **pixels}
        (tmp_path / "saved/preprocessor_config.json").write_text(json.dumps(processor))
    result = convert(tmp_path / "saved")
    config = result.plan.config
    assert (result.plan.origin, result.plan.has_head) == (f"{library}_bit", has_head)
    assert (config.stage_depths, config.stem_width, config.weight_standardization) == ((2, 1), 32, "variance")
    assert config.image_size == (224 if library == "timm" else 40)

    def places(model: Any, images: torch.Tensor) -> torch.Tensor:
        maps = model.forward_features(images) if library == "timm" else transformers_tokens(model, images)
        return maps.flatten(2).mT

    def outcome(model: Any, images: torch.Tensor) -> torch.Tensor:
        if library == "transformers" and has_head:
            return model(images).logits
        return model(images) if library == "timm" else model(images).pooler_output.flatten(1)

    hold(model, load(result), (45, 61), places, outcome)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: bit_of_timm(preact=False), "norms after their convolutions.*use it with timm"),
        (lambda: bit_of_timm(norm_layer=BatchNormAct2d), "BatchNorm.*use it with timm"),
        (lambda: bit_of_transformers(layer_type="bottleneck"), "norms after their convolutions.*with transformers"),
    ],
)
def test_other_resnets_are_refused_by_name(build: Callable[[], nn.Module], told: str):
    with pytest.raises(UserError, match=told):
        conversion.plan(shapes_of(build().state_dict()))


@pytest.mark.parametrize("field", [{"global_padding": "SAME"}, {"num_groups": 16}, {"output_stride": 16}], ids=str)
def test_bit_that_is_set_up_otherwise_is_refused(field: dict[str, Any]):
    model, ((name, value),) = bit_of_transformers(**field), field.items()
    with pytest.raises(UserError, match=re.escape(f"config.json has {name}={value!r}")):
        conversion.plan(shapes_of(model.state_dict()), companions=Companions(model.config.to_dict()))


def masked_autoencoder(model: nn.Module) -> dict[str, torch.Tensor]:
    """As its code saves it: encoder and decoder side by side."""
    decoder = {"mask_token": (1, 1, 8), "decoder_embed.weight": (8, 64), "decoder_pos_embed": (1, 10, 8)}
    decoder |= {"decoder_blocks.0.attn.qkv.weight": (24, 8), "decoder_norm.bias": (8,), "decoder_pred.bias": (48,)}
    return model.state_dict() | {name: torch.ones(shape) for name, shape in decoder.items()}


def distilled(model: nn.Module) -> dict[str, Any]:
    """As DINO saves a training: student, teacher, optimizer."""
    head = {f"head.{name}": torch.ones(4) for name in ("mlp.0.bias", "last_layer.weight_g", "last_layer.weight_v")}
    state = model.state_dict()
    student = {name: value + 1 for name, value in state.items()} | head
    return {
        "student": {f"module.{'' if name in head else 'backbone.'}{name}": value for name, value in student.items()},
        "teacher": {f"{'' if name in head else 'backbone.'}{name}": value for name, value in (state | head).items()},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3)}},
            "param_groups": [{"lr": 0.1}],
        },
        "dino_loss": {"center": torch.zeros(1, 4)},
        "args": argparse.Namespace(arch="vit_tiny"),
        "epoch": 7,
    }


def lightning(model: nn.Module) -> dict[str, Any]:
    """As PyTorch Lightning saves a training, of a compiled model."""
    return {
        "state_dict": {f"model._orig_mod.{name}": value for name, value in model.state_dict().items()},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}],
        "callbacks": {"EarlyStopping": {"best_score": torch.tensor(0.5)}},
        "loops": {"fit_loop": {"state_dict": {}}},
        "lr_schedulers": [],
        "global_step": 3,
        "pytorch-lightning_version": "2.5",
    }


# Name -> (what is saved, origin, ignored keys by reason).
WRAPPED: dict[str, tuple[Callable[[nn.Module], dict], str, dict[str, int]]] = {
    "timm": (lambda model: model.state_dict(), "timm_vit", {}),
    "module": (lambda model: {f"module.{name}": value for name, value in model.state_dict().items()}, "timm_vit", {}),
    "an average of torch": (lambda model: AveragedModel(model).state_dict(), "timm_vit", {"training progress": 1}),
    "compiled in parallel": (lambda model: {f"module._orig_mod.{name}": value for name,
        value in model.state_dict().items()}, "timm_vit", {}),
    "compiled blocks": (lambda model: {re.sub(r"(blocks\.\d\.)", r"\1_orig_mod.", name): value for name,
        value in model.state_dict().items()}, "timm_vit", {}),
    "Lightning": (lightning, "timm_vit", {"state of the optimizer": 1, "training progress": 1}),
    "model and its average": (lambda model: {"model": model.state_dict(), "model_ema": {name: value + 1 for name,
        value in model.state_dict().items()}, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}, "timm_vit",
        {"moving average (EMA) of the model that is converted": 30, "state of the optimizer": 1}),
    "masked autoencoder": (lambda model: {"model": masked_autoencoder(model)}, "mae", {"mask token of the decoder": 1,
        "decoder, which reconstructs pixels": 5}),
    "DINO": (distilled, "dino", {"projection head of the self-distillation": 6,
        "the student of a self-distillation, whose teacher is converted": 30, "state of the optimizer": 2,
        "training progress": 1}),
    "DINO's backbone": (lambda model: {"teacher": {f"backbone.{name}": value for name,
        value in model.state_dict().items()}}, "dino", {}),
    "a student alone": (lambda model: {f"student.backbone.{name}": value for name, value in model.state_dict().items()},
        "dino", {}),
    "DINOv2": (lambda model: model.state_dict() | {"mask_token": torch.ones(1, 64)}, "dino",
        {"mask token of DINOv2's training": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRAPPED)
def test_encoders_in_files_of_training_code(case: str, tmp_path: Path):
    save, origin, ignored = WRAPPED[case]
    model = of_timm(embed_dim=64, num_heads=1, num_classes=0)
    torch.save(save(model), tmp_path / "model.pth")
    result = convert(tmp_path / "model.pth")
    reasons = list(result.plan.ignored.values())
    assert (result.plan.origin, {reason: reasons.count(reason) for reason in reasons}) == (origin, ignored)
    assert result.plan.assumed
    hold(model, load(result), (12, 12), timm_tokens, timm_outcome)
    processor = json.loads((result.output / "preprocessor_config.json").read_text())
    assert processor["image_mean"] == ([0.5] * 3 if origin == "timm_vit" else [0.485, 0.456, 0.406])


def test_of_a_model_and_its_average_the_prefix_chooses(tmp_path: Path):
    """timm's train.py --model-ema saves two models; every prefix that the refusal names converts one of them."""
    model = of_timm(embed_dim=64, num_heads=1)
    average = {name: value + 1 for name, value in model.state_dict().items()}
    torch.save({"state_dict": model.state_dict(), "state_dict_ema": average, "epoch": 3}, tmp_path / "model.pth")
    with pytest.raises(UserError, match="holds 2 models") as error:
        convert(tmp_path / "model.pth")
    choices = re.search(r"--prefix \(([\w.]+) or ([\w.]+)\)", str(error.value))
    states = [hf_vit.from_hub(tmp_path / "model.pth", prefix=choices[place]).state_dict() for place in (1, 2)]
    for state, source in zip(states, (model.state_dict(), average), strict=True):
        assert torch.equal(state["vit.embeddings.cls_token"], source["cls_token"])


def test_the_prefix_that_leaves_out_others_is_named(tmp_path: Path):
    state = {f"model.{name}": value for name, value in of_timm(embed_dim=64, num_heads=1).state_dict().items()}
    torch.save(state | {"criterion.weight": torch.ones(5)}, tmp_path / "model.pth")
    with pytest.raises(UserError, match=r"1 keys left over: criterion\.weight \(add --prefix model\."):
        convert(tmp_path / "model.pth")
    assert hf_vit.from_hub(tmp_path / "model.pth", prefix="model.").config.num_labels == 5


def test_a_head_of_several_layers_is_replaced_by_a_new_one(tmp_path: Path):
    state = of_timm(embed_dim=64, num_heads=1, num_classes=0).state_dict()
    head = {"head.0.weight": torch.ones(9, 64), "head.0.bias": torch.ones(9), "head.2.weight": torch.ones(5, 9)}
    torch.save(state | head, tmp_path / "model.pth")
    with pytest.raises(UserError, match=r"a head of several layers.*--num-labels"):
        convert(tmp_path / "model.pth")
    assert hf_vit.from_hub(tmp_path / "model.pth", num_labels=3).config.num_labels == 3


@torch.no_grad()
def test_two_heads_are_verified_by_their_mean(tmp_path: Path):
    model = of_transformers("DeiTForImageClassificationWithTeacher")
    model.save_pretrained(tmp_path / "saved")
    images = torch.randn(2, 3, 12, 12)
    recording = {"images": images.permute(0, 2, 3, 1).numpy(), "logits": model(images).logits.numpy()}
    np.savez(tmp_path / "recording.npz", **recording)
    result = convert(tmp_path / "saved", recording=tmp_path / "recording.npz")
    assert [one.stage for one in result.verification.checks] == ["logits"]


def test_a_file_of_an_architecture_at_another_size(tmp_path: Path):
    """Its images get the declared size too, with the share of the crop that timm has for the architecture."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=1)
    torch.save(model.state_dict(), tmp_path / "model.pth")
    source = f"timm:vit_tiny_patch16_224@{tmp_path / 'model.pth'}"
    result = conversion.convert(source, tmp_path / "out", image_size=(48, 48))
    processor = json.loads((result.output / "preprocessor_config.json").read_text())
    assert (processor["size"], processor["crop_size"]) == ({"shortest_edge": 53}, {"height": 48, "width": 48})


def test_a_mixer_of_timm(tmp_path: Path):
    """With its config: its GELU, its labels and its pixels; and alone, when the GELU is assumed."""
    model = mixer_of_timm()
    arguments = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "num_blocks": 2}
    saved = save_timm(model, tmp_path / "saved", model_args=arguments)
    result = conversion.convert(saved, tmp_path / "model")
    assert (result.plan.origin, result.plan.assumed, result.plan.config.hidden_act) == ("timm_mixer", {}, "gelu")
    hold(model, load(result), (16, 16), timm_tokens, timm_outcome)
    stored = json.loads((saved / "config.json").read_text())["pretrained_cfg"]
    assert list(AutoImageProcessor.from_pretrained(result.output).image_mean) == list(stored["mean"])
    save_file(model.float().state_dict(), tmp_path / "alone.safetensors")
    alone = conversion.convert(tmp_path / "alone.safetensors", tmp_path / "alone")
    assert set(alone.plan.assumed) == {"hidden_act", "processor", "image_size", "labels"}
    hold(model, load(alone), (16, 16), timm_tokens, timm_outcome)


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
    with pytest.raises(UserError, match="'gmixer_24_224' has another mix of tokens than the MLP-Mixer's"):
        conversion.convert(gated, tmp_path / "out")
    affine = mixer_of_timm("resmlp_12_224", block_layer=ResBlock, norm_layer=Affine, mlp_ratio=4)
    with pytest.raises(UserError, match="the checkpoint cannot be converted, as it looks like part of a ViT of timm"):
        conversion.plan(shapes_of(affine.state_dict()))
    arguments = {"img_size": 16, "act_layer": "gelu_tanh"}
    tanh = save_timm(mixer_of_timm(), tmp_path / "tanh", model_args=arguments)
    with pytest.raises(UserError, match="has the argument 'act_layer' of timm, which hf_vit does not support"):
        conversion.convert(tanh, tmp_path / "out")
    bare = save_timm(mixer_of_timm(), tmp_path / "bare", model_args={"img_size": 16})
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"global_pool": "max", "model_args": {"img_size": 16}}))
    with pytest.raises(UserError, match="has global_pool='max', but hf_vit only supports 'avg'"):
        conversion.convert(bare, tmp_path / "out")
    assert not (tmp_path / "out").exists()
