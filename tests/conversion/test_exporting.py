"""Out again: the same parameters after the way there and back, the same results in the other library."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
import transformers
from originals.pytorch import randomise
from PIL import Image
from safetensors import SafetensorError
from torch import nn
from transformers import ViTImageProcessor

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.conversion import export
from hf_vit.conversion.origins.origin import TRANSFORMS
from hf_vit.conversion.origins.registry import find_origin
from hf_vit.conversion.targets.registry import TARGETS
from hf_vit.errors import UserError
from hf_vit.results.delivery import prepare_output

SIZES = {
    "image_size": 12, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 20,
}  # fmt: skip
HYBRID = {"stage_depths": (2, 1), "stem_width": 32, "image_size": 32, "patch_size": None}
TIMMS_HYBRID = {
    "stage_depths": (2, 2, 2, 2), "image_size": 64, "patch_size": None, "weight_standardization": "variance",
    "group_norm_eps": 1e-5, "hidden_act": "gelu",
}  # fmt: skip
LABELS = {"id2label": {0: "cat", 1: "dog", 2: "Äpfel"}, "label2id": {"cat": 0, "dog": 1, "Äpfel": 2}}
TIMM = {"hidden_act": "gelu", "position_interpolation": "bicubic"}

CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "norm_before_layers": True}
RECTANGLE = {"image_size": (8, 18), "patch_size": (4, 6)}
DISTILLED = {"use_distillation_token": True}
ROTARY = {**TIMM, "rotary_embedding": "axial"}
# For timm's class Eva.
EVAS: tuple[dict[str, Any], ...] = (
    {**ROTARY, **LABELS, **RECTANGLE, "rotary_reference_grid": (3, 5), "rotary_offset": 1, "num_register_tokens": 2,
        "position_on_class_token": False},
    {**ROTARY, "rotary_coordinates": "centered", "position_embedding": "none", "rotary_pairing": "halves",
        "rotary_periods": (1.0, 10.0), "rotary_rescale": 2.0, "layer_norm_eps": 1e-5, "hidden_size": 24,
        "mlp_type": "swiglu", "norm_after_pooling": None},
    {**ROTARY, "rotary_embedding": "mixed", "rotary_axis_order": "column_row", "position_on_class_token": False},
    {**ROTARY, "pooling": "map_with_registers", "num_register_tokens": 2, "norm_before_layers": True,
        "pooling_num_heads": 2, "pooling_intermediate_size": 11, "position_on_class_token": "with_registers"},
    {**TIMM, "norm_after_branches": True, "norm_in_attention": True, "norm_in_mlp": True, "mlp_type": "swiglu"},
    {**TIMM, "key_bias": False, "pooling": "gap", "norm_after_pooling": True, "layer_scale_init_value": 0.1},
)  # fmt: skip
# (target, class) -> fields of configs that come back with the same parameters.
CONFIGS: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {
    ("transformers", "HfViTForImageClassification"): (LABELS, {"id2label": LABELS["id2label"]}, {"hidden_act": "gelu",
        "qkv_bias": False, "layer_norm_eps": 1e-3, "position_interpolation": "bicubic"}, RECTANGLE, {**LABELS,
        **DISTILLED}, {**DISTILLED, "use_distillation_head": False, "qkv_bias": False, "hidden_act": "gelu"}),
    ("transformers", "HfViTModel"): ({}, {"representation_size": 7}, DISTILLED, {**DISTILLED, "representation_size": 7,
        **RECTANGLE}),
    ("timm", "HfViTForImageClassification"): (LABELS, {**TIMM, "qkv_bias": False}, {**TIMM, "pooling": "gap"},
        {"pooling": "gap", "use_class_token": True}, {**TIMM, "pooling": "map"}, {"position_on_class_token": False},
        {"layer_scale_init_value": 1e-5}, RECTANGLE, {**TIMM, **LABELS, **DISTILLED}, CLIP, {"pooling": "gap",
        "norm_after_pooling": True}, {"num_register_tokens": 3, "position_on_class_token": False,
        "layer_scale_init_value": 1e-5}, {"mlp_type": "swiglu"}, *EVAS),
    ("timm", "HfViTModel"): ({**DISTILLED, "layer_scale_init_value": 1e-5}, {}, {"pooling": "map",
        "norm_after_pooling": True, "num_register_tokens": 2, "position_on_class_token": True}),
    ("timm", "HfHybridViTForImageClassification"): ({**TIMMS_HYBRID, **LABELS}, {**TIMMS_HYBRID, "stage_depths": (),
        "stem_patch_size": 4, "image_size": (32, 48), "qkv_bias": False}),
    ("timm", "HfHybridViTModel"): ({**TIMMS_HYBRID, "stage_depths": (), "stem_patch_size": 2},),
    ("vit_jax", "HfViTForImageClassification"): ({}, {"pooling": "gap"}, {"representation_size": 7}),
    ("vit_jax", "HfViTModel"): ({"patch_size": (4, 6), "image_size": (12, 18)},),
    ("vit_jax", "HfHybridViTForImageClassification"): (HYBRID, {**HYBRID, "stage_depths": (), "group_norm_eps": 1e-6}),
}  # fmt: skip
CASES = [(target, kind, fields) for (target, kind), rows in CONFIGS.items() for fields in rows]


def make(kind: str, folder: Path, **fields: Any) -> Path:
    """A saved model of this package with random weights."""
    model_class = getattr(hf_vit, kind)
    given = {name: value for name, value in {**SIZES, **fields}.items() if value is not None}
    model = randomise(model_class(model_class.config_class(**given)))
    model.save_pretrained(folder)
    height, width = model.config.nominal_size
    size = {"height": height, "width": width}
    ViTImageProcessor(image_mean=[0.1, 0.2, 0.3], resample=3, size=size).save_pretrained(folder)
    return folder


def load(folder: Path, kind: str) -> Any:
    return getattr(hf_vit, kind).from_pretrained(folder).eval()


TOWER = {"num_register_tokens": 2, "norm_before_layers": True, "norm_after_pooling": True, "mlp_type": "swiglu"}


@pytest.mark.parametrize("target", ["transformers", "timm", "vit_jax"])
@pytest.mark.parametrize("field", TOWER)
def test_what_has_no_place_is_named(field: str, target: str, tmp_path: Path):
    """Each field goes along with the same results, or what is missing is named (of CLIP's head, a bias)."""
    source = make("HfViTForImageClassification", tmp_path / "source", **{field: TOWER[field]})
    told = ""
    try:
        difference = export(source, tmp_path / "exported", target).difference
    except UserError as refusal:
        told, difference = str(refusal), 0.0
    assert bool(told) != (tmp_path / "exported").exists()
    assert not told or f"{field}={TOWER[field]!r}" in told or "classifier.bias (its values are not zero)" in told
    assert difference <= 1e-5


@pytest.mark.parametrize(("target", "kind", "fields"), CASES, ids=range(len(CASES)))
def test_way_there_and_back(target: str, kind: str, fields: dict[str, Any], tmp_path: Path):
    source = make(kind, tmp_path / "source", **fields)
    result = export(source, tmp_path / "exported", target)
    assert prepare_output(tmp_path / "exported", force=True)  # nothing in it is taken for somebody's
    assert result.difference <= 1e-5
    file = tmp_path / "exported" / "model.npz" if target == "vit_jax" else tmp_path / "exported"
    back = conversion.convert(file, tmp_path / "back")
    ours, again = load(source, kind), load(back.output, kind)
    assert ours.state_dict().keys() == again.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    images = torch.randn(2, 3, *ours.config.nominal_size)
    with torch.no_grad():
        assert torch.equal(ours(images)[0], again(images)[0])
    (record,) = json.loads((tmp_path / "exported" / "facts.json").read_text())
    assert record["values"]["target"] == target
    if target != "vit_jax" and "For" in kind:
        same_logits_in_the_other_library(ours, target, tmp_path / "exported", "id2label" in fields)


@pytest.mark.parametrize("target", ["transformers", "timm", "vit_jax"])
def test_a_classifier_without_labels_goes_as_its_encoder(target: str, tmp_path: Path):
    source = make("HfViTForImageClassification", tmp_path / "source", num_labels=0, hidden_act="gelu_pytorch_tanh")
    export(source, tmp_path / "exported", target)
    file = tmp_path / "exported" / "model.npz" if target == "vit_jax" else tmp_path / "exported"
    back = load(conversion.convert(file, tmp_path / "back").output, "HfViTModel").state_dict()
    ours = load(source, "HfViTForImageClassification").vit.state_dict()
    assert all(torch.equal(value, back[name]) for name, value in ours.items())


def test_transformers_says_nothing_of_defaults_of_its_text_tower(tmp_path: Path):
    """Of SigLIP's, which a tower of images does not have."""
    source = make("HfViTForImageClassification", tmp_path / "source", pooling="gap")
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.Logger.warning_once.cache_clear()  # transformers' own: of every warning, the first
    transformers.utils.logging.add_handler(handler)
    try:
        export(source, tmp_path / "exported", "transformers")
    finally:
        transformers.utils.logging.remove_handler(handler)
    assert json.loads((tmp_path / "exported/config.json").read_text())["model_type"] == "siglip"
    assert records == []


def in_the_other_library(target: str, folder: Path) -> nn.Module:
    if target == "timm":
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return transformers.AutoModelForImageClassification.from_pretrained(folder).eval()


def same_logits_in_the_other_library(ours: Any, target: str, folder: Path, with_names: bool) -> None:
    """As its users load it, in both precisions, beside ours in float64; with labels and preprocessing."""
    theirs = in_the_other_library(target, folder)
    size, exact = ours.config.nominal_size, 5e-6 if ours.config.rotary_embedding else 1e-10
    for dtype, tolerance in {torch.float64: exact, torch.float32: 1e-5}.items():
        images = torch.randn(2, 3, *size, dtype=torch.float64).to(dtype)
        with torch.no_grad():
            expected, logits = ours.double()(images.double()).logits, theirs.to(dtype)(images)
        logits = logits if target == "timm" else logits.logits
        assert float((logits - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))
    if target == "timm":
        data = timm.data.resolve_model_data_config(theirs)
        assert (list(data["mean"]), data["interpolation"]) == ([0.1, 0.2, 0.3], "bicubic")
        assert tuple(data["input_size"]) == (3, *size)
        assert not with_names or theirs.pretrained_cfg["label_names"] == ["cat", "dog", "Äpfel"]
    else:
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        assert list(processor.image_mean) == [0.1, 0.2, 0.3]
        assert theirs.config.id2label == ours.config.id2label


@pytest.mark.parametrize("case", ["vit_tok", "vit_tok_rep", "vit_gap", "vit_optprefix", "hybrid_r50", "hybrid_rti"])
def test_originals_files_come_back_with_the_same_bits(case: str, golden: Path, tmp_path: Path):
    """From .npz to .npz: the same arrays, under the newer spelling of the keys."""
    conversion.convert(golden / f"{case}.ckpt.npz", tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", "vit_jax")
    with np.load(golden / f"{case}.ckpt.npz") as before, np.load(tmp_path / "out" / "model.npz") as after:
        shapes = {key: before[key].shape for key in before.files}
        named = find_origin(shapes, case).names(shapes)
        assert set(named.normal) == set(after.files)
        for name, key in named.normal.items():
            assert np.array_equal(before[key], after[name]), key


@pytest.mark.parametrize(("pooling", "size"), [("token", (64, 64)), ("gap", (64, 64)), ("token", (32, 96))])
def test_timms_own_reader_reads_the_older_spelling(pooling: str, size: tuple[int, int], tmp_path: Path):
    """As released files are spelt; the newer spelling, which timm cannot read, is the default. A table of any grid."""
    fields = {"hidden_size": 192, "patch_size": 16, "image_size": size, "pooling": pooling}
    source = make("HfViTForImageClassification", tmp_path / "source", **fields, num_labels=5)
    export(source, tmp_path / "newer", "vit_jax")
    export(source, tmp_path / "older", "vit_jax", spelling="older")
    kinds = {"global_pool": "token"} if pooling == "token" else {"global_pool": "avg", "class_token": False}
    sizes = {
        "img_size": size, "num_classes": 5, "depth": 2, "num_heads": 3, "mlp_ratio": 20 / 192, "act_layer": "gelu_tanh",
    }  # fmt: skip
    theirs = timm.create_model("vit_tiny_patch16_224", **sizes, **kinds, fc_norm=False).eval()
    with pytest.raises(KeyError):
        theirs.load_pretrained(tmp_path / "newer" / "model.npz")
    theirs.load_pretrained(tmp_path / "older" / "model.npz")
    ours, images = load(source, "HfViTForImageClassification").double(), torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(theirs.double()(images), ours(images).logits, rtol=0, atol=1e-10)
    with pytest.raises(UserError, match="unknown --spelling 'oldest'; choose from newer, older"):
        export(source, tmp_path / "other", "vit_jax", spelling="oldest")


ALL, TRANSFORMERS, TIMM_ALONE, JAX = ("transformers", "timm", "vit_jax"), ("transformers",), ("timm",), ("vit_jax",)
# Fields of the config, targets that does not support them, and how the message names the field (else as it is).
REFUSED: tuple[tuple[dict[str, Any], tuple[str, ...], str], ...] = (
    ({"pooling": "gap", "use_class_token": True}, TRANSFORMERS, ""),
    ({"pooling": "map"}, TRANSFORMERS, "pooling='map' before a classifier"),
    ({"pooling": "map"}, JAX, ""),
    ({"position_embedding": "relative"}, ALL, ""),
    ({"position_embedding": "sincos_2d"}, ALL, ""),
    ({"position_embedding": "none"}, JAX, ""),
    ({"is_causal": True}, ALL, ""),
    ({"num_hidden_groups": 1}, ALL, ""),
    ({"layer_scale_init_value": 0.1}, JAX, ""),
    ({"use_distillation_token": True}, JAX, ""),
    ({"use_distillation_head": False, **DISTILLED}, TIMM_ALONE, "use_distillation_head=False before a classifier"),
    ({"position_on_class_token": False, **DISTILLED}, TIMM_ALONE,
        "position_on_class_token=False beside a distillation token"),
    ({"position_on_class_token": False, **DISTILLED}, TRANSFORMERS, ""),
    ({"representation_size": 7}, TRANSFORMERS, "representation_size=7 before a classifier"),
    ({"representation_size": 7}, TIMM_ALONE, ""),
    ({"position_on_class_token": False}, ("transformers", "vit_jax"), ""),
    ({"use_class_token": True, "pooling": "gap"}, JAX, ""),
    ({"image_size": (32, 8)}, JAX, "a patch grid of 8x2 (the original code reads its 16 rows as 4x4)"),
    ({"layer_norm_eps": 1e-12}, ("timm", "vit_jax"), ""),
    ({"hidden_act": "gelu"}, JAX, ""),
    ({"hidden_act": "mish"}, TIMM_ALONE, ""),
    ({"norm_before_layers": True, "norm_after_pooling": True}, JAX, ""),
    ({"pooling": "gap", "norm_before_layers": True}, TRANSFORMERS, ""),
    ({"image_size": (12, 8), "norm_before_layers": True, "norm_after_pooling": True}, TRANSFORMERS,
        "image_size=(12, 8) (only squares)"),
    ({"intermediate_size": 21, "mlp_type": "swiglu", "layer_scale_init_value": 1.0}, TRANSFORMERS,
        "intermediate_size=21 (no mlp_ratio gives it)"),
    ({"image_size": (12, 8), "layer_scale_init_value": 1.0}, TRANSFORMERS, "image_size=(12, 8) (only squares)"),
    ({"intermediate_size": 36, "layer_scale_init_value": 1.0}, TRANSFORMERS,
        "intermediate_size=36 (no mlp_ratio gives it)"),
    ({"layer_norm_eps": 1e-5, "mlp_type": "swiglu"}, TIMM_ALONE, "layer_norm_eps=1e-05 with mlp_type='swiglu'"),
    ({"pooling": "map", "mlp_type": "swiglu"}, TIMM_ALONE, "pooling='map' with mlp_type='swiglu'"),
    ({"mlp_type": "swiglu", "layer_norm_eps": 1e-5}, TRANSFORMERS, ""),
    ({"qkv_bias": False}, JAX, ""),
    ({"rotary_register_base": 100.0, **ROTARY, "num_register_tokens": 4}, TIMM_ALONE, ""),
    ({"rotary_periods": (1.0, 9.0), **ROTARY}, ALL, ""),
    ({"rotary_pairing": "halves", **ROTARY, "rotary_embedding": "mixed"}, TIMM_ALONE,
        "rotary_pairing='halves' with rotary_embedding='mixed'"),
    ({"pooling": "map", **ROTARY, "num_register_tokens": 2, "use_class_token": False}, TIMM_ALONE,
        "pooling='map' beside registers"),
    ({"use_qk_norm": True, **ROTARY}, ALL, ""),
    ({"norm_type": "rmsnorm", **ROTARY}, ALL, ""),
    ({"position_embedding": "sincos_2d_mae", "norm_type": "rmsnorm", "norm_on_patches": True}, TIMM_ALONE, ""),
)  # fmt: skip


@pytest.mark.parametrize(("fields", "targets", "told"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_expressed_is_refused_by_name(fields: dict[str, Any], targets: tuple[str, ...], told: str):
    model_class, (name, value) = hf_vit.HfViTForImageClassification, next(iter(fields.items()))
    words = told or f"{name}={value!r}"
    with torch.device("meta"):
        model = model_class(model_class.config_class(**{**SIZES, **fields}))
    for target in targets:
        with pytest.raises(UserError) as refusal:
            TARGETS[target].refuse_inexpressible(model)
        assert f"does not support {words}" in str(refusal.value) or f", {words}" in str(refusal.value)


NOT_OF_TIMM = "cannot preprocess images with size="
# Fields of a processor -> crop_mode and crop_pct that timm is given, or what the refusal says.
CROPS: list[tuple[dict[str, Any], tuple[str, float] | str]] = [
    ({"size": {"shortest_edge": 13}, "do_center_crop": True, "crop_size": 12}, ("center", 12 / 13)),
    ({"size": {"height": 15, "width": 15}, "do_center_crop": True, "crop_size": 12}, ("squash", 0.8)),
    ({"size": {"height": 14, "width": 14}}, NOT_OF_TIMM),
    ({"size": {"height": 15, "width": 12}, "do_center_crop": True, "crop_size": 12}, NOT_OF_TIMM),
    ({"size": {"height": 12, "width": 12}, "do_resize": False}, NOT_OF_TIMM),
]  # fmt: skip
# Fields of a processor of 12x12 px -> nothing, as timm makes the same pixels, or what the refusal says.
PIXELS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"do_normalize": False, "image_mean": None, "image_std": None}, ""),
    ({"rescale_factor": 1 / 127.5, "image_mean": [1.0, 0.9, 1.1]}, ""),
    ({"do_rescale": False, "image_mean": [127.0, 120.0, 110.0], "image_std": [60.0, 50.0, 40.0]}, ""),
    ({"do_rescale": False, "do_normalize": False}, ""),
    ({"image_mean": 0.5, "image_std": 0.25}, ""),
    ({"image_std": [0.5, 0, 0.5]}, r"above 0, .* image_std=\(0\.5, 0, 0\.5\)"),
    ({"rescale_factor": 0}, "has rescale_factor=0"),
    ({"image_mean": None}, "has .*image_mean=None"),
    ({"do_pad": True, "pad_size": {"height": 16, "width": 16}}, "cannot preprocess .* do_pad=True"),
]  # fmt: skip


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("HfViTForImageClassification", tmp_path_factory.mktemp("classifier") / "source")


def exported_to_timm(classifier: Path, folder: Path, told: object, **fields: Any) -> ViTImageProcessor | None:
    """Export with this processor, and return it; None where that is refused."""
    source, processor = shutil.copytree(classifier, folder / "source"), ViTImageProcessor(**fields)
    processor.save_pretrained(source)
    if not isinstance(told, str) or not told:
        export(source, folder / "out", "timm")
        return processor
    with pytest.raises(UserError, match=told):
        export(source, folder / "out", "timm")
    return None


@pytest.mark.parametrize(("fields", "crop"), CROPS, ids=range(len(CROPS)))
def test_preprocessing_in_timms_words(fields: dict[str, Any], crop: Any, classifier: Path, tmp_path: Path):
    if exported_to_timm(classifier, tmp_path, crop, **fields) is None:
        return
    told = json.loads((tmp_path / "out" / "config.json").read_text())["pretrained_cfg"]
    assert (told["crop_mode"], told["crop_pct"]) == (crop[0], pytest.approx(crop[1]))
    processor = hf_vit.image_processor_from_hub(tmp_path / "out")
    assert dict(processor.size) == fields["size"]
    assert dict(processor.crop_size) == {"height": 12, "width": 12}


@pytest.mark.parametrize(("fields", "told"), PIXELS, ids=range(len(PIXELS)))
def test_timm_makes_the_processors_pixels(fields: dict[str, Any], told: str, classifier: Path, tmp_path: Path):
    processor = exported_to_timm(classifier, tmp_path, told, size={"height": 12, "width": 12}, **fields)
    if processor is None:
        return
    data = timm.data.resolve_model_data_config(in_the_other_library("timm", tmp_path / "out"))
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8))
    expected = processor(photo, return_tensors="pt").pixel_values[0].float()
    torch.testing.assert_close(timm.data.create_transform(**data)(photo), expected, rtol=1e-6, atol=1e-6)
    again = hf_vit.image_processor_from_hub(tmp_path / "out")(photo, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(again, expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_dinov2_keeps_its_positions_at_the_size_of_its_pixels(tmp_path: Path):
    """transformers' class takes images of any size, and resizes positions in its own way."""
    for mode, side in (("bilinear", 24), ("bicubic", 24), ("bilinear", 48)):
        fields = {"layer_scale_init_value": 1.0, "position_interpolation": mode, "image_size": 48, "patch_size": 8}
        folder = make("HfViTForImageClassification", tmp_path / f"{mode}{side}", **fields, intermediate_size=96)
        ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(folder)
        if (mode, side) == ("bilinear", 24):
            with pytest.raises(UserError, match=r"resizes positions by 'bicubic' to .* to 48x48 px, or use --to onnx"):
                export(folder, tmp_path / "refused", "transformers")
            continue
        export(folder, tmp_path / f"out{side}", "transformers")
        theirs = transformers.Dinov2ForImageClassification.from_pretrained(tmp_path / f"out{side}").eval()
        images = torch.randn(2, 3, side, side)
        expected = load(folder, "HfViTForImageClassification")(images).logits
        torch.testing.assert_close(theirs(images).logits, expected, rtol=0, atol=1e-5)


def test_other_families_and_heads_are_refused_by_name(tmp_path: Path):
    axial = make("HfAxialViTForImageClassification", tmp_path / "axial", pooling="gap")
    local = make("HfLocalViTForImageClassification", tmp_path / "local")
    constants = {"group_norm_eps": 1e-5, "weight_standardization": "variance"}
    hybrid = make("HfHybridViTForImageClassification", tmp_path / "hybrid", **HYBRID, **constants)
    original = {"stage_depths": (), "image_size": 32, "patch_size": None}
    originals = make("HfHybridViTModel", tmp_path / "originals", **original)
    two_tokens = {**TIMMS_HYBRID, **original, "use_distillation_token": True}
    two_tokens = make("HfHybridViTModel", tmp_path / "two_tokens", **two_tokens)
    masked = make("HfViTForMaskedPatchPrediction", tmp_path / "masked")
    for source, target, told in (
        (axial, "transformers", "model_type='hf_axial_vit'"),
        (axial, "vit_jax", "model_type='hf_axial_vit'"),
        (axial, "timm", "model_type='hf_axial_vit'"),
        *((local, target, "model_type='hf_local_vit'") for target in ("transformers", "vit_jax", "timm")),
        (hybrid, "timm", "stage_depths=(2, 1) (only () or (2, 2, 2, 2) or (3, 4, 9) or (3, 4, 6, 3))"),
        (hybrid, "timm", "stem_width=32 (only 64)"),
        (originals, "timm", "group_norm_eps=1e-06 (only 1e-05)"),
        (originals, "timm", "weight_standardization='std' (only 'variance')"),
        (two_tokens, "timm", "does not support use_distillation_token=True of a hybrid"),
        (hybrid, "vit_jax", "group_norm_eps=1e-05, weight_standardization='variance'"),
        (masked, "transformers", "HfViTForMaskedPatchPrediction cannot be exported; give a classifier"),
    ):
        with pytest.raises(UserError) as refusal:
            export(source, tmp_path / "out", target)
        assert told in str(refusal.value)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["transformers", "timm", "vit_jax", "onnx"])
def test_what_no_file_can_hold_is_refused(target: str, tmp_path: Path):
    source = make("HfViTForImageClassification", tmp_path / "source")
    model = load(source, "HfViTForImageClassification")
    model.config.id2label[0] = "\ud83d of a smile"
    model.save_pretrained(source)
    with pytest.raises(UserError, match=r"class name '\\ud83d of a smile' has half of a character"):
        export(source, tmp_path / "out", target)
    model.config.id2label[0] = "smile"
    model.classifier.bias.data[0] = torch.nan
    model.save_pretrained(source)
    with pytest.raises(UserError, match="weights that are NaN or infinite, so it cannot be exported"):
        export(source, tmp_path / "out", target)


def test_transforms_and_their_inverses():
    shapes = {"keep": (3, 4), "transpose": (3, 4), "conv": (2, 3, 4, 5), "split_heads": (6, 2, 3)}
    shapes |= {"pointwise": (1, 1, 3, 4), "join_heads": (2, 3, 6), "flatten_heads": (2, 3), "flatten": (1, 1, 1, 4)}
    shapes |= {"as_token": (4,), "as_table": (3, 4), "dense": (3, 4, 1, 1)}
    shapes |= {"linear_patches": (5, 48), "linear_patches_last": (16, 5)}
    assert set(shapes) == set(TRANSFORMS)
    for name, shape in shapes.items():
        source = torch.randn(shape)
        assert torch.equal(TRANSFORMS[name].revert(TRANSFORMS[name].apply(source), shape), source)


def test_full_disk_is_one_line(tmp_path: Path, monkeypatch):
    source = make("HfViTModel", tmp_path / "source", hidden_act="gelu")
    full = {
        "timm": ("hf_vit.conversion.targets.timm_folder.save_file", SafetensorError("No space left (os error 28)")),
        "vit_jax": ("numpy.savez", OSError(28, "No space left on device")),
        "transformers": ("transformers.ViTModel.save_pretrained", SafetensorError("No space left (os error 28)")),
    }
    for target, (function, error) in full.items():
        monkeypatch.setattr(function, Mock(side_effect=error))
        with pytest.raises(UserError, match="out cannot be written: No space left"):
            export(source if target != "vit_jax" else make("HfViTModel", tmp_path / "tanh"), tmp_path / "out", target)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "tanh"}


def test_results_that_differ_are_not_delivered(tmp_path: Path, fails, monkeypatch):
    bare = make("HfViTModel", tmp_path / "bare", representation_size=7)
    monkeypatch.setattr(torch.nn.Tanh, "forward", lambda self, values: values * torch.nan)  # of transformers' pooler
    with pytest.raises(UserError, match="differs from the original by nan"):
        export(bare, tmp_path / "out", "transformers")
    source = make("HfViTForImageClassification", tmp_path / "source")
    apply = TRANSFORMS["keep"].revert
    monkeypatch.setattr(type(TRANSFORMS["keep"]), "revert", lambda self, value, shape: apply(value, shape) * 1.01)
    fails(("export", source, tmp_path / "out", "--to", "transformers"), "differs from the original by")
    with pytest.raises(UserError, match="differs from the original by nan"):
        export(source, tmp_path / "out", "vit_jax")
    with pytest.raises(UserError, match="--to keras is not a known format; choose one of transformers, timm,"):
        export(source, tmp_path / "out", "keras")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "source"]
