"""Files and folders in one move: what a process left that is no more goes, and what the system refuses is told."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from hf_vit import UserError
from hf_vit.errors import refusal
from hf_vit.results.delivery import free_folder, new_folder
from hf_vit.results.facts import append_record, is_recorded, new_record
from hf_vit.results.writing import beside, saying_why, write_atomically


@pytest.fixture(scope="module")
def dead() -> int:
    """A process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def left_by(process: int, path: Path, ending: str = "tmp") -> Path:
    name = beside(path, ending).name
    return path.with_name(name.replace(f"-{os.getpid()}-", f"-{process}-"))


def test_what_a_dead_process_left_of_a_file_goes(dead: int, tmp_path: Path):
    path = tmp_path / "facts.json"
    others = [left_by(os.getppid(), path), left_by(dead, tmp_path / "other.json")]
    for remains in (left_by(dead, path), *others):
        remains.write_text("half")
    write_atomically(path, "whole")
    assert path.read_text() == "whole"
    assert set(tmp_path.iterdir()) == {path, *others}


def test_a_folder_that_was_set_aside_is_put_back_before_it_is_judged(dead: int, tmp_path: Path):
    aside = left_by(dead, tmp_path / "model", "former")
    aside.mkdir()
    (aside / "facts.json").touch()
    with pytest.raises(UserError, match="is not empty"):
        free_folder(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_new_folder_bears_the_name_of_its_place(tmp_path: Path):
    with new_folder(tmp_path / "model") as folder:
        assert folder.name == "model"
        assert not (tmp_path / "model").exists()
        (folder / "whole").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "whole"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system; make that disk writable"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded; free some of your space there"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error; have that disk looked after"),
        (SafetensorError("I/O error: Disk quota exceeded (os error 122)"), "quota exceeded; free some of your space"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files; raise the limit of open files (ulimit"),
    ],
)
def test_a_refusal_of_the_system_names_place_reason_and_remedy(error: Exception, said: str, tmp_path: Path):
    """Where a part of it was refused, the whole is named."""
    with pytest.raises(UserError) as told, saying_why(tmp_path / "whole"), saying_why(tmp_path / "part"):
        raise error
    assert str(told.value).startswith(f"{tmp_path / 'whole'} cannot be written: ")
    assert said in str(told.value)
    assert ("another disk" in str(told.value)) == ("ulimit" not in said)


def test_other_errors_stay_what_they_are(tmp_path: Path):
    assert refusal(RuntimeError("something else")) is None
    with pytest.raises(RuntimeError, match="something else"), saying_why(tmp_path):
        raise RuntimeError("something else")


def test_a_record_is_known_by_what_it_holds(tmp_path: Path):
    values = {"analyses": {"cka": {"mean": 0.25, "layers": (1, 2)}}, "skipped": 0}
    append_record(tmp_path, new_record("analysis", values=values, command="hf-vit analyze"))
    assert is_recorded(tmp_path, "analysis", {"analyses": {"cka": {"layers": [1, 2]}}})
    assert not is_recorded(tmp_path, "analysis", {"analyses": {"cka": {"mean": 0.5}}})
    assert not is_recorded(tmp_path, "analysis", {"analyses": {"other": {}}})
    assert not is_recorded(tmp_path, "benchmark", {"skipped": 0})


def test_what_cannot_be_removed_either_does_not_hide_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("touch", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(UserError, match=r"facts\.json cannot be written: Read-only file system; make that disk"):
        write_atomically(tmp_path / "facts.json", "whole")
