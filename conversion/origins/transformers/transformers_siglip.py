"""transformers' SigLIP (arXiv 2303.15343): its image tower, alone or beside the text tower, and its classifier."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_vit.conversion.origins.origin import Declared, Dims, KeyNames, KeyRule
from hf_vit.conversion.origins.transformers import transformers_clip
from hf_vit.conversion.origins.transformers.configs import read_config
from hf_vit.conversion.origins.transformers.transformers_clip import CLASS, TOWER_RULES, dense, find_base, tower_fields
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair, Patches, table_size

_HEAD, _MAP = "head", "pooler.map"
UNUSED_HEAD = "attention pooling that the classifier does not use"

MAP_RULES = (
    KeyRule(f"{_HEAD}.probe", "11D", "keep", f"{_MAP}.probe", part="map"),
    KeyRule(
        f"{_HEAD}.attention.in_proj_weight", ("3D", "D"), "keep", f"{_MAP}.attention.{{q,k,v}}_proj.weight", part="map"
    ),
    KeyRule(f"{_HEAD}.attention.in_proj_bias", ("3D",), "keep", f"{_MAP}.attention.{{q,k,v}}_proj.bias", part="map"),
    *dense(f"{_HEAD}.attention.out_proj", ("D", "D"), f"{_MAP}.attention.o_proj", "map"),
    *dense(f"{_HEAD}.layernorm", ("D",), f"{_MAP}.layernorm", "map"),
    *dense(f"{_HEAD}.mlp.fc1", ("M", "D"), f"{_MAP}.mlp.fc1", "map"),
    *dense(f"{_HEAD}.mlp.fc2", ("D", "M"), f"{_MAP}.mlp.fc2", "map"),
)

RULES = (
    *TOWER_RULES,
    KeyRule("embeddings.patch_embedding.bias", "D", "keep", "embeddings.patch_embeddings.projection.bias"),
    *MAP_RULES,
    *dense("classifier", ("L", "D"), "classifier", "head"),
)


def recognises(shapes: Mapping[str, Shape]) -> bool:
    return find_base(shapes) is not None and not any(key.endswith(CLASS) for key in shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """As CLIP's; a classifier leaves the attention pooling out."""
    found = transformers_clip.names(shapes)
    if any(name.startswith("classifier.") for name in found.normal):
        for name in [name for name in found.normal if name.startswith(f"{_HEAD}.")]:
            found.ignored[found.normal.pop(name)] = UNUSED_HEAD
    return found


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`."""
    patches = Patches((dims["P"], dims["Q"]))
    return tower_fields(dims, patches, table_size(dims["T"], patches, image_size)) | {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "pooling": "map" if "map" in parts else "gap",
    }


def declared(companions: Companions, shapes: Mapping[str, Shape]) -> Declared:
    """See `configs.read_config`."""
    return read_config(companions, ("siglip_vision_model", "siglip"))


ORIGIN = replace(
    transformers_clip.ORIGIN,
    name="transformers_siglip",
    title="transformers' SigLIP (siglip_vision_model, and the image tower of siglip), .safetensors or .bin",
    rules=RULES,
    recognises=recognises,
    names=names,
    configure=configure,
    declared=declared,
    assumed=transformers_clip.ASSUMED | {"hidden_act": "the tanh GELU", "layer_norm_eps": "eps 1e-6"},
    foreign_heads={},
    zeros={},
    notes=(
        "Prefixes that are taken off: `vision_model.`, and what is wrapped around a model.",
        "`attention.in_proj_weight` holds the projections of query, key and value one after the other.",
        "`SiglipForImageClassification` classifies the mean of the tokens; its tower's attention pooling is left out. "
        "A tower without that (`vision_use_head=False`) has no pooling; the mean of the tokens is pooled here.",
        "Where the file of the processor is missing: resized bicubically to the image size, pixels in [-1, 1].",
    ),
)
