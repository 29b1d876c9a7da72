"""Image towers in the files of the codes that trained them: CLIP, OpenCLIP, DINOv2; and declared prefixes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from originals.open_clip import both_towers, open_clip_tower
from originals.pytorch import of_timm, save_timm
from safetensors.torch import save_file

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.errors import UserError
from hf_vit_cli.main import main


def largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))


def load(result: conversion.ConversionResult) -> Any:
    return result.plan.model_class.from_pretrained(result.output).eval()


@torch.no_grad()
@pytest.mark.parametrize("place", ["alone", "both", "below"])
def test_open_clip(place: str, tmp_path: Path):
    tower = open_clip_tower()
    state = tower.state_dict() if place == "alone" else both_towers(tower, "module." if place == "below" else "")
    torch.save({"state_dict": state, "epoch": 3} if place == "below" else state, tmp_path / "clip.pt")
    result = conversion.convert(tmp_path / "clip.pt", tmp_path / "out")
    assert result.plan.origin == "open_clip"
    assert ("the text tower" in result.plan.ignored.values()) == (place != "alone")
    assert "OpenAI's own weights" in str(conversion.assumption(result.plan))
    ours = load(result)
    for dtype, tolerance in {torch.float64: 1e-10, torch.float32: 1e-5}.items():
        images = torch.randn(2, 3, 12, 12, dtype=torch.float64).to(dtype)
        tokens, embedding = tower.to(dtype)(images)
        assert largest(ours.to(dtype).vit(images).last_hidden_state, tokens) <= tolerance
        assert largest(ours(images).logits, embedding) <= tolerance
    processor = json.loads((result.output / "preprocessor_config.json").read_text())
    assert processor["image_mean"] == [0.48145466, 0.4578275, 0.40821073]


def write_open_clip(folder: Path, pixels: dict[str, Any], **tower: Any) -> Path:
    """As OpenCLIP writes a repository of the Hub."""
    folder.mkdir()
    torch.save(both_towers(open_clip_tower(heads=2)), folder / "open_clip_pytorch_model.bin")
    vision = {"image_size": 12, "width": 64, "layers": 2, "head_width": 32, "patch_size": 4, **tower}
    config = {"model_cfg": {"quick_gelu": True, "vision_cfg": vision}, "preprocess_cfg": pixels}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


def test_what_open_clips_config_says(tmp_path: Path):
    colours = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    cropped = write_open_clip(tmp_path / "cropped", colours)
    result = conversion.convert(cropped, tmp_path / "out")
    config, processor = result.plan.config, json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert (config.num_attention_heads, config.hidden_act, config.image_mean) == (2, "quick_gelu", (0.1, 0.2, 0.3))
    assert (processor["size"], processor["crop_size"]) == ({"shortest_edge": 12}, {"height": 12, "width": 12})
    assert (processor["resample"], processor["image_std"]) == (3, [0.4, 0.5, 0.6])
    assert not result.plan.assumed
    squashed = write_open_clip(tmp_path / "squashed", {"resize_mode": "squash", "interpolation": "bilinear"})
    found = hf_vit.image_processor_from_hub(squashed)
    assert (dict(found.size), found.do_center_crop, found.resample) == ({"height": 12, "width": 12}, False, 2)
    for number, (pixels, tower, told) in enumerate(
        [
            ({}, {"timm_model_name": "vit_base"}, "model_cfg.vision_cfg.timm_model_name='vit_base'"),
            ({}, {"pool_type": "avg"}, "model_cfg.vision_cfg.pool_type='avg'"),
            ({"resize_mode": "longest"}, {}, "preprocess_cfg.resize_mode='longest'"),
            ({}, {"image_size": 16}, "makes 4x4 = 16 patches of 4x4 px, but the position table has 9"),
        ]
    ):
        source = write_open_clip(tmp_path / f"other-{number}", pixels, **tower)
        with pytest.raises(UserError, match=re.escape(told)) as refused:
            conversion.convert(source, tmp_path / "not")
        assert "\n" not in str(refused.value)


@torch.no_grad()
def test_open_clip_goes_on_to_transformers(tmp_path: Path):
    from transformers import CLIPVisionModelWithProjection

    tower = open_clip_tower()
    torch.save(both_towers(tower), tmp_path / "clip.pt")
    conversion.convert(tmp_path / "clip.pt", tmp_path / "ours", hidden_act="gelu")
    conversion.export(tmp_path / "ours", tmp_path / "theirs", "transformers")
    images = torch.randn(2, 3, 12, 12)
    theirs = CLIPVisionModelWithProjection.from_pretrained(tmp_path / "theirs").eval()
    assert largest(theirs(images).image_embeds, tower(images)[1]) <= 1e-5


@torch.no_grad()
def test_timms_clip_goes_on_to_transformers(tmp_path: Path):
    """It norms all tokens before one is pooled, which only they show who look at the others."""
    from transformers import CLIPVisionModelWithProjection

    sizes = {"embed_dim": 64, "num_heads": 2}
    for labels in (5, 0):
        model = of_timm("vit_base_patch16_clip_224", num_classes=labels, **sizes)
        if labels:
            model.head.bias.zero_()  # as of all released ones
        source = save_timm(model, tmp_path / f"saved-{labels}", model_args=sizes)
        if not labels:
            with pytest.raises(UserError, match="CLIP cannot express norm_after_pooling=False without a head"):
                conversion.export(source, tmp_path / "bare", "transformers")
            continue
        conversion.export(source, tmp_path / "exported", "transformers")
        theirs = CLIPVisionModelWithProjection.from_pretrained(tmp_path / "exported").eval()
        images = torch.randn(2, 3, 12, 12)
        assert largest(theirs(images).image_embeds, model(images)) <= 1e-5


def as_dinov2(model: torch.nn.Module, chunk: int | None, prefix: str) -> dict[str, torch.Tensor]:
    """A state of timm's DINOv2 under the names of its own code."""
    state = {}
    for name, value in model.state_dict().items():
        name = name.replace("reg_token", "register_tokens")
        if "packed" in str(type(model.blocks[0].mlp)).lower() or hasattr(model.blocks[0].mlp, "gate_last"):
            name = name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")
        if chunk is not None:
            name = re.sub(r"blocks\.(\d+)", lambda found: f"blocks.{int(found[1]) // chunk}.{found[1]}", name)
        state[prefix + name] = value
    return state | {f"{prefix}mask_token": torch.ones(1, 64)}


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("swiglu", [False, True], ids=["dense", "swiglu"])
def test_dinov2(chunk: int | None, swiglu: bool, tmp_path: Path):
    name = "vit_giant_patch14_reg4_dinov2" if swiglu else "vit_base_patch14_reg4_dinov2"
    small = {"embed_dim": 64, "num_heads": 1, "depth": 3, "num_classes": 0, "mlp_ratio": 1.0}
    model = of_timm(name, **small)
    prefix = "teacher.backbone." if chunk == 1 else ""
    others = {"teacher.dino_head.mlp.0.bias": torch.ones(4), "student.backbone.norm.bias": torch.ones(64)}
    save_file(as_dinov2(model, chunk, prefix) | (others if prefix else {}), tmp_path / "dinov2.safetensors")
    result = conversion.convert(tmp_path / "dinov2.safetensors", tmp_path / "out")
    assert result.plan.origin == "dino"
    assert (result.plan.config.num_register_tokens, result.plan.config.num_hidden_layers) == (4, 3)
    assert "mask token of DINOv2's training" in result.plan.ignored.values()
    ours = load(result).double()
    images = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    assert largest(ours(images).last_hidden_state, model.double().forward_features(images)) <= 1e-10
    state = as_dinov2(model, chunk, prefix)
    lost = next(key for key in state if key.endswith("1.norm2.bias"))
    with pytest.raises(UserError, match=f"1 keys missing: {re.escape(lost)}"):
        conversion.plan({key: tuple(value.shape) for key, value in state.items() if key != lost})


def test_a_block_in_two_chunks_is_refused():
    state = as_dinov2(of_timm(embed_dim=64, num_heads=1, num_classes=0), 1, "")
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    with pytest.raises(UserError, match="a block in two chunks"):
        conversion.plan(shapes | {"blocks.7.1.norm1.bias": (64,)})


@torch.no_grad()
def test_a_declared_prefix(tmp_path: Path, capsys):
    """Whatever code wrapped the model; what lies outside is accounted for."""
    model = of_timm(embed_dim=64, num_heads=1)
    state = {f"net.visual.trunk.{name}": value for name, value in model.state_dict().items()}
    save_file(state | {"net.text.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="below another prefix"):
        conversion.convert(tmp_path / "model.safetensors", tmp_path / "out")
    for prefix in ("net.visual.trunk", "net.visual.trunk."):
        result = conversion.convert(tmp_path / "model.safetensors", tmp_path / prefix, prefix=prefix)
        assert result.plan.ignored == {"net.text.weight": "outside of --prefix net.visual.trunk."}
    images = torch.randn(2, 3, 12, 12)
    assert largest(load(result)(images).logits, model(images)) <= 1e-5
    command = ["convert", str(tmp_path / "model.safetensors"), str(tmp_path / "by_command")]
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--prefix", "net.visual.trunk", "--report", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["source"] for row in report["keys"]} == {*state, "net.text.weight"}
    with pytest.raises(UserError, match=r"no key begins with --prefix 'nut'; the keys begin with net\."):
        conversion.convert(tmp_path / "model.safetensors", tmp_path / "out", prefix="nut")
    assert hf_vit.from_hub(tmp_path / "model.safetensors", prefix="net.visual.trunk").config.hidden_size == 64


def test_a_prefix_of_an_npz(checkpoint, write_npz, tmp_path: Path):
    arrays = checkpoint()
    path = write_npz({f"encoder/{key}": value for key, value in arrays.items()} | {"other": arrays["cls"]})
    result = conversion.convert(path, tmp_path / "out", prefix="encoder")
    assert result.plan.ignored == {"other": "outside of --prefix encoder/"}
    wrong = {f"encoder/{key}": tuple(value.shape) for key, value in arrays.items() if key != "cls"}
    with pytest.raises(UserError, match="encoder/Transformer/encoder_norm/bias"):
        conversion.plan({key: s for key, s in wrong.items() if not key.endswith("encoder_norm/bias")}, prefix="encoder")
