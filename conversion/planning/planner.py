"""From the keys and shapes of a file to a complete plan, or a refusal that lists everything that does not fit."""

import re
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins.origin import BLOCK, Declared, KeyNames, KeyRule, Origin
from hf_vit.conversion.origins.registry import find_origin
from hf_vit.conversion.origins.transforms import COMPUTATIONS, TRANSFORMS
from hf_vit.conversion.planning.accounting import check_accounting
from hf_vit.conversion.planning.layout import Layout, naming
from hf_vit.conversion.planning.plan import (
    DECLARED,
    HEADS,
    POSITION_TABLE,
    REPRESENTATION,
    Plan,
    PlanOptions,
    Resample,
    Row,
    Wishes,
)
from hf_vit.conversion.readers.checkpoint import NOTHING_BESIDE, Companions, Shape
from hf_vit.conversion.sizes import Pair, size_text, square_or_pair
from hf_vit.errors import UserError, strict_reason
from hf_vit.families import FAMILIES
from hf_vit.models.configuration_hf_base import HfBaseConfig
from hf_vit.models.configuration_hf_vit import as_pair

REPLACED = "replaced by a new head"
MISFIT = "config.json does not fit the weights beside it"


def plan(
    shapes: Mapping[str, Shape],
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
    shapes: Mapping[str, Shape], wishes: Wishes, companions: Companions = NOTHING_BESIDE, file_name: str = "the file"
) -> Plan:
    """See `plan`."""
    with naming(file_name):
        return _make_plan(shapes, wishes, companions, file_name)


def _make_plan(shapes: Mapping[str, Shape], wishes: Wishes, companions: Companions, file_name: str) -> Plan:
    prefix = _prefix(shapes, wishes.prefix)
    inside = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
    origin = find_origin(inside, file_name, companions)
    declared = Declared() if origin.declared is None else origin.declared(companions, inside)
    names = _below(prefix, origin.names(inside), shapes)
    layout = Layout(origin, _without_foreign_heads(origin, names, wishes), shapes)
    layout.refuse_misfits()
    _refuse_pointless(wishes, layout)
    source_has_head = "head" in layout.parts and not wishes.drop_pre_logits
    assumed = {name: text for name, text in origin.assumed.items() if not layout.parts & origin.told.get(name, set())}
    fields = _fields(layout, declared, wishes, assumed)
    fields |= _label_fields(layout.dims["L"] if source_has_head else None, declared, wishes)
    has_head = source_has_head or wishes.new_head
    config, resample = _config(origin.family, fields, wishes.resize_to)
    model_class, parameters = _parameters(origin.family, config, has_head)
    rows, ignored = _rows_of_file(layout, wishes, resample)
    rows += _computed_rows(layout, parameters)
    zeros = [name for part, lacked in origin.zeros.items() if part in layout.parts for name in lacked]
    if wishes.new_head:
        zeros = [name for name in parameters if name.startswith(HEADS)]
    rows += [Row(name, parameters[name], None, None, "zeros") for name in zeros if name in parameters]
    plan = Plan(
        origin.name,
        origin.family,
        config,
        model_class,
        tuple(rows),
        ignored,
        has_head,
        wishes.new_head,
        declared.processor,
        _assumed(assumed, companions, wishes, fields, source_has_head and not wishes.new_head and not origin.zeros),
    )
    check_accounting(plan, shapes, parameters)
    return plan


def _prefix(shapes: Mapping[str, Shape], declared: str | None) -> str:
    """What was declared, with the dot or slash after it.

    Raises:
        UserError: no key begins with it.
    """
    if not declared:
        return ""
    ways = (declared,) if declared.endswith((".", "/")) else (f"{declared}.", f"{declared}/")
    found = next((way for way in ways if any(key.startswith(way) for key in shapes)), None)
    if found is None:
        begins = sorted({re.match(r"[^./]*[./]?", key)[0] for key in shapes})  # pyright: ignore[reportOptionalSubscript]
        raise UserError(f"no key begins with --prefix {declared!r}; the keys begin with {', '.join(begins[:6])}")
    return found


def _below(prefix: str, names: KeyNames, shapes: Mapping[str, Shape]) -> KeyNames:
    """The names of a file's keys, from those of its keys below a declared prefix."""
    outside = {key: f"outside of --prefix {prefix}" for key in shapes if not key.startswith(prefix)}
    return KeyNames(
        {name: prefix + key for name, key in names.normal.items()},
        {prefix + key: reason for key, reason in names.ignored.items()} | outside,
        lambda name: prefix + names.spell(name),
    )


def _without_foreign_heads(origin: Origin, names: KeyNames, wishes: Wishes) -> KeyNames:
    """The keys of the file without those of a head that no model here has, where a new one takes its place.

    Raises:
        UserError: none does.
    """
    for pattern, head in origin.foreign_heads.items():
        for name in [name for name in names.normal if re.fullmatch(pattern, name)]:
            if not wishes.new_head:
                raise UserError(
                    f"the checkpoint has {head} ('{names.normal[name]}'), which no model here has; give --num-labels "
                    "or --labels for a new head in its place"
                )
            names.ignored[names.normal.pop(name)] = REPLACED
    return names


def _refuse_pointless(wishes: Wishes, layout: Layout) -> None:
    """Raise a UserError for what is asked of a part that the source does not have."""
    if wishes.drop_pre_logits and not _representation(layout):
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
    if others := [name for name in _declared_by_people(wishes) if not hasattr(family.config_class, name)]:
        names = ", ".join(DECLARED[name] for name in others)
        raise UserError(f"{family.label} has no {', '.join(others)}; leave out {names}")


def _representation(layout: Layout) -> set[str]:
    """The optional part that is the representation layer, if the file has it."""
    return {rule.part for rule in layout.present.values() if rule.parameter.startswith(REPRESENTATION)}


def _declared_by_people(wishes: Wishes) -> dict[str, Any]:
    """Field of the config -> value, where an option gives one."""
    given = {
        "num_attention_heads": wishes.num_heads,
        "hidden_act": wishes.hidden_act,
        "pooling": wishes.pooling,
        "position_embedding": wishes.position_embedding,
    }
    return {name: value for name, value in given.items() if value is not None}


def _rows_of_file(layout: Layout, wishes: Wishes, resample: Resample | None) -> tuple[list[Row], dict[str, str]]:
    """(one row for every parameter that one array of the file fills; key -> why it is left out)."""
    ignored, rows = dict(layout.names.ignored), list[Row]()
    for name, rule in layout.present.items():
        key = layout.names.normal[name]
        reason = _reason_to_leave(rule, wishes)
        if reason is not None:
            ignored[key] = reason
        elif rule.transform not in COMPUTATIONS:
            table = resample if rule.parameter == POSITION_TABLE else None
            blocks = range(layout.depth) if rule.stacked else (None,)
            rows += [row for block in blocks for row in _rows(rule, key, layout.shapes[key], table, block)]
    return rows, ignored


def _computed_rows(layout: Layout, parameters: Mapping[str, Shape]) -> list[Row]:
    """One row for every parameter that is computed from several arrays of the file, or of which several are."""
    keys: dict[tuple[str, str], list[str]] = {}
    for name, rule in layout.present.items():
        if rule.transform in COMPUTATIONS:
            for block in range(layout.depth if BLOCK in rule.parameter else 1):
                keys.setdefault((rule.at(block).parameter, rule.transform), []).append(layout.names.normal[name])
    return [
        Row(parameter, parameters.get(parameter, ()), first, layout.shapes[first], transform, beside=tuple(others))
        for (parameter, transform), (first, *others) in keys.items()
    ]


def _reason_to_leave(rule: KeyRule, wishes: Wishes) -> str | None:
    """Why a weight of the source is not used, or None."""
    if wishes.new_head and rule.parameter.startswith(HEADS):
        return REPLACED
    if wishes.drop_pre_logits and rule.parameter.startswith(HEADS):
        return "head of the dropped representation layer"
    if wishes.drop_pre_logits and rule.parameter.startswith(REPRESENTATION):
        return "dropped representation layer"
    return None


def _assumed(
    assumed: Mapping[str, str], companions: Companions, wishes: Wishes, fields: Mapping[str, Any], has_names: bool
) -> dict[str, str]:
    """Field of the config, "labels" or "processor" -> what neither the source nor people say of it."""
    if companions.config is not None:
        has_pixels = companions.processor is not None or "model_type" not in companions.config
        return {} if has_pixels else {"processor": "the pixels of released models (no preprocessor_config.json)"}
    found = {name: text for name, text in assumed.items() if name not in _declared_by_people(wishes)}
    if wishes.image_size is None:
        found["image_size"] = f"images of {size_text(as_pair(fields['image_size']))} px"
    if has_names:
        found["labels"] = "no names of the classes (LABEL_0, ...)"
    return found


def _fields(layout: Layout, declared: Declared, wishes: Wishes, assumed: Mapping[str, str]) -> dict[str, Any]:
    """Fields of the config, as shapes, the files beside the weights, and people say."""
    origin, parts = layout.origin, layout.parts
    if wishes.drop_pre_logits:
        parts -= _representation(layout)
    try:
        image_size = wishes.image_size or declared.image_size
        fields = origin.configure(layout.dims, parts, layout.normal_shapes, image_size)
    except UserError as error:
        if wishes.image_size is not None or declared.image_size is None:
            raise
        raise UserError(f"{MISFIT}: {str(error).replace('--image-size', 'image_size')}") from error
    if origin.has_blocks:
        fields |= {"num_hidden_layers": layout.depth}
    fields |= agreed(fields, declared, assumed)
    by_people = _declared_by_people(wishes)
    if by_people.get("pooling") == "token" and origin.first_patch and "cls" not in parts:
        by_people["pooling"] = "first_patch"  # without a class token, the first token is a patch's
    fields |= _undisputed(by_people, fields, declared, origin, assumed)
    scale = declared.processor or {}  # of pixels; a head that predicts colours goes by it
    for name in ("image_mean", "image_std"):
        if name in scale:
            fields[name] = tuple(map(float, scale[name]))
            if len(scale[name]) != fields["num_channels"]:
                raise UserError(
                    f"what lies beside the weights gives {name}={scale[name]!r:.80}; it needs a value for each of the "
                    f"{fields['num_channels']} channels"
                )
    if FAMILIES[origin.family].is_vit and "num_attention_heads" not in fields:
        raise UserError(
            f"the weights do not tell the number of heads, and {fields['hidden_size']} channels are no multiple of 64; "
            "declare it with --num-heads, or give the folder with the config.json that lies beside them"
        )
    return fields


def agreed(fields: Mapping[str, Any], declared: Declared, assumed: Mapping[str, str]) -> dict[str, Any]:
    """What the files beside the weights say.

    Raises:
        UserError: the weights' shapes say otherwise.
    """
    wrong = [
        f"{name} is {value!s:.80} there, the weights make it {fields[name]}"
        for name, value in declared.fields.items()
        if name in fields and name not in assumed and name != "layer_scale_init_value" and fields[name] != value
    ]
    if wrong:
        raise UserError(f"{MISFIT}: {'; '.join(wrong)}")
    return dict(declared.fields)


def _undisputed(
    by_people: Mapping[str, Any],
    fields: Mapping[str, Any],
    declared: Declared,
    origin: Origin,
    assumed: Mapping[str, str],
) -> Mapping[str, Any]:
    """What people declare.

    Raises:
        UserError: a file beside the weights, the weights, or the origin's code say otherwise.
    """
    for name, value in by_people.items():
        is_known = name in declared.fields or name not in assumed
        if is_known and name in fields and fields[name] != value:
            source = "config.json says" if name in declared.fields else f"files of {origin.name} have"
            raise UserError(f"{DECLARED[name]} {value}: {source} {name}={fields[name]!r}; leave the option out")
    return by_people


def _label_fields(size: int | None, declared: Declared, wishes: Wishes) -> dict[str, Any]:
    """Names of the classes, or at least their number; `size` is that of the source's head, None without one."""
    labels, size = wishes.labels, size if wishes.num_labels is None else wishes.num_labels
    if not wishes.new_head and size is not None and declared.labels is not None:
        labels = declared.labels
        if len(labels) != size:
            raise UserError(f"{MISFIT}: it names {len(labels)} classes, the weights make {size}")
    if labels is not None:
        return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    return {} if size is None else {"num_labels": size}


def _config(family: str, fields: dict[str, Any], resize_to: Pair | None) -> tuple[HfBaseConfig, Resample | None]:
    config_class: Any = FAMILIES[family].config_class
    try:
        config = config_class(**fields)
        if resize_to is None:
            return config, None
        resized = config_class(**fields | {"image_size": square_or_pair(resize_to)})
        prefix = config.num_special_positions
        return resized, Resample(config.grid, resized.grid, prefix, config.position_interpolation)
    except StrictDataclassError as error:
        raise UserError(f"the checkpoint's sizes make no model: {strict_reason(error):.400}") from error


def _parameters(family: str, config: HfBaseConfig, with_head: bool) -> tuple[type[PreTrainedModel], dict[str, Shape]]:
    """The class to save, and the shapes of its parameters under the names that key tables use."""
    model_class = FAMILIES[family].classes["classification" if with_head else "model"]
    with torch.device("meta"), no_init_weights():
        state = model_class(config).state_dict()
    prefix = f"{model_class.base_model_prefix}."
    return model_class, {name.removeprefix(prefix): tuple(value.shape) for name, value in state.items()}


def _rows(rule: KeyRule, key: str, shape: Shape, resample: Resample | None, block: int | None) -> Generator[Row]:
    """One row for every parameter that the array, or one block of it, fills."""
    number = len(rule.parameters)
    for index in range(number):
        parameter = (rule if block is None else rule.at(block)).parameters[index]
        row = Row(parameter, (), key, shape, rule.transform, resample, block, (index, number) if number > 1 else None)
        moved = TRANSFORMS[rule.transform].apply(row.taken(torch.empty(shape, device="meta")))
        parameter_shape = tuple(moved.shape)
        if resample is not None:
            parameter_shape = (1, resample.prefix + resample.new_grid[0] * resample.new_grid[1], parameter_shape[2])
        yield replace(row, parameter_shape=parameter_shape)
