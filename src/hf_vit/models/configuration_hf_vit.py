"""Define the base of all configurations, the fields that all Vision Transformers share, and the plain ViT's config.

Sources: Dosovitskiy et al., "An Image is Worth 16x16 Words" (arXiv 2010.11929); the defaults are the original code's.
"""

import difflib
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Literal

from huggingface_hub import hf_hub_download
from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig

# Keys that transformers writes into configs or passes along without declaring them as fields.
# `encoder_stride` belongs to transformers' ViT, which reconstructs images with it.
FOREIGN_KEYS = (
    *("auto_map", "attn_implementation", "torch_dtype", "quantization_config", "encoder_stride"),
    *("tie_word_embeddings", "is_encoder_decoder", "is_decoder", "add_cross_attention"),
    *("image_mean", "image_std"),  # fields of ViTs alone, which conversions write for all families
)
SEQUENCES = (
    *("image_size", "patch_size", "image_mean", "image_std", "pyramid_strides", "stage_depths", "stem_stages"),
    *("rotary_periods", "rotary_reference_grid"),
)
PYRAMID_STRIDES = (4, 8, 16, 32)  # in px
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")

# Fields that follow the same rule in all families.
COUNTS = (
    *("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("token_intermediate_size", "fpn_hidden_size", "representation_size", "num_hidden_groups"),
    *("attention_stride", "pooling_num_heads", "pooling_intermediate_size"),
)
RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
SCALES = ("layer_norm_eps", "initializer_range", "rotary_base", "rotary_register_base")
MAX_LAYERS = 10_000  # a crafted config must not make a model builder run out of memory

PositionEmbedding = Literal[
    "learned", "learned_2d", "sincos_2d", "sincos_2d_mae", "sincos_1d", "relative", "relative_bias", "none"
]
# fmt: off
PositionInterpolation = Literal[
    "bilinear_corners", "bicubic", "bicubic_antialias", "flexivit", "bilinear",
    "bilinear_corners_square", "bicubic_antialias_square", "bilinear_square",
]
# fmt: on
Pooling = Literal["token", "gap", "token_and_gap", "map", "map_with_registers", "first_patch"]


def as_pair(value: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """Return a side length, which may be one int or (height, width), as (height, width)."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def refuse(*rules: tuple[object, str]) -> None:
    """Raise a ValueError with the message of the first rule that applies; a rule is (whether it applies, message)."""
    for applies, message in rules:
        if applies:
            raise ValueError(message)


class HfBaseConfig(BackboneConfigMixin, PreTrainedConfig):
    """Abstract: a configuration that is saved with its models' code, so that they load without hf_vit installed.

    Config fields of a backbone:
        out_features, out_indices: the output stages among "stem", "stage1", ...; default: the last one.

    Class attributes:
        auto_classes: Auto class -> "module.Class", for all classes that load from one saved folder. Their modules are
            saved together with the sibling modules that these import.
    """

    auto_classes: ClassVar[dict[str, str]]

    image_size: int | tuple[int, int] | list[int] = 224
    num_channels: int = 3
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Turn lists into tuples, and set the output stages."""
        self._warn_about_misspelled_fields(kwargs)
        _check_labels(kwargs.get("num_labels"), self.id2label)
        for name, value in list(vars(self).items()):
            if isinstance(value, list) and name in SEQUENCES:
                setattr(self, name, tuple(value))
        self.take_stages(kwargs)
        super().__post_init__(**kwargs)

    def _warn_about_misspelled_fields(self, extra_fields: dict[str, Any]) -> None:
        """Warn about unknown keys that resemble a field's name; other unknown keys may come from a newer version."""
        field_names = [field.name for field in fields(self) if not field.name.startswith("_")]
        for key in extra_fields:
            parts = set(key.split("_"))
            similar_names = [name for name in field_names if parts <= set(name.split("_"))]
            similar_names = similar_names or difflib.get_close_matches(key, field_names, n=1, cutoff=0.6)
            if similar_names and key not in FOREIGN_KEYS and not key.startswith("_") and not hasattr(type(self), key):
                warnings.warn(
                    f"{type(self).__name__} has no field '{key}' (value {extra_fields[key]!r}), so it changes nothing; "
                    f"did you mean '{similar_names[0]}'?",
                    UserWarning,
                    stacklevel=5,
                )

    def take_stages(self, given: dict[str, Any]) -> None:
        """Set the output stages from `given`, and remove their keys from it."""
        given.pop("stage_names", None)  # a config file may hold them, but they follow from the number of stages
        self.set_output_features_output_indices(given.pop("out_features", None), given.pop("out_indices", None))

    @property
    def num_stages(self) -> int:
        """Return how many stages a backbone has after its stem."""
        return self.num_hidden_layers

    @property
    def stage_names(self) -> list[str]:
        return ["stem", *(f"stage{index}" for index in range(1, self.num_stages + 1))]

    def set_output_features_output_indices(self, out_features: list[str] | None, out_indices: Any) -> None:
        """Set the output stages as transformers does, but keep None, which is the last stage."""
        self._out_features = self._out_indices = None
        if out_features is not None or out_indices is not None:
            super().set_output_features_output_indices(out_features, out_indices)

    @BackboneConfigMixin.out_features.getter
    def out_features(self) -> list[str]:
        return self._out_features or [f"stage{self.num_stages}" if self.num_stages else "stem"]

    @BackboneConfigMixin.out_indices.getter
    def out_indices(self) -> list[int]:
        return self._out_indices or [self.num_stages]

    @property
    def nominal_size(self) -> tuple[int, int]:
        """Return `image_size` as (height, width) in px."""
        return as_pair(self.image_size)

    @property
    def patch_stride(self) -> tuple[int, int]:
        """Return the (height, width) in px of the image area behind one token, or behind one cell of the last map."""
        return as_pair(self.patch_size)

    @property
    def pooled_size(self) -> int:
        """Return the number of channels of the pooled output, which a classifier reads."""
        return self.hidden_size

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (h, w), how many whole patches an image of height x width px has; the rest is ignored, as originally.

        Raises:
            ValueError: the image is smaller than a patch, or the family does not take its size.
        """
        stride_h, stride_w = self.patch_stride
        if height < stride_h or width < stride_w:
            raise ValueError(
                f"image {height}x{width} px is smaller than a patch of {stride_h}x{stride_w} px; resize or pad it first"
            )
        return height // stride_h, width // stride_w

    @property
    def grid(self) -> tuple[int, int]:
        """Return (h, w), how many patches the nominal image has; the position table has this size."""
        return self.grid_of(*self.nominal_size)

    def validate_stages(self) -> None:
        if self._out_features is not None or self._out_indices is not None:
            self.verify_out_features_out_indices()

    def validate_image_fits_patch(self) -> None:
        """Raise a ValueError for invalid image or patch sizes, or for an image smaller than a patch."""
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            sides = (value, value) if isinstance(value, int) else value
            refuse(
                (len(sides) != 2, f"{name}={value} has {len(sides)} numbers; give one int or (height, width) in px"),
                (any(side < 1 for side in sides), f"{name}={value} must be at least 1 px"),
            )
        try:
            self.grid_of(*self.nominal_size)
        except ValueError as error:
            raise ValueError(
                f"image_size={self.image_size} does not fit patch_size={self.patch_size}: {error}"
            ) from None

    def validate_sizes(self) -> None:
        self._check_numbers(COUNTS, lambda value: value >= 1, "must be at least 1")
        limit = f"must be at most {MAX_LAYERS}"
        self._check_numbers(("num_hidden_layers",), lambda value: value <= MAX_LAYERS, limit)

    def validate_rates(self) -> None:
        self._check_numbers(RATES, lambda value: 0 <= value < 1, "is not a probability; give 0 <= {name} < 1")
        requirement = "must be a finite number above 0"
        self._check_numbers(SCALES, lambda value: value > 0 and math.isfinite(value), requirement)

    def _check_numbers(self, names: tuple[str, ...], is_valid: Callable[[Any], bool], requirement: str) -> None:
        """Raise a ValueError for a wrong number in one of the named fields.

        Fields that the family lacks are skipped; None is left to the check of the field's type.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in names:
            if values.get(name) is not None and not is_valid(values[name]):
                raise ValueError(f"{name}={values[name]} {requirement.format(name=name)}")

    def validate_names(self) -> None:
        """Raise a ValueError for an unknown activation or problem type, or for incomplete class indices."""
        activation = self.hidden_act if "hidden_act" in [field.name for field in fields(self)] else "gelu"
        if activation not in ACT2FN:
            matches = difflib.get_close_matches(activation, list(ACT2FN), n=1)
            hint = f"did you mean '{matches[0]}'?" if matches else "use a name of transformers.activations.ACT2FN"
            raise ValueError(f"hidden_act='{activation}' is not an activation of transformers; {hint}")
        indices = list(range(len(self.id2label or {})))
        refuse(
            (
                self.problem_type not in (None, *PROBLEM_TYPES),
                f"problem_type='{self.problem_type}' is unknown; it needs one of {PROBLEM_TYPES}, or None",
            ),
            (
                sorted(self.id2label or {}) != indices,
                f"id2label has the indices {sorted(self.id2label or {})}; it needs 0 to {len(indices) - 1}, "
                "one name for each output of the head: dict(enumerate(names))",
            ),
        )

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration with the model's code and `auto_map`.

        `auto_map` keeps classes of other modules whose code is in the folder; the family's classes fill the other
        entries. Code comes from the installed package, or from where the configuration was loaded. `auto_map` leaves
        out classes whose code cannot be fetched, because they could not be loaded again.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        family = next(base for base in type(self).__mro__ if "auto_classes" in vars(base))
        has_module = self._copy_modules(folder, family)
        missing = [f"{name}.py" for name, is_saved in has_module.items() if not is_saved]
        self.auto_map = self._collect_auto_classes(folder, family, has_module)
        if missing:
            warnings.warn(
                f"{', '.join(missing)} could not be fetched from {self.name_or_path!r}, so without hf_vit installed "
                f"{save_directory} loads only with {', '.join(self.auto_map)}; to load it with the other Auto classes, "
                "save it again where hf_vit is installed",
                UserWarning,
                stacklevel=2,
            )
        super().save_pretrained(save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)

    def _collect_auto_classes(self, folder: Path, family: type, has_module: dict[str, bool]) -> dict[str, str]:
        """Return the `auto_map` to save: the family's classes, and the folder's classes from other modules.

        `family` is the config class that defines `auto_classes`, and `has_module` says for each module of it whether
        its code is in the folder.
        """
        stored_map: Any = getattr(self, "auto_map", None)
        loaded_map: dict[str, Any] = stored_map if isinstance(stored_map, dict) else {}
        custom_classes: dict[str, str] = {}
        for auto_class, target in loaded_map.items():
            code, _, class_name = str(target).partition(".")
            is_name = code.isidentifier() and class_name.isidentifier()
            if is_name and code not in has_module and (folder / f"{code}.py").is_file():
                custom_classes[auto_class] = target
        module = type(self).__module__.rpartition(".")[2]
        name = type(self).__name__
        is_registered = self._auto_class is not None and module != "__main__"
        if type(self) is not family and (is_registered or (folder / f"{module}.py").is_file()):
            custom_classes["AutoConfig"] = f"{module}.{name}"
        elif type(self) is not family:
            warnings.warn(
                f"{name} is not registered for AutoConfig, so {folder} loads as {family.__name__}; call "
                f"{name}.register_for_auto_class() before saving",
                UserWarning,
                stacklevel=3,
            )
        family_classes: dict[str, str] = {}
        was_saved = "AutoConfig" in loaded_map  # then keep only the family's entries that it had
        for auto_class, target in self.auto_classes.items():
            if has_module[target.partition(".")[0]] and (not was_saved or loaded_map.get(auto_class) == target):
                family_classes[auto_class] = target
        if custom_classes.get("AutoConfig", family.__name__).rpartition(".")[2] != family.__name__:
            family_classes = {}  # transformers refuses a model class whose config class has another name
            if not custom_classes.keys() - {"AutoConfig"}:
                warnings.warn(
                    f"{folder} has no model class for {name}, so AutoModel cannot load it where hf_vit is not "
                    f"installed; write a model class with config_class = {name}, call its register_for_auto_class() "
                    "and save again",
                    UserWarning,
                    stacklevel=3,
                )
        return family_classes | custom_classes

    def _copy_modules(self, folder: Path, family: type) -> dict[str, bool]:
        """Copy the code of the family's classes and of the sibling modules it imports.

        Returns:
            For each of these modules, whether the folder now has its code.
        """
        has_module: dict[str, bool] = {}
        queue = [target.partition(".")[0] for target in self.auto_classes.values()]
        while queue:
            if (name := queue.pop()) not in has_module:
                has_module[name] = self._copy_code(f"{name}.py", folder, family)
                code = (folder / f"{name}.py").read_text(encoding="utf-8") if has_module[name] else ""
                queue += re.findall(r"^from \.(\w+) import", code, flags=re.MULTILINE)
        return has_module

    def _copy_code(self, name: str, folder: Path, family: type) -> bool:
        """Copy one file of code into the folder; return whether the folder now has it.

        The file comes from beside the family's class, or from where the config was loaded.
        """
        code_folder = Path(str(sys.modules[family.__module__].__file__)).parent
        source = code_folder / name
        if not source.is_file():
            # transformers caches code from the Hub in a folder named after its commit; stay at that commit.
            revision = code_folder.name if re.fullmatch("[0-9a-f]{40}", code_folder.name) else None
            checkpoint = str(self.name_or_path)
            try:
                is_on_hub = not os.path.isdir(checkpoint)
                source = Path(
                    hf_hub_download(checkpoint, name, revision=revision) if is_on_hub else f"{checkpoint}/{name}"
                )
            except (OSError, ValueError):  # offline, or not a repository's name
                pass
        if not source.is_file():
            return (folder / name).is_file()  # transformers copies the file of the model's class and its imports
        if source.resolve() != (folder / name).resolve():
            shutil.copyfile(source, folder / name)
        return True


@strict
class HfViTBaseConfig(HfBaseConfig):
    """Abstract: the fields that all Vision Transformers of the package have; `HfViTConfig` documents them."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float | int = 1e-6
    qkv_bias: bool = True
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    drop_path_rate: float | int = 0.0
    initializer_range: float = 0.02
    position_embedding: PositionEmbedding = "learned"
    position_on_class_token: bool | Literal["with_registers"] = True
    position_interpolation: PositionInterpolation = "bilinear_corners"
    position_interpolation_offset: float | int = 0.0
    pooling: Pooling = "token"
    use_class_token: bool | None = None
    representation_size: int | None = None
    layer_scale_init_value: float | int | None = None
    num_hidden_groups: int | None = None
    is_causal: bool = False
    use_distillation_token: bool = False
    use_distillation_head: bool | None = None
    num_register_tokens: int = 0
    norm_before_layers: bool = False
    norm_after_pooling: bool | None = False
    mlp_type: Literal["dense", "swiglu"] = "dense"
    norm_type: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_on_patches: bool = False
    norm_after_branches: bool = False
    norm_in_attention: bool = False
    norm_in_mlp: bool = False
    use_qk_norm: bool = False
    key_bias: bool = True
    projection_bias: bool = True
    mlp_bias: bool = True
    pooling_num_heads: int | None = None
    pooling_intermediate_size: int | None = None
    rotary_embedding: Literal["axial", "mixed"] | None = None
    rotary_base: float | int = 100.0
    rotary_periods: tuple[float, ...] | list[float] | None = None
    rotary_coordinates: Literal["index", "centered"] = "index"
    rotary_offset: float | int = 0
    rotary_reference_grid: int | tuple[int, int] | list[int] | None = None
    rotary_axis_order: Literal["row_column", "column_row"] = "row_column"
    rotary_pairing: Literal["halves", "interleaved"] = "interleaved"
    rotary_register_base: float | int | None = None
    rotary_shift: float | int | None = None
    rotary_jitter: float | int | None = None
    rotary_rescale: float | int | None = None
    reshape_hidden_states: bool = True
    apply_layernorm: bool = True
    use_feature_pyramid: bool = False
    fpn_hidden_size: int = 256
    pyramid_strides: tuple[int, ...] | list[int] = PYRAMID_STRIDES
    prediction_target: Literal["mean_color", "downsampled", "pixels"] = "mean_color"
    predict_next_patch: bool = False
    image_mean: float | int | tuple[float, ...] | list[float] = 0.5
    image_std: float | int | tuple[float, ...] | list[float] = 0.5

    # Outputs that transformers' Trainer leaves out of predictions, so that these are the logits alone.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cls_logits", "distillation_logits"]

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """Return how tensor parallelism splits the dense layers of the blocks, as transformers' plan.

        Layers before a norm over all their channels are not split.
        """
        mlp_layers = {"dense": (("fc1",), "fc2"), "swiglu": (("gate_proj", "up_proj"), "down_proj")}
        parts = {"attention": (("q_proj", "k_proj", "v_proj"), "o_proj"), "mlp": mlp_layers[self.mlp_type]}
        if self.norm_in_attention:
            del parts["attention"]
        if self.norm_in_mlp:
            del parts["mlp"]
        plan = dict[str, str]()
        for part, (inner_names, last_name) in parts.items():
            plan |= {f"layers.*.{part}.{name}": "colwise" for name in inner_names}
            plan[f"layers.*.{part}.{last_name}"] = "rowwise"
        # All heads share these, but each process has only some of the heads.
        shared = ["relative_position"] if self.position_embedding == "relative" else []
        shared += ["q_layernorm", "k_layernorm"] if self.use_qk_norm else []
        if "attention" in parts:
            plan |= {f"layers.*.attention.{name}": "replicated_with_grad_allreduce" for name in shared}
        return plan

    @property
    def has_class_token(self) -> bool:
        """Return `use_class_token`, or where it is None whether pooling reads a class token."""
        return self.pooling.startswith("token") if self.use_class_token is None else self.use_class_token

    @property
    def pooled_size(self) -> int:
        """Return the number of channels of the pooled output, which a classifier reads."""
        return self.representation_size or self.hidden_size * (2 if self.pooling == "token_and_gap" else 1)

    @property
    def has_distillation_head(self) -> bool:
        """Return whether the classifier has a second head, on the distillation token."""
        return self.use_distillation_token if self.use_distillation_head is None else self.use_distillation_head

    @property
    def num_special_tokens(self) -> int:
        """Return the number of class, distillation and register tokens; they precede the patches (follow if
        `is_causal`).
        """
        return int(self.has_class_token) + int(self.use_distillation_token) + self.num_register_tokens

    @property
    def num_special_positions(self) -> int:
        """Return how many special tokens, counted from the first, have a position (see `position_on_class_token`)."""
        if not self.position_on_class_token:
            return 0
        registers_without_position = 0 if self.position_on_class_token == "with_registers" else self.num_register_tokens
        return self.num_special_tokens - registers_without_position

    def validate_sizes(self) -> None:
        """Raise a ValueError for sizes, counts and scales out of their range."""
        super().validate_sizes()
        width, layers, groups = self.hidden_size, self.num_hidden_layers, self.num_hidden_groups
        heads = {"num_attention_heads": self.num_attention_heads, "pooling_num_heads": self.pooling_num_heads or 1}
        scale, registers = self.layer_scale_init_value, self.num_register_tokens
        refuse(
            (registers < 0, f"num_register_tokens={registers} must be at least 0 (0: none)"),
            *(
                (
                    width % count,
                    f"hidden_size={width} is not divisible by {name}={count}; "
                    "choose a number of heads that divides the hidden size",
                )
                for name, count in heads.items()
            ),
            (
                groups is not None and groups > layers,
                f"num_hidden_groups={groups} exceeds num_hidden_layers={layers}; use at most one group per layer",
            ),
            (
                scale is not None and not 0 <= scale < math.inf,
                f"layer_scale_init_value={scale} must be a finite number of at least 0, or None for none",
            ),
        )

    def validate_combinations(self) -> None:
        """Raise a ValueError for special tokens, pooling and norms that exclude each other."""
        pooling = self.pooling
        registers = self.num_register_tokens
        shares_one_block = self.num_hidden_groups == 1 and self.num_hidden_layers > 1
        refuse(
            (
                pooling.startswith("token") and self.use_class_token is False,
                f"pooling='{pooling}' reads the class token, but use_class_token=False; use pooling='gap'",
            ),
            (
                pooling == "token_and_gap" and (self.norm_after_pooling or self.representation_size is not None),
                "pooling='token_and_gap' cannot be combined with norm_after_pooling=True or representation_size, which "
                "need a pooled output of hidden_size channels; leave them out",
            ),
            (
                self.use_distillation_token and pooling != "token",
                f"use_distillation_token=True needs a class token; use pooling='token' instead of '{pooling}'",
            ),
            (
                self.use_distillation_head and not self.use_distillation_token,
                "use_distillation_head=True reads the distillation token; set use_distillation_token=True",
            ),
            (
                self.is_causal and self.has_class_token and pooling in ("gap", "first_patch"),
                f"use_class_token=True has no effect with is_causal=True and pooling='{pooling}': the class token "
                "comes last, where no patch attends to it; use pooling='token' or leave the class token out",
            ),
            (
                registers and self.is_causal,
                f"num_register_tokens={registers} has no effect with is_causal=True: registers come last, where no "
                "patch attends to them; use num_register_tokens=0",
            ),
            (
                registers and pooling == "map" and self.has_class_token,
                f"num_register_tokens={registers} cannot be combined with pooling='map' and use_class_token=True, as "
                "the pooling can only skip registers that come first; set use_class_token=False or "
                "pooling='map_with_registers'",
            ),
            (
                self.norm_after_pooling and (self.representation_size is not None or self.has_distillation_head),
                "norm_after_pooling=True cannot be combined with representation_size or a distillation head; set "
                "representation_size=None and use_distillation_head=False, or use norm_after_pooling=False",
            ),
            (
                self.drop_path_rate and shares_one_block,
                f"drop_path_rate={self.drop_path_rate} has no effect with num_hidden_groups=1, as the first group's "
                "rate is always 0; use drop_path_rate=0 or more groups",
            ),
        )

    def validate_positions(self) -> None:
        """Raise a ValueError for position embeddings that attention, resampling or the hidden size do not fit."""
        positions = self.position_embedding
        # Parts of the hidden size: one for each axis, and in sincos_2d one for its sines and one for its cosines.
        num_parts = {"learned_2d": 2, "sincos_1d": 2, "sincos_2d": 4, "sincos_2d_mae": 4}.get(positions, 1)
        refuse(
            (
                self.is_causal and positions.startswith("relative"),
                f"is_causal=True cannot be combined with position_embedding='{positions}'; use 'learned'",
            ),
            (
                self.position_interpolation_offset and not self.position_interpolation.startswith("bicubic"),
                f"position_interpolation_offset={self.position_interpolation_offset} has no effect with "
                f"position_interpolation='{self.position_interpolation}'; use 'bicubic' or leave the offset out",
            ),
            (
                positions.startswith(("learned_2d", "relative")) and self.position_interpolation.endswith("_square"),
                f"position_interpolation='{self.position_interpolation}' needs one table for rows and columns; use it "
                "with position_embedding='learned'",
            ),
            (
                self.hidden_size % num_parts,
                f"position_embedding='{positions}' splits hidden_size={self.hidden_size} into {num_parts} parts; "
                f"choose a hidden size divisible by {num_parts}",
            ),
            (
                positions in ("sincos_1d", "sincos_2d") and self.hidden_size <= num_parts,
                f"position_embedding='{positions}' needs at least two frequencies; use a hidden_size above {num_parts} "
                f"instead of {self.hidden_size}",
            ),
        )

    @property
    def num_rotary_axes(self) -> int:
        """Return the number of grid axes that share the channels of a head in rotary positions."""
        return 2

    def validate_rotary(self) -> None:
        """Raise a ValueError for rotary positions that heads, registers or other positions do not fit."""
        if self.rotary_embedding is None:
            rotary_fields = [field for field in fields(self) if field.name.startswith("rotary_")]
            names = ", ".join(field.name for field in rotary_fields if getattr(self, field.name) != field.default)
            refuse((names, f"{names} has no effect without rotary_embedding; set rotary_embedding='axial'"))
            return
        size = self.hidden_size // max(self.num_attention_heads, 1)
        num_periods = size // (2 * self.num_rotary_axes)
        registers = self.num_register_tokens
        periods = self.rotary_periods
        shift, jitter, rescale = self.rotary_shift, self.rotary_jitter, self.rotary_rescale
        moves = [value for value in (shift, jitter, rescale) if value is not None]
        factors = [value for value in (jitter, rescale) if value is not None]
        is_centered = self.rotary_coordinates == "centered"
        reference = self.rotary_reference_grid
        refuse(
            (
                size % (2 * self.num_rotary_axes),
                f"rotary_embedding='{self.rotary_embedding}' needs heads whose size is a multiple of "
                f"{2 * self.num_rotary_axes}, but hidden_size / num_attention_heads is {size}; change one of them",
            ),
            (
                self.position_embedding.startswith("relative"),
                f"rotary_embedding cannot be combined with position_embedding='{self.position_embedding}'; use "
                "position_embedding='learned' or 'none'",
            ),
            (
                periods is not None and (len(periods) != num_periods or not all(0 < p < math.inf for p in periods)),
                f"rotary_periods={periods} must be {num_periods} finite numbers above 0, one for each pair of channels "
                "and axis",
            ),
            (
                self.rotary_embedding == "mixed" and (periods or is_centered or self.rotary_register_base),
                "rotary_embedding='mixed' learns its frequencies for the patches' indices; leave out rotary_periods, "
                "rotary_register_base and rotary_coordinates='centered'",
            ),
            (
                is_centered and (self.rotary_offset or reference is not None),
                "rotary_offset and rotary_reference_grid have no effect with rotary_coordinates='centered', which has "
                "a fixed scale; leave them out",
            ),
            (
                reference is not None and min(as_pair(reference)) < 1,
                f"rotary_reference_grid={reference} must be at least 1 patch on each side",
            ),
            (
                self.rotary_register_base is not None and (not registers or math.isqrt(registers) ** 2 != registers),
                f"rotary_register_base needs registers that fill a square grid (1, 4, 9, ...), but "
                f"num_register_tokens={registers}; change one of them",
            ),
            (
                moves and not is_centered,
                "rotary_shift, rotary_jitter and rotary_rescale need rotary_coordinates='centered'; set it, or "
                "leave them out",
            ),
            (
                not all(0 <= value < math.inf for value in moves) or any(factor < 1 for factor in factors),
                f"rotary_shift={shift} must be at least 0, rotary_jitter={jitter} and rotary_rescale={rescale} at "
                "least 1, or None for none",
            ),
        )

    def validate_prediction(self) -> None:
        """Raise a ValueError for invalid settings of patch prediction: causality, mean and deviation of the pixels."""
        next_patch = "predict_next_patch=True needs is_causal=True, so that no patch attends to the next one; set both"
        refuse((self.predict_next_patch and not self.is_causal, next_patch))
        for name, least in (("image_mean", -math.inf), ("image_std", 0)):
            value = getattr(self, name)
            values = value if isinstance(value, tuple | list) else [value]
            refuse(
                (
                    len(values) not in (1, self.num_channels) or not all(map(math.isfinite, values)),
                    f"{name}={value} must be one finite number, or one for each of the {self.num_channels} channels",
                ),
                (min(values, default=1) <= least, f"{name}={value} must be above 0, as pixel values are divided by it"),
            )

    def validate_feature_pyramid(self) -> None:
        """Raise a ValueError for invalid strides, or for a patch or an output that the pyramid cannot be built from."""
        strides = tuple(stride for stride in PYRAMID_STRIDES if stride in self.pyramid_strides)
        if not strides or strides != tuple(self.pyramid_strides):
            raise ValueError(
                f"pyramid_strides={self.pyramid_strides} must be some of {PYRAMID_STRIDES} px, the smallest first; for "
                f"example {PYRAMID_STRIDES[:2]}"
            )
        if not self.use_feature_pyramid:  # do not list the stages, of which a crafted config may have too many
            return
        height, width = self.patch_stride
        refuse(
            (
                height != width or height & (height - 1),
                f"use_feature_pyramid=True needs a square patch whose side is a power of two; got {height}x{width} px. "
                "Load the model with patch_size=16, which resamples its patch kernel, and save it first",
            ),
            (
                not self.reshape_hidden_states or len(self.out_features or ()) != 1,
                f"use_feature_pyramid=True needs one stage in out_features and reshape_hidden_states=True; got "
                f"out_features={self.out_features} and reshape_hidden_states={self.reshape_hidden_states}",
            ),
        )


@strict
class HfViTConfig(HfViTBaseConfig):
    """Configuration of `HfViTModel` and its heads; the default is ViT-B/16 at 224 px (arXiv 2010.11929, table 1).

    Args:
        image_size: nominal image in px, int or (height, width); the size of the position table. Other sizes work too.
        patch_size: px, int or (height, width).
        num_channels, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: as in transformers' ViT.
        hidden_act: activation of the MLPs; default: the original code's tanh GELU. Converted checkpoints set their own.
        layer_norm_eps: 1e-6 is the original code's value.
        qkv_bias: whether query, key and value projections have a bias.
        hidden_dropout_prob: dropout after the position embedding and every dense layer of blocks but q, k, v (table 3).
        attention_probs_dropout_prob: dropout on the attention probabilities.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 with depth.
        initializer_range: standard deviation of the learned position tables.
        position_embedding: "learned", "learned_2d" (two tables of D/2), "sincos_2d", "sincos_1d",
            "sincos_2d_mae" (its frequencies end before 1/10000; arXiv 2111.06377), "relative"
            (offsets as keys; appendix D.4), "relative_bias" (one value for each offset and head; arXiv 2103.14030) or
            "none".
        position_on_class_token: True: the class token has a row in the position table. False: it has none (big_vision).
            "with_registers": the registers have rows too (timm).
        position_interpolation: how a learned table is resampled to another grid. "bilinear_corners" is the original
            code's method, "bicubic" that of transformers' ViT, CLIP and DINOv2, "bicubic_antialias" that of timm and of
            DINOv2 with registers. "flexivit" (arXiv 2212.08013) is bilinear with antialiasing, without aligned corners,
            as in FlexiViT and SigLIP 2; it also fits patch kernels to a resize without antialiasing. "_square": the
            table is resampled to a square of the longer side and cut off, which keeps its aspect ratio (timm).
        position_interpolation_offset: number added to both sides of the new grid to compute the scale of the bicubic
            methods; 0.1 in DINO, and in DINOv2 without registers.
        pooling: "token" (class token), "gap" (mean of the patch tokens), "token_and_gap" (both, one after the other, as
            DINOv2's linear classifiers), "map" (attention pooling of all tokens but registers), "map_with_registers"
            (of all tokens) or "first_patch" (big_vision's pool_type "0").
        use_class_token: None means that there is one if `pooling` begins with "token".
        representation_size: width of the tanh layer before the head (`pre_logits`), or None.
        layer_scale_init_value: initial LayerScale (CaiT, arXiv 2103.17239), or None for no LayerScale.
        num_hidden_groups: number of groups of layers that share weights (ALBERT); None: no layers share weights.
        is_causal: whether attention is causal in raster order, as in GPT; the special tokens then come last.
        use_distillation_token: whether to add DeiT's distillation token (arXiv 2012.12877).
        use_distillation_head: whether a classifier has a second head on the distillation token and returns the mean of
            both; None: if there is such a token. False: the token only takes part in attention.
        num_register_tokens: learned tokens between the class token and the patches (arXiv 2309.16588). By default they
            have no position and pooling does not read them.
        norm_before_layers: whether a LayerNorm follows the embeddings and the patch projection has no bias, as in CLIP.
        norm_after_pooling: True: the last LayerNorm normalizes the pooled output, and `last_hidden_state` is the last
            block's output; models without pooling normalize the tokens. False: it normalizes the tokens. None: there is
            no last LayerNorm.
        mlp_type: "dense": two layers with `hidden_act` between; "swiglu" (arXiv 2002.05202): a SiLU gate and values,
            both `intermediate_size` wide.
        norm_type: kind of all norms: "layernorm" or "rmsnorm" (arXiv 1910.07467).
        norm_on_patches: whether to normalize patches before positions are added (AIMv2).
        norm_after_branches: whether the norms of a block follow attention and MLP, before the residual is added,
            instead of preceding them (EVA-02-CLIP-E).
        norm_in_attention, norm_in_mlp: whether a norm precedes the last layer of attention, or of the MLP (EVA-02).
        use_qk_norm: whether to normalize queries and keys over the channels of each head.
        key_bias: whether the key projection has a bias too if `qkv_bias` is True; False in EVA and DINOv3.
        projection_bias, mlp_bias: whether the output projection of attention, or the layers of the MLP, have biases.
        pooling_num_heads, pooling_intermediate_size: sizes of attention pooling; None: those of the blocks.
        rotary_embedding: rotary positions (arXiv 2104.09864), in addition to `position_embedding`. "axial": the row
            rotates half of a head's channels, the column the other half; "mixed": both rotate all channels, with
            frequencies learned for each layer and head (arXiv 2403.13298). None: no rotary positions. Angles are
            computed in float32 (float64 in a float64 model), whatever the model's dtype.
        rotary_base: periods are the powers rotary_base**(i / n), i < n; "mixed" is initialized with them.
        rotary_periods: the periods themselves, a quarter of a head's channels; they replace those of `rotary_base`.
        rotary_coordinates: "index": rows and columns counted from 0; "centered": patch centers in [-1, 1] for every
            grid, times 2 pi (DINOv3).
        rotary_offset: number added to the index, 1 in Perception Encoder with a class token.
        rotary_reference_grid: patches per side, int or (h, w), that the index of every grid is scaled to (EVA-02);
            None: no scaling.
        rotary_axis_order: the axis of the first half of a head's channels, or of the first learned frequencies.
        rotary_pairing: channels that rotate together: "interleaved" (0 and 1, 2 and 3, ...) or "halves" (each of the
            first half with its counterpart in the second).
        rotary_register_base: base of a rotation of the registers, which form a square grid of their own (ViT-5); None:
            special tokens are not rotated.
        rotary_shift, rotary_jitter, rotary_rescale: augmentation of centered coordinates in training (DINOv3): a shift
            of up to +-rotary_shift and a factor between 1 / rotary_jitter and rotary_jitter for each axis, and a common
            factor between 1 / rotary_rescale and rotary_rescale; None: none.
        reshape_hidden_states, apply_layernorm, use_feature_pyramid, fpn_hidden_size, pyramid_strides: see
            `HfViTBackbone`.
        prediction_target: "mean_color", "downsampled" or "pixels" (B.1.2); see `HfViTForMaskedPatchPrediction`.
        predict_next_patch: whether its head predicts from each patch the next one in raster order; needs `is_causal`.
        image_mean, image_std: normalization of the image processor, one number or one per channel; patch prediction
            reads the colors back from `pixel_values` with them.

    Raises:
        huggingface_hub.errors.StrictDataclassError: a value has a wrong type or cannot be combined with another; the
            message names field, value and remedy.
    """

    model_type = "hf_vit"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_hf_vit.HfViTConfig",
        "AutoModel": "modeling_hf_vit.HfViTModel",
        "AutoModelForImageClassification": "modeling_hf_vit.HfViTForImageClassification",
        "AutoModelForMaskedImageModeling": "pretraining_hf_vit.HfViTForMaskedPatchPrediction",
        "AutoBackbone": "backbone_hf_vit.HfViTBackbone",
    }

    patch_size: int | tuple[int, int] | list[int] = 16


def _check_labels(num_labels: object, id2label: object) -> None:
    """Check `num_labels` and `id2label` before transformers derives one from the other."""
    if num_labels is not None and (
        isinstance(num_labels, bool) or not isinstance(num_labels, Integral) or num_labels < 0
    ):
        raise ValueError(f"num_labels={num_labels!r} must be an integer of at least 0 (0: no head)")
    if id2label is not None and not isinstance(id2label, dict):
        raise ValueError(f"id2label={id2label!r} must be a dict from index to name; give dict(enumerate(names))")
