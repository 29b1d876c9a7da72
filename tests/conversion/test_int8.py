"""int8: fitted to images by our own means or NNCF's, judged by images that they have not seen, or not written."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from models.families import FAMILIES
from onnxscript import ir
from PIL import Image
from torch.onnx import ONNXProgram
from training.conftest import save_model
from transformers import ViTImageProcessor

from hf_vit.conversion import export
from hf_vit.conversion.targets.graphs import certificate as certificates
from hf_vit.conversion.targets.graphs import int8
from hf_vit.conversion.targets.graphs.certificate import verify
from hf_vit.conversion.targets.graphs.int8 import Calibration, choose_float_parts, estimate_agreement
from hf_vit.conversion.targets.graphs.runtimes import get_openvino_core
from hf_vit.errors import UserError
from hf_vit.loading.model import load_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of exporters and quantisers
    pytest.mark.usefixtures("exported_once"),
]

COLOURS = ("blue", "green", "red")


def pixels(colour: int, number: int) -> np.ndarray:
    random = np.random.default_rng([colour, number])
    image = random.integers(0, 120, (16, 16, 3))
    image[..., 2 - colour] += 60 + random.integers(60)
    return image.astype(np.uint8)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A classifier of colours, whose head is fitted to what its random layers see, and images of them."""
    root = tmp_path_factory.mktemp("int8")
    for split, count in {"train": 40, "validation": 1, "test": 70}.items():
        for colour, name in enumerate(COLOURS):
            (root / "data" / split / name).mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(pixels(colour, number + 1000 * (split == "test")))
                image.resize((24, 20)).save(root / "data" / split / name / f"{number}.png")
    names = {"id2label": dict(enumerate(COLOURS)), "label2id": {name: i for i, name in enumerate(COLOURS)}}
    model: Any = FAMILIES["plain"].build("classification", "rotary_gap", **names, num_hidden_layers=2)
    given = np.stack([pixels(colour, number) for colour in range(3) for number in range(40)])
    with torch.no_grad():
        images = torch.from_numpy(given).permute(0, 3, 1, 2) / 127.5 - 1
        features = model.vit(images).pooler_output
        wanted = torch.eye(3).repeat_interleave(40, 0) * 8 - 4
        with_one = torch.cat([features, torch.ones(len(features), 1)], dim=1)
        fitted = torch.linalg.lstsq(with_one.T @ with_one + 0.01 * torch.eye(33), with_one.T @ wanted).solution
        model.classifier.weight.copy_(fitted[:-1].T)
        model.classifier.bias.copy_(fitted[-1])
    return {"model": save_model(model, root / "model"), "data": root / "data"}


# Which take half a minute each.
SLOW = (
    *((to, "static", "--preprocessing") for to in ("onnx", "openvino")),
    ("onnx", "dynamic", "--static"), ("onnx", "static", "--decoding"), ("openvino", "static", "--static"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("to", "mode", "more"),
    [
        ("onnx", "static", "--static"),
        ("openvino", "dynamic", "--static"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_what_the_certificate_says_of_int8(
    to: str,
    mode: str,
    more: str,
    places: dict[str, Path],
    tmp_path: Path,
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    """Agreement and accuracy, measured again with both models; int8 weights; temporary files lie beside the output."""
    output = tmp_path / "int8, again"
    folders, make, before = list[str](), tempfile.mkdtemp, tempfile.tempdir

    def watched(*arguments: Any, **named: Any) -> str:
        folders.append(make(*arguments, **named))
        return folders[-1]

    source = places["model"]
    if is_multi_label := to == "openvino":
        source = shutil.copytree(source, tmp_path / "multi-label")
        config = json.loads((source / "config.json").read_text()) | {"problem_type": "multi_label_classification"}
        (source / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(tempfile, "mkdtemp", watched)
    words = ("--to", to, "--quantize", mode, "--calibrate", places["data"], more)
    code, told, refusal = command("export", source, output, *words)
    monkeypatch.undo()
    assert code == 0, refusal
    assert [folder for folder in folders if not Path(folder).is_relative_to(tmp_path)] == []
    assert tempfile.tempdir == before
    certificate = json.loads((output / "export.json").read_text())
    said = certificate["quantization"]
    graph, model = load_model(output), load_model(places["model"], "cpu")
    files = [(path, COLOURS.index(path.parent.name)) for path in sorted((places["data"] / "test").rglob("*.png"))]
    images = [Image.open(path).convert("RGB") for path, _ in files]
    with torch.no_grad():
        ours, theirs = (each.model(each.pixel_values(images)).logits for each in (model, graph))
    labels = torch.tensor([label for _, label in files])
    assert (said["mode"], said["held_out_images"], said["layers"]) == (mode, 210, 13)
    assert said["accuracy"] == pytest.approx(float((theirs.argmax(1) == labels).double().mean()), abs=0.005)
    assert said["float_accuracy"] == float((ours.argmax(1) == labels).double().mean())
    assert said["agreement"] == pytest.approx(float((theirs.argmax(1) == ours.argmax(1)).double().mean()), abs=0.005)
    assert said["agreement"] >= 0.995
    assert said["float_accuracy"] > 0.9
    assert f"{said['agreement']:.2%} of 210 held-out images get the model's class" in told
    assert ("the other labels of this multi-label model were not compared" in told) == is_multi_label
    assert 1e-4 < float((ours - theirs).norm() / ours.norm()) < 0.15
    assert int8_weights(output)
    assert certificate["takes"] == {"--preprocessing": "images", "--decoding": "file"}.get(more, "pixel_values")
    checked = {(check["pixels"], check["compares"]) for check in certificate["checks"]}
    of_images = {("noise of 8 bits", "results"), ("photograph", "preprocessed")}
    assert checked == (of_images if more != "--static" else {("noise", "results")})
    verify(output)


def test_a_name_of_two_classes_judges_no_accuracy():
    """Which of the two an image shows, its name does not tell; where the data has neither, all is as ever."""
    logits = torch.eye(3)
    config = SimpleNamespace(id2label={0: "crane", 1: "cat", 2: "crane"}, num_labels=3)
    outgoing: Any = SimpleNamespace(config=config, folder=Path(), compute_results=lambda pixel_values: pixel_values)
    opened = SimpleNamespace(run=lambda given: {"logits": torch.tensor(given)})
    runtime: Any = SimpleNamespace(file="", open=lambda file: opened)
    for names, wanted in ((["cat", "crane"], (1.0, None, None)), (["cat"], (1.0, 1 / 3, 1 / 3))):
        batch = (logits.numpy(), logits, torch.zeros(3, dtype=torch.long))
        data: Any = SimpleNamespace(
            data=SimpleNamespace(label_names=names),
            judging=SimpleNamespace(iterate_labeled_batches=lambda batch=batch: [batch]),
        )
        assert certificates.measure_agreement(outgoing, runtime, data) == pytest.approx(wanted)


def int8_weights(folder: Path) -> list[np.ndarray]:
    """Those of dense layers, without zero points."""
    if (folder / "openvino_model.xml").is_file():
        operations = get_openvino_core().read_model(folder / "openvino_model.xml").get_ops()
        found = [each.data for each in operations if each.get_type_name() == "Constant"]
    else:
        found = [onnx.numpy_helper.to_array(each) for each in onnx.load(folder / "model.onnx").graph.initializer]
    return [each for each in found if each.dtype == np.int8 and each.ndim == 2]


@pytest.mark.parametrize(
    ("to", "mode"),
    [("onnx", "dynamic"), *(pytest.param(to, "static", marks=pytest.mark.slow) for to in ("onnx", "openvino"))],
)
def test_without_vnni_sums_of_two_products_fit_into_16_bits(
    to: str, mode: Any, places: dict[str, Path], tmp_path: Path, processor: Callable[..., None]
):
    """Processors with AVX2 or AVX-512 alone cut them off: a third of the logits' length, in this model.

    Unreadable images are left out, as the command has no option for them.
    """
    processor()
    (places["data"] / "train/red/unreadable.png").touch()
    export(places["model"], tmp_path / "out", to, static=True, quantize=mode, calibrate=str(places["data"]))
    weights = int8_weights(tmp_path / "out")
    assert len(weights) >= 12  # of 13; a part may stay in float
    assert max(2 * 255 * abs(each.astype(int)).max() for each in weights) < 2**15
    load_model(tmp_path / "out")
    with np.load(tmp_path / "out" / "export.npz") as arrays:
        elsewhere = [arrays[name] * 1.3 for name in arrays.files]
    np.savez(tmp_path / "out" / "export.npz", *elsewhere)
    with pytest.raises(UserError, match=r"different results on this machine .* or export the model again on this"):
        load_model(tmp_path / "out")
    (tmp_path / "out" / "export.json").rename(tmp_path / "away.json")
    with pytest.raises(UserError, match=r"is in int8, .* its export\.json is missing.* export the model again"):
        load_model(tmp_path / "out")
    processor(avx512_vnni=True)
    load_model(tmp_path / "out")


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_int8_of_onnxruntime_is_fitted_to_tokens_and_images(
    mode: Any, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No image changes another's answer; on what a layer reads, its weights err less than the nearest ones would."""
    has_second_file = mode == "static"  # as a graph with more than 2 GB of weights
    monkeypatch.setattr(ONNXProgram, "save", partialmethod(ONNXProgram.save, external_data=has_second_file))
    export(places["model"], tmp_path / "out", "onnx", static=True, quantize=mode, calibrate=str(places["data"]))
    assert (tmp_path / "out/model.onnx.data").exists() == has_second_file
    graph, model = load_model(tmp_path / "out").model, load_model(places["model"], "cpu").model
    given = torch.from_numpy(np.stack([pixels(colour, number) for colour in range(3) for number in range(40)]))
    images = given.permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        beside_a_bright_one = graph(torch.cat([images[:1], 30 * images[50:51]])).logits[:1]
        torch.testing.assert_close(beside_a_bright_one, graph(images[:1]).logits, rtol=1e-5, atol=1e-5)
    read = list[torch.Tensor]()
    layer = model.vit.layers[1].mlp.fc2  # the norms of others are changed with their weights
    layer.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0].flatten(0, -2)))
    with torch.no_grad():
        model(images)
    tensors = onnx.load(tmp_path / "out" / "model.onnx").graph.initializer
    weights = {each.name: onnx.numpy_helper.to_array(each) for each in tensors if "layers.1.mlp.fc2/" in each.name}
    rounded, scales = (
        torch.tensor(values)
        for part in ("/weight", "/scales")
        for name, values in weights.items()
        if name.endswith(part)
    )
    nearest = (layer.weight / scales[:, None]).round() * scales[:, None]
    errors = [float((read[0] @ (each - layer.weight).T).norm()) for each in ((rounded * scales).T, nearest)]
    assert 0 < errors[0] < 0.9 * errors[1]


class EyesOfFour:
    """100 images that are the logits themselves."""

    pixels = torch.eye(4).repeat(25, 1)

    def __len__(self) -> int:
        return len(self.pixels)

    def first(self, count: int) -> "EyesOfFour":
        return self


def test_what_breaks_answers_stays_in_float():
    """Of four parts one turns all answers, one some: both are found, and no more stay in float."""
    images = EyesOfFour()
    parts = {name: [f"{name}.{i}" for i in range(2)] for name in ("a", "b", "c", "d")}
    data: Any = Calibration(None, images, images, images)  # pyright: ignore[reportArgumentType]

    def answers(layers: Any, _: torch.Tensor) -> Any:
        broken = torch.eye(4)
        if "b.0" in layers:
            broken = broken.roll(1, 0)
        if "d.0" in layers:
            broken[0, 0] = -1
        return lambda given: given.pixels @ broken + 1e-3 * ("a.1" in layers)

    chosen = choose_float_parts(answers, lambda given: given.pixels, parts, data)
    assert list(chosen) == ["b", "d"]

    def all_broken(layers: Any, _: torch.Tensor) -> Any:
        return lambda given: -given.pixels

    with pytest.raises(UserError, match=r"only 0\.00% of 100 images keep their class, even with half of .* 4 parts"):
        choose_float_parts(all_broken, lambda given: given.pixels, parts, data)
    # One of a hundred images changes: too many where 99.5% are required of others, few enough for 97%.
    lenient = replace(data, agreement=0.97)

    def one_changed(layers: Any, _: torch.Tensor) -> Any:
        signs = torch.ones(100, 1)
        signs[0] = -1 if "d.0" in layers else 1
        return lambda given: given.pixels * signs

    assert choose_float_parts(one_changed, lambda given: given.pixels, parts, lenient) == {}
    assert list(choose_float_parts(one_changed, lambda given: given.pixels, parts, data)) == ["d"]
    # No part makes up for it: without margin, but with the share that is required, the best is kept, quantized last.
    quantized = list[int]()

    def always_changed(layers: Any, _: torch.Tensor) -> Any:
        quantized.append(len(layers))
        return one_changed(["d.0"], _)

    enough = replace(data, agreement=0.989)
    assert choose_float_parts(always_changed, lambda given: given.pixels, parts, enough) == {}
    assert quantized[-1] == 8


def test_the_share_that_stays_is_foretold_better_than_counted():
    """Of 400 draws of 400 images, whose share is known from 200,000: 0.7 of a count's error at most, no bias."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        ours = 3 * torch.randn(count, 5, generator=generator)
        return ours, ours + 0.02 * torch.randn(count, 5, generator=generator)

    def counted(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((ours.argmax(1) == theirs.argmax(1)).double().mean())

    share = counted(*drawn(200_000))
    draws = [drawn(400) for _ in range(400)]
    expected, counts = (torch.tensor([ask(*draw) for draw in draws]) for ask in (estimate_agreement, counted))
    assert 0.99 < share < 0.998
    assert float(expected.mean()) == pytest.approx(share, abs=3e-4)
    assert (expected - share).std() < 0.7 * (counts - share).std()


def test_a_missed_bound_stops_the_export_with_the_figure(
    places: dict[str, Path], tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
):
    """The message names the option that accepts what was measured; the option is told before, and is recorded."""
    monkeypatch.setattr(certificates, "measure_agreement", lambda *_: (0.975, 0.9, 0.924))
    words = (places["model"], tmp_path / "out", "--to", "onnx", "--static", "--quantize", "dynamic")
    words += ("--calibrate", places["data"])
    code, told, error = command("export", *words)
    assert (code, told) == (1, "")
    assert "in int8 97.50% of 210 held-out images" in error
    assert "at least 99.50% and a loss of at most 0.30 points of accuracy are required" in error
    assert "accept it with --agreement 0.96, " in error  # of the 4% that may change 60% may be lost
    assert not (tmp_path / "out").exists()
    assert command("export", *words, "--agreement", "98")[:2] == (1, "")
    code, told, _ = command("export", *words, "--agreement", "0.96")
    assert (code, "(96.00% required)" in told) == (0, True)
    certificate = json.loads((tmp_path / "out" / "export.json").read_text())
    (record,) = json.loads((tmp_path / "out" / "facts.json").read_text())
    for quantization in (certificate["quantization"], record["values"]["quantization"]):
        assert (quantization["agreement"], quantization["required_agreement"]) == (0.975, 0.96)


def starve(*_: object, **__: object) -> None:
    """No file can be opened any more, in any library."""
    with open(os.devnull) as file:
        setrlimit(RLIMIT_NOFILE, (file.fileno(), getrlimit(RLIMIT_NOFILE)[1]))


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be moved or removed any more."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for name in ("rename", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, refuse)


@pytest.mark.parametrize("reason", ["Too many open files; raise the limit", "Permission denied; make that folder"])
def test_why_nothing_could_be_written_is_told(reason: str, places: dict[str, Path], tmp_path: Path, monkeypatch):
    """What cannot be removed is an error of its own."""
    before, save = getrlimit(RLIMIT_NOFILE), ir.save

    def starve_when_it_begins(*arguments: Any, **options: Any) -> None:
        if "denied" not in reason:
            starve()
        save(*arguments, **options)

    choose_first = int8.choose_float_parts

    def forbid_when_chosen(*arguments: Any) -> Any:
        chosen = choose_first(*arguments)
        forbid(monkeypatch)
        return chosen

    monkeypatch.setattr(ir, "save", starve_when_it_begins)
    monkeypatch.setattr(int8, "choose_float_parts", forbid_when_chosen)
    given: Any = {"static": True, "quantize": "dynamic", "calibrate": str(places["data"])}
    try:
        with pytest.raises(UserError) as told:
            export(places["model"], tmp_path / "out", "onnx", **given)
    finally:
        setrlimit(RLIMIT_NOFILE, before)
        monkeypatch.undo()
    assert str(told.value).startswith(f"{tmp_path / 'out'} cannot be written: {reason}")
    assert not (tmp_path / "out").exists()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no images": ({"to": "onnx", "quantize": "static"}, "--quantize static needs images for calibration; add"),
    "nothing to do": ({"to": "onnx", "calibrate": "DATA"}, "--calibrate is only used with --quantize; add --quantize"),
    "no such mode": ({"to": "onnx", "quantize": "int4", "calibrate": "DATA"},
        "--quantize int4 cannot be combined with --to onnx; use --quantize dynamic or"),
    "not of this target": ({"to": "openvino", "quantize": "int4", "calibrate": "DATA"},
        "--quantize int4 cannot be combined with --to openvino; use --quantize dynamic or --quantize static"),
    "another target": ({"to": "timm", "quantize": "static"}, "--quantize cannot be combined with --to timm; leave it"),
    "too few": ({"to": "onnx", "quantize": "static", "calibrate": "FEW"},
        r"FEW has \d+ training and \d+ test images, but int8 needs at least 64"),
    "a bare model": ({"to": "onnx", "quantize": "static", "calibrate": "DATA", "model": "BARE"},
        "compares predicted classes"),
    "one band": ({"to": "onnx", "quantize": "static", "calibrate": "FEW", "model": "GRAY"},
        "GRAY takes images with num_channels=1; give a model for RGB images"),
    "a share in percent": ({"to": "onnx", "quantize": "static", "calibrate": "DATA", "agreement": 98},
        "--agreement 98 is out of range; give a share of images above 0 and up to 1"),
    "nothing to compare": ({"to": "onnx", "agreement": 0.98}, "--agreement is only used with --quantize"),
    "no data": ({"to": "onnx", "quantize": "static", "calibrate": "NONE"}, "NONE"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_before_any_work(case: str, places: dict[str, Path], tmp_path: Path):
    options, message = BAD[case]
    for name, colour in (("blue", 2), ("red", 0)):
        (tmp_path / "FEW" / name).mkdir(parents=True)
        for number in range(30):
            Image.fromarray(pixels(colour, number)).save(tmp_path / "FEW" / name / f"{number}.png")
    save_model(FAMILIES["plain"].build("model", num_hidden_layers=1), tmp_path / "BARE")
    FAMILIES["plain"].build("classification", num_hidden_layers=1, num_channels=1).save_pretrained(tmp_path / "GRAY")
    ViTImageProcessor(image_mean=[0.5], image_std=[0.5], do_convert_rgb=False).save_pretrained(tmp_path / "GRAY")
    there = {"DATA": str(places["data"]), **{name: str(tmp_path / name) for name in ("FEW", "NONE", "BARE", "GRAY")}}
    given: Any = {name: there.get(value, value) for name, value in options.items()}
    with pytest.raises(UserError, match=message):
        export(given.pop("model", places["model"]), tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
