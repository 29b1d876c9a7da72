"""The `hf-vit` program: collects the commands and turns bad input into one line and a non-zero exit."""

import importlib
import os
import sys
from collections.abc import Sequence

import typer

# Every name is a module of this package with a function of the same name (dashes become underscores).
COMMANDS: tuple[str, ...] = (
    "demo",
    "finetune",
    "pretrain",
    "recipes",
    "evaluate",
    "predict",
    "analyze",
    "cost",
    "scaling-law",
    "convert",
    "export",
    "card",
    "push",
    "verify",
)


def build_app() -> typer.Typer:
    """Assemble the typer application; command modules import nothing heavy at their top."""
    app = typer.Typer(
        name="hf-vit",
        help="Vision transformers for Hugging Face: train, evaluate, convert, share.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _root() -> None:  # pyright: ignore[reportUnusedFunction]
        """Vision transformers for Hugging Face: train, evaluate, convert, share."""

    for name in COMMANDS:
        attribute = name.replace("-", "_")
        module = importlib.import_module(f"hf_vit.cli.{attribute}")
        app.command(name)(getattr(module, attribute))
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program: exit 0, or one line on standard error and an exit code other than 0."""
    from hf_vit.errors import UserError

    try:
        build_app()(args=list(arguments) if arguments is not None else None, prog_name="hf-vit")
    except (UserError, OSError) as error:
        if os.environ.get("HF_VIT_TRACEBACK"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"hf-vit: {message}", file=sys.stderr)
        raise SystemExit(1) from None
