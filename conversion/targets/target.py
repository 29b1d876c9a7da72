"""What a target is: a library that a model of this package can go to, by the same key tables that read its files.

What a target cannot express is refused by name; every parameter finds its place, or nothing is written.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins.origin import COMPUTATIONS, TRANSFORMS, KeyRule, Origin, axis_factor
from hf_vit.conversion.planning import HEADS, POSITION_TABLE, listing
from hf_vit.conversion.targets.graphs.int8 import Calibration
from hf_vit.conversion.targets.graphs.preprocessing import PIXEL_VALUES
from hf_vit.conversion.targets.graphs.runtimes import Mode
from hf_vit.errors import UserError
from hf_vit.families import DENSE_HEADS, dense_head_of, problem_type_of
from hf_vit.models.configuration_hf_vit import PROBLEM_TYPES, as_pair
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone

# Settings of training, of feature maps and of pre-training heads: no logits depend on them.
WITHOUT_EFFECT = frozenset(
    (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "initializer_range"),
        *("reshape_hidden_states", "apply_layernorm", "use_feature_pyramid", "fpn_hidden_size"),
        *("pyramid_strides", "stem_stages"),
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
# As in `verification`; of the models that are not named, 1e-5.
TOLERANCE = {"hf_hybrid_vit": 6e-5, "hf_bit": 6e-5, **{head.model_type: 1e-4 for head in DENSE_HEADS.values()}}
# By the name of a dense head: what its graph gives, [B, ...] each. Mask R-CNN is none: which boxes it looks at, it
# decides in Python, image by image.
DENSE_OUTPUTS = {
    "linear": ["logits"],
    "upernet": ["logits"],
    "mask2former": ["class_queries_logits", "masks_queries_logits"],
    "detr": ["logits", "pred_boxes"],
    "deformable-detr": ["logits", "pred_boxes"],
}


def dense_outputs(model: PreTrainedModel) -> list[str] | None:
    """Return the names of what the graph of a model of dense prediction gives; None for a model of another kind."""
    head = dense_head_of(getattr(model.config, "model_type", None))
    return None if head is None else DENSE_OUTPUTS.get(head.name, [])


@dataclass(frozen=True)
class DenseSizes:
    """The images that a dense predictor's graph for any size takes, with the fields of a family's configuration."""

    backbone: Any
    num_channels: int
    patch_stride: tuple[int, int]  # px that sides must be multiples of, so that all maps are whole
    grid: tuple[int, int]  # of these in the nominal image
    stage_depths: tuple[int, ...] = ()  # only multiples are taken; see `only_whole_patches`

    @classmethod
    def of(cls, model: PreTrainedModel) -> "DenseSizes":
        (backbone,) = (module for module in model.modules() if isinstance(module, HfBaseBackbone))
        config: Any = backbone.config
        unit_h, unit_w = (math.lcm(side, *backbone.strides) for side in config.patch_stride)
        height, width = config.nominal_size
        return cls(config, config.num_channels, (unit_h, unit_w), (height // unit_h, width // unit_w))

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the grid of images; a ValueError where the backbone takes none of this size."""
        return self.backbone.grid_of(height, width)


@dataclass(frozen=True)
class OutgoingModel:
    """A model in evaluation on its way out, and how it is written."""

    model: PreTrainedModel
    processor: Any
    arrays: dict[str, torch.Tensor]  # by keys of the target, contiguous; empty for a target without key table
    folder: Path
    static: bool = False  # for the nominal image size alone
    spelling: str = "newer"  # of an original's keys
    takes: str = PIXEL_VALUES  # anything else: the image processor is in the graph, see `graphs.preprocessing`
    quantize: Mode | None = None
    calibration: Calibration | None = None
    opset: int | None = None  # of ONNX; None for torch's default

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def has_head(self) -> bool:
        return has_head(self.model)

    @property
    def output_names(self) -> list[str]:
        """Return its graph's: a classifier's logits and what its head sees, a bare model's tokens, a dense head's."""
        if (names := dense_outputs(self.model)) is not None:
            return names
        return ["logits", "features"] if self.has_head else ["last_hidden_state"]

    @property
    def compared(self) -> list[str]:
        """Return its graph's outputs that are compared with the model's."""
        return self.output_names if self.is_dense else self.output_names[:1]

    @property
    def is_dense(self) -> bool:
        return dense_outputs(self.model) is not None

    @property
    def sizes(self) -> Any:
        """Return what decides which images it takes: its configuration, or what a dense predictor's maps allow."""
        return DenseSizes.of(self.model) if self.is_dense else self.config

    @property
    def nominal_size(self) -> tuple[int, int]:
        return as_pair(self.config.image_size)

    @torch.no_grad()
    def probe(self, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (images of noise [B, C, H, W], what the model gives)."""
        generator = torch.Generator().manual_seed(0)
        height, width = self.nominal_size
        images = torch.randn(batch, self.config.num_channels, height, width, generator=generator)
        return images, self.outcome(images)

    def outcome(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, tokens of a bare model, or all that is `compared`, of images [B, C, H, W]."""
        output = self.model(images)
        return join_outputs([output[name] for name in self.compared])


@dataclass(frozen=True)
class Part:
    """The key table, read backwards, that takes the models of some configs; the other fields as those of `Target`."""

    title: str
    table: Origin
    expresses: Mapping[str, Sequence[Any]]
    objections: Callable[[Any, bool], list[str]]


class Target(ABC):
    """Abstract: a library that models can go to."""

    name: ClassVar[str]  # as `--to` has it
    title: ClassVar[str]  # in messages
    tables: ClassVar[Mapping[str, Origin] | None] = None  # by model_type; None for a target that takes any model
    # Field of the config -> values that the target has; of a field that is not named, only the default.
    expresses: ClassVar[Mapping[str, Sequence[Any]]] = MappingProxyType({})
    libraries: ClassVar[tuple[tuple[str, ...], str]] = ((), "")  # needed modules, and the extra that brings them
    options: ClassVar[tuple[str, ...]] = ()  # what else `export` takes for it, by the names of its arguments
    least_tolerance: ClassVar[float] = 0.0  # of results, for a target that computes by approximations
    takes: ClassVar[str] = PIXEL_VALUES  # see `OutgoingModel`
    takes_dense: ClassVar[bool] = False
    problem_types: ClassVar[tuple[str, ...]] = PROBLEM_TYPES

    @abstractmethod
    def write(self, outgoing: OutgoingModel) -> None:
        """Write the files."""

    @abstractmethod
    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        """Return the largest difference between the written model's results and ours, and the library that ran it."""

    def part_for(self, config: PreTrainedConfig) -> Part:
        """Return the part of the target that takes a model of this config."""
        return Part(self.title, (self.tables or {})[config.model_type], self.expresses, self.objections)

    def objections(self, config: PreTrainedConfig, has_head: bool) -> list[str]:
        """Return what else the target cannot express, in words."""
        return []

    def spell(self, key: str, model: PreTrainedModel) -> str:
        """Return the key in the file for one in the table's normal form."""
        return key

    @final
    def tolerance(self, config: PreTrainedConfig) -> float:
        return max(TOLERANCE.get(config.model_type, 1e-5), self.least_tolerance)

    @final
    def require_libraries(self) -> None:
        """Raise a UserError where a library is missing."""
        modules, extra = self.libraries
        missing = [name for name in modules if find_spec(name) is None]
        if missing:
            raise UserError(f'the export to {self.title} needs {", ".join(missing)}: pip install "hf-vit[{extra}]"')

    @final
    def refuse_options(self, given: Mapping[str, object]) -> None:
        """Raise a UserError that names an option of other targets."""
        for name, value in given.items():
            if value and name not in self.options:
                raise UserError(f"--{name} cannot be combined with --to {self.name}; leave it out")

    @final
    def refuse_inexpressible(self, model: PreTrainedModel) -> None:
        """Raise a UserError that names everything the target cannot express; return if there is nothing."""
        config, kind = model.config, type(model).__name__
        if (outputs := dense_outputs(model)) is not None:
            if not outputs:
                names = ", ".join(f"'{name}'" for name in DENSE_OUTPUTS if DENSE_HEADS[name].task == "detection")
                raise UserError(
                    f"{kind} is torchvision's Mask R-CNN, which selects boxes in Python and cannot be "
                    f"exported as a graph; the heads {names} can be exported"
                )
            if not self.takes_dense:
                raise UserError(
                    f"{kind} cannot be exported to {self.title}; export segmentation and detection models to ONNX"
                )
            return
        if not kind.endswith(("Model", "ForImageClassification")):
            raise UserError(f"{kind} is neither a classifier nor a bare model; give one of these")
        if has_head(model) and (problem_type := problem_type_of(model)) not in self.problem_types:
            raise UserError(
                f"{self.title} treats outputs as class logits, and this model has "
                f"problem_type='{problem_type}'; nothing was written: choose --to transformers or onnx"
            )
        if self.tables is None:
            return
        if config.model_type not in self.tables:
            known = " and ".join(self.tables)
            raise UserError(f"{self.title} cannot express model_type='{config.model_type}'; it takes {known}")
        wrong, part = list[str](), self.part_for(config)
        defaults = {known.name: known.default for known in fields(config)}
        for name, value in _settings(config).items():
            # A ResNet's epsilon is the layers' by default.
            allowed = part.expresses.get(name, (config.layer_norm_eps if name == "group_norm_eps" else defaults[name],))
            if allowed is not ANY and value not in allowed:
                choice = f" (it has {' or '.join(map(repr, allowed))})" if name in part.expresses else ""
                wrong.append(f"{name}={value!r}{choice}")
        wrong += part.objections(config, has_head(model))
        if wrong:
            raise UserError(f"{part.title} cannot express {', '.join(wrong)}; nothing was written")

    @final
    def arrays_of(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return the parameters by the target's keys and with its axes, of two rules by the first; all find a place."""
        if self.tables is None:
            return {}
        prefix, part = f"{model.base_model_prefix}.", self.part_for(model.config)
        state = {name.removeprefix(prefix): value.detach().cpu() for name, value in model.state_dict().items()}
        arrays, placed, sizes = dict[str, torch.Tensor](), set[str](), _sizes(model.config, state)
        for rule in _rules_for(part.table, model.config):
            if all(name in state for name in rule.parameters) and not placed.issuperset(rule.parameters):
                shape = [factor * (sizes[letter] if letter else 1) for factor, letter in map(axis_factor, rule.axes)]
                shape[0] //= len(rule.parameters)
                reverted = [TRANSFORMS[rule.transform].revert(state[name], shape) for name in rule.parameters]
                arrays[self.spell(rule.key, model)] = torch.cat(reverted)
                placed.update(rule.parameters)
        lacked = {name for names in part.table.zeros.values() for name in names}
        left = [name for name in state if name not in placed and not (name in lacked and not state[name].any())]
        words = [f"{name} (which is not zero)" if name in lacked else name for name in left]
        if left:
            raise UserError(f"{part.title} has no place for {listing('parameters', words)}; nothing was written")
        return arrays


def _rules_for(origin: Origin, config: PreTrainedConfig) -> list[KeyRule]:
    """Return a key table for a model, one rule a key, without what is computed from several arrays."""
    rules = tuple(rule for rule in origin.rules if rule.transform not in COMPUTATIONS)
    if origin.rules_of is not None:  # for a stem of these depths
        depths = getattr(config, "stage_depths", ())
        units = [(stage, unit) for stage, depth in enumerate(depths, start=1) for unit in range(1, depth + 1)]
        numbered = {one.key: () for unit in units for rule in rules if (one := rule.in_unit(*unit)) != rule}
        rules = origin.rules_of(rules, numbered)
    blocks = range(config.num_hidden_layers)
    return [one for rule in rules for one in ([rule.at(i) for i in blocks] if rule.in_block else [rule])]


def _sizes(config: Any, state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the size of every letter that the legends of key tables use."""
    stem, heads = getattr(config, "stem_patch_size", None), getattr(config, "num_attention_heads", 1)
    patch = config.patch_stride if stem is None else (stem, stem)
    return {
        "P": patch[0],
        "Q": patch[1],
        "C": config.num_channels,
        "D": config.hidden_size,
        "T": state[POSITION_TABLE].shape[1] if POSITION_TABLE in state else math.prod(config.grid),
        "G": getattr(config, "num_register_tokens", 0),
        "A": heads,
        "K": config.hidden_size // heads,
        "S": getattr(config, "token_intermediate_size", 0),
        "M": config.intermediate_size,
        "R": getattr(config, "representation_size", None) or config.hidden_size,
        "L": config.num_labels,
        "W": getattr(config, "stem_width", 0),
    }


def join_outputs(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one output as it is, several [B, ...] as one [B, M]."""
    return outputs[0] if len(outputs) == 1 else torch.cat([each.flatten(1) for each in outputs], dim=1)


def has_head(model: PreTrainedModel) -> bool:
    """Return whether it is a classifier."""
    return dense_outputs(model) is None and any(name.startswith(HEADS) for name in model.state_dict())


@torch.no_grad()
def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value where that exceeds 1; NaN where a value is."""
    return float((ours - theirs).abs().max()) / max(1.0, float(ours.abs().max()))


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields that results depend on; a value that repeats what another sets is given as the default."""
    inherited = {known.name for known in fields(PreTrainedConfig)}  # pyright: ignore[reportArgumentType]
    names = {known.name for known in fields(config)} - inherited - WITHOUT_EFFECT
    settings = {name: getattr(config, name) for name in sorted(names)}
    if "pooling" not in settings:  # of a Mixer, which has but one way
        return settings
    if config.has_class_token == (config.pooling == "token"):
        settings["use_class_token"] = None
    if config.num_hidden_groups == config.num_hidden_layers:
        settings["num_hidden_groups"] = None
    if not config.has_class_token and config.position_on_class_token != "with_registers":
        settings["position_on_class_token"] = True
    if "group_norm_eps" in settings and config.group_norm_eps is None:
        settings["group_norm_eps"] = config.layer_norm_eps
    return settings
