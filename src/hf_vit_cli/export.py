"""`hf-vit export`."""

from pathlib import Path

from hf_vit_cli.command import collect_options, print_safely
from hf_vit_cli.options import arg, opt


def export(
    model: str = arg(..., "Model: folder, Hub id, or any checkpoint that hf-vit convert reads."),
    output: Path = arg(..., "New folder for the exported model."),
    to: str = opt(
        ...,
        "Format to export to: transformers, timm, vit_jax, onnx, openvino, executorch or transformers.js.",
        metavar="TARGET",
    ),
    force: bool = opt(False, "Replace the output folder of an earlier export.", "--force"),
    static: bool = opt(False, "onnx, openvino: make a graph that only takes the model's image size.", "--static"),
    spelling: str | None = opt(
        None,
        "vit_jax: names of the weights, newer (as in current code; the default) or older (as in released checkpoints).",
        metavar="SPELLING",
    ),
    preprocessing: bool = opt(
        False,
        "onnx, openvino: include the image processor, so that the graph takes uint8 images of any size.",
        "--preprocessing",
    ),
    decoding: bool = opt(
        False, "onnx: include the image decoder, so that the graph takes the bytes of a JPEG or PNG file.", "--decoding"
    ),
    quantize: str | None = opt(
        None, "onnx, openvino: quantize dense layers to int8: dynamic or static.", metavar="MODE"
    ),
    calibrate: str | None = opt(
        None,
        "With --quantize: data set whose train split calibrates the int8 model, and whose test split checks it.",
        metavar="DATA",
    ),
    agreement: float | None = opt(
        None,
        "With --quantize: least share of the test images that must keep the model's class (default 0.995).",
        metavar="SHARE",
    ),
    opset: int | None = opt(None, "onnx: opset version, 14 or later (default 20).", metavar="N"),
) -> None:
    """Export a model to another library or runtime, and compare its results there."""
    values = collect_options(locals())
    from hf_vit import conversion

    result = conversion.export(**values)
    print_safely(f"results differ by at most {result.difference:.1e} (measured with {result.measured_with})")
    if result.int8 is not None:
        print_safely(result.int8)
    print_safely(f"saved in {result.output}")
