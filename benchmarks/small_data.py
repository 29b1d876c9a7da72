"""How the recipe `small-data` was chosen: candidates on validation images of digits, photographs and fractals.

    python benchmarks/small_data.py [--seeds 0] [--steps 400] [--output benchmarks/results/small_data.jsonl]

Every finished run is a line of the output, and is not repeated: start it again to go on. A plain ViT of 0.2 million
parameters learns from scratch at 32 px, always for as many steps of 64 images. Only validation images are looked at.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hf_vit import HfViTConfig
from hf_vit.environment import hardware, versions
from hf_vit.training import finetune

DATA = ("digits", "photos", "fractals:classes=20,images=50,seed=1")
_MILD: dict[str, Any] = {
    "random_resized_crop": (0.6, 1.0),
    "rotation_degrees": 10.0,
    "horizontal_flip": 0.0,
    "average_decay": 0.99,
}
_MIXED = {"mixup_alpha": 0.2, "drop_path": 0.1}
CANDIDATES: dict[str, dict[str, Any]] = {
    "default-small": {},
    "adamw 1e-3": _MILD | {"learning_rate": 1e-3},
    "adamw 3e-3": _MILD | {"learning_rate": 3e-3},
    "muon 1e-3": _MILD | {"learning_rate": 1e-3, "optimizer": "muon", "momentum": 0.95},
    "muon 3e-3": _MILD | {"learning_rate": 3e-3, "optimizer": "muon", "momentum": 0.95},
    "muon 1e-3, mixed": _MILD | _MIXED | {"learning_rate": 1e-3, "optimizer": "muon", "momentum": 0.95},
}
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}


def model() -> HfViTConfig:
    """The ViT that every candidate trains."""
    return HfViTConfig(image_size=32, patch_size=8, pooling="gap", **SIZES)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--data", nargs="+", default=list(DATA))
    options.add_argument("--candidates", nargs="+", default=list(CANDIDATES))
    options.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "small_data.jsonl")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    lines = chosen.output.read_text().splitlines() if chosen.output.exists() else []
    done = {tuple(json.loads(line)[key] for key in ("candidate", "data", "seed", "steps")) for line in lines}
    for seed in chosen.seeds:
        for data in chosen.data:
            for candidate in chosen.candidates:
                if (candidate, data, seed, chosen.steps) not in done:
                    run(candidate, data, seed, chosen.steps, chosen.output)


def run(candidate: str, data: str, seed: int, steps: int, output: Path) -> None:
    """Train once, and add a line."""
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"steps": steps, "evaluations": 4} | CANDIDATES[candidate]
        result = finetune(model(), data, Path(folder) / "out", seed=seed, device="cpu", precision="fp32", **settings)
    record = {
        "candidate": candidate,
        "data": data,
        "seed": seed,
        "steps": steps,
        "validation_accuracy": result.validation["accuracy"],
        "validation_loss": result.validation["loss"],
        "best_step": result.best_step,
        "cpu_seconds": round(time.process_time() - begun, 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": hardware("cpu"),
        "versions": versions(),
    }
    with output.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(
        f"{candidate}, {data}, seed {seed}: {record['validation_accuracy']:.2%} in {record['cpu_seconds']} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
