"""Classes of unequal size: weights and draws that make up for it, against plain arithmetic."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from hf_vit import UserError
from hf_vit.results.facts import Facts
from hf_vit.training import FinetuneOptions, finetune
from hf_vit.training.trainer.losses import WeightedCrossEntropy
from hf_vit.training.trainer.sampling import EpochSampler

LABELS = [0] * 60 + [1] * 30 + [2] * 10


def test_weights_are_one_on_average_and_even_the_classes_out():
    loss = WeightedCrossEntropy.balanced(LABELS, 4)
    assert loss.weights == pytest.approx((100 / 180, 100 / 90, 100 / 30, 1.0))
    assert sum(loss.weights[label] for label in LABELS) == pytest.approx(100)
    assert 60 * loss.weights[0] == pytest.approx(10 * loss.weights[2])


def test_the_loss_is_each_images_own_times_its_weight():
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 3), torch.tensor([0, 0, 1, 2, 1, 0, 2, 2])
    loss = WeightedCrossEntropy.balanced(LABELS, 3)
    own = -torch.log_softmax(logits.double(), 1)[torch.arange(8), labels]
    expected = (own * torch.tensor(loss.weights, dtype=torch.float64)[labels]).mean()
    outputs = SimpleNamespace(logits=logits)
    torch.testing.assert_close(loss(outputs, loss.targets(labels, 3)).double(), expected, atol=1e-6, rtol=0)
    # Two micro-batches of a step, as the Trainer counts them: label elements, three a row.
    halves = [
        loss(SimpleNamespace(logits=logits[half]), loss.targets(labels[half], 3), num_items_in_batch=24)
        for half in (slice(0, 5), slice(5, 8))
    ]
    torch.testing.assert_close(sum(halves).double(), expected, atol=1e-6, rtol=0)
    # An evaluation's class indices are not weighted.
    torch.testing.assert_close(loss(outputs, labels), F.cross_entropy(logits, labels))


def test_every_class_is_drawn_as_often_as_the_others():
    weights = WeightedCrossEntropy.balanced(LABELS, 3).weights
    sampler = EpochSampler(100, seed=3, weights=[weights[label] for label in LABELS])
    drawn: Counter[int] = Counter()
    for epoch in range(60):
        sampler.set_epoch(epoch)
        keys = list(sampler)
        assert len(keys) == 100
        assert {number % 2**32 for number, _ in keys} == {epoch}
        assert len(set(keys)) == 100, "drawn again, an image is varied anew"
        drawn.update(LABELS[index] for _, index in keys)
    # Binomial(6000, 1/3): standard deviation 36.5.
    assert all(abs(count - 2000) < 183 for count in drawn.values())
    sampler.set_epoch(4)
    assert list(sampler) == list(sampler)


def test_a_training_that_makes_up_for_it(make_colours, tiny_config, tmp_path):
    data = make_colours(tmp_path / "colours", count=20)
    for path in sorted((data / "red").iterdir())[6:]:
        path.unlink()
    heads = []
    for how in ({}, {"class_weights": True}, {"balanced_sampling": True}):
        output = tmp_path / "_".join(["out", *how])
        result = finetune(tiny_config(), str(data), output, steps=4, evaluations=2, batch_size=8, **how)
        recipe = Facts.load(output).records[0].values["recipe"]
        assert {name: recipe[name] for name in ("class_weights", "balanced_sampling")} == {
            "class_weights": False, "balanced_sampling": False, **how
        }  # fmt: skip
        heads.append(result.model.classifier.weight.detach())
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_what_does_not_go_together_is_refused_before_anything_is_written(colours, tiny_config, tmp_path):
    def run(**values):
        options = FinetuneOptions(streaming=values.pop("streaming", False))
        finetune(tiny_config(), str(colours), tmp_path / "out", options=options, steps=2, **values)

    with pytest.raises(UserError, match="the classes of a stream are not known beforehand; balance them without"):
        run(streaming=True, class_weights=True)
    with pytest.raises(UserError, match="class weights are a setting of the loss ce"):
        run(loss="bce", class_weights=True)
    with pytest.raises(UserError, match="make up for the same; choose one"):
        run(balanced_sampling=True, class_weights=True)
    assert not (tmp_path / "out").exists()
