"""Momentum contrast against the formula in numpy, and two processes against one."""

import copy
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import distributed

from hf_vit import (
    HfAxialResNetConfig,
    HfAxialResNetModel,
    HfAxialViTConfig,
    HfAxialViTModel,
    HfHybridViTConfig,
    HfHybridViTModel,
    HfViTConfig,
    HfViTModel,
)
from hf_vit.data import AugmentationConfig, make_processor
from hf_vit.errors import UserError
from hf_vit.training.tasks.momentum_contrast import (
    ContrastiveOptions,
    MomentumContrast,
    MomentumUpdate,
    TwoViews,
    build_mlp,
    contrastive_loss,
    momentum_at,
)
from hf_vit.training.trainer.batch_norm import synchronise_batch_norms

SIZES = dict(image_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
OPTIONS = dict(hidden_size=12, projection_size=8)


def learner(normalization="batch", seed=0, **options):
    torch.manual_seed(seed)
    encoder = HfViTModel(HfViTConfig(patch_size=8, **SIZES))
    torch.nn.init.normal_(encoder.embeddings.cls_token)
    chosen = ContrastiveOptions(normalization=normalization, **{**OPTIONS, **options})
    return MomentumContrast(encoder, chosen).double().train()


def views(batch=6, seed=1):
    return torch.randn(batch, 2, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_loss(queries, keys, temperature):
    """Algorithm 1 of arXiv 2104.02057, one query at a time."""
    total = 0.0
    for i, query in enumerate(queries):
        query = query / math.sqrt(sum(v * v for v in query))
        scores = []
        for key in keys:
            key = key / math.sqrt(sum(v * v for v in key))
            scores.append(sum(a * b for a, b in zip(query, key, strict=True)) / temperature)
        total += math.log(sum(math.exp(score) for score in scores)) - scores[i]
    return 2 * temperature * total / len(queries)


@pytest.mark.parametrize("temperature", [0.07, 0.2, 1.0])
def test_loss_is_the_formula(temperature):
    random = np.random.RandomState(0)
    queries, keys = random.randn(5, 8), random.randn(5, 8)
    found = contrastive_loss(torch.tensor(queries), torch.tensor(keys), temperature)
    assert found.item() == pytest.approx(slow_loss(queries, keys, temperature), rel=1e-12)


@pytest.mark.parametrize("normalization", ["batch", "layer", "none"])
def test_symmetric_loss_of_both_views(normalization):
    model = learner(normalization)
    with torch.no_grad():
        for parameter in (*model.momentum_encoder.parameters(), *model.momentum_projector.parameters()):
            parameter.add_(0.1 * torch.randn_like(parameter))  # so that the copies are not the originals
    images = views()
    twin = copy.deepcopy(model)
    first, second = images[:, 0], images[:, 1]
    queries = [twin.predictor(twin.projector(twin.encoder(v).pooler_output)).detach().numpy() for v in (first, second)]
    keys = [twin.momentum_projector(twin.momentum_encoder(v).pooler_output).detach().numpy() for v in (first, second)]
    wanted = slow_loss(queries[0], keys[1], 0.2) + slow_loss(queries[1], keys[0], 0.2)
    assert model(images)["loss"].item() == pytest.approx(wanted, rel=1e-9)


def test_only_the_learning_side_gets_gradients():
    model = learner()
    model(views())["loss"].backward()
    slow = [p for p in (*model.momentum_encoder.parameters(), *model.momentum_projector.parameters())]
    assert all(p.grad is None and not p.requires_grad for p in slow)
    frozen = {name for name, p in model.encoder.named_parameters() if not p.requires_grad}
    assert frozen == {"embeddings.patch_embeddings.projection.weight", "embeddings.patch_embeddings.projection.bias"}
    learning = [*model.encoder.parameters(), *model.projector.parameters(), *model.predictor.parameters()]
    assert all(p.grad is not None for p in learning if p.requires_grad)
    free = learner(freeze_patches=False)
    assert all(p.requires_grad for p in free.encoder.parameters())


def test_the_papers_heads():
    """Projector of three layers, predictor of two; a norm after each, the last one of both without scale (MoCo v3)."""
    model = learner()
    kinds = [type(layer).__name__ for layer in model.projector]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    assert [layer.affine for layer in model.projector if hasattr(layer, "affine")] == [True, True, False]
    kinds = [type(layer).__name__ for layer in model.predictor]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    assert [layer.affine for layer in model.predictor if hasattr(layer, "affine")] == [True, False]
    assert ContrastiveOptions() == ContrastiveOptions(0.2, 0.99, 256, None, "batch", True)
    widths = {width: build_width(width) for width in (64, 192, 384, 768)}
    assert widths == {64: 768, 192: 2304, 384: 4096, 768: 4096}
    assert not any(isinstance(layer, torch.nn.BatchNorm1d) for layer in build_mlp([4, 4, 4], "none"))


def build_width(hidden_size):
    with torch.device("meta"):
        config = HfViTConfig(**{**SIZES, "patch_size": 8, "hidden_size": hidden_size})
        return MomentumContrast(HfViTModel(config)).projector[0].out_features


def test_momentum_moves_the_copies_by_the_rest():
    model = learner()
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.add_(1.0)
    before = {name: p.clone() for name, p in model.momentum_encoder.named_parameters()}
    model.update_momentum(0.9)
    fast = dict(model.encoder.named_parameters())
    for name, moved in model.momentum_encoder.named_parameters():
        torch.testing.assert_close(moved, 0.9 * before[name] + 0.1 * fast[name], rtol=0, atol=1e-14)
    assert [round(momentum_at(step, 100, 0.99), 6) for step in (0, 50, 100)] == [0.99, 0.995, 1.0]
    assert MomentumUpdate(model).model is model


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (HfHybridViTModel, HfHybridViTConfig(stage_depths=(), stem_width=32, **SIZES)),
        (HfAxialViTModel, HfAxialViTConfig(patch_size=8, **SIZES)),
    ],
)
def test_other_families(model_class, config):
    model = MomentumContrast(model_class(config), ContrastiveOptions(**OPTIONS)).train()
    loss = model(views().float())["loss"]
    loss.backward()
    assert loss.isfinite()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.encoder.parameters())


def axial_learner():
    """An encoder that has batch norms itself."""
    torch.manual_seed(0)
    sizes = dict(image_size=16, stage_depths=(1,), stem_width=8)
    encoder = HfAxialResNetModel(HfAxialResNetConfig(**sizes))
    return MomentumContrast(encoder, ContrastiveOptions(**OPTIONS)).double().train()


LEARNERS = {"layer": lambda: learner("layer"), "batch": lambda: learner("batch"), "axial": axial_learner}


def one_of_two(kind):
    distributed.init_process_group("gloo")
    model, rank = LEARNERS[kind](), distributed.get_rank()
    synchronise_batch_norms(model)
    loss = model(views(8)[rank * 4 : rank * 4 + 4])["loss"]
    loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in found:
        distributed.all_reduce(gradient)
    mean = loss.detach().clone()
    distributed.all_reduce(mean)
    torch.save((mean / 2, [gradient / 2 for gradient in found], model.state_dict()), "result.pt")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow  # two processes
@pytest.mark.parametrize("kind", LEARNERS)
def test_two_processes_give_the_loss_and_gradients_of_one(tmp_path, kind, warm):
    """Keys are gathered over processes, so that every query sees the whole batch; batch norms see it as well."""
    assert warm.together("training.test_contrastive:one_of_two", tmp_path, kind=kind) == ""
    loss, gradients, state = torch.load(tmp_path / "process-0" / "result.pt")
    model = LEARNERS[kind]()
    wanted = model(views(8))["loss"]
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-10)
    whole = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(whole) == len(gradients)
    for given, own in zip(gradients, whole, strict=True):
        torch.testing.assert_close(given, own, rtol=0, atol=1e-10)
    for name, value in model.state_dict().items():  # running means and variances among them
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10, msg=name)
    halves = [LEARNERS[kind]()(views(8)[i : i + 4])["loss"].item() for i in (0, 4)]
    assert abs(sum(halves) / 2 - wanted.item()) > 1e-3, "without gathering it would be another number"


def test_synchronised_batch_norms_keep_names_weights_and_judgement():
    model = learner("batch")
    twin = copy.deepcopy(model)
    twin.projector[1].weight.requires_grad_(False)
    synchronise_batch_norms(twin)
    assert {name: value.shape for name, value in twin.state_dict().items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert not twin.projector[1].weight.requires_grad
    assert twin.projector[4].weight.requires_grad
    features = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(twin.eval().projector(features), model.eval().projector(features), rtol=0, atol=0)


def test_two_views_are_a_function_of_seed_epoch_and_image():
    """Different from each other and in every epoch; the same again whatever ran before; judged ones never change."""
    processor = make_processor(HfViTConfig(patch_size=8, **SIZES))
    random = np.random.RandomState(0)
    images = [Image.fromarray(random.randint(0, 255, (24, 24, 3), dtype=np.uint8)) for _ in range(3)]
    crops = AugmentationConfig(random_resized_crop=(0.2, 1.0), horizontal_flip=0.5)

    def look(transform, epoch, order=(0, 1, 2)):
        transform.set_epoch(epoch)
        prepared = transform.prepare([images[i] for i in order])
        return torch.stack(transform.finish(prepared, np.asarray(order, dtype=np.uint64)))

    first = look(TwoViews(processor, crops, seed=1), 0)
    assert first.shape == (3, 2, 3, 16, 16)
    assert not torch.equal(first[:, 0], first[:, 1])
    other_order = TwoViews(processor, crops, seed=1)
    torch.rand(7)
    look(other_order, 5)
    assert torch.equal(look(other_order, 0, order=(2, 0)), first[[2, 0]])
    for another in (look(other_order, 1), look(TwoViews(processor, crops, seed=2), 0)):
        assert all(
            not torch.equal(one, two) for one, two in zip(another.flatten(0, 1), first.flatten(0, 1), strict=True)
        )
    judged = TwoViews(processor, crops, seed=1, judged=True)
    assert torch.equal(look(judged, 3), look(judged, 4))
    assert (judged.mixable, other_order.mixable) == (False, True)
    state = torch.get_rng_state()
    look(other_order, 2)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's numbers are drawn"


def test_wrong_values():
    for options, message in (
        ({"temperature": 0.0}, "temperature 0.0 must be above 0"),
        ({"momentum": 1.5}, "momentum 1.5"),
        ({"projection_size": 0}, "at least 1"),
        ({"hidden_size": -1}, "at least 1"),
        ({"normalization": "group"}, "normalization 'group' is unknown; choose batch, layer, none"),
    ):
        with pytest.raises(UserError, match=message):
            ContrastiveOptions(**options)
    with pytest.raises(ValueError, match=r"views of shape \(6, 3, 16, 16\).*\[B, 2, C, H, W\]"):
        learner()(views()[:, 0])
