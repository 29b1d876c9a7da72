"""How fast models answer and how much memory that takes: in turns, in one process, beside the first of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from PIL import Image

from hf_vit.loading.model import LoadedModel
from hf_vit.speed.measuring import Quartiles, others_load, peak_memory, quartiles, speed_ratio, take_turns


@final
@dataclass(frozen=True)
class ForwardSpeed:
    """One model's forward pass.

    Attributes:
        images_per_second: over the turns.
        times_as_fast: as the first model, paired by turns.
        peak_memory: bytes that torch holds at most, beyond weights and input; None of a graph.
    """

    images_per_second: Quartiles
    times_as_fast: Quartiles
    peak_memory: int | None


def noise_for(subject: LoadedModel, batch: int) -> torch.Tensor:
    """[B, C, H, W] on the model's device: images of noise in the size that it is fed with, as its processor makes them.

    Raises:
        UserError: the model refuses a batch of this size.
    """
    height, width = subject.input_size
    levels = np.random.default_rng(0).integers(0, 256, (batch, height, width, 3), np.uint8)
    sample = subject.pixel_values([Image.fromarray(image) for image in levels])
    _forward(subject, sample)()
    return sample


def measure_forwards(
    subjects: Mapping[str, LoadedModel], samples: Mapping[str, torch.Tensor], turns: int
) -> tuple[dict[str, ForwardSpeed], float]:
    """Time forward passes of all models on prepared images.

    Args:
        subjects: the models, the first of them the measure of the others.
        samples: for every model the images it is timed with, [B, C, H, W] on its device.
        turns: forwards of every model that count; two more warm up.

    Returns:
        The speeds, and the cores that others kept busy before or after, whichever was more.
    """
    forwards = {name: _forward(subject, samples[name]) for name, subject in subjects.items()}
    first, load = next(iter(forwards)), others_load()
    seconds = take_turns(forwards, turns)
    load = max(load, others_load())
    speeds = {
        name: ForwardSpeed(
            images_per_second=quartiles([len(samples[name]) / second for second in seconds[name]]),
            times_as_fast=speed_ratio(seconds, name, first),
            peak_memory=None if subjects[name].is_graph else peak_memory(forward, str(samples[name].device)),
        )
        for name, forward in forwards.items()
    }
    return speeds, load


def _forward(subject: LoadedModel, sample: torch.Tensor) -> Callable[[], Any]:
    model = subject.model.eval()

    def forward() -> None:
        with torch.inference_mode():
            model(sample)
        if sample.is_cuda:
            torch.cuda.synchronize(sample.device)

    return forward
