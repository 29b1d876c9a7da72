"""The steps of the trainer against plain torch: decay, accumulation, losses, unequal classes, layer-wise rates."""

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from training.conftest import Images, make_resnet_config, make_transformers_vit
from transformers import ConvNextConfig, ConvNextForImageClassification, Trainer

from hf_vit import (
    HfAxialResNetForImageClassification,
    HfAxialViTConfig,
    HfAxialViTForImageClassification,
    HfHybridViTConfig,
    HfHybridViTForImageClassification,
    HfViTForImageClassification,
    HfViTForMaskedPatchPrediction,
    UserError,
)
from hf_vit.models.modeling_hf_axial_resnet import LogitNorm
from hf_vit.results.facts import Facts
from hf_vit.training import finetune
from hf_vit.training.trainer.losses import BinaryCrossEntropy, WeightedCrossEntropy
from hf_vit.training.trainer.optimizers import make_parameter_groups, number_layers
from hf_vit.training.trainer.sampling import EpochSampler

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
            self.logit_norm = LogitNorm()
            self.scale = nn.Conv2d(4, 4, 1)
            self.classes = nn.Embedding(3, 4)
            self.mask_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.dense = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2)

    weights = ["scale.weight", "dense.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    assert make_trainer().get_decay_parameter_names(Odd()) == weights


def test_decay_reaches_the_optimizer(make_trainer):
    trainer = make_trainer(weight_decay=0.3)
    groups = trainer.create_optimizer().param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(trainer.model.parameters()))


def plain_step(model, data, smoothing, loss, learning_rate=0.1):
    """Parameters after one step of gradient descent on all images at once; the model itself stays."""
    model = copy.deepcopy(model).train()
    logits = model(pixel_values=data.pixels).logits
    labels = data.labels if data.labels.ndim == 2 else F.one_hot(data.labels, 3).float()
    if loss is not None:
        targets = labels * (1 - smoothing) + smoothing / 3
        if loss.threshold is not None:
            targets = ((targets > loss.threshold) & (labels > 0)).float()
        F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1).mean().backward()
    else:
        F.cross_entropy(logits, labels, label_smoothing=smoothing).backward()
    return torch.cat([(p - learning_rate * p.grad).detach().flatten() for p in model.parameters()])


BINARY = [(BinaryCrossEntropy(), 0.0), (BinaryCrossEntropy(), 0.2)]
BINARY += [(BinaryCrossEntropy(threshold), 0.1) for threshold in (0.2, 0.0)]


@pytest.mark.parametrize(("loss", "smoothing"), [(None, 0.0), (None, 0.2), *BINARY], ids=str)
@pytest.mark.parametrize("soft", [False, True])
def test_accumulated_step_equals_the_large_batch(soft, loss, smoothing, make_trainer):
    """12 images as 3 micro-batches of 4, and as 11 and a single one: the step that plain torch makes of all 12."""
    for micro, accumulated in ((4, 3), (11, 2)):
        sizes = dict(per_device_train_batch_size=micro, gradient_accumulation_steps=accumulated)
        settings = sizes | dict(label_smoothing_factor=smoothing, max_grad_norm=0.0)
        trainer = make_trainer(dataset=Images(soft=soft), extras=dict(compute_loss_func=loss), **settings)
        expected = plain_step(trainer.model, trainer.train_dataset, smoothing, loss)
        trainer.train()
        after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        torch.testing.assert_close(after, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", ["patches", "multi_label_classification", "regression"])
def test_an_accumulated_step_of_means_is_the_large_batch(kind, make_trainer, tiny_config):
    """As above, of models whose loss is a mean over a micro-batch, the last of which is smaller: our own over patches,
    transformers' own of several labels and of values."""
    masked = torch.zeros(4, dtype=torch.bool)
    masked[1:3] = True
    images = [{"pixel_values": image, "bool_masked_pos": masked} for image in Images().pixels]
    after = []
    for micro, accumulated in ((12, 1), (4, 3), (5, 3)):
        model = HfViTForMaskedPatchPrediction(tiny_config())
        if kind != "patches":
            images = Images(soft=True)
            model = make_transformers_vit(problem_type=kind)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulated}
        make_trainer(model, images, **sizes, max_grad_norm=0.0).train()
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for parameters in after[1:]:
        torch.testing.assert_close(parameters, after[0], rtol=0, atol=3e-6)


@pytest.mark.parametrize("extras", [{}, dict(compute_loss_func=BinaryCrossEntropy())], ids=["smoothed", "binary"])
def test_the_loss_of_an_evaluation_is_the_plain_cross_entropy(extras, make_trainer):
    trainer = make_trainer(extras=extras, label_smoothing_factor=0.3)
    data = trainer.eval_dataset
    with torch.no_grad():
        plain = F.cross_entropy(trainer.model.eval()(pixel_values=data.pixels).logits, data.labels)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.item(), rel=1e-6)


def test_loss_that_is_no_number_stops_the_training_and_spares_the_weights(make_trainer):
    trainer = make_trainer(max_steps=5)
    trainer.train_dataset.pixels[:] = float("nan")
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(UserError, match=r"loss became nan at step 1 \(learning rate 0.1.*no weight has changed yet"):
        trainer.train()
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


def test_on_an_accelerator_a_loss_that_is_no_number_is_seen_when_it_is_logged(make_trainer):
    """No step waits for the device, and nothing is evaluated, saved or logged of what came after."""
    trainer = make_trainer(max_steps=9, logging_steps=4, save_strategy="no")
    trainer.train_dataset.pixels[:] = torch.nan
    trainer._checks_later = True
    with pytest.raises(UserError, match=r"became NaN or infinite at step 1 \(noticed at step 4"):
        trainer.train()
    assert not [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer = make_trainer(max_steps=3, logging_steps=500, save_strategy="no")
    weights = copy.deepcopy(trainer.model.state_dict())
    trainer.train_dataset.pixels[:] = torch.nan
    trainer._checks_later = True
    with pytest.raises(UserError, match=r"at step 1 \(noticed at step 3"):
        trainer.train()
    trainer.train_dataset.pixels[:] = 0
    trainer.model.load_state_dict(weights)
    trainer.train()
    assert trainer.state.stateful_callbacks["Clock"]["attributes"]["earlier"] == 0, "a new training, of its own time"


def test_nothing_shared_is_a_pickle(make_trainer, tmp_path):
    trainer = make_trainer(save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "shared"))
    names = {path.name for path in (tmp_path / "shared").iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert not list(tmp_path.rglob("training_args.bin"))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels_of_a_model_of_transformers(make_trainer, smoothing):
    """Which takes them for several classes an image, and would keep that in its configuration."""
    model = make_transformers_vit()
    if smoothing:  # a class of one's own
        model.__class__ = type("OneOfOnesOwn", (type(model),), {})
    trainer = make_trainer(model, Images(soft=not smoothing), label_smoothing_factor=smoothing)
    batch = next(iter(trainer.get_train_dataloader()))
    soft = batch["labels"] if not smoothing else F.one_hot(batch["labels"], 3) * (1 - smoothing) + smoothing / 3
    expected = F.cross_entropy(model.train()(batch["pixel_values"]).logits, soft)
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), expected)
    trainer.train()
    assert model.config.problem_type in (None, "single_label_classification")


def test_other_images_are_all_evaluated_with_persistent_workers_too(make_trainer):
    workers = dict(dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer = make_trainer(per_device_eval_batch_size=8, dataloader_drop_last=True, **workers)
    validation, others = trainer.eval_dataset, Images(10)
    others.labels = (others.labels + 1) % 3
    state = torch.get_rng_state()
    found = [trainer.evaluate()["eval_loss"]]
    assert torch.equal(torch.get_rng_state(), state), "a resumed training starts its workers once more"
    found += [trainer.evaluate(*images)["eval_loss"] for images in ((others,), ())]
    predictions = torch.from_numpy(trainer.predict(others).predictions)
    assert len(predictions) == len(others)
    assert trainer.get_eval_dataloader(validation) is trainer.get_eval_dataloader(), "its workers stay"
    with torch.no_grad():
        for images, loss in zip((validation, others, validation), found, strict=True):
            expected = F.cross_entropy(trainer.model(images.pixels).logits, images.labels)
            assert loss == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(predictions, trainer.model(others.pixels).logits)


def test_another_order_of_the_images_is_refused(make_trainer):
    with pytest.raises(UserError, match="train_sampling_strategy='sequential' does not work with HfViTTrainer"):
        make_trainer(train_sampling_strategy="sequential")
    with pytest.raises(UserError, match="sampling_weights has 3 values, but there are 12 training images"):
        make_trainer(extras=dict(sampling_weights=[1.0, 2.0, 3.0])).get_train_dataloader()  # one for every class
    stream = type("Stream", (IterableDataset,), {"__iter__": lambda _: iter(())})
    for extras in (dict(sampling_weights=[1.0]), dict(repeated_augmentation=3)):
        with pytest.raises(UserError, match="a stream gives every image once per epoch"):
            make_trainer(dataset=stream(), extras=extras).get_train_dataloader()


def test_batch_norms_that_are_frozen_before_the_training_keep_their_statistics(make_trainer):
    """Also in a trainer that existed before, or whose `model_init` makes another model."""
    trainer = make_trainer(HfAxialResNetForImageClassification(make_resnet_config()))
    trainer.model.base_model.requires_grad_(False)
    before = {name: buffer.clone() for name, buffer in trainer.model.named_buffers() if "running" in name}
    trainer.train()
    assert before
    assert all(torch.equal(before[name], buffer) for name, buffer in trainer.model.named_buffers() if name in before)


def test_operations_are_counted_as_the_stock_trainer_does(make_trainer):
    """The count goes into trainer_state.json; ours looks at the parameters once a training."""
    trainer = make_trainer()
    for size in (4, 3, 4):
        batch = {"pixel_values": torch.zeros(size, 3, 8, 8)}
        assert trainer.floating_point_ops(batch) == Trainer.floating_point_ops(trainer, batch)
    assert trainer.floating_point_ops({"other": torch.zeros(2)}) == 0


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
        assert recipe.items() >= ({"class_weights": False, "balanced_sampling": False} | how).items()
        heads.append(result.model.classifier.weight.detach())
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


SIZES = dict(image_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16)


def models(tiny_config):
    yield HfViTForImageClassification(tiny_config(num_hidden_layers=4, layer_scale_init_value=0.1))
    yield HfViTForImageClassification(tiny_config(num_hidden_layers=4, pooling="map", representation_size=8))
    towers = {"num_register_tokens": 2, "norm_before_layers": True, "norm_after_pooling": True, "mlp_type": "swiglu"}
    yield HfViTForImageClassification(tiny_config(num_hidden_layers=4, **towers))
    yield HfHybridViTForImageClassification(HfHybridViTConfig(**SIZES, stage_depths=(1,), stem_width=32))
    yield HfAxialViTForImageClassification(HfAxialViTConfig(**SIZES, patch_size=8))


def test_rates_of_every_family(tiny_config):
    for model in models(tiny_config):
        decaying = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
        groups = make_parameter_groups(model, decaying, learning_rate=2.0, weight_decay=0.3, layer_decay=0.5)
        found = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
        for name, parameter in model.named_parameters():
            words = name.split(".")
            if "layers" in words:
                above = 4 - int(words[words.index("layers") + 1])
            else:
                above = 5 if words[1] == "embeddings" else 0
            assert found[id(parameter)] == (2.0 / 2**above, 0.3 if name in decaying else 0.0), name
        assert groups[0]["lr"] == 2.0  # what the Trainer logs


def test_shared_blocks_have_the_number_of_the_highest_layer(tiny_config):
    model = HfViTForImageClassification(tiny_config(num_hidden_layers=6, num_hidden_groups=2))
    numbers = number_layers(model)
    by_block = {name.split(".")[2]: number for name, number in numbers.items() if ".layers." in name}
    blocks = list(model.vit.layers)
    order = [blocks.index(layer) for layer in model.vit.layer_sequence()]
    assert by_block == {str(group): 1 + max(i for i, own in enumerate(order) if own == group) for group in (0, 1)}
    assert numbers["classifier.weight"] == 7


def test_frozen_parameters_are_left_out(tiny_config):
    model = HfViTForImageClassification(tiny_config())
    model.vit.requires_grad_(False)
    groups = make_parameter_groups(model, [], learning_rate=1.0, weight_decay=0.0, layer_decay=0.5)
    assert [len(group["params"]) for group in groups] == [2]


def test_a_model_without_layers_is_refused():
    model = nn.Linear(2, 2)
    model.config = type("Config", (), {"num_hidden_layers": 2})()
    stages = ConvNextConfig(hidden_sizes=[4] * 4, depths=[1, 1, 2, 1])  # the layers of each are numbered from 0
    for each in (model, ConvNextForImageClassification(stages)):
        with pytest.raises(UserError, match=f"--layer-decay does not work with {type(each).__name__}"):
            number_layers(each)


def test_the_trainer_moves_lower_layers_less(tiny_config, make_trainer):
    torch.manual_seed(0)
    model = HfViTForImageClassification(tiny_config(num_hidden_layers=4))
    nn.init.normal_(model.classifier.weight)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = make_trainer(model, extras=dict(layer_decay=0.5), max_grad_norm=0.0, weight_decay=0.0, logging_steps=1)
    trainer.train()
    moved = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    numbers = number_layers(model)

    torch.manual_seed(0)
    plain = HfViTForImageClassification(tiny_config(num_hidden_layers=4))
    plain.load_state_dict(before)
    make_trainer(plain, max_grad_norm=0.0, weight_decay=0.0).train()
    for name, parameter in plain.named_parameters():
        expected = (parameter.detach() - before[name]) * 0.5 ** (5 - numbers[name])
        torch.testing.assert_close(moved[name], expected, rtol=1e-3, atol=1e-7)
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(0.1)


def test_every_trial_of_a_search_has_its_own_optimizer(make_trainer):
    trainer = make_trainer(extras=dict(layer_decay=0.5), optim="adamw_torch")
    for beta in (0.9, 0.5):
        trainer.args.adam_beta1, trainer.optimizer = beta, None
        assert {group["betas"][0] for group in trainer.create_optimizer().param_groups} == {beta}
