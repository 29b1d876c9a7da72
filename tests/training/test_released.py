"""What is released, and how it is learnt: weight averages, adapters, sharpness-aware steps."""

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from models import families as tiny
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from training.conftest import Images, make_resnet_config, make_transformers_vit
from transformers import AutoModelForImageClassification, PreTrainedConfig, TrainerCallback, TrainingArguments

from hf_vit import (
    HfAxialResNetForImageClassification,
    HfAxialViTConfig,
    HfAxialViTForImageClassification,
    HfViTForImageClassification,
    UserError,
)
from hf_vit.training import HfViTTrainer, finetune
from hf_vit.training.trainer.sam import SharpnessAware
from hf_vit.training.trainer.weights import LoraAdapter, WeightAverage, train_head_only

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
    def make(model=None, **arguments):
        settings = dict(max_steps=6, save_steps=3, eval_steps=3, eval_strategy="steps", logging_steps=3)
        return make_trainer(model, extras=dict(average_decay=DECAY), **{**settings, **arguments})

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
    # And an evaluation judges the average.
    judge, data = copy.deepcopy(trainer.model).eval(), trainer.eval_dataset
    judge.load_state_dict(load_file(Path(trainer.args.output_dir) / "checkpoint-3" / "model.safetensors"))
    with torch.no_grad():
        expected = F.cross_entropy(judge(pixel_values=data.pixels).logits, data.labels)
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert logged[0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("model", [None, "transformers ViT"])
def test_the_best_average_is_what_is_left(model, averaging):
    keep_best = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)  # the first
    # transformers saves it under other names than those of its modules.
    trainer = averaging(model and make_transformers_vit(), **keep_best, learning_rate=3.0)
    trainer.train()
    best = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint).state_dict()
    assert trainer.state.best_global_step < trainer.state.global_step
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
    with average_of.use_averages(), average_of.use_averages():
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
        with average_of.use_averages():
            found = model.weight.detach().clone()
        assert torch.equal(model.weight, learnt)
    # As near as bfloat16 gets, a quarter of the way.
    assert ((found.double() - expected).abs() <= 2**-8 + 1e-6).all()


def test_averaging_and_adapter_together_are_refused(make_trainer, tiny_config):
    pytest.importorskip("peft")
    model = HfViTForImageClassification(tiny_config())
    with pytest.raises(UserError, match="average_decay cannot be combined with an adapter"):
        make_trainer(model, extras=dict(average_decay=0.5, adapter=LoraAdapter(model)))


# ---- few weights


@pytest.mark.parametrize("family", ["plain", "axial_resnet"])  # the second has batch norms
def test_only_the_head_learns(family, make_trainer, tiny_config):
    model = AutoModelForImageClassification.from_config(tiny_config() if family == "plain" else make_resnet_config())
    train_head_only(model)
    before = copy.deepcopy(model.state_dict())
    make_trainer(model, max_steps=3).train()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("name", ["plain", "hybrid", "axial", "local", "mixer", "bit", "axial_resnet"])
def test_only_the_last_blocks_and_the_head_learn(name, colours, tmp_path):
    config = (tiny.FAMILIES | tiny.OTHERS)[name].config(num_labels=3)
    AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path / "start")
    start = load_file(tmp_path / "start" / "model.safetensors")
    settings = dict(tune="last-blocks", tuned_blocks=1, steps=4, evaluations=1, learning_rate=0.1, precision="fp32")
    settings["batch_size"] = 8
    train = partial(finetune, str(tmp_path / "start"), str(colours), tmp_path / "out", head_bias=0.1, device="cpu")
    if not hasattr(config, "num_hidden_layers"):
        with pytest.raises(UserError, match=r"--tune last-blocks does not work with .*no sequence of layers"):
            train(**settings)
        return
    blocks = config.num_hidden_layers
    with pytest.raises(UserError, match=f"--tuned-blocks {blocks} leaves none of the {blocks} blocks .* frozen"):
        train(**settings | {"tuned_blocks": blocks})
    learnt = load_file(train(**settings).folder / "model.safetensors")
    frozen = {name for name, value in start.items() if torch.equal(value, learnt[name])}
    below = re.compile(rf"embeddings\.|layers\.(?!{blocks - 1}\.)")
    # `k_proj.bias` has no effect in a softmax, so its gradient is 0 but for rounding
    kinds = {name: bool(below.search(name)) for name in start if not name.endswith("k_proj.bias")}
    assert {name for name, is_below in kinds.items() if is_below} == frozen & kinds.keys()


def adapted(family, tiny_config):
    pytest.importorskip("peft")
    torch.manual_seed(1)
    if family == "axial":
        sizes = dict(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        model = HfAxialViTForImageClassification(HfAxialViTConfig(**sizes, intermediate_size=32, num_labels=3))
    else:
        fields = {"shared": {"num_hidden_groups": 1}, "rotary": {"rotary_embedding": "mixed"}}.get(family, {})
        model = HfViTForImageClassification(tiny_config(**fields))
    return model, LoraAdapter(model, rank=2, alpha=6)


@pytest.mark.parametrize("family", ["plain", "shared", "axial", "rotary"])
def test_lora_learns_low_rank_updates_and_leaves_a_plain_model(family, make_trainer, tiny_config):
    model, adapter = adapted(family, tiny_config)
    before = {name: value.clone() for name, value in adapter.make_merged_state(model.state_dict()).items()}
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


def test_a_missing_peft_names_the_extra(monkeypatch, tiny_config):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'hf-vit\[peft\]'"):
        LoraAdapter(HfViTForImageClassification(tiny_config()))


def test_a_model_without_projections_or_head_is_refused():
    pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UserError, match="use --tune all or --tune head"):
        LoraAdapter(model)
    with pytest.raises(UserError, match="no classification head"):
        train_head_only(model)


# ---- sharpness-aware steps


class Quadratic(nn.Module):
    """Loss of an image with curvature c: c * (3 * a**2 + b**2) / 2, at first in (a, b) = (1, -2)."""

    accepts_loss_kwargs = False

    def __init__(self, dropout=0.0):
        super().__init__()
        self.config = PreTrainedConfig(num_labels=2)
        self.place = nn.Parameter(torch.tensor([1.0, -2.0]))
        self.dropout = nn.Dropout(dropout)
        self.seen = []

    def forward(self, curvature, labels=None):
        place = self.dropout(self.place)
        self.seen.append((self.place.detach().clone(), place.detach().clone()))
        each = curvature * (torch.tensor([3.0, 1.0]) * place**2).sum() / 2
        return {"loss": each.mean(), "logits": each[:, None]}


class Curvatures(torch.utils.data.Dataset):
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return {"curvature": torch.tensor(self.values[index])}


class Turned(Quadratic):
    """Curvatures from 5 on count along a alone, as slopes of one direction would be perturbed alike."""

    def forward(self, curvature, labels=None):
        self.seen.append((self.place.detach().clone(), None))
        first = (curvature < 5).float()
        each = curvature * (3 * self.place[0] ** 2 + first * self.place[1] ** 2) / 2
        return {"loss": each.mean(), "logits": each[:, None]}


def descend(model, curvatures, tmp_path, sharpness, micro_batches=1, steps=1, clip=0.0):
    size = dict(per_device_train_batch_size=len(curvatures) // micro_batches, gradient_accumulation_steps=micro_batches)
    rule = dict(optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_steps=steps, max_grad_norm=clip)
    quiet = dict(report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1)
    arguments = TrainingArguments(str(tmp_path), **size, **rule, **quiet)
    trainer = HfViTTrainer(model=model, args=arguments, train_dataset=Curvatures(curvatures), sharpness=sharpness)
    trainer.train()
    return trainer


def slope(place, curvature):
    return torch.tensor([3.0 * curvature * place[0], curvature * place[1]])


def test_a_step_on_a_quadratic_worked_by_hand(tmp_path):
    model = Quadratic()
    trainer = descend(model, [2.0], tmp_path, SharpnessAware(0.5))
    # g = (6, -4), |g| = sqrt(52); e = 0.5 g / |g|; g(w + e) = (6 (1 + 3/sqrt(52)), 2 (-2 - 2/sqrt(52)))
    root = 52**0.5
    expected = [1 - 0.1 * 6 * (1 + 3 / root), -2 - 0.1 * 2 * (-2 - 2 / root)]
    torch.testing.assert_close(model.place.detach(), torch.tensor(expected), rtol=1e-6, atol=0)
    with pytest.raises(UserError, match="must be above 0"):
        SharpnessAware(0.0)
    # What is logged is the loss at the weights themselves: 2 * (3 + 4) / 2.
    assert trainer.state.log_history[0]["loss"] == pytest.approx(7.0)


def test_infinite_gradients_of_scaled_losses_perturb_no_weight():
    """Float16's loss scale begins too large; the step is skipped, so its second loss must not be NaN."""
    model, sharpness, places = Quadratic(), SharpnessAware(0.5), []

    def run(batch):
        places.append(model.place.detach().clone())
        model.place.grad = torch.tensor([torch.inf, 1.0])
        return torch.zeros(())

    sharpness.begin([{}])
    sharpness.backward(model, {}, run)
    assert torch.equal(*places)


def test_accumulated_micro_batches_are_one_batch(tmp_path):
    whole, parts = Turned(), Turned()
    descend(whole, [1.0, 2.0, 3.0, 6.0], tmp_path, SharpnessAware(0.3), steps=3)
    descend(parts, [1.0, 2.0, 3.0, 6.0], tmp_path, SharpnessAware(0.3), micro_batches=4, steps=3)
    torch.testing.assert_close(parts.place, whole.place)


def test_m_sharpness_perturbs_for_every_micro_batch(tmp_path):
    model = Turned()
    descend(model, [2.0, 8.0], tmp_path, SharpnessAware(0.5, micro_batches=True), micro_batches=2)
    start = torch.tensor([1.0, -2.0])
    gradients = []
    for curvature, mask in ((2.0, torch.tensor([1.0, 1.0])), (8.0, torch.tensor([1.0, 0.0]))):
        gradient = slope(start, curvature) * mask
        gradients.append(slope(start + 0.5 * gradient / gradient.norm(), curvature) * mask)
    torch.testing.assert_close(model.place.detach(), start - 0.1 * sum(gradients) / 2)


def test_gradients_are_clipped_after_both_passes(tmp_path):
    model = Quadratic()
    descend(model, [2.0], tmp_path, SharpnessAware(0.5), clip=1.0)
    assert (model.place.detach() - torch.tensor([1.0, -2.0])).norm() == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("micro_batches", [False, True])
def test_both_passes_drop_the_same_and_the_weights_come_back(micro_batches, tmp_path):
    torch.manual_seed(0)
    model = Quadratic(dropout=0.5)
    descend(model, [1.0, 1.5, 2.0, 2.5], tmp_path, SharpnessAware(0.1, micro_batches), micro_batches=4, steps=4)
    dropped = [(place == 0).tolist() for _, place in model.seen]
    assert len(dropped) == 2 * 4 * 4
    if micro_batches:
        assert dropped[0::2] == dropped[1::2]
    else:
        for step in range(4):
            assert dropped[8 * step : 8 * step + 4] == dropped[8 * step + 4 : 8 * step + 8]
    assert len({tuple(mask) for mask in dropped}) > 1
    first = [weights for weights, _ in model.seen[:8]]
    assert torch.equal(first[0], torch.tensor([1.0, -2.0]))
    if micro_batches:
        assert all(torch.equal(weights, first[0]) for weights in first[0::2])


def batch_normed():
    torch.manual_seed(1)
    model = HfAxialResNetForImageClassification(make_resnet_config()).train()
    nn.init.normal_(model.classifier.weight)
    return model


@pytest.mark.parametrize("micro_batches", [False, True])
def test_running_statistics_are_those_of_plain_passes(micro_batches):
    model = batch_normed()
    plain = copy.deepcopy(model)
    batches = [{"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.tensor([0, 1, 2, 0])} for _ in range(2)]

    def run(batch):
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    sharpness = SharpnessAware(0.1, micro_batches)
    sharpness.begin(batches)
    for batch in batches:
        sharpness.backward(model, batch, run)
        plain(**batch)
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "kind", ["bfloat16", "batch norm and SAM", "transformers ViT", "average of a transformers ViT"]
)
def test_resumed_is_the_unbroken_one_to_the_bit(kind, make_trainer, tiny_config):
    """Averages in float32, adapters and SAM of models without batch norms: test_resume.py."""

    def make():
        torch.manual_seed(0)
        images, extras, settings = Images(), dict(average_decay=DECAY), dict(max_steps=6, save_steps=3)
        if "ViT" in kind:
            model = make_transformers_vit()
            if "average" not in kind:
                extras = None
        elif kind == "bfloat16":
            images.pixels = images.pixels.bfloat16()
            model = HfViTForImageClassification(tiny_config()).bfloat16()
        else:
            model, extras["sharpness"] = batch_normed(), SharpnessAware(0.1)
            settings |= dict(per_device_train_batch_size=3, gradient_accumulation_steps=2)
        return make_trainer(model, images, extras, **settings)

    trainer, again = make(), make()
    trainer.train()
    again.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-3"))
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_a_flat_place_is_no_division_by_zero(tmp_path):
    model = Quadratic()
    model.place.data.zero_()
    descend(model, [2.0], tmp_path, SharpnessAware(0.5))
    assert torch.equal(model.place.detach(), torch.zeros(2))
