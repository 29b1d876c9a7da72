"""Google's vision_transformer (vit_jax): plain ViT of arXiv 2010.11929, AugReg (2106.10270) and SAM (2106.01548) files.

The original is JAX/Flax: kernels are [in, out] and [height, width, in, out], attention kernels keep heads apart. Files
of its first, pre-linen days number the modules of a block in one sequence (`LayerNorm_0`,
`MultiHeadDotProductAttention_1`, `LayerNorm_2`, `MlpBlock_3`), later ones each kind by itself (`LayerNorm_0`,
`LayerNorm_1`, `MlpBlock_0`); the original reads both by renumbering each kind in order, and so does this module.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from hf_vit.conversion.origins.origin import Dims, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.preprocessing import ORIGINAL_PIXELS
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import Pair, Patches, square_or_pair, table_size
from hf_vit.errors import UserError

_BLOCK = "Transformer/encoderblock_{i}"
_ATTENTION = f"{_BLOCK}/MultiHeadDotProductAttention_0"
_MLP = f"{_BLOCK}/MlpBlock_0"
TABLE = "Transformer/posembed_input/pos_embedding"

RULES = (
    KeyRule("embedding/kernel", "PQCD", "conv", "embeddings.patch_embeddings.projection.weight"),
    KeyRule("embedding/bias", "D", "keep", "embeddings.patch_embeddings.projection.bias"),
    KeyRule("cls", "11D", "keep", "embeddings.cls_token", part="cls"),
    KeyRule(TABLE, "1TD", "keep", "embeddings.position_embeddings"),
    KeyRule(f"{_BLOCK}/LayerNorm_0/scale", "D", "keep", "layers.{i}.layernorm_before.weight"),
    KeyRule(f"{_BLOCK}/LayerNorm_0/bias", "D", "keep", "layers.{i}.layernorm_before.bias"),
    KeyRule(f"{_ATTENTION}/query/kernel", "DAK", "split_heads", "layers.{i}.attention.q_proj.weight"),
    KeyRule(f"{_ATTENTION}/query/bias", "AK", "flatten_heads", "layers.{i}.attention.q_proj.bias"),
    KeyRule(f"{_ATTENTION}/key/kernel", "DAK", "split_heads", "layers.{i}.attention.k_proj.weight"),
    KeyRule(f"{_ATTENTION}/key/bias", "AK", "flatten_heads", "layers.{i}.attention.k_proj.bias"),
    KeyRule(f"{_ATTENTION}/value/kernel", "DAK", "split_heads", "layers.{i}.attention.v_proj.weight"),
    KeyRule(f"{_ATTENTION}/value/bias", "AK", "flatten_heads", "layers.{i}.attention.v_proj.bias"),
    KeyRule(f"{_ATTENTION}/out/kernel", "AKD", "join_heads", "layers.{i}.attention.o_proj.weight"),
    KeyRule(f"{_ATTENTION}/out/bias", "D", "keep", "layers.{i}.attention.o_proj.bias"),
    KeyRule(f"{_BLOCK}/LayerNorm_1/scale", "D", "keep", "layers.{i}.layernorm_after.weight"),
    KeyRule(f"{_BLOCK}/LayerNorm_1/bias", "D", "keep", "layers.{i}.layernorm_after.bias"),
    KeyRule(f"{_MLP}/Dense_0/kernel", "DM", "transpose", "layers.{i}.mlp.fc1.weight"),
    KeyRule(f"{_MLP}/Dense_0/bias", "M", "keep", "layers.{i}.mlp.fc1.bias"),
    KeyRule(f"{_MLP}/Dense_1/kernel", "MD", "transpose", "layers.{i}.mlp.fc2.weight"),
    KeyRule(f"{_MLP}/Dense_1/bias", "D", "keep", "layers.{i}.mlp.fc2.bias"),
    KeyRule("Transformer/encoder_norm/scale", "D", "keep", "layernorm.weight"),
    KeyRule("Transformer/encoder_norm/bias", "D", "keep", "layernorm.bias"),
    KeyRule("pre_logits/kernel", "DR", "transpose", "pooler.dense.weight", part="pre_logits"),
    KeyRule("pre_logits/bias", "R", "keep", "pooler.dense.bias", part="pre_logits"),
    KeyRule("head/kernel", "RL", "transpose", "classifier.weight", part="head"),
    KeyRule("head/bias", "L", "keep", "classifier.bias", part="head"),
)

LEGEND = {
    "P, Q": "height and width of a patch in px",
    "C": "channels",
    "D": "hidden size",
    "T": "rows of the position table: the class token's, where there is one, then the patch grid's row by row",
    "A": "heads",
    "K": "size of a head",
    "M": "width of the MLP",
    "R": "size of the representation layer; D without one",
    "L": "labels",
}

IGNORED = {
    r"opt/(?!target/).+": "optimizer state",
    r"(opt_state|optimizer)/.+": "optimizer state",
    r"(step|epoch|rng|accum_train_time|(extra|chrono|state|states)/.+)": "training progress",
}

PREFIXES = ("", "opt/target/", "target/", "params/")
_NUMBERED = re.compile(r"(LayerNorm|MultiHeadDotProductAttention|MlpBlock)_(\d+)")
# Where modules are numbered: the blocks, all alike, stacked or not, and (big_vision) the MAP head.
_SCOPE = re.compile(r"((Transformer/encoderblock|MAPHead_0)(?:_\d+)?/)([^/]+)(/.+)")


def recognises(shapes: Mapping[str, Shape]) -> bool:
    """A position table inside the Transformer is this code's mark; with a ResNet stem it is a hybrid's."""
    return has_position_table(shapes) and not has_stem(shapes) and not has_parts_of_big_vision(shapes)


def has_position_table(shapes: Mapping[str, Shape]) -> bool:
    return any(key.endswith(TABLE) for key in shapes)


def has_stem(shapes: Mapping[str, Shape]) -> bool:
    return any(re.search(r"(^|/)(conv_root|gn_root|block\d+/unit\d+)/", key) for key in shapes)


def has_parts_of_big_vision(shapes: Mapping[str, Shape]) -> bool:
    """Whether there is a MAP head or stacked blocks, which only files of big_vision have, old ones too."""
    return any(re.fullmatch(r"(.*/)?(MAPHead_0/.+|probe|Transformer/encoderblock/.+)", key) for key in shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """Strip the prefix, sort out what is no weight, and renumber the modules of a block."""
    prefix = _prefix(shapes)
    weights, ignored = sorted_out(shapes, prefix, IGNORED)
    return renumbered(weights, ignored, prefix)


def sorted_out(keys: Iterable[str], prefix: str, reasons: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(name without the prefix -> key, for what may be a weight; key -> reason, for what is ignored)."""
    ignored: dict[str, str] = {}
    weights: dict[str, str] = {}
    for key in keys:
        reason = next((reason for pattern, reason in reasons.items() if re.fullmatch(pattern, key)), None)
        if reason is None:
            # What lies outside the prefix keeps its full name: no rule knows it, so it is reported as left over.
            weights[key.removeprefix(prefix) if key.startswith(prefix) else f"/{key}"] = key
        else:
            ignored[key] = reason
    return weights, ignored


def renumbered(weights: Mapping[str, str], ignored: dict[str, str], prefix: str) -> KeyNames:
    """The names with each kind of module numbered by itself, in order, as the original's `convert_pre_linen` does."""
    ranks = {
        (scope, f"{kind}_{number}"): f"{kind}_{rank}"
        for (scope, kind), numbers in _numbers(weights).items()
        for rank, number in enumerate(numbers)
    }
    spelt = {(scope, new): old for (scope, old), new in ranks.items()}

    def rename(key: str, table: Mapping[tuple[str, str], str]) -> str:
        found = _SCOPE.fullmatch(key)
        return key if found is None else found[1] + table.get((found[2], found[3]), found[3]) + found[4]

    normal = {rename(name, ranks): key for name, key in weights.items()}
    return KeyNames(normal, ignored, lambda name: prefix + rename(name, spelt))


def _prefix(shapes: Mapping[str, Shape]) -> str:
    found = [prefix for prefix in PREFIXES if f"{prefix}{TABLE}" in shapes]
    if len(found) != 1:
        raise UserError(
            f"the file holds position tables under {len(found)} of the prefixes {', '.join(map(repr, PREFIXES))}; "
            "exactly one set of weights is needed"
        )
    return found[0]


def _numbers(weights: Iterable[str]) -> dict[tuple[str, str], list[int]]:
    """(scope, kind of module) -> the numbers it has there, in order: {("MAPHead_0", "LayerNorm"): [1], ...}."""
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in weights:
        found = _SCOPE.fullmatch(name)
        module = _NUMBERED.fullmatch(found[3]) if found else None
        if found and module and module[2] == str(int(module[2])):
            numbers[found[2], module[1]].add(int(module[2]))
    return {kind: sorted(known) for kind, known in numbers.items()}


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: tuple[int, int] | None
) -> dict[str, Any]:
    """Fields of `HfViTConfig`."""
    patches = Patches((dims["P"], dims["Q"]))
    size = table_size(dims["T"] - ("cls" in parts), patches, image_size)
    return {"patch_size": square_or_pair(patches.sides), **common_fields(dims, parts, size)}


def common_fields(dims: Dims, parts: frozenset[str], image_size: Pair) -> dict[str, Any]:
    """What the Transformer tells of the config.

    Tanh GELU and eps 1e-6 are constants of the original code (Flax's defaults).
    """
    if dims["A"] * dims["K"] != dims["D"]:
        raise UserError(
            f"{dims['A']} heads of size {dims['K']} make {dims['A'] * dims['K']}, but the hidden size is {dims['D']}; "
            "the model needs heads that split the hidden size evenly"
        )
    return {
        "image_size": square_or_pair(image_size),
        "num_channels": dims["C"],
        "hidden_size": dims["D"],
        "num_attention_heads": dims["A"],
        "intermediate_size": dims["M"],
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "position_embedding": "learned",
        "pooling": "token" if "cls" in parts else "gap",
        "representation_size": dims["R"] if "pre_logits" in parts else None,
    }


ASSUMED = {"pooling": "the mean of the patches, as there is no class token", "processor": ORIGINAL_PIXELS}

ORIGIN = Origin(
    name="vit_jax",
    title="Google vision_transformer (vit_jax) .npz: ImageNet-21k, fine-tuned, AugReg and SAM files",
    legend=LEGEND,
    rules=RULES,
    block_pattern=r"Transformer/encoderblock_(0|[1-9]\d*)/",
    without={"pre_logits": {"R": "D"}},
    ignored=IGNORED,
    recognises=recognises,
    names=names,
    configure=configure,
    assumed=ASSUMED,
    told={"pooling": frozenset({"cls"})},
    first_patch=True,
    notes=(
        "Prefixes that are taken off: " + ", ".join(f"`{prefix}`" for prefix in PREFIXES if prefix) + ".",
        "Numbers of `LayerNorm_`, `MultiHeadDotProductAttention_` and `MlpBlock_` are those of the newer (linen) form; "
        "older files (`LayerNorm_0`, `MultiHeadDotProductAttention_1`, `LayerNorm_2`, `MlpBlock_3`) are renumbered per "
        "kind, as the original does.",
        "`cls` decides between token and GAP pooling; `pre_logits` and `head` may be missing.",
    ),
)
