"""The one error a user is meant to read, and what becomes of memory that ran out and of what the system refuses."""

import errno
import os
import re
import unicodedata
from collections.abc import Generator
from contextlib import contextmanager

from hf_vit_settings import UserError

# In the words of CUDA, MPS and cuBLAS; of torch's allocator on the CPU, on Linux and Windows.
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")

# Why the system refuses to write -> what to do about it.
_OF_THE_DISK = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your space there",
    errno.EROFS: "make that disk writable",
    errno.EACCES: "make that folder writable",
    errno.EPERM: "make that folder writable",
    errno.EIO: "check that disk for errors",
}
_OF_TORCH_SAVE = ("inline_container.cc", "iostream error")  # of a large file, and of one that it writes at its end
_OTHERWISE = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "end programs that hold files open",
    errno.ENAMETOOLONG: "give a shorter name",
}


def one_line(value: object) -> str:
    """Return the value's text in one line, without control characters and without what turns the direction of
    writing.
    """
    spaced = "".join(" " if unicodedata.category(sign) in ("Cc", "Zl", "Zp") else sign for sign in str(value))
    return " ".join("".join(sign for sign in spaced if unicodedata.category(sign) not in ("Cf", "Cs")).split())


class DivergedError(UserError):
    """The loss of a training is no number any more."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, of whatever library and device, says that memory ran out."""
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
        raise UserError(f"out of memory for {what}; {remedy}") from error


def refusal(error: BaseException, elsewhere: bool = True) -> str | None:
    """Return why the system refused to write, in its words, and the remedy; None for any other error.

    Args:
        error: of the system, of safetensors (which says it in its text), or of torch.save (which does not say why).
        elsewhere: whether another place would do as well.
    """
    named = re.search(r"\(os error (\d+)\)", str(error))
    if isinstance(error, OSError):
        number, reason = error.errno, error.strerror
    elif any(words in str(error) for words in _OF_TORCH_SAVE):
        number, reason = errno.ENOSPC, "torch could not write a file to its end, probably because the disk is full"
    elif named is not None:
        number, reason = int(named[1]), os.strerror(int(named[1]))
    else:
        return None
    if number not in _OF_THE_DISK:
        return f"{reason}; {_OTHERWISE[number]}" if number in _OTHERWISE else None
    return f"{reason}; {_OF_THE_DISK[number]}{', or choose a folder on another disk' if elsewhere else ''}"


def strict_reason(error: Exception) -> str:
    """Return why a strict config refused its values: it names the validator first and the reason in its last line."""
    return str(error).splitlines()[-1].strip().removeprefix("ValueError: ").removeprefix("TypeError: ")


def first_line(error: BaseException) -> str:
    """Return the first line of a message that says anything, or the error's name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
