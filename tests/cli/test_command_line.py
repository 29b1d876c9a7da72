"""The recorded command repeats what was typed."""

from pathlib import Path
from typing import Annotated

import pytest
import typer

from hf_vit_cli.command_line import command_line


def _typed(*arguments: str) -> str:
    app = typer.Typer()
    found: list[str] = []

    @app.command()
    def work(
        context: typer.Context,
        places: Annotated[list[Path], typer.Argument()],
        size: Annotated[int, typer.Option()] = 3,
        range_: Annotated[tuple[float, float] | None, typer.Option("--range")] = None,
        tag: Annotated[list[str] | None, typer.Option()] = None,
        flag: Annotated[bool, typer.Option("--flag/--no-flag")] = True,
        quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False,
    ) -> None:
        found.append(command_line(context))

    app(args=list(arguments), prog_name="hf-vit", standalone_mode=False)
    return found[0]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("a b", "a b"),
        ("a --size 3", "a"),
        ("a --size 4 --quiet", "a --size 4 --quiet"),
        ("-q a", "a --quiet"),
        ("a --no-flag --range 0.5 1", "a --range 0.5 1.0 --no-flag"),
        ("a --tag x --tag y", "a --tag x --tag y"),
        ("my\\ cat", "'my cat'"),
    ],
)
def test_arguments_come_back(typed: str, shown: str) -> None:
    import shlex

    assert _typed(*shlex.split(typed)) == f"hf-vit {shown}"
    assert _typed(*shlex.split(shown)) == f"hf-vit {shown}"
