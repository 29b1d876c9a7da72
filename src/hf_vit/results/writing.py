"""Writing a file in one move: it appears complete or not at all, whatever happens meanwhile. And scratch folders.

What is being written lies hidden beside its place, under a name that tells machine and process; the next that writes
there removes what a process left that is no more.
"""

import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hf_vit.errors import UserError, refusal


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file in one move; what was there stays until then.

    Raises:
        UserError: nothing can be written there.
    """
    # A file's name may hold bytes that are no text.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with new_file(path) as temporary, saying_why(path), temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_file(path: Path) -> Generator[Path]:
    """A temporary file beside `path` that takes its place at the end, or vanishes if anything goes wrong.

    Raises:
        UserError: nothing can be written there.
    """
    refuse_address(path)
    temporary = beside(path, "tmp")
    try:
        with saying_why(path):
            remove_remains(path.parent, path.name)
            temporary.touch()
        yield temporary
        with saying_why(path):
            temporary.replace(path)
    finally:
        with suppress(OSError):  # what refused to be written may refuse to be removed
            temporary.unlink()


@contextmanager
def scratch_folder(purpose: str) -> Generator[Path]:
    """A folder of this user alone among the system's temporary ones, which vanishes at the end.

    Raises:
        UserError: nothing can be written there.
    """
    place = Path(tempfile.gettempdir()) / f"hf_vit_{purpose}"
    folder = beside(place, "tmp")
    try:
        with saying_why(place.parent):
            remove_remains(place.parent, place.name)
            folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def saying_why(path: Path) -> Generator[None]:
    """Turn what the system says about writing there into one line that names the place and the remedy.

    Where it is said of a part already, the whole is named instead.

    Raises:
        UserError: the disk is full, the name is too long, nothing may be written there, ...
    """
    try:
        yield
    except Exception as error:  # of safetensors and torch, too
        cause = error.__cause__ or error if isinstance(error, UserError) else error
        if (why := refusal(cause)) is not None:
            raise UserError(f"{path} cannot be written: {why}") from cause
        if isinstance(error, OSError):
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


@contextmanager
def asking_why(*files: Path) -> Generator[None]:
    """Around a library that may not say why it could not write: when it fails, Python writes as much at that place.

    Args:
        files: about as large as what the library writes, and where it does.

    Raises:
        OSError: what the system says to that.
    """
    try:
        yield
    except UserError:
        raise
    except Exception:
        for path in files:
            with path.open("rb") as file, tempfile.NamedTemporaryFile(dir=path.parent) as copy:
                shutil.copyfileobj(file, copy)
        raise


def is_address(place: str | Path) -> bool:
    """Whether this begins as s3:// does, of which a `Path` has lost a slash; here it would become a folder "s3:"."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(place)) is not None


def refuse_address(place: str | Path) -> None:
    """Where only this machine's disks will do.

    Raises:
        UserError: it is an address.
    """
    if is_address(place):
        raise UserError(f"{place} is an address, not a place on this machine; give a path")


def beside(path: Path, ending: str) -> Path:
    """A hidden name beside `path` for what is to take its place ("tmp"), or took it ("former")."""
    name = path.name[:100]  # the system's limit is 255 bytes
    return path.with_name(f".{name}.{_this_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.{ending}")


def remove_remains(folder: Path, name: str | None = None) -> None:
    """Remove what processes of this machine that are no more left in a folder; those of others may still be in use.

    Args:
        folder: need not exist.
        name: of the file or folder that was being written; by default of any. One that a kill between the two moves of
            a replacement took away is put back.
    """
    any_name = ".+" if name is None else re.escape(name[:100])
    pattern = re.compile(rf"\.({any_name})\.{_this_host()}-(\d+)-[0-9a-f]{{8}}\.(tmp|former)")
    for inside in os.listdir(folder) if folder.is_dir() else ():
        remains = pattern.fullmatch(inside)
        if remains is None or psutil.pid_exists(int(remains[2])):
            continue
        path, place = folder / inside, folder / (name or remains[1])
        if remains[3] == "former" and not place.exists():
            path.rename(place)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _this_host() -> str:
    return re.sub(r"\W", "", socket.gethostname())[:40]
