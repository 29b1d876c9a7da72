"""Encoders trained by self-distillation (DINO, arXiv 2104.14294; DINOv2, 2304.07193), in the files of their own code.

Of student and teacher the teacher is taken, as its authors do. An encoder that stands alone has the names of timm.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_vit.conversion.origins.origin import Dims, KeyNames
from hf_vit.conversion.origins.pytorch import mae, timm_vit
from hf_vit.conversion.origins.wrapped import BESIDE, bare_names, renamed, unwrapped
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import Pair
from hf_vit.errors import UserError

IGNORED = {
    r"(head\.(mlp|last_layer)|dino_head|ibot_head)\..+": "projection head of the self-distillation",
    r"mask_token": "mask token of DINOv2's training",
}
_WRAPPED = re.compile(r"(.*\.)?(teacher|student)\..+")
_OWN_NAMES = re.compile(r"register_tokens|blocks\.\d+\.\d+\..+")  # of DINOv2
_CHUNKED = re.compile(r"blocks\.(\d+)\.(\d+)\.(.+)")


def recognises(shapes: Mapping[str, Shape]) -> bool:
    marks = [*map(re.compile, IGNORED), _OWN_NAMES]
    bare = bare_names(shapes)
    marked = any(map(_WRAPPED.fullmatch, shapes)) or any(mark.fullmatch(name) for mark in marks for name in bare)
    return timm_vit.recognises(shapes) and marked and not mae.recognises(shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """As timm's; blocks that are stored in chunks keep their number in the whole."""
    found = unwrapped(shapes, timm_vit.PATCHES, IGNORED)
    chunk_of = {block[2]: block[1] for name in found.normal if (block := _CHUNKED.fullmatch(name))}
    normal = {_CHUNKED.sub(r"blocks.\2.\3", name): key for name, key in found.normal.items()}
    if len(normal) != len(found.normal):
        raise UserError("the file holds a block in two chunks; which of them counts is unknown")

    def spell(name: str) -> str:
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        chunk = chunk_of.get(block[1], "0") if block and chunk_of else None
        return found.spell(name if block is None or chunk is None else f"blocks.{chunk}.{block[1]}.{block[2]}")

    bare = renamed(KeyNames(normal, found.ignored, spell), {"reg_token": "register_tokens"})
    return timm_vit.with_swiglu(bare, shapes)


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`; positions are stretched without antialiasing, but for models with registers."""
    fields = timm_vit.configure(dims, parts, shapes, image_size)
    return fields if "registers" in parts else fields | {"position_interpolation": "bicubic"}


ORIGIN = replace(
    timm_vit.ORIGIN,
    name="dino",
    title="self-distilled encoders (DINO, DINOv2 with and without registers) .pth",
    ignored=IGNORED | BESIDE,
    recognises=recognises,
    names=names,
    configure=configure,
    declared=mae.declared,
    assumed=mae.ASSUMED,
    notes=(
        "Names are timm's, but for `register_tokens` (timm's `reg_token`) and blocks in chunks (`blocks.0.3.norm1`).",
        "Of `teacher.` and `student.` the teacher is converted.",
        *timm_vit.ORIGIN.notes[:2],
    ),
)
