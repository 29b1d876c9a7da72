"""A graph that was exported is a subject like any other: commands take its file, and answer as for its model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from models.families import FAMILIES
from PIL import Image
from pyarrow import parquet
from training.conftest import make_colour_folder, save_model
from transformers import ConvNextImageProcessor

import hf_vit
from hf_vit import conversion
from hf_vit.errors import UserError
from hf_vit.loading.model import load_model
from hf_vit.results.facts import append_record, make_record

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("exported_once")]  # of torch's exporter

FILES = {"onnx": "model.onnx", "openvino": "openvino_model.xml"}
Succeeds = Callable[..., str]


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A classifier of colours (random weights), and images."""
    root = tmp_path_factory.mktemp("coloured")
    names = {"id2label": {0: "blue", 1: "green", 2: "red"}, "label2id": {"blue": 0, "green": 1, "red": 2}}
    model = FAMILIES["plain"].build("classification", **names, num_hidden_layers=1)
    return {"MODEL": save_model(model, root / "model"), "DATA": make_colour_folder(root / "colours", count=10)}


@pytest.fixture(scope="module", params=FILES)
def places(request, coloured: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """These, and the model's graph for a runtime."""
    out = tmp_path_factory.mktemp("graph") / "out"
    conversion.export(coloured["MODEL"], out, request.param)
    return {**coloured, "GRAPH": out / FILES[request.param], "FOLDER": out}


@pytest.fixture(scope="module")
def of_images(coloured: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """These, and graphs with the image processor in them, which take images and files."""
    root = tmp_path_factory.mktemp("graph")
    conversion.export(coloured["MODEL"], root / "images", "onnx", preprocessing=True)
    conversion.export(coloured["MODEL"], root / "files", "onnx", decoding=True)
    return {**coloured, "images": root / "images", "files": root / "files"}


def test_the_same_answers_as_the_model(places: dict[str, Path]):
    """To images, and to noise; an image that is not finite spoils no other."""
    graph, model = load_model(places["GRAPH"]), load_model(places["MODEL"], "cpu")
    images = [Image.open(path).convert("RGB") for path in sorted(places["DATA"].rglob("*.png"))[:5]]
    assert graph.label_sets == model.label_sets
    assert torch.equal(graph.prepare(images), model.prepare(images))
    with torch.no_grad():
        given, wanted = (one.model(one.pixel_values(images)).logits for one in (graph, model))
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-5)
    assert graph.fingerprint != model.fingerprint
    checks = json.loads((places["FOLDER"] / "export.json").read_text())["checks"]
    assert [check["pixels"] for check in checks] == ["noise"] * 6 + ["not finite"]
    images = torch.randn(2, 3, 16, 16)
    images[0, :, 3, 3] = torch.nan
    with torch.no_grad():
        given, wanted = (one.model(images).logits for one in (graph, model))
    assert given[0].isnan().all()
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-5, equal_nan=True)


def test_predict(places: dict[str, Path], succeeds: Succeeds):
    image = next(places["DATA"].rglob("*.png"))
    assert succeeds("predict", places["GRAPH"], image) == succeeds("predict", places["MODEL"], image)


@pytest.mark.parametrize("target", ["onnx", "timm", "transformers"])
def test_an_export_keeps_the_thresholds_of_a_multi_label_model_and_the_class_of_its_processor(
    target: str, coloured: dict[str, Path], tmp_path: Path
):
    image, folder = next(coloured["DATA"].rglob("*.png")), shutil.copytree(coloured["MODEL"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"problem_type": "multi_label_classification"}
    (folder / "config.json").write_text(json.dumps(config))
    if target != "timm":
        ConvNextImageProcessor(size={"shortest_edge": 16}, crop_pct=0.5).save_pretrained(folder)  # crops by itself
    (prediction,) = hf_vit.predict(folder, [image])
    (first, best), *others = prediction.scores
    thresholds = {first: (best + 1) / 2} | {name: score / 2 for name, score in others}
    append_record(folder, make_record("evaluation", values={"thresholds": thresholds}))
    conversion.export(folder, tmp_path / "out", target, static=target == "onnx")
    models = [folder, tmp_path / "out"]
    if target == "timm":
        conversion.convert(models[-1], tmp_path / "back")
        models.append(tmp_path / "back")
    for model in models:
        (prediction,) = hf_vit.predict(model, [image])
        assert dict(prediction.scores) == pytest.approx({first: best, **dict(others)}, abs=1e-5)
        assert set(prediction.labels or ()) == {name for name, _ in others}


def test_evaluate_and_compare(places: dict[str, Path], tmp_path: Path, succeeds: Succeeds):
    """As the model, but for attacks: a graph has no gradients."""
    for name in ("MODEL", "GRAPH"):
        succeeds("evaluate", places[name], "--data", places["DATA"], "--output", tmp_path / name)
    written = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("MODEL", "GRAPH")]
    assert written[0] == written[1]
    of_graph, of_model = compared(places["GRAPH"], places, tmp_path / "out", succeeds)
    assert json.loads((tmp_path / "out/speed.json").read_text())["rows"]
    assert of_graph["top1"] == of_model["top1"]
    assert (of_graph["parameters"], of_graph["flops"], of_graph["fgsm"]) == (None, None, None)
    assert "exported graph: it was not attacked, and parameters and FLOPs were not counted" in of_graph["notes"][-1]


def compared(graph: Path, places: dict[str, Path], out: Path, succeeds: Succeeds) -> list[dict[str, Any]]:
    words = ("--speed-turns", "1", "--corruption", "contrast", "--epsilon", "1", "--output", out)
    succeeds("compare", graph, places["MODEL"], "--data", places["DATA"], *words)
    return json.loads((out / "comparison.json").read_text())["models"]


def test_embed_and_protocols_that_judge_features(places: dict[str, Path], tmp_path: Path, succeeds: Succeeds):
    tables, scores = list[np.ndarray](), list[Any]()
    data = ("--data", places["DATA"], "--output")
    for name in ("MODEL", "GRAPH"):
        succeeds("embed", places[name], *data, tmp_path / name, "--split", "test")
        (file,) = (tmp_path / name).glob("*.parquet")
        tables.append(np.stack(parquet.read_table(file)["embedding"].to_pylist()))
        knn = ("--protocol", "knn", "--neighbors", "3")
        succeeds("evaluate", places[name], *data, tmp_path / f"{name} knn", *knn)
        scores.append(json.loads((tmp_path / f"{name} knn/knn.json").read_text())["values"])
    of_model, of_graph = tables
    np.testing.assert_allclose(of_graph, of_model, rtol=0, atol=1e-5)
    assert of_model.std() > 0.1
    assert scores[0] == scores[1]


@pytest.mark.parametrize("threads", [1, 2])
def test_images_of_refused_sizes_are_not_answered(threads: int, places: dict[str, Path], monkeypatch: Any):
    """On one thread OpenVINO gave the answers of the images before."""
    torch.set_num_threads(threads)
    model = load_model(places["GRAPH"]).model
    wanted = model(torch.ones(2, 3, 16, 16)).logits
    for height, width in ((1, 16), (16, 3)):
        remedy = "image_sides_are_smaller_than_4x4_px|; resize them to at least 4x4 px$"
        with pytest.raises(UserError, match=f"the graph cannot run 2 images of {height}x{width} px: .*({remedy})"):
            model(torch.zeros(2, 3, height, width))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # with which OpenVINO computes nothing of some int8 graphs either
    if threads == 1 and places["GRAPH"].suffix == ".xml":
        with pytest.raises(UserError, match=r"under ONEDNN_MAX_CPU_ISA=AVX2 for .*1x16 px; unset it \(the graph"):
            model(torch.zeros(2, 3, 1, 16))
    assert torch.equal(model(torch.ones(2, 3, 16, 16)).logits, wanted)


def test_other_files_are_refused(places: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Graphs of another hand, and files that are none: what OpenVINO has for these would write a log of its own."""
    file = shutil.copytree(places["FOLDER"], tmp_path / "out") / places["GRAPH"].name
    if file.suffix == ".onnx":
        proto = onnx.load(file)
        metadata = {entry.key: entry for entry in proto.metadata_props}
        bands = json.loads(metadata["processor"].value) | {"do_convert_rgb": False, "image_mean": [0.5] * 4}
        metadata["processor"].value = json.dumps(bands)
        onnx.save(proto, file)
        with pytest.raises(UserError, match=r"model\.onnx takes images with num_channels=4; give a model for RGB"):
            load_model(file)
        elsewhere = '{"image_processor_type": "OneFormerImageProcessor", "class_info_file": "private.json"}'
        for key, value, reason in (("labels", "[1]", ""), ("processor", elsewhere, "another repository")):
            metadata[key].value = value
            onnx.save(proto, file)
            with pytest.raises(UserError, match=rf"onnxruntime cannot read .*model\.onnx: .*{reason}.* export the"):
                load_model(file)
        del proto.metadata_props[:]
        onnx.save(proto, file)
    else:
        file.write_text(file.read_text().replace("<labels ", "<names "))
    with pytest.raises(UserError, match=r"has no labels, .* give one that hf-vit export --to"):
        load_model(file)
    file.write_text("no graph")
    with pytest.raises(UserError, match=rf"(onnxruntime|openvino) cannot read .*model\{file.suffix}"):
        load_model(file)
    assert capfd.readouterr() == ("", "")


def test_bench_beside_the_model(places: dict[str, Path], tmp_path: Path, succeeds: Succeeds):
    """Paired by turns; and what torch cannot see of a runtime's memory is not told as a number."""
    words = ("--batch", "1", "--batch", "3", "--turns", "1", "--output", tmp_path / "speed.json")
    succeeds("bench", "saved", places["MODEL"], places["GRAPH"], *words)
    written = json.loads((tmp_path / "speed.json").read_text())
    assert [row["batch"] for row in written["rows"]] == [1, 3]
    assert {".onnx": "onnxruntime", ".xml": "openvino"}[places["GRAPH"].suffix] in written["versions"]
    for row in written["rows"]:
        assert list(row["models"]) == ["model", places["GRAPH"].name]
        of_model, of_graph = row["models"].values()
        ratio = of_graph["images_per_second"]["median"] / of_model["images_per_second"]["median"]
        assert of_graph["times_as_fast"]["median"] == pytest.approx(ratio, rel=1e-2)
        assert of_model["peak_memory"] > 0
        assert of_graph["peak_memory"] is None


def test_what_a_graph_cannot_do_is_refused_in_one_line(places: dict[str, Path], tmp_path: Path, command: Any):
    """Before anything is measured."""
    model, graph, out, data = places["MODEL"], places["GRAPH"], tmp_path / "out", ("--data", places["DATA"])
    for words, message in (
        (("analyze", graph, "--images", places["DATA"], "--output", out), "graph, whose layers cannot be read"),
        (("evaluate", graph, *data, "--protocol", "robustness"), "has no gradients"),
        (("evaluate", graph, *data, "--protocol", "patch-drop"), "has no gradients"),
        (("bench", "saved", model, graph, "--device", "cuda"), "cuda"),
        (("bench", "saved", model, model), "was given twice"),
        (("bench", "models", "Ti/16", "--contestant", graph, "--output", out), "hf-vit bench saved"),
        (("bench", "data", graph, *data), "is an exported graph, which cannot be trained; give the original model"),
        (("soup", graph, model, "--output", out), "or an exported graph, which cannot be averaged"),
    ):
        code, _, told = command(*words)
        assert (code, message in told) == (1, True), told
        assert "Traceback" not in told
        assert words[0] != "bench" or told.count("\n") == 1
        assert not out.exists()
    assert "exported graphs have no weights to compare" in command("diff", graph, graph)[1]


@pytest.mark.parametrize("which", ["images", "files"])
def test_a_graph_with_its_processor_takes_images_of_several_sizes(which: str, of_images: dict[str, Path]):
    graph, model = load_model(of_images[which]), load_model(of_images["MODEL"], "cpu")
    picture = Image.effect_mandelbrot((90, 70), (-2, -1.2, 0.6, 1.2), 60).convert("RGB")
    sizes = ((90, 70), (16, 16), (31, 8), (400, 300))
    images = [picture.resize(size) for size in sizes]
    with torch.no_grad():
        given, wanted = (one.model(one.pixel_values(images)).logits for one in (graph, model))
        alone = graph.model(graph.pixel_values(images[2:3])).logits
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone, wanted[2:3], rtol=0, atol=1e-5)
    assert graph.input_size == model.input_size


def test_commands_feed_a_graph_with_its_processor_images_as_they_are(
    of_images: dict[str, Path], tmp_path: Path, succeeds: Succeeds, command: Any
):
    image, graph = next(of_images["DATA"].rglob("*.png")), of_images["images"]
    assert succeeds("predict", graph, image) == succeeds("predict", of_images["MODEL"], image)
    data = ("--data", of_images["DATA"])
    succeeds("evaluate", graph, *data, "--output", tmp_path / "evaluated")
    of_graph, of_model = compared(graph, of_images, tmp_path / "out", succeeds)
    assert of_graph["top1"] == of_model["top1"]
    assert (of_graph["corruptions"], of_graph["clean"]) == ({}, None)
    assert of_graph["image_size"] == of_model["image_size"]
    assert "exported graph: it was not corrupted or attacked, and param" in of_graph["notes"][-1]
    code, _, told = command("evaluate", graph, *data, "--protocol", "corruptions")
    assert (code, "contains its image processor, so it cannot be attacked" in told) == (1, True)
