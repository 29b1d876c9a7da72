"""Access object stores by URL, and explain their failures in one line.

Only URLs that the user typed are opened; URLs in downloaded files are treated as data.
"""

import os
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from stat import S_ISREG
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from hf_vit.environment import require
from hf_vit.errors import UserError
from hf_vit.repositories.hub import summarize_error

# Protocols of fsspec whose objects become visible only when they are complete.
STORES = ("s3", "gs", "hf", "memory")


class StoreError(UserError):
    """A store could not be reached or did not answer, so it is unknown what it holds."""


def is_store_url(path: object) -> bool:
    """Return whether this is a URL of an object store."""
    scheme, is_url, _ = str(path).partition("://")
    return bool(is_url) and scheme in STORES


def to_path(name: str | os.PathLike[str]) -> Path:
    """Return a path object for a local path, a file:/// URL or a store URL (s3://BUCKET/...); it need not exist.

    Returns:
        A `Path`, with the home folder for ~, or a path of universal_pathlib, which has the same methods.

    Raises:
        UserError: the URL's scheme is unknown, or a library is missing.
    """
    text = str(name)
    if "://" not in text:
        return Path(os.path.expanduser(name))
    if text.startswith("file:///"):
        return Path(unquote(urlsplit(text).path))
    if not is_store_url(text):
        schemes = ", ".join(f"{store}://" for store in STORES)
        raise UserError(f"the URL {text} has an unknown scheme; give a local path, file:///, or one of {schemes}")
    require("upath", purpose=f"the URL {text}")
    from upath import UPath

    with explain_missing_library(text), explain_store_errors(text, "opened"):
        path = UPath(text)
        _ = path.fs  # imports the store's library
    return cast(Path, path)


def is_folder(path: Path) -> bool:
    """Return whether a path is an existing folder."""
    with explain_store_errors(path, "read"):
        return path.is_dir()


def list_objects(folder: Path) -> list[tuple[str, ...]]:
    """Return all files below a folder of a store as tuples of path parts, sorted."""
    store = _refresh(folder)
    with explain_store_errors(folder, "listed"):
        prefix = store.path.strip("/") + "/"
        paths = (path.strip("/").removeprefix(prefix) for path in store.fs.find(store.path))
        return sorted(tuple(path.split("/")) for path in paths if path)


def match_objects(pattern: str) -> list[Path]:
    """Return the objects of a store that match a glob pattern, sorted."""
    store = _refresh(to_path(pattern))
    with explain_store_errors(pattern, "listed"):
        return sorted(to_path(store.fs.unstrip_protocol(path)) for path in store.fs.glob(store.path))


def read_sizes(files: Iterable[Path]) -> dict[Path, int]:
    """Return the sizes in bytes of those files that exist; every folder of a store is listed once."""
    file_sizes: dict[Path, int] = {}
    stored: list[Path] = []
    for path in files:
        if is_store_url(path):
            stored.append(path)
            continue
        with suppress(OSError, ValueError):
            status = os.stat(path)
            if S_ISREG(status.st_mode):
                file_sizes[path] = status.st_size
    for folder, paths in groupby(sorted(stored, key=str), key=attrgetter("parent")):
        store = _refresh(folder)
        with explain_store_errors(folder, "listed"):
            try:
                listing = {entry["name"].strip("/"): entry["size"] for entry in store.fs.ls(store.path, detail=True)}
            except FileNotFoundError:
                continue
        names = {path: cast(Any, path).path.strip("/") for path in paths}
        file_sizes |= {path: listing[name] for path, name in names.items() if name in listing}
    return file_sizes


def _refresh(path: Path) -> Any:
    """Return a store's path after clearing the listings that fsspec caches."""
    store: Any = path
    with explain_store_errors(path, "listed"):
        store.fs.invalidate_cache()
    return store


def read_bytes(file: Path) -> bytes:
    """Return the content of an object; raise a FileNotFoundError if there is none, or a StoreError."""
    with explain_store_errors(file, "read"):
        return file.read_bytes()


def write_object(address: str, content: bytes | Path) -> None:
    """Write an object in one move; `content` is bytes, or a local file that holds them."""
    from fsspec.core import url_to_fs

    try:
        with explain_store_errors(address, "written"):
            store, path = url_to_fs(address)
            if isinstance(content, Path):
                store.put_file(str(content), path)
            else:
                store.pipe_file(path, content)
    except FileNotFoundError:
        raise UserError(f"{address} cannot be written, as the bucket or folder does not exist; create it") from None


@contextmanager
def explain_missing_library(address: str) -> Generator[None]:
    """Turn the ImportError of a store's library into a UserError with the pip command."""
    try:
        yield
    except ImportError as error:
        package = re.search(r"\w+fs\b", str(error))
        remedy = f"install it with pip install {package[0]}" if package else str(error)
        raise UserError(f"the library that reads {address} is not installed; {remedy}") from error


@contextmanager
def explain_store_errors(path: object, done: str) -> Generator[None]:
    """Turn a store's failure into a StoreError of one line; missing objects and libraries are left to the caller."""
    try:
        yield
    except (ImportError, FileNotFoundError, UserError):
        raise
    except Exception as error:  # every store's library has its own classes
        raise StoreError(
            f"{path} cannot be {done} ({summarize_error(error)}); check the path, your permissions and the network"
        ) from error
