"""Encoders in the files of the codes that trained them: MAE (arXiv 2111.06377), DINO (2104.14294), DINOv2 (2304.07193)
and DINOv3 (2508.10104).

An encoder of the first three that stands alone has the names of timm, and is one of `timm.py`.
"""

import re
from dataclasses import replace

from hf_vit.conversion.origins import timm
from hf_vit.conversion.origins.beside import IMAGENET_MEAN, IMAGENET_STD
from hf_vit.conversion.origins.origin import Declared, Fields, KeyNames, KeyRule, Network, dense, square_or_pair
from hf_vit.conversion.origins.wrapped import bare_names, has, renamed, unwrapped
from hf_vit.conversion.readers import Companions, Shapes
from hf_vit.errors import UserError

_PIXELS = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD, "resample": 3, "do_convert_rgb": True}
_OF_MAE = {
    r"mask_token": "mask token of the decoder",
    r"decoder_\w+(\..+)?": "decoder, which reconstructs pixels",
}
_OF_DINO = {
    r"(head\.(mlp|last_layer)|dino_head|ibot_head)\..+": "projection head of the self-distillation",
    r"mask_token": "mask token of DINOv2's training",
}
_OF_DINOV3 = {
    **_OF_DINO,
    r"local_cls_norm\..+": "a norm that only training uses",
    r"blocks\.\d+\.attn\.qkv\.bias_mask": "the mask that takes the bias of the key away",
}
_DINO_MARKS = "|".join((*_OF_DINO, r"register_tokens|blocks\.\d+\.\d+\..+"))  # the last are DINOv2's own names
_CHUNKED = re.compile(r"blocks\.(\d+)\.(\d+)\.(.+)")


def _declared(companions: Companions, shapes: Shapes) -> Declared:
    """Return the codes' own constants; a folder's config.json is one of timm."""
    declared = timm.declared(companions, shapes)
    return Declared(processor=_PIXELS) if companions.config is None else declared


def _configure_mae(network: Network) -> Fields:
    """Its code stretches positions without antialiasing."""
    return timm.configure(network) | {"position_interpolation": "bicubic"}


def _recognises_mae(shapes: Shapes) -> bool:
    return timm.recognises(shapes) and any(name.startswith("decoder_") for name in bare_names(shapes))


MAE = replace(
    timm.VIT,
    name="mae",
    recognises=_recognises_mae,
    names=lambda shapes: timm.names(shapes, _OF_MAE),
    configure=_configure_mae,
    declared=_declared,
    assumed={**timm.VIT.assumed, "processor": "ImageNet's mean and deviation, resized bicubically"},
)


def _recognises_dino(shapes: Shapes) -> bool:
    is_wrapped = any(re.fullmatch(r"(.*\.)?(teacher|student)\..+", key) for key in shapes)
    is_marked = is_wrapped or any(re.fullmatch(_DINO_MARKS, name) for name in bare_names(shapes))
    return timm.recognises(shapes) and is_marked and not _recognises_mae(shapes)


def _dino_names(shapes: Shapes) -> KeyNames:
    """Blocks that are stored in chunks keep their number in the whole."""
    found = unwrapped(shapes, timm.PATCHES, _OF_DINO)
    chunk_of = {block[2]: block[1] for name in found.normal if (block := _CHUNKED.fullmatch(name))}
    normal = {_CHUNKED.sub(r"blocks.\2.\3", name): key for name, key in found.normal.items()}
    if len(normal) != len(found.normal):
        raise UserError("the file holds a block in two chunks; which one is right is unknown; keep one")

    def spell(name: str) -> str:
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        chunk = chunk_of.get(block[1], "0") if block and chunk_of else None
        return found.spell(name if block is None or chunk is None else f"blocks.{chunk}.{block[1]}.{block[2]}")

    bare = renamed(KeyNames(normal, found.ignored, spell), {"reg_token": "register_tokens"})
    return timm.with_swiglu(bare, shapes)


def _configure_dino(network: Network) -> Fields:
    """Positions are stretched without antialiasing, and with an offset, but for models with registers."""
    if "registers" in network.parts:
        return timm.configure(network)
    return _configure_mae(network) | {"position_interpolation_offset": 0.1}


DINO = replace(
    MAE,
    name="dino",
    recognises=_recognises_dino,
    names=_dino_names,
    configure=_configure_dino,
)


def _dinov3_names(shapes: Shapes) -> KeyNames:
    """A bias of query, key and value beside a mask is that of query and value: the code multiplies the key's by 0."""
    names = unwrapped(shapes, timm.PATCHES, _OF_DINOV3)
    is_masked = any(key.endswith(".attn.qkv.bias_mask") for key in shapes)
    return renamed(names, {".attn.qkv.masked_bias": ".attn.qkv.bias"} if is_masked else {})


def _configure_dinov3(network: Network) -> Fields:
    """What neither names nor shapes tell is the same in all released models, but for the image size."""
    dims, parts, (height, width) = network.dims, network.parts, network.patches.sides
    default_size = 224 if 224 % height == 0 else 14 * height, 224 if 224 % width == 0 else 14 * width
    return {
        "image_size": square_or_pair(network.image_size or default_size),
        "patch_size": square_or_pair((height, width)),
        "num_channels": dims["C"],
        "hidden_size": dims["D"],
        "num_attention_heads": dims["D"] // (4 * dims["F"]),
        "intermediate_size": dims["M"],
        "mlp_type": "dense" if "dense" in parts else "swiglu",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "norm_type": "layernorm" if "layernorm" in parts else "rmsnorm",
        "qkv_bias": bool({"qkv_bias", "masked_bias"} & parts),
        "key_bias": "masked_bias" not in parts,
        "layer_scale_init_value": 1e-5 if "layer_scale" in parts else None,
        "num_register_tokens": dims["G"] if "registers" in parts else 0,
        "position_embedding": "none",
        "rotary_embedding": "axial",
        "rotary_coordinates": "centered",
        "rotary_pairing": "halves",
        "rotary_rescale": 2.0,
    }


_BLOCK, _TARGET = "blocks.{i}", "layers.{i}"
DINOV3 = replace(
    DINO,
    name="dinov3",
    rules=(
        *dense("patch_embed.proj", "DCPQ", "embeddings.patch_embeddings.projection"),
        KeyRule("cls_token", "11D", "keep", "embeddings.cls_token"),
        KeyRule("storage_tokens", "1GD", "keep", "embeddings.register_tokens", "registers"),
        KeyRule("rope_embed.periods", "F", "periods", "rotary_periods"),
        KeyRule(
            f"{_BLOCK}.attn.qkv.masked_bias", ("3D",), "keep", f"{_TARGET}.attention.{{q,_,v}}_proj.bias", "masked_bias"
        ),
        *(
            replace(rule, part=rule.part or "layernorm") if re.search(r"norm\d\.bias$", rule.key) else rule
            for rule in timm.BLOCK_RULES
        ),
        *dense("norm", "D", "layernorm", bias_part="layernorm"),
    ),
    recognises=has(timm.PATCHES, ("",), r"(^|\.)rope_embed\.periods$"),
    names=_dinov3_names,
    configure=_configure_dinov3,
    rules_of=None,
    declared=lambda companions, shapes: Declared(processor=_PIXELS),
    assumed={
        "layer_norm_eps": "eps 1e-5",
        "hidden_act": "the exact GELU",
        "processor": "ImageNet's mean and deviation, resized bicubically",
    },
    refused={
        r"cls_norm\..+": "a last norm of its own for the class token",
        r"blocks\.\d+\.(attn|mlp)\.(q_norm|k_norm|fc[123]\.scale)(\..+)?": "another attention or MLP",
    },
    lacking={},
    foreign_heads={},
    package="Meta's dinov3",
)
