"""After optimizing: what would train, cast, move, copy or save a model is refused, and nothing of it is half done."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, RESNETS, Family
from torch import nn

import hf_vit
from hf_vit.inference.packing import PackedDense

OTHER_FAMILIES = RESNETS

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
    tensors = {name: (id(t), t.dtype, t.device, t.requires_grad) for name, t in model.named_parameters()}
    buffers = {name: (id(t), t.dtype, t.device) for name, t in model.named_buffers()}
    return {"tensors": tensors, "buffers": buffers, "modes": {n: m.training for n, m in model.named_modules()}}


@torch.no_grad()
def test_changes_are_refused_wholly(family: Family, tmp_path: Path):
    """For the classifier and for the bare model in it, whose parts are their own."""
    model = hf_vit.optimize_for_inference(family.build("classification").train())
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


def test_what_changes_nothing_may_stay_in_a_users_code(family: Family):
    model = hf_vit.optimize_for_inference(family.build("classification"))
    assert model.eval().to(torch.float32).to("cpu").float().requires_grad_(False) is model
    assert isinstance(model, family.classes["classification"])
    assert type(model).__name__ == family.classes["classification"].__name__
    assert model.dtype == torch.float32


def test_no_gradients(family: Family):
    model = hf_vit.optimize_for_inference(family.build("classification"))
    images = family.images(model.config)
    assert not model(images).logits.requires_grad
    if any(isinstance(module, PackedDense) for module in model.modules()):  # BiT computes convolutions alone
        with pytest.raises(hf_vit.UserError, match="no gradients"):
            model(images.requires_grad_())


def test_memory_is_given_back_at_once():
    """An optimized model refers to itself nowhere, so that its memory does not wait for the garbage collector."""
    model = FAMILIES["plain"].build("classification")
    images = FAMILIES["plain"].images(model.config, grid=(3, 5))
    gc.collect()
    gc.disable()
    try:
        model = hf_vit.optimize_for_inference(model)
        with torch.no_grad():
            model(images)
        known = [weakref.ref(model), weakref.ref(model.vit.layers[0])]
        del model
        assert [reference() for reference in known] == [None, None]
    finally:
        gc.enable()
