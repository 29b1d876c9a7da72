"""Good inputs for every command, and what is given to it in their place: files that are prepared once, and values."""

import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
from pages.small_runtime import save_runtime
from PIL import Image
from training.conftest import COLOURS, coloured_square, make_colour_folder

from campaigns.commands import save_classifier

# What the bad value of an option or argument is drawn from, by its name; a number by its type. Whatever is added to the
# program must be added here, or the campaign says so.
KINDS = {
    "model": "model models teacher against other", "data": "data images source unlabeled calibrate",
    "output": "output report", "runtime": "runtime", "size": "image_size resize_to", "repository": "repo push space",
    "file": "verify labels class_map cue_conflict config sources real_labels mappings", "place": "places",
    "device": "device", "address": "address", "text": "sweep_rates device_flops sha256 license revision tag "
    "max_shard_size prefix",
    "name": "recipe distillation precision optimizer schedule loss tune objective target mode normalization name "
    "protocol split fill picture_format hidden_act pooling to kinds only corruption variants work dtype contestant "
    "report_to image_column label_column family spelling self_training pseudo_labels auto_augment quantize task head "
    "runner position_embedding rotary_embedding features sdk",
}  # fmt: skip
RGB = tuple(COLOURS.values())
FREE = ("unit", "search", "judged_on", "collection")  # any text will do, or is shown as it is
ENDLESS = ("steps", "epochs", "seeds", "turns", "builds", "trials", "seconds", "speed_turns")  # many take their time

VALUES: dict[str, tuple[str, ...]] = {
    "model": (
        "no-such-model", "nobody/no-such-model", "no/such/folder", "", "a b/c", "../..", "-/-", "user/" + "x" * 300,
        "https://huggingface.co/user/model", "http://127.0.0.1:9/x", "ftp://host/model", "file:///etc/passwd",
        "hf://user", "timm:no_such_model", "timm:", "~/no-such-model", "notes.txt", "empty", "weights_only", "bert",
        "broken_config", "config_list", "config_null", "config_folder", "no_weights", "truncated", "zero_weights",
        "other_weights", "broken_index", "binary_config", "deep_config", "wrong_types", "too_large", "no_layers",
        "/dev/null", "/dev/zero", "pipe", "loop", "dangling", "parquet.parquet", "S/0", "S/99999", "Ti/4/4", "R50",
        "image.png", "archive.tar", "pickle.bin", "line\nbreak", "ünï/cödé", "\x1b[31mred",
    ),
    "data": (
        "no-such-data", "nobody/no-such-data", "no/such/folder", "", "https://example.org/data.zip", "notes.txt",
        "empty", "no_images", "one_class", "flat", "zero_image", "truncated_image", "huge_image", "text_image",
        "parquet.parquet", "zero.parquet", "broken.parquet", "archive.tar", "broken.tar", "table.csv", "pickle.bin",
        "/dev/null", "/dev/zero", "pipe", "loop", "dangling", "model", "line\nbreak", "a" * 300, "deep_classes",
        "fractals:classes=0", "fractals:classes=10,images=99999999", "fractals:colour=3", "scenes", "scenes:images=0",
        "scenes:size=9,images=3", "masks", "other_masks", "colour_masks", "no_masks", "coco", "broken_coco",
        "empty_coco", "outside_coco", "coco/annotations.json",
    ),
    "output": (
        "", "taken", "notes.txt", "notes.txt/out", "/proc/out", "/dev/null/out", "/dev/null", "dangling", "loop/out",
        "loop", "a" * 300, "x/" * 3000, "pipe", "/sys/out", "s3://", "ftp://host/out", "nosuch:/out", "file://out",
    ),
    "file": (
        "", "no-such-file", "empty", "notes.txt", "zero.bin", "pickle.bin", "/dev/null", "/dev/zero", "pipe", "loop",
        "dangling", "list.json", "number.json", "broken.json", "deep.json", "image.png", "a" * 300, "other.npz",
        "zero.npz", "table.csv",
    ),
    "runtime": ("", "no-such-folder", "empty", "notes.txt", "model", "/dev/null", "pipe", "loop", "dangling"),
    "size": ("", "0", "-1", "3x", "x3", "nan", "1e3", "3x3x3", "99999999", "0x8", "8 8", "eight"),
    "repository": (
        "", "a/b/c", "user/", "/name", "user/na me", "user/..", "-user/x", "user/" + "x" * 200,
        "user/x.git",
    ),
    "place": (
        "no/such/folder", "../..", "-/-", "user/" + "x" * 300, "notes.txt", "/dev/null", "pipe", "loop", "dangling",
        "https://huggingface.co/user", "line\nbreak", "ünï", "\x1b[31mred",
    ),
    "address": ("", "nowhere", "127.0.0.1:1", "127.0.0.1:x", "127.0.0.1:99999999", "ray://127.0.0.1:1", "a b:1"),
    "device": ("", "quantum", "cuda", "cuda:9", "cuda:x", "mps", "meta", "cpu:x", "gpu", "-1"),
    "name": ("", "nosuch", "TOP1", "adam w", "x" * 300, "-1"),
    "text": ("", "x" * 300, "nan", "-1", "a b", "../..", "0GB"),
    "int": ("-1", "0", "1.5", "nan", "inf", "x", "", "1e3", "99999999999999999999", "0x10"),
    "float": ("-1", "nan", "inf", "-inf", "x", "", "1e400", "1,5"),
}  # fmt: skip

# The inputs with which a command would work: each bad one takes the place of one of them, or is added.
_GOOD = {
    "demo": "output:--output=out epochs:--epochs=0.02",
    "finetune": "model:model data:--data=colours output:--output=out steps:--steps=2 evaluations:--evaluations=1 "
                "batch_size:--batch-size=4 precision:--precision=fp32",
    "data": "source:colours output:--output=out",
    "recipes": "",
    "soup": "models:model,model_2 output:--output=out data:--data=colours",
    "evaluate": "model:model data:--data=colours output:--output=out",
    "predict": "model:model images:image.png",
    "embed": "model:model data:--data=colours output:--output=out",
    "analyze": "model:model images:--images=flat output:--output=out only:--only=patch_filters",
    "compare": "models:model,model_2 data:--data=colours output:--output=out speed_turns:--speed-turns=0 "
               "robustness_images:--robustness-images=2",
    "cost": "model:model",
    "scaling-law": "sources:runs.csv output:--output=out.png",
    "convert": "model:checkpoint.npz output:out",
    "export": "model:model output:out to:--to=transformers",
    "page": "models:model output:--output=out images:--images=colours runtime:--runtime=runtime",
    "card": "model:model",
    "diff": "model:model other:model_2 output:--output=out",
    "models": "places:model",
    "push": "model:model repo:user/name license:--license=mit",
    "verify": "repo:user/name",
    "bench models": "variants:Ti/16 output:--output=out.json turns:--turns=1 batch:--batch=1 "
                    "image_size:--image-size=16 contestant:--contestant=hf_vit work:--work=inference",
    "bench saved": "models:model,model_2 output:--output=out.json turns:--turns=1 batch:--batch=1",
    "bench data": "model:model data:--data=colours seconds:--seconds=0.1",
}  # fmt: skip
_GOOD["pretrain"] = _GOOD["finetune"]
GOOD: dict[str, dict[str, list[str]]] = {
    command: {name: words.split(",") for name, _, words in (each.partition(":") for each in line.split())}
    for command, line in _GOOD.items()
}
REPLACES = {"epochs": "steps"}
# What options need beside them, to be looked at.
_TEACHER, _SCHEDULE = "--teacher model_2 --unlabeled flat", "--schedule warmup_stable_decay"
_BESIDE = {
    ("evaluate", "--protocol few-shot"): "shots trials", ("evaluate", "--protocol knn"): "neighbors",
    ("evaluate", "--protocol robustness"): "epsilons steps", ("evaluate", "--protocol corruptions"): "kinds",
    ("evaluate", "--protocol real"): "real_labels", ("evaluate", "--protocol objectnet"): "mappings",
    ("evaluate", "--protocol patch-drop"): "patch_size fill",
    ("diff", "--data colours"): "image_column label_column num_images", ("card", "--power 30"): "carbon_intensity",
    ("finetune", "--teacher model_2"): "temperature distillation distillation_weight unlabeled",
    ("finetune", "--loss bce"): "bce_threshold", ("finetune", "--tune lora"): "lora_rank lora_alpha",
    ("finetune", "--tune last-blocks"): "tuned_blocks",
    ("finetune", "--task segmentation"): "head head_width scale_jitter", ("finetune", "--optimizer sgd"): "momentum",
    ("finetune", _SCHEDULE): "cooldown", ("pretrain", _SCHEDULE): "cooldown",
    ("finetune", _TEACHER): "self_training unlabeled_ratio pseudo_labels confidence images_per_class head_dropout",
    ("finetune", f"{_TEACHER} --self-training meta-pseudo-labels"): "uda_weight uda_temperature uda_threshold",
    ("finetune", "--runner ray --sweep-rates 0.001,0.01"): "address",
    ("pretrain", "--objective contrastive"):
        "temperature encoder_momentum projection_size hidden_size normalization",
    ("analyze", "--cue-conflict cues --only shape_bias"): "class_map", ("analyze", "--only shape_bias"): "cue_conflict",
    ("analyze", "--only attention_rollout"): "rollout_identity", ("analyze", "--only cka"): "against cka_batch_size",
    ("soup", "model_2"): "models", ("compare", "model_2"): "models", ("bench saved", "model_2"): "models",
    ("embed", "--features mean"): "layers",
    ("verify", "--results"): "data device", ("export", "--to vit_jax"): "spelling",
    ("export", "--to onnx --calibrate colours"): "quantize", ("export", "--to onnx --quantize static"): "calibrate",
    **{(command, "--runner ray"): "address" for command in ("compare", "embed", "evaluate", "predict")},
    ("cost", "--images 1000"): "epochs device_flops", ("cost", "--mode memory"): "batch_size precision",
    ("cost", "--images 1000 --device-flops 1e12"): "devices utilization price",
}  # fmt: skip
BESIDE = {(command, name): words for (command, words), names in _BESIDE.items() for name in names.split()}


def write_files(root: Path, checkpoint: Path) -> None:
    _images(root)
    _masks_and_objects(root)
    _models(root)
    shutil.copy(checkpoint, root / "checkpoint.npz")
    (root / "empty").mkdir()
    save_runtime(root / "runtime")
    (root / "taken").mkdir()
    (root / "taken" / "mine.txt").write_text("mine")
    os.mkfifo(root / "pipe")
    (root / "dangling").symlink_to("nowhere/at/all")
    (root / "loop").symlink_to("loop")
    files = {
        "notes.txt": "notes\n", "list.json": "[]", "number.json": "7", "broken.json": "{", "table.csv": "a,b\n1,2\n",
        "deep.json": "[" * 100_000,
        "runs.csv": "compute,error\n" + "".join(f"{2**i},{1 / (i + 2)}\n" for i in range(6)),
    }  # fmt: skip
    for name, text in files.items():
        (root / name).write_text(text)
    for name in ("zero.bin", "zero.parquet", "zero.npz"):
        (root / name).touch()
    for name in ("broken.parquet", "broken.tar", "archive.tar"):
        (root / name).write_bytes(b"PAR1" + bytes(600))
    torch.save({"a": torch.zeros(3), "b": Path("x")}, root / "pickle.bin")
    np.savez(root / "other.npz", a=np.zeros(3))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1, 2], "b": ["x", "y"]}), root / "parquet.parquet")


def _images(root: Path) -> None:
    def folder(name: str, *classes: str) -> Path:
        labels = dict(zip(classes or ("blue", "red"), COLOURS.values(), strict=False))
        return make_colour_folder(root / name, 12, labels)

    folder("colours")
    folder("one_class", "blue")
    folder("flat", "")
    (root / "cues").mkdir()
    coloured_square(RGB[0], 1).save(root / "cues" / "blue1-red1.png")
    (root / "no_images" / "blue").mkdir(parents=True)
    (root / "no_images" / "blue" / "readme.txt").write_text("none")
    (root / "deep_classes" / "a").mkdir(parents=True)
    folder("deep_classes/a/b")
    whole = (root / "colours" / "blue" / "00.png").read_bytes()
    # A header that tells of 60,000 x 60,000 px.
    header = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + whole[24:29]
    huge = whole[:12] + header + zlib.crc32(header).to_bytes(4, "big") + whole[33:]
    for name, content in {"zero": b"", "truncated": whole[:100], "huge": huge, "text": b"no image"}.items():
        (folder(f"{name}_image") / "blue" / "bad.png").write_bytes(content)
    coloured_square(RGB[0], 0).save(root / "image.png")


def _masks_and_objects(root: Path) -> None:
    """Folders for segmentation and detection, of which each but the first of its kind has something wrong."""
    mask = np.arange(144, dtype=np.uint8).reshape(12, 12) % 3
    masks = {
        "masks": Image.fromarray(mask), "other_masks": Image.fromarray(mask[:7]), "no_masks": None,
        "colour_masks": Image.new("RGB", (12, 12)),
    }  # fmt: skip
    for name, picture in masks.items():
        for part in ("images", "annotations"):
            (root / name / part).mkdir(parents=True)
        for index in range(9):
            coloured_square(RGB[index % 3], 300 + index).save(root / name / "images" / f"{index}.png")
            if picture is not None:
                picture.save(root / name / "annotations" / f"{index}.png")
    for name, box in {"coco": [2, 2, 5, 6], "empty_coco": [2, 2, 0, 6], "outside_coco": [2, 2, 90, 6]}.items():
        (root / name).mkdir()
        for index in range(9):
            coloured_square(RGB[index % 3], 400 + index).save(root / name / f"{index}.png")
        told = {
            "images": [{"id": index, "file_name": f"{index}.png", "height": 12, "width": 12} for index in range(9)],
            "annotations": [{"id": 1 + i, "image_id": i, "category_id": i % 2, "bbox": box} for i in range(9)],
            "categories": [{"id": 0, "name": "blue"}, {"id": 1, "name": "red"}],
        }
        (root / name / "annotations.json").write_text(json.dumps(told))
    shutil.copytree(root / "coco", root / "broken_coco")
    (root / "broken_coco" / "annotations.json").write_text(json.dumps(told)[:-9])


def _models(root: Path) -> None:
    for name in ("model", "model_2"):
        save_classifier(root / name, ("blue", "red"), num_hidden_layers=1)
    names = {"config": "config.json", "weights": "model.safetensors", "index": "model.safetensors.index.json"}
    fields = json.loads((root / "model" / "config.json").read_text())
    weights = (root / "model" / "model.safetensors").read_bytes()
    changes: dict[str, dict[str, str | bytes | None]] = {
        "weights_only": {"config": None}, "config_folder": {"config": None}, "no_weights": {"weights": None},
        "bert": {"config": '{"model_type": "bert", "architectures": ["BertModel"]}'},
        "broken_config": {"config": "{"}, "config_list": {"config": "[]"}, "config_null": {"config": "null"},
        "binary_config": {"config": bytes(range(256))}, "deep_config": {"config": "[" * 100_000},
        "truncated": {"weights": weights[:-100]}, "zero_weights": {"weights": b""},
        "other_weights": {"weights": b"\x02" + bytes(7) + b"{}"},
        "broken_index": {"weights": None, "index": '{"weight_map": []}'},
        "wrong_types": {"config": json.dumps(fields | {"hidden_size": "wide", "id2label": 3})},
        "too_large": {"config": json.dumps(fields | {"hidden_size": 10**9})},
        "no_layers": {"config": json.dumps(fields | {"num_hidden_layers": -1})},
    }  # fmt: skip
    for name, files in changes.items():
        shutil.copytree(root / "model", root / name)
        for file, content in files.items():
            path = root / name / names[file]
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
    (root / "config_folder" / "config.json").mkdir()
