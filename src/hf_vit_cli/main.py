"""The `hf-vit` program: collects the commands and turns bad input into one line and a non-zero exit."""

import errno
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import metadata
from io import TextIOWrapper

import typer

from hf_vit_cli.command import Command, plain_text
from hf_vit_cli.options import opt

# Every command has a module, which holds a function, or a group of them, of its name (dashes: underscores).
COMMANDS = (
    *("demo", "finetune", "pretrain", "recipes", "soup"),
    *("data", "evaluate", "predict", "embed", "analyze", "compare", "diff", "cost", "scaling-law"),
    *("convert", "export", "page", "card", "push", "verify", "models", "bench"),
)
# What can be done about what the system did not find or may not read; what it may not write, `errors.refusal` tells.
_REMEDIES = {
    errno.EACCES: "ask for permission, or choose another path",
    errno.EPERM: "ask for permission, or choose another path",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "give a folder",
    errno.EISDIR: "give a file",
    errno.EEXIST: "choose another name",
    errno.ELOOP: "the link points to itself; give its target",
}
# What reads from the Hub -> where its verbosity is looked for, and whether it shows bars.
_CLIENTS = {"datasets": "DATASETS_VERBOSITY", "huggingface_hub": "HF_HUB_VERBOSITY"}
_BARS = {"datasets": "HF_DATASETS_DISABLE_PROGRESS_BARS", "huggingface_hub": "HF_HUB_DISABLE_PROGRESS_BARS"}


def build_app() -> typer.Typer:
    """Assemble the typer application; command modules import nothing heavy at their top."""
    app = typer.Typer(name="hf-vit", pretty_exceptions_enable=False)

    @app.callback(invoke_without_command=True)
    def _root(  # pyright: ignore[reportUnusedFunction]
        context: typer.Context,
        version: bool = opt(False, "Show the version and exit.", "--version"),
    ) -> None:
        """Vision transformers for Hugging Face: train, evaluate, convert, share."""
        if version:
            typer.echo(f"hf-vit {metadata.version('hf-vit')}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    for name in COMMANDS:
        attribute = name.replace("-", "_")
        module = importlib.import_module(f"hf_vit_cli.{attribute}")
        command = getattr(module, attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=Command)(command)
    return app


@contextmanager
def _set_up_logs() -> Generator[None]:
    """Silence the clients' own logs, unless asked for, as errors tell of them; show that a model is converted."""
    shown, handler = logging.getLogger("hf_vit.conversion"), logging.StreamHandler(sys.stderr)
    handler.format = lambda record: plain_text(f"note: {record.getMessage()}")
    levels = {logger: logger.level for logger in (shown, *map(logging.getLogger, _CLIENTS))}
    for name, variable in _CLIENTS.items():
        if os.environ.setdefault(variable, "critical") == "critical":  # which counts when it is imported
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if os.environ.get("RANK", "0") == "0":
        shown.addHandler(handler)
        shown.setLevel(logging.INFO)
    try:
        yield
    finally:
        shown.removeHandler(handler)
        for logger, level in levels.items():
            logger.setLevel(level)


def message_of(error: Exception) -> str | None:
    """Return the line; None where the error is no user's, and its traceback is wanted."""
    if isinstance(error, typer.TyperException):
        text, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
        more = "" if context is None else f"; {context.command_path} --help lists its options"
        line = " ".join(f"{text[:1].lower()}{text[1:]}{more}".split())
        return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
    # Not before there is something to be told: these imports take seconds.
    from hf_vit.errors import one_line
    from hf_vit.results.redaction import redact_message

    text = _refusal(error)
    # It may be kept in a log, and words of strangers may be part of it.
    return None if text is None else redact_message(one_line(text)) or type(error).__name__


def _refusal(error: Exception) -> str | None:
    from huggingface_hub.errors import StrictDataclassError

    from hf_vit.environment import missing_library
    from hf_vit.errors import UserError, is_out_of_memory, refusal, strict_reason

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ImportError):
        return missing_library(error)
    if isinstance(error, OSError):
        # Permission may have been missed for reading.
        why = None if isinstance(error, PermissionError) else refusal(error)
        return _of_system(error) if why is None else f"{error.filename or 'a file'} cannot be written: {why}"
    if isinstance(error, StrictDataclassError):
        return strict_reason(error)
    if is_out_of_memory(error):
        return "out of memory; close other programs, or choose a smaller batch, image or model"
    return None


def _of_system(error: OSError) -> str:
    """Format an operating system error with a remedy, without its number."""
    if error.errno is None or error.filename is None:
        return str(error)
    place = error.filename2 or error.filename
    remedy = _REMEDIES.get(error.errno, "choose another path")
    return f"{os.fspath(place)!r}: {error.strerror or os.strerror(error.errno)}; {remedy}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program: exit 0, or one line on standard error and an exit code other than 0."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a shell closed it (`2>&-`): the next file that is opened would get its lines
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    warnings.formatwarning = lambda message, *_: f"note: {' '.join(str(message).split())}\n"
    if isinstance(sys.stdout, TextIOWrapper):  # names of files need not be text
        sys.stdout.reconfigure(errors="backslashreplace")
    for client, variable in _BARS.items() if not sys.stderr.isatty() else ():  # in a log bars are lines
        if os.environ.setdefault(variable, "1") == "1" and client in sys.modules:  # else it counts when it is imported
            importlib.import_module(f"{client}.utils").disable_progress_bars()
    given = None if arguments is None else list(arguments)
    try:
        try:
            os.getcwd()  # before anything is imported that looks there
        except FileNotFoundError:
            raise typer.TyperException("the working directory was deleted; change to another") from None
        with _set_up_logs():
            code = build_app()(args=given, prog_name="hf-vit", standalone_mode=False)
    except Exception as error:
        message = None if os.environ.get("HF_VIT_TRACEBACK") else message_of(error)
        if message is None:
            raise
        rank = os.environ.get("RANK", "0")
        print(f"hf-vit: {message}" if rank == "0" else f"hf-vit (process {rank}): {message}", file=sys.stderr)
        code = error.exit_code if isinstance(error, typer.TyperException) else 1  # 2: it was typed wrongly
    raise SystemExit(code or 0)
