"""Our ONNX export beside transformers' export of the same model, in onnxruntime, and in OpenVINO where it is installed.

    python benchmarks/onnx_speed.py [--turns 15] [--variants S/16 B/16] [--output benchmarks/results/onnx_speed.json]

Both graphs hold a ViT of one size with erf's GELU at 224 px, made with `hf-vit export --to onnx` and transformers'
OnnxExporter; random weights. How many times as fast ours is, by turns.
"""

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from hf_vit.conversion import export
from hf_vit.data import make_processor
from hf_vit.speed.measuring import quartiles, speed_ratio, take_turns
from hf_vit.speed.peers import Shape, build
from hf_vit.speed.script import Script, parser


def graphs(variant: str, folder: Path) -> dict[str, Path]:
    """The files of both sides."""
    shape = Shape(variant)
    ours, theirs = build("hf_vit", shape).model, build("transformers", shape).model
    saved = folder / "model"
    ours.save_pretrained(saved)  # pyright: ignore[reportCallIssue]
    make_processor(ours.config).save_pretrained(saved)
    export(saved, folder / "ours", "onnx")
    sample = {"pixel_values": torch.randn(2, 3, 224, 224)}
    OnnxExporter().export(theirs.eval(), sample, config=OnnxConfig(dynamic=True)).save_pretrained(folder / "theirs")
    return {"hf_vit": folder / "ours" / "model.onnx", "transformers": folder / "theirs" / "model.onnx"}


def in_onnxruntime(path: Path, images: np.ndarray, threads: int) -> Callable[[], Any]:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session: Any = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {session.get_inputs()[0].name: images})


def in_openvino(path: Path, images: np.ndarray, threads: int) -> Callable[[], Any]:
    import openvino

    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_NUM_THREADS": threads})
    return lambda: compiled(images)


def main() -> None:
    options = parser(__doc__, turns=15)
    options.add_argument("--variants", nargs="+", default=["S/16", "B/16"])
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    report = Script(options.parse_args())
    engines = {"onnxruntime": in_onnxruntime} | ({"openvino": in_openvino} if find_spec("openvino") else {})
    for variant in report.options.variants:
        with tempfile.TemporaryDirectory() as folder:
            files = graphs(variant, Path(folder))
            for engine, load in engines.items():
                for batch in report.options.batches:
                    images = np.random.default_rng(0).standard_normal((batch, 3, 224, 224), dtype=np.float32)
                    runs = {name: load(path, images, report.options.threads) for name, path in files.items()}
                    seconds = take_turns(runs, report.options.turns)
                    report.add(
                        variant=variant,
                        engine=engine,
                        batch=batch,
                        times_as_fast=speed_ratio(seconds, "hf_vit", "transformers"),
                        images_per_second=round(batch / quartiles(seconds["hf_vit"]).median, 1),
                    )
    report.finish()


if __name__ == "__main__":
    main()
