"""How the recipe `small-data` was chosen: candidates on validation images of digits, photographs and fractals.

A plain ViT of 0.2 million parameters learns from scratch at 32 px, always for as many steps of 64 images. Only
validation images are looked at.
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any

from records import Job, PlannedJob, Records, script_options
from script import CPU, vit_sizes
from tables import TABLES

from hf_vit import HfViTConfig
from hf_vit.training import finetune

DATA = ("digits", "photos", "fractals:classes=20,images=50,seed=1")
_MILD = {"random_resized_crop": (0.6, 1.0), "rotation_degrees": 10.0, "horizontal_flip": 0.0, "average_decay": 0.99}
_MUON = _MILD | {"optimizer": "muon", "momentum": 0.95}
CANDIDATES: dict[str, dict[str, Any]] = {
    "default-small": {},
    "adamw 1e-3": _MILD | {"learning_rate": 1e-3},
    "adamw 3e-3": _MILD | {"learning_rate": 3e-3},
    "muon 1e-3": _MUON | {"learning_rate": 1e-3},
    "muon 3e-3": _MUON | {"learning_rate": 3e-3},
    "muon 1e-3, mixed": _MUON | {"learning_rate": 1e-3, "mixup_alpha": 0.2, "drop_path": 0.1},
}
CONFIG = HfViTConfig(image_size=32, patch_size=8, pooling="gap", **vit_sizes(64, 256, num_hidden_layers=4))


def train(job: Job, _: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"steps": job["steps"], "evaluations": 4} | CANDIDATES[job["candidate"]]
        result = finetune(CONFIG, job["data"], Path(folder) / "out", seed=job["seed"], **CPU, **settings)
    scores = {f"validation_{name}": result.validation[name] for name in ("accuracy", "loss")}
    return {**scores, "best_step": result.best_step}


def main() -> None:
    options = script_options(__doc__, "small_data.jsonl")
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--steps", type=int, default=400)
    arguments = options.parse_args()
    jobs: list[PlannedJob] = [
        ({"candidate": candidate, "data": data, "seed": seed, "steps": arguments.steps}, [])
        for seed, data, candidate in itertools.product(arguments.seeds, DATA, CANDIDATES)
    ]
    Records(arguments.output).work(jobs, train)
    print(TABLES["small_data"](arguments.output))


if __name__ == "__main__":
    main()
