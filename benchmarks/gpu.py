"""Measure speed on a GPU in one call: eager and compiled, inference and training, bfloat16, with the other libraries.

    python benchmarks/gpu.py [--seconds 480] [--peak-tflops 790] [--output benchmarks/results/gpu.json]

S/16, B/16, L/16, R50+B/16 and Axial-B/16 at 224, 384 and 1024 px, the most telling cells first; it stops starting cells
when the time is up and rewrites its result after every one. Utilization counts a multiply-add as 2 FLOPs and a training
step as three forwards; 790 TFLOP/s dense bf16 were measured on an H200. "flash" is hf_vit with the flash_attention_2
package where that is installed; torch's own kernels choose flash under sdpa as well. `--device cpu --tiny` tries the
script out. It needs no pydantic, datasets or evaluate.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch

from hf_vit.errors import UserError
from hf_vit.speed.measuring import SpeedFile
from hf_vit.speed.peers import COMPILED, Cell, Shape, Work, measure_cell
from hf_vit_cli.bench import print_cell

VARIANTS = ("B/16", "L/16", "S/16", "R50+B/16", "Axial-B/16")
# Images a step by image size (px) and work: enough to fill the device, little enough for a training step's memory.
BATCHES: dict[int, dict[Work, int]] = {
    224: {"inference": 256, "training": 128},
    384: {"inference": 96, "training": 48},
    1024: {"inference": 8, "training": 4},
}
CONTESTANTS = ("hf_vit", "transformers", "timm")


def cells(device: str, tiny: bool) -> Iterator[Cell]:
    """Iterate over the cells: 224 px first, for inference and training, then the larger images."""
    sizes, variants = (BATCHES, VARIANTS) if not tiny else ({32: {"inference": 2, "training": 2}}, ("Ti/16",))
    for size, variant, work in itertools.product(sizes, variants, ("inference", "training")):
        yield Cell(work, Shape(variant, size), "bfloat16", sizes[size][work], device)


def contestants() -> list[str]:
    """Return the models: eager and compiled; with flash attention where its package is installed."""
    names = [*CONTESTANTS, *(f"{name}{COMPILED}" for name in CONTESTANTS)]
    return [*names, "hf_vit flash", "hf_vit flash" + COMPILED] if find_spec("flash_attn") else names


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=480, help="after which no new cell is started")
    options.add_argument("--peak-tflops", type=float, default=790, help="dense bf16 peak of the device")
    options.add_argument("--turns", type=int, default=8)
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="one small cell of each work, to try the script")
    options.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    arguments = options.parse_args()
    if arguments.tiny and arguments.output == options.get_default("output"):
        arguments.output = None  # the record is of the whole
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --device cpu --tiny tries the script out")
    torch.backends.cudnn.benchmark = True
    command = f"python benchmarks/gpu.py --seconds {arguments.seconds:g} --turns {arguments.turns}"
    speeds = SpeedFile(arguments.output, command, arguments.device, peak_tflops=arguments.peak_tflops)
    started = time.monotonic()
    for cell in cells(arguments.device, arguments.tiny):
        if time.monotonic() - started > arguments.seconds:
            print("the time is up; the remaining cells stay open")
            break
        try:
            result = measure_cell(
                cell, contestants(), arguments.turns, memory=True, peak_flops=arguments.peak_tflops * 1e12
            )
        except (UserError, torch.OutOfMemoryError) as error:
            print(f"{cell}: {error}")
            continue
        speeds.add(asdict(result), result.load)
        print_cell(result)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
