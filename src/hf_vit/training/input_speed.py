"""Measure whether the images come as fast as the model trains on them: both, and the two together, in images/s."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from hf_vit.errors import UserError
from hf_vit.results.writing import scratch_folder
from hf_vit.training.options import FinetuneOptions
from hf_vit.training.recipes.registry import Recipe, find_recipe
from hf_vit.training.run import Job, check, open_start, prepare, quiet_transformers
from hf_vit.training.tasks.classification import Classification

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
    """Measure the input of a training beside the training itself, as `finetune` would run both.

    Args:
        model, data, recipe, options: as `finetune` takes them. Nothing is written.
        seconds: of each of the three measurements; they take turns.
        report: gets a line at a time about what is done.

    Raises:
        UserError: bad input, see `finetune`; `seconds` is not positive.
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
        batches = _endless(loader)
        one = next(batches)

        def step(batch: dict[str, Any]) -> int:
            trainer.training_step(learner, batch)
            optimizer.step()
            optimizer.zero_grad()
            return len(batch["labels"])

        works: list[Callable[[], int]] = [
            lambda: len(next(batches)["labels"]),
            lambda: step(one),
            lambda: step(next(batches)),
        ]
        step(one)
        rates: list[list[float]] = [[], [], []]
        for _ in range(_TURNS):
            for number, work in enumerate(works):
                if number != 1 and loader.num_workers:  # batches that were prepared while nobody asked
                    for _ in range(2 * loader.num_workers + 2):
                        next(batches)
                rates[number].append(_images_per_second(work, seconds / _TURNS))
        cached = bool(getattr(trainer.train_dataset, "is_cached", False))
    data_speed, model_speed, together = map(median, rates)
    return InputSpeed(data_speed, model_speed, together, run.micro_batch_size, loader.num_workers, cached)


def _images_per_second(work: Callable[[], int], seconds: float) -> float:
    images, start = 0, time.perf_counter()
    while True:
        images += work()
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                elapsed = time.perf_counter() - start
            return images / elapsed


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader
