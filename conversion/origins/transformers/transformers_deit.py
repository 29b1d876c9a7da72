"""transformers' DeiT (arXiv 2012.12877): a ViT with a distillation token, and mostly a head for it."""

from collections.abc import Mapping
from typing import Any

from hf_vit.conversion.origins.origin import Declared, Dims, KeyRule, Origin
from hf_vit.conversion.origins.transformers import transformers_vit
from hf_vit.conversion.origins.transformers.transformers_vit import RULES, common_fields, find_base, read_vit_config
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair, Patches, square_or_pair, table_size

MODEL_TYPE = "deit"
TOKEN = "embeddings.distillation_token"

DISTILLATION_RULES = (
    KeyRule(TOKEN, "11D", "keep", TOKEN),
    KeyRule("distillation_classifier.weight", "LD", "keep", "distillation_classifier.weight", part="second_head"),
    KeyRule("distillation_classifier.bias", "L", "keep", "distillation_classifier.bias", part="second_head"),
)


def recognises(shapes: Mapping[str, Shape]) -> bool:
    return find_base(shapes) is not None and any(key.endswith(TOKEN) for key in shapes)


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`."""
    patches = Patches((dims["P"], dims["Q"]))
    return common_fields(dims, parts, table_size(dims["T"] - 2, patches, image_size)) | {
        "patch_size": square_or_pair(patches.sides),
        "use_distillation_token": True,
        "use_distillation_head": None if "second_head" in parts or "head" not in parts else False,
    }


def declared(companions: Companions, shapes: Mapping[str, Shape]) -> Declared:
    """See `transformers_vit.read_vit_config`."""
    return read_vit_config(companions, shapes, (MODEL_TYPE,))


ORIGIN = Origin(
    name="transformers_deit",
    title="transformers' DeiT (deit), .safetensors or .bin",
    legend=transformers_vit.LEGEND,
    rules=(*RULES, *DISTILLATION_RULES),
    block_pattern=transformers_vit.ORIGIN.block_pattern,
    without={},
    ignored=transformers_vit.ORIGIN.ignored,
    recognises=recognises,
    names=transformers_vit.names,
    configure=configure,
    declared=declared,
    assumed=transformers_vit.ASSUMED,
    notes=(
        "`DeiTForImageClassificationWithTeacher` has two heads (`cls_classifier` is `classifier` here) and gives the "
        "mean of both; `DeiTForImageClassification` has the token, but reads the class token alone "
        "(`use_distillation_head=False`). DeiT without a distillation token is a `vit`.",
        *transformers_vit.ORIGIN.notes,
    ),
)
