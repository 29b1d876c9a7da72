"""Files and folders in one move: what a process left that is no more goes, and what the system refuses is told."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import hf_vit
from hf_vit import UserError
from hf_vit.errors import explain_refusal
from hf_vit.results.delivery import deliver_folder, prepare_output
from hf_vit.results.facts import append_record, make_record
from hf_vit.writing import explain_write_errors, make_hidden_path, write_atomically


@pytest.fixture(scope="module")
def dead() -> int:
    """A process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def left_by(process: int, path: Path, ending: str = "tmp") -> Path:
    name = make_hidden_path(path, ending).name
    return path.with_name(name.replace(f"-{os.getpid()}-", f"-{process}-"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_dead_process_left_goes(kind: str, dead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a process is writing stays, what is of another machine, and what is of another output."""
    monkeypatch.setattr("socket.gethostname", lambda: "pod-of-a-long-name-in-a-cluster-whose-number-comes-last-1")
    path = tmp_path / "output"
    mine = left_by(dead, path)
    others = [left_by(os.getppid(), path), left_by(dead, tmp_path / "other")]
    others.append(mine.with_name(mine.name.replace(f"-{dead}-", f"x-{dead}-")))
    monkeypatch.setattr("socket.gethostname", lambda: "pod-of-a-long-name-in-a-cluster-whose-number-comes-last-2")
    others.append(left_by(dead, path))
    monkeypatch.setattr("socket.gethostname", lambda: "pod-of-a-long-name-in-a-cluster-whose-number-comes-last-1")
    for remains in (mine, *others):
        if kind == "folder":
            remains.mkdir()
        (remains / "half" if kind == "folder" else remains).touch()
    if kind == "file":
        write_atomically(path, "whole")
    else:
        with deliver_folder(path) as folder:
            (folder / "whole").touch()
    assert set(tmp_path.iterdir()) == {path, *others}


def test_a_folder_that_was_set_aside_is_put_back_before_it_is_judged(dead: int, tmp_path: Path):
    aside = left_by(dead, tmp_path / "model", "former")
    aside.mkdir()
    (aside / "facts.json").touch()
    with pytest.raises(UserError, match="is not empty"):
        prepare_output(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_process_of_the_same_number_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in containers, where every run may be process 1."""
    mine, earlier = make_hidden_path(tmp_path / "facts.json", "tmp"), make_hidden_path(tmp_path / "model", "former")
    mine.touch()
    earlier.mkdir()
    write_atomically(tmp_path / "facts.json", "whole")
    assert mine.exists()
    monkeypatch.setattr("hf_vit.writing._TOKENS", set[str]())
    write_atomically(tmp_path / "facts.json", "whole")
    assert prepare_output(tmp_path / "model") == tmp_path / "model"
    assert {path.name for path in tmp_path.iterdir()} == {"facts.json", "model"}


def test_long_names_are_told_apart_and_fit(dead: int, tmp_path: Path):
    first, second = tmp_path / ("模型" * 40 + "1"), tmp_path / ("模型" * 40 + "2")
    aside = left_by(dead, second, "former")
    aside.mkdir()
    (aside / "mark").touch()
    with deliver_folder(prepare_output(first)) as folder:
        (folder / "whole").touch()
    with pytest.raises(UserError, match="is not empty"):
        prepare_output(second)
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == {
        Path(path) for path in (first.name, f"{first.name}/whole", second.name, f"{second.name}/mark")
    }


def test_what_another_user_left_stands_in_nobody_s_way(dead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    remains, unlink = left_by(dead, tmp_path / "facts.json"), Path.unlink
    remains.touch()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == remains:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    write_atomically(tmp_path / "facts.json", "whole")
    assert (tmp_path / "facts.json").read_text() == "whole"


@pytest.mark.parametrize(("before", "after"), [(0o600, 0o600), (0o664, 0o664), (0o4444, 0o644)])
def test_a_file_keeps_who_may_read_it(before: int, after: int, tmp_path: Path):
    path = tmp_path / "facts.json"
    path.touch()
    path.chmod(before)
    write_atomically(path, "whole")
    assert path.stat().st_mode & 0o7777 == after


def test_a_link_in_a_folder_leads_nothing_out_of_it(tmp_path: Path):
    """A stranger may have made it."""
    outside, path = tmp_path / "private", tmp_path / "facts.json"
    outside.write_text("private")
    path.symlink_to(outside)
    write_atomically(path, "whole")
    assert (outside.read_text(), path.read_text(), path.is_symlink()) == ("private", "whole", False)


def make_model(folder: Path, kind: str = "conversion") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    append_record(folder, make_record(kind, values={}, command="hf-vit"))
    return folder


@pytest.mark.parametrize(
    "name", [".git/HEAD", "thesis/chapter.tex", "notes.txt", "train.py", "onnx/notes.txt", "a.png", "README.md"]
)
def test_force_replaces_no_folder_with_what_is_somebody_s(name: str, tmp_path: Path):
    theirs = make_model(tmp_path / "model") / name
    assert prepare_output(tmp_path / "model", force=True)
    theirs.parent.mkdir(exist_ok=True)
    theirs.touch()
    held = name if name.startswith("onnx") else name.split("/")[0] + "/" * ("/" in name)
    with pytest.raises(UserError, match=f"holds {held}, which hf-vit did not write; choose another"):
        prepare_output(tmp_path / "model", force=True)
    with pytest.raises(UserError, match=r"empty this one first$"):
        prepare_output(tmp_path / "model", force=False)


def test_force_replaces_no_model_that_was_only_measured(tmp_path: Path):
    make_model(tmp_path / "model", "evaluation")
    with pytest.raises(UserError, match=r"--force replaces only what hf-vit trained, converted or exported$"):
        prepare_output(tmp_path / "model", force=True)


def test_all_that_a_model_folder_holds_is_known(tmp_path: Path):
    """Cards, records and all code of the package: such a folder may be replaced."""
    package = Path(hf_vit.__file__).parent
    for folder in ("axial", "hybrid", "local", "vit"):
        copy = shutil.copytree(package / "model_cards" / f"{folder}-digits", tmp_path / folder)
        for code in package.glob("models/*_hf_*.py"):
            shutil.copy(code, copy)
        (copy / "doors.json").touch()
        assert prepare_output(copy, force=True).samefile(copy)


def make_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def test_a_new_folder_bears_the_name_of_its_place(tmp_path: Path):
    with deliver_folder(tmp_path / "model") as folder:
        assert (folder.name, (tmp_path / "model").exists()) == ("model", False)
        (folder / "whole").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "whole"]


def test_an_empty_folder_is_filled_and_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It may be where somebody works, or a disk of its own: nothing is put beside it."""
    output = tmp_path / "model"
    output.mkdir(mode=0o700)
    before, order = output.stat(), list[str]()
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: (order.append(path.name), replace(path, to))[1])
    with deliver_folder(prepare_output(output)) as folder:
        assert folder.name == "model"
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        make_files(folder, "README.md", "config.json", "facts.json", "model.safetensors")
    assert (output.stat().st_ino, output.stat().st_mode) == (before.st_ino, before.st_mode)
    assert order == ["facts.json", "README.md", "model.safetensors", "config.json"]
    assert sorted(path.name for path in output.iterdir()) == sorted(order)


def test_an_empty_folder_is_filled_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replace = Path.replace

    def refuse(path: Path, to: Path) -> Path:
        if to == tmp_path / "config.json":
            raise OSError(errno.EIO, "Input/output error")
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(UserError, match="Input/output error"), deliver_folder(tmp_path) as folder:
        make_files(folder, "facts.json", "config.json")
    with pytest.raises(UserError, match="is not empty"), deliver_folder(tmp_path) as folder:
        (tmp_path / "theirs").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "a private model"])
def test_what_is_delivered_is_on_the_disk_and_for_all_who_may_see_it(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """safetensors makes files that only their owner can read; a folder that nobody else sees stays so."""
    output, synced, replace = tmp_path / "model", set[int](), Path.replace
    if before != "nothing":
        (make_model(output) if before == "a private model" else (output.mkdir() or output)).chmod(0o700)

    def move(path: Path, to: Path) -> Path:
        assert {file.stat().st_ino for file in path.rglob("*") if file.is_file()} <= synced
        return replace(path, to)

    def sync(file: int) -> None:
        synced.add(os.fstat(file).st_ino)
        together.wait(5)  # one by one, thousands of masks would take minutes

    together = threading.Barrier(2)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", move)
    with deliver_folder(prepare_output(output, force=True), force=True) as folder:
        (folder / "onnx").mkdir()
        for name in ("model.safetensors", "onnx/weights.safetensors"):
            save_file({"weight": torch.zeros(1)}, folder / name)
        for name in ("config.json", "preprocessor_config.json"):
            (folder / name).touch()
    modes = {path.stat().st_mode & 0o777 for path in output.rglob("*") if path.is_file()}
    assert modes == {output.joinpath("config.json").stat().st_mode & 0o777}
    assert (output.stat().st_mode & 0o077 == 0) == (before != "nothing")
    assert {path.stat().st_ino for path in output.rglob("*") if path.is_file()} <= synced


def test_the_working_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(make_model(tmp_path / "model"))
    with pytest.raises(UserError, match="mount point or the working folder, so it cannot be replaced; empty it"):
        prepare_output(".", force=True)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system; make that disk writable"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded; free some of your space there"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error; check that disk for errors"),
        (SafetensorError("I/O error: Disk quota exceeded (os error 122)"), "quota exceeded; free some of your space"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files; raise the limit of open files (ulimit"),
    ],
)
def test_a_refusal_of_the_system_names_place_reason_and_remedy(error: Exception, said: str, tmp_path: Path):
    """Where a part of it was refused, the whole is named."""
    with (
        pytest.raises(UserError) as told,
        explain_write_errors(tmp_path / "whole"),
        explain_write_errors(tmp_path / "part"),
    ):
        raise error
    assert str(told.value).startswith(f"{tmp_path / 'whole'} cannot be written: ")
    assert said in str(told.value)
    assert ("another disk" in str(told.value)) == ("ulimit" not in said)


def test_other_errors_stay_what_they_are(tmp_path: Path):
    assert explain_refusal(RuntimeError("something else")) is None
    with pytest.raises(RuntimeError, match="something else"), explain_write_errors(tmp_path):
        raise RuntimeError("something else")


def test_what_cannot_be_removed_either_does_not_hide_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("touch", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(UserError, match=r"facts\.json cannot be written: Read-only file system; make that disk"):
        write_atomically(tmp_path / "facts.json", "whole")
