"""Measure the throughput of the data loader, of training steps, and of both together, in images/s."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from statistics import median
from typing import Any, cast

import torch

from hf_vit.conversion.progress import quiet_transformers
from hf_vit.errors import UserError
from hf_vit.training.recipes.registry import Recipe, find_recipe
from hf_vit.training.run import Job, check, open_start, prepare
from hf_vit.training.tasks.classification import Classification
from hf_vit.writing import make_scratch_folder
from hf_vit_settings import FinetuneOptions

# Turns of every measurement, of which the median is reported.
_TURNS = 3


@dataclass(frozen=True)
class InputSpeed:
    """Median throughput in images/s of one process.

    Attributes:
        data: the training loader (read, decode, augment, collate, move to the device).
        model: training steps (forward, backward, optimizer) on one batch.
        together: training steps on batches of the loader.
        micro_batch_size: images per step.
        num_workers: processes that prepare images.
        is_cached: prepared images are in memory, so nothing is read or decoded after the first epoch.
    """

    data: float
    model: float
    together: float
    micro_batch_size: int
    num_workers: int
    is_cached: bool

    @property
    def limit(self) -> str:
        """The bottleneck of the training: "data" or "model"."""
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
    """Measure the loader and the training steps that `finetune` would use; nothing is written.

    `seconds` is the duration of each of the three measurements, which alternate.
    """
    if seconds <= 0:
        raise UserError(f"--seconds {seconds} is too short to measure; give a larger number, such as --seconds 5")
    one_step_recipe = (find_recipe(recipe) if isinstance(recipe, str) else recipe).override(steps=1, warmup=0)
    report_line = report or (lambda line: None)
    with make_scratch_folder("input_speed") as scratch, quiet_transformers():
        task = Classification()
        job = Job(model, data, scratch / "run", one_step_recipe, options or FinetuneOptions())
        check(task, job, report_line)
        run = prepare(task, job, open_start(job, report_line), report_line)
        trainer = task.build_trainer(run)
        # Images are not kept as they are read, so that every turn reads files.
        cast(Any, trainer.train_dataset)._kept = None
        loader = trainer.get_train_dataloader()
        prepared_model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
        # The Trainer divides the loss by this when it does not count images.
        trainer.current_gradient_accumulation_steps = 1
        batches = chain.from_iterable(repeat(loader))
        first_batch = next(batches)

        def step(batch: dict[str, Any]) -> int:
            trainer.training_step(prepared_model, batch)
            optimizer.step()
            optimizer.zero_grad()
            return len(batch["labels"])

        functions: dict[str, Callable[[], int]] = {
            "data": lambda: len(next(batches)["labels"]),
            "model": lambda: step(first_batch),
            "together": lambda: step(next(batches)),
        }
        step(first_batch)
        rates: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(_TURNS):
            for name, work in functions.items():
                if name != "model" and loader.num_workers:  # skip batches that were prepared during the last turn
                    for _ in range(2 * loader.num_workers + 2):
                        next(batches)
                rates[name].append(_measure_throughput(work, seconds / _TURNS))
        is_cached = bool(getattr(trainer.train_dataset, "is_cached", False))
    medians = {name: median(values) for name, values in rates.items()}
    workers = loader.num_workers
    return InputSpeed(**medians, micro_batch_size=run.micro_batch_size, num_workers=workers, is_cached=is_cached)


def _measure_throughput(work: Callable[[], int], seconds: float) -> float:
    """Repeat a function that returns its number of images, and return the throughput."""
    images = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or not images:
        images += work()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return images / (time.perf_counter() - start)
