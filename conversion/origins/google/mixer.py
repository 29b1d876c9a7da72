"""MLP-Mixers of Google's vision_transformer (vit_jax/models_mixer.py): arXiv 2105.01601, and SAM's (2106.01548)."""

from collections.abc import Mapping
from typing import Any

from hf_vit.conversion.origins.google import vit_jax
from hf_vit.conversion.origins.google.bit import only_prefix
from hf_vit.conversion.origins.origin import Dims, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.preprocessing import ORIGINAL_PIXELS
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import Pair, Patches, square_or_pair, table_size

_STEM = "stem/kernel"
_BLOCK = "MixerBlock_{i}"

RULES = (
    KeyRule(_STEM, "PQCD", "conv", "embeddings.patch_embeddings.projection.weight"),
    KeyRule("stem/bias", "D", "keep", "embeddings.patch_embeddings.projection.bias"),
    KeyRule(f"{_BLOCK}/LayerNorm_0/scale", "D", "keep", "layers.{i}.layernorm_before.weight"),
    KeyRule(f"{_BLOCK}/LayerNorm_0/bias", "D", "keep", "layers.{i}.layernorm_before.bias"),
    KeyRule(f"{_BLOCK}/token_mixing/Dense_0/kernel", "TS", "transpose", "layers.{i}.token_mlp.fc1.weight"),
    KeyRule(f"{_BLOCK}/token_mixing/Dense_0/bias", "S", "keep", "layers.{i}.token_mlp.fc1.bias"),
    KeyRule(f"{_BLOCK}/token_mixing/Dense_1/kernel", "ST", "transpose", "layers.{i}.token_mlp.fc2.weight"),
    KeyRule(f"{_BLOCK}/token_mixing/Dense_1/bias", "T", "keep", "layers.{i}.token_mlp.fc2.bias"),
    KeyRule(f"{_BLOCK}/LayerNorm_1/scale", "D", "keep", "layers.{i}.layernorm_after.weight"),
    KeyRule(f"{_BLOCK}/LayerNorm_1/bias", "D", "keep", "layers.{i}.layernorm_after.bias"),
    KeyRule(f"{_BLOCK}/channel_mixing/Dense_0/kernel", "DM", "transpose", "layers.{i}.mlp.fc1.weight"),
    KeyRule(f"{_BLOCK}/channel_mixing/Dense_0/bias", "M", "keep", "layers.{i}.mlp.fc1.bias"),
    KeyRule(f"{_BLOCK}/channel_mixing/Dense_1/kernel", "MD", "transpose", "layers.{i}.mlp.fc2.weight"),
    KeyRule(f"{_BLOCK}/channel_mixing/Dense_1/bias", "D", "keep", "layers.{i}.mlp.fc2.bias"),
    KeyRule("pre_head_layer_norm/scale", "D", "keep", "layernorm.weight"),
    KeyRule("pre_head_layer_norm/bias", "D", "keep", "layernorm.bias"),
    KeyRule("head/kernel", "DL", "transpose", "classifier.weight", part="head"),
    KeyRule("head/bias", "L", "keep", "classifier.bias", part="head"),
)

LEGEND = {
    "P, Q": "height and width of a patch in px",
    "C": "channels",
    "D": "hidden size",
    "T": "tokens, one a patch of the grid row by row",
    "S": "width of the token MLP",
    "M": "width of the channel MLP",
    "L": "labels",
}


def recognises(shapes: Mapping[str, Shape]) -> bool:
    """A stem before blocks that mix tokens."""
    stem = any(f"{prefix}{_STEM}" in shapes for prefix in vit_jax.PREFIXES)
    return stem and any("/token_mixing/" in key for key in shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """Strip the prefix and sort out what is no weight."""
    prefix = only_prefix(shapes, _STEM, "MLP-Mixers")
    weights, ignored = vit_jax.sorted_out(shapes, prefix, vit_jax.IGNORED)
    return KeyNames(weights, ignored, lambda name: prefix + name)


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfMixerConfig`; tanh GELU and eps 1e-6 are constants of the original code (Flax's defaults)."""
    patches = Patches((dims["P"], dims["Q"]))
    return {
        "image_size": square_or_pair(table_size(dims["T"], patches, image_size, "token MLP")),
        "patch_size": square_or_pair(patches.sides),
        "num_channels": dims["C"],
        "hidden_size": dims["D"],
        "token_intermediate_size": dims["S"],
        "intermediate_size": dims["M"],
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }


ORIGIN = Origin(
    name="mixer",
    title="MLP-Mixers of Google's vision_transformer (vit_jax) .npz: ImageNet-1k, ImageNet-21k and SAM files",
    legend=LEGEND,
    rules=RULES,
    block_pattern=r"MixerBlock_(0|[1-9]\d*)/",
    without={},
    ignored=vit_jax.IGNORED,
    recognises=recognises,
    names=names,
    configure=configure,
    family="mixer",
    assumed={"processor": ORIGINAL_PIXELS},
    notes=(
        "Becomes an `HfMixerForImageClassification`; `head` may be missing.",
        "Prefixes that are taken off: " + ", ".join(f"`{prefix}`" for prefix in vit_jax.PREFIXES if prefix) + ".",
        "The token MLP tells the number of patches; a grid that is no square is declared by `--image-size`.",
    ),
)
