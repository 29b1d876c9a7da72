"""A graph with the image processor in it is a subject like any other, which is fed images as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES
from PIL import Image
from training.conftest import make_colour_folder

from hf_vit import conversion
from hf_vit.data import make_processor
from hf_vit.subjects.subject import open_subject
from hf_vit_cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A classifier of colours (random weights), its graphs that take images and files, and images."""
    root = tmp_path_factory.mktemp("graph")
    names = {"id2label": {0: "blue", 1: "green", 2: "red"}, "label2id": {"blue": 0, "green": 1, "red": 2}}
    model = FAMILIES["plain"].build("classification", **names, num_hidden_layers=1)
    model.save_pretrained(root / "model")
    make_processor(model.config).save_pretrained(root / "model")
    conversion.export(root / "model", root / "images", "onnx", preprocessing=True)
    conversion.export(root / "model", root / "files", "onnx", decoding=True)
    return {
        "model": root / "model",
        "images": root / "images",
        "files": root / "files",
        "data": make_colour_folder(root / "colours", count=10),
    }


def run(*words: object) -> Any:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


@pytest.mark.parametrize("which", ["images", "files"])
def test_images_of_several_sizes_in_a_batch(which: str, places: dict[str, Path]):
    graph, model = open_subject(places[which]), open_subject(places["model"], "cpu")
    picture = Image.effect_mandelbrot((90, 70), (-2, -1.2, 0.6, 1.2), 60).convert("RGB")
    sizes = ((90, 70), (16, 16), (31, 8), (400, 300))
    images = [picture.resize(size) for size in sizes]
    with torch.no_grad():
        given, wanted = (one.model(one.pixel_values(images)).logits for one in (graph, model))
        alone = graph.model(graph.pixel_values(images[2:3])).logits
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone, wanted[2:3], rtol=0, atol=1e-5)
    assert graph.input_size == model.input_size


def test_commands(places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    image, graph = next(places["data"].rglob("*.png")), places["images"]
    printed = list[str]()
    for source in (places["model"], graph):
        assert not run("predict", source, image)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    data = ("--data", places["data"])
    assert not run("evaluate", graph, *data, "--output", tmp_path / "evaluated")
    words = ("--speed-turns", "1", "--corruption", "contrast", "--epsilon", "1")
    assert not run("compare", graph, places["model"], *data, "--output", tmp_path / "out", *words)
    of_graph, of_model = json.loads((tmp_path / "out/comparison.json").read_text())["models"]
    assert of_graph["top1"] == of_model["top1"]
    assert (of_graph["corruptions"], of_graph["clean"]) == ({}, None)
    assert of_graph["notes"][-1] == "a graph: neither corrupted nor attacked, parameters and FLOPs not counted"
    assert run("evaluate", graph, *data, "--protocol", "corruptions") == 1
    assert "resizes images itself; attacks and corruptions change what a model is fed" in capsys.readouterr().err
