"""What would be lost or half done is refused in one line: before a model is optimized, and afterwards."""

import copy
import gc
import io
import itertools
import operator
import pickle
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, OTHERS, Family, assert_near, tensors_of
from torch import nn
from torch.nn.utils import parametrize, prune

import hf_vit
from hf_vit.inference import optimize
from hf_vit.inference.packing import PackedDense
from hf_vit.models.modeling_hf_vit import HfViTLayer

OTHER_FAMILIES = OTHERS
PLAIN = FAMILIES["plain"]


def lora(target: str) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=2, target_modules=[target], init_lora_weights=False))

    return change


def added_adapter(model: Any) -> None:
    """transformers' own door to peft, which leaves no PeftModel around it."""
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["fc1"], init_lora_weights=False))


def with_hook(register: str, path: str) -> Callable[[nn.Module], object]:
    return lambda model: getattr(model.get_submodule(path), register)(lambda *_: None)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Otherwise(HfViTLayer):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


class TaggedTensor(torch.Tensor):
    pass


def quantised_by_torchao(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def patched_forward(model: Any) -> None:
    attention = model.vit.layers[0].attention
    attention.forward = attention.forward  # as accelerate's hooks do


def other_part(model: Any) -> None:
    fc2 = model.vit.layers[0].mlp.fc2
    model.vit.layers[0].mlp.fc2 = nn.Sequential(fc2, nn.Tanh())


def tensor_subclass(model: Any) -> None:
    norm = model.vit.layernorm
    norm.weight = nn.Parameter(norm.weight.detach().as_subclass(TaggedTensor))


FC1, PATCHES = "vit.layers.0.mlp.fc1", "vit.embeddings.patch_embeddings.projection"
# Those that make another model of it, and those that change it in place.
WRAPPED: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "LoRA": (lora("q_proj"), r"peft.*merge_and_unload"),
    "LoRA on the head": (lora("classifier"), r"peft.*merge_and_unload"),
    "quantize_dynamic": (
        lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
        r"is a torch\.ao\..*without quantization",
    ),
    "compiled": (lambda model: torch.compile(model, backend="eager"), "before torch.compile"),
    "data parallel": (nn.DataParallel, r"model\.module"),
}
CHANGED: dict[str, tuple[Callable[[Any], object], str]] = {
    "added adapter": (added_adapter, r"layers\.0\.mlp\.fc1 is a peft\..*merge_and_unload"),
    "hook on a product": (with_hook("register_forward_hook", FC1), r"0\.mlp\.fc1 has a hook"),
    "hook on a block": (with_hook("register_forward_hook", "vit.layers.1"), r"vit\.layers\.1 has a hook"),
    "pre-hook": (with_hook("register_forward_pre_hook", "vit.layers.1.attention"), "has a hook"),
    "backward hook": (with_hook("register_full_backward_hook", "vit.layers.0.attention.o_proj"), "has a hook"),
    "backward pre-hook": (with_hook("register_full_backward_pre_hook", "vit.layers.0"), "has a hook"),
    "hook on the patches": (with_hook("register_forward_hook", PATCHES), r"patch_embeddings\.projection has a hook"),
    "parametrisation": (
        lambda model: parametrize.register_parametrization(model.get_submodule(FC1), "weight", Doubled()),
        "fc1 is a torch.nn.utils.parametrize.*remove_parametrizations",
    ),
    "weight norm": (lambda model: nn.utils.parametrizations.weight_norm(model.get_submodule(PATCHES)),
        "projection is a torch.nn.utils.parametrize"),
    "pruned": (lambda model: prune.random_unstructured(model.vit.layers[1].attention.q_proj, "weight", 0.5),
        "q_proj has a hook"),
    "torchao": (quantised_by_torchao, "torchao.*without quantization"),
    "patched forward": (patched_forward, r"attention\.forward was replaced"),
    "subclass of a block": (lambda model: setattr(model.vit.layers[1], "__class__", Otherwise),
        r"layers\.1 is a .*Otherwise.*as from_pretrained"),
    "other part": (other_part, r"mlp\.fc2 is a .*Sequential, not the plain Linear"),
    "tensor subclass": (tensor_subclass, r"layernorm\.weight is a .*TaggedTensor"),
    "mixed dtypes": (lambda model: model.vit.layers[1].bfloat16(), r"torch\.bfloat16 and torch\.float32"),
    "meta": (lambda model: model.vit.layers[1].to("meta"), r"layers\.1.*meta device.*load"),
    "compiled part": (lambda model: model.vit.layers[1].compile(backend="eager"), r"layers\.1 is compiled"),
}  # fmt: skip
DO_NOT_RUN = ("meta", "mixed dtypes", "compiled", "compiled part")


def outputs(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return tensors_of(model(torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)))


def state(model: nn.Module) -> dict[str, Any]:
    """All that a change could leave half done: classes and modes, and the tensors themselves."""
    parts = dict(model.named_modules())
    held = {name: {**part._parameters, **part._buffers} for name, part in parts.items()}
    tensors = {(part, name): t for part, each in held.items() for name, t in each.items() if t is not None}
    return {
        "parts": {name: (type(part), part.training) for name, part in parts.items()},
        "tensors": {key: (id(t), t.dtype, t.device, t.requires_grad) for key, t in tensors.items()},
    }


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.dequantize() if "torchao" in type(tensor).__module__ else tensor).detach().clone()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if not tensor.is_meta
    }


@contextmanager
def nothing_changes(model: nn.Module, runs: bool = True) -> Iterator[None]:
    """Classes, modes, tensors and outputs are bit for bit what they were."""
    model.train()
    wanted, before, weights = outputs(model) if runs else [], state(model), values(model)
    yield
    assert state(model) == before
    after = values(model)
    assert after.keys() == weights.keys()
    assert [name for name, tensor in after.items() if not torch.equal(tensor, weights[name])] == []
    assert all(torch.equal(new, old) for new, old in zip(outputs(model) if runs else [], wanted, strict=True))


# Upstream: peft asks for a name that transformers renames; torch.ao and torch.jit say that they are old.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [*WRAPPED, *CHANGED])
def test_what_would_be_lost_is_refused(name: str):
    change, message = (WRAPPED | CHANGED)[name]
    changed = change(model := PLAIN.build("classification"))
    model = changed if name in WRAPPED else model
    with nothing_changes(model, name not in DO_NOT_RUN), pytest.raises(hf_vit.UserError, match=message) as refused:
        hf_vit.optimize_for_inference(model, engine="torch")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["reduce.norm", "row.content_norm", "column.position_norm"])
def test_batch_norms_that_normalise_each_batch(path: str):
    model = OTHERS["axial_resnet"].build("classification")
    name = f"resnet.encoder.stages.0.0.{path}"
    model.set_submodule(name, nn.BatchNorm1d(model.get_submodule(name).num_features, track_running_stats=False))
    with nothing_changes(model), pytest.raises(hf_vit.UserError, match=f"{name} is a batch norm without running"):
        hf_vit.optimize_for_inference(model, engine="torch")


@pytest.mark.parametrize("given", [None, "out/model", nn.Linear(2, 2), nn.Sequential(nn.ReLU())], ids=str)
def test_what_is_no_model_of_the_package(given: Any):
    with pytest.raises(hf_vit.UserError, match=r"is not a model|contains no model of hf_vit, so there is"):
        hf_vit.optimize_for_inference(given, engine="torch")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"engine": "tvm"}, "engine='tvm' is unknown; choose from 'auto', 'torch', 'openvino', 'onnxruntime'"),
        ({"engine": None}, "engine=None"),
        ({"quantize": "int4"}, "quantize='int4' is unknown; use 'int8' or None"),
        ({"quantize": "int8", "compile": True}, "quantize='int8' cannot be combined with compile=True"),
        ({"merge_tokens": 0.5}, "merge_tokens=0.5 is not a number of tokens"),
    ],
)
def test_options_that_there_are_not(option: dict[str, Any], message: str):
    model = PLAIN.build("classification")
    with nothing_changes(model), pytest.raises(hf_vit.UserError, match=message):
        hf_vit.optimize_for_inference(model, **option)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_a_failure_in_the_middle_changes_nothing(family: Family, error: Exception, monkeypatch):
    model = family.build("classification")
    packed = optimize.pack
    calls = iter(range(100))

    def fail_late(part: nn.Module, **options: Any) -> nn.Module:
        if next(calls) == 2:
            raise error
        return packed(part, **options)

    monkeypatch.setattr(optimize, "pack", fail_late)
    with nothing_changes(model), pytest.raises(hf_vit.UserError, match="out of memory"):
        hf_vit.optimize_for_inference(model, engine="torch")
    assert next(calls) == 3


def test_a_merged_adapter_and_hooks_elsewhere_are_welcome():
    """What the remedies name, and what stays: around the patches' product, the last norm, the head, and recording."""
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # upstream, see above
        adapted = lora("q_proj")(PLAIN.build("classification")).eval()
    images = PLAIN.images(PLAIN.config())
    wanted = adapted(images).logits.detach()
    model = adapted.merge_and_unload()
    seen: list[Any] = []
    model.vit.embeddings.patch_embeddings.register_forward_hook(lambda *_: seen.append("patches"))
    model.vit.layernorm.register_forward_hook(lambda *_: seen.append("norm"))
    model.classifier.register_forward_pre_hook(lambda *_: seen.append("head"))
    recorded = model(images, output_hidden_states=True).hidden_states  # transformers sets its hooks now
    fast = hf_vit.optimize_for_inference(model, engine="torch")
    seen.clear()
    with torch.no_grad():
        assert_near(fast(images).logits, wanted)
        assert seen == ["patches", "norm", "head"]
        given = fast(images, output_hidden_states=True).hidden_states
    for state, plain in zip(given, recorded, strict=True):
        assert_near(state, plain)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "train": (lambda model: model.train(), "cannot be trained; load the model again"),
    "requires_grad": (lambda model: model.requires_grad_(), "cannot be trained"),
    "half": (lambda model: model.half(), r"cannot be cast or moved from torch.float32 on cpu"),
    "bfloat16": (lambda model: model.to(torch.bfloat16), "cannot be cast"),
    "double": (lambda model: model.double(), "cannot be cast"),
    "meta": (lambda model: model.to("meta"), "cannot be cast or moved"),
    "deepcopy": (copy.deepcopy, "cannot be copied"),
    "copy": (copy.copy, "cannot be copied"),
    "pickle": (pickle.dumps, "cannot be copied or pickled"),
    "torch.save": (lambda model: torch.save(model, io.BytesIO()), "cannot be copied or pickled"),
    "state_dict": (lambda model: model.state_dict(), "cannot be saved"),
    "load_state_dict": (lambda model: model.load_state_dict({}), "cannot be given other weights"),
    "resize_to": (lambda model: model.resize_to(image_size=64), "cannot be resized"),
    "compile": (lambda model: model.compile(), "compile=True"),
    "again": (hf_vit.optimize_for_inference, "already optimized"),
}


@torch.no_grad()
def test_changes_are_refused_wholly(family: Family, tmp_path: Path):
    """For the classifier and for the bare model in it, whose parts are their own."""
    model = hf_vit.optimize_for_inference(family.build("classification").train(), engine="torch")
    images = family.images(model.config)
    wanted, before = model(images).logits, state(model)
    assert not any(training for _, training in before["parts"].values())
    refused = REFUSED | {"save": (lambda part: part.save_pretrained(tmp_path / "out"), "cannot be saved")}
    for part in (model, getattr(model, model.base_model_prefix)):
        for name, (change, message) in refused.items():
            with pytest.raises(hf_vit.UserError, match=message) as error:
                change(part)
            assert "\n" not in str(error.value), name
            assert state(model) == before, name
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(model(images).logits, wanted)


def test_what_changes_nothing_may_stay_and_there_are_no_gradients(family: Family):
    model = hf_vit.optimize_for_inference(family.build("classification"), engine="torch")
    assert model.eval().to(torch.float32).to("cpu").float().requires_grad_(False) is model
    assert isinstance(model, family.classes["classification"])
    assert type(model).__name__ == family.classes["classification"].__name__
    assert model.dtype == torch.float32
    images = family.images(model.config)
    assert not model(images).logits.requires_grad
    if any(isinstance(module, PackedDense) for module in model.modules()):  # BiT computes convolutions alone
        with pytest.raises(hf_vit.UserError, match="no gradients"):
            model(images.requires_grad_())


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_memory_and_files_are_given_back_at_once(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An optimized model refers to itself nowhere, so that its memory does not wait for the garbage collector."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = FAMILIES["plain"].build("classification", num_hidden_layers=1)
    images = FAMILIES["plain"].images(model.config, grid=(3, 5))
    gc.collect()
    gc.disable()
    try:
        model = hf_vit.optimize_for_inference(model, engine=engine)
        with torch.no_grad():
            model(images)
        assert list(tmp_path.iterdir()) == []
        held = [model, model.vit.layers[0], *([model.vit.graph] if engine == "openvino" else [])]
        known = [weakref.ref(each) for each in held]
        del model, held
        assert [reference() for reference in known] == [None] * len(known)
    finally:
        gc.enable()


WRITES: dict[str, Callable[[Any], object]] = {
    "copy_": lambda weight: weight.copy_(2 * weight),
    "data": lambda weight: weight.data.copy_(2 * weight),
    "data replaced": lambda weight: setattr(weight, "data", 2 * weight),
    "a view": lambda weight: weight.detach().unsqueeze(0).zero_(),
    "a view in a tuple": lambda weight: weight.reshape(-1).unbind(0)[0].zero_(),
    "an item": lambda weight: weight.__setitem__(0, 2.0),
    "an operator": lambda weight: operator.iadd(weight, 1.0),
    "out": lambda weight: torch.add(weight, weight, out=weight),
    "foreach": lambda weight: torch._foreach_mul_([weight], 2.0),
    "initialised": nn.init.zeros_,
    "gradients": lambda weight: weight.requires_grad_(),
}


@torch.no_grad()
def test_weights_that_are_shown_cannot_be_written(family: Family):
    """The rest would part from those that are packed: averaged weights swapped in by name gave a mixture of both."""
    model = hf_vit.optimize_for_inference(family.build("classification"), engine="torch")
    images = family.images(model.config)
    wanted = model(images).logits
    weights = [*model.named_parameters(), *getattr(model, model.base_model_prefix).named_buffers()]
    for (name, weight), (way, write) in itertools.product(weights, WRITES.items()):
        with pytest.raises(hf_vit.UserError, match="cannot be given other weights; load the weights before") as error:
            write(weight)
        assert "\n" not in str(error.value), (name, way)
    assert torch.equal(model(images).logits, wanted)


@torch.no_grad()
def test_a_kernel_without_values_gives_no_numbers():
    """torch's own parts can be moved, and torch takes what is in memory for a kernel on the meta device."""
    model = hf_vit.optimize_for_inference(OTHERS["axial_resnet"].build("classification"), engine="torch")
    model.resnet.encoder.root_conv.to("meta")
    with pytest.raises(ValueError, match="without values"):
        model(OTHERS["axial_resnet"].images(model.config))


@torch.no_grad()
def test_weights_that_are_shown_can_be_read():
    model = hf_vit.optimize_for_inference(FAMILIES["plain"].build("classification"), engine="torch")
    weight, other = dict(model.named_parameters())["classifier.weight"], torch.zeros(3, 32)
    assert type(weight * 2) is type(weight.clone()) is torch.Tensor
    assert torch.equal(other.copy_(weight), model.classifier.weight)
    with pytest.raises(ValueError, match="read-only"):
        weight.numpy()[0] = 0
    model.zero_grad()
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert (next(model.parameters()).dtype, next(model.parameters()).device) == (model.dtype, model.device)


def test_parts_of_an_optimized_model_stay():
    """By every way in which a part, a weight or what is heard of it would be another than the plain model's."""
    model = hf_vit.optimize_for_inference(FAMILIES["plain"].build("classification", "layer_scale"), engine="torch")
    layer, embeddings = model.vit.layers[0], model.vit.embeddings
    for change, message in (
        (lambda: setattr(layer.mlp, "fc1", nn.Linear(32, 48)), "another submodule"),
        (lambda: setattr(layer.mlp.fc1, "forward", lambda tokens: tokens), "another submodule"),
        (lambda: setattr(embeddings, "cls_token", nn.Parameter(torch.zeros(1, 1, 32))), "other weights"),
        (lambda: layer.mlp.fc1.register_forward_hook(lambda *_: None), "hooked at a merged layer"),
        (lambda: layer.attention.register_forward_hook(lambda *_: None), "hooked at a merged layer"),
    ):
        with pytest.raises(hf_vit.UserError, match=message):
            change()
    # Names that hold other numbers than the plain model's, or that kept tables would not follow, are not there.
    for path in ("mlp.fc2.weight", "attention.o_proj.bias"):
        with pytest.raises(AttributeError):
            layer.get_parameter(path)
    assert not hasattr(embeddings, "position_embeddings")
    balanced = FAMILIES["plain"].build("classification")
    images = FAMILIES["plain"].images(balanced.config)
    hf_vit.optimize_for_inference(balanced, quantize="int8", calibrate=images)
    norm = balanced.vit.layers[0].layernorm_before  # its channels are balanced with those of the weights after it
    for change, message in (
        (lambda: norm.register_forward_hook(lambda *_: None), "hooked at a merged layer"),
        (lambda: norm.load_state_dict(balanced.vit.layernorm.state_dict()), "other weights"),
    ):
        with pytest.raises(hf_vit.UserError, match=message):
            change()
    hybrid = hf_vit.optimize_for_inference(FAMILIES["hybrid"].build("classification"), engine="torch")
    assert not hasattr(hybrid.vit.embeddings.patch_embeddings.stem.root_conv, "weight")
    assert not hasattr(hybrid.vit.embeddings.patch_embeddings.projection, "weight")
    model(FAMILIES["plain"].images(model.config), output_hidden_states=True)  # transformers' own recording goes on


@pytest.mark.parametrize("optimized_first", [True, False])
@torch.no_grad()
def test_what_a_hook_keeps_is_not_written_over(optimized_first: bool):
    """In the stem, whose units write sums over what nobody listens to."""
    plain, model = (FAMILIES["hybrid"].build("classification") for _ in range(2))
    images = FAMILIES["hybrid"].images(model.config)
    model = hf_vit.optimize_for_inference(model, engine="torch") if optimized_first else model
    seen: list[list[torch.Tensor]] = [[], []]
    for each, kept in zip((plain, model), seen, strict=True):
        for module in each.modules():
            if isinstance(module, nn.GroupNorm):
                module.register_forward_hook(lambda _, args, output, kept=kept: kept.append(output))
    model = model if optimized_first else hf_vit.optimize_for_inference(model, engine="torch")
    plain(images)
    model(images)
    for given, wanted in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_dropout_does_not_train_alone(name: str):
    """Those of the blocks are gone, so that a mean over the rest would be another one."""
    model = FAMILIES[name].build("classification", hidden_dropout_prob=0.3)
    model.classifier = nn.Sequential(nn.Dropout(0.3), model.classifier)
    fast = hf_vit.optimize_for_inference(model, engine="torch")
    left, of_head = [part for part in fast.modules() if isinstance(part, nn.Dropout)]
    with pytest.raises(hf_vit.UserError, match="cannot be trained"):
        left.train()
    assert not left.training
    assert of_head.train().training, "what is the user's stays so"
