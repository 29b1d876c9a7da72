"""What is said of an error that tells of bad input: one line."""

import errno
import os

import typer

# What can be done about what the system did not find or may not read; what it may not write, `errors.refusal` tells.
_REMEDIES = {
    errno.EACCES: "have it permitted, or choose another place",
    errno.EPERM: "have it permitted, or choose another place",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "give a folder",
    errno.EISDIR: "give a file",
    errno.EEXIST: "choose another name",
    errno.ELOOP: "the link leads to itself: give what it should lead to",
}


def exit_code_of(error: Exception) -> int:
    """2 for a command that was typed wrongly, 1 for what it could not do."""
    return error.exit_code if isinstance(error, typer.TyperException) else 1


def message_of(error: Exception) -> str | None:
    """The line; None where the error is no user's, and its traceback is wanted."""
    if isinstance(error, typer.TyperException):
        line = " ".join(_misuse(error).split())
        return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
    # Not before there is something to be told: these imports take seconds.
    from hf_vit.errors import one_line
    from hf_vit.results.redaction import redact_message

    text = _refusal(error)
    # It may be kept in a log, and words of strangers may be part of it.
    return None if text is None else redact_message(one_line(text)) or type(error).__name__


def _misuse(error: typer.TyperException) -> str:
    """Of what was typed: what is wrong, and where to look."""
    text, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    more = "" if context is None else f"; {context.command_path} --help tells what it takes"
    return f"{text[:1].lower()}{text[1:]}{more}"


def _refusal(error: Exception) -> str | None:
    from huggingface_hub.errors import StrictDataclassError

    from hf_vit.errors import UserError, is_out_of_memory, refusal, strict_reason

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        # Permission may have been missed for reading.
        why = None if isinstance(error, PermissionError) else refusal(error)
        return _of_system(error) if why is None else f"{error.filename or 'a file'} cannot be written: {why}"
    if isinstance(error, StrictDataclassError):
        return strict_reason(error)
    if is_out_of_memory(error):
        return "there is too little memory for this; end other programs, or choose a smaller batch, image or model"
    return None


def _of_system(error: OSError) -> str:
    """Without its number, and with what can be done."""
    if error.errno is None or error.filename is None:
        return str(error)
    place = error.filename2 or error.filename
    remedy = _REMEDIES.get(error.errno, "look into it, or choose another place")
    return f"{os.fspath(place)!r}: {error.strerror or os.strerror(error.errno)}; {remedy}"
