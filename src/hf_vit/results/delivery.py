"""Folders that appear complete or not at all, whatever happens while they are written."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_vit.errors import UserError
from hf_vit.results.facts import FACTS_NAME
from hf_vit.results.writing import beside, refuse_address, remove_remains, saying_why


def free_folder(output: str | Path, force: bool | None = None) -> Path:
    """Where a new folder will be written: `output`, or what it links to; what a killed process left there goes.

    Args:
        output: absent or an empty folder.
        force: it may also hold what this package wrote, which will be replaced; None where the user has no such choice.

    Raises:
        UserError: it is neither.
    """
    refuse_address(output)
    output = Path(output)
    with saying_why(output):
        place = Path(os.path.realpath(output))
        with suppress(FileNotFoundError, NotADirectoryError):
            place.lstat()  # finds a name that is too long
        remove_remains(place.parent, place.name)
    if place.is_dir():
        is_ours = (place / FACTS_NAME).is_file()
        if any(place.iterdir()) and not (force and is_ours):
            remedy = f"; --force replaces only a folder with a {FACTS_NAME}" if force else ""
            if force is False and is_ours:
                remedy = ", or replace what is in it with --force"
            raise UserError(f"the folder {output} is not empty; give a new folder, or empty this one first{remedy}")
    elif place.exists() or place.is_symlink():  # a link to itself
        raise UserError(f"{output} exists and is no folder; give another name")
    file = next((above for above in place.parents if above.exists() and not above.is_dir()), None)
    if file is not None:
        raise UserError(f"{output} cannot be a folder, as {file.name} is a file; give another name")
    return place


@contextmanager
def new_folder(output: Path, force: bool = False) -> Generator[Path]:
    """A folder of the name of `output` that takes its place at the end, or vanishes if anything goes wrong.

    Until then it lies in a hidden one beside `output`.

    Args:
        output: as `free_folder` gives it.
        force: see `free_folder`.

    Raises:
        UserError: the disk is full, or nothing may be written there.
    """
    temporary = beside(output, "tmp")
    folder = temporary / output.name
    try:
        with saying_why(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(parents=True)
        yield folder
        with saying_why(output):
            free_folder(output, force)  # someone else may have been faster
            _replace(output, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(output: Path, folder: Path) -> None:
    """Put `folder` in the place of `output`, which is absent, empty, or given up."""
    if not (output.is_dir() and any(output.iterdir())):
        folder.replace(output)
        return
    former = beside(output, "former")
    output.rename(former)
    try:
        folder.replace(output)
    except BaseException:
        former.rename(output)
        raise
    shutil.rmtree(former, ignore_errors=True)
