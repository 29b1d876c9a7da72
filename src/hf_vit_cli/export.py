"""`hf-vit export`."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    model: Annotated[str, typer.Argument(help="Folder, Hub id, or whatever hf-vit convert reads.")],
    output: Annotated[Path, typer.Argument(help="New folder for the exported model.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET", help="transformers, timm, vit_jax, onnx, openvino, executorch or transformers.js."
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier export wrote.")] = False,
    static: Annotated[
        bool, typer.Option("--static", help="With --to onnx or openvino: a graph for the nominal image size alone.")
    ] = False,
    spelling: Annotated[
        str | None, typer.Option(metavar="SPELLING", help="With --to vit_jax: newer (default) or older keys.")
    ] = None,
    preprocessing: Annotated[
        bool,
        typer.Option(
            "--preprocessing",
            help="With --to onnx or openvino: the image processor, too: uint8 images of any size go in.",
        ),
    ] = False,
    decoding: Annotated[
        bool, typer.Option("--decoding", help="With --to onnx: the decoder, too: the bytes of a JPEG or PNG go in.")
    ] = False,
    quantize: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="Dense layers in int8: static (onnx, openvino) or dynamic (onnx)."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="With --quantize: images (train) to set it, and others (test) to judge it."),
    ] = None,
    opset: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --to onnx: version of ONNX's operators, 14 or later (default 20)."),
    ] = None,
) -> None:
    """Write a model in the files of another library, and compare its results there; all or nothing."""
    from hf_vit import conversion

    result = conversion.export(
        model,
        output,
        to,
        force=force,
        static=static,
        spelling=spelling,
        preprocessing=preprocessing,
        decoding=decoding,
        quantize=quantize,
        calibrate=calibrate,
        opset=opset,
    )
    typer.echo(f"results differ by at most {result.difference:.1e} (measured with {result.measured_with})")
    if result.int8 is not None:
        typer.echo(result.int8)
    typer.echo(f"saved in {result.output}")
