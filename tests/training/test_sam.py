"""Sharpness-aware minimisation against quadratics worked by hand, through the Trainer itself."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, TrainingArguments

from hf_vit import HfAxialResNetConfig, HfAxialResNetForImageClassification, UserError
from hf_vit.training import HfViTTrainer
from hf_vit.training.trainer.sam import SharpnessAware


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


def descend(model, curvatures, tmp_path, sharpness, micro_batches=1, steps=1, clip=0.0):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=len(curvatures) // micro_batches,
        gradient_accumulation_steps=micro_batches,
        max_steps=steps,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=clip,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = HfViTTrainer(model=model, args=arguments, train_dataset=Curvatures(curvatures), sharpness=sharpness)
    trainer.train()
    return trainer


def slope(place, curvature):
    """By hand: (3 c a, c b)."""
    return torch.tensor([3.0 * curvature * place[0], curvature * place[1]])


def test_a_step_on_a_quadratic_worked_by_hand(tmp_path):
    model = Quadratic()
    trainer = descend(model, [2.0], tmp_path, SharpnessAware(0.5))
    # g = (6, -4), |g| = sqrt(52); e = 0.5 g / |g|; g(w + e) = (6 (1 + 3/sqrt(52)), 2 (-2 - 2/sqrt(52)))
    root = 52**0.5
    expected = [1 - 0.1 * 6 * (1 + 3 / root), -2 - 0.1 * 2 * (-2 - 2 / root)]
    torch.testing.assert_close(model.place.detach(), torch.tensor(expected), rtol=1e-6, atol=0)
    # What is logged is the loss at the weights themselves: 2 * (3 + 4) / 2.
    assert trainer.state.log_history[0]["loss"] == pytest.approx(7.0)


def test_without_it_a_step_is_plain(tmp_path):
    model = Quadratic()
    descend(model, [2.0], tmp_path, None)
    torch.testing.assert_close(model.place.detach(), torch.tensor([1 - 0.6, -2 + 0.4]))


def test_accumulated_micro_batches_are_one_batch(tmp_path):
    whole, parts = Quadratic(), Quadratic()
    descend(whole, [1.0, 2.0, 3.0, 6.0], tmp_path, SharpnessAware(0.3), steps=3)
    descend(parts, [1.0, 2.0, 3.0, 6.0], tmp_path, SharpnessAware(0.3), micro_batches=4, steps=3)
    torch.testing.assert_close(parts.place, whole.place)


def test_m_sharpness_perturbs_for_every_micro_batch(tmp_path):
    # Slopes of one direction would be perturbed alike: the second pair of images looks along a alone.
    class Turned(Quadratic):
        def forward(self, curvature, labels=None):
            self.seen.append((self.place.detach().clone(), None))
            first = (curvature < 5).float()
            each = curvature * (3 * self.place[0] ** 2 + first * self.place[1] ** 2) / 2
            return {"loss": each.mean(), "logits": each[:, None]}

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
    config = HfAxialResNetConfig(image_size=8, num_labels=3, stage_depths=(1,), stem_width=8)
    model = HfAxialResNetForImageClassification(config).train()
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


def test_resumed_with_batch_norm_is_the_unbroken_one_to_the_bit(make_trainer):
    trained = []
    for checkpoint in (None, "checkpoint-2"):
        extras = dict(sharpness=SharpnessAware(0.1), average_decay=0.7)
        trainer = make_trainer(
            batch_normed(),
            extras=extras,
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
        )
        trainer.train(resume_from_checkpoint=checkpoint and str(Path(trainer.args.output_dir) / checkpoint))
        trained.append(trainer.model.state_dict())
    assert all(torch.equal(trained[1][name], value) for name, value in trained[0].items())


def test_a_flat_place_is_no_division_by_zero(tmp_path):
    model = Quadratic()
    model.place.data.zero_()
    descend(model, [2.0], tmp_path, SharpnessAware(0.5))
    assert torch.equal(model.place.detach(), torch.zeros(2))


def test_a_radius_of_nothing_is_refused():
    with pytest.raises(UserError, match="give a rho above 0"):
        SharpnessAware(0.0)
