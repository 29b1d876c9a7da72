"""Encoders of masked autoencoders (MAE, arXiv 2111.06377), in the files of its own code: the decoder is left out.

An encoder that stands alone has the names of timm and is one of `timm_vit.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_vit.conversion.origins.origin import Declared, Dims, KeyNames
from hf_vit.conversion.origins.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from hf_vit.conversion.origins.pytorch import timm_vit
from hf_vit.conversion.origins.wrapped import BESIDE, bare_names, unwrapped
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair

IGNORED = {
    r"mask_token": "mask token of the decoder",
    r"decoder_\w+(\..+)?": "decoder, which reconstructs pixels",
}

ASSUMED = timm_vit.ASSUMED | {"processor": "ImageNet's mean and deviation, resized bicubically"}
IMAGENET_PIXELS = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD, "resample": 3, "do_convert_rgb": True}


def recognises(shapes: Mapping[str, Shape]) -> bool:
    return timm_vit.recognises(shapes) and any(name.startswith("decoder_") for name in bare_names(shapes))


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    return timm_vit.with_swiglu(unwrapped(shapes, timm_vit.PATCHES, IGNORED), shapes)


def declared(companions: Companions, shapes: Mapping[str, Shape]) -> Declared:
    """The code's own constants; a folder's config.json is one of timm."""
    declared = timm_vit.declared(companions, shapes)
    return Declared(processor=IMAGENET_PIXELS) if companions.config is None else declared


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`; its code stretches positions without antialiasing."""
    return timm_vit.configure(dims, parts, shapes, image_size) | {"position_interpolation": "bicubic"}


ORIGIN = replace(
    timm_vit.ORIGIN,
    name="mae",
    title="masked autoencoders (MAE) .pth: the encoder",
    ignored=IGNORED | BESIDE,
    recognises=recognises,
    names=names,
    configure=configure,
    declared=declared,
    assumed=ASSUMED,
    notes=(
        "Names are timm's; the encoder's positions are stored in the file.",
        *timm_vit.ORIGIN.notes[:2],
    ),
)
