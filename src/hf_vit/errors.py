"""Turn errors that users can act on, such as full memory or a full disk, into one clear line."""

import errno
import os
import re
import unicodedata
from collections.abc import Generator
from contextlib import contextmanager

from hf_vit_settings import UserError

# Phrases in the errors of CUDA, MPS and cuBLAS, and of torch's CPU allocator on Linux and Windows.
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")

# Error number of a failed write -> remedy, for errors that depend on the disk.
_DISK_REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your space there",
    errno.EROFS: "make that disk writable",
    errno.EACCES: "make that folder writable",
    errno.EPERM: "make that folder writable",
    errno.EIO: "check that disk for errors",
}
_TORCH_SAVE_ERRORS = ("inline_container.cc", "iostream error")  # phrases of torch.save when a write fails
_OTHER_REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "end programs that hold files open",
    errno.ENAMETOOLONG: "give a shorter name",
}


def to_one_line(value: object) -> str:
    """Return the value's text in one line, without control characters and marks that change the writing direction."""
    text_with_spaces = "".join(
        " " if unicodedata.category(character) in ("Cc", "Zl", "Zp") else character for character in str(value)
    )
    return " ".join(
        "".join(
            character for character in text_with_spaces if unicodedata.category(character) not in ("Cf", "Cs")
        ).split()
    )


class UnlabeledError(UserError):
    """The data lack the labels that are asked for."""


class DivergedError(UserError):
    """Training diverged: the loss is not a finite number."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of any library or device means that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY)


@contextmanager
def report_full_memory(purpose: str, remedy: str) -> Generator[None]:
    """Turn running out of memory in a block into an error of one line.

    Args:
        purpose: what needs the memory, such as "a batch of 8 images".
        remedy: what the user can do, such as "choose a smaller batch size".

    Raises:
        UserError: memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"out of memory for {purpose}; {remedy}") from error


def explain_refusal(error: BaseException, elsewhere: bool = True) -> str | None:
    """Return why the system refused to write and the remedy; None for any other error.

    Args:
        error: an error of the system, of safetensors (which names the reason in its text) or of torch.save (which does
            not).
        elsewhere: whether another disk would help.
    """
    os_error = re.search(r"\(os error (\d+)\)", str(error))
    if isinstance(error, OSError):
        number, reason = error.errno, error.strerror
    elif any(phrase in str(error) for phrase in _TORCH_SAVE_ERRORS):
        number = errno.ENOSPC
        reason = "torch could not write a file to its end, probably because the disk is full"
    elif os_error is not None:
        number = int(os_error[1])
        reason = os.strerror(int(os_error[1]))
    else:
        return None
    if number not in _DISK_REMEDIES:
        return f"{reason}; {_OTHER_REMEDIES[number]}" if number in _OTHER_REMEDIES else None
    return f"{reason}; {_DISK_REMEDIES[number]}{', or choose a folder on another disk' if elsewhere else ''}"


def get_strict_reason(error: Exception) -> str:
    """Return why a strict config refused its values, which is the last line of the error."""
    return str(error).splitlines()[-1].strip().removeprefix("ValueError: ").removeprefix("TypeError: ")


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty, or the error's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
