"""`hf-vit export`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_vit_cli.options import arg, opt


def export(
    model: Annotated[str, arg("Folder, Hub id, or whatever hf-vit convert reads.")],
    output: Annotated[Path, arg("New folder for the exported model.")],
    to: Annotated[
        str, opt("transformers, timm, vit_jax, onnx, openvino, executorch or transformers.js.", metavar="TARGET")
    ],
    force: Annotated[bool, opt("Replace what an earlier export wrote.", "--force")] = False,
    static: Annotated[
        bool, opt("With --to onnx or openvino: export a graph for the model's image size only.", "--static")
    ] = False,
    spelling: Annotated[
        str | None, opt("With --to vit_jax: newer (default) or older key names.", metavar="SPELLING")
    ] = None,
    preprocessing: Annotated[
        bool,
        opt(
            "With --to onnx or openvino: include the image processor; the graph takes uint8 images of any size.",
            "--preprocessing",
        ),
    ] = False,
    decoding: Annotated[
        bool,
        opt(
            "With --to onnx: include the image decoder; the graph takes the bytes of a JPEG or PNG file.", "--decoding"
        ),
    ] = False,
    quantize: Annotated[
        str | None, opt("Quantize dense layers to int8: static (onnx, openvino) or dynamic (onnx).", metavar="MODE")
    ] = None,
    calibrate: Annotated[
        str | None,
        opt("With --quantize: data whose train split calibrates int8 and whose test split checks it.", metavar="DATA"),
    ] = None,
    opset: Annotated[
        int | None,
        opt("With --to onnx: opset version, 14 or later (default 20).", metavar="N"),
    ] = None,
) -> None:
    """Export a model to another library or runtime, and compare its results there."""
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
