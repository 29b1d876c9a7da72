"""`hf-vit soup`."""

from pathlib import Path
from typing import Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import command_line, pass_on, print_table, tell
from hf_vit_cli.options import arg, opt


@options.takes("skip_bad_images", "image_column", "label_column", "device")
def soup(
    context: typer.Context,
    models: list[str] = arg(..., "Two or more models fine-tuned from one checkpoint.", metavar="MODEL..."),
    output: Path = options.OUTPUT,
    data: str | None = opt(
        None, "Data to evaluate the soup on and to select models by (--greedy); as in --data of finetune."
    ),
    greedy: bool = opt(False, "Add models one by one and keep those that improve validation accuracy.", "--greedy"),
    batch_size: int = opt(64, "Images per forward pass.", min=1),
    **shared: Any,
) -> None:
    """Average the weights of fine-tuned models into one (arXiv 2203.05482)."""
    values = pass_on(locals())
    from hf_vit.training.soups import make_soup

    made = make_soup(**values, command=command_line(context), report=tell)
    rows = [(one.name, _share(one.accuracy), "in" if one.is_in else "left out") for one in made.ingredients]
    print_table([*rows, None, ("the soup", _share(made.accuracy), "")], "ingredient", "validation accuracy", "")
    if made.test is not None:
        tell(f"test accuracy of the soup: {made.test.top1:.2%} of {made.test.num_images:,} images")
    tell(f"saved in {made.folder}: model, processor, facts.json, README.md")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
