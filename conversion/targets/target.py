"""Define what a target is: a library to which models export, by the same key tables that read its files.

Settings that a target cannot express are refused by name. Every parameter is exported, or nothing is written.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins.origin import COMPUTATIONS, TRANSFORMS, KeyRule, Origin, make_resnet_rules, split_axis
from hf_vit.conversion.planning import HEADS, POSITION_TABLE, format_listing
from hf_vit.conversion.targets.graphs.int8 import Calibration
from hf_vit.conversion.targets.graphs.preprocessing import PIXEL_VALUES
from hf_vit.conversion.targets.graphs.runtimes import Mode
from hf_vit.environment import require
from hf_vit.errors import UserError
from hf_vit.families import DENSE_HEADS, find_head_type, get_problem_type
from hf_vit.models.configuration_hf_vit import PROBLEM_TYPES, as_pair
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone

# Settings of training, feature maps and pre-training heads, which do not affect logits.
WITHOUT_EFFECT = frozenset(
    (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "initializer_range"),
        *("reshape_hidden_states", "apply_layernorm", "use_feature_pyramid", "fpn_hidden_size"),
        *("pyramid_strides", "stem_stages"),
        *("_out_features", "_out_indices", "prediction_target", "predict_next_patch", "image_mean", "image_std"),
    )
)
_ANY: tuple[Any, ...] = ()
# Settings that follow from the weights' shapes, or that are the same in all libraries.
_SIZES = (
    *("image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "position_interpolation"),
)
# As in `verification`; 1e-5 for models that are not listed.
TOLERANCE = {"hf_hybrid_vit": 6e-5, "hf_bit": 6e-5, **{head.model_type: 1e-4 for head in DENSE_HEADS.values()}}
# Name of a dense head -> outputs [B, ...] of its graph. Mask R-CNN is missing, as it selects boxes in Python, image by
# image.
DENSE_OUTPUTS = {
    "linear": ["logits"],
    "upernet": ["logits"],
    "mask2former": ["class_queries_logits", "masks_queries_logits"],
    "detr": ["logits", "pred_boxes"],
    "deformable-detr": ["logits", "pred_boxes"],
}


def describe_dense_outputs(model: PreTrainedModel) -> list[str] | None:
    """Return the graph's outputs for a dense prediction model, [] if it has no graph; None for other models."""
    head = find_head_type(getattr(model.config, "model_type", None))
    return None if head is None else DENSE_OUTPUTS.get(head.name, [])


@dataclass(frozen=True)
class DenseSizes:
    """The image sizes that a dense predictor's graph for any size takes, with the fields of a configuration."""

    backbone: Any
    num_channels: int
    patch_stride: tuple[int, int]  # px; sides must be multiples of it, so that no map is rounded
    grid: tuple[int, int]  # number of these strides in the nominal image
    stage_depths: tuple[int, ...] = ()  # set, as sides must be multiples; see `needs_whole_patches`

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "DenseSizes":
        """Return the sizes for a dense predictor with one of the package's backbones."""
        (backbone,) = (module for module in model.modules() if isinstance(module, HfBaseBackbone))
        config: Any = backbone.config
        unit_h, unit_w = (math.lcm(side, *backbone.strides) for side in config.patch_stride)
        height, width = config.nominal_size
        return cls(config, config.num_channels, (unit_h, unit_w), (height // unit_h, width // unit_w))

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the backbone's grid for an image; raise a ValueError for a size that the backbone does not take."""
        return self.backbone.grid_of(height, width)


@dataclass(frozen=True)
class OutgoingModel:
    """A model in evaluation mode, and how to export it."""

    model: PreTrainedModel
    processor: Any
    arrays: dict[str, torch.Tensor]  # the target's key -> contiguous array; empty for a target without key table
    folder: Path
    static: bool = False  # whether the graph is for the nominal image size only
    spelling: str = "newer"  # form of vit_jax's keys
    takes: str = PIXEL_VALUES  # input of the graph; others include the image processor, see `graphs.preprocessing`
    quantize: Mode | None = None
    calibration: Calibration | None = None
    opset: int | None = None  # ONNX opset; None for torch's default
    thresholds: Mapping[str, float] | None = None  # recorded for the classes of a multi-label model

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def has_head(self) -> bool:
        return has_head(self.model)

    @property
    def output_names(self) -> list[str]:
        """Return the graph's outputs: logits and the head's input, tokens of a bare model, or those of a dense head."""
        dense_outputs = describe_dense_outputs(self.model)
        if dense_outputs is not None:
            return dense_outputs
        return ["logits", "features"] if self.has_head else ["last_hidden_state"]

    @property
    def compared_outputs(self) -> list[str]:
        """Return the graph's outputs that are compared with the model's."""
        return self.output_names if self.is_dense else self.output_names[:1]

    @property
    def is_dense(self) -> bool:
        return describe_dense_outputs(self.model) is not None

    @property
    def sizes(self) -> Any:
        """Return the object that defines the valid image sizes: the configuration, or `DenseSizes`."""
        return DenseSizes.from_model(self.model) if self.is_dense else self.config

    @property
    def nominal_size(self) -> tuple[int, int]:
        return as_pair(self.config.image_size)

    @torch.no_grad()
    def probe(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two images of noise [2, C, H, W] and the model's results for them."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(2, self.config.num_channels, *self.nominal_size, generator=generator)
        return images, self.compute_results(images)

    def compute_results(self, images: torch.Tensor) -> torch.Tensor:
        """Return the `compared_outputs` for images [B, C, H, W], several as one [B, M]."""
        output = self.model(images)
        return join_outputs([output[name] for name in self.compared_outputs])


# What AIMv2 supports in all libraries.
AIMV2_FIELDS: Mapping[str, Sequence[Any]] = {
    **{"norm_type": ("rmsnorm",), "norm_on_patches": (True,), "mlp_type": ("swiglu",), "pooling": ("gap",)},
    **dict.fromkeys(("qkv_bias", "projection_bias", "mlp_bias"), (False,)),
}


def express(*any_value: str, **values: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Return what a target supports, for `Part`: sizes and other fields with any value, and fields with few values."""
    return {**dict.fromkeys((*_SIZES, *any_value), _ANY), **values}


@dataclass(frozen=True)
class Part:
    """What a target does with the models of some configs: a key table, read backwards, and what it can express."""

    title: str  # name in messages
    table: Origin
    # Field of the config -> values that are supported, see `express`; for fields that are not listed, only the default.
    expresses: Mapping[str, Sequence[Any]]
    # (config, whether there is a head) -> setting in words -> whether the model has it, and the target does not
    objections: Callable[[Any, bool], Mapping[str, object]]


class Target(ABC):
    """Abstract: a library to which models export."""

    name: ClassVar[str]  # value of `--to`
    title: ClassVar[str]  # name in messages
    model_types: ClassVar[tuple[str, ...]] = ()  # of the models that it takes; () for a target without key tables
    libraries: ClassVar[tuple[tuple[str, ...], str]] = ((), "")  # needed modules, and the extra that installs them
    options: ClassVar[tuple[str, ...]] = ()  # further arguments of `export` that the target takes
    least_tolerance: ClassVar[float] = 0.0  # tolerance of results, for a target that uses approximations
    takes: ClassVar[str] = PIXEL_VALUES  # see `OutgoingModel`
    takes_dense: ClassVar[bool] = False
    problem_types: ClassVar[tuple[str, ...]] = PROBLEM_TYPES

    @abstractmethod
    def write(self, outgoing: OutgoingModel) -> None:
        """Write the files."""

    @abstractmethod
    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        """Return the largest difference of the files' results from the model's, and the library that ran the files."""

    def part_for(self, config: PreTrainedConfig) -> Part:
        """Return the part of a target with key tables that takes a model of this config."""
        raise NotImplementedError(f"{self.title} has no key tables")

    def spell(self, key: str, model: PreTrainedModel) -> str:
        """Return the key in the target's file for one in the table's normal form."""
        return key

    @final
    def tolerance(self, config: PreTrainedConfig) -> float:
        """Return the largest difference of results that is accepted."""
        return max(TOLERANCE.get(config.model_type, 1e-5), self.least_tolerance)

    @final
    def require_libraries(self) -> None:
        """Raise a UserError if a library is missing."""
        modules, extra = self.libraries
        require(*modules, purpose=f"export to {self.title}", extra=extra)

    @final
    def refuse_options(self, options: Mapping[str, object]) -> None:
        """Raise a UserError that names an option that only other targets have."""
        for name, value in options.items():
            if value and name not in self.options:
                raise UserError(f"--{name} cannot be combined with --to {self.name}; leave it out")

    @final
    def refuse_inexpressible(self, model: PreTrainedModel) -> None:
        """Raise a UserError that lists all settings that the target cannot express, if there are any."""
        config = model.config
        class_name = type(model).__name__
        outputs = describe_dense_outputs(model)
        if outputs is not None:
            self._refuse_dense(class_name, outputs)
            return
        if not class_name.endswith(("Model", "ForImageClassification")):
            raise UserError(f"{class_name} cannot be exported; give a classifier or a model without a head")
        problem_type = get_problem_type(model) if has_head(model) else None
        if problem_type is not None and problem_type not in self.problem_types:
            raise UserError(
                f"{self.title} only supports single-label classifiers, but this model has "
                f"problem_type='{problem_type}', so nothing was written; use --to transformers or --to onnx"
            )
        if not self.model_types:
            return
        if config.model_type not in self.model_types:
            supported = " and ".join(self.model_types)
            raise UserError(
                f"{self.title} does not support model_type='{config.model_type}', only {supported}; use --to onnx"
            )
        part = self.part_for(config)
        objections = part.objections(config, has_head(model))
        unsupported = _find_unsupported_fields(part, config)
        unsupported += [text for text, applies in objections.items() if applies]
        if unsupported:
            raise UserError(
                f"{part.title} does not support {', '.join(unsupported)}, so nothing was written; use --to onnx"
            )

    def _refuse_dense(self, class_name: str, outputs: Sequence[str]) -> None:
        """Raise a UserError for a segmentation or detection model that cannot be exported to this target."""
        if not outputs:
            names = ", ".join(f"'{name}'" for name in DENSE_OUTPUTS if DENSE_HEADS[name].task == "detection")
            raise UserError(
                f"{class_name} uses torchvision's Mask R-CNN, which cannot be exported as a graph; train a model with "
                f"one of these heads instead: {names}"
            )
        if not self.takes_dense:
            raise UserError(f"{class_name} cannot be exported to {self.title}; use --to onnx")

    @final
    def make_arrays(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return the target's key -> array, in the target's layout; raise a UserError if a parameter has no key.

        If several rules fit a parameter, the first one counts.
        """
        if not self.model_types:
            return {}
        part = self.part_for(model.config)
        prefix = f"{model.base_model_prefix}."
        state = {name.removeprefix(prefix): value.detach().cpu() for name, value in model.state_dict().items()}
        sizes = _collect_sizes(model.config, state)
        arrays = dict[str, torch.Tensor]()
        exported = set[str]()

        def measure_axis(axis: str) -> int:
            factor, letter = split_axis(axis)
            return factor * (sizes[letter] if letter else 1)

        for rule in _select_rules(part.table, model.config):
            if rule.stacked:  # one array holds the parameter of all blocks
                names = tuple(rule.for_block(i).parameter for i in range(model.config.num_hidden_layers))
            else:  # one array holds one parameter, or several in equal parts
                names = rule.parameters
            if not names or not all(name in state for name in names):
                continue
            revert = TRANSFORMS[rule.transform].revert
            if rule.stacked:
                shape = [measure_axis(axis) for axis in rule.axes if axis != "N"]
                array = torch.stack([revert(state[name], shape) for name in names], dim=rule.stack_axis)
            elif exported.issuperset(names):
                continue
            else:
                shape = list(map(measure_axis, rule.axes))
                shape[0] //= len(names)
                array = torch.cat([revert(state[name], shape) for name in names])
            arrays[self.spell(rule.key, model)] = array
            exported.update(names)
        _refuse_unexported(part, {name: value for name, value in state.items() if name not in exported})
        return arrays


def _refuse_unexported(part: Part, unexported: Mapping[str, torch.Tensor]) -> None:
    """Raise a UserError for parameters without a key, unless the target's model computes the same without them."""
    names_of_zeros = {name for names in part.table.zeros.values() for name in names}
    missing: list[str] = []
    for name, value in unexported.items():
        if name not in names_of_zeros:
            missing.append(name)
        elif value.any():
            missing.append(f"{name} (its values are not zero)")
    if missing:
        raise UserError(
            f"{part.title} has no weights for {format_listing('parameters', missing)}, so nothing was written; "
            "use --to onnx"
        )


def _select_rules(origin: Origin, config: PreTrainedConfig) -> list[KeyRule]:
    """Return one rule per key of a model, without those that are computed from several arrays."""
    rules = tuple(rule for rule in origin.rules if rule.transform not in COMPUTATIONS)
    if origin.has_units:
        rules = make_resnet_rules(rules, getattr(config, "stage_depths", ()), {})
    expanded: list[KeyRule] = []
    for rule in rules:
        expanded += [rule.for_block(i) for i in range(config.num_hidden_layers)] if rule.in_block else [rule]
    return expanded


def _collect_sizes(config: Any, state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the size of every axis letter of key tables."""
    stem = getattr(config, "stem_patch_size", None)
    heads = getattr(config, "num_attention_heads", 1)
    patch = config.patch_stride if stem is None else (stem, stem)
    return {
        "P": patch[0],
        "Q": patch[1],
        "C": config.num_channels,
        "Z": patch[0] * patch[1] * config.num_channels,
        "Y": config.grid[0],
        "V": config.grid[1],
        "D": config.hidden_size,
        "T": state[POSITION_TABLE].shape[1] if POSITION_TABLE in state else math.prod(config.grid),
        "G": getattr(config, "num_register_tokens", 0),
        "A": heads,
        "K": config.hidden_size // heads,
        "S": getattr(config, "token_intermediate_size", 0),
        "F": config.hidden_size // heads // 2,
        "M": config.intermediate_size,
        "X": getattr(config, "pooling_intermediate_size", None) or config.intermediate_size,
        "R": config.pooled_size,
        "L": config.num_labels,
        "W": getattr(config, "stem_width", 0),
    }


def join_outputs(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one output as it is, several [B, ...] as one [B, M]."""
    return outputs[0] if len(outputs) == 1 else torch.cat([output.flatten(1) for output in outputs], dim=1)


def has_head(model: PreTrainedModel) -> bool:
    return describe_dense_outputs(model) is None and any(name.startswith(HEADS) for name in model.state_dict())


@torch.no_grad()
def measure_difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value if that exceeds 1; NaN if one is NaN."""
    return float((expected - actual).abs().max()) / max(1.0, float(expected.abs().max()))


def _select_relevant_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the config's fields that affect results, to compare them with the defaults.

    A value that only repeats what another field says becomes the default.
    """
    inherited = {field.name for field in fields(PreTrainedConfig)}  # pyright: ignore[reportArgumentType]
    names = {field.name for field in fields(config)} - inherited - WITHOUT_EFFECT
    settings = {name: getattr(config, name) for name in sorted(names)}
    if "pooling" not in settings:  # an MLP-Mixer always pools by the mean
        return settings
    if config.has_class_token == (config.pooling == "token"):
        settings["use_class_token"] = None
    if config.num_hidden_groups == config.num_hidden_layers:
        settings["num_hidden_groups"] = None
    if not config.has_class_token and config.position_on_class_token != "with_registers":
        settings["position_on_class_token"] = True
    periods = settings["rotary_periods"]
    if periods is not None:
        powers = torch.arange(len(periods), dtype=torch.float64) / len(periods)
        expected_periods = config.rotary_base**powers
        # The tolerance is float32's, as files hold the periods in it.
        if torch.allclose(torch.tensor(periods, dtype=torch.float64), expected_periods, rtol=3e-7, atol=0):
            settings["rotary_periods"] = None
    if "group_norm_eps" in settings and config.group_norm_eps is None:
        settings["group_norm_eps"] = config.layer_norm_eps
    return settings


def _find_unsupported_fields(part: Part, config: Any) -> list[str]:
    """Return the config's fields whose values the part cannot express, each with the values that it can."""
    defaults = {field.name: field.default for field in fields(config)}
    if "group_norm_eps" in defaults:  # by default, a ResNet stem has the epsilon of the layers
        defaults["group_norm_eps"] = config.layer_norm_eps
    unsupported_fields: list[str] = []
    for name, value in _select_relevant_fields(config).items():
        allowed = part.expresses.get(name, (defaults[name],))
        if allowed is not _ANY and value not in allowed:
            choice = f" (only {' or '.join(map(repr, allowed))})" if name in part.expresses else ""
            unsupported_fields.append(f"{name}={value!r}{choice}")
    return unsupported_fields
