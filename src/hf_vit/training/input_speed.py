"""Measure whether the images come as fast as the model trains on them: both, and the two together, in images/s."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from statistics import median
from typing import Any

import torch

from hf_vit.conversion.progress import quiet_transformers
from hf_vit.errors import UserError
from hf_vit.results.writing import scratch_folder
from hf_vit.training.recipes.registry import Recipe, find_recipe
from hf_vit.training.run import Job, check, open_start, prepare
from hf_vit.training.tasks.classification import Classification
from hf_vit_settings import FinetuneOptions

# Turns of each measurement; the median counts.
_TURNS = 3


@dataclass(frozen=True)
class InputSpeed:
    """Medians of what was measured, in images/s of one process.

    Attributes:
        data: the training loader alone: read, decode, vary, collate, move to the device.
        model: training steps on one batch that is there already: forward, backward, optimizer.
        together: training steps on what the loader gives.
        micro_batch_size: images a step.
        num_workers: processes that prepare images.
        is_cached: prepared images are kept in memory, so nothing is read or decoded after the first epoch.
    """

    data: float
    model: float
    together: float
    micro_batch_size: int
    num_workers: int
    is_cached: bool

    @property
    def limit(self) -> str:
        """What a faster one of would make training faster: "data" or "model"."""
        return "data" if self.data < self.model else "model"


def measure_input(
    model: str,
    data: str,
    *,
    recipe: str | Recipe = "default-small",
    options: FinetuneOptions | None = None,
    seconds: float = 5.0,
    report: Callable[[str], None] | None = None,
) -> InputSpeed:
    """Measure the input of a training beside the training itself, as `finetune` would run both; nothing is written.

    `seconds` are of each of the three measurements, which take turns.
    """
    if seconds <= 0:
        raise UserError(f"{seconds} seconds are too short to measure; give 5 or more")
    chosen = (find_recipe(recipe) if isinstance(recipe, str) else recipe).override(steps=1)
    options = options or FinetuneOptions()
    say = report or (lambda line: None)
    with scratch_folder("input_speed") as scratch, quiet_transformers():
        task, job = Classification(), Job(model, data, scratch / "run", chosen, options)
        check(task, job, say)
        run = prepare(task, job, open_start(job, say), say)
        trainer = task.build_trainer(run)
        loader = trainer.get_train_dataloader()
        learner, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
        # What the Trainer divides a loss by when it does not count the images.
        trainer.current_gradient_accumulation_steps = 1
        batches = chain.from_iterable(repeat(loader))
        one = next(batches)

        def step(batch: dict[str, Any]) -> int:
            trainer.training_step(learner, batch)
            optimizer.step()
            optimizer.zero_grad()
            return len(batch["labels"])

        works: dict[str, Callable[[], int]] = {
            "data": lambda: len(next(batches)["labels"]),
            "model": lambda: step(one),
            "together": lambda: step(next(batches)),
        }
        step(one)
        rates: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(_TURNS):
            for name, work in works.items():
                if name != "model" and loader.num_workers:  # batches that were prepared while nobody asked
                    for _ in range(2 * loader.num_workers + 2):
                        next(batches)
                rates[name].append(_images_per_second(work, seconds / _TURNS))
        is_cached = bool(getattr(trainer.train_dataset, "is_cached", False))
    medians = {name: median(values) for name, values in rates.items()}
    return InputSpeed(
        **medians, micro_batch_size=run.micro_batch_size, num_workers=loader.num_workers, is_cached=is_cached
    )


def _images_per_second(work: Callable[[], int], seconds: float) -> float:
    images, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not images:
        images += work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
    return images / elapsed
