"""The one error a user is meant to read, and what memory that ran out becomes."""

from collections.abc import Generator
from contextlib import contextmanager

# In the words of CUDA, MPS and cuBLAS; of torch's allocator on the CPU, on Linux and Windows.
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")


class UserError(ValueError):
    """Bad input: the message says what was given, what is needed and the remedy.

    The command line prints it as one line.
    """


class DivergedError(UserError):
    """The loss of a training is no number any more."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, of whatever library and device, says that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@contextmanager
def enough_memory(what: str, remedy: str) -> Generator[None]:
    """Turn memory that runs out meanwhile into one line.

    Args:
        what: was to fit: "a batch of 8 images".
        remedy: "choose a smaller batch size".

    Raises:
        UserError: it did not fit.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"there is too little memory for {what}; {remedy}") from error


def strict_reason(error: Exception) -> str:
    """Why a strict config refused its values: it names the validator first and the reason in its last line."""
    return str(error).splitlines()[-1].strip().removeprefix("ValueError: ")


def first_line(error: BaseException) -> str:
    """The first line of a message that says anything, or the error's name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
