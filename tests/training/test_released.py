"""What is released instead of the weights that learn: their average, or an adapter merged into them."""

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from training.conftest import Images
from transformers import TrainerCallback

from hf_vit import HfAxialViTConfig, HfAxialViTForImageClassification, HfViTForImageClassification, UserError
from hf_vit.training.trainer.adapters import LoraAdapter, train_head_only
from hf_vit.training.trainer.averaging import WeightAverage
from hf_vit.training.trainer.losses import BinaryCrossEntropy

DECAY = 0.7


class Trajectory(TrainerCallback):
    """The weights after every step."""

    def __init__(self, model):
        self.model = model
        self.weights = [self.now()]

    def now(self):
        return {name: value.double().clone() for name, value in self.model.state_dict().items()}

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(self.now())


def average(weights):
    """The closed form: decay**n of the first weights, and (1 - decay) * decay**(n - k) of those after step k."""
    steps = len(weights) - 1
    shares = [DECAY**steps] + [(1 - DECAY) * DECAY ** (steps - step) for step in range(1, steps + 1)]
    return {name: sum(s * w[name] for s, w in zip(shares, weights, strict=True)) for name in weights[0]}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.fixture
def averaging(make_trainer):
    def make(**arguments):
        settings = dict(max_steps=6, save_steps=3, eval_steps=3, eval_strategy="steps", logging_steps=3)
        return make_trainer(extras=dict(average_decay=DECAY), **{**settings, **arguments})

    return make


def test_checkpoints_and_model_are_the_closed_form_average(averaging):
    trainer = averaging()
    path = Trajectory(trainer.model)
    trainer.add_callback(path)
    trainer.train()
    assert_close(trainer.model.state_dict(), average(path.weights))
    for step in (3, 6):
        checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        assert_close(load_file(checkpoint / "model.safetensors"), average(path.weights[: step + 1]))
        assert_close(load_file(checkpoint / "training_weights.safetensors"), path.weights[step])


def test_evaluation_judges_the_average(averaging):
    trainer = averaging()
    trainer.train()
    judge = copy.deepcopy(trainer.model).eval()
    judge.load_state_dict(load_file(Path(trainer.args.output_dir) / "checkpoint-3" / "model.safetensors"))
    data = trainer.eval_dataset
    with torch.no_grad():
        expected = F.cross_entropy(judge(pixel_values=data.pixels).logits, data.labels)
    logged = next(
        entry["eval_loss"] for entry in trainer.state.log_history if entry.get("step") == 3 and "eval_loss" in entry
    )
    assert logged == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_averaging_is_the_unbroken_one_to_the_bit(averaging, tiny_config, dtype):
    def make():
        torch.manual_seed(0)
        images = Images()
        images.pixels = images.pixels.to(dtype)
        model = HfViTForImageClassification(tiny_config()).to(dtype)
        return averaging(model=model, dataset=images)

    trainer = make()
    trainer.train()
    again = make()
    again.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-3"))
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_the_best_average_is_what_is_left(averaging):
    trainer = averaging(
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False, learning_rate=3.0
    )
    trainer.train()
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    assert all(torch.equal(trainer.model.state_dict()[name], value) for name, value in best.items())


def test_exchange_gives_the_weights_back_to_the_bit_and_averages_batch_statistics():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average_of = WeightAverage(model, 0.75)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.add_(0.1)
    model(torch.full((4, 2), 8.0))
    after = copy.deepcopy(model.state_dict())
    average_of.update()
    with average_of.in_place(), average_of.in_place():
        found = copy.deepcopy(model.state_dict())
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    for name in ("0.weight", "1.running_mean", "1.running_var"):
        torch.testing.assert_close(found[name], 0.75 * before[name] + 0.25 * after[name])
    assert found["1.num_batches_tracked"] == 1


def test_bfloat16_weights_are_averaged_in_float32():
    model = nn.Linear(8, 8).bfloat16()
    nn.init.uniform_(model.weight, 1.0, 2.0)
    average_of, expected = WeightAverage(model, 0.999), model.weight.detach().double()
    nn.init.uniform_(model.weight, 1.0, 2.0)
    learnt = model.weight.detach().clone()
    for _ in range(300):
        average_of.update()
        expected = 0.999 * expected + 0.001 * learnt.double()
        with average_of.in_place():
            found = model.weight.detach().clone()
        assert torch.equal(model.weight, learnt)
    # As near as bfloat16 gets, a quarter of the way.
    assert ((found.double() - expected).abs() <= 2**-8 + 1e-6).all()


def test_averaging_and_adapter_together_are_refused(make_trainer, tiny_config):
    pytest.importorskip("peft")
    model = HfViTForImageClassification(tiny_config())
    with pytest.raises(UserError, match="cannot be averaged and merged"):
        make_trainer(model, extras=dict(average_decay=0.5, adapter=LoraAdapter(model)))


# ---- few weights


def test_only_the_head_learns(make_trainer, tiny_config):
    model = HfViTForImageClassification(tiny_config())
    train_head_only(model)
    before = copy.deepcopy(model.state_dict())
    make_trainer(model, max_steps=3).train()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"classifier.weight", "classifier.bias"}


def adapted(family, tiny_config):
    pytest.importorskip("peft")
    torch.manual_seed(1)
    if family == "axial":
        sizes = dict(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        model = HfAxialViTForImageClassification(HfAxialViTConfig(**sizes, intermediate_size=32, num_labels=3))
    else:
        model = HfViTForImageClassification(tiny_config(num_hidden_groups=1 if family == "shared" else None))
    return model, LoraAdapter(model, rank=2, alpha=6)


@pytest.mark.parametrize("family", ["plain", "shared", "axial"])
def test_lora_learns_low_rank_updates_and_leaves_a_plain_model(family, make_trainer, tiny_config):
    model, adapter = adapted(family, tiny_config)
    before = {name: value.clone() for name, value in adapter.merged_state(model.state_dict()).items()}
    trainer = make_trainer(model, extras=dict(adapter=adapter), max_steps=4, save_steps=4, learning_rate=0.5)
    logits = []

    class Last(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with torch.no_grad():
                model.eval()
                logits.append(model(pixel_values=Images().pixels).logits)
                model.train()

    trainer.add_callback(Last())
    trainer.train()
    fresh = type(model)(model.config)
    assert model.state_dict().keys() == fresh.state_dict().keys()
    # The model with its adapter, the merged one and the saved one answer alike.
    saved = type(model).from_pretrained(Path(trainer.args.output_dir) / "checkpoint-4")
    for judge in (model.eval(), saved.eval()):
        with torch.no_grad():
            torch.testing.assert_close(judge(pixel_values=Images().pixels).logits, logits[-1], rtol=1e-4, atol=1e-5)
    for name, value in model.state_dict().items():
        update = value - before[name]
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            assert torch.linalg.matrix_rank(update, rtol=1e-3) == 2, name
        else:
            assert name.startswith("classifier") == bool(update.any()), name


def test_resumed_lora_is_the_unbroken_one_to_the_bit(make_trainer, tiny_config):
    trained = []
    for checkpoint in (None, "checkpoint-2"):
        model, adapter = adapted("plain", tiny_config)
        trainer = make_trainer(model, extras=dict(adapter=adapter), max_steps=4, save_steps=2, learning_rate=0.5)
        resume = checkpoint and str(Path(trainer.args.output_dir) / checkpoint)
        trainer.train(resume_from_checkpoint=resume)
        trained.append(model.state_dict())
    assert all(torch.equal(trained[1][name], value) for name, value in trained[0].items())


def test_a_missing_peft_names_the_extra(monkeypatch, tiny_config):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'hf-vit\[peft\]'"):
        LoraAdapter(HfViTForImageClassification(tiny_config()))


def test_a_model_without_projections_or_head_is_refused():
    pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UserError, match="tune all of it, or its head"):
        LoraAdapter(model)
    with pytest.raises(UserError, match="no classification head"):
        train_head_only(model)


# ---- one yes or no a class


def binary_by_hand(logits, targets):
    total = 0.0
    for row, wanted in zip(logits.tolist(), targets.tolist(), strict=True):
        for logit, target in zip(row, wanted, strict=True):
            total -= target * math.log(1 / (1 + math.exp(-logit))) + (1 - target) * math.log(1 / (1 + math.exp(logit)))
    return total / len(logits)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(("threshold", "smoothing"), [(None, 0.0), (None, 0.3), (0.2, 0.1)])
def test_binary_loss_is_the_hand_computed_one(soft, threshold, smoothing, make_trainer):
    trainer = make_trainer(
        dataset=Images(soft=soft),
        extras=dict(compute_loss_func=BinaryCrossEntropy(threshold)),
        label_smoothing_factor=smoothing,
    )
    data = trainer.train_dataset
    labels = data.labels if soft else F.one_hot(data.labels, 3).float()
    targets = labels * (1 - smoothing) + smoothing / 3
    if threshold is not None:
        targets = (targets > threshold).float()
    model = trainer.model.train()
    inputs = {"pixel_values": data.pixels, "labels": data.labels}
    loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=data.labels.numel())
    logits = model(pixel_values=data.pixels).logits
    assert loss.item() == pytest.approx(binary_by_hand(logits, targets), rel=1e-5)


def test_binary_loss_of_accumulated_micro_batches_is_that_of_the_batch(make_trainer):
    weights = []
    for micro, accumulated in ((12, 1), (4, 3)):
        trainer = make_trainer(
            extras=dict(compute_loss_func=BinaryCrossEntropy()),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulated,
        )
        trainer.train()
        weights.append(trainer.model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6)


def test_evaluation_after_binary_training_is_the_plain_cross_entropy(make_trainer):
    trainer = make_trainer(extras=dict(compute_loss_func=BinaryCrossEntropy()))
    data = trainer.eval_dataset
    with torch.no_grad():
        expected = F.cross_entropy(trainer.model.eval()(pixel_values=data.pixels).logits, data.labels)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
