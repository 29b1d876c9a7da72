"""`hf-vit convert`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_vit_cli.options import arg, opt, parse_size


def convert(
    model: Annotated[str, arg("Checkpoint: file, folder, https:// or gs:// address, hf://owner/name/file, timm:NAME.")],
    output: Annotated[Path, arg("New folder for the converted model.")],
    image_size: Annotated[
        str | None, opt("Declare the size in px the source was made for (a table that is no square).", metavar="HxW")
    ] = None,
    resize_to: Annotated[str | None, opt("Resample the positions to another image size in px.", metavar="HxW")] = None,
    num_labels: Annotated[int | None, opt("Replace the head by a new one of zeros for N classes.", metavar="N")] = None,
    labels: Annotated[
        Path | None, opt("The same with names: a text file, one a line, or a JSON list.", metavar="FILE")
    ] = None,
    drop_pre_logits: Annotated[
        bool, opt("Leave out the representation layer, and the head made for it.", "--drop-pre-logits")
    ] = False,
    num_heads: Annotated[
        int | None, opt("Declare the source's attention heads, where its files do not say it.", metavar="N")
    ] = None,
    hidden_act: Annotated[
        str | None, opt("Declare its activation: gelu, gelu_pytorch_tanh, quick_gelu ...", metavar="NAME")
    ] = None,
    pooling: Annotated[
        str | None, opt("Declare its pooling: token (without a class token: first patch), gap, map.", metavar="NAME")
    ] = None,
    position_embedding: Annotated[
        str | None, opt("Declare its positions, where there is no table: sincos_2d or none.", metavar="NAME")
    ] = None,
    prefix: Annotated[
        str | None, opt("Declare what the model's keys begin with, where something is around it.", metavar="NAME")
    ] = None,
    verify: Annotated[
        Path | None, opt("Images and results of the original code that the model must reproduce.", metavar="IO.npz")
    ] = None,
    report: Annotated[
        Path | None, opt("Write every source key, shape, transform and target (JSON).", metavar="FILE", dir_okay=False)
    ] = None,
    sha256: Annotated[str | None, opt("What the source file must be; anything else is refused.", metavar="HEX")] = None,
    force: Annotated[bool, opt("Replace what an earlier conversion wrote.", "--force")] = False,
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
