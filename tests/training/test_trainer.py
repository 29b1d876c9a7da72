import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training.conftest import Images
from transformers import Trainer

from hf_vit import HfViTForImageClassification, HfViTForMaskedPatchPrediction, UserError
from hf_vit.training.trainer.losses import smooth_labels

FORMS = {
    "plain": dict(),
    "2d": dict(position_embedding="learned_2d", layer_scale_init_value=0.1, use_distillation_token=True),
    "map": dict(pooling="map", representation_size=8),
    "relative": dict(position_embedding="relative", pooling="gap"),
}


@pytest.mark.parametrize("form", FORMS)
def test_only_matrices_and_kernels_decay(form, tiny_config, make_trainer):
    model = HfViTForImageClassification(tiny_config(**FORMS[form]))
    decaying = set(make_trainer(model).get_decay_parameter_names(model))
    spared = {name for name, _ in model.named_parameters()} - decaying
    # The reference: what the parameter is, by its name alone.
    words = ("bias", "layernorm", "token", "position_embedding", "offset_embeddings", "lambda1", "probe")
    assert spared == {name for name, _ in model.named_parameters() if any(word in name for word in words)}
    assert {"classifier.weight", "vit.embeddings.patch_embeddings.projection.weight"} <= decaying


def test_group_norms_embeddings_and_bare_parameters_are_spared(make_trainer):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(2, 4)
            self.scale = nn.Conv2d(4, 4, 1)
            self.classes = nn.Embedding(3, 4)
            self.mask_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.dense = nn.Linear(4, 4)

    assert make_trainer().get_decay_parameter_names(Odd()) == ["scale.weight", "dense.weight"]


def test_decay_reaches_the_optimizer(make_trainer):
    trainer = make_trainer(weight_decay=0.3)
    groups = trainer.create_optimizer().param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(trainer.model.parameters()))


def plain_step(model, data, smoothing, learning_rate=0.1):
    """Parameters after one step of gradient descent on all images at once; the model itself stays."""
    model = copy.deepcopy(model).train()
    logits = model(pixel_values=data.pixels).logits
    labels = data.labels if data.labels.ndim == 2 else F.one_hot(data.labels, 3).float()
    F.cross_entropy(logits, labels, label_smoothing=smoothing).backward()
    return torch.cat([(p - learning_rate * p.grad).detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("soft", [False, True])
def test_accumulated_step_equals_the_large_batch(soft, smoothing, make_trainer):
    """12 images as one batch, as 3 of 4, and as 2 of 5 and one of 2: the step that plain torch makes of all 12."""
    after = []
    for micro, accumulated in ((12, 1), (4, 3), (5, 3)):
        trainer = make_trainer(
            dataset=Images(soft=soft),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulated,
            label_smoothing_factor=smoothing,
            max_grad_norm=0.0,
        )
        expected = plain_step(trainer.model, trainer.train_dataset, smoothing)
        trainer.train()
        after.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    for parameters in after:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=3e-6)


def test_an_accumulated_step_without_labels_is_the_large_batch(make_trainer, tiny_config):
    """As above, of a model whose loss is a mean over patches: the last of a step's micro-batches is smaller."""
    masked = torch.zeros(4, dtype=torch.bool)
    masked[1:3] = True
    images = [{"pixel_values": image, "bool_masked_pos": masked} for image in Images().pixels]
    after = []
    for micro, accumulated in ((12, 1), (4, 3), (5, 3)):
        model = HfViTForMaskedPatchPrediction(tiny_config())
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulated}
        make_trainer(model, images, **sizes, max_grad_norm=0.0).train()
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for parameters in after[1:]:
        torch.testing.assert_close(parameters, after[0], rtol=0, atol=3e-6)


@pytest.mark.parametrize("soft", [False, True])
def test_smoothed_loss_is_the_hand_computed_one(soft, make_trainer):
    trainer = make_trainer(dataset=Images(soft=soft), label_smoothing_factor=0.3)
    data = trainer.train_dataset
    batch = {"pixel_values": data.pixels, "labels": data.labels}
    trainer.model.train()
    loss, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
    total = 0.0
    for row, label in zip(outputs.logits.double().tolist(), data.labels.tolist(), strict=True):
        target = label if soft else [float(k == label) for k in range(3)]
        target = [0.7 * share + 0.3 / 3 for share in target]
        log_sum = math.log(sum(math.exp(value) for value in row))
        total += sum(share * (log_sum - value) for share, value in zip(target, row, strict=True))
    assert loss.item() == pytest.approx(total / len(data), rel=1e-6)


def test_evaluation_loss_is_not_smoothed(make_trainer):
    trainer = make_trainer(label_smoothing_factor=0.3)
    data = trainer.eval_dataset
    with torch.no_grad():
        plain = F.cross_entropy(trainer.model.eval()(pixel_values=data.pixels).logits, data.labels)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.item(), rel=1e-6)


def test_smoothing_keeps_probabilities():
    soft = smooth_labels(torch.tensor([2, 0]), 4, 0.2)
    torch.testing.assert_close(soft, torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]]))


def test_loss_that_is_no_number_stops_the_training_and_spares_the_weights(make_trainer):
    trainer = make_trainer(max_steps=5)
    trainer.train_dataset.pixels[:] = float("nan")
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(UserError, match=r"loss became nan at step 1 \(learning rate 0.1"):
        trainer.train()
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


def test_on_an_accelerator_a_loss_that_is_no_number_is_seen_when_it_is_logged(make_trainer):
    """No step waits for the device, and nothing is evaluated, saved or logged of what came after."""
    trainer = make_trainer(max_steps=9, logging_steps=4, save_strategy="no")
    trainer.train_dataset.pixels[:] = torch.nan
    trainer._looks_later = True
    with pytest.raises(UserError, match=r"became no number at step 1 \(seen at step 4, when it is logged"):
        trainer.train()
    assert not [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer = make_trainer(max_steps=3, logging_steps=500, save_strategy="no")
    trainer.train_dataset.pixels[:] = torch.nan
    trainer._looks_later = True
    with pytest.raises(UserError, match=r"at step 1 \(seen at step 3"):
        trainer.train()


def test_nothing_shared_is_a_pickle(make_trainer, tmp_path):
    trainer = make_trainer(save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "shared"))
    names = {path.name for path in (tmp_path / "shared").iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert not list(tmp_path.rglob("training_args.bin"))


def tiny_model_of_transformers():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    return ViTForImageClassification(config)


def test_a_model_of_transformers_trains_too(make_trainer):
    trainer = make_trainer(tiny_model_of_transformers(), max_steps=20)
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels_of_a_model_of_transformers(make_trainer, smoothing):
    """Which takes them for several classes an image, and would keep that in its configuration."""
    model = tiny_model_of_transformers()
    if smoothing:  # a class of one's own
        model.__class__ = type("OneOfOnesOwn", (type(model),), {})
    trainer = make_trainer(model, Images(soft=not smoothing), label_smoothing_factor=smoothing)
    batch = next(iter(trainer.get_train_dataloader()))
    soft = batch["labels"] if not smoothing else F.one_hot(batch["labels"], 3) * (1 - smoothing) + smoothing / 3
    expected = F.cross_entropy(model.train()(batch["pixel_values"]).logits, soft)
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), expected)
    trainer.train()
    assert model.config.problem_type in (None, "single_label_classification")


def test_another_order_of_the_images_is_refused(make_trainer):
    with pytest.raises(UserError, match="no train_sampling_strategy='sequential'; leave that out"):
        make_trainer(train_sampling_strategy="sequential")


def test_operations_are_counted_as_the_stock_trainer_does(make_trainer):
    """The count goes into trainer_state.json; ours looks at the parameters once a training."""
    trainer = make_trainer()
    for size in (4, 3, 4):
        batch = {"pixel_values": torch.zeros(size, 3, 8, 8)}
        assert trainer.floating_point_ops(batch) == Trainer.floating_point_ops(trainer, batch)
    assert trainer.floating_point_ops({"other": torch.zeros(2)}) == 0
