"""Measure the memory of `embed` from ten thousand to a million images.

Parquet files of 10,000 noisy images of 8 px each, read as a stream by two processes, of this machine or of Ray. The
memory is the most that the command and all it starts hold together at a time beyond what was there before (a page that
several share counts once), looked at five times a second. Ray's own processes and its object store are part of it.
"""

import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import torch
from pyarrow import parquet
from script import Script, parser, save_with_processor, vit_sizes

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.data.builtin import encode_netpbm

PER_FILE, SIDE, PROCESSES, PAUSE = 10_000, 8, 2, 0.2


def write_images(folder: Path, images: int) -> None:
    """Write images with one of two labels."""
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number in range(-(-images // PER_FILE)):
        pixels = noise.integers(256, size=(min(PER_FILE, images - number * PER_FILE), SIDE * SIDE * 3), dtype=np.uint8)
        stored = [{"bytes": encode_netpbm(row.tobytes(), (SIDE, SIDE)), "path": None} for row in pixels]
        labels = ["ab"[row % 2] for row in range(len(stored))]
        parquet.write_table(pa.table({"image": stored, "label": labels}), folder / f"train-{number:05d}.parquet")


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = vit_sizes(16, 32, heads=2, image_size=SIDE, patch_size=4, num_hidden_layers=1, num_labels=2)
    save_with_processor(HfViTForImageClassification(HfViTConfig(**sizes)), folder)


def count_bytes(processes: list[psutil.Process]) -> int:
    """Return the bytes that processes hold together."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def measure_peak(arguments: list[str], folder: Path) -> int:
    """Return the peak bytes held by a command."""
    peak = 0
    with (folder / "log.txt").open("w") as log:
        command = psutil.Popen(
            [sys.executable, "-m", "hf_vit", *arguments], cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
        while command.poll() is None:
            peak = max(peak, count_bytes([command, *command.children(recursive=True)]))
            time.sleep(PAUSE)
    if command.returncode:
        raise RuntimeError((folder / "log.txt").read_text()[-500:])
    return peak


def main() -> None:
    options = parser(__doc__, turns=1)
    options.add_argument("--images", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    options.add_argument("--runner", nargs="+", default=["local", "ray"], choices=["local", "ray"])
    report = Script(options.parse_args())
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        write_model(folder / "model")
        for images in report.options.images:
            write_images(folder / str(images), images)
            for runner in report.options.runner:
                output = f"{runner}-{images}"
                arguments = f"embed model --data {images} --streaming --split train --output {output} --runner {runner}"
                arguments += f" --num-processes {PROCESSES} --batch-size 512 --device cpu --no-optimize"
                peak = measure_peak(arguments.split(), folder)
                rows = sum(parquet.read_metadata(path).num_rows for path in (folder / output).glob("*.parquet"))
                if rows > images or rows < 0.7 * images:  # validation and test are cut from it
                    raise RuntimeError(f"{rows} rows of {images} images")
                report.record(runner=runner, images=images, rows=rows, mib=round(peak / 2**20))
    report.finish(px=SIDE, processes=PROCESSES)


if __name__ == "__main__":
    main()
