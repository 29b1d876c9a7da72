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
from hf_vit.repositories.retrying import reason

# Of fsspec; in each of them an object is seen when its last byte has arrived, and not before.
STORES = ("s3", "gs", "hf", "memory")


class StoreError(UserError):
    """A store, or the way to it, failed: nothing is known of what should have come from there."""


def in_store(place: str | os.PathLike[str]) -> bool:
    """Whether this is the address of an object store."""
    return str(place).partition("://")[0] in STORES and "://" in str(place)


def place_of(name: str | os.PathLike[str]) -> Path:
    """A file or folder, which need not be there.

    Args:
        name: a path, file:///PATH, or the address of an object store (s3://BUCKET/..., gs://..., hf://datasets/...).

    Returns:
        A path, or something with a path's methods: universal_pathlib's.

    Raises:
        UserError: it is an address of another kind, or what its store needs is not installed.
    """
    text = str(name)
    scheme, is_address, _ = text.partition("://")
    if not is_address:
        return Path(name)
    if text.startswith("file:///"):
        return Path(unquote(urlsplit(text).path))
    if scheme not in STORES:
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
    """Whether it is one, and there."""
    with saying_what(place, "read"):
        return place.is_dir()


def find(folder: Path) -> list[tuple[str, ...]]:
    """The names of all files below a folder of a store, part by part, sorted."""
    place = cast(Any, folder)
    with saying_what(place, "listed"):
        place.fs.invalidate_cache()  # it remembers what was there
        below = place.path.rstrip("/") + "/"
        paths = (each.strip("/").removeprefix(below.strip("/") + "/") for each in place.fs.find(place.path))
        return sorted(tuple(path.split("/")) for path in paths if path)


def matches(pattern: str) -> list[Path]:
    """The files of a store that a pattern stands for, sorted."""
    place = cast(Any, place_of(pattern))
    with saying_what(pattern, "listed"):
        place.fs.invalidate_cache()
        return sorted(place_of(place.fs.unstrip_protocol(each)) for each in place.fs.glob(place.path))


def sizes(files: Iterable[Path]) -> dict[Path, int]:
    """Of those that are there, in bytes; of a store every folder is listed once, as it is now."""
    found: dict[Path, int] = {}
    for folder, inside in groupby(sorted(files, key=str), key=attrgetter("parent")):
        if not in_store(folder):
            found |= {path: path.stat().st_size for path in inside if os.path.isfile(path)}
            continue
        store: Any = folder
        with saying_what(folder, "listed"):
            store.fs.invalidate_cache()
            try:
                listed = {each["name"].strip("/"): each["size"] for each in store.fs.ls(store.path, detail=True)}
            except FileNotFoundError:
                continue
        names = {path: cast(Any, path).path.strip("/") for path in inside}
        found |= {path: listed[name] for path, name in names.items() if name in listed}
    return found


def read(file: Path) -> bytes:
    """An object of a store.

    Raises:
        FileNotFoundError: it is not there.
        StoreError: it cannot be read.
    """
    with saying_what(file, "read"):
        return file.read_bytes()


def write(address: str, content: bytes | Path) -> None:
    """Let an object appear, or be replaced, in one move.

    Args:
        content: of it, or the file of this machine that has it.

    Raises:
        UserError: it cannot be written, or its bucket or repository is not there.
    """
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
