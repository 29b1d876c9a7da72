"""What a target is: a library that a model of this package can go to, by the same key tables that read its files.

What a target cannot express is refused by name; every parameter finds its place, or nothing is written.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins.origin import Origin
from hf_vit.conversion.planning.layout import listing
from hf_vit.conversion.planning.plan import HEADS
from hf_vit.conversion.targets.backwards import array_of, rules_for
from hf_vit.conversion.targets.graphs.calibration import Calibration, Mode
from hf_vit.conversion.targets.graphs.dense import DenseSizes, dense_outputs, refuse_dense
from hf_vit.conversion.targets.graphs.preprocessing import PIXEL_VALUES
from hf_vit.errors import UserError
from hf_vit.families import DENSE_HEADS, problem_type_of
from hf_vit.models.configuration_hf_vit import PROBLEM_TYPES, as_pair

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


@dataclass(frozen=True)
class OutgoingModel:
    """A model on its way out.

    Attributes:
        model: of this package, in evaluation.
        processor: its `ViTImageProcessor`.
        arrays: key of the target -> contiguous array; empty for a target without key table.
        folder: where the files go.
        static: for the nominal image size alone.
        spelling: of an original's keys, where it has several.
        takes: what the graph is fed with, see `graphs.preprocessing`; unless that is pixel values, the image processor
            is in the graph.
        quantize, calibration: in int8, and with which images.
    """

    model: PreTrainedModel
    processor: Any
    arrays: dict[str, torch.Tensor]
    folder: Path
    static: bool = False
    spelling: str = "newer"
    takes: str = PIXEL_VALUES
    quantize: Mode | None = None
    calibration: Calibration | None = None

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def has_head(self) -> bool:
        return has_head(self.model)

    @property
    def output_names(self) -> list[str]:
        """Of its graph: a classifier's logits and what its head sees, a bare model's tokens, a dense head's."""
        if (names := dense_outputs(self.model)) is not None:
            return names
        return ["logits", "features"] if self.has_head else ["last_hidden_state"]

    @property
    def compared(self) -> list[str]:
        """Those of its graph's outputs that are compared with the model's."""
        return self.output_names if self.is_dense else self.output_names[:1]

    @property
    def is_dense(self) -> bool:
        """Whether it predicts something for every place of an image."""
        return dense_outputs(self.model) is not None

    @property
    def sizes(self) -> Any:
        """What tells which images it takes: its configuration, or what the maps of a dense predictor allow."""
        return DenseSizes.of(self.model) if self.is_dense else self.config

    @property
    def nominal_size(self) -> tuple[int, int]:
        """(height, width) in px of the images that the position table is made for."""
        return as_pair(self.config.image_size)

    @torch.no_grad()
    def probe(self, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """(images of noise [B, C, H, W], what the model gives)."""
        generator = torch.Generator().manual_seed(0)
        height, width = self.nominal_size
        images = torch.randn(batch, self.config.num_channels, height, width, generator=generator)
        return images, self.outcome(images)

    def outcome(self, images: torch.Tensor) -> torch.Tensor:
        """What the model makes of images [B, C, H, W]: logits, tokens of a bare model, or all that is `compared`."""
        output = self.model(images)
        return joined([output[name] for name in self.compared])


class Target(ABC):
    """Abstract: a library that models can go to.

    Attributes:
        name: as `--to` has it.
        title: what messages call it.
        tables: model_type -> key table; None for a target that takes any model as it is.
        expresses: field of the config -> values that the target has (`ANY`: all); of a field that is not named, only
            the default.
        libraries: modules that are needed to write or to compare, and the extra of this package that brings them.
        options: what else `export` takes for this target, by the names of its arguments.
        takes: what its graphs are fed with, see `OutgoingModel`.
        takes_dense: whether models of dense prediction can go there.
        problem_types: what outputs may be, see `problem_type_of`.
        least_tolerance: of results, for a target that computes by approximations.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    tables: ClassVar[Mapping[str, Origin] | None] = None
    expresses: ClassVar[Mapping[str, Sequence[Any]]] = MappingProxyType({})
    libraries: ClassVar[tuple[tuple[str, ...], str]] = ((), "")
    options: ClassVar[tuple[str, ...]] = ()
    least_tolerance: ClassVar[float] = 0.0
    takes: ClassVar[str] = PIXEL_VALUES
    takes_dense: ClassVar[bool] = False
    problem_types: ClassVar[tuple[str, ...]] = PROBLEM_TYPES

    @abstractmethod
    def write(self, outgoing: OutgoingModel) -> None:
        """Write the files."""

    @abstractmethod
    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        """The largest difference between the written model's results and ours, and with what it was measured."""

    def table_of(self, config: PreTrainedConfig) -> Origin:
        """The key table of a model that the target takes."""
        return (self.tables or {})[config.model_type]

    def expressed(self, config: PreTrainedConfig) -> Mapping[str, Sequence[Any]]:
        """`expresses`, for a model of this config."""
        return self.expresses

    def title_of(self, config: PreTrainedConfig) -> str:
        """What messages call the part of the target that takes a model of this config."""
        return self.title

    def objections(self, config: PreTrainedConfig, has_head: bool) -> list[str]:
        """What else the target cannot express, in words."""
        return []

    def spell(self, key: str, model: PreTrainedModel) -> str:
        """Key in the table's normal form -> key in the file."""
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
                raise UserError(f"--{name} does not go with --to {self.name}; leave it out")

    @final
    def refuse_inexpressible(self, model: PreTrainedModel) -> None:
        """Raise a UserError that names everything the target cannot express; return if there is nothing."""
        config, kind = model.config, type(model).__name__
        refuse_dense(model, self.title, self.takes_dense)
        if dense_outputs(model) is not None:
            return
        if not kind.endswith(("Model", "ForImageClassification")):
            raise UserError(f"{kind} is neither a classifier nor a bare model; only those can be exported")
        if has_head(model) and (problem_type := problem_type_of(model)) not in self.problem_types:
            raise UserError(
                f"{self.title} takes outputs for logits of classes, and those of this model are for problem_type="
                f"'{problem_type}'; nothing is written: choose --to transformers or onnx"
            )
        if self.tables is None:
            return
        if config.model_type not in self.tables:
            known = " and ".join(self.tables)
            raise UserError(f"{self.title} cannot express model_type='{config.model_type}'; it takes {known}")
        wrong, expressed = list[str](), self.expressed(config)
        for name, value in _settings(config).items():
            allowed = expressed.get(name, (_default(config, name),))
            if allowed is not ANY and value not in allowed:
                choice = f" (it has {' or '.join(map(repr, allowed))})" if name in expressed else ""
                wrong.append(f"{name}={value!r}{choice}")
        wrong += self.objections(config, has_head(model))
        if wrong:
            raise UserError(f"{self.title_of(config)} cannot express {', '.join(wrong)}; nothing is written")

    @final
    def arrays_of(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """The model's parameters under the target's keys and with its axes; of two rules for one, by the first.

        Raises:
            UserError: a parameter has no place there.
        """
        if self.tables is None:
            return {}
        prefix = f"{model.base_model_prefix}."
        state = {name.removeprefix(prefix): value.detach().cpu() for name, value in model.state_dict().items()}
        arrays: dict[str, torch.Tensor] = {}
        placed: set[str] = set()
        table = self.table_of(model.config)
        for rule in rules_for(table, model.config):
            if all(name in state for name in rule.parameters) and not placed.issuperset(rule.parameters):
                arrays[self.spell(rule.key, model)] = array_of(rule, state, model.config)
                placed.update(rule.parameters)
        lacked = {name for names in table.zeros.values() for name in names}
        left = [name for name in state if name not in placed and not (name in lacked and not state[name].any())]
        told = [f"{name} (which is not zero)" if name in lacked else name for name in left]
        if left:
            title = self.title_of(model.config)
            raise UserError(f"{title} has no place for {listing('parameters', told)}; nothing is written")
        return arrays


def joined(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """One output as it is, several [B, ...] as one [B, M]."""
    return outputs[0] if len(outputs) == 1 else torch.cat([each.flatten(1) for each in outputs], dim=1)


def has_head(model: PreTrainedModel) -> bool:
    """Whether it is a classifier."""
    return dense_outputs(model) is None and any(name.startswith(HEADS) for name in model.state_dict())


@torch.no_grad()
def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the largest value where that exceeds 1; NaN where a value is."""
    return float((ours - theirs).abs().max()) / max(1.0, float(ours.abs().max()))


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """What results depend on, field by field; a value that says what another does already is given as the default."""
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


def _default(config: PreTrainedConfig, name: str) -> Any:
    if name == "group_norm_eps":  # None means that
        return config.layer_norm_eps
    return next(known.default for known in fields(config) if known.name == name)
