"""What a source says of its pixels, as fields of `ViTImageProcessor`: from transformers' files and from timm's."""

import math
from collections.abc import Mapping
from typing import Any

from hf_vit.errors import UserError

# PIL's numbers, which transformers uses.
RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

_FIELDS = (
    "do_resize",
    "size",
    "resample",
    "do_center_crop",
    "crop_size",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
    "do_convert_rgb",
)
_COMMON = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True}
# Kind of processor, without the ending of its class -> what it does where its file is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {**_COMMON, "size": 224, "resample": 2},
    "DeiT": {
        **_COMMON,
        "size": 256,
        "resample": 3,
        "do_center_crop": True,
        "crop_size": 224,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
    },
    "ViTHybrid": {
        **_COMMON,
        "size": {"shortest_edge": 224},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": 224,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],  # CLIP's, which this class defaults to
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
}
_ENDINGS = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")


def from_transformers(processor: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a preprocessor_config.json, of today or of older versions.

    Raises:
        UserError: it is of another kind, whose steps are unknown here.
    """
    named = processor.get("image_processor_type") or processor.get("feature_extractor_type") or "ViTImageProcessor"
    kind = str(named)
    for ending in _ENDINGS:
        kind = kind.removesuffix(ending)
    if kind not in _DEFAULTS:
        raise UserError(
            f"preprocessor_config.json is of {named}, whose steps are unknown here; known are "
            + ", ".join(f"{name}ImageProcessor" for name in _DEFAULTS)
        )
    given = {name: processor[name] for name in _FIELDS if processor.get(name) is not None}
    fields = {**_DEFAULTS[kind], **given}
    if isinstance(fields["size"], int) and kind == "ViTHybrid":
        fields["size"] = {"shortest_edge": fields["size"]}
    for name in ("size", "crop_size"):
        if isinstance(fields.get(name), int):
            fields[name] = {"height": fields[name], "width": fields[name]}
    if not fields.get("do_center_crop"):
        fields.pop("crop_size", None)
    return fields


def from_timm(pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that give the pixels of timm's evaluation transform (timm/data/transforms_factory.py).

    Raises:
        UserError: the transform has a step that `ViTImageProcessor` does not have.
    """
    channels, height, width = pretrained.get("input_size", (3, 224, 224))
    mode, crop = pretrained.get("crop_mode") or "center", pretrained.get("crop_pct") or 0.875
    interpolation = str(pretrained.get("interpolation") or "bilinear")
    if mode not in ("center", "squash") or interpolation not in RESAMPLE or (mode == "center" and height != width):
        raise UserError(
            f"timm's preprocessing (crop_mode '{mode}', interpolation '{interpolation}', {height}x{width} px) has no "
            "counterpart in ViTImageProcessor"
        )
    scaled = math.floor(height / crop), math.floor(width / crop)
    return {
        "size": {"shortest_edge": scaled[0]} if mode == "center" else {"height": scaled[0], "width": scaled[1]},
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "resample": RESAMPLE[interpolation],
        "image_mean": list(pretrained.get("mean") or IMAGENET_MEAN),
        "image_std": list(pretrained.get("std") or IMAGENET_STD),
        "do_convert_rgb": channels == 3,
    }
