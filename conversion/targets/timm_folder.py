"""A folder for timm: `timm.create_model("local-dir:FOLDER", pretrained=True)`, or a repository of the Hub."""

import json
import math
from typing import Any, final

import torch
from safetensors.torch import save_file
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins import timm as timm_tables
from hf_vit.conversion.origins.beside import RESAMPLE
from hf_vit.conversion.targets.graphs.preprocessing import scale_of
from hf_vit.conversion.targets.target import ANY, SIZES, OutgoingModel, Target, largest_difference
from hf_vit.errors import UserError

# Arguments make any plain ViT of them, but for eps and MLP; heads are given, so that the names stand for no exception.
PLAIN = {
    (1e-6, "dense"): "vit_base_patch16_224",
    (1e-5, "dense"): "vit_base_patch16_clip_224",
    (1e-6, "swiglu"): "vit_giant_patch14_dinov2",
}
DISTILLED = "deit_base_distilled_patch16_224"
# A stem's depths, unlike all else, are the architecture's; its width is always this.
HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
STEM_WIDTH = 64
_ACTIVATIONS = {ours: name for name, ours in timm_tables.ACTIVATIONS.items()}
_POOLINGS = {ours: name for name, ours in timm_tables.POOLINGS.items()} | {"map_with_registers": "map"}

_TABLES = {"hf_vit": timm_tables.VIT, "hf_hybrid_vit": timm_tables.HYBRID}
_EXPRESSED = {
    **SIZES,
    "hidden_act": tuple(_ACTIVATIONS),
    "pooling": tuple(_POOLINGS),
    **dict.fromkeys(("qkv_bias", "use_class_token", "position_on_class_token", "layer_scale_init_value"), ANY),
    **dict.fromkeys(("use_distillation_token", "use_distillation_head", "stem_patch_size"), ANY),
    **dict.fromkeys(("num_register_tokens", "norm_before_layers", "norm_after_pooling", "mlp_type"), ANY),
    "layer_norm_eps": (1e-6, 1e-5),
    "stage_depths": tuple(HYBRIDS),
    "stem_width": (STEM_WIDTH,),
    **{name: (value,) for name, value in timm_tables.STEM_CONSTANTS.items()},
}


@final
class TimmFolder(Target):
    """config.json and weights of timm, checked there."""

    name = "timm"
    title = "timm's VisionTransformer"
    tables = _TABLES
    expresses = _EXPRESSED
    libraries = (("timm",), "timm")

    def write(self, outgoing: OutgoingModel) -> None:
        config, num_classes = outgoing.config, outgoing.config.num_labels if outgoing.has_head else 0
        plain = DISTILLED if config.use_distillation_token else PLAIN.get((config.layer_norm_eps, config.mlp_type))
        described = {
            "architecture": HYBRIDS[config.stage_depths] if _is_hybrid(config) else plain,
            "num_classes": num_classes,
            "num_features": config.hidden_size,
            "global_pool": _POOLINGS[config.pooling],
            "model_args": _arguments(outgoing, num_classes),
            "pretrained_cfg": _pretrained(outgoing, num_classes),
        }
        if config.problem_type is not None:  # timm passes it over
            described["problem_type"] = config.problem_type
        arrays = outgoing.arrays
        if config.num_register_tokens and config.has_class_token and config.position_on_class_token is True:
            # timm has positions of all special tokens, registers too, or of none: the class token takes its own along.
            first, patches = arrays["pos_embed"][:, :1], arrays["pos_embed"][:, 1:]
            arrays = arrays | {"cls_token": arrays["cls_token"] + first, "pos_embed": patches.contiguous()}
        text = json.dumps(described, indent=2, ensure_ascii=False) + "\n"
        (outgoing.folder / "config.json").write_text(text, encoding="utf-8")
        save_file(arrays, outgoing.folder / "model.safetensors", metadata={"format": "pt"})

    @torch.no_grad()
    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        import timm

        model: Any = timm.create_model(f"local-dir:{outgoing.folder}", pretrained=True).eval()
        images, ours = outgoing.probe()
        theirs = model(images) if outgoing.has_head else model.forward_features(images)
        return largest_difference(ours, theirs), f"timm {timm.__version__}"

    def spell(self, key: str, model: PreTrainedModel) -> str:
        if key.startswith("norm.") and model.config.norm_after_pooling:
            return f"fc_{key}"
        return _spell(key.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2."), model.config)

    def objections(self, config: PreTrainedConfig, has_head: bool) -> list[str]:
        alone = _is_hybrid(config) or config.use_distillation_token  # built by an architecture of its own
        if (config.layer_norm_eps, config.mlp_type) not in (list(PLAIN)[:1] if alone else PLAIN):
            return [f"layer_norm_eps={config.layer_norm_eps} with mlp_type={config.mlp_type!r} in one architecture"]
        if config.mlp_type == "swiglu" and config.pooling.startswith("map") and config.hidden_act != "silu":
            return [
                f"hidden_act={config.hidden_act!r} in the MAP head of a model with mlp_type='swiglu' (it has 'silu')"
            ]
        if not config.use_distillation_token:
            return []
        if _is_hybrid(config):
            return ["use_distillation_token=True of a hybrid"]
        wrong = {
            "num_register_tokens beside a distillation token": config.num_register_tokens,
            "use_distillation_head=False before a classifier": has_head and not config.has_distillation_head,
            "position_on_class_token=False beside a distillation token": not config.position_on_class_token,
        }
        return [setting for setting, is_wrong in wrong.items() if is_wrong]


def _is_hybrid(config: PreTrainedConfig) -> bool:
    return config.model_type == "hf_hybrid_vit"


def _spell(key: str, config: PreTrainedConfig) -> str:
    alone = _is_hybrid(config) and not config.stage_depths
    return timm_tables.name_in_root_alone(key) if alone else key


def _arguments(outgoing: OutgoingModel, num_classes: int) -> dict[str, Any]:
    config = outgoing.config
    is_swiglu = config.mlp_type == "swiglu"  # packed: gate and values in one layer
    width = config.intermediate_size * (2 if is_swiglu else 1)
    ratio = width / config.hidden_size
    if int(config.hidden_size * ratio) < width:  # timm rounds down
        ratio = math.nextafter(ratio, math.inf)
    special = config.pooling == "map_with_registers" or (config.pooling == "map" and config.has_class_token)
    sides = (config.stem_patch_size,) * 2 if _is_hybrid(config) else config.patch_stride
    return {
        "img_size": list(outgoing.nominal_size),
        "patch_size": sides[0] if sides[0] == sides[1] else list(sides),
        "in_chans": config.num_channels,
        "num_classes": num_classes,
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": ratio,
        "qkv_bias": config.qkv_bias,
        "act_layer": "silu" if is_swiglu else _ACTIVATIONS[config.hidden_act],
        "global_pool": _POOLINGS[config.pooling],
        "class_token": config.has_class_token,
        "no_embed_class": config.position_on_class_token != "with_registers"
        and (bool(config.num_register_tokens) or (config.has_class_token and not config.position_on_class_token)),
        "pre_norm": config.norm_before_layers,
        "init_values": config.layer_scale_init_value,
        "final_norm": config.norm_after_pooling is not None,
        "fc_norm": bool(config.norm_after_pooling),
        **({"reg_tokens": config.num_register_tokens} if config.num_register_tokens else {}),
        **({"pool_include_prefix": True} if special else {}),
    }


def _pretrained(outgoing: OutgoingModel, num_classes: int) -> dict[str, Any]:
    """Return timm's `pretrained_cfg`; timm always divides levels by 255 first."""
    config, processor = outgoing.config, outgoing.processor
    names = {number: name for name, number in RESAMPLE.items()}
    mode, part = _cropping(outgoing)
    mean, std = map(list, scale_of(processor, config.num_channels, unit=255))
    if min(std) <= 0:
        raise UserError(
            f"timm's VisionTransformer cannot express image_std={processor.image_std} with "
            f"rescale_factor={processor.rescale_factor} (both have to be above 0); nothing was written"
        )
    described: dict[str, Any] = {
        "input_size": [config.num_channels, *outgoing.nominal_size],
        "fixed_input_size": True,
        "interpolation": names[int(processor.resample)],
        "crop_pct": part,
        "crop_mode": mode,
        "mean": mean,
        "std": std,
        "num_classes": num_classes,
        "first_conv": _spell("patch_embed.backbone.stem.conv", config) if _is_hybrid(config) else "patch_embed.proj",
        "classifier": ["head", "head_dist"] if config.has_distillation_head else "head",
    }
    if num_classes and config.id2label != {i: f"LABEL_{i}" for i in range(num_classes)}:
        described["label_names"] = [config.id2label[i] for i in range(num_classes)]
    return described


def _cropping(outgoing: OutgoingModel) -> tuple[str, float]:
    """Return timm's (crop_mode, crop_pct) for the processor's steps; a UserError where it has no words for them."""
    processor, (height, width) = outgoing.processor, outgoing.nominal_size
    size, crop = dict(processor.size), dict(processor.crop_size) if processor.do_center_crop else dict(processor.size)
    mode = "center" if "shortest_edge" in size else "squash"
    scaled = size.get("shortest_edge", size.get("height", 0))
    part = height / max(scaled, 1)
    if math.floor(height / part) < scaled:  # timm rounds down
        part = math.nextafter(part, 0)
    wanted = {"shortest_edge": scaled} if mode == "center" else {"height": scaled, "width": math.floor(width / part)}
    square = mode == "squash" or height == width
    pads = bool(getattr(processor, "do_pad", None))
    is_other = size != wanted or crop != {"height": height, "width": width} or not square
    if not processor.do_resize or pads or is_other:
        raise UserError(
            f"timm's VisionTransformer cannot express the preprocessing size={size}, "
            f"crop_size={crop}{', do_pad=True' * pads} of a model for {height}x{width} px; nothing was "
            "written"
        )
    return mode, part
