"""Writing a file in one move: it appears complete or not at all, whatever happens meanwhile. And scratch folders.

What is being written lies hidden beside its place, under a name that tells machine and process; the next that writes
there removes what a process left that is no more.
"""

import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hf_vit.errors import UserError, refusal

_LONGEST = 99  # bytes of a name that is kept whole; earlier versions cut to 100 characters
_MADE = set[str]()  # what tells the hidden names of this process from those of an earlier one of the same number


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file in one move; what was there stays until then."""
    # A file's name may hold bytes that are no text.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with new_file(path) as temporary, saying_why(path), temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_file(path: Path) -> Generator[Path]:
    """A temporary file beside `path` that takes its place at the end, or vanishes if anything goes wrong.

    Whoever may read or write an earlier file may do so with the new one. A link is replaced: in a folder that a
    stranger wrote it may lead anywhere.
    """
    refuse_address(path)
    temporary = beside(path, "tmp")
    try:
        with saying_why(path):
            remove_remains(path.parent, path.name)
            temporary.touch()
            _permit_as(path, temporary)
        yield temporary
        with saying_why(path):
            temporary.replace(path)
    finally:
        with suppress(OSError):  # what refused to be written may refuse to be removed
            temporary.unlink()


@contextmanager
def scratch_folder(purpose: str) -> Generator[Path]:
    """Make a folder of this user alone among the system's temporary ones, which vanishes at the end."""
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
    """Turn what the system says about writing there, or to a part of it, into one line with place and remedy."""
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
    """Find out why a library could not write: if it fails, write as much at that place with Python.

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
    """Return whether this begins as s3:// does, of which a `Path` has lost a slash; here it would become a folder
    "s3:".
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(place)) is not None


def refuse_address(place: str | Path) -> None:
    """Raise a UserError for an address, where only this machine's disks will do."""
    if is_address(place):
        raise UserError(f"{place} is a URL, not a local path; give a path")


def beside(path: Path, ending: str) -> Path:
    """Return a hidden name beside `path` for what is to take its place ("tmp"), or took it ("former")."""
    _MADE.add(token := uuid.uuid4().hex[:8])
    return path.with_name(f".{_stem(path.name)}.{_this_host()}-{os.getpid()}-{token}.{ending}")


def remove_remains(folder: Path, name: str | None = None) -> None:
    """Remove what processes of this machine that are no more left in a folder; those of others may still be in use.

    Args:
        folder: need not exist.
        name: of the file or folder that was being written; by default of any. One that a kill between the two moves of
            a replacement took away is put back, where it is named.
    """
    stem, endings = (".+", "tmp") if name is None else (_stems(name), "tmp|former")
    pattern = re.compile(rf"\.(?:{stem})\.{_this_host()}-(\d+)-([0-9a-f]{{8}})\.({endings})")
    for inside in os.listdir(folder) if folder.is_dir() else ():
        remains = pattern.fullmatch(inside)
        if remains is None or _is_alive(int(remains[1]), remains[2]):
            continue
        path = folder / inside
        if name is not None and remains[3] == "former" and not (folder / name).exists():
            path.rename(folder / name)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # it may be another user's
                path.unlink()


def _permit_as(path: Path, new: Path) -> None:
    """Give a new file the permissions of the one that it will replace; its owner goes on writing."""
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        wanted = stat.S_IMODE(mode) & 0o777 | stat.S_IWUSR
        if stat.S_ISREG(mode) and stat.S_IMODE(new.stat().st_mode) != wanted:
            new.chmod(wanted)


def _is_alive(process: int, token: str) -> bool:
    """Return whether a process still writes there: in a container every run may have the same number."""
    return token in _MADE if process == os.getpid() else psutil.pid_exists(process)


def _stem(name: str) -> str:
    """Return a name as a part of a hidden one, which the system allows 255 bytes: cut, and told from others by a
    hash.
    """
    whole = os.fsencode(name)
    if len(whole) <= _LONGEST:
        return name
    return f"{whole[: _LONGEST - 9].decode(errors='ignore')}~{hashlib.sha256(whole).hexdigest()[:8]}"


def _stems(name: str) -> str:
    """Return a pattern of what stands for a name in hidden ones, those of earlier versions included that were not
    cut.
    """
    return "|".join(re.escape(stem) for stem in {_stem(name), name} if len(stem) <= _LONGEST)


def _this_host() -> str:
    return re.sub(r"\W", "", socket.gethostname())[:40]
