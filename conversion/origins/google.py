"""Google's codes: vision_transformer (vit_jax) and big_vision, with their ViTs, hybrids, MLP-Mixers and BiT ResNets.

Both are JAX/Flax: kernels are [in, out] and [height, width, in, out], attention kernels keep heads apart. Tanh GELU and
eps 1e-6 are constants of the code. Files of vit_jax's first, pre-linen days number the modules of a block in one
sequence (`LayerNorm_0`, `MultiHeadDotProductAttention_1`, `LayerNorm_2`, `MlpBlock_3`), later ones each kind by itself;
the originals read both by renumbering each kind in order, and so does this module.
"""

import re
from collections import defaultdict
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
    resnet_rules,
    square_or_pair,
    stage_depths,
)
from hf_vit.conversion.readers import Shapes
from hf_vit.errors import UserError

PREFIXES = ("", "opt/target/", "target/", "params/")
_IMAGE_PREFIXES = (*PREFIXES, *(f"{prefix}img/" for prefix in PREFIXES))  # the latter of contrastive models
_IGNORED = {
    r"opt/(?!target/).+": "optimizer state",
    r"(opt_state|optimizer)/.+": "optimizer state",
    r"(step|epoch|rng|accum_train_time|(extra|chrono|state|states)/.+)": "training progress",
}
# Of a contrastive model (LiT, SigLIP), below the prefix of both towers.
_OTHER_TOWER = {r"txt/.+": "the text tower", r"[tb]": "temperature and bias of the contrastive loss"}


def _dense(source: str, axes: str, target: str, part: str = "", move: str = "transpose") -> tuple[KeyRule, KeyRule]:
    return (
        KeyRule(f"{source}/kernel", axes, move, f"{target}.weight", part),
        KeyRule(f"{source}/bias", axes[-1], "keep", f"{target}.bias", part),
    )


def _norm(source: str, target: str, width: str = "D", move: str = "keep") -> tuple[KeyRule, KeyRule]:
    return (
        KeyRule(f"{source}/scale", (width,), move, f"{target}.weight"),
        KeyRule(f"{source}/bias", (width,), move, f"{target}.bias"),
    )


def _projection(source: str, target: str) -> tuple[KeyRule, KeyRule]:
    return (
        KeyRule(f"{source}/kernel", "DAK", "split_heads", f"{target}.weight"),
        KeyRule(f"{source}/bias", "AK", "flatten_heads", f"{target}.bias"),
    )


def _names_below(
    there: Iterable[str], what: str, keys: Iterable[str], known: Collection[str] = _IMAGE_PREFIXES
) -> KeyNames:
    """Strip the one known prefix of those under which `what` is there, and sort out what is no weight."""
    found = sorted({*there} & {*known})
    if not found:
        prefix = min(there)
        raise UserError(f"the file holds {what} below '{prefix}', which is unknown; declare it by --prefix {prefix}")
    if len(found) > 1:
        names = ", ".join(map(repr, found))
        raise UserError(f"the file holds {what} under {len(found)} prefixes ({names}); one is needed (--prefix)")
    (prefix,) = found
    names, reasons = KeyNames({}, {}, lambda name: prefix + name), dict(_IGNORED)
    if prefix.endswith("img/"):
        above = re.escape(prefix.removesuffix("img/"))
        reasons |= {above + pattern: reason for pattern, reason in _OTHER_TOWER.items()}
    for key in keys:
        reason = next((reason for pattern, reason in reasons.items() if re.fullmatch(pattern, key)), None)
        if reason is None:
            # What lies outside the prefix keeps its full name: no rule knows it, so it is reported as left over.
            names.normal[key.removeprefix(prefix) if key.startswith(prefix) else f"/{key}"] = key
        else:
            names.ignored[key] = reason
    return names


def _anchored(anchor: str, what: str, shapes: Shapes) -> KeyNames:
    return _names_below([key.removesuffix(anchor) for key in shapes if key.endswith(anchor)], what, shapes)


# The plain ViT of vit_jax.

_BLOCK, _TARGET = "Transformer/encoderblock_{i}", "layers.{i}"
_ATTENTION = f"{_BLOCK}/MultiHeadDotProductAttention_0"
TABLE = "Transformer/posembed_input/pos_embedding"

RULES = (
    *_dense("embedding", "PQCD", "embeddings.patch_embeddings.projection", move="conv"),
    KeyRule("cls", "11D", "keep", "embeddings.cls_token", "cls"),
    KeyRule(TABLE, "1TD", "keep", "embeddings.position_embeddings"),
    *_norm(f"{_BLOCK}/LayerNorm_0", f"{_TARGET}.layernorm_before"),
    *_projection(f"{_ATTENTION}/query", f"{_TARGET}.attention.q_proj"),
    *_projection(f"{_ATTENTION}/key", f"{_TARGET}.attention.k_proj"),
    *_projection(f"{_ATTENTION}/value", f"{_TARGET}.attention.v_proj"),
    *_dense(f"{_ATTENTION}/out", "AKD", f"{_TARGET}.attention.o_proj", move="join_heads"),
    *_norm(f"{_BLOCK}/LayerNorm_1", f"{_TARGET}.layernorm_after"),
    *_dense(f"{_BLOCK}/MlpBlock_0/Dense_0", "DM", f"{_TARGET}.mlp.fc1"),
    *_dense(f"{_BLOCK}/MlpBlock_0/Dense_1", "MD", f"{_TARGET}.mlp.fc2"),
    *_norm("Transformer/encoder_norm", "layernorm"),
    *_dense("pre_logits", "DR", "pooler.dense", "pre_logits"),
    *_dense("head", "RL", "classifier", "head"),
)
_NUMBERED = re.compile(r"(LayerNorm|MultiHeadDotProductAttention|MlpBlock)_(\d+)")
# Where modules are numbered: the blocks, all alike, stacked or not, and (big_vision) the MAP head.
_SCOPE = re.compile(r"((Transformer/encoderblock|MAPHead_0)(?:_\d+)?/)([^/]+)(/.+)")


def _has(pattern: str) -> Callable[[Shapes], bool]:
    return lambda shapes: any(re.search(pattern, key) for key in shapes)


_has_table = _has(rf"{TABLE}$")  # a position table inside the Transformer is the mark of vit_jax
_has_stem = _has(r"(^|/)(conv_root|gn_root|block\d+/unit\d+)/")
# A MAP head or stacked blocks, which only files of big_vision have, old ones too.
_has_parts_of_big_vision = _has(r"(^|/)(MAPHead_0/.|probe$|Transformer/encoderblock/.)")


def _vit_jax_names(shapes: Shapes) -> KeyNames:
    return _renumbered(_anchored(TABLE, "position tables", shapes))


def _renumbered(names: KeyNames) -> KeyNames:
    """Number each kind of module by itself, in order, as the original's `convert_pre_linen` does."""
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)  # (scope, kind of module) -> the numbers it has there
    for name in names.normal:
        scope = _SCOPE.fullmatch(name)
        module = _NUMBERED.fullmatch(scope[3]) if scope else None
        if scope and module and module[2] == str(int(module[2])):
            numbers[scope[2], module[1]].add(int(module[2]))
    ranks = {
        (scope, f"{kind}_{number}"): f"{kind}_{rank}"
        for (scope, kind), there in numbers.items()
        for rank, number in enumerate(sorted(there))
    }
    spelt = {(scope, new): old for (scope, old), new in ranks.items()}

    def rename(name: str, table: Mapping[tuple[str, str], str]) -> str:
        scope = _SCOPE.fullmatch(name)
        return name if scope is None else scope[1] + table.get((scope[2], scope[3]), scope[3]) + scope[4]

    normal = {rename(name, ranks): key for name, key in names.normal.items()}
    return KeyNames(normal, names.ignored, lambda name: names.spell(rename(name, spelt)))


def _configure_vit(network: Network, patches: Patches | None = None, rows: int | None = None) -> Fields:
    """`patches` are those of a stem, `rows` of special tokens in the position table."""
    dims, parts = network.dims, network.parts
    fields = network.vit_fields("cls" in parts if rows is None else rows, patches)
    if dims["A"] * dims["K"] != dims["D"]:
        raise UserError(
            f"{dims['A']} heads of size {dims['K']} make {dims['A'] * dims['K']}, but the hidden size is {dims['D']}; "
            "the model needs heads that split the hidden size evenly"
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
    block_pattern=r"Transformer/encoderblock_(0|[1-9]\d*)/",
    recognises=lambda shapes: _has_table(shapes) and not _has_stem(shapes) and not _has_parts_of_big_vision(shapes),
    names=_vit_jax_names,
    configure=_configure_vit,
    without={"pre_logits": {"R": "D"}},
    assumed={"pooling": "the mean of the patches, as there is no class token", "processor": ORIGINAL_PIXELS},
    told={"pooling": frozenset({"cls"})},
    first_patch=True,
)

# Hybrids of vit_jax: a ResNet stem before that Transformer.

STEM = "embeddings.patch_embeddings.stem"
_UNIT = "block{s}/unit{u}"  # numbers of a stage and of a unit in it, from 1


def _unit_rules(at: str, pre_activation: bool = False) -> tuple[KeyRule, ...]:
    """Return the rules of a unit of a ResNet, in the order of its computation."""
    rules: list[KeyRule] = []
    norms = "IUU" if pre_activation else "UUO"
    for number, (kernel, width) in enumerate(zip(("11IU", "33UU", "11UO"), norms, strict=True), start=1):
        norm = _norm(f"{_UNIT}/gn{number}", f"{at}.norm{number}", width, "flatten")
        conv = KeyRule(f"{_UNIT}/conv{number}/kernel", kernel, "conv", f"{at}.conv{number}.weight")
        rules += [*norm, conv] if pre_activation else [conv, *norm]
    return (*rules, KeyRule(f"{_UNIT}/conv_proj/kernel", "11IO", "conv", f"{at}.projection.weight"))


def _stem_rules(stem: str) -> tuple[KeyRule, ...]:
    at = f"{stem}.stages.{{s-1}}.{{u-1}}"
    return (
        KeyRule("conv_root/kernel", "77CW", "conv", f"{stem}.root_conv.weight"),
        *_norm("gn_root", f"{stem}.root_norm", "W", "flatten"),
        *_unit_rules(at),
        *_norm(f"{_UNIT}/gn_proj", f"{at}.projection_norm", "O", "flatten"),
    )


_depths = partial(stage_depths, r"block([1-9]\d{0,3})/unit([1-9]\d{0,3})/", 1)


def stem_fields(network: Network, depths: tuple[int, ...]) -> tuple[Fields, Patches]:
    """Return what the stem tells of the config, and how its map is cut into patches."""
    width, patch = network.dims["W"], network.dims.get("P", 1)
    if width % 32:
        raise UserError(
            f"the stem is {width} wide, which GroupNorm's 32 groups do not divide; the file is damaged or "
            "of another format"
        )
    patches = Patches((patch, patch), stem_stride=4 * 2 ** max(len(depths) - 1, 0))
    return {"stage_depths": depths, "stem_width": width, "stem_patch_size": patch}, patches


def _configure_hybrid(network: Network) -> Fields:
    stem, patches = stem_fields(network, _depths(network.shapes))
    return stem | _configure_vit(network, patches)


VIT_JAX_HYBRID = replace(
    VIT_JAX,
    name="vit_jax_hybrid",
    rules=(
        *_stem_rules(STEM),
        KeyRule("embedding/kernel", "PPFD", "conv", "embeddings.patch_embeddings.projection.weight"),
        *RULES[1:],
    ),
    recognises=lambda shapes: _has_table(shapes) and _has_stem(shapes),
    configure=_configure_hybrid,
    family="hybrid",
    rules_of=partial(resnet_rules, _depths),
)

# big_vision: the blocks of vit_jax; positions are added before the class token is attached, layers that ran in a scan
# are stacked in one array. The forms of older files are those that its own loader mends (big_vision/models/vit.py).

_HEAD, _BV_TABLE, _STACKED = "MAPHead_0", "pos_embedding", "Transformer/encoderblock/"
_ENCODER = re.compile(r"((?:.*/)?)Transformer/(?:encoderblock(?:_\d+)?|encoder_norm)/.+")
# Where older files have the table (the last is vit_jax's own place), and parts of the MAP head.
_OLD_TABLES = ("Transformer/pos_embedding", TABLE)
_INLINED = re.compile(r"probe|(LayerNorm|MultiHeadDotProductAttention|MlpBlock)_\d+/.+")


def _rule_of_map(rule: KeyRule) -> KeyRule:
    """The MAP head has the parts of a block, and a probe in the place of the first LayerNorm."""
    parameter = rule.parameter.replace(_TARGET, "pooler.map").replace("layernorm_before", "layernorm")
    return replace(rule, key=rule.key.replace(_BLOCK, _HEAD), parameter=parameter, part="map")


def _recognises_big_vision(shapes: Shapes) -> bool:
    """Return whether there is an encoder under the names of Google's code, without a stem and the marks of vit_jax."""
    is_encoder = any(map(_ENCODER.fullmatch, shapes)) and not _has_stem(shapes)
    return is_encoder and (not _has_table(shapes) or _has_parts_of_big_vision(shapes))


def _big_vision_names(shapes: Shapes) -> KeyNames:
    """Strip the prefix, sort out what is no weight of the image model, and name everything as files of today do."""
    there = {match[1] for key in shapes if (match := _ENCODER.fullmatch(key))}
    found = _names_below(there, "encoders", shapes)
    prefix = found.spell("")
    if len(shapes.get(f"{prefix}embedding/kernel", ())) == 2:
        raise UserError(
            "the checkpoint has patches of many grids in one sequence (NaFlex), which hf_vit does not support; "
            "use it with big_vision"
        )
    moved = {old: _BV_TABLE for old in _OLD_TABLES if old in found.normal}  # old place -> today's
    if "probe" in found.normal:  # a MAP head that is not in a module of its own
        moved |= {name: f"{_HEAD}/{name}" for name in found.normal if _INLINED.fullmatch(name)}
    places = [moved.get(name, name) for name in found.normal]
    if twice := sorted({place for place in places if places.count(place) > 1}):
        raise UserError(
            f"the file holds {', '.join(twice[:3])} in an older place and in today's; one of them is needed"
        )
    renumbered = _renumbered(replace(found, normal=dict(zip(places, found.normal.values(), strict=True))))
    old = {new: name for name, new in moved.items()}

    def spell(name: str) -> str:
        spelt = renumbered.spell(name).removeprefix(prefix)
        inlined = "probe" in moved and spelt.startswith(f"{_HEAD}/")
        return prefix + old.get(spelt, spelt.removeprefix(f"{_HEAD}/") if inlined else spelt)

    return replace(renumbered, spell=spell)


def _stack(rules: tuple[KeyRule, ...], shapes: Shapes) -> tuple[KeyRule, ...]:
    """Return the rules of the blocks, for one array a block or for one of all blocks."""
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
        raise UserError(f"the file holds both a class token and a MAP head ({_HEAD}), which big_vision never combines")
    has_class_row = False  # as the first of the table, in older files
    if "T" in network.dims:
        has_class_row = "cls" in parts and patches.fit(network.dims["T"] - 1, size)
    elif size is None:
        raise UserError(
            "the file holds no position table, so its positions are sincos2d (or none: "
            "--position-embedding none; or it is damaged); give the image size the checkpoint was trained "
            "at with --image-size HxW"
        )
    else:
        h, w = patches.grid_of(size)
        network = replace(network, dims={**network.dims, "T": h * w})
    return _configure_vit(network, rows=int(has_class_row)) | {
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
        *(_rule_of_map(rule) for rule in RULES if rule.in_block and "LayerNorm_1" not in rule.key),
    ),
    recognises=_recognises_big_vision,
    names=_big_vision_names,
    configure=_configure_big_vision,
    rules_of=_stack,
    assumed={
        "position_embedding": "sincos2d positions, as there is no table",
        "pooling": "the mean of the patches, as there is neither class token nor MAP head",
        "processor": ORIGINAL_PIXELS,
    },
    told={"position_embedding": frozenset({"table"}), "pooling": frozenset({"cls", "map"})},
)

# BiT's ResNets (arXiv 1912.11370): of post-activation units (big_vision's models/bit.py), which are a hybrid's stem;
# and the ResNetV2 of the paper (models/bit_paper.py, big_transfer's own files), whose names there, such as
# `resnet/block1/unit01/a/standardized_conv2d_4/kernel`, are told in those of big_vision, `block1/unit01/conv1/kernel`.

BIT_IMAGE_SIZE = 224  # px; the network takes any, and the file does not tell which it was trained on
BIT_EPSILON = 1e-6  # of GroupNorm in the original
_ROOT, _BIG_TRANSFER = "root_block/conv_root/kernel", "resnet/"
_ROOT_THERE = re.compile(rf"{_BIG_TRANSFER}root_block/standardized_conv2d(_\d+)?/kernel")
# big_transfer's name of what big_vision calls otherwise, within a unit or outside of all.
_THERE = {
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
_HERE = {there: here for here, there in _THERE.items()}


def _is_resnet(root: str, shapes: Shapes) -> bool:
    """Return whether there is this root, and no Transformer beside it."""
    there = [prefix for prefix in _IMAGE_PREFIXES if f"{prefix}{root}" in shapes]
    return any(not any(key.startswith(f"{prefix}Transformer/") for key in shapes) for prefix in there)


def bit_fields(network: Network, depths: tuple[int, ...], pre_activation: bool) -> Fields:
    """Return fields of `HfBitConfig`."""
    stem, _ = stem_fields(network, depths)
    size = BIT_IMAGE_SIZE if network.image_size is None else square_or_pair(network.image_size)
    sizes = {name: stem[name] for name in ("stage_depths", "stem_width")}
    return {**sizes, "num_channels": network.dims["C"], "image_size": size, "pre_activation": pre_activation}


def _configure_bit(pre_activation: bool, network: Network) -> Fields:
    return bit_fields(network, _depths(network.shapes), pre_activation)


def _bit_paper_names(shapes: Shapes) -> KeyNames:
    is_big_transfers = any(map(_ROOT_THERE.fullmatch, shapes))
    if is_big_transfers:
        found = _names_below([_BIG_TRANSFER], "ResNets", shapes, [_BIG_TRANSFER])
    else:
        found = _anchored(_ROOT, "ResNets", shapes)
    normal: dict[str, str] = {}
    for name, key in found.normal.items():
        unit = re.fullmatch(r"(block[1-9]\d*/unit)(0[1-9]|[1-9]\d+)/(.+)", name)
        scope, end = (f"{unit[1]}{int(unit[2])}/", unit[3]) if unit else ("", name)
        if is_big_transfers:
            end = _HERE.get(re.sub(r"standardized_conv2d_\d+/", "standardized_conv2d/", end), "")
        here = scope + end if end and (unit or not end.startswith("block")) else f"/{name}"  # no rule knows "/..."
        if here in normal:
            raise UserError(f"the file holds '{normal[here]}' and '{key}', which are the same array's; one is needed")
        normal[here] = key

    def spell(name: str) -> str:
        unit = re.fullmatch(r"(block\d+/unit)(\d+)/(.+)", name)
        scope, end = (f"{unit[1]}{int(unit[2]):02d}/", unit[3]) if unit else ("", name)
        return found.spell(scope + (_THERE[end] if is_big_transfers else end))

    return KeyNames(normal, found.ignored, spell)


BIT = Origin(
    name="bit",
    rules=(
        *_stem_rules("encoder"),
        *_dense("head", "FL", "classifier", "head"),
    ),
    block_pattern="",
    recognises=partial(_is_resnet, "conv_root/kernel"),
    names=partial(_anchored, "conv_root/kernel", "ResNets"),
    configure=partial(_configure_bit, False),
    family="bit",
    rules_of=partial(resnet_rules, _depths),
    assumed={"processor": ORIGINAL_PIXELS},
)
BIT_PAPER = replace(
    BIT,
    name="bit_paper",
    rules=(
        KeyRule(_ROOT, "77CW", "conv", "encoder.root_conv.weight"),
        *_unit_rules("encoder.stages.{s-1}.{u-1}", pre_activation=True),
        *_norm("norm-pre-head", "encoder.norm", "F", "flatten"),
        *_dense("head", "FL", "classifier", "head", "pointwise"),
    ),
    recognises=lambda shapes: _is_resnet(_ROOT, shapes) or any(map(_ROOT_THERE.fullmatch, shapes)),
    names=_bit_paper_names,
    configure=partial(_configure_bit, True),
    assumed={
        "zero_padded_pool": "the root pools what lies within the map, as in big_vision (big_transfer pads with zeros: "
        "from_pretrained(folder, zero_padded_pool=True))",
        "processor": ORIGINAL_PIXELS,
    },
)

# MLP-Mixers of vit_jax (models_mixer.py): arXiv 2105.01601, and SAM's (2106.01548).

_MIXER_STEM, _MIXER_BLOCK = "stem/kernel", "MixerBlock_{i}"


def configure_mixer(network: Network) -> Fields:
    """Return fields of `HfMixerConfig`; parts of a patch are padded."""
    dims, patches = network.dims, replace(network.patches, is_padded=True)
    return {
        "image_size": square_or_pair(patches.table_size(dims["T"], network.image_size, "token MLP")),
        "patch_size": square_or_pair(patches.sides),
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
        *_dense("stem", "PQCD", "embeddings.patch_embeddings.projection", move="conv"),
        *_norm(f"{_MIXER_BLOCK}/LayerNorm_0", f"{_TARGET}.layernorm_before"),
        *_dense(f"{_MIXER_BLOCK}/token_mixing/Dense_0", "TS", f"{_TARGET}.token_mlp.fc1"),
        *_dense(f"{_MIXER_BLOCK}/token_mixing/Dense_1", "ST", f"{_TARGET}.token_mlp.fc2"),
        *_norm(f"{_MIXER_BLOCK}/LayerNorm_1", f"{_TARGET}.layernorm_after"),
        *_dense(f"{_MIXER_BLOCK}/channel_mixing/Dense_0", "DM", f"{_TARGET}.mlp.fc1"),
        *_dense(f"{_MIXER_BLOCK}/channel_mixing/Dense_1", "MD", f"{_TARGET}.mlp.fc2"),
        *_norm("pre_head_layer_norm", "layernorm"),
        *_dense("head", "DL", "classifier", "head"),
    ),
    block_pattern=r"MixerBlock_(0|[1-9]\d*)/",
    recognises=lambda shapes: (
        any(f"{prefix}{_MIXER_STEM}" in shapes for prefix in _IMAGE_PREFIXES) and _has("/token_mixing/")(shapes)
    ),
    names=partial(_anchored, _MIXER_STEM, "MLP-Mixers"),
    configure=configure_mixer,
    family="mixer",
    assumed={"processor": ORIGINAL_PIXELS},
)
ORIGINS = (VIT_JAX, VIT_JAX_HYBRID, BIG_VISION, BIT, BIT_PAPER, MIXER)
