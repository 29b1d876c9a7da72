"""Learning from images that a teacher labels: formulas, meta gradient and steps by hand, resuming, refusals."""

import copy
import json
import shutil
from collections import Counter

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from training.conftest import COLOURS, NAMES, coloured_square, make_teacher_model, same_weights, save_model
from transformers import AutoModelForImageClassification, TrainerCallback, TrainingArguments

from hf_vit import HfViTForImageClassification, UserError
from hf_vit.cost import measured_run
from hf_vit.data import AugmentationConfig, TransformedImages, load_data, make_processor, train_transform
from hf_vit.data.load import load_unlabeled
from hf_vit.errors import DivergedError
from hf_vit.loading.folders import list_checkpoints
from hf_vit.loading.model import LoadedModel
from hf_vit.results.facts import Facts
from hf_vit.results.trained_images import count_trained
from hf_vit.training import DistillationOptions, finetune
from hf_vit.training.run import is_complete
from hf_vit.training.tasks.distillation import Teacher, open_teacher
from hf_vit.training.tasks.self_training import (
    UNLABELLED,
    JoinPseudoLabeled,
    MetaPseudoLabelsTrainer,
    NoisyStudent,
    SelfTrainingOptions,
    TeacherGradients,
    UnlabeledCollator,
    WithUnlabeled,
    balance_rows,
    estimate_improvement,
)
from hf_vit.training.trainer.sampling import SeededDataset

KINDS = ["noisy-student", "meta-pseudo-labels"]
SETTINGS = dict(steps=8, evaluations=4, batch_size=12, learning_rate=2e-3, dropout=0.1, shift_px=1, patience=20)


# --- which images are learnt from ---


def test_classes_are_balanced_by_the_surest_and_by_repetition():
    """arXiv 1911.04252, section 3.1: the most confident of frequent classes, repetitions of rare ones."""
    random = np.random.RandomState(0)
    classes = np.repeat([0, 1, 3], [9, 4, 1])
    confidence = random.permutation(len(classes)) / len(classes)
    rows = balance_rows(torch.tensor(confidence), torch.tensor(classes), 6, seed=1)
    times = Counter(rows)
    assert Counter(classes[rows].tolist()) == {0: 6, 1: 6, 3: 6}
    surest = sorted(range(9), key=lambda row: -confidence[row])[:6]
    assert sorted(row for row in times if row < 9) == sorted(surest)
    assert all(times[row] == 1 for row in surest)
    assert sorted(times[row] for row in range(9, 13)) == [1, 1, 2, 2]
    assert times[13] == 6
    assert rows == balance_rows(torch.tensor(confidence), torch.tensor(classes), 6, seed=1)
    others = [balance_rows(torch.tensor(confidence), torch.tensor(classes), 6, seed=seed) for seed in range(2, 9)]
    assert any(sorted(rows) != sorted(other) for other in others)  # which are repeated is a matter of chance


@pytest.fixture
def digits_beside_digits(tiny_config):
    """12 labelled digits, each with 2 of 7 rows of others."""

    def make(seed=5):
        data = load_data("digits")
        images = load_unlabeled("digits")
        processor = make_processor(tiny_config())
        varied = AugmentationConfig(shift_px=2)
        labelled = TransformedImages(data.split("train").select(range(12)), train_transform(processor, varied, 1))
        others = TransformedImages(images.table, train_transform(processor, varied, 2))
        return WithUnlabeled(labelled, others, [3, 8, 9, 20, 21, 22, 22], ratio=2, seed=seed)

    return make


def drawn(dataset, epoch, order):
    dataset.set_epoch(epoch)
    return {index: dataset[index][UNLABELLED] for index in order}


def test_unlabelled_images_come_in_passes_of_their_own(digits_beside_digits):
    dataset = digits_beside_digits()
    epochs = [drawn(dataset, epoch, range(12)) for epoch in range(7)]
    rows = [example["index"] for epoch in epochs for index in range(12) for example in epoch[index]]
    assert len(rows) == 7 * 12 * 2
    for start in range(0, len(rows), 7):
        assert sorted(rows[start : start + 7]) == [3, 8, 9, 20, 21, 22, 22]
    assert len({tuple(rows[start : start + 7]) for start in range(0, len(rows), 7)}) > 20
    # The same image comes differently every time.
    pixels = [e["pixel_values"] for epoch in epochs for share in epoch.values() for e in share if e["index"] == 9]
    assert len({image.numpy().tobytes() for image in pixels}) > len(pixels) // 2


def test_what_is_drawn_depends_on_seed_epoch_and_position_alone(digits_beside_digits):
    one, other = digits_beside_digits(), digits_beside_digits()
    drawn(other, 2, range(12))
    before, after = drawn(one, 1, range(12)), drawn(other, 1, reversed(range(12)))
    for index, share in before.items():
        for mine, theirs in zip(share, after[index], strict=True):
            assert mine["index"] == theirs["index"]
            assert torch.equal(mine["pixel_values"], theirs["pixel_values"])
    order = [[e["index"] for e in share] for share in drawn(digits_beside_digits(seed=6), 1, range(12)).values()]
    assert order != [[e["index"] for e in share] for share in before.values()]


@pytest.mark.parametrize("hard", [False, True])
def test_a_batch_of_a_noisy_student(hard, digits_beside_digits):
    """Labels are smoothed, and hard pseudo labels; the teacher's probabilities stay as they are."""
    dataset = digits_beside_digits()
    told = torch.rand(1257, 10, generator=torch.Generator().manual_seed(0)).softmax(1)
    loader = SeededDataset(dataset, UnlabeledCollator(10, JoinPseudoLabeled(told, 0.2, hard)), seed=3)
    batch = loader.__getitems__([(4, 7), (4, 2), (4, 11)])
    dataset.set_epoch(4)
    labelled = [dataset.labeled[index] for index in (7, 2, 11)]
    others = [example for index in (7, 2, 11) for example in dataset[index][UNLABELLED]]
    assert torch.equal(batch["pixel_values"], torch.stack([e["pixel_values"] for e in labelled + others]))
    smooth = [[0.82 if k == e["label"] else 0.02 for k in range(10)] for e in labelled]
    torch.testing.assert_close(batch["labels"][:3], torch.tensor(smooth))
    for row, example in zip(batch["labels"][3:].tolist(), others, strict=True):
        says = told[example["index"]].tolist()
        first = says.index(max(says))
        assert row == pytest.approx([0.82 if k == first else 0.02 for k in range(10)] if hard else says)


def test_folders_of_images_without_classes(colours, tmp_path):
    """Wherever they lie, of split folders train and unlabeled; what is no image is not looked at."""
    for place in ("a.png", "deep/er/b.png", ".hidden/c.png"):
        (tmp_path / "loose" / place).parent.mkdir(parents=True, exist_ok=True)
        coloured_square((9, 9, 9), 1 + len(place)).save(tmp_path / "loose" / place)
    (tmp_path / "loose" / "readme.txt").write_text("none")
    images = load_unlabeled(str(tmp_path / "loose"))
    assert (images.name, len(images.seen), len(images.table)) == ("loose", 2, 2)
    for split in ("train", "test"):
        shutil.copytree(tmp_path / "loose", tmp_path / "split" / split)
    (tmp_path / "split" / "test" / "a.png").unlink()
    assert len(load_unlabeled(str(tmp_path / "split")).seen) == 2
    assert load_unlabeled(str(tmp_path / "split")).fingerprint == images.fingerprint
    for folder in ("unlabeled2017", "holdout"):
        shutil.copytree(tmp_path / "split" / "test", tmp_path / "split" / folder)
    assert len(load_unlabeled(str(tmp_path / "split")).seen) == 3
    (tmp_path / "loose" / "d.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"d\.png.*--skip-bad-images"):
        load_unlabeled(str(tmp_path / "loose"))
    assert load_unlabeled(str(tmp_path / "loose"), skip_bad_images=True).left_out == 1
    # A class may be called train; of other sources the training images, of those without splits all.
    for number, name in enumerate(("bus", "car", "train")):
        (tmp_path / "vehicles" / name).mkdir(parents=True)
        coloured_square((9, 9, 9), 2 + number).save(tmp_path / "vehicles" / name / "a.png")
    assert len(load_unlabeled(str(tmp_path / "vehicles")).seen) == 3
    assert len(load_unlabeled("digits").seen) == 1257
    assert len(load_unlabeled(str(colours)).seen) == 60


def test_a_teacher_sees_the_pixels_of_its_student(tmp_path):
    """Also of a TIFF file that counts from white."""
    file, seen = tmp_path / "scan.tif", []
    Image.fromarray(np.full((8, 8), 65535, np.uint16)).save(file, tiffinfo={262: 0, 274: 1})

    def prepare(images):
        seen.extend(images)
        return torch.zeros(len(images), 3, 8, 8)

    teacher = Teacher(LoadedModel(make_teacher_model(), prepare, "teacher"))
    NoisyStudent(SelfTrainingOptions(teacher, "", confidence=0.0)).select(load_unlabeled(tmp_path))
    assert [image.getcolors() for image in seen] == [[(64, (0, 0, 0))]]


# --- the meta gradient ---


@pytest.fixture
def pair(tiny_config):
    """Teacher and student, images and labels, in double precision."""

    def model(seed):
        torch.manual_seed(seed)
        made = HfViTForImageClassification(tiny_config())
        nn.init.normal_(made.classifier.weight)
        made.set_attn_implementation("eager")  # the fused one has no second derivative
        return made.double().train()

    generator = torch.Generator().manual_seed(3)
    images = torch.randn(9, 3, 8, 8, generator=generator, dtype=torch.float64)
    return model(1), model(2), (images[:4], torch.tensor([0, 2, 1, 1])), images[4:]


def learnt_by_feedback(teacher, student, known, unknown, guesses, rate):
    """The teacher's gradient by this package: first order, with a real step of the student in between."""
    teacher, student = copy.deepcopy(teacher), copy.deepcopy(student)
    weights = list(student.parameters())
    lesson = TeacherGradients(list(teacher.parameters()))
    logits = teacher(unknown).logits
    lesson.add(0.0 * logits.sum(), F.cross_entropy(logits, guesses))
    before = [weight.detach().clone() for weight in weights]
    F.cross_entropy(student(unknown).logits, guesses).backward()
    torch.optim.SGD(weights, rate).step()
    images, labels = known
    lesson.finish(estimate_improvement(F.cross_entropy(student(images).logits, labels), weights, before))
    return {name: weight.grad for name, weight in teacher.named_parameters()}


def through_the_step(teacher, student, known, unknown, guesses, rate):
    """The slow reference: d CE(labels; student after its step) / d teacher, through the step itself.

    The lesson weighs 1, and changes as its labels' likelihood does (appendix A).
    """
    images, labels = known
    learning = dict(student.named_parameters())

    def loss_after(weights):
        likely = -F.cross_entropy(torch.func.functional_call(teacher, weights, (unknown,)).logits, guesses)
        slopes = torch.func.grad(
            lambda own: F.cross_entropy(torch.func.functional_call(student, own, (unknown,)).logits, guesses)
        )(learning)
        after = {
            name: learning[name] - rate * (likely - likely.detach()).exp() * slope for name, slope in slopes.items()
        }
        return F.cross_entropy(torch.func.functional_call(student, after, (images,)).logits, labels)

    return torch.func.grad(loss_after)(dict(teacher.named_parameters()))


def distance(ours, theirs):
    one, other = (torch.cat([tensors[name].detach().flatten() for name in theirs]) for tensors in (ours, theirs))
    assert other.norm() > 1e-9
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("rate", [1e-3, 0.1, 1.0])
def test_the_meta_gradient_is_that_through_the_students_step(rate, pair):
    given = (*pair, torch.tensor([2, 0, 1, 1, 2]), rate)
    assert distance(learnt_by_feedback(*given), through_the_step(*given)) < 1e-10


class Pairs(torch.utils.data.Dataset):
    """12 labelled images, each with 2 unlabelled ones in two views."""

    def __init__(self):
        generator = torch.Generator().manual_seed(4)
        self.pixels = torch.rand(12, 3, 8, 8, generator=generator) * 2 - 1
        self.others = torch.rand(12, 2, 2, 3, 8, 8, generator=generator) * 2 - 1
        self.labels = torch.arange(12) % 3

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "labels": self.labels[index], UNLABELLED: self.others[index]}


def collate(examples):
    batch = {name: torch.stack([example[name] for example in examples]) for name in ("pixel_values", "labels")}
    if UNLABELLED in examples[0]:
        batch[UNLABELLED] = torch.cat([example[UNLABELLED] for example in examples])
    return batch


class Drawn(TrainerCallback):
    """Starts every step from known chance, and keeps what was trained on."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(100 + state.global_step)


@pytest.mark.parametrize(("micro", "accumulated", "clip"), [(12, 1, 0.7), (4, 3, 0.7), (4, 3, 100.0)])
def test_steps_are_those_computed_by_hand(micro, accumulated, clip, tiny_config, tmp_path):
    """Two steps of student and teacher in plain torch, with baseline, ramp, clipping and schedule."""
    torch.manual_seed(0)
    student = HfViTForImageClassification(tiny_config())
    nn.init.normal_(student.classifier.weight)
    teacher_model, processor, data = make_teacher_model(), make_processor(student.config), Pairs()
    step = dict(max_steps=2, learning_rate=0.5, lr_scheduler_type="linear", optim="sgd", max_grad_norm=clip)
    sizes = dict(per_device_train_batch_size=micro, gradient_accumulation_steps=accumulated)
    smoothed = dict(report_to="none", use_cpu=True, label_smoothing_factor=0.1)
    arguments = TrainingArguments(str(tmp_path), **step, **sizes, **smoothed)
    told = SelfTrainingOptions(None, "", "meta-pseudo-labels", uda_weight=3.0, uda_temperature=0.5, uda_threshold=0.993)
    teacher = open_teacher((teacher_model, processor)).select_classes(NAMES)
    before = {name: value.clone() for name, value in teacher_model.state_dict().items()}
    given = dict(train_dataset=data, data_collator=collate, processing_class=processor, callbacks=[Drawn()])
    trainer = MetaPseudoLabelsTrainer(copy.deepcopy(student), arguments, teacher=teacher, self_training=told, **given)
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in teacher_model.state_dict().items())
    expected = by_hand(copy.deepcopy(student), copy.deepcopy(teacher_model), trainer, micro, clip)
    found = trainer.model, trainer.teacher.loaded.model
    for ours, theirs, begun in zip(found, expected, (student, teacher_model), strict=True):
        moved = 0.0
        for mine, hers, first in zip(ours.parameters(), theirs.parameters(), begun.parameters(), strict=True):
            torch.testing.assert_close(mine, hers, rtol=2e-6, atol=3e-6)
            moved += float((hers - first).detach().abs().sum())
        assert moved > 0.1


def by_hand(student, teacher, trainer, micro, clip):
    """Algorithm 1 with the moving baseline, on the order of images that the trainer has."""
    student.train(), teacher.train().requires_grad_(True)
    baseline = 0.0
    for step, rate in enumerate((0.5, 0.25)):
        loader = trainer.get_train_dataloader()
        loader.set_epoch(step)  # which has one step
        batches = list(loader)
        assert {len(batch["labels"]) for batch in batches} == {micro}
        torch.manual_seed(100 + step)
        lesson, own, likely = 0.0, 0.0, 0.0
        for batch in batches:
            share = len(batch["labels"]) / 12
            weak, strong = batch[UNLABELLED].unbind(1)
            says = teacher(strong).logits
            guesses = torch.multinomial(says.softmax(1).detach(), 1)[:, 0]
            target = (teacher(weak).logits / 0.5).softmax(1).detach()
            agree = -(target * says.log_softmax(1)).sum(1) * (target.amax(1) >= 0.993)
            known = F.cross_entropy(teacher(batch["pixel_values"]).logits, batch["labels"], label_smoothing=0.1)
            own = own + share * (known + 3.0 * step / 2 * agree.mean())
            likely = likely + share * F.cross_entropy(says, guesses)
            lesson = lesson + share * F.cross_entropy(student(strong).logits, guesses, label_smoothing=0.1)
        old = [p.detach().clone() for p in student.parameters()]
        descend(student, torch.autograd.grad(lesson, list(student.parameters())), rate, clip)
        after = sum(
            F.cross_entropy(student(b["pixel_values"]).logits, b["labels"]) * len(b["labels"]) / 12 for b in batches
        )
        slopes = torch.autograd.grad(after, list(student.parameters()))
        feedback = sum(
            float(((o - n.detach()) * s).sum()) for o, n, s in zip(old, student.parameters(), slopes, strict=True)
        )
        baseline = 0.99 * baseline + 0.01 * feedback
        weights = list(teacher.parameters())
        descend(teacher, torch.autograd.grad(own + (feedback - baseline) * likely, weights), rate, clip)
    return student, teacher


@torch.no_grad()
def descend(model, slopes, rate, clip):
    norm = torch.cat([slope.flatten() for slope in slopes]).norm()
    for weight, slope in zip(model.parameters(), slopes, strict=True):
        weight -= rate * slope * min(1.0, clip / float(norm))


# --- training ---


@pytest.fixture(scope="module")
def teacher_folder(tiny_config, colours, tmp_path_factory):
    """A teacher that has learnt the colours."""
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    settings = dict(steps=40, evaluations=1, batch_size=12, learning_rate=5e-3, random_resized_crop=(0, 0))
    assert finetune(tiny_config(), str(colours), folder, device="cpu", **settings).test.top1 > 0.8
    return folder


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """30 images of the colours in a heap, whose classes nobody knows."""
    folder = tmp_path_factory.mktemp("more") / "heap"
    folder.mkdir()
    for number in range(30):
        coloured_square(list(COLOURS.values())[number % 3], 7000 + number).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def train(tiny_config, colours, teacher_folder, more):
    def run(output, kind="noisy-student", model=None, given=None, changes=None, unlabelled=more, **options):
        learning = SelfTrainingOptions(teacher_folder, str(unlabelled), kind, **(given or {}))
        settings = {**SETTINGS, **(changes or {}), **options, "micro_batch_size": 6, "device": "cpu"}
        return finetune(model or tiny_config(), str(colours), output, self_training=learning, **settings)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_is_saved_with_facts_and_resumes_exactly(kind, train, tmp_path, killed, teacher_folder):
    kept = {path: path.read_bytes() for path in teacher_folder.iterdir()}
    told = []
    done = train(tmp_path / "done", kind, keep_checkpoints=True, report=told.append)
    assert {path: path.read_bytes() for path in teacher_folder.iterdir()} == kept
    assert "teacher teacher) on colours" in "".join(told)
    assert "unlabeled images per labeled one, from 30 of heap" in "".join(told)
    values = Facts.load(done.folder).filter_kind("training")[-1].values
    assert (values["teacher"], values["self_training"]) == ("teacher", kind)
    assert values["unlabelled"].startswith("heap ")
    assert (values["unlabelled_images"], values["unlabelled_images_left_out"]) == (30, 0)
    assert values["recipe"]["name"] == kind
    # 8 steps of 12 labelled images but 2 in the fifth, the last of the 50, and 3 or 4 others beside each.
    assert measured_run(done.folder).images == (50 + 3 * 12) * (4 if kind == "noisy-student" else 5)
    card = (done.folder / "README.md").read_text()
    assert f"| self training | {kind} |" in card
    AutoModelForImageClassification.from_pretrained(done.folder)
    again = killed(done, "again")
    train(again, kind, resume=True)
    assert same_weights(done.folder, again)
    recalled = train(again, kind, resume=True)
    assert (recalled.validation, recalled.test.loss) == (done.validation, done.test.loss), "a finished run is recalled"
    # A checkpoint whose teacher was not written to its end is none.
    if kind == "meta-pseudo-labels":
        checkpoint = list_checkpoints(done.folder / "checkpoints")[-1]
        assert is_complete(checkpoint)
        (checkpoint / "teacher.pt").write_bytes((checkpoint / "teacher.pt").read_bytes()[:-40])
        assert not is_complete(checkpoint)


@pytest.mark.parametrize("heads", [("classifier",), ("classifier", "distillation_classifier")])
def test_noise_is_in_training_alone(heads, train, tiny_config, tmp_path):
    """Without noise in a head it learns otherwise; what is released has none."""
    settings = dict(model=tiny_config(use_distillation_token=len(heads) > 1, pooling="token"))
    settings |= dict(changes=dict(steps=2, evaluations=1, dropout=0.0, drop_path=0.0))
    noisy = train(tmp_path / "noisy", **settings)
    plain = train(tmp_path / "plain", **settings, given={"head_dropout": 0.0})
    for name in heads:
        assert not torch.equal(noisy.model.get_submodule(name).weight, plain.model.get_submodule(name).weight)
        assert not noisy.model.get_submodule(name)._forward_pre_hooks
    pixels = torch.rand(2, 3, 8, 8)
    saved = AutoModelForImageClassification.from_pretrained(noisy.folder)
    assert torch.equal(noisy.model(pixels).logits, saved(pixels).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_images_that_the_model_is_judged_by_are_not_learnt_from(kind, train, colours, more, tmp_path):
    """By their content, whatever they are called; the leak check knows of the others."""
    data = load_data(str(colours))
    heap = tmp_path / "heap"
    shutil.copytree(more, heap)
    judged = {image.digest: image.name for split in ("validation", "test") for image in data.seen[split]}
    for number, path in enumerate(judged.values()):
        shutil.copy(path, heap / f"other-{number}.png")
    shutil.copy(data.seen["train"][0].name, heap / "labelled.png")
    done = train(tmp_path / "out", kind, unlabelled=heap, changes=dict(steps=1, evaluations=1))
    values = Facts.load(done.folder).filter_kind("training")[-1].values
    assert (values["unlabelled_images"], values["unlabelled_images_left_out"]) == (31, len(judged))
    assert count_trained(done.folder, judged) == 0
    assert count_trained(done.folder, [image.digest for image in load_unlabeled(str(more)).seen]) == 30


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        dict(average_decay=0.5, layer_decay=0.7, balanced_sampling=True, patience=1),
        dict(tune="lora", lora_rank=2),
        dict(tune="head", lr_sweep=[1e-3, 1e-2], learning_rate=None),
    ],
    ids=["weights", "lora", "sweep"],
)
def test_together_with_what_other_trainings_have(changes, kind, train, tmp_path, tiny_checkpoint):
    done = train(tmp_path / "out", kind, model=str(tiny_checkpoint), changes=dict(steps=2, evaluations=2, **changes))
    saved = AutoModelForImageClassification.from_pretrained(done.folder)
    assert all(bool(weight.isfinite().all()) for weight in saved.parameters())
    assert len(done.trials) == len(changes.get("lr_sweep", ()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_diverges_says_so(kind, train, tmp_path):
    with pytest.raises(DivergedError, match=r"the loss became (nan|inf) at step [23]"):
        train(tmp_path / "out", kind, changes=dict(optimizer="sgd", learning_rate=1e30, warmup=0.0, clip=0.0))


# --- the command line ---


def test_flags(succeeds, colours, teacher_folder, more, tmp_path):
    arguments = ("finetune", "Ti/4", "--data", colours, "--output", tmp_path / "out", "--image-size", "8")
    steps = ("--steps", "1", "--evaluations", "1", "--batch-size", "4", "--device", "cpu", "--teacher", teacher_folder)
    chosen = ("--unlabeled", more, "--unlabeled-ratio", "2", "--pseudo-labels", "hard", "--confidence", ".35")
    out = succeeds(*arguments, *steps, *chosen, "--images-per-class", "4", "--head-dropout", ".2")
    assert "recipe noisy-student" in out
    values = json.loads((tmp_path / "out" / "facts.json").read_text())[0]["values"]
    told = {name: values[name] for name in ("unlabelled_ratio", "pseudo_labels", "confidence", "images_per_class")}
    assert told == {"unlabelled_ratio": 2, "pseudo_labels": "hard", "confidence": 0.35, "images_per_class": 4}
    assert sum(values["unlabelled_images_of_classes"]) == values["unlabelled_images"]


HEAP = ("--teacher", "TEACHER", "--unlabeled", "HEAP")
META = (*HEAP, "--self-training", "meta-pseudo-labels")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--unlabeled", "HEAP"), "needs --teacher and --unlabeled"),
        (("--self-training", "noisy-student", "--teacher", "TEACHER"), "needs --teacher and --unlabeled"),
        (("--confidence", ".5"), "--confidence needs --teacher"),
        ((*HEAP, "--distillation", "hard"), "--distillation cannot be combined with --unlabeled"),
        ((*META, "--sam-rho", ".05"), "--sam-rho 0.05 does not work with meta-pseudo-labels"),
        ((*HEAP, "--mixup-alpha", ".2"), "mixup_alpha 0.2 of the recipe noisy-student; add --mixup-alpha 0"),
        ((*HEAP, "--streaming"), "leave --streaming out"),
        ((*HEAP, "--data", "digits"), "teacher teacher cannot be used: the data has classes that the model does not"),
        (("--teacher", "FEWER", "--unlabeled", "HEAP"), "teacher fewer cannot be used: the data has classes that"),
        (("--teacher", "TEACHER", "--unlabeled", "no/such/folder"), "no/such/folder' does not exist"),
        (("--teacher", "TEACHER", "--unlabeled", "EMPTY"), "holds no files"),
        (("--teacher", "TEACHER", "--unlabeled", "JUDGED"), "are also validation or test images of colours"),
        ((*HEAP, "--confidence", "1"), "teacher teacher labels none of the 30 images of heap"),
    ],
)
def test_refused_before_any_training(arguments, message, command, colours, teacher_folder, more, tiny_config, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "judged").mkdir()
    for number, image in enumerate(load_data(str(colours)).seen["test"]):
        shutil.copy(image.name, tmp_path / "judged" / f"{number}.png")
    fewer = HfViTForImageClassification(tiny_config(num_labels=2, id2label={0: "blue", 1: "green"}))
    places = {"TEACHER": teacher_folder, "HEAP": more, "EMPTY": tmp_path / "empty", "JUDGED": tmp_path / "judged"}
    places["FEWER"] = save_model(fewer, tmp_path / "fewer")
    words = [places.get(word, word) for word in arguments]
    given = ("Ti/4", "--data", colours, "--output", tmp_path / "out", "--image-size", "8", *words)
    code, _, err = command("finetune", *given)
    assert (code, err.count("\n")) == (1, 1), err
    assert message in err
    assert not (tmp_path / "out").exists()


def test_several_processes(monkeypatch):
    """Meta pseudo labels are refused; a noisy student is test_processes'."""
    from hf_vit.training.recipes.registry import find_recipe
    from hf_vit.training.tasks.self_training import MetaPseudoLabels

    monkeypatch.setenv("WORLD_SIZE", "2")
    model = timm.create_model("test_vit", num_classes=3)
    task = MetaPseudoLabels(SelfTrainingOptions(Teacher(LoadedModel(model, torch.stack, "vit")), "", KINDS[1]))
    with pytest.raises(UserError, match="only works in one process"):
        task.check(find_recipe("meta-pseudo-labels"))
    assert task.count_extra_bytes() == 3 * 4 * sum(weight.numel() for weight in model.parameters())


def test_distillation_or_self_training(colours, teacher_folder, more, tmp_path):
    soft, self_training = DistillationOptions(teacher_folder), SelfTrainingOptions(teacher_folder, more)
    with pytest.raises(UserError, match="distillation and self-training cannot be combined"):
        finetune("Ti/4", str(colours), tmp_path / "out", distillation=soft, self_training=self_training)
