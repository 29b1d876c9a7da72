"""Write files so that they appear complete or not at all, and find scratch folders and the cache.

A file is first written under a hidden name beside its target. The name contains host and process id, so that a later
run can remove the files of processes that no longer exist.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hf_vit.errors import UserError, explain_refusal, to_one_line

_MAX_NAME_BYTES = 99  # bytes of a name before it is cut
_TOKENS = set[str]()  # random tokens of this process; an earlier process may have had the same id


def is_writable(folder: str | os.PathLike[str]) -> bool:
    """Return whether this user may write into a folder."""
    return os.access(folder, os.W_OK)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file in one move; an existing file is replaced only when the new one is complete."""
    # File names in the content may contain bytes that are not valid text.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with replace_file(path) as temporary, explain_write_errors(path):
        temporary.write_bytes(data)


@contextmanager
def replace_file(path: Path) -> Generator[Path]:
    """Yield a temporary file beside `path` that replaces it on success and is deleted on failure.

    The new file gets the permissions of an existing one. A link is replaced, not followed: in an untrusted folder it
    may point anywhere.
    """
    reject_url(path)
    temporary = make_hidden_path(path, "tmp")
    try:
        with explain_write_errors(path):
            remove_leftovers(path.parent, path.name)
            temporary.touch()
            _copy_permissions(path, temporary)
        yield temporary
        with explain_write_errors(path):
            _sync_file(temporary)
            temporary.replace(path)
    finally:
        with suppress(OSError):  # the disk that failed the write may fail this too
            temporary.unlink()


@contextmanager
def make_scratch_folder(purpose: str) -> Generator[Path]:
    """Yield a temporary folder that only this user can read, and delete it at the end."""
    prefix = Path(tempfile.gettempdir()) / f"hf_vit_{purpose}"
    folder = make_hidden_path(prefix, "tmp")
    try:
        with explain_write_errors(prefix.parent):
            remove_leftovers(prefix.parent, prefix.name)
            folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cache_folder(*names: str) -> Path:
    """Return a folder of hf_vit in the Hub's cache for assets of libraries; create it if it does not exist."""
    from huggingface_hub import cached_assets_path, constants

    try:
        return cached_assets_path("hf_vit", *names)
    except (OSError, ValueError) as error:  # ValueError for a file in its place
        raise UserError(
            f"the cache {constants.HF_ASSETS_CACHE} cannot be written ({to_one_line(error)}); remove a file in "
            "its place, or set HF_ASSETS_CACHE to another folder"
        ) from error


@contextmanager
def explain_write_errors(path: Path) -> Generator[None]:
    """Turn a system error while writing `path` or a file in it into a UserError with the path and the remedy."""
    try:
        yield
    except Exception as error:  # safetensors and torch raise their own classes
        cause = error.__cause__ or error if isinstance(error, UserError) else error
        if (reason := explain_refusal(cause)) is not None:
            raise UserError(f"{path} cannot be written: {reason}") from cause
        if isinstance(error, OSError):
            raise UserError(f"{path} cannot be written: {error.strerror or error}; choose another path") from error
        raise


@contextmanager
def diagnose_write_failure(*files: Path) -> Generator[None]:
    """Find the system's reason if a library fails to write: copy these files at the same place with Python.

    Args:
        files: files about as large as those that the library writes, in the same folders.
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


def is_url(path: str | Path) -> bool:
    """Return whether a path begins like a URL ("s3:/"); `Path` has removed one slash of "s3://"."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def reject_url(path: str | Path) -> None:
    """Raise a UserError for a URL where only a local path is supported."""
    if is_url(path):
        raise UserError(f"{path} is a URL, not a local path; give a local path")


def make_hidden_path(path: Path, ending: str) -> Path:
    """Return a hidden name beside `path`, for its replacement ("tmp") or its previous version ("former")."""
    token = uuid.uuid4().hex[:8]
    _TOKENS.add(token)
    return path.with_name(f".{_shorten_name(path.name)}.{_get_host()}-{os.getpid()}-{token}.{ending}")


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files that dead processes of this machine left in a folder.

    Args:
        folder: the folder; it need not exist.
        name: the file or folder whose temporary files are removed; None removes those of all names. If a process was
            killed while replacing `name`, its previous version is restored.
    """
    stem, endings = (".+", "tmp") if name is None else (re.escape(_shorten_name(name)), "tmp|former")
    pattern = re.compile(rf"\.{stem}\.{_get_host()}-(\d+)-([0-9a-f]{{8}})\.({endings})")
    for entry in os.listdir(folder) if folder.is_dir() else ():
        match = pattern.fullmatch(entry)
        if match is None or _is_alive(int(match[1]), match[2]):
            continue
        path = folder / entry
        if name is not None and match[3] == "former" and not (folder / name).exists():
            path.rename(folder / name)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # it may belong to another user
                path.unlink()


def settle_folder(folder: Path) -> None:
    """Write all files in a new folder to the disk, and give them its permissions.

    A power loss could leave them empty, and safetensors makes files that only their owner can read.
    """
    mode = folder.stat().st_mode & 0o666
    paths = list(filter(Path.is_file, folder.rglob("*")))
    for path in paths:
        with suppress(OSError):  # some file systems have no permissions
            path.chmod(mode)
    with ThreadPoolExecutor(8) as pool:  # a disk writes thousands of files at once many times as fast as one by one
        list(pool.map(_sync_file, paths))


def _sync_file(path: Path) -> None:
    with path.open("rb" if os.name == "posix" else "rb+") as file:
        os.fsync(file.fileno())


def _copy_permissions(path: Path, new: Path) -> None:
    """Give a new file the permissions of the file it will replace, always writable by its owner."""
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        permissions = stat.S_IMODE(mode) & 0o777 | stat.S_IWUSR
        if stat.S_ISREG(mode) and stat.S_IMODE(new.stat().st_mode) != permissions:
            new.chmod(permissions)


def _is_alive(process: int, token: str) -> bool:
    """Return whether the process that made a temporary file still runs.

    If it has this process's id, the token decides: in containers every run may get the same id.
    """
    return token in _TOKENS if process == os.getpid() else psutil.pid_exists(process)


def _shorten_name(name: str) -> str:
    """Return a name short enough for a hidden file name (255 bytes at most): long names are cut and end with a hash."""
    encoded = os.fsencode(name)
    if len(encoded) <= _MAX_NAME_BYTES:
        return name
    return f"{encoded[: _MAX_NAME_BYTES - 9].decode(errors='ignore')}~{hashlib.sha256(encoded).hexdigest()[:8]}"


def _get_host() -> str:
    """Return this machine's name as it appears in temporary file names."""
    return re.sub(r"\W", "", socket.gethostname())[:64]
