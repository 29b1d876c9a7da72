"""`hf-vit verify FOLDER --doors`: the same images through every door, and no code of the folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluation.tiny import NAMES, make_images
from hub.conftest import save_model
from pages.browser import CHROMIUM, RUNTIME
from training.conftest import make_colour_folder

DOORS = ["torch", "pipeline", "handler", "onnxruntime", "openvino", "browser page"]
pytestmark = pytest.mark.usefixtures("exported_once")
Command = Callable[..., tuple[int, str, str]]


# Makes the handler a hundredth surer than the model, and the pipeline's probabilities NaN.
DISTURBED = """
import numpy
import torch
numpy.exp = lambda values: numpy.nan * values
softmax = torch.Tensor.softmax
torch.Tensor.softmax = lambda logits, *given: softmax(logits * 1.01, *given)
"""


@pytest.mark.parametrize(
    ("kind", "is_disturbed"),
    [
        ("single_label_classification", True),
        pytest.param("single_label_classification", False, marks=pytest.mark.slow),  # 25 s: two exports, a new process
        pytest.param("multi_label_classification", False, marks=pytest.mark.slow),
        pytest.param("regression", False, marks=pytest.mark.slow),
    ],
)
def test_every_door_gives_the_same(kind: str, is_disturbed: bool, tmp_path: Path, command: Command, monkeypatch: Any):
    """Of a folder whose own code and handler, as a stranger could have left them, do not run."""
    folder, trace = save_model(tmp_path / "model", problem_type=kind, image_size=8), tmp_path / "trace"
    for file in (*folder.glob("*.py"), folder / "handler.py", folder / "evil.py"):
        file.write_text(f"open({str(trace)!r}, 'w').close()\nfrom transformers import ViTImageProcessor as Evil\n")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["auto_map"] = {"AutoImageProcessor": f"{folder}--evil.Evil"}  # code of another place
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    monkeypatch.setenv("PATH", str(tmp_path))  # where no browser is
    if is_disturbed:
        (tmp_path / "sitecustomize.py").write_text(DISTURBED)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data = make_colour_folder(tmp_path / "colours", count=6)
    code, out, err = command("verify", folder, "--doors", "--data", data)
    assert code == is_disturbed
    differing = "hf-vit: pipeline, handler: answers differ from the torch model's by more than 1e-04"
    assert err.startswith(differing) == is_disturbed
    assert not trace.exists()
    assert "not tried: no Chromium or Chrome" in " ".join(out.replace("│", " ").split())
    result = json.loads((folder / "doors.json").read_text())
    assert [door["name"] for door in result["doors"]] == DOORS
    assert (result["data"]["name"], result["data"]["split"], result["data"]["size"]) == ("colours", "test", 3)
    assert result["doors"][-1]["not_tried"]
    tried = result["doors"][:-1]
    assert [door["largest_difference"] for door in tried if door["name"] == "pipeline" and is_disturbed] in ([], [None])
    for door in (each for each in tried if each["largest_difference"] is not None):
        assert (door["images"], door["equal_labels"]) == (3, 3), door
        assert (door["largest_difference"] > 1e-4) == (is_disturbed and door["name"] == "handler"), door


def test_doors_of_a_model_that_keeps_shapes(tmp_path: Path, command: Command) -> None:
    """All but the pipeline and the page, which resize images to one size."""
    folder = save_model(tmp_path / "model", image_size=8)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"max_num_patches": 12}))
    for number, size in enumerate([(9, 31), (40, 8), (12, 12)] * 3):
        place = tmp_path / "data" / ("train", "validation", "test")[number // 3] / NAMES[number % 3]
        place.mkdir(parents=True)
        make_images(1, side=40)[0].resize(size).save(place / "0.png")
    code, _, err = command("verify", folder, "--doors", "--data", tmp_path / "data")
    assert code == 0, err
    doors = json.loads((folder / "doors.json").read_text())["doors"]
    tried = [door for door in doors if door["not_tried"] is None]
    assert [door["name"] for door in tried] == ["torch", "handler", "onnxruntime", "openvino"]
    assert all(door["largest_difference"] < 1e-5 for door in tried)


@pytest.mark.browser
def test_the_page_in_a_browser_is_a_door(tmp_path: Path, command: Command) -> None:
    folder = save_model(tmp_path / "model", image_size=8)
    assert command("verify", folder, "--doors", "--data", "digits", "--runtime", RUNTIME)[0] == 0
    page = json.loads((folder / "doors.json").read_text())["doors"][-1]
    assert Path(str(CHROMIUM)).name in page["version"].lower()
    assert (page["images"], page["equal_labels"]) == (360, 360)
    assert 0 < page["largest_difference"] < 1e-4


def test_a_folder_is_not_taken_for_a_repository(tmp_path: Path, command: Command) -> None:
    remedy = "add --doors, or, for the repository of this name, run the command in another folder"
    assert f"is a folder, not a repository; {remedy}" in command("verify", tmp_path)[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--doors", "--results"], "--doors takes one --data and --runtime"),
        (["--doors", "--data", "digits", "--data", "photos"], "--doors takes one --data"),
        (["--doors", "--revision", "main"], "--doors takes one --data"),
        (["--runtime", "dist"], "--runtime needs --doors"),
    ],
)
def test_options_that_do_not_belong_are_refused(options: list[str], words: str, command: Command) -> None:
    code, _, err = command("verify", "out/model", *options)
    assert code != 0
    assert words in err
