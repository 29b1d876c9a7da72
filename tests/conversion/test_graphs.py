"""ONNX graphs: of every size, with the image processor inside, of dense predictors; in onnxruntime and its tools."""

import hashlib
import io
import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from dense_heads import build
from models.families import FAMILIES, OTHERS
from onnx import helper
from onnxruntime import quantization
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from onnxruntime.transformers.optimizer import optimize_model
from onnxruntime_extensions import get_library_path
from onnxscript import ir
from PIL import Image
from skimage.data import astronaut, chelsea
from training.conftest import save_model
from transformers import CLIPImageProcessor, ConvNextImageProcessor, DeiTImageProcessor, ViTImageProcessor

import hf_vit
from hf_vit.conversion import export
from hf_vit.conversion.targets.graphs import preprocessing
from hf_vit.conversion.targets.graphs.certificate import Check, verify
from hf_vit.conversion.targets.graphs.preprocessing import ENCODED, IMAGES, LEVELS, Preprocessing, prepend
from hf_vit.conversion.targets.graphs.runtimes import get_openvino_core
from hf_vit.conversion.targets.graphs.tracing import OPSETS, REPLACEMENTS, linspace_of_any_size
from hf_vit.conversion.targets.target import TOLERANCE
from hf_vit.errors import UserError
from hf_vit.loading.model import load_model
from hf_vit.loading.start import find_model
from hf_vit.training.tasks.dense import build_dense_model

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("exported_once")]  # of the exporter's own
Command = Callable[..., tuple[int, str, str]]


def saved(
    name: str, folder: Path, choice: str = "default", head: str = "classification", processor: Any = None, **fields: Any
) -> Any:
    """A model of random weights far from zero, in a folder with its processor; of our families with one layer."""
    fields = {"num_hidden_layers": 1} | fields if name in FAMILIES else fields
    model = {**FAMILIES, **OTHERS}[name].build(head, choice, **fields)
    save_model(model, folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return model


def session_of(model: Any) -> onnxruntime.InferenceSession:
    """A file, a folder's, or bytes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(get_library_path())
    model = model / "model.onnx" if isinstance(model, Path) and model.is_dir() else model
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def answers(session: onnxruntime.InferenceSession, images: torch.Tensor) -> np.ndarray:
    return session.run(None, {"pixel_values": images.numpy()})[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(a plain classifier for 16x16 px, the folder that it was exported to)."""
    folder = tmp_path_factory.mktemp("plain")
    model = saved("plain", folder / "model")
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
    *(("plain", choice) for choice in ("rotary", "rotary_mixed", "rotary_registers", "rotary_causal", "rmsnorm")),
    *(("axial", "rotary_gap"), ("local", "rotary")),
)


@pytest.mark.parametrize(
    ("name", "choice"),
    [("plain", "relative"), ("plain", "rotary_gap"), *(pytest.param(*path, marks=pytest.mark.slow) for path in SLOW)],
)
def test_five_sizes_with_one_graph(name: str, choice: str, tmp_path: Path):
    tolerance = 6e-5 if name in ("hybrid", "bit") else 1e-5
    head = "model" if choice.startswith("bare ") else "classification"
    model = saved(name, tmp_path / "model", choice.removeprefix("bare "), head)
    assert export(tmp_path / "model", tmp_path / "out", "onnx").difference <= tolerance
    session = session_of(tmp_path / "out")
    same_at_all_sizes(model, session, tolerance)
    if name == "hybrid":
        height, width = model.config.patch_stride
        with pytest.raises(Fail, match=f"must_be_multiples_of_{height}x{width}_px"):
            answers(session, torch.zeros(1, 3, 32, 32 + width // 2))


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
    session, images = session_of(folder), torch.randn(2, 3, 19, 22)
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
        *(pytest.param("plain", choice, 14, marks=pytest.mark.slow) for choice in ("rotary_mixed", "rotary_registers")),
    ],
)
def test_another_opset_gives_the_same_numbers(name: str, choice: str, opset: int, tmp_path: Path):
    """Judged by the same certificate; what runtimes of that opset do not know is in none of its nodes."""
    tolerance = 6e-5 if name in ("hybrid", "bit") else 1e-5
    model = saved(name, tmp_path / "model", choice)
    assert export(tmp_path / "model", tmp_path / "out", "onnx", opset=opset).difference <= tolerance
    graph = onnx.load(tmp_path / "out" / "model.onnx")
    assert [(each.domain, each.version) for each in graph.opset_import] == [("", opset)]
    onnx.checker.check_model(graph, full_check=True)
    same_at_all_sizes(model, session_of(tmp_path / "out"), tolerance)


TOOLS = [("plain", "gelu", opset) for opset in OPSETS] + [
    (name, choice, opset)
    for name, choice in (("plain", "rotary"), ("hybrid", "default"), ("axial", "default"), ("local", "default"),
                         ("bit", "default"), ("mixer", "default"))
    for opset in (14, 18, OPSETS[-1])
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "choice", "opset"),
    [TOOLS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in TOOLS[1:])],  # 5 s each
)
def test_onnxruntimes_tools_take_the_graph(name: str, choice: str, opset: int, tmp_path: Path, monkeypatch):
    """Shape inference, the preparation for quantization and the transformers' optimizer, which change no answer."""
    monkeypatch.chdir(tmp_path)  # where a tool that fails leaves files
    fields = {"hidden_act": "gelu"} if choice == "gelu" else {}
    model = saved(name, tmp_path / "model", "default" if fields else choice, **fields)
    # Symbolic shape inference gives up on graphs of local attention for any size, and on a ResNet's altogether.
    export(tmp_path / "model", tmp_path / "out", "onnx", opset=opset, static=name == "local")
    file, images = tmp_path / "out/model.onnx", torch.randn(2, 3, *model.config.nominal_size)
    wanted = answers(session_of(file), images)
    inferred = onnx.shape_inference.infer_shapes(onnx.load(file), check_type=True, strict_mode=True, data_prop=True)
    onnx.checker.check_model(inferred, full_check=True)
    is_resnet = name in ("hybrid", "bit")
    quantization.quant_pre_process(str(file), str(tmp_path / "prepared.onnx"), skip_symbolic_shape=is_resnet)
    heads = getattr(model.config, "num_attention_heads", 0)
    sizes = {"num_heads": heads, "hidden_size": model.config.hidden_size if heads else 0}  # both, or none of them
    optimize_model(str(file), "vit", **sizes, opt_level=0).save_model_to_file(str(tmp_path / "optimized.onnx"))
    for made in ("prepared", "optimized"):
        found = answers(session_of(tmp_path / f"{made}.onnx"), images)
        # It takes the tanh GELU, an operator from opset 20 on, for the exact one.
        is_other_gelu = made == "optimized" and opset >= 20 and choice != "gelu"
        np.testing.assert_allclose(found, wanted, rtol=0, atol=(1e-2 if is_other_gelu else 1e-5) * abs(wanted).max())


def test_nothing_is_added_to_attentions_scores(plain: tuple[Any, Path]):
    """Exporters are given a mask by transformers where nothing is masked: a sum of all scores in every layer."""
    graph = onnx.load(plain[1] / "model.onnx").graph
    makers = {output: node.op_type for node in graph.node for output in node.output}
    assert [makers[node.input[0]] for node in graph.node if node.op_type == "Softmax"] == ["MatMul"]


def test_what_the_file_says_of_itself(plain: tuple[Any, Path]):
    model, folder = plain
    session = session_of(folder)
    (given,), outputs, said = session.get_inputs(), session.get_outputs(), session.get_modelmeta().custom_metadata_map
    assert (given.name, given.shape) == ("pixel_values", ["batch", 3, "height", "width"])
    assert [(each.name, each.shape) for each in outputs] == [("logits", ["batch", 3]), ("features", ["batch", 32])]
    assert json.loads(said["labels"]) == {str(index): label for index, label in model.config.id2label.items()}
    assert json.loads(said["processor"])["size"] == {"height": 16, "width": 16}
    assert said["image_sizes"] == "at least 4x4 px"


class Noise(quantization.CalibrationDataReader):
    def __init__(self) -> None:
        self.left = [np.random.default_rng(i).standard_normal((2, 3, 16, 16), dtype=np.float32) for i in range(4)]

    def get_next(self) -> Any:
        return {"pixel_values": self.left.pop()} if self.left else None


def test_onnxruntimes_own_tools_take_the_file(plain: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Preparation, optimiser, both quantisers; what they write runs, at other sizes too."""
    monkeypatch.chdir(tmp_path)
    model, folder = plain
    file, images = folder / "model.onnx", torch.randn(2, 3, 20, 12)
    with torch.no_grad():
        wanted = model(images).logits.numpy()
    quantization.shape_inference.quant_pre_process(str(file), str(tmp_path / "prepared.onnx"))
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


def test_static_is_for_the_nominal_size(tmp_path: Path, command: Command):
    model = saved("plain", tmp_path / "model")
    assert command("export", tmp_path / "model", tmp_path / "out", "--to", "onnx", "--static")[0] == 0
    session, images = session_of(tmp_path / "out"), torch.randn(5, 3, 16, 16)
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    with torch.no_grad():
        np.testing.assert_allclose(answers(session, images), model(images).logits.numpy(), rtol=0, atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["image_sizes"] == "16x16 px"


def test_the_certificate_is_of_what_the_model_gives(plain: tuple[Any, Path], command: Command):
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
    code, out, _ = command("verify", folder)
    assert (code, "7 checks repeated with onnxruntime" in out) == (0, True)


def test_a_certificate_is_repeated_in_another_provider(plain: tuple[Any, Path], tmp_path: Path, monkeypatch):
    """`examples/tensorrt.py` with the provider of CPUs, as here is no GPU; TensorRT's is refused."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/tensorrt.py"))["main"]
    folder = shutil.copytree(plain[1], tmp_path / "out")
    with pytest.raises(SystemExit, match="not certified in TensorrtExecutionProvider: onnxruntime has no Tensorrt"):
        example(str(folder))
    assert not (folder / "tensorrt.json").exists()
    example(str(folder), "CPUExecutionProvider")
    certificates = [json.loads((folder / name).read_text()) for name in ("tensorrt.json", "export.json")]
    assert certificates[0]["checks"] == certificates[1]["checks"]


def test_what_differs_and_what_is_no_number_is_not_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One class of a damaged head was passed over where all other differences were small."""
    model = saved("plain", tmp_path / "model")
    with monkeypatch.context() as patched:
        patched.setitem(TOLERANCE, "hf_vit", 1e-12)
        with pytest.raises(UserError, match=r"differs from the original by \d\.\de-0\d .* so nothing was written"):
            export(tmp_path / "model", tmp_path / "out", "onnx", static=True)
    for value, told in ((torch.nan, "has weights that are NaN or infinite"), (3e38, "results are NaN or infinite")):
        with torch.no_grad():
            model.classifier.bias[1] = value
            model.classifier.weight[1] = value
        model.save_pretrained(tmp_path / "model")
        with pytest.raises(UserError, match=told):
            export(tmp_path / "model", tmp_path / "out", "onnx", static=True)
    assert not (tmp_path / "out").exists()


def edit_graph(folder: Path) -> None:
    proto = onnx.load(folder / "model.onnx")
    proto.producer_name = "someone else"
    onnx.save(proto, folder / "model.onnx")


def edit_weights_beside(folder: Path) -> None:
    """Change one bit of weights that have a file of their own, as those of more than 2 GB have."""
    file, data = folder / "model.onnx", folder / "model.onnx.data"
    onnx.save(onnx.load(file), file, save_as_external_data=True, location=data.name)
    certificate = json.loads((folder / "export.json").read_text())
    certificate["sha256"] = hashlib.sha256(file.read_bytes() + data.read_bytes()).hexdigest()
    (folder / "export.json").write_text(json.dumps(certificate))
    verify(folder)
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])


def other_results(folder: Path) -> None:
    with np.load(folder / "export.npz") as results:
        np.savez(folder / "export.npz", *(result + 1e-3 for result in results.values()))


DAMAGES: dict[str, tuple[Any, str]] = {
    "graph": (edit_graph, r"was changed after the export .its SHA-256"),
    "weights beside": (edit_weights_beside, r"was changed after the export"),
    "results": (other_results, r"different results on this machine .* at most \d\.\de-0[34] \(1e-05 is allowed\)"),
    "no graph": (lambda folder: (folder / "model.onnx").unlink(), r"model\.onnx or export\.npz in .* is missing"),
    "half of it": (lambda folder: (folder / "export.npz").write_bytes(b"PK"),
        r"model\.onnx or export\.npz in .* is missing"),
    "certificate": (lambda folder: (folder / "export.json").write_text("{}"),
        r"export\.json was not written by this version"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_changed_is_refused_in_one_line(damage: str, plain: tuple[Any, Path], tmp_path: Path):
    folder = shutil.copytree(plain[1], tmp_path / "copy")
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(UserError, match=message):
        verify(folder)


def test_a_mixer_has_a_graph_of_its_one_size(tmp_path: Path):
    model = saved("mixer", tmp_path / "model")
    with torch.autocast("cpu", torch.bfloat16):  # whose casts the graph does not get
        export(tmp_path / "model", tmp_path / "out", "onnx")
    height, width = model.config.nominal_size
    assert session_of(tmp_path / "out").get_inputs()[0].shape == ["batch", 3, height, width]


# ---- the image processor in the graph: the same numbers as transformers' own, or a refusal by name

BICUBIC = Image.Resampling.BICUBIC
PROCESSORS: dict[str, Any] = {
    "ViT": ViTImageProcessor(),
    "rectangle": ViTImageProcessor(size={"height": 48, "width": 80}, resample=BICUBIC),
    "CLIP": CLIPImageProcessor(),
    "DeiT": DeiTImageProcessor(size={"height": 60, "width": 60}, crop_size={"height": 56, "width": 56}),
    "odd crop": ViTImageProcessor(size={"shortest_edge": 41}, do_center_crop=True, crop_size={"height": 33,
        "width": 36}, do_normalize=False),
    "crop alone": ViTImageProcessor(do_resize=False, do_center_crop=True, crop_size={"height": 301, "width": 600},
        do_rescale=False),
}  # fmt: skip
PHOTOGRAPH = astronaut()
PICTURES = [PHOTOGRAPH, PHOTOGRAPH[:61, :93], PHOTOGRAPH[:9, 80:380], PHOTOGRAPH[:224, :224]]
PICTURES += [chelsea(), chelsea()[:1, :1]]


def graph_of(processor: Any, takes: str = IMAGES) -> bytes:
    """The processor before a graph that does nothing."""
    values = {name: helper.make_tensor_value_info(name, 1, ["b", 3, f"h{name}", f"w{name}"]) for name in ("in", "out")}
    graph = helper.make_graph([helper.make_node("Identity", ["in"], ["out"])], "g", [values["in"]], [values["out"]])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    model = ir.from_proto(proto)
    prepend(model, Preprocessing.from_processor(processor), takes)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return proto.SerializeToString()


def processor_alone(processor: Any, takes: str = IMAGES) -> onnxruntime.InferenceSession:
    return session_of(graph_of(processor, takes))


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_same_values_as_transformers(name: str):
    """At every size of image, alone and in a batch; to the last bit of what is resized."""
    processor, graph = PROCESSORS[name], processor_alone(PROCESSORS[name])
    of_levels = processor_alone(processor, LEVELS)  # as transformers.js hands them on: float32 [B, 3, H, W], 0..255
    for picture in PICTURES:
        wanted = processor(images=Image.fromarray(picture), return_tensors="np")["pixel_values"][0]
        batch = graph.run(["preprocessed"], {"images": np.stack([picture, 255 - picture, picture])})[0]
        levels = picture.transpose(2, 0, 1)[None].astype(np.float32)
        np.testing.assert_array_equal(of_levels.run(["preprocessed"], {"pixel_values": levels})[0][0], batch[0])
        for values in batch[::2]:
            np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-6)  # a step of 1/255 is 4e-3 and more


def test_openvino_reads_the_same_processor(tmp_path: Path):
    """It computes in float32 what torch computes in float64, so that some values differ by 1 of 255."""
    for name in ("CLIP", "rectangle"):
        processor, file = PROCESSORS[name], tmp_path / f"{name}.onnx"
        step = Preprocessing.from_processor(processor).step
        file.write_bytes(graph_of(processor))
        model, precision = openvino.convert_model(file), {"INFERENCE_PRECISION_HINT": "f32"}
        graph = get_openvino_core().compile_model(model, "CPU", precision)
        for picture in PICTURES:
            wanted = processor(images=Image.fromarray(picture), return_tensors="np")["pixel_values"][0]
            difference = abs(graph([np.stack([picture, 255 - picture])])["preprocessed"][0] - wanted)
            assert difference.max() <= step
            assert (difference > step / 2).mean() < 0.005


def test_of_an_image_that_shrinks_far_some_values_differ_by_one():
    """To a fourteenth: the sums exceed float32's 24 bits. And from Pillow's resizing a few, as torchvision's do."""
    processor = ViTImageProcessor(size={"height": 16, "width": 16}, do_rescale=False, do_normalize=False)
    graph, picture = processor_alone(processor), astronaut()[:224, :224]
    theirs = graph.run(["preprocessed"], {"images": picture[None]})[0][0]
    ours = processor(images=Image.fromarray(picture), return_tensors="np")["pixel_values"][0]
    pillows = np.array(Image.fromarray(picture).resize((16, 16), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    for other in (ours.astype(float), pillows.astype(float)):
        assert abs(theirs - other).max() <= 1
        assert (theirs != other).mean() < 0.01


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def test_files_are_decoded():
    """PNGs and JPEGs as Pillow decodes them, gray ones too; of JPEGs with halved colours, a little otherwise."""
    processor, picture = ViTImageProcessor(), Image.fromarray(chelsea())
    graph = processor_alone(processor, ENCODED)
    exact = [encoded(picture, "PNG"), encoded(picture.convert("P"), "PNG"), encoded(picture.convert("L"), "PNG")]
    exact += [encoded(picture, "JPEG", subsampling=0), encoded(picture.convert("L"), "JPEG")]
    for file in (*exact, encoded(picture, "JPEG")):
        wanted = processor(images=Image.open(io.BytesIO(file)).convert("RGB"), return_tensors="np")["pixel_values"]
        difference = abs(graph.run(["preprocessed"], {"file": np.frombuffer(file, np.uint8)})[0] - wanted)
        assert difference.max() == 0 if file in exact else difference.mean() < 0.01


CHELSEA = Image.fromarray(chelsea())
# What the graph takes, what it is given, and what its refusal says; the decoder alone would end the process.
BAD: tuple[tuple[str, Any, str], ...] = (
    (ENCODED, encoded(CHELSEA, "GIF"), "the_file_must_be_a_png_or_a_whole_jpeg"),
    (ENCODED, encoded(CHELSEA, "JPEG")[:-2], "the_file_must_be_a_png_or_a_whole_jpeg"),
    (ENCODED, encoded(CHELSEA, "PNG")[:2000], "DecodeImage"),
    (ENCODED, encoded(CHELSEA.convert("CMYK"), "JPEG"), "images_of_four_channels_are_refused"),
    (ENCODED, b"", "non-zero status code"),
    (IMAGES, np.zeros((1, 9, 9, 3), np.float32), "Unexpected input data type"),
    (IMAGES, np.zeros((1, 9, 9, 4), np.uint8), "Got: 4 Expected: 3"),
    (IMAGES, np.zeros((1, 0, 9, 3), np.uint8), "images_are_empty"),
)  # fmt: skip


@pytest.mark.parametrize(("takes", "given", "why"), BAD, ids=[f"{row[0]}-{row[2]}" for row in BAD])
def test_what_is_no_image_is_refused(takes: str, given: Any, why: str):
    graph = processor_alone(ViTImageProcessor(), takes)
    values = np.frombuffer(given, np.uint8) if takes == ENCODED else given
    with pytest.raises((Fail, InvalidArgument, RuntimeException), match=f"(?i){why}"):
        graph.run(["preprocessed"], {takes: values})


class Mirrored(ViTImageProcessor):
    def resize(self, image: Any, *arguments: Any, **options: Any) -> Any:
        return super().resize(image.flip(-1), *arguments, **options)


REFUSED: dict[str, tuple[Any, str]] = {
    "of the user": (Mirrored(), r"Mirrored \(which overrides resize\)"),
    "of another model": (ConvNextImageProcessor(), r"ConvNextImageProcessor \(which overrides \w+\)"),
    "filter": (ViTImageProcessor(resample=1), r"resample=LANCZOS \(a graph has BILINEAR and BICUBIC\)"),
    "many sizes": (ViTImageProcessor(size={"shortest_edge": 16}),
        r"size=\{'shortest_edge': 16\} \(a graph needs height"),
    "no size": (ViTImageProcessor(do_resize=False), r"do_resize=False without a crop \(images keep their sizes\)"),
    "no deviation": (ViTImageProcessor(image_std=[0.5, 0, 0.5]), r"image_std=\(0\.5, 0, 0\.5\) \(division by 0"),
    "margin": (ViTImageProcessor(do_pad=True), "do_pad=True"),
    "no processor": (object(), r"object \(not one of transformers' torchvision processors\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_graph_does_is_named(case: str):
    processor, why = REFUSED[case]
    with pytest.raises(UserError, match=f"a graph cannot compute.*{why}.* without --preprocessing and --decoding"):
        Preprocessing.from_processor(processor)


@pytest.fixture(scope="module")
def with_processor(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(a classifier for 16x16 px, the folder of its graph with a processor that makes 20x12 px)."""
    folder = tmp_path_factory.mktemp("with_processor")
    processor = ViTImageProcessor(size={"height": 20, "width": 12}, resample=BICUBIC)
    model = saved("plain", folder / "model", processor=processor)
    export(folder / "model", folder / "out", "onnx", preprocessing=True)
    return model, folder / "out"


def test_the_answers_of_processor_and_model(with_processor: tuple[Any, Path]):
    model, folder = with_processor
    graph, processor = session_of(folder), ViTImageProcessor.from_pretrained(folder)
    assert [(given.name, given.shape, given.type) for given in graph.get_inputs()] == [
        ("images", ["batch", "height", "width", 3], "tensor(uint8)")
    ]
    for picture in PICTURES:
        with torch.no_grad():
            wanted = model(**processor(images=Image.fromarray(picture), return_tensors="pt")).logits.numpy()
        np.testing.assert_allclose(graph.run(["logits"], {"images": picture[None]})[0], wanted, rtol=0, atol=1e-5)
    said = graph.get_modelmeta().custom_metadata_map
    assert (said["image_sizes"], said["takes"]) == ("all", "images")
    assert json.loads(said["processor"])["size"] == {"height": 20, "width": 12}


def test_the_certificate_covers_the_processor(with_processor: tuple[Any, Path], command: Command):
    """Noise that is not resized for the results; photographs of other sizes for what the processor makes of them."""
    folder = with_processor[1]
    certificate = json.loads((folder / "export.json").read_text())
    checks = [(one["pixels"], one["height"], one["width"], one["compares"]) for one in certificate["checks"]]
    assert checks[:2] == [("noise of 8 bits", 20, 12, "results")] * 2
    assert {(pixels, compares) for pixels, _, _, compares in checks[2:]} == {("photograph", "preprocessed")}
    assert len({(height, width) for _, height, width, _ in checks[2:]}) == 4
    assert certificate["pixel_tolerance"] == pytest.approx(1.001 / 127.5)
    code, out, _ = command("verify", folder)
    assert (code, "pixel values of resized images by 0.0e+00 (7.9e-03, a step of 1/255)" in out) == (0, True)


def test_onto_an_earlier_export_the_remedy_is_force(with_processor: tuple[Any, Path], tmp_path: Path):
    """Not onto another folder, which --force would not replace either."""
    model, folder = with_processor[1].parent / "model", with_processor[1]
    with pytest.raises(UserError, match=r"is not empty; .*, or add --force to replace its content"):
        export(model, folder, "onnx", preprocessing=True)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty; choose a new folder, or empty this one first$"):
        export(model, tmp_path, "onnx", preprocessing=True)


def test_another_filter_stops_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved("plain", tmp_path / "model")
    weights = preprocessing._compute_weights
    monkeypatch.setattr(preprocessing, "_compute_weights", lambda nodes, old, new, _: weights(nodes, old, new, BICUBIC))
    with pytest.raises(UserError, match=r"the graph resizes images differently .*nothing was written"):
        export(tmp_path / "model", tmp_path / "out", "onnx", preprocessing=True)
    assert not (tmp_path / "out").exists()


def test_the_bytes_of_a_file(tmp_path: Path, command: Command):
    """In an older opset, which has no antialiasing of positions; nor has OpenVINO."""
    fields = {"position_interpolation": "bicubic_antialias", "image_size": 56, "hidden_size": 64}  # not folded by torch
    model = saved("plain", tmp_path / "model", processor=ViTImageProcessor(size={"height": 24, "width": 32}), **fields)
    assert command("export", tmp_path / "model", tmp_path / "out", "--to", "onnx", "--decoding", "--opset", 14)[0] == 0
    graph, processor = session_of(tmp_path / "out"), ViTImageProcessor.from_pretrained(tmp_path / "model")
    file = np.frombuffer(encoded(Image.fromarray(chelsea()), "PNG"), np.uint8)
    with torch.no_grad():
        wanted = model(**processor(images=Image.fromarray(chelsea()), return_tensors="pt")).logits.numpy()
    np.testing.assert_allclose(graph.run(["logits"], {"file": file})[0], wanted, rtol=0, atol=1e-5)
    assert verify(tmp_path / "out").holds()


ONE_SIZE_PROTOCOLS = "the image processor makes images of 32x40 px, but the model does not take"
SLOW_FAMILIES = ("hybrid", "axial", "bit", "axial_resnet")


@pytest.mark.parametrize("name", ["mixer", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)])
def test_every_family_with_its_processor(name: str, tmp_path: Path):
    """What takes other sizes than its own takes what the processor makes; a Mixer takes its own."""
    other = ViTImageProcessor(size={"height": 32, "width": 40})
    model = saved(name, tmp_path / "model", processor=other)
    if name == "mixer":
        with pytest.raises(UserError, match=ONE_SIZE_PROTOCOLS):
            export(tmp_path / "model", tmp_path / "out", "onnx", preprocessing=True)
        height, width = model.config.nominal_size
        other = ViTImageProcessor(size={"height": height, "width": width})
        other.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", "onnx", preprocessing=True)
    graph = session_of(tmp_path / "out")
    with torch.no_grad():
        wanted = model(**other(images=Image.fromarray(chelsea()), return_tensors="pt")).logits.numpy()
    tolerance = 6e-5 * max(1, abs(wanted).max())
    np.testing.assert_allclose(graph.run(["logits"], {"images": chelsea()[None]})[0], wanted, rtol=0, atol=tolerance)


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved("plain", tmp_path / "bare", head="model")
    saved("plain", tmp_path / "model")
    ViTImageProcessor(size={"height": 16, "width": 16}, resample=5).save_pretrained(tmp_path / "model")
    for model, options, why in (
        ("bare", {"preprocessing": True}, r"and --to transformers\.js need a classifier of RGB images; use"),
        ("model", {"preprocessing": True}, "resample=HAMMING"),
        ("model", {"decoding": True}, "resample=HAMMING"),
        ("model", {"opset": 13}, r"--opset 13 is unknown; give a number from 14 to \d+"),
        ("model", {"opset": 99}, r"--opset 99 is unknown; give a number from 14 to \d+"),
    ):
        with pytest.raises(UserError, match=why):
            export(tmp_path / model, tmp_path / "out", "onnx", **options)
    others = dict.fromkeys(("preprocessing", "decoding", "static", "spelling"), "timm") | {"opset": "openvino"}
    for option, target in others.items():
        with pytest.raises(UserError, match=f"--{option} cannot be combined with --to {target}; leave it out"):
            export(tmp_path / "model", tmp_path / "out", target, **{option: 17 if option == "opset" else True})
    assert not (tmp_path / "out").exists()


# ---- dense prediction

DENSE = [("plain", "linear")]
SLOW_DENSE = [
    *(("plain", head) for head in ("upernet", "detr", "deformable-detr", "mask2former")),
    *(("hybrid", "linear"), ("axial", "upernet"), ("local", "linear"), ("bit", "linear"), ("axial_resnet", "linear")),
]


def saved_dense(family: str, head: str, folder: Path) -> Path:
    for part in build(family, head):
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "head"),
    [*DENSE, *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for case in SLOW_DENSE)],
)
@torch.no_grad()
def test_a_dense_graph_answers_at_every_size(family: str, head: str, tmp_path: Path) -> None:
    folder = saved_dense(family, head, tmp_path / "model")
    export(folder, tmp_path / "graph", "onnx")
    model = load_model(folder, "cpu").model
    session = session_of(tmp_path / "graph")
    names = [each.name for each in session.get_outputs()]
    for batch, height, width in ((1, 64, 64), (3, 64, 160), (2, 128, 96), (1, 32, 64)):
        pixel_values = torch.randn(batch, 3, height, width)
        wanted = model(pixel_values=pixel_values)
        for name, given in zip(names, session.run(None, {"pixel_values": pixel_values.numpy()}), strict=True):
            scale = max(1.0, wanted[name].abs().max().item())
            torch.testing.assert_close(torch.from_numpy(given), wanted[name], rtol=0, atol=1e-4 * scale)
    with pytest.raises(Exception, match="Reshape"):
        session.run(None, {"pixel_values": torch.randn(1, 3, 70, 64).numpy()})
    told = json.loads(session.get_modelmeta().custom_metadata_map["labels"])
    assert told == {"0": "sky", "1": "cat"}
    with pytest.raises(UserError, match=r"is the graph of a Hf\w+, which hf-vit does not run; run it with onnxruntime"):
        load_model(tmp_path / "graph")


@pytest.mark.slow
def test_a_dense_graph_of_one_size(tmp_path: Path) -> None:
    folder = saved_dense("plain", "upernet", tmp_path / "model")
    result = export(folder, tmp_path / "graph", "onnx", static=True)
    assert result.difference <= 1e-4


def test_dense_models_that_are_refused(tmp_path: Path) -> None:
    linear, mask_rcnn = (saved_dense("plain", head, tmp_path / head) for head in ("linear", "mask-rcnn"))
    with pytest.raises(UserError, match=r"HfMaskRCNNForObjectDetection uses torchvision's Mask R-CNN.*'detr'"):
        export(mask_rcnn, tmp_path / "graph", "onnx")
    for target in ("timm", "transformers", "vit_jax", "openvino"):
        with pytest.raises(UserError, match=r"HfLinearForSemanticSegmentation cannot be exported to .*--to onnx"):
            export(linear, tmp_path / "graph", target)
    with pytest.raises(UserError, match=r"settings that a graph cannot compute.*: SegformerImage"):
        export(linear, tmp_path / "graph", "onnx", preprocessing=True)
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    source = find_model(hf_vit.HfViTConfig(image_size=48, **tiny))
    for part in build_dense_model(source, "upernet", ["sky", "cat"], width=16):
        part.save_pretrained(tmp_path / "odd")
    with pytest.raises(UserError, match=r"multiples of 32x32 px, but the model's images have 48x48"):
        export(tmp_path / "odd", tmp_path / "graph", "onnx")


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3), (7, 5), (12, 6)])
@pytest.mark.parametrize("size", [1, 2, 3, (6, 4)])
def test_pooling_in_other_operators(height: int, width: int, size: int | tuple[int, int]) -> None:
    pool = torch.nn.functional.adaptive_avg_pool2d
    maps = torch.randn(2, 3, height, width, dtype=torch.float64)
    given = REPLACEMENTS[pool](maps, size)
    torch.testing.assert_close(given, pool(maps, size), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("old", "new"), [((7, 7), (14, 3)), ((16, 5), (1, 40)), ((1, 6), (1, 9)), ((4, 4), (5, 2))])
def test_antialiasing_in_other_operators(old: tuple[int, int], new: tuple[int, int], mode: str) -> None:
    resize, maps = torch.nn.functional.interpolate, torch.randn(2, 3, *old)
    given = REPLACEMENTS[resize](maps, size=new, mode=mode, antialias=True)
    torch.testing.assert_close(given, resize(maps, size=new, mode=mode, antialias=True), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("start", "end", "steps"), [(0.5, 6.5, 7), (0.5, 0.5, 1), (-1.0, 1.0, 4)])
def test_steps_in_other_operators(start: float, end: float, steps: int) -> None:
    given = linspace_of_any_size(start, end, steps, dtype=torch.float32)
    torch.testing.assert_close(given, torch.linspace(start, end, steps), rtol=0, atol=1e-6)
