"""The image towers that people have: CLIP's, SigLIP's and DINOv2's, into models of this package and out again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from originals.pytorch import SIZES, of_transformers, randomise
from torch import nn

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.conversion.origins.preprocessing import CLIP_MEAN, IMAGENET_MEAN
from hf_vit.errors import UserError

DINOV2 = {"mlp_ratio": 2}
CLIP_TEXT = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 9,
}


def two_towers(name: str) -> nn.Module:
    """A whole CLIP or SigLIP with its text tower."""
    made = getattr(transformers, name)
    extra = {"projection_dim": 7} if name == "CLIPModel" else {}
    vision = {key: value for key, value in SIZES.items() if key != "num_labels"}
    text = CLIP_TEXT | {"vocab_size": 9, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return randomise(made(made.config_class(vision_config=vision | extra, text_config=text | extra, **extra)))


def tokens_and_pooled(model: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output = model(images)
    return output.last_hidden_state, output.pooler_output


def tokens_and_embedding(model: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output = model(images)
    return output.last_hidden_state, output.image_embeds


def of_whole_clip(model: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output = model.vision_model(images)
    return output.last_hidden_state, model.visual_projection(output.pooler_output)


def of_whole_siglip(model: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens_and_pooled(model.vision_model, images)


def tokens_and_logits(model: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return model.vision_model(images).last_hidden_state, model(images).logits


def tokens_and_mean(model: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = model(images).last_hidden_state
    return tokens, tokens.mean(dim=1)


# Name -> (model, what it gives, class it goes out to, key parts that are left out, fields of the config).
TOWERS: dict[str, tuple[Callable[[], nn.Module], Callable, str, set[str], dict[str, Any]]] = {
    "clip": (
        lambda: of_transformers("CLIPVisionModel"),
        tokens_and_pooled,
        "CLIPVisionModel",
        set(),
        {"norm_before_layers": True, "norm_after_pooling": True, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    ),
    "clip with projection": (
        lambda: of_transformers("CLIPVisionModelWithProjection", projection_dim=7),
        tokens_and_embedding,
        "CLIPVisionModelWithProjection",
        set(),
        {"num_labels": 7},
    ),
    "both towers of clip": (
        lambda: two_towers("CLIPModel"),
        of_whole_clip,
        "CLIPVisionModelWithProjection",
        {"the text tower", "scale and bias of the contrastive loss"},
        {"num_labels": 7},
    ),
    "siglip": (
        lambda: of_transformers("SiglipVisionModel", image_size=15),  # 3x3 patches of 4 px
        tokens_and_pooled,
        "SiglipVisionModel",
        set(),
        {"pooling": "map", "hidden_act": "gelu_pytorch_tanh", "image_size": 15},
    ),
    "siglip without a head": (
        lambda: of_transformers("SiglipVisionModel", vision_use_head=False),
        tokens_and_mean,
        "SiglipVisionModel",
        set(),
        {"pooling": "gap"},
    ),
    "both towers of siglip": (
        lambda: two_towers("SiglipModel"),
        of_whole_siglip,
        "SiglipVisionModel",
        {"the text tower", "scale and bias of the contrastive loss"},
        {},
    ),
    "classifier of siglip": (
        lambda: of_transformers("SiglipForImageClassification"),
        tokens_and_logits,
        "SiglipForImageClassification",
        {"attention pooling that the classifier does not use"},
        {"pooling": "gap", "num_labels": 5},
    ),
    "dinov2": (
        lambda: of_transformers("Dinov2Model", **DINOV2, layerscale_value=0.5),
        tokens_and_pooled,
        "Dinov2Model",
        {"mask token of DINOv2's training"},
        {"layer_scale_init_value": 0.5, "hidden_act": "gelu", "intermediate_size": 48},
    ),
    "dinov2 of swiglu": (
        lambda: of_transformers("Dinov2Model", mlp_ratio=2, use_swiglu_ffn=True, qkv_bias=False),
        tokens_and_pooled,
        "Dinov2Model",
        {"mask token of DINOv2's training"},
        {"mlp_type": "swiglu", "intermediate_size": 32, "qkv_bias": False},
    ),
    "dinov2 with registers": (
        lambda: of_transformers("Dinov2WithRegistersModel", **DINOV2, num_register_tokens=3),
        tokens_and_pooled,
        "Dinov2WithRegistersModel",
        {"mask token of DINOv2's training"},
        {"num_register_tokens": 3},
    ),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))


def results_of(model: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a model of this package."""
    output = getattr(model, "vit", model)(images)
    pooled = model(images).logits if hasattr(model, "classifier") else output.pooler_output
    return output.last_hidden_state, pooled


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:images of 15x15 px")
@pytest.mark.parametrize("spelling", ["old", "new"])
@pytest.mark.parametrize("case", TOWERS)
def test_in(case: str, spelling: str, tmp_path: Path):
    build, outcome, _, left_out, fields = TOWERS[case]
    model = build()
    model.save_pretrained(tmp_path / "saved", save_original_format=spelling == "old")
    result = conversion.convert(tmp_path / "saved", tmp_path / "converted")
    assert set(result.plan.ignored.values()) == left_out
    for name, value in fields.items():
        assert getattr(result.plan.config, name) == value
    ours = result.plan.model_class.from_pretrained(result.output).eval()
    size = result.plan.config.nominal_size
    for dtype, tolerance in TOLERANCE.items():
        images = torch.randn(2, 3, *size, dtype=torch.float64).to(dtype)
        expected = outcome(model.to(dtype), images)
        for found, value in zip(results_of(ours.to(dtype), images), expected, strict=True):
            assert largest(found, value) <= tolerance


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:images of 15x15 px")
@pytest.mark.parametrize("case", TOWERS)
def test_out_again_to_the_same_class(case: str, tmp_path: Path):
    build, outcome, name, _, _ = TOWERS[case]
    model = build()
    model.save_pretrained(tmp_path / "saved")
    exported = conversion.export(tmp_path / "saved", tmp_path / "exported", "transformers")
    assert exported.difference <= 1e-5
    assert json.loads((exported.output / "config.json").read_text())["architectures"] == [name]
    again, report = getattr(transformers, name).from_pretrained(exported.output, output_loading_info=True)
    assert not any(report.values())
    if name == "CLIPVisionModelWithProjection":
        expect = tokens_and_embedding
    elif name == "SiglipForImageClassification":
        expect = tokens_and_logits
    else:
        expect = tokens_and_pooled if case != "siglip without a head" else tokens_and_mean
    size = hf_vit.from_hub(tmp_path / "saved").config.nominal_size
    for dtype, tolerance in TOLERANCE.items():
        images = torch.randn(2, 3, *size, dtype=torch.float64).to(dtype)
        for found, value in zip(expect(again.eval().to(dtype), images), outcome(model.to(dtype), images), strict=True):
            assert largest(found, value) <= tolerance


@torch.no_grad()
@pytest.mark.parametrize("case", ["clip", "siglip without a head", "dinov2", "dinov2 with registers"])
def test_other_sizes_are_resampled_as_theirs(case: str, tmp_path: Path):
    model = TOWERS[case][0]()
    model.save_pretrained(tmp_path / "saved")
    ours = hf_vit.from_hub(tmp_path / "saved")
    for size in ((20, 24), (8, 8)):
        images = torch.randn(2, 3, *size)
        options = {} if case.startswith("dinov2") else {"interpolate_pos_encoding": True}
        assert largest(ours(images).last_hidden_state, model(images, **options).last_hidden_state) <= 1e-5


def test_pixels_come_along(tmp_path: Path):
    """Those of the file beside the weights, or else of the released models."""
    expected = {
        "CLIPVisionModel": ({"shortest_edge": 12}, {"height": 12, "width": 12}, CLIP_MEAN, 3),
        "SiglipVisionModel": ({"height": 12, "width": 12}, None, [0.5] * 3, 3),
        "Dinov2Model": ({"shortest_edge": 256}, {"height": 224, "width": 224}, IMAGENET_MEAN, 3),
    }
    for name, (size, crop, mean, resample) in expected.items():
        of_transformers(name).save_pretrained(tmp_path / name)
        found = hf_vit.image_processor_from_hub(tmp_path / name)
        assert (dict(found.size), list(found.image_mean), found.resample) == (size, mean, resample), name
        assert (dict(found.crop_size) if found.do_center_crop else None) == crop
    transformers.CLIPImageProcessor(size={"shortest_edge": 20}, crop_size=14).save_pretrained(
        tmp_path / "CLIPVisionModel"
    )
    found = hf_vit.image_processor_from_hub(tmp_path / "CLIPVisionModel")
    assert (dict(found.size), dict(found.crop_size)) == ({"shortest_edge": 20}, {"height": 14, "width": 14})


def test_pixels_of_a_processor_of_images_and_texts(tmp_path: Path):
    """As transformers 5 writes them: in one file, and no other."""
    of_transformers("CLIPVisionModel").save_pretrained(tmp_path)
    steps = transformers.CLIPImageProcessor(size={"shortest_edge": 20}, crop_size=14).to_dict()
    whole = tmp_path / "processor_config.json"
    whole.write_text(json.dumps({"processor_class": "CLIPProcessor", "image_processor": steps}))
    found = hf_vit.image_processor_from_hub(tmp_path)
    assert (dict(found.size), dict(found.crop_size)) == ({"shortest_edge": 20}, {"height": 14, "width": 14})
    whole.write_text(json.dumps({"image_processor": "CLIP"}))
    with pytest.raises(UserError, match=r"processor_config\.json gives image_processor='CLIP'; it needs the fields"):
        hf_vit.image_processor_from_hub(tmp_path)


@pytest.mark.parametrize("backend", ["CLIPImageProcessor", "SiglipImageProcessor", "BitImageProcessor"])
def test_pixels_are_those_of_the_processor(backend: str, tmp_path: Path):
    import numpy as np
    from PIL import Image

    made = getattr(transformers, backend)(size=16 if backend == "SiglipImageProcessor" else {"shortest_edge": 16})
    if backend != "SiglipImageProcessor":
        made.crop_size = {"height": 12, "width": 12}
    of_transformers("CLIPVisionModel").save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    ours = hf_vit.image_processor_from_hub(tmp_path)(photo, return_tensors="pt").pixel_values
    assert torch.equal(ours, made(photo, return_tensors="pt").pixel_values)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Dinov2ForImageClassification", "a classifier on the class token beside the mean of the patches"),
        ("Dinov2WithRegistersForImageClassification", "a classifier on the class token beside the mean of the patches"),
    ],
)
def test_heads_that_no_model_here_has_are_replaced_or_refused(name: str, told: str, tmp_path: Path):
    made = getattr(transformers, name)
    vision = {key: value for key, value in SIZES.items() if key != "num_labels"}
    randomise(made(made.config_class(**vision, **DINOV2, num_labels=5))).save_pretrained(tmp_path / "saved")
    with pytest.raises(UserError, match=rf"has {told}.* no model here has; give --num-labels or --labels for a new"):
        conversion.convert(tmp_path / "saved", tmp_path / "out")
    result = conversion.convert(tmp_path / "saved", tmp_path / "out", num_labels=3)
    assert sorted(key for key, why in result.plan.ignored.items() if why == "replaced by a new head") == [
        "classifier.bias",
        "classifier.weight",
    ]


@torch.no_grad()
@pytest.mark.parametrize("spelling", ["old", "new"])
def test_classifier_of_clip(spelling: str, tmp_path: Path):
    """It reads the patches' mean before the last LayerNorm."""
    model = of_transformers("CLIPForImageClassification")
    model.save_pretrained(tmp_path / "saved", save_original_format=spelling == "old")
    result = conversion.convert(tmp_path / "saved", tmp_path / "converted")
    assert set(result.plan.ignored.values()) == {"the last LayerNorm, which the classifier does not read"}
    ours = result.plan.model_class.from_pretrained(result.output).eval()
    for dtype, tolerance in TOLERANCE.items():
        images = torch.randn(2, 3, 12, 12, dtype=torch.float64).to(dtype)
        for found, value in zip(
            results_of(ours.to(dtype), images), tokens_and_logits(model.to(dtype), images), strict=True
        ):
            assert largest(found, value) <= tolerance
    new = conversion.convert(tmp_path / "saved", tmp_path / "new", num_labels=3)
    assert sorted(key for key, why in new.plan.ignored.items() if why == "replaced by a new head") == [
        "classifier.bias",
        "classifier.weight",
    ]
    with pytest.raises(UserError, match=r"CLIP cannot express .*norm_after_pooling=None \(it has True or False\)"):
        conversion.export(result.output, tmp_path / "out", "transformers")


@torch.no_grad()
def test_a_fine_tuned_dinov2_goes_out_as_its_classifier(tmp_path: Path):
    """Whose head reads the mean of the patches too: with weights of zero there."""
    of_transformers("Dinov2Model", **DINOV2).save_pretrained(tmp_path / "saved")
    conversion.convert(tmp_path / "saved", tmp_path / "tuned", num_labels=3)
    ours: Any = randomise(hf_vit.HfViTForImageClassification.from_pretrained(tmp_path / "tuned"))
    ours.save_pretrained(tmp_path / "tuned")
    conversion.export(tmp_path / "tuned", tmp_path / "exported", "transformers")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "exported").eval()
    assert type(theirs).__name__ == "Dinov2ForImageClassification"
    images = torch.randn(2, 3, 12, 12)
    assert largest(theirs(images).logits, ours(images).logits) <= 1e-5


def test_a_head_with_a_bias_has_no_place_in_clip(tmp_path: Path):
    of_transformers("CLIPVisionModel").save_pretrained(tmp_path / "saved")
    conversion.convert(tmp_path / "saved", tmp_path / "tuned", num_labels=3)
    conversion.export(tmp_path / "tuned", tmp_path / "zeros", "transformers")
    model = randomise(hf_vit.HfViTForImageClassification.from_pretrained(tmp_path / "tuned"))
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(UserError, match=r"no place for 1 parameters: classifier.bias \(which is not zero\)"):
        conversion.export(tmp_path / "tuned", tmp_path / "out", "transformers")
    assert conversion.export(tmp_path / "tuned", tmp_path / "timm", "timm").difference <= 1e-5


def test_values_of_a_tower_that_are_none(tmp_path: Path):
    two_towers("CLIPModel").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for value, told in (
        (["a"], "gives vision_config="),
        ({**config["vision_config"], "image_size": "x"}, "gives the size 'x'"),
        ({**config["vision_config"], "hidden_size": 48}, "hidden_size is 48 there, the weights make it 24"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": value}))
        with pytest.raises(UserError, match=told):
            hf_vit.from_hub(tmp_path)
