"""`hf-vit recipes`."""

from typing import Annotated

from hf_vit_cli.options import arg


def recipes(
    name: Annotated[str | None, arg("Recipe to show with every value. Default: list all.")] = None,
) -> None:
    """Show the training recipes: purpose, values and sources."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from hf_vit.training.recipes.registry import RECIPES, find_recipe

    if name is None:
        table = Table(Column("recipe", no_wrap=True), "for", "source")
        for recipe in RECIPES.values():
            table.add_row(recipe.name, escape(recipe.summary), escape(recipe.source))
    else:
        recipe = find_recipe(name)
        table = Table(Column("value", no_wrap=True), recipe.name)
        table.add_row("for", escape(recipe.summary))
        table.add_row("source", escape(recipe.source), end_section=True)
        for key, value in recipe.settings().items():
            if key not in ("name", "source"):
                table.add_row(key, _shown(value))
    Console().print(table)


def _shown(value: object) -> str:
    if value is None or value in ([], {}):
        return "-"
    return ", ".join(str(item) for item in value) if isinstance(value, list) else f"{value}"
