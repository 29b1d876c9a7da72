"""Dense prediction: heads on every backbone, and segmentation and detection under the one driver."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from data.conftest import write_rooms
from dense_heads import CASES, FAMILIES, ONE_STRIDE, SIDE, SMALL, UNREAD, VIT, backbone_of, batch_for, build
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from training.conftest import assert_complete, same_weights
from training.dense_jobs import DATA, TINY, learn
from zygote import Zygote

import hf_vit
from hf_vit import HfViTConfig, UserError
from hf_vit.audit.results import audit_results
from hf_vit.data import load_data, scenes
from hf_vit.evaluation import embed, evaluate, predict
from hf_vit.families import DENSE_HEADS
from hf_vit.loading.model import load_model
from hf_vit.loading.outputs import detect, get_dense_task, segment
from hf_vit.loading.start import build_classifier, find_dense_head, find_model
from hf_vit.models.resnet_hf_vit import ResNetStem
from hf_vit.results.facts import Facts
from hf_vit.training import finetune
from hf_vit.training.recipes.registry import find_recipe
from hf_vit.training.tasks.dense import build_dense_model, make_model_inputs
from hf_vit.training.trainer.optimizers import number_layers


def answers_of(head: str, model: Any, processor: Any, pixel_values: torch.Tensor) -> list[Any]:
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
    assert get_dense_task(model) == kind.task
    assert type(processor) is getattr(transformers, kind.processor)
    assert processor.size == {"height": SIDE, "width": SIDE}
    assert model.config.id2label == {0: "sky", 1: "cat"}
    batch = batch_for(head)
    model.train()(**make_model_inputs(model, batch)).loss.sum().backward()
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
    before, *later = (answers_of(head, *pair, batch["pixel_values"]) for pair in pairs)
    for after in later:
        for old, new in zip(before, after, strict=True):
            # The last bit of a convolution depends on where its kernel lies in memory.
            torch.testing.assert_close(new, old, rtol=0, atol=1e-3 if old.is_floating_point() else 0)


@pytest.mark.parametrize("head", ["detr", "deformable-detr"])
def test_crowds_are_not_learnt_in_a_validation_loss_either(head: str) -> None:
    model, _ = build("plain", head)
    batch = batch_for(head)
    few = make_model_inputs(model, batch)["labels"]
    first = batch["labels"][0]
    crowded = {name: torch.cat([value, value]) for name, value in first.items()} | {"iscrowd": torch.tensor([0, 1])}
    many = make_model_inputs(model, {**batch, "labels": [crowded, batch["labels"][1]]})["labels"]
    for one, other in zip(few, many, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one | other)


def test_boxes_are_not_rounded_to_bfloat16() -> None:
    """Without deltas every box is an anchor, in the image; from 256 px on bfloat16 has even numbers only.

    The last column of the coarsest map, at 768 px, reaches beyond the image.
    """
    torch.manual_seed(0)
    height, width, sizes = 32, 784, (32, 64, 128, 256)
    backbone = HfViTConfig(**TINY | {"image_size": (height, width), "num_hidden_layers": 1}, use_feature_pyramid=True)
    kind: Any = DENSE_HEADS["mask-rcnn"]
    fields = dict(use_masks=False, representation_size=8, box_score_threshold=0.0)
    model = kind.model_class(kind.config_class(backbone_config=backbone, **fields)).eval()
    for layer in (model.rpn.head.bbox_pred, model.roi_heads.box_predictor.bbox_pred):
        nn.init.zeros_(layer.weight)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        (found,) = model(torch.randn(1, 3, height, width)).detections
    anchors = []
    for stride, size in zip(model.backbone.strides, sizes, strict=True):
        for x, y, ratio in product(range(0, width, stride), range(0, height, stride), (0.5, 1.0, 2.0)):
            right, down = np.round(size / ratio**0.5 / 2), np.round(size * ratio**0.5 / 2)
            anchors.append([x - right, y - down, x + right, y + down])
    inside = torch.tensor(np.clip(anchors, 0, [width, height, width, height]), dtype=torch.float32)
    assert len(found["boxes"]) > 50
    assert float((found["boxes"].float()[:, None] - inside).abs().amax(-1).amin(-1).max()) < 1e-3


@pytest.mark.parametrize("head", ["detr", "deformable-detr"])
def test_boxes_of_queries_are_not_rounded_to_bfloat16(head: str) -> None:
    model, _ = build("plain", head)
    with torch.autocast("cpu", torch.bfloat16):
        boxes = model.train()(**make_model_inputs(model, batch_for(head))).pred_boxes
    assert boxes.dtype == torch.float32
    assert not torch.equal(boxes, boxes.bfloat16().float())


@pytest.mark.parametrize("head", ["linear", "detr"])
def test_there_are_no_features_of_the_whole_image(head: str, tmp_path: Path) -> None:
    model, processor = build("plain", head)
    for part in (model, processor):
        part.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=f" is a {DENSE_HEADS[head].task} model, which has no features of the whole"):
        embed(str(tmp_path / "model"), "digits", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="not an image classifier"):
        load_model(tmp_path / "model", "cpu", as_classifier=True)


@pytest.mark.parametrize("head", DENSE_HEADS)
def test_a_checkpoint_is_trained_on(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For other classes with its own head, in another size, with another head, and as a classifier."""
    model, processor = build("plain", head)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {"1": "cat", "0": "sky"}  # as programs that sort names write 0, 1, 10, 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    source, old = find_model(str(tmp_path)), model.state_dict()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    for name in (str(tmp_path), "me/dense"):
        assert find_dense_head(name, DENSE_HEADS[head].task) == head
        assert find_dense_head(name, "classification") is None
    other, _ = build_dense_model(source, head, ["sky", "dog"])
    wider, _ = build_dense_model(source, head, ["sky", "cat", "dog"])
    changed = {name for name, value in wider.state_dict().items() if value.shape != old[name].shape}
    assert changed
    for further in (other, wider):
        state = further.state_dict()
        assert state.keys() == old.keys()
        fresh = {name for name, value in state.items() if not torch.equal(value, old[name])}
        assert {name for name in changed if name.endswith("r.weight")} <= fresh <= changed
    assert wider.train()(**make_model_inputs(wider, batch_for(head))).loss.sum().isfinite()
    larger, processor = build_dense_model(source, head, ["sky", "cat"], image_size=(SIDE + 16, SIDE))
    assert processor.size == {"height": SIDE + 16, "width": SIDE}
    pixels = processor(images=Image.new("RGB", (9, 7)), return_tensors="pt")["pixel_values"]
    assert pixels.shape[2:] == (SIDE + 16, SIDE)
    differing = {name for name, value in larger.state_dict().items() if not torch.equal(value, old[name])}
    assert [name.rpartition(".")[2] for name in differing] == ["position_embeddings"]
    if head not in ("linear", "detr"):  # whose width follows from the backbone, or from the fields
        with pytest.raises(UserError, match=r"has other sizes .*leave --head-width out"):
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


@pytest.mark.parametrize("norm", [False, True, None])
def test_a_linear_head_normalizes_maps_without_a_norm(norm: bool | None) -> None:
    """As those of Perception Encoder's spatial ViTs."""
    config = hf_vit.HfViTConfig(**VIT, patch_size=16, pooling="gap", norm_after_pooling=norm)
    assert build_dense_model(find_model(config), "linear", ["a", "b"])[0].config.use_norm == (norm is None)


@pytest.mark.parametrize("head", DENSE_HEADS)
def test_the_loss_falls(head: str) -> None:
    model, _ = build("plain", head)
    inputs = make_model_inputs(model.train(), batch_for(head))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    while not losses or losses[-1] > 0.7 * losses[0]:
        assert len(losses) < 20, losses
        optimizer.zero_grad()
        loss = model(**inputs).loss.sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


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
        ("plain", "upernet", [4, 8, 16, 32]), ("plain", "deformable-detr", [8, 16, 32]), ("plain", "detr", [16]),
        ("axial", "mask-rcnn", [4, 8, 16, 32]), ("hybrid", "upernet", [4, 8, 16, 16]),
        ("hybrid", "deformable-detr", [8, 16, 16]), ("hybrid", "linear", [16]), ("bit", "mask-rcnn", [4, 8, 16, 32]),
        ("bit", "linear", [4, 8, 16, 32]), ("axial_resnet", "deformable-detr", [8, 16, 32]),
        ("axial_resnet", "detr", [32]),
    ],
)  # fmt: skip
@torch.no_grad()
def test_the_maps_have_the_strides_that_are_told(family: str, head: str, strides: list[int]) -> None:
    backbone = backbone_of(build(family, head)[0]).eval()
    maps = backbone(torch.zeros(1, 3, SIDE, 2 * SIDE)).feature_maps
    assert [SIDE // each.shape[2] for each in maps] == strides == backbone.strides
    assert [2 * SIDE // each.shape[3] for each in maps] == strides
    assert [each.shape[1] for each in maps] == backbone.channels


@pytest.mark.parametrize("head", DENSE_HEADS)
def test_layers_are_those_of_the_backbone(head: str) -> None:
    model, _ = build("plain", head)
    names = {id(parameter): name for name, parameter in backbone_of(model).named_parameters()}
    numbers, known = number_layers(model), {"vit.embeddings.": 0, "vit.layers.0.": 1, "vit.layers.1.": 2}
    for name, parameter in model.named_parameters():
        own_name = names.get(id(parameter), "")
        assert numbers[name] == next((known[start] for start in known if own_name.startswith(start)), 3), name


@pytest.mark.parametrize(("family", "head"), ONE_STRIDE)
def test_a_head_that_does_not_fit_is_refused(family: str, head: str) -> None:
    with pytest.raises(UserError, match=rf"the head '{head}' needs \d feature maps .*linear or detr"):
        build(family, head)


def test_what_else_is_refused() -> None:
    with pytest.raises(UserError, match="--head fcn is unknown; choose one of linear, upernet"):
        build_dense_model(find_model(FAMILIES["plain"]()), "fcn", ["a"])
    with pytest.raises(UserError, match="sets num_queries, which the head 'linear' does not have"):
        build("plain", "linear", num_queries=3)
    with pytest.raises(ValueError, match="the loss compares classes, but num_labels=1"):
        build("plain", "linear", id2label={0: "cat"})[0](**batch_for("linear"))
    batch = batch_for("mask-rcnn")
    batch["labels"][0]["boxes"][0, 2] = batch["labels"][0]["boxes"][0, 0]
    with pytest.raises(ValueError, match="a box without width or height, whose loss is infinite"):
        build("plain", "mask-rcnn")[0].train()(**batch)
    mask_rcnn, odd_patch = DENSE_HEADS["mask-rcnn"], hf_vit.HfViTConfig(**VIT, patch_size=14)
    with pytest.raises(ValueError, match=r"power of two; got 14x14 px"):  # torchvision takes 14 px for 16
        mask_rcnn.model_class(mask_rcnn.config_class(backbone_config=odd_patch, anchor_sizes=(32,)))
    with pytest.raises(ValueError, match="image_size=128 is a field of backbone_config"):
        build("plain", "linear")[0].config.image_size = 128
    source = find_model(hf_vit.HfViTConfig(**{**VIT, "image_size": 63}, patch_size=7))
    with pytest.raises(UserError, match=r"power of two; got 7x7 px"):
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
        ({"stem_stages": (1,), "use_feature_pyramid": True}, "cannot be combined with use_feature_pyramid=True"),
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


TASKS = [("segmentation", "linear"), ("segmentation", "upernet"), ("detection", "mask-rcnn")]
MODELS = TASKS[::2]


@pytest.fixture(autouse=True, scope="module")
def few_held_out():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scenes, "HELD_OUT", 6)
        yield


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model[0])
def learnt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished model of each task, with its checkpoints."""
    task, head = request.param
    settings = dict(steps=8, evaluations=4, keep_checkpoints=True)
    result = learn(tmp_path_factory.mktemp(task) / "learnt", task, head, **settings)
    return task, head, settings, result


@pytest.mark.parametrize(("task", "head"), TASKS)
def test_a_finished_folder(tmp_path: Path, task: str, head: str) -> None:
    """Model, facts with the test, card with its numbers, curve, pictures; the loss falls; nothing is learnt again."""
    result = learn(tmp_path / "out", task, head, steps=8)
    losses = [entry["loss"] for entry in result.history if "loss" in entry]
    assert losses[-1] < losses[0]
    training, test = Facts.load(tmp_path / "out").records
    assert (training.values["task"], training.values["head"], training.values["head_width"]) == (task, head, 16)
    measured = "mean_iou" if task == "segmentation" else "ap50"
    assert training.values[f"validation_{measured}"] == result.validation[measured]
    assert (test.values["protocol"], test.data.split, test.data.size) == (task, "test", 6)
    assert result.test.headline() == test.values["headline"]
    figures = ("learning_curve.png", f"evaluation_{task}.png", f"evaluation_{task}_worst_images.png")
    assert_complete(tmp_path / "out", *figures)
    card = (tmp_path / "out" / "README.md").read_text().replace("\\", "")
    for name, value in test.values["headline"].items():
        assert f"| {name} | {value:.2%} |" in card
    assert "worst_images" not in card, "pictures with images of the data are shared on request alone"
    again = learn(tmp_path / "out", task, head, steps=8, resume=True)
    assert again.test.values() == result.test.values()
    assert again.validation == result.validation
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, result.model.state_dict()[name].cpu())


_DETR: dict[str, Any] = {
    **{"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 8},
    **find_recipe("detr-coco").architecture,
}
_MASK2FORMER = {"encoder_layers": 1, "decoder_layers": 2, "dim_feedforward": 32, "num_queries": 8}


@pytest.mark.parametrize(
    ("task", "head", "fields"),
    [
        ("segmentation", "mask2former", _MASK2FORMER),
        ("detection", "detr", _DETR),
        ("detection", "deformable-detr", _DETR),
    ],
)
def test_heads_of_transformers(tmp_path: Path, task: str, head: str, fields: dict[str, Any]) -> None:
    """One step of each through the task: learnt, judged, and opened again by its name alone."""
    recipe = replace(find_recipe(f"{task}-small"), architecture=fields)
    result = learn(tmp_path / "out", task, head, recipe=recipe, steps=1, evaluations=1, batch_size=2, head_width=64)
    assert result.steps == 1
    again = evaluate(str(tmp_path / "out"), DATA, device="cpu", progress=False)
    assert (again.protocol, again.result.values()) == (task, result.test.values())
    assert Facts.load(tmp_path / "out").records[0].values["recipe"]["architecture"] == fields


@pytest.mark.parametrize("head", ["linear", "upernet"])  # the feature pyramid of the second learns
def test_frozen_backbone(tmp_path: Path, head: str) -> None:
    """The weights of a rotary checkpoint stay, to the bit; all that surrounds them learns."""
    config = hf_vit.HfViTConfig(**TINY, rotary_embedding="axial", position_embedding="none")
    hf_vit.HfViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "encoder")
    settings = dict(task="segmentation", head=head, tune="head", batch_size=8, evaluations=1, head_width=16)
    once, twice = (  # the rate of the first step is 0
        finetune(str(tmp_path / "encoder"), DATA, tmp_path / f"out-{steps}", steps=steps, **settings)
        for steps in (1, 2)
    )
    before, after = (load_file(result.folder / "model.safetensors") for result in (once, twice))
    encoder = load_file(tmp_path / "encoder" / "model.safetensors")
    frozen = {f"backbone.vit.{name}": value for name, value in encoder.items()}
    assert {name for name, value in after.items() if torch.equal(value, frozen.get(name, before[name]))} == {*frozen}


def test_killed_and_resumed_to_the_same_bits(learnt: Any, killed: Any) -> None:
    """Weights, best step, validation and test are those of the unbroken run; a process is killed in test_resume.py."""
    task, head, settings, unbroken = learnt
    resumed = learn(killed(unbroken, "killed", lost=2), task, head, **settings, resume=True)
    assert same_weights(resumed.folder, unbroken.folder)
    assert (resumed.validation, resumed.best_step) == (unbroken.validation, unbroken.best_step)
    assert resumed.test.values() == unbroken.test.values()


@pytest.mark.slow  # two processes train
def test_two_processes_judge_every_image_once(learnt: Any, tmp_path: Path, warm: Zygote) -> None:
    """Both say the same; of masks without ignored pixels it is what one process learns, but for rounding."""
    task, head, _, _ = learnt
    settings = dict(optimizer="sgd", learning_rate=0.01)  # no Adam, which makes steps of rounding errors
    job = {"output": str(tmp_path / "two"), "task": task, "head": head, "settings": settings}
    assert warm.together("training.dense_jobs:learn_alone", tmp_path / "processes", **job) == ""
    told = [json.loads((tmp_path / f"processes/process-{rank}/answer.json").read_text()) for rank in range(2)]
    assert told[0] == told[1]
    record = Facts.load(tmp_path / "two").records[0]
    assert record.values["world_size"] == 2
    if task == "segmentation":
        one = learn(tmp_path / "one", task, head, **settings)
        ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
        assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5
        assert told[0]["validation"] == pytest.approx(one.validation, abs=2e-3)


@pytest.mark.slow  # two processes train
@pytest.mark.parametrize(("task", "head"), [("detection", "detr"), ("segmentation", "mask2former")])
def test_losses_per_object_do_not_depend_on_processes(task: str, head: str, tmp_path: Path, warm: Zygote) -> None:
    """Of six images to be judged in batches of two, the second process has one batch, the first two."""
    settings = dict(optimizer="sgd", learning_rate=1e-9, batch_size=4, micro_batch_size=2, steps=2, evaluations=1)
    settings["head_width"] = 32  # the groups of Mask2Former's norms
    job = {"output": str(tmp_path / "two"), "task": task, "head": head, "settings": settings}
    assert warm.together("training.dense_jobs:learn_alone", tmp_path / "processes", **job) == ""
    two = json.loads((tmp_path / "processes/process-0/answer.json").read_text())
    one = learn(tmp_path / "one", task, head, **settings)
    (loss,) = [entry["loss"] for entry in one.history if "loss" in entry]
    assert two["losses"] == [pytest.approx(loss, rel=0.1)]  # dropout, and weights of classes per micro-batch
    assert two["validation"]["loss"] == pytest.approx(one.validation["loss"], rel=1e-3 if head == "detr" else 0.1)


@pytest.mark.slow  # two processes train
def test_two_processes_train_a_backbone_with_parts_that_no_map_passes(tmp_path: Path, warm: Zygote) -> None:
    """A BiT's last norm has no gradient, for which torch would wait at the second step."""
    settings = {"family": "bit", "steps": 2, "evaluations": 1}
    job = {"output": str(tmp_path / "two"), "task": "segmentation", "head": "linear", "settings": settings}
    assert warm.together("training.dense_jobs:learn_alone", tmp_path / "processes", **job) == ""


@pytest.mark.parametrize(("head", "least"), [("linear", 1), ("upernet", 2)])  # UperNet has batch norms
def test_pixels_that_are_not_judged_weigh_nothing(tmp_path: Path, head: str, least: int) -> None:
    """However many there are in a micro-batch, and where there are no others."""
    side = TINY["image_size"]
    random = np.random.default_rng(0)
    masks = {}
    for split, count in (("training", 8), ("validation", 3), ("test", 3)):
        for number in range(count):
            masks[f"{split}/{number}"] = mask = random.integers(0, 3, (side, side), dtype=np.uint8)
            mask[(0 if number == 2 and split != "test" else 3) if number % 2 == 0 else side :] = 255
    data = str(write_rooms(tmp_path / "rooms", masks))
    settings = dict(
        steps=2, evaluations=1, batch_size=8, device="cpu", precision="fp32", optimizer="sgd",
        head_width=16 if head == "upernet" else None, momentum=0.0,
        learning_rate=0.1, schedule="constant", warmup=0, clip=0.0, dropout=0.0,
        drop_path=0.0, random_resized_crop=(0, 0), scale_jitter=(0, 0), horizontal_flip=0.0, color_jitter=0.0,
    )  # fmt: skip
    learnt = {}
    for size in (8, least):
        output = tmp_path / f"out-{size}"
        model = hf_vit.HfViTConfig(**TINY)
        result = finetune(model, data, output, task="segmentation", head=head, micro_batch_size=size, **settings)
        learnt[size] = load_file(output / "model.safetensors"), result.validation["loss"]
    assert np.isfinite([loss for _, loss in learnt.values()]).all()
    if head == "linear":
        assert learnt[1][1] == pytest.approx(learnt[8][1], abs=1e-5)
        for name, value in learnt[8][0].items():
            torch.testing.assert_close(learnt[1][0][name], value, rtol=0, atol=1e-6, msg=name)


def test_a_folder_is_measured_and_predicts(learnt: Any, tmp_path: Path, succeeds: Any) -> None:
    """Without a word of the task: the same test again, and answers as JSON, masks and pictures."""
    task, _, _, result = learnt
    again = evaluate(str(result.folder), DATA, device="cpu", progress=False)
    assert again.protocol == task
    assert again.result.values() == result.test.values()
    findings = audit_results(result.folder, device="cpu")
    assert {finding.verdict for finding in findings} == {"equal"}, "what the card tells is measured again"
    assert len(findings) == len(result.test.headline())
    shutil.copytree(result.folder, tmp_path / "changed", ignore=shutil.ignore_patterns("checkpoints"))
    facts = json.loads((tmp_path / "changed" / "facts.json").read_text())
    for change, verdict in ((5e-5, "rounding"), (5e-4, "different")):
        numbers = {name: value + change for name, value in result.test.headline().items()}
        facts[-1]["values"]["headline"] = numbers
        (tmp_path / "changed" / "facts.json").write_text(json.dumps(facts))
        verdicts = {
            each.verdict
            for each in audit_results(tmp_path / "changed", device="cpu")
            if each.published in numbers.values()
        }
        assert verdicts == {verdict}
    image = load_data(DATA, target="mask").split("test")[0]["image"].resize((48, 40))
    for name in ("one", "One"):
        (tmp_path / name.lower()).mkdir(exist_ok=True)
        image.save(tmp_path / name.lower() / f"{name}.png")
    files = sorted((tmp_path / "one").iterdir())
    succeeds("predict", result.folder, *files, "--output", tmp_path / "out", "--threshold", 0)
    listed = json.loads((tmp_path / "out" / "predictions.json").read_text())
    told = predict(str(result.folder), files, threshold=0.0, device="cpu")
    assert [each["answers"] for each in listed] == [each.answers for each in told]
    assert len({each["mask"] for each in listed}) == 2
    mask = np.asarray(Image.open(tmp_path / "out" / listed[0]["mask"]))
    assert mask.shape == (40, 48)
    if task == "segmentation":
        shares = {answer["label"]: answer["share"] for answer in listed[0]["answers"]}
        names = result.model.config.id2label
        assert shares == pytest.approx({names[k]: float(np.mean(mask == k)) for k in np.unique(mask).tolist()})
    else:
        boxes = np.asarray([answer["box"] for answer in listed[0]["answers"]])
        assert boxes.min() >= 0
        assert (boxes.max(axis=0) <= [48, 40, 48, 40]).all()
        scores = [answer["score"] for answer in listed[0]["answers"]]
        assert scores == sorted(scores, reverse=True)
    with Image.open(tmp_path / "out" / listed[0]["picture"]) as picture:
        assert picture.size == (48, 40)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(task="depth"), "--task depth is unknown.*classification, segmentation, detection"),
        (dict(task="segmentation", head="detr"), "--head detr does not work for segmentation.*upernet, mask2former"),
        (dict(task="detection", head="linear"), "--head linear does not work for detection.*detr, deformable-detr"),
        (dict(task="classification", head="linear"), "only work with --task segmentation or detection"),
        (dict(task="segmentation", head_width=0), "--head-width is 0, but it must be at least 1 channel"),
        (dict(task="segmentation", streaming=True), "--streaming does not work for segmentation and detection"),
        (dict(task="segmentation", mixup_alpha=0.2), "mixup_alpha"),
        (dict(task="detection", rotation_degrees=5.0), "rotation_degrees"),
        (dict(task="segmentation", label_smoothing=0.1), "--label-smoothing"),
        (dict(task="detection", loss="bce"), "--loss"),
        (dict(task="detection", tune="lora"), r"--tune \(lora\) does not work for"),
        (dict(task="segmentation", lr_sweep=True), "--lr-sweep compares validation accuracies"),
        (dict(task="segmentation", sam_rho=0.05), "--sam-rho"),
    ],
)
def test_refused_before_anything_is_read(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        finetune("no/such/model", "no-such-data", tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("head", "steps"), [("linear", 1), ("detr", 2)])
def test_a_training_that_diverges_in_its_last_step_has_no_good_validation(
    tmp_path: Path, head: str, steps: int
) -> None:
    """Of NaN the processor makes the background, which most pixels show, and DETR's loss raises an error of its own."""
    task = DENSE_HEADS[head].task
    message = {"linear": "outputs are NaN or infinite", "detr": "^the loss became NaN or infinite after step 1 "}[head]
    with pytest.raises(UserError, match=message):
        learn(tmp_path / "out", task, head, steps=steps, evaluations=1, learning_rate=1e38, warmup=0.0)
    for path in (tmp_path / "out").rglob("trainer_state.json"):
        assert np.isnan(
            [json.loads(path.read_text())["log_history"][-1][f"eval_{name}"] for name in ("score", "mean_iou")]
        ).all()


def test_labels_are_no_masks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither masks nor objects"):
        finetune(hf_vit.HfViTConfig(**TINY), "digits", tmp_path / "out", task="segmentation")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("empty", ["validation", "test"])
def test_a_split_without_annotations_is_told_before_the_training(tmp_path: Path, empty: str) -> None:
    """Such as published test splits, whose masks are 255 everywhere."""
    masks = {f"{split}/0": np.eye(32, dtype=np.uint8) for split in ("training", "validation", "test")}
    masks[f"{empty}/0"][:] = 255
    rooms = write_rooms(tmp_path / "rooms", masks)
    with pytest.raises(UserError, match=f"^no {empty} image has pixels of any class.* move the split away"):
        finetune(hf_vit.HfViTConfig(**TINY), str(rooms), tmp_path / "out", task="segmentation", steps=1)
    assert not (tmp_path / "out").exists()


def test_a_finished_model_of_another_task(tmp_path: Path) -> None:
    learn(tmp_path / "out", "segmentation", "linear", steps=1, evaluations=1)
    with pytest.raises(UserError, match="a model for another task"):
        learn(tmp_path / "out", "detection", "mask-rcnn", resume=True)
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["id2label"]["1"] == scenes.SHAPES[0]
