"""Define the origins of Google's code: vision_transformer (vit_jax) and big_vision, with ViTs, hybrids, Mixers and BiT.

Both are JAX/Flax: kernels are [in, out] and [height, width, in, out], and attention kernels have an axis for heads.
Tanh GELU and eps 1e-6 are constants of the code. Old files of vit_jax number the modules of a block in one sequence
(`LayerNorm_0`, `MultiHeadDotProductAttention_1`, `LayerNorm_2`, `MlpBlock_3`), later ones number each kind separately.
The original code reads both by renumbering each kind, and so does this module.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from hf_vit.conversion.origins.beside import ORIGINAL_PIXELS
from hf_vit.conversion.origins.origin import (
    BLOCK,
    Fields,
    KeyNames,
    KeyRule,
    Network,
    Origin,
    Patches,
    shorten_pair,
)
from hf_vit.conversion.origins.wrapped import find_first_reason
from hf_vit.conversion.readers import Shapes
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_resnet import compute_stem_stride

PREFIXES = ("", "opt/target/", "target/", "params/")
_IMAGE_PREFIXES = (*PREFIXES, *(f"{prefix}img/" for prefix in PREFIXES))  # img/ in contrastive models
_IGNORED = {
    r"opt/(?!target/).+": "optimizer state",
    r"(opt_state|optimizer)/.+": "optimizer state",
    r"(step|epoch|rng|accum_train_time|(extra|chrono|state|states)/.+)": "training progress",
}
# Keys of a contrastive model (LiT, SigLIP) besides the image tower -> why they are ignored.
_OTHER_TOWER = {r"txt/.+": "the text tower", r"[tb]": "temperature and bias of the contrastive loss"}


def _make_dense_rules(
    source: str, axes: str, target: str, part: str = "", transform: str = "transpose"
) -> tuple[KeyRule, KeyRule]:
    """Return the rules for kernel and bias of a dense layer or convolution."""
    return (
        KeyRule(f"{source}/kernel", axes, transform, f"{target}.weight", part),
        KeyRule(f"{source}/bias", axes[-1], "keep", f"{target}.bias", part),
    )


def _make_norm_rules(source: str, target: str, width: str = "D", transform: str = "keep") -> tuple[KeyRule, KeyRule]:
    return (
        KeyRule(f"{source}/scale", (width,), transform, f"{target}.weight"),
        KeyRule(f"{source}/bias", (width,), transform, f"{target}.bias"),
    )


def _make_projection_rules(source: str, target: str) -> tuple[KeyRule, KeyRule]:
    """Return the rules for a query, key or value projection, which has an axis for heads."""
    return (
        KeyRule(f"{source}/kernel", "DAK", "split_heads", f"{target}.weight"),
        KeyRule(f"{source}/bias", "AK", "flatten_heads", f"{target}.bias"),
    )


def _select_names_below(
    file_prefixes: Iterable[str],
    anchor_name: str,
    keys: Iterable[str],
    known_prefixes: Collection[str] = _IMAGE_PREFIXES,
) -> KeyNames:
    """Remove the prefix of the model, and sort out keys that are not weights.

    `file_prefixes` are those below which the file has the anchor, a key of every model, which messages call
    `anchor_name`. A UserError is raised unless exactly one of them is a known prefix.
    """
    prefixes = sorted({*file_prefixes} & {*known_prefixes})
    if not prefixes:
        prefix = min(file_prefixes)
        raise UserError(f"the file holds {anchor_name} below the prefix '{prefix}'; select them with --prefix {prefix}")
    if len(prefixes) > 1:
        names = ", ".join(map(repr, prefixes))
        raise UserError(
            f"the file holds {anchor_name} below {len(prefixes)} prefixes ({names}); select one with --prefix"
        )
    (prefix,) = prefixes
    names = KeyNames({}, {}, lambda name: prefix + name)
    reasons = dict(_IGNORED)
    if prefix.endswith("img/"):
        prefix_pattern = re.escape(prefix.removesuffix("img/"))
        reasons |= {prefix_pattern + pattern: reason for pattern, reason in _OTHER_TOWER.items()}
    for key in keys:
        reason = find_first_reason(reasons, key)
        if reason is None:
            # Keys outside the prefix keep their full name, for which there is no rule, so they are left over.
            names.normal[key.removeprefix(prefix) if key.startswith(prefix) else f"/{key}"] = key
        else:
            names.ignored[key] = reason
    return names


def _make_names_at_anchor(anchor: str, anchor_name: str, shapes: Shapes) -> KeyNames:
    """Return the names of the keys of a file whose model has the key `anchor`."""
    return _select_names_below(
        [key.removesuffix(anchor) for key in shapes if key.endswith(anchor)], anchor_name, shapes
    )


# The plain ViT of vit_jax.

_BLOCK, _TARGET = "Transformer/encoderblock_{i}", "layers.{i}"
_ATTENTION = f"{_BLOCK}/MultiHeadDotProductAttention_0"
TABLE = "Transformer/posembed_input/pos_embedding"

RULES = (
    *_make_dense_rules("embedding", "PQCD", "embeddings.patch_embeddings.projection", transform="conv"),
    KeyRule("cls", "11D", "keep", "embeddings.cls_token", "cls"),
    KeyRule(TABLE, "1TD", "keep", "embeddings.position_embeddings"),
    *_make_norm_rules(f"{_BLOCK}/LayerNorm_0", f"{_TARGET}.layernorm_before"),
    *_make_projection_rules(f"{_ATTENTION}/query", f"{_TARGET}.attention.q_proj"),
    *_make_projection_rules(f"{_ATTENTION}/key", f"{_TARGET}.attention.k_proj"),
    *_make_projection_rules(f"{_ATTENTION}/value", f"{_TARGET}.attention.v_proj"),
    *_make_dense_rules(f"{_ATTENTION}/out", "AKD", f"{_TARGET}.attention.o_proj", transform="join_heads"),
    *_make_norm_rules(f"{_BLOCK}/LayerNorm_1", f"{_TARGET}.layernorm_after"),
    *_make_dense_rules(f"{_BLOCK}/MlpBlock_0/Dense_0", "DM", f"{_TARGET}.mlp.fc1"),
    *_make_dense_rules(f"{_BLOCK}/MlpBlock_0/Dense_1", "MD", f"{_TARGET}.mlp.fc2"),
    *_make_norm_rules("Transformer/encoder_norm", "layernorm"),
    *_make_dense_rules("pre_logits", "DR", "pooler.dense", "pre_logits"),
    *_make_dense_rules("head", "RL", "classifier", "head"),
)
_NUMBERED = re.compile(r"(LayerNorm|MultiHeadDotProductAttention|MlpBlock)_(\d+)")
# Modules whose submodules are numbered: the blocks, stacked or not, and (big_vision) the MAP head.
_SCOPE = re.compile(r"((Transformer/encoderblock|MAPHead_0)(?:_\d+)?/)([^/]+)(/.+)")


def _make_key_test(pattern: str) -> Callable[[Shapes], bool]:
    """Return a function that tells whether some key matches a pattern."""
    return lambda shapes: any(re.search(pattern, key) for key in shapes)


_has_table = _make_key_test(rf"{TABLE}$")  # only vit_jax has the position table inside the Transformer
_has_stem = _make_key_test(r"(^|/)(conv_root|gn_root|block\d+/unit\d+)/")
# Only files of big_vision have a MAP head or stacked blocks.
_has_parts_of_big_vision = _make_key_test(r"(^|/)(MAPHead_0/.|probe$|Transformer/encoderblock/.)")


def _renumber(names: KeyNames) -> KeyNames:
    """Number each kind of module separately, in order, like the original code's `convert_pre_linen`."""
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)  # (scope, kind of module) -> its numbers
    for name in names.normal:
        scope = _SCOPE.fullmatch(name)
        module = _NUMBERED.fullmatch(scope[3]) if scope else None
        if scope and module and module[2] == str(int(module[2])):  # leading zeros are no number of a module
            numbers[scope[2], module[1]].add(int(module[2]))
    new_names: dict[tuple[str, str], str] = {}  # (scope, module) -> module with its rank as its number
    for (scope, kind), module_numbers in numbers.items():
        for rank, number in enumerate(sorted(module_numbers)):
            new_names[scope, f"{kind}_{number}"] = f"{kind}_{rank}"
    old_names = {(scope, new): old for (scope, old), new in new_names.items()}

    def rename(name: str, table: Mapping[tuple[str, str], str]) -> str:
        scope = _SCOPE.fullmatch(name)
        return name if scope is None else scope[1] + table.get((scope[2], scope[3]), scope[3]) + scope[4]

    normal = {rename(name, new_names): key for name, key in names.normal.items()}
    return KeyNames(normal, names.ignored, lambda name: names.spell(rename(name, old_names)))


def _configure_vit(network: Network, patches: Patches | None = None, special_rows: int | None = None) -> Fields:
    """Return the fields of a ViT's config, whose position table has special rows: by default the class token's."""
    dims, parts = network.dims, network.parts
    fields = network.read_vit_fields("cls" in parts if special_rows is None else special_rows, patches)
    if dims["A"] * dims["K"] != dims["D"]:
        raise UserError(
            f"{dims['A']} heads of size {dims['K']} have {dims['A'] * dims['K']} channels, but hf_vit only "
            f"supports as many as the hidden size, {dims['D']}; use the checkpoint with its own code"
        )
    return fields | {
        "num_attention_heads": dims["A"],
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "pooling": "token" if "cls" in parts else "gap",
        "representation_size": dims["R"] if "pre_logits" in parts else None,
    }


VIT_JAX = Origin(
    name="vit_jax",
    rules=RULES,
    recognizes=lambda shapes: _has_table(shapes) and not _has_stem(shapes) and not _has_parts_of_big_vision(shapes),
    names=lambda shapes: _renumber(_make_names_at_anchor(TABLE, "position tables", shapes)),
    configure=_configure_vit,
    without={"pre_logits": {"R": "D"}},
    assumed={"pooling": "the mean of the patches, as there is no class token", "processor": ORIGINAL_PIXELS},
    parts_that_tell={"pooling": frozenset({"cls"})},
    first_patch=True,
)

# Hybrids of vit_jax: a ResNet stem before that Transformer.

STEM = "embeddings.patch_embeddings.stem"
_UNIT = "block{s}/unit{u}"  # numbers of a stage and of a unit in it, counted from 1


def _make_unit_rules(target: str, pre_activation: bool = False) -> tuple[KeyRule, ...]:
    """Return the rules of a ResNet's unit, in the order of its computation."""
    rules: list[KeyRule] = []
    norms = "IUU" if pre_activation else "UUO"
    for number, (kernel, width) in enumerate(zip(("11IU", "33UU", "11UO"), norms, strict=True), start=1):
        norm = _make_norm_rules(f"{_UNIT}/gn{number}", f"{target}.norm{number}", width, "flatten")
        conv = KeyRule(f"{_UNIT}/conv{number}/kernel", kernel, "conv", f"{target}.conv{number}.weight")
        rules += [*norm, conv] if pre_activation else [conv, *norm]
    return (*rules, KeyRule(f"{_UNIT}/conv_proj/kernel", "11IO", "conv", f"{target}.projection.weight"))


def _make_stem_rules(stem: str) -> tuple[KeyRule, ...]:
    unit_target = f"{stem}.stages.{{s-1}}.{{u-1}}"
    return (
        KeyRule("conv_root/kernel", "77CW", "conv", f"{stem}.root_conv.weight"),
        *_make_norm_rules("gn_root", f"{stem}.root_norm", "W", "flatten"),
        *_make_unit_rules(unit_target),
        *_make_norm_rules(f"{_UNIT}/gn_proj", f"{unit_target}.projection_norm", "O", "flatten"),
    )


def _derive_stem_fields(network: Network) -> tuple[Fields, Patches]:
    """Return the config's fields for a stem, and the patches that its feature map is cut into."""
    width = network.dims["W"]
    patch = network.dims.get("P", 1)
    if width % 32:
        raise UserError(
            f"the stem has {width} channels, but GroupNorm needs a multiple of 32, so the file is damaged or "
            "has another format; download it again"
        )
    patches = Patches((patch, patch), stem_stride=compute_stem_stride(network.stage_depths))
    return {"stage_depths": network.stage_depths, "stem_width": width, "stem_patch_size": patch}, patches


def configure_stem(constants: Fields, after: Callable[[Network, Patches], Fields], network: Network) -> Fields:
    """Return the fields of `HfHybridViTConfig`: the stem's, `constants`, and those `after` returns for the blocks."""
    stem, patches = _derive_stem_fields(network)
    return stem | constants | after(network, patches)


VIT_JAX_HYBRID = replace(
    VIT_JAX,
    name="vit_jax_hybrid",
    rules=(
        *_make_stem_rules(STEM),
        KeyRule("embedding/kernel", "PPFD", "conv", "embeddings.patch_embeddings.projection.weight"),
        *RULES[1:],
    ),
    recognizes=lambda shapes: _has_table(shapes) and _has_stem(shapes),
    configure=partial(configure_stem, {}, _configure_vit),
    family="hybrid",
)

# big_vision: the blocks of vit_jax. Positions are added before the class token is attached, and layers of a scan are
# stacked in one array. Older files have the forms that its loader converts (big_vision/models/vit.py).

_HEAD = "MAPHead_0"
_BV_TABLE = "pos_embedding"
_STACKED = "Transformer/encoderblock/"
_ENCODER = re.compile(r"((?:.*/)?)Transformer/(?:encoderblock(?:_\d+)?|encoder_norm)/.+")
# Names of the position table (the last is vit_jax's) and of parts of the MAP head in older files.
_OLD_TABLES = ("Transformer/pos_embedding", TABLE)
_INLINED = re.compile(r"probe|(LayerNorm|MultiHeadDotProductAttention|MlpBlock)_\d+/.+")


def _map_head_rule(rule: KeyRule) -> KeyRule:
    """Turn a block's rule into the MAP head's, which has the same parts, and a probe instead of the first LayerNorm."""
    parameter = rule.parameter.replace(_TARGET, "pooler.map").replace("layernorm_before", "layernorm")
    return replace(rule, key=rule.key.replace(_BLOCK, _HEAD), parameter=parameter, part="map")


def _recognizes_big_vision(shapes: Shapes) -> bool:
    """Return whether the file has an encoder with the names of Google's code, no stem, and not the form of vit_jax."""
    is_encoder = any(map(_ENCODER.fullmatch, shapes)) and not _has_stem(shapes)
    return is_encoder and (not _has_table(shapes) or _has_parts_of_big_vision(shapes))


def _select_big_vision_names(shapes: Shapes) -> KeyNames:
    """Remove the prefix, sort out keys that are not weights of the image model, and use the names of current files."""
    prefixes = {match[1] for key in shapes if (match := _ENCODER.fullmatch(key))}
    names = _select_names_below(prefixes, "encoders", shapes)
    prefix = names.spell("")
    new_names = {name: _BV_TABLE for name in _OLD_TABLES if name in names.normal}  # name in the file -> current name
    has_inlined_head = "probe" in names.normal  # a MAP head that is not in a module of its own
    if has_inlined_head:
        new_names |= {name: f"{_HEAD}/{name}" for name in names.normal if _INLINED.fullmatch(name)}
    counts = Counter(new_names.get(name, name) for name in names.normal)
    repeated_names = sorted(name for name, count in counts.items() if count > 1)
    if repeated_names:
        raise UserError(
            f"the file holds {', '.join(repeated_names[:3])} under an old and a new name; remove one of the two"
        )
    current = {new_names.get(name, name): key for name, key in names.normal.items()}
    renumbered = _renumber(replace(names, normal=current))
    old_names = {new: name for name, new in new_names.items()}

    def spell(name: str) -> str:
        spelling = renumbered.spell(name).removeprefix(prefix)
        if spelling in old_names:
            return prefix + old_names[spelling]
        # Spell the keys that the file lacks without a module, too.
        return prefix + (spelling.removeprefix(f"{_HEAD}/") if has_inlined_head else spelling)

    return replace(renumbered, spell=spell)


def _stack(rules: tuple[KeyRule, ...], shapes: Shapes) -> tuple[KeyRule, ...]:
    """Return the rules for files with one array per block, or with one array for all blocks."""
    if not any(name.startswith(_STACKED) for name in shapes):
        return rules
    return tuple(
        replace(rule, key=rule.key.replace(f"_{BLOCK}/", "/", 1), axes=("N", *rule.axes), stacked=True)
        if rule.in_block
        else rule
        for rule in rules
    )


def _configure_big_vision(network: Network) -> Fields:
    parts, patches, size = network.parts, network.patches, network.image_size
    if {"cls", "map"} <= parts:
        raise UserError(
            f"the file holds both a class token and a MAP head ({_HEAD}), which no model of big_vision "
            "combines; give the original checkpoint"
        )
    has_class_row = False  # older files have a row for the class token, the first of the table
    if "T" in network.dims:
        has_class_row = "cls" in parts and patches.fits(network.dims["T"] - 1, size)
    elif size is None:
        raise UserError(
            "the weights do not record the image size, because sincos2d positions are computed; give the size with "
            "--image-size, such as --image-size 224 (or --position-embedding none for a model without positions)"
        )
    else:
        h, w = patches.grid_of(size)
        network = replace(network, dims={**network.dims, "T": h * w})
    return _configure_vit(network, special_rows=int(has_class_row)) | {
        "position_embedding": "learned" if "table" in parts else "sincos_2d",
        "position_on_class_token": has_class_row,
        "pooling": next((kind for part, kind in {"cls": "token", "map": "map"}.items() if part in parts), "gap"),
    }


BIG_VISION = replace(
    VIT_JAX,
    name="big_vision",
    rules=(
        *(replace(rule, key=_BV_TABLE, part="table") if rule.key == TABLE else rule for rule in RULES),
        KeyRule(f"{_HEAD}/probe", "11D", "keep", "pooler.map.probe", part="map"),
        *(_map_head_rule(rule) for rule in RULES if rule.in_block and "LayerNorm_1" not in rule.key),
    ),
    recognizes=_recognizes_big_vision,
    names=_select_big_vision_names,
    configure=_configure_big_vision,
    rules_of=_stack,
    assumed={
        "position_embedding": "sincos2d positions, as there is no table",
        "pooling": "the mean of the patches, as there is neither class token nor MAP head",
        "processor": ORIGINAL_PIXELS,
    },
    parts_that_tell={"position_embedding": frozenset({"table"}), "pooling": frozenset({"cls", "map"})},
)

# NaFlex (SigLIP 2, arXiv 2502.14786), for images in their own shape: patches come as vectors, and the position table
# has its grid.

_KERNEL = "embedding/kernel"
NAFLEX = replace(
    BIG_VISION,
    name="big_vision_naflex",
    rules=(
        KeyRule(_KERNEL, "ZD", "linear_patches_last", "embeddings.patch_embeddings.projection.weight"),
        KeyRule(_BV_TABLE, "YYD", "as_table", "embeddings.position_embeddings"),
        *(rule for rule in BIG_VISION.rules if rule.key not in (_KERNEL, _BV_TABLE)),
    ),
    recognizes=lambda shapes: (
        _recognizes_big_vision(shapes)
        and any(len(shape) == 2 for key, shape in shapes.items() if key.endswith(f"/{_KERNEL}") or key == _KERNEL)
    ),
    configure=lambda network: (
        _configure_big_vision(network.with_linear_patches())
        | {"position_embedding": "learned", "position_interpolation": "flexivit"}
    ),
    assumed={name: BIG_VISION.assumed[name] for name in ("pooling", "processor")},
    parts_that_tell={"pooling": BIG_VISION.parts_that_tell["pooling"]},
)

# BiT's ResNets (arXiv 1912.11370): with post-activation units (big_vision's models/bit.py), which are a hybrid's stem;
# and the ResNetV2 of the paper (models/bit_paper.py, big_transfer). The names of big_transfer, such as
# `resnet/block1/unit01/a/standardized_conv2d_4/kernel`, are replaced by big_vision's, `block1/unit01/conv1/kernel`.

BIT_IMAGE_SIZE = 224  # px; the network takes any size, and the file does not record that of its training
BIT_EPSILON = 1e-6  # GroupNorm's epsilon in the original code
_ROOT, _BIG_TRANSFER = "root_block/conv_root/kernel", "resnet/"
_BIG_TRANSFER_ROOT = re.compile(rf"{_BIG_TRANSFER}root_block/standardized_conv2d(_\d+)?/kernel")
# big_vision's name, within a unit or outside of units -> big_transfer's name.
_TO_BIG_TRANSFER = {
    _ROOT: "root_block/standardized_conv2d/kernel",
    "norm-pre-head/scale": "group_norm/gamma",
    "norm-pre-head/bias": "group_norm/beta",
    "head/kernel": "head/conv2d/kernel",
    "head/bias": "head/conv2d/bias",
    **{f"conv{number}/kernel": f"{group}/standardized_conv2d/kernel" for number, group in enumerate("abc", 1)},
    **{f"gn{number}/scale": f"{group}/group_norm/gamma" for number, group in enumerate("abc", 1)},
    **{f"gn{number}/bias": f"{group}/group_norm/beta" for number, group in enumerate("abc", 1)},
    "conv_proj/kernel": "a/proj/standardized_conv2d/kernel",
}
_FROM_BIG_TRANSFER = {old: new for new, old in _TO_BIG_TRANSFER.items()}


def _is_resnet(root: str, shapes: Shapes) -> bool:
    """Return whether the file has this root, and no Transformer below the same prefix."""
    prefixes = [prefix for prefix in _IMAGE_PREFIXES if f"{prefix}{root}" in shapes]
    return any(not any(key.startswith(f"{prefix}Transformer/") for key in shapes) for prefix in prefixes)


def configure_bit(constants: Fields, network: Network) -> Fields:
    """Return the fields of `HfBitConfig`, with these constants."""
    stem, _ = _derive_stem_fields(network)
    size = BIT_IMAGE_SIZE if network.image_size is None else shorten_pair(network.image_size)
    sizes = {name: stem[name] for name in ("stage_depths", "stem_width")}
    return {**sizes, "num_channels": network.dims["C"], "image_size": size, **constants}


def _select_bit_paper_names(shapes: Shapes) -> KeyNames:
    """Return the names of the keys of big_vision's or big_transfer's ResNetV2, in big_vision's spelling."""
    is_big_transfer = any(map(_BIG_TRANSFER_ROOT.fullmatch, shapes))
    if is_big_transfer:
        names = _select_names_below([_BIG_TRANSFER], "ResNets", shapes, [_BIG_TRANSFER])
    else:
        names = _make_names_at_anchor(_ROOT, "ResNets", shapes)
    normal: dict[str, str] = {}
    for name, key in names.normal.items():
        match = re.fullmatch(r"(block[1-9]\d*/unit)(0[1-9]|[1-9]\d+)/(.+)", name)  # unit 01 has the number 1 in rules
        scope, name_in_unit = (f"{match[1]}{int(match[2])}/", match[3]) if match else ("", name)
        if is_big_transfer:  # its convolutions are numbered through the whole network, which the names do not need
            name_without_number = re.sub(r"standardized_conv2d_\d+/", "standardized_conv2d/", name_in_unit)
            name_in_unit = _FROM_BIG_TRANSFER.get(name_without_number, "")
        is_known = name_in_unit and (match or not name_in_unit.startswith("block"))
        normal_name = scope + name_in_unit if is_known else f"/{name}"  # no rule has such a name, so it is left over
        if normal_name in normal:
            raise UserError(
                f"the file holds the same array under two names, '{normal[normal_name]}' and '{key}'; remove one "
                "of them"
            )
        normal[normal_name] = key

    def spell(name: str) -> str:
        match = re.fullmatch(r"(block\d+/unit)(\d+)/(.+)", name)
        scope, name_in_unit = (f"{match[1]}{int(match[2]):02d}/", match[3]) if match else ("", name)
        return names.spell(scope + (_TO_BIG_TRANSFER[name_in_unit] if is_big_transfer else name_in_unit))

    return KeyNames(normal, names.ignored, spell)


BIT = Origin(
    name="bit",
    rules=(*_make_stem_rules("encoder"), *_make_dense_rules("head", "FL", "classifier", "head")),
    recognizes=partial(_is_resnet, "conv_root/kernel"),
    names=partial(_make_names_at_anchor, "conv_root/kernel", "ResNets"),
    configure=partial(configure_bit, {"pre_activation": False}),
    family="bit",
    assumed={"processor": ORIGINAL_PIXELS},
)
BIT_PAPER = replace(
    BIT,
    name="bit_paper",
    rules=(
        KeyRule(_ROOT, "77CW", "conv", "encoder.root_conv.weight"),
        *_make_unit_rules("encoder.stages.{s-1}.{u-1}", pre_activation=True),
        *_make_norm_rules("norm-pre-head", "encoder.norm", "F", "flatten"),
        *_make_dense_rules("head", "FL", "classifier", "head", "pointwise"),
    ),
    recognizes=lambda shapes: _is_resnet(_ROOT, shapes) or any(map(_BIG_TRANSFER_ROOT.fullmatch, shapes)),
    names=_select_bit_paper_names,
    configure=partial(configure_bit, {"pre_activation": True}),
    assumed={
        "zero_padded_pool": "the root pools what lies within the map, as in big_vision (big_transfer pads with zeros: "
        "from_pretrained(folder, zero_padded_pool=True))",
        "processor": ORIGINAL_PIXELS,
    },
)

# MLP-Mixers of vit_jax (models_mixer.py): arXiv 2105.01601, and SAM's (2106.01548).

_MIXER_STEM, _MIXER_BLOCK = "stem/kernel", "MixerBlock_{i}"


def configure_mixer(network: Network) -> Fields:
    """Return the fields of `HfMixerConfig`; incomplete patches are padded."""
    dims = network.dims
    patches = replace(network.patches, is_padded=True)
    return {
        "image_size": shorten_pair(patches.find_table_size(dims["T"], network.image_size, "token MLP")),
        "patch_size": shorten_pair(patches.sides),
        "num_channels": dims["C"],
        "hidden_size": dims["D"],
        "token_intermediate_size": dims["S"],
        "intermediate_size": dims["M"],
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }


MIXER = Origin(
    name="mixer",
    rules=(
        *_make_dense_rules("stem", "PQCD", "embeddings.patch_embeddings.projection", transform="conv"),
        *_make_norm_rules(f"{_MIXER_BLOCK}/LayerNorm_0", f"{_TARGET}.layernorm_before"),
        *_make_dense_rules(f"{_MIXER_BLOCK}/token_mixing/Dense_0", "TS", f"{_TARGET}.token_mlp.fc1"),
        *_make_dense_rules(f"{_MIXER_BLOCK}/token_mixing/Dense_1", "ST", f"{_TARGET}.token_mlp.fc2"),
        *_make_norm_rules(f"{_MIXER_BLOCK}/LayerNorm_1", f"{_TARGET}.layernorm_after"),
        *_make_dense_rules(f"{_MIXER_BLOCK}/channel_mixing/Dense_0", "DM", f"{_TARGET}.mlp.fc1"),
        *_make_dense_rules(f"{_MIXER_BLOCK}/channel_mixing/Dense_1", "MD", f"{_TARGET}.mlp.fc2"),
        *_make_norm_rules("pre_head_layer_norm", "layernorm"),
        *_make_dense_rules("head", "DL", "classifier", "head"),
    ),
    recognizes=lambda shapes: (
        any(f"{prefix}{_MIXER_STEM}" in shapes for prefix in _IMAGE_PREFIXES)
        and _make_key_test("/token_mixing/")(shapes)
    ),
    names=partial(_make_names_at_anchor, _MIXER_STEM, "MLP-Mixers"),
    configure=configure_mixer,
    family="mixer",
    assumed={"processor": ORIGINAL_PIXELS},
)
ORIGINS = (VIT_JAX, VIT_JAX_HYBRID, NAFLEX, BIG_VISION, BIT, BIT_PAPER, MIXER)
