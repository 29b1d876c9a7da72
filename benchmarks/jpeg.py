"""JPEG files to batches, two workers: our evaluation transform beside both of transformers' processors, same loop.

Random crops of photographs are stored as square JPEG files. Both sides decode by Pillow, resize to 224 px by the
processor's library (Pillow or torchvision), and go through the same torch DataLoader, whose collator is the batch that
either makes. Theirs is given images one by one, and whole batches. With `--workers 0` ours prepares a batch in threads,
as it does of itself; theirs is also told in as many threads, which its caller has to bring. "draft" lets the JPEG
decoder itself halve the image where it stays larger than 224 px: how much faster, and how far its pixels are off.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from script import Script, parser
from skimage import data as photographs
from transformers import ViTImageProcessor, ViTImageProcessorPil

from hf_vit.data import eval_transform
from hf_vit.data.images import decode_image, map_in_threads
from hf_vit.speed.measuring import compute_quartiles, compute_speed_ratio, take_turns


def write_images(folder: Path, count: int, size: int) -> list[Path]:
    """Write square crops of photographs as JPEG of quality 90."""
    random = np.random.default_rng(0)
    sources = [Image.fromarray(photographs.astronaut()), Image.fromarray(photographs.chelsea())]
    paths = []
    for number in range(count):
        source = sources[number % 2].resize((size * 5 // 4, size * 5 // 4))
        left, top = random.integers(size // 4, size=2).tolist()
        paths.append(folder / f"{number}.jpg")
        source.crop((left, top, left + size, top + size)).save(paths[-1], quality=90)
    return paths


class Opening:
    """A function that opens paths and turns the images into a batch."""

    def __init__(self, prepare: Any, draft_side: int | None = None) -> None:
        self.prepare, self.draft_side = prepare, draft_side

    def __call__(self, paths: list[Path]) -> torch.Tensor:
        return self.prepare(map_in_threads(lambda path: decode_image(path, self.draft_side), paths))


def prepare_batch(processor: Any, images: list[Image.Image]) -> torch.Tensor:
    """Use an image processor of transformers as it is."""
    return processor(images=images, return_tensors="pt")["pixel_values"]


def prepare_one_by_one(processor: Any, images: list[Image.Image], apply: Any = map) -> torch.Tensor:
    """Use it on one image at a time; with `map_in_threads`, in as many threads as torch uses."""
    return torch.cat(list(apply(lambda image: prepare_batch(processor, [image]), images)))


PROCESSORS, SIZE = {"Pillow": ViTImageProcessorPil, "torchvision": ViTImageProcessor}, 512  # of the files, px


def main() -> None:
    options = parser(__doc__, turns=7)
    options.add_argument("--images", type=int, default=512)
    options.add_argument("--workers", type=int, default=2)
    report = Script(options.parse_args())
    settings = report.options
    with tempfile.TemporaryDirectory() as folder:
        paths: Any = write_images(Path(folder), settings.images, SIZE)
        for name, kind in PROCESSORS.items():
            processor = kind(do_convert_rgb=True)
            ours = eval_transform(processor).batch
            theirs = {"transformers": partial(prepare_batch, processor)}
            theirs["one by one"] = partial(prepare_one_by_one, processor)
            if settings.workers == 0:
                theirs["in threads"] = partial(prepare_one_by_one, processor, apply=map_in_threads)
            sides = {name: Opening(prepare) for name, prepare in {"hf_vit": ours, **theirs}.items()}
            sides["draft"] = Opening(ours, draft_side=224)
            first = {name: side(paths[:16]) for name, side in sides.items()}
            differences = {name: (first["transformers"] - values).abs() for name, values in first.items()}
            same: Any = {"num_workers": settings.workers, "persistent_workers": settings.workers > 0}
            loaders = {
                side: torch.utils.data.DataLoader(paths, batch_size=32, collate_fn=prepare, **same)
                for side, prepare in sides.items()
            }
            turns = {side: lambda loader=loader: sum(map(len, loader)) for side, loader in loaders.items()}
            seconds = take_turns(turns, settings.turns)
            ratios = {
                f"times_as_fast_as_{side.replace(' ', '_')}": compute_speed_ratio(seconds, "hf_vit", side)
                for side in theirs
            }
            report.record(
                processor=name,
                **ratios,
                images_per_second=round(settings.images / compute_quartiles(seconds["hf_vit"]).median, 1),
                largest_difference=float(differences["hf_vit"].max()),
                draft_times_as_fast=compute_speed_ratio(seconds, "draft", "hf_vit"),
                draft_mean_difference=round(127.5 * float(differences["draft"].mean()), 2),
            )
    report.finish(images=settings.images, px=SIZE)


if __name__ == "__main__":
    main()
