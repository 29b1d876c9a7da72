"""The main job: by command, what it leaves, which head it keeps, when it stops, what it says of hardly learning."""

import contextlib
import io
import json
import shutil
from itertools import cycle, islice
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from data.conftest import write_idx
from PIL import Image
from scipy.stats import binom
from training.conftest import assert_complete, make_teacher_model, save_model
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    EvalPrediction,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    ViTImageProcessor,
    pipeline,
)

from hf_vit import HfHybridViTConfig, HfLocalViTConfig, HfViTConfig, HfViTForImageClassification, UserError
from hf_vit.cost import memory_plan
from hf_vit.data import load_data
from hf_vit.evaluation import evaluate, evaluate_protocol
from hf_vit.loading.start import build_classifier, build_processor, choose_image_size, find_model
from hf_vit.models.embeddings_hf_vit import resample_position_table
from hf_vit.models.modeling_hf_vit import HfViTAttention
from hf_vit.results.facts import Facts
from hf_vit.training import FinetuneOptions, finetune
from hf_vit.training.plan import choose_attention, limit_evaluation, note_memory, use_bf16
from hf_vit.training.tasks.classification import compute_chance_accuracy, compute_metrics
from hf_vit.training.trainer.callbacks import Patience
from hf_vit_cli.main import main

SHORT = ("--steps", "24", "--evaluations", "4", "--batch-size", "12", "--learning-rate", "2e-3", "--precision", "fp32")


@pytest.fixture(scope="module")
def tuned(tiny_checkpoint, colours, tmp_path_factory):
    """A checkpoint fine-tuned by command: the folder, and what was printed."""
    output, printed = tmp_path_factory.mktemp("tuned") / "colours-vit", io.StringIO()
    words = ["finetune", "--model", tiny_checkpoint, "--data", colours, "--output", output, "--image-size", "16x12"]
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        main([str(word) for word in (*words, "--seed", "5", *SHORT)])
    assert not ended.value.code
    return output, printed.getvalue()


def test_fine_tuning_a_checkpoint_by_command(tuned, colours):
    output, out = tuned
    assert "50 images of 3 classes" in out
    assert "test accuracy" in out
    assert "saved in" in out
    assert_complete(output, "learning_curve.png", "confusion_matrix.png")
    assert (output / "modeling_hf_vit.py").is_file()

    config = json.loads((output / "config.json").read_text())
    assert config["id2label"] == {"0": "blue", "1": "green", "2": "red"}
    assert config["label2id"] == {"blue": 0, "green": 1, "red": 2}
    assert config["image_size"] == [16, 12]
    processor = AutoImageProcessor.from_pretrained(output)
    assert (processor.size.height, processor.size.width) == (16, 12)
    assert tuple(processor.image_mean) == (0.4, 0.5, 0.6)
    assert "| colours | test |" in (output / "README.md").read_text()

    answers = pipeline("image-classification", model=str(output))(str(colours / "red" / "00.png"))
    assert {answer["label"] for answer in answers} == {"blue", "green", "red"}


@pytest.mark.parametrize(("emulated", "attention"), [(False, "eager"), (True, "sdpa")])
def test_bfloat16_on_a_cpu(emulated, attention, tiny_checkpoint, colours, tmp_path, command, processor, monkeypatch):
    """Explicit attention where the processor has instructions for it; the saved model has torch's own again."""
    processor(avx512_bf16=not emulated)
    used: list[str] = []
    attend = HfViTAttention.attend

    def watched(self: HfViTAttention, *args, **kwargs):
        if self.training:
            used.append(self.config._attn_implementation)
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(HfViTAttention, "attend", watched)
    arguments = ("--model", tiny_checkpoint, "--data", colours, "--output", tmp_path / "out", "--device", "cpu")
    assert command("finetune", *arguments, "--steps", "2", *SHORT[2:-1], "bf16")[0] == 0
    assert set(used) == {attention}
    assert Facts.load(tmp_path / "out").records[0].values["precision"] == "bf16"
    saved = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert (saved.dtype, saved.config._attn_implementation) == (torch.float32, "sdpa")


def test_accelerates_configuration_changes_no_precision(tiny_checkpoint, colours, tmp_path, monkeypatch, stop_at):
    """`accelerate launch` passes its own on in a variable."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    used: list[str] = []
    stop_at(1, lambda: used.append(AcceleratorState().mixed_precision))
    finetune(tiny_checkpoint, str(colours), tmp_path / "out", steps=1, evaluations=1, precision="fp32", device="cpu")
    assert used == ["no"]


@pytest.mark.parametrize("settings", [{}, {"average_decay": 0.9}, {"tune": "lora"}, {"task": "segmentation"}], ids=str)
def test_after_bfloat16_the_saved_model_is_judged(settings, tiny_checkpoint, colours, tmp_path, processor, monkeypatch):
    """`evaluate` of the saved folder gives the same digits; the record says what the validation was computed in."""
    processor(avx512_bf16=True)
    monkeypatch.setattr("hf_vit.data.scenes.HELD_OUT", 6)
    data = "scenes:images=16,size=32" if "task" in settings else str(colours)
    quick = dict(steps=4, evaluations=2, batch_size=8, learning_rate=1e-3, precision="bf16", device="cpu")
    done = finetune(tiny_checkpoint, data, tmp_path / "out", **quick, **settings)
    judged = evaluate(str(tmp_path / "out"), data, device="cpu", progress=False).result.values()
    assert judged == done.test.values()
    assert Facts.load(tmp_path / "out").records[0].values["validation_precision"] == "bf16"


AMX, WITHOUT = {"amx_bf16": True}, {"avx512_bf16": True}
CHOICES = [("auto", 128, AMX, True), ("auto", 64, AMX, False), ("auto", 768, WITHOUT, False)]
CHOICES += [("fp32", 768, AMX, False), ("bf16", 64, WITHOUT, True)]


@pytest.mark.parametrize(("precision", "width", "capabilities", "is_bf16"), CHOICES)
def test_precision_auto_is_bfloat16_for_wide_models(precision, width, capabilities, is_bf16, processor, tiny_config):
    """On a processor with matrix units."""
    processor(**capabilities)
    options = FinetuneOptions(device="cpu", precision=precision)
    assert use_bf16(options, tiny_config(hidden_size=width)) == is_bf16


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (HfViTConfig(image_size=32, patch_size=1), "eager"),
        (HfLocalViTConfig(image_size=28, patch_size=1), "eager"),
        (HfLocalViTConfig(image_size=32, patch_size=1), None),
    ],
)
def test_bfloat16_on_cpus_leaves_the_attention_of_many_patches_local(config, attention, processor):
    """A Local-ViT's eager attention computes all pairs of patches."""
    processor(amx_bf16=True)
    chosen = []
    run = SimpleNamespace(config=config, bf16=True, options=FinetuneOptions(device="cpu"))
    choose_attention(run, SimpleNamespace(set_attn_implementation=chosen.append))
    assert chosen == [attention] * (attention is not None)


def test_a_gpu_that_emulates_bfloat16_computes_in_float32(monkeypatch, tiny_config):
    """Except on request, as for a run to resume that began in bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not use_bf16(FinetuneOptions(device="cuda"), tiny_config())
    assert use_bf16(FinetuneOptions(device="cuda", precision="bf16"), tiny_config())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    with pytest.raises(UserError, match="this GPU does not support bf16"):
        use_bf16(FinetuneOptions(device="cuda", precision="bf16"), tiny_config())


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_the_trainer_takes_the_requested_one_of_two_gpus(device, tiny_config, colours, tmp_path, monkeypatch):
    """No GPU here, so the training ends before the trainer moves the model."""
    empty, current = torch.empty, []
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **options: empty(*sizes, **options))
    for name, value in (("is_available", True), ("device_count", 2), ("is_bf16_supported", True)):
        monkeypatch.setattr(torch.cuda, name, lambda *given, value=value, **options: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))

    def stop(self, *, args, **settings):
        raise UserError(f"{args.device}, {args.n_gpu} GPUs, pinned memory {args.dataloader_pin_memory}, {args.use_cpu}")

    monkeypatch.setattr(Trainer, "__init__", stop)
    is_cpu = device == "cpu"
    message = f"{device}, {0 if is_cpu else 1} GPUs, pinned memory {not is_cpu}, {is_cpu}"
    with pytest.raises(UserError, match=message):
        finetune(tiny_config(), str(colours), tmp_path / "out", steps=1, device=device, precision="fp32")
    assert current[-1:] == ([] if is_cpu else [device])


def test_facts_record_what_was_used_and_found(tuned, colours):
    output, _ = tuned
    facts = Facts.load(output)
    assert [record.kind for record in facts.records] == ["training", "evaluation"]
    training, evaluation = facts.records
    assert training.seed == 5
    assert training.command.startswith("hf-vit finetune tiny --data colours --output colours-vit --image-size 16x12 ")
    assert " --seed 5 " in training.command
    assert training.data.model_dump()["split"] == "train"
    assert training.data.size == 50
    values = training.values
    assert values["recipe"]["learning_rate"] == 2e-3
    assert values["recipe"]["optimizer"] == "adamw"
    assert values["recipe"]["image_size"] == [16, 12]
    assert (values["recipe"]["dropout"], values["recipe"]["drop_path"]) == (0, 0)
    assert (values["steps"], values["planned_steps"], values["precision"]) == (24, 24, "fp32")
    batch = values["recipe"]["batch_size"]
    batches = [min(batch, 50 - start) for start in range(0, 50, batch)]
    assert 50 % batch
    assert values["images_seen"] == sum(islice(cycle(batches), 24))
    assert values["base_model"].endswith("tiny")

    # The recorded accuracy is that of the saved folder, and the images the untouched ones.
    data = load_data(str(colours), image_size=(16, 12))
    assert evaluation.data.fingerprint == data.fingerprint
    assert (evaluation.data.split, evaluation.data.size) == ("test", 2)
    model = AutoModelForImageClassification.from_pretrained(output)
    processor = AutoImageProcessor.from_pretrained(output)
    again = evaluate_protocol("top1", (model, processor), data, progress=False).result
    assert again.top1 == evaluation.values["top1"]
    assert again.loss == pytest.approx(evaluation.values["loss"], rel=1e-5)


def test_it_learns_and_keeps_the_best_checkpoint(colours, tiny_config, tmp_path):
    settings = dict(steps=120, evaluations=6, batch_size=16, learning_rate=3e-3)
    result = finetune(tiny_config(), str(colours), tmp_path / "out", **settings)
    evaluations = {entry["step"]: entry for entry in result.history if "eval_accuracy" in entry}
    assert list(evaluations) == [20, 40, 60, 80, 100, 120]
    best = max(evaluations.values(), key=lambda entry: (entry["eval_accuracy"], -entry["eval_loss"]))
    assert result.best_step == best["step"]
    assert result.validation == {"accuracy": best["eval_accuracy"], "loss": best["eval_loss"]}
    assert result.test.top1 >= 5 / 6
    data = load_data(str(colours), image_size=(8, 8))
    judged = (result.model, result.processor)
    validation = evaluate_protocol("top1", judged, data, split="validation", progress=False).result
    assert validation.top1 == pytest.approx(best["eval_accuracy"])


def test_the_seed_decides_everything(colours, tiny_config, tmp_path):
    def weights(name, seed, before, data=colours):
        torch.manual_seed(before)
        run = finetune(tiny_config(), data, tmp_path / name, seed=seed, steps=2, evaluations=1)
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    first = weights("a", seed=1, before=10)
    loaded = load_data(colours)
    assert torch.equal(weights("b", seed=1, before=11, data=loaded), first)
    with pytest.raises(UserError, match="the data is a Dataset; give a path, a Hub id"):
        weights("d", seed=1, before=11, data=loaded.split("train"))
    with pytest.raises(UserError, match=r"'colours' was loaded with target='label'; load it with target='mask'"):
        finetune(tiny_config(), loaded, tmp_path / "e", task="segmentation")
    with pytest.raises(UserError, match="the model is a HfViTForImageClassification; give a folder"):
        finetune(HfViTForImageClassification(tiny_config()), colours, tmp_path / "f")
    assert not torch.equal(weights("c", seed=2, before=10), first)


def test_new_head_and_resampled_positions(tiny_checkpoint):
    source = find_model(str(tiny_checkpoint))
    old = AutoModelForImageClassification.from_pretrained(tiny_checkpoint)
    new = build_classifier(source, ["a", "b"], image_size=(16, 8), dropout=0.25, drop_path=0.5)
    assert old.classifier.weight.abs().min() > 0
    assert not new.classifier.weight.any()
    assert not new.classifier.bias.any()
    assert new.config.id2label == {0: "a", 1: "b"}
    assert (new.config.hidden_dropout_prob, new.config.drop_path_rate) == (0.25, 0.5)
    assert new.config.image_size == (16, 8)
    expected = resample_position_table(old.vit.embeddings.position_embeddings, (2, 2), (4, 2))
    torch.testing.assert_close(new.vit.embeddings.position_embeddings.detach(), expected.detach())
    kept = {name: p for name, p in new.state_dict().items() if "classifier" not in name and "position" not in name}
    before = old.state_dict()
    assert all(torch.equal(before[name], p) for name, p in kept.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.1], "resample": 3},
        {"do_normalize": False},
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0]},
    ],
    ids=str,
)
def test_images_are_prepared_as_the_checkpoint_s(settings, tiny_config, tmp_path):
    config = tiny_config()
    HfViTForImageClassification(config).save_pretrained(tmp_path)
    size = {"height": config.image_size, "width": config.image_size}
    given = ViTImageProcessor(size=size, **settings)
    given.save_pretrained(tmp_path)
    made = build_processor(find_model(str(tmp_path)), config)
    image = Image.linear_gradient("L").convert("RGB")
    expected, found = (of(image, return_tensors="pt")["pixel_values"].float() for of in (given, made))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_bare_and_half_precision_checkpoints(tiny_config, tmp_path):
    from hf_vit import HfViTModel

    bare = HfViTModel(tiny_config()).to(torch.bfloat16)
    bare.save_pretrained(tmp_path / "bare")
    model = build_classifier(find_model(str(tmp_path / "bare")), ["a", "b"])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.vit.layernorm.weight.bfloat16(), bare.layernorm.weight)
    assert torch.equal(model.vit.layers[0].mlp.fc1.weight.bfloat16(), bare.layers[0].mlp.fc1.weight)


@pytest.mark.parametrize(("name", "patch", "width"), [("Ti/4", 4, 192), ("ViT-S/16", 16, 384)])
def test_variants_start_afresh(name, patch, width):
    config = find_model(name).config
    assert (config.patch_size, config.hidden_size) == (patch, width)


HARDLY = ("--steps", "2", "--batch-size", "12", "--precision", "fp32", "--learning-rate", "1e-9")
PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


@pytest.fixture
def saved(tmp_path):
    """Save a classifier of these classes whose head is not zero: its folder, and itself."""

    def make(*names, **fields):
        model = make_teacher_model(names, **fields)
        return save_model(model, tmp_path / "saved"), model

    return make


OTHER_ORDER, IN_ORDER = ("red", "blue", "green"), ["blue", "green", "red"]


@pytest.mark.parametrize(
    ("names", "fields", "classes", "rows"),
    [
        (OTHER_ORDER, {}, IN_ORDER, [1, 2, 0]),
        (OTHER_ORDER, {"representation_size": 8}, IN_ORDER, [1, 2, 0]),
        (OTHER_ORDER, {"use_distillation_token": True}, IN_ORDER, [1, 2, 0]),
        (("red ", "cre\u0300me", "green"), {}, ["cr\u00e8me", "green", "red"], [1, 2, 0]),  # another form of Unicode
        (("crane", "owl", "crane"), {}, ["crane", "owl", "crane"], [0, 1, 2]),  # two classes of one name
    ],
)
def test_the_same_classes_keep_their_head_in_any_order(names, fields, classes, rows, saved):
    folder, old = saved(*names, **fields)
    new = build_classifier(find_model(str(folder)), classes).eval()
    assert new.config.id2label == dict(enumerate(classes))
    with torch.no_grad():
        before, after = old(PIXELS), new(PIXELS)
    assert torch.equal(after.logits, before.logits[:, rows])
    if fields.get("use_distillation_token"):
        assert torch.equal(after.distillation_logits, before.distillation_logits[:, rows])


@pytest.mark.parametrize("names", [("red", "blue"), ("red", "blue", "green", "white"), ("red", "blue", "red")])
def test_other_classes_get_a_new_head(saved, names):
    folder, _ = saved(*names, representation_size=8)
    new = build_classifier(find_model(str(folder)), ["blue", "green", "red"])
    assert not new.classifier.weight.any()
    assert new.config.representation_size is None
    fresh = build_classifier(find_model("Ti/4"), ["LABEL_0", "LABEL_1"], image_size=(8, 8))
    assert not fresh.classifier.weight.any(), "a variant has no head to keep"


def test_it_is_told_and_can_be_declined(saved, colours, command, tmp_path):
    folder, old = saved("red", "blue", "green")
    arguments = ("finetune", "--model", folder, "--data", colours, *HARDLY)
    code, out, _ = command(*arguments, "--output", tmp_path / "kept")
    assert (code, out.count("; the checkpoint's head for these classes is kept (--new-head")) == (0, 1)
    kept = AutoModelForImageClassification.from_pretrained(tmp_path / "kept")
    torch.testing.assert_close(kept.classifier.weight, old.classifier.weight[[1, 2, 0]], atol=1e-6, rtol=0)
    recipe = Facts.load(tmp_path / "kept").records[0].values["recipe"]
    assert (recipe["new_head"], recipe["head_bias"]) == (False, None)

    code, out, _ = command(*arguments, "--output", tmp_path / "new", "--new-head")
    assert (code, "kept" in out) == (0, False)
    new = AutoModelForImageClassification.from_pretrained(tmp_path / "new")
    assert new.classifier.weight.abs().max() < 1e-6
    recipe = Facts.load(tmp_path / "new").records[0].values["recipe"]
    assert (recipe["new_head"], recipe["head_bias"]) == (True, 0.0)


@pytest.mark.parametrize(
    ("scores", "losses", "warmup"),
    [
        ([0.1] * 8, [2.29, 2.28, 2.27, 2.26, 2.25, 2.24, 2.3, 2.3], 0),  # neither is better: twice is enough
        ([0.1, 0.1, 0.2, 0.1, 0.1], [2.3] * 5, 0),  # a better accuracy begins anew
        ([0.1] * 7, [2.3] * 7, 0.5),  # the 60th and the 70th step are the first two that count
    ],
    ids=["a falling loss is progress", "a better score", "the warm-up does not count"],
)
def test_patience(scores, losses, warmup):
    """It ends the training at the last of these evaluations, which are ten steps apart."""
    patience, stops = Patience(2), []
    arguments = TrainingArguments(metric_for_best_model="score", greater_is_better=True, warmup_steps=warmup)
    for step, (score, loss) in enumerate(zip(scores, losses, strict=True), 1):
        control, state = TrainerControl(), TrainerState(global_step=10 * step, max_steps=100, best_metric=0.14)
        patience.on_evaluate(arguments, state, control, {"eval_score": score, "eval_loss": loss})
        stops.append(control.should_training_stop)
    assert stops == [False] * (len(scores) - 1) + [True]


@pytest.mark.parametrize("counts", [(36,) * 10, (500, 500), (900, 50, 50), (1,) * 2000])
def test_accuracy_of_chance(counts):
    """Guesses are right more often than that once in a hundred data sets or more rarely, by the binomial law."""
    images = sum(counts)
    chance = compute_chance_accuracy(np.repeat(np.arange(len(counts)), counts))
    assert max(counts) / images < chance < 1
    assert 1e-5 < binom.sf(chance * images, images, max(counts) / images) < 0.02
    # Of few images it explains not all.
    assert compute_chance_accuracy(np.array([0, 1, 2] * 2)) == pytest.approx(2 / 3)


def test_a_model_that_has_hardly_learnt_is_told(colours, make_colours, succeeds, tmp_path, tiny_checkpoint):
    """Nothing can be learnt of classes that look alike."""
    alike = make_colours(tmp_path / "alike", colours=dict.fromkeys(("blue", "green", "red"), (90, 90, 90)))
    arguments = ("finetune", "--model", tiny_checkpoint, "--batch-size", "16", "--evaluations", "1")
    out = succeeds(*arguments, "--data", alike, "--output", tmp_path / "out", "--steps", "2")
    (line,) = (line for line in out.splitlines() if "hardly learned" in line)
    assert "train longer" in line
    values = Facts.load(tmp_path / "out").records[0].values
    assert values["validation_accuracy"] <= values["chance_accuracy"] < 1
    row = f"| validation accuracy that chance explains, at most | {values['chance_accuracy']:.2%} |"
    assert row in (tmp_path / "out" / "README.md").read_text().replace("\\", "")
    learning = ("--steps", "100", "--learning-rate", "3e-3")
    out = succeeds(*arguments, "--data", colours, "--output", tmp_path / "learnt", *learning)
    assert "hardly learned" not in out


def test_the_last_step_is_judged_whatever_the_interval(colours, tiny_config, tmp_path):
    result = finetune(tiny_config(), str(colours), tmp_path / "out", steps=7, evaluations=3, batch_size=8)
    assert [entry["step"] for entry in result.history if "eval_accuracy" in entry] == [3, 6, 7]


def test_of_equal_accuracies_the_lower_loss_is_better():
    """Rows are (right, loss); of 10,000 images one more that is right outweighs any loss."""
    labels = np.zeros(10_000, np.int64)

    def score(right, loss):
        rows = np.full((10_000, 2), loss)
        rows[:, 0] = np.arange(10_000) < right
        return compute_metrics(EvalPrediction(predictions=rows, label_ids=labels))["score"]

    assert score(7000, 0.5) > score(7000, 0.6) > score(6999, 0.5)
    assert score(7001, 20.0) > score(7000, 0.5)


def test_a_training_takes_the_size_of_the_checkpoint_s_processor(succeeds, tiny_checkpoint, colours, tmp_path, caplog):
    """A DINOv2 of 518 px by its config is fed 224 px by its processor; and sizes of a recipe become whole patches."""
    model, sizes = shutil.copytree(tiny_checkpoint, tmp_path / "model"), {}
    ViTImageProcessor(size={"height": 12, "width": 12}).save_pretrained(model)
    for name, more in {"processor": (), "option": ("--image-size", "8")}.items():
        words = ("--data", colours, "--output", tmp_path / name, *SHORT, *more)
        sizes[name] = succeeds("finetune", "--model", model, *words)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["image_size"] == {"processor": 12, "option": 8}[name]
    told = "is trained at the 12x12 px of its image processor; its config says 8x8 px"
    assert [told in out for out in sizes.values()] == [True, False]
    source = find_model(str(model))
    (note,) = choose_image_size(source, (10, 10), None)[1]
    assert note.startswith("images of 10x10 px do not divide into whole patches of 4x4 px")
    assert choose_image_size(source, [8, 8], None) == ((8, 8), [])
    cut = "the recipe's images of 15x18 px become 12x16 px, whole patches of 4x4 px"
    assert choose_image_size(source, None, (15, 18)) == ((12, 16), [cut])
    hybrid = find_model(HfHybridViTConfig(stage_depths=(1, 1), stem_width=32))  # which fills up patches of 8 px
    assert choose_image_size(hybrid, (36, 36), None) == ((36, 36), [])
    (model / "preprocessor_config.json").unlink()
    assert list(build_processor(source, source.config).image_mean) == [0.5] * 3
    assert f"{model} has no preprocessor_config.json, so pixels are normalized as its config says" in caplog.text
    fresh = find_model("EVA-02-Ti/14")  # the config's constants are those from which patch prediction reads colors
    assert tuple(build_processor(fresh, fresh.config).image_std) == fresh.config.image_std != (0.5,) * 3


def test_a_short_training_evaluates_no_longer_than_it_trains(tiny_checkpoint, tmp_path):
    """Evaluating 400 images ten times and 9,000 once takes longer than training on 24 images, at three passes each."""
    random = np.random.RandomState(0)
    for split, count in (("train", 600), ("val", 400), ("t10k", 9000)):
        pixels, labels = random.randint(0, 256, (count, 4, 4)), np.arange(count) % 2
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            write_idx(tmp_path / "data" / f"{split}-{kind}-ubyte", array.astype(np.uint8))
    data, lines = load_data(tmp_path / "data"), list[str]()
    recipe = {"steps": 3, "batch_size": 8, "warmup": 10, "average_decay": 0.8, "keep_checkpoints": True}
    for given, count, words in (
        ({}, 1, "once instead of 20 times, and on 500 images"),
        ({"evaluations": 3}, 3, "on 500 images"),  # a number that was given stays
    ):
        out = tmp_path / f"out{count}"
        result = finetune(str(tiny_checkpoint), data, out, report=lines.append, **recipe, **given)
        assert (Facts.load(out).records[-1].data.size, result.test.num_images) == (500, 500)
        assert sum("eval_loss" in entry for entry in result.history) == count
        assert any(f"a short training: it evaluates {words} of each split" in line for line in lines)
    shutil.copytree(tmp_path / "out1" / "checkpoints", tmp_path / "again" / "checkpoints")
    with pytest.raises(UserError, match=r"limited_evaluation was \[1, 500\] and is now \[20, 500\]"):
        finetune(str(tiny_checkpoint), data, tmp_path / "again", resume=True, evaluations=20, **recipe)
    for note in ("the warm-up of 10 steps is longer than the training of 3, so", "initial weights by 51%; give a"):
        assert any(note in line for line in lines)
    options = FinetuneOptions()
    cases = ((300, 16, 10, 10, {}), (240, 16, 30, 6, {}), (240, 16, 30, 28, {"objective": "masked-patch"}))
    for steps, batch, evaluations, expected, task in cases:  # a pre-training is not tested
        settings = SimpleNamespace(evaluations=evaluations, batch_size=batch)
        run = SimpleNamespace(recipe=settings, data=data, options=options, steps=steps, task=task)
        run.keeps_evaluations = False
        assert limit_evaluation(run) == (expected, None)


def test_the_memory_of_a_large_step_is_told(monkeypatch, tmp_path):
    """As `hf-vit cost --memory` plans it; a step that does not fit is told with the remedy."""
    config = HfViTConfig(image_size=32, patch_size=8, hidden_size=1024, num_hidden_layers=1, num_attention_heads=16)
    config.save_pretrained(tmp_path)
    plan = memory_plan(tmp_path, batch_size=1024)
    with torch.device("meta"):
        model = HfViTForImageClassification(config)
    options = FinetuneOptions(device="cpu")
    run = SimpleNamespace(model=model, micro_batch_size=1024, bf16=False, options=options)
    run.recipe = SimpleNamespace(tune="head")  # no gradients of the backbone
    assert note_memory(run) == []
    run.recipe.tune = "all"
    (note,) = note_memory(run)
    assert f"a step of 1024 images needs about {plan.rows[0].replicated / 1e9:.1f} GB" in note
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**9))
    assert note_memory(run) == [f"{note}, but 1.0 GB are free; choose a smaller --micro-batch-size"]
    run.micro_batch_size = 1
    assert note_memory(run) == []
