"""Tables of results on the terminal; names in them are written as they are."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hf_vit.evaluation.protocols.frame import Table


def print_tables(tables: "Iterable[Table]") -> None:
    """One after the other, each below its title."""
    from rich import table as rich_table
    from rich.console import Console
    from rich.markup import escape

    for shown in tables:
        typer.echo(shown.title)
        table = rich_table.Table(*map(escape, shown.header), show_header=bool(shown.header))
        for row in shown.rows:
            table.add_row(*map(escape, row))
        Console().print(table)
