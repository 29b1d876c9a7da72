"""Every command that writes, at a size of a second, and what it starts from.

A new command, export target or pre-training objective must join a table, or `test_every_command_is_in_a_table` fails.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.engine import ROOT

TRAINING = ("--steps", "2", "--evaluations", "2", "--batch-size", "8", "--device", "cpu")
DATA = ("--data", "images")
INTO = ("--output", "out")


@dataclass(frozen=True)
class Command:
    """A command line, run in a place that holds `images`, `model`, `other` and `sure` (its siblings) and `source.npz`.

    Attributes:
        arguments: of hf-vit.
        earlier: commands that were run there before: what is replaced must stay until the new is complete.
    """

    arguments: tuple[str, ...]
    earlier: tuple[tuple[str, ...], ...] = ()


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

# Name -> a command that writes.
WRITING: dict[str, Command] = {
    "data-output": Command(("data", "images", *INTO)),
    "soup": Command(("soup", "model", "other", *INTO)),
    "soup-judged": Command(("soup", "model", "other", *INTO, *DATA, "--greedy")),
    "evaluate": Command((*_EVALUATE, "--device", "cpu"), earlier=((*_EVALUATE, "--seed", "1"),)),
    "evaluate-output": Command((*_EVALUATE, *INTO), earlier=((*_EVALUATE, *INTO, "--seed", "1"),)),
    "evaluate-protocol": Command((*_EVALUATE, "--protocol", "knn", "--neighbors", "3")),
    **{
        f"predict-{kind}": Command((*_PREDICT, f"rows.{kind}"), earlier=((*_PREDICT, f"rows.{kind}", "--top", "1"),))
        for kind in ("csv", "parquet")
    },
    "predict-masks": Command(("predict", "heads", "images/red", *INTO), earlier=(_SEGMENT,)),
    "embed": Command(("embed", "model", *DATA, *INTO, "--rows-per-file", "8")),
    "analyze": Command(("analyze", "model", *_FILTERS, "--only", "attention_entropy")),
    "analyze-stages": Command(
        ("analyze", "run", *_FILTERS),
        earlier=(("finetune", "--model", "model", *DATA, "--output", "run", *TRAINING, "--keep-checkpoints"),),
    ),
    "compare": Command((*_COMPARE, "--no-robustness", "--speed-turns", "0")),
    "diff": Command(("diff", "model", "other", *DATA, *INTO), earlier=(("diff", "other", "model", *DATA, *INTO),)),
    "scaling-law": Command(("scaling-law", "points.csv", "--output", "law.png")),
    "bench-models": Command(("bench", "models", "Ti/16", *_SPEED), earlier=(("bench", "models", "S/16", *_SPEED),)),
    "bench-saved": Command(_SAVED, earlier=((*_SAVED, "--batch", "2"),)),
    "bench-data": Command(("bench", "data", *DATA, "--model", "model", "--seconds", "0.05")),
    "models-page": Command(("models", ".", "papers", "--search", "Ti/16", "--output", "models.html")),
    "card": Command((*_CARD, "--license", "mit"), earlier=(_CARD,)),
    "card-space": Command((*_CARD, "--space", "alice/my-page"), earlier=(_CARD,)),
    "convert": Command(_CONVERT),
    "convert-report": Command((*_CONVERT, "--report", "report.json")),
    "convert-force": Command(
        (*_CONVERT, "--force", "--report", "report.json", "--num-labels", "7"),
        earlier=((*_CONVERT, "--report", "report.json"),),
    ),
    **{f"export-{name}": Command(arguments) for name, arguments in _EXPORT.items()},
    "page": Command(_PAGE),
    "export-force": Command((*_EXPORT["timm"], "--force"), earlier=(("export", "other", "out", "--to", "timm"),)),
    "finetune": Command(_FINETUNE),
    "finetune-segmentation": Command(_SEGMENT),
    "finetune-sweep": Command(("finetune", "--model", "model", *DATA, *INTO, *TRAINING, "--sweep-rates", "0.001,0.01")),
    "finetune-meta-pseudo-labels": Command(
        (*_FINETUNE, "--teacher", "model", "--unlabeled", "images", "--self-training", "meta-pseudo-labels")
    ),
    "pretrain-masked-patch": Command(_PRETRAIN),
    "pretrain-next-patch": Command((*_PRETRAIN, "--objective", "next-patch")),
    "pretrain-contrastive": Command((*_PRETRAIN, "--objective", "contrastive")),
    "demo": Command(("demo", "--epochs", "0.1"), earlier=(("demo", "--epochs", "0.05"),)),
}
# Name -> a command that talks to a Hub, on which the model is to be alice/my-vit.
_PUSH = ("push", "model", "alice/my-vit", "--license", "mit")
SHARING: dict[str, Command] = {
    "push": Command((*_PUSH, "--max-shard-size", "8KB")),
    "push-space": Command(("push", "out", "alice/my-vit", "--license", "mit", "--space"), earlier=(_PAGE,)),
    "push-collection": Command((*_PUSH, "--collection", "Small models")),
    "verify": Command(("verify", "alice/my-vit"), earlier=(_PUSH,)),
    "verify-results": Command(("verify", "alice/my-vit", "--results", *DATA), earlier=(_EVALUATE, _PUSH)),
    "finetune-push": Command((*_FINETUNE, "--push", "alice/my-vit", "--license", "mit")),
}
# Name -> a command that writes no file of the user's.
READING: dict[str, Command] = {
    "predict": Command(("predict", "model", "images/red")), "recipes": Command(("recipes",)),
    "models": Command(("models", ".")), "cost": Command(("cost", "Ti/4")), "data": Command(("data", "images")),
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
