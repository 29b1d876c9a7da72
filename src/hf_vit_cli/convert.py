"""`hf-vit convert`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_vit_cli.options import arg, opt, parse_size


def convert(
    model: Annotated[str, arg("Checkpoint: file, folder, https:// or gs:// address, hf://owner/name/file, timm:NAME.")],
    output: Annotated[Path, arg("New folder for the converted model.")],
    image_size: Annotated[
        str | None,
        opt("Image size that the source was trained at (224 or 224x160), if it cannot be inferred.", metavar="HxW"),
    ] = None,
    resize_to: Annotated[
        str | None, opt("Resample the position embeddings to another image size: 384 or 384x256.", metavar="HxW")
    ] = None,
    num_labels: Annotated[
        int | None, opt("Replace the head by a new one, filled with zeros, for N classes.", metavar="N")
    ] = None,
    labels: Annotated[
        Path | None,
        opt("The same with class names: a text file with one name per line, or a JSON list.", metavar="FILE"),
    ] = None,
    drop_pre_logits: Annotated[
        bool, opt("Drop the representation layer and the head behind it.", "--drop-pre-logits")
    ] = False,
    num_heads: Annotated[
        int | None, opt("Number of attention heads, if the source does not record it.", metavar="N")
    ] = None,
    hidden_act: Annotated[
        str | None,
        opt("Activation, if the source does not record it: gelu, gelu_pytorch_tanh, quick_gelu, ...", metavar="NAME"),
    ] = None,
    pooling: Annotated[
        str | None,
        opt(
            "Pooling, if the source does not record it: token (without a class token: first patch), gap or map.",
            metavar="NAME",
        ),
    ] = None,
    position_embedding: Annotated[
        str | None, opt("Position embedding of a source without a table: sincos_2d or none.", metavar="NAME")
    ] = None,
    prefix: Annotated[
        str | None, opt("Prefix of the model's keys, if it is wrapped in another module.", metavar="NAME")
    ] = None,
    verify: Annotated[
        Path | None,
        opt(
            "Recording (.npz): images and outputs of the original code that the model must reproduce.", metavar="IO.npz"
        ),
    ] = None,
    report: Annotated[
        Path | None,
        opt(
            "JSON file that lists every source key with its shape, transform and target.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None,
    sha256: Annotated[
        str | None, opt("Required SHA-256 of the source file; other files are refused.", metavar="HEX")
    ] = None,
    force: Annotated[bool, opt("Replace what an earlier conversion wrote.", "--force")] = False,
) -> None:
    """Convert a checkpoint of another library into a folder that from_pretrained loads."""
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
