"""What can be told of a path before any work: whether it can be read to an end, or written."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def is_endless(path: str | Path) -> bool:
    """Whether a device or a pipe has this name, which may never end."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def obstacle(place: Path) -> str | None:
    """Why nothing can be written to a file or folder of this name; None where it can. Nothing is written."""
    from hf_vit.results.writing import is_address

    if is_address(place):
        return "it is an address, not a place on this machine"
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(place)  # which a name that is too long does not survive
        nearest = next(each for each in (place.absolute(), *place.absolute().parents) if os.path.lexists(each))
        if not nearest.exists():
            return f"{nearest.name} is a link that leads nowhere"
        if nearest == place.absolute() and nearest.is_file():
            nearest = nearest.parent
        if not nearest.is_dir():
            return f"{nearest} is no folder"
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return error.strerror
