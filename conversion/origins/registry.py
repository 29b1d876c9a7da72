"""Which kind of checkpoint a file is: an origin that can be converted, or a refusal that names the likely kind."""

import re
from collections.abc import Iterable

from hf_vit.conversion.origins import aim, clip, deit, dino_mae, eva, google, timm, transformers
from hf_vit.conversion.origins.beside import DEFAULTS, IMAGE_TOWERS
from hf_vit.conversion.origins.origin import Origin
from hf_vit.conversion.readers import NOTHING_BESIDE, Companions, Shapes
from hf_vit.errors import UserError

# The first that recognises a file is its origin.
ORIGINS: tuple[Origin, ...] = (
    *google.ORIGINS,
    *(transformers.VIT, transformers.DEIT, transformers.VIT_HYBRID, transformers.BIT),
    *(clip.CLIP_CLASSIFIER, clip.CLIP, clip.SIGLIP),
    transformers.DINOV2,
    *(eva.EVA, deit.VIT5, deit.DEIT, dino_mae.DINOV3, dino_mae.MAE, dino_mae.DINO),
    *(timm.VIT, timm.HYBRID, timm.MIXER, timm.BIT),
    *(clip.PERCEPTION_ENCODER, clip.OPEN_CLIP, aim.AIMV2),
)
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
_STEM = r"(^|/)(conv_root|root_block|block\d+/unit\d+)/"
_ELSEWHERE = "whose patch embedding is missing"
MAX_PREFIXES = 100  # that are tried, the shortest first
# What is known by its keys but not converted -> regular expressions, each of which is found in some key. The first that
# fits is named.
STRANGERS = {
    "part of an MLP-Mixer (arXiv 2105.01601), whose stem is missing": (r"(^|/)MixerBlock_\d+/",),
    "a hybrid ViT of an unsupported code base (ResNet stem, Transformer)": (
        _STEM,
        r"(^|/)Transformer/encoder",
    ),
    "part of a BiT ResNet, whose root is missing": (_STEM,),
    "a text tower of big_vision, which is not a vision transformer": (r"(^|/)txt/",),
    f"part of a ViT of timm, {_ELSEWHERE}": (r"(^|\.)blocks\.\d+\.(attn\.qkv|norm1)\.",),
    f"part of a ViT of transformers, {_ELSEWHERE}": (
        r"(^|\.)(layer\.\d+\.attention\.attention\.query|layers\.\d+\.attention\.q_proj)\.",
    ),
}


def find_origin(shapes: Shapes, file_name: str, companions: Companions = NOTHING_BESIDE) -> Origin:
    """Return the origin of a file with these keys.

    Raises:
        UserError: no origin recognises it; the message names the model that config.json names, or the likely kind.
    """
    config = companions.config or {}
    kind, architecture = config.get("model_type"), config.get("architecture")
    if kind is not None and kind not in TRANSFORMERS_TYPES:
        says = f"config.json of {file_name} says model_type {kind!r:.80}"
        if isinstance(kind, str) and kind in NOT_HERE:
            raise UserError(f"{says}, which has {NOT_HERE[kind]}; no hf_vit model does; use it with transformers")
        raise UserError(f"{says}; of transformers' models {', '.join(TRANSFORMERS_TYPES)} convert")
    if isinstance(architecture, str):  # of timm: its name tells more than its keys
        timm.refuse_foreign(architecture.partition(".")[0])
    for origin in ORIGINS:
        if origin.recognises(shapes):
            return origin
    if isinstance(architecture, str) and not re.match(r"(test_|flexi)?vit|deit|mixer|resnetv2_\d+x", architecture):
        raise UserError(
            f"timm's '{architecture:.80}' is of an architecture that hf_vit does not support; use it with timm"
        )
    ends = {key[: match.end()] for key in shapes for match in re.finditer(r"[./]", key)}
    for prefix in sorted(ends, key=len)[:MAX_PREFIXES]:
        inside = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
        if below := next((origin.name for origin in ORIGINS if origin.recognises(inside)), None):
            raise UserError(f"{file_name} holds a model of {below} below '{prefix}'; declare it by --prefix {prefix}")
    examples = ", ".join(list(shapes)[:3])
    likely = likely_kind(shapes) or f"an unknown checkpoint (it holds {examples}, ...)"
    known = ", ".join(origin.name for origin in ORIGINS)
    raise UserError(f"{file_name} looks like {likely}; hf-vit convert reads files of {known}")


def likely_kind(keys: Iterable[str]) -> str | None:
    """Return the name of the first stranger all of whose marks are found among the keys."""
    known = list(keys)
    for name, marks in STRANGERS.items():
        if all(any(re.search(mark, key) for key in known) for mark in marks):
            return name
    return None
