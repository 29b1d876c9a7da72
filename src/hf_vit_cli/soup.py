"""`hf-vit soup`."""

from typing import Annotated, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import command_line
from hf_vit_cli.options import arg, opt


@options.takes("skip_bad_images", "image_column", "label_column", "device")
def soup(
    context: typer.Context,
    models: Annotated[list[str], arg("Two or more models fine-tuned from one checkpoint.", metavar="MODEL...")],
    output: options.Output,
    data: Annotated[
        str | None, opt("Data to evaluate the soup on and to select models by (--greedy); as in --data of finetune.")
    ] = None,
    greedy: Annotated[
        bool, opt("Add models one by one and keep those that improve validation accuracy.", "--greedy")
    ] = False,
    batch_size: Annotated[int, opt("Images per forward pass.", min=1)] = 64,
    **shared: Any,
) -> None:
    """Average the weights of fine-tuned models into one (arXiv 2203.05482)."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hf_vit.training.soups import make_soup

    made = make_soup(
        models,
        output,
        greedy=greedy,
        data=data,
        batch_size=batch_size,
        command=command_line(context),
        report=typer.echo,
        **shared,
    )
    table = Table("ingredient", "validation accuracy", "")
    for one in made.ingredients:
        table.add_row(escape(one.name), _share(one.accuracy), "in" if one.is_in else "left out")
    table.add_section()
    table.add_row("the soup", _share(made.accuracy), "")
    Console().print(table)
    if made.test is not None:
        typer.echo(f"test accuracy of the soup: {made.test.top1:.2%} of {made.test.num_images:,} images")
    typer.echo(f"saved in {made.folder}: model, processor, facts.json, README.md")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
