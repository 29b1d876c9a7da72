"""Fine-tuning at a higher resolution than the checkpoint's (arXiv 2010.11929, section 3.2), on the photographs.

    python benchmarks/high_resolution.py [--output benchmarks/results/high_resolution.json] [--seeds 3]

A ViT of 4 layers, 64 wide, patch 8, learns the eight photographs' crops at 32x32 px (16 tokens; recipe default-small,
6 epochs). From that checkpoint: the same weights asked at 64x64 px without any training, positions resampled; fine-
tuning at 32 px and at 64 px (64 tokens) by the paper's recipe (`vit-finetune`: SGD, cosine, clip 1; batch 64, 40
steps), each with its learning rate chosen among .01 and .03 on the validation images; and a ViT that never saw 32 px,
trained at 64 px for as many steps as both together. Tiles of the test crops were never seen in training.

A folder in `--work` that is complete is not trained again. About 2 minutes of one core a seed.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from hf_vit import HfViTConfig
from hf_vit.data import load_data
from hf_vit.evaluation import evaluate_protocol
from hf_vit.results.facts import Facts, new_record
from hf_vit.subjects.subject import open_subject
from hf_vit.training import FinetuneOptions, find_recipe, finetune

LOW, HIGH = 32, 64
SIZES: dict[str, Any] = {
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
FIRST_EPOCHS, MORE_STEPS, BATCH = 6, 40, 64
RATES = (0.01, 0.03)  # of the paper's grid
FIRST_STEPS = FIRST_EPOCHS * 13  # 800 images
FIRST = find_recipe("default-small").model_copy(update={"patience": None, "evaluations": 2})


def train(folder: Path, model: Any, side: int, seed: int, **settings: Any) -> dict[str, Any]:
    """Train, unless it was done before, and read what the facts say."""
    if not (folder / "facts.json").is_file():
        options = FinetuneOptions(image_size=(side, side), seed=seed, resume=(folder / "checkpoints").exists())
        finetune(model, "photos", folder, options=options, report=print, **settings)
    facts = Facts.load(folder)
    training, evaluation = facts.of_kind("training")[-1], facts.of_kind("evaluation")[-1]
    return {
        "accuracy": evaluation.values["top1"],
        "learning_rate": training.values["recipe"]["learning_rate"],  # pyright: ignore
        "steps": training.values["steps"],
        "seconds": training.seconds,
    }


def as_it_is(folder: Path, side: int) -> dict[str, Any]:
    """The test accuracy of a checkpoint asked at another size, without training."""
    loaded = open_subject(folder)
    model: Any = loaded.model
    model.resize_to(image_size=side)
    loaded.processor.size = {"height": side, "width": side}
    photos = load_data("photos", image_size=(side, side))
    found = evaluate_protocol("top1", (model, loaded.processor), photos, progress=False).result
    return {"accuracy": found.values()["top1"], "steps": 0}


def run(work: Path, seed: int) -> dict[str, dict[str, Any]]:
    """All rows of one seed."""
    small = HfViTConfig(image_size=LOW, **SIZES)
    low = work / f"low-{seed}"
    fine: dict[str, Any] = {
        "recipe": "vit-finetune",
        "steps": MORE_STEPS,
        "batch_size": BATCH,
        "warmup": 0.1,
        "evaluations": 2,
        "lr_sweep": RATES,
    }
    return {
        "low": train(low, small, LOW, seed, recipe=FIRST, epochs=FIRST_EPOCHS),
        "low, asked at high": as_it_is(low, HIGH),
        "low, then low": train(work / f"low-low-{seed}", str(low), LOW, seed, **fine),
        "low, then high": train(work / f"low-high-{seed}", str(low), HIGH, seed, **fine),
        "high from scratch": train(
            work / f"high-{seed}", small, HIGH, seed, recipe=FIRST, steps=FIRST_STEPS + MORE_STEPS
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/high_resolution.json"))
    parser.add_argument("--work", type=Path, default=Path("out/high_resolution"))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    runs = {str(seed): run(arguments.work, seed) for seed in range(arguments.seeds)}
    rows = {name: [runs[seed][name]["accuracy"] for seed in runs] for name in runs["0"]}
    for name, found in rows.items():
        shown = ", ".join(f"{accuracy:.2%}" for accuracy in found)
        print(f"{name:20} mean {statistics.mean(found):.2%} ({shown})")
    record = new_record("benchmark", values={"runs": runs}, command="python benchmarks/high_resolution.py")
    arguments.output.write_text(json.dumps(record.model_dump(mode="json"), indent=2) + "\n")


if __name__ == "__main__":
    main()
