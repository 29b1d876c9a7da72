"""Define the origins of AIMv2 (arXiv 2411.14402): files of Apple's code and of timm."""

from dataclasses import replace

from hf_vit.conversion.origins import timm
from hf_vit.conversion.origins.beside import CLIP_PIXELS
from hf_vit.conversion.origins.origin import Declared, Fields, KeyRule, Network, Origin, dense, weights
from hf_vit.conversion.origins.wrapped import make_recognizer, rename_keys, unwrap
from hf_vit.conversion.readers import Companions, Shapes

_PATCHES = "preprocessor.patchifier.proj.weight"
_BLOCK, _TARGET = "trunk.blocks.{i}", "layers.{i}"


def _configure(network: Network) -> Fields:
    """Return the fields of the config; without a table, positions are sines and cosines for any image size."""
    dims, patches = network.dims, network.patches
    has_table = "table" in network.parts
    height, width = patches.sides
    size = network.image_size or (16 * height, 16 * width)
    return network.sizes(patches.find_table_size(dims["T"], network.image_size) if has_table else size) | {
        **({"num_attention_heads": dims["D"] // 128} if dims["D"] % 128 == 0 else {}),
        "mlp_type": "swiglu",
        "layer_norm_eps": 1e-5,
        "norm_type": "rmsnorm",
        "norm_on_patches": True,
        **dict.fromkeys(("qkv_bias", "projection_bias", "mlp_bias"), False),
        "pooling": "gap",
        "position_embedding": "learned" if has_table else "sincos_2d_mae",
        "position_interpolation": "bicubic",
    }


AIMV2 = Origin(
    name="aimv2",
    rules=(
        *dense("preprocessor.patchifier.proj", "DCPQ", "embeddings.patch_embeddings.projection"),
        *weights("preprocessor.patchifier.norm", "D", "embeddings.patch_layernorm"),
        KeyRule("preprocessor.pos_embed", "1TD", "keep", "embeddings.position_embeddings", "table"),
        *weights(f"{_BLOCK}.norm_1", "D", f"{_TARGET}.layernorm_before"),
        *weights(f"{_BLOCK}.attn.qkv", ("3D", "D"), f"{_TARGET}.attention.{{q,k,v}}_proj"),
        *weights(f"{_BLOCK}.attn.proj", "DD", f"{_TARGET}.attention.o_proj"),
        *weights(f"{_BLOCK}.norm_2", "D", f"{_TARGET}.layernorm_after"),
        *weights(f"{_BLOCK}.mlp.fc1", "MD", f"{_TARGET}.mlp.gate_proj"),
        *weights(f"{_BLOCK}.mlp.fc3", "MD", f"{_TARGET}.mlp.up_proj"),
        *weights(f"{_BLOCK}.mlp.fc2", "DM", f"{_TARGET}.mlp.down_proj"),
        *weights("trunk.post_trunk_norm", "D", "layernorm"),
    ),
    recognizes=make_recognizer(_PATCHES, ("",), r"(^|\.)trunk\.post_trunk_norm\.weight$"),
    names=lambda shapes: unwrap(shapes, _PATCHES, {}),
    configure=_configure,
    declared=lambda companions, shapes: Declared(processor=CLIP_PIXELS),
    assumed={
        "num_attention_heads": "heads of 128",
        "pooling": "the mean of the patches, as the file has no pooling",
        "processor": "CLIP's mean and deviation, resized bicubically",
    },
    foreign_heads={r"head\..+": "a head that pools by attention without an MLP"},
    package="apple/ml-aim",
)

# timm's AIMv2: the same network with the names of its ViT.

TIMM_MODULES = {
    "preprocessor.patchifier.": "patch_embed.",
    "preprocessor.pos_embed": "pos_embed",
    "trunk.blocks.": "blocks.",
    "trunk.post_trunk_norm.": "norm.",
}
TIMM_LAYERS = {".norm_1.": ".norm1.", ".norm_2.": ".norm2.", ".mlp.fc1.": ".mlp.fc1_g.", ".mlp.fc3.": ".mlp.fc1_x."}


def _read_timm_config(companions: Companions, shapes: Shapes) -> Declared:
    """Return the facts about arguments and preprocessing in timm's config.json."""
    config_file, _, arguments = timm.read_config_file(companions)
    fields = timm.convert_arguments({"global_pool": config_file.global_pool, **arguments}, ())
    return timm.declare(config_file, companions, {"position_embedding": "learned", **fields})


TIMM_AIMV2 = replace(
    AIMV2,
    name="timm_aimv2",
    rules=(*AIMV2.rules, *dense("head", "LD", "classifier", "head")),
    recognizes=make_recognizer(timm.PATCHES, ("",), r"(^|\.)patch_embed\.norm\.weight$"),
    names=lambda shapes: rename_keys(rename_keys(unwrap(shapes, timm.PATCHES, {}), TIMM_MODULES), TIMM_LAYERS),
    configure=lambda network: _configure(network) | {"position_interpolation": "bicubic_antialias"},
    declared=_read_timm_config,
    foreign_heads={},
    package="timm",
)
