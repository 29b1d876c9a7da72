"""Write a folder so that it appears complete or not at all, whatever happens meanwhile."""

import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_vit.errors import UserError
from hf_vit.results.facts import FACTS_NAME, Facts
from hf_vit.results.writing import beside, refuse_address, remove_remains, saying_why

# What training, convert and export write, and what card, evaluate and analyze add to it.
_WRITTEN = re.compile(
    r"config\.json|\w+_hf_\w+\.py|facts\.json|README\.md|training_images\.txt"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|model\.(npz|pte)|openvino_model\.(xml|bin)"
    r"|onnx/|(onnx/)?((pre)?processor_config\.json|model\.onnx(\.data)?|export\.(json|npz))"
    r"|(learning_curve|confusion_matrix|wrong_images|embeddings|predictions)\.png|(evaluation|analysis)_\w+\.(png|svg)"
)


def free_folder(output: str | Path, force: bool | None = None, parcel: Path | None = None) -> Path:
    """Return where a new folder will be written: `output`, or what it links to; what a killed process left there goes.

    Args:
        output: absent or an empty folder.
        force: it may also hold a model that this package wrote, and nothing else, which will be replaced; None where
            the user has no such choice.
        parcel: what may lie in it besides.

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
        with saying_why(output):
            remove_remains(place)
            if {*place.iterdir()} - {parcel}:
                _refuse_full(output, place, force)
    elif place.exists() or place.is_symlink():  # a link to itself
        raise UserError(f"{output} exists and is not a folder; give another name")
    file = next((above for above in place.parents if above.exists() and not above.is_dir()), None)
    if file is not None:
        raise UserError(f"{output} cannot be a folder, as {file.name} is a file; give another name")
    return place


def _refuse_full(output: str | Path, place: Path, force: bool | None) -> None:
    """Let pass a folder that `force` may replace."""
    foreign, is_model = _foreign_in(place), False  # a facts.json alone comes of a measurement, too
    with suppress(UserError):  # it is damaged
        is_model = bool(Facts.load(place).origins())
    if not (force and is_model):
        remedy = "; --force replaces only what hf-vit trained, converted or exported" if force else ""
        if force is False and is_model and not foreign:
            remedy = ", or replace what is in it with --force"
        raise UserError(f"the folder {output} is not empty; give a new folder, or empty this one first{remedy}")
    if foreign:
        held = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise UserError(
            f"the folder {output} holds {held}, which hf-vit did not write; give a new folder, or move these files"
        )
    if os.path.ismount(place) or place == Path.cwd():
        raise UserError(f"the folder {output} is a disk or the working folder; empty it, or name a folder inside it")


def _foreign_in(place: Path) -> list[str]:
    entries = (*place.iterdir(), *place.glob("onnx/*"))
    names = [path.relative_to(place).as_posix() + "/" * path.is_dir() for path in entries]
    return sorted(name for name in names if not _WRITTEN.fullmatch(name))


@contextmanager
def new_folder(output: Path, force: bool = False) -> Generator[Path]:
    """Make a folder of the name of `output` that takes its place at the end, or vanishes if anything goes wrong.

    Until then it lies in a hidden one beside `output`; inside, where that is there and empty. Then `output` stays what
    it is, perhaps a disk of its own or the working folder, and is filled.

    Args:
        output: as `free_folder` gives it.
        force: see `free_folder`.

    Raises:
        UserError: the disk is full, or nothing may be written there.
    """
    is_there = output.is_dir() and not any(output.iterdir())
    temporary = beside(output / output.name if is_there else output, "tmp")
    folder = temporary / output.name
    try:
        with saying_why(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(parents=True)
        yield folder
        with saying_why(output):
            free_folder(output, None if is_there else force, temporary)  # someone else may have been faster
            (_fill if is_there else _replace)(output, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fill(output: Path, folder: Path) -> None:
    """Move what is in `folder` into `output`, or nothing.

    After a kill it can be replaced, as facts.json comes first, and is no model, as what makes one of it comes last.
    """

    def place_in_line(path: Path) -> tuple[bool, bool, bool]:
        is_model = path.name.startswith(("model", "openvino_model"))
        return path.name != FACTS_NAME, path.name == "config.json", is_model

    moved: list[Path] = []
    try:
        for path in sorted(folder.iterdir(), key=place_in_line):
            path.replace(output / path.name)
            moved.append(path)
    except BaseException:
        for path in moved:
            (output / path.name).replace(path)
        raise


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
