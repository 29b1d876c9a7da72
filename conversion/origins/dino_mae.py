"""Encoders in the files of the codes that trained them: MAE (arXiv 2111.06377), DINO (2104.14294), DINOv2 (2304.07193).

An encoder that stands alone has the names of timm, and is one of `timm.py`.
"""

import re
from dataclasses import replace

from hf_vit.conversion.origins import timm
from hf_vit.conversion.origins.beside import IMAGENET_MEAN, IMAGENET_STD
from hf_vit.conversion.origins.origin import Declared, Fields, KeyNames, Network
from hf_vit.conversion.origins.wrapped import bare_names, renamed, unwrapped
from hf_vit.conversion.readers import Companions, Shapes
from hf_vit.errors import UserError

_PIXELS = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD, "resample": 3, "do_convert_rgb": True}
_OF_MAE = {
    r"mask_token": "mask token of the decoder",
    r"decoder_\w+(\..+)?": "decoder, which reconstructs pixels",
}
_OF_DINO = {
    r"(head\.(mlp|last_layer)|dino_head|ibot_head)\..+": "projection head of the self-distillation",
    r"mask_token": "mask token of DINOv2's training",
}
_DINO_MARKS = "|".join((*_OF_DINO, r"register_tokens|blocks\.\d+\.\d+\..+"))  # the last are DINOv2's own names
_CHUNKED = re.compile(r"blocks\.(\d+)\.(\d+)\.(.+)")


def _declared(companions: Companions, shapes: Shapes) -> Declared:
    """Return the codes' own constants; a folder's config.json is one of timm."""
    declared = timm.declared(companions, shapes)
    return Declared(processor=_PIXELS) if companions.config is None else declared


def _configure_mae(network: Network) -> Fields:
    """Its code stretches positions without antialiasing."""
    return timm.configure(network) | {"position_interpolation": "bicubic"}


def _recognises_mae(shapes: Shapes) -> bool:
    return timm.recognises(shapes) and any(name.startswith("decoder_") for name in bare_names(shapes))


MAE = replace(
    timm.VIT,
    name="mae",
    recognises=_recognises_mae,
    names=lambda shapes: timm.names(shapes, _OF_MAE),
    configure=_configure_mae,
    declared=_declared,
    assumed={**timm.VIT.assumed, "processor": "ImageNet's mean and deviation, resized bicubically"},
)


def _recognises_dino(shapes: Shapes) -> bool:
    is_wrapped = any(re.fullmatch(r"(.*\.)?(teacher|student)\..+", key) for key in shapes)
    is_marked = is_wrapped or any(re.fullmatch(_DINO_MARKS, name) for name in bare_names(shapes))
    return timm.recognises(shapes) and is_marked and not _recognises_mae(shapes)


def _dino_names(shapes: Shapes) -> KeyNames:
    """Blocks that are stored in chunks keep their number in the whole."""
    found = unwrapped(shapes, timm.PATCHES, _OF_DINO)
    chunk_of = {block[2]: block[1] for name in found.normal if (block := _CHUNKED.fullmatch(name))}
    normal = {_CHUNKED.sub(r"blocks.\2.\3", name): key for name, key in found.normal.items()}
    if len(normal) != len(found.normal):
        raise UserError("the file holds a block in two chunks; which one is right is unknown; keep one")

    def spell(name: str) -> str:
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        chunk = chunk_of.get(block[1], "0") if block and chunk_of else None
        return found.spell(name if block is None or chunk is None else f"blocks.{chunk}.{block[1]}.{block[2]}")

    bare = renamed(KeyNames(normal, found.ignored, spell), {"reg_token": "register_tokens"})
    return timm.with_swiglu(bare, shapes)


def _configure_dino(network: Network) -> Fields:
    """Positions are stretched without antialiasing, but for models with registers."""
    return timm.configure(network) if "registers" in network.parts else _configure_mae(network)


DINO = replace(
    MAE,
    name="dino",
    recognises=_recognises_dino,
    names=_dino_names,
    configure=_configure_dino,
)
