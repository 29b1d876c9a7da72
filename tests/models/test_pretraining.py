"""Masked and next patch prediction against plain loops, one image, one patch and one number at a time."""

import math
from typing import Any

import pytest
import torch
from models.families import FAMILIES, corruption, pad
from transformers import AutoModelForMaskedImageModeling

from hf_vit import HfViTBackbone, HfViTForImageClassification, HfViTForMaskedPatchPrediction, HfViTModel
from hf_vit.models.embeddings_hf_vit import corrupt_patches
from hf_vit.models.pretraining_hf_vit import build_target, cut_patches, join_patches

TARGETS = ("mean_color", "downsampled", "pixels")
MEAN, STD = (0.4, 0.5, 0.6), (0.25, 0.5, 0.3)


def build(family: str = "plain", dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    return FAMILIES[family].build("masked_prediction", dtype=dtype, image_mean=MEAN, image_std=STD, **overrides)


def images_of(model: Any, batch: int = 2, grid: tuple[int, int] | None = None) -> torch.Tensor:
    """Pixel values whose colours fill [0, 1], with a few beyond either end."""
    like = FAMILIES["plain"].images(model.config, batch, grid, torch.float64)
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (MEAN, STD))
    return ((like * 0.55 + 0.5) - mean) / std


def slow_classes(patch: torch.Tensor, side: int) -> list[int]:
    """The classes of one patch [C, P, P'] of pixel values, by loops."""
    channels, height, width = patch.shape
    found = []
    for row in range(side):
        for column in range(side):
            number = 0
            for channel in range(channels):
                cells = [
                    float(patch[channel, y, x]) * STD[channel] + MEAN[channel]
                    for y in range(row * height // side, (row + 1) * height // side)
                    for x in range(column * width // side, (column + 1) * width // side)
                ]
                level = math.floor(sum(cells) / len(cells) * 8)
                number = number * 8 + min(max(level, 0), 7)
            found.append(number)
    return found


def slow_loss(model: Any, images: torch.Tensor, masked: torch.Tensor, predictions: torch.Tensor) -> float:
    """The mean over the patches that count, by loops; `predictions` [B, N, outputs] are the head's."""
    (h, w), (high, wide), kind = model.config.grid, model.config.patch_stride, model.config.prediction_target
    losses = []
    for image in range(len(images)):
        for place in range(h * w):
            if not masked[image, place]:
                continue
            top, left = place // w * high, place % w * wide
            patch, outputs = images[image, :, top : top + high, left : left + wide], predictions[image, place].tolist()
            if kind == "pixels":
                losses += [(a - b) ** 2 for a, b in zip(outputs, patch.flatten().tolist(), strict=True)]
                continue
            for index, label in enumerate(slow_classes(patch, 1 if kind == "mean_color" else 4)):
                scores = outputs[index * 512 : (index + 1) * 512]
                losses.append(math.log(sum(math.exp(score) for score in scores)) - scores[label])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["plain", "axial"])
def test_loss_is_that_of_plain_loops(name: str, target: str):
    """On the corrupted patches alone; the same while training, where the head runs on these alone."""
    model = build(name, prediction_target=target, patch_size=8 if target == "downsampled" else 4)
    images = images_of(model)
    inputs = corruption(model.config, images)
    tokens = model.vit(images, **inputs).last_hidden_state[:, model.config.num_special_tokens :]
    wanted = slow_loss(model, images, inputs["bool_masked_pos"], model.prediction_head(tokens))
    outputs = model(images, **inputs)
    assert outputs.loss.item() == pytest.approx(wanted, rel=1e-10)
    trained = model.train()(images, **inputs)
    assert trained.loss.item() == pytest.approx(wanted, rel=1e-10)
    assert (trained.logits, trained.reconstruction) == (None, None)


def test_corruption_is_that_of_plain_loops():
    generator = torch.Generator().manual_seed(0)
    patches, mask_token = torch.randn(3, 6, 5, generator=generator), torch.randn(1, 1, 5, generator=generator)
    masked = torch.rand(3, 6, generator=generator) < 0.6
    sources = torch.randint(-1, 6, (3, 6), generator=generator)
    found = corrupt_patches(patches, mask_token, masked, sources)
    for image in range(3):
        for place in range(6):
            source = int(sources[image, place])
            wanted = patches[image, place]
            if masked[image, place]:
                wanted = mask_token[0, 0] if source == -1 else patches[image, source]
            assert torch.equal(found[image, place], wanted)
    for image in range(3):  # bool_masked_pos alone: [mask] everywhere
        alone = corrupt_patches(patches, mask_token, masked, None)[image]
        assert all(torch.equal(alone[p], mask_token[0, 0] if masked[image, p] else patches[image, p]) for p in range(6))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_embeddings_are_corrupted_before_positions_are_added(name: str):
    family = FAMILIES[name]
    model = family.build("masked_prediction", dtype=torch.float64)
    images, embeddings = family.images(model.config, dtype=torch.float64), model.vit.embeddings
    inputs = corruption(model.config, images)
    patches = embeddings.patch_embeddings(images)
    positions, _ = embeddings.compute_position_table(model.config.grid, like=patches)
    wanted = corrupt_patches(patches, embeddings.mask_token, inputs["bool_masked_pos"], inputs["patch_sources"])
    found = embeddings(images, **inputs).hidden_states[:, model.config.num_special_tokens :]
    torch.testing.assert_close(found, wanted + positions, rtol=0, atol=1e-12)


def test_padded_batch_is_corrupted_as_each_image_alone():
    family = FAMILIES["plain"]
    model = family.build("masked_prediction", dtype=torch.float64)
    singles = [family.images(model.config, 1, grid, torch.float64) for grid in ((2, 3), (3, 2))]
    images, padding = pad(model.config, singles, [(2, 3), (3, 2)], (3, 4))
    masked, sources = torch.zeros(2, 12, dtype=torch.bool), torch.full((2, 12), -1)
    masked[0, [1, 4]] = masked[1, [0, 9]] = True
    sources[0, 4], sources[1, 9] = 2, 4  # places 1 and 4 of 2x3 are 1 and 4 of 3x4 + one a row: (0, 1), (1, 0)
    together = model(images, bool_masked_pos=masked, patch_sources=sources, patch_attention_mask=padding)
    alone_masks = torch.tensor([[0, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1]]).bool()
    alone_sources = torch.tensor([[-1, -1, -1, 2, -1, -1], [-1, -1, -1, -1, -1, 2]])
    alone = [
        model(single, bool_masked_pos=alone_masks[i : i + 1], patch_sources=alone_sources[i : i + 1])
        for i, single in enumerate(singles)
    ]
    torch.testing.assert_close(together.loss, sum(output.loss for output in alone) / 2, rtol=0, atol=1e-10)
    for name in ("bool_masked_pos", "patch_sources"):
        wrong = {"bool_masked_pos": masked.clone(), "patch_sources": sources.clone()}
        wrong[name][0, 4 if name == "patch_sources" else 3] = 11 if name == "patch_sources" else True
        with pytest.raises(ValueError, match="select patches of padding"):
            model(images, patch_attention_mask=padding, **wrong)


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (4, 4)], ids=str)
def test_patches_are_cut_row_by_row_and_joined_again(grid: tuple[int, int]):
    images = torch.randn(2, 3, grid[0] * 3, grid[1] * 5)
    patches = cut_patches(images, (3, 5))
    for place in range(grid[0] * grid[1]):
        y, x = place // grid[1] * 3, place % grid[1] * 5
        assert torch.equal(patches[:, place], images[:, :, y : y + 3, x : x + 5])
    assert torch.equal(join_patches(patches, grid), images)


@pytest.mark.parametrize("target", TARGETS)
def test_reconstruction_of_a_perfect_prediction(target: str):
    model = build(prediction_target=target, patch_size=8)
    images = images_of(model)
    patches = cut_patches(images, (8, 8))
    if target == "pixels":
        outputs, wanted = patches.flatten(2), patches
    else:
        side = 1 if target == "mean_color" else 4
        labels = torch.tensor([[slow_classes(patch, side) for patch in image] for image in patches])
        outputs = torch.nn.functional.one_hot(labels, 512).double().flatten(2)
        mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (MEAN, STD))
        middle = ((patches * std + mean).unflatten(-1, (side, -1)).unflatten(-3, (side, -1)).mean((-3, -1)) * 8).floor()
        middle = (middle.clamp(0, 7) + 0.5) / 8
        repeated = middle.repeat_interleave(8 // side, -1).repeat_interleave(8 // side, -2)
        wanted = (repeated - mean) / std
    torch.testing.assert_close(model.target.to_patches(outputs), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
def test_next_patch_is_predicted_from_those_before(target: str):
    """Loss by loops on the token before each patch; no later patch changes a prediction."""
    model = build(prediction_target=target, is_causal=True, predict_next_patch=True)
    images = images_of(model)
    inputs = {"bool_masked_pos": torch.arange(16).expand(2, 16) > 0, "patch_sources": torch.arange(16).expand(2, 16)}
    tokens = model.vit(images).last_hidden_state[:, :16]
    before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :15]], dim=1)
    predictions = model.prediction_head(before)
    outputs = model(images, **inputs)
    wanted = slow_loss(model, images, inputs["bool_masked_pos"], predictions)
    assert outputs.loss.item() == pytest.approx(wanted, rel=1e-10)
    patches = cut_patches(images, (4, 4)).clone()
    patches[:, 7:] = patches[:, 7:].flip(-1) + 0.3
    changed = cut_patches(model(join_patches(patches, (4, 4))).reconstruction, (4, 4))
    given = cut_patches(outputs.reconstruction, (4, 4))
    torch.testing.assert_close(changed[:, :8], given[:, :8], rtol=0, atol=1e-12)
    assert not torch.equal(changed[:, 8:], given[:, 8:])


def test_transformers_own_use(tmp_path):
    """`AutoModelForMaskedImageModeling` with `bool_masked_pos` alone, as transformers' example does."""
    build(dtype=torch.float32).save_pretrained(tmp_path)
    model = AutoModelForMaskedImageModeling.from_pretrained(tmp_path)
    images = images_of(model).float()
    masked = torch.rand(2, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    outputs = model(images, bool_masked_pos=masked)
    assert outputs.reconstruction.shape == images.shape
    assert torch.equal(model(images, bool_masked_pos=masked.long()).loss, outputs.loss)
    assert torch.equal(model(images, masked, torch.full((2, 16), -1)).loss, outputs.loss)
    assert model.config.image_mean == MEAN
    new = HfViTForMaskedPatchPrediction(FAMILIES["plain"].config(prediction_target="mean_color"))
    assert new(images, bool_masked_pos=masked).loss.item() == pytest.approx(math.log(512), abs=1e-5), "it says nothing"


# In training, where the head runs on the masked patches alone.
COMPILED = [("pixels", True)]


@pytest.mark.parametrize("target", ["mean_color", "downsampled", "pixels"])
@pytest.mark.parametrize("training", [False, True])
def test_no_masked_patch_is_no_loss(target: str, training: bool):
    """As transformers' ViT, which divides by the number of masked pixels + 1e-5; compiled and not."""
    model = FAMILIES["plain"].build("masked_prediction", prediction_target=target, num_hidden_layers=1).train(training)
    images = FAMILIES["plain"].images(model.config)
    masked = torch.zeros(2, 16, dtype=torch.bool)
    loss = model(images, bool_masked_pos=masked).loss
    loss.backward()
    assert loss == 0
    if (target, training) in COMPILED:
        with torch.no_grad():
            assert torch.compile(model, backend="eager")(images, bool_masked_pos=masked).loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


MASKS = [
    (torch.ones(2, 15), None, r"bool_masked_pos has shape \(2, 15\); it needs \[2, 16\]"),
    (torch.ones(1, 16), None, r"bool_masked_pos has shape \(1, 16\); it needs \[2, 16\]"),
    (torch.ones(2, 4, 4), None, r"bool_masked_pos has shape \(2, 4, 4\); it needs \[2, 16\]"),
    (torch.ones(2, 16), torch.zeros(2, 9, dtype=torch.long), r"patch_sources has shape \(2, 9\); it needs \[2, 16\]"),
    (torch.ones(2, 16), torch.zeros(2, 16), "patch_sources are torch.float32.*int64"),
    (torch.ones(2, 16), torch.full((2, 16), 16), "run from 16 to 16; give -1.*0 to 15"),
    (torch.ones(2, 16), torch.full((2, 16), -2), "run from -2 to -2"),
]


@pytest.mark.parametrize("training", [False, True])
def test_wrong_masks(training: bool):
    model = build().train(training)
    for masked, sources, message in MASKS:
        with pytest.raises(ValueError, match=message):
            model(images_of(model), bool_masked_pos=masked, patch_sources=sources)


def test_mask_for_models_that_cannot_take_it():
    images = images_of(build())
    sources = torch.zeros(2, 16, dtype=torch.long)
    with pytest.raises(ValueError, match="needs bool_masked_pos"):
        build()(images, patch_sources=sources)
    with pytest.raises(ValueError, match=r"with a \[mask\] embedding; load.*AutoModelForMaskedImageModeling"):
        HfViTModel(FAMILIES["plain"].config())(images.float(), bool_masked_pos=torch.ones(2, 16))
    model = build(is_causal=True, predict_next_patch=True)
    with pytest.raises(ValueError, match=r"patch 0, which has no patch before it"):
        model(images, bool_masked_pos=torch.ones(2, 16))
    with pytest.raises(ValueError, match=r"raster order.*one size"):
        model(images, bool_masked_pos=torch.arange(16).expand(2, 16) > 0, patch_attention_mask=torch.ones(2, 4, 4))
    hybrid = FAMILIES["hybrid"].build("masked_prediction")
    with pytest.raises(ValueError, match="image 30x32 px is not a whole number of patches of 8x8 px"):
        hybrid(torch.zeros(1, 3, 30, 32), bool_masked_pos=torch.ones(1, 16))
    assert hybrid(torch.zeros(1, 3, 30, 32)).reconstruction.shape == (1, 3, 30, 32)


TARGETS_THAT_CANNOT_BE = [
    ({"num_channels": 5}, r"with num_channels=5 .* 8\*\*5 color classes; use prediction_target='pixels'"),
    ({"num_channels": 13, "prediction_target": "downsampled"}, r"8\*\*13 color classes"),
    ({"prediction_target": "downsampled", "patch_size": 2}, "shrinks patches to 4x4; a patch of 2x2 px.*'mean_color'"),
]


@pytest.mark.parametrize(("fields", "message"), TARGETS_THAT_CANNOT_BE, ids=range(len(TARGETS_THAT_CANNOT_BE)))
def test_targets_that_cannot_be(fields: dict[str, Any], message: str):
    config = FAMILIES["plain"].config(**fields)
    HfViTForImageClassification(config)  # has no such target
    with pytest.raises(ValueError, match=message):
        HfViTForMaskedPatchPrediction(config)
    assert build_target(FAMILIES["plain"].config(**{**fields, "prediction_target": "pixels"})).num_outputs


def test_other_patch_sizes(tmp_path):
    """Colours of a resized patch need no other head; all its pixels do."""
    build(dtype=torch.float32).save_pretrained(tmp_path / "colours")
    model = HfViTForMaskedPatchPrediction.from_pretrained(tmp_path / "colours", patch_size=8, image_size=32)
    images = images_of(model).float()
    assert model(images, bool_masked_pos=torch.ones(2, 16)).reconstruction.shape == images.shape
    build(dtype=torch.float32, prediction_target="pixels").save_pretrained(tmp_path / "pixels")
    with pytest.raises(ValueError, match="all pixels of patches of 4x4 px, which does not fit patch_size=8x8"):
        HfViTForMaskedPatchPrediction.from_pretrained(tmp_path / "pixels", patch_size=8, image_size=32)
    assert HfViTBackbone.from_pretrained(tmp_path / "pixels", patch_size=8, image_size=32).config.grid == (4, 4)


def test_bfloat16_and_autocast_judge_in_float32():
    model = build(dtype=torch.float32)
    images = images_of(model).float()
    inputs = corruption(model.config, images)
    wanted = model(images, **inputs).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(images, **inputs)
    assert found.logits.dtype == found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, wanted, rtol=0.05, atol=0.05)
