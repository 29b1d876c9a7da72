"""CLIP's image tower (arXiv 2103.00020) under the names of OpenAI's code and OpenCLIP, beside the text tower or alone.

Query, key and value are one projection, as torch's own attention holds them, and the last projection is transposed.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from hf_vit.conversion.origins.beside import Count, Number, Positive, checked, pair_of
from hf_vit.conversion.origins.origin import Declared, Dims, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.preprocessing import CLIP_MEAN, CLIP_STD, RESAMPLE
from hf_vit.conversion.origins.pytorch.timm_architectures import HEADS_OF_WIDTH
from hf_vit.conversion.origins.wrapped import BESIDE, prefixes, unwrapped
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair, Patches, square_or_pair, table_size

_TOWER = "visual."
PATCHES = "conv1.weight"
_CLASS, _MARK = "class_embedding", re.compile(r"(.*\.)?transformer\.resblocks\.\d+\.\w+\..+")
_BLOCK, _TARGET = "transformer.resblocks.{i}", "layers.{i}"


def _dense(source: str, axes: tuple[str, ...], target: str) -> tuple[KeyRule, ...]:
    """Weight and bias of a dense layer or a norm; `axes` of the weight, output first."""
    return (
        KeyRule(f"{source}.weight", axes, "keep", f"{target}.weight"),
        KeyRule(f"{source}.bias", axes[:1], "keep", f"{target}.bias"),
    )


RULES = (
    KeyRule(PATCHES, "DCPQ", "keep", "embeddings.patch_embeddings.projection.weight"),
    KeyRule(_CLASS, "D", "as_token", "embeddings.cls_token"),
    KeyRule("positional_embedding", "TD", "as_table", "embeddings.position_embeddings"),
    *_dense("ln_pre", ("D",), "embeddings.layernorm"),
    *_dense(f"{_BLOCK}.ln_1", ("D",), f"{_TARGET}.layernorm_before"),
    KeyRule(f"{_BLOCK}.attn.in_proj_weight", ("3D", "D"), "keep", f"{_TARGET}.attention.{{q,k,v}}_proj.weight"),
    KeyRule(f"{_BLOCK}.attn.in_proj_bias", ("3D",), "keep", f"{_TARGET}.attention.{{q,k,v}}_proj.bias"),
    *_dense(f"{_BLOCK}.attn.out_proj", ("D", "D"), f"{_TARGET}.attention.o_proj"),
    KeyRule(f"{_BLOCK}.ls_1.gamma", "D", "keep", f"{_TARGET}.layer_scale1.lambda1", part="layer_scale"),
    *_dense(f"{_BLOCK}.ln_2", ("D",), f"{_TARGET}.layernorm_after"),
    *_dense(f"{_BLOCK}.mlp.c_fc", ("M", "D"), f"{_TARGET}.mlp.fc1"),
    *_dense(f"{_BLOCK}.mlp.c_proj", ("D", "M"), f"{_TARGET}.mlp.fc2"),
    KeyRule(f"{_BLOCK}.ls_2.gamma", "D", "keep", f"{_TARGET}.layer_scale2.lambda1", part="layer_scale"),
    *_dense("ln_post", ("D",), "layernorm"),
    KeyRule("proj", "DL", "transpose", "classifier.weight", part="head"),
)

# Beside the image tower.
OTHER_TOWER = {
    r"(transformer|token_embedding|ln_final|text\w*)\..+|(positional_embedding|text_projection)": "the text tower",
    r"logit_(scale|bias)": "scale and bias of the contrastive loss",
    r"input_resolution|context_length|vocab_size": "sizes, as numbers",
}
REFUSED = {
    r"attn_pool\..+|ln_k\..+|attn_pool_contrastive\..+": "attention pooling with queries of its own (CoCa)",
    r"transformer\.resblocks\.\d+\.attn\.(ln_\w+|head_scale|logit_scale)(\..+)?": "another attention",
    r"layer\d\.\d+\..+": "a ResNet (CLIP's RN50 and its kin)",
}
ASSUMED = {
    "num_attention_heads": "heads of 64 (16 heads at widths of 1152, 1280, 1408 and 1664)",
    "hidden_act": "the exact GELU (OpenAI's own weights and OpenCLIP's -quickgelu have quick_gelu)",
    "layer_norm_eps": "eps 1e-5",
    "processor": "CLIP's mean and deviation, resized bicubically",
}


def recognises(shapes: Mapping[str, Shape]) -> bool:
    base = _find_base(shapes)
    has_token = base is not None and any(key.endswith(base + _CLASS) for key in shapes)
    return has_token and any(map(_MARK.fullmatch, shapes))


def _find_base(shapes: Mapping[str, Shape]) -> str | None:
    return next((base for base in (_TOWER, "") if prefixes(shapes, base + PATCHES)), None)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """Strip what is around the image tower, and leave the text tower out."""
    base = _find_base(shapes) or ""
    found = unwrapped(shapes, base + PATCHES, OTHER_TOWER if base else {})
    left = {name: key for name, key in found.normal.items() if not name.startswith(base)}
    normal = {name.removeprefix(base): key for name, key in found.normal.items() if name not in left}
    normal |= {f"/{name}": key for name, key in left.items()}  # no rule knows "/..."
    return KeyNames(normal, found.ignored, lambda name: found.spell(f"{base}{name}"))


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`."""
    patches, width = Patches((dims["P"], dims["Q"])), dims["D"]
    heads = HEADS_OF_WIDTH.get(width, width // 64 if width % 64 == 0 else None)
    return ({} if heads is None else {"num_attention_heads": heads}) | {
        "image_size": square_or_pair(table_size(dims["T"] - 1, patches, image_size)),
        "patch_size": square_or_pair(patches.sides),
        "num_channels": dims["C"],
        "hidden_size": width,
        "intermediate_size": dims["M"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "position_embedding": "learned",
        "position_interpolation": "bicubic",
        "pooling": "token",
        "norm_before_layers": True,
        "norm_after_pooling": True,
        "layer_scale_init_value": 1e-5 if "layer_scale" in parts else None,
    }


class Pixels(BaseModel):
    """What is read of `preprocess_cfg`."""

    mean: list[Number] = CLIP_MEAN
    std: list[Positive] = CLIP_STD
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    resize_mode: Literal["shortest", "squash"] = "shortest"


class Tower(BaseModel):
    """What is read of `model_cfg.vision_cfg`; what another network is asked for by has one value here."""

    image_size: object = 224
    width: Count = 768
    head_width: Count = 64
    pool_type: Literal["tok"] = "tok"
    timm_model_name: None = None
    act_kwargs: None = None
    norm_kwargs: None = None


class TwoTowers(BaseModel):
    """What is read of `model_cfg`."""

    vision_cfg: Tower = Tower()
    quick_gelu: bool = False


class OpenClipConfig(BaseModel):
    """What is read of open_clip_config.json."""

    model_cfg: TwoTowers
    preprocess_cfg: Pixels = Pixels()


def declared(companions: Companions, shapes: Mapping[str, Shape]) -> Declared:
    """What open_clip_config.json says; without one, the colours of CLIP."""
    colours = {"resample": 3, "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "do_convert_rgb": True}
    if companions.config is None:
        return Declared(processor=colours)
    config = checked(OpenClipConfig, companions.config, "open_clip_config.json")
    tower, pixels = config.model_cfg.vision_cfg, config.preprocess_cfg
    height, width = pair_of(tower.image_size)
    is_cropped = pixels.resize_mode == "shortest"
    steps = {
        "size": {"shortest_edge": min(height, width)} if is_cropped else {"height": height, "width": width},
        "do_center_crop": is_cropped,
        "resample": RESAMPLE[pixels.interpolation],
        "image_mean": pixels.mean,
        "image_std": pixels.std,
    } | ({"crop_size": {"height": height, "width": width}} if is_cropped else {})
    fields = {
        "num_attention_heads": tower.width // tower.head_width,
        "hidden_act": "quick_gelu" if config.model_cfg.quick_gelu else "gelu",
    }
    return Declared(fields, (height, width), processor=colours | steps)


ORIGIN = Origin(
    name="open_clip",
    title="CLIP of OpenAI's code and of OpenCLIP: the image tower, .safetensors or .pt",
    legend={
        "P, Q": "height and width of a patch in px",
        "C": "channels",
        "D": "hidden size",
        "T": "rows of the position table: the class token's, then the patch grid's row by row",
        "M": "width of the MLP",
        "L": "size of the common space of images and texts",
    },
    rules=RULES,
    block_pattern=r"transformer\.resblocks\.(0|[1-9]\d*)\.",
    without={},
    ignored=OTHER_TOWER | BESIDE,
    recognises=recognises,
    names=names,
    configure=configure,
    declared=declared,
    assumed=ASSUMED,
    refused=REFUSED,
    zeros={"head": ("classifier.bias",)},
    package="open_clip",
    notes=(
        "Prefixes that are taken off: `visual.`, and what is wrapped around a model. Towers of timm inside OpenCLIP "
        "have timm's keys: `--prefix visual.trunk`.",
        "`attn.in_proj_weight` holds the projections of query, key and value one after the other.",
        "`proj`, into the common space, is the head here, with a bias of zeros: `logits` are an image's embedding.",
        "A folder's open_clip_config.json tells heads, activation and preprocessing.",
        "OpenAI's own files are TorchScript, whose code is never run: save the `state_dict()` of the loaded model.",
    ),
)
