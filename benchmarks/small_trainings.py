"""What scripts share that train small models on images of 32 px by a loop of their own."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hf_vit.data import load_data

SIDE = 32


@dataclass(frozen=True)
class Images:
    """Images [n, C, 32, 32] in [-1, 1] and labels [n] of every split."""

    images: dict[str, torch.Tensor]
    labels: dict[str, torch.Tensor]


@functools.cache
def load_images(name: str) -> Images:
    data, images, labels = load_data(name, image_size=(SIDE, SIDE)), {}, {}
    for split, table in data.splits.items():
        pixels = torch.tensor(np.stack([np.asarray(image.convert("RGB")) for image in table["image"]])).float()
        images[split] = pixels.permute(0, 3, 1, 2) / 127.5 - 1
        labels[split] = torch.tensor(table["label"])
    return Images(images, labels)


def subset(labels: torch.Tensor, examples: int, seed: int) -> torch.Tensor:
    """Return the indices of `examples` images, class by class in turn; those of a seed contain its smaller subsets."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    ranks = torch.zeros(len(labels))
    for label in labels.unique():
        class_indices = shuffled[labels[shuffled] == label]
        ranks[class_indices] = torch.arange(len(class_indices)) + label / 100
    return ranks.argsort()[:examples]


def batches(indices: torch.Tensor, steps: int, generator: torch.Generator, size: int = 32) -> Iterator[torch.Tensor]:
    """Yield `steps` batches of indices, repeating an image only when all have been used."""
    waiting = indices[:0]
    for _ in range(steps):
        while len(waiting) < size:
            waiting = torch.cat([waiting, indices[torch.randperm(len(indices), generator=generator)]])
        yield waiting[:size]
        waiting = waiting[size:]


def train_steps(
    model: torch.nn.Module,
    compute_loss: Callable[[torch.Tensor], torch.Tensor],
    order: Iterable[torch.Tensor],
    steps: int,
    rate: float,
) -> None:
    """Train with AdamW, 10% warm-up and cosine decay to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    warm_up = max(steps // 10, 1)
    for step, batch in enumerate(order):
        progress = (step - warm_up) / max(steps - warm_up, 1)
        factor = (step + 1) / warm_up if step < warm_up else 0.5 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.zero_grad()
        compute_loss(batch).backward()
        optimizer.step()
