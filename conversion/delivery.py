"""Folders and files that appear complete or not at all, whatever happens while they are written."""

import os
import re
import shutil
import socket
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from safetensors import SafetensorError

from hf_vit.errors import UserError
from hf_vit.results.facts import FACTS_NAME


def free_folder(output: str | Path, force: bool = False) -> Path:
    """Where a new folder will be written: `output`, or what it links to.

    Args:
        output: absent or an empty folder.
        force: it may also hold what this package wrote, which will be replaced.

    Raises:
        UserError: it is neither.
    """
    output = Path(output)
    with saying_why(output):
        place = Path(os.path.realpath(output))
        with suppress(FileNotFoundError, NotADirectoryError):
            place.lstat()  # finds a name that is too long
    if place.is_dir():
        if any(place.iterdir()) and not (force and (place / FACTS_NAME).is_file()):
            remedy = f"; --force replaces only a folder with a {FACTS_NAME}" if force else ""
            raise UserError(f"the folder {output} is not empty; give a new folder, or empty this one first{remedy}")
    elif place.exists() or place.is_symlink():  # a link to itself
        raise UserError(f"{output} exists and is no folder; give another name")
    file = next((above for above in place.parents if above.exists() and not above.is_dir()), None)
    if file is not None:
        raise UserError(f"{output} cannot be a folder, as {file.name} is a file; give another name")
    return place


@contextmanager
def new_folder(output: Path, force: bool = False) -> Generator[Path]:
    """A temporary folder beside `output` that takes its place at the end, or vanishes if anything goes wrong.

    What a process that was killed left behind is removed first.

    Args:
        output: as `free_folder` gives it.
        force: see `free_folder`.

    Raises:
        UserError: the disk is full, or nothing may be written there.
    """
    temporary = _beside(output, "tmp")
    try:
        with saying_why(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            _remove_remains(output)
            temporary.mkdir()
        yield temporary
        with saying_why(output):
            free_folder(output, force)  # someone else may have been faster
            _replace(output, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def new_file(path: Path) -> Generator[Path]:
    """A temporary file beside `path` that takes its place at the end, or vanishes if anything goes wrong.

    Raises:
        UserError: nothing can be written there.
    """
    temporary = _beside(path, "tmp")
    try:
        with saying_why(path):
            temporary.touch()
        yield temporary
        with saying_why(path):
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def saying_why(path: Path) -> Generator[None]:
    """Turn what the system says about writing there into one line that names the place.

    Raises:
        UserError: the disk is full, the name is too long, nothing may be written there, ...
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:  # as the Rust side says it
        raise UserError(f"{path} cannot be written: {error}") from error


def _replace(output: Path, folder: Path) -> None:
    """Put `folder` in the place of `output`, which is absent, empty, or given up."""
    if not (output.is_dir() and any(output.iterdir())):
        folder.replace(output)
        return
    former = _beside(output, "former")
    output.rename(former)
    try:
        folder.replace(output)
    except BaseException:
        former.rename(output)
        raise
    shutil.rmtree(former, ignore_errors=True)


def _beside(path: Path, ending: str) -> Path:
    name = path.name[:100]  # the system's limit is 255 bytes
    return path.with_name(f".{name}.{_this_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.{ending}")


def _this_host() -> str:
    return re.sub(r"\W", "", socket.gethostname())[:40]


def _remove_remains(output: Path) -> None:
    """Folders of this machine's processes that are no more; those of others may still be in use."""
    pattern = re.compile(rf"\.{re.escape(output.name[:100])}\.{_this_host()}-(\d+)-[0-9a-f]{{8}}\.(tmp|former)")
    for folder in output.parent.iterdir():
        remains = pattern.fullmatch(folder.name)
        if remains is None or psutil.pid_exists(int(remains[1])):
            continue
        if remains[2] == "former" and not output.exists():
            folder.rename(output)  # killed between the two moves of a replacement
        else:
            shutil.rmtree(folder, ignore_errors=True)
