"""JPEG files to batches, two workers: our evaluation transform beside transformers' processor on Pillow, same loop.

    python benchmarks/jpeg.py [--turns 7] [--images 512] [--output benchmarks/results/jpeg.json]

Random crops of photographs are stored as 500x375 px JPEG files. Both sides use Pillow to decode and resize to 224 px,
and the same torch DataLoader; the largest difference of their pixels is printed.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from skimage import data as photographs
from transformers import ViTImageProcessorPil

from hf_vit.data import eval_transform
from hf_vit.speed.measuring import quartiles, speed_ratio, take_turns
from hf_vit.speed.script import Script, parser


def write_images(folder: Path, count: int) -> list[Path]:
    """500x375 px crops of photographs, JPEG of quality 90."""
    random = np.random.default_rng(0)
    sources = [Image.fromarray(photographs.astronaut()), Image.fromarray(photographs.chelsea())]
    paths = []
    for number in range(count):
        source = sources[number % 2].resize((640, 480))
        left, top = int(random.integers(140)), int(random.integers(105))
        paths.append(folder / f"{number}.jpg")
        source.crop((left, top, left + 500, top + 375)).save(paths[-1], quality=90)
    return paths


class Files(torch.utils.data.Dataset):
    """Image files through a function of [image] -> [pixel values]."""

    def __init__(self, paths: list[Path], prepare: Any) -> None:
        self.paths, self.prepare = paths, prepare

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index]) as image:
            return self.prepare([image])[0]


def theirs(images: list[Image.Image]) -> torch.Tensor:
    return PROCESSOR(images=images, return_tensors="pt")["pixel_values"]


PROCESSOR = ViTImageProcessorPil(do_convert_rgb=True)


def main() -> None:
    options = parser(__doc__, turns=7)
    options.add_argument("--images", type=int, default=512)
    options.add_argument("--workers", type=int, default=2)
    report = Script(options.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        paths = write_images(Path(folder), report.options.images)
        sets = {"hf_vit": Files(paths, eval_transform(PROCESSOR).prepare), "transformers": Files(paths, theirs)}
        difference = max(float((sets["hf_vit"][i] - sets["transformers"][i]).abs().max()) for i in range(16))
        loaders = {
            name: torch.utils.data.DataLoader(
                files, batch_size=32, num_workers=report.options.workers, persistent_workers=True
            )
            for name, files in sets.items()
        }
        seconds = take_turns(
            {name: lambda loader=loader: sum(len(batch) for batch in loader) for name, loader in loaders.items()},
            report.options.turns,
        )
    report.add(
        times_as_fast=speed_ratio(seconds, "hf_vit", "transformers"),
        images_per_second=round(report.options.images / quartiles(seconds["hf_vit"]).median, 1),
        largest_difference=difference,
    )
    report.finish()


if __name__ == "__main__":
    main()
