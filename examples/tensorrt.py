"""Repeat the certificate of an ONNX export in TensorRT. It was not run: it needs an NVIDIA GPU.

    hf-vit export out/digits out/onnx --to onnx --static
    pip install onnxruntime-gpu tensorrt
    python examples/tensorrt.py out/onnx

All of the graph must run in TensorRT, in float32. Writes tensorrt.json beside the graph's own certificate, export.json.
Another execution provider of onnxruntime can be named after the folder.
"""

import os
import sys
from pathlib import Path

os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # products in float32, and not in TF32; before CUDA starts

from hf_vit.conversion.targets.graphs.certificate import verify
from hf_vit.conversion.targets.graphs.runtimes import OnnxRuntime
from hf_vit.errors import UserError


def main(folder: str, provider: str = "TensorrtExecutionProvider") -> None:
    try:
        certificate = verify(Path(folder), OnnxRuntime(provider))
    except UserError as error:
        sys.exit(f"not certified in {provider}: {error}")
    certificate.write(Path(folder) / "tensorrt.json")
    print(f"{len(certificate.checks)} checks in {provider}: {certificate.describe()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
