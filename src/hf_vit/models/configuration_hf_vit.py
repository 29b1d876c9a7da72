"""Configuration of the plain Vision Transformer, and the fields that all families share.

Sources: Dosovitskiy et al., "An Image is Worth 16x16 Words" (arXiv 2010.11929); the defaults are the original code's.
"""

import difflib
import math
import warnings
from dataclasses import fields
from numbers import Integral
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN

from .configuration_hf_base import HfBaseConfig

# Keys that transformers writes into configs or passes along without declaring them as fields.
# `encoder_stride` is of transformers' ViT, which reconstructs images with it.
FOREIGN_KEYS = frozenset(
    [
        "auto_map",
        "attn_implementation",
        "torch_dtype",
        "quantization_config",
        "encoder_stride",
        "tie_word_embeddings",
        "is_encoder_decoder",
        "is_decoder",
        "add_cross_attention",
    ]
)

PYRAMID_STRIDES = (4, 8, 16, 32)  # px of the image behind one place of a map

MAX_LAYERS = 10_000  # what a crafted config may ask for before anything is built

PositionEmbedding = Literal["learned", "learned_2d", "sincos_2d", "sincos_1d", "relative", "relative_bias", "none"]
Pooling = Literal["token", "gap", "map", "map_with_registers", "first_patch"]

PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")


def as_pair(value: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """Read a side length that may be one int or (height, width)."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


@strict
class HfViTBaseConfig(HfBaseConfig):
    """Abstract: the fields that every family of the package has (one legend: px are pixels of the input image)."""

    code_files: ClassVar[tuple[str, ...]] = (
        "configuration_hf_base",
        "configuration_hf_vit",
        "pretrained_hf_vit",
        "positions_hf_vit",
        "embeddings_hf_vit",
        "loss_hf_vit",
        "modeling_hf_vit",
        "pretraining_hf_vit",
        "backbone_hf_vit",
    )
    image_size: int | tuple[int, int] | list[int] = 224
    num_channels: int = 3
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
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("image_size", "patch_size", "image_mean", "image_std"):
            if isinstance(getattr(self, name, None), list):
                setattr(self, name, tuple(getattr(self, name)))
        self.pyramid_strides = tuple(self.pyramid_strides)
        self.take_stages(kwargs)
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
    def num_stages(self) -> int:
        return self.num_hidden_layers

    @property
    def patch_stride(self) -> tuple[int, int]:
        """(height, width) in px of the image area behind one patch token."""
        return as_pair(self.patch_size)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """(h, w): the patches of an image of height x width px; what makes no whole patch is left out, as originally.

        Raises:
            ValueError: the image is smaller than a patch.
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
        for name in (
            "num_channels",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "fpn_hidden_size",
        ):
            _need_positive(name, getattr(self, name))
        for name in ("representation_size", "num_hidden_groups"):
            if getattr(self, name) is not None:
                _need_positive(name, getattr(self, name))
        if self.num_register_tokens < 0:
            raise ValueError(f"num_register_tokens={self.num_register_tokens} must be at least 0 (0: none)")
        if self.num_hidden_layers > MAX_LAYERS:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers} is more than {MAX_LAYERS}, the most there can be"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}; "
                "choose a number of heads that divides the hidden size"
            )
        groups = self.num_hidden_groups
        if groups is not None and groups > self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_groups={groups} exceeds num_hidden_layers={self.num_hidden_layers}; "
                "a group holds at least one layer"
            )

    def validate_image_fits_patch(self) -> None:
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) and len(value) != 2:
                raise ValueError(f"{name}={value} has {len(value)} numbers; give one int or (height, width) in px")
            for side in as_pair(value):
                _need_positive(name, side, value)
        try:
            self.grid_of(*self.nominal_size)
        except ValueError as misfit:
            raise ValueError(
                f"image_size={self.image_size} does not fit patch_size={self.patch_size}: {misfit}"
            ) from None

    def validate_rates(self) -> None:
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a probability; it needs 0 <= {name} < 1")
        for name in ("layer_norm_eps", "initializer_range"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number above 0")
        scale = self.layer_scale_init_value
        if scale is not None and not (scale >= 0 and math.isfinite(scale)):
            raise ValueError(f"layer_scale_init_value={scale} must be a finite number of at least 0, or None for none")

    def validate_names(self) -> None:
        if self.hidden_act not in ACT2FN:
            nearest = difflib.get_close_matches(self.hidden_act, list(ACT2FN), n=1)
            hint = f"did you mean '{nearest[0]}'?" if nearest else "use a name of transformers.activations.ACT2FN"
            raise ValueError(f"hidden_act='{self.hidden_act}' is not an activation of transformers; {hint}")
        if self.problem_type not in (None, *PROBLEM_TYPES):
            raise ValueError(f"problem_type='{self.problem_type}' is unknown; it needs one of {PROBLEM_TYPES}, or None")
        if self.id2label is not None and sorted(self.id2label) != list(range(len(self.id2label))):
            raise ValueError(
                f"id2label has the indices {sorted(self.id2label)}; it needs 0 to {len(self.id2label) - 1}, "
                "one name an output of the head: dict(enumerate(names))"
            )

    def validate_combinations(self) -> None:
        """The table of what goes together; every row says the remedy."""
        if self.pooling == "token" and self.use_class_token is False:
            raise ValueError("pooling='token' reads the class token, but use_class_token=False; use pooling='gap'")
        if self.use_distillation_token and self.pooling != "token":
            raise ValueError(
                f"use_distillation_token=True needs pooling='token' (got '{self.pooling}'): "
                "the distillation token stands beside a class token"
            )
        if self.use_distillation_head and not self.use_distillation_token:
            raise ValueError("use_distillation_head=True reads the distillation token; set use_distillation_token=True")
        if self.is_causal and self.position_embedding.startswith("relative"):
            raise ValueError(
                f"is_causal=True does not go with position_embedding='{self.position_embedding}'; use 'learned'"
            )
        if self.is_causal and self.has_class_token and self.pooling == "gap":
            raise ValueError(
                "use_class_token=True has no effect with is_causal=True and pooling='gap': no patch sees a token that "
                "stands last; use pooling='token' or leave the class token out"
            )
        self._validate_registers_and_norms()
        if self.drop_path_rate and self.num_hidden_groups == 1 < self.num_hidden_layers:
            raise ValueError(
                f"drop_path_rate={self.drop_path_rate} has no effect with num_hidden_groups=1: it grows from 0 at the "
                "first group of layers to its value at the last; use 0 or more groups"
            )
        parts = {"learned_2d": 2, "sincos_1d": 2, "sincos_2d": 4}.get(self.position_embedding, 1)
        if self.hidden_size % parts:
            raise ValueError(
                f"position_embedding='{self.position_embedding}' splits hidden_size={self.hidden_size} into {parts} "
                f"parts; choose a hidden size divisible by {parts}"
            )
        if self.position_embedding.startswith("sincos") and self.hidden_size <= parts:
            raise ValueError(
                f"position_embedding='{self.position_embedding}' needs at least two frequencies; "
                f"hidden_size={self.hidden_size} must exceed {parts}"
            )

    def _validate_registers_and_norms(self) -> None:
        if self.num_register_tokens and self.is_causal:
            raise ValueError(
                f"num_register_tokens={self.num_register_tokens} has no use with is_causal=True: no patch sees a token "
                "that stands last; leave the registers out"
            )
        if self.num_register_tokens and self.pooling == "map" and self.has_class_token:
            raise ValueError(
                f"num_register_tokens={self.num_register_tokens} with pooling='map' and use_class_token=True: the "
                "pooling reads all tokens but the registers, which stand between; leave the class token out, or use "
                "pooling='map_with_registers'"
            )
        if self.norm_after_pooling and (self.representation_size is not None or self.has_distillation_head):
            raise ValueError(
                "norm_after_pooling=True is the last layer before one classifier; leave out representation_size and "
                "the distillation head (use_distillation_head=False), or use norm_after_pooling=False"
            )

    def validate_prediction(self) -> None:
        if self.predict_next_patch and not self.is_causal:
            raise ValueError(
                "predict_next_patch=True needs is_causal=True: with full attention every patch sees the next one"
            )
        for name in ("image_mean", "image_std"):
            given = getattr(self, name)
            values = given if isinstance(given, tuple | list) else [given]
            if len(values) not in (1, self.num_channels) or not all(math.isfinite(value) for value in values):
                raise ValueError(
                    f"{name}={given} must be one finite number, or one for each of the {self.num_channels} channels"
                )
            if name == "image_std" and min(values) <= 0:
                raise ValueError(f"image_std={given} must be above 0: pixel values were divided by it")

    def validate_feature_pyramid(self) -> None:
        strides = [stride for stride in PYRAMID_STRIDES if stride in self.pyramid_strides]
        if not strides or strides != list(self.pyramid_strides):
            raise ValueError(
                f"pyramid_strides={self.pyramid_strides} must be some of {PYRAMID_STRIDES} px, the smallest first"
            )
        if not self.use_feature_pyramid:
            return
        height, width = self.patch_stride
        if height != width or height & (height - 1):
            raise ValueError(
                f"use_feature_pyramid=True makes maps of strides 4, 8, 16 and 32 px by doubling and halving, which a "
                f"patch of {height}x{width} px does not fit; it needs a square patch whose side is a power of two "
                "(load the model with patch_size=16 and save it: its kernel is resampled)"
            )
        if not self.reshape_hidden_states or len(self.out_features or ()) != 1:
            raise ValueError(
                f"use_feature_pyramid=True is built from one map [B, D, h, w]; got out_features={self.out_features} "
                f"and reshape_hidden_states={self.reshape_hidden_states}; name one stage, keep reshape_hidden_states"
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
            targets are colours, which are read back from `pixel_values` with these.

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


def _need_positive(name: str, number: int, value: object = None) -> None:
    if number < 1:
        raise ValueError(f"{name}={number if value is None else value} must be at least 1")


def _check_labels(num_labels: object, id2label: object) -> None:
    """Before transformers makes the one of the other."""
    if num_labels is not None and (
        isinstance(num_labels, bool) or not isinstance(num_labels, Integral) or num_labels < 0
    ):
        raise ValueError(f"num_labels={num_labels!r} must be an integer of at least 0 (0: no head)")
    if id2label is not None and not isinstance(id2label, dict):
        raise ValueError(f"id2label={id2label!r} must be a dict from index to name: dict(enumerate(names))")
