"""What decoding JPEG files at a smaller scale (`--draft`) costs and gives: accuracy of models trained here, and speed.

Crops of photographs become JPEG files. For every size a ViT is trained on them without draft (kept in --train and not
trained again), and evaluated on the validation and the test files without and with it. Speed is that of files to pixel
values, one image after the other in one thread; differences of pixels are in steps of 255.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from script import Script, parser, train_once, vit_sizes

from hf_vit import HfViTConfig
from hf_vit.data import load_data
from hf_vit.data.images import decode_image
from hf_vit.evaluation import evaluate_protocol, predict
from hf_vit.loading.model import load_model
from hf_vit.speed.measuring import compute_speed_ratio, take_turns

SIDE, SIZES = 384, (48, 112)  # px
QUALITY, WIDTHS = 90, vit_sizes(64, 256, num_hidden_layers=6, position_embedding="sincos_2d", pooling="gap")


def write_files(folder: Path) -> None:
    """Write folder/SPLIT/CLASS/NUMBER.jpg."""
    data = load_data("photos", image_size=(SIDE, SIDE))
    for split, table in data.splits.items():
        for number, row in enumerate(table):
            class_folder: Any = folder / split / data.label_names[row["label"]]
            class_folder.mkdir(parents=True, exist_ok=True)
            row["image"].convert("RGB").save(class_folder / f"{number}.jpg", quality=QUALITY)


def measure(size: int, data: Path, folder: Path, turns: int) -> dict[str, Any]:
    config = HfViTConfig(image_size=size, patch_size=size // 8, **WIDTHS)
    model, files = str(train_once(config, str(data), folder, epochs=40)), sorted((data / "test").rglob("*.jpg"))
    row: dict[str, Any] = {"px": size}
    for split in ("validation", "test"):
        for name, draft in (("", False), ("_draft", True)):
            run = evaluate_protocol("top1", model, str(data), split=split, draft=draft, progress=False)
            row[f"{split}_accuracy{name}"] = round(run.result.values()["top1"], 5)
            row[f"{split}_images"] = run.result.num_images
    answers = ([each.scores[0][0] for each in predict(model, files, draft=draft)] for draft in (False, True))
    row["test_answers_changed"] = sum(a != b for a, b in zip(*answers, strict=True))
    subject = load_model(model)

    def values(side: int | None) -> list[torch.Tensor]:
        return [subject.prepare([decode_image(path, side)]) for path in files]

    row["decoded_px"] = decode_image(files[0], subject.draft_side).size[0]
    pairs = zip(values(None), values(subject.draft_side), strict=True)
    row["mean_difference"] = round(127.5 * float(np.mean([float((a - b).abs().mean()) for a, b in pairs])), 2)
    forms: Any = {"whole": lambda: values(None), "draft": lambda: values(subject.draft_side)}
    row["times_as_fast"] = compute_speed_ratio(take_turns(forms, turns), "draft", "whole")
    return row


def main() -> None:
    options = parser(__doc__, turns=5)
    options.add_argument("--train", type=Path, default=Path("out/draft"))
    report = Script(options.parse_args())
    root: Path = report.options.train
    data = root / "data"
    if not data.exists():
        write_files(root / "making")
        (root / "making").rename(data)
    for size in SIZES:
        report.record(**measure(size, data, root / str(size), report.options.turns))
    report.finish(quality=QUALITY, px_of_files=SIDE)


if __name__ == "__main__":
    main()
