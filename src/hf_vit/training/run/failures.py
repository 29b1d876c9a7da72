"""What can befall a training, in one line each that says how to go on."""

from collections.abc import Generator
from contextlib import contextmanager, suppress

from hf_vit.errors import DivergedError, UserError, is_out_of_memory, refusal
from hf_vit.training.processes import is_first
from hf_vit.training.run.checkpoints import last_complete, remove_incomplete
from hf_vit.training.run.decisions import Run


@contextmanager
def explained(run: Run, accumulates: bool) -> Generator[None]:
    """Turn what befalls a training into one line.

    Args:
        run: what is trained.
        accumulates: its batches may be put together from smaller parts.

    Raises:
        UserError: instead of the errors of torch, the system and the data libraries.
    """
    try:
        yield
    except UserError as error:
        if why := refusal(error.__cause__ or error, elsewhere=False):
            raise UserError(_unwritable(run, why)) from error
        # From a loader's worker it arrives wrapped in the worker's traceback.
        message = str(error).rpartition("UserError: ")[2].strip()
        if isinstance(error, DivergedError):
            raise DivergedError(f"{message}; a training of other settings wants another --output") from error
        raise UserError(message) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(_too_little_memory(run, accumulates)) from error
        if why := refusal(error, elsewhere=False):
            raise UserError(_unwritable(run, why)) from error
        if "DataLoader worker (pid" in str(error):
            raise UserError(_killed_worker(run, error)) from error
        if "Batch does not contain any data" in str(error):  # accelerate's, of a stream without rows
            raise UserError(
                f"{run.data.name} as a stream has no image for validation or for test, which get about 10% of its "
                "images each; give more images, or leave --streaming out"
            ) from error
        # An error that came of files which were taken away or changed while they were read.
        if changes := run.data.changed_files():
            raise UserError(f"of the training data {changes}; put it back as it was, then {_resume(run)}") from error
        raise


def _resume(run: Run) -> str:
    kept = last_complete(run.work)
    return f"go on from {kept.name} with --resume" if kept else "start again with --resume"


def _too_little_memory(run: Run, accumulates: bool) -> str:
    size, smaller = run.micro_batch_size, "smaller images or a smaller model"
    message = f"there is too little memory for {size} images at once; choose "
    if size > 1:
        flag, same = ("--micro-batch-size", " (the result stays the same)") if accumulates else ("--batch-size", "")
        message += f"a smaller {flag} than {size}{same}, {smaller}"
    else:
        message += smaller
    if last_complete(run.work) is None:
        return f"{message}, and start again with --resume"
    return f"{message}, in another --output"


def _unwritable(run: Run, why: str) -> str:
    with suppress(OSError):
        if is_first():
            remove_incomplete(run.work)
    return f"the output {run.output} cannot be written: {why}, then {_resume(run)}"


def _killed_worker(run: Run, error: Exception) -> str:
    """Most often by the system, where memory ran out; a stream's workers cannot be fewer when it is resumed."""
    reason = " ".join(str(error).split()).rstrip(".")
    fewer = "" if run.options.streaming and last_complete(run.work) else " or choose a smaller --num-workers"
    return (
        f"a process that prepares images was killed, most likely for want of memory ({reason}); free some{fewer}, then "
        f"{_resume(run)}"
    )
