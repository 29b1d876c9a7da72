"""Define the origin AIMv2 (arXiv 2411.14402): files of Apple's code."""

from hf_vit.conversion.origins.beside import CLIP_MEAN, CLIP_STD
from hf_vit.conversion.origins.origin import Declared, Fields, KeyRule, Network, Origin, dense, square_or_pair
from hf_vit.conversion.origins.wrapped import make_recognizer, unwrap

_PATCHES = "preprocessor.patchifier.proj.weight"
_BLOCK, _TARGET = "trunk.blocks.{i}", "layers.{i}"


def _configure(network: Network) -> Fields:
    """Return the fields of the config; without a table, positions are sines and cosines for any image size."""
    dims, patches = network.dims, network.patches
    has_table = "table" in network.parts
    height, width = patches.sides
    size = network.image_size or (16 * height, 16 * width)
    if has_table:
        size = patches.table_size(dims["T"], network.image_size)
    return {
        "image_size": square_or_pair(size),
        "patch_size": square_or_pair(patches.sides),
        "num_channels": dims["C"],
        "hidden_size": dims["D"],
        **({"num_attention_heads": dims["D"] // 128} if dims["D"] % 128 == 0 else {}),
        "intermediate_size": dims["M"],
        "mlp_type": "swiglu",
        "layer_norm_eps": 1e-5,
        "norm_type": "rmsnorm",
        "norm_on_patches": True,
        **dict.fromkeys(("qkv_bias", "projection_bias", "mlp_bias"), False),
        "pooling": "gap",
        "position_embedding": "learned" if has_table else "sincos_2d_mae",
        "position_interpolation": "bicubic",
    }


def _weight(key: str, axes: tuple[str, ...] | str, parameter: str) -> KeyRule:
    """Return the rule for a weight without a bias."""
    return KeyRule(f"{key}.weight", axes, "keep", f"{parameter}.weight")


AIMV2 = Origin(
    name="aimv2",
    rules=(
        *dense("preprocessor.patchifier.proj", "DCPQ", "embeddings.patch_embeddings.projection"),
        _weight("preprocessor.patchifier.norm", "D", "embeddings.patch_layernorm"),
        KeyRule("preprocessor.pos_embed", "1TD", "keep", "embeddings.position_embeddings", "table"),
        _weight(f"{_BLOCK}.norm_1", "D", f"{_TARGET}.layernorm_before"),
        _weight(f"{_BLOCK}.attn.qkv", ("3D", "D"), f"{_TARGET}.attention.{{q,k,v}}_proj"),
        _weight(f"{_BLOCK}.attn.proj", "DD", f"{_TARGET}.attention.o_proj"),
        _weight(f"{_BLOCK}.norm_2", "D", f"{_TARGET}.layernorm_after"),
        _weight(f"{_BLOCK}.mlp.fc1", "MD", f"{_TARGET}.mlp.gate_proj"),
        _weight(f"{_BLOCK}.mlp.fc3", "MD", f"{_TARGET}.mlp.up_proj"),
        _weight(f"{_BLOCK}.mlp.fc2", "DM", f"{_TARGET}.mlp.down_proj"),
        _weight("trunk.post_trunk_norm", "D", "layernorm"),
    ),
    block_pattern=r"trunk\.blocks\.(0|[1-9]\d*)\.",
    recognizes=make_recognizer(_PATCHES, ("",), r"(^|\.)trunk\.post_trunk_norm\.weight$"),
    names=lambda shapes: unwrap(shapes, _PATCHES, {}),
    configure=_configure,
    declared=lambda companions, shapes: Declared(
        processor={"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "resample": 3, "do_convert_rgb": True}
    ),
    assumed={
        "num_attention_heads": "heads of 128",
        "pooling": "the mean of the patches, as the file has no pooling",
        "processor": "CLIP's mean and deviation, resized bicubically",
    },
    foreign_heads={r"head\..+": "a head that pools by attention without an MLP"},
    package="apple/ml-aim",
)
