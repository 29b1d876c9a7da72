"""Measure accuracy and calibration of students with and without label smoothing and a teacher, on digits.

The teacher is a ViT that is trained once with the recipe "digits" but for the label smoothing. The student has a
seventh of its parameters and is trained with that recipe, but without any variation of the images (--varied: with it):

    plain      labels alone, no smoothing
    smoothing  labels smoothed by 0.1 (arXiv 1512.00567)
    logit      plain, and 0.1 * KL * T^2 with the teacher at T = 3 (arXiv 1503.02531, weights of arXiv 2012.12877)
    soft       the same on a distillation token with a head of its own
    hard       the teacher's first guess, weight 0.5, on such a token (arXiv 2012.12877)

The best of 10 checkpoints by validation accuracy is evaluated once on the test images: accuracy, mean negative
log-likelihood, expected calibration error (arXiv 1706.04599).
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any

from records import Job, PlannedJob, Records, script_options
from script import CPU, count_parameters, move_into_place, vit_sizes
from tables import TABLES

from hf_vit import HfViTConfig
from hf_vit.training import finetune
from hf_vit.training.tasks.distillation import DistillationOptions

SEEDS = (0, 1, 2)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "smoothing": {"label_smoothing": 0.1}, **{kind: {"kind": kind} for kind in ("logit", "soft", "hard")}
}  # fmt: skip
TEACHER = vit_sizes(64, 128, num_hidden_layers=6, pooling="gap", position_embedding="sincos_2d")
STUDENT = vit_sizes(32, 64, num_hidden_layers=3)
UNVARIED = {"shift_px": 0.0, "rotation_degrees": 0.0, "shear_degrees": 0.0, "zoom": 0.0}


def train(job: Job, teacher: Path) -> dict[str, Any]:
    """Train one model on the digits; what its test says. The teacher stays where it belongs."""
    config, values, learning = TEACHER, dict[str, Any](), None
    if job["way"] != "teacher":
        config, settings = STUDENT, dict(WAYS[job["way"]])
        learning = DistillationOptions(str(teacher), settings.pop("kind")) if "kind" in settings else None
        values = settings | {"epochs": job["epochs"], "evaluations": 10} | ({} if job["varied"] else UNVARIED)
    with tempfile.TemporaryDirectory() as folder:
        result = finetune(
            HfViTConfig(image_size=16, patch_size=4, **config), "digits", Path(folder) / "out", recipe="digits",
            distillation=learning, seed=job["seed"], **CPU, **({"label_smoothing": 0.0} | values),
        )  # fmt: skip
        if job["way"] == "teacher":
            move_into_place(Path(folder) / "out", teacher)
    return {
        "accuracy": result.test.top1, "loss": result.test.loss, "ece": result.test.ece,
        "parameters": count_parameters(result.model), "settings": learning.settings() if learning else {},
    }  # fmt: skip


def main() -> None:
    options = script_options(__doc__, "distillation.jsonl")
    options.add_argument("--epochs", type=int, default=40)
    options.add_argument("--varied", action="store_true", help="the recipe's variation of the images")
    options.add_argument("--teacher", type=Path, default=Path("build/distillation"), help="made where it is not there")
    arguments = options.parse_args()
    teacher: Path = arguments.teacher
    first = [] if teacher.exists() else [{"way": "teacher", "seed": 0}]
    jobs: list[PlannedJob] = [(job, []) for job in first]
    for seed, way in itertools.product(SEEDS, WAYS):
        jobs.append(({"way": way, "seed": seed, "epochs": arguments.epochs, "varied": arguments.varied}, first))

    def has_files(job: Job) -> bool:
        return job not in first or teacher.exists()

    Records(arguments.output).work(jobs, lambda job, _: train(job, teacher), has_files=has_files)
    print(TABLES["distillation"](arguments.output))


if __name__ == "__main__":
    main()
