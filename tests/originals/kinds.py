"""Small checkpoints of three classes as people have them: saved by transformers and timm, and as the original file."""

import json
from collections.abc import Callable
from pathlib import Path

import timm
from originals.pytorch import hybrid_of_timm, of_timm, of_transformers, randomise, save_timm, vit_hybrid_parts
from safetensors.torch import save_file
from transformers import (
    AutoModelForImageClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTImageProcessor,
)

LABELS = ("blue", "green", "red")
NAMED = {
    "num_labels": 3,
    "id2label": dict(enumerate(LABELS)),
    "label2id": {name: index for index, name in enumerate(LABELS)},
}


def _transformers(name: str) -> Callable[[Path], str]:
    def save(folder: Path) -> str:
        of_transformers(name, **NAMED).save_pretrained(folder)
        ViTImageProcessor(size={"height": 12, "width": 12}).save_pretrained(folder)
        return str(folder)

    return save


def _vit_hybrid(folder: Path) -> str:
    model = vit_hybrid_parts()
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    state |= {name: value[:3].clone() for name, value in state.items() if name.startswith("classifier.")}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    labels = {"id2label": {str(index): name for index, name in enumerate(LABELS)}}
    (folder / "config.json").write_text(json.dumps(model.json() | labels))
    steps = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor = {"image_processor_type": "ViTHybridImageProcessor", **steps}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


def _timm(folder: Path) -> str:
    sizes = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return str(save_timm(of_timm(num_classes=3), folder, label_names=list(LABELS), model_args=sizes))


def _timm_hybrid(folder: Path) -> str:
    return str(save_timm(hybrid_of_timm(num_classes=3), folder, label_names=list(LABELS)))


def _timm_file(folder: Path) -> str:
    """One of timm's architectures for tests, so that its name tells its sizes."""
    model = randomise(timm.create_model("test_vit", num_classes=3))
    folder.mkdir()
    save_file(model.state_dict(), folder / "test_vit.safetensors")
    return f"timm:test_vit@{folder / 'test_vit.safetensors'}"


def _wrapped(folder: Path) -> str:
    """transformers' class around a model of timm, made without a `pretrained_cfg`."""
    config = TimmWrapperConfig(architecture="test_vit", model_args={"img_size": 32, "depth": 1}, **NAMED)
    randomise(TimmWrapperForImageClassification(config)).save_pretrained(folder)
    return str(folder)


def _wrapped_folder(folder: Path) -> str:
    """A folder of timm, loaded and saved by transformers: the weights have timm's names."""
    file = Path(_timm(folder.with_name(f"{folder.name}-timm"))) / "config.json"
    config = json.loads(file.read_text())
    config["model_args"].pop("num_classes", None)  # which transformers gives itself
    file.write_text(json.dumps(config))
    AutoModelForImageClassification.from_pretrained(file.parent).save_pretrained(folder)
    return str(folder)


def _original(folder: Path) -> str:
    """vit_jax's file, as its golden data have it."""
    return str(Path(__file__).parents[1] / "golden" / "vit_tok.ckpt.npz")


# Kind -> what writes it into a new folder and says what to give as --model.
KINDS: dict[str, Callable[[Path], str]] = {
    "transformers ViT": _transformers("ViTForImageClassification"),
    "transformers ViT without head": _transformers("ViTModel"),
    "transformers DeiT": _transformers("DeiTForImageClassification"),
    "transformers DeiT with teacher": _transformers("DeiTForImageClassificationWithTeacher"),
    "transformers CLIP": _transformers("CLIPForImageClassification"),
    "transformers SigLIP": _transformers("SiglipForImageClassification"),
    "transformers DINOv2 without head": _transformers("Dinov2WithRegistersModel"),
    "transformers ViT-hybrid": _vit_hybrid,
    "timm folder": _timm,
    "timm:FOLDER": lambda folder: f"timm:{_timm(folder)}",
    "timm:NAME@FILE": _timm_file,
    "timm by transformers": _wrapped,
    "timm folder by transformers": _wrapped_folder,
    "original .npz": _original,
}
HEADLESS = ("transformers ViT without head", "transformers DINOv2 without head")
NAMELESS = ("timm:NAME@FILE",)  # timm's classes have names where they are ImageNet's, or a config.json says them
UNNAMED = ("timm:NAME@FILE", "original .npz")  # files that do not tell the names of their classes
# What an installed library runs, so that nothing is converted for those who look at a model from outside.
RUN_BY_THEIR_LIBRARY = (
    "transformers ViT",
    "transformers ViT without head",
    "transformers DeiT",
    "transformers DeiT with teacher",
    "transformers DINOv2 without head",
    "timm folder",
    "timm:FOLDER",
    "timm:NAME@FILE",
    "timm by transformers",
    "timm folder by transformers",
)
