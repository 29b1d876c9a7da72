"""Fine-tuning keeps what is there, does not stop while it learns, and tells when it has learnt next to nothing."""

import numpy as np
import pytest
import torch
from scipy.stats import binom
from transformers import (
    AutoModelForImageClassification,
    EvalPrediction,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_vit import HfViTForImageClassification
from hf_vit.data import make_processor
from hf_vit.loading.start import build_classifier, find_model
from hf_vit.results.facts import Facts
from hf_vit.training import finetune
from hf_vit.training.tasks.classification import compute_chance_accuracy, compute_metrics
from hf_vit.training.trainer.callbacks import Patience

SHORT = ("--steps", "2", "--batch-size", "12", "--precision", "fp32", "--learning-rate", "1e-9")
PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


@pytest.fixture
def saved(tiny_config, tmp_path):
    """Save a classifier of these classes whose head is not zero: its folder, and itself."""

    def make(*names, **fields):
        torch.manual_seed(1)
        config = tiny_config(id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}, **fields)
        model = HfViTForImageClassification(config).eval()
        for name, parameter in model.named_parameters():
            if "classifier" in name:
                torch.nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / "saved")
        make_processor(config).save_pretrained(tmp_path / "saved")
        return tmp_path / "saved", model

    return make


COLOURS, IN_ORDER = ("red", "blue", "green"), ["blue", "green", "red"]


@pytest.mark.parametrize(
    ("names", "fields", "classes", "rows"),
    [
        (COLOURS, {}, IN_ORDER, [1, 2, 0]),
        (COLOURS, {"representation_size": 8}, IN_ORDER, [1, 2, 0]),
        (COLOURS, {"use_distillation_token": True}, IN_ORDER, [1, 2, 0]),
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


def test_a_variant_has_no_head_to_keep():
    assert not build_classifier(find_model("Ti/4"), ["LABEL_0", "LABEL_1"], image_size=(8, 8)).classifier.weight.any()


def test_it_is_told_and_can_be_declined(saved, colours, command, tmp_path):
    folder, old = saved("red", "blue", "green")
    arguments = ("finetune", "--model", folder, "--data", colours, *SHORT)
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


def judged(patience, score, loss, step, best, warmup=0):
    """Whether an evaluation stops the training."""
    control = TrainerControl()
    arguments = TrainingArguments(metric_for_best_model="score", greater_is_better=True, warmup_steps=warmup)
    state = TrainerState(global_step=step, max_steps=100, best_metric=best)
    patience.on_evaluate(arguments, state, control, {"eval_score": score, "eval_loss": loss})
    return control.should_training_stop


def test_a_falling_loss_is_progress():
    patience = Patience(2)
    assert [judged(patience, 0.1, 2.3 - step / 100, step, best=0.14) for step in range(1, 7)] == [False] * 6
    # Neither: twice is enough. A better accuracy begins anew.
    assert [judged(patience, 0.1, 2.3, step, best=0.14) for step in (7, 8)] == [False, True]
    patience = Patience(2)
    scores = (0.1, 0.1, 0.2, 0.1, 0.1)
    stops = [judged(patience, score, 2.3, step, best=0.14) for step, score in enumerate(scores, 1)]
    assert stops == [False, False, False, False, True]


def test_the_warm_up_does_not_count():
    patience = Patience(2)
    stops = [judged(patience, 0.1, 2.3, 10 * step, best=0.14, warmup=0.5) for step in range(1, 8)]
    assert stops == [False] * 6 + [True]  # the 60th and the 70th step are the first two that count


def test_no_run_is_stopped_while_it_warms_up(colours, tiny_config, tmp_path):
    """All of it is warm-up: without the rule the first evaluations, which are all the same, would end it."""
    result = finetune(
        tiny_config(), str(colours), tmp_path / "out", steps=6, warmup=6, patience=1, learning_rate=1e-12, batch_size=12
    )
    assert result.steps == 6


@pytest.mark.parametrize("counts", [(36,) * 10, (500, 500), (900, 50, 50), (1,) * 2000])
def test_accuracy_of_chance(counts):
    """Guesses are right more often than that once in a hundred data sets or more rarely, by the binomial law."""
    images = sum(counts)
    chance = compute_chance_accuracy(np.repeat(np.arange(len(counts)), counts))
    assert max(counts) / images < chance < 1
    assert 1e-5 < binom.sf(chance * images, images, max(counts) / images) < 0.02


def test_of_few_images_chance_explains_not_all():
    assert compute_chance_accuracy(np.array([0, 1, 2] * 2)) == pytest.approx(2 / 3)


def test_a_model_that_has_hardly_learnt_is_told(colours, make_colours, command, tmp_path, tiny_checkpoint):
    """Nothing can be learnt of classes that look alike."""
    alike = make_colours(tmp_path / "alike", colours=dict.fromkeys(("blue", "green", "red"), (90, 90, 90)))
    arguments = ("finetune", "--model", tiny_checkpoint, "--batch-size", "16", "--evaluations", "1")
    code, out, _ = command(*arguments, "--data", alike, "--output", tmp_path / "out", "--steps", "2")
    assert code == 0
    (line,) = (line for line in out.splitlines() if "hardly learned" in line)
    assert "train longer" in line
    values = Facts.load(tmp_path / "out").records[0].values
    assert values["validation_accuracy"] <= values["chance_accuracy"] < 1
    row = f"| validation accuracy that chance explains, at most | {values['chance_accuracy']:.2%} |"
    assert row in (tmp_path / "out" / "README.md").read_text().replace("\\", "")
    learning = ("--steps", "100", "--learning-rate", "3e-3")
    code, out, _ = command(*arguments, "--data", colours, "--output", tmp_path / "learnt", *learning)
    assert (code, "hardly learned" in out) == (0, False)


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
