"""transformers' CLIP (arXiv 2103.00020): its image tower, alone, with the projection, or beside the text tower."""

from collections.abc import Mapping
from typing import Any

from hf_vit.conversion.origins.origin import Declared, Dims, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.transformers.configs import read_config
from hf_vit.conversion.origins.wrapped import BESIDE, prefixes, unwrapped
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair, Patches, square_or_pair, table_size

PATCHES, CLASS = "embeddings.patch_embedding.weight", "embeddings.class_embedding"
_BASE = "vision_model."  # the image tower inside another model
_BLOCK, _TARGET = "encoder.layers.{i}", "layers.{i}"


def dense(source: str, axes: tuple[str, ...], target: str, part: str = "") -> tuple[KeyRule, ...]:
    """Weight and bias of a dense layer or a norm; `axes` of the weight, output first."""
    return (
        KeyRule(f"{source}.weight", axes, "keep", f"{target}.weight", part),
        KeyRule(f"{source}.bias", axes[:1], "keep", f"{target}.bias", part),
    )


# Common to CLIP and SigLIP.
TOWER_RULES = (
    KeyRule(PATCHES, "DCPQ", "keep", "embeddings.patch_embeddings.projection.weight"),
    KeyRule("embeddings.position_embedding.weight", "TD", "as_table", "embeddings.position_embeddings"),
    *dense(f"{_BLOCK}.layer_norm1", ("D",), f"{_TARGET}.layernorm_before"),
    *(
        rule
        for name in "qkv"
        for rule in dense(f"{_BLOCK}.self_attn.{name}_proj", ("D", "D"), f"{_TARGET}.attention.{name}_proj")
    ),
    *dense(f"{_BLOCK}.self_attn.out_proj", ("D", "D"), f"{_TARGET}.attention.o_proj"),
    *dense(f"{_BLOCK}.layer_norm2", ("D",), f"{_TARGET}.layernorm_after"),
    *dense(f"{_BLOCK}.mlp.fc1", ("M", "D"), f"{_TARGET}.mlp.fc1"),
    *dense(f"{_BLOCK}.mlp.fc2", ("D", "M"), f"{_TARGET}.mlp.fc2"),
    *dense("post_layernorm", ("D",), "layernorm"),
)
BLOCK_PATTERN = r"encoder\.layers\.(0|[1-9]\d*)\."

RULES = (
    *TOWER_RULES,
    KeyRule(CLASS, "D", "as_token", "embeddings.cls_token"),
    *dense("pre_layrnorm", ("D",), "embeddings.layernorm"),
    KeyRule("visual_projection.weight", "LD", "keep", "classifier.weight", part="head"),
)

LEGEND = {
    "P, Q": "height and width of a patch in px",
    "C": "channels",
    "D": "hidden size",
    "T": "rows of the position table: the class token's, where there is one, then the patch grid's row by row",
    "M": "width of the MLP",
    "L": "labels; of a projection, the size of the common space",
}

# Beside the image tower.
OTHER_TOWER = {
    r"text_model\..+|text_projection\..+": "the text tower",
    r"logit_(scale|bias)": "scale and bias of the contrastive loss",
    r"(vision_model\.)?embeddings\.position_ids": "numbers of the positions",
}
ASSUMED = {
    "num_attention_heads": "heads of 64",
    "hidden_act": "quick_gelu",
    "layer_norm_eps": "eps 1e-5",
    "processor": "pixels in [-1, 1], resized bilinearly",
}


def recognises(shapes: Mapping[str, Shape]) -> bool:
    return find_base(shapes) is not None and any(key.endswith(CLASS) for key in shapes)


def find_base(shapes: Mapping[str, Shape]) -> str | None:
    """Name of the image tower inside the file's model, with its dot; "" where it stands alone, None without one."""
    return next((base for base in ("", _BASE) if prefixes(shapes, base + PATCHES)), None)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """Strip what is around the image tower."""
    base = find_base(shapes) or ""
    found = unwrapped(shapes, base + PATCHES, OTHER_TOWER)
    normal = {name.removeprefix(base): key for name, key in found.normal.items()}
    beside = ("visual_projection.", "classifier.")
    return KeyNames(
        normal, found.ignored, lambda name: found.spell(name if name.startswith(beside) else f"{base}{name}")
    )


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`."""
    patches = Patches((dims["P"], dims["Q"]))
    return tower_fields(dims, patches, table_size(dims["T"] - 1, patches, image_size)) | {
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "pooling": "token",
        "norm_before_layers": True,
        "norm_after_pooling": True,
    }


def tower_fields(dims: Dims, patches: Patches, image_size: Pair) -> dict[str, Any]:
    """What shapes tell of the config, of CLIP and SigLIP alike."""
    heads = {"num_attention_heads": dims["D"] // 64} if dims["D"] % 64 == 0 else {}
    return heads | {
        "image_size": square_or_pair(image_size),
        "patch_size": square_or_pair(patches.sides),
        "num_channels": dims["C"],
        "hidden_size": dims["D"],
        "intermediate_size": dims["M"],
        "position_embedding": "learned",
        "position_interpolation": "bicubic",
    }


def declared(companions: Companions, shapes: Mapping[str, Shape]) -> Declared:
    """See `configs.read_config`."""
    return read_config(companions, ("clip_vision_model", "clip"))


ORIGIN = Origin(
    name="transformers_clip",
    title="transformers' CLIP (clip_vision_model, and the image tower of clip), .safetensors or .bin",
    legend=LEGEND,
    rules=RULES,
    block_pattern=BLOCK_PATTERN,
    without={},
    ignored=OTHER_TOWER | BESIDE,
    recognises=recognises,
    names=names,
    configure=configure,
    declared=declared,
    assumed=ASSUMED,
    zeros={"head": ("classifier.bias",)},
    package="transformers",
    notes=(
        "Prefixes that are taken off: `vision_model.`, and what is wrapped around a model.",
        "The projection into the common space of images and texts (`CLIPVisionModelWithProjection`) is the head here, "
        "with a bias of zeros: `logits` are `image_embeds`.",
        "As in CLIP, `last_hidden_state` is as the last block left it, and the last LayerNorm takes the pooled token.",
        "Where the file of the processor is missing: the shortest edge resized bicubically, the centre cropped, CLIP's "
        "mean and deviation.",
    ),
)
