"""Export to a folder for timm: `timm.create_model("local-dir:FOLDER", pretrained=True)`, or a repository on the Hub."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, final

import torch
from safetensors.torch import save_file
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins import aim, timm_eva
from hf_vit.conversion.origins import timm as timm_tables
from hf_vit.conversion.origins.beside import RESAMPLE
from hf_vit.conversion.targets.graphs.preprocessing import scale_of
from hf_vit.conversion.targets.target import AIMV2_FIELDS, OutgoingModel, Part, Target, express, measure_difference
from hf_vit.errors import UserError

# Architectures by eps and type of MLP, which arguments cannot change; arguments set everything else, heads too.
PLAIN = {
    (1e-6, "dense"): "vit_base_patch16_224",
    (1e-5, "dense"): "vit_base_patch16_clip_224",
    (1e-6, "swiglu"): "vit_giant_patch14_dinov2",
}
DISTILLED = "deit_base_distilled_patch16_224"
# Architectures by depths of the stem, which arguments cannot change; the stem's width is always STEM_WIDTH.
HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
STEM_WIDTH = 64
_ACTIVATIONS = {ours: name for name, ours in timm_tables.ACTIVATIONS.items()}
_POOLINGS = {ours: name for name, ours in timm_tables.POOLINGS.items()} | {"map_with_registers": "map"}

# Architectures of timm's class Eva by eps.
EVAS = {1e-6: "eva_giant_patch14_224", 1e-5: "vit_base_patch16_dinov3"}
_PACKED = {".mlp.w12.": ".mlp.fc1.", ".mlp.w3.": ".mlp.fc2."}  # the tables' names -> timm's

# Fields that arguments of both classes set.
_ANY_VALUE = (
    *("qkv_bias", "use_class_token", "position_on_class_token", "layer_scale_init_value", "num_register_tokens"),
    *("norm_before_layers", "norm_after_pooling", "mlp_type"),
)


@dataclass(frozen=True)
class Kind(Part):
    """A class of timm, and what it can express."""

    architecture: Callable[[Any], str]
    arguments: Callable[[Any], dict[str, Any]]  # config -> timm's arguments that not all classes have
    spellings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_PACKED))


def _find_vit_name(config: Any) -> str:
    """Return the name of the architecture of timm's VisionTransformer."""
    if _is_hybrid(config):
        return HYBRIDS[config.stage_depths]
    return DISTILLED if config.use_distillation_token else PLAIN[config.layer_norm_eps, config.mlp_type]


def _find_vit_objections(config: Any, has_head: bool) -> Mapping[str, object]:
    """Name combinations of settings that none of timm's architectures has."""
    has_own_architecture = _is_hybrid(config) or config.use_distillation_token  # with the first of `PLAIN`'s settings
    if (config.layer_norm_eps, config.mlp_type) not in (list(PLAIN)[:1] if has_own_architecture else PLAIN):
        return {f"layer_norm_eps={config.layer_norm_eps} with mlp_type={config.mlp_type!r} in one architecture": True}
    if config.norm_type == "rmsnorm" and (has_own_architecture or config.layer_norm_eps != 1e-6):
        return {"norm_type='rmsnorm' with a stem, a distillation token or another eps than 1e-6": True}
    if config.mlp_type == "swiglu" and config.pooling.startswith("map"):  # timm doubles the MAP head's width, too
        return {f"pooling={config.pooling!r} with mlp_type='swiglu'": True}
    if not config.use_distillation_token or _is_hybrid(config):
        return {"use_distillation_token=True of a hybrid": config.use_distillation_token}
    return {
        "num_register_tokens beside a distillation token": config.num_register_tokens,
        "use_distillation_head=False before a classifier": has_head and not config.has_distillation_head,
        "position_on_class_token=False beside a distillation token": not config.position_on_class_token,
    }


def _make_vit_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments of timm's VisionTransformer alone."""
    is_swiglu = config.mlp_type == "swiglu"  # timm packs gate and values into one layer
    includes_special_tokens = config.pooling == "map_with_registers" or (
        config.pooling == "map" and config.has_class_token
    )
    return {
        "mlp_ratio": _compute_ratio(config.intermediate_size * (2 if is_swiglu else 1), config.hidden_size),
        "act_layer": "silu" if is_swiglu else _ACTIVATIONS[config.hidden_act],
        **_make_token_arguments(config),
        "pre_norm": config.norm_before_layers,
        "final_norm": config.norm_after_pooling is not None,
        "fc_norm": bool(config.norm_after_pooling),
        **({"norm_layer": "rmsnorm"} if config.norm_type == "rmsnorm" else {}),
        **({"reg_tokens": config.num_register_tokens} if config.num_register_tokens else {}),
        **({"pool_include_prefix": True} if includes_special_tokens else {}),
    }


def _make_token_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments that timm's VisionTransformer and Eva have, and AIMv2 does not need."""
    return {
        "qkv_bias": config.qkv_bias,
        "class_token": config.has_class_token,
        # timm has positions for all special tokens or for none; see `TimmFolder.write`.
        "no_embed_class": config.position_on_class_token != "with_registers"
        and (bool(config.num_register_tokens) or (config.has_class_token and not config.position_on_class_token)),
        "init_values": config.layer_scale_init_value,
    }


def _find_eva_objections(config: Any, has_head: bool) -> Mapping[str, object]:
    """Name combinations of settings that timm's class Eva lacks."""
    is_mixed = config.rotary_embedding == "mixed"
    uses_act = config.mlp_type == "dense" or "map" in config.pooling
    return {
        f"hidden_act={config.hidden_act!r} (only 'gelu')": uses_act and config.hidden_act != "gelu",
        "pooling='map' beside registers": config.pooling == "map" and config.num_register_tokens,
        "layer_scale_init_value beside norm_after_branches": config.norm_after_branches
        and config.layer_scale_init_value is not None,
        "rotary_pairing='halves' with rotary_embedding='mixed'": is_mixed and config.rotary_pairing == "halves",
        "rotary_offset or rotary_reference_grid with rotary_embedding='mixed'": is_mixed
        and (config.rotary_offset or config.rotary_reference_grid is not None),
    }


def _make_eva_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments of timm's class Eva alone."""
    rotations = {ours: theirs for theirs, ours in timm_eva.ROTATIONS.items()}
    rotation = rotations.get((config.rotary_embedding, config.rotary_coordinates))
    arguments: dict[str, Any] = {"use_rot_pos_emb": rotation is not None}
    arguments |= {} if rotation is None else {"rope_type": rotation}
    for name, (setting, choices) in timm_eva.ARGUMENTS.items():
        if rotation is None and setting.startswith("rotary_"):
            continue
        value = getattr(config, setting)
        if choices is not None:  # timm has another name for the value
            value = next(theirs for theirs, ours in choices.items() if ours == value)
        arguments[name] = value
    pooling_width = config.pooling_intermediate_size or config.intermediate_size
    return arguments | {
        "mlp_ratio": _compute_ratio(config.intermediate_size, config.hidden_size),
        "attn_pool_mlp_ratio": _compute_ratio(pooling_width, config.hidden_size),
        **_make_token_arguments(config),
        "attn_type": "rope" if config.qkv_bias and config.key_bias else "eva",
        "qkv_fused": True,
        "swiglu_mlp": config.mlp_type == "swiglu",
        "swiglu_align_to": 0,
        "scale_mlp": config.norm_in_mlp,
        "scale_attn_inner": config.norm_in_attention,
        "use_post_transformer_norm": config.norm_after_pooling is False,
        "use_fc_norm": bool(config.norm_after_pooling),
        "dynamic_img_size": config.position_embedding == "none",
    }


VIT = Kind(
    "timm's VisionTransformer",
    timm_tables.VIT,
    express(
        *(*_ANY_VALUE, "norm_type", "use_distillation_token", "use_distillation_head", "stem_patch_size"),
        hidden_act=tuple(_ACTIVATIONS),
        pooling=tuple(_POOLINGS),
        layer_norm_eps=(1e-6, 1e-5),
        stage_depths=tuple(HYBRIDS),
        stem_width=(STEM_WIDTH,),
        **{name: (value,) for name, value in timm_tables.STEM_CONSTANTS.items()},
    ),
    _find_vit_objections,
    _find_vit_name,
    _make_vit_arguments,
)
HYBRID = replace(VIT, table=timm_tables.HYBRID)
EVA = Kind(
    "timm's Eva",
    timm_eva.EVA,
    express(
        *(*_ANY_VALUE, *(setting for setting, _ in timm_eva.ARGUMENTS.values())),
        *("rotary_embedding", "rotary_coordinates"),
        *("hidden_act", "key_bias", "norm_in_attention", "norm_in_mlp", "pooling_intermediate_size"),
        position_embedding=("learned", "none"),
        pooling=tuple(_POOLINGS),
        layer_norm_eps=tuple(EVAS),
    ),
    _find_eva_objections,
    lambda config: EVAS[config.layer_norm_eps],
    _make_eva_arguments,
    _PACKED | timm_eva.SCALES | {".mlp.w1.": ".mlp.fc1_g.", ".mlp.w2.": ".mlp.fc1_x."},
)
AIMV2 = Kind(
    "timm's AIMv2",
    aim.TIMM_AIMV2,
    express("hidden_act", layer_norm_eps=(1e-5,), **AIMV2_FIELDS),
    lambda config, has_head: {},
    lambda config: "aimv2_large_patch14_224",
    lambda config: {"mlp_ratio": _compute_ratio(config.intermediate_size, config.hidden_size)},
    aim.TIMM_MODULES | aim.TIMM_LAYERS,
)


def _make_naflex_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments of timm's NaFlexVit alone."""
    mode = config.position_interpolation.removesuffix(timm_tables.SQUARE)
    values = next(theirs for theirs, ours in timm_tables.RESIZINGS.items() if ours == mode)
    arguments = {name: value for name, value in _make_vit_arguments(config).items() if name != "no_embed_class"}
    return arguments | {
        **dict(zip(timm_tables.RESIZING, values, strict=True)),
        timm_tables.KEEPS_ASPECT: config.position_interpolation.endswith(timm_tables.SQUARE),
        "pos_embed_grid_size": list(config.grid),
    }


NAFLEX = Kind(
    "timm's NaFlexVit",
    timm_tables.NAFLEX,
    {**VIT.expresses, "layer_norm_eps": (1e-6,), "mlp_type": ("dense",), "norm_type": ("layernorm",)},
    lambda config, has_head: {
        "position_on_class_token other than False": config.has_class_token and config.position_on_class_token
    },
    lambda config: "naflexvit_base_patch16_siglip",
    _make_naflex_arguments,
    timm_tables.NAFLEX_MODULES,
)


def find_kind(config: Any) -> Kind:
    """Return the class that fits the model, or that comes closest."""
    if _is_hybrid(config):
        return HYBRID
    keeps_aspect = config.position_interpolation.endswith(timm_tables.SQUARE)
    if keeps_aspect or (config.position_interpolation == "flexivit" and not config.has_class_token):
        return NAFLEX
    if config.norm_on_patches:
        return AIMV2
    lacks_key_bias = config.qkv_bias and not config.key_bias
    has_inner_norms = config.norm_after_branches or config.norm_in_attention or config.norm_in_mlp
    if config.rotary_embedding is None and not lacks_key_bias and not has_inner_norms:
        return VIT
    if config.mlp_type == "swiglu" and config.norm_in_mlp:  # timm then has gate and values in two layers
        rules = tuple(rule for rule in EVA.table.rules if ".w12." not in rule.key)
        return replace(EVA, table=replace(EVA.table, rules=rules))
    return EVA


@final
class TimmFolder(Target):
    """config.json and weights for timm, which are checked with timm."""

    name = "timm"
    title = "timm"
    model_types = ("hf_vit", "hf_hybrid_vit")
    libraries = (("timm",), "timm")

    def part_for(self, config: PreTrainedConfig) -> Part:
        return find_kind(config)

    def write(self, outgoing: OutgoingModel) -> None:
        """Write config.json and the weights."""
        config = outgoing.config
        num_classes = outgoing.config.num_labels if outgoing.has_head else 0
        config_file = {
            "architecture": find_kind(config).architecture(config),
            "num_classes": num_classes,
            "num_features": config.hidden_size,
            "global_pool": _POOLINGS[config.pooling],
            "model_args": _make_arguments(outgoing, num_classes),
            "pretrained_cfg": _make_pretrained_config(outgoing, num_classes),
        }
        # timm ignores these, but a conversion back reads them.
        max_num_patches = getattr(outgoing.processor, "max_num_patches", None)
        ours = {"problem_type": config.problem_type, "max_num_patches": max_num_patches}
        config_file |= {name: value for name, value in ours.items() if value is not None}
        arrays = outgoing.arrays
        has_position = config.has_class_token and config.position_on_class_token is True and "pos_embed" in arrays
        if config.num_register_tokens and has_position:
            # timm has positions for all special tokens, registers included, or for none, so add the position here.
            class_position, patches = arrays["pos_embed"][:, :1], arrays["pos_embed"][:, 1:]
            arrays = arrays | {"cls_token": arrays["cls_token"] + class_position, "pos_embed": patches.contiguous()}
        text = json.dumps(config_file, indent=2, ensure_ascii=False) + "\n"
        (outgoing.folder / "config.json").write_text(text, encoding="utf-8")
        save_file(arrays, outgoing.folder / "model.safetensors", metadata={"format": "pt"})

    @torch.no_grad()
    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        import timm

        model: Any = timm.create_model(f"local-dir:{outgoing.folder}", pretrained=True).eval()
        images, expected_results = outgoing.probe()
        results = model(images) if outgoing.has_head else model.forward_features(images)
        return measure_difference(expected_results, results), f"timm {timm.__version__}"

    def spell(self, key: str, model: PreTrainedModel) -> str:
        if key.startswith("norm.") and model.config.norm_after_pooling:
            return f"fc_{key}"
        for normal, timms in find_kind(model.config).spellings.items():
            key = key.replace(normal, timms)
        return _spell_stem(key, model.config)


def _is_hybrid(config: PreTrainedConfig) -> bool:
    return config.model_type == "hf_hybrid_vit"


def _spell_stem(key: str, config: PreTrainedConfig) -> str:
    """Return timm's spelling of a stem's key; a stem without stages lacks "stem." in its names."""
    has_root_only = _is_hybrid(config) and not config.stage_depths
    return key.replace(f"{timm_tables.BACKBONE}.stem.", f"{timm_tables.BACKBONE}.") if has_root_only else key


def _make_arguments(outgoing: OutgoingModel, num_classes: int) -> dict[str, Any]:
    """Return the arguments with which timm builds the model (`model_args` of its config.json)."""
    config = outgoing.config
    is_resized = _find_input_size(outgoing) != outgoing.nominal_size
    sides = (config.stem_patch_size,) * 2 if _is_hybrid(config) else config.patch_stride
    return {
        "img_size": list(outgoing.nominal_size),
        "patch_size": sides[0] if sides[0] == sides[1] else list(sides),
        "in_chans": config.num_channels,
        "num_classes": num_classes,
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "global_pool": _POOLINGS[config.pooling],
        **find_kind(config).arguments(config),
        **({"dynamic_img_size": True} if is_resized and find_kind(config) is VIT else {}),
    }


def _compute_ratio(width: int, hidden_size: int) -> float:
    """Return the ratio from which timm computes a width, which it rounds down."""
    ratio = width / hidden_size
    return ratio if int(hidden_size * ratio) == width else math.nextafter(ratio, math.inf)


def _make_pretrained_config(outgoing: OutgoingModel, num_classes: int) -> dict[str, Any]:
    """Return timm's `pretrained_cfg`, which normalizes pixels after division by 255."""
    config = outgoing.config
    processor = outgoing.processor
    size = _find_input_size(outgoing)
    filter_names = {number: name for name, number in RESAMPLE.items()}
    mode, crop_share = _find_cropping(outgoing)
    mean, std = map(list, scale_of(processor, config.num_channels, unit=255))
    if min(std) <= 0:
        raise UserError(
            f"timm needs image_std and rescale_factor above 0, but the image processor has "
            f"image_std={processor.image_std} and rescale_factor={processor.rescale_factor}, so nothing was written; "
            "correct preprocessor_config.json"
        )
    pretrained_config: dict[str, Any] = {
        "input_size": [config.num_channels, *size],
        "fixed_input_size": config.position_embedding != "none" and size == outgoing.nominal_size,
        "interpolation": filter_names[int(processor.resample)],
        "crop_pct": crop_share,
        "crop_mode": mode,
        "mean": mean,
        "std": std,
        "num_classes": num_classes,
        "first_conv": _spell_stem("patch_embed.backbone.stem.conv", config)
        if _is_hybrid(config)
        else find_kind(config).spellings.get("patch_embed.proj.", "patch_embed.proj").rstrip("."),
        "classifier": ["head", "head_dist"] if config.has_distillation_head else "head",
    }
    if num_classes and config.id2label != {i: f"LABEL_{i}" for i in range(num_classes)}:
        pretrained_config["label_names"] = [config.id2label[i] for i in range(num_classes)]
    return pretrained_config


def _find_input_size(outgoing: OutgoingModel) -> tuple[int, int]:
    """Return the images that preprocessing gives, if timm has no table or resizes it as we do; else nominal ones."""
    processor, config = outgoing.processor, outgoing.config
    pixels = dict(processor.crop_size) if processor.do_center_crop else dict(processor.size)
    kind = find_kind(config)
    resizes = kind is NAFLEX or (kind is VIT and config.position_interpolation == "bicubic_antialias")
    takes_any = (resizes or config.position_embedding == "none") and {"height", "width"} <= pixels.keys()
    return (pixels["height"], pixels["width"]) if takes_any else outgoing.nominal_size


def _find_cropping(outgoing: OutgoingModel) -> tuple[str, float]:
    """Return timm's (crop_mode, crop_pct) for the processor's steps; raise a UserError if timm cannot express them."""
    processor = outgoing.processor
    height, width = _find_input_size(outgoing)
    size = dict(processor.size)
    crop = dict(processor.crop_size) if processor.do_center_crop else dict(processor.size)
    mode = "center" if "shortest_edge" in size else "squash"
    resized_side = size.get("shortest_edge", size.get("height", 0))
    crop_share = height / max(resized_side, 1)
    if math.floor(height / crop_share) < resized_side:  # timm rounds the size down
        crop_share = math.nextafter(crop_share, 0)
    expected_size = (
        {"shortest_edge": resized_side}
        if mode == "center"
        else {"height": resized_side, "width": math.floor(width / crop_share)}
    )
    has_square_crop = mode == "squash" or height == width
    has_padding = bool(getattr(processor, "do_pad", None))
    is_other = size != expected_size or crop != {"height": height, "width": width} or not has_square_crop
    if not processor.do_resize or has_padding or is_other:
        raise UserError(
            f"timm cannot preprocess images with size={size}, crop_size={crop}, do_pad={has_padding} for a "
            f"model of {height}x{width} px, so nothing was written; resize to the model's size in "
            "preprocessor_config.json"
        )
    return mode, crop_share
