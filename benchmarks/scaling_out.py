"""`embed` by two workers beside the model alone on the same cores: what decoding, resizing, moving and writing cost.

    python benchmarks/scaling_out.py [--turns 3] [--images 768] [--output benchmarks/results/scaling_out.json]

B/16 of random weights at batch 8, optimized by torch, a thread a process. The model alone: two processes that compute
a prepared batch again and again. `embed`: the same model on images that need no decoding (stored pixel by pixel, of
the model's size) and on JPEG files of 512 px; by processes of this machine, and by Ray on it. All take turns. The rate
of `embed` is that of the middle of a run, without what it does once (opening, looking at every image, the first and
last files): the slope of finished images against time, as files are finished several at once; "whole_seconds" tells
all of it.
"""

import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jpeg import write_images
from PIL import Image
from script import Script, alternate, parser, save_with_processor

from hf_vit import HfViTForImageClassification
from hf_vit.evaluation import embed
from hf_vit.loading.model import load_model
from hf_vit.loading.optimizing import optimize
from hf_vit.speed.measuring import quartiles
from hf_vit.variants import variant_config

WORKERS, BATCH, ROWS_PER_FILE, EDGE = 2, 8, 32, 4


def run_alone(model: str, seconds: float, barrier: Any, rates_queue: Any) -> None:
    """Return the images/s of one process with one thread while the others run."""
    torch.set_num_threads(1)
    subject = load_model(model, "cpu")
    optimize(subject, "torch")
    values = torch.randn(BATCH, 3, 224, 224)
    with torch.inference_mode():
        subject.model(values)
        barrier.wait()
        start, images = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            subject.model(values)
            images += BATCH
        rates_queue.put(images / (time.perf_counter() - start))


def measure_model_alone(model: str, seconds: float = 30) -> tuple[float]:
    """Return the images/s of all workers together, alone in a tuple."""
    context = multiprocessing.get_context("spawn")
    barrier, rates_queue = context.Barrier(WORKERS), context.Queue()
    processes = [context.Process(target=run_alone, args=(model, seconds, barrier, rates_queue)) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    rates = [rates_queue.get(timeout=20 * seconds) for _ in processes]
    for process in processes:
        process.join()
    return (sum(rates),)


def measure_embed(model: str, data: str, runner: str) -> tuple[float, float]:
    """Return images/s in the middle of a run, and the seconds of the whole run."""
    moments: list[float] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        embed(
            model, data, Path(folder) / "out", splits=["train"], num_processes=WORKERS, batch_size=BATCH,
            rows_per_file=ROWS_PER_FILE, device="cpu", optimize=True, runner=runner,
            report=lambda finished_files, parts: moments.append(time.perf_counter()),
        )  # fmt: skip
    middle = moments[EDGE - 1 : len(moments) - EDGE]
    finished = [ROWS_PER_FILE * count for count in range(len(middle))]
    return statistics.linear_regression(middle, finished).slope, time.perf_counter() - start


def write_data(folder: Path, kind: str, count: int) -> str:
    """Write images of one kind into folders of two classes, all in the training split."""
    jpeg_folder = folder / "made"
    jpeg_folder.mkdir()
    for number, path in enumerate(write_images(jpeg_folder, count, 512)):
        class_folder = folder / kind / "train" / "ab"[number % 2]
        class_folder.mkdir(parents=True, exist_ok=True)
        if kind == "JPEG":
            path.replace(class_folder / path.name)
        else:
            Image.open(path).resize((224, 224)).save(class_folder / f"{path.stem}.ppm")
            path.unlink()
    jpeg_folder.rmdir()
    return str(folder / kind)


def main() -> None:
    options = parser(__doc__, turns=3)
    options.add_argument("--images", type=int, default=768)
    options.add_argument("--runner", nargs="+", default=["local", "ray"], choices=["local", "ray"])
    report = Script(options.parse_args())
    settings = report.options
    torch.set_num_threads(WORKERS)  # each of the workers has one
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        classifier = HfViTForImageClassification(variant_config("B/16", num_labels=2))
        model = str(save_with_processor(classifier, Path(folder) / "model"))
        data = {kind: write_data(Path(folder), kind, settings.images) for kind in ("decoded", "JPEG")}
        contestants: dict[str, Callable[[], tuple[float, ...]]] = {"model alone": partial(measure_model_alone, model)}
        for runner, kind in itertools.product(settings.runner, data):
            contestants[f"{runner}, {kind}"] = partial(measure_embed, model, data[kind], runner)
        turns = alternate(contestants, settings.turns)
    alone, *_ = zip(*turns.pop("model alone"), strict=True)
    for name, results in turns.items():
        rates, seconds = zip(*results, strict=True)
        report.record(
            contestant=name,
            share_of_model_alone=quartiles([rate / base for rate, base in zip(rates, alone, strict=True)]),
            images_per_second=round(quartiles(rates).median, 2),
            whole_seconds=round(quartiles(seconds).median, 1),
        )
    report.finish(images=settings.images, model_alone=round(quartiles(alone).median, 2))


if __name__ == "__main__":
    main()
