"""After optimizing: what would train, cast, move, copy or save a model is refused, and nothing of it is half done."""

import copy
import gc
import io
import itertools
import operator
import pickle
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, OTHERS, Family
from torch import nn

import hf_vit
from hf_vit.inference.packing import PackedDense

OTHER_FAMILIES = OTHERS

REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "train": (lambda model: model.train(), "cannot be trained; load the model again"),
    "requires_grad": (lambda model: model.requires_grad_(), "cannot be trained"),
    "half": (lambda model: model.half(), r"cannot be cast or moved, it stays torch.float32 on cpu"),
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
    "again": (hf_vit.optimize_for_inference, "optimized before"),
}


def state(model: nn.Module) -> dict[str, Any]:
    """All that a change could leave half done."""
    parts = dict(model.named_modules())
    held = {name: {**part._parameters, **part._buffers} for name, part in parts.items()}  # the tensors themselves
    tensors = {(part, name): t for part, each in held.items() for name, t in each.items() if t is not None}
    return {
        "tensors": {key: (id(t), t.dtype, t.device, t.requires_grad) for key, t in tensors.items()},
        "modes": {name: part.training for name, part in parts.items()},
    }


@torch.no_grad()
def test_changes_are_refused_wholly(family: Family, tmp_path: Path):
    """For the classifier and for the bare model in it, whose parts are their own."""
    model = hf_vit.optimize_for_inference(family.build("classification").train(), engine="torch")
    images = family.images(model.config)
    wanted, before = model(images).logits, state(model)
    assert not any(before["modes"].values())
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
        with pytest.raises(hf_vit.UserError, match="cannot be given other weights; load them before") as error:
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
        (lambda: setattr(layer.mlp, "fc1", nn.Linear(32, 48)), "another part"),
        (lambda: setattr(layer.mlp.fc1, "forward", lambda tokens: tokens), "another part"),
        (lambda: setattr(embeddings, "cls_token", nn.Parameter(torch.zeros(1, 1, 32))), "other weights"),
        (lambda: layer.mlp.fc1.register_forward_hook(lambda *_: None), "listened to here"),
        (lambda: layer.attention.register_forward_hook(lambda *_: None), "listened to here"),
    ):
        with pytest.raises(hf_vit.UserError, match=message):
            change()
    # Names that hold other numbers than the plain model's, or that kept tables would not follow, are not there.
    for path in ("mlp.fc2.weight", "attention.o_proj.bias"):
        with pytest.raises(AttributeError):
            layer.get_parameter(path)
    assert not hasattr(embeddings, "position_embeddings")
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
