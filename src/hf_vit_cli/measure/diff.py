"""`hf-vit diff`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_vit_cli import options
from hf_vit_cli.result_tables import print_tables

_OneMore = "folder, Hub id, user/name@REVISION, timm:NAME, or a file that hf-vit convert reads."


def diff(
    model: Annotated[str, typer.Argument(help=f"Model: {_OneMore}", show_default=False)],
    other: Annotated[str, typer.Argument(help=f"The second model: {_OneMore}", show_default=False)],
    data: Annotated[
        str | None, typer.Option(help="Ask both about the same images, as --data of evaluate.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for numbers and pictures.", file_okay=False)] = None,
    split: Annotated[str, typer.Option(help="With --data: train, validation or test.")] = "test",
    num_images: Annotated[int | None, typer.Option(help="With --data: ask about so many images.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Images a step.", min=1)] = 32,
    skip_bad_images: options.SkipBadImages = False,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    device: options.Device = None,
    seed: Annotated[int, typer.Option(help="Of the draw of the images.", min=0)] = 0,
) -> None:
    """Tell two models, or two revisions of one, apart: configuration, weights by layer, answers to the same images."""
    from hf_vit.audit.differences import diff as tell_apart
    from hf_vit.errors import UserError

    if data is None and (num_images or skip_bad_images or image_column or label_column):
        raise UserError("--num-images, --skip-bad-images and the columns are of images; add --data, or leave them out")
    difference = tell_apart(
        model,
        other,
        data=data,
        split=split,
        num_images=num_images,
        batch_size=batch_size,
        seed=seed,
        device=device,
        skip_bad_images=skip_bad_images,
        image_column=image_column,
        label_column=label_column,
    )
    print_tables(difference.tables())
    if output is not None:
        difference.save(output)
        typer.echo(f"numbers and pictures in {output}")
