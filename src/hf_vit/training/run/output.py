"""The output folder: held by one run alone, free or its own, filled in one move, tidied up.

OUTPUT/                  the finished model, config.json last
OUTPUT/checkpoints/      see `checkpoints`; gone when the model is there, unless it is to be kept
OUTPUT/.lock             while a run lives, and after one that was killed
"""

import os
import shutil
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from huggingface_hub.utils import WeakFileLock

from hf_vit.errors import UserError, refusal
from hf_vit.results.writing import remove_remains
from hf_vit.training.processes import is_first, wait_for_all
from hf_vit.training.run.checkpoints import RUN_NAME, work_folder
from hf_vit.training.run.decisions import Run

_LOCK, _REMOVED = ".lock", ".checkpoints-removed"
_AT_ONCE = 0.1  # seconds: a lock that is free is taken within; 0 would be none


@contextmanager
def alone_in(output: Path) -> Generator[None]:
    """Hold an output folder against other runs; it is made if need be, and goes again if nothing was written.

    The first process does for all.

    Raises:
        UserError: another run lives in it, it is no folder, or it cannot be written.
    """
    if not is_first():
        yield
        return
    if output.exists() and not output.is_dir():
        raise UserError(f"the output {output} is a file; choose a new or empty folder")
    absent = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        with ExitStack() as held:
            _enter(held, output)
            try:
                yield
            finally:
                # Removed while it is held: who opened it meanwhile sees that it has no name any more, and tries again.
                with suppress(OSError):
                    (output / _LOCK).unlink()
    finally:
        with suppress(OSError):
            for folder in absent:
                folder.rmdir()


def _enter(held: ExitStack, output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        held.enter_context(WeakFileLock(output / _LOCK, timeout=_AT_ONCE))
    except TimeoutError as error:
        raise UserError(f"another run is at work in {output}; wait for its end, or choose another --output") from error
    except OSError as error:
        raise UserError(
            f"the output {output} cannot be written ({error.strerror or error}); choose another folder"
        ) from error


def is_finished(output: Path) -> bool:
    """Whether a folder holds a complete model, whatever lies beside it."""
    return (output / "config.json").is_file() and (output / "facts.json").is_file()


def refuse_taken(output: Path, resume: bool) -> None:
    """Make sure that an output folder is free, or holds a run to be resumed; the first process does for all.

    Raises:
        UserError: it holds something else.
    """
    if not is_first():
        return
    work = work_folder(output)
    remove_remains(work)
    with suppress(OSError):
        work.rmdir()  # empty: a run was killed before it was entered
    inside = sorted(path.name for path in output.iterdir() if path.name != _LOCK) if output.exists() else []
    if not inside:
        return
    if is_finished(output):
        raise UserError(f"the output folder {output} holds a finished model; choose a new or empty one")
    if not (work / RUN_NAME).is_file():
        held = f"something else ({', '.join(inside[:3])})"
        raise UserError(f"the output folder {output} holds {held}; choose a new or empty one")
    if not resume:
        raise UserError(f"{output} holds an unfinished run; go on with --resume, or delete the folder")


def deliver(run: Run, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside the checkpoints, move it into the output when it is complete, and tidy up.

    The first process does, when no other reads the checkpoints any more; all return when it has.

    Raises:
        UserError: the system refuses to write; the checkpoints stay.
    """
    wait_for_all()
    if is_first():
        _deliver(run, write)
        tidy(run.output, run.options.keep_checkpoints)
    wait_for_all()


def _deliver(run: Run, write: Callable[[Path], None]) -> None:
    # Of the same name as the output, which is the model's name in the card.
    parcel = run.work / "finished" / run.output.absolute().name
    try:
        shutil.rmtree(parcel, ignore_errors=True)
        parcel.mkdir(parents=True)
        write(parcel)
        move_into(parcel, run.output)
    except Exception as error:  # of safetensors, torch or the system
        why = refusal(error.__cause__ or error, elsewhere=False)
        if why is None:
            raise
        with suppress(OSError):
            shutil.rmtree(parcel)
        raise UserError(
            f"the output {run.output} cannot be written: {why}, then go on with --resume; the checkpoints are complete"
        ) from error


def tidy(output: Path, keep_checkpoints: bool) -> None:
    """Remove what a finished model does not need; renamed first, so that a kill leaves no half of a run behind."""
    work, removed = work_folder(output), output / _REMOVED
    if not keep_checkpoints and work.exists():
        shutil.rmtree(removed, ignore_errors=True)
        work.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def move_into(source: Path, target: Path, last: str = "config.json") -> None:
    """Move the files of a folder into another on the same disk; `last` comes last, it makes a model loadable."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: (path.name == last, path.name)):
        os.replace(path, target / path.name)
    source.rmdir()


def need_space_for(run: Run, beside: int = 0) -> None:
    """Raise before training if the disk has no room for the finished model and three checkpoints (one being written).

    Args:
        run: what is about to be trained.
        beside: bytes of a checkpoint beside the model's weights and their optimizer's.

    Raises:
        UserError: see `need_space`.
    """
    weights = sum(parameter.numel() * 4 for parameter in run.model.parameters())
    state = weights * {"adamw": 2, "lamb": 2, "sgd": 1, "lion": 1, "muon": 2}[run.recipe.optimizer]
    if run.recipe.average_decay is not None or run.recipe.tune == "lora":
        state += weights  # what training goes on from, beside what is released
    # 16 MiB for processor, code, pictures and the files' own overhead.
    need_space(run.output, weights + 3 * (weights + state + beside) + (16 << 20))


def need_space(folder: Path, needed: int) -> None:
    """Make sure that `needed` bytes fit on the disk of a folder that may not exist yet.

    Raises:
        UserError: they do not.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"the disk of {folder} has {_size(free)} free and training needs about {_size(needed)} (the model and "
            "three checkpoints with optimizer state); free some space or choose another place"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
