"""Object stores: places in them by their addresses, and what goes wrong there in one line.

An address counts where the user typed it; what a file says of addresses is data, and is not followed.
"""

import os
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from hf_vit.errors import UserError
from hf_vit.repositories.hub import reason

# Of fsspec; in each of them an object is seen when its last byte has arrived, and not before.
STORES = ("s3", "gs", "hf", "memory")


class StoreError(UserError):
    """A store, or the way to it, failed: nothing is known of what should have come from there."""


def in_store(place: str | os.PathLike[str]) -> bool:
    """Return whether this is the address of an object store."""
    scheme, is_address, _ = str(place).partition("://")
    return bool(is_address) and scheme in STORES


def place_of(name: str | os.PathLike[str]) -> Path:
    """Return a file or folder, which need not be there, by its path or address (file:///PATH, s3://BUCKET/...).

    Returns:
        A path, or something with a path's methods: universal_pathlib's.
    """
    text = str(name)
    if "://" not in text:
        return Path(name)
    if text.startswith("file:///"):
        return Path(unquote(urlsplit(text).path))
    if not in_store(text):
        known = ", ".join(f"{each}://" for each in STORES)
        raise UserError(f"{text} has an unknown scheme; give a path, file:///, {known}")
    try:
        from upath import UPath
    except ImportError as error:
        raise UserError(f"the library that reads {text} is not installed: pip install 'hf-vit[stores]'") from error
    with installed_for(text), saying_what(text, "opened"):
        place = UPath(text)
        _ = place.fs  # imports the store's library
    return cast(Path, place)


def is_folder(place: Path) -> bool:
    """Return whether it is one, and there."""
    with saying_what(place, "read"):
        return place.is_dir()


def find(folder: Path) -> list[tuple[str, ...]]:
    """Return the names of all files below a folder of a store, part by part, sorted."""
    store = _store_of(folder)
    with saying_what(folder, "listed"):
        below = store.path.strip("/") + "/"
        paths = (each.strip("/").removeprefix(below) for each in store.fs.find(store.path))
        return sorted(tuple(path.split("/")) for path in paths if path)


def matches(pattern: str) -> list[Path]:
    """Return the files of a store that a pattern stands for, sorted."""
    store = _store_of(place_of(pattern))
    with saying_what(pattern, "listed"):
        return sorted(place_of(store.fs.unstrip_protocol(each)) for each in store.fs.glob(store.path))


def sizes(files: Iterable[Path]) -> dict[Path, int]:
    """Return the bytes of those that are there; of a store every folder is listed once, as it is now."""
    known: dict[Path, int] = {}
    for folder, inside in groupby(sorted(files, key=str), key=attrgetter("parent")):
        if not in_store(folder):
            known |= {path: path.stat().st_size for path in inside if os.path.isfile(path)}
            continue
        store = _store_of(folder)
        with saying_what(folder, "listed"):
            try:
                listed = {each["name"].strip("/"): each["size"] for each in store.fs.ls(store.path, detail=True)}
            except FileNotFoundError:
                continue
        names = {path: cast(Any, path).path.strip("/") for path in inside}
        known |= {path: listed[name] for path, name in names.items() if name in listed}
    return known


def _store_of(place: Path) -> Any:
    """Return a place of a store, whose listings are asked for anew: fsspec remembers what was there."""
    store: Any = place
    with saying_what(place, "listed"):
        store.fs.invalidate_cache()
    return store


def read(file: Path) -> bytes:
    """Read an object of a store.

    Raises:
        FileNotFoundError: it is not there.
        StoreError: it cannot be read.
    """
    with saying_what(file, "read"):
        return file.read_bytes()


def write(address: str, content: bytes | Path) -> None:
    """Let an object appear, or be replaced, in one move; `content` may be the file of this machine that has it."""
    from fsspec.core import url_to_fs

    try:
        with saying_what(address, "written"):
            store, place = url_to_fs(address)
            if isinstance(content, Path):
                store.put_file(str(content), place)
            else:
                store.pipe_file(place, content)
    except FileNotFoundError:
        raise UserError(f"{address} cannot be written: there is no such bucket or folder; create it") from None


@contextmanager
def installed_for(address: str) -> Generator[None]:
    """Say what to install where a store's library is missing."""
    try:
        yield
    except ImportError as error:
        package = re.search(r"\w+fs\b", str(error))
        remedy = f"pip install {package[0]}" if package else str(error)
        raise UserError(f"the library that reads {address} is not installed: {remedy}") from error


@contextmanager
def saying_what(place: object, done: str) -> Generator[None]:
    """Let what goes wrong in a store be one line; that something is not there, or not installed, is the caller's."""
    try:
        yield
    except (ImportError, FileNotFoundError, UserError):
        raise
    except Exception as error:  # every store's library raises its own
        raise StoreError(
            f"{place} cannot be {done} ({reason(error)}); check the path, your permissions and the network"
        ) from error
