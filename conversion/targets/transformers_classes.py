"""Which class of transformers a model goes to, and the fields of that class's config: ViT, DeiT, CLIP, SigLIP, DINOv2.

The class follows from what the model has, so that what came from one of these goes back to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_vit.conversion.origins.origin import Origin
from hf_vit.conversion.origins.transformers import (
    transformers_clip,
    transformers_deit,
    transformers_dinov2,
    transformers_siglip,
)
from hf_vit.conversion.origins.transformers.transformers_clip import dense
from hf_vit.conversion.sizes import square_or_pair
from hf_vit.conversion.targets.target import ANY, SIZES

_COPIED = (
    *("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps"),
    *("initializer_range", "problem_type"),
)
_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "qkv_bias")
_ANY_CONSTANTS = {**SIZES, **dict.fromkeys(("hidden_act", "layer_norm_eps"), ANY)}


@dataclass(frozen=True)
class Kind:
    """A family of transformers' classes.

    Attributes:
        title: what messages call it.
        table: key table that is read backwards.
        expresses: as `Target.expresses`.
        class_name: (config, whether there is a head) -> name of the class.
        fields: config -> fields of the class's config, beside those that all have.
        objections: (config, whether there is a head) -> what else it cannot express.
    """

    title: str
    table: Origin
    expresses: Mapping[str, Sequence[Any]]
    class_name: Callable[[Any, bool], str]
    fields: Callable[[Any], dict[str, Any]]
    objections: Callable[[Any, bool], list[str]] = field(default=lambda config, has_head: [])

    def config_fields(self, config: Any) -> dict[str, Any]:
        """Of transformers' config."""
        sizes = {"image_size": square_or_pair(config.nominal_size), "patch_size": square_or_pair(config.patch_stride)}
        sizes = {name: list(size) if isinstance(size, tuple) else size for name, size in sizes.items()}
        return {name: getattr(config, name) for name in _COPIED} | sizes | self.fields(config)


def _square(config: Any, has_head: bool) -> list[str]:
    sides = {"image_size": config.nominal_size, "patch_size": config.patch_stride}
    return [f"{name}={pair} (it has squares)" for name, pair in sides.items() if pair[0] != pair[1]]


def _vit_class(config: Any, has_head: bool) -> str:
    if not config.use_distillation_token:
        return "ViTForImageClassification" if has_head else "ViTModel"
    if not has_head:
        return "DeiTModel"
    return "DeiTForImageClassification" + ("WithTeacher" if config.has_distillation_head else "")


def _vit_fields(config: Any) -> dict[str, Any]:
    pooler = {"pooler_output_size": config.representation_size or config.hidden_size, "pooler_act": "tanh"}
    return {name: getattr(config, name) for name in ("intermediate_size", *_DROPOUT)} | pooler


def _vit_objections(config: Any, has_head: bool) -> list[str]:
    if has_head and config.representation_size is not None:
        return [f"representation_size={config.representation_size} before a classifier"]
    return []


VIT = Kind(
    "transformers' ViT and DeiT",
    transformers_deit.ORIGIN,  # transformers_vit's rules, and those of the second token
    _ANY_CONSTANTS
    | dict.fromkeys(("qkv_bias", "representation_size", "use_distillation_token", "use_distillation_head"), ANY),
    _vit_class,
    _vit_fields,
    _vit_objections,
)


def _clip_objections(config: Any, has_head: bool) -> list[str]:
    """Before a head only the class token counts: whether it is normed before or after it is taken is all the same."""
    bare = [] if config.norm_after_pooling or has_head else ["norm_after_pooling=False without a head"]
    return [*bare, *_square(config, has_head)]


CLIP = Kind(
    "transformers' CLIP",
    transformers_clip.ORIGIN,
    _ANY_CONSTANTS | {"norm_before_layers": (True,), "norm_after_pooling": (True, False)},
    lambda config, has_head: "CLIPVisionModel" + ("WithProjection" if has_head else ""),
    lambda config: {
        "intermediate_size": config.intermediate_size,
        "attention_dropout": config.attention_probs_dropout_prob,
        "projection_dim": config.num_labels,
    },
    _clip_objections,
)


def _siglip_objections(config: Any, has_head: bool) -> list[str]:
    with_head = ["pooling='map' before a classifier"] if has_head and config.pooling == "map" else []
    return [*with_head, *_square(config, has_head)]


SIGLIP = Kind(
    "transformers' SigLIP",
    transformers_siglip.ORIGIN,
    _ANY_CONSTANTS | {"pooling": ("map", "gap")},
    lambda config, has_head: "SiglipForImageClassification" if has_head else "SiglipVisionModel",
    lambda config: {
        "intermediate_size": config.intermediate_size,
        "attention_dropout": config.attention_probs_dropout_prob,
        "vision_use_head": config.pooling == "map",
    },
    _siglip_objections,
)


def swiglu_width(hidden: int) -> int:
    """What DINOv2 makes of the MLP's nominal width: two thirds, rounded up to a multiple of 8."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8


def mlp_ratio(config: Any) -> float | None:
    """The `mlp_ratio` that gives the width of the MLP; whole numbers first, as released models have it."""
    width, hidden = config.intermediate_size, config.hidden_size
    made = swiglu_width if config.mlp_type == "swiglu" else int
    fractions = (width / hidden, (width + 0.5) / hidden, 1.5 * width / hidden, (1.5 * width + 0.5) / hidden)
    ratios = (*range(1, 17), *fractions)
    return next((ratio for ratio in ratios if made(int(hidden * ratio)) == width), None)


def _dinov2_fields(config: Any) -> dict[str, Any]:
    registers = {"num_register_tokens": config.num_register_tokens} if config.num_register_tokens else {}
    return {name: getattr(config, name) for name in _DROPOUT} | {
        "mlp_ratio": mlp_ratio(config),
        "use_swiglu_ffn": config.mlp_type == "swiglu",
        "layerscale_value": config.layer_scale_init_value,
        "drop_path_rate": config.drop_path_rate,
        **({} if registers else {"use_mask_token": False}),
        **registers,
    }


def _dinov2_objections(config: Any, has_head: bool) -> list[str]:
    if not has_head and config.pooling != "token":
        return [f"pooling={config.pooling!r} without a head"]
    return [] if mlp_ratio(config) else [f"intermediate_size={config.intermediate_size} (no mlp_ratio gives it)"]


DINOV2 = Kind(
    "transformers' DINOv2",
    replace(
        transformers_dinov2.ORIGIN,
        rules=(*transformers_dinov2.RULES, *dense("classifier", ("L", "D"), "classifier", "head")),
    ),
    _ANY_CONSTANTS
    | dict.fromkeys(("qkv_bias", "layer_scale_init_value", "num_register_tokens", "mlp_type"), ANY)
    | {"pooling": ("token", "gap"), "use_class_token": (None, True)},
    lambda config, has_head: (
        "Dinov2"
        + ("WithRegisters" if config.num_register_tokens else "")
        + ("ForImageClassification" if has_head else "Model")
    ),
    _dinov2_fields,
    _dinov2_objections,
)
KINDS = (VIT, CLIP, SIGLIP, DINOV2)


def kind_of(config: Any) -> Kind:
    """The classes that this model goes to, or comes nearest to."""
    if config.norm_before_layers:
        return CLIP
    if config.layer_scale_init_value is not None:
        return DINOV2
    return SIGLIP if not config.has_class_token else VIT
