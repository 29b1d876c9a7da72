"""Every command that writes, at a size of a second, and what it starts from.

A new command, export target or pre-training objective must join a table, or `test_every_command_is_in_a_table` fails.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaigns.engine import ROOT

TRAINING = ("--steps", "2", "--evaluations", "2", "--batch-size", "8", "--device", "cpu")
DATA = ("--data", "images")
INTO = ("--output", "out")


# The words of a command line after hf-vit. It runs in a place that holds `images`, `model`, `other` and `sure` (its
# siblings) and `source.npz`.
Line = tuple[str, ...]
_CONVERT, _CARD = ("convert", "source.npz", "out"), ("card", "model")
_EVALUATE, _COMPARE = ("evaluate", "model", *DATA), ("compare", "model", "other", *DATA, *INTO)
_PAGE = ("page", "model", *INTO, "--runtime", "runtime")
_PREDICT = ("predict", "model", "images/red", "--output")
_CALIBRATE = ("--calibrate", "digits")
_LIBRARIES = ("transformers", "timm", "vit_jax", "onnx", "openvino", "transformers.js")
_EXPORT = {name: ("export", "model", "out", "--to", name) for name in _LIBRARIES}
_EXPORT["onnx-preprocessing"] = (*_EXPORT["onnx"], "--preprocessing")
_EXPORT |= {
    f"{name}-quantize": ("export", "sure", "out", "--to", name, "--static", "--quantize", "static", *_CALIBRATE)
    for name in ("onnx", "openvino")
}
_FINETUNE = ("finetune", "model", *DATA, *INTO, *TRAINING)
_HEAD = ("--task", "segmentation", "--head-width", "8", "--image-size", "32")
_SEGMENT = ("finetune", "model", "--data", "scenes:images=8,size=32", "--output", "heads", *_HEAD, *TRAINING)
_SPEED = ("--batch", "1", "--turns", "1", "--image-size", "16", "--work", "inference", "--contestant", "hf_vit",
          "--output", "speed.json")  # fmt: skip
_SAVED = ("bench", "saved", "model", "other", "--turns", "1", "--batch", "1", "--output", "speed.json")
_FILTERS = ("--images", "images", *INTO, "--only", "patch_filters")
_PRETRAIN = ("pretrain", "--model", "model", *DATA, *INTO, *TRAINING)

# Name -> commands, of which the last one is tried: what the earlier ones wrote must stay until the new is complete.
WRITING: dict[str, list[Line]] = {
    "data-output": [("data", "images", *INTO)],
    "soup": [("soup", "model", "other", *INTO)],
    "soup-judged": [("soup", "model", "other", *INTO, *DATA, "--greedy")],
    "evaluate": [(*_EVALUATE, "--seed", "1"), (*_EVALUATE, "--device", "cpu")],
    "evaluate-output": [(*_EVALUATE, *INTO, "--seed", "1"), (*_EVALUATE, *INTO)],
    "evaluate-protocol": [(*_EVALUATE, "--protocol", "knn", "--neighbors", "3")],
    "predict-csv": [(*_PREDICT, "rows.csv", "--top", "1"), (*_PREDICT, "rows.csv")],
    "predict-parquet": [(*_PREDICT, "rows.parquet", "--top", "1"), (*_PREDICT, "rows.parquet")],
    "predict-masks": [_SEGMENT, ("predict", "heads", "images/red", *INTO)],
    "embed": [("embed", "model", *DATA, *INTO, "--rows-per-file", "8")],
    "analyze": [("analyze", "model", *_FILTERS, "--only", "attention_entropy")],
    "analyze-stages": [
        ("finetune", "--model", "model", *DATA, "--output", "run", *TRAINING, "--keep-checkpoints"),
        ("analyze", "run", *_FILTERS),
    ],
    "compare": [(*_COMPARE, "--no-robustness", "--speed-turns", "0")],
    "diff": [("diff", "other", "model", *DATA, *INTO), ("diff", "model", "other", *DATA, *INTO)],
    "scaling-law": [("scaling-law", "points.csv", "--output", "law.png")],
    "bench-models": [("bench", "models", "S/16", *_SPEED), ("bench", "models", "Ti/16", *_SPEED)],
    "bench-saved": [(*_SAVED, "--batch", "2"), _SAVED],
    "bench-data": [("bench", "data", *DATA, "--model", "model", "--seconds", "0.05")],
    "models-page": [("models", ".", "papers", "--search", "Ti/16", "--output", "models.html")],
    "card": [_CARD, (*_CARD, "--license", "mit")],
    "card-space": [_CARD, (*_CARD, "--space", "alice/my-page")],
    "convert": [_CONVERT],
    "convert-report": [(*_CONVERT, "--report", "report.json")],
    "convert-force": [
        (*_CONVERT, "--report", "report.json"),
        (*_CONVERT, "--force", "--report", "report.json", "--num-labels", "7"),
    ],
    **{f"export-{name}": [arguments] for name, arguments in _EXPORT.items()},
    "page": [_PAGE],
    "export-force": [("export", "other", "out", "--to", "timm"), (*_EXPORT["timm"], "--force")],
    "finetune": [_FINETUNE],
    "finetune-segmentation": [_SEGMENT],
    "finetune-sweep": [("finetune", "--model", "model", *DATA, *INTO, *TRAINING, "--sweep-rates", "0.001,0.01")],
    "finetune-meta-pseudo-labels": [
        (*_FINETUNE, "--teacher", "model", "--unlabeled", "images", "--self-training", "meta-pseudo-labels")
    ],
    "pretrain-masked-patch": [_PRETRAIN],
    "pretrain-next-patch": [(*_PRETRAIN, "--objective", "next-patch")],
    "pretrain-contrastive": [(*_PRETRAIN, "--objective", "contrastive")],
    "demo": [("demo", "--epochs", "0.05"), ("demo", "--epochs", "0.1")],
}
# The same of commands that talk to a Hub, on which the model is to be alice/my-vit.
_PUSH = ("push", "model", "alice/my-vit", "--license", "mit")
SHARING: dict[str, list[Line]] = {
    "push": [(*_PUSH, "--max-shard-size", "8KB")],
    "push-space": [_PAGE, ("push", "out", "alice/my-vit", "--license", "mit", "--space")],
    "push-collection": [(*_PUSH, "--collection", "Small models")],
    "verify": [_PUSH, ("verify", "alice/my-vit")],
    "verify-results": [_EVALUATE, _PUSH, ("verify", "alice/my-vit", "--results", *DATA)],
    "finetune-push": [(*_FINETUNE, "--push", "alice/my-vit", "--license", "mit")],
}
# The same of commands that write no file of the user's.
READING: dict[str, list[Line]] = {
    "predict": [("predict", "model", "images/red")], "recipes": [("recipes",)], "models": [("models", ".")],
    "cost": [("cost", "Ti/4")], "data": [("data", "images")],
}  # fmt: skip


def save_classifier(folder: Path, names: Sequence[str], seed: int = 0, bias: float = 0.0, **sizes: Any) -> None:
    """Save a classifier of 8 px with its processor and the record of a training; `bias` favors the first class."""
    import torch

    from hf_vit import HfViTConfig, HfViTForImageClassification
    from hf_vit.data import make_processor
    from hf_vit.results.facts import DataFact, append_record, make_record

    torch.manual_seed(seed)
    tiny = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    labels: Any = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    model = HfViTForImageClassification(HfViTConfig(**{**tiny, **sizes}, intermediate_size=32, **labels))
    torch.nn.init.normal_(model.classifier.weight)
    torch.nn.init.constant_(model.classifier.bias[0], bias)
    model.save_pretrained(folder)
    make_processor(model.config).save_pretrained(folder)
    values = {"variant": "S/16", "steps": 2 + seed, "recipe": {"batch_size": 4}}
    data = DataFact(name="digits", fingerprint="0" * 16, split="train", size=8)
    command = "hf-vit finetune S/16 --data digits"
    append_record(folder, make_record("training", values=values, data=data, command=command))


def make_template(folder: Path) -> Path:
    """What a place holds at first."""
    from pages.small_runtime import save_runtime
    from training.conftest import COLOURS, make_colour_folder

    make_colour_folder(folder / "images", count=8)
    for seed, name in enumerate(("model", "other", "sure")):
        bias = 100.0 if name == "sure" else 0.0  # then rounding changes no answer
        save_classifier(folder / name, sorted(COLOURS), seed, bias)
    shutil.copyfile(ROOT / "tests/golden" / "vit_tok.ckpt.npz", folder / "source.npz")
    save_runtime(folder / "runtime")
    points = "\n".join(f"{compute},{0.5 * compute**-0.3 + 0.05}" for compute in (1, 3, 10, 30, 100, 300))
    (folder / "points.csv").write_text(f"compute,error\n{points}\n")
    return folder
