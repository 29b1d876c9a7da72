"""Measure the memory of `embed` from ten thousand to a million images, and its throughput beside the model alone.

Parquet files of 10,000 noisy images of 8 px each, read as a stream by two processes, of this machine or of Ray. The
memory is the most that the command and all it starts hold together at a time (a page that several share counts once).
Ray's own processes and its object store are part of it.

With `--throughput N` it measures instead: seconds, and seconds of processors, per image of a S/16 in two processes of
one thread, with images that are stored decoded and as JPEG. They are what the command takes for N images more than what
it takes for a quarter of them, over the images between, so that its start does not count. The model alone is two
processes that repeat one batch. Ray's processes, which usually give way, have the priority of all others.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from jpeg import write_images as write_jpeg_files
from PIL import Image
from pyarrow import parquet
from script import Script, alternate, parser, save_with_processor, vit_sizes

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.data.builtin import encode_netpbm
from hf_vit.speed.measuring import compute_quartiles, compute_speed_ratio

PER_FILE, SIDE, PROCESSES, PER_BATCH = 10_000, 8, 2, 32

Seconds = tuple[float, float]  # per image: of time, and of all processors


def write_images(folder: Path, images: int) -> None:
    """Write images with one of two labels."""
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number in range(-(-images // PER_FILE)):
        pixels = noise.integers(256, size=(min(PER_FILE, images - number * PER_FILE), SIDE * SIDE * 3), dtype=np.uint8)
        stored = [{"bytes": encode_netpbm(row.tobytes(), (SIDE, SIDE)), "path": None} for row in pixels]
        labels = ["ab"[row % 2] for row in range(len(stored))]
        parquet.write_table(pa.table({"image": stored, "label": labels}), folder / f"train-{number:05d}.parquet")


def write_model(folder: Path, **sizes: int) -> None:
    torch.manual_seed(0)
    save_with_processor(HfViTForImageClassification(HfViTConfig(**sizes, num_labels=2)), folder / "model")


def count_bytes(processes: list[psutil.Process]) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def run_embed(arguments: str, folder: Path, look: Callable[[list[psutil.Process]], None], pause: float) -> None:
    """Run `embed` in two processes; look at the command and all that it started every `pause` seconds."""
    words = f"embed model {arguments} --split train --num-processes {PROCESSES} --device cpu --no-optimize".split()
    with (folder / "log.txt").open("w") as log:
        program = [sys.executable, "-m", "hf_vit", *words]
        command = psutil.Popen(program, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        while command.poll() is None:
            with suppress(psutil.NoSuchProcess):
                look([command, *command.children(recursive=True)])
            with suppress(psutil.TimeoutExpired):
                command.wait(pause)
    if command.returncode:
        raise RuntimeError((folder / "log.txt").read_text()[-500:])


ALONE = """
import sys, time, torch
from hf_vit.evaluation.reading import compute_features
from hf_vit.loading import load_model
torch.set_num_threads(1)
loaded, images = load_model(sys.argv[1], device="cpu"), int(sys.argv[2])
pixel_values = torch.randn(32, 3, 224, 224)
with torch.inference_mode():
    compute_features(loaded.model, pixel_values)
    start = time.perf_counter(), time.process_time()
    for _ in range(images // 32):
        compute_features(loaded.model, pixel_values)
    print(*(end - begin for begin, end in zip(start, (time.perf_counter(), time.process_time()))))
"""


def write_sources(folder: Path, images: int) -> None:
    """Write a S/16, and the same photographs as decoded images of its size and as JPEG, in parquet files."""
    write_model(folder, **vit_sizes(384, 1536, heads=6, image_size=224, patch_size=16, num_hidden_layers=12))
    paths = write_jpeg_files(folder, 64, 512)
    pixels = [np.asarray(Image.open(path).resize((224, 224))).tobytes() for path in paths]
    forms = {"decoded": [encode_netpbm(each, (224, 224)) for each in pixels], "JPEG": [*map(Path.read_bytes, paths)]}
    for form, contents in forms.items():
        stored = [{"bytes": contents[number % 64], "path": None} for number in range(images)]
        table = pa.table({"image": stored, "label": ["ab"[number % 2] for number in range(images)]})
        for count in (images, images // 4):
            (folder / f"{form}-{count}").mkdir()
            parquet.write_table(table[:count], folder / f"{form}-{count}" / "train-0.parquet")


def time_alone(folder: Path, images: int) -> Seconds:
    """Return the seconds per image of two processes that run the model, and those of processors."""
    command = [sys.executable, "-W", "ignore", "-c", ALONE, folder / "model", str(images // PROCESSES)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    ends = [process.communicate()[0].split()[-2:] for process in started]
    wall, cpu = (sum(map(float, seconds)) / images for seconds in zip(*ends, strict=True))
    return wall / PROCESSES, cpu


def time_command(folder: Path, data: str, runner: str) -> tuple[float, float, int]:
    """Return the seconds of a whole `embed`, those of processors (the last second left out), and the images."""
    seconds: dict[int, float] = {}

    def look(processes: list[psutil.Process]) -> None:
        seconds.update((process.pid, sum(process.cpu_times()[:2])) for process in processes)

    with tempfile.TemporaryDirectory(dir=folder) as output:
        start = time.perf_counter()
        arguments = f"--data {data} --output {output} --runner {runner} --rows-per-file {PER_BATCH}"
        run_embed(arguments, folder, look, pause=1)
        wall = time.perf_counter() - start
        return wall, sum(seconds.values()), json.loads((Path(output) / "manifest.json").read_bytes())["rows"]


def time_embed(folder: Path, form: str, runner: str, images: int) -> Seconds:
    """Return the seconds per image of `embed`, and those of processors, without its start."""
    long, short = (time_command(folder, f"{form}-{count}", runner) for count in (images, images // 4))
    wall, cpu, rows = (most - least for most, least in zip(long, short, strict=True))
    return wall / rows, cpu / rows


def measure_throughput(report: Script) -> None:
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's own name)
    images, turns = report.options.throughput, report.options.turns
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        write_sources(folder, images)
        for form in ("decoded", "JPEG"):
            ways = {runner: partial(time_embed, folder, form, runner, images) for runner in report.options.runner}
            seconds = alternate({"model alone": partial(time_alone, folder, images), **ways}, turns)
            for runner in seconds:
                row: dict[str, Any] = {"stored": form, "runner": runner}
                for number, kind in enumerate(("wall", "cpu")):
                    sides = {name: [value[number] for value in each] for name, each in seconds.items()}
                    row[f"{kind}_ms"] = round(1000 * compute_quartiles(sides[runner]).median, 2)
                    row[f"share_of_model_{kind}"] = compute_speed_ratio(sides, runner, "model alone")
                report.record(**row)
    report.finish(processes=PROCESSES, images=images)


def main() -> None:
    options = parser(__doc__, turns=1)
    options.add_argument("--images", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    options.add_argument("--runner", nargs="+", default=["local", "ray"], choices=["local", "ray"])
    options.add_argument("--throughput", type=int, metavar="N", help="measure images/s on N images, not the memory")
    report = Script(options.parse_args())
    if report.options.throughput is not None:
        measure_throughput(report)
        return
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        write_model(folder, **vit_sizes(16, 32, heads=2, image_size=SIDE, patch_size=4, num_hidden_layers=1))
        for images in report.options.images:
            write_images(folder / str(images), images)
            for runner in report.options.runner:
                output = f"{runner}-{images}"
                arguments = f"--data {images} --streaming --output {output} --runner {runner} --batch-size 512"
                peaks = list[int]()
                run_embed(arguments, folder, lambda processes: peaks.append(count_bytes(processes)), pause=0.2)  # noqa: B023
                rows = sum(parquet.read_metadata(path).num_rows for path in (folder / output).glob("*.parquet"))
                if rows > images or rows < 0.7 * images:  # validation and test are cut from it
                    raise RuntimeError(f"{rows} rows of {images} images")
                report.record(runner=runner, images=images, rows=rows, mib=round(max(peaks) / 2**20))
    report.finish(px=SIDE, processes=PROCESSES)


if __name__ == "__main__":
    main()
