"""Out again: a model of this package in the files of another library, by the same key tables that read them.

A target is data: which settings it has (`expresses`), whose key table it goes by, and how its files are written. What
it cannot express is refused by name; every parameter finds its place, or nothing is written.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from hf_vit.conversion.delivery import new_folder, refuse_used_folder
from hf_vit.conversion.loading import from_hub, image_processor_from_hub
from hf_vit.conversion.origins.origin import KeyRule, Origin
from hf_vit.conversion.plan.building import without_progress_bars
from hf_vit.conversion.plan.layout import axis_factor, listing
from hf_vit.conversion.plan.planning import HEADS
from hf_vit.conversion.plan.transforms import TRANSFORMS
from hf_vit.errors import UserError
from hf_vit.results.facts import append_record, new_record

# Settings of training, of feature maps and of pre-training heads: no logits depend on them.
WITHOUT_EFFECT = frozenset(
    (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "initializer_range"),
        *("reshape_hidden_states", "apply_layernorm", "use_feature_pyramid", "fpn_hidden_size"),
        *("_out_features", "_out_indices", "prediction_target", "predict_next_patch", "image_mean", "image_std"),
    )
)
ANY: tuple[Any, ...] = ()
# What follows from the weights' shapes, or is the same in all libraries.
SIZES: Mapping[str, Sequence[Any]] = dict.fromkeys(
    (
        *("image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("intermediate_size", "position_interpolation"),
    ),
    ANY,
)
Arrays = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Exported:
    """A model on its way out.

    Attributes:
        model: of this package, in evaluation.
        processor: its `ViTImageProcessor`.
        arrays: key of the target -> contiguous array; empty for a target without key table.
        folder: where the files go.
    """

    model: Any
    processor: Any
    arrays: Arrays
    folder: Path

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def has_head(self) -> bool:
        return has_head(self.model)

    @property
    def nominal_size(self) -> tuple[int, int]:
        """(height, width) in px of the images that the position table is made for."""
        (h, w), (stride_h, stride_w) = self.config.grid, self.config.patch_stride
        return h * stride_h, w * stride_w


@dataclass(frozen=True)
class Target:
    """A library that models can go to.

    Attributes:
        name: as `--to` has it.
        title: what messages call it.
        write: makes the files.
        compare: the largest difference between the written model's results and ours, and with what it was measured.
        tables: model_type -> key table; None for a target that takes any model as it is.
        expresses: field of the config -> values that the target has (`ANY`: all); of a field that is not named, only
            the default.
        objections: what else the target cannot express, in words.
        spell: (key in the table's normal form, the model) -> key in the file.
        ready: raises UserError where a library is missing.
    """

    name: str
    title: str
    write: Callable[[Exported], None]
    compare: Callable[[Exported], tuple[float, str]]
    tables: Mapping[str, Origin] | None = None
    expresses: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    objections: Callable[[Any, bool], list[str]] = lambda config, has_head: []
    spell: Callable[[str, Any], str] = lambda key, model: key
    ready: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class ExportResult:
    """What was written, and how far its results are from the model's.

    Attributes:
        output: the folder.
        target: name of the target.
        difference: largest difference of the results, relative to the largest value where that exceeds 1.
        measured_with: the library that ran the written model.
    """

    output: Path
    target: str
    difference: float
    measured_with: str


TOLERANCE = {"hf_hybrid_vit": 6e-5, "hf_bit": 6e-5}  # as in `verification`; 1e-5 for the others


def export(model: str | Path, output: str | Path, to: str) -> ExportResult:
    """Write a model in the files of another library; the folder appears complete or not at all.

    Args:
        model: a folder, a Hub id, or anything that `from_hub` loads.
        output: new folder.
        to: name of a target, a key of `TARGETS`.

    Raises:
        UserError: there is no such model or target, the target cannot express the model, a library is missing, or the
            written model gives other results.
    """
    from hf_vit.conversion.targets import TARGETS

    if to not in TARGETS:
        raise UserError(f"--to {to!r} is no target; give one of {', '.join(TARGETS)}")
    target, started = TARGETS[to], time.perf_counter()
    target.ready()
    output = Path(output)
    refuse_used_folder(output)
    with without_progress_bars():
        loaded, processor = from_hub(model), image_processor_from_hub(model)
        refuse_inexpressible(target, loaded)
        arrays = {} if target.tables is None else to_arrays(target, loaded)
        with new_folder(output) as folder:
            exported = Exported(loaded, processor, arrays, folder)
            target.write(exported)
            difference, measured_with = target.compare(exported)
            if not difference <= TOLERANCE.get(loaded.config.model_type, 1e-5):  # refuses NaN too
                raise UserError(
                    f"the model for {target.title} gives other results, {difference:.1e} apart (measured with "
                    f"{measured_with}), so nothing is written; please report this"
                )
            values = {"target": to, "largest_difference": difference, "measured_with": measured_with}
            record = new_record("conversion", values=values, seconds=time.perf_counter() - started)
            append_record(folder, record)
    return ExportResult(output, to, difference, measured_with)


def has_head(model: Any) -> bool:
    return any(name.startswith(HEADS) for name in model.state_dict())


def refuse_inexpressible(target: Target, model: Any) -> None:
    """Raise a UserError that names everything the target cannot express; return if there is nothing."""
    config, kind = model.config, type(model).__name__
    if not kind.endswith(("Model", "ForImageClassification")):
        raise UserError(f"{kind} is neither a classifier nor a bare model; only those can be exported")
    if target.tables is None:
        return
    if config.model_type not in target.tables:
        known = " and ".join(target.tables)
        raise UserError(f"{target.title} cannot express model_type='{config.model_type}'; it takes {known}")
    wrong: list[str] = []
    for name, value in _settings(config).items():
        allowed = target.expresses.get(name, (_default(config, name),))
        if allowed is not ANY and value not in allowed:
            choice = f" (it has {' or '.join(map(repr, allowed))})" if name in target.expresses else ""
            wrong.append(f"{name}={value!r}{choice}")
    wrong += target.objections(config, has_head(model))
    if wrong:
        raise UserError(f"{target.title} cannot express {', '.join(wrong)}; nothing is written")


def _settings(config: Any) -> dict[str, Any]:
    """What results depend on, field by field; a value that says what another does already is given as the default."""
    inherited = {known.name for known in fields(PreTrainedConfig)}  # pyright: ignore[reportArgumentType]
    names = {known.name for known in fields(config)} - inherited - WITHOUT_EFFECT
    settings = {name: getattr(config, name) for name in sorted(names)}
    if config.has_class_token == (config.pooling == "token"):
        settings["use_class_token"] = None
    if config.num_hidden_groups == config.num_hidden_layers:
        settings["num_hidden_groups"] = None
    if not config.has_class_token:
        settings["position_on_class_token"] = True
    if "group_norm_eps" in settings and config.group_norm_eps is None:
        settings["group_norm_eps"] = config.layer_norm_eps
    return settings


def _default(config: Any, name: str) -> Any:
    if name == "group_norm_eps":  # None means that
        return config.layer_norm_eps
    return next(known.default for known in fields(config) if known.name == name)


def to_arrays(target: Target, model: Any) -> Arrays:
    """The model's parameters under the target's keys and with its axes.

    Raises:
        UserError: a parameter has no place there.
    """
    assert target.tables is not None
    state, config = model.state_dict(), model.config
    prefix = f"{model.base_model_prefix}."
    state = {name.removeprefix(prefix): value.detach().cpu() for name, value in state.items()}
    arrays: Arrays = {}
    used: set[str] = set()
    for rule in rules_for(target.tables[config.model_type], config):
        if all(name in state for name in rule.targets):
            arrays[target.spell(rule.source, model)] = _source(
                rule, [state[name] for name in rule.targets], config, state
            )
            used.update(rule.targets)
    left = [name for name in state if name not in used]
    if left:
        raise UserError(f"{target.title} has no place for {listing('parameters', left)}; nothing is written")
    return arrays


def rules_for(origin: Origin, config: Any) -> list[KeyRule]:
    """The key table for a model of this config, one rule a key."""
    rules = origin.rules
    if origin.rules_of is not None:  # for a stem of these depths
        depths = getattr(config, "stage_depths", ())
        units = [(stage, unit) for stage, depth in enumerate(depths, start=1) for unit in range(1, depth + 1)]
        numbered = {one.source: () for unit in units for rule in rules if (one := rule.in_unit(*unit)) != rule}
        rules = origin.rules_of(rules, numbered)
    blocks = range(config.num_hidden_layers)
    return [one for rule in rules for one in ([rule.at(i) for i in blocks] if rule.in_block else [rule])]


def _source(rule: KeyRule, parts: Sequence[torch.Tensor], config: Any, state: Mapping[str, torch.Tensor]) -> Any:
    sizes = _sizes(config, state)
    shape = [_size(axis, sizes) for axis in rule.axes]
    shape[0] //= len(parts)
    return torch.cat([TRANSFORMS[rule.transform].revert(part, shape) for part in parts])


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    factor, letter = axis_factor(axis)
    return factor * (sizes[letter] if letter else 1)


def _sizes(config: Any, state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Size of every letter that the legends of key tables use."""
    patch = config.patch_stride
    if hasattr(config, "stem_patch_size"):
        patch = (config.stem_patch_size, config.stem_patch_size)
    return {
        "P": patch[0],
        "Q": patch[1],
        "C": config.num_channels,
        "D": config.hidden_size,
        "T": state["embeddings.position_embeddings"].shape[1] if "embeddings.position_embeddings" in state else 0,
        "A": config.num_attention_heads,
        "K": config.hidden_size // config.num_attention_heads,
        "M": config.intermediate_size,
        "R": config.representation_size or config.hidden_size,
        "L": config.num_labels,
        "W": getattr(config, "stem_width", 0),
    }


@torch.no_grad()
def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the largest value where that exceeds 1; NaN where a value is."""
    return float((ours - theirs).abs().max()) / max(1.0, float(ours.abs().max()))


@torch.no_grad()
def probe(exported: Exported, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """(images of noise [B, C, H, W], what the model gives: logits, or tokens of a bare model)."""
    generator = torch.Generator().manual_seed(0)
    height, width = exported.nominal_size
    images = torch.randn(batch, exported.config.num_channels, height, width, generator=generator)
    output = exported.model(images)
    return images, output.logits if exported.has_head else output.last_hidden_state
