"""Models that somebody changed, holds or listens to: optimized they answer as they did before."""

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inference.conftest import PLAIN, attend_to_twice_the_values, build, optimize
from models.families import FAMILIES, OTHERS, assert_near
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_vit
from hf_vit.inference.layers import Dense
from hf_vit.models.modeling_hf_axial_resnet import DenseNorm
from hf_vit.models.modeling_hf_vit import HfViTMeanPooler, HfViTModel, HfViTTokenPooler

IMAGES = PLAIN.images(PLAIN.config(), batch=3)


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def forward_of_ones_own(model: Any) -> None:
    plain = model.forward
    model.forward = types.MethodType(lambda self, images, **asked: plain(images * 2, **asked), model)


def forward_that_reads_all_tokens(model: Any) -> None:
    def forward(self: Any, images: torch.Tensor, **asked: Any) -> Any:
        tokens = self.vit(images, **asked).last_hidden_state
        return types.SimpleNamespace(logits=self.classifier(tokens.mean(1)))

    model.forward = types.MethodType(forward, model)


class LastToken(HfViTTokenPooler):
    def pool(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        return hidden_states[:, -1]


class OfAllTokens(HfViTModel):
    def forward(self, pixel_values: torch.Tensor, *args: Any, **asked: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        outputs: Any = super().forward(pixel_values, *args, **asked)
        outputs.pooler_output = outputs.last_hidden_state.mean(1)
        return outputs


def with_pooler(kind: Callable[[Any], nn.Module]) -> Callable[[Any], None]:
    return lambda model: setattr(model.vit, "pooler", kind(model.config))


def one_block_twice(model: Any) -> None:
    model.vit.layers[0] = model.vit.layers[1]


def patches_that_overlap(model: Any) -> None:
    model.vit.embeddings.patch_embeddings.projection = nn.Conv2d(3, 32, 6, stride=4, padding=1)


def other_biases(model: Any) -> None:
    """Keys without one, as in Whisper and BEiT; and others."""
    first, second = model.vit.layers
    first.attention.k_proj.bias = second.attention.o_proj.bias = None
    first.mlp.fc1, first.mlp.fc2 = nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)


class MeanOfTokens(PLAIN.classes["classification"]):
    def forward(self, pixel_values: torch.Tensor, **asked: Any) -> Any:
        tokens = self.vit(pixel_values, **asked).last_hidden_state
        return types.SimpleNamespace(logits=self.classifier(tokens.mean(1)))


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a hook on the head": (lambda model: model.classifier.register_forward_hook(doubled), "torch"),
    "a hook on the images": (
        lambda model: model.register_forward_pre_hook(lambda module, args: ((args[0] - 1) / 3,)),
        "torch",
    ),
    "a forward of one's own": (forward_of_ones_own, "torch"),
    "a forward that reads all tokens": (forward_that_reads_all_tokens, "torch"),
    "another pooler of the package": (with_pooler(HfViTMeanPooler), "openvino"),
    "a pooler of one's own": (with_pooler(LastToken), "openvino"),
    "a bare model of one's own": (lambda model: setattr(model.vit, "__class__", OfAllTokens), "torch"),
    "a classifier of one's own": (lambda model: setattr(model, "__class__", MeanOfTokens), "openvino"),
    "what cannot be copied": (lambda model: setattr(model, "lock", threading.Lock()), "torch"),
    "an attention of one's own": (attend_to_twice_the_values, "openvino"),
    "one block twice": (one_block_twice, "openvino"),
    "patches that overlap": (patches_that_overlap, "openvino"),
    "other biases": (other_biases, "openvino"),
}


@torch.no_grad()
# The last layer is cut to what the head reads, or is not.
@pytest.mark.parametrize(("engine", "choice"), [("auto", "default"), ("torch", "default"), ("torch", "gap")])
@pytest.mark.parametrize(("change", "computes"), CHANGES.values(), ids=CHANGES)
def test_a_changed_classifier(change: Callable[[Any], object], computes: str, engine: str, choice: str):
    model = build(choice)
    change(model)
    wanted = model(IMAGES).logits
    fast = hf_vit.optimize_for_inference(model, engine=engine)
    assert fast.engine == ("torch" if engine == "torch" else computes)
    assert_near(fast(IMAGES).logits, wanted)


@torch.no_grad()
@pytest.mark.parametrize("kind", [HfViTMeanPooler, LastToken])
def test_a_pooler_that_comes_later(kind: Callable[[Any], nn.Module]):
    """It may read what the last layer computed for nobody before."""
    model = build()
    fast = optimize(model)
    for each in (model, fast):
        with_pooler(kind)(each)
    assert_near(fast(IMAGES).logits, model(IMAGES).logits)


@torch.no_grad()
@pytest.mark.parametrize("value", [torch.nan, 3e38])
def test_weights_whose_answers_are_not_numbers(value: float):
    """OpenVINO's ReLU makes numbers of NaN: a model that has diverged would look as if it worked."""
    model = build("gap", hidden_act="relu")
    model.vit.layers[0].mlp.fc1.bias[0] = value
    model.vit.layers[0].mlp.fc2.weight[:, 0] = 3.0  # else 3e38 stays a number
    assert model(IMAGES).logits.isnan().all()
    with pytest.raises(hf_vit.UserError, match=r"may return numbers where .* computes NaN.* engine='torch'"):
        optimize(model, "openvino")
    fast = hf_vit.optimize_for_inference(model)
    assert fast.engine == "torch"
    assert fast(IMAGES).logits.isnan().all()


@torch.no_grad()
def test_images_and_features_that_are_negated_lazily(pair: tuple[Any, Any]):
    """Of which NumPy makes nothing."""
    fast = pair[1]
    features = torch.randn(2, fast.classifier.in_features)
    assert_near(fast.classifier(torch._neg_view(features)), fast.classifier(-features))
    assert_near(fast(torch._neg_view(-IMAGES)).logits, fast(IMAGES).logits)


def test_an_engine_that_is_asked_for_takes_no_hooks():
    """Not on the model itself either: they would be in its graph, and then be called."""
    heard: list[object] = []
    for path, named in (("", "the model"), *((name, name) for name in ("vit", "vit.layernorm", "classifier"))):
        model = build("gap")
        model.get_submodule(path).register_forward_hook(lambda *given: heard.append(given))
        with pytest.raises(hf_vit.UserError, match=f"cannot call the hook of {named}; remove the hook"):
            hf_vit.optimize_for_inference(model, engine="openvino")
    assert not heard


@torch.no_grad()
def test_hooks_that_come_later_on_parts_that_are_new(pair: tuple[Any, Any]):
    """Where patches are cut; and everywhere at once. Merged parts take none."""
    path = "vit.embeddings.patch_embeddings.projection"
    plain, fast = pair
    hooks = [model.get_submodule(path).register_forward_hook(doubled) for model in pair]
    assert_near(fast(IMAGES).logits, plain(IMAGES).logits)
    for hook in hooks:
        hook.remove()
    with pytest.raises(hf_vit.UserError, match="hooked at a merged layer"):
        fast.vit.layers[0].mlp.register_forward_pre_hook(lambda *_: None)
    heard: list[str] = []
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(type(module).__name__))
    fast(IMAGES)
    everywhere.remove()
    assert {"FusedLayer", "LayerNorm"} <= set(heard)


@torch.no_grad()
def test_one_block_in_two_towers():
    """It is the last of one, which reads its class token alone, and the first of the other."""
    towers = nn.ModuleList([build(), build(seed=1)])
    first, second = towers
    second.vit.layers[0] = first.vit.layers[1]  # pyright: ignore[reportIndexIssue]
    wanted = [tower(IMAGES).logits for tower in towers]
    hf_vit.optimize_for_inference(towers, engine="torch")
    for tower, logits in zip(towers, wanted, strict=True):
        assert_near(tower(IMAGES).logits, logits)
    one_block_twice(tied := build())
    with pytest.raises(hf_vit.UserError, match="does not work with layers that share blocks"):
        hf_vit.optimize_for_inference(tied, merge_tokens=1)


@torch.no_grad()
def test_a_bias_before_a_batch_norm():
    model = OTHERS["axial_resnet"].build("classification")
    part: Any = next(part for part in model.modules() if type(part) is DenseNorm)
    part.dense.bias = nn.Parameter(torch.randn(part.dense.out_features))
    features = torch.randn(5, part.dense.in_features)
    wanted = part.norm(part.dense(features))
    assert_near(Dense.from_dense_norm(part, torch.float32)(features), wanted)


@torch.no_grad()
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("name", ["plain", pytest.param("bit", marks=pytest.mark.slow)])  # 10 s of compiling
def test_images_that_overflow_on_the_way(name: str, engine: str):
    """Engines make numbers of it, in a ReLU, say."""
    family = (FAMILIES | OTHERS)[name]
    model = family.build("classification", **({"hidden_act": "relu"} if name == "plain" else {}))
    images = family.images(model.config) * 1e20
    wanted = model(images).logits
    assert wanted.isnan().all()
    assert hf_vit.optimize_for_inference(model, engine=engine)(images).logits.isnan().all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("default", "engine"),
    [(torch.float64, "torch"), (torch.bfloat16, "torch"), (torch.float64, "onnxruntime"), (torch.bfloat16, "openvino")],
)
def test_another_default_dtype(default: torch.dtype, engine: str):
    model = build("gap")
    wanted = model(IMAGES).logits
    torch.set_default_dtype(default)
    try:
        with torch.device("meta" if engine == "onnxruntime" else "cpu"):
            fast = hf_vit.optimize_for_inference(model, engine=engine)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_near(fast(IMAGES).logits, wanted)


class Holder(nn.Module):
    """Somebody's class, whose names are its own, and which keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.head = build("gap", "model"), nn.Linear(32, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.features, self.dtype, self.placement = self.engine(images).pooler_output, images.dtype, "here"
        return self.head(self.features)


class Particular(nn.Module):
    """One whose subclasses have to say more."""

    def __init_subclass__(cls, *, key: str) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self.vit = build("gap", "model")


@torch.no_grad()
def test_the_class_around_a_model_stays_its_owners():
    model = Holder()
    wanted, inside = model(IMAGES), model.engine
    fast = hf_vit.optimize_for_inference(model, engine="torch")
    assert_near(fast(IMAGES), wanted)
    assert fast.engine is inside
    assert fast.dtype == torch.float32
    with pytest.raises(hf_vit.UserError, match="cannot be trained"):
        fast.train()


def test_a_class_that_nothing_can_guard_is_refused_before_anything_changes():
    model = Particular()
    before = [type(part) for part in model.modules()]
    with pytest.raises(hf_vit.UserError, match=r"Particular cannot be subclassed .*key.*; optimize the hf_vit model"):
        hf_vit.optimize_for_inference(model)
    assert [type(part) for part in model.modules()] == before


@torch.no_grad()
def test_a_pass_of_shapes_alone_leaves_nothing_behind():
    """Fake tensors that were kept as the tables of a size would come out of all passes of that size."""
    model = build().double()  # the products of which torch can do without values
    images = torch.randn(1, 3, 24, 24, dtype=torch.float64)
    wanted = model(images).logits
    fast = hf_vit.optimize_for_inference(model, engine="torch")
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fast(torch.empty(1, 3, 24, 24, dtype=torch.float64)).logits.shape == (1, 3)
    assert_near(fast(images).logits, wanted)


@torch.no_grad()
def test_mapped_over_images_asked_for_a_mask_and_exported(pair: tuple[Any, Any], recwarn: pytest.WarningsRecorder):
    """By torch, which says that mapping its packed products is slow."""
    model, fast = pair
    wanted = model(IMAGES).logits
    assert_near(torch.vmap(lambda image: fast(image[None]).logits[0])(IMAGES), wanted)
    recwarn.clear()
    with pytest.raises(ValueError, match=r"bool_masked_pos needs a model with a \[mask\] embedding"):
        fast(IMAGES, bool_masked_pos=torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(hf_vit.UserError, match="cannot be traced or exported"):
        torch.export.export(fast, (IMAGES,))
