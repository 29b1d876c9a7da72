"""`hf-vit convert`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_vit_cli.options import parse_size


def convert(
    model: Annotated[
        str,
        typer.Argument(help="Checkpoint: file, folder, https:// or gs:// address, hf://owner/name/file, timm:NAME."),
    ],
    output: Annotated[Path, typer.Argument(help="New folder for the converted model.")],
    image_size: Annotated[
        str | None,
        typer.Option(metavar="HxW", help="Declare the size in px the source was made for (a table that is no square)."),
    ] = None,
    resize_to: Annotated[
        str | None, typer.Option(metavar="HxW", help="Resample the positions to another image size in px.")
    ] = None,
    num_labels: Annotated[
        int | None, typer.Option(metavar="N", help="Replace the head by a new one of zeros for N classes.")
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The same with names: a text file, one a line, or a JSON list."),
    ] = None,
    drop_pre_logits: Annotated[
        bool,
        typer.Option("--drop-pre-logits", help="Leave out the representation layer, and the head made for it."),
    ] = False,
    num_heads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Declare the source's attention heads, where its files do not say it."),
    ] = None,
    hidden_act: Annotated[
        str | None, typer.Option(metavar="NAME", help="Declare its activation: gelu, gelu_pytorch_tanh, quick_gelu ...")
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Declare its pooling: token (without a class token: first patch), gap, map."),
    ] = None,
    position_embedding: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Declare its positions, where there is no table: sincos_2d or none."),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Declare what the model's keys begin with, where something is around it."),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(metavar="IO.npz", help="Images and results of the original code that the model must reproduce."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write every source key, shape, transform and target (JSON).", dir_okay=False
        ),
    ] = None,
    sha256: Annotated[
        str | None, typer.Option(metavar="HEX", help="What the source file must be; anything else is refused.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier conversion wrote.")] = False,
) -> None:
    """Convert an original checkpoint into a folder that from_pretrained reads; all or nothing."""
    from hf_vit.conversion import api
    from hf_vit.conversion.origins.beside import read_labels

    result = api.convert(
        model,
        output,
        image_size=parse_size(image_size),
        resize_to=parse_size(resize_to, "--resize-to"),
        num_labels=num_labels,
        labels=None if labels is None else read_labels(labels),
        drop_pre_logits=drop_pre_logits,
        num_heads=num_heads,
        hidden_act=hidden_act,
        pooling=pooling,
        position_embedding=position_embedding,
        prefix=prefix,
        recording=verify,
        report=report,
        sha256=sha256,
        force=force,
    )
    if (assumption := api.assumption(result.plan)) is not None:
        typer.echo(assumption, err=True)
    typer.echo(api.describe(result))
