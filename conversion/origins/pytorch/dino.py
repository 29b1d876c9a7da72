"""Encoders trained by self-distillation (DINO, arXiv 2104.14294; DINOv2, 2304.07193), in the files of their own code.

Of student and teacher the teacher is taken, as its authors do. An encoder that stands alone has the names of timm.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from hf_vit.conversion.origins.origin import KeyNames
from hf_vit.conversion.origins.pytorch import mae, timm_vit
from hf_vit.conversion.origins.wrapped import BESIDE, bare_names, unwrapped
from hf_vit.conversion.readers.checkpoint import Shape

IGNORED = {
    r"head\.(mlp|last_layer)\..+": "projection head of the self-distillation",
    r"mask_token": "mask token of DINOv2's training",
}
_WRAPPED = re.compile(r"(.*\.)?(teacher|student)\..+")


def recognises(shapes: Mapping[str, Shape]) -> bool:
    marked = any(map(_WRAPPED.fullmatch, shapes)) or any(
        re.fullmatch(pattern, name) for name in bare_names(shapes) for pattern in IGNORED
    )
    return timm_vit.recognises(shapes) and marked and not mae.recognises(shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    return timm_vit.with_swiglu(unwrapped(shapes, timm_vit.PATCHES, IGNORED), shapes)


ORIGIN = replace(
    timm_vit.ORIGIN,
    name="dino",
    title="self-distilled encoders (DINO, DINOv2 without registers) .pth",
    ignored=IGNORED | BESIDE,
    recognises=recognises,
    names=names,
    declared=mae.declared,
    assumed=mae.ASSUMED,
    notes=(
        "Names are timm's. Of `teacher.` and `student.` the teacher is converted.",
        *timm_vit.ORIGIN.notes[:2],
    ),
)
