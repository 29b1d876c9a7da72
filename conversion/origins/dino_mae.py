"""Define the origins MAE (arXiv 2111.06377), DINO (2104.14294) and DINOv2 (2304.07193): files of the original code.

An encoder saved without training state has timm's names, and belongs to an origin of `timm.py`.
"""

import re
from dataclasses import replace

from hf_vit.conversion.origins import timm
from hf_vit.conversion.origins.beside import IMAGENET_PIXELS
from hf_vit.conversion.origins.origin import Declared, Fields, KeyNames, KeyRule, Network, dense
from hf_vit.conversion.origins.wrapped import make_recognizer, rename_keys, strip_wrappers, unwrap
from hf_vit.conversion.readers import Companions, Shapes
from hf_vit.errors import UserError

_MAE_IGNORED = {r"mask_token": "mask token of the decoder", r"decoder_\w+(\..+)?": "decoder, which reconstructs pixels"}
_DINO_IGNORED = {
    r"(head\.(mlp|last_layer)|dino_head|ibot_head)\..+": "projection head of the self-distillation",
    r"mask_token": "mask token of DINOv2's training",
}
_DINOV3_IGNORED = {
    **_DINO_IGNORED,
    r"local_cls_norm\..+": "a norm that only training uses",
    r"blocks\.\d+\.attn\.qkv\.bias_mask": "the mask that takes the bias of the key away",
}
_DINO_KEYS = "|".join((*_DINO_IGNORED, r"register_tokens|blocks\.\d+\.\d+\..+"))  # the last two are DINOv2's names
# A linear classifier on the class token and the mean of the patches, whose file the codes keep beside the backbone's.
_LINEAR_HEAD = dense("linear_head", ("L", "2D"), "classifier", "head")
_CHUNKED = re.compile(r"blocks\.(\d+)\.(\d+)\.(.+)")


def _with_linear_head(names: KeyNames, shapes: Shapes) -> KeyNames:
    """Use the same name for a linear head beside the backbone in one module and in a file of its own.

    Raises:
        UserError: the head reads more than the last layer.
    """
    names = rename_keys(names, {"linear_head.": "/linear_head."}) if "/linear_head.weight" in names.normal else names
    keys = [names.normal.get(name) for name in ("linear_head.weight", timm.PATCHES)]
    (_, inputs), (width, *_) = [shapes[key] if key else (0, 0) for key in keys]
    if inputs == 5 * width > 0:
        raise UserError(
            f"the linear head reads {inputs} channels, the class tokens of the last four layers and the mean of the "
            "patches; hf_vit has heads on the last layer alone; give the head on one layer"
        )
    return names


def _read_declared(companions: Companions, shapes: Shapes) -> Declared:
    """Return the code's constants for a file, or what timm's config.json in a folder says."""
    declared = timm.declared(companions, shapes)
    return Declared(processor=IMAGENET_PIXELS) if companions.config is None else declared


def _configure_mae(network: Network) -> Fields:
    """Return the fields of the config: as timm's, but MAE's code resamples positions without antialiasing."""
    return timm.configure(network) | {"position_interpolation": "bicubic"}


def _recognizes_mae(shapes: Shapes) -> bool:
    """Return whether the file has an encoder with timm's names and a decoder."""
    return timm.recognizes(shapes) and any(name.startswith("decoder_") for name in strip_wrappers(shapes))


MAE = replace(
    timm.VIT,
    name="mae",
    recognizes=_recognizes_mae,
    names=lambda shapes: timm.names(shapes, _MAE_IGNORED),
    configure=_configure_mae,
    declared=_read_declared,
    assumed={**timm.VIT.assumed, "processor": "ImageNet's mean and deviation, resized bicubically"},
)


def _recognizes_dino(shapes: Shapes) -> bool:
    """Return whether the file has an encoder with timm's names and keys of DINO's training."""
    is_wrapped = any(re.fullmatch(r"(.*\.)?(teacher|student)\..+", key) for key in shapes)
    has_dino_keys = is_wrapped or any(re.fullmatch(_DINO_KEYS, name) for name in strip_wrappers(shapes))
    return timm.recognizes(shapes) and has_dino_keys and not _recognizes_mae(shapes)


def _select_dino_names(shapes: Shapes) -> KeyNames:
    """Return the names of the keys; blocks stored in chunks are numbered over all chunks."""
    names = unwrap(shapes, timm.PATCHES, _DINO_IGNORED)
    chunk_of_block = {match[2]: match[1] for name in names.normal if (match := _CHUNKED.fullmatch(name))}
    normal = {_CHUNKED.sub(r"blocks.\2.\3", name): key for name, key in names.normal.items()}
    if len(normal) != len(names.normal):
        raise UserError("the file holds the same block in two chunks; keep it in one chunk and save the file again")

    def spell(name: str) -> str:
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if match is None or not chunk_of_block:
            return names.spell(name)
        chunk = chunk_of_block.get(match[1], "0")  # a block without any key: name the first chunk
        return names.spell(f"blocks.{chunk}.{match[1]}.{match[2]}")

    renamed = rename_keys(KeyNames(normal, names.ignored, spell), {"reg_token": "register_tokens"})
    return timm.with_swiglu(_with_linear_head(renamed, shapes), shapes)


def _select_rules(rules: tuple[KeyRule, ...], shapes: Shapes) -> tuple[KeyRule, ...]:
    """Return the rules with the linear head in place of that of the class token if the file has one."""
    if "linear_head.weight" not in shapes:
        return rules
    return (*(rule for rule in rules if rule.part != "head"), *_LINEAR_HEAD)


def _find_pooling(network: Network) -> Fields:
    """Return the field of the pooling that a linear head reads."""
    return {"pooling": "token_and_gap"} if "linear_head.weight" in network.shapes else {}


def _configure_dino(network: Network) -> Fields:
    """Return the fields of the config: positions are resampled with antialiasing only in models with registers."""
    if "registers" in network.parts:
        return timm.configure(network) | _find_pooling(network)
    return _configure_mae(network) | {"position_interpolation_offset": 0.1} | _find_pooling(network)


DINO = replace(
    MAE,
    name="dino",
    recognizes=_recognizes_dino,
    names=_select_dino_names,
    configure=_configure_dino,
    rules_of=_select_rules,
)


def _select_dinov3_names(shapes: Shapes) -> KeyNames:
    """Return the names of the keys; a masked bias is one of query and value, as the key's mask is 0."""
    names = unwrap(shapes, timm.PATCHES, _DINOV3_IGNORED)
    is_masked = any(key.endswith(".attn.qkv.bias_mask") for key in shapes)
    names = rename_keys(names, {".attn.qkv.masked_bias": ".attn.qkv.bias"} if is_masked else {})
    return _with_linear_head(names, shapes)


def _configure_dinov3(network: Network) -> Fields:
    """Return the fields of the config; those that names and shapes do not show are the same in all released models."""
    dims, parts = network.dims, network.parts
    # No array shows the image size; models of DINOv3 take any number of whole patches.
    height, width = network.patches.sides
    default_size = 224 if 224 % height == 0 else 14 * height, 224 if 224 % width == 0 else 14 * width
    return (
        _find_pooling(network)
        | network.sizes(network.image_size or default_size)
        | {
            "num_attention_heads": dims["D"] // (4 * dims["F"]),
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
    )


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
        *dense("head", "LD", "classifier", "head"),  # that users put in place of the class's `head` without weights
    ),
    recognizes=make_recognizer(timm.PATCHES, ("",), r"(^|\.)rope_embed\.periods$"),
    names=_select_dinov3_names,
    configure=_configure_dinov3,
    declared=lambda companions, shapes: Declared(processor=IMAGENET_PIXELS),
    assumed={
        "layer_norm_eps": "eps 1e-5",
        "hidden_act": "the exact GELU (SiLU in a SwiGLU)",
        "processor": "ImageNet's mean and deviation, resized bicubically",
    },
    refused={
        r"cls_norm\..+": "a separate last norm for the class token",
        r"blocks\.\d+\.(attn|mlp)\.(q_norm|k_norm|fc[123]\.scale)(\..+)?": "normalized or scaled attention or MLP",
    },
    lacking={},
    foreign_heads={},
    package="Meta's dinov3",
)
