"""A good small checkpoint of every origin (`CASES`), the formats it comes in (`FORMATS`), and what it becomes."""

import functools
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import timm
import torch
from hybrid.reference import stem_shapes
from originals.google import (
    Arrays,
    as_big_transfer,
    as_tower,
    class_token_apart,
    make_mixer,
    make_resnet_v2,
    stacked,
    with_map_head,
)
from originals.pytorch import (
    bit_of_timm,
    bit_of_transformers,
    both_towers,
    hybrid_of_timm,
    mixer_of_timm,
    of_timm,
    of_transformers,
    open_clip_tower,
    randomise,
    save_timm,
    vit_hybrid_parts,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTImageProcessor,
)

import hf_vit.conversion as conversion
from hf_vit.models.configuration_hf_hybrid_vit import HfHybridViTConfig
from hf_vit.models.modeling_hf_hybrid_vit import HfHybridViTModel

MODEL_FILES = ("config.json", "model.safetensors", "preprocessor_config.json")
# All sizes differ, so that no other order of axes fits by accident: D 6, A 2, K 3, M 5, R 7, L 4, 1 + 2x2 positions.
SIZES = {
    "depth": 2, "heads": 2, "head_size": 3, "mlp": 5, "patch": (4, 2), "grid": (2, 2), "representation": 7, "labels": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        suffix: how its name ends.
        dump: from arrays to its bytes.
        dtypes: that it can hold: those of weights that lose no digit, and others.
        checked: of how many of its first bytes a change must be noticed; the other bytes have no checksum.
    """

    suffix: str
    dump: Callable[[Arrays], bytes]
    dtypes: tuple[str, ...]
    checked: Callable[[bytes], int] = len


def dump_npz(stored: bool) -> Callable[[Arrays], bytes]:
    def dump(arrays: Arrays) -> bytes:
        file = io.BytesIO()
        (np.savez if stored else np.savez_compressed)(file, **arrays)
        return file.getvalue()

    return dump


def dump_torch(arrays: Arrays) -> bytes:
    file = io.BytesIO()
    torch.save({key: torch.from_numpy(np.array(array, order="C")) for key, array in arrays.items()}, file)
    return file.getvalue()


def dump_safetensors(arrays: Arrays) -> bytes:
    return safetensors.numpy.save({key: np.array(array, order="C") for key, array in arrays.items()})


def header_end(data: bytes) -> int:
    """Where the arrays begin in a .safetensors file: after the header's length and the header."""
    return 8 + int.from_bytes(data[:8], "little")


NUMPY_DTYPES = ("f8", ">f4", ">f8", "i4", "c8", "?", "i8", "U8", "S4", "u1")
TORCH_DTYPES = ("f8", "i4", "?", "i8", "u1")
FORMATS = {
    "stored": Format(".npz", dump_npz(stored=True), NUMPY_DTYPES),
    "deflated": Format(".npz", dump_npz(stored=False), NUMPY_DTYPES),
    "safetensors": Format(".safetensors", dump_safetensors, TORCH_DTYPES, header_end),
    "pth": Format(".pth", dump_torch, TORCH_DTYPES),
}


def converted(source: Path, output: Path, **options: Any) -> dict[str, bytes]:
    """The files of the converted model."""
    conversion.convert(source, output, force=True, **options)
    return files_of_model(output)


def files_of_model(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in MODEL_FILES}


def stem_filled(source: Path, output: Path) -> dict[str, bytes]:
    """The parameters of a hybrid's stem that a ResNet was loaded into."""
    sizes = {"image_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "stem_width": 32}
    model = HfHybridViTModel(HfHybridViTConfig(stage_depths=(1,), intermediate_size=4, **sizes))
    conversion.load_stem(model, source)
    stem = model.embeddings.patch_embeddings.stem.state_dict()
    return {name: value.numpy().tobytes() for name, value in stem.items()}


@dataclass(frozen=True)
class Case:
    """A good checkpoint of one origin.

    Attributes:
        make: from `make_checkpoint` to its arrays.
        formats: the files it may come in, names in `FORMATS`.
        beside: gives the files that lie beside it in a folder: name -> content.
        run: (file or folder, folder to write, options) -> what it becomes.
        options: of `run`.
        silent: key -> kinds of edit that nothing else in the file contradicts, so that another model is right.
    """

    make: Callable[[Callable[..., Arrays]], Arrays]
    formats: tuple[str, ...] = ("stored", "deflated")
    beside: Callable[[], Mapping[str, Any]] | None = None
    run: Callable[..., Mapping[str, bytes]] = converted
    options: Mapping[str, Any] = field(default_factory=dict)
    silent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def files(self, data: bytes, suffix: str) -> dict[str, bytes]:
        """The checkpoint by name: a file, or all files of a folder."""
        if self.beside is None:
            return {f"source{suffix}": data}
        weights = "model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin"
        beside = {f"saved/{name}": json.dumps(content).encode() for name, content in self.beside().items()}
        return {f"saved/{weights}": data} | beside


def stem() -> Arrays:
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in stem_shapes((1,), 32).items()}


def hybrid(make: Callable[..., Arrays]) -> Arrays:
    return stem() | make(**SIZES | {"patch": (1, 1), "channels": 128})


def resnet(make: Callable[..., Arrays]) -> Arrays:
    head = {"head/kernel": np.ones((128, 4), np.float32), "head/bias": np.ones(4, np.float32)}
    return {f"params/{key}": array for key, array in (stem() | head).items()}


def tower(make: Callable[..., Arrays]) -> Arrays:
    """A contrastive model of sincos2d positions, MAP head and stacked blocks."""
    arrays = class_token_apart(make(**SIZES | {"head_size": 4, "depth": 3, "token": False, "linen": True}))
    del arrays["pos_embedding"]
    return as_tower(stacked(with_map_head(arrays)), "params/")


def of_torch(build: Callable[[], Any], beside: Callable[[Any], Mapping[str, Any]] | None = None, **others: Any) -> Case:
    """A model of transformers or timm, beside its other files or alone."""
    model = functools.cache(build)
    arrays = functools.cache(lambda: {key: value.numpy() for key, value in model().state_dict().items()})
    files = None if beside is None else functools.cache(lambda: beside(model()))
    return Case(lambda make: arrays(), formats=("safetensors", "pth"), beside=files, **others)


def of_timms_name(name: str, width: int, **sizes: Any) -> Case:
    """A model of timm with one head and mean pooling, beside the config.json that names it."""
    arguments = {"num_heads": 1, "img_size": 12} | sizes
    config = TIMM_CONFIG | {"architecture": name, "global_pool": "avg", "model_args": arguments}
    return of_torch(lambda: of_timm(name, embed_dim=width, num_heads=1, **sizes), lambda _: {"config.json": config})


def of_transformers_with_files(name: str, processor: Mapping[str, Any] | None = None, **fields: Any) -> Case:
    def beside(model: Any) -> dict[str, Any]:
        config = {"config.json": json.loads(model.config.to_json_string(use_diff=False))}
        return config | ({} if processor is None else {"preprocessor_config.json": processor})

    return of_torch(lambda: of_transformers(name, **fields), beside)


def encoder(prefix: str = "", **others: np.ndarray) -> Case:
    """A bare encoder of timm's names, below a prefix and beside other arrays."""

    def make(_: Any) -> Arrays:
        state = of_timm(embed_dim=64, num_heads=1).state_dict()
        return others | {prefix + key: value.numpy() for key, value in state.items() if not key.startswith("head.")}

    return Case(make, formats=("safetensors", "pth"))


def dinov2_in_chunks() -> Case:
    """DINOv2's own names: registers, a mask token, and blocks in chunks of two."""

    def make(_: Any) -> Arrays:
        state = of_timm("vit_base_patch14_reg4_dinov2", embed_dim=64, num_heads=1, num_classes=0).state_dict()
        state["register_tokens"] = state.pop("reg_token")
        chunked = {re.sub(r"blocks\.(\d+)", r"blocks.0.\1", key): value.numpy() for key, value in state.items()}
        return chunked | {"mask_token": np.ones((1, 64), "f4")}

    return Case(make, formats=("safetensors", "pth"))


def clip_of_open_clip() -> Case:
    arrays = functools.cache(lambda: {key: value.numpy() for key, value in both_towers(open_clip_tower()).items()})
    return Case(lambda make: arrays(), formats=("safetensors", "pth"))


def recorded(file: str, silent: Mapping[str, tuple[str, ...]] | None = None, **options: Any) -> Case:
    """A file of the golden data, whose original code is not installed."""

    path = Path(__file__).parents[1] / "golden" / file

    @functools.cache
    def arrays() -> Arrays:
        if path.suffix == ".npz":
            return dict(np.load(path))
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        return {key: value.numpy() for key, value in state.get("model", state).items()}

    formats = ("stored", "deflated") if path.suffix == ".npz" else ("safetensors", "pth")
    return Case(lambda make: arrays(), formats=formats, options=options, silent=silent or {})


# What lies beside the weights of transformers and of timm.
SQUARE = {"height": 12, "width": 12}
PIXELS: dict[str, Any] = {
    "do_resize": True, "resample": 2, "do_rescale": True, "rescale_factor": 0.00392156862745098, "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.4, 0.3], "do_convert_rgb": True,
}  # fmt: skip
TIMM_CONFIG: dict[str, Any] = {
    "architecture": "vit_tiny_patch16_224", "num_classes": 5, "num_features": 24, "global_pool": "token",
    "model_args": {"num_heads": 3, "act_layer": "gelu", "img_size": 12},
    "pretrained_cfg": {"input_size": [3, 12, 12], "crop_pct": 0.9, "crop_mode": "center", "interpolation": "bicubic",
        "mean": [0.5, 0.4, 0.3], "std": [0.5, 0.4, 0.3], "label_names": list("abcde"),
        "first_conv": "patch_embed.proj"},
}  # fmt: skip
PATCH = ("less", "more")  # of the patch's height, which no other array confirms
# A classifier of CLIP does not read the last LayerNorm.
IDLE = ("vision_model.post_layernorm.weight", "vision_model.post_layernorm.bias")
UNREAD = ("drop", "mistype", "dtype", "shape", "less", "more", "value")
CASES = {
    "vit_jax": Case(lambda make: make(**SIZES), silent={"embedding/kernel": PATCH}),
    "vit_jax_hybrid": Case(hybrid),
    "big_vision": Case(
        lambda make: class_token_apart(make(**SIZES, linen=True)),
        # Without its class token a file is one of GAP.
        silent={"embedding/kernel": PATCH, "cls": ("drop", "rename")},
    ),
    "big_vision tower": Case(tower, options={"image_size": (8, 4)}, silent={"params/img/embedding/kernel": PATCH}),
    "big_vision_naflex": recorded("naflex_map.npz"),
    "bit": Case(resnet),
    "bit into a stem": Case(resnet, run=stem_filled),
    "bit_paper": Case(lambda make: make_resnet_v2(depths=(1,), labels=4)),
    "bit_paper of big_transfer": Case(lambda make: as_big_transfer(make_resnet_v2(depths=(1,), labels=4), True)),
    "mixer": Case(lambda make: make_mixer(prefix="params/"), silent={"params/stem/kernel": PATCH}),
    "transformers_vit": of_transformers_with_files(
        "ViTForImageClassification", PIXELS | {"image_processor_type": "ViTImageProcessor", "size": SQUARE}
    ),
    "transformers_deit": of_transformers_with_files(
        "DeiTForImageClassificationWithTeacher",
        PIXELS
        | {"feature_extractor_type": "DeiTFeatureExtractor", "size": 14, "do_center_crop": True, "crop_size": SQUARE},
    ),
    "transformers_vit_hybrid": of_torch(vit_hybrid_parts, lambda model: model.files(size={"shortest_edge": 36})),
    "transformers_clip": of_transformers_with_files("CLIPVisionModelWithProjection"),
    "transformers_clip_classifier": replace(
        of_transformers_with_files("CLIPForImageClassification"), silent=dict.fromkeys(IDLE, UNREAD)
    ),
    "transformers_siglip": of_transformers_with_files("SiglipVisionModel"),
    "transformers_siglip2": of_transformers_with_files(
        "Siglip2VisionModel", {"image_processor_type": "Siglip2ImageProcessor"}, num_patches=9
    ),
    "transformers_dinov2": of_transformers_with_files("Dinov2WithRegistersModel", mlp_ratio=2),
    "transformers_dinov3": of_transformers_with_files("DINOv3ViTModel", num_register_tokens=2),
    "transformers_aimv2": of_transformers_with_files("Aimv2VisionModel", use_head=False),
    "transformers_ijepa": of_transformers_with_files("IJepaForImageClassification"),
    "transformers_dinov2 of SwiGLU": of_transformers_with_files("Dinov2Model", use_swiglu_ffn=True),
    "timm_vit": of_torch(lambda: of_timm(embed_dim=64, num_heads=1)),
    "timm_vit beside its config": of_torch(of_timm, lambda _: {"config.json": TIMM_CONFIG}),
    "timm_vit of SwiGLU and registers": of_torch(
        lambda: of_timm("vit_giant_patch14_reg4_dinov2", embed_dim=64, num_heads=1, mlp_ratio=0.5),
        # Its table has no row for either: one of GAP, or one without registers.
        silent={"cls_token": ("drop", "rename"), "reg_token": ("drop",)},
    ),
    "timm_vit of CLIP": of_torch(lambda: of_timm("vit_base_patch16_clip_224", embed_dim=64, num_heads=1)),
    "timm_eva": of_timms_name("vit_medium_patch16_rope_reg1_gap_256", 64),
    "timm_aimv2": of_timms_name("aimv2_large_patch14_224", 128),
    "timm_naflex": of_timms_name("naflexvit_base_patch16_gap", 64, patch_size=4, pos_embed_grid_size=(3, 2)),
    "timm_hybrid": of_torch(hybrid_of_timm),
    "timm_mixer": of_torch(mixer_of_timm),
    "timm_bit": of_torch(lambda: bit_of_timm((1,))),
    "transformers_bit": of_torch(
        lambda: bit_of_transformers(hidden_sizes=[128], depths=[1]),
        lambda model: {"config.json": json.loads(model.config.to_json_string(use_diff=False))},
    ),
    "mae": encoder(**{"mask_token": np.ones((1, 1, 64), "f4"), "decoder_embed.weight": np.ones((8, 64), "f4")}),
    "dino": encoder("teacher.backbone."),
    "dino of DINOv2": dinov2_in_chunks(),
    "open_clip": replace(clip_of_open_clip(), silent={"visual.proj": ("drop",)}),  # one without projection
    "dinov3": recorded("dinov3_vits.pth", silent={"storage_tokens": ("drop", "less", "more")}),  # any number of them
    "eva": recorded("eva02_clip.pt"),
    "vit5": recorded("vit5.pth"),
    "perception_encoder": recorded("pe_spatial.pt", num_heads=3),
    "deit": recorded("rope_axial_ape.bin", num_heads=2, rotary_embedding="axial"),
    "aimv2": recorded("aimv2_native.safetensors", num_heads=4),
}

# Checkpoints of three classes as people have them: saved by transformers and timm, and as the original file.
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
    vit_hybrid_parts(LABELS).save(folder, size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return str(folder)


def _timm(folder: Path) -> str:
    sizes = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return str(save_timm(of_timm(num_classes=3), folder, label_names=list(LABELS), model_args=sizes))


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
    "transformers ViT", "transformers ViT without head", "transformers DeiT", "transformers DeiT with teacher",
    "transformers DINOv2 without head", "timm folder", "timm:FOLDER", "timm:NAME@FILE", "timm by transformers",
    "timm folder by transformers",
)  # fmt: skip
