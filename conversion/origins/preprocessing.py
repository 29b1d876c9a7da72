"""What a source says of its pixels, as fields of `ViTImageProcessor`: from transformers' files and from timm's."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from hf_vit.conversion.origins.beside import Count, Number, Positive, Text, checked, pair_of
from hf_vit.errors import UserError

# PIL's numbers, which transformers uses.
RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

# What Google's code makes, and most others.
ORIGINAL_PIXELS = "pixels in [-1, 1], resized bilinearly"

_Size = Count | dict[str, Count]


class TransformersPixels(BaseModel):
    """The fields of a preprocessor_config.json that `ViTImageProcessor` has too."""

    do_resize: bool | None = None
    size: _Size | None = None
    resample: Annotated[int, Field(ge=0, le=5)] | None = None
    do_center_crop: bool | None = None
    crop_size: _Size | None = None
    do_rescale: bool | None = None
    rescale_factor: Positive | None = None
    do_normalize: bool | None = None
    image_mean: list[Number] | None = None
    image_std: list[Positive] | None = None
    do_convert_rgb: bool | None = None
    do_pad: bool | None = None


class TimmPixels(BaseModel):
    """The fields of timm's pretrained_cfg that decide about pixels."""

    input_size: Annotated[list[Count], Field(min_length=3, max_length=3)] = [3, 224, 224]
    fixed_input_size: bool | None = None
    crop_mode: str | None = None
    crop_pct: Positive | None = None
    interpolation: str | None = None
    mean: Annotated[list[Number], Field(min_length=1)] | None = None
    std: Annotated[list[Positive], Field(min_length=1)] | None = None
    label_names: list[Text] | None = None


CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_COMMON = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True}
_CROPPED = {"resample": 3, "do_center_crop": True, "do_convert_rgb": True}
_CLIP = {**_CROPPED, "size": {"shortest_edge": 224}, "crop_size": 224, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
# Kind of processor, without the ending of its class -> what it does where its file is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {**_COMMON, "size": 224, "resample": 2},
    "DeiT": {**_COMMON, **_CROPPED, "size": 256, "crop_size": 224},
    **dict.fromkeys(("ViTHybrid", "CLIP", "Bit"), _CLIP),  # CLIP's constants in all three
    "Siglip": {**_COMMON, "size": {"height": 224, "width": 224}, "resample": 3},
}
_BY_SHORTEST_EDGE = ("ViTHybrid", "CLIP", "Bit", "Siglip")  # what a size of one number means to them
_ENDINGS = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")


def from_transformers(processor: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a preprocessor_config.json, of today or of older versions.

    Raises:
        UserError: it is of another kind, whose steps are unknown here, or pads.
    """
    names = (processor.get(field) for field in ("image_processor_type", "feature_extractor_type"))
    named = next((name for name in names if name is not None), None)
    kind = "ViT" if named is None else str(named)
    for ending in _ENDINGS:
        kind = kind.removesuffix(ending)
    if kind not in _DEFAULTS:
        raise UserError(
            f"preprocessor_config.json is of {named!s:.80}, whose steps are unknown here; known are "
            + ", ".join(f"{name}ImageProcessor" for name in _DEFAULTS)
        )
    given = checked(TransformersPixels, processor, "preprocessor_config.json").model_dump(exclude_none=True)
    if given.pop("do_pad", False):
        raise UserError(
            "preprocessor_config.json gives do_pad=true, and no processor here pads images; set it to false there"
        )
    if not given and named is None:
        raise UserError("preprocessor_config.json says nothing of the pixels; get the file again, or leave it out")
    fields = {**_DEFAULTS[kind], **given}
    if isinstance(fields["size"], int) and kind in _BY_SHORTEST_EDGE:
        fields["size"] = {"shortest_edge": fields["size"]}
    for name in ("size", "crop_size"):
        if isinstance(fields.get(name), int):
            fields[name] = {"height": fields[name], "width": fields[name]}
    if not fields.get("do_center_crop"):
        fields.pop("crop_size", None)
    return fields


def from_timm(pretrained: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that give the pixels of timm's evaluation transform (timm/data/transforms_factory.py).

    Args:
        pretrained: timm's pretrained_cfg.
        arguments: the model's (`model_args`). Their img_size is that of the pixels where the model takes no other.

    Raises:
        UserError: the transform has a step that `ViTImageProcessor` does not have, or a value is of another kind.
    """
    pixels = checked(TimmPixels, pretrained, "config.json")
    channels, height, width = pixels.input_size
    takes_others = arguments.get("dynamic_img_size") or arguments.get("strict_img_size") is False
    if pixels.fixed_input_size and not takes_others and arguments.get("img_size") is not None:
        height, width = pair_of(arguments["img_size"])
    mode, crop, interpolation = (
        pixels.crop_mode or "center",
        pixels.crop_pct or 0.875,
        pixels.interpolation or "bicubic",
    )
    if mode not in ("center", "squash") or interpolation not in RESAMPLE or (mode == "center" and height != width):
        raise UserError(
            f"timm's preprocessing (crop_mode '{mode:.80}', interpolation '{interpolation:.80}', {height}x{width} px) "
            "has no counterpart in ViTImageProcessor"
        )
    scaled = math.floor(height / crop), math.floor(width / crop)
    return {
        "size": {"shortest_edge": scaled[0]} if mode == "center" else {"height": scaled[0], "width": scaled[1]},
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "resample": RESAMPLE[interpolation],
        "image_mean": pixels.mean or IMAGENET_MEAN,
        "image_std": pixels.std or IMAGENET_STD,
        "do_convert_rgb": channels == 3,
    }
