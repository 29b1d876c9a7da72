"""`hf_vit.from_hub`: models of other libraries converted in memory; the same numbers, pixels and task classes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from originals.pytorch import mixer_of_timm, of_timm, of_transformers, save_timm
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.models._hub import load_model_config_from_path
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    DeiTImageProcessor,
    ViTImageProcessor,
    ViTImageProcessorPil,
)

import hf_vit
from hf_vit.conversion.origins.beside import RESAMPLE
from hf_vit.errors import UserError
from hf_vit.loading import load_model

IMAGES = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 61, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((122, 80), Image.Resampling.BILINEAR)


def test_options_of_a_conversion(tmp_path: Path):
    of_transformers("ViTForImageClassification").save_pretrained(tmp_path)
    loaded = hf_vit.from_hub(tmp_path, labels=["cat", "dog"], resize_to=(16, 20), dtype=torch.bfloat16)
    assert loaded.config.id2label == {0: "cat", 1: "dog"}
    assert (loaded.config.grid, loaded.dtype) == ((4, 5), torch.bfloat16)
    assert not loaded.classifier.weight.any()
    assert hf_vit.image_processor_from_hub(tmp_path, resize_to=(16, 20)).size == {"height": 16, "width": 20}


def test_what_is_assumed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = of_transformers("ViTForImageClassification")
    model.save_pretrained(tmp_path / "complete")
    torch.save(of_timm("vit_tiny_patch16_224").state_dict(), tmp_path / "bare.pth")
    ViTImageProcessor().save_pretrained(tmp_path / "complete")
    hf_vit.from_hub(tmp_path / "complete")
    assert not caplog.records
    hf_vit.from_hub(tmp_path / "bare.pth", num_heads=3)
    (record,) = caplog.records
    assert "bare.pth is a checkpoint of timm_vit and is converted in memory; assumed, as" in record.getMessage()


@torch.no_grad()
def test_own_models_load_as_they_are(tmp_path: Path):
    of_transformers("ViTForImageClassification").save_pretrained(tmp_path / "theirs")
    model = hf_vit.from_hub(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "own")
    hf_vit.image_processor_from_hub(tmp_path / "theirs").save_pretrained(tmp_path / "own")
    again = hf_vit.from_hub(tmp_path / "own")
    assert torch.equal(again(IMAGES).logits, model(IMAGES).logits)
    assert hf_vit.image_processor_from_hub(tmp_path / "own").size == {"height": 12, "width": 12}
    with pytest.raises(UserError, match=r"is already an hf_vit model, .*; load it with HfViTForImageClassification\."):
        hf_vit.from_hub(tmp_path / "own", num_labels=3)


def test_folders_of_other_models_are_refused(tmp_path: Path):
    of_transformers("ViTForImageClassification").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for fields, told in (
        (
            {"model_type": "beit"},
            "has model_type 'beit', a model with a bias of relative positions in every block, .* with transformers",
        ),
        ({"model_type": "gpt2"}, "has model_type 'gpt2', which hf_vit cannot convert; .* vit, vit_mae"),
        ({"model_type": "deit"}, "has model_type 'deit', but the weights have the keys of vit"),
        ({"model_type": None}, "has model_type None"),
        ({"hidden_size": 48}, "does not fit the weights: it has hidden_size=48, the weights need 24"),
        ({"image_size": 16}, "does not fit the weights: image_size 16x16 has 4x4 = 16 patches"),
        ({"image_size": "big"}, "has the size 'big'; write one number of pixels"),
        ({"patch_size": [4, 4, 4]}, r"has the size \[4, 4, 4\]"),
        ({"num_attention_heads": 5}, "hidden_size=24 is not divisible by num_attention_heads=5"),
        ({"num_hidden_layers": 3}, "it has num_hidden_layers=3, the weights need 2"),
        ({"hidden_act": "gelo"}, "hidden_act='gelo' is not an activation"),
        ({"qkv_bias": False}, "it has qkv_bias=False, the weights need True"),
        ({"model_type": "hf_vit", "architectures": ["ViTModel"]}, "which is not part of hf_vit"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(UserError, match=told) as error:
            hf_vit.from_hub(tmp_path)
        assert "\n" not in str(error.value)


def test_what_is_not_there(tmp_path: Path):
    with pytest.raises(UserError, match="there is no folder nobody/nothing, and it cannot be loaded from the Hub: "):
        hf_vit.from_hub("nobody/nothing")  # tests run offline
    for source in ("no such place", "/no/such/folder", "x" * 300):
        with pytest.raises(UserError, match=r"there is no file or folder .*; give a path, or owner/name"):
            hf_vit.from_hub(source)
    with pytest.raises(UserError, match="is not a Hub URL"):
        hf_vit.from_hub("hf://nobody")
    with pytest.raises(UserError, match="revision 'main' can only be used with a model on the Hub"):
        hf_vit.from_hub(tmp_path, revision="main")


PROCESSORS = {
    "vit": ViTImageProcessor(size={"height": 12, "width": 12}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]),
    "vit of another resampling": ViTImageProcessor(size={"height": 16, "width": 12}, resample=3, do_rescale=False),
    "deit": DeiTImageProcessor(size={"height": 20, "width": 20}, crop_size={"height": 12, "width": 12}),
    "no crop": DeiTImageProcessor(size={"shortest_edge": 12}, do_center_crop=False),
    "clip": transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=12),
    "siglip": transformers.SiglipImageProcessor(size=16),
    "bit": transformers.BitImageProcessor(size={"shortest_edge": 16}, crop_size=12),
    "gray": ViTImageProcessor(size={"height": 12, "width": 12}, image_mean=[0.4], image_std=[0.2]),
}  # fmt: skip


@pytest.mark.parametrize("case", PROCESSORS)
def test_pixels_are_those_of_transformers(case: str, photo: Image.Image, tmp_path: Path):
    processor = PROCESSORS[case]
    num_channels = len(processor.image_mean)
    of_transformers("ViTModel", num_channels=num_channels).save_pretrained(tmp_path)
    photo = photo if num_channels == 3 else photo.convert("L")
    processor.save_pretrained(tmp_path)
    found = hf_vit.image_processor_from_hub(tmp_path)
    assert hf_vit.from_hub(tmp_path).config.image_mean == tuple(found.image_mean)
    ours, theirs = (each(photo, return_tensors="pt").pixel_values for each in (found, processor))
    assert torch.equal(ours, theirs)
    pil = getattr(transformers, f"{type(processor).__name__}Pil")
    theirs, ours = pil.from_pretrained(tmp_path), ViTImageProcessorPil.from_dict(found.to_dict())
    assert np.array_equal(theirs(photo)["pixel_values"][0], ours(photo)["pixel_values"][0])


def test_a_gray_model_is_refused_where_images_have_colors(tmp_path: Path):
    save_timm(of_timm(in_chans=1, embed_dim=64, num_heads=1), tmp_path)
    for source in (tmp_path, tmp_path / "model.safetensors"):  # timm runs the first, and this package the second
        with pytest.raises(UserError, match=r"takes images with num_channels=1; give a model for RGB images"):
            load_model(source)


def test_older_preprocessor_files(tmp_path: Path):
    of_transformers("ViTModel").save_pretrained(tmp_path)
    old = {"feature_extractor_type": "ViTFeatureExtractor", "size": 12, "resample": 2, "image_mean": [0.5, 0.5, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    found = hf_vit.image_processor_from_hub(tmp_path)
    assert (found.size, found.resample) == ({"height": 12, "width": 12}, 2)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "BeitImageProcessor"}))
    with pytest.raises(UserError, match="is for BeitImageProcessor, which hf_vit does not support"):
        hf_vit.from_hub(tmp_path)


SILENT = {
    "DeiT's colours": {"image_processor_type": "DeiTImageProcessor"},
    "SigLIP's square": {"image_processor_type": "SiglipImageProcessor"},
    "SigLIP's shortest edge": {"image_processor_type": "SiglipImageProcessor", "size": 12},
    "CLIP's shortest edge": {"image_processor_type": "CLIPImageProcessor", "size": 20, "crop_size": 12},
}  # fmt: skip


@pytest.mark.parametrize("case", SILENT)
def test_what_a_file_leaves_open_is_as_in_transformers(case: str, photo: Image.Image, tmp_path: Path):
    of_transformers("ViTModel").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SILENT[case]))
    theirs, ours = AutoImageProcessor.from_pretrained(tmp_path), hf_vit.image_processor_from_hub(tmp_path)
    assert torch.equal(ours(photo, return_tensors="pt").pixel_values, theirs(photo, return_tensors="pt").pixel_values)


def test_two_classes_of_one_name(tmp_path: Path):
    """As ImageNet has "crane", the bird and the machine."""
    model = of_transformers("ViTForImageClassification")
    model.config.id2label = {0: "crane", 1: "cat", 2: "crane", 3: "dog", 4: "owl"}
    model.config.label2id = {"crane": 2, "cat": 1, "dog": 3, "owl": 4}
    model.save_pretrained(tmp_path / "theirs")
    hf_vit.from_hub(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    assert (again.config.id2label, again.config.label2id) == (model.config.id2label, model.config.label2id)


AS_TIMM_READS: dict[str, dict[str, Any]] = {
    "names at both levels": {"label_names": list("abcde"), "pretrained_cfg": {"label_names": list("ABCDE")}},
    "names below": {"pretrained_cfg": {"label_names": list("ABCDE")}},
    "one name twice": {"label_names": list("abade")},
    "form of old files": {"pretrained_cfg": None, "input_size": [3, 224, 224], "labels": list("abcde")},
    "no interpolation": {"pretrained_cfg": {"interpolation": None}},
    "one size alone": {"pretrained_cfg": {"input_size": [3, 224, 224], "fixed_input_size": True}},
    "other sizes": {"pretrained_cfg": {"input_size": [3, 224, 224], "fixed_input_size": False}},
    "any size": {"pretrained_cfg": {"input_size": [3, 224, 224], "fixed_input_size": True},
        "model_args": {"dynamic_img_size": True}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("build", "case"),
    [(of_timm, case) for case in AS_TIMM_READS]
    + [(mixer_of_timm, case) for case in AS_TIMM_READS if case != "any size"],
)
def test_a_config_is_read_as_timm_reads_it(build: Any, case: str, tmp_path: Path):
    changes, folder = AS_TIMM_READS[case], save_timm(build(), tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value}))
    theirs = load_model_config_from_path(folder)[0]
    data = resolve_data_config(pretrained_cfg=theirs)
    ours, processor = hf_vit.from_hub(folder), hf_vit.image_processor_from_hub(folder)
    names = theirs.get("label_names") or [f"LABEL_{index}" for index in range(5)]
    assert list(ours.config.id2label.values()) == names
    assert (processor.crop_size.height, processor.crop_size.width) == tuple(data["input_size"][1:])
    assert processor.resample == RESAMPLE[data["interpolation"]]


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("crop", [0.75, 0.8])
def test_pixels_are_those_of_timm(crop: float, mode: str, interpolation: str, photo: Image.Image, tmp_path: Path):
    """Exactly where both work with PIL; transformers' other backend is one level of 255 apart at most."""
    model = of_timm()
    cfg = {"crop_pct": crop, "crop_mode": mode, "interpolation": interpolation, "mean": (0.4, 0.5, 0.6)}
    model.pretrained_cfg.update(cfg)
    found = hf_vit.image_processor_from_hub(save_timm(model, tmp_path / "saved"))
    transform = create_transform(**resolve_data_config({"input_size": (3, 12, 12)}, model=model))
    resize, _, *rest = transform.transforms
    resized = resize(photo)
    left, top = (resized.width - 12) // 2, (resized.height - 12) // 2
    expected = resized.crop((left, top, left + 12, top + 12))
    for step in rest:
        expected = step(expected)
    if crop == 0.75:
        assert torch.equal(expected, transform(photo))
    pil = ViTImageProcessorPil.from_dict(found.to_dict())(photo, return_tensors="pt").pixel_values[0]
    assert float((pil - expected).abs().max()) <= 1e-6
    tensors = found(photo, return_tensors="pt").pixel_values[0]
    assert float((tensors - expected).abs().max()) <= 1.01 / 255 / 0.5


def test_preprocessing_that_has_no_counterpart(tmp_path: Path):
    model = of_timm()
    model.pretrained_cfg["crop_mode"] = "border"
    with pytest.raises(UserError, match=r"timm's preprocessing crop_mode='border'"):
        hf_vit.image_processor_from_hub(save_timm(model, tmp_path / "border"))
