"""The files that data is read from: what tells a change, and which of them is missing, changed or broken."""

import hashlib
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hf_vit.data.sources import Source

# Files are hashed whole up to this many bytes together; beyond, their sizes must do.
HASHED_BYTES = 1 << 30
_NAMED = 3


def named_files(place: Source) -> Iterator[tuple[str, Path]]:
    """Every file with its name for people: split/file, or split/class/file of a folder."""
    for split, paths in place.files.items():
        for path in paths:
            yield f"{split}/{path.name}", path
    for split, classes in place.folder.items():
        for label, paths in classes.items():
            for path in paths:
                yield f"{split}/{label}/{path.name}", path


def file_states(place: Source, contents: bool = True) -> dict[str, str]:
    """Name -> what changes with the file: a hash of its content, or its size. Files that are not there are left out.

    Args:
        place: a folder or files; others have none.
        contents: hash them if all together are at most `HASHED_BYTES`.
    """
    there = [(name, path) for name, path in named_files(place) if path.is_file()]
    whole = contents and sum(path.stat().st_size for _, path in there) <= HASHED_BYTES
    states: dict[str, list[str]] = {}
    for name, path in there:  # files of several folders may share a name
        states.setdefault(name, []).append(_digest(path) if whole else f"{path.stat().st_size}")
    return {name: " ".join(sorted(found)) for name, found in states.items()}


def states_fingerprint(states: Mapping[str, str]) -> str:
    """16 hexadecimal digits of a hash over names and states."""
    lines = sorted(f"{name}\t{state}" for name, found in states.items() for state in found.split())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def tell_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which files are missing, changed or new, as "train/a.parquet is missing, ..."; empty if none is."""
    kinds = {
        "is missing": sorted(before.keys() - now.keys()),
        "has changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
        "is new": sorted(now.keys() - before.keys()),
    }
    told = [f"{name} {what}" for what, names in kinds.items() for name in names]
    more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return ", ".join(told[:_NAMED]) + more


def broken_file(place: Source) -> str | None:
    """The first parquet or tar file that is cut off or none, and why; None if all begin and end as they must."""
    for name, path in named_files(place):
        try:
            if place.kind == "parquet":
                from pyarrow import parquet

                parquet.read_metadata(path)
            elif place.kind == "webdataset":
                _look_into(path)
        except Exception as error:  # pyarrow, tarfile and gzip each raise their own
            reason = " ".join(str(error).split()) or type(error).__name__
            return f"the file {name} is damaged ({reason:.120})"
    return None


def _look_into(path: Path) -> None:
    with tarfile.open(path):  # reads the first header
        pass
    if path.suffix == ".tar":
        with path.open("rb") as file:
            file.seek(-2 * tarfile.BLOCKSIZE, os.SEEK_END)
            if any(file.read()):
                raise tarfile.ReadError("cut off: the two empty blocks at its end are missing")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
