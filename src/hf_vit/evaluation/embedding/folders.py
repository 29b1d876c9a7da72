"""Where the files of `embed` go: a folder on a disk or in an object store, whose files appear when complete."""

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from hf_vit.errors import UserError
from hf_vit.repositories.stores import in_store, installed_for, place_of, saying_what, write
from hf_vit.results.facts import exclusive
from hf_vit.results.writing import refuse_address, remove_remains, saying_why, write_atomically


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

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes out that ask for it, where the place can."""
        ...


def output_folder(place: str | Path) -> OutputFolder:
    """The folder of this name, which need not be there.

    Args:
        place: a path, file:///PATH, or the address of a folder: s3://BUCKET/..., gs://..., hf://datasets/USER/NAME/...

    Raises:
        UserError: it is a file, of another kind, or what its store needs is not installed.
    """
    if not in_store(place):
        return Disk(place_of(place))
    store = ObjectStore(str(place))
    if not store.opened()[1].strip("/"):
        raise UserError(f"the output {place} names no folder; give one, such as {place}NAME/embeddings")
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
        self._made()
        write_atomically(self.path / name, content)

    @contextmanager
    def alone(self) -> Generator[None]:
        self._made()
        with exclusive(self.path):
            yield

    def _made(self) -> None:
        with saying_why(self.path):
            self.path.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True)
class ObjectStore:
    """A folder in an object store, by fsspec; who may write there is known to the store's own library."""

    address: str

    def __str__(self) -> str:
        return self.address.rstrip("/")

    def opened(self) -> tuple[Any, str]:
        """The store (fsspec keeps it), and the folder's place in it."""
        from fsspec.core import url_to_fs

        with installed_for(self.address), saying_what(self, "opened"):
            return url_to_fs(self.address)

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def names(self) -> set[str]:
        store, place = self.opened()
        with saying_what(self, "listed"):
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
        with saying_what(self, "read"):
            store.invalidate_cache(place)  # others wrote there
            return store.open(f"{place}/{name}", "rb")

    def write(self, name: str, content: bytes) -> None:
        write(f"{self}/{name}", content)
