"""Folders that appear complete or not at all, whatever happens while they are written."""

import os
import re
import shutil
import socket
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from hf_vit.errors import UserError


def refuse_used_folder(output: Path) -> None:
    """Raise a UserError unless `output` is absent or an empty folder."""
    if output.is_dir():
        if any(output.iterdir()):
            raise UserError(f"the folder {output} is not empty; give a new folder, or empty this one first")
    elif output.exists() or output.is_symlink():
        raise UserError(f"{output} exists and is no folder; give another name")


@contextmanager
def new_folder(output: Path) -> Generator[Path]:
    """A temporary folder beside `output` that takes its place at the end, or vanishes if anything goes wrong.

    What a process that was killed left behind is removed first.
    """
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    _remove_remains(output)
    folder = output.with_name(f".{output.name}.{_this_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    folder.mkdir()
    try:
        yield folder
        refuse_used_folder(output)  # someone else may have been faster
        folder.replace(output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _this_host() -> str:
    return re.sub(r"\W", "", socket.gethostname())[:40]


def _remove_remains(output: Path) -> None:
    """Temporary folders of this machine's processes that are no more; those of others may still be in use."""
    pattern = re.compile(rf"\.{re.escape(output.name)}\.{_this_host()}-(\d+)-[0-9a-f]{{8}}\.tmp")
    for folder in output.parent.iterdir():
        found = pattern.fullmatch(folder.name)
        if found and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(folder, ignore_errors=True)
