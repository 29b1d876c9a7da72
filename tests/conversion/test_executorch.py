"""ExecuTorch, which pins versions of its own: refused by name without it, and tried in an environment of its own."""

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from models.families import FAMILIES
from PIL import Image

import hf_vit
from hf_vit.conversion.api import export
from hf_vit.data import make_processor
from hf_vit.errors import UserError

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
        hf_vit.evaluation.predict(str(tmp_path / "model.pte"), [str(model)])


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
    """Exported, verified, and asked by the same command as the model."""
    saved(tmp_path / "model")
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "image.png")

    def told(*words: str) -> str:
        done = subprocess.run([*program, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout

    assert "measured with executorch" in told("export", "model", "out", "--to", "executorch")
    assert "checks repeated with executorch" in told("verify", "out")
    assert told("predict", "out", "image.png") == told("predict", "model", "image.png", "--device", "cpu")
