"""List the papers' named sizes, and build their configurations by name.

Sources: B, L, H: arXiv 2010.11929, table 1; Ti, S: arXiv 2106.10270; So400m, g, G, e: arXiv 2106.04560, 2305.13035
and 2209.06794 with the numbers of the original code's table. Hybrids: 2010.11929 section 3.1 and table 6, 2106.10270.
Local: 2010.11929's sizes.
BiT: 1912.11370; R50x2 as 2010.11929, table 6. AxialResNet: 2003.07853, section 4. Mixer: 2105.01601, table 1.
DINOv3: 2508.10104 and `dinov3/hub/backbones.py`; EVA-02: 2303.11331; PE core: 2504.13181 and its code's `config.py`;
ViT-5: 2602.08071 and its code's `models_vit5.py`.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from hf_vit.errors import UserError
from hf_vit.families import FAMILIES
from hf_vit.models.configuration_hf_vit import HfBaseConfig


@dataclass(frozen=True)
class Variant:
    """A named size: depth, width D, MLP width, heads, and the published patch sides in px."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    patches: tuple[int, ...]


VARIANTS: dict[str, Variant] = {
    "Ti": Variant(12, 192, 768, 3, (16,)),
    "S": Variant(12, 384, 1536, 6, (32, 16)),
    "B": Variant(12, 768, 3072, 12, (32, 16, 8)),
    "L": Variant(24, 1024, 4096, 16, (32, 16)),
    "H": Variant(32, 1280, 5120, 16, (14,)),
    "So400m": Variant(27, 1152, 4304, 16, (14,)),
    "g": Variant(40, 1408, 6144, 16, (14,)),
    "G": Variant(48, 1664, 8192, 16, (14,)),
    "e": Variant(56, 1792, 15360, 16, (14,)),
}

# Name -> (size, stage depths, side of the feature map's patches in cells). The stride of "R+Ti/16" is 32 px.
HYBRIDS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "R+Ti/16": ("Ti", (), 8),
    "R26+S/32": ("S", (2, 2, 2, 2), 1),
    "R26+B/32": ("B", (2, 2, 2, 2), 1),
    "R50+B/16": ("B", (3, 4, 9), 1),
    "R50+L/32": ("L", (3, 4, 6, 3), 1),
    "R50+L/16": ("L", (3, 4, 9), 1),
}

AXIAL_SIZES = ("Ti", "S", "B")  # B is published (2010.11929, appendix D.6); the smaller sizes are the package's
AXIAL_PATCHES = (32, 16)

LOCAL_SIZES = ("Ti", "S", "B")  # the package's: the plain sizes with attention in a window of 7 (1906.05909)
LOCAL_PATCHES = (16, 8)

# Name -> (family, stage depths, channels of the root).
RESNETS: dict[str, tuple[str, tuple[int, ...], int]] = {
    **{
        f"AxialResNet-{size}": ("axial_resnet", (3, 4, 6, 3), width)
        for size, width in (("S", 32), ("M", 48), ("L", 64))
    },
    **{f"BiT-R50x{factor}": ("bit", (3, 4, 6, 3), 64 * factor) for factor in (1, 2, 3)},
    **{f"BiT-R101x{factor}": ("bit", (3, 4, 23, 3), 64 * factor) for factor in (1, 3)},
    **{f"BiT-R152x{factor}": ("bit", (3, 8, 36, 3), 64 * factor) for factor in (2, 4)},
}

# Size -> layers, width C, widths of the token MLP (D_S) and of the channel MLP (D_C), and the published patches in px.
MIXERS: dict[str, tuple[int, int, int, int, tuple[int, ...]]] = {
    "Mixer-S": (8, 512, 256, 2048, (32, 16)),
    "Mixer-B": (12, 768, 384, 3072, (32, 16)),
    "Mixer-L": (24, 1024, 512, 4096, (32, 16)),
    "Mixer-H": (32, 1280, 640, 5120, (14,)),
}

# The fields in which rotary models differ from a plain ViT: those of their converted checkpoints.
_IMAGENET_PIXELS = {"image_mean": IMAGENET_DEFAULT_MEAN, "image_std": IMAGENET_DEFAULT_STD}
_DINOV3 = {
    **_IMAGENET_PIXELS,
    **{
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "key_bias": False,
        "layer_scale_init_value": 1e-5,
        "num_register_tokens": 4,
    },
    **{"position_embedding": "none", "rotary_embedding": "axial", "rotary_coordinates": "centered"},
    **{"rotary_pairing": "halves", "rotary_rescale": 2.0},
}
_DINOV3_SWIGLU = _DINOV3 | {"mlp_type": "swiglu"}
_EVA02 = {
    **{"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD, "hidden_act": "gelu"},
    **{"mlp_type": "swiglu", "key_bias": False, "pooling": "gap", "use_class_token": True, "norm_after_pooling": True},
    **{"position_interpolation": "bicubic", "rotary_embedding": "axial", "rotary_base": 10_000.0},
    **{"rotary_reference_grid": 16},
}
_EVA02_NORM = _EVA02 | {"norm_in_mlp": True}
_PE = {
    **{"hidden_act": "gelu", "layer_norm_eps": 1e-5, "norm_before_layers": True, "use_class_token": True},
    **{"pooling": "map", "pooling_num_heads": 8, "norm_after_pooling": False, "position_interpolation": "bilinear"},
    **{"rotary_embedding": "axial", "rotary_base": 10_000.0, "rotary_offset": 1, "rotary_axis_order": "column_row"},
}
_VIT5 = {
    **_IMAGENET_PIXELS,
    **{
        "hidden_act": "gelu",
        "qkv_bias": False,
        "norm_type": "rmsnorm",
        "use_qk_norm": True,
        "layer_scale_init_value": 1e-4,
    },
    **{"num_register_tokens": 4, "position_on_class_token": False, "position_interpolation": "bicubic"},
    **{"rotary_embedding": "axial", "rotary_base": 10_000.0, "rotary_register_base": 100.0},
}

# Name -> (size, other fields).
ROTARY: dict[str, tuple[Variant, dict[str, Any]]] = {
    "DINOv3-S": (Variant(12, 384, 1536, 6, (16,)), _DINOV3),
    "DINOv3-S+": (Variant(12, 384, 1536, 6, (16,)), _DINOV3_SWIGLU),
    "DINOv3-B": (Variant(12, 768, 3072, 12, (16,)), _DINOV3),
    "DINOv3-L": (Variant(24, 1024, 4096, 16, (16,)), _DINOV3),
    "DINOv3-H+": (Variant(32, 1280, 5120, 20, (16,)), _DINOV3_SWIGLU),
    "DINOv3-7B": (Variant(40, 4096, 8192, 32, (16,)), _DINOV3_SWIGLU | {"qkv_bias": False, "key_bias": True}),
    "EVA-02-Ti": (Variant(12, 192, 512, 3, (14,)), _EVA02),
    "EVA-02-S": (Variant(12, 384, 1024, 6, (14,)), _EVA02),
    "EVA-02-B": (Variant(12, 768, 2048, 12, (14,)), _EVA02_NORM),
    "EVA-02-L": (Variant(24, 1024, 2730, 16, (14,)), _EVA02_NORM),
    "PE-core-B": (Variant(12, 768, 3072, 12, (16,)), _PE | {"pooling_intermediate_size": 3072}),
    "PE-core-L": (Variant(24, 1024, 4096, 16, (14,)), _PE | {"image_size": 336, "pooling_intermediate_size": 4096}),
    "PE-core-G": (
        Variant(50, 1536, 8960, 16, (14,)),
        _PE | {"image_size": 448, "pooling_intermediate_size": 6144, "use_class_token": False, "rotary_offset": 0},
    ),
    **{f"ViT-5-{size}": (replace(VARIANTS[size], patches=(16,)), _VIT5) for size in ("S", "B", "L")},
}


def list_variant_names() -> list[str]:
    """Return the names of all variants, plain ones first."""

    def combine(patches_of_size: Mapping[str, Sequence[int]], prefix: str = "") -> list[str]:
        return [f"{prefix}{size}/{patch}" for size, patches in patches_of_size.items() for patch in patches]

    return [
        *combine({size: variant.patches for size, variant in VARIANTS.items()}),
        *HYBRIDS,
        *combine(dict.fromkeys(AXIAL_SIZES, AXIAL_PATCHES), "Axial-"),
        *combine(dict.fromkeys(LOCAL_SIZES, LOCAL_PATCHES), "Local-"),
        *RESNETS,
        *combine({size: patches for size, (*_, patches) in MIXERS.items()}),
        *combine({size: variant.patches for size, (variant, _) in ROTARY.items()}),
    ]


def looks_like_variant(name: str) -> bool:
    """Return whether a name looks like a variant's, valid or not, and not like a repository of the Hub."""
    return "/" not in name or re.fullmatch(r"[^/\\.]+/\d+", name) is not None


def variant_config(name: str, **overrides: Any) -> HfBaseConfig:
    """Return the configuration of a variant, such as "B/16", "R50+B/16", "Axial-B/32", "DINOv3-B/16" or "BiT-R50x1".

    Plain, axial, local and rotary variants and Mixers take any patch side in px ("Ti/4"); `overrides` sets any field.

    Raises:
        UserError: there is no such variant; the message names the most similar ones.
    """
    if name in HYBRIDS:
        size, stage_depths, stem_patch_size = HYBRIDS[name]
        stem: dict[str, Any] = {"stage_depths": stage_depths, "stem_patch_size": stem_patch_size}
        return _build_config("hybrid", {**_make_width_fields(VARIANTS[size]), **stem, **overrides})
    if name in RESNETS:
        family, stage_depths, stem_width = RESNETS[name]
        return _build_config(family, {"stage_depths": stage_depths, "stem_width": stem_width, **overrides})
    size, _, patch = name.partition("/")
    if size in MIXERS and patch.isdecimal():
        layers, width, tokens, channels, _ = MIXERS[size]
        widths = {"hidden_size": width, "token_intermediate_size": tokens, "intermediate_size": channels}
        return _build_config("mixer", {"num_hidden_layers": layers, **widths, "patch_size": int(patch), **overrides})
    if size in ROTARY and patch.isdecimal():
        variant, fields = ROTARY[size]
        return _build_config("plain", {**_make_width_fields(variant), **fields, "patch_size": int(patch), **overrides})
    match = re.fullmatch(r"(?:ViT-)?(Axial-|Local-)?([A-Za-z0-9]+)/(\d+)", name)
    if match is None or match[2] not in VARIANTS:
        suggestions = difflib.get_close_matches(name, list_variant_names(), n=3, cutoff=0.3) or list_variant_names()
        raise UserError(
            f"the variant '{name}' is unknown; give one of the form SIZE/PATCH, such as {', '.join(suggestions)}"
        )
    fields = {**_make_width_fields(VARIANTS[match[2]]), "patch_size": int(match[3]), **overrides}
    return _build_config({"Axial-": "axial", "Local-": "local"}.get(match[1], "plain"), fields)


def _build_config(family: str, fields: dict[str, Any]) -> HfBaseConfig:
    """Build a family's configuration from fields."""
    config_class: Any = FAMILIES[family].config_class
    return config_class(**fields)


def _make_width_fields(variant: Variant) -> dict[str, Any]:
    """Return the fields of a size: depth, widths and number of heads."""
    return {
        "num_hidden_layers": variant.num_hidden_layers,
        "hidden_size": variant.hidden_size,
        "intermediate_size": variant.intermediate_size,
        "num_attention_heads": variant.num_attention_heads,
    }
