"""torch.compile without graph breaks, torch.export and ONNX by transformers' exporters."""

from pathlib import Path

import numpy as np
import pytest
import torch
from models.families import FAMILIES, MIXERS, Family, training_loss

# Those whose forward takes another path; a few for every run, the rest with the slow tests.
FEW = [("plain", "default"), ("hybrid", "default"), ("axial", "default"), ("mixer", "default"), ("local", "default")]
FEW += [("plain", "rotary")]
MORE = [
    *(("plain", choice) for choice in ("relative", "causal_map_2d", "sincos_2d", "distillation", "gap", "learned_2d")),
    *(("plain", choice) for choice in ("registers_map", "norm_after_map", "swiglu")),
    *(("plain", choice) for choice in ("relative_bias", "positions_of_registers", "no_last_norm")),
    *(("plain", choice) for choice in ("rotary_gap", "rotary_mixed", "rotary_registers")),
    *(("hybrid", "relative"), ("axial", "sincos_1d"), ("axial", "map")),
    *(("local", "criss_cross"), ("local", "strided"), ("local", "gap")),
    *(("hybrid", "rotary"), ("axial", "rotary_gap")),
]
PATHS = [*FEW, *(pytest.param(*path, marks=pytest.mark.slow) for path in MORE)]

# Every layer is traced again: one shows what all are.
ONE = {"num_hidden_layers": 1}

# Upstream: transformers.exporters reads `treespec.children_specs`, which torch 2.15 deprecates.
exporter_warnings = pytest.mark.filterwarnings("ignore:`treespec.children_specs` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "choice"), PATHS)
def test_fullgraph(name: str, choice: str):
    """The plain family at another size too: tables are resampled in the graph, one graph a size."""
    family = (FAMILIES | MIXERS)[name]
    model = family.build("classification", choice, **ONE)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    for grid in (None, (3, 5)) if name == "plain" else (None,):
        images = family.images(model.config, grid=grid)
        with torch.no_grad():
            torch.testing.assert_close(compiled(images).logits, model(images).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hybrid", "axial"))]
)
def test_compiled_training_gives_the_same_gradients(name: str):
    family = FAMILIES[name]
    model = family.build("classification", **ONE).train()
    images = family.images(model.config)
    training_loss(family, "classification", model, images).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    compiled(images, labels=torch.tensor([0, 1])).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_inductor(family: Family):
    model = family.build("classification", **ONE)
    images = family.images(model.config)
    with torch.no_grad():
        given = torch.compile(model, fullgraph=True)(images).logits
        torch.testing.assert_close(given, model(images).logits, rtol=0, atol=1e-5)


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values).logits


# Those whose positions or attention depend on the grid each in a way of its own.
TRACED = [
    *(("plain", choice) for choice in ("default", "learned_2d", "sincos_1d", "relative", "relative_bias", "bicubic")),
    *(("plain", choice) for choice in ("rotary", "rotary_gap", "rotary_mixed", "rotary_registers")),
    *((name, "default") for name in ("hybrid", "axial", "local")),
    *(("local", "strided"), ("local", "criss_cross")),
    *(("axial", "rotary_gap"), ("local", "rotary_mixed")),
]


@pytest.mark.filterwarnings("ignore")  # of torch.jit, about everything that it keeps
@pytest.mark.parametrize(("name", "choice"), TRACED)
@torch.no_grad()
def test_traced_at_the_nominal_size_it_answers_at_others(name: str, choice: str):
    """It raised there, or torch.export called the sides constant: the position table was the nominal one."""
    family, dynamic = FAMILIES[name], torch.export.Dim.DYNAMIC
    model = Logits(family.build("classification", choice, **ONE))
    images, shapes = family.images(model.model.config), ({0: dynamic, 2: dynamic, 3: dynamic},)
    traced = [torch.jit.trace(model, images, check_trace=False)]
    if (name, choice) in (
        ("plain", "default"),
        ("plain", "relative"),
        ("axial", "default"),
    ):  # the hybrid takes a minute
        traced.append(torch.export.export(model, (images,), dynamic_shapes=shapes, strict=False).module())
    for batch, grid in ((2, None), (1, (3, 5)), (3, (6, 4))):
        other = family.images(model.model.config, batch=batch, grid=grid)
        for given in traced:
            torch.testing.assert_close(given(other), model(other), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of torch.jit
@torch.no_grad()
def test_exported_at_another_size_a_rectangular_table_is_kept_at_its_own():
    """With a position table that keeps its aspect, answers at the nominal size were others."""
    family, dynamic = FAMILIES["plain"], torch.export.Dim.DYNAMIC
    fields = ONE | {"position_interpolation": "bilinear_square"}
    model = Logits(family.build("classification", "rectangular", **fields))
    images, shapes = family.images(model.model.config, grid=(3, 5)), ({2: dynamic, 3: dynamic},)
    program = torch.export.export(model, (images,), dynamic_shapes=shapes, strict=False).module()
    traced = torch.jit.trace(model, images, check_trace=False)
    for grid in (None, (3, 5), (7, 4)):
        images = family.images(model.model.config, grid=grid)
        for given in (program, traced):
            torch.testing.assert_close(given(images), model(images), rtol=0, atol=1e-5)


def exported(family: Family, model, exporter: str):
    """By transformers' exporter, from a batch of 3, for batches of any size."""
    from transformers.exporters import configs, exporter_dynamo, exporter_onnx

    makers = {"Dynamo": exporter_dynamo.DynamoExporter, "Onnx": exporter_onnx.OnnxExporter}
    shapes = {"pixel_values": {0: torch.export.Dim("batch", min=1, max=64)}}
    config = getattr(configs, f"{exporter}Config")(dynamic=True, dynamic_shapes=shapes)
    return makers[exporter]().export(model, {"pixel_values": family.images(model.config, batch=3)}, config=config)


@exporter_warnings
@pytest.mark.parametrize(
    ("name", "choice"), [FEW[0], *(pytest.param(*path, marks=pytest.mark.slow) for path in [*FEW[1:], *MORE])]
)
def test_torch_export(name: str, choice: str):
    family = (FAMILIES | MIXERS)[name]
    model = family.build("classification", choice, **ONE)
    program = exported(family, model, "Dynamo")
    for batch in (1, 5):
        images = family.images(model.config, batch=batch)
        torch.testing.assert_close(program(pixel_values=images).logits, model(images).logits, rtol=0, atol=1e-5)
    # Nothing of the trace stays in the model.
    wanted = family.build("classification", choice, **ONE)(images).logits
    with torch.no_grad():
        torch.testing.assert_close(model(images).logits, wanted, rtol=0, atol=1e-5)


# The hybrid's graph holds the plain family's blocks, which the program above shows with a batch of any size. Slow: each
# takes torch's exporter 5 s; tests/test_any_model.py exports an axial model to ONNX by default.
@exporter_warnings
@pytest.mark.parametrize(
    ("name", "choice"), [FEW[1], *(pytest.param(*p, marks=pytest.mark.slow) for p in [FEW[0], *FEW[2:], *MORE])]
)
def test_onnx(name: str, choice: str, tmp_path: Path):
    import onnxruntime

    family = (FAMILIES | MIXERS)[name]
    model = family.build("classification", choice, **ONE)
    exported(family, model, "Onnx").save_pretrained(tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["pixel_values"]
    names = [value.name for value in session.get_outputs()]
    for batch in (1, 5):
        images = family.images(model.config, batch=batch)
        with torch.no_grad():
            wanted = model(images)
        for output, given in zip(names, session.run(None, {"pixel_values": images.numpy()}), strict=True):
            np.testing.assert_allclose(given, wanted[output].numpy(), rtol=0, atol=1e-5)
