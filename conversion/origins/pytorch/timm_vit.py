"""timm's plain ViTs (`vit_*`, `deit_*`, `deit3_*`, `flexivit_*`, SigLIP's towers), and encoders under the same names.

Query, key and value are one fused projection. What neither names nor shapes tell (heads, activation, pooling) comes
from the architecture and the arguments that config.json names; the exceptions from timm's rule are listed here.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from hf_vit.conversion.labels import names_of
from hf_vit.conversion.origins.beside import Text, checked, pair_of
from hf_vit.conversion.origins.origin import Declared, Dims, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.preprocessing import ORIGINAL_PIXELS, from_timm
from hf_vit.conversion.origins.pytorch.timm_architectures import (
    HEADS_OF_WIDTH,
    arguments_of,
    exceptions_of,
    refuse_unknown,
)
from hf_vit.conversion.origins.wrapped import BESIDE, bare_names, prefixes, renamed, unwrapped
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair, Patches, fits, square_or_pair, table_size, table_size_and_prefix
from hf_vit.errors import UserError

PATCHES = "patch_embed.proj.weight"
_BLOCK, _TARGET = "blocks.{i}", "layers.{i}"
_POOL, _MAP = "attn_pool", "pooler.map"
_OFFSETS = f"{_TARGET}.attention.relative_position.offset_embeddings"


def _dense(
    source: str, axes: tuple[str, ...], target: str, part: str = "", bias_part: str | None = None
) -> tuple[KeyRule, ...]:
    """Weight and bias of a dense layer or a norm; `axes` of the weight, output first."""
    return (
        KeyRule(f"{source}.weight", axes, "keep", f"{target}.weight", part),
        KeyRule(f"{source}.bias", axes[:1], "keep", f"{target}.bias", part if bias_part is None else bias_part),
    )


BLOCK_RULES = (
    *_dense(f"{_BLOCK}.norm1", ("D",), f"{_TARGET}.layernorm_before"),
    *_dense(f"{_BLOCK}.attn.qkv", ("3D", "D"), f"{_TARGET}.attention.{{q,k,v}}_proj", bias_part="qkv_bias"),
    *_dense(f"{_BLOCK}.attn.proj", ("D", "D"), f"{_TARGET}.attention.o_proj"),
    KeyRule(f"{_BLOCK}.ls1.gamma", "D", "keep", f"{_TARGET}.layer_scale1.lambda1", part="layer_scale"),
    *_dense(f"{_BLOCK}.norm2", ("D",), f"{_TARGET}.layernorm_after"),
    *_dense(f"{_BLOCK}.mlp.fc1", ("M", "D"), f"{_TARGET}.mlp.fc1", "dense"),
    *_dense(f"{_BLOCK}.mlp.fc2", ("D", "M"), f"{_TARGET}.mlp.fc2", "dense"),
    *_dense(f"{_BLOCK}.mlp.w12", ("2M", "D"), f"{_TARGET}.mlp.{{gate,up}}_proj", "packed_swiglu"),
    *_dense(f"{_BLOCK}.mlp.w1", ("M", "D"), f"{_TARGET}.mlp.gate_proj", "swiglu"),
    *_dense(f"{_BLOCK}.mlp.w2", ("M", "D"), f"{_TARGET}.mlp.up_proj", "swiglu"),
    *_dense(f"{_BLOCK}.mlp.w3", ("D", "M"), f"{_TARGET}.mlp.down_proj", "swiglu_out"),
    KeyRule(f"{_BLOCK}.ls2.gamma", "D", "keep", f"{_TARGET}.layer_scale2.lambda1", part="layer_scale"),
)


def _offset_mlp(source: str, part: str) -> tuple[KeyRule, ...]:
    """The MLP that gives the bias of an offset; all four arrays make one table."""
    shapes = {"fc1.weight": ("H", "2"), "fc1.bias": ("H",), "fc2.weight": ("A", "H"), "fc2.bias": ("A",)}
    return tuple(KeyRule(f"{source}.mlp.{name}", axes, "offset_mlp", _OFFSETS, part) for name, axes in shapes.items())


RELATIVE_RULES = (
    *_offset_mlp(f"{_BLOCK}.attn.rel_pos", "offset_mlp"),
    *_offset_mlp("shared_rel_pos", "shared_offset_mlp"),
    KeyRule(f"{_BLOCK}.attn.rel_pos.relative_position_bias_table", "OA", "keep", _OFFSETS, part="offset_table"),
)
RELATIVE = frozenset(rule.part for rule in RELATIVE_RULES)

MAP_RULES = (
    KeyRule(f"{_POOL}.latent", "11D", "keep", f"{_MAP}.probe", part="map"),
    *_dense(f"{_POOL}.q", ("D", "D"), f"{_MAP}.attention.q_proj", "map"),
    *_dense(f"{_POOL}.kv", ("2D", "D"), f"{_MAP}.attention.{{k,v}}_proj", "map"),
    *_dense(f"{_POOL}.proj", ("D", "D"), f"{_MAP}.attention.o_proj", "map"),
    *_dense(f"{_POOL}.norm", ("D",), f"{_MAP}.layernorm", "map"),
    *_dense(f"{_POOL}.mlp.fc1", ("M", "D"), f"{_MAP}.mlp.fc1", "map"),
    *_dense(f"{_POOL}.mlp.fc2", ("D", "M"), f"{_MAP}.mlp.fc2", "map"),
)

# Everything but the patches, which a hybrid cuts from its stem's feature map.
AFTER_PATCHES = (
    KeyRule(
        "patch_embed.proj.bias", "D", "keep", "embeddings.patch_embeddings.projection.bias", part="without norm_before"
    ),
    KeyRule("cls_token", "11D", "keep", "embeddings.cls_token", part="cls"),
    KeyRule("dist_token", "11D", "keep", "embeddings.distillation_token", part="distillation"),
    KeyRule("reg_token", "1GD", "keep", "embeddings.register_tokens", part="registers"),
    KeyRule("pos_embed", "1TD", "keep", "embeddings.position_embeddings"),
    *_dense("norm_pre", ("D",), "embeddings.layernorm", "norm_before"),
    *BLOCK_RULES,
    *RELATIVE_RULES,
    *_dense("norm", ("D",), "layernorm", "norm"),
    *_dense("fc_norm", ("D",), "layernorm", "norm_after"),
    *MAP_RULES,
    *_dense("pre_logits.fc", ("R", "D"), "pooler.dense", "pre_logits"),
    *_dense("head", ("L", "R"), "classifier", "head"),
    *_dense("head_dist", ("L", "D"), "distillation_classifier", "second_head"),
)

RULES = (KeyRule(PATCHES, "DCPQ", "keep", "embeddings.patch_embeddings.projection.weight"), *AFTER_PATCHES)

LEGEND = {
    "P, Q": "height and width of a patch in px",
    "C": "channels",
    "D": "hidden size",
    "T": "rows of the position table: the special tokens', where they have any, then the patch grid's row by row",
    "G": "register tokens",
    "M": "width of the MLP",
    "H": "width of the MLP of relative positions",
    "O": "offsets between patches: (2h - 1) * (2w - 1)",
    "A": "heads",
    "R": "size of the representation layer; D without one",
    "L": "labels",
}

REFUSED = {
    r"rope(_embed)?\..+|storage_tokens": "rotary positions (RoPE, as DINOv3 and EVA have)",
    r"blocks\.\d+\.attn\.(q_norm|k_norm)\..+": "attention with normalised queries and keys",
    r"blocks\.\d+\.attn\.(norm|sub_norm|lambda_\w+)(\..+)?": "another attention (with a norm inside, differential)",
    r"blocks\.\d+\.(attn\.)?(rel_pos_\w+|relative_position_\w+)(\..+)?": "relative positions in its attention, as BEiT "
    "and SAM have",
    r"blocks\.\d+\.(gamma_[12]|attn\.[qkv]_(bias|proj\..+))": "the blocks of BEiT and EVA",
    r"blocks\.\d+\.mlp\.norm\..+": "an MLP with a norm inside",
    r"blocks\.\d+\.(attns|ffns|in_proj|in_norm|attn_out_proj|out_proj|mlp_out_proj|mlp_bias)(\..+)?": "parallel blocks",
}
LACKING = {
    r"blocks\.\d+\.norm[12]\.bias": "norms without a bias (RMSNorm)",
    r"blocks\.\d+\.attn\.proj\.bias": "attention whose last projection has no bias",
}

# Of timm before version 0.9.
IGNORED = {r".*rel_pos\.(relative_position_index|rel_coords_log)": "numbers of the relative positions"}

# Arguments that config.json may name without any need to read them: names and shapes tell as well, or only training
# notices them.
NEEDLESS = re.compile(
    r"img_size|patch_size|in_chans|num_classes|embed_dim|depth|mlp_ratio|\w+_bias|class_token|no_embed_class|init_values|"
    r"reg_tokens|pre_norm|final_norm|fc_norm|qk_norm|pos_embed|rel_pos_(type|dim)|shared_rel_pos|(\w+_)?drop(_path)?_rate|weight_init|fix_init|"
    r"dynamic_img_size|strict_img_size|pretrained_strict|features_only"
)
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}
POOLINGS = {"token": "token", "avg": "gap", "map": "map"}

ASSUMED = {
    "num_attention_heads": "heads of 64 (16 heads at widths of 1152, 1280, 1408 and 1664)",
    "hidden_act": "the exact GELU",
    "layer_norm_eps": "LayerNorms before attention and MLP, eps 1e-6 (1e-5 with a norm before the blocks)",
    "position_embedding": "positions added to the tokens once (no RoPE)",
    "pooling": "the class token read, where there is one and no norm after pooling, else the mean",
    "processor": ORIGINAL_PIXELS,
}


class TimmConfig(BaseModel):
    """What is read of timm's config.json."""

    architecture: str | None = None
    global_pool: str | None = None
    model_args: dict[str, Any] | None = None
    pretrained_cfg: dict[str, Any] | None = None
    label_names: list[Text] | None = None
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None


def recognises(shapes: Mapping[str, Shape]) -> bool:
    """A fused projection in blocks, and patches that are cut from the image itself."""
    return bool(prefixes(shapes, PATCHES)) and not has_stem(shapes)


def has_stem(shapes: Mapping[str, Shape]) -> bool:
    return any("patch_embed.backbone." in key for key in shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    return with_swiglu(unwrapped(shapes, PATCHES, IGNORED), shapes)


def with_swiglu(names: KeyNames, shapes: Mapping[str, Shape]) -> KeyNames:
    """The layers of a SwiGLU by their names in DINOv2's code; timm names those of the packed one as a dense MLP's."""
    first = {
        name: shapes[names.normal[at]]
        for name in ("fc1", "fc2")
        if (at := f"blocks.0.mlp.{name}.weight") in names.normal
    }
    is_packed = (
        len(first) == 2 and len(first["fc1"]) == len(first["fc2"]) == 2 and first["fc1"][0] == 2 * first["fc2"][1]
    )
    spelt = {"w12": "fc1", "w3": "fc2"} if is_packed else {}
    if any(re.fullmatch(r"blocks\.\d+\.mlp\.fc1_[gx]\.weight", name) for name in names.normal):
        spelt = {"w1": "fc1_g", "w2": "fc1_x", "w3": "fc2"}
    return renamed(names, {f".mlp.{new}.": f".mlp.{old}." for new, old in spelt.items()})


def rules_of(rules: tuple[KeyRule, ...], shapes: Mapping[str, Shape]) -> tuple[KeyRule, ...]:
    """Without the position table, where a bias of relative positions takes its place."""
    is_relative = any("rel_pos." in name for name in shapes) and "pos_embed" not in shapes
    return tuple(rule for rule in rules if rule.key != "pos_embed") if is_relative else rules


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`."""
    patches = Patches((dims["P"], dims["Q"]))
    return common_fields(dims, parts, patches, image_size) | {"patch_size": square_or_pair(patches.sides)}


def common_fields(dims: Dims, parts: frozenset[str], patches: Patches, image_size: Pair | None) -> dict[str, Any]:
    """What names and shapes tell, and timm's rules where config.json does not name an exception."""
    width = dims["D"]
    heads = HEADS_OF_WIDTH.get(width, width // 64 if width % 64 == 0 else None)
    known = {} if heads is None else {"num_attention_heads": heads}
    positions = _relative_positions if RELATIVE & parts else _added_positions
    return (
        known
        | {
            "num_channels": dims["C"],
            "hidden_size": width,
            "intermediate_size": dims["M"],
            "mlp_type": "dense" if "dense" in parts else "swiglu",
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5 if "norm_before" in parts else 1e-6,
            "qkv_bias": "qkv_bias" in parts,
            "position_interpolation": "bicubic_antialias",
            "pooling": "map" if "map" in parts else "token" if "cls" in parts and "norm_after" not in parts else "gap",
            "use_class_token": "cls" in parts,
            "use_distillation_token": "distillation" in parts,
            "use_distillation_head": False
            if {"distillation", "head"} <= parts and "second_head" not in parts
            else None,
            "num_register_tokens": dims["G"] if "registers" in parts else 0,
            "norm_before_layers": "norm_before" in parts,
            "norm_after_pooling": "norm_after" in parts if {"norm", "norm_after"} & parts else None,
            "representation_size": dims["R"] if "pre_logits" in parts else None,
            # What it was in training is not in the weights; timm's models that have it begin with 1e-5 or 1e-6.
            "layer_scale_init_value": 1e-5 if "layer_scale" in parts else None,
        }
        | positions(dims, parts, patches, image_size)
    )


def _added_positions(dims: Dims, parts: frozenset[str], patches: Patches, image_size: Pair | None) -> dict[str, Any]:
    """Of a table with rows for the patches alone, after those of special tokens, or of these and the registers."""
    rows, special = dims["T"], ("cls" in parts) + ("distillation" in parts)
    registers = dims["G"] if "registers" in parts else 0
    without = fits(rows - special, patches, image_size) or fits(rows, patches, image_size)
    on_special: bool | str
    if registers and not without and fits(rows - special - registers, patches, image_size):
        size, on_special = table_size(rows - special - registers, patches, image_size), "with_registers"
    else:
        size, with_special = table_size_and_prefix(rows, special, patches, image_size)
        on_special = with_special or not special
    return {
        "image_size": square_or_pair(size),
        "position_embedding": "learned",
        "position_on_class_token": on_special,
    }


def _relative_positions(dims: Dims, parts: frozenset[str], patches: Patches, image_size: Pair | None) -> dict[str, Any]:
    """Of a bias that a table has, or an MLP gives, for the patches of images of a declared size.

    Raises:
        UserError: no size is declared, or the table is not of that size.
    """
    if image_size is None:
        raise UserError(
            "the weights do not tell the image size that their relative positions were trained at; declare it with "
            "--image-size HxW"
        )
    h, w = patches.grid_of(image_size)
    if "offset_table" in parts and dims["O"] != (2 * h - 1) * (2 * w - 1):
        raise UserError(
            f"{dims['O']} relative positions are not those of {h}x{w} patches, {(2 * h - 1) * (2 * w - 1)}; declare "
            "another --image-size; a bias between the patches and a class token has no place here"
        )
    return {
        "image_size": square_or_pair(image_size),
        "position_embedding": "relative_bias",
        "num_attention_heads": dims["A"],
    }


def declared(companions: Companions, shapes: Mapping[str, Shape]) -> Declared:
    """What timm's config.json says of architecture, arguments and preprocessing.

    Raises:
        UserError: it is of another library, or asks for what no model here does.
    """
    beside = None if companions.config is None else checked(TimmConfig, companions.config, "config.json")
    if beside is None:
        _refuse_unlikely(shapes, {})
        _refuse_other_order(shapes)
        return Declared()
    if beside.architecture is None:
        raise UserError("config.json names no architecture of timm, but the keys beside it are timm's")
    architecture = beside.architecture.partition(".")[0]
    refuse_unknown(architecture)
    arguments = arguments_of(architecture) | (beside.model_args or {})
    _refuse_unlikely(shapes, arguments)
    special = {"cls_token", "dist_token", "reg_token"} & set(bare_names(shapes))
    fields = exceptions_of(architecture)
    fields |= _argument_fields({"global_pool": beside.global_pool, **arguments}, has_special=bool(special))
    if fields.get("pooling") == "map" and arguments.get("pool_include_prefix") and "reg_token" in special:
        fields["pooling"] = "map_with_registers"
    return declared_by(beside, companions.config or {}, fields)


def declared_by(beside: TimmConfig, config: Mapping[str, Any], fields: Mapping[str, Any]) -> Declared:
    """These fields, and what config.json says of image size, names of classes and pixels, read as timm reads it.

    Raises:
        UserError: it gives no size, one of another kind, or pixels that no processor here makes.
    """
    if beside.pretrained_cfg is not None and "input_size" not in beside.pretrained_cfg:
        raise UserError("config.json gives a pretrained_cfg without input_size; get the file again")
    pretrained, arguments = beside.pretrained_cfg or config, beside.model_args or {}
    pixels = from_timm(pretrained, arguments)
    size = pixels["crop_size"]["height"], pixels["crop_size"]["width"]
    labels = beside.label_names or pretrained.get("label_names")  # the top level's win
    fields = {**fields, **({} if beside.problem_type is None else {"problem_type": beside.problem_type})}
    return Declared(fields, pair_of(arguments.get("img_size") or size), names_of(labels), pixels)


def _refuse_unlikely(shapes: Mapping[str, Shape], arguments: Mapping[str, Any]) -> None:
    """Raise a UserError where weights lack what only a config.json can say is not missing, or pool otherwise.

    Attention may pool the patches alone, beside tokens that the MAP head here reads too.
    """
    bare = bare_names(shapes)
    last = {f"{name}.{part}" for name in ("norm", "fc_norm") for part in ("weight", "bias")}
    if last.isdisjoint(bare) and arguments.get("final_norm") is not False:
        raise UserError(
            "the checkpoint has no LayerNorm after its blocks, and no config.json of timm beside it says that there is "
            "none (final_norm); nothing is written"
        )
    special = [name for name in ("cls_token", "dist_token") if name in bare]
    if special and f"{_POOL}.latent" in bare and not arguments.get("pool_include_prefix"):
        raise UserError(
            f"timm's attention pooling leaves out {' and '.join(special)}, which the MAP head here reads; only models "
            "with pool_include_prefix=True in the model_args of their config.json have the same numbers"
        )


def _refuse_other_order(shapes: Mapping[str, Shape]) -> None:
    """Raise a UserError for relative positions without LayerScale, where timm may norm after attention and MLP."""
    bare = bare_names(shapes)
    if any("rel_pos." in name for name in bare) and not any(name.endswith(".ls1.gamma") for name in bare):
        raise UserError(
            "the weights have relative positions and no LayerScale, and do not tell whether their LayerNorms stand "
            "before or after attention and MLP; give the folder with the config.json that lies beside them"
        )


def _argument_fields(arguments: Mapping[str, Any], has_special: bool) -> dict[str, Any]:
    """Fields of the config that arguments of an architecture ask for."""
    fields: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None or value is False or NEEDLESS.fullmatch(name):
            continue
        if name == "num_heads" and type(value) is int and 0 < value < 2**20:
            fields["num_attention_heads"] = value
        elif name == "act_layer" and isinstance(value, str) and value in ACTIVATIONS:
            fields["hidden_act"] = ACTIVATIONS[value]
        elif name == "global_pool" and isinstance(value, str) and value in POOLINGS:
            fields["pooling"] = POOLINGS[value]
        elif name == "pool_include_prefix" and not (arguments["global_pool"] == "avg" and has_special):
            continue  # see `_refuse_unlikely`; the class token alone is read either way
        else:
            argument = f"{name:.80}={value!r:.80}"
            raise UserError(f"config.json gives timm's argument {argument}, which has no counterpart here")
    return fields


ORIGIN = Origin(
    name="timm_vit",
    title="timm's plain ViTs (vit_*, deit_*, deit3_*, flexivit_*), .safetensors or .pth",
    legend=LEGEND,
    rules=RULES,
    block_pattern=r"blocks\.(0|[1-9]\d*)\.",
    without={"pre_logits": {"R": "D"}},
    ignored=IGNORED | BESIDE,
    recognises=recognises,
    names=names,
    configure=configure,
    rules_of=rules_of,
    declared=declared,
    assumed=ASSUMED,
    refused=REFUSED,
    lacking=LACKING,
    package="timm",
    notes=(
        "Prefixes that are taken off: what is wrapped around a model (`model.`, `state_dict.`, `module.`, ...).",
        "`attn.qkv` and `attn_pool.kv` hold their projections one after the other along the first axis.",
        "Encoders of MAE (arXiv 2111.06377), DINO (2104.14294) and DINOv2 (2304.07193, without registers) that stand "
        "alone have the same names.",
        "A folder's config.json tells architecture, pooling, labels and preprocessing. Pixels are timm's; where an odd "
        "number of them is cropped away, transformers begins one pixel before timm.",
        "The position table may begin with rows for the special tokens, or not (`no_embed_class`): the patches' rows "
        "make a square, or the declared size.",
    ),
)
