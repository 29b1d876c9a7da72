"""The `hf-vit` program: collects the commands and turns bad input into one line and a non-zero exit."""

import importlib
import os
import sys
from collections.abc import Sequence

import typer

# Command -> the folder of its module, which has a function, or a group of them, of that name (dashes: underscores).
COMMANDS: dict[str, str] = {
    **dict.fromkeys(("demo", "finetune", "pretrain", "recipes", "soup"), "train"),
    **dict.fromkeys(("evaluate", "predict", "embed", "analyze", "compare", "cost", "scaling-law"), "measure"),
    **dict.fromkeys(("convert", "export", "card", "push", "verify"), "share"),
    "bench": "measure",
}


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

    for name, folder in COMMANDS.items():
        attribute = name.replace("-", "_")
        module = importlib.import_module(f"hf_vit.cli.{folder}.{attribute}")
        command = getattr(module, attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _bad_input() -> tuple[type[Exception], ...]:
    """Errors that tell of bad input; asked for when one is on its way, as the import takes its time."""
    from huggingface_hub.errors import StrictDataclassError

    from hf_vit.errors import UserError

    return UserError, OSError, StrictDataclassError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program: exit 0, or one line on standard error and an exit code other than 0."""
    from hf_vit.errors import UserError, enough_memory, strict_reason

    try:
        with enough_memory("this", "end other programs, or choose a smaller batch, image or model"):
            build_app()(args=list(arguments) if arguments is not None else None, prog_name="hf-vit")
    except _bad_input() as error:
        if os.environ.get("HF_VIT_TRACEBACK"):
            raise
        text = str(error) if isinstance(error, UserError | OSError) else strict_reason(error)
        message = " ".join(text.split()) or type(error).__name__
        rank = os.environ.get("RANK", "0")
        print(f"hf-vit: {message}" if rank == "0" else f"hf-vit (process {rank}): {message}", file=sys.stderr)
        raise SystemExit(1) from None
