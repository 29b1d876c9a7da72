"""`hf-vit recipes`."""

from hf_vit_cli.command import print_table
from hf_vit_cli.options import arg


def recipes(name: str | None = arg(None, "Recipe whose values are shown. Default: list all recipes.")) -> None:
    """Show the training recipes: purpose, values and sources."""
    from rich.table import Column

    from hf_vit.training.recipes.registry import RECIPES, find_recipe

    if name is None:
        rows = [(recipe.name, recipe.summary, recipe.source) for recipe in RECIPES.values()]
        print_table(rows, Column("recipe", no_wrap=True), "purpose", "source")
        return
    recipe = find_recipe(name)
    values = [(key, _format_value(value)) for key, value in recipe.settings().items() if key not in ("name", "source")]
    description = [("purpose", recipe.summary), ("source", recipe.source), None]
    print_table([*description, *values], Column("value", no_wrap=True), recipe.name)


def _format_value(value: object) -> str:
    """Return a recipe's value as text; "-" for None and empty values."""
    if value is None or value in ([], {}):
        return "-"
    return ", ".join(str(item) for item in value) if isinstance(value, list) else f"{value}"
