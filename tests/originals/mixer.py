"""Small MLP-Mixers in vit_jax's layout, and of timm."""

from typing import Any

import numpy as np
from originals.pytorch import randomise
from timm.models.mlp_mixer import _create_mixer
from torch import nn

Arrays = dict[str, np.ndarray]


def make_mixer(
    depth: int = 2,
    width: int = 6,
    tokens: int = 3,
    channels: int = 5,
    patch: tuple[int, int] = (4, 2),
    grid: tuple[int, int] = (2, 2),
    labels: int | None = 7,
    prefix: str = "",
) -> Arrays:
    """Random weights as vit_jax's models_mixer.py names them; `tokens` and `channels` are the widths of the MLPs."""
    rng, patches = np.random.default_rng(0), grid[0] * grid[1]
    shapes: dict[str, tuple[int, ...]] = {"stem/kernel": (*patch, 3, width), "stem/bias": (width,)}
    for block in range(depth):
        for mixing, outer, inner in (("token_mixing", patches, tokens), ("channel_mixing", width, channels)):
            at = f"MixerBlock_{block}/{mixing}"
            shapes |= {f"{at}/Dense_0/kernel": (outer, inner), f"{at}/Dense_0/bias": (inner,)}
            shapes |= {f"{at}/Dense_1/kernel": (inner, outer), f"{at}/Dense_1/bias": (outer,)}
        for norm in (0, 1):
            shapes |= {f"MixerBlock_{block}/LayerNorm_{norm}/{name}": (width,) for name in ("scale", "bias")}
    shapes |= {f"pre_head_layer_norm/{name}": (width,) for name in ("scale", "bias")}
    if labels is not None:
        shapes |= {"head/kernel": (width, labels), "head/bias": (labels,)}
    return {
        prefix + key: (rng.normal(0, 0.3, shape) + key.endswith("scale")).astype(np.float32)
        for key, shape in shapes.items()
    }


def mixer_of_timm(name: str = "mixer_b16_224", **arguments: Any) -> nn.Module:
    """One of timm's, small unless `arguments` say otherwise."""
    small = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "num_blocks": 2, "num_classes": 5}
    return randomise(_create_mixer(name, **{**small, **arguments}))
