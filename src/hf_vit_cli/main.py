"""The `hf-vit` program: registers the commands, and turns errors into one line and a non-zero exit code."""

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

from hf_vit_cli.command import Command, strip_control_characters
from hf_vit_cli.options import opt

# Every command has a module with a function or a typer group of the same name (underscores for dashes).
COMMANDS = (
    *("demo", "finetune", "pretrain", "recipes", "soup"),
    *("data", "evaluate", "predict", "embed", "analyze", "compare", "diff", "cost", "scaling-law"),
    *("convert", "export", "page", "card", "push", "verify", "models", "bench"),
)
# Remedies for system errors while reading; `errors.explain_refusal` handles errors while writing.
_REMEDIES = {
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "give a folder",
    errno.EISDIR: "give a file",
    errno.EEXIST: "choose another name",
    errno.ELOOP: "the link points to itself; give the file that it should point to",
}
# Library that reads from the Hub -> environment variables of its verbosity, and of its progress bars.
_CLIENTS = {"datasets": "DATASETS_VERBOSITY", "huggingface_hub": "HF_HUB_VERBOSITY"}
_BARS = {"datasets": "HF_DATASETS_DISABLE_PROGRESS_BARS", "huggingface_hub": "HF_HUB_DISABLE_PROGRESS_BARS"}


def build_app() -> typer.Typer:
    """Return the typer application with all commands; command modules import nothing slow at module level."""
    app = typer.Typer(name="hf-vit", pretty_exceptions_enable=False)

    @app.callback(invoke_without_command=True)
    def _root(  # pyright: ignore[reportUnusedFunction]
        context: typer.Context, version: bool = opt(False, "Show the version and exit.", "--version")
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
    """Silence the Hub clients' logs, as errors are reported in one line, and show notes about conversions."""
    conversion_log = logging.getLogger("hf_vit.conversion")
    handler = logging.StreamHandler(sys.stderr)
    handler.format = lambda record: strip_control_characters(f"note: {record.getMessage()}")
    levels = {logger: logger.level for logger in (conversion_log, *map(logging.getLogger, _CLIENTS))}
    for name, variable in _CLIENTS.items():
        if os.environ.setdefault(variable, "critical") == "critical":  # read when the library is imported
            logging.getLogger(name).setLevel(logging.CRITICAL)
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        conversion_log.addHandler(handler)
    conversion_log.setLevel(logging.INFO if is_main else logging.ERROR)
    try:
        yield
    finally:
        conversion_log.removeHandler(handler)
        for logger, level in levels.items():
            logger.setLevel(level)


def format_error(error: Exception) -> str | None:
    """Return the line to print for an error; None for an unexpected error, whose traceback is needed."""
    if isinstance(error, typer.TyperException):
        text = error.format_message().rstrip(".")
        context = getattr(error, "ctx", None)
        help_hint = "" if context is None else f"; {context.command_path} --help lists all options"
        line = " ".join(f"{text[:1].lower()}{text[1:]}{help_hint}".split())
        return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
    # These imports take seconds, so they are made only for an error.
    from hf_vit.errors import to_one_line
    from hf_vit.results.redaction import redact_message

    text = _describe_error(error)
    # Redacted, as it may be logged; one line, as it may contain text from elsewhere.
    return None if text is None else redact_message(to_one_line(text)) or type(error).__name__


def _describe_error(error: Exception) -> str | None:
    """Return the message for an error that a user can mend; None for other errors."""
    from huggingface_hub.errors import StrictDataclassError

    from hf_vit.environment import describe_missing_library
    from hf_vit.errors import UserError, explain_refusal, get_strict_reason, is_out_of_memory

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ImportError):
        return describe_missing_library(error)
    if isinstance(error, OSError):
        # Permission may be missing for reading, which `explain_refusal` does not cover.
        reason = None if isinstance(error, PermissionError) else explain_refusal(error)
        if reason is None:
            return _describe_system_error(error)
        return f"{error.filename or 'a file'} cannot be written: {reason}"
    if isinstance(error, StrictDataclassError):
        return get_strict_reason(error)
    if is_out_of_memory(error):
        return "the memory is full; close other programs, or choose a smaller --batch-size, --image-size or model"
    return None


def _describe_system_error(error: OSError) -> str:
    """Return the message for an operating system error: path, reason and remedy, without the error number."""
    if error.errno is None or error.filename is None:
        return str(error)
    path = error.filename2 or error.filename
    remedy = _REMEDIES.get(error.errno, "choose another path")
    return f"{os.fspath(path)!r}: {error.strerror or os.strerror(error.errno)}; {remedy}"


def _set_up_output() -> None:
    """Make standard output and error writable, print warnings as notes, and hide progress bars outside a terminal."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (`2>&-`): the next opened file would receive the output
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    warnings.formatwarning = lambda message, *_: f"note: {strip_control_characters(' '.join(str(message).split()))}\n"
    if isinstance(sys.stdout, TextIOWrapper):  # file names may not be valid text
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr.isatty():
        return
    for client, variable in _BARS.items():  # in a log every update is a line
        if os.environ.setdefault(variable, "1") == "1" and client in sys.modules:  # read only when it is imported
            importlib.import_module(f"{client}.utils").disable_progress_bars()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; it exits with code 0, or with one line on standard error and another code."""
    _set_up_output()
    argument_list = None if arguments is None else list(arguments)
    try:
        try:
            os.getcwd()  # checked first, as imports need the working directory
        except FileNotFoundError:
            raise typer.TyperException("the working directory was deleted; change to another one with cd") from None
        with _set_up_logs():
            code = build_app()(args=argument_list, prog_name="hf-vit", standalone_mode=False)
    except Exception as error:
        message = None if os.environ.get("HF_VIT_TRACEBACK") else format_error(error)
        if message is None:
            raise
        rank = os.environ.get("RANK", "0")
        print(f"hf-vit: {message}" if rank == "0" else f"hf-vit (process {rank}): {message}", file=sys.stderr)
        code = error.exit_code if isinstance(error, typer.TyperException) else 1  # typer's code 2 means a usage error
    raise SystemExit(code or 0)
