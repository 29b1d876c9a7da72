"""What a command says that was stopped: by Ctrl-C, a training by SIGTERM, too."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import typer


@contextmanager
def stoppable(way_on: Callable[[], str]) -> Generator[None]:
    """Turn `KeyboardInterrupt` into one line that says what was kept and how to go on; the exit code is 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"hf-vit: stopped; {way_on()}", err=True)
        raise typer.Exit(130) from None


def finished_parts(output: str | Path) -> str:
    """The way on of a command that keeps what is finished in a folder, or at an address."""
    if "://" in str(output):
        return f"what is finished stays in {output}, the same command goes on from it"
    output = Path(output)
    if output.is_dir() and any(not path.name.startswith(".") for path in output.iterdir()):
        return f"what is finished is in {output}, the same command goes on from it"
    return "nothing is finished yet; start again with the same command"
