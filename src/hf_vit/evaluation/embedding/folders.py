"""Where the files of `embed` go: a folder on a disk or in an object store, whose files appear when complete."""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import unquote, urlsplit

from hf_vit.errors import UserError
from hf_vit.repositories.retrying import reason
from hf_vit.results.writing import refuse_address, remove_remains, saying_why, write_atomically

# Of fsspec; in each of them an object is seen when its last byte has arrived, and not before.
_STORES = ("s3", "gs", "hf", "memory")


class OutputFolder(Protocol):
    """A folder of files that are written whole; its text is its name, and it travels to other processes."""

    def names(self) -> set[str]:
        """Of what is in it, of folders with a / at their end; none where it is not there."""
        ...

    def open(self, name: str) -> IO[bytes]:
        """A file, to be read; FileNotFoundError if there is none."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Let a file appear, or be replaced, in one move."""
        ...


def output_folder(place: str | Path) -> OutputFolder:
    """The folder of this name, which need not be there.

    Args:
        place: a path, file:///PATH, or the address of a folder: s3://BUCKET/..., gs://..., hf://datasets/USER/NAME/...

    Raises:
        UserError: it is a file, of another kind, or what its store needs is not installed.
    """
    scheme, is_address, _ = str(place).partition("://")
    if scheme == "file" and str(place).startswith("file:///"):
        return Disk(Path(unquote(urlsplit(str(place)).path)))
    if not is_address:
        return Disk(Path(place))
    if scheme not in _STORES:
        known = ", ".join(f"{each}://" for each in _STORES)
        raise UserError(f"the output {place} is of a kind that is not written to; give a folder, file:///, {known}")
    store = ObjectStore(str(place))
    if not store.opened()[1].strip("/"):
        raise UserError(f"the output {place} names no folder; give one, such as {scheme}://NAME/embeddings")
    return store


@dataclass(frozen=True)
class Disk:
    """A folder on a disk."""

    path: Path

    def __post_init__(self) -> None:
        refuse_address(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"the output {self.path} is a file; choose a new or empty folder")

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> set[str]:
        remove_remains(self.path)
        if not self.path.exists():
            return set()
        with os.scandir(self.path) as inside:
            return {each.name + "/" * each.is_dir() for each in inside}

    def open(self, name: str) -> IO[bytes]:
        return (self.path / name).open("rb")

    def write(self, name: str, content: bytes) -> None:
        with saying_why(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / name, content)


@dataclass(frozen=True)
class ObjectStore:
    """A folder in an object store, by fsspec; who may write there is known to the store's own library."""

    address: str

    def __str__(self) -> str:
        return self.address.rstrip("/")

    def opened(self) -> tuple[Any, str]:
        """The store (fsspec keeps it), and the folder's place in it."""
        from fsspec.core import url_to_fs

        try:
            with self._saying_why("opened"):
                return url_to_fs(self.address)
        except ImportError as error:
            package = re.search(r"\w+fs\b", str(error))
            remedy = f"pip install {package[0]}" if package else str(error)
            raise UserError(f"what {self.address} is read by is not installed: {remedy}") from error

    def names(self) -> set[str]:
        store, place = self.opened()
        with self._saying_why("listed"):
            store.invalidate_cache()  # it remembers what was there
            try:
                inside: list[dict[str, str]] = store.ls(place, detail=True)
            except FileNotFoundError:
                return set()
        below = f"{place.strip('/')}/"
        paths = (each["name"].strip("/") + "/" * (each["type"] == "directory") for each in inside)
        return {path.removeprefix(below) for path in paths if path.startswith(below) and path != below}

    def open(self, name: str) -> IO[bytes]:
        store, place = self.opened()
        with self._saying_why("read"):
            return store.open(f"{place}/{name}", "rb")

    def write(self, name: str, content: bytes) -> None:
        store, place = self.opened()
        with self._saying_why("written"):
            store.pipe_file(f"{place}/{name}", content)

    @contextmanager
    def _saying_why(self, done: str) -> Generator[None]:
        try:
            yield
        except (ImportError, FileNotFoundError):
            if done == "written":
                raise UserError(f"{self} cannot be written: there is no such place in that store; create it") from None
            raise
        except Exception as error:  # every store's library raises its own
            raise UserError(
                f"{self} cannot be {done} ({reason(error)}); check its name, your right to it and the network"
            ) from error
