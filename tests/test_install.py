"""What works with the direct dependencies alone, and what a command says that needs an extra of this package."""

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from loopback.client import Loopback

ROOT = Path(__file__).parents[1]
EXTRAS = ("sklearn", "scipy", "skimage", "matplotlib", "torchdata", "tenacity", "lazy_loader", "timm", "onnx", "ray")

PROGRAM = """
import contextlib, importlib.util, io, json, sys

folder, extras = sys.argv[1], json.loads(sys.argv[2])
assert [name for name in extras if importlib.util.find_spec(name)] == []

import torch
from PIL import Image
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments, ViTImageProcessor

import hf_vit
from hf_vit_cli.main import main

tiny = dict(image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=2)
model = AutoModelForImageClassification.from_config(hf_vit.HfViTConfig(intermediate_size=16, **tiny))
torch.nn.init.normal_(model.classifier.weight)
rows = [{"pixel_values": torch.rand(3, 16, 16), "labels": number % 2} for number in range(8)]
quiet = dict(report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, per_device_train_batch_size=4)
trainer = Trainer(model, TrainingArguments(f"{folder}/run", max_steps=2, **quiet), train_dataset=rows)
assert trainer.train().global_step == 2
trainer.save_model(f"{folder}/model")
ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(f"{folder}/model")
loaded = AutoModelForImageClassification.from_pretrained(f"{folder}/model").eval()
assert type(loaded) is hf_vit.HfViTForImageClassification
with torch.inference_mode():
    pixels = torch.rand(2, 3, 16, 16)
    before = loaded(pixels).logits
    hf_vit.optimize_for_inference(loaded)
    assert torch.allclose(loaded(pixels).logits, before, atol=1e-5)
with open(f"{folder}/model/README.md", "w") as card:
    card.write("---\\nlicense: apache-2.0\\n---\\nA tiny model.\\n")
hf_vit.push_to_hub(f"{folder}/model", "alice/tiny")
Image.new("RGB", (20, 20)).save(f"{folder}/a.png")

for line in sys.stdin.read().splitlines():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as heard:
        try:
            main(line.format(folder=folder).split())
        except SystemExit as ended:
            code = ended.code
    print("ANSWER", json.dumps([line, code, heard.getvalue()]))
"""
WORKING = (
    "--help", "predict {folder}/model {folder}/a.png", "cost S/16", "models papers", "recipes",
    "export {folder}/model {folder}/theirs --to transformers", "convert {folder}/theirs {folder}/back",
    "card {folder}/back --license apache-2.0", "push {folder}/back alice/back", "verify alice/back",
)  # fmt: skip
# A command -> what it needs, and the extra.
REFUSED = {
    "demo --output {folder}/demo": ("scikit-learn and matplotlib", "train"),
    "finetune {folder}/model --data digits --output {folder}/out": ("scikit-learn and matplotlib", "train"),
    "pretrain S/16 --data digits --output {folder}/out": ("scikit-learn and matplotlib", "train"),
    "evaluate {folder}/model --data digits": ("scikit-learn and matplotlib", "train"),
    "soup {folder}/model {folder}/model --output {folder}/out": ("scikit-learn and matplotlib", "train"),
    "compare {folder}/model S/16 --data digits --output {folder}/out": ("scikit-learn and matplotlib", "train"),
    "analyze {folder}/model --output {folder}/out": ("scikit-learn and matplotlib", "analysis"),
    "scaling-law {folder}/points.csv": ("scipy and matplotlib", "train"),
    "data digits": ("scikit-learn", "train"),
    "export {folder}/model {folder}/onnx --to onnx": ("onnx", "export"),
    "export {folder}/model {folder}/openvino --to openvino": ("onnx", "export,openvino"),
    "export {folder}/model {folder}/executorch --to executorch": ("executorch", "executorch"),
    "export {folder}/model {folder}/timm --to timm": ("timm", "timm"),
    "page {folder}/model --output {folder}/page": ("onnx", "export"),
    "embed {folder}/model --data {folder}/model --output {folder}/rows --runner ray": ("Ray", "ray"),
    "convert timm:vit_tiny_patch16_224 {folder}/timm": ("timm", "timm"),
}


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of a fresh environment with the direct dependencies and what they bring (some GB)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    constraints, folder = (ROOT / "constraints.txt").read_text(), ROOT / "build/small"
    wanted = "\n".join((*project["dependencies"], constraints))
    done = folder / "done"
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin/pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
        subprocess.run([*pip, *project["dependencies"]], check=True)
        done.write_text(wanted)
    return folder / "bin/python"


def test_a_name_whose_import_needs_a_missing_library_tells_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = "from hf_vit.environment import make_lazy_names\n__getattr__, *_ = make_lazy_names(__name__, __file__)"
    (tmp_path / "mine").mkdir()
    for file, text in (
        ("__init__.py", lazy),
        ("__init__.pyi", "from .inner import name"),
        ("inner.py", "import scipy"),
    ):
        (tmp_path / "mine" / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ModuleNotFoundError, match=r'^this needs scipy; install with pip install "hf-vit\[train\]"$'):
        _ = importlib.import_module("mine").name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_direct_dependencies_are_enough(python: Path, loopback_server: Loopback, tmp_path: Path) -> None:
    """Import, Auto classes, the stock Trainer, optimizing, sharing and the commands; others name what they need."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    hub = {"HF_ENDPOINT": loopback_server.endpoint, "HF_TOKEN": "hf_alice_write", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [python, "-c", PROGRAM, str(tmp_path), json.dumps(EXTRAS)],
        input="\n".join((*WORKING, *REFUSED)),
        env=kept | hub | {"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    answers = {line: (code, heard) for line, code, heard in map(json.loads, printed)}
    assert {line: answers[line] for line in WORKING if answers[line][0] != 0} == {}
    for line, (needed, extra) in REFUSED.items():
        code, heard = answers[line]
        assert (code, heard.count("\n")) == (1, 1), (line, heard)
        assert f"needs {needed}" in heard, (line, heard)
        assert f"hf-vit[{extra}]" in heard or f"pip install {extra}" in heard, (line, heard)


@pytest.mark.slow  # a minute
def test_the_steps_of_the_dockerfile_run(tmp_path: Path) -> None:
    """Without docker and the network: pip finds all but this package among what is installed here."""
    site, found = Path(sysconfig.get_path("purelib")), tmp_path / "installed"
    found.mkdir()
    for entry in site.iterdir():
        if not entry.name.startswith(("hf_vit", "__editable__", "__pycache__")):
            (found / entry.name).symlink_to(entry)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON", "PIP_"))}
    offline = {"PYTHONPATH": str(found), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    command = [sys.executable, str(ROOT / "tests/dockerfile.py"), str(tmp_path / "image")]
    done = subprocess.run(command, env=kept | offline, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"hf-vit {version}\n" in done.stdout
    assert "finetune" in done.stdout.split("$ hf-vit --help\n")[1]
    (package,) = (tmp_path / "image/venv").glob("lib/python*/site-packages/hf_vit")
    assert (package / "conversion/api.py").is_file()
