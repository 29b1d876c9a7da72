"""Write an output folder so that it appears complete or not at all."""

import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_vit.display import shorten_list
from hf_vit.errors import UserError
from hf_vit.results.facts import FACTS_NAME, Facts
from hf_vit.writing import explain_write_errors, make_hidden_path, reject_url, remove_leftovers, settle_folder

# In every card that hf_vit renders; a README.md without it is its owner's.
MARKER = "<!-- Rendered by hf-vit from facts.json and config.json; edits here are lost when it is rendered again. -->"
# Files that training, convert and export write, and those that card, evaluate, analyze and verify add.
_OUR_FILES = re.compile(
    r"(config|facts|doors)\.json|\w+_hf_\w+\.py|README\.md|training_images\.txt"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|model\.(npz|pte)|openvino_model\.(xml|bin)"
    r"|onnx/|(onnx/)?((pre)?processor_config\.json|model\.onnx(\.data)?|export\.(json|npz))"
    r"|(learning_curve|confusion_matrix|wrong_images|embeddings|predictions)\.png|(evaluation|analysis)_\w+\.(png|svg)"
)


def prepare_output(output: str | Path, force: bool | None = None, ignored_path: Path | None = None) -> Path:
    """Check that an output folder can be written, remove what a killed process left in it, and return its real path.

    It does not exist yet or is empty, but for `ignored_path`; a link is followed. With `force` a model written by
    hf_vit, with no other files beside it, may be replaced; None stands for a user without such an option.

    Raises:
        UserError: the folder holds other files, or the path cannot be a folder.
    """
    reject_url(output)
    output = Path(output).expanduser()
    with explain_write_errors(output):
        target = Path(os.path.realpath(output))
        with suppress(FileNotFoundError, NotADirectoryError):
            target.lstat()  # raises if the name is too long
        remove_leftovers(target.parent, target.name)
    if target.is_dir():
        with explain_write_errors(output):
            remove_leftovers(target)
            if {*target.iterdir()} - {ignored_path}:
                _check_replaceable(output, target, force)
    elif target.exists() or target.is_symlink():  # the second condition: a link to itself
        raise UserError(f"the output {output} exists and is not a folder; choose another name")
    file = next((parent for parent in target.parents if parent.exists() and not parent.is_dir()), None)
    if file is not None:
        raise UserError(f"the output folder {output} cannot be created, as {file.name} is a file; choose another name")
    return target


def _check_replaceable(output: str | Path, target: Path, force: bool | None) -> None:
    """Raise a UserError for a non-empty folder, unless `force` is set and it holds only a model written by hf_vit."""
    entries = (*target.iterdir(), *target.glob("onnx/*"))
    names = [path.relative_to(target).as_posix() + "/" * path.is_dir() for path in entries]
    foreign_files = [name for name in names if not _OUR_FILES.fullmatch(name)]
    card = target / "README.md"
    if card.is_file() and MARKER not in card.read_text(encoding="utf-8", errors="replace"):
        foreign_files.append(card.name)
    is_model = False  # facts.json alone does not prove a model: measurements write it as well
    with suppress(UserError):  # facts.json is damaged
        is_model = bool(Facts.load(target).list_origins())
    if not (force and is_model):
        remedy = "; --force replaces only what hf-vit trained, converted or exported" if force else ""
        if force is False and is_model and not foreign_files:
            remedy = ", or add --force to replace its content"
        raise UserError(f"the folder {output} is not empty; choose a new folder, or empty this one first{remedy}")
    if foreign_files:
        file_list = shorten_list(sorted(foreign_files), 3)
        raise UserError(
            f"the folder {output} holds {file_list}, which hf-vit did not write; choose another, or move them"
        )
    if os.path.ismount(target) or target == Path.cwd():
        problem = f"the folder {output} is a mount point or the working folder, so it cannot be replaced"
        raise UserError(f"{problem}; empty it, or choose a folder inside it")


@contextmanager
def deliver_folder(output: Path, force: bool = False) -> Generator[Path]:
    """Yield a temporary folder that is moved to `output` on success and deleted on failure.

    The temporary folder lies hidden beside `output`. If `output` exists and is empty, it may be a mount point or the
    working folder and cannot be replaced; the temporary folder then lies inside it and its files are moved one by one.
    `output` is the path that `prepare_output` returned.

    Raises:
        UserError: the disk is full, or the folder may not be written.
    """
    is_empty_folder = output.is_dir() and not any(output.iterdir())
    temporary = make_hidden_path(output / output.name if is_empty_folder else output, "tmp")
    folder = temporary / output.name
    try:
        with explain_write_errors(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(parents=True)
        yield folder
        with explain_write_errors(output):
            settle_folder(folder)
            # Another process may have written it meanwhile.
            prepare_output(output, None if is_empty_folder else force, temporary)
            (fill_folder if is_empty_folder else _replace)(output, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fill_folder(output: Path, folder: Path) -> None:
    """Move all files from `folder` into `output`, or none if a move fails.

    facts.json is moved first, so that the next run may replace the folder after a kill; config.json and weights are
    moved last, so that an incomplete folder does not load as a model.
    """

    def sort_key(path: Path) -> tuple[bool, bool, bool]:
        is_model = path.name.startswith(("model", "openvino_model"))
        return path.name != FACTS_NAME, path.name == "config.json", is_model

    moved_paths: list[Path] = []
    try:
        for path in sorted(folder.iterdir(), key=sort_key):
            path.replace(output / path.name)
            moved_paths.append(path)
    except BaseException:
        for path in moved_paths:
            (output / path.name).replace(path)
        raise


def _replace(output: Path, folder: Path) -> None:
    """Move `folder` to `output`, which is absent, empty, or a model that may be replaced."""
    if not (output.is_dir() and any(output.iterdir())):
        folder.replace(output)
        return
    former = make_hidden_path(output, "former")
    with suppress(OSError):  # some file systems have no permissions
        folder.chmod(output.stat().st_mode & 0o7777 | 0o700)  # a private folder stays private
    output.rename(former)
    try:
        folder.replace(output)
    except BaseException:
        former.rename(output)
        raise
    shutil.rmtree(former, ignore_errors=True)
