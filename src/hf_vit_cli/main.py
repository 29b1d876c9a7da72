"""The `hf-vit` program: collects the commands and turns bad input into one line and a non-zero exit."""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import metadata
from io import TextIOWrapper
from typing import Annotated

import typer

from hf_vit_cli.command import Command
from hf_vit_cli.messages import exit_code_of, message_of

# Command -> the folder of its module, which has a function, or a group of them, of that name (dashes: underscores).
COMMANDS: dict[str, str] = {
    **dict.fromkeys(("demo", "finetune", "pretrain", "recipes", "soup"), "train"),
    **dict.fromkeys(("data", "evaluate", "predict", "embed", "analyze", "compare", "diff"), "measure"),
    **dict.fromkeys(("cost", "scaling-law"), "measure"),
    **dict.fromkeys(("convert", "export", "page", "card", "push", "verify", "models"), "share"),
    "bench": "measure",
}
# What reads from the Hub -> where its verbosity is looked for.
_CLIENTS = {"datasets": "DATASETS_VERBOSITY", "huggingface_hub": "HF_HUB_VERBOSITY"}


def build_app() -> typer.Typer:
    """Assemble the typer application; command modules import nothing heavy at their top."""
    app = typer.Typer(name="hf-vit", pretty_exceptions_enable=False)

    @app.callback(invoke_without_command=True)
    def _root(  # pyright: ignore[reportUnusedFunction]
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    ) -> None:
        """Vision transformers for Hugging Face: train, evaluate, convert, share."""
        if version:
            typer.echo(f"hf-vit {metadata.version('hf-vit')}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    for name, folder in COMMANDS.items():
        attribute = name.replace("-", "_")
        module = importlib.import_module(f"hf_vit_cli.{folder}.{attribute}")
        command = getattr(module, attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=Command)(command)
    return app


@contextmanager
def _silencing_clients() -> Generator[None]:
    """What comes of a library's attempts is told in one line; their own log of them stays silent, unless asked for."""
    levels = {name: logging.getLogger(name).level for name in _CLIENTS}
    for name, variable in _CLIENTS.items():
        if os.environ.setdefault(variable, "critical") == "critical":  # which counts when it is imported
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _showing_log() -> Generator[None]:
    """That a model is converted on the way, a line on standard error, of the first process alone."""
    logger, handler = logging.getLogger("hf_vit.conversion"), logging.StreamHandler(sys.stderr)
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    handler.setFormatter(logging.Formatter("note: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _open_closed_streams() -> None:
    """Give what is said a place where a shell closed it (`2>&-`), or it would go into the next file that is opened."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _refuse_without_folder() -> None:
    """Before anything is imported that looks there.

    Raises:
        typer.TyperException: somebody deleted the working folder.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise typer.TyperException("the working folder is gone; change to another") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program: exit 0, or one line on standard error and an exit code other than 0."""
    _open_closed_streams()
    warnings.formatwarning = lambda message, *_: f"note: {' '.join(str(message).split())}\n"
    if isinstance(sys.stdout, TextIOWrapper):  # names of files need not be text
        sys.stdout.reconfigure(errors="backslashreplace")
    if not sys.stderr.isatty():  # in a log its bars are lines
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    given = None if arguments is None else list(arguments)
    try:
        _refuse_without_folder()
        with _silencing_clients(), _showing_log():
            code = build_app()(args=given, prog_name="hf-vit", standalone_mode=False)
    except Exception as error:
        message = None if os.environ.get("HF_VIT_TRACEBACK") else message_of(error)
        if message is None:
            raise
        rank = os.environ.get("RANK", "0")
        print(f"hf-vit: {message}" if rank == "0" else f"hf-vit (process {rank}): {message}", file=sys.stderr)
        code = exit_code_of(error)
    raise SystemExit(code or 0)
