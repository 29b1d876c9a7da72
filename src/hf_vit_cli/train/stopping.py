"""What a training that was stopped says."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import typer


@contextmanager
def stoppable(output: Path) -> Generator[None]:
    """Turn Ctrl-C and SIGTERM into one line that says what was kept and how to go on; the exit code is 130."""
    try:
        yield
    except KeyboardInterrupt:
        from hf_vit.training.run.resuming import way_on

        typer.echo(f"hf-vit: stopped; {way_on(output)}", err=True)
        raise typer.Exit(130) from None
