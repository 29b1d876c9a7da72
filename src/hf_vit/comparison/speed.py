"""How fast the models are and how much memory they take: in turns, in one process, beside the first of them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from hf_vit.comparison.result_files import JudgedModel, ModelSpeed, SpeedResult, Spread
from hf_vit.environment import hardware
from hf_vit.speed.measuring import BUSY, Quartiles, others_load, peak_memory, quartiles, speed_ratio, take_turns
from hf_vit.subjects.subject import Subject


def measure_speed(
    subjects: Mapping[str, Subject],
    samples: Mapping[str, torch.Tensor],
    models: list[JudgedModel],
    turns: int,
) -> SpeedResult:
    """Time forward passes of all models on prepared images; the load of others is looked at before and after.

    Args:
        subjects: the models with what answers, the first of them the measure of the others.
        samples: for every model the images it is timed with, [B, C, H, W] on its device.
        models: what they are.
        turns: forwards of every model that count; two more warm up.
    """
    forwards = {name: _forward(subject, samples[name]) for name, subject in subjects.items()}
    device = str(next(iter(samples.values())).device)
    load = others_load()
    seconds = take_turns(forwards, turns)
    load = max(load, others_load())
    first, batch_size = next(iter(forwards)), len(next(iter(samples.values())))
    rows = {
        name: ModelSpeed(
            images_per_second=_spread(quartiles([batch_size / second for second in seconds[name]])),
            times_as_fast=_spread(speed_ratio(seconds, name, first)),
            peak_memory=peak_memory(forward, device),
        )
        for name, forward in forwards.items()
    }
    return SpeedResult(
        models=models,
        batch_size=batch_size,
        turns=turns,
        threads=torch.get_num_threads(),
        hardware=hardware(device),
        others_load=round(load, 2),
        quiet=load <= BUSY,
        rows=rows,
    )


def _forward(subject: Subject, sample: torch.Tensor) -> Callable[[], Any]:
    model = subject.model.eval()

    def forward() -> None:
        with torch.inference_mode():
            model(sample)
        if sample.is_cuda:
            torch.cuda.synchronize(sample.device)

    return forward


def _spread(found: Quartiles) -> Spread:
    return Spread(**{name: float(f"{value:.4g}") for name, value in asdict(found).items()})
