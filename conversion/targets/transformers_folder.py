"""A folder for transformers: its ViT, DeiT, CLIP, SigLIP or DINOv2, whichever has what the model has.

The class follows from what the model has, so that what came from one of these goes back to it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, final

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins import clip
from hf_vit.conversion.origins import transformers as tables
from hf_vit.conversion.origins.origin import dense, square_or_pair
from hf_vit.conversion.planning import HEADS
from hf_vit.conversion.targets.target import ANY, SIZES, OutgoingModel, Part, Target, has_head, largest_difference

VIT_TYPE = "hf_vit"
_OWN_HEADS = (*HEADS, "visual_projection.")  # outside of the bare model
_COPIED = (
    *("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps"),
    *("initializer_range", "problem_type"),
)
_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "qkv_bias")
_ANY_CONSTANTS = {**SIZES, **dict.fromkeys(("hidden_act", "layer_norm_eps"), ANY)}


@dataclass(frozen=True)
class Kind(Part):
    """A family of transformers' classes."""

    class_name: Callable[[Any, bool], str]  # of a config, and whether there is a head
    fields: Callable[[Any], dict[str, Any]]  # of the class's config, beside those that all have


def _vit_class(config: Any, has_head: bool) -> str:
    if not config.use_distillation_token:
        return "ViTForImageClassification" if has_head else "ViTModel"
    teacher = "WithTeacher" if config.has_distillation_head else ""
    return f"DeiTForImageClassification{teacher}" if has_head else "DeiTModel"


def _vit_fields(config: Any) -> dict[str, Any]:
    pooler = {"pooler_output_size": config.representation_size or config.hidden_size, "pooler_act": "tanh"}
    return {name: getattr(config, name) for name in ("intermediate_size", *_DROPOUT)} | pooler


VIT = Kind(
    "transformers' ViT and DeiT",
    tables.DEIT,  # the rules of ViT, and those of the second token
    _ANY_CONSTANTS
    | dict.fromkeys(("qkv_bias", "representation_size", "use_distillation_token", "use_distillation_head"), ANY),
    lambda config, has_head: (
        [f"representation_size={config.representation_size} before a classifier"]
        if has_head and config.representation_size is not None
        else []
    ),
    _vit_class,
    _vit_fields,
)


def _tower_fields(config: Any) -> dict[str, Any]:
    dropout = config.attention_probs_dropout_prob
    return {"intermediate_size": config.intermediate_size, "attention_dropout": dropout}


def _tower_objections(config: Any, has_head: bool) -> list[str]:
    """List what CLIP or SigLIP lacks. Before a head only CLIP's class token counts: when it is normed is the same."""
    is_clip = config.norm_before_layers
    sides = {"image_size": config.nominal_size, "patch_size": config.patch_stride}
    wrong = {
        "norm_after_pooling=False without a head": is_clip and not (config.norm_after_pooling or has_head),
        "pooling='map' before a classifier": not is_clip and has_head and config.pooling == "map",
        **{f"{name}={pair} (it has squares)": pair[0] != pair[1] for name, pair in sides.items()},
    }
    return [words for words, holds in wrong.items() if holds]


CLIP = Kind(
    "transformers' CLIP",
    clip.CLIP,
    _ANY_CONSTANTS | {"norm_before_layers": (True,), "norm_after_pooling": (True, False)},
    _tower_objections,
    lambda config, has_head: "CLIPVisionModel" + ("WithProjection" if has_head else ""),
    lambda config: _tower_fields(config) | {"projection_dim": config.num_labels},
)
SIGLIP = Kind(
    "transformers' SigLIP",
    clip.SIGLIP,
    _ANY_CONSTANTS | {"pooling": ("map", "gap")},
    _tower_objections,
    lambda config, has_head: "SiglipForImageClassification" if has_head else "SiglipVisionModel",
    lambda config: _tower_fields(config) | {"vision_use_head": config.pooling == "map"},
)


def mlp_ratio(config: Any) -> int | None:
    """Return the `mlp_ratio` that gives the width of the MLP; transformers takes whole numbers alone.

    Of a SwiGLU's nominal width DINOv2 takes two thirds, rounded up to a multiple of 8.
    """
    widths = {ratio: config.hidden_size * ratio for ratio in range(1, 17)}
    if config.mlp_type == "swiglu":
        widths = {ratio: (int(width * 2 / 3) + 7) // 8 * 8 for ratio, width in widths.items()}
    return next((ratio for ratio, width in widths.items() if width == config.intermediate_size), None)


def _dinov2_fields(config: Any) -> dict[str, Any]:
    registers = config.num_register_tokens
    return {name: getattr(config, name) for name in _DROPOUT} | {
        "mlp_ratio": mlp_ratio(config),
        "use_swiglu_ffn": config.mlp_type == "swiglu",
        "layerscale_value": config.layer_scale_init_value,
        "drop_path_rate": config.drop_path_rate,
        **({"num_register_tokens": registers} if registers else {"use_mask_token": False}),
    }


def _dinov2_objections(config: Any, has_head: bool) -> list[str]:
    if not has_head and config.pooling != "token":
        return [f"pooling={config.pooling!r} without a head"]
    return [] if mlp_ratio(config) else [f"intermediate_size={config.intermediate_size} (no mlp_ratio gives it)"]


DINOV2 = Kind(
    "transformers' DINOv2",
    replace(tables.DINOV2, rules=(*tables.DINOV2.rules, *dense("classifier", ("L", "D"), "classifier", "head"))),
    _ANY_CONSTANTS
    | dict.fromkeys(("qkv_bias", "layer_scale_init_value", "num_register_tokens", "mlp_type"), ANY)
    | {"pooling": ("token", "gap"), "use_class_token": (None, True)},
    _dinov2_objections,
    lambda config, has_head: (
        "Dinov2"
        + ("WithRegisters" if config.num_register_tokens else "")
        + ("ForImageClassification" if has_head else "Model")
    ),
    _dinov2_fields,
)
KINDS = (VIT, CLIP, SIGLIP, DINOV2)


def kind_of(config: Any) -> Kind:
    """Return the classes that this model goes to, or comes nearest to."""
    if config.norm_before_layers:
        return CLIP
    if config.layer_scale_init_value is not None:
        return DINOV2
    return SIGLIP if not config.has_class_token else VIT


@final
class TransformersFolder(Target):
    """config.json and weights of transformers, checked there."""

    name = "transformers"
    title = "transformers"
    tables = MappingProxyType({VIT_TYPE: VIT.table})

    def part_for(self, config: PreTrainedConfig) -> Part:
        return kind_of(config)

    def write(self, outgoing: OutgoingModel) -> None:
        ours = outgoing.config
        model_class = _model_class(ours, outgoing.has_head)
        sizes = {"image_size": square_or_pair(ours.nominal_size), "patch_size": square_or_pair(ours.patch_stride)}
        fields = {name: getattr(ours, name) for name in _COPIED}
        fields |= {name: list(size) if isinstance(size, tuple) else size for name, size in sizes.items()}
        fields |= kind_of(ours).fields(ours)
        two_towers = "vision_config" in model_class.config_class.sub_configs  # that of a classifier of SigLIP
        config = model_class.config_class(**({"vision_config": fields} if two_towers else fields))
        if outgoing.has_head:
            config.id2label = dict(ours.id2label)
            config.label2id = dict(ours.label2id or {label: index for index, label in ours.id2label.items()})
        model = model_class(config, **_options(outgoing))
        model.load_state_dict(_arrays(outgoing), strict=True)
        model.to(outgoing.model.dtype).save_pretrained(outgoing.folder)
        outgoing.processor.save_pretrained(outgoing.folder)

    @torch.no_grad()
    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        model_class = _model_class(outgoing.config, outgoing.has_head)
        model = model_class.from_pretrained(outgoing.folder, **_options(outgoing)).eval()
        images, ours = outgoing.probe()
        output = model(images)
        if outgoing.has_head:
            difference = largest_difference(ours, output["image_embeds" if "image_embeds" in output else "logits"])
        else:
            difference = largest_difference(ours, output.last_hidden_state)
            if output.pooler_output is not None:
                pooled = outgoing.model(images).pooler_output
                difference = max(difference, largest_difference(pooled, output.pooler_output))
        return difference, f"transformers {version('transformers')}"

    def spell(self, key: str, model: PreTrainedModel) -> str:
        config = model.config
        if key.startswith(_OWN_HEADS):
            return f"cls_{key}" if config.has_distillation_head and key.startswith("classifier.") else key
        if not has_head(model):
            return key
        is_tower = kind_of(config) in (CLIP, SIGLIP)
        return f"{'vision_model' if is_tower else _model_class(config, True).base_model_prefix}.{key}"


def _model_class(config: PreTrainedConfig, has_head: bool) -> Any:
    import transformers

    return getattr(transformers, kind_of(config).class_name(config, has_head))


def _options(outgoing: OutgoingModel) -> dict[str, Any]:
    """Return arguments of the class beside the config: a bare ViT has a pooler or not; a classifier has none."""
    if outgoing.has_head or kind_of(outgoing.config) is not VIT:
        return {}
    return {"add_pooling_layer": outgoing.config.representation_size is not None}


def _arrays(outgoing: OutgoingModel) -> dict[str, torch.Tensor]:
    """Add what only transformers' classes have: of DINOv2 a mask token, and a head that reads class token and mean."""
    arrays, config = outgoing.arrays, outgoing.config
    if kind_of(config) is not DINOV2:
        return arrays
    if outgoing.has_head:
        weight = arrays["classifier.weight"]
        halves = [weight, torch.zeros_like(weight)]
        arrays = arrays | {"classifier.weight": torch.cat(halves if config.pooling == "token" else halves[::-1], dim=1)}
    if config.num_register_tokens:
        name = next(key for key in arrays if key.endswith("embeddings.register_tokens"))
        mask = torch.zeros(1, config.hidden_size, dtype=arrays[name].dtype)
        arrays = arrays | {name.replace("register_tokens", "mask_token"): mask}
    return arrays
