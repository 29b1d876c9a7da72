"""Do images without labels help? The digits with 50 labels: a supervised model, noisy students, meta pseudo labels.

Data: of the UCI digits' training images 5 a class have their label, others for every seed: 3 to train on, 2 to validate
on. The other 1,207 have none. The 360 test images are the built-in ones. One ViT for all, 28,170 parameters, 16x16 px:

    supervised    the 30 labelled images alone; the teacher of the others
    noisy-1       Noisy Student (arXiv 1911.04252), from nothing, taught by supervised
    noisy-2       the same, taught by noisy-1
    meta          Meta Pseudo Labels (arXiv 2003.10580), from nothing, the teacher begins as supervised
    meta-labels   meta, fine-tuned on the 30 labelled images
    fast-...      the same, taught by `fast`: supervised at the students' learning rate, which the 20 validation images
                  of seed 0 did not choose

First the settings of `GRIDS` are tried with seed 0, and of each way those with the best VALIDATION accuracy, then loss,
are kept; then all is trained with three seeds, and the best of 10 checkpoints by validation is evaluated once on the
test images. The ways have about as many CPU seconds, as the supervised model sees its 30 images more often.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from records import Job, Records, script_options
from script import CPU, vit_sizes
from tables import TABLES

from hf_vit import HfViTConfig
from hf_vit.data import load_data
from hf_vit.training import FinetuneOptions, SelfTrainingOptions, finetune

SEEDS = (0, 1, 2)
MODEL = vit_sizes(32, 64, image_size=16, patch_size=4, num_hidden_layers=3)
RATE: dict[str, Any] = {"learning_rate": 5e-3}
# Of each way what is tried: changes of the recipe "digits", and of the self-training's defaults.
GRIDS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "supervised": [({"learning_rate": rate}, {}) for rate in (1.5e-3, 5e-3)],
    "rate": [(RATE, {})],
    "noisy": [
        (RATE | {"randaugment": (2, 30), "drop_path": 0.2}, {}),  # the paper's noise
        (RATE, {"head_dropout": 0.1}),
        (RATE, {"head_dropout": 0.1, "confidence": 0.6}),
    ],
    "meta": [(RATE | {"randaugment": (2, 30)}, {}), (RATE, {}), (RATE, {"uda_weight": 4.0})],
    "labels": [({"learning_rate": rate}, {}) for rate in (1e-4, 1e-3)],
}
# Way -> its grid, its teacher, what it begins with, its steps.
WAYS: dict[str, tuple[str, str | None, str | None, int]] = {
    "supervised": ("supervised", None, None, 1000),
    "noisy-1": ("noisy", "supervised", None, 400),
    "noisy-2": ("noisy", "noisy-1", None, 400),
    "meta": ("meta", "supervised", None, 200),
    "meta-labels": ("labels", None, "meta", 100),
    "fast": ("rate", None, None, 1000),
    "fast-noisy-1": ("noisy", "fast", None, 400),
    "fast-noisy-2": ("noisy", "fast-noisy-1", None, 400),
    "fast-meta": ("meta", "fast", None, 200),
    "fast-meta-labels": ("labels", None, "fast-meta", 100),
}
CHOOSING = ("supervised", "noisy-1", "meta", "meta-labels")  # by whose runs the settings of a grid are chosen


def write_data(root: Path, seed: int) -> None:
    """Write the folders `labelled` (train, validation, test, with classes) and `unlabelled`."""
    data, random = load_data("digits"), np.random.RandomState(seed)
    train: Any = data.split("train")
    labels = np.asarray(train["label"])
    labeled_rows = np.concatenate([random.permutation(np.flatnonzero(labels == label))[:5] for label in range(10)])
    splits = {int(row): ("train", "validation")[index % 5 > 2] for index, row in enumerate(labeled_rows)}
    rows = [("test", row) for row in data.split("test")] + [(splits.get(i), row) for i, row in enumerate(train)]
    for number, (split, row) in enumerate(rows):
        folder = root / "labelled" / split / str(row["label"]) if split else root / "unlabelled"
        folder.mkdir(parents=True, exist_ok=True)
        row["image"].save(folder / f"{number}.png")


def train(work: Path, job: Job, records: Records, folder: Path) -> dict[str, Any]:
    """Carry out one run with the settings that the job names, or the best of those tried."""
    grid, teacher, begin, steps = WAYS[job["way"]]
    seed, choice = job["seed"], job["choice"] if "choice" in job else choose_settings(records, grid)
    changes, options = GRIDS[grid][choice]
    data = work / f"data-{seed}"
    if not data.exists():
        write_data(data, seed)
    learning = None
    if teacher is not None:
        kind: Any = "noisy-student" if grid == "noisy" else "meta-pseudo-labels"
        learning = SelfTrainingOptions(work / f"{teacher}-{seed}", str(data / "unlabelled"), kind, **options)
    shutil.rmtree(folder, ignore_errors=True)
    result = finetune(
        HfViTConfig(**MODEL) if begin is None else str(work / f"{begin}-{seed}"),
        str(data / "labelled"), folder, recipe="digits", self_training=learning,
        options=FinetuneOptions(seed=seed, **CPU), steps=steps, batch_size=30, evaluations=10, **changes,
    )  # fmt: skip
    settings = changes | ({} if learning is None else learning.settings())
    results = {"choice": choice, "validation": result.validation, "settings": settings, "steps": steps}
    # By the test images nothing is to be chosen.
    return results | ({"test": {"accuracy": result.test.top1, "loss": result.test.loss}} if job["final"] else {})


def jobs() -> Iterator[Job]:
    for seed in SEEDS:
        for way, (grid, *_) in WAYS.items():
            if seed == 0 and way in CHOOSING:
                yield from ({"way": way, "seed": seed, "final": False, "choice": n} for n in range(len(GRIDS[grid])))
            yield {"way": way, "seed": seed, "final": True}


def choose_settings(records: Records, grid: str) -> int:
    """Return the settings of a grid with the best validation result for seed 0."""
    if len(GRIDS[grid]) == 1:
        return 0
    trials = [run for job in jobs() if not job["final"] and WAYS[job["way"]][0] == grid and (run := records.find(job))]
    best_trial = max(trials, key=lambda run: (run["validation"]["accuracy"], -run["validation"]["loss"]))
    return int(best_trial["choice"])


if __name__ == "__main__":
    parser = script_options(__doc__, "self_training.jsonl")
    parser.add_argument("--work", type=Path, default=Path("build/self_training"), help="folder for data and models")
    arguments = parser.parse_args()
    records = Records(arguments.output)

    def model_folder(job: Job) -> Path:
        return arguments.work / (f"{job['way']}-{job['seed']}" if job["final"] else "tried")

    records.work(
        [(job, []) for job in jobs()],
        lambda job, _: train(arguments.work, job, records, model_folder(job)),
        has_files=lambda job: not job["final"] or model_folder(job).exists(),
    )
    print(TABLES["self_training"](arguments.output))
