"""From the keys and shapes of a file to a complete plan, or a refusal that lists everything that does not fit."""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins.origin import KeyRule, Origin, Told
from hf_vit.conversion.plan.layout import Layout, listing, refuse
from hf_vit.conversion.plan.transforms import TRANSFORMS
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair, grid_of, size_text, square_or_pair
from hf_vit.errors import UserError
from hf_vit.families import FAMILIES

POSITION_TABLE = "embeddings.position_embeddings"
HEADS = ("classifier.", "distillation_classifier.")
REPRESENTATION = "pooler.dense."
NOTHING_BESIDE = Companions()
MISFIT = "config.json does not fit the weights beside it"


@dataclass(frozen=True)
class Resample:
    """A position table stretched from one (h, w) patch grid to another; `prefix` rows are copied."""

    old_grid: Pair
    new_grid: Pair
    prefix: int
    mode: str


@dataclass(frozen=True)
class Row:
    """One parameter of the model and where it comes from. A row without a source is filled with zeros (a new head).

    `target` is the name in the bare model, without the prefix that it has inside a classifier. `block` is the step of
    the source's first axis that is taken, where an array stacks all blocks; `piece` is (index, number) of the equal
    part along that axis, where an array fills several parameters; `source_shape` is the whole array's.
    """

    target: str
    target_shape: Shape
    source: str | None
    source_shape: Shape | None
    transform: str
    resample: Resample | None = None
    block: int | None = None
    piece: tuple[int, int] | None = None

    def taken(self, source: torch.Tensor) -> torch.Tensor:
        """The part of the whole source array that this row moves."""
        block = source if self.block is None else source[self.block]
        return block if self.piece is None else block.chunk(self.piece[1])[self.piece[0]]


@dataclass(frozen=True)
class Plan:
    """What a conversion will do, decided on names and shapes alone.

    Attributes:
        origin: name of the origin.
        family: of the model, a key of `FAMILIES`.
        config: the model's configuration.
        model_class: what will be saved: the classifier, or the bare model if the source has no head.
        rows: one for every parameter of the model.
        ignored: source key -> why it is left out.
        has_head: whether there is a classifier.
        new_head: whether the classifier is new (zeros).
        processor: see `Told.processor`.
        assumed: field of the config -> what was assumed, as nothing beside the weights told.
    """

    origin: str
    family: str
    config: Any
    model_class: type[PreTrainedModel]
    rows: tuple[Row, ...]
    ignored: Mapping[str, str]
    has_head: bool
    new_head: bool
    processor: Mapping[str, Any] | None = None
    assumed: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def consumed(self) -> list[str]:
        """The source keys that fill a parameter."""
        return list(dict.fromkeys(row.source for row in self.rows if row.source is not None))

    def parameter_name(self, row: Row) -> str:
        """The row's parameter as `model_class` names it."""
        bare = row.target.startswith(HEADS) or not self.has_head
        return row.target if bare else f"{self.model_class.base_model_prefix}.{row.target}"


def make_plan(
    origin: Origin,
    shapes: Mapping[str, Shape],
    *,
    image_size: Pair | None = None,
    resize_to: Pair | None = None,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    drop_pre_logits: bool = False,
    companions: Companions = NOTHING_BESIDE,
) -> Plan:
    """Map every key of a file of this origin, or refuse.

    Args:
        shapes: key -> shape of every array in the file.
        image_size: (height, width) in px that the source was made for, if its position table is not square.
        resize_to: (height, width) in px to resample the positions to.
        num_labels: size of a new, zero head.
        labels: names of the classes of a new, zero head.
        drop_pre_logits: leave out the representation layer, and the source's head, which was made for it.
        companions: what lies beside the weights.

    Raises:
        UserError: a key is missing, left over or of a wrong shape (all are listed), or the sizes make no model.
    """
    layout = Layout(origin, origin.names(shapes), shapes)
    layout.refuse_misfits()
    if resize_to is not None and not origin.has_blocks:
        raise UserError("a ResNet has no positions to resample and takes images of any size; leave out --resize-to")
    parts = layout.parts - _representation(layout) if drop_pre_logits else layout.parts
    has_head = "head" in parts and not drop_pre_logits
    new_head = num_labels is not None or labels is not None
    told = Told() if origin.told is None else origin.told(companions, shapes)
    fields = _fields(layout, parts, told, image_size)
    if not new_head and has_head and told.labels is not None and len(told.labels) == layout.dims["L"]:
        labels = told.labels
    fields |= _label_fields(layout.dims["L"] if has_head else None, num_labels, labels)
    config, resample = _config(origin.family, fields, resize_to)
    model_class, targets = _targets(origin.family, config, has_head or new_head)
    ignored, rows = dict(layout.names.ignored), list[Row]()
    for name, rule in layout.present.items():
        key = layout.names.normal[name]
        reason = _reason_to_leave(rule, new_head, drop_pre_logits)
        if reason is not None:
            ignored[key] = reason
        else:
            table = resample if rule.target == POSITION_TABLE else None
            blocks = range(layout.depth) if rule.stacked else (None,)
            rows += [row for block in blocks for row in _rows(rule, key, shapes[key], table, block)]
    if new_head:
        new = {name: shape for name, shape in targets.items() if name.startswith(HEADS)}
        rows += [Row(name, shape, None, None, "zeros") for name, shape in new.items()]
    has_head = has_head or new_head
    assumed = origin.assumed if companions.config is None else dict[str, str]()
    plan = Plan(
        origin.name,
        origin.family,
        config,
        model_class,
        tuple(rows),
        ignored,
        has_head,
        new_head,
        told.processor,
        assumed,
    )
    check_accounting(plan, shapes, targets)
    return plan


def _representation(layout: Layout) -> frozenset[str]:
    """The optional part that is the representation layer.

    Raises:
        UserError: the file has none.
    """
    found = frozenset(rule.part for rule in layout.present.values() if rule.target.startswith(REPRESENTATION))
    if not found:
        raise UserError("the checkpoint has no representation layer (pre_logits) to drop; leave out --drop-pre-logits")
    return found


def _reason_to_leave(rule: KeyRule, new_head: bool, drop_pre_logits: bool) -> str | None:
    """Why a weight of the source is not used, or None."""
    if new_head and rule.target.startswith(HEADS):
        return "replaced by a new head"
    if drop_pre_logits and rule.target.startswith(HEADS):
        return "head of the dropped representation layer"
    if drop_pre_logits and rule.target.startswith(REPRESENTATION):
        return "dropped representation layer"
    return None


def check_accounting(plan: Plan, shapes: Mapping[str, Shape], targets: Mapping[str, Shape]) -> None:
    """Hold the promise: every source key used once or ignored, every parameter filled once and with its shape.

    Raises:
        UserError: it does not hold; what is wrong is listed.
    """
    used = Counter([*plan.consumed, *plan.ignored])
    uses = Counter((row.source, row.block, row.piece) for row in plan.rows if row.source is not None)
    twice = {key for key, count in used.items() if count > 1} | {key for (key, *_), count in uses.items() if count > 1}
    blocks = Counter(key for key, block, _ in uses if block is not None)
    pieces = Counter((key, piece[1]) for key, _, piece in uses if piece is not None)
    filled = Counter(row.target for row in plan.rows)
    misshapen = [
        f"{row.target} {size_text(row.target_shape)} (needs {size_text(targets[row.target])})"
        for row in plan.rows
        if row.target in targets and row.target_shape != targets[row.target]
    ]
    refuse(
        listing("keys left over", [key for key in shapes if not used[key]]),
        listing("keys used twice", sorted(twice)),
        listing("keys used in part", [key for key, count in blocks.items() if count != shapes.get(key, (0,))[0]]),
        listing("keys used in part", [key for (key, needed), count in pieces.items() if count != needed]),
        listing("keys used that are not there", [key for key in used if key not in shapes]),
        listing("parameters not filled", [name for name in targets if not filled[name]]),
        listing("parameters filled twice", [name for name, count in filled.items() if count > 1]),
        listing("parameters that the model does not have", [name for name in filled if name not in targets]),
        listing("parameters of another shape", misshapen),
    )


def _fields(layout: Layout, parts: frozenset[str], told: Told, image_size: Pair | None) -> dict[str, Any]:
    """Fields of the config, as the shapes and the files beside the weights say."""
    origin = layout.origin
    try:
        fields = origin.configure(layout.dims, parts, layout.normal_shapes, image_size or told.image_size)
    except UserError as error:
        if image_size is not None or told.image_size is None:
            raise
        raise UserError(f"{MISFIT}: {str(error).replace('--image-size', 'image_size')}") from error
    if origin.has_blocks:
        fields |= {"num_hidden_layers": layout.depth}
    fields |= agreed(fields, told, origin.assumed)
    scale = told.processor or {}  # of pixels; a head that predicts colours goes by it
    fields |= {name: tuple(map(float, scale[name])) for name in ("image_mean", "image_std") if name in scale}
    if origin.has_blocks and "num_attention_heads" not in fields:
        raise UserError(
            f"the weights do not tell the number of heads, and {fields['hidden_size']} channels are no multiple of 64; "
            "give the folder with the config.json that lies beside them"
        )
    return fields


def agreed(fields: Mapping[str, Any], told: Told, assumed: Mapping[str, str]) -> dict[str, Any]:
    """What the files beside the weights say.

    Raises:
        UserError: the weights' shapes say otherwise.
    """
    wrong = [
        f"{name} is {value} there, the weights make it {fields[name]}"
        for name, value in told.fields.items()
        if name in fields and name not in assumed and fields[name] != value
    ]
    if wrong:
        raise UserError(f"{MISFIT}: {'; '.join(wrong)}")
    return dict(told.fields)


def _label_fields(found: int | None, num_labels: int | None, labels: Sequence[str] | None) -> dict[str, Any]:
    if labels is not None:
        return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    size = found if num_labels is None else num_labels
    return {} if size is None else {"num_labels": size}


def _config(family: str, fields: dict[str, Any], resize_to: Pair | None) -> tuple[Any, Resample | None]:
    config_class: Any = FAMILIES[family].config_class
    try:
        config = config_class(**fields)
        if resize_to is None:
            return config, None
        rows_before = config.num_special_tokens if config.position_on_class_token else 0
        grid = grid_of(resize_to, config.patch_stride, "--resize-to")
        resample = Resample(config.grid, grid, rows_before, config.position_interpolation)
        fields["image_size"] = square_or_pair(resize_to)
        return config_class(**fields), resample
    except StrictDataclassError as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"the checkpoint's sizes make no model: {reason}") from error


def _targets(family: str, config: Any, with_head: bool) -> tuple[type[PreTrainedModel], dict[str, Shape]]:
    """The class to save, and the shapes of its parameters under the names that key tables use."""
    model_class = FAMILIES[family].classes["classification" if with_head else "model"]
    with torch.device("meta"), no_init_weights():
        state = model_class(config).state_dict()
    prefix = f"{model_class.base_model_prefix}."
    return model_class, {name.removeprefix(prefix): tuple(value.shape) for name, value in state.items()}


def _rows(rule: KeyRule, key: str, shape: Shape, resample: Resample | None, block: int | None) -> Generator[Row]:
    """One row for every parameter that the array, or one block of it, fills."""
    number = len(rule.targets)
    for index in range(number):
        target = (rule if block is None else rule.at(block)).targets[index]
        row = Row(target, (), key, shape, rule.transform, resample, block, (index, number) if number > 1 else None)
        moved = TRANSFORMS[rule.transform].apply(row.taken(torch.empty(shape, device="meta")))
        target_shape = tuple(moved.shape)
        if resample is not None:
            target_shape = (1, resample.prefix + resample.new_grid[0] * resample.new_grid[1], target_shape[2])
        yield replace(row, target_shape=target_shape)
