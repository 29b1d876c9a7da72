"""Define the origins of CLIP (arXiv 2103.00020) and SigLIP (2303.15343): transformers, OpenAI's code and OpenCLIP.

Only the image towers convert.
"""

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel

from hf_vit.conversion.origins.beside import (
    CLIP_MEAN,
    CLIP_PIXELS,
    CLIP_STD,
    ORIGINAL_PIXELS,
    RESAMPLE,
    Count,
    Number,
    Positive,
    read_config,
    read_size,
    validate_values,
)
from hf_vit.conversion.origins.origin import ASSUMED_HEADS, Declared, Fields, KeyNames, KeyRule, Network, Origin, dense
from hf_vit.conversion.origins.wrapped import find_prefixes, ignore_keys, make_recognizer, unwrap
from hf_vit.conversion.readers import Companions, Shapes
from hf_vit.errors import UserError

# transformers' CLIP: the image tower alone, with the projection, or with the text tower.

_PATCHES, _CLASS = "embeddings.patch_embedding.weight", "embeddings.class_embedding"
_BASES = ("", "vision_model.")  # the latter inside another model
_BLOCK, _TARGET = "encoder.layers.{i}", "layers.{i}"
_ATTENTION = f"{_TARGET}.attention"

# Rules that CLIP and SigLIP share.
_TOWER_RULES = (
    KeyRule(_PATCHES, "DCPQ", "keep", "embeddings.patch_embeddings.projection.weight"),
    KeyRule("embeddings.position_embedding.weight", "TD", "as_table", "embeddings.position_embeddings"),
    *dense(f"{_BLOCK}.layer_norm1", "D", f"{_TARGET}.layernorm_before"),
    *dense(f"{_BLOCK}.self_attn.{{q,k,v}}_proj", "DD", f"{_ATTENTION}.{{q,k,v}}_proj"),
    *dense(f"{_BLOCK}.self_attn.out_proj", "DD", f"{_ATTENTION}.o_proj"),
    *dense(f"{_BLOCK}.layer_norm2", "D", f"{_TARGET}.layernorm_after"),
    *dense(f"{_BLOCK}.mlp.fc1", "MD", f"{_TARGET}.mlp.fc1"),
    *dense(f"{_BLOCK}.mlp.fc2", "DM", f"{_TARGET}.mlp.fc2"),
    *dense("post_layernorm", "D", "layernorm"),
)
# Keys beside the image tower -> why they are ignored.
_OTHER_TOWER = {
    r"text_model\..+|text_projection\..+": "the text tower",
    r"logit_(scale|bias)": "scale and bias of the contrastive loss",
    r"(vision_model\.)?embeddings\.position_ids": "indices of the positions",
}
_CLIP_FIELDS: Fields = {
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "position_interpolation": "bicubic",
    "pooling": "token",
    "norm_before_layers": True,
    "norm_after_pooling": True,
}


def _names(shapes: Shapes) -> KeyNames:
    return unwrap(shapes, _PATCHES, _OTHER_TOWER, _BASES, ("visual_projection.", "classifier."))


def _read_clip_config(companions: Companions, shapes: Shapes) -> Declared:
    """Return the facts in CLIP's config.json, which also has the width of the projection."""
    width = (companions.config or {}).get("projection_dim")
    rows = next((shape[0] for key, shape in shapes.items() if key.endswith("visual_projection.weight") and shape), None)
    if None not in (width, rows) and width != rows:
        raise UserError(
            f"config.json has projection_dim={width!r:.80}, but visual_projection.weight has {rows} rows; "
            "download both files again from the same model"
        )
    return read_config(companions, ("clip_vision_model", "clip"))


CLIP = Origin(
    name="transformers_clip",
    rules=(
        *_TOWER_RULES,
        KeyRule(_CLASS, "D", "as_token", "embeddings.cls_token"),
        *dense("pre_layrnorm", "D", "embeddings.layernorm"),
        KeyRule("visual_projection.weight", "LD", "keep", "classifier.weight", part="head"),
    ),
    recognizes=make_recognizer(_PATCHES, _BASES, rf"{_CLASS}$"),
    names=_names,
    configure=lambda network: network.read_vit_fields(1) | _CLIP_FIELDS,
    declared=_read_clip_config,
    assumed={
        "num_attention_heads": ASSUMED_HEADS,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": "eps 1e-5",
        "processor": ORIGINAL_PIXELS,
    },
    zeros={"head": ("classifier.bias",)},
    package="transformers",
)

# transformers' classifier on CLIP reads the mean of the last block's patches, without a last LayerNorm.


def _select_classifier_names(shapes: Shapes) -> KeyNames:
    """Return the names of the classifier's keys; the last LayerNorm is ignored."""
    names = _names(shapes)
    ignore_keys(names, "post_layernorm.", "last LayerNorm, which the classifier does not use")
    return names


CLIP_CLASSIFIER = replace(
    CLIP,
    name="transformers_clip_classifier",
    rules=(
        *(rule for rule in CLIP.rules if not rule.parameter.startswith(("layernorm.", "classifier."))),
        *dense("classifier", "LD", part="head"),
    ),
    recognizes=make_recognizer(_PATCHES, _BASES, rf"{_CLASS}$", r"classifier\."),
    names=_select_classifier_names,
    configure=lambda network: (
        network.read_vit_fields(1)
        | _CLIP_FIELDS
        | {"pooling": "gap", "use_class_token": True, "norm_after_pooling": None}
    ),
    zeros={},
)

# transformers' SigLIP: the image tower, alone or with the text tower, and the classifier.

_MAP = "pooler.map"


def _select_siglip_names(shapes: Shapes) -> KeyNames:
    """Return the names of the image tower's keys; a classifier does not use the attention pooling."""
    names = _names(shapes)
    if any(name.startswith("classifier.") for name in names.normal):
        ignore_keys(names, "head.", "attention pooling that the classifier does not use")
    return names


def _configure_siglip(network: Network) -> Fields:
    return network.read_vit_fields(0, heads={1152: 16, 1536: 16}) | {
        "position_interpolation": "bicubic",
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "pooling": "map" if "map" in network.parts else "gap",
    }


SIGLIP = replace(
    CLIP,
    name="transformers_siglip",
    rules=(
        *_TOWER_RULES,
        KeyRule("embeddings.patch_embedding.bias", "D", "keep", "embeddings.patch_embeddings.projection.bias"),
        KeyRule("head.probe", "11D", "keep", f"{_MAP}.probe", "map"),
        KeyRule("head.attention.in_proj_weight", ("3D", "D"), "keep", f"{_MAP}.attention.{{q,k,v}}_proj.weight", "map"),
        KeyRule("head.attention.in_proj_bias", ("3D",), "keep", f"{_MAP}.attention.{{q,k,v}}_proj.bias", "map"),
        *dense("head.attention.out_proj", "DD", f"{_MAP}.attention.o_proj", "map"),
        *dense("head.layernorm", "D", f"{_MAP}.layernorm", "map"),
        *dense("head.mlp.fc1", "MD", f"{_MAP}.mlp.fc1", "map"),
        *dense("head.mlp.fc2", "DM", f"{_MAP}.mlp.fc2", "map"),
        *dense("classifier", "LD", part="head"),
    ),
    recognizes=make_recognizer(_PATCHES, _BASES, lacks=rf"{_CLASS}$"),
    names=_select_siglip_names,
    configure=_configure_siglip,
    declared=lambda companions, shapes: read_config(companions, ("siglip_vision_model", "siglip")),
    assumed={
        **CLIP.assumed,
        "num_attention_heads": "heads of 64 (16 heads at widths of 1152 and 1536)",
        "hidden_act": "the tanh GELU",
        "layer_norm_eps": "eps 1e-6",
    },
    zeros={},
)

# SigLIP 2 for images in their own shape (NaFlex, arXiv 2502.14786): patches come as vectors, and the position table is
# resized to the grid of every image.

SIGLIP2 = replace(
    SIGLIP,
    name="transformers_siglip2",
    rules=(
        KeyRule(_PATCHES, "DZ", "linear_patches", "embeddings.patch_embeddings.projection.weight"),
        *SIGLIP.rules[1:],
    ),
    recognizes=lambda shapes: (
        SIGLIP.recognizes(shapes)
        and any(len(shape) == 2 for key, shape in shapes.items() if key.endswith(f".{_PATCHES}") or key == _PATCHES)
    ),
    configure=lambda network: _configure_siglip(network.with_linear_patches()) | {"position_interpolation": "flexivit"},
    # config.json has a number of patches instead of an image size.
    declared=lambda companions, shapes: replace(
        read_config(companions, ("siglip2_vision_model", "siglip2")), image_size=None
    ),
)

# CLIP with the names of OpenAI's code and OpenCLIP, with the text tower or alone.

_OPEN_PATCHES = "conv1.weight"
_OPEN_CLASS = "class_embedding"
_OPEN_BASES = ("visual.", "")
_OPEN_BLOCK = "transformer.resblocks.{i}"
_OPEN_BLOCKS = r"(^|\.)transformer\.resblocks\.\d+\.\w+\.."
_OPEN_OTHER_TOWER = {
    r"(transformer|token_embedding|ln_final|text\w*)\..+|(positional_embedding|text_projection)": "the text tower",
    r"logit_(scale|bias)": "scale and bias of the contrastive loss",
    r"input_resolution|context_length|vocab_size": "sizes stored as numbers",
}


def _open_clip_names(shapes: Shapes) -> KeyNames:
    has_two_towers = find_prefixes(shapes, _OPEN_BASES[0] + _OPEN_PATCHES)
    return unwrap(shapes, _OPEN_PATCHES, _OPEN_OTHER_TOWER if has_two_towers else {}, _OPEN_BASES)


def _configure_open_clip(network: Network) -> Fields:
    """Return the fields of OpenCLIP's config, with the exact GELU."""
    return network.read_vit_fields(1) | {
        **_CLIP_FIELDS,
        "hidden_act": "gelu",
        "layer_scale_init_value": 1e-5 if "layer_scale" in network.parts else None,
        "position_interpolation": "bicubic_antialias",
    }


class Pixels(BaseModel):
    """The fields of `preprocess_cfg` that are read."""

    mean: list[Number] = CLIP_MEAN
    std: list[Positive] = CLIP_STD
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    resize_mode: Literal["shortest", "squash"] = "shortest"


class Tower(BaseModel):
    """The fields of `model_cfg.vision_cfg` that are read; fields for other networks have only one valid value."""

    image_size: object = 224
    width: Count = 768
    head_width: Count = 64
    pool_type: Literal["tok"] = "tok"
    timm_model_name: None = None
    act_kwargs: None = None
    norm_kwargs: None = None


class TwoTowers(BaseModel):
    """The fields of `model_cfg` that are read."""

    vision_cfg: Tower = Tower()
    quick_gelu: bool = False


class OpenClipConfig(BaseModel):
    """The fields of open_clip_config.json that are read."""

    model_cfg: TwoTowers
    preprocess_cfg: Pixels = Pixels()


def _read_open_clip_config(companions: Companions, shapes: Shapes) -> Declared:
    """Return the facts in open_clip_config.json; without one, CLIP's preprocessing."""
    if companions.config is None:
        return Declared(processor=CLIP_PIXELS)
    config = validate_values(OpenClipConfig, companions.config, "open_clip_config.json")
    tower = config.model_cfg.vision_cfg
    pixels = config.preprocess_cfg
    height, width = read_size(tower.image_size)
    full_size = {"height": height, "width": width}
    is_cropped = pixels.resize_mode == "shortest"
    if is_cropped and height != width:
        raise UserError(
            f"open_clip's preprocessing resize_mode='shortest' for {height}x{width} px has no equivalent in "
            "CLIPImageProcessor; use the model with open_clip"
        )
    steps = {
        "size": {"shortest_edge": min(height, width)} if is_cropped else full_size,
        "do_center_crop": is_cropped,
        "resample": RESAMPLE[pixels.interpolation],
        "image_mean": pixels.mean,
        "image_std": pixels.std,
    } | ({"crop_size": full_size} if is_cropped else {})
    activation = "quick_gelu" if config.model_cfg.quick_gelu else "gelu"
    fields = {"num_attention_heads": tower.width // tower.head_width, "hidden_act": activation}
    return Declared(fields, (height, width), processor=CLIP_PIXELS | steps)


OPEN_CLIP = Origin(
    name="open_clip",
    rules=(
        KeyRule(_OPEN_PATCHES, "DCPQ", "keep", "embeddings.patch_embeddings.projection.weight"),
        KeyRule(_OPEN_CLASS, "D", "as_token", "embeddings.cls_token"),
        KeyRule("positional_embedding", "TD", "as_table", "embeddings.position_embeddings"),
        *dense("ln_pre", "D", "embeddings.layernorm"),
        *dense(f"{_OPEN_BLOCK}.ln_1", "D", f"{_TARGET}.layernorm_before"),
        KeyRule(f"{_OPEN_BLOCK}.attn.in_proj_weight", ("3D", "D"), "keep", f"{_ATTENTION}.{{q,k,v}}_proj.weight"),
        KeyRule(f"{_OPEN_BLOCK}.attn.in_proj_bias", ("3D",), "keep", f"{_ATTENTION}.{{q,k,v}}_proj.bias"),
        *dense(f"{_OPEN_BLOCK}.attn.out_proj", "DD", f"{_ATTENTION}.o_proj"),
        KeyRule(f"{_OPEN_BLOCK}.ls_1.gamma", "D", "keep", f"{_TARGET}.layer_scale1.lambda1", "layer_scale"),
        *dense(f"{_OPEN_BLOCK}.ln_2", "D", f"{_TARGET}.layernorm_after"),
        *dense(f"{_OPEN_BLOCK}.mlp.c_fc", "MD", f"{_TARGET}.mlp.fc1"),
        *dense(f"{_OPEN_BLOCK}.mlp.c_proj", "DM", f"{_TARGET}.mlp.fc2"),
        KeyRule(f"{_OPEN_BLOCK}.ls_2.gamma", "D", "keep", f"{_TARGET}.layer_scale2.lambda1", "layer_scale"),
        *dense("ln_post", "D", "layernorm"),
        KeyRule("proj", "DL", "transpose", "classifier.weight", "head"),
    ),
    recognizes=make_recognizer(_OPEN_PATCHES, _OPEN_BASES, rf"(^|\.){_OPEN_CLASS}$", _OPEN_BLOCKS),
    names=_open_clip_names,
    configure=_configure_open_clip,
    declared=_read_open_clip_config,
    assumed={
        "num_attention_heads": ASSUMED_HEADS,
        "hidden_act": "the exact GELU (OpenAI's own weights and OpenCLIP's -quickgelu have quick_gelu)",
        "layer_norm_eps": "eps 1e-5",
        "processor": "CLIP's mean and deviation, resized bicubically",
    },
    refused={
        r"attn_pool\..+|ln_k\..+|attn_pool_contrastive\..+": "attention pooling with several queries (CoCa)",
        r"transformer\.resblocks\.\d+\.attn\.(ln_\w+|head_scale|logit_scale)(\..+)?": "scaled or normalized attention",
        r"layer\d\.\d+\..+": "a ResNet (such as CLIP's RN50)",
    },
    zeros={"head": ("classifier.bias",)},
    package="open_clip",
)

# Perception Encoder (arXiv 2504.13181): OpenCLIP's names, and rotary positions, which no key shows. Core models pool by
# attention; spatial and language models are towers without a last norm.

_PE_POOL = "attn_pool"
_is_core = make_recognizer(_OPEN_PATCHES, _OPEN_BASES, rf"(^|\.){_PE_POOL}\.probe$")
_is_tower = make_recognizer(
    _OPEN_PATCHES, _OPEN_BASES, _OPEN_BLOCKS, lacks=r"(^|\.)(ln_post\.weight|proj|attn_pool\..+)$"
)


def _configure_perception_encoder(network: Network) -> Fields:
    parts, dims = network.parts, network.dims
    has_class = "cls" in parts
    if "map" in parts and "norm" not in parts:
        raise UserError(
            "the attention pooling lacks the norm 'ln_post' before it, so the file is damaged; download it again"
        )
    return network.read_vit_fields(int(has_class), heads={1536: 16}) | {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "norm_before_layers": True,
        "norm_after_pooling": False if "norm" in parts else None,
        "layer_scale_init_value": 0.1 if "layer_scale" in parts else None,
        "use_class_token": has_class,
        "pooling": "map" if "map" in parts else ("token" if has_class else "gap"),
        "pooling_num_heads": 8 if "map" in parts else None,
        "pooling_intermediate_size": dims["X"] if "map" in parts else None,
        "position_interpolation": "bilinear",
        "rotary_embedding": "axial",
        "rotary_base": 10_000.0,
        "rotary_offset": int(has_class),
        "rotary_axis_order": "column_row",
    }


# OpenCLIP's keys that Perception Encoder's models may lack -> the optional part they belong to.
_PE_PARTS = {_OPEN_CLASS: "cls", "ln_post.weight": "norm", "ln_post.bias": "norm"}
PERCEPTION_ENCODER = replace(
    OPEN_CLIP,
    name="perception_encoder",
    rules=(
        *(replace(rule, part=_PE_PARTS.get(rule.key, rule.part)) for rule in OPEN_CLIP.rules),
        KeyRule(f"{_PE_POOL}.probe", "11D", "keep", f"{_MAP}.probe", "map"),
        KeyRule(
            f"{_PE_POOL}.attn.in_proj_weight", ("3D", "D"), "keep", f"{_MAP}.attention.{{q,k,v}}_proj.weight", "map"
        ),
        KeyRule(f"{_PE_POOL}.attn.in_proj_bias", ("3D",), "keep", f"{_MAP}.attention.{{q,k,v}}_proj.bias", "map"),
        *dense(f"{_PE_POOL}.attn.out_proj", "DD", f"{_MAP}.attention.o_proj", "map"),
        *dense(f"{_PE_POOL}.layernorm", "D", f"{_MAP}.layernorm", "map"),
        *dense(f"{_PE_POOL}.mlp.c_fc", "XD", f"{_MAP}.mlp.fc1", "map"),
        *dense(f"{_PE_POOL}.mlp.c_proj", "DX", f"{_MAP}.mlp.fc2", "map"),
    ),
    recognizes=lambda shapes: _is_core(shapes) or _is_tower(shapes),
    configure=_configure_perception_encoder,
    declared=None,
    assumed={
        "num_attention_heads": "heads of 64 (16 heads at a width of 1536)",
        "rotary_embedding": "rotary positions, as Perception Encoder has them",
        "processor": ORIGINAL_PIXELS,
    },
    parts_that_tell={"rotary_embedding": frozenset({"map"})},
    refused={r"attn_pool\.(attn\.(q|k|v)_proj_weight|query)": "another attention pooling"},
    package="Meta's perception_models",
)
