"""Define timm's origins: plain ViTs (`vit_*`, `deit_*`, `deit3_*`, `flexivit_*`, SigLIP's towers), hybrids, Mixers,
BiT.

Query, key and value are one fused projection. Facts that names and shapes do not show (heads, activation, pooling) come
from the architecture and the arguments in config.json; this module lists the exceptions from timm's defaults.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

from pydantic import BaseModel

from hf_vit.conversion.origins.beside import (
    ORIGINAL_PIXELS,
    Count,
    Text,
    from_timm,
    read_class_names,
    read_size,
    validate_values,
)
from hf_vit.conversion.origins.google import STEM, configure_bit, configure_mixer, configure_stem
from hf_vit.conversion.origins.origin import (
    ASSUMED_HEADS,
    Declared,
    Fields,
    KeyNames,
    KeyRule,
    Network,
    Origin,
    Patches,
    dense,
    find_heads,
    format_size,
    shorten_pair,
)
from hf_vit.conversion.origins.wrapped import make_recognizer, rename_keys, strip_wrappers, unwrap
from hf_vit.conversion.readers import Companions, Shapes
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import PositionInterpolation

# timm 1.0: by default heads are 64 wide, the GELU is exact and eps is 1e-6. Architectures with other values, which
# their weights do not show (all matches count).
EXCEPTIONS: dict[str, Fields] = {
    r"vit_so400m_patch16_siglip_(gap_)?\d+": {"num_attention_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    r"vit_so400m_.+": {"num_attention_heads": 16},
    r"vit_giantopt_.+": {"num_attention_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    r"(vit_large_patch16_siglip_(gap_)?512|vit_base_patch32_siglip_(gap_)?256)": {"hidden_act": "gelu_pytorch_tanh"},
    r"vit_base_patch16_gap_224": {"num_attention_heads": 16},
    r"vit_giant_patch14_(reg\d_)?(dinov2|tipsv2)": {"hidden_act": "silu"},
    r"test_vit2?": {"num_attention_heads": 2},
    r"test_vit[34]": {"num_attention_heads": 3},
    r"vit_\w+_rpn_\d+": {"norm_after_branches": True},
    r"vit_\w+_clip_quickgelu_\d+": {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    r"vit_\w+_clip_(\d+|laion2b)": {"layer_norm_eps": 1e-5},  # the second in names of timm before 0.8
}
# Arguments of an architecture that its config.json does not name.
ARGUMENTS: dict[str, Fields] = {
    r"vit_\w+_radio_.+|vit_intern300m_.+": {"final_norm": False},
    r"test_vit3": {"pool_include_prefix": True},
    r"test_vit4": {"norm_layer": "rmsnorm"},
}
_RMS = "norms that do not subtract the mean (RMSNorm)"
# Architecture -> its feature that no model here has, even if its keys are those of a plain ViT.
UNSUPPORTED_FEATURES: dict[str, str] = {
    r"vit_\w+_sapiens2(_.*)?": "queries that share keys, and LayerScale after attention alone",
    r"beit(v2)?(_.+)?": "a learned bias of relative positions in its attention, also for the class token",
    r"samvit_.+": "attention in windows with relative positions (SAM)",
    r"vit_\w+_xp_\d+": f"parallel attention and MLP, and {_RMS}",
    r"vit_dp\w+|vit_pwee_.+|vit_\w+_\d+x[2-9]_\d+": "parallel attention and MLP in a block",
    r"vit_d(little|wee)_.+": "differential attention",
    r"vit_\w+_(mci|resnet\d+d)(_.+)?": "another stem than BiT's ResNet (ResNet-D, MobileCLIP)",
    r"g(mixer|mlp)_.+|resmlp_.+": "another mix of tokens than the MLP-Mixer's (gates, or affine layers)",
    r"resnetv2_\d+(d|t)?(_(evos|frn|gn))?": "another ResNetV2 than BiT's (batch norms or other stems)",
}
# Arguments in config.json that are not read: names and shapes show them too, or they only affect training.
_IGNORED_ARGUMENTS = re.compile(
    r"img_size|patch_size|in_chans|num_classes|embed_dim|depth|mlp_ratio|\w+_bias|class_token|no_embed_class|init_values|"
    r"reg_tokens|pre_norm|final_norm|fc_norm|qk_norm|pos_embed|rel_pos_(type|dim)|shared_rel_pos|(\w+_)?drop(_path)?_rate|"
    r"weight_init|fix_init|dynamic_img_size|strict_img_size|pretrained_strict|features_only"
)
ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"} | {name: name for name in ("gelu", "quick_gelu", "relu", "silu")}
POOLINGS = {"token": "token", "avg": "gap", "map": "map"}

PATCHES = "patch_embed.proj.weight"
_BLOCK, _TARGET = "blocks.{i}", "layers.{i}"
_MAP = "pooler.map"
_OFFSETS = f"{_TARGET}.attention.relative_position.offset_embeddings"


def _make_offset_mlp_rules(source: str, part: str) -> tuple[KeyRule, ...]:
    """Return the rules of the MLP that computes relative positions' biases; its four arrays make one table."""
    axes = {"fc1.weight": ("H", "2"), "fc1.bias": ("H",), "fc2.weight": ("A", "H"), "fc2.bias": ("A",)}
    return tuple(KeyRule(f"{source}.mlp.{name}", axes[name], "offset_mlp", _OFFSETS, part) for name in axes)


BLOCK_RULES = (
    *dense(f"{_BLOCK}.norm1", "D", f"{_TARGET}.layernorm_before"),
    *dense(f"{_BLOCK}.attn.qkv", ("3D", "D"), f"{_TARGET}.attention.{{q,k,v}}_proj", bias_part="qkv_bias"),
    *dense(f"{_BLOCK}.attn.proj", "DD", f"{_TARGET}.attention.o_proj"),
    KeyRule(f"{_BLOCK}.ls1.gamma", "D", "keep", f"{_TARGET}.layer_scale1.lambda1", "layer_scale"),
    *dense(f"{_BLOCK}.norm2", "D", f"{_TARGET}.layernorm_after"),
    *dense(f"{_BLOCK}.mlp.fc1", "MD", f"{_TARGET}.mlp.fc1", "dense"),
    *dense(f"{_BLOCK}.mlp.fc2", "DM", f"{_TARGET}.mlp.fc2", "dense"),
    *dense(f"{_BLOCK}.mlp.w12", ("2M", "D"), f"{_TARGET}.mlp.{{gate,up}}_proj", "packed_swiglu"),
    *dense(f"{_BLOCK}.mlp.w1", "MD", f"{_TARGET}.mlp.gate_proj", "swiglu"),
    *dense(f"{_BLOCK}.mlp.w2", "MD", f"{_TARGET}.mlp.up_proj", "swiglu"),
    *dense(f"{_BLOCK}.mlp.w3", "DM", f"{_TARGET}.mlp.down_proj", "swiglu_out"),
    KeyRule(f"{_BLOCK}.ls2.gamma", "D", "keep", f"{_TARGET}.layer_scale2.lambda1", "layer_scale"),
)
_RELATIVE_RULES = (
    *_make_offset_mlp_rules(f"{_BLOCK}.attn.rel_pos", "offset_mlp"),
    *_make_offset_mlp_rules("shared_rel_pos", "shared_offset_mlp"),
    KeyRule(f"{_BLOCK}.attn.rel_pos.relative_position_bias_table", "OA", "keep", _OFFSETS, "offset_table"),
)
_RELATIVE = tuple(dict.fromkeys(rule.part for rule in _RELATIVE_RULES))
RULES = (
    KeyRule(PATCHES, "DCPQ", "keep", "embeddings.patch_embeddings.projection.weight"),
    KeyRule("patch_embed.proj.bias", "D", "keep", "embeddings.patch_embeddings.projection.bias", "without norm_before"),
    KeyRule("cls_token", "11D", "keep", "embeddings.cls_token", "cls"),
    KeyRule("dist_token", "11D", "keep", "embeddings.distillation_token", "distillation"),
    KeyRule("reg_token", "1GD", "keep", "embeddings.register_tokens", "registers"),
    KeyRule("pos_embed", "1TD", "keep", "embeddings.position_embeddings", f"without {', '.join(_RELATIVE)}"),
    *dense("norm_pre", "D", "embeddings.layernorm", "norm_before"),
    *BLOCK_RULES,
    *_RELATIVE_RULES,
    *dense("norm", "D", "layernorm", "norm"),
    *dense("fc_norm", "D", "layernorm", "norm_after"),
    KeyRule("attn_pool.latent", "11D", "keep", f"{_MAP}.probe", "map"),
    *dense("attn_pool.q", "DD", f"{_MAP}.attention.q_proj", "map"),
    *dense("attn_pool.kv", ("2D", "D"), f"{_MAP}.attention.{{k,v}}_proj", "map"),
    *dense("attn_pool.proj", "DD", f"{_MAP}.attention.o_proj", "map"),
    *dense("attn_pool.norm", "D", f"{_MAP}.layernorm", "map"),
    *dense("attn_pool.mlp.fc1", "MD", f"{_MAP}.mlp.fc1", "map"),
    *dense("attn_pool.mlp.fc2", "DM", f"{_MAP}.mlp.fc2", "map"),
    *dense("pre_logits.fc", "RD", "pooler.dense", "pre_logits"),
    *dense("head", "LR", "classifier", "head"),
    *dense("head_dist", "LD", "distillation_classifier", "second_head"),
)


class TimmConfig(BaseModel):
    """The fields of timm's config.json that are read."""

    architecture: str | None = None
    global_pool: str | None = None
    model_args: dict[str, Any] | None = None
    pretrained_cfg: dict[str, Any] | None = None
    label_names: list[Text] | None = None
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    max_num_patches: Count | None = None


def refuse_foreign(architecture: str) -> None:
    """Raise a UserError for an architecture of timm with a feature that no model here has."""
    for pattern, feature in UNSUPPORTED_FEATURES.items():
        if re.fullmatch(pattern, architecture):
            raise UserError(
                f"timm's '{architecture:.80}' has {feature}, which hf_vit does not support; use it with timm"
            )


def find_fields(table: Mapping[str, Fields], architecture: str) -> Fields:
    """Return the fields of all entries of a table that match an architecture; later ones win."""
    fields: Fields = {}
    for pattern, values in table.items():
        fields |= values if re.fullmatch(pattern, architecture) else {}
    return fields


def read_config_file(companions: Companions) -> tuple[TimmConfig, str, Fields]:
    """Return timm's config.json, the name of the architecture without its tag ("" if there is none), and arguments."""
    config_file = validate_values(TimmConfig, companions.config or {}, "config.json")
    return config_file, (config_file.architecture or "").partition(".")[0], config_file.model_args or {}


# Files with a fused projection in blocks, and with patches that are cut from the image itself.
recognizes = make_recognizer(PATCHES, ("",), lacks=r"patch_embed\.backbone\.")
# Keys of timm before version 0.9 -> why they are ignored.
_IGNORED = {r".*rel_pos\.(relative_position_index|rel_coords_log)": "indices of the relative positions"}


def names(shapes: Shapes, ignored: Mapping[str, str] = _IGNORED) -> KeyNames:
    """Remove prefixes, sort out keys that are not weights, and use DINOv2's names for a SwiGLU."""
    return with_swiglu(unwrap(shapes, PATCHES, ignored), shapes)


def with_swiglu(names: KeyNames, shapes: Shapes) -> KeyNames:
    """Use DINOv2's names for the layers of a SwiGLU; timm names a packed one like a dense MLP."""
    first, second = (shapes.get(names.normal.get(f"blocks.0.mlp.{name}.weight", ""), ()) for name in ("fc1", "fc2"))
    spellings: dict[str, str] = {}  # DINOv2's name -> timm's
    if len(first) == len(second) == 2 and first[0] == 2 * second[1]:  # packed: gate and up in one layer
        spellings = {"w12": "fc1", "w3": "fc2"}
    if any(re.fullmatch(r"blocks\.\d+\.mlp\.fc1_[gx]\.weight", name) for name in names.normal):
        spellings = {"w1": "fc1_g", "w2": "fc1_x", "w3": "fc2"}
    pooling = {"attn_pool.": "attn_pool."}  # whose MLP has no gate, and keeps its names
    return rename_keys(names, pooling | {f".mlp.{new}.": f".mlp.{old}." for new, old in spellings.items()})


def configure(network: Network) -> Fields:
    return _derive_common_fields(network, network.patches) | {"patch_size": shorten_pair(network.patches.sides)}


def read_shown_fields(network: Network) -> Fields:
    """Return the config's fields that names and shapes show in files of timm's VisionTransformer and Eva."""
    dims, parts = network.dims, network.parts
    return {
        "num_channels": dims["C"],
        "hidden_size": dims["D"],
        "intermediate_size": dims["M"],
        "mlp_type": "dense" if "dense" in parts else "swiglu",
        "hidden_act": "gelu",
        "pooling": "map" if "map" in parts else "token" if "cls" in parts and "norm_after" not in parts else "gap",
        "use_class_token": "cls" in parts,
        "num_register_tokens": dims["G"] if "registers" in parts else 0,
        "norm_before_layers": "norm_before" in parts,
        "norm_after_pooling": "norm_after" in parts if {"norm", "norm_after"} & parts else None,
        # Weights do not show the initial value; timm's models use 1e-5 or 1e-6.
        "layer_scale_init_value": 1e-5 if "layer_scale" in parts else None,
    }


def _derive_common_fields(network: Network, patches: Patches) -> Fields:
    """Return the config's fields that names and shapes show, and timm's defaults for the others."""
    dims, parts = network.dims, network.parts
    has_one_head = {"distillation", "head"} <= parts and "second_head" not in parts
    fields = find_heads(dims["D"]) | {
        **read_shown_fields(network),
        "layer_norm_eps": 1e-5 if "norm_before" in parts else 1e-6,
        "qkv_bias": "qkv_bias" in parts,
        "position_interpolation": "bicubic_antialias",
        "use_distillation_token": "distillation" in parts,
        "use_distillation_head": False if has_one_head else None,
        "representation_size": dims["R"] if "pre_logits" in parts else None,
    }
    positions = derive_position_fields if parts.isdisjoint(_RELATIVE) else _derive_relative_positions
    return fields | positions(network, patches)


def derive_position_fields(network: Network, patches: Patches) -> Fields:
    """Return the fields for a position table, which may have rows for special tokens and registers too."""
    dims, parts, image_size = network.dims, network.parts, network.image_size
    rows = dims["T"]
    special = ("cls" in parts) + ("distillation" in parts)
    registers = dims["G"] if "registers" in parts else 0
    # Rows for class and distillation token; also if nothing fits, which `find_table_size` reports.
    prefix_rows, position_on_class_token = special, True
    if not patches.fits(rows - special, image_size):
        if patches.fits(rows, image_size):  # for patches alone
            prefix_rows, position_on_class_token = 0, not special
        elif registers and patches.fits(rows - special - registers, image_size):
            prefix_rows, position_on_class_token = special + registers, "with_registers"
    size = patches.find_table_size(rows - prefix_rows, image_size)
    return {
        "image_size": shorten_pair(size),
        "position_embedding": "learned",
        "position_on_class_token": position_on_class_token,
    }


def _derive_relative_positions(network: Network, patches: Patches) -> Fields:
    """Return the fields for relative positions stored as a table or as an MLP, at the given image size."""
    dims, image_size = network.dims, network.image_size
    if image_size is None:
        raise UserError(
            "the weights do not record the image size for their relative positions; give it with "
            "--image-size, such as --image-size 224"
        )
    h, w = patches.grid_of(image_size)
    if "offset_table" in network.parts and dims["O"] != (2 * h - 1) * (2 * w - 1):
        raise UserError(
            f"the file has {dims['O']} relative positions, but {h}x{w} patches need "
            f"{(2 * h - 1) * (2 * w - 1)}; give the size of its training with --image-size (a model whose "
            "class token has relative positions does not convert)"
        )
    return {
        "image_size": shorten_pair(image_size),
        "position_embedding": "relative_bias",
        "num_attention_heads": dims["A"],
    }


def declared(companions: Companions, shapes: Shapes) -> Declared:
    """Return the facts about architecture, arguments and preprocessing in timm's config.json."""
    key_names = set(strip_wrappers(shapes))
    if companions.config is None:
        _refuse_unlikely(key_names, {})
        is_relative = any("rel_pos." in name for name in key_names)
        # With a layer scale, timm's blocks normalize before each layer; without one, there are both kinds.
        if is_relative and not any(name.endswith(".ls1.gamma") for name in key_names):
            raise UserError(
                "the weights do not show whether LayerNorms come before or after attention and MLP; give the "
                "folder with timm's config.json"
            )
        return Declared()
    config_file, architecture, arguments = read_config_file(companions)
    if config_file.architecture is None:
        raise UserError("the weights are timm's, but config.json has no 'architecture'; give timm's config.json")
    if not re.fullmatch(r"(vit|deit|deit3|flexivit|test_vit)\d?(_[\w-]+)?", architecture):
        raise UserError(
            f"config.json has the architecture '{architecture:.80}' of timm, but the weights are those of a "
            "plain ViT (vit_*, deit*_* or flexivit_*); give the config.json of these weights"
        )
    arguments = find_fields(ARGUMENTS, architecture) | arguments
    _refuse_unlikely(key_names, arguments)
    fields = {"layer_norm_eps": 1e-6} | find_fields(EXCEPTIONS, architecture)
    fields |= convert_arguments({"global_pool": config_file.global_pool, **arguments}, key_names)
    return declare(config_file, companions, fields)


def declare(config_file: TimmConfig, companions: Companions, fields: Mapping[str, Any]) -> Declared:
    """Return these fields with the image size, class names and preprocessing in config.json, read as timm does."""
    if config_file.pretrained_cfg is not None and "input_size" not in config_file.pretrained_cfg:
        raise UserError("config.json has a pretrained_cfg without input_size; download the file again")
    pretrained = config_file.pretrained_cfg or companions.config or {}
    arguments = config_file.model_args or {}
    number = config_file.max_num_patches
    pixels: Fields = from_timm(pretrained, arguments) | ({} if number is None else {"max_num_patches": number})
    size = pixels["crop_size"]["height"], pixels["crop_size"]["width"]
    # The top level takes precedence; files without a pretrained_cfg may have the older name.
    labels = config_file.label_names or pretrained.get("label_names") or pretrained.get("labels")
    fields = {**fields, **({} if config_file.problem_type is None else {"problem_type": config_file.problem_type})}
    return Declared(fields, read_size(arguments.get("img_size") or size), read_class_names(labels), pixels)


def _refuse_unlikely(key_names: Collection[str], arguments: Mapping[str, Any]) -> None:
    """Raise a UserError if a part is missing without a word in config.json, or if pooling reads other tokens than here.

    timm's attention pooling may read only patches, where the MAP head here reads special tokens too.
    """
    last_norm_keys = {f"{name}.{part}" for name in ("norm", "fc_norm") for part in ("weight", "bias")}
    if last_norm_keys.isdisjoint(key_names) and arguments.get("final_norm") is not False:
        raise UserError(
            "the checkpoint has no LayerNorm after its blocks; if that is right, give the folder with timm's "
            "config.json, which must have final_norm=False in model_args"
        )
    special = [name for name in ("cls_token", "dist_token") if name in key_names]
    if special and "attn_pool.latent" in key_names and not arguments.get("pool_include_prefix"):
        raise UserError(
            f"timm's attention pooling skips {' and '.join(special)}, but hf_vit's MAP head reads every token; use the "
            "model with timm, or set pool_include_prefix=True in the model_args of config.json if it was trained so"
        )


def convert_arguments(
    arguments: Mapping[str, Any], key_names: Collection[str], pools_registers: bool = False
) -> Fields:
    """Return the config's fields that timm's arguments set; raise a UserError for one that no model here has.

    `key_names` show which special tokens the model has, which pooling may include or not; `pools_registers` tells
    whether attention pooling reads registers without the argument `pool_include_prefix` too.
    """
    has_special = not {"cls_token", "dist_token", "reg_token"}.isdisjoint(key_names)
    fields: Fields = {}
    for name, value in arguments.items():
        if value is None or value is False or _IGNORED_ARGUMENTS.fullmatch(name):
            continue
        if name == "num_heads" and type(value) is int and 0 < value < 2**20:
            fields["num_attention_heads"] = value
        elif name == "act_layer" and isinstance(value, str) and value in ACTIVATIONS:
            fields["hidden_act"] = ACTIVATIONS[value]
        elif name == "global_pool" and isinstance(value, str) and value in POOLINGS:
            fields["pooling"] = POOLINGS[value]
        elif (name, value) == ("norm_layer", "rmsnorm"):
            continue  # the origin `RMSNORM` sets the field
        elif name == "pool_include_prefix" and not (arguments["global_pool"] == "avg" and has_special):
            continue  # `_refuse_unlikely` checks it; it does not matter for a class token alone
        else:
            argument = f"{name:.80}={value!r:.80}"
            raise UserError(
                f"config.json has the argument {argument} of timm, which hf_vit does not support; use it with timm"
            )
    pools_registers = pools_registers or bool(arguments.get("pool_include_prefix"))
    if pools_registers and {"attn_pool.latent", "reg_token"} <= set(key_names):
        fields["pooling"] = "map_with_registers"
    return fields


VIT = Origin(
    name="timm_vit",
    rules=RULES,
    without={"pre_logits": {"R": "D"}},
    recognizes=recognizes,
    names=names,
    configure=configure,
    declared=declared,
    assumed={
        "num_attention_heads": ASSUMED_HEADS,
        "hidden_act": "the exact GELU (SiLU in a SwiGLU)",
        "layer_norm_eps": "LayerNorms before attention and MLP, eps 1e-6 (1e-5 with a norm before the blocks)",
        "position_embedding": "positions added to the tokens once (no RoPE)",
        "pooling": "pooling by the class token if there is one and no norm after pooling, else by the mean",
        "processor": ORIGINAL_PIXELS,
    },
    refused={
        r"rope(_embed)?\..+|storage_tokens": "rotary positions (RoPE, as DINOv3 and EVA have)",
        r"blocks\.\d+\.attn\.(q_norm|k_norm)\..+": "attention with normalized queries and keys",
        r"blocks\.\d+\.attn\.(norm|sub_norm|lambda_\w+)(\..+)?": "attention with a norm inside, or differential",
        r"blocks\.\d+\.(attn\.)?(rel_pos_\w+|relative_position_\w+)(\..+)?": "relative positions in its attention, as "
        "BEiT and SAM have",
        r"blocks\.\d+\.(gamma_[12]|attn\.[qkv]_(bias|proj\..+))": "the blocks of BEiT and EVA",
        r"blocks\.\d+\.mlp\.norm\..+": "an MLP with a norm inside",
        r"blocks\.\d+\.(attns|ffns|in_proj|in_norm|attn_out_proj|out_proj|mlp_out_proj|mlp_bias)(\..+)?": "parallel "
        "blocks",
    },
    lacking={
        r"blocks\.\d+\.norm[12]\.bias": "norms without a bias (RMSNorm)",
        r"blocks\.\d+\.attn\.proj\.bias": "attention whose last projection has no bias",
    },
    foreign_heads={r"(head|fc|classifier)\.(?!(weight|bias)$).+": "a head of several layers"},
    package="timm",
)

# The same with norms that do not subtract the mean, which only config.json tells from other norms without a bias.


def has_rmsnorm(architecture: str, config: Mapping[str, Any]) -> bool:
    """Return whether timm's ViT of this architecture and config.json has RMSNorms."""
    arguments: object = config.get("model_args")
    all_arguments = find_fields(ARGUMENTS, architecture) | (arguments if isinstance(arguments, dict) else {})
    return all_arguments.get("norm_layer") == "rmsnorm"


def _read_declared_rmsnorm(companions: Companions, shapes: Shapes) -> Declared:
    """Return the facts in the config.json of a model with RMSNorms."""
    facts = declared(companions, shapes)
    return replace(facts, fields={**facts.fields, "norm_type": "rmsnorm", "layer_norm_eps": 1e-6})


RMSNORM = replace(
    VIT,
    rules=tuple(rule for rule in RULES if not re.fullmatch(r"(.+\.)?(norm\d?|fc_norm|norm_pre)\.bias", rule.key)),
    declared=_read_declared_rmsnorm,
    lacking={},
)

# NaFlexVit, for images in their own shape: patches come as vectors, and the position table has its grid. How the table
# is resized is not in the weights.

NAFLEX_MODULES = {
    "patch_embed.proj.": "embeds.proj.",
    **{name: f"embeds.{name}" for name in ("cls_token", "reg_token", "pos_embed")},
}
# Argument that resizes tables -> its default; and their values -> the way here, to which "_square" is added if the
# aspect ratio is kept.
RESIZING = {"pos_embed_interp_mode": "bicubic", "pos_embed_antialias": True, "pos_embed_align_corners": False}
RESIZINGS = {
    ("bicubic", True, False): "bicubic_antialias",
    ("bicubic", False, False): "bicubic",
    ("bilinear", True, False): "flexivit",
    ("bilinear", False, False): "bilinear",
    ("bilinear", False, True): "bilinear_corners",
}
KEEPS_ASPECT, SQUARE = "pos_embed_ar_preserving", "_square"
# Architecture -> arguments that its config.json does not name (all matches count).
_NAFLEX_ARGUMENTS: dict[str, Fields] = {
    r".+_par(fac)?_gap": {KEEPS_ASPECT: True},
    r".+_siglip": {"act_layer": "gelu_tanh", "pos_embed_interp_mode": "bilinear"},
    r".+_radio_v\d": {
        **{"final_norm": False, KEEPS_ASPECT: True},
        **{"pos_embed_interp_mode": "bilinear", "pos_embed_antialias": False},
    },
    r".+_(base|huge)_patch16_radio_v3": {"pos_embed_align_corners": True},
}


def _choose_resizing(arguments: Fields, names: set[str], shapes: Shapes) -> str:
    """Remove timm's arguments for resizing positions from `arguments`, and return hf_vit's mode that does the same."""
    values = [arguments.pop(name) for name in RESIZING]
    keeps_aspect = bool(arguments.pop(KEEPS_ASPECT, False))
    if "pos_embed_x" in names:  # timm resizes both tables linearly, and so their sum bilinearly
        values = ["bilinear", False, False]
    mode = next((ours for theirs, ours in RESIZINGS.items() if list(theirs) == values), "none")
    mode += SQUARE if keeps_aspect else ""
    if mode not in get_args(PositionInterpolation):
        settings = ", ".join(f"{name}={value!r:.40}" for name, value in zip(RESIZING, values, strict=True))
        square = f" and {KEEPS_ASPECT}=True" if keeps_aspect else ""
        raise UserError(
            f"timm resizes the positions with {settings}{square}, which hf_vit does not support; use it with timm"
        )
    lengths = {shape[1] for key, shape in shapes.items() if re.search(r"pos_embed_[xy]$", key) and len(shape) == 3}
    if keeps_aspect and len(lengths) > 1:  # timm stretches the shorter one at the table's own size too
        raise UserError(
            f"timm keeps the aspect ratio of tables for {sorted(lengths)} rows and columns, which hf_vit does not "
            "support; use it with timm"
        )
    return mode


def _read_naflex_config(companions: Companions, shapes: Shapes) -> Declared:
    """Return the facts about arguments and preprocessing in timm's config.json, which must be there."""
    config_file, architecture, own_arguments = read_config_file(companions)
    if not re.fullmatch(r"naflexvit_\w+", architecture):
        raise UserError(
            "how timm's NaFlexVit resizes its positions is not in the weights; give the folder with timm's config.json"
        )
    arguments = RESIZING | find_fields(_NAFLEX_ARGUMENTS, architecture) | own_arguments
    names = {name.replace("embeds.", "") for name in strip_wrappers(shapes)}
    _refuse_unlikely(names, arguments)
    resizing = _choose_resizing(arguments, names, shapes)
    if arguments.pop("patchify_channels_last", True) is False:
        raise UserError(
            "config.json has the argument patchify_channels_last=False of timm, which hf_vit does not support; use it "
            "with timm"
        )
    arguments.pop("pos_embed_grid_size", None)  # the table shows it
    patch = read_size(arguments.get("patch_size", 16))
    fields = convert_arguments({"global_pool": config_file.global_pool, **arguments}, names)
    fields |= {"patch_size": shorten_pair(patch), "position_interpolation": resizing, "layer_norm_eps": 1e-6}
    declared = declare(config_file, companions, fields)
    pixels = dict(declared.processor or {})
    h, w = pixels["crop_size"]["height"] // patch[0], pixels["crop_size"]["width"] // patch[1]
    return replace(declared, image_size=None, processor={"max_num_patches": h * w} | pixels)


def _configure_naflex(network: Network) -> Fields:
    """Return the fields of the config, without the way of resizing."""
    fields = configure(network.with_linear_patches())
    return {name: value for name, value in fields.items() if name != "position_interpolation"}


NAFLEX = replace(
    VIT,
    name="timm_naflex",
    rules=(
        KeyRule(PATCHES, "DZ", "linear_patches", "embeddings.patch_embeddings.projection.weight"),
        KeyRule("pos_embed", "1YVD", "as_table", "embeddings.position_embeddings", "without axes"),
        KeyRule("pos_embed_y", "1YD", "sum_axes", "embeddings.position_embeddings", "axes"),
        KeyRule("pos_embed_x", "1VD", "sum_axes", "embeddings.position_embeddings", "axes"),
        *(rule for rule in RULES if rule.key not in (PATCHES, "pos_embed") and rule not in _RELATIVE_RULES),
    ),
    recognizes=make_recognizer(NAFLEX_MODULES["patch_embed.proj."] + "weight", ("",)),
    names=lambda shapes: rename_keys(unwrap(shapes, "embeds.proj.weight", {}), NAFLEX_MODULES),
    configure=_configure_naflex,
    declared=_read_naflex_config,
)

# Hybrids (`vit_*_r*_s*`): the stem of Google's hybrids with two other constants, in timm as in transformers: kernels
# are standardized by (w - mean) / sqrt(var + 1e-8), and GroupNorm's eps is 1e-5.

STEM_CONSTANTS: Fields = {"weight_standardization": "variance", "group_norm_eps": 1e-5}
BACKBONE, _UNIT = "patch_embed.backbone", "stages.{s-1}.blocks.{u-1}"


def make_resnet_layer_rules(
    root: str, unit: str, target: str, norm: str, pre_activation: bool = False
) -> tuple[KeyRule, ...]:
    """Return the rules of a ResNet with PyTorch's axes of kernels, without its head; `target` is its name in the model.

    `root`, `unit` (with `{s-1}` and `{u-1}` for the numbers of stage and unit) and `norm` are the file's names. With
    `pre_activation` norms precede the convolutions: `norm` follows the last unit, and the projection has none.
    """

    def conv(source: str, axes: str, name: str) -> KeyRule:
        return KeyRule(f"{source}.weight", axes, "keep", f"{target}.{name}.weight")

    unit_target = "stages.{s-1}.{u-1}"
    projection = f"{unit}.downsample"
    norm_rules = dense(norm, "F" if pre_activation else "W", f"{target}.{'norm' if pre_activation else 'root_norm'}")
    rules = [conv(root, "WC77", "root_conv"), *([] if pre_activation else norm_rules)]
    for number, axes in enumerate(("UI11", "UU33", "OU11"), start=1):
        rules.append(conv(f"{unit}.conv{number}", axes, f"{unit_target}.conv{number}"))
        rules += dense(f"{unit}.norm{number}", axes[pre_activation], f"{target}.{unit_target}.norm{number}")
    rules.append(conv(f"{projection}.conv", "OI11", f"{unit_target}.projection"))
    projection_norm_rules = dense(f"{projection}.norm", "O", f"{target}.{unit_target}.projection_norm")
    return (*rules, *(norm_rules if pre_activation else projection_norm_rules))


def _select_hybrid_names(shapes: Shapes) -> KeyNames:
    """Return the names of the keys; a stem without stages lacks "stem." in its names."""
    key_names = unwrap(shapes, PATCHES, {})
    has_root_only = not any(name.startswith(f"{BACKBONE}.st") for name in key_names.normal)
    return rename_keys(key_names, {f"{BACKBONE}.stem.": f"{BACKBONE}."}) if has_root_only else key_names


HYBRID = replace(
    VIT,
    name="timm_hybrid",
    rules=(
        *make_resnet_layer_rules(f"{BACKBONE}.stem.conv", f"{BACKBONE}.{_UNIT}", STEM, f"{BACKBONE}.stem.norm"),
        KeyRule(PATCHES, "DFPP", "keep", "embeddings.patch_embeddings.projection.weight"),
        *RULES[1:],
    ),
    recognizes=make_recognizer(PATCHES, ("",), r"patch_embed\.backbone\."),
    names=_select_hybrid_names,
    configure=partial(configure_stem, STEM_CONSTANTS, _derive_common_fields),
    family="hybrid",
    refused={
        **VIT.refused,
        rf"{re.escape(BACKBONE)}\.(?!stem\.|stages\.).+": "another stem than BiT's ResNet (ResNet-D, MobileCLIP, ...)",
    },
)

# MLP-Mixers (`mixer_*`): the original network with the exact GELU.

_MIXER_STEM = "stem.proj.weight"


def _declare_mean_pooled(
    architectures: str, ignored_arguments: str, companions: Companions, shapes: Shapes
) -> Declared:
    """Return the facts in the config.json of a model with mean pooling; the first arguments are regular expressions."""
    if companions.config is None:
        return Declared()
    config_file, architecture, arguments = read_config_file(companions)
    if not re.fullmatch(architectures, architecture):
        raise UserError(
            f"config.json has the architecture '{architecture:.80}' of timm, which does not fit these "
            "weights; give the config.json that belongs to them"
        )
    if unknown := sorted(name for name in arguments if not re.fullmatch(ignored_arguments, name)):
        raise UserError(
            f"config.json has the argument {unknown[0]!r:.80} of timm, which hf_vit does not support; use it with timm"
        )
    pooling = arguments.get("global_pool") or config_file.global_pool or "avg"
    if pooling != "avg":
        raise UserError(
            f"config.json has global_pool={pooling!r:.80}, but hf_vit only supports 'avg' here; use it with timm"
        )
    return declare(config_file, companions, {})


def _configure_mixer(network: Network) -> Fields:
    size, patches = network.image_size, network.patches
    if size is not None and (size[0] % patches.sides[0] or size[1] % patches.sides[1]):
        raise UserError(
            f"{format_size(size)} px is not a multiple of the patch size, {format_size(patches.sides)} px: timm "
            "drops the incomplete patches, hf_vit pads them; use the model with timm"
        )
    return configure_mixer(network) | {"hidden_act": "gelu"}


MIXER = Origin(
    name="timm_mixer",
    rules=(
        *dense("stem.proj", "DCPQ", "embeddings.patch_embeddings.projection"),
        *dense(f"{_BLOCK}.norm1", "D", f"{_TARGET}.layernorm_before"),
        *dense(f"{_BLOCK}.mlp_tokens.fc1", "ST", f"{_TARGET}.token_mlp.fc1"),
        *dense(f"{_BLOCK}.mlp_tokens.fc2", "TS", f"{_TARGET}.token_mlp.fc2"),
        *dense(f"{_BLOCK}.norm2", "D", f"{_TARGET}.layernorm_after"),
        *dense(f"{_BLOCK}.mlp_channels.fc1", "MD", f"{_TARGET}.mlp.fc1"),
        *dense(f"{_BLOCK}.mlp_channels.fc2", "DM", f"{_TARGET}.mlp.fc2"),
        *dense("norm", "D", "layernorm"),
        *dense("head", "LD", "classifier", "head"),
    ),
    recognizes=make_recognizer(_MIXER_STEM, ("",), r"\.mlp_tokens\."),
    names=lambda shapes: unwrap(shapes, _MIXER_STEM, {}),
    configure=_configure_mixer,
    family="mixer",
    declared=partial(
        _declare_mean_pooled,
        r"mixer_[a-z](16|32)_\w+",
        r"img_size|patch_size|in_chans|num_classes|num_blocks|embed_dim|mlp_ratio|global_pool|nlhb|stem_norm|"
        r"(proj_)?drop_rate|drop_path_rate",
    ),
    assumed={name: VIT.assumed[name] for name in ("hidden_act", "processor")},
    package="timm",
)

# BiT's ResNetV2 (`resnetv2_*_bit`): the paper's network with two other constants.

BIT_CONSTANTS: Fields = {"pre_activation": True, "weight_standardization": "variance", "zero_padded_pool": True}
BIT = Origin(
    name="timm_bit",
    rules=(
        *make_resnet_layer_rules("stem.conv", _UNIT, "encoder", "norm", pre_activation=True),
        KeyRule("head.fc.weight", "LF11", "dense", "classifier.weight", "head"),
        KeyRule("head.fc.bias", "L", "keep", "classifier.bias", "head"),
    ),
    recognizes=make_recognizer("stem.conv.weight", ("",), r"(^|\.)stages\.\d+\.blocks\.\d+\.norm3\."),
    names=lambda shapes: unwrap(shapes, "stem.conv.weight", {}),
    configure=partial(configure_bit, BIT_CONSTANTS),
    family="bit",
    declared=partial(
        _declare_mean_pooled,
        r"resnetv2_\d+x\d+_bit(_\w+)?",
        r"img_size|layers|channels|in_chans|num_classes|width_factor|stem_chs|global_pool|drop_(path_)?rate|zero_init_last",
    ),
    assumed={"processor": ORIGINAL_PIXELS},
    refused={r".+\.running_(mean|var)": "BatchNorm", r"stem\.norm\..+": "units with norms after their convolutions"},
    package="timm",
)
