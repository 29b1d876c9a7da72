"""The image processor in the graph: the same numbers as transformers' own, files and all; or a refusal by name."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from models.families import FAMILIES, OTHERS
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from onnxruntime_extensions import get_library_path
from onnxscript import ir
from PIL import Image
from skimage.data import astronaut, chelsea
from transformers import CLIPImageProcessor, ConvNextImageProcessor, DeiTImageProcessor, ViTImageProcessor

from hf_vit.conversion import export
from hf_vit.conversion.targets.graphs import preprocessing
from hf_vit.conversion.targets.graphs.certificate import verify
from hf_vit.conversion.targets.graphs.preprocessing import ENCODED, IMAGES, LEVELS, Preprocessing, prepend
from hf_vit.conversion.targets.graphs.runtimes import openvino_core
from hf_vit.errors import UserError
from hf_vit_cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter

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
PICTURES = [
    PHOTOGRAPH,
    chelsea(),
    PHOTOGRAPH[:61, :93],
    PHOTOGRAPH[:9, 80:380],
    PHOTOGRAPH[:224, :224],
    chelsea()[:1, :1],
]  # fmt: skip


def session_of(model: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def graph_of(processor: Any, takes: str = IMAGES) -> bytes:
    """The processor before a graph that does nothing."""
    values = {name: helper.make_tensor_value_info(name, 1, ["b", 3, f"h{name}", f"w{name}"]) for name in ("in", "out")}
    graph = helper.make_graph([helper.make_node("Identity", ["in"], ["out"])], "g", [values["in"]], [values["out"]])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    model = ir.from_proto(proto)
    prepend(model, Preprocessing.of(processor), takes)
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
        step = Preprocessing.of(processor).step
        file.write_bytes(graph_of(processor))
        graph = openvino_core().compile_model(openvino.convert_model(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
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
    "of the user": (Mirrored(), r"a Mirrored \(it overrides resize\)"),
    "of another model": (ConvNextImageProcessor(), r"a ConvNextImageProcessor \(it overrides \w+\)"),
    "filter": (ViTImageProcessor(resample=1), r"resample=LANCZOS \(graphs have BILINEAR and BICUBIC\)"),
    "many sizes": (ViTImageProcessor(size={"shortest_edge": 16}),
        r"size=\{'shortest_edge': 16\} \(graphs need a height"),
    "no size": (ViTImageProcessor(do_resize=False), r"images of all sizes \(do_resize=False, and no crop\)"),
    "no deviation": (ViTImageProcessor(image_std=[0.5, 0, 0.5]), r"image_std=\(0\.5, 0, 0\.5\) \(nothing can be"),
    "margin": (ViTImageProcessor(do_pad=True), "do_pad=True"),
    "no processor": (object(), r"a object \(not one of transformers' torchvision processors\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_graph_does_is_named(case: str):
    processor, why = REFUSED[case]
    with pytest.raises(UserError, match=f"a graph cannot do .*{why}.* or export --to onnx without it"):
        Preprocessing.of(processor)


def run(*words: object) -> Any:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def saved(name: str, folder: Path, processor: Any = None, head: str = "classification") -> Any:
    one_layer = {"num_hidden_layers": 1} if name in FAMILIES else {}
    model = {**FAMILIES, **OTHERS}[name].build(head, "default", **one_layer)
    model.save_pretrained(folder)
    height, width = model.config.nominal_size
    (processor or ViTImageProcessor(size={"height": height, "width": width})).save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(a classifier for 16x16 px, the folder of its graph with a processor that makes 20x12 px)."""
    folder = tmp_path_factory.mktemp("plain")
    model = saved("plain", folder / "model", ViTImageProcessor(size={"height": 20, "width": 12}, resample=BICUBIC))
    assert not run("export", folder / "model", folder / "out", "--to", "onnx", "--preprocessing")
    return model, folder / "out"


def test_the_answers_of_processor_and_model(plain: tuple[Any, Path]):
    model, folder = plain
    graph, processor = session_of(folder / "model.onnx"), ViTImageProcessor.from_pretrained(folder)
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


def test_the_certificate_covers_the_processor(plain: tuple[Any, Path], capsys: pytest.CaptureFixture[str]):
    """Noise that is not resized for the results; photographs of other sizes for what the processor makes of them."""
    folder = plain[1]
    certificate = json.loads((folder / "export.json").read_text())
    checks = [(one["pixels"], one["height"], one["width"], one["compares"]) for one in certificate["checks"]]
    assert checks[:2] == [("noise of 8 bits", 20, 12, "results")] * 2
    assert {(pixels, compares) for pixels, _, _, compares in checks[2:]} == {("photograph", "preprocessed")}
    assert len({(height, width) for _, height, width, _ in checks[2:]}) == 4
    assert certificate["pixel_tolerance"] == pytest.approx(1.001 / 127.5)
    assert not run("verify", folder)
    assert "pixel values of resized images by 0.0e+00 (7.9e-03, a step of 1/255)" in capsys.readouterr().out


def test_onto_an_earlier_export_the_remedy_is_force(plain: tuple[Any, Path], tmp_path: Path):
    """Not onto another folder, which --force would not replace either."""
    model, folder = plain[1].parent / "model", plain[1]
    with pytest.raises(UserError, match=r"is not empty; .*, or replace what is in it with --force"):
        export(model, folder, "onnx", preprocessing=True)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty; give a new folder, or empty this one first$"):
        export(model, tmp_path, "onnx", preprocessing=True)


def test_another_filter_stops_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved("plain", tmp_path / "model")
    weights = preprocessing._weights
    monkeypatch.setattr(preprocessing, "_weights", lambda nodes, old, new, _: weights(nodes, old, new, BICUBIC))
    with pytest.raises(UserError, match=r"the graph resizes images differently: .*nothing was written"):
        export(tmp_path / "model", tmp_path / "out", "onnx", preprocessing=True)
    assert not (tmp_path / "out").exists()


def test_the_bytes_of_a_file(tmp_path: Path):
    """In an older opset, too, which the nodes of the processor are written in as those of the model."""
    model = saved("plain", tmp_path / "model")
    assert not run("export", tmp_path / "model", tmp_path / "out", "--to", "onnx", "--decoding", "--opset", "14")
    graph, processor = session_of(tmp_path / "out/model.onnx"), ViTImageProcessor.from_pretrained(tmp_path / "model")
    file = np.frombuffer(encoded(Image.fromarray(chelsea()), "PNG"), np.uint8)
    with torch.no_grad():
        wanted = model(**processor(images=Image.fromarray(chelsea()), return_tensors="pt")).logits.numpy()
    np.testing.assert_allclose(graph.run(["logits"], {"file": file})[0], wanted, rtol=0, atol=1e-5)
    assert verify(tmp_path / "out").holds()


OF_ONE_SIZE = "the image processor makes images of 32x40 px, which the model does not take"
SLOW = ("hybrid", "axial", "bit", "axial_resnet")


@pytest.mark.parametrize("name", ["mixer", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_family(name: str, tmp_path: Path):
    """What takes other sizes than its own takes what the processor makes; a Mixer takes its own."""
    other = ViTImageProcessor(size={"height": 32, "width": 40})
    model = saved(name, tmp_path / "model", other)
    if name == "mixer":
        with pytest.raises(UserError, match=OF_ONE_SIZE):
            export(tmp_path / "model", tmp_path / "out", "onnx", preprocessing=True)
        height, width = model.config.nominal_size
        other = ViTImageProcessor(size={"height": height, "width": width})
        other.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", "onnx", preprocessing=True)
    graph = session_of(tmp_path / "out/model.onnx")
    with torch.no_grad():
        wanted = model(**other(images=Image.fromarray(chelsea()), return_tensors="pt")).logits.numpy()
    tolerance = 6e-5 * max(1, abs(wanted).max())
    np.testing.assert_allclose(graph.run(["logits"], {"images": chelsea()[None]})[0], wanted, rtol=0, atol=tolerance)


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved("plain", tmp_path / "bare", head="model")
    saved("plain", tmp_path / "model")
    ViTImageProcessor(size={"height": 16, "width": 16}, resample=5).save_pretrained(tmp_path / "model")
    for model, options, why in (
        ("bare", {"preprocessing": True}, "need a classifier of RGB images"),
        ("model", {"preprocessing": True}, "resample=HAMMING"),
        ("model", {"decoding": True}, "resample=HAMMING"),
    ):
        with pytest.raises(UserError, match=why):
            export(tmp_path / model, tmp_path / "out", "onnx", **options)
    for option in ("preprocessing", "decoding"):
        with pytest.raises(UserError, match=f"--{option} cannot be combined with --to timm; leave it out"):
            export(tmp_path / "model", tmp_path / "out", "timm", **{option: True})
    assert not (tmp_path / "out").exists()
