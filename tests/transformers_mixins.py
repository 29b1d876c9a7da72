"""transformers' own model tests (`ModelTesterMixin`), which only its source distribution carries.

`python tests/transformers_mixins.py` (a step of `make test`) downloads the source distribution of the installed
version into .cache/ and keeps its tests; `load` imports one of them. Nothing of it is kept in this repository.
"""

import importlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from types import ModuleType

import transformers

FOLDER = Path(__file__).parents[1] / ".cache" / f"transformers-{transformers.__version__}-tests"
PACKAGE = "transformers_own_tests"
# Siblings that the mixins import but the distribution lacks: tests of text generation and of exporters.
MISSING = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def download() -> None:
    """Fetch the tests of the installed transformers, once."""
    if FOLDER.is_dir():
        return
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as temporary:
        requirement = f"transformers=={transformers.__version__}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--no-binary", ":all:", "--dest", temporary, requirement], check=True)
        (archive,) = Path(temporary).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            tests = [member for member in opened.getmembers() if "/tests/" in member.name]
            opened.extractall(temporary, members=tests, filter="data")
        (unpacked,) = Path(temporary).glob("*/tests")
        shutil.move(unpacked, FOLDER)


def load(name: str) -> ModuleType:
    """Import one of transformers' test modules, for example "test_modeling_common"."""
    if PACKAGE not in sys.modules:
        _package(PACKAGE, [str(FOLDER)])
        for module, mixin in MISSING.items():
            _package(f"{PACKAGE}.{module.split('.')[0]}", [])
            stand_in = _package(f"{PACKAGE}.{module}", [])
            setattr(stand_in, mixin, type(mixin, (), {}))
    return importlib.import_module(f"{PACKAGE}.{name}")


def _package(name: str, path: list[str]) -> ModuleType:
    package = types.ModuleType(name)
    package.__path__ = path
    sys.modules[name] = package
    return package


if __name__ == "__main__":
    download()
