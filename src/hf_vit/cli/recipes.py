"""`hf-vit recipes`."""

from typing import Annotated

import typer


def recipes(name: Annotated[str | None, typer.Argument(help="One recipe; by default all.")] = None) -> None:
    """Show the training recipes: every value, and where it comes from."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from hf_vit.training.recipes import RECIPES, find_recipe

    chosen = list(RECIPES.values()) if name is None else [find_recipe(name)]
    table = Table(Column("value", no_wrap=True), *(recipe.name for recipe in chosen))
    table.add_row("for", *(recipe.summary for recipe in chosen))
    table.add_row("source", *(escape(recipe.source) for recipe in chosen), end_section=True)
    settings = [recipe.settings() for recipe in chosen]
    for key in settings[0]:
        if key not in ("name", "source"):
            table.add_row(key, *(_shown(values[key]) for values in settings))
    Console().print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return "x".join(str(item) for item in value) if isinstance(value, list) else f"{value}"
