"""Configurations: what every one inherits, the fields that all Vision Transformers share, and the plain one's.

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
# `encoder_stride` is of transformers' ViT, which reconstructs images with it.
FOREIGN_KEYS = (
    *("auto_map", "attn_implementation", "torch_dtype", "quantization_config", "encoder_stride"),
    *("tie_word_embeddings", "is_encoder_decoder", "is_decoder", "add_cross_attention"),
)
SEQUENCES = ("image_size", "patch_size", "image_mean", "image_std", "pyramid_strides", "stage_depths", "stem_stages")
PYRAMID_STRIDES = (4, 8, 16, 32)  # px of the image behind one place of a map
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")

# Fields that are checked alike in all families.
COUNTS = (
    *("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("token_intermediate_size", "fpn_hidden_size", "representation_size", "num_hidden_groups"),
    "attention_stride",
)
RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
SCALES = ("layer_norm_eps", "initializer_range")
MAX_LAYERS = 10_000  # what a crafted config may ask for before anything is built

PositionEmbedding = Literal["learned", "learned_2d", "sincos_2d", "sincos_1d", "relative", "relative_bias", "none"]
Pooling = Literal["token", "gap", "map", "map_with_registers", "first_patch"]


def as_pair(value: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """Read a side length that may be one int or (height, width)."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def refuse(*rules: tuple[object, str]) -> None:
    """Raise a ValueError with the message of the first rule that applies; a rule is (whether it applies, message)."""
    for applies, message in rules:
        if applies:
            raise ValueError(message)


class HfBaseConfig(BackboneConfigMixin, PreTrainedConfig):
    """Abstract: a configuration is saved with the code that its models run, so that they load without the package.

    Config fields of a backbone:
        out_features, out_indices: which of "stem", "stage1", ... it gives; by default the last.

    Class attributes:
        auto_classes: the class for each Auto class, "module.Class": all that load from one saved folder. Their modules
            are saved, and the siblings that these import.
    """

    auto_classes: ClassVar[dict[str, str]]

    image_size: int | tuple[int, int] | list[int] = 224
    num_channels: int = 3
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, value in list(vars(self).items()):
            if isinstance(value, list) and name in SEQUENCES:
                setattr(self, name, tuple(value))
        self.take_stages(kwargs)
        super().__post_init__(**kwargs)

    def take_stages(self, given: dict[str, Any]) -> None:
        """Read `out_features` and `out_indices` of a backbone out of what a configuration was given."""
        given.pop("stage_names", None)  # of a file: they follow from the number of stages
        self.set_output_features_output_indices(given.pop("out_features", None), given.pop("out_indices", None))

    @property
    def num_stages(self) -> int:
        """Stages of a backbone after its stem."""
        return self.num_hidden_layers

    @property
    def stage_names(self) -> list[str]:
        return ["stem", *(f"stage{index}" for index in range(1, self.num_stages + 1))]

    def set_output_features_output_indices(self, out_features: list[str] | None, out_indices: Any) -> None:
        """Set the output stages as transformers does, but keep None, which is the last stage."""
        self._out_features = self._out_indices = None
        if out_features is not None or out_indices is not None:
            super().set_output_features_output_indices(out_features, out_indices)

    @property
    def out_features(self) -> list[str]:
        return self._out_features or [f"stage{self.num_stages}" if self.num_stages else "stem"]

    @out_features.setter
    def out_features(self, out_features: list[str] | None) -> None:
        self.set_output_features_output_indices(out_features, None)

    @property
    def out_indices(self) -> list[int]:
        return self._out_indices or [self.num_stages]

    @out_indices.setter
    def out_indices(self, out_indices: tuple[int, ...] | list[int] | None) -> None:
        self.set_output_features_output_indices(None, out_indices)

    @property
    def nominal_size(self) -> tuple[int, int]:
        """(height, width) of the nominal image in px."""
        return as_pair(self.image_size)

    @property
    def patch_stride(self) -> tuple[int, int]:
        """(height, width) in px of the image area behind one token, or one place of the last map."""
        return as_pair(self.patch_size)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """(h, w): the patches of an image of height x width px; what makes no whole patch is left out, as originally.

        Raises:
            ValueError: the image is smaller than a patch, or another than the family takes.
        """
        stride_h, stride_w = self.patch_stride
        if height < stride_h or width < stride_w:
            raise ValueError(
                f"image {height}x{width} px is smaller than a patch of {stride_h}x{stride_w} px; resize or pad it first"
            )
        return height // stride_h, width // stride_w

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w): patches of the nominal image, the size of the position table."""
        return self.grid_of(*self.nominal_size)

    def validate_stages(self) -> None:
        if self._out_features is not None or self._out_indices is not None:
            self.verify_out_features_out_indices()

    def validate_image_fits_patch(self) -> None:
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            sides = (value, value) if isinstance(value, int) else value
            refuse(
                (len(sides) != 2, f"{name}={value} has {len(sides)} numbers; give one int or (height, width) in px"),
                (any(side < 1 for side in sides), f"{name}={value} must be at least 1 px"),
            )
        try:
            self.grid_of(*self.nominal_size)
        except ValueError as misfit:
            raise ValueError(
                f"image_size={self.image_size} does not fit patch_size={self.patch_size}: {misfit}"
            ) from None

    def validate_sizes(self) -> None:
        self._check_numbers(COUNTS, lambda value: value >= 1, "must be at least 1")
        most = f"is more than {MAX_LAYERS}, the most there can be"
        self._check_numbers(("num_hidden_layers",), lambda value: value <= MAX_LAYERS, most)

    def validate_rates(self) -> None:
        self._check_numbers(RATES, lambda value: 0 <= value < 1, "is not a probability; it needs 0 <= {name} < 1")
        scale = "must be a finite number above 0"
        self._check_numbers(SCALES, lambda value: value > 0 and math.isfinite(value), scale)

    def _check_numbers(self, names: tuple[str, ...], is_right: Callable[[Any], bool], need: str) -> None:
        """Refuse a wrong number, of those fields that the family has; None is left to the field's type."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in names:
            if given.get(name) is not None and not is_right(given[name]):
                raise ValueError(f"{name}={given[name]} {need.format(name=name)}")

    def validate_names(self) -> None:
        act = self.hidden_act if "hidden_act" in [field.name for field in fields(self)] else "gelu"
        if act not in ACT2FN:
            nearest = difflib.get_close_matches(act, list(ACT2FN), n=1)
            hint = f"did you mean '{nearest[0]}'?" if nearest else "use a name of transformers.activations.ACT2FN"
            raise ValueError(f"hidden_act='{act}' is not an activation of transformers; {hint}")

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration with the model's code and `auto_map`.

        Classes of another module that `auto_map` names stay in it where their code stands in the folder; the family's
        fill in the others. A model that was loaded without the package brought along what its own class needs; the
        siblings are fetched from where it came. Where that is gone, `auto_map` leaves out the classes that could not
        be loaded again.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        family = next(base for base in type(self).__mro__ if "auto_classes" in vars(base))
        modules = self._copy_modules(folder, family)
        missing = [name for name, is_there in modules.items() if not is_there]
        self.auto_map = self._classes_in(folder, family, modules)
        if missing:
            warnings.warn(
                f"{', '.join(f'{name}.py' for name in missing)} could not be fetched from {self.name_or_path!r}; "
                f"{save_directory} loads without the package by {', '.join(self.auto_map)} alone",
                UserWarning,
                stacklevel=2,
            )
        super().save_pretrained(save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)

    def _classes_in(self, folder: Path, family: type, modules: dict[str, bool]) -> dict[str, str]:
        """Return the `auto_map` of a folder: its own classes, and those of the family that load beside them."""
        given: Any = getattr(self, "auto_map", None)
        given = given if isinstance(given, dict) else {}
        own = {auto_class: target for auto_class, target in given.items() if self._is_own(target, folder, modules)}
        module, name = type(self).__module__.rpartition(".")[2], type(self).__name__
        is_registered = self._auto_class is not None and module != "__main__"
        if type(self) is not family and (is_registered or (folder / f"{module}.py").is_file()):
            own["AutoConfig"] = f"{module}.{name}"
        elif type(self) is not family:
            warnings.warn(
                f"{name} is not registered, so {folder} loads with {family.__name__} in its place; call "
                f"{name}.register_for_auto_class() before saving",
                UserWarning,
                stacklevel=3,
            )
        ours = {key: target for key, target in self.auto_classes.items() if modules[target.partition(".")[0]]}
        if "AutoConfig" in given:  # a place that is not ours there, or empty, was left to another class
            ours = {auto_class: target for auto_class, target in ours.items() if given.get(auto_class) == target}
        if own.get("AutoConfig", family.__name__).rpartition(".")[2] != family.__name__:
            ours = {}  # transformers refuses models of a configuration of another name
            if not own.keys() - {"AutoConfig"}:
                warnings.warn(
                    f"{folder} has no model class for {name}, so AutoModel cannot load it where hf_vit is not "
                    f"installed; write a model class with config_class = {name}, call its register_for_auto_class() "
                    "and save again",
                    UserWarning,
                    stacklevel=3,
                )
        return ours | own

    def _is_own(self, target: object, folder: Path, modules: dict[str, bool]) -> bool:
        """Return whether `auto_map` names a class whose code is no part of the family and stands in the folder."""
        module, _, name = str(target).partition(".")
        is_name = module.isidentifier() and name.isidentifier()
        return is_name and module not in modules and (folder / f"{module}.py").is_file()

    def _copy_modules(self, folder: Path, family: type) -> dict[str, bool]:
        """Copy the code of the family's classes and the siblings it imports; return which modules stand there now."""
        modules: dict[str, bool] = {}
        waiting = [target.partition(".")[0] for target in self.auto_classes.values()]
        while waiting:
            if (name := waiting.pop()) not in modules:
                modules[name] = self._copy_code(f"{name}.py", folder, family)
                code = (folder / f"{name}.py").read_text(encoding="utf-8") if modules[name] else ""
                waiting += re.findall(r"^from \.(\w+) import", code, flags=re.MULTILINE)
        return modules

    def _copy_code(self, name: str, folder: Path, family: type) -> bool:
        """Return whether the file now stands in the folder: from beside the family's class, or where the config
        came from.
        """
        here = Path(str(sys.modules[family.__module__].__file__)).parent
        source = here / name
        if not source.is_file():
            # Code of the Hub is kept under its commit, which is the one to go on with.
            revision = here.name if re.fullmatch("[0-9a-f]{40}", here.name) else None
            origin = str(self.name_or_path)
            try:
                at_hub = not os.path.isdir(origin)
                source = Path(hf_hub_download(origin, name, revision=revision) if at_hub else f"{origin}/{name}")
            except (OSError, ValueError):  # not to be had, or the name of no repository
                pass
        if not source.is_file():
            return (folder / name).is_file()  # transformers copied what the model's own class imports
        if source.resolve() != (folder / name).resolve():
            shutil.copyfile(source, folder / name)
        return True


@strict
class HfViTBaseConfig(HfBaseConfig):
    """Abstract: the fields that every family of the package has (one legend: px are pixels of the input image)."""

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
    position_interpolation: Literal["bilinear_corners", "bicubic", "bicubic_antialias", "flexivit"] = "bilinear_corners"
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
    reshape_hidden_states: bool = True
    apply_layernorm: bool = True
    use_feature_pyramid: bool = False
    fpn_hidden_size: int = 256
    pyramid_strides: tuple[int, ...] | list[int] = PYRAMID_STRIDES
    prediction_target: Literal["mean_color", "downsampled", "pixels"] = "mean_color"
    predict_next_patch: bool = False
    image_mean: float | int | tuple[float, ...] | list[float] = 0.5
    image_std: float | int | tuple[float, ...] | list[float] = 0.5

    def __post_init__(self, **kwargs: Any) -> None:
        self._warn_about_misspelt(kwargs)
        _check_labels(kwargs.get("num_labels"), self.id2label)
        super().__post_init__(**kwargs)

    def _warn_about_misspelt(self, unknown: dict[str, Any]) -> None:
        """Unknown keys are kept, as newer versions may write them; one that looks like a field's name is told."""
        known = [field.name for field in fields(self) if not field.name.startswith("_")]
        for key in unknown:
            words = set(key.split("_"))
            nearest = [name for name in known if words <= set(name.split("_"))]
            nearest = nearest or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
            if nearest and key not in FOREIGN_KEYS and not key.startswith("_") and not hasattr(type(self), key):
                warnings.warn(
                    f"{type(self).__name__} has no field '{key}' (value {unknown[key]!r}), so it changes nothing; "
                    f"did you mean '{nearest[0]}'?",
                    UserWarning,
                    stacklevel=5,
                )

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How processes share the dense layers of the blocks (tensor parallelism)."""
        of_mlp = {"dense": (("fc1",), "fc2"), "swiglu": (("gate_proj", "up_proj"), "down_proj")}
        inner, last = of_mlp[self.mlp_type]
        plan = {f"layers.*.attention.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")}
        plan |= {"layers.*.attention.o_proj": "rowwise"}
        return plan | {f"layers.*.mlp.{name}": "colwise" for name in inner} | {f"layers.*.mlp.{last}": "rowwise"}

    @property
    def has_class_token(self) -> bool:
        return self.pooling == "token" if self.use_class_token is None else self.use_class_token

    @property
    def has_distillation_head(self) -> bool:
        """Whether a classifier has a second head, on the distillation token."""
        return self.use_distillation_token if self.use_distillation_head is None else self.use_distillation_head

    @property
    def num_special_tokens(self) -> int:
        """Class, distillation and register tokens; they stand before the patches (after them when `is_causal`)."""
        return int(self.has_class_token) + int(self.use_distillation_token) + self.num_register_tokens

    @property
    def num_special_positions(self) -> int:
        """Special tokens that get a position, of the first: see `position_on_class_token`."""
        if not self.position_on_class_token:
            return 0
        without = 0 if self.position_on_class_token == "with_registers" else self.num_register_tokens
        return self.num_special_tokens - without

    def validate_sizes(self) -> None:
        super().validate_sizes()
        width, heads, layers, groups = (
            *(self.hidden_size, self.num_attention_heads, self.num_hidden_layers),
            self.num_hidden_groups,
        )
        scale, registers = self.layer_scale_init_value, self.num_register_tokens
        refuse(
            (registers < 0, f"num_register_tokens={registers} must be at least 0 (0: none)"),
            (
                width % heads,
                f"hidden_size={width} is not divisible by num_attention_heads={heads}; "
                "choose a number of heads that divides the hidden size",
            ),
            (
                groups is not None and groups > layers,
                f"num_hidden_groups={groups} exceeds num_hidden_layers={layers}; a group holds at least one layer",
            ),
            (
                scale is not None and not 0 <= scale < math.inf,
                f"layer_scale_init_value={scale} must be a finite number of at least 0, or None for none",
            ),
        )

    def validate_names(self) -> None:
        super().validate_names()
        indices = list(range(len(self.id2label or {})))
        refuse(
            (
                self.problem_type not in (None, *PROBLEM_TYPES),
                f"problem_type='{self.problem_type}' is unknown; it needs one of {PROBLEM_TYPES}, or None",
            ),
            (
                sorted(self.id2label or {}) != indices,
                f"id2label has the indices {sorted(self.id2label or {})}; it needs 0 to {len(indices) - 1}, "
                "one name an output of the head: dict(enumerate(names))",
            ),
        )

    def validate_combinations(self) -> None:
        """Refuse what does not go together; every row says the remedy."""
        pooling, positions, registers = self.pooling, self.position_embedding, self.num_register_tokens
        parts = {"learned_2d": 2, "sincos_1d": 2, "sincos_2d": 4}.get(positions, 1)
        refuse(
            (
                pooling == "token" and self.use_class_token is False,
                "pooling='token' reads the class token, but use_class_token=False; use pooling='gap'",
            ),
            (
                self.use_distillation_token and pooling != "token",
                f"use_distillation_token=True needs pooling='token' (got '{pooling}'): "
                "the distillation token stands beside a class token",
            ),
            (
                self.use_distillation_head and not self.use_distillation_token,
                "use_distillation_head=True reads the distillation token; set use_distillation_token=True",
            ),
            (
                self.is_causal and positions.startswith("relative"),
                f"is_causal=True does not go with position_embedding='{positions}'; use 'learned'",
            ),
            (
                self.is_causal and self.has_class_token and pooling == "gap",
                "use_class_token=True has no effect with is_causal=True and pooling='gap': no patch sees a token that "
                "stands last; use pooling='token' or leave the class token out",
            ),
            (
                registers and self.is_causal,
                f"num_register_tokens={registers} has no use with is_causal=True: no patch sees a token that stands "
                "last; leave the registers out",
            ),
            (
                registers and pooling == "map" and self.has_class_token,
                f"num_register_tokens={registers} with pooling='map' and use_class_token=True: the pooling reads all "
                "tokens but the registers, which stand between; leave the class token out, or use "
                "pooling='map_with_registers'",
            ),
            (
                self.norm_after_pooling and (self.representation_size is not None or self.has_distillation_head),
                "norm_after_pooling=True is the last layer before one classifier; leave out representation_size and "
                "the distillation head (use_distillation_head=False), or use norm_after_pooling=False",
            ),
            (
                self.drop_path_rate and self.num_hidden_groups == 1 < self.num_hidden_layers,
                f"drop_path_rate={self.drop_path_rate} has no effect with num_hidden_groups=1: it grows from 0 at the "
                "first group of layers to its value at the last; use 0 or more groups",
            ),
            (
                self.hidden_size % parts,
                f"position_embedding='{positions}' splits hidden_size={self.hidden_size} into {parts} parts; choose a "
                f"hidden size divisible by {parts}",
            ),
            (
                positions.startswith("sincos") and self.hidden_size <= parts,
                f"position_embedding='{positions}' needs at least two frequencies; hidden_size={self.hidden_size} must "
                f"exceed {parts}",
            ),
        )

    def validate_prediction(self) -> None:
        next_patch = "predict_next_patch=True needs is_causal=True: with full attention every patch sees the next one"
        refuse((self.predict_next_patch and not self.is_causal, next_patch))
        for name, least in (("image_mean", -math.inf), ("image_std", 0)):
            given, channels = getattr(self, name), self.num_channels
            values = given if isinstance(given, tuple | list) else [given]
            refuse(
                (
                    len(values) not in (1, channels) or not all(map(math.isfinite, values)),
                    f"{name}={given} must be one finite number, or one for each of the {channels} channels",
                ),
                (min(values, default=1) <= least, f"{name}={given} must be above 0: pixel values were divided by it"),
            )

    def validate_feature_pyramid(self) -> None:
        strides = tuple(stride for stride in PYRAMID_STRIDES if stride in self.pyramid_strides)
        if not strides or strides != tuple(self.pyramid_strides):
            raise ValueError(
                f"pyramid_strides={self.pyramid_strides} must be some of {PYRAMID_STRIDES} px, the smallest first"
            )
        if not self.use_feature_pyramid:  # nothing is said of stages, of which a crafted config may have too many
            return
        height, width = self.patch_stride
        refuse(
            (
                height != width or height & (height - 1),
                f"use_feature_pyramid=True makes maps of strides 4, 8, 16 and 32 px by doubling and halving, which a "
                f"patch of {height}x{width} px does not fit; it needs a square patch whose side is a power of two "
                "(load the model with patch_size=16 and save it: its kernel is resampled)",
            ),
            (
                not self.reshape_hidden_states or len(self.out_features or ()) != 1,
                f"use_feature_pyramid=True is built from one map [B, D, h, w]; got out_features={self.out_features} "
                f"and reshape_hidden_states={self.reshape_hidden_states}; name one stage, keep reshape_hidden_states",
            ),
        )


@strict
class HfViTConfig(HfViTBaseConfig):
    """Configuration of `HfViTModel` and its heads; the default is ViT-B/16 at 224 px (arXiv 2010.11929, table 1).

    Args:
        image_size: nominal image in px, int or (height, width); the size of the position table. Other sizes work too.
        patch_size: px, int or (height, width).
        num_channels, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: as in transformers' ViT.
        hidden_act: the original's tanh GELU by default; other origins carry their own.
        layer_norm_eps: 1e-6, the original's value.
        qkv_bias: whether query, key and value projections have a bias.
        hidden_dropout_prob: after the position embedding and every dense layer but q, k, v (table 3).
        attention_probs_dropout_prob: on the attention probabilities.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 with depth.
        initializer_range: standard deviation of the learned position tables.
        position_embedding: "learned", "learned_2d" (two tables of D/2), "sincos_2d", "sincos_1d", "relative"
            (offsets as keys; appendix D.4), "relative_bias" (a number an offset and head; arXiv 2103.14030) or "none".
        position_on_class_token: False: the table is added before the class token is attached (big_vision);
            "with_registers": it has rows for the registers too (timm).
        position_interpolation: how a learned table is resampled to another grid; "bilinear_corners" is the original's,
            "bicubic" that of transformers' ViT, CLIP and DINOv2, "bicubic_antialias" that of timm and of DINOv2 with
            registers. "flexivit" (arXiv 2212.08013), bilinear without aligned corners, also fits patch kernels to a
            resize without antialiasing, as that code does.
        pooling: "token" (class token), "gap" (mean of the patch tokens), "map" (attention pooling of all tokens but
            registers), "map_with_registers" (of all tokens) or "first_patch" (big_vision's pool_type "0").
        use_class_token: None means pooling == "token".
        representation_size: width of the tanh layer before the head (`pre_logits`), or None.
        layer_scale_init_value: initial LayerScale (CaiT, arXiv 2103.17239), or None for no LayerScale.
        num_hidden_groups: layers that share weights (ALBERT); None means that every layer has its own.
        is_causal: GPT-style attention in raster order; the special tokens then stand last.
        use_distillation_token: DeiT's second token (arXiv 2012.12877).
        use_distillation_head: whether a classifier has a second head on that token, and gives the mean of both; None
            means that it has. False: the token only attends and is attended to.
        num_register_tokens: learned tokens between the class token and the patches, which attend and are attended to;
            they have no position, and no pooling reads them (arXiv 2309.16588), where nothing else is said.
        norm_before_layers: a LayerNorm on the embedded tokens, and no bias in the patch projection, as in CLIP.
        norm_after_pooling: the last LayerNorm takes the pooled output instead of the tokens, so that
            `last_hidden_state` is as the last block left it. What has no pooling takes it on the tokens all the same.
            None: there is no last LayerNorm.
        mlp_type: of the blocks: "dense", two layers with `hidden_act` between; or "swiglu" (arXiv 2002.05202), whose
            SiLU gate and values are both `intermediate_size` wide.
        reshape_hidden_states, apply_layernorm, use_feature_pyramid, fpn_hidden_size, pyramid_strides: of
            `HfViTBackbone`; see there.
        prediction_target: of `HfViTForMaskedPatchPrediction`: "mean_color", "downsampled" or "pixels" (B.1.2).
        predict_next_patch: its head predicts from each patch the next one in raster order; needs `is_causal`.
        image_mean, image_std: what the image processor subtracts and divides by, one number or one a channel; its
            targets are colors, which are read back from `pixel_values` with these.

    Raises:
        huggingface_hub.errors.StrictDataclassError: a value is of a wrong type or does not go with another; the
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
    """Before transformers makes the one of the other."""
    if num_labels is not None and (
        isinstance(num_labels, bool) or not isinstance(num_labels, Integral) or num_labels < 0
    ):
        raise ValueError(f"num_labels={num_labels!r} must be an integer of at least 0 (0: no head)")
    if id2label is not None and not isinstance(id2label, dict):
        raise ValueError(f"id2label={id2label!r} must be a dict from index to name: dict(enumerate(names))")
