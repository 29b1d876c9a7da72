"""ExecuTorch, which pins versions of its own: refused by name without it, and tried in an environment of its own."""

import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from models.families import FAMILIES
from PIL import Image
from pyarrow import parquet
from training.conftest import make_colour_folder

import hf_vit
from hf_vit.conversion.api import export
from hf_vit.data import make_processor
from hf_vit.errors import UserError
from hf_vit.evaluation import predict

NEEDED = ("executorch", "ruamel.yaml", "flatbuffers")


def saved(folder: Path) -> Path:
    model = FAMILIES["plain"].build("classification", num_hidden_layers=1)
    model.save_pretrained(folder)
    make_processor(model.config).save_pretrained(folder)
    return folder


def test_without_the_library_it_is_refused_by_name(tmp_path: Path):
    assert importlib.util.find_spec("executorch") is None, "its own environment is for it: see below"
    model = saved(tmp_path / "model")
    with pytest.raises(UserError, match=r'export to ExecuTorch needs executorch: pip install "hf-vit\[executorch\]"'):
        export(model, tmp_path / "out", "executorch")
    (tmp_path / "model.pte").write_bytes(b"")
    with pytest.raises(UserError, match=r'model\.pte needs executorch: pip install "hf-vit\[executorch\]"'):
        predict(str(tmp_path / "model.pte"), [str(model)])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`hf-vit` in an environment that has ExecuTorch beside the packages of this one."""
    root = tmp_path_factory.mktemp("executorch")
    subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True)
    python = root / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = root / "venv" / "lib" / version / "site-packages"
    places = [str(Path(hf_vit.__file__).parents[1]), *{sysconfig.get_path("purelib"), *site_packages()}]
    (packages / "beside.pth").write_text("\n".join(places))
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *NEEDED], check=True)
    return [str(python), "-c", "from hf_vit_cli.main import main; main()"]


def site_packages() -> list[str]:
    return [place for place in sys.path if place.endswith("site-packages")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_program_answers_as_its_model(program: list[str], tmp_path: Path):
    """Exported, verified, and asked by the same commands as the model; nothing of ExecuTorch's log is seen."""
    saved(tmp_path / "model")
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
    assert re.fullmatch(r"hf-vit: the graph refuses images of 16x16 px, 65 at once: .*\n", too_many.stderr)
