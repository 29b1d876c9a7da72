"""Measure speed, memory, size and agreement of ViTs in int8, bfloat16 and float32 with three engines.

"agreement" trains a ViT, a Hybrid and an Axial-ViT on digits and on crops of photographs (once; they stay in --work),
exports each to every runtime in int8, and asks both about more than 1,000 images of the test split, which neither
training nor quantising saw. How to quantise was chosen with --development, which takes other models of other images.
"speed" times random weights at 224 px in turns, float32 of the same runtime beside every other form.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from records import Job, Records
from script import name_own, parser, save_with_processor, settle, train_once, vit_sizes
from tables import INT8_FORMS

from hf_vit import HfAxialViTConfig, HfHybridViTConfig, HfViTConfig
from hf_vit.speed.measuring import compute_quartiles, compute_speed_ratio, others_load, take_turns

WIDTHS = vit_sizes(64, 128, pooling="gap", position_embedding="sincos_2d")
FAMILIES = {
    "plain": lambda side: HfViTConfig(**WIDTHS, image_size=side, patch_size=side // 4, num_hidden_layers=6),
    "hybrid": lambda side: HfHybridViTConfig(
        **WIDTHS, image_size=side, stem_patch_size=side // 16, stage_depths=(1,), stem_width=32, num_hidden_layers=4
    ),
    "axial": lambda side: HfAxialViTConfig(**WIDTHS, image_size=side, patch_size=side // 4, num_hidden_layers=3),
}
SIDES = {"digits": 16, "photographs": 32}
# Of one form in a row, by which its weights come to lie in the cache as in use, if they fit.
PASSES_A_TURN = 5
METHODS = ("torch", "onnx dynamic", "onnx static", "openvino static")


def digit_images(mirrored: bool) -> Iterator[tuple[str, str, Image.Image]]:
    """Yield (split, class, image): 597 digits for training, 100 to select an epoch, 1,100 for the test."""
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    order = np.random.RandomState(mirrored).permutation(len(bunch.target))
    splits = ["train"] * 597 + ["validation"] * 100 + ["test"] * 1100
    for split, row in zip(splits, order, strict=True):
        image = Image.fromarray(np.rint(bunch.images[row] * (255 / 16)).astype(np.uint8))
        yield split, str(bunch.target[row]), ImageOps.mirror(image) if mirrored else image


def photograph_crops(mirrored: bool) -> Iterator[tuple[str, str, Image.Image]]:
    """Yield (split, class, image): crops like the built-in photos, four times as many, from disjoint tiles."""
    import skimage

    from hf_vit.data.builtin import PHOTOGRAPHS, crop_boxes

    for label, (name, file, frame) in enumerate(PHOTOGRAPHS):
        photograph = Image.open(Path(str(skimage.__file__)).parent / "data" / file).convert("RGB").crop(frame)
        photograph = ImageOps.mirror(photograph) if mirrored else photograph  # its tests are no test before
        for repeat in range(12 if mirrored else 4):
            for split, _, box in crop_boxes((0, 0, *photograph.size), seed=label + 100 * repeat):
                if not mirrored or repeat in (range(8, 12) if split == "test" else range(4)):  # 0 to 7 were looked at
                    yield split, name, photograph.crop(box)


def data_folder(name: str, work: Path) -> Path:
    """Return a folder of images split/class/number.png, written once."""
    folder = work / "data" / name.replace(" ", "-")
    if not folder.is_dir():
        arriving = name_own(folder)
        *mirrored, kind = name.split()
        images = {"digits": digit_images, "photographs": photograph_crops}[kind](bool(mirrored))
        for number, (split, label, image) in enumerate(images):
            class_folder = arriving / split / label
            class_folder.mkdir(parents=True, exist_ok=True)
            image.save(class_folder / f"{number:05d}.png")
        settle(arriving, folder)
    return folder


def make_classifier(family: str, name: str, work: Path) -> Path:
    """Return a classifier of a family, trained once on such a folder."""
    folder, kind = work / "models" / f"{family}-{name.replace(' ', '-')}", name.split()[-1]
    config, data, epochs = FAMILIES[family](SIDES[kind]), str(data_folder(name, work)), 60 if kind == "digits" else 15
    torch.set_num_threads(1)
    return train_once(config, data, folder, epochs, seed=int(name != kind))


def export_once(model: Path, to: str, mode: str | None, data: str | None, work: Path) -> Path:
    """Return a folder written once by `hf-vit export`."""
    from hf_vit.conversion import export

    folder = work / "exports" / f"{model.name}-{to}-{mode or 'float'}"
    if not (folder / "export.json").is_file():
        export(model, folder, to, quantize=mode, calibrate=data, static=True)
    return folder


def evaluate_export(family: str, name: str, to: str, mode: str, work: Path) -> dict[str, Any]:
    """Return the certificate's results of a trained model in int8, or why there is none."""
    from hf_vit.errors import UserError

    model, data = make_classifier(family, name, work), data_folder(name, work)
    try:
        folder = export_once(model, to, mode, str(data), work)
    except UserError as error:
        return {"refused": str(error)}
    graph = [path for path in folder.iterdir() if path.suffix in (".onnx", ".data", ".xml", ".bin")]
    megabytes = sum(path.stat().st_size for path in graph) / 1e6
    return json.loads((folder / "export.json").read_text())["quantization"] | {"megabytes": megabytes}


def evaluate_torch(family: str, name: str, work: Path) -> dict[str, Any]:
    """Return the share of test images with the same prediction after `optimize_for_inference(quantize="int8")`."""
    from hf_vit import optimize_for_inference
    from hf_vit.data import load_data
    from hf_vit.loading.model import load_model

    data, folder = load_data(str(data_folder(name, work))), make_classifier(family, name, work)
    table: Any = data.split("test")
    subject, ours = load_model(folder, "cpu"), load_model(folder, "cpu").model
    quantized = optimize_for_inference(subject.model, quantize="int8")
    classes = torch.tensor(subject.list_classes(data.label_names))
    answers = list[torch.Tensor]()
    with torch.no_grad():
        for start in range(0, len(table), 8):
            rows = table[start : start + 8]
            pixels, labels = subject.pixel_values(rows["image"]), classes[torch.tensor(rows["label"])]
            in_float, in_int8 = (model(pixels).logits.argmax(-1) for model in (ours, quantized))
            answers.append(torch.stack([in_float == in_int8, in_int8 == labels, in_float == labels]))
    agreement, accuracy, float_accuracy = torch.cat(answers, dim=1).double().mean(dim=1).tolist()
    return {
        "agreement": agreement, "accuracy": accuracy, "float_accuracy": float_accuracy, "held_out_images": len(table)
    }  # fmt: skip


def save_random_model(variant: str, work: Path) -> Path:
    from hf_vit.speed.peers import Shape, build

    folder = work / "models" / variant.replace("/", "")
    if not (folder / "config.json").is_file():
        model: Any = build("hf_vit", Shape(variant)).model
        torch.nn.init.normal_(model.classifier.weight, std=0.02)
        save_with_processor(model, folder)
    return folder


class Noise(list[torch.Tensor]):
    """Images in batches of one, as quantisers ask for them (`conversion.targets.graphs.int8.Images`)."""

    takes = "pixel_values"


def quantize_random(variant: str, to: str, mode: str, work: Path) -> Path:
    """Return a fully quantized graph of random weights, which needs no certificate."""
    from hf_vit.conversion.targets.graphs.int8 import QUANTIZERS

    runtime = next(quantizer for quantizer in QUANTIZERS.values() if quantizer.target == to)
    source = export_once(save_random_model(variant, work), to, None, None, work) / runtime.file
    folder = work / "exports" / f"{variant.replace('/', '')}-{to}-{mode}"
    if not folder.is_dir():
        unfinished = name_own(folder)
        unfinished.mkdir(exist_ok=True)
        images = Noise(torch.randn(8, 1, 3, 224, 224, generator=torch.Generator().manual_seed(1)))
        runtime.quantize(source, unfinished / runtime.file, mode, images, runtime.list_dense_layers(source))
        settle(unfinished, folder)
    return folder


def build_torch_step(folder: Path, images: torch.Tensor, form: str) -> Callable[[], Any]:
    """Return a function that runs an optimized model once in "float32", "bfloat16" or "int8"."""
    from transformers import AutoModelForImageClassification

    from hf_vit import optimize_for_inference

    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    model: Any = AutoModelForImageClassification.from_pretrained(folder, dtype=dtype).eval()
    model = optimize_for_inference(model, engine="torch", quantize="int8" if form == "int8" else None)
    converted = images.to(dtype)

    @torch.inference_mode()
    def step() -> Any:
        return model(converted)

    return step


def build_step(
    runtime: str, form: str, variant: str, images: torch.Tensor, threads: int, work: Path
) -> Callable[[], Any]:
    """Return a function that runs one form of a runtime; its graph is made once."""
    from hf_vit.conversion.targets.graphs.runtimes import ONNXRUNTIME, get_openvino_core

    model, to = save_random_model(variant, work), {"onnxruntime": "onnx"}.get(runtime, runtime)
    if runtime == "torch":
        return build_torch_step(model, images, form)
    if form.startswith("int8"):
        folder = quantize_random(variant, to, form.split()[1], work)
    else:
        folder = export_once(model, to, None, None, work)
    if runtime == "onnxruntime":
        return partial(ONNXRUNTIME.open(folder / "model.onnx").run, images)  # its threads do not wait on the cores
    precision = "bf16" if form == "bfloat16" else "f32"
    hints = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = get_openvino_core().compile_model(folder / "openvino_model.xml", "CPU", hints)
    return lambda: compiled([images.numpy()])


def time_forms(runtime: str, variant: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    turns: dict[str, Callable[[], Any]] = {}
    for form in INT8_FORMS[runtime]:
        step = build_step(runtime, form, variant, images, options.threads, options.work)
        turns[form] = lambda step=step: [step() for _ in range(PASSES_A_TURN)]
    seconds, load = take_turns(turns, options.turns), others_load()
    rows: dict[str, Any] = {"others_load": round(load, 2), "passes_a_turn": PASSES_A_TURN}
    for form in turns:
        arguments = [runtime, form, variant, str(batch), str(options.threads), str(options.work)]
        command = [sys.executable, __file__, "memory", *arguments]
        memory = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
        rows[form] = {
            "images_per_second": PASSES_A_TURN * batch / compute_quartiles(seconds[form]).median,
            "times_float32": asdict(compute_speed_ratio(seconds, form, "float32")),
            "memory_megabytes": float(memory),
        }
    return rows


def print_memory(arguments: Sequence[str]) -> None:
    """Print the memory of this process, which runs only one form."""
    import psutil

    runtime, form, variant, batch, threads, work = arguments
    torch.set_num_threads(int(threads))
    images = torch.randn(int(batch), 3, 224, 224)
    __import__(runtime)
    before = psutil.Process().memory_info().rss
    step = build_step(runtime, form, variant, images, int(threads), Path(work))
    step()
    step()
    print((psutil.Process().memory_info().rss - before) / 1e6)  # beyond the imported libraries


def carry_out(options: argparse.Namespace, job: Job, _: Any) -> dict[str, Any]:
    """Measure the forms of a runtime, or judge one in int8."""
    if job["part"] == "speed":
        results = time_forms(job["runtime"], job["variant"], job["batch"], options)
    elif job["by"] == "torch":
        results = evaluate_torch(job["family"], job["images"], options.work)
    else:
        results = evaluate_export(job["family"], job["images"], *job["by"].split(), options.work)
    return results | {"packages": {name: version(name) for name in ("onnxruntime", "openvino", "nncf")}}


def main() -> None:
    if sys.argv[1:2] == ["memory"]:
        print_memory(sys.argv[2:])
        return
    options = parser(__doc__, turns=15)
    options.add_argument("part", choices=("agreement", "speed"))
    options.add_argument("--work", type=Path, default=Path("build/int8"))
    options.add_argument("--development", action="store_true")
    options.set_defaults(output=Path("build/int8/int8.jsonl"))
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    images = [name if arguments.development else f"mirrored {name}" for name in SIDES]
    axes: dict[str, Any] = {
        "speed": {"variant": ("S/16", "B/16"), "batch": (1, 8), "runtime": INT8_FORMS},
        "agreement": {"images": images, "family": FAMILIES, "by": METHODS},
    }[arguments.part]
    cells = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    jobs = [({"part": arguments.part, **cell}, ()) for cell in cells]
    Records(arguments.output).work(jobs, partial(carry_out, arguments))


if __name__ == "__main__":
    main()
