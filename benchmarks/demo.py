"""Compare the demonstration's models, made by `hf-vit demo --seeds 10 --output FOLDER`, with two of scikit-learn.

Reads the recorded test results of every seed, and fits a support vector machine and the 3 nearest neighbours on the
pixels of the same training images. Their settings are common ones for these digits, not tuned here.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from script import describe
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC

from hf_vit.data import load_data
from hf_vit.results.facts import Facts

PEERS = {"SVC(C=10, gamma=0.001)": SVC(C=10, gamma=0.001), "3 nearest neighbours": KNeighborsClassifier(3)}


def read_seed(folder: Path) -> dict[str, Any]:
    facts = Facts.load(folder)
    training, test = facts.filter_kind("training")[-1], facts.filter_kind("evaluation")[-1]
    assert test.data is not None
    return {
        "seed": training.seed, "test_accuracy": test.values["top1"], "images": test.data.size,
        **{name: training.values[name] for name in ("validation_accuracy", "recipe")},
        "training_seconds": training.seconds, "date": f"{training.date:%Y-%m-%d}", "hardware": training.hardware,
        "versions": training.versions,
    }  # fmt: skip


def count_peer_errors() -> dict[str, int]:
    splits: Any = load_data("digits").splits
    pixels = {
        name: np.stack([np.asarray(row["image"].convert("L"), dtype=float).ravel() / 255 * 16 for row in splits[name]])
        for name in ("train", "test")
    }
    labels = {name: np.array(splits[name]["label"]) for name in pixels}
    fitted = {name: peer.fit(pixels["train"], labels["train"]) for name, peer in PEERS.items()}
    return {name: int((peer.predict(pixels["test"]) != labels["test"]).sum()) for name, peer in fitted.items()}


def main() -> None:
    parser = describe(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "demo.json")
    arguments = parser.parse_args()
    seeds = sorted((read_seed(folder) for folder in arguments.folder.glob("seed-*")), key=lambda seed: seed["seed"])
    mean = sum(seed["test_accuracy"] for seed in seeds) / len(seeds)
    results = {"mean_test_accuracy": mean, "seeds": seeds, "wrong_of_360": count_peer_errors()}
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    worst = min(seed["test_accuracy"] for seed in seeds)
    print(f"{len(seeds)} seeds: mean {mean:.2%}, worst {worst:.2%}; wrong of 360: {results['wrong_of_360']}")


if __name__ == "__main__":
    main()
