"""Export to a folder for transformers: its ViT, DeiT, CLIP, SigLIP, SigLIP 2, DINOv2, DINOv3 or AIMv2.

The class follows from the model's settings, so that a model that came from one of these classes goes back to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from typing import Any, final

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins import clip
from hf_vit.conversion.origins import transformers as tables
from hf_vit.conversion.origins.beside import FIELD_NAMES
from hf_vit.conversion.origins.origin import dense, format_size
from hf_vit.conversion.planning import HEADS
from hf_vit.conversion.targets.target import (
    AIMV2_FIELDS,
    OutgoingModel,
    Part,
    Target,
    express,
    has_head,
    measure_difference,
)
from hf_vit.errors import UserError

_HEADS = (*HEADS, "visual_projection.")  # keys outside of the bare model
_CONSTANTS = ("hidden_act", "layer_norm_eps")


@dataclass(frozen=True)
class Kind(Part):
    """A group of transformers' classes, and what they can express."""

    class_name: Callable[[Any, bool], str]  # (config, whether there is a head) -> name of the class
    # config -> fields of transformers' config that `FIELD_NAMES` does not have, or that have other values
    fields: Callable[[Any], dict[str, Any]]


def _choose_vit_class(config: Any, has_head: bool) -> str:
    """Return the name of transformers' ViT or DeiT class."""
    if not config.use_distillation_token:
        return "ViTForImageClassification" if has_head else "ViTModel"
    teacher = "WithTeacher" if config.has_distillation_head else ""
    return f"DeiTForImageClassification{teacher}" if has_head else "DeiTModel"


VIT = Kind(
    "transformers' ViT and DeiT",
    tables.DEIT,  # has ViT's rules and those of the distillation token
    express(*_CONSTANTS, "qkv_bias", "representation_size", "use_distillation_token", "use_distillation_head"),
    lambda config, has_head: {
        f"representation_size={config.representation_size} before a classifier": has_head
        and config.representation_size is not None
    },
    _choose_vit_class,
    lambda config: {
        "pooler_output_size": config.representation_size or config.hidden_size,
        "pooler_act": "tanh",
    },
)


def _get_sizes(config: Any) -> dict[str, tuple[int, int]]:
    """Return the (height, width) in px of images and patches, by the names of transformers' fields."""
    return {"image_size": config.nominal_size, "patch_size": config.patch_stride}


def _list_unequal_sides(config: Any) -> dict[str, object]:
    """Name images and patches that are not square."""
    return {f"{name}={pair} (only squares)": pair[0] != pair[1] for name, pair in _get_sizes(config).items()}


def _list_tower_objections(config: Any, has_head: bool) -> Mapping[str, object]:
    """Name settings that CLIP or SigLIP lacks.

    With a head, only CLIP's class token matters, so norms before or after pooling are equivalent.
    """
    is_clip = config.norm_before_layers
    return {
        "norm_after_pooling=False without a head": is_clip and not (config.norm_after_pooling or has_head),
        "pooling='map' before a classifier": not is_clip and has_head and config.pooling == "map",
    } | _list_unequal_sides(config)


CLIP = Kind(
    "transformers' CLIP",
    clip.CLIP,
    express(*_CONSTANTS, norm_before_layers=(True,), norm_after_pooling=(True, False)),
    _list_tower_objections,
    lambda config, has_head: "CLIPVisionModel" + ("WithProjection" if has_head else ""),
    lambda config: {"projection_dim": config.num_labels},
)
SIGLIP = Kind(
    "transformers' SigLIP",
    clip.SIGLIP,
    express(*_CONSTANTS, pooling=("map", "gap")),
    _list_tower_objections,
    lambda config, has_head: "SiglipForImageClassification" if has_head else "SiglipVisionModel",
    lambda config: {"vision_use_head": config.pooling == "map"},
)
SIGLIP2 = Kind(
    "transformers' SigLIP 2",
    clip.SIGLIP2,
    SIGLIP.expresses,
    lambda config, has_head: (
        dict(_list_tower_objections(config, has_head))
        | {f"positions of {config.grid[0]}x{config.grid[1]} patches (only squares)": config.grid[0] != config.grid[1]}
    ),
    lambda config, has_head: f"Siglip2{'ForImageClassification' if has_head else 'VisionModel'}",
    lambda config: SIGLIP.fields(config) | {"num_patches": config.grid[0] * config.grid[1]},
)


def compute_mlp_ratio(config: Any) -> int | None:
    """Return the `mlp_ratio` for the MLP's width, a whole number in transformers; None if there is none.

    DINOv2 takes two thirds of a SwiGLU's nominal width, rounded up to a multiple of 8.
    """
    widths = {ratio: config.hidden_size * ratio for ratio in range(1, 17)}
    if config.mlp_type == "swiglu":
        widths = {ratio: (int(width * 2 / 3) + 7) // 8 * 8 for ratio, width in widths.items()}
    return next((ratio for ratio, width in widths.items() if width == config.intermediate_size), None)


def _make_dinov2_fields(config: Any) -> dict[str, Any]:
    """Return the fields of DINOv2's config that only it has."""
    return {
        "mlp_ratio": compute_mlp_ratio(config),
        "use_swiglu_ffn": config.mlp_type == "swiglu",
        **({} if config.num_register_tokens else {"use_mask_token": False}),
    }


def _find_dinov2_objections(config: Any, has_head: bool) -> Mapping[str, object]:
    """Name settings that DINOv2 lacks."""
    if not has_head and config.pooling != "token":
        return {f"pooling={config.pooling!r} without a head": True}
    width = f"intermediate_size={config.intermediate_size} (no mlp_ratio gives it)"
    return {width: not compute_mlp_ratio(config)} | _list_unequal_sides(config)


DINOV2 = Kind(
    "transformers' DINOv2",
    replace(tables.DINOV2, rules=(*tables.DINOV2.rules[:-2], *dense("classifier", "LR", part="head"))),
    express(
        *(*_CONSTANTS, "qkv_bias", "layer_scale_init_value", "num_register_tokens", "mlp_type"),
        pooling=("token", "gap", "token_and_gap"),
        use_class_token=(None, True),
    ),
    _find_dinov2_objections,
    lambda config, has_head: (
        "Dinov2"
        + ("WithRegisters" if config.num_register_tokens else "")
        + ("ForImageClassification" if has_head else "Model")
    ),
    _make_dinov2_fields,
)


def _make_dinov3_fields(config: Any) -> dict[str, Any]:
    """Return the fields of DINOv3's config that only it has; its SwiGLU has its activation in `hidden_act`."""
    is_gated = config.mlp_type == "swiglu"
    return {
        "use_gated_mlp": is_gated,
        **({"hidden_act": "silu"} if is_gated else {}),
        **dict.fromkeys(("query_bias", "value_bias"), config.qkv_bias),
        "key_bias": config.qkv_bias and config.key_bias,
        "proj_bias": config.projection_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": config.rotary_base,
        "pos_embed_shift": config.rotary_shift,
        "pos_embed_jitter": config.rotary_jitter,
        "pos_embed_rescale": config.rotary_rescale,
    }


DINOV3 = Kind(
    "transformers' DINOv3",
    tables.DINOV3,
    express(
        *(*_CONSTANTS, "qkv_bias", "key_bias", "projection_bias", "mlp_bias", "layer_scale_init_value", "mlp_type"),
        *("num_register_tokens", "rotary_base", "rotary_shift", "rotary_jitter", "rotary_rescale"),
        position_embedding=("none",),
        rotary_embedding=("axial",),
        rotary_coordinates=("centered",),
        rotary_pairing=("halves",),
        use_class_token=(None, True),
    ),
    lambda config, has_head: {
        "a classifier (it has none for DINOv3)": has_head,
        "layer_scale_init_value=None": config.layer_scale_init_value is None,
    },
    lambda config, has_head: "DINOv3ViTModel",
    _make_dinov3_fields,
)
AIMV2 = Kind(
    "transformers' AIMv2",
    tables.AIMV2,
    express(*_CONSTANTS, position_embedding=("learned", "sincos_2d_mae"), **AIMV2_FIELDS),
    lambda config, has_head: {"a classifier (it has none for AIMv2)": has_head} | _list_unequal_sides(config),
    lambda config, has_head: "Aimv2VisionModel",
    lambda config: {
        **{"hidden_act": "silu", "rms_norm_eps": config.layer_norm_eps, "use_head": False},
        "is_native": config.position_embedding == "sincos_2d_mae",
    },
)


def find_kind(config: Any) -> Kind:
    """Return the classes that fit the model, or that come closest."""
    if config.norm_before_layers:
        return CLIP
    if config.norm_on_patches:
        return AIMV2
    if config.rotary_embedding is not None:
        return DINOV3
    if config.layer_scale_init_value is not None:
        return DINOV2
    if config.has_class_token:
        return VIT
    return SIGLIP2 if config.position_interpolation == "flexivit" else SIGLIP


@final
class TransformersFolder(Target):
    """config.json and weights for transformers, which are checked with transformers."""

    name = "transformers"
    title = "transformers"
    model_types = ("hf_vit",)

    def part_for(self, config: PreTrainedConfig) -> Part:
        return find_kind(config)

    def write(self, outgoing: OutgoingModel) -> None:
        """Write config.json, the weights and the image processor."""
        hf_vit_config = outgoing.config
        _refuse_other_positions(outgoing)
        model_class = _get_model_class(hf_vit_config, outgoing.has_head)
        tower_class = model_class.config_class.sub_configs.get("vision_config")  # as SigLIP's classifier has
        names = {field.name for field in fields(tower_class or model_class.config_class)} - {"problem_type"}
        names |= {"initializer_range", "layer_norm_eps"}  # which not all classes have, but a conversion back reads
        values = {name: getattr(hf_vit_config, ours) for name, ours in FIELD_NAMES.items() if name in names}
        for name, (height, width) in _get_sizes(hf_vit_config).items():
            values[name] = height if height == width else [height, width]
        values |= find_kind(hf_vit_config).fields(hf_vit_config)
        config = model_class.config_class(**({"vision_config": values} if tower_class else values))
        config.problem_type = hf_vit_config.problem_type
        if outgoing.has_head:
            config.id2label = dict(hf_vit_config.id2label)
            config.label2id = dict(hf_vit_config.label2id)
        model = model_class(config, **_make_options(outgoing))
        model.load_state_dict(_add_missing_arrays(outgoing), strict=True)
        model.to(outgoing.model.dtype).save_pretrained(outgoing.folder)
        _make_processor(outgoing).save_pretrained(outgoing.folder)

    @torch.no_grad()
    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        model_class = _get_model_class(outgoing.config, outgoing.has_head)
        model = model_class.from_pretrained(outgoing.folder, **_make_options(outgoing)).eval()
        images, expected_results = outgoing.probe()
        is_siglip2 = find_kind(outgoing.config) is SIGLIP2
        output = model(**_make_siglip2_inputs(images, outgoing.config) if is_siglip2 else {"pixel_values": images})
        if outgoing.has_head:
            name = "image_embeds" if "image_embeds" in output else "logits"  # the former for CLIP's projection
            difference = measure_difference(expected_results, output[name])
        else:
            difference = measure_difference(expected_results, output.last_hidden_state)
            if output.pooler_output is not None:
                pooled = outgoing.model(images).pooler_output
                # torch's maximum keeps NaN, Python's does not.
                difference = float(torch.tensor([difference, measure_difference(pooled, output.pooler_output)]).max())
        return difference, f"transformers {version('transformers')}"

    def spell(self, key: str, model: PreTrainedModel) -> str:
        config = model.config
        if key.startswith(_HEADS):
            return f"cls_{key}" if config.has_distillation_head and key.startswith("classifier.") else key
        if not has_head(model):
            return key
        is_tower = find_kind(config) in (CLIP, SIGLIP, SIGLIP2)
        return f"{'vision_model' if is_tower else _get_model_class(config, True).base_model_prefix}.{key}"


def _get_model_class(config: PreTrainedConfig, has_head: bool) -> Any:
    import transformers

    return getattr(transformers, find_kind(config).class_name(config, has_head))


def _refuse_other_positions(outgoing: OutgoingModel) -> None:
    """Raise a UserError if DINOv2, which takes images of any size, has other positions at the image processor's."""
    processor, config = outgoing.processor, outgoing.config
    mode = "bicubic_antialias" if config.num_register_tokens else "bicubic"
    if find_kind(config) is not DINOV2 or config.position_interpolation == mode:
        return
    pixels = dict(processor.crop_size if processor.do_center_crop else processor.size)
    if (pixels.get("height"), pixels.get("width")) != outgoing.nominal_size:
        raise UserError(
            f"transformers' DINOv2 resizes positions by {mode!r} to the image processor's size {pixels}, but the model "
            f"has position_interpolation={config.position_interpolation!r}, so nothing was written; set the size in "
            f"preprocessor_config.json to {format_size(outgoing.nominal_size)} px, or use --to onnx"
        )


def _make_processor(outgoing: OutgoingModel) -> Any:
    """Return the image processor for the class; SigLIP 2's keeps the shape of images."""
    processor, config = outgoing.processor, outgoing.config
    if find_kind(config) is not SIGLIP2:
        return processor
    from transformers import Siglip2ImageProcessor

    names = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "do_convert_rgb")
    return Siglip2ImageProcessor(
        patch_size=config.patch_stride[0],
        max_num_patches=getattr(processor, "max_num_patches", None) or config.grid[0] * config.grid[1],
        **{name: getattr(processor, name) for name in names},
    )


def _make_siglip2_inputs(images: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Return images [B, C, H, W] of one size as SigLIP 2's inputs: patches [B, N, P*P*C], their mask and grids."""
    h, w = config.grid_of(*images.shape[2:])
    patch_h, patch_w = config.patch_stride
    pixels = images[:, :, : h * patch_h, : w * patch_w].unflatten(3, (w, patch_w)).unflatten(2, (h, patch_h))
    patches = pixels.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    mask = torch.ones(patches.shape[:2], dtype=torch.int64)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([(h, w)] * len(images)),
    }


def _make_options(outgoing: OutgoingModel) -> dict[str, Any]:
    """Return further arguments of the class: a bare ViT may have a pooler or not."""
    if outgoing.has_head or find_kind(outgoing.config) is not VIT:
        return {}
    return {"add_pooling_layer": outgoing.config.representation_size is not None}


def _add_missing_arrays(outgoing: OutgoingModel) -> dict[str, torch.Tensor]:
    """Return the arrays with those that only transformers has: mask tokens, and DINOv2's head for token and mean."""
    config = outgoing.config
    arrays = dict(outgoing.arrays)
    if find_kind(config) is DINOV3:
        width, dtype = config.hidden_size, outgoing.model.dtype
        all_arrays = {
            "embeddings.mask_token": torch.zeros(1, 1, width, dtype=dtype),
            "embeddings.register_tokens": torch.zeros(1, 0, width, dtype=dtype),  # replaced if there are any
        }
        for key, array in arrays.items():
            spelling = key.replace(".mlp.fc1.", ".mlp.up_proj.").replace(".mlp.fc2.", ".mlp.down_proj.")
            all_arrays[spelling] = array
        return all_arrays
    if find_kind(config) is not DINOV2:
        return arrays
    if outgoing.has_head and config.pooling != "token_and_gap":  # the head gets zeros for what the pooling leaves out
        weight = arrays["classifier.weight"]
        halves = [weight, torch.zeros_like(weight)]
        arrays["classifier.weight"] = torch.cat(halves if config.pooling == "token" else halves[::-1], dim=1)
    if config.num_register_tokens:
        token_key = next(key for key in arrays if key.endswith("embeddings.register_tokens"))
        mask_token = torch.zeros(1, config.hidden_size, dtype=arrays[token_key].dtype)
        arrays[token_key.replace("register_tokens", "mask_token")] = mask_token
    return arrays
