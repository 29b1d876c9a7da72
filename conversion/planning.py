"""From the keys and shapes of a file to a complete plan, or a refusal that lists everything that does not fit.

A plan is data: one row for every parameter of the model, a reason for every key left out. Every key of the file is used
once or ignored, every parameter filled once; nothing is read.
"""

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
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
    axis_factor,
    size_text,
    square_or_pair,
)
from hf_vit.conversion.origins.registry import find_origin
from hf_vit.conversion.readers import NOTHING_BESIDE, Companions, Shape, Shapes
from hf_vit.errors import UserError, strict_reason
from hf_vit.families import FAMILIES
from hf_vit.models.configuration_hf_vit import HfBaseConfig, as_pair

POSITION_TABLE = "embeddings.position_embeddings"
HEADS = ("classifier.", "distillation_classifier.")
REPRESENTATION = "pooler.dense."
REPLACED = "replaced by a new head"
MISFIT = "config.json does not fit the weights beside it"
SHOWN = 8  # names a message lists before it only counts
MAX_DEPTH = 1000  # an absurd block number would make an absurd list of missing keys; it is left over instead

# Field of the config -> the option that declares it.
DECLARED = {
    "num_attention_heads": "--num-heads",
    "hidden_act": "--hidden-act",
    "pooling": "--pooling",
    "position_embedding": "--position-embedding",
    "rotary_embedding": "--rotary-embedding",
    "norm_after_branches": "--norm-after-branches",
}


# What only files have that do not tell it.
_NEVER_BY_DEFAULT = ("rotary_embedding", "norm_after_branches")


class PlanOptions(TypedDict, total=False):
    """What people may say about a conversion; see `Wishes`."""

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
class Wishes:
    """What people say about a conversion: declared of the source, or wanted of the model.

    Attributes:
        image_size: (height, width) in px the source was made for; needed if its position table is not square.
        resize_to: (height, width) in px to resample the position table to, as the original's fine-tuning does.
        num_labels: size of a new, zero head.
        labels: names of the classes of a new, zero head.
        drop_pre_logits: leave out the representation layer, as the original's fine-tuning does; the source's head was
            made for it and goes too, so that without a new one the result is the bare model.
        num_heads, hidden_act, pooling, position_embedding, rotary_embedding, norm_after_branches: of the source's
            network ("token", "gap", "map"; "sincos_2d", "none"; "axial", "none"), where neither its weights nor a file
            beside them say it. "token" without a class token is the first patch's.
        prefix: what the model's keys begin with, where something unknown is wrapped around it; others are left out.

    Raises:
        UserError: they contradict each other.
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
        if self.num_labels is not None and self.labels is not None:
            raise UserError("give either the number of labels or their names, not both")
        if (self.num_labels is not None and self.num_labels < 1) or (self.labels is not None and not self.labels):
            raise UserError(f"{self.num_labels or 0} labels are too few for a classifier; give at least 1")

    @property
    def new_head(self) -> bool:
        return self.num_labels is not None or self.labels is not None

    @property
    def declared(self) -> Fields:
        """Field of the config -> value, where an option gives one."""
        values = (
            *(self.num_heads, self.hidden_act, self.pooling, self.position_embedding, self.rotary_embedding),
            self.norm_after_branches or None,
        )
        return {name: value for name, value in zip(DECLARED, values, strict=True) if value is not None}


@dataclass(frozen=True)
class Resample:
    """A position table stretched from one (h, w) patch grid to another; `prefix` rows are copied."""

    old_grid: Pair
    new_grid: Pair
    prefix: int
    mode: str
    offset: float = 0.0


@dataclass(frozen=True)
class Row:
    """One parameter of the model and where it comes from."""

    parameter: str  # in the bare model, without the prefix that it has inside a classifier
    parameter_shape: Shape
    key: str | None  # None: filled with zeros (a new head)
    shape: Shape | None  # of the whole array
    transform: str
    resample: Resample | None = None
    block: int | None = None  # step along an axis, where an array stacks all blocks
    axis: int = 0  # which that is
    # (index, number) of equal parts along the first axis, of an array for several parameters
    piece: tuple[int, int] | None = None
    num_left_out: int = 0  # of these parts
    beside: tuple[str, ...] = ()  # keys of the other arrays it is computed from; others may be, too

    def taken(self, array: torch.Tensor) -> torch.Tensor:
        """Return the part of the whole array that this row moves."""
        block = array if self.block is None else array.select(self.axis, self.block)
        return block if self.piece is None else block.chunk(self.piece[1])[self.piece[0]]


@dataclass(frozen=True)
class Plan:
    """What a conversion will do, decided on names and shapes alone.

    Attributes:
        origin: name of the origin.
        family: of the model, a key of `hf_vit.families.FAMILIES`.
        config: the model's configuration.
        model_class: what will be saved: the classifier, or the bare model if the source has no head.
        rows: one for every parameter of the model.
        ignored: key of the file -> why it is left out.
        has_head: whether there is a classifier.
        new_head: whether the classifier is new (zeros).
        processor: fields of the image processor; None for the original's, see `Declared`.
        assumed: field of the config, "labels" or "processor" -> what was assumed, as the source does not tell it.
    """

    origin: str
    family: str
    config: HfBaseConfig
    model_class: type[PreTrainedModel]
    rows: tuple[Row, ...]
    ignored: Mapping[str, str]
    has_head: bool
    new_head: bool
    processor: Mapping[str, Any] | None = None
    assumed: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def consumed(self) -> list[str]:
        """The keys of the file that fill a parameter."""
        return list(dict.fromkeys(key for row in self.rows if row.key is not None for key in (row.key, *row.beside)))

    @property
    def resample(self) -> Resample | None:
        """How the position table is stretched, if it is."""
        return next((row.resample for row in self.rows if row.resample), None)

    @property
    def size(self) -> int:
        """Bytes of the arrays that are used, in float32."""
        shapes = {row.key: row.shape for row in self.rows if row.shape is not None}
        return 4 * sum(map(math.prod, shapes.values()))

    def parameter_name(self, row: Row) -> str:
        """Return the row's parameter as `model_class` names it."""
        bare = row.parameter.startswith(HEADS) or not self.has_head
        return row.parameter if bare else f"{self.model_class.base_model_prefix}.{row.parameter}"


def plan(
    shapes: Shapes,
    *,
    file_name: str = "the checkpoint",
    companions: Companions = NOTHING_BESIDE,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Decide a conversion on names and shapes alone; nothing is read.

    Args:
        shapes: key -> shape of every array of the checkpoint.
        file_name: what messages call the checkpoint.
        companions: what lies beside the weights.
        options: see `Wishes`.

    Raises:
        UserError: the checkpoint is of an unknown kind, a key is missing, left over or of a wrong shape (all are
            listed), or the sizes make no model.
    """
    return make_plan(shapes, Wishes(**options), companions, file_name)


def make_plan(
    shapes: Shapes, wishes: Wishes, companions: Companions = NOTHING_BESIDE, file_name: str = "the file"
) -> Plan:
    """See `plan`."""
    with naming(file_name):
        return _make_plan(shapes, wishes, companions, file_name)


@contextmanager
def naming(file_name: str) -> Generator[None]:
    """Name the checkpoint in every UserError within that does not."""
    try:
        yield
    except UserError as error:
        if file_name in str(error):
            raise
        raise UserError(f"{file_name}: {error}") from error


def _make_plan(shapes: Shapes, wishes: Wishes, companions: Companions, file_name: str) -> Plan:
    prefix = _prefix(shapes, wishes.prefix)
    inside = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
    origin = find_origin(inside, file_name, companions)
    declared = Declared() if origin.declared is None else origin.declared(companions, inside)
    names = _below(prefix, origin.names(inside), shapes)
    _replace_foreign_heads(origin, names, wishes)
    layout = Layout(origin, names, shapes)
    layout.refuse_misfits()
    _refuse_pointless(wishes, layout)
    source_has_head = "head" in layout.parts and not wishes.drop_pre_logits
    has_head = source_has_head or wishes.new_head
    assumed = {name: text for name, text in origin.assumed.items() if not layout.parts & origin.told.get(name, set())}
    fields = _fields(layout, declared, wishes, assumed)
    fields |= _settings(layout, companions)
    fields |= _label_fields(layout.dims["L"] if source_has_head else None, declared, wishes)
    config, resample = _config(origin.family, fields, wishes.resize_to)
    model_class = FAMILIES[origin.family].classes["classification" if has_head else "model"]
    with torch.device("meta"), no_init_weights():
        state = model_class(config).state_dict()
    inner = f"{model_class.base_model_prefix}."
    parameters = {name.removeprefix(inner): tuple(value.shape) for name, value in state.items()}
    rows, ignored = _rows(layout, wishes, resample, parameters)
    zeros = [name for part, lacked in origin.zeros.items() if part in layout.parts for name in lacked]
    if wishes.new_head:
        zeros = [name for name in parameters if name.startswith(HEADS)]
    rows += [Row(name, parameters[name], None, None, "zeros") for name in zeros if name in parameters]
    has_nameless_head = source_has_head and not wishes.new_head and not origin.zeros
    texts = _assumed(assumed, companions, wishes, fields, has_nameless_head)
    model = (origin.name, origin.family, config, model_class)
    plan = Plan(*model, tuple(rows), ignored, has_head, wishes.new_head, declared.processor, texts)
    check_accounting(plan, shapes, parameters)
    return plan


def check_accounting(plan: Plan, shapes: Shapes, parameters: Shapes) -> None:
    """Raise a UserError unless every key is used once or ignored, and every parameter filled once, with its shape."""
    used = Counter([*plan.consumed, *plan.ignored])
    moved = (row for row in plan.rows if not row.beside)  # what is computed from several may take part in more
    uses = Counter((row.key, row.block, row.piece) for row in moved if row.key is not None)
    twice = {key for key, count in used.items() if count > 1} | {key for (key, *_), count in uses.items() if count > 1}
    blocks = Counter((row.key, row.axis) for row in plan.rows if row.block is not None)
    pieces = Counter((row.key, row.piece[1] - row.num_left_out) for row in plan.rows if row.piece is not None)
    in_part = {str(key) for (key, axis), count in blocks.items() if count != shapes.get(str(key), (0, 0))[axis]}
    in_part |= {str(key) for (key, needed), count in pieces.items() if count != needed}
    filled = Counter(row.parameter for row in plan.rows)
    misshapen = [
        f"{row.parameter} {size_text(row.parameter_shape)} (needs {size_text(parameters[row.parameter])})"
        for row in plan.rows
        if row.parameter in parameters and row.parameter_shape != parameters[row.parameter]
    ]
    _refuse(
        listing("keys left over", [key for key in shapes if not used[key]]),
        listing("keys used twice", sorted(twice)),
        listing("keys used in part", sorted(in_part)),
        listing("keys used that are not there", [key for key in used if key not in shapes]),
        listing("parameters not filled", [name for name in parameters if not filled[name]]),
        listing("parameters filled twice", [name for name, count in filled.items() if count > 1]),
        listing("parameters that the model does not have", [name for name in filled if name not in parameters]),
        listing("parameters of another shape", misshapen),
    )


def listing(kind: str, names: Sequence[str], count: int | None = None) -> str:
    """Return "3 keys missing: a, b, c", or "" for none."""
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names) if count is None else count} {kind}: {', '.join(names[:SHOWN])}{more}"


def _refuse(*problems: str) -> None:
    """Raise a UserError that lists all problems in one line, if there is any."""
    if any(problems):
        raise UserError(
            "the checkpoint does not map completely, so nothing was written; " + "; ".join(filter(None, problems))
        )


@dataclass(frozen=True)
class Layout:
    """The keys and shapes of one file, held against its origin's key table; all keys are in the table's normal form."""

    origin: Origin
    names: KeyNames
    shapes: Shapes

    @cached_property
    def normal_shapes(self) -> dict[str, Shape]:
        return {name: self.shapes[key] for name, key in self.names.normal.items()}

    @cached_property
    def rules(self) -> tuple[KeyRule, ...]:
        """The origin's key table for this file; only the blocks of the Transformer are still one line for all."""
        rules_of = self.origin.rules_of
        return self.origin.rules if rules_of is None else rules_of(self.origin.rules, self.normal_shapes)

    @cached_property
    def depth(self) -> int:
        """Number of blocks: as many as the highest number says, so that a gap is noticed; or as are stacked."""
        blocks = [int(match[1]) for key in self.names.normal if (match := re.match(self.origin.block_pattern, key))]
        if not blocks and any(rule.stacked for rule in self.rules):
            if not 0 < self.dims.get("N", 0) <= MAX_DEPTH:
                raise UserError(
                    f"the file stacks {self.dims.get('N', 0)} encoder blocks; it is damaged or is not a ViT"
                )
            return self.dims["N"]
        possible = [block for block in blocks if block < MAX_DEPTH]
        if not possible:
            raise UserError("the file holds no encoder block; it is damaged or of another kind")
        return max(possible) + 1

    @cached_property
    def parts(self) -> frozenset[str]:
        """The optional parts of which the file has at least one key."""
        optional = [rule for rule in self.rules if rule.part and not rule.part.startswith(WITHOUT)]
        return frozenset(one.part for one in self._numbered(optional) if one.key in self.names.normal)

    def _numbered(self, rules: Iterable[KeyRule]) -> list[KeyRule]:
        """Return one rule a key."""
        return [one for rule in rules for one in ([rule.at(i) for i in range(self.depth)] if rule.in_block else [rule])]

    @cached_property
    def _needed(self) -> list[KeyRule]:
        """The rules of all parts that the file has."""
        wanted = {"", *self.parts}
        return [
            rule
            for rule in self.rules
            if rule.part in wanted
            or (rule.part.startswith(WITHOUT) and rule.part.removeprefix(WITHOUT) not in self.parts)
        ]

    @cached_property
    def expected(self) -> dict[str, KeyRule]:
        """Key -> rule, for every key that the file must have."""
        return {rule.key: rule for rule in self._numbered(self._needed)}

    @cached_property
    def present(self) -> dict[str, KeyRule]:
        return {name: rule for name, rule in self.expected.items() if name in self.names.normal}

    @cached_property
    def dims(self) -> dict[str, int]:
        """Size of every axis letter: what most arrays say, so that one wrong array is the one that is named.

        Ties go to the arrays of fewest axes: a bias cannot be transposed.
        """
        votes: dict[str, Counter[int]] = defaultdict(Counter)
        for name, rule in sorted(self.present.items(), key=lambda item: len(item[1].axes)):
            axes, shape = self._axes(rule), self.normal_shapes[name]
            if len(axes) == len(shape):
                for (factor, letter), size in zip(axes, shape, strict=True):
                    if letter and size % factor == 0:
                        votes[letter][size // factor] += 1
        return {letter: sizes.most_common(1)[0][0] for letter, sizes in votes.items()}

    def _axes(self, rule: KeyRule) -> list[tuple[int, str]]:
        """Return (factor, letter) of the rule's axes, read with the parts that the file has."""
        axes = list(rule.axes)
        for part, others in self.origin.without.items():
            if part not in self.parts:
                axes = [others.get(axis, axis) for axis in axes]
        return [axis_factor(axis) for axis in axes]

    def network(self, parts: frozenset[str], image_size: Pair | None) -> Network:
        """Return what names and shapes tell of the network."""
        return Network(self.dims, parts, self.normal_shapes, image_size)

    @property
    def representation(self) -> set[str]:
        """The optional part that is the representation layer, if the file has it."""
        return {rule.part for rule in self.present.values() if rule.parameter.startswith(REPRESENTATION)}

    def refuse_misfits(self) -> None:
        """Raise a UserError that lists every key missing, left over or of a wrong shape; return if there is none."""
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
            listing("keys missing", [self.names.spell(name) for name in self._whole_blocks(missing)], len(missing)),
            self._left_over(),
            listing("keys of a wrong shape", list(filter(None, map(self._misshapen, self.present)))),
        )

    def _refuse_feature(self, feature: str) -> NoReturn:
        remedy = f"use it with {self.origin.package}" if self.origin.package else "nothing was written"
        raise UserError(f"the checkpoint has {feature}, which hf_vit does not support; {remedy}")

    def _whole_blocks(self, missing: Sequence[str]) -> list[str]:
        """Return the missing keys, with a wholly missing block as one: "Transformer/encoderblock_1/*"."""
        in_block = sum(rule.in_block for rule in self._needed)
        if not in_block:
            return list(missing)
        blocks = {name: match[0] for name in missing if (match := re.match(self.origin.block_pattern, name))}
        counts = Counter(blocks.values())
        names = (f"{blocks[name]}*" if counts[blocks.get(name, "")] == in_block else name for name in missing)
        return list(dict.fromkeys(names))

    def _left_over(self) -> str:
        """Return which keys no rule knows, and how those outside of the model are left out."""
        keys = [key for name, key in self.names.normal.items() if name not in self.expected]
        inside = [self.names.normal[name] for name in self.present]
        prefix = os.path.commonprefix(inside)  # noqa: RUF071 (of characters, to cut after the last dot or slash)
        prefix = prefix[: max(prefix.rfind("."), prefix.rfind("/")) + 1]
        outside = prefix and any(not key.startswith(prefix) for key in keys)
        hint = f" (--prefix {prefix} leaves out what is beside it)" if outside else ""
        return listing("keys left over", keys) + hint

    def _misshapen(self, name: str) -> str:
        """Return what is wrong with an array's shape, or ""."""
        shape, axes = self.normal_shapes[name], self._axes(self.present[name])
        # 0 where no array tells
        needed = tuple(factor * self.dims.get(letter, 0) if letter else factor for factor, letter in axes)
        if shape == needed and all(shape):
            return ""
        hint = ", it looks transposed" if sorted(shape) == sorted(needed) else ""
        sides = zip(needed, axes, strict=True)
        want = "x".join(str(size or f"{factor if factor > 1 else ''}{letter}") for size, (factor, letter) in sides)
        return f"{self.names.normal[name]} is {size_text(shape)} (needs {want}{hint})"


def _prefix(shapes: Shapes, declared: str | None) -> str:
    """Return what was declared, with the dot or slash after it."""
    if not declared:
        return ""
    ways = (declared,) if declared.endswith((".", "/")) else (f"{declared}.", f"{declared}/")
    for way in ways:
        if any(key.startswith(way) for key in shapes):
            return way
    begins = sorted({re.match(r"[^./]*[./]?", key)[0] for key in shapes})  # pyright: ignore[reportOptionalSubscript]
    raise UserError(f"no key begins with --prefix {declared!r}; the keys begin with {', '.join(begins[:6])}")


def _below(prefix: str, names: KeyNames, shapes: Shapes) -> KeyNames:
    """Return the names of a file's keys, from those of its keys below a declared prefix."""
    outside = {key: f"outside of --prefix {prefix}" for key in shapes if not key.startswith(prefix)}
    return KeyNames(
        {name: prefix + key for name, key in names.normal.items()},
        {prefix + key: reason for key, reason in names.ignored.items()} | outside,
        lambda name: prefix + names.spell(name),
    )


def _replace_foreign_heads(origin: Origin, names: KeyNames, wishes: Wishes) -> None:
    """Ignore the keys of a head that no model here has, where a new one takes its place; else raise a UserError."""
    for pattern, head in origin.foreign_heads.items():
        for name in [name for name in names.normal if re.fullmatch(pattern, name)]:
            if not wishes.new_head:
                raise UserError(
                    f"the checkpoint has {head} ('{names.normal[name]}'), which hf_vit does not support; "
                    "give --num-labels or --labels for a new head in its place"
                )
            names.ignored[names.normal.pop(name)] = REPLACED


def _refuse_pointless(wishes: Wishes, layout: Layout) -> None:
    """Raise a UserError for what is asked of a part that the source does not have."""
    if wishes.drop_pre_logits and not layout.representation:
        raise UserError("the checkpoint has no representation layer (pre_logits) to drop; leave out --drop-pre-logits")
    if wishes.resize_to is not None and "offset_table" in layout.parts:
        raise UserError(
            "a table of relative positions keeps its size here; leave out --resize-to, and give another image_size to "
            "from_pretrained"
        )
    family = FAMILIES[layout.origin.family]
    if family.is_vit:
        return
    if wishes.resize_to is not None:
        why = "takes images of one size" if family.has_tokens else "takes images of any size"
        raise UserError(f"{family.label} has no positions to resample and {why}; leave out --resize-to")
    if others := [name for name in wishes.declared if not hasattr(family.config_class, name)]:
        names = ", ".join(DECLARED[name] for name in others)
        raise UserError(f"{family.label} has no {', '.join(others)}; leave out {names}")


def _fields(layout: Layout, declared: Declared, wishes: Wishes, assumed: Mapping[str, str]) -> Fields:
    """Return fields of the config, as shapes, the files beside the weights, and people say."""
    origin = layout.origin
    parts = layout.parts - layout.representation if wishes.drop_pre_logits else layout.parts
    try:
        fields = origin.configure(layout.network(parts, wishes.image_size or declared.image_size))
    except UserError as error:
        if wishes.image_size is not None or declared.image_size is None:
            raise
        raise UserError(f"{MISFIT}: {str(error).replace('--image-size', 'image_size')}") from error
    if origin.block_pattern:
        fields |= {"num_hidden_layers": layout.depth}
    wrong = [
        f"{name} is {value!s:.80} there, the weights make it {fields[name]}"
        for name, value in declared.fields.items()
        if name in fields and name not in assumed and name != "layer_scale_init_value" and fields[name] != value
    ]
    if wrong:
        raise UserError(f"{MISFIT}: {'; '.join(wrong)}")
    fields |= declared.fields
    by_people = wishes.declared
    if by_people.get("pooling") == "token" and origin.first_patch and "cls" not in parts:
        by_people["pooling"] = "first_patch"  # without a class token, the first token is a patch's
    for name, value in by_people.items():
        is_known = name in declared.fields or name not in assumed
        given = None if value == "none" and name == "rotary_embedding" else value
        if is_known and (name in fields or name in _NEVER_BY_DEFAULT) and fields.get(name) != given:
            source = "config.json says" if name in declared.fields else f"files of {origin.name} have"
            raise UserError(f"{DECLARED[name]} {value}: {source} {name}={fields.get(name)!r}; leave the option out")
        fields[name] = given
    if fields.get("rotary_embedding") is None:
        fields = {name: value for name, value in fields.items() if not name.startswith("rotary_")}
    scale = declared.processor or {}  # of pixels; a head that predicts colors goes by it
    for name in scale.keys() & {"image_mean", "image_std"}:
        fields[name] = tuple(map(float, scale[name]))
        if len(scale[name]) != fields["num_channels"]:
            raise UserError(
                f"the files beside the weights give {name}={scale[name]!r:.80}; it needs a value for each of the "
                f"{fields['num_channels']} channels"
            )
    if FAMILIES[origin.family].is_vit and "num_attention_heads" not in fields:
        raise UserError(
            f"the weights do not record the number of heads, and {fields['hidden_size']} channels are not a "
            "multiple of 64; give --num-heads, or the folder with their config.json"
        )
    return fields


def _settings(layout: Layout, companions: Companions) -> Fields:
    """Return the fields of the config that arrays of the file give; {} where nothing can be read."""
    rules = {layout.names.normal[name]: rule for name, rule in layout.present.items() if rule.transform in SETTINGS}
    if companions.read is None:
        return {}
    arrays = {key: companions.read(key) for key in rules}
    return {rule.parameter: SETTINGS[rule.transform](arrays[key], layout.dims) for key, rule in rules.items()}


def _label_fields(size: int | None, declared: Declared, wishes: Wishes) -> Fields:
    """Return names of the classes, or at least their number; `size` is that of the source's head, None without one."""
    labels, size = wishes.labels, size if wishes.num_labels is None else wishes.num_labels
    if not wishes.new_head and size is not None and declared.labels is not None:
        labels = declared.labels
        if len(labels) != size:
            raise UserError(f"{MISFIT}: it names {len(labels)} classes, the weights make {size}")
    if labels is not None:
        return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    return {} if size is None else {"num_labels": size}


def _config(family: str, fields: Fields, resize_to: Pair | None) -> tuple[HfBaseConfig, Resample | None]:
    config_class: Any = FAMILIES[family].config_class
    try:
        config = config_class(**fields)
        if resize_to is None:
            return config, None
        resized = config_class(**fields | {"image_size": square_or_pair(resize_to)})
        how = config.num_special_positions, config.position_interpolation, config.position_interpolation_offset
        return resized, Resample(config.grid, resized.grid, *how)
    except StrictDataclassError as error:
        raise UserError(f"the checkpoint's sizes make no model: {strict_reason(error):.400}") from error


def _assumed(
    assumed: Mapping[str, str], companions: Companions, wishes: Wishes, fields: Fields, has_nameless_head: bool
) -> dict[str, str]:
    """Return for fields of the config, "labels" and "processor" what neither the source nor people say of them."""
    if companions.config is not None:
        has_pixels = companions.processor is not None or "model_type" not in companions.config
        return {} if has_pixels else {"processor": "the pixels of released models (no preprocessor_config.json)"}
    texts = {name: text for name, text in assumed.items() if name not in wishes.declared}
    if wishes.image_size is None:
        texts["image_size"] = f"images of {size_text(as_pair(fields['image_size']))} px"
    if has_nameless_head:
        texts["labels"] = "no names of the classes (LABEL_0, ...)"
    return texts


def _rows(
    layout: Layout, wishes: Wishes, resample: Resample | None, parameters: Shapes
) -> tuple[list[Row], dict[str, str]]:
    """Return one row for every parameter that arrays of the file fill; and key -> why it is left out."""
    ignored, rows = dict(layout.names.ignored), list[Row]()
    computed: dict[tuple[str, str], list[str]] = {}  # (parameter, computation) -> keys
    for name, rule in layout.present.items():
        key = layout.names.normal[name]
        if wishes.new_head and rule.parameter.startswith(HEADS):
            ignored[key] = REPLACED
        elif wishes.drop_pre_logits and rule.parameter.startswith(HEADS):
            ignored[key] = "head of the dropped representation layer"
        elif wishes.drop_pre_logits and rule.parameter.startswith(REPRESENTATION):
            ignored[key] = "dropped representation layer"
        elif rule.transform in SETTINGS:
            ignored[key] = "numbers that config.json holds"
        elif rule.transform in COMPUTATIONS:
            for block in range(layout.depth if BLOCK in rule.parameter else 1):
                computed.setdefault((rule.at(block).parameter, rule.transform), []).append(key)
        else:
            table = resample if rule.parameter == POSITION_TABLE else None
            for block in range(layout.depth) if rule.stacked else (None,):
                rows += _rows_of_array(rule, key, layout.shapes[key], table, block)
    for (parameter, transform), (first, *others) in computed.items():
        shape = parameters.get(parameter, ())
        rows.append(Row(parameter, shape, first, layout.shapes[first], transform, beside=tuple(others)))
    return rows, ignored


def _rows_of_array(
    rule: KeyRule, key: str, shape: Shape, resample: Resample | None, block: int | None
) -> Generator[Row]:
    """Yield one row for every parameter that the array, or one block of it, fills."""
    parameters, axis = (rule if block is None else rule.at(block)).parameters, 0 if block is None else rule.stack_axis
    for index, parameter in enumerate(parameters):
        if not parameter:
            continue
        piece = (index, len(parameters)) if len(parameters) > 1 else None
        row = Row(parameter, (), key, shape, rule.transform, resample, block, axis, piece, parameters.count(""))
        moved = TRANSFORMS[rule.transform].apply(row.taken(torch.empty(shape, device="meta")))
        parameter_shape = tuple(moved.shape)
        if resample is not None:
            parameter_shape = (1, resample.prefix + math.prod(resample.new_grid), parameter_shape[2])
        yield replace(row, parameter_shape=parameter_shape)
