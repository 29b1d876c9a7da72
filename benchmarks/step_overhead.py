"""Measure the overhead of HfViTTrainer and the stock Trainer over a plain PyTorch loop with a tiny model.

    python benchmarks/step_overhead.py [--turns 9] [--steps 60] [--output benchmarks/results/step_overhead.json]

The same model, images, AdamW, cosine schedule and clipping at 1.0; CPU seconds a step of one thread, which other
processes touch less than the clock; the first steps are left out. A turn runs each contestant once.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from script import Script, alternate, parser, vit_sizes
from transformers import Trainer, TrainerCallback, TrainingArguments, get_cosine_schedule_with_warmup

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.speed.measuring import quartiles, speed_ratio
from hf_vit.training import HfViTTrainer

BATCH, RATE, WARM_UP = 64, 1e-3, 5


def make_noise() -> Any:
    """Return 512 images of noise, 16x16 px."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(512, 3, 16, 16, generator=generator), torch.randint(10, (512,), generator=generator)
    return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]


class Clock(TrainerCallback):
    """A callback that records the CPU time at the end of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.times.append(time.process_time())


def build_tiny() -> Any:
    torch.manual_seed(0)
    sizes = vit_sizes(64, 128, image_size=16, patch_size=4, num_hidden_layers=4, num_labels=10)
    return HfViTForImageClassification(HfViTConfig(**sizes))


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def train_by_trainer(kind: type[Trainer], steps: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"max_steps": steps, "learning_rate": RATE, "lr_scheduler_type": "cosine"}
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, logging_steps=20, save_strategy="no", use_cpu=True,
            disable_tqdm=True, remove_unused_columns=False, optim="adamw_torch", **settings,
        )  # fmt: skip
        clock = Clock()
        kind(build_tiny(), arguments, train_dataset=make_noise(), data_collator=collate, callbacks=[clock]).train()
    return clock.times


def train_by_loop(steps: int) -> list[float]:
    model, times = build_tiny().train(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, steps)
    loader = torch.utils.data.DataLoader(make_noise(), BATCH, shuffle=True, collate_fn=collate)
    while len(times) < steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            times.append(time.process_time())
    return times[:steps]


def median_step_seconds(train: Callable[..., list[float]], *arguments: Any) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(train(*arguments)[WARM_UP:]))


def main() -> None:
    options = parser(__doc__, turns=9)
    options.add_argument("--steps", type=int, default=60)
    options.set_defaults(threads=1)
    report = Script(options.parse_args())
    steps = report.options.steps
    contestants = {
        **{
            kind.__name__: partial(median_step_seconds, train_by_trainer, kind, steps)
            for kind in (HfViTTrainer, Trainer)
        },
        "a plain loop": partial(median_step_seconds, train_by_loop, steps),
    }
    seconds = alternate(contestants, report.options.turns)
    for name, values in seconds.items():
        milliseconds = round(1000 * quartiles(values).median, 2)
        ratio = speed_ratio(seconds, "a plain loop", name)
        report.record(contestant=name, time_of_a_plain_loop=ratio, milliseconds=milliseconds)
    report.finish(steps=steps, batch=BATCH)


if __name__ == "__main__":
    main()
