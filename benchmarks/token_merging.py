"""Measure speed and accuracy of token merging: `optimize_for_inference(merge_tokens=r)` against the same model without.

Speed of S/16 and B/16 at 224 px with random weights, and of a ViT with 128 tokens that is trained on the digits (once;
kept in --train), with its accuracy. Chosen is the fastest r that loses at most half a point on the validation images.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from script import Script, parser, train_once, vit_sizes

from hf_vit import HfViTConfig, HfViTForImageClassification, optimize_for_inference
from hf_vit.data import load_data, make_processor
from hf_vit.speed.measuring import compute_speed_ratio, take_turns
from hf_vit.speed.peers import Shape, build

MERGED = (2, 4, 8, 12, 16, 20, 24)  # r; six blocks of 128 tokens lose up to 5 x 24, half of those left at most
ALLOWED = 0.005  # of accuracy
_SIZES = vit_sizes(64, 256, num_hidden_layers=6, position_embedding="sincos_2d", pooling="gap")
DIGITS = HfViTConfig(image_size=16, patch_size=(2, 1), **_SIZES)


@torch.inference_mode()
def predict(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(batch).logits for batch in pixels.split(60)]).argmax(-1)


def load_split(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    images: Any = load_data("digits").splits[name]
    processor = make_processor(DIGITS)
    pixels = processor([image.convert("RGB") for image in images["image"]], return_tensors="pt")["pixel_values"]
    return pixels, torch.as_tensor(np.asarray(images["label"]))


def measure_rows(report: Script, name: str, model: Any, images: torch.Tensor) -> list[dict[str, Any]]:
    """Record and return the speed for every r as a ratio to the model without merging."""
    turns = report.options.turns
    forms = {None: optimize_for_inference(copy.deepcopy(model), engine="torch")}
    forms |= {count: optimize_for_inference(copy.deepcopy(model), merge_tokens=count) for count in MERGED}
    seconds = take_turns({str(count): partial(predict, form, images) for count, form in forms.items()}, turns)
    rows: list[dict[str, Any]] = []
    for count, form in forms.items():
        row: dict[str, Any] = {"model": name, "merge_tokens": count, "batch": len(images)}
        row["times_as_fast"] = compute_speed_ratio(seconds, str(count), "None")
        if name == "digits":
            for split_name in ("validation", "test"):
                pixels, labels = load_split(split_name)
                row[f"{split_name}_accuracy"] = float((predict(form, pixels) == labels).double().mean())
                row[f"{split_name}_images"] = len(labels)
        rows.append(row)
    for row in rows:
        report.record(**row)
    return rows


def choose_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest of the rows that keeps the validation accuracy of the first, with its other results."""
    plain, *merging = rows
    allowed = [row for row in merging if row["validation_accuracy"] >= plain["validation_accuracy"] - ALLOWED]
    best = max(allowed, key=lambda row: row["times_as_fast"].median)
    return {
        "merge_tokens": best["merge_tokens"],
        "times_as_fast": round(best["times_as_fast"].median, 2),
        "validation_points_lost": round(100 * (plain["validation_accuracy"] - best["validation_accuracy"]), 2),
        "test_points_lost": round(100 * (plain["test_accuracy"] - best["test_accuracy"]), 2),
    }


def main() -> None:
    options = parser(__doc__, turns=9)
    options.add_argument("--train", type=Path, default=Path("out/tokens"))
    report = Script(options.parse_args())
    folder = train_once(DIGITS, "digits", report.options.train, epochs=40)
    trained = HfViTForImageClassification.from_pretrained(folder).eval()
    digits = measure_rows(report, "digits", trained, load_split("test")[0][:60])
    for name in ("S/16", "B/16"):
        model: Any = build("hf_vit", Shape(name))
        measure_rows(report, name, getattr(model, "model", model), torch.randn(8, 3, 224, 224))
    report.finish(chosen=choose_row(digits))
    print(choose_row(digits))


if __name__ == "__main__":
    main()
