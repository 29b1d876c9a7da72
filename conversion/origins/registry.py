"""Find the origin of a checkpoint, or refuse it with the likely kind."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hf_vit.conversion.origins import aim, clip, deit, dino_mae, eva, google, timm, timm_eva, transformers
from hf_vit.conversion.origins.beside import DEFAULTS, IMAGE_TOWERS
from hf_vit.conversion.origins.origin import Origin
from hf_vit.conversion.readers import NO_COMPANIONS, Companions, Shapes
from hf_vit.errors import UserError

# The first that recognizes a file is its origin.
ORIGINS: tuple[Origin, ...] = (
    *google.ORIGINS,
    *(transformers.IJEPA, transformers.VIT, transformers.DEIT, transformers.VIT_HYBRID, transformers.BIT),
    *(clip.CLIP_CLASSIFIER, clip.CLIP, clip.SIGLIP2, clip.SIGLIP),
    *(transformers.DINOV2, transformers.DINOV3, transformers.AIMV2),
    *(eva.EVA, deit.VIT5, deit.DEIT, dino_mae.DINOV3, dino_mae.MAE, dino_mae.DINO),
    *(timm.VIT, timm.NAFLEX, timm.HYBRID, timm.MIXER, timm.BIT, timm_eva.EVA, aim.TIMM_AIMV2),
    *(clip.PERCEPTION_ENCODER, clip.OPEN_CLIP, aim.AIMV2),
)
# Values of `model_type` in transformers' config.json that convert.
TRANSFORMERS_TYPES = (*DEFAULTS, *IMAGE_TOWERS)
# Values of `model_type` that do not convert -> the feature that no model here has.
UNSUPPORTED_FEATURES = {
    **dict.fromkeys(("beit", "data2vec-vision"), "a bias of relative positions in every block"),
    **dict.fromkeys(("sam", "sam2", "sam_vision_model", "vitdet"), "attention in windows with relative positions"),
    **dict.fromkeys(("swin", "swinv2", "hiera"), "attention in windows on maps of several sizes"),
}
_STEM = r"(^|/)(conv_root|root_block|block\d+/unit\d+)/"
_NO_PATCHES = "whose patch embedding is missing"
MAX_PREFIXES = 100  # prefixes to try, the shortest first
# Kinds that do not convert -> regular expressions that all match some key. Messages name the first kind that fits.
UNSUPPORTED_KINDS = {
    "part of an MLP-Mixer (arXiv 2105.01601), whose stem is missing": (r"(^|/)MixerBlock_\d+/",),
    "a hybrid ViT (ResNet stem with a Transformer) of an unsupported code base": (_STEM, r"(^|/)Transformer/encoder"),
    "part of a BiT ResNet, whose root is missing": (_STEM,),
    "a text tower of big_vision, which is not a vision transformer": (r"(^|/)txt/",),
    f"part of a ViT of timm, {_NO_PATCHES}": (r"(^|\.)blocks\.\d+\.(attn\.qkv|norm1)\.",),
    f"part of a ViT of transformers, {_NO_PATCHES}": (
        r"(^|\.)(layer\.\d+\.attention\.attention\.query|layers\.\d+\.attention\.q_proj)\.",
    ),
}


def find_origin(shapes: Shapes, file_name: str, companions: Companions = NO_COMPANIONS) -> Origin:
    """Return the origin of a file with these keys.

    Raises:
        UserError: no origin recognizes the file; the message names the model in config.json, or the likely kind.
    """
    config = companions.config or {}
    architecture = config.get("architecture")
    _refuse_unknown_type(config.get("model_type"), file_name)
    if isinstance(architecture, str):
        timm_origin = _find_timm_origin(architecture.partition(".")[0], config, shapes)
        if timm_origin is not None:
            return timm_origin
    for origin in ORIGINS:
        if origin.recognizes(shapes):
            return origin
    known = r"(test_|flexi|naflex)?vit|deit|mixer|resnetv2_\d+x"
    if isinstance(architecture, str) and not re.match(known, architecture):
        raise UserError(
            f"config.json of {file_name} has the architecture '{architecture:.80}' of timm, which hf_vit "
            "cannot convert; use it with timm"
        )
    models = _find_models_below_prefixes(shapes)
    if models:
        places = " and ".join(f"'{prefix}'" for prefix in models)
        name = next(iter(models.values()))
        raise UserError(
            f"{file_name} has a model of {name} below the prefix {places}; select it with --prefix "
            f"{' or '.join(models)}"
        )
    examples = ", ".join(list(shapes)[:3])
    likely = guess_kind(shapes) or f"an unknown checkpoint with keys such as {examples}"
    origin_names = ", ".join(origin.name for origin in ORIGINS)
    raise UserError(f"{file_name} cannot be converted, as it looks like {likely}; supported formats: {origin_names}")


def _refuse_unknown_type(model_type: object, file_name: str) -> None:
    """Raise a UserError for a model_type of transformers that no origin converts."""
    if model_type is None or model_type in TRANSFORMERS_TYPES:
        return
    subject = f"config.json of {file_name} has model_type {model_type!r:.80}"
    if isinstance(model_type, str) and model_type in UNSUPPORTED_FEATURES:
        raise UserError(
            f"{subject}, a model with {UNSUPPORTED_FEATURES[model_type]}, which hf_vit does not support; use it "
            "with transformers"
        )
    raise UserError(f"{subject}, which hf_vit cannot convert; it converts {', '.join(TRANSFORMERS_TYPES)}")


def _find_timm_origin(name: str, config: Mapping[str, Any], shapes: Shapes) -> Origin | None:
    """Return the origin of a model of timm whose name shows more than its keys; None if the keys decide."""
    timm.refuse_foreign(name)
    if timm.has_rmsnorm(name, config) and timm.RMSNORM.recognizes(shapes):
        return timm.RMSNORM
    if timm_eva.has_architecture(name) and timm_eva.EVA.recognizes(shapes):
        return timm_eva.EVA  # some of these files have the keys of the original code
    if re.fullmatch(r"aimv2_\w+", name) and aim.TIMM_AIMV2.recognizes(shapes):
        return aim.TIMM_AIMV2
    return None


def _find_models_below_prefixes(shapes: Shapes) -> dict[str, str]:
    """Return prefix -> the origin of the model whose keys are below it; of nested prefixes, the shortest."""
    prefixes = {key[: match.end()] for key in shapes for match in re.finditer(r"[./]", key)}
    models: dict[str, str] = {}
    for prefix in sorted(prefixes, key=lambda prefix: (len(prefix), prefix))[:MAX_PREFIXES]:
        keys_below_prefix = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
        origin_name = next((origin.name for origin in ORIGINS if origin.recognizes(keys_below_prefix)), None)
        if origin_name is not None and not prefix.startswith(tuple(models)):
            models[prefix] = origin_name
    return models


def guess_kind(keys: Iterable[str]) -> str | None:
    """Return the first unsupported kind whose patterns all match some key; None if there is none."""
    key_list = list(keys)
    for name, patterns in UNSUPPORTED_KINDS.items():
        if all(any(re.search(pattern, key) for key in key_list) for pattern in patterns):
            return name
    return None
