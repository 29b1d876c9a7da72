"""Image towers that people have: CLIP's, SigLIP's and DINOv2's, of transformers and of the codes that trained them."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from evaluation.tiny import NAMES
from originals.google import make_checkpoint, shapes_of
from originals.pytorch import (
    SIZES,
    both_towers,
    largest,
    load,
    of_timm,
    of_transformers,
    open_clip_tower,
    randomise,
    save_timm,
)
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.conversion.origins.beside import CLIP_MEAN, IMAGENET_MEAN
from hf_vit.errors import UserError

DINOV2 = {"mlp_ratio": 2}
CLIP_TEXT = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9,
}  # fmt: skip
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
TOWER_NAMES = ("ijepa", "dinov2", "dinov2_with_registers", "vision_model")
Outcome = tuple[torch.Tensor, torch.Tensor]


def two_towers(name: str) -> nn.Module:
    """A whole CLIP or SigLIP with its text tower."""
    made = getattr(transformers, name)
    extra = {"CLIPModel": {"projection_dim": 7}, "Siglip2Model": {"num_patches": 9}}.get(name, {})
    vision = {key: value for key, value in SIZES.items() if key != "num_labels"}
    text = CLIP_TEXT | {"vocab_size": 9, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return randomise(made(made.config_class(vision_config=vision | extra, text_config=text | extra, **extra)))


def inputs_of(model: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """SigLIP 2 takes patches, with their mask and grid."""
    if "Siglip2" not in type(model).__name__:
        return {"pixel_values": images}
    patches = torch.stack([convert_image_to_patches(image, 4) for image in images])
    grids = torch.tensor([[side // 4 for side in images.shape[2:]]] * len(images))
    return {"pixel_values": patches, "spatial_shapes": grids, "pixel_attention_mask": torch.ones(patches.shape[:2])}


def outcome_of(model: Any, images: torch.Tensor) -> Outcome:
    """Tokens, and what the model of another library makes of them: logits, embedding, pooled tokens or their mean."""
    inputs = inputs_of(model, images)
    if hasattr(model, "text_model"):
        output = model.vision_model(**inputs)
        return output.last_hidden_state, getattr(model, "visual_projection", nn.Identity())(output.pooler_output)
    output = model(**inputs)
    if "logits" in output:
        tower = getattr(model, next(name for name in TOWER_NAMES if hasattr(model, name)))
        return tower(**inputs).last_hidden_state, output.logits
    tokens = output.last_hidden_state
    pooled = output.get("image_embeds", output.get("pooler_output"))
    return tokens, tokens.mean(dim=1) if pooled is None else pooled


@torch.no_grad()
def hold(
    ours: Any,
    size: tuple[int, int],
    theirs: Callable[[torch.Tensor], Outcome],
    tolerances: dict[torch.dtype, float] = TOLERANCE,
) -> None:
    for dtype, tolerance in tolerances.items():
        images = torch.randn(2, 3, *size, dtype=torch.float64).to(dtype)
        tokens, outcome = theirs(images)
        assert largest(ours.to(dtype).base_model(images).last_hidden_state, tokens) <= tolerance
        output = ours(images)
        assert largest(output.logits if "logits" in output else output.pooler_output, outcome) <= tolerance


TEXT = {"the text tower", "scale and bias of the contrastive loss"}
MASK = {"mask token of DINOv2's training"}
# Name -> (model, class it goes out to, reasons why keys are left out, fields of the config).
TOWERS: dict[str, tuple[Callable[[], nn.Module], str, set[str], dict[str, Any]]] = {
    "clip": (lambda: of_transformers("CLIPVisionModel"), "CLIPVisionModel", set(), {"norm_before_layers": True,
        "norm_after_pooling": True, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}),
    "clip with projection": (lambda: of_transformers("CLIPVisionModelWithProjection", projection_dim=7),
        "CLIPVisionModelWithProjection", set(), {"num_labels": 7}),
    "both towers of clip": (lambda: two_towers("CLIPModel"), "CLIPVisionModelWithProjection", TEXT, {"num_labels": 7}),
    "siglip": (lambda: of_transformers("SiglipVisionModel", image_size=15), "SiglipVisionModel", set(),
        {"pooling": "map", "hidden_act": "gelu_pytorch_tanh", "image_size": 15}),
    "siglip without a head": (lambda: of_transformers("SiglipVisionModel", vision_use_head=False), "SiglipVisionModel",
        set(), {"pooling": "gap"}),
    "both towers of siglip": (lambda: two_towers("SiglipModel"), "SiglipVisionModel", TEXT, {}),
    "classifier of siglip": (lambda: of_transformers("SiglipForImageClassification"), "SiglipForImageClassification",
        {"attention pooling that the classifier does not use"}, {"pooling": "gap", "num_labels": 5}),
    "siglip 2": (lambda: of_transformers("Siglip2VisionModel", num_patches=9), "Siglip2VisionModel", set(),
        {"pooling": "map", "image_size": 12, "position_interpolation": "flexivit"}),
    "siglip 2 without a head": (lambda: of_transformers("Siglip2VisionModel", num_patches=16, vision_use_head=False),
        "Siglip2VisionModel", set(), {"pooling": "gap", "image_size": 16}),
    "both towers of siglip 2": (lambda: two_towers("Siglip2Model"), "Siglip2VisionModel", TEXT, {}),
    "classifier of siglip 2": (lambda: of_transformers("Siglip2ForImageClassification", num_patches=9),
        "Siglip2ForImageClassification", {"attention pooling that the classifier does not use"}, {"num_labels": 5}),
    "classifier of clip": (lambda: of_transformers("CLIPForImageClassification"), "",
        {"last LayerNorm, which the classifier does not use"}, {}),
    "dinov2": (lambda: of_transformers("Dinov2Model", **DINOV2, layerscale_value=0.5), "Dinov2Model", MASK,
        {"layer_scale_init_value": 0.5, "hidden_act": "gelu", "intermediate_size": 48}),
    "dinov2 of swiglu": (lambda: of_transformers("Dinov2Model", mlp_ratio=2, use_swiglu_ffn=True, qkv_bias=False),
        "Dinov2Model", MASK, {"mlp_type": "swiglu", "intermediate_size": 32, "qkv_bias": False}),
    "dinov2 with registers": (lambda: of_transformers("Dinov2WithRegistersModel", **DINOV2, num_register_tokens=3),
        "Dinov2WithRegistersModel", MASK, {"num_register_tokens": 3}),
    **{f"classifier of {name}": (partial(of_transformers, f"{name}ForImageClassification", **DINOV2, num_labels=5),
        f"{name}ForImageClassification", MASK, {"pooling": "token_and_gap", "num_labels": 5})
        for name in ("Dinov2", "Dinov2WithRegisters")},
    "dinov3": (lambda: of_transformers("DINOv3ViTModel", layerscale_value=0.5, num_register_tokens=3, rope_theta=30.0),
        "DINOv3ViTModel", {"mask token of DINOv3's training"}, {"key_bias": False, "num_register_tokens": 3}),
    "dinov3 of swiglu": (lambda: of_transformers("DINOv3ViTModel", use_gated_mlp=True, hidden_act="silu",
        query_bias=False, value_bias=False), "DINOv3ViTModel", {"mask token of DINOv3's training",
        "empty array of register tokens"}, {"mlp_type": "swiglu", "qkv_bias": False}),
    "dinov3 of other constants": (lambda: of_transformers("DINOv3ViTModel", num_register_tokens=1, key_bias=True,
        hidden_act="gelu_new", layer_norm_eps=0.01), "DINOv3ViTModel", {"mask token of DINOv3's training"},
        {"key_bias": True, "hidden_act": "gelu_new", "layer_norm_eps": 0.01}),
    "aimv2": (lambda: of_transformers("Aimv2VisionModel", use_head=False), "Aimv2VisionModel", set(),
        {"norm_type": "rmsnorm"}),
    "aimv2 of native size": (lambda: of_transformers("Aimv2VisionModel", use_head=False, is_native=True),
        "Aimv2VisionModel", set(), {"position_embedding": "sincos_2d_mae"}),
    "i-jepa": (lambda: of_transformers("IJepaModel"), "SiglipVisionModel", set(), {"pooling": "gap"}),
    "classifier of i-jepa": (lambda: of_transformers("IJepaForImageClassification", num_labels=5),
        "SiglipForImageClassification", set(), {"pooling": "gap", "num_labels": 5}),
}  # fmt: skip
# Those whose positions transformers resamples as we do.
RESAMPLED = (
    *("clip", "dinov3", "dinov3 of swiglu", "i-jepa", "siglip 2", "siglip 2 without a head"),
    *("siglip without a head", "dinov2", "dinov2 with registers"),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:images of 15x15 px")
@pytest.mark.parametrize("case", TOWERS)
def test_in_and_out_again_to_the_same_class(case: str, tmp_path: Path):
    """From both spellings of transformers; at other sizes, resampled as theirs; and back to the library."""
    build, name, left_out, fields = TOWERS[case]
    model: Any = build()
    # transformers computes angles and RMSNorm in float32 in every precision.
    tolerances = dict.fromkeys(TOLERANCE, 1e-5) if case.startswith(("dinov3", "aimv2")) else TOLERANCE
    for spelling in ("old", "new"):
        model.float().save_pretrained(tmp_path / spelling, save_original_format=spelling == "old")
        result = conversion.convert(tmp_path / spelling, tmp_path / f"{spelling} converted")
        assert set(result.plan.ignored.values()) == left_out
        assert {field: getattr(result.plan.config, field) for field in fields} == fields
        ours, size = load(result), result.plan.config.nominal_size
        hold(ours, size, lambda images: outcome_of(model.to(images.dtype), images), tolerances)
    if case in RESAMPLED:
        options = {} if case.startswith(("dino", "siglip 2")) else {"interpolate_pos_encoding": True}
        for other in ((20, 24), (8, 8)):
            images = torch.randn(2, 3, *other)
            with torch.no_grad():
                theirs = model.float()(**inputs_of(model, images), **options).last_hidden_state
                assert largest(ours(images).last_hidden_state, theirs) <= 1e-5
    if not name:
        with pytest.raises(UserError, match=r"does not support .*norm_after_pooling=None \(only True or False\)"):
            conversion.export(result.output, tmp_path / "exported", "transformers")
        return
    exported = conversion.export(tmp_path / "new", tmp_path / "exported", "transformers")
    assert exported.difference <= 1e-5
    assert json.loads((exported.output / "config.json").read_text())["architectures"] == [name]
    again, report = getattr(transformers, name).from_pretrained(exported.output, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        for dtype, tolerance in tolerances.items():
            images = torch.randn(2, 3, *size, dtype=torch.float64).to(dtype)
            found, expected = (outcome_of(one.eval().to(dtype), images) for one in (again, model))
            assert max(map(largest, found, expected)) <= tolerance


def test_images_in_their_own_shape_are_those_of_siglip_2(tmp_path: Path, command: Any):
    """Enlarged to the most patches, embedded in batches of many shapes, converted or not; and back, with its pixels."""
    theirs: Any = of_transformers("Siglip2VisionModel", num_patches=9)
    theirs.save_pretrained(tmp_path / "siglip2")
    processor = transformers.Siglip2ImageProcessor(patch_size=4, max_num_patches=24, image_mean=[0.4, 0.5, 0.6])
    processor.save_pretrained(tmp_path / "siglip2")
    random = np.random.default_rng(0)
    for number, size in enumerate([(9, 31), (40, 8), (12, 12), (3, 200), (25, 25)]):
        place = tmp_path / "data" / "test" / NAMES[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(place / f"{number}.png")
    own_shape = ("--data", tmp_path / "data", "--max-num-patches", 24, "--output")
    for words in (
        ("convert", tmp_path / "siglip2", "--output", tmp_path / "ours"),
        ("embed", tmp_path / "ours", *own_shape, tmp_path / "converted"),
        ("embed", tmp_path / "siglip2", "--data", tmp_path / "data", "--output", tmp_path / "as it was"),  # by default
        ("export", tmp_path / "ours", "--to", "transformers", "--output", tmp_path / "back"),
    ):
        code, _, err = command(*words)
        assert code == 0, err
    outputs = (tmp_path / "converted", tmp_path / "as it was")
    rows, others = (pq.read_table(next(folder.glob("*.parquet"))).to_pylist() for folder in outputs)
    files = [Image.open(tmp_path / "data" / "test" / row["image"]) for row in rows]
    with torch.no_grad():
        expected = theirs(**processor(files, return_tensors="pt")).pooler_output
        again = transformers.AutoImageProcessor.from_pretrained(tmp_path / "back")
        back = transformers.AutoModel.from_pretrained(tmp_path / "back")(**again(files, return_tensors="pt"))
    assert [row["image"] for row in rows] == [row["image"] for row in others]
    assert len(rows) == 5
    for found in (rows, others):
        assert largest(torch.tensor([row["embedding"] for row in found]), expected) <= 1e-5
    assert largest(back.pooler_output, expected) <= 1e-5


def test_a_classifier_of_siglip_2_learns_and_answers_in_own_shapes(tmp_path: Path, command: Any):
    """With a random crop or with features kept; the loss of the test split is that of transformers' classifier."""
    made = of_transformers("Siglip2ForImageClassification", num_patches=9, num_labels=2)
    made.config.id2label = dict(enumerate(NAMES[:2]))
    made.config.label2id = {name: i for i, name in enumerate(NAMES[:2])}
    made.save_pretrained(tmp_path / "siglip2")
    transformers.Siglip2ImageProcessor(patch_size=4, max_num_patches=24).save_pretrained(tmp_path / "siglip2")
    random, labels, images = np.random.default_rng(0), list[int](), list[Image.Image]()
    for split in ("train", "validation", "test"):
        for number in range(8):
            place = tmp_path / "data" / split / NAMES[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(random.integers(0, 256, (8 + 3 * number, 30 - 2 * number, 3), dtype=np.uint8))
            image.save(place / f"{number}.png")
            images, labels = ([*images, image], [*labels, number % 2]) if split == "test" else (images, labels)
    data, short = ("--data", tmp_path / "data"), ("--epochs", 1, "--batch-size", 4, "--device", "cpu")
    whole = ("--random-resized-crop", 0, 0, "--horizontal-flip", 0)
    for words in (
        ("finetune", tmp_path / "siglip2", *data, "--output", tmp_path / "tuned", *short),
        ("evaluate", tmp_path / "tuned", *data),
        ("export", tmp_path / "tuned", "--to", "transformers", "--output", tmp_path / "back"),
        ("finetune", tmp_path / "tuned", *data, "--output", tmp_path / "head", *short, *whole, "--tune", "head"),
        ("finetune", tmp_path / "tuned", *data, "--output", tmp_path / "kept", *short, *whole, "--tune", "head",
            "--cache-features"),
        ("finetune", tmp_path / "tuned", *data, "--output", tmp_path / "square", *short, "--image-size", 16),
        ("soup", tmp_path / "tuned", tmp_path / "kept", *data, "--output", tmp_path / "soup"),
        ("evaluate", tmp_path / "soup", *data),
        ("export", tmp_path / "tuned", "--to", "onnx", "--output", tmp_path / "onnx", "--opset", 14),
    ):  # fmt: skip
        code, _, err = command(*words)
        assert code == 0, err
    tuned, output = tmp_path / "tuned", ("--output", tmp_path / "no")
    for words in (
        ("finetune", tuned, *data, "--output", tmp_path / "mixed", "--mixup-alpha", 0.2),
        ("finetune", "Ti/16", *data, "--output", tmp_path / "taught", "--teacher", tuned, "--image-size", 16),
        *(("evaluate", tuned, *data, "--protocol", name) for name in ("linear-probe", "robustness", "corruptions")),
        ("compare", tuned, tmp_path / "square", *data, *output),
        ("page", tuned, *output),
        ("predict", tuned, tmp_path / "data/test" / NAMES[0], "--draft"),
        ("export", tuned, "--to", "onnx", "--static", *output),
        ("export", tuned, "--to", "openvino", "--preprocessing", *output),
        ("export", tuned, "--to", "onnx", "--quantize", "static", "--calibrate", tmp_path / "data", *output),
    ):
        code, _, err = command(*words)
        assert code == 1, words
        assert re.search(r"needs? images of one size, but the( image processor of this)? model", err), (words, err)
    model: Any = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "back").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "back")
    with torch.no_grad():
        logits = model(**processor(images, return_tensors="pt")).logits
    files = sorted((tmp_path / "data/test").rglob("*.png"), key=lambda path: path.stem)
    for name in ("tuned", "onnx"):
        scores = [dict(each.scores) for each in hf_vit.predict(str(tmp_path / name), files)]
        ours = torch.tensor([[each[model.config.id2label[index]] for index in range(2)] for each in scores])
        assert largest(ours, logits.softmax(-1)) <= 1e-5, name
    numbers = torch.tensor([model.config.label2id[NAMES[label]] for label in labels])
    expected = float(nn.functional.cross_entropy(logits, numbers))
    losses = {
        name: [record["values"]["loss"] for record in json.loads((tmp_path / name / "facts.json").read_text())[1:]]
        for name in ("tuned", "head", "kept", "soup")
    }
    assert losses["soup"][0] == pytest.approx(losses["soup"][1], abs=1e-6)  # of the soup's test, and of evaluate
    assert losses["tuned"] == pytest.approx([expected] * 2, abs=1e-5)  # of finetune's test, and of evaluate
    assert losses["kept"] == pytest.approx(losses["head"], abs=1e-5)
    sizes = {
        name: getattr(transformers.AutoImageProcessor.from_pretrained(tmp_path / name), "max_num_patches", None)
        for name in ("tuned", "square")
    }
    assert sizes == {"tuned": 24, "square": None}


def test_pixels_come_along(tmp_path: Path):
    """Those of the file beside the weights, or else of the released models; models without a table resize them, too."""
    expected = {
        "CLIPVisionModel": ({"shortest_edge": 12}, {"height": 12, "width": 12}, CLIP_MEAN, 3),
        "SiglipVisionModel": ({"height": 12, "width": 12}, None, [0.5] * 3, 3),
        "Siglip2VisionModel": ({"height": 64, "width": 64}, None, [0.5] * 3, 2),
        "Dinov2Model": ({"shortest_edge": 256}, {"height": 224, "width": 224}, IMAGENET_MEAN, 3),
        "DINOv3ViTModel": ({"height": 224, "width": 224}, None, IMAGENET_MEAN, 2),
        "DeiTModel": ({"height": 13, "width": 13}, {"height": 12, "width": 12}, IMAGENET_MEAN, 3),
        "ViTMAEModel": ({"height": 12, "width": 12}, None, IMAGENET_MEAN, 2),
    }
    for name, (size, crop, mean, resample) in expected.items():
        of_transformers(name).save_pretrained(tmp_path / name)
        found = hf_vit.image_processor_from_hub(tmp_path / name)
        assert (dict(found.size), list(found.image_mean), found.resample) == (size, mean, resample), name
        assert (dict(found.crop_size) if found.do_center_crop else None) == crop
        resized = hf_vit.image_processor_from_hub(tmp_path / name, resize_to=(96, 64))
        assert (dict(resized.size), bool(resized.do_center_crop)) == ({"height": 96, "width": 64}, False), name
    of_transformers("ViTMAEModel", num_channels=1).save_pretrained(tmp_path / "gray")
    assert list(hf_vit.image_processor_from_hub(tmp_path / "gray").image_mean) == [0.5]


def test_pixels_of_a_processor_of_images_and_texts(tmp_path: Path):
    """As transformers 5 writes them: in one file, which it prefers to the other one."""
    of_transformers("CLIPVisionModel").save_pretrained(tmp_path)
    steps = transformers.CLIPImageProcessor(size={"shortest_edge": 20}, crop_size=14).to_dict()
    whole = tmp_path / "processor_config.json"
    whole.write_text(json.dumps({"processor_class": "CLIPProcessor", "image_processor": steps}))
    found = hf_vit.image_processor_from_hub(tmp_path)
    assert (dict(found.size), dict(found.crop_size)) == ({"shortest_edge": 20}, {"height": 14, "width": 14})
    transformers.CLIPImageProcessor(size={"shortest_edge": 30}, crop_size=14).save_pretrained(tmp_path)
    for content, side in (({"image_processor": steps}, 20), ({"processor_class": "CLIPProcessor"}, 30)):
        whole.write_text(json.dumps(content))
        assert transformers.AutoImageProcessor.from_pretrained(tmp_path).size["shortest_edge"] == side
        assert hf_vit.image_processor_from_hub(tmp_path).size["shortest_edge"] == side
    whole.write_text(json.dumps({"image_processor": "CLIP"}))
    with pytest.raises(UserError, match="has image_processor='CLIP', but an object with fields is needed"):
        hf_vit.image_processor_from_hub(tmp_path)


@pytest.mark.parametrize("name", ["Dinov2", "Dinov2WithRegisters", "CLIP"])
def test_heads_are_replaced(name: str, tmp_path: Path):
    fields = {} if name == "CLIP" else DINOV2
    of_transformers(f"{name}ForImageClassification", **fields).save_pretrained(tmp_path / "saved")
    result = conversion.convert(tmp_path / "saved", tmp_path / "out", num_labels=3)
    replaced = sorted(key for key, reason in result.plan.ignored.items() if reason == "replaced by a new head")
    assert replaced == ["classifier.bias", "classifier.weight"]


@pytest.mark.parametrize("name", ["Siglip", "CLIP"])
def test_what_the_outputs_of_a_two_tower_classifier_mean(name: str, tmp_path: Path):
    """Its config says so beside the image tower's, in transformers and in what goes back to it."""
    model = of_transformers(f"{name}ForImageClassification")
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(tmp_path / "saved")
    assert hf_vit.from_hub(tmp_path / "saved").config.problem_type == "multi_label_classification"
    if name == "Siglip":
        conversion.export(tmp_path / "saved", tmp_path / "exported", "transformers")
        config = transformers.AutoConfig.from_pretrained(tmp_path / "exported")
        assert config.problem_type == "multi_label_classification"


@torch.no_grad()
def test_a_fine_tuned_dinov2_goes_out_as_its_classifier(tmp_path: Path):
    """Whose head reads the mean of the patches too: with weights of zero there."""
    of_transformers("Dinov2Model", **DINOV2).save_pretrained(tmp_path / "saved")
    conversion.convert(tmp_path / "saved", tmp_path / "tuned", num_labels=3)
    ours: Any = randomise(hf_vit.HfViTForImageClassification.from_pretrained(tmp_path / "tuned"))
    ours.save_pretrained(tmp_path / "tuned")
    assert conversion.export(tmp_path / "tuned", tmp_path / "exported", "transformers").difference <= 1e-5
    assert "Dinov2ForImageClassification" in (tmp_path / "exported/config.json").read_text()


def test_a_head_with_a_bias_has_no_place_in_clip(tmp_path: Path):
    of_transformers("CLIPVisionModel").save_pretrained(tmp_path / "saved")
    conversion.convert(tmp_path / "saved", tmp_path / "tuned", num_labels=3)
    conversion.export(tmp_path / "tuned", tmp_path / "zeros", "transformers")
    model = randomise(hf_vit.HfViTForImageClassification.from_pretrained(tmp_path / "tuned"))
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(UserError, match=r"no weights for 1 parameters: classifier.bias \(its values are not zero\)"):
        conversion.export(tmp_path / "tuned", tmp_path / "out", "transformers")
    assert conversion.export(tmp_path / "tuned", tmp_path / "timm", "timm").difference <= 1e-5


def test_values_of_a_tower_that_are_none(tmp_path: Path):
    two_towers("CLIPModel").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for value, told in (
        (["a"], "has vision_config="),
        ({**config["vision_config"], "image_size": "x"}, "has the size 'x'"),
        ({**config["vision_config"], "hidden_size": 48}, "it has hidden_size=48, the weights need 24"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": value}))
        with pytest.raises(UserError, match=told):
            hf_vit.from_hub(tmp_path)


@pytest.mark.parametrize("place", ["alone", "both", "below"])
def test_open_clip(place: str, tmp_path: Path):
    tower = open_clip_tower()
    state = tower.state_dict() if place == "alone" else both_towers(tower, "module." if place == "below" else "")
    torch.save({"state_dict": state, "epoch": 3} if place == "below" else state, tmp_path / "clip.pt")
    result = conversion.convert(tmp_path / "clip.pt", tmp_path / "out")
    assert result.plan.origin == "open_clip"
    assert ("the text tower" in result.plan.ignored.values()) == (place != "alone")
    assert "OpenAI's own weights" in str(conversion.assumption(result.plan))
    hold(load(result), (12, 12), lambda images: tower.to(images.dtype)(images))
    processor = json.loads((result.output / "preprocessor_config.json").read_text())
    assert processor["image_mean"] == [0.48145466, 0.4578275, 0.40821073]
    assert conversion.export(result.output, tmp_path / "exported", "transformers").difference <= 1e-5
    assert "CLIPVisionModelWithProjection" in (tmp_path / "exported/config.json").read_text()
    # At another size as `force_image_size` of OpenCLIP, which resizes the table with antialiasing.
    table = tower.double().positional_embedding.detach()
    grid = F.interpolate(table[1:].T.unflatten(1, (3, 3))[None], (5, 2), mode="bicubic", antialias=True)
    tower.positional_embedding = nn.Parameter(torch.cat([table[:1], grid[0].flatten(1).T]))
    hold(load(result), (20, 8), lambda images: tower.to(images.dtype)(images))


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
            (
                {},
                {"image_size": [16, 12]},
                "resize_mode='shortest' for 16x12 px has no equivalent in CLIPImageProcessor",
            ),
            ({}, {"image_size": 16}, "has 4x4 = 16 patches of 4x4 px, but the position table has 9"),
        ]
    ):
        source = write_open_clip(tmp_path / f"other-{number}", pixels, **tower)
        with pytest.raises(UserError, match=re.escape(told)) as refused:
            conversion.convert(source, tmp_path / "not")
        assert "\n" not in str(refused.value)


@torch.no_grad()
def test_timms_clip_goes_on_to_transformers(tmp_path: Path):
    """It norms all tokens before one is pooled, which only they show who look at the others."""
    sizes = {"embed_dim": 64, "num_heads": 2}
    for labels in (5, 0):
        model = of_timm("vit_base_patch16_clip_224", num_classes=labels, **sizes)
        if labels:
            model.head.bias.zero_()  # as of all released ones
        source = save_timm(model, tmp_path / f"saved-{labels}", model_args=sizes)
        if labels:
            assert conversion.export(source, tmp_path / "exported", "transformers").difference <= 1e-5
            assert "CLIPVisionModelWithProjection" in (tmp_path / "exported/config.json").read_text()
        else:
            with pytest.raises(UserError, match="CLIP does not support norm_after_pooling=False without a head"):
                conversion.export(source, tmp_path / "bare", "transformers")


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
        conversion.plan({key: shape for key, shape in shapes_of(state).items() if key != lost})


def test_a_block_in_two_chunks_is_refused():
    state = as_dinov2(of_timm(embed_dim=64, num_heads=1, num_classes=0), 1, "")
    with pytest.raises(UserError, match="the same block in two chunks"):
        conversion.plan(shapes_of(state) | {"blocks.7.1.norm1.bias": (64,)})


@torch.no_grad()
def test_a_declared_prefix(tmp_path: Path, command):
    """Whatever code wrapped the model; what lies outside is accounted for."""
    model = of_timm(embed_dim=64, num_heads=1)
    state = {f"net.visual.trunk.{name}": value for name, value in model.state_dict().items()}
    save_file(state | {"net.text.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'net.visual.trunk.'; select it with --prefix net.visual.trunk."):
        conversion.convert(tmp_path / "model.safetensors", tmp_path / "out")
    for prefix in ("net.visual.trunk", "net.visual.trunk."):
        result = conversion.convert(tmp_path / "model.safetensors", tmp_path / prefix, prefix=prefix)
        assert result.plan.ignored == {"net.text.weight": "outside of --prefix net.visual.trunk."}
    images = torch.randn(2, 3, 12, 12)
    assert largest(load(result)(images).logits, model(images)) <= 1e-5
    words = (tmp_path / "model.safetensors", tmp_path / "by_command", "--report", tmp_path / "report.json")
    assert command("convert", *words, "--prefix", "net.visual.trunk")[0] == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["source"] for row in report["keys"]} == {*state, "net.text.weight"}
    with pytest.raises(UserError, match=r"no key begins with --prefix 'nut'; the file has the prefixes net\."):
        conversion.convert(tmp_path / "model.safetensors", tmp_path / "out", prefix="nut")
    assert hf_vit.from_hub(tmp_path / "model.safetensors", prefix="net.visual.trunk").config.hidden_size == 64
    parts = ("bat", "cat", "hat", "mat", "rat")
    several = {f"{part}.{name}": tuple(value.shape) for part in parts for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match="below the prefix " + " and ".join(f"'{part}.'" for part in parts)):
        conversion.plan(several)


def test_a_prefix_of_an_npz(write_npz, tmp_path: Path):
    arrays = make_checkpoint()
    path = write_npz({f"encoder/{key}": value for key, value in arrays.items()} | {"other": arrays["cls"]})
    result = conversion.convert(path, tmp_path / "out", prefix="encoder")
    assert result.plan.ignored == {"other": "outside of --prefix encoder/"}
    wrong = {f"encoder/{key}": shape for key, shape in shapes_of(arrays).items() if not key.endswith("norm/bias")}
    with pytest.raises(UserError, match="encoder/Transformer/encoder_norm/bias"):
        conversion.plan(wrong, prefix="encoder")
