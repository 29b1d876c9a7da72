"""Plan a conversion from the keys and shapes of a file, or refuse it with a list of everything that does not fit.

A plan is data: one row for every parameter of the model, a reason for every ignored key. Every key of the file is used
once or ignored, and every parameter is filled once. No array is read.
"""

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn, TypedDict, Unpack

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins.origin import (
    BLOCK,
    COMPUTATIONS,
    SETTINGS,
    TRANSFORMS,
    WITHOUT,
    Declared,
    Fields,
    KeyNames,
    KeyRule,
    Network,
    Origin,
    Pair,
    count_units,
    format_size,
    make_resnet_rules,
    shorten_pair,
    split_axis,
)
from hf_vit.conversion.origins.registry import find_origin
from hf_vit.conversion.readers import NO_COMPANIONS, Companions, Shape, Shapes, name_in_errors
from hf_vit.errors import UserError, get_strict_reason
from hf_vit.families import FAMILIES
from hf_vit.models.configuration_hf_vit import HfBaseConfig, as_pair

POSITION_TABLE = "embeddings.position_embeddings"
HEADS = ("classifier.", "distillation_classifier.")
REPRESENTATION = "pooler.dense."
REPLACED = "replaced by a new head"
MISFIT = "config.json does not fit the weights"
MAX_LISTED = 8  # names that a message lists; the rest is counted
MAX_DEPTH = 1000  # keys with larger block numbers are reported as left over

# Field of the config -> the command's option that sets it.
DECLARED = {
    "num_attention_heads": "--num-heads",
    "hidden_act": "--hidden-act",
    "pooling": "--pooling",
    "position_embedding": "--position-embedding",
    "rotary_embedding": "--rotary-embedding",
    "norm_after_branches": "--norm-after-branches",
}


# Fields that must not be set for origins which do not assume a value for them.
_NEVER_BY_DEFAULT = ("rotary_embedding", "norm_after_branches")


class PlanOptions(TypedDict, total=False):
    """Options of a conversion; see `PlanSettings`."""

    image_size: Pair | None
    resize_to: Pair | None
    num_labels: int | None
    labels: Sequence[str] | None
    drop_pre_logits: bool
    num_heads: int | None
    hidden_act: str | None
    pooling: str | None
    position_embedding: str | None
    rotary_embedding: str | None
    norm_after_branches: bool | None
    prefix: str | None


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Options of a conversion: facts about the source that its files do not record, and changes to the model.

    Attributes:
        image_size: (height, width) in px that the source was trained at; needed if its position table is not square.
        resize_to: (height, width) in px to resample the position table to, as the original code's fine-tuning does.
        num_labels: number of classes of a new head, which starts at zero.
        labels: names of the classes of a new head, which starts at zero.
        drop_pre_logits: remove the representation layer, as the original code's fine-tuning does. The source's head
            needs that layer and is removed too, so without a new head the result is the bare model.
        num_heads, hidden_act, pooling, position_embedding, rotary_embedding, norm_after_branches: values of the config
            (pooling: "token", "gap", "map"; position_embedding: "sincos_2d", "none"), if neither the weights nor a file
            beside them record them. "token" without a class token means the first patch's.
        prefix: the beginning of the model's keys in a checkpoint that also holds something else, which is ignored.

    Raises:
        UserError: the options contradict each other.
    """

    image_size: Pair | None = None
    resize_to: Pair | None = None
    num_labels: int | None = None
    labels: Sequence[str] | None = None
    drop_pre_logits: bool = False
    num_heads: int | None = None
    hidden_act: str | None = None
    pooling: str | None = None
    position_embedding: str | None = None
    rotary_embedding: str | None = None
    norm_after_branches: bool | None = None
    prefix: str | None = None

    def __post_init__(self) -> None:
        """Raise a UserError for options that exclude each other, or for an empty list of labels."""
        if self.num_labels is not None and self.labels is not None:
            raise UserError(f"--num-labels {self.num_labels} and --labels cannot be combined; give only one of them")
        if (self.num_labels is not None and self.num_labels < 1) or (self.labels is not None and not self.labels):
            raise UserError(
                f"a classifier needs at least 1 label, but {self.num_labels or 0} were given; give a positive "
                "--num-labels, or names with --labels"
            )

    @property
    def new_head(self) -> bool:
        return self.num_labels is not None or self.labels is not None

    @property
    def declared(self) -> Fields:
        """Return the fields of the config that options set."""
        values = {name: getattr(self, option[2:].replace("-", "_")) for name, option in DECLARED.items()}
        # A flag that is left out is False.
        return {name: value for name, value in values.items() if value is not None and value is not False}


@dataclass(frozen=True)
class Resample:
    """The resampling of a position table from one (h, w) patch grid to another; `prefix` rows are copied."""

    old_grid: Pair
    new_grid: Pair
    prefix: int
    mode: str
    offset: float = 0.0


@dataclass(frozen=True)
class Row:
    """One parameter of the model and where its values come from."""

    parameter: str  # name in the bare model, without the prefix that it has inside a classifier
    parameter_shape: Shape
    key: str | None  # None: filled with zeros (a new head)
    shape: Shape | None  # shape of the whole array
    transform: str
    resample: Resample | None = None
    block: int | None = None  # index along `axis`, if the array stacks all blocks
    axis: int = 0
    piece: tuple[int, int] | None = None  # (index, number) of equal parts, if the array holds several parameters
    num_left_out: int = 0  # number of these parts that no parameter gets
    other_keys: tuple[str, ...] = ()  # keys of other arrays that the parameter is computed from, maybe with others

    def select(self, array: torch.Tensor) -> torch.Tensor:
        """Return the part of the whole array that this row uses."""
        block = array if self.block is None else array.select(self.axis, self.block)
        return block if self.piece is None else block.chunk(self.piece[1])[self.piece[0]]


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion will do, decided from names and shapes only.

    Attributes:
        origin: name of the origin.
        family: family of the model, a key of `hf_vit.families.FAMILIES`.
        config: the model's configuration.
        model_class: the class to save: the classifier, or the bare model if the source has no head.
        rows: one row for every parameter of the model.
        ignored: key of the file -> why it is ignored.
        has_head: whether there is a classifier.
        new_head: whether the classifier is new (zeros).
        processor: fields of the image processor; others are the original's, see `Declared`, and the size the model's.
        assumed: field of the config, "labels" or "processor" -> what was assumed, as the source does not record it.
    """

    origin: str
    family: str
    config: HfBaseConfig
    model_class: type[PreTrainedModel]
    rows: tuple[Row, ...]
    ignored: Mapping[str, str]
    has_head: bool
    new_head: bool
    processor: Mapping[str, Any] = field(default_factory=dict[str, Any])
    assumed: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def consumed(self) -> list[str]:
        """Return the keys of the file that fill a parameter."""
        keys = [key for row in self.rows if row.key is not None for key in (row.key, *row.other_keys)]
        return list(dict.fromkeys(keys))

    @property
    def resample(self) -> Resample | None:
        """Return how the position table is resampled; None if it is not."""
        return next((row.resample for row in self.rows if row.resample), None)

    @property
    def size(self) -> int:
        """Return the size in bytes of all used arrays in float32."""
        shapes = {row.key: row.shape for row in self.rows if row.shape is not None}
        return 4 * sum(map(math.prod, shapes.values()))

    def parameter_name(self, row: Row) -> str:
        """Return the name of the row's parameter in `model_class`."""
        has_no_prefix = row.parameter.startswith(HEADS) or not self.has_head
        return row.parameter if has_no_prefix else f"{self.model_class.base_model_prefix}.{row.parameter}"


def plan(
    shapes: Shapes,
    *,
    file_name: str = "the checkpoint",
    companions: Companions = NO_COMPANIONS,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Plan a conversion from names and shapes only, without reading arrays.

    Args:
        shapes: key -> shape of every array of the checkpoint.
        file_name: the checkpoint's name in messages.
        companions: the JSON files beside the weights.
        options: see `PlanSettings`.

    Raises:
        UserError: the kind of checkpoint is unknown; a key is missing, left over or has a wrong shape (all are listed);
            or no model has these sizes.
    """
    return make_plan(shapes, PlanSettings(**options), companions, file_name)


def make_plan(
    shapes: Shapes, settings: PlanSettings, companions: Companions = NO_COMPANIONS, file_name: str = "the file"
) -> Plan:
    """Find the origin, match the keys with its table, build the config, and list rows and ignored keys; see `plan`."""
    with name_in_errors(file_name):
        return _make_plan(shapes, settings, companions, file_name)


def _make_plan(shapes: Shapes, settings: PlanSettings, companions: Companions, file_name: str) -> Plan:
    prefix = _find_prefix(shapes, settings.prefix)
    # torch.compile adds a name to keys, of the whole model or of every block.
    keys = {key.removeprefix(prefix).replace("_orig_mod.", ""): key for key in shapes if key.startswith(prefix)}
    keys_below_prefix = {name: shapes[key] for name, key in keys.items()}
    config: Any = companions.config or {}
    if settings.image_size is not None and "architecture" in config:  # timm's, whose preprocessing follows the model
        arguments = {**(config.get("model_args") or {}), "img_size": list(settings.image_size)}
        companions = replace(companions, config={**config, "model_args": arguments})
    origin = find_origin(keys_below_prefix, file_name, companions)
    declared = Declared() if origin.declared is None else origin.declared(companions, keys_below_prefix)
    names = _make_names_below_prefix(prefix, origin.names(keys_below_prefix), keys, shapes)
    _replace_foreign_heads(origin, names, settings)
    layout = Layout(origin, names, shapes)
    layout.refuse_misfits()
    _refuse_inapplicable(settings, layout)
    source_has_head = "head" in layout.parts and not settings.drop_pre_logits
    has_head = source_has_head or settings.new_head
    tells = origin.parts_that_tell
    assumed = {name: text for name, text in origin.assumed.items() if not layout.parts & tells.get(name, set())}
    fields = _build_fields(layout, declared, settings, assumed)
    fields |= _read_fields(layout, companions)
    fields |= _make_label_fields(layout.dims["L"] if source_has_head else None, declared, settings)
    config, resample = _build_config(origin.family, fields, settings.resize_to)
    model_class = FAMILIES[origin.family].classes["classification" if has_head else "model"]
    parameters = _list_parameters(model_class, config)
    rows, ignored = _build_rows(layout, settings, resample, parameters)
    if settings.new_head:
        zeros = [name for name in parameters if name.startswith(HEADS)]
    else:
        zeros = [name for part, part_zeros in origin.zeros.items() if part in layout.parts for name in part_zeros]
    rows += [Row(name, parameters[name], None, None, "zeros") for name in zeros if name in parameters]
    # An origin with zeros (CLIP) has a projection as its head, whose outputs are not classes.
    has_unnamed_classes = source_has_head and not settings.new_head and not origin.zeros
    assumptions = _describe_assumptions(assumed, companions, settings, fields, has_unnamed_classes)
    model = (origin.name, origin.family, config, model_class)
    processor = dict(declared.processor or {})
    if settings.resize_to is not None:  # then images get that size, whether there is a table to resample or not
        processor = {name: value for name, value in processor.items() if "size" not in name and "crop" not in name}
    plan = Plan(*model, tuple(rows), ignored, has_head, settings.new_head, processor, assumptions)
    check_accounting(plan, shapes, parameters)
    return plan


def _list_parameters(model_class: type[PreTrainedModel], config: HfBaseConfig) -> dict[str, Shape]:
    """Return the shape of every parameter of a model, by its name in the bare model; no weights are allocated."""
    with torch.device("meta"), no_init_weights():
        state = model_class(config).state_dict()
    base_prefix = f"{model_class.base_model_prefix}."
    return {name.removeprefix(base_prefix): tuple(value.shape) for name, value in state.items()}


def check_accounting(plan: Plan, shapes: Shapes, parameters: Shapes) -> None:
    """Raise a UserError unless every key is used once or ignored, and every parameter is filled once with its shape."""
    known_keys = {*plan.consumed, *plan.ignored}
    parameter_counts = Counter(row.parameter for row in plan.rows)
    misshapen = [
        f"{row.parameter} {format_size(row.parameter_shape)} (needs {format_size(parameters[row.parameter])})"
        for row in plan.rows
        if row.parameter_shape != parameters.get(row.parameter, row.parameter_shape)
    ]
    _refuse(
        format_listing("keys left over", [key for key in shapes if key not in known_keys]),
        format_listing("keys used twice", _find_keys_used_twice(plan)),
        format_listing("keys used only partly", _find_keys_used_partly(plan, shapes)),
        format_listing("keys used but missing from the file", sorted(known_keys - set(shapes))),
        format_listing("parameters not filled", [name for name in parameters if not parameter_counts[name]]),
        format_listing("parameters filled twice", [name for name, count in parameter_counts.items() if count > 1]),
        format_listing(
            "parameters that the model does not have", [name for name in parameter_counts if name not in parameters]
        ),
        format_listing("parameters of another shape", misshapen),
    )


def _find_keys_used_twice(plan: Plan) -> list[str]:
    """Return the keys that are both used and ignored, or of which two parameters copy the same part."""
    # A computation may use an array for several parameters.
    copies = [row for row in plan.rows if row.key is not None and not row.other_keys]
    part_counts = Counter((str(row.key), row.block, row.piece) for row in copies)
    copied_twice = {key for (key, *_), count in part_counts.items() if count > 1}
    return sorted(copied_twice | (set(plan.consumed) & set(plan.ignored)))


def _find_keys_used_partly(plan: Plan, shapes: Shapes) -> list[str]:
    """Return the keys of which a block, or one of the equal parts that are not left out, fills no parameter."""
    block_counts = Counter((str(row.key), row.axis) for row in plan.rows if row.block is not None)
    part_counts = Counter((str(row.key), row.piece[1] - row.num_left_out) for row in plan.rows if row.piece is not None)
    without_blocks = {key for (key, axis), count in block_counts.items() if count != shapes.get(key, (0, 0))[axis]}
    return sorted(without_blocks | {key for (key, num_parts), count in part_counts.items() if count != num_parts})


def format_listing(kind: str, names: Sequence[str], count: int | None = None) -> str:
    """Return a list for a message, such as "3 keys missing: a, b, c"; "" if there are no names."""
    if not names:
        return ""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{len(names) if count is None else count} {kind}: {', '.join(names[:MAX_LISTED])}{more}"


def _refuse(*problems: str) -> None:
    """Raise a UserError that lists all problems in one line, if there are any."""
    if listed := "; ".join(filter(None, problems)):
        raise UserError(f"the checkpoint does not fit its model, so nothing was written: {listed}")


@dataclass(frozen=True)
class Layout:
    """The keys and shapes of one file, matched with its origin's key table; keys are in the table's normal form."""

    origin: Origin
    names: KeyNames
    shapes: Shapes

    @cached_property
    def normal_shapes(self) -> dict[str, Shape]:
        return {name: self.shapes[key] for name, key in self.names.normal.items()}

    @cached_property
    def stage_depths(self) -> tuple[int, ...]:
        """Return the number of units in every stage of a ResNet; () without one."""
        return count_units(self.origin.rules, self.normal_shapes) if self.origin.has_units else ()

    @cached_property
    def rules(self) -> tuple[KeyRule, ...]:
        """Return the key table for this file, in which only Transformer blocks still share one rule for all."""
        rules = self.origin.rules
        if self.origin.rules_of is not None:
            rules = self.origin.rules_of(rules, self.normal_shapes)
        if self.origin.has_units:
            rules = make_resnet_rules(rules, self.stage_depths, self.normal_shapes)
        return rules

    @cached_property
    def depth(self) -> int:
        """Return the number of blocks: stacked ones, or the highest number, so that gaps are noticed."""
        matches = (re.match(self.origin.block_pattern, key) for key in self.names.normal)
        blocks = [int(match[1]) for match in matches if match]
        if not blocks and any(rule.stacked for rule in self.rules):
            stack_size = self.dims.get("N", 0)
            if not 0 < stack_size <= MAX_DEPTH:
                raise UserError(
                    f"the file holds {stack_size} encoder blocks, but a ViT has 1 to {MAX_DEPTH}; download "
                    "it again, or give a ViT checkpoint"
                )
            return stack_size
        possible = [block for block in blocks if block < MAX_DEPTH]
        if not possible:
            raise UserError("the file holds no encoder block, so it is damaged or no ViT; give a ViT checkpoint")
        return max(possible) + 1

    @cached_property
    def parts(self) -> frozenset[str]:
        """Return the optional parts of which the file has at least one key."""
        optional = [rule for rule in self.rules if rule.part and not rule.part.startswith(WITHOUT)]
        return frozenset(rule.part for rule in self._expand(optional) if rule.key in self.names.normal)

    def _expand(self, rules: Iterable[KeyRule]) -> list[KeyRule]:
        """Return one rule per key: rules for blocks are repeated with each block's number."""
        expanded_rules: list[KeyRule] = []
        for rule in rules:
            expanded_rules += [rule.for_block(i) for i in range(self.depth)] if rule.in_block else [rule]
        return expanded_rules

    @cached_property
    def _needed_rules(self) -> list[KeyRule]:
        """Return the rules that apply to the parts that the file has."""

        def is_needed(part: str) -> bool:
            if part.startswith(WITHOUT):
                return self.parts.isdisjoint(part.removeprefix(WITHOUT).split(", "))
            return part == "" or part in self.parts

        return [rule for rule in self.rules if is_needed(rule.part)]

    @cached_property
    def expected(self) -> dict[str, KeyRule]:
        """Return key -> rule for every key that the file must have."""
        return {rule.key: rule for rule in self._expand(self._needed_rules)}

    @cached_property
    def present(self) -> dict[str, KeyRule]:
        """Return key -> rule for every expected key that the file has."""
        return {name: rule for name, rule in self.expected.items() if name in self.names.normal}

    @cached_property
    def dims(self) -> dict[str, int]:
        """Return the size of every axis letter, by majority of the arrays, so that a single wrong array is named.

        In a tie, arrays with the fewest axes win, as a bias cannot be transposed.
        """
        votes: dict[str, Counter[int]] = defaultdict(Counter)
        for name, rule in sorted(self.present.items(), key=lambda item: len(item[1].axes)):
            axes = self._resolve_axes(rule)
            shape = self.normal_shapes[name]
            if len(axes) == len(shape):
                for (factor, letter), size in zip(axes, shape, strict=True):
                    if letter and size % factor == 0:
                        votes[letter][size // factor] += 1
        return {letter: sizes.most_common(1)[0][0] for letter, sizes in votes.items()}

    def _resolve_axes(self, rule: KeyRule) -> list[tuple[int, str]]:
        """Return (factor, letter) of the rule's axes, given the optional parts that the file has."""
        axes = list(rule.axes)
        for part, replacements in self.origin.without.items():
            if part not in self.parts:
                axes = [replacements.get(axis, axis) for axis in axes]
        return [split_axis(axis) for axis in axes]

    @property
    def representation(self) -> set[str]:
        """Return the name of the part that is the representation layer, in a set that is empty if the file has none."""
        return {rule.part for rule in self.present.values() if rule.parameter.startswith(REPRESENTATION)}

    def refuse_misfits(self) -> None:
        """Raise a UserError that lists every key that is missing, left over or has a wrong shape, if there are any."""
        for pattern, reason in self.origin.refused.items():
            for name, key in self.names.normal.items():
                if re.fullmatch(pattern, name):
                    self._refuse_feature(f"{reason} ('{key}')")
        missing = [name for name in self.expected if name not in self.present]
        for pattern, reason in self.origin.lacking.items():
            expected = {name for name in self.expected if re.fullmatch(pattern, name)}
            if expected and expected <= set(missing):
                self._refuse_feature(reason)
        _refuse(
            format_listing(
                "keys missing", [self.names.spell(name) for name in self._join_blocks(missing)], len(missing)
            ),
            self._describe_left_over(),
            format_listing("keys of a wrong shape", list(filter(None, map(self._describe_misfit, self.present)))),
        )

    def _refuse_feature(self, feature: str) -> NoReturn:
        """Raise a UserError for a feature of the source's model that hf_vit does not have."""
        remedy = f"use it with {self.origin.package}" if self.origin.package else "use it with the code that saved it"
        raise UserError(f"the checkpoint has {feature}, which hf_vit does not support; {remedy}")

    def _join_blocks(self, missing: Sequence[str]) -> list[str]:
        """Return the missing keys, with one entry for a block without any key: "Transformer/encoderblock_1/*"."""
        keys_per_block = sum(rule.in_block for rule in self._needed_rules)
        if not keys_per_block:
            return list(missing)
        blocks = {name: match[0] for name in missing if (match := re.match(self.origin.block_pattern, name))}
        missing_counts = Counter(blocks.values())
        names: list[str] = []
        for name in missing:
            block = blocks.get(name)  # such as "Transformer/encoderblock_1/"
            is_block_missing = block is not None and missing_counts[block] == keys_per_block
            names.append(f"{block}*" if is_block_missing else name)
        return list(dict.fromkeys(names))

    def _describe_left_over(self) -> str:
        """Return a list of the keys without a rule, and a hint if --prefix would exclude them."""
        keys = [key for name, key in self.names.normal.items() if name not in self.expected]
        known_keys = [self.names.normal[name] for name in self.present]
        prefix = os.path.commonprefix(known_keys)  # noqa: RUF071 (of characters, to cut after the last dot or slash)
        prefix = prefix[: max(prefix.rfind("."), prefix.rfind("/")) + 1]
        has_keys_outside = prefix and any(not key.startswith(prefix) for key in keys)
        hint = f" (add --prefix {prefix} to ignore keys outside the model)" if has_keys_outside else ""
        return format_listing("keys left over", keys) + hint

    def _describe_misfit(self, name: str) -> str:
        """Return a clause about an array's wrong shape; "" if the shape is right."""
        shape = self.normal_shapes[name]
        needed: list[int] = []
        needed_texts: list[str] = []
        for factor, letter in self._resolve_axes(self.present[name]):
            size = factor * self.dims.get(letter, 0) if letter else factor  # 0 if no array shows it
            needed.append(size)
            needed_texts.append(str(size or f"{factor if factor > 1 else ''}{letter}"))
        if shape == tuple(needed) and all(shape):
            return ""
        hint = ", it looks transposed" if sorted(shape) == sorted(needed) else ""
        return f"{self.names.normal[name]} is {format_size(shape)} (needs {'x'.join(needed_texts)}{hint})"


def _find_prefix(shapes: Shapes, prefix: str | None) -> str:
    """Return the given prefix with the dot or slash that follows it in the file; "" without a prefix."""
    if not prefix:
        return ""
    candidates = (prefix,) if prefix.endswith((".", "/")) else (f"{prefix}.", f"{prefix}/")
    for candidate in candidates:
        if any(key.startswith(candidate) for key in shapes):
            return candidate
    first_parts = sorted({re.split(r"(?<=[./])", key, maxsplit=1)[0] for key in shapes})  # up to the first dot or slash
    raise UserError(
        f"no key begins with --prefix {prefix!r}; the file has the prefixes {', '.join(first_parts[:6])}: give one"
    )


def _make_names_below_prefix(prefix: str, names: KeyNames, keys: Mapping[str, str], shapes: Shapes) -> KeyNames:
    """Return the names of all keys of a file, given the names of its `keys` below a prefix."""
    outside = {key: f"outside of --prefix {prefix}" for key in shapes if not key.startswith(prefix)}
    return KeyNames(
        {name: keys[key] for name, key in names.normal.items()},
        {keys[key]: reason for key, reason in names.ignored.items()} | outside,
        lambda name: prefix + names.spell(name),
    )


def _replace_foreign_heads(origin: Origin, names: KeyNames, settings: PlanSettings) -> None:
    """Ignore the keys of a head that hf_vit does not have, if a new head replaces it; otherwise raise a UserError."""
    for pattern, head in origin.foreign_heads.items():
        for name in [name for name in names.normal if re.fullmatch(pattern, name)]:
            if not settings.new_head:
                raise UserError(
                    f"the checkpoint has {head} ('{names.normal[name]}'), which hf_vit does not support; give "
                    "--num-labels or --labels to replace it with a new classifier"
                )
            names.ignored[names.normal.pop(name)] = REPLACED


def _refuse_inapplicable(settings: PlanSettings, layout: Layout) -> None:
    """Raise a UserError for options about a part that the source does not have."""
    if settings.drop_pre_logits and not layout.representation:
        raise UserError(
            "the checkpoint has no representation layer (pre_logits) that could be dropped; leave --drop-pre-logits out"
        )
    fixed = {"offset_table": "relative positions", "axes": "positions of rows and columns"}
    tables = [text for part, text in fixed.items() if part in layout.parts]
    if tables and settings.resize_to is not None:
        raise UserError(
            f"--resize-to {format_size(settings.resize_to)} cannot resample {tables[0]}; leave it out, "
            "and load the converted model with from_pretrained(folder, image_size=...)"
        )
    family = FAMILIES[layout.origin.family]
    if family.is_vit:
        return
    if settings.resize_to is not None:
        size_rule = "only takes images of its training size" if family.has_tokens else "takes images of any size"
        raise UserError(f"{family.label} has no position embeddings to resample and {size_rule}; leave --resize-to out")
    if missing_fields := [name for name in settings.declared if not hasattr(family.config_class, name)]:
        names = ", ".join(DECLARED[name] for name in missing_fields)
        raise UserError(f"{family.label} has no {', '.join(missing_fields)}; leave {names} out")


def _build_fields(layout: Layout, declared: Declared, settings: PlanSettings, assumed: Mapping[str, str]) -> Fields:
    """Return the config's fields as shapes, the files beside the weights and options give them, which must agree."""
    parts = layout.parts - layout.representation if settings.drop_pre_logits else layout.parts
    fields = _build_shape_fields(layout, parts, declared, settings)
    _refuse_conflicting_config(fields, declared, assumed)
    fields |= declared.fields
    options: Fields = dict(settings.declared)
    if options.get("rotary_embedding") == "none":
        options["rotary_embedding"] = None
    if options.get("pooling") == "token" and layout.origin.first_patch and "cls" not in parts:
        options["pooling"] = "first_patch"  # without a class token, the first token is a patch
    for name, value in options.items():
        is_recorded = name in declared.fields or name not in assumed
        is_known = is_recorded and (name in fields or name in _NEVER_BY_DEFAULT)
        if is_known and fields.get(name) != value:
            source = "config.json says" if name in declared.fields else f"checkpoints of {layout.origin.name} have"
            raise UserError(
                f"{DECLARED[name]} {settings.declared[name]} contradicts the checkpoint: {source} "
                f"{name}={fields.get(name)!r}; leave {DECLARED[name]} out"
            )
    fields |= options
    if fields.get("rotary_embedding") is None:
        fields = {name: value for name, value in fields.items() if not name.startswith("rotary_")}
    fields |= _read_normalization(declared.processor or {}, fields["num_channels"])
    if FAMILIES[layout.origin.family].is_vit and "num_attention_heads" not in fields:
        raise UserError(
            "the weights do not record the number of attention heads; give it with --num-heads, or give the "
            "folder with their config.json"
        )
    return fields


def _build_shape_fields(layout: Layout, parts: frozenset[str], declared: Declared, settings: PlanSettings) -> Fields:
    """Return the config's fields that the shapes of these parts show, for the image size that is given or declared."""
    image_size = settings.image_size or declared.image_size
    try:
        fields = layout.origin.configure(
            Network(layout.dims, parts, layout.normal_shapes, image_size, layout.stage_depths)
        )
    except UserError as error:
        if settings.image_size is not None or declared.image_size is None:
            raise
        # The size in question is that of config.json, not an option.
        raise UserError(f"{MISFIT}: {str(error).replace('--image-size', 'image_size')}") from error
    return fields | ({"num_hidden_layers": layout.depth} if layout.origin.block_pattern else {})


def _refuse_conflicting_config(fields: Fields, declared: Declared, assumed: Mapping[str, str]) -> None:
    """Raise a UserError if the files beside the weights give a field another value than the weights show."""
    conflicts: list[str] = []
    for name, value in declared.fields.items():
        # Weights show that there is a layer scale, but not the value that it began with.
        is_shown = name in fields and name not in assumed and name != "layer_scale_init_value"
        if is_shown and fields[name] != value:
            conflicts.append(f"it has {name}={value!s:.80}, the weights need {fields[name]}")
    if conflicts:
        raise UserError(f"{MISFIT}: {'; '.join(conflicts)}; give the config.json that belongs to these weights")


def _read_normalization(processor: Mapping[str, Any], num_channels: int) -> Fields:
    """Return the mean and deviation of pixels, which a head that predicts colors needs; {} if nothing states them."""
    fields = {name: processor[name] for name in ("image_mean", "image_std") if name in processor}
    for name, values in fields.items():
        if len(values) != num_channels:
            raise UserError(
                f"the preprocessing has {name}={values!r:.80}, but the weights take {num_channels} channels; give one "
                "value per channel in the JSON file beside the weights"
            )
    return {name: tuple(map(float, values)) for name, values in fields.items()}


def _read_fields(layout: Layout, companions: Companions) -> Fields:
    """Return the config's fields that arrays of the file hold; {} without access to arrays."""
    read = companions.read
    if read is None:
        return {}
    return {
        rule.parameter: SETTINGS[rule.transform](read(layout.names.normal[name]), layout.dims)
        for name, rule in layout.present.items()
        if rule.transform in SETTINGS
    }


def _make_label_fields(size: int | None, declared: Declared, settings: PlanSettings) -> Fields:
    """Return the config's fields for the names of the classes, or at least for their number.

    `size` is the number of classes of the source's head; None without one.
    """
    if settings.num_labels is not None:
        return {"num_labels": settings.num_labels}
    labels = settings.labels
    if labels is None:
        if size is None:
            return {}
        if declared.labels is None:
            return {"num_labels": size}
        labels = declared.labels
        if len(labels) != size:
            raise UserError(
                f"{MISFIT}: it names {len(labels)} classes, but the weights have {size}; give the config.json of "
                "these weights, or correct its names"
            )
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


def _build_config(family: str, fields: Fields, resize_to: Pair | None) -> tuple[HfBaseConfig, Resample | None]:
    """Build the configuration, and the resampling of positions if another image size is requested."""
    config_class: Any = FAMILIES[family].config_class
    try:
        config = config_class(**fields)
        if resize_to is None:
            return config, None
        resized = config_class(**fields | {"image_size": shorten_pair(resize_to)})
        resampling = config.num_special_positions, config.position_interpolation, config.position_interpolation_offset
        return resized, Resample(config.grid, resized.grid, *resampling)
    except StrictDataclassError as error:
        raise UserError(f"no hf_vit model can have the checkpoint's sizes: {get_strict_reason(error):.400}") from error


def _describe_assumptions(
    assumed: Mapping[str, str],
    companions: Companions,
    settings: PlanSettings,
    fields: Fields,
    has_unnamed_classes: bool,
) -> dict[str, str]:
    """Return for fields of the config, "labels" and "processor" what was assumed, where nothing records them."""
    if companions.config is not None:
        has_pixels = companions.processor is not None or "model_type" not in companions.config
        return {} if has_pixels else {"processor": "pixels as for released models (no preprocessor_config.json)"}
    texts = {name: text for name, text in assumed.items() if name not in settings.declared}
    if settings.image_size is None:
        texts["image_size"] = f"images of {format_size(as_pair(fields['image_size']))} px"
    if has_unnamed_classes:
        texts["labels"] = "no names of the classes (LABEL_0, ...)"
    return texts


def _build_rows(
    layout: Layout, settings: PlanSettings, resample: Resample | None, parameters: Shapes
) -> tuple[list[Row], dict[str, str]]:
    """Return one row for every parameter that arrays of the file fill, and for every ignored key the reason."""
    ignored = dict(layout.names.ignored)
    rows = list[Row]()
    keys_of_computation: dict[tuple[str, str], list[str]] = {}  # (parameter, computation) -> keys
    for name, rule in layout.present.items():
        key = layout.names.normal[name]
        reason_to_ignore = _find_reason_to_ignore(rule, settings)
        if reason_to_ignore is not None:
            ignored[key] = reason_to_ignore
        elif rule.transform in COMPUTATIONS:
            # A key without a number, such as a table that all blocks share, is used in the computation for each block.
            for block in range(layout.depth if BLOCK in rule.parameter else 1):
                keys_of_computation.setdefault((rule.for_block(block).parameter, rule.transform), []).append(key)
        else:
            resampling = resample if rule.parameter == POSITION_TABLE else None
            blocks = range(layout.depth) if rule.stacked else (None,)
            for block in blocks:
                rows += _build_array_rows(rule, key, layout.shapes[key], resampling, block)
    for (parameter, transform), (first_key, *other_keys) in keys_of_computation.items():
        shape = parameters.get(parameter, ())
        rows.append(Row(parameter, shape, first_key, layout.shapes[first_key], transform, other_keys=tuple(other_keys)))
    return rows, ignored


def _find_reason_to_ignore(rule: KeyRule, settings: PlanSettings) -> str | None:
    """Return why a key of the table fills no parameter; None if it fills one."""
    is_head = rule.parameter.startswith(HEADS)
    if settings.new_head and is_head:
        return REPLACED
    if settings.drop_pre_logits and is_head:
        return "head of the dropped representation layer"
    if settings.drop_pre_logits and rule.parameter.startswith(REPRESENTATION):
        return "dropped representation layer"
    return "numbers that go into config.json" if rule.transform in SETTINGS else None


def _build_array_rows(
    rule: KeyRule, key: str, shape: Shape, resample: Resample | None, block: int | None
) -> Generator[Row]:
    """Yield one row for every parameter that an array, or one block of it, fills."""
    parameters = (rule if block is None else rule.for_block(block)).parameters
    axis = 0 if block is None else rule.stack_axis
    for index, parameter in enumerate(parameters):
        if not parameter:
            continue
        piece = (index, len(parameters)) if len(parameters) > 1 else None
        row = Row(parameter, (), key, shape, rule.transform, resample, block, axis, piece, parameters.count(""))
        values = TRANSFORMS[rule.transform].apply(row.select(torch.empty(shape, device="meta")))
        parameter_shape = tuple(values.shape)
        if resample is not None:
            parameter_shape = (1, resample.prefix + math.prod(resample.new_grid), parameter_shape[2])
        yield replace(row, parameter_shape=parameter_shape)
