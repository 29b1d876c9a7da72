"""ONNX: one graph for batches and images of any size, in onnxruntime and its own tools."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from models.families import FAMILIES, OTHERS
from onnxruntime import quantization
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from transformers import ViTImageProcessor

from hf_vit.conversion import export
from hf_vit.conversion.targets.graphs.certificate import Check, verify
from hf_vit.conversion.targets.target import TOLERANCE
from hf_vit.errors import UserError
from hf_vit_cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter's own

ONE = {"num_hidden_layers": 1}


def saved(name: str, folder: Path, choice: str = "default", head: str = "classification", **fields: Any) -> Any:
    """A model of random weights far from zero, in a folder with its processor."""
    model = {**FAMILIES, **OTHERS}[name].build(head, choice, **fields)
    model.save_pretrained(folder)
    height, width = model.config.nominal_size
    ViTImageProcessor(size={"height": height, "width": width}).save_pretrained(folder)
    return model


def opened(folder: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def answers(session: onnxruntime.InferenceSession, images: torch.Tensor) -> np.ndarray:
    return session.run(None, {"pixel_values": images.numpy()})[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(a plain classifier for 16x16 px, the folder that it was exported to)."""
    folder = tmp_path_factory.mktemp("plain")
    model = saved("plain", folder / "model", **ONE)
    export(folder / "model", folder / "out", "onnx")
    return model, folder / "out"


# In patches; the nominal grids are 4x4, the hybrid's and the ResNets' of 8 px.
GRIDS = [(4, 4), (3, 7), (2, 1), (9, 4), (6, 10)]


# torch's exporter takes 4 to 8 s each.
SLOW = (
    *(("plain", choice) for choice in ("learned_2d", "sincos_2d", "bicubic", "causal_map_2d", "registers_map")),
    *(("axial", choice) for choice in ("default", "sincos_1d", "map", "resnet_stem")),
    *(("local", choice) for choice in ("default", "gap", "criss_cross", "strided")),
    *(("hybrid", choice) for choice in ("default", "relative", "root_alone")),
    *(("axial_resnet", "default"), ("bit", "default"), ("plain", "bare causal"), ("axial", "bare default")),
)


@pytest.mark.parametrize(
    ("name", "choice"), [("plain", "relative"), *(pytest.param(*path, marks=pytest.mark.slow) for path in SLOW)]
)
def test_five_sizes_with_one_graph(name: str, choice: str, tmp_path: Path):
    tolerance = 6e-5 if name in ("hybrid", "bit") else 1e-5
    head = "model" if choice.startswith("bare ") else "classification"
    fields = ONE if name in FAMILIES else {}
    model = saved(name, tmp_path / "model", choice.removeprefix("bare "), head, **fields)
    assert export(tmp_path / "model", tmp_path / "out", "onnx").difference <= tolerance
    session = opened(tmp_path / "out")
    same_at_all_sizes(model, session, tolerance)
    if name == "hybrid":
        with pytest.raises(Fail, match="must_be_multiples_of_8x8_px"):
            answers(session, torch.zeros(1, 3, 32, 36))


def same_at_all_sizes(model: Any, session: onnxruntime.InferenceSession, tolerance: float) -> None:
    generator, (height, width) = torch.Generator().manual_seed(5), model.config.patch_stride
    for batch, (h, w) in enumerate(GRIDS, start=1):
        images = torch.rand(batch, model.config.num_channels, h * height, w * width, generator=generator) * 2 - 1
        with torch.no_grad():
            wanted = model(images)[0].numpy()
        np.testing.assert_allclose(answers(session, images), wanted, rtol=0, atol=tolerance * max(1, abs(wanted).max()))


def test_the_plain_graph_at_five_sizes_and_with_pixels_left_over(plain: tuple[Any, Path]):
    """What the model refuses the graph refuses, in its own runtime, by the name of the node."""
    model, folder = plain
    session, images = opened(folder), torch.randn(2, 3, 19, 22)
    same_at_all_sizes(model, session, 1e-5)
    with torch.no_grad():
        wanted = model(images).logits.numpy()
    np.testing.assert_allclose(answers(session, images), wanted, rtol=0, atol=1e-5)
    for height, width in ((3, 16), (16, 3), (0, 16)):
        images = torch.zeros(1, 3, height, width)
        with pytest.raises(ValueError, match="is smaller than a patch"):
            model(images)
        with pytest.raises(Fail, match="image_sides_are_smaller"):
            answers(session, images)


@pytest.mark.parametrize(
    ("name", "choice", "opset"),
    [
        ("plain", "map", 14),
        # torch's exporter takes 4 to 8 s each.
        *(pytest.param(name, "default", 14, marks=pytest.mark.slow) for name in ("hybrid", "axial", "bit")),
        *(pytest.param("plain", "relative", opset, marks=pytest.mark.slow) for opset in (15, 17, 22)),
    ],
)
def test_another_opset_gives_the_same_numbers(name: str, choice: str, opset: int, tmp_path: Path):
    """Judged by the same certificate; what runtimes of that opset do not know is in none of its nodes."""
    tolerance = 6e-5 if name in ("hybrid", "bit") else 1e-5
    model = saved(name, tmp_path / "model", choice, **(ONE if name in FAMILIES else {}))
    assert export(tmp_path / "model", tmp_path / "out", "onnx", opset=opset).difference <= tolerance
    graph = onnx.load(tmp_path / "out" / "model.onnx")
    assert [(each.domain, each.version) for each in graph.opset_import] == [("", opset)]
    onnx.checker.check_model(graph, full_check=True)
    same_at_all_sizes(model, opened(tmp_path / "out"), tolerance)


def test_an_opset_that_there_is_not_is_refused(tmp_path: Path):
    saved("plain", tmp_path / "model", **ONE)
    for opset in (13, 99):
        with pytest.raises(UserError, match=rf"--opset {opset} is not available; give one from 14 to \d+"):
            export(tmp_path / "model", tmp_path / "out", "onnx", opset=opset)
    with pytest.raises(UserError, match="--opset cannot be combined with --to openvino; leave it out"):
        export(tmp_path / "model", tmp_path / "out", "openvino", opset=17)


def test_nothing_is_added_to_attentions_scores(plain: tuple[Any, Path]):
    """Exporters are given a mask by transformers where nothing is masked: a sum of all scores in every layer."""
    graph = onnx.load(plain[1] / "model.onnx").graph
    makers = {output: node.op_type for node in graph.node for output in node.output}
    assert [makers[node.input[0]] for node in graph.node if node.op_type == "Softmax"] == ["MatMul"]


def test_what_the_file_says_of_itself(plain: tuple[Any, Path]):
    model, folder = plain
    session = opened(folder)
    (given,), outputs, said = session.get_inputs(), session.get_outputs(), session.get_modelmeta().custom_metadata_map
    assert (given.name, given.shape) == ("pixel_values", ["batch", 3, "height", "width"])
    assert [(output.name, output.shape) for output in outputs] == [
        ("logits", ["batch", 3]),
        ("features", ["batch", 32]),
    ]
    assert json.loads(said["labels"]) == {str(index): label for index, label in model.config.id2label.items()}
    assert json.loads(said["processor"])["size"] == {"height": 16, "width": 16}
    assert said["image_sizes"] == "at least 4x4 px"


class Noise(quantization.CalibrationDataReader):
    def __init__(self) -> None:
        self.left = [np.random.default_rng(i).standard_normal((2, 3, 16, 16), dtype=np.float32) for i in range(4)]

    def get_next(self) -> Any:
        return {"pixel_values": self.left.pop()} if self.left else None


def test_onnxruntimes_own_tools_take_the_file(plain: tuple[Any, Path], tmp_path: Path):
    """Checker, shape inference, preparation, optimiser, both quantisers; what they write runs, at other sizes too."""
    model, folder = plain
    file, images = folder / "model.onnx", torch.randn(2, 3, 20, 12)
    onnx.checker.check_model(file, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(onnx.load(file), strict_mode=True)
    assert inferred.graph.value_info
    with torch.no_grad():
        wanted = model(images).logits.numpy()
    quantization.shape_inference.quant_pre_process(file, tmp_path / "prepared.onnx", skip_symbolic_shape=True)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    quantization.quantize_dynamic(file, tmp_path / "dynamic.onnx")
    quantization.quantize_static(tmp_path / "prepared.onnx", tmp_path / "static.onnx", Noise(), per_channel=True)
    for name, tolerance in {"prepared": 1e-5, "optimized": 1e-5, "dynamic": 0.2, "static": 0.2}.items():
        session = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"])
        difference = abs(answers(session, images) - wanted).max()
        assert difference <= tolerance * abs(wanted).max(), name
        assert difference > 1e-4 or tolerance < 0.1, name  # something was quantised


def test_static_is_for_the_nominal_size(tmp_path: Path):
    model = saved("plain", tmp_path / "model", **ONE)
    run("export", tmp_path / "model", tmp_path / "out", "--to", "onnx", "--static")
    session, images = opened(tmp_path / "out"), torch.randn(5, 3, 16, 16)
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    with torch.no_grad():
        np.testing.assert_allclose(answers(session, images), model(images).logits.numpy(), rtol=0, atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["image_sizes"] == "16x16 px"
    with pytest.raises(UserError, match="--static cannot be combined with --to timm; leave it out"):
        export(tmp_path / "model", tmp_path / "timm", "timm", static=True)


def run(*arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert not stop.value.code


def test_the_certificate_is_of_what_the_model_gives(plain: tuple[Any, Path], capsys: pytest.CaptureFixture[str]):
    """Its checks, done again by hand: images from its own recipe, the model, the recorded results."""
    model, folder = plain
    certificate = json.loads((folder / "export.json").read_text())
    assert certificate["sha256"] == hashlib.sha256((folder / "model.onnx").read_bytes()).hexdigest()
    assert certificate["versions"]["onnxruntime"] == onnxruntime.__version__
    sizes = [(check["batch"], check["height"], check["width"]) for check in certificate["checks"]]
    assert sizes == [(1, 16, 16), (3, 16, 16), (2, 8, 16), (1, 20, 12), (2, 24, 24), (1, 16, 32), (2, 16, 16)]
    with np.load(folder / "export.npz") as results:
        for check, result in zip(certificate["checks"], results.values(), strict=True):
            images = Check(**check).images()
            with torch.no_grad():
                np.testing.assert_allclose(model(images).logits.numpy(), result, rtol=0, atol=1e-5)
            assert check["largest_difference"] <= certificate["tolerance"] == 1e-5
            assert images.isnan().any() == (check["pixels"] == "not finite") == np.isnan(result[0]).all()
            assert images.nan_to_num().abs().max() <= 1
            assert np.isfinite(result[1:]).all()
    run("verify", folder)
    assert "7 checks repeated with onnxruntime" in capsys.readouterr().out


def edit_graph(folder: Path) -> None:
    proto = onnx.load(folder / "model.onnx")
    proto.producer_name = "someone else"
    onnx.save(proto, folder / "model.onnx")


def other_results(folder: Path) -> None:
    with np.load(folder / "export.npz") as results:
        np.savez(folder / "export.npz", *(result + 1e-3 for result in results.values()))


DAMAGES: dict[str, tuple[Any, str]] = {
    "graph": (edit_graph, r"does not match export\.json: it was changed"),
    "results": (other_results, r"different results on this machine: .* at most \d\.\de-0[34] \(1e-05 is allowed\)"),
    "no graph": (lambda folder: (folder / "model.onnx").unlink(), r"lacks model\.onnx or export\.npz"),
    "half of it": (lambda folder: (folder / "export.npz").write_bytes(b"PK"),
        r"lacks model\.onnx or export\.npz"),
    "certificate": (lambda folder: (folder / "export.json").write_text("{}"),
        r"export\.json is not a result of this version"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_changed_is_refused_in_one_line(damage: str, plain: tuple[Any, Path], tmp_path: Path):
    folder = shutil.copytree(plain[1], tmp_path / "copy")
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(UserError, match=message):
        verify(folder)


def test_a_missed_bound_stops_the_export_with_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved("plain", tmp_path / "model", **ONE)
    monkeypatch.setitem(TOLERANCE, "hf_vit", 1e-12)
    with pytest.raises(UserError, match=r"gives other results, \d\.\de-0\d apart .* so nothing was written"):
        export(tmp_path / "model", tmp_path / "out", "onnx", static=True)
    assert not (tmp_path / "out").exists()


def test_a_mixer_has_a_graph_of_its_one_size(tmp_path: Path):
    model = saved("mixer", tmp_path / "model", **ONE)
    export(tmp_path / "model", tmp_path / "out", "onnx")
    height, width = model.config.nominal_size
    assert opened(tmp_path / "out").get_inputs()[0].shape == ["batch", 3, height, width]
