"""Learning from a teacher: the losses by hand, what the teacher sees, whose classes it speaks of, exact resuming."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from training.conftest import NAMES, Images, make_teacher_model, same_weights, save_model
from transformers import (
    AutoModelForImageClassification,
    ConvNextImageProcessor,
    EfficientNetImageProcessor,
    ResNetConfig,
    ResNetForImageClassification,
    TrainingArguments,
    ViTImageProcessor,
)

from hf_vit import HfViTForImageClassification, UserError
from hf_vit.data import make_processor
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.pixels import PixelScale
from hf_vit.models.modeling_hf_vit import HfViTImageClassifierOutput
from hf_vit.results.facts import Facts
from hf_vit.training import FinetuneOptions, finetune
from hf_vit.training.tasks.distillation import (
    DistillationOptions,
    DistillationTrainer,
    Teacher,
    distillation_loss,
    open_teacher,
)

SETTINGS = dict(steps=8, evaluations=4, batch_size=12, learning_rate=2e-3, mixup_alpha=0.2, dropout=0.1, shift_px=1)


def plain_loss(kind, own, learner, labels, taught, weight, temperature):
    """arXiv 2012.12877, equations 2 and 3; `labels` are probabilities."""
    if kind == "hard":
        lesson = F.cross_entropy(learner, taught.argmax(1))
    else:
        ours, theirs = (learner / temperature).log_softmax(1), (taught / temperature).softmax(1)
        lesson = temperature**2 * F.kl_div(ours, theirs, reduction="batchmean")
    return (1 - weight) * F.cross_entropy(own, labels) + weight * lesson


@pytest.fixture
def answers():
    """Logits [5, 3] of both heads and of the teacher."""
    generator = torch.Generator().manual_seed(1)
    return [3 * torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(
    ("kind", "given", "weight", "temperature"),
    [
        ("hard", {}, 0.5, None), ("hard", {"weight": 0.8}, 0.8, None), ("soft", {}, 0.1, 3.0),
        ("soft", {"weight": 0.3, "temperature": 1.5}, 0.3, 1.5), ("logit", {}, 0.1, 3.0),
        ("logit", {"weight": 1.0, "temperature": 7.0}, 1.0, 7.0),
    ],
)  # fmt: skip
def test_the_loss_is_the_hand_computed_one(kind, given, weight, temperature, soft, answers):
    cls, token, taught = answers
    labels = torch.rand(5, 3, dtype=torch.float64).softmax(1) if soft else torch.tensor([0, 2, 1, 1, 0])
    outputs = HfViTImageClassifierOutput(logits=(cls + token) / 2, cls_logits=cls, distillation_logits=token)
    loss = distillation_loss(outputs, labels, taught, DistillationOptions(None, kind, **given))
    own, learner = (outputs.logits, outputs.logits) if kind == "logit" else (cls, token)
    rows = labels if soft else F.one_hot(labels, 3)
    expected = plain_loss(kind, own, learner, rows.double(), taught, weight, temperature)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["hard", "logit"])
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_damaged_teacher_has_no_most_likely_class(kind, damage, answers):
    cls, token, taught = answers
    taught[2, 1] = damage
    outputs = HfViTImageClassifierOutput(logits=cls, cls_logits=cls, distillation_logits=token)
    assert distillation_loss(outputs, torch.tensor([0, 2, 1, 1, 0]), taught, DistillationOptions(None, kind)).isnan()


# --- teachers ---


@pytest.fixture
def images():
    """So pale that no filter overshoots white or black."""
    return [Image.fromarray(np.random.RandomState(seed).randint(80, 176, (8, 8, 3), np.uint8)) for seed in range(4)]


@pytest.fixture
def teacher_folder(tiny_config, tmp_path_factory):
    """A saved teacher with a scale of its own."""
    scale = dict(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.25])
    return save_model(make_teacher_model(), tmp_path_factory.mktemp("teacher") / "teacher", **scale)


EIGHT_PX = {"size": {"height": 8, "width": 8}}
# What it sees is its processor's, but for Pillow's two roundings to whole pixel values where the size is another one.
PROCESSORS = {
    **{f"{side} px, {resample.name}": (
        ViTImageProcessor(size={"height": side, "width": side}, resample=resample, image_std=[1, 1, 1]), 1.25 / 255)
       for side in (4, 16) for resample in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)},
    "normalised twice": (EfficientNetImageProcessor(**EIGHT_PX), 1e-5),  # by include_top
    "normalised once": (EfficientNetImageProcessor(**EIGHT_PX, include_top=False), 1e-5),
    "of every size": (ViTImageProcessor(do_resize=False), 1e-5),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_teacher_sees_what_its_processor_makes(name, tiny_config, images):
    (processor, tolerance), seen = PROCESSORS[name], []
    student, wanted = make_processor(tiny_config()), processor(images, return_tensors="pt")["pixel_values"]
    model = make_teacher_model(image_size=wanted.shape[-1])
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    teacher = open_teacher((model, processor))
    given = student(images, return_tensors="pt")["pixel_values"]
    answers = teacher.logits(given, PixelScale.from_processor(student))
    torch.testing.assert_close(seen[0], wanted, atol=tolerance, rtol=1e-5)
    if tolerance == 1e-5:
        torch.testing.assert_close(answers, teacher.classify(images), atol=1e-4, rtol=1e-4)


def test_processors_that_do_not_normalise_or_rescale(images):
    for options in ({"do_normalize": False}, {"do_rescale": False, "image_mean": [99, 98, 97], "image_std": [9, 8, 7]}):
        processor = ViTImageProcessor(size={"height": 8, "width": 8}, **options)
        made = processor(images, return_tensors="pt")["pixel_values"].float()
        pixels = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]) / 255
        torch.testing.assert_close(PixelScale.from_processor(processor).values(pixels), made, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(PixelScale.from_processor(processor).pixels(made), pixels, atol=1e-6, rtol=1e-5)


def test_classes_are_matched_by_name(teacher_folder):
    """The teacher knows more classes, in another order: the answers are the data's, in the data's."""
    names = ["red", "cyan", "blue", "green"]
    model = make_teacher_model(names)
    teacher = open_teacher((model, ViTImageProcessor.from_pretrained(teacher_folder))).select_classes(NAMES)
    pixels = torch.rand(2, 3, 8, 8)
    scale = PixelScale.from_processor(ViTImageProcessor.from_pretrained(teacher_folder))
    torch.testing.assert_close(teacher.logits(pixels, scale), model(pixels).logits[:, [2, 3, 0]], atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match=r"teacher HfViT\w+ cannot be used: the data has classes .*'black'"):
        teacher.select_classes(["blue", "black"])


def test_a_teacher_of_transformers(tmp_path):
    labels = dict(enumerate(NAMES))
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], id2label=labels)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "resnet")
    # It gives a shorter side only, and is fed squares.
    ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=1.0).save_pretrained(tmp_path / "resnet")
    teacher = open_teacher(tmp_path / "resnet", "cpu").select_classes(NAMES)
    assert (teacher.loaded.name, teacher.size) == ("resnet", (32, 32))
    seen = []
    teacher.loaded.model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    assert teacher.logits(torch.rand(2, 3, 8, 8), PixelScale()).shape == (2, 3)
    assert seen == [(2, 3, 32, 32)]


@pytest.fixture
def timm_folder(tmp_path):
    """Save a tiny model of timm: (folder, what config.json says beyond the architecture)."""
    from timm.models import save_for_hf

    def make(**config):
        torch.manual_seed(3)
        args = dict(img_size=16, patch_size=8, embed_dim=12, depth=1, num_heads=2)
        model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **args)
        save_for_hf(model, tmp_path / "timm", model_config=config, model_args=args, safe_serialization=True)
        return tmp_path / "timm", model.eval()

    return make


def test_a_teacher_of_timm(timm_folder):
    folder, model = timm_folder(label_names=["red", "green", "blue"])
    pixels = torch.rand(2, 3, 16, 16)
    expected = model((pixels - 0.5) / 0.5)[:, [2, 1, 0]]
    for source in (folder, f"timm:{folder}"):
        teacher = open_teacher(source, "cpu").select_classes(NAMES)
        assert (teacher.loaded.name, teacher.size) == ("timm:timm", (16, 16))
        torch.testing.assert_close(teacher.logits(pixels, PixelScale()), expected)


def test_a_teacher_that_does_not_name_its_classes(timm_folder):
    with pytest.raises(UserError, match=r"has no class names.*add label_names"):
        open_teacher(timm_folder()[0], "cpu").select_classes(NAMES)


@pytest.mark.parametrize(("field", "value"), [("interpolation", "x"), ("mean", "x"), ("crop_pct", "x"), ("std", [0.0])])
def test_a_preparation_that_timm_cannot_build_is_one_line(field, value, timm_folder):
    folder, _ = timm_folder(label_names=["a", "b", "c"])
    config = json.loads((folder / "config.json").read_text()) | {"label_descriptions": ["a", "b", "c"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).label_sets == [["a", "b", "c"]]
    config["pretrained_cfg"][field] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"timm cannot be loaded \((Key|Type|Value)Error: .*\); download it again"):
        load_model(folder)


def test_timm_knows_imagenet_by_number_and_by_word():
    from hf_vit.loading.folders import get_timm_label_names

    numbers, words = get_timm_label_names(timm.create_model("resnet10t"))
    assert (numbers[0], words[0]) == ("n01440764", "tench, Tinca tinca")
    pixels, model = torch.rand(1, 3, 32, 32), timm.create_model("resnet10t").eval()
    teacher = Teacher(LoadedModel(model, torch.stack, "resnet"))
    for names in (["n01443537", "n01440764"], ["goldfish, Carassius auratus", "tench, Tinca tinca"]):
        found = teacher.select_classes(names).logits(pixels, PixelScale())
        torch.testing.assert_close(found, model(pixels)[:, [1, 0]])


# --- training ---


@pytest.mark.parametrize("kind", ["hard", "soft", "logit"])
def test_a_step_is_the_one_computed_by_hand(kind, tiny_config, teacher_folder, tmp_path):
    """Whole or in parts of 4 and of 5 images: the step of plain torch on all 12, with smoothed labels."""
    after, data = [], Images()
    options = DistillationOptions(teacher_folder, kind, weight=0.4)
    for micro, accumulated in ((12, 1), (4, 3), (5, 3)):
        torch.manual_seed(0)
        student = HfViTForImageClassification(tiny_config(use_distillation_token=kind != "logit"))
        for name, head in student.named_children():
            if "classifier" in name:
                nn.init.normal_(head.weight)
        step = dict(max_steps=1, learning_rate=0.1, optim="sgd", label_smoothing_factor=0.2, max_grad_norm=0.0)
        sizes = dict(per_device_train_batch_size=micro, gradient_accumulation_steps=accumulated)
        arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **step, **sizes)
        teacher = open_teacher(teacher_folder, "cpu")
        given = dict(train_dataset=data, eval_dataset=data, processing_class=make_processor(student.config))
        trainer = DistillationTrainer(student, arguments, teacher=teacher, distillation=options, **given)
        with torch.no_grad():
            logits = student.eval()(data.pixels).logits
        assert trainer.evaluate()["eval_loss"] == pytest.approx(F.cross_entropy(logits, data.labels).item(), rel=1e-6)
        expected = plain_step(student, data, teacher.loaded.model, kind)
        trainer.train()
        after.append(torch.cat([parameter.detach().flatten() for parameter in student.parameters()]))
    for parameters in after:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=5e-6)


def plain_step(student, data, teacher, kind):
    import copy

    model = copy.deepcopy(student).train()
    mean, std = torch.tensor([0.4, 0.5, 0.6])[:, None, None], torch.tensor([0.2, 0.3, 0.25])[:, None, None]
    with torch.no_grad():
        taught = teacher((data.pixels * 0.5 + 0.5 - mean) / std).logits
    outputs = model(data.pixels)
    own = outputs.logits if kind == "logit" else outputs.cls_logits
    learner = outputs.logits if kind == "logit" else outputs.distillation_logits
    plain_loss(kind, own, learner, F.one_hot(data.labels, 3) * 0.8 + 0.2 / 3, taught, 0.4, 3.0).backward()
    return torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in model.parameters()])


@pytest.fixture
def distil(tiny_config, colours, teacher_folder):
    def run(output, resume=False, kind="hard", teacher=teacher_folder, changes=None, model=None, **options):
        chosen = FinetuneOptions(micro_batch_size=6, resume=resume, device="cpu", **options)
        settings = {**SETTINGS, **(changes or {})}
        learning = DistillationOptions(teacher, kind)
        return finetune(model or tiny_config(), str(colours), output, distillation=learning, options=chosen, **settings)

    return run


def test_a_distilled_model_is_saved_with_facts_and_resumes_exactly(distil, killed, tmp_path, teacher_folder):
    before = {path: path.read_bytes() for path in teacher_folder.iterdir()}
    done = distil(tmp_path / "done", keep_checkpoints=True)
    assert {path: path.read_bytes() for path in teacher_folder.iterdir()} == before
    # Inference averages both heads, and no teacher travels along.
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "done")
    outputs = model(torch.rand(2, 3, 8, 8))
    mean = (outputs.cls_logits + outputs.distillation_logits) / 2
    torch.testing.assert_close(outputs.logits, mean)
    assert not torch.equal(outputs.cls_logits, outputs.distillation_logits)
    values = Facts.load(tmp_path / "done").filter_kind("training")[-1].values
    assert (values["teacher"], values["distillation"], values["distillation_weight"]) == ("teacher", "hard", 0.5)
    assert "temperature" not in values
    card = (tmp_path / "done" / "README.md").read_text()
    assert "| teacher | teacher |" in card
    assert "| distillation | hard |" in card
    again = killed(done, "again")
    distil(again, resume=True)
    assert same_weights(done.folder, again)


def test_another_teacher_cannot_take_over(distil, killed, tmp_path, teacher_folder):
    done = distil(tmp_path / "done", kind="logit", changes=dict(steps=2, evaluations=1), keep_checkpoints=True)
    again = killed(done, "again", lost=0)
    model = make_teacher_model()
    with torch.no_grad():
        model.classifier.bias[0] += 1
    model.save_pretrained(teacher_folder)
    with pytest.raises(UserError, match=r"--resume needs the settings .* teacher_fingerprint was .* and is now "):
        distil(again, kind="logit", resume=True, changes=dict(steps=2, evaluations=1))


def test_a_teacher_does_not_change_how_the_student_begins(tiny_config, colours, tmp_path):
    """With a weight of nothing the training is the one without a teacher."""
    settings = {**SETTINGS, "steps": 3, "evaluations": 1}
    options = FinetuneOptions(micro_batch_size=6, device="cpu")
    finetune(tiny_config(), str(colours), tmp_path / "alone", options=options, **settings)
    learning = DistillationOptions((make_teacher_model(), make_processor(tiny_config())), weight=0.0)
    finetune(tiny_config(), str(colours), tmp_path / "taught", options=options, distillation=learning, **settings)
    assert same_weights(tmp_path / "alone", tmp_path / "taught")


def test_students_without_a_place_for_the_token(distil, tiny_checkpoint, tmp_path):
    from hf_vit import HfAxialViTConfig

    with pytest.raises(UserError, match=r"has no distillation token.*--distillation logit"):
        distil(tmp_path / "out", model=str(tiny_checkpoint))
    axial = HfAxialViTConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UserError, match="distillation"):
        distil(tmp_path / "out", model=axial)
    distil(tmp_path / "out", kind="logit", model=str(tiny_checkpoint), changes=dict(steps=1, evaluations=1))


# --- the command line ---


def test_flags(succeeds, colours, teacher_folder, tmp_path):
    arguments = ("finetune", "--model", "Ti/4", "--data", colours, "--output", tmp_path / "out", "--image-size", "8")
    steps = ("--steps", "1", "--evaluations", "1", "--batch-size", "4", "--device", "cpu")
    taught = ("--teacher", teacher_folder, "--distillation", "soft", "--temperature", 2, "--distillation-weight", 0.3)
    assert ", teacher teacher) on" in succeeds(*arguments, *steps, *taught)
    values = json.loads((tmp_path / "out" / "facts.json").read_text())[0]["values"]
    assert (values["distillation"], values["temperature"], values["distillation_weight"]) == ("soft", 2.0, 0.3)
