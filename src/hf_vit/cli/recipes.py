"""`hf-vit recipes`."""

from typing import Annotated

import typer

_SIDE_BY_SIDE = 2  # recipes that fit a terminal of 80 columns with their names


def recipes(name: Annotated[str | None, typer.Argument(help="One recipe; by default all.")] = None) -> None:
    """Show the training recipes: every value, and where it comes from."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from hf_vit.training.recipes import RECIPES, find_recipe

    chosen = list(RECIPES.values()) if name is None else [find_recipe(name)]
    for shown in (chosen[i : i + _SIDE_BY_SIDE] for i in range(0, len(chosen), _SIDE_BY_SIDE)):
        table = Table(Column("value", no_wrap=True), *(recipe.name for recipe in shown))
        table.add_row("for", *(recipe.summary for recipe in shown))
        table.add_row("source", *(escape(recipe.source) for recipe in shown), end_section=True)
        settings = [recipe.settings() for recipe in shown]
        for key in settings[0]:
            if key not in ("name", "source"):
                table.add_row(key, *(_shown(values[key]) for values in settings))
        Console().print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return "x".join(str(item) for item in value) if isinstance(value, list) else f"{value}"
