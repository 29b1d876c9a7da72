"""transformers' classifier on CLIP's image tower (`CLIPForImageClassification`).

It reads the mean of the patches as the last block left them: the tower's last LayerNorm stands idle beside it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_vit.conversion.origins.origin import Dims, KeyNames
from hf_vit.conversion.origins.transformers import transformers_clip
from hf_vit.conversion.origins.transformers.transformers_clip import dense
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import Pair

IDLE = "the last LayerNorm, which the classifier does not read"


def recognises(shapes: Mapping[str, Shape]) -> bool:
    return transformers_clip.recognises(shapes) and any(key.rpartition("classifier.")[1] for key in shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """As CLIP's, without that LayerNorm."""
    found = transformers_clip.names(shapes)
    for name in [name for name in found.normal if name.startswith("post_layernorm.")]:
        found.ignored[found.normal.pop(name)] = IDLE
    return found


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`."""
    reads = {"pooling": "gap", "use_class_token": True, "norm_after_pooling": None}
    return transformers_clip.configure(dims, parts, shapes, image_size) | reads


_UNREAD = ("layernorm", "classifier")  # of CLIP's table

ORIGIN = replace(
    transformers_clip.ORIGIN,
    name="transformers_clip_classifier",
    title="transformers' classifier on CLIP (CLIPForImageClassification), .safetensors or .bin",
    rules=(
        *(rule for rule in transformers_clip.RULES if rule.parameter.partition(".")[0] not in _UNREAD),
        *dense("classifier", ("L", "D"), "classifier", "head"),
    ),
    recognises=recognises,
    names=names,
    configure=configure,
    zeros={},
    notes=(
        "Prefixes that are taken off: `vision_model.`, and what is wrapped around a model.",
        "The classifier reads the mean of the patches before the last LayerNorm (`norm_after_pooling=None`), which is "
        "left out.",
    ),
)
