"""The recipe `small-data`: plain ViT, by several ways to start, beside a ResNet, at equal CPU seconds on few images.

Digits, photographs, and classes of fractals that no pre-training has seen; 50 or 200 images of all classes alike, or
all. ViT and ResNet are those of data_scale.py, of equal FLOPs. Every start has as many CPU seconds a rate (--seconds),
by the seconds of its steps that are measured beforehand: from scratch; after fractals (for --pretraining-seconds, at
the lower rate, once a seed for all data, not counted); or after masked patches or momentum contrast on the images of
the task, for half of these seconds. Both rates of the recipe are tried in each run and that with the better VALIDATION
accuracy is kept; the test images are evaluated once a run.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from data_scale import MODELS, SIDE
from records import Job, Records, read_plan, script_options
from script import CPU, move_into_place
from small_trainings import subset
from tables import TABLES

from hf_vit.data import load_data
from hf_vit.training import finetune, pretrain

DATA = ("digits", "photos", "fractals:classes=20,images=50,seed=1")
FRACTALS = "fractals:classes=100,images=1000,seed=0"  # other classes than those of the comparison
STARTS = {  # name -> (model, where its weights come from)
    "ViT": ("ViT", "scratch"), "ResNet": ("BiT", "scratch"),
    "ViT, fractals": ("ViT", "fractals"), "ResNet, fractals": ("BiT", "fractals"),
    "ViT, masked": ("ViT", "masked-patch"), "ViT, contrast": ("ViT", "contrastive"),
}  # fmt: skip
_SHORT = (8, 136)  # steps of the two trainings that a step's seconds are taken from; they are recorded once for all


@dataclass(frozen=True)
class Plan:
    """The plan of the experiment; its fields are the script's options."""

    data: tuple[str, ...] = DATA
    images: tuple[int, ...] = (50, 200, 0)  # 0: all
    starts: tuple[str, ...] = tuple(STARTS)
    seeds: tuple[int, ...] = (0, 1, 2)
    seconds: float = 40.0  # CPU seconds a rate and run
    pretraining_seconds: float = 600.0

    def jobs(self) -> Iterator[tuple[Job, list[Job]]]:
        """Return all jobs seed by seed, each with those it depends on."""
        origins = [STARTS[start] for start in self.starts]
        steps = [(model, "labels") for model, _ in origins]
        steps += [(model, origin) for model, origin in origins if origin not in ("scratch", "fractals")]
        yield from ((step_job(model, objective), []) for model, objective in dict.fromkeys(steps))
        for seed in self.seeds:
            for model in dict.fromkeys(model for model, origin in origins if origin == "fractals"):
                yield self.fractals(model, seed), [step_job(model, "labels")]
            for data, images, start in itertools.product(self.data, self.images, self.starts):
                (model, origin), prerequisites = STARTS[start], [step_job(STARTS[start][0], "labels")]
                if origin != "scratch":
                    prerequisites += [self.fractals(model, seed) if origin == "fractals" else step_job(model, origin)]
                same = {"data": data, "images": images, "seed": seed, "seconds": self.seconds}
                yield {"kind": "run", "start": start, **same}, prerequisites

    def fractals(self, model: str, seed: int) -> Job:
        return {"kind": "fractals", "model": model, "seed": seed, "seconds": self.pretraining_seconds}


def run_job(job: Job, _: Any, records: Records, kept: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        if job["kind"] == "step":
            return {"seconds_of_step": measure_step_seconds(job["model"], job["objective"], folder)}
        if job["kind"] == "fractals":
            return learn_fractals(job, records, folder, kept / f"{job['model']}-{job['seed']}")
        return carry_out(job, records, folder, kept)


def step_job(model: str, objective: str) -> Job:
    return {"kind": "step", "model": model, "objective": objective}


def count_steps(seconds: float, records: Records, model: str, objective: str) -> int:
    """Return the number of steps that fit, from the one record that all processes use."""
    measured = records.find(step_job(model, objective))
    assert measured is not None, "measured before"
    return max(1, round(seconds / measured["seconds_of_step"]))


def learn_fractals(job: Job, records: Records, folder: Path, place: Path) -> dict[str, Any]:
    """Train weights on fractals for all runs of a seed, and move them into place when complete."""
    steps = count_steps(job["seconds"], records, job["model"], "labels")
    result = finetune(
        MODELS[job["model"]], FRACTALS, folder / "out", recipe="small-data", learning_rate=1e-3, steps=steps,
        evaluations=4, seed=job["seed"], **CPU,
    )  # fmt: skip
    place.parent.mkdir(parents=True, exist_ok=True)
    move_into_place(folder / "out", place)
    return {"steps": steps, "validation_accuracy": result.validation["accuracy"]}


def carry_out(job: Job, records: Records, folder: Path, kept: Path) -> dict[str, Any]:
    """Carry out one start on some images: pre-training if it has one, then fine-tuning at two rates."""
    model, origin = STARTS[job["start"]]
    data, batch_size = write_few_images(job["data"], job["images"], job["seed"], folder / "data")
    seconds, start, before = job["seconds"], MODELS[model], 0
    if origin == "fractals":
        start = str(kept / f"{model}-{job['seed']}")
    elif origin != "scratch":
        seconds /= 2
        before = count_steps(seconds, records, model, origin)
        pretrain(
            start, data, folder / "start", objective=origin, steps=before, batch_size=batch_size, image_size=SIDE,
            evaluations=2, seed=job["seed"], **CPU,
        )  # fmt: skip
        start = str(folder / "start")
    steps = count_steps(seconds, records, model, "labels")
    result = finetune(
        start, data, folder / "out", recipe="small-data", lr_sweep=True, steps=steps, batch_size=batch_size,
        image_size=SIDE, evaluations=4, seed=job["seed"], **CPU,
    )  # fmt: skip
    accuracies = {"validation_accuracy": result.validation["accuracy"], "test_accuracy": result.test.top1}
    return {"pretraining_steps": before, "steps": steps, **accuracies}


def write_few_images(name: str, images: int, seed: int, folder: Path) -> tuple[str, int]:
    """Return a folder with this many training images per class, and a suitable batch size."""
    data = load_data(name, image_size=(SIDE, SIDE))
    for split, table in data.splits.items():
        numbers = range(len(table))
        if split == "train" and images:
            numbers = subset(torch.tensor(table["label"]), images, seed).tolist()
        for number in numbers:
            row = table[number]
            class_folder = folder / split / data.label_names[row["label"]]
            class_folder.mkdir(parents=True, exist_ok=True)
            row["image"].save(class_folder / f"{number}.png")
    return str(folder), 64 if not images or images >= 128 else 32


def measure_step_seconds(model: str, objective: str, folder: Path) -> float:
    """Return the CPU seconds of a step of 64 digits, measured by short trainings."""
    learn = partial(finetune, recipe="small-data") if objective == "labels" else partial(pretrain, objective=objective)
    same = {"batch_size": 64, "evaluations": 1, "image_size": SIDE, **CPU}

    def train(steps: int) -> float:
        out = Path(tempfile.mkdtemp(dir=folder)) / "out"
        start = time.process_time()
        learn(MODELS[model], "digits", out, steps=steps, **same)
        return time.process_time() - start

    few, more = (statistics.median(train(steps) for _ in range(3)) for steps in _SHORT)
    return max(1e-3, (more - few) / (_SHORT[1] - _SHORT[0]))


def main() -> None:
    options = script_options(__doc__, "small_data_compare.jsonl", Plan, starts=STARTS)
    options.add_argument("--kept", type=Path, default=Path("build/small_data"), help="weights learnt on fractals")
    arguments = options.parse_args()
    records, jobs = Records(arguments.output), list(read_plan(Plan, arguments).jobs())

    def has_weights(job: Job) -> bool:
        return job["kind"] != "fractals" or (arguments.kept / f"{job['model']}-{job['seed']}").exists()

    records.work(jobs, partial(run_job, records=records, kept=arguments.kept), has_files=has_weights)
    print(TABLES["small_data_compare"](records.path))


if __name__ == "__main__":
    main()
