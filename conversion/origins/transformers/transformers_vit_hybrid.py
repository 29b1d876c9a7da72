"""transformers' former ViTHybrid (`vit-hybrid`, until version 4.40): a BiT backbone before the blocks of its ViT.

The network is timm's hybrid: kernels standardised by their variance, GroupNorm's eps 1e-5. A backbone that is set up in
another way (pre-activation, other padding, a stage before the last) is refused by name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from hf_vit.conversion.origins.beside import Count, checked
from hf_vit.conversion.origins.google import vit_jax_hybrid
from hf_vit.conversion.origins.google.vit_jax_hybrid import expanded, stem_fields
from hf_vit.conversion.origins.origin import Declared, Dims, KeyRule, Origin
from hf_vit.conversion.origins.pytorch.timm_hybrid import CONSTANTS, depths_of, stem_rules
from hf_vit.conversion.origins.transformers import transformers_vit
from hf_vit.conversion.origins.transformers.transformers_vit import RULES, common_fields, find_base, read_vit_config
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair, table_size
from hf_vit.errors import UserError

_BIT = "embeddings.patch_embeddings.backbone.bit"
MODEL_TYPE = "vit-hybrid"
_FIRST = ("downsample",)

ROOT_RULES, UNIT_RULES = stem_rules(
    (f"{_BIT}.embedder.convolution", f"{_BIT}.embedder.norm"), f"{_BIT}.encoder.stages.{{s-1}}.layers.{{u-1}}"
)

# Field of the backbone's config -> (what it must be, what its class defaults to).
BACKBONE: dict[str, tuple[Any, Any]] = {
    "model_type": ("bit", "bit"),
    "layer_type": ("bottleneck", "preactivation"),
    "global_padding": ("same", None),
    "embedding_dynamic_padding": (True, False),
    "hidden_act": ("relu", "relu"),
    "num_groups": (32, 32),
    "output_stride": (32, 32),
    "width_factor": (1, 1),
}


class BackboneStages(BaseModel):
    """What is read of the backbone's config beside that; its class has four stages."""

    depths: list[Count] = [3, 4, 6, 3]
    out_features: list[str] | None = None


class HybridConfig(BaseModel):
    """What is read of config.json beside `configs.TransformersConfig`."""

    backbone_config: BackboneStages | None = None


def recognises(shapes: Mapping[str, Shape]) -> bool:
    return find_base(shapes) is not None and has_backbone(shapes)


def has_backbone(shapes: Mapping[str, Shape]) -> bool:
    return any("embeddings.patch_embeddings.backbone." in key for key in shapes)


def stage_depths(shapes: Iterable[str]) -> tuple[int, ...]:
    return depths_of(shapes, rf"{re.escape(_BIT)}\.encoder\.stages\.(\d{{1,3}})\.layers\.(\d{{1,3}})\.")


def rules_of(rules: tuple[KeyRule, ...], shapes: Mapping[str, Shape]) -> tuple[KeyRule, ...]:
    """One rule a key of the stem, its axes in multiples of the stem's width W."""
    return tuple(expanded(rules, UNIT_RULES, stage_depths(shapes), _FIRST))


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfHybridViTConfig`."""
    stem, patches = stem_fields(dims, stage_depths(shapes))
    return stem | CONSTANTS | common_fields(dims, parts, table_size(dims["T"] - 1, patches, image_size))


def declared(companions: Companions, shapes: Mapping[str, Shape]) -> Declared:
    """See `transformers_vit.read_vit_config`; and the backbone must be one that the stem here equals.

    Raises:
        UserError: it is not.
    """
    found = read_vit_config(companions, shapes, (MODEL_TYPE,))
    if companions.config is None:
        return found
    stages = checked(HybridConfig, companions.config, "config.json").backbone_config
    if stages is not None:
        _refuse_other_backbones(stages, companions.config["backbone_config"])
    fields = dict(found.fields)
    patch = fields.pop("patch_size", 1)
    return replace(found, fields=fields | {"stem_patch_size": patch})


def _refuse_other_backbones(stages: BackboneStages, backbone: Mapping[str, Any]) -> None:
    last = f"stage{len(stages.depths)}"
    wrong = {name: backbone.get(name, default) for name, (_, default) in BACKBONE.items()}
    wrong = {name: value for name, value in wrong.items() if str(value).lower() != str(BACKBONE[name][0]).lower()}
    if stages.out_features not in (None, [last]):
        wrong["out_features"] = stages.out_features
    if wrong:
        told = ", ".join(f"{name}={value!r:.80}" for name, value in wrong.items())
        raise UserError(
            f"the backbone of this vit-hybrid is set up as the stem here is not ({told}); it needs "
            + ", ".join(f"{name}={needed!r}" for name, (needed, _) in BACKBONE.items())
            + f", out_features=['{last}']"
        )


ORIGIN = Origin(
    name="transformers_vit_hybrid",
    title="transformers' former ViTHybrid (vit-hybrid), .safetensors or .bin",
    legend={letter: meaning for letter, meaning in transformers_vit.LEGEND.items() if letter != "P, Q"}
    | {letter: vit_jax_hybrid.LEGEND[letter] for letter in "PWUOIF"},
    rules=(
        *ROOT_RULES,
        *UNIT_RULES,
        *(replace(rule, axes="DFPP") if rule.key == transformers_vit.PATCHES else rule for rule in RULES),
    ),
    block_pattern=transformers_vit.ORIGIN.block_pattern,
    without={},
    ignored=transformers_vit.ORIGIN.ignored,
    recognises=recognises,
    names=transformers_vit.names,
    configure=configure,
    family="hybrid",
    rules_of=rules_of,
    declared=declared,
    assumed=transformers_vit.ASSUMED,
    notes=(
        "`{s-1}` and `{u-1}` are the numbers of a stage and of a unit in it.",
        "Kernels are standardised by their variance and GroupNorm's eps is 1e-5, as in timm, whose network this is.",
        "The backbone must have: " + ", ".join(f"`{name}={needed!r}`" for name, (needed, _) in BACKBONE.items()) + ".",
        *transformers_vit.ORIGIN.notes,
    ),
)
