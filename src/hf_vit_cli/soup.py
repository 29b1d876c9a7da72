"""`hf-vit soup`."""

from pathlib import Path
from typing import Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import collect_options, format_command, print_safely, print_table
from hf_vit_cli.options import arg, opt


@options.with_options("skip_bad_images", "image_column", "label_column", "device")
def soup(
    context: typer.Context,
    models: list[str] = arg(
        ..., "Two or more models that were fine-tuned from the same checkpoint.", metavar="MODEL..."
    ),
    output: Path = options.OUTPUT,
    data: str | None = opt(
        None,
        "Data set to evaluate the averaged model on, and to choose models on with --greedy; given as in "
        "--data of finetune.",
    ),
    greedy: bool = opt(False, "Add models one by one and keep those that improve validation accuracy.", "--greedy"),
    batch_size: int = opt(64, "Images per forward pass.", min=1),
    **shared: Any,
) -> None:
    """Average the weights of fine-tuned models into one (arXiv 2203.05482)."""
    values = collect_options(locals())
    from hf_vit.evaluation.protocols.frame import percent
    from hf_vit.training.soups import make_soup

    result = make_soup(**values, command=format_command(context), report=print_safely)
    rows = [
        (model.name, percent(model.accuracy), "used" if model.is_in else "not used") for model in result.ingredients
    ]
    print_table([*rows, None, ("soup", percent(result.accuracy), "")], "ingredient", "validation accuracy", "")
    if result.test is not None:
        print_safely(f"test accuracy of the soup: {result.test.top1:.2%} of {result.test.num_images:,} images")
    print_safely(f"saved in {result.folder}: model, processor, facts.json, README.md")
