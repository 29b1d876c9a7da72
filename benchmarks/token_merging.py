"""What token merging costs and gives: `optimize_for_inference(merge_tokens=r)` beside the same model without.

    python benchmarks/token_merging.py [--train out/tokens] [--turns 9] [--output benchmarks/results/token_merging.json]

Speed of S/16 and B/16 at 224 px with random weights, and of a ViT with 256 tokens that is trained on the digits (16 px,
patches of 1 px; kept in --train and not trained again), with its accuracy on the validation and the test images for
every r. r is no setting that was chosen: all that were tried are told.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_vit import HfViTConfig, HfViTForImageClassification, optimize_for_inference
from hf_vit.data import load_data, make_processor
from hf_vit.speed.measuring import speed_ratio, take_turns
from hf_vit.speed.peers import Shape, build
from hf_vit.speed.script import Script, parser
from hf_vit.training import FinetuneOptions, finetune

MERGED = (2, 4, 8, 12, 16, 24)  # r; six blocks of 256 tokens lose up to 5 x 24
DIGITS = HfViTConfig(
    image_size=16,
    patch_size=1,
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    intermediate_size=128,
    position_embedding="sincos_2d",
    pooling="gap",
)


def trained(folder: Path) -> Any:
    if not folder.exists():
        options = FinetuneOptions(seed=0, device="cpu", precision="fp32")
        finetune(DIGITS, "digits", folder, recipe="digits", options=options, report=print)
    return HfViTForImageClassification.from_pretrained(folder).eval()


@torch.inference_mode()
def predictions(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(batch).logits for batch in pixels.split(60)]).argmax(-1)


def split(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    images: Any = load_data("digits").splits[name]
    processor = make_processor(DIGITS)
    pixels = processor([image.convert("RGB") for image in images["image"]], return_tensors="pt")["pixel_values"]
    return pixels, torch.as_tensor(np.asarray(images["label"]))


def main() -> None:
    options = parser(__doc__, turns=9)
    options.add_argument("--train", type=Path, default=Path("out/tokens"))
    report = Script(options.parse_args())
    digits = trained(report.options.train)
    plain = {name: build("hf_vit", Shape(name)) for name in ("S/16", "B/16")}
    models: dict[str, Any] = {
        **{name: getattr(built, "model", built) for name, built in plain.items()},
        "digits": digits,
    }
    data = {name: split(name) for name in ("validation", "test")}
    for name, model in models.items():
        config = model.config
        images = torch.randn(8, config.num_channels, *config.nominal_size)
        forms = {None: optimize_for_inference(copy.deepcopy(model))}
        forms |= {count: optimize_for_inference(copy.deepcopy(model), merge_tokens=count) for count in MERGED}

        def runs(form: Any, images: torch.Tensor = images) -> Any:
            return lambda: predictions(form, images)

        seconds = take_turns({str(count): runs(form) for count, form in forms.items()}, report.options.turns)
        for count, form in forms.items():
            row: dict[str, Any] = {"model": name, "merge_tokens": count, "batch": len(images)}
            row["times_as_fast"] = speed_ratio(seconds, str(count), "None")
            if name == "digits":
                for part, (pixels, labels) in data.items():
                    row[f"{part}_accuracy"] = float((predictions(form, pixels) == labels).double().mean())
                    row[f"{part}_images"] = len(labels)
            report.add(**row)
    report.finish()


if __name__ == "__main__":
    main()
