"""Attention distance beside the plain forwards on the same images: how many times as long, and how much more memory.

    python benchmarks/analysis.py [--images 128] [--turns 3] [--output benchmarks/results/analysis.json]

A B/16 with random weights at 224 px, in float32. Both take the same prepared images in batches of the same size; what
reads and resizes images is in neither. Memory is what the process holds at its peak above the loaded model; it is
looked at in a pass of its own, before the clock runs. The goal: within 2 times the time and 1 GB above the model.
"""

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from hf_vit import HfViTForImageClassification
from hf_vit.analysis import AttentionReader
from hf_vit.analysis.analyses.attention_analysis import LayerHeadMeans
from hf_vit.analysis.analyses.distance import attention_distances
from hf_vit.speed.measuring import quartiles, take_turns
from hf_vit.speed.script import Script, parser
from hf_vit.variants import variant_config


def measure_distances(model: Any, batches: list[torch.Tensor]) -> None:
    """What the analysis does with its batches."""
    reader, means = AttentionReader(model), LayerHeadMeans()
    for pixel_values in batches:
        reader.read(
            pixel_values, lambda layer, maps: means.add(layer, attention_distances(maps, layer, reader.layout.patch_px))
        )
    assert means.arrays()["distance"].shape == (12, 12)


def plain_forwards(model: Any, batches: list[torch.Tensor]) -> None:
    for pixel_values in batches:
        model(pixel_values)


def peak_above(work: Callable[[], None]) -> float:
    """MB (1e6 bytes) that the process grows by at most while `work` runs, looked at every 2 ms."""
    process, done, peak = psutil.Process(), threading.Event(), 0
    before = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(peak - before, 0) / 1e6


def options() -> argparse.Namespace:
    made = parser(__doc__, turns=3)
    made.add_argument("--images", type=int, default=128)
    made.add_argument("--batch-size", type=int, default=8)
    return made.parse_args()


@torch.inference_mode()
def main() -> None:
    chosen = options()
    report = Script(chosen)
    torch.manual_seed(0)
    model = HfViTForImageClassification(variant_config("B/16", num_labels=1000)).eval()
    batches = list(torch.randn(chosen.images, 3, 224, 224).split(chosen.batch_size))
    contestants = {
        "forward": lambda: plain_forwards(model, batches),
        "distance": lambda: measure_distances(model, batches),
    }
    memory = peak_above(contestants["distance"])
    seconds = take_turns(contestants, chosen.turns, warm_up=0)
    ratios = [ours / plain for ours, plain in zip(seconds["distance"], seconds["forward"], strict=True)]
    report.add(
        images=chosen.images,
        batch_size=chosen.batch_size,
        times_as_long=quartiles(ratios),
        megabytes_above_the_model=round(memory),
    )
    report.finish()


if __name__ == "__main__":
    main()
