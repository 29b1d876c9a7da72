"""Every key of many origins, most in PyTorch's formats, and every value beside it: what does not fit is named."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from originals.cases import CASES
from originals.google import make_checkpoint, shapes_of
from originals.pytorch import of_timm, of_transformers, old_spelling, save_timm
from transformers import ViTImageProcessor

import hf_vit.conversion as conversion
from campaigns.forgeries import places, with_value
from hf_vit.conversion.fill import build_processor
from hf_vit.conversion.origins.beside import FIELD_NAMES
from hf_vit.conversion.readers import Companions, open_checkpoint
from hf_vit.errors import UserError

Shapes = dict[str, tuple[int, ...]]


ORIGINS = (
    "transformers_vit", "transformers_deit", "transformers_vit_hybrid", "transformers_clip",
    "transformers_clip_classifier", "transformers_siglip", "transformers_siglip2", "transformers_dinov2", "open_clip",
    "timm_vit", "timm_hybrid", "mae", "dino", "vit_jax", "vit_jax_hybrid", "mixer",
)  # fmt: skip
OLD = ("transformers_vit", "transformers_deit")  # taken in the old spelling of their keys
# Keys whose absence is noticed by another sign: the origin is not recognised, or the rest makes another model.
BY_ANOTHER_SIGN = re.compile(
    r"(.*\.)?(patch_embed\.proj\.weight|patch_embeddings\.projection\.weight|cls_token|dist\w*_token|register_tokens)"
    r"|(.*\.)?(patch_embedding\.weight|class_embedding|conv1\.weight|layer_scale1\.lambda1)"
    r"|(.*/)?(cls|pos_embedding|(conv_root|stem)/kernel)"
)
IGNORED = re.compile(r".*decoder_embed.*|.*post_layernorm.*|student\..*|.*mask_token")
# Arrays with a size that no other array tells.
ALONE = re.compile(
    r"(.*\.)?((position\w*|patch)_embedding(\.weight)?|(visual_projection\.weight|proj)|register_tokens)"
)


@cache
def good(origin: str) -> tuple[Shapes, Companions]:
    case = CASES[origin]
    shapes = shapes_of(case.make(make_checkpoint))
    if origin in OLD:
        shapes = {old_spelling(key.replace("deit.layers.", "deit.encoder.layer.")): s for key, s in shapes.items()}
    if origin == "open_clip":  # the image tower alone, as nobody would miss an array of the other
        shapes = {key.removeprefix("visual."): s for key, s in shapes.items() if key.startswith("visual.")}
    beside = case.beside() if case.beside else {}
    return shapes, Companions(beside.get("config.json"), beside.get("preprocessor_config.json"))


def explain_refusal(shapes: Shapes, companions: Companions) -> str:
    with pytest.raises(UserError) as error:
        conversion.plan(shapes, companions=companions)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(params=ORIGINS)
def case(request) -> tuple[Shapes, Companions]:
    shapes, companions = good(request.param)
    assert conversion.plan(shapes, companions=companions).origin == request.param
    return shapes, companions


def test_missing_keys_are_named_as_the_file_spells_them(case):
    shapes, companions = case
    for key in shapes:
        if IGNORED.fullmatch(key) or key in ("visual_projection.weight", "proj"):  # without which it is a bare tower
            continue
        told = explain_refusal({name: shape for name, shape in shapes.items() if name != key}, companions)
        assert BY_ANOTHER_SIGN.fullmatch(key) or key in told, key


def test_added_keys_are_left_over(case):
    shapes, companions = case
    for key in ("temperature", "model.temperature", "encoder.layer.0.temperature", "blocks.0.temperature"):
        assert re.search(
            rf"1 keys left over: {re.escape(key)}|another MLP", explain_refusal(shapes | {key: (1,)}, companions)
        )


def test_turned_arrays_are_named(case):
    shapes, companions = case
    turned = {key: shape[::-1] for key, shape in shapes.items() if len(shape) == 2 and shape[0] != shape[1]}
    assert len(turned) >= 5
    for key, shape in turned.items():
        if ALONE.fullmatch(key):
            assert key in explain_refusal(shapes | {key: shape}, companions)
        elif not IGNORED.fullmatch(key):
            assert re.search(
                rf"{re.escape(key)} is {shape[0]}x{shape[1]} .*looks transposed",
                explain_refusal(shapes | {key: shape}, companions),
            )


def test_arrays_of_another_size_are_named(case):
    """Or the layer's other array, where nothing else tells which of the two is right."""
    shapes, companions = case
    for key, shape in shapes.items():
        # A patch's width is told by no other array, only by config.json.
        patches = key.endswith(("patch_embed.proj.weight", "conv1.weight")) and shape[-1] == 4
        if IGNORED.fullmatch(key) or not shape or patches or key == "proj":
            continue
        told = explain_refusal(shapes | {key: (*shape[:-1], shape[-1] + 1)}, companions)
        named = re.sub(r"[./]\w+$", "", key)
        assert named in told or "position table" in told or "does not fit the weights" in told, (key, told)


def test_gaps_in_blocks_and_in_stages(case):
    shapes, companions = case
    # Not a unit of a stem: "stages.0.blocks.1.".
    found = {key: re.search(r"(?<!\d\.)(layers?|blocks)\.1\.|(encoderb|MixerB)lock_1/", key) for key in shapes}
    second = {key: (mark[0], shapes[key]) for key, mark in found.items() if mark}

    def moved(number: str) -> Shapes:
        return {key.replace(mark, mark.replace("1", number)): shape for key, (mark, shape) in second.items()}

    told = explain_refusal(shapes | moved("4"), companions)
    assert re.search(r"\d+ keys missing: .*[._]2[./]\*, .*[._]3[./]\*", told)
    assert "keys left over" in explain_refusal(shapes | moved("99999999999"), companions)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("rope.freqs", "rotary positions"),
        ("storage_tokens", "rotary positions"),
        ("blocks.1.attn.q_norm.weight", "attention with normalized queries and keys"),
        ("blocks.1.attn.lambda_q1", "attention with a norm inside, or differential"),
        ("blocks.0.attn.relative_position_bias_table", "relative positions"),
        ("blocks.1.attn.q_proj.weight", "the blocks of BEiT and EVA"),
        ("blocks.0.mlp.norm.weight", "an MLP with a norm inside"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(key: str, told: str):
    shapes, companions = good("timm_vit")
    message = explain_refusal(shapes | {key: (64,)}, companions)
    assert re.search(rf"has {told}.*\('{key}'\), which hf_vit does not support; use it with timm", message)


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (r"blocks\.\d\.norm[12]\.bias", r"norms without a bias \(RMSNorm\)"),
        (r"blocks\.\d\.attn\.proj\.bias", "attention whose last projection has no bias"),
        (r"norm\..+", "no LayerNorm after its blocks"),
    ],
)
def test_what_is_nowhere_in_the_file_is_refused_by_name(lost: str, told: str):
    shapes, companions = good("timm_vit")
    left = {key: shape for key, shape in shapes.items() if not re.fullmatch(lost, key)}
    assert re.search(told, explain_refusal(left, companions))


def test_one_weight_in_two_spellings_is_refused():
    shapes, companions = good("transformers_vit")
    new = "vit.layers.0.attention.q_proj.weight"
    assert "name the same weight" in explain_refusal(shapes | {new: (24, 24)}, companions)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "has no 'architecture'"),
        ({"architecture": "resnet50"}, "'resnet50' of timm"),
        ({"architecture": "vit_x", "model_args": {"act_layer": "mish"}},
            "the argument act_layer='mish' of timm, which hf_vit does not support"),
        ({"architecture": "vit_x", "model_args": {"norm_layer": "layernorm2d"}},
            "the argument norm_layer='layernorm2d' of timm"),
        ({"architecture": "vit_x", "global_pool": "max"}, "the argument global_pool='max' of timm"),
        ({"architecture": "vit_x", "pretrained_cfg": {"input_size": [3, 16, 16]}},
            "image_size 16x16 has 4x4 = 16 patches"),
        # Architectures whose keys may look plain, and those that the weights are not of.
        ({"architecture": "vit_giant_patch16_sapiens2.sa_1b"}, "'vit_giant_patch16_sapiens2' has queries that share"),
        ({"architecture": "samvit_base_patch16"}, "has attention in windows.*, which hf_vit does not support; use"),
        ({"architecture": "vit_base_mci_224"}, "the checkpoint: timm's 'vit_base_mci_224' has another stem"),
        ({"architecture": "vit_small_patch16_18x2_224"}, "has parallel attention and MLP"),
        ({"architecture": "vit_base_patch16_dinov3.lvd_1689m", "input_size": [3, 12, 12]}, "s=4, the weights need 0"),
        ({"architecture": "vit_pe_spatial_base_patch16_512", "input_size": [3, 12, 12]}, "norm_before_layers"),
        ({"architecture": "eva02_base_patch14_224", "input_size": [3, 12, 12]}, "mlp_type"),
    ],
)  # fmt: skip
def test_configs_of_timm_that_do_not_fit(config: dict, told: str):
    assert re.search(told, explain_refusal(good("timm_vit")[0], Companions(config)))


BAD = (-1, 0.5, float("inf"), "x", ["a"], [1, 2, 3], {"a": 1}, {"height": 0, "width": 5})


@cache
def of_library(library: str) -> tuple[Shapes, dict[str, Any], dict[str, Any]]:
    """(shapes, config.json, preprocessor_config.json) of a good model; timm has no such third file."""
    if library == "transformers":
        model: Any = of_transformers("ViTForImageClassification")
        read = ("model_type", "image_size", "patch_size", "id2label", *FIELD_NAMES)
        config = {name: value for name, value in model.config.to_dict().items() if name in read}
        processor = json.loads(ViTImageProcessor(size={"height": 12, "width": 12}).to_json_string())
    else:
        model = of_timm()
        config = {"architecture": "vit_tiny_patch16_224", "global_pool": "token", "num_classes": 5}
        pretrained = {"input_size": [3, 12, 12], "crop_pct": 0.9, "mean": [0.5] * 3, "std": [0.5] * 3}
        pretrained |= {"interpolation": "bicubic", "crop_mode": "center", "label_names": None}
        config |= {"pretrained_cfg": pretrained, "model_args": {"num_heads": 3, "act_layer": "gelu", "img_size": 12}}
        processor = {}
    return shapes_of(model.state_dict()), config, processor


def make_refusal(shapes: Shapes, config: Any, processor: Any) -> str | None:
    """The message, or None for what makes a model."""
    try:
        build_processor(conversion.plan(shapes, companions=Companions(config, processor or None)))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_values_of_another_kind(library: str):
    shapes, config, processor = of_library(library)
    assert make_refusal(shapes, config, processor) is None
    changed = [(with_value(config, place, bad), processor) for place in places(config) for bad in BAD]
    changed += [(config, with_value(processor, place, bad)) for place in places(processor) for bad in BAD]
    refusals = [message for files in changed if (message := make_refusal(shapes, *files)) is not None]
    assert len(changed) // 4 < len(refusals) < len(changed)
    assert not any("\n" in message for message in refusals)


def with_other(**fields: Any) -> Callable[[Any], Any]:
    return lambda content: content | fields


def with_one(value: Any, *place: str) -> Callable[[Any], Any]:
    return lambda content: with_value(content, place, value)


PAD = {"do_pad": True, "pad_size": {"height": 16, "width": 16}}
# (library, file, what is done to it, what the refusal says).
VALUES: tuple[tuple[str, str, Callable[[Any], Any], str], ...] = (
    ("transformers", "processor", with_other(image_mean=0.5), "preprocessor_config.json has image_mean"),
    ("transformers", "processor", with_other(size="x"), "preprocessor_config.json has size"),
    ("transformers", "processor", with_other(size={"depth": 3}), "preprocessor_config.json is not valid"),
    ("transformers", "processor", with_other(resample="2"), "preprocessor_config.json has resample='2'"),
    ("transformers", "processor", with_other(image_mean=[0.5]), "image_mean=.0.5."),
    ("transformers", "processor", with_other(**PAD), "has do_pad=true, but hf_vit's image processors do not pad"),
    ("transformers", "processor", with_other(image_processor_type=0), "json is for 0, which hf_vit does not"),
    ("transformers", "processor", lambda _: {"a": 1}, "preprocessor_config.json has no known field"),
    ("transformers", "config", with_other(num_attention_heads=None), "has num_attention_heads=None"),
    ("transformers", "config", with_one(7, "id2label", "2"), "has id2label.2=7"),
    ("transformers", "config", with_other(id2label={"0": "a", "1": "b"}), "it names 2 classes, but the weights have 5"),
    ("transformers", "config", with_other(id2label={"1": "b"}), "no name for class 0"),
    ("transformers", "config", with_other(hidden_act="x" * 9999), "sizes: hidden_act='xx"),
    ("transformers", "config", with_other(model_type="x" * 9999), "has model_type 'x{79}, which"),
    ("timm", "config", with_one("x", "pretrained_cfg", "crop_pct"), "has crop_pct='x'"),
    ("timm", "config", with_other(model_args=[1]), "config.json has model_args"),
    ("timm", "config", with_one(5, "pretrained_cfg", "label_names"), "has label_names=5"),
    ("timm", "config", with_other(pretrained_cfg={"a": 1}), "pretrained_cfg without input_size"),
    ("timm", "config", with_one([], "pretrained_cfg", "mean"), r"has mean=\[\]"),
    ("timm", "config", with_one([], "model_args", "act_layer"), "argument act_layer"),
)  # fmt: skip


@pytest.mark.parametrize(("library", "file", "change", "told"), VALUES, ids=[row[3] for row in VALUES])
def test_value_is_named(library: str, file: str, change: Callable[[Any], Any], told: str):
    shapes, config, processor = of_library(library)
    files = (config, change(processor)) if file == "processor" else (change(config), None)
    message = make_refusal(shapes, *files)
    assert message
    assert re.search(told, message)
    assert len(message) < 1000


CONTENTS = (b"", b"\xff", b"{", b"[" * 10**5, b"[1]", b"5", b'"x"', b"null")
WEIGHT_MAPS = (None, 5, "x", [], ["a"], {}, {"a": 5}, {"a": None}, {"a": ["b"]})


def test_files_that_are_no_object(tmp_path: Path):
    save_timm(of_timm(), tmp_path)
    of_transformers("ViTModel").save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    config, index = tmp_path / "config.json", tmp_path / "parts" / "model.safetensors.index.json"
    cases = [(file, content) for file in (config, index) for content in CONTENTS]
    cases += [(index, json.dumps({"weight_map": weight_map}).encode()) for weight_map in WEIGHT_MAPS]
    for file, content in cases:
        file.write_bytes(content)
        with pytest.raises(UserError, match=file.name if content in CONTENTS else None) as error:
            open_checkpoint(file.parent)
        assert "\n" not in str(error.value)
