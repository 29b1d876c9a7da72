"""Which kind of checkpoint a file is: an origin that can be converted, or a refusal that names the likely kind."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hf_vit.conversion.origins.google import big_vision, bit, bit_paper, mixer, vit_jax, vit_jax_hybrid
from hf_vit.conversion.origins.origin import Origin
from hf_vit.conversion.origins.pytorch import (
    dino,
    mae,
    open_clip,
    timm_architectures,
    timm_hybrid,
    timm_mixer,
    timm_vit,
)
from hf_vit.conversion.origins.transformers import (
    transformers_clip,
    transformers_clip_classifier,
    transformers_deit,
    transformers_dinov2,
    transformers_siglip,
    transformers_vit,
    transformers_vit_hybrid,
)
from hf_vit.conversion.origins.transformers.configs import DEFAULTS, IMAGE_TOWERS
from hf_vit.conversion.readers.checkpoint import NOTHING_BESIDE, Companions, Shape
from hf_vit.errors import UserError

ORIGINS: tuple[Origin, ...] = (
    vit_jax.ORIGIN,
    vit_jax_hybrid.ORIGIN,
    big_vision.ORIGIN,
    bit.ORIGIN,
    bit_paper.ORIGIN,
    mixer.ORIGIN,
    transformers_vit.ORIGIN,
    transformers_deit.ORIGIN,
    transformers_vit_hybrid.ORIGIN,
    transformers_clip_classifier.ORIGIN,
    transformers_clip.ORIGIN,
    transformers_siglip.ORIGIN,
    transformers_dinov2.ORIGIN,
    mae.ORIGIN,
    dino.ORIGIN,
    timm_vit.ORIGIN,
    timm_hybrid.ORIGIN,
    timm_mixer.ORIGIN,
    open_clip.ORIGIN,
)

_STEM = r"(^|/)(conv_root|root_block|block\d+/unit\d+)/"
_TRANSFORMER = r"(^|/)Transformer/encoder"


# As config.json says it.
TRANSFORMERS_TYPES = (*DEFAULTS, *IMAGE_TOWERS)
# Of transformers' models that people bring, what no model here has.
NOT_HERE = {
    **dict.fromkeys(("beit", "data2vec-vision"), "a bias of relative positions in every block"),
    **dict.fromkeys(("dinov3_vit", "eva02", "pe_vision"), "rotary positions (RoPE)"),
    **dict.fromkeys(("sam", "sam2", "sam_vision_model", "vitdet"), "attention in windows with relative positions"),
    **dict.fromkeys(("swin", "swinv2", "hiera"), "attention in windows on maps of several sizes"),
    **dict.fromkeys(("siglip2", "siglip2_vision_model"), "patches of many grids in one sequence (NaFlex)"),
}


@dataclass(frozen=True)
class Stranger:
    """A kind of checkpoint that is known by its keys but not converted.

    Attributes:
        name: what a message calls it.
        marks: regular expressions; each must be found in some key.
    """

    name: str
    marks: tuple[str, ...]


# The first that fits is named.
STRANGERS = (
    Stranger("part of an MLP-Mixer (arXiv 2105.01601), whose stem is missing", (r"(^|/)MixerBlock_\d+/",)),
    Stranger("a hybrid ViT of another code (ResNet stem, Transformer), which is not supported", (_STEM, _TRANSFORMER)),
    Stranger("part of a BiT ResNet, whose root is missing", (_STEM,)),
    Stranger("a text tower of big_vision, which is no vision transformer", (r"(^|/)txt/",)),
    Stranger(
        "part of a ViT of timm, whose patch embedding is missing or lies below another prefix (--prefix)",
        (r"(^|\.)blocks\.\d+\.(attn\.qkv|norm1)\.",),
    ),
    Stranger(
        "part of a ViT of transformers, whose patch embedding is missing or lies below another prefix (--prefix)",
        (r"(^|\.)(layer\.\d+\.attention\.attention\.query|layers\.\d+\.attention\.q_proj)\.",),
    ),
)


def find_origin(shapes: Mapping[str, Shape], file_name: str, companions: Companions = NOTHING_BESIDE) -> Origin:
    """The origin of a file with these keys.

    Raises:
        UserError: no origin recognises it; the message names the model that config.json names, or the likely kind.
    """
    kind = (companions.config or {}).get("model_type")
    if kind is not None and kind not in TRANSFORMERS_TYPES:
        known = ", ".join(TRANSFORMERS_TYPES)
        if isinstance(kind, str) and kind in NOT_HERE:
            raise UserError(
                f"config.json of {file_name} says model_type {kind!r}, which has {NOT_HERE[kind]}; no model here does, "
                "so use it with transformers itself"
            )
        says = f"config.json of {file_name} says model_type {kind!r:.80}"
        raise UserError(f"{says}; of transformers' models {known} convert")
    architecture = (companions.config or {}).get("architecture")
    if isinstance(architecture, str):  # of timm: its name tells more than its keys
        timm_architectures.refuse_foreign(architecture.partition(".")[0])
    for origin in ORIGINS:
        if origin.recognises(shapes):
            return origin
    examples = ", ".join(list(shapes)[:3])
    kind = likely_kind(shapes) or f"no checkpoint that is known here (it holds {examples}, ...)"
    known = ", ".join(origin.name for origin in ORIGINS)
    raise UserError(f"{file_name} looks like {kind}; hf-vit convert reads files of {known}")


def likely_kind(keys: Iterable[str]) -> str | None:
    """Name of the first stranger all of whose marks are found among the keys."""
    known = list(keys)
    for stranger in STRANGERS:
        if all(any(re.search(mark, key) for key in known) for mark in stranger.marks):
            return stranger.name
    return None
