"""Heads of dense prediction on every family's backbone: built, trained a step, saved and loaded again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dense_heads import CASES, FAMILIES, ONE_STRIDE, SIDE, SMALL, UNREAD, VIT, backbone_of, batch_for, build
from huggingface_hub.errors import StrictDataclassError

import hf_vit
from hf_vit.errors import UserError
from hf_vit.families import DENSE_HEADS
from hf_vit.models.resnet_hf_vit import ResNetStem
from hf_vit.subjects.dense import dense_task_of, detect, segment
from hf_vit.training.dense_model import build_dense_model, model_inputs
from hf_vit.training.model_source import build_classifier, find_model, own_head


def predict(head: str, model: Any, processor: Any, pixel_values: torch.Tensor) -> list[Any]:
    """Class maps, or boxes, labels, scores and masks."""
    sizes = [(50, 70), (64, 64)]
    if DENSE_HEADS[head].task == "segmentation":
        return segment(model, processor, pixel_values, sizes)
    found = detect(model, processor, pixel_values, sizes)
    return [each[name] for each in found for name in sorted(each)]


# A head reads maps of one stride or of several: by default every head on a family of each kind, every family once.
DEFAULT = [case for case in CASES if case[0] in ("plain", "bit") or case[1] == "linear"]
SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in CASES if each not in DEFAULT]  # a minute together


@pytest.mark.parametrize(("family", "head"), DEFAULT + SLOW)
def test_every_head_on_every_family(family: str, head: str, tmp_path: Path) -> None:
    """All of the backbone gets a gradient, and what is saved is loaded by its Auto class, bit for bit."""
    kind, (model, processor) = DENSE_HEADS[head], build(family, head)
    assert type(model) is kind.model_class
    assert dense_task_of(model) == kind.task
    assert type(processor) is getattr(transformers, kind.processor)
    assert processor.size == {"height": SIDE, "width": SIDE}
    assert model.config.id2label == {0: "sky", 1: "cat"}
    batch = batch_for(head)
    model.train()(**model_inputs(model, batch)).loss.sum().backward()
    unread = UNREAD.get(family, "-")
    without = [name for name, parameter in backbone_of(model).named_parameters() if parameter.grad is None]
    assert [name for name in without if not name.startswith(unread)] == []
    model.eval().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again, info = getattr(transformers, kind.auto_class).from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is kind.model_class
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    further, _ = build_dense_model(find_model(str(tmp_path)), head, ["sky", "cat"])
    assert type(further) is kind.model_class
    assert all(torch.equal(value, state[name]) for name, value in further.state_dict().items())
    loaded = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    pairs = ((model, processor), (again, loaded), (further.eval(), loaded))
    before, *later = (predict(head, *pair, batch["pixel_values"]) for pair in pairs)
    for after in later:
        for old, new in zip(before, after, strict=True):
            # The last bit of a convolution depends on where its kernel lies in memory.
            torch.testing.assert_close(new, old, rtol=0, atol=1e-3 if old.is_floating_point() else 0)


@pytest.mark.parametrize("head", ["detr", "deformable-detr"])
def test_crowds_are_not_learnt_in_a_validation_loss_either(head: str) -> None:
    model, _ = build("plain", head)
    batch = batch_for(head)
    few = model_inputs(model, batch)["labels"]
    first = batch["labels"][0]
    crowded = {name: torch.cat([value, value]) for name, value in first.items()} | {"iscrowd": torch.tensor([0, 1])}
    many = model_inputs(model, {**batch, "labels": [crowded, batch["labels"][1]]})["labels"]
    for one, other in zip(few, many, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one | other)


@pytest.mark.parametrize("head", DENSE_HEADS)
def test_a_checkpoint_is_trained_on(head: str, tmp_path: Path) -> None:
    """For other classes with its own head, in another size, with another head, and as a classifier."""
    model, processor = build("plain", head)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    source, old = find_model(str(tmp_path)), model.state_dict()
    assert own_head(str(tmp_path), DENSE_HEADS[head].task) == head
    assert own_head(str(tmp_path), "classification") is None
    other, _ = build_dense_model(source, head, ["sky", "dog"])
    wider, _ = build_dense_model(source, head, ["sky", "cat", "dog"])
    changed = {name for name, value in wider.state_dict().items() if value.shape != old[name].shape}
    assert changed
    for further in (other, wider):
        state = further.state_dict()
        assert state.keys() == old.keys()
        fresh = {name for name, value in state.items() if not torch.equal(value, old[name])}
        assert {name for name in changed if name.endswith("r.weight")} <= fresh <= changed
    assert wider.train()(**model_inputs(wider, batch_for(head))).loss.sum().isfinite()
    larger, processor = build_dense_model(source, head, ["sky", "cat"], image_size=(2 * SIDE, SIDE))
    assert processor.size == {"height": 2 * SIDE, "width": SIDE}
    differing = {name for name, value in larger.state_dict().items() if not torch.equal(value, old[name])}
    assert [name.rpartition(".")[2] for name in differing] == ["position_embeddings"]
    if head not in ("linear", "detr"):  # whose width follows from the backbone, or from the fields
        with pytest.raises(UserError, match=r"is of another shape .*leave --head-width"):
            build_dense_model(source, head, ["sky", "cat"], width=2 * SMALL[head]["width"])
    another = "linear" if head != "linear" else "detr"
    given = {} if another == "linear" else SMALL["detr"]
    exchanged, _ = build_dense_model(source, another, ["sky", "cat"], **given)
    classifier = build_classifier(source, ["sky", "cat"])
    theirs = backbone_of(model).state_dict()
    for taken in (backbone_of(exchanged).state_dict(), classifier.state_dict()):
        same = [torch.equal(theirs[name], value) for name, value in taken.items() if name in theirs]
        assert all(same)
        assert len(same) > 10


@pytest.mark.parametrize("head", DENSE_HEADS)
def test_the_loss_falls(head: str) -> None:
    model, _ = build("plain", head)
    inputs = model_inputs(model.train(), batch_for(head))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(**inputs).loss.sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoints_weights_are_the_backbones(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    classifier = transformers.AutoModelForImageClassification.from_config(config)
    classifier.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(image_mean=[0.1] * 3).save_pretrained(tmp_path)
    model, processor = build_dense_model(find_model(str(tmp_path)), "linear", ["sky", "cat"])
    assert list(processor.image_mean) == [0.1] * 3
    state, shared = classifier.state_dict(), 0
    for name, value in backbone_of(model).state_dict().items():
        assert torch.equal(value, state[name]), name
        shared += 1
    assert shared > 10


@pytest.mark.parametrize(
    ("family", "head", "strides"),
    [
        ("plain", "upernet", [4, 8, 16, 32]),
        ("plain", "deformable-detr", [8, 16, 32]),
        ("plain", "detr", [16]),
        ("axial", "mask-rcnn", [4, 8, 16, 32]),
        ("hybrid", "upernet", [4, 8, 16, 16]),
        ("hybrid", "deformable-detr", [8, 16, 16]),
        ("hybrid", "linear", [16]),
        ("bit", "mask-rcnn", [4, 8, 16, 32]),
        ("bit", "linear", [4, 8, 16, 32]),
        ("axial_resnet", "deformable-detr", [8, 16, 32]),
        ("axial_resnet", "detr", [32]),
    ],
)
@torch.no_grad()
def test_the_maps_have_the_strides_that_are_told(family: str, head: str, strides: list[int]) -> None:
    backbone = backbone_of(build(family, head)[0]).eval()
    maps = backbone(torch.zeros(1, 3, SIDE, 2 * SIDE)).feature_maps
    assert [SIDE // each.shape[2] for each in maps] == strides == backbone.strides
    assert [2 * SIDE // each.shape[3] for each in maps] == strides
    assert [each.shape[1] for each in maps] == backbone.channels


@pytest.mark.parametrize(("family", "head"), ONE_STRIDE)
def test_a_head_that_does_not_fit_is_refused(family: str, head: str) -> None:
    with pytest.raises(
        hf_vit.UserError, match=rf"the head '{head}' reads \d maps of different strides.*linear or detr"
    ):
        build(family, head)


def test_what_else_is_refused() -> None:
    with pytest.raises(hf_vit.UserError, match="no head 'fcn'; it needs one of linear, upernet"):
        build_dense_model(find_model(FAMILIES["plain"]()), "fcn", ["a"])
    with pytest.raises(hf_vit.UserError, match="the head 'linear' has no num_queries"):
        build("plain", "linear", num_queries=3)
    source = find_model(hf_vit.HfViTConfig(**{**VIT, "image_size": 63}, patch_size=7))
    with pytest.raises(hf_vit.UserError, match=r"patch of 7x7 px does not fit.*power of two"):
        build_dense_model(source, "upernet", ["a", "b"])


@torch.no_grad()
def test_stem_maps_are_the_stems() -> None:
    """Against stems that end earlier."""
    depths = (1, 2, 1)
    config = hf_vit.HfHybridViTConfig(**VIT, stage_depths=depths, stem_width=32, stem_stages=(1, 3))
    backbone = hf_vit.HfHybridViTBackbone(config).eval()
    pixel_values = torch.randn(2, 3, 48, 80)
    maps, state = backbone(pixel_values).feature_maps, backbone.vit.embeddings.patch_embeddings.stem.state_dict()
    for stage, given in ((1, maps[0]), (3, maps[1])):
        stem = ResNetStem(hf_vit.HfHybridViTConfig(**VIT, stage_depths=depths[:stage], stem_width=32))
        stem.load_state_dict({name: value for name, value in state.items() if name in stem.state_dict()})
        torch.testing.assert_close(given, stem(pixel_values), rtol=0, atol=1e-5)
    plain = hf_vit.HfHybridViTBackbone(hf_vit.HfHybridViTConfig(**VIT, stage_depths=depths, stem_width=32)).eval()
    plain.load_state_dict(backbone.state_dict())
    assert torch.equal(maps[2], plain(pixel_values).feature_maps[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stem_stages": (3, 1)}, r"stem_stages=\(3, 1\) must be some of the stem's stages \(1, 2, 3\)"),
        ({"stem_stages": (4,)}, r"stem_stages=\(4,\) must be some"),
        ({"stem_stages": (1,), "use_feature_pyramid": True}, "neither with use_feature_pyramid=True"),
        ({"pyramid_strides": (8, 4)}, r"pyramid_strides=\(8, 4\) must be some of \(4, 8, 16, 32\) px"),
        ({"pyramid_strides": ()}, r"pyramid_strides=\(\) must be some"),
    ],
)
def test_wrong_maps_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictDataclassError, match=message):
        hf_vit.HfHybridViTConfig(**VIT, stem_width=32, **wrong)


def test_a_head_has_a_dropout_of_its_own():
    model: Any = build("plain", "detr", backbone_dropout=0.25, dropout=0.125)[0]
    assert model.config.dropout == 0.125
    assert model.config.backbone_config.hidden_dropout_prob == 0.25
