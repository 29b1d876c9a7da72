"""Define what every model of the package inherits: initialization, saving, loading, resizing, and the shared heads.

Legend: B batch, C channels, H x W px, h x w cells of a map, K labels.
Sources: the original code's initialization (arXiv 2010.11929); resizing: 2010.11929, section 3.2, and 2212.08013.
"""

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BackboneOutput, ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import TransformersKwargs, can_return_tuple

SIZE_KEYS = ("image_size", "patch_size")
HUB_KEYS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def lecun_normal_(kernel: torch.Tensor) -> None:
    """Initialize a kernel as Flax's dense layers and convolutions: variance 1 / fan-in, truncated at two deviations.

    transformers' function of this name truncates at +-2 instead, so its deviation is 14% too large.
    """
    deviation = kernel[0].numel() ** -0.5 / 0.87962566103423978  # the factor that truncation reduces it by
    init.trunc_normal_(kernel, std=deviation, a=-2 * deviation, b=2 * deviation)


def check_values(inputs: torch.Tensor, *parents: nn.Module) -> None:
    """Refuse weights on the meta device, for which torch would read arbitrary memory.

    Most layers raise an error for such weights by themselves; call this for those that do not.

    Raises:
        ValueError: the inputs have values, but a weight has none and no accelerate hook loads it later.
    """
    if inputs.is_meta:
        return
    for parent in parents:
        for module in parent.modules():
            is_loaded_later = hasattr(module, "_hf_hook")
            if not is_loaded_later and any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                raise ValueError("a weight is on the meta device, without values; load all weights of the model first")


def check_images(pixel_values: torch.Tensor, num_channels: int) -> None:
    """Raise a ValueError for inputs that are not a batch of images."""
    if not isinstance(pixel_values, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"pixel_values have the type {type(pixel_values).__name__}; the model needs a tensor [B, C, H, W]: use the "
            'image processor with return_tensors="pt"'
        )
    if pixel_values.ndim != 4 or pixel_values.shape[1] != num_channels:
        raise ValueError(
            f"pixel_values have shape {tuple(pixel_values.shape)}; the model needs [B, {num_channels}, H, W]: use the "
            'image processor with return_tensors="pt"'
        )
    if not pixel_values.is_floating_point():
        raise ValueError(
            f"pixel_values are {pixel_values.dtype}; the model needs normalized floats: use the image processor"
        )


def compute_classification_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    problem_type: str | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Compute the mean loss over the batch, or over `num_items_in_batch` of all accumulated batches.

    Args:
        logits: [B, K].
        labels: [B] or [B, 1] int: cross-entropy (-100 is ignored); [B, K]: soft cross-entropy of probabilities, or
            binary cross-entropy if `problem_type` is "multi_label_classification", summed over classes as in the
            original code (transformers' models take their mean); K = 1 or "regression": squared error.
        num_items_in_batch: label elements of the accumulated batches, as transformers' Trainer counts them.

    Raises:
        ValueError: labels and logits do not fit each other, or soft labels are not probabilities.
    """
    if not isinstance(labels, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"labels have the type {type(labels).__name__}; give a tensor of class indices [B] or targets [B, K]"
        )
    labels = labels.to(logits.device)
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if problem_type is None and logits.shape[1] == 1:
        problem_type = "regression"
    is_single_label = problem_type in (None, "single_label_classification")
    has_one_label_per_image = labels.shape == logits.shape[:1]  # [B]
    has_logits_shape = labels.shape == logits.shape  # [B, K]
    are_indices = (has_one_label_per_image or labels.shape == (len(logits), 1)) and not labels.is_floating_point()
    if problem_type == "regression" and (has_logits_shape or (has_one_label_per_image and logits.shape[1] == 1)):
        losses = ((scores - labels.to(scores.dtype).view_as(scores)) ** 2).mean(dim=1)
    elif problem_type == "multi_label_classification" and has_logits_shape:
        losses = F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none").sum(dim=1)
    elif is_single_label and has_logits_shape:
        _check_probabilities(labels)
        losses = F.cross_entropy(scores, labels.to(scores.dtype), reduction="none")
    elif is_single_label and are_indices:
        indices = labels.flatten().long()
        _check_indices(indices, logits.shape[1])
        losses = F.cross_entropy(scores, indices, reduction="none")
        if num_items_in_batch is None:
            return losses.sum() / (indices != -100).sum().clamp(min=1)
    else:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} and {labels.dtype} do not fit logits {tuple(logits.shape)} and "
            f"problem_type={problem_type}; give class indices [B], or probabilities or targets [B, K]"
        )
    if num_items_in_batch is None:
        return losses.mean()
    count = torch.as_tensor(num_items_in_batch).clamp(min=1)  # 0 if all are ignored
    return losses.sum() * labels[0].numel() / count  # K label elements an image for [B, K]


def _are_readable(labels: torch.Tensor) -> bool:
    """Return whether Python can read values: not in a compiled graph, nor for the images `torch.func` maps over."""
    return not torch.compiler.is_compiling() and torch.func.debug_unwrap(labels) is labels


def _check_probabilities(labels: torch.Tensor) -> None:
    """Raise a ValueError if soft labels [B, K] are not probabilities."""
    if not _are_readable(labels):
        return
    sums = labels.sum(dim=1, dtype=torch.float32)
    if bool(((sums - 1).abs() > 1e-2).any()):
        raise ValueError(
            f"labels [B, K] have rows that sum to {sums.min():.3g} ... {sums.max():.3g}, so they are not "
            "probabilities; for multi-label images, set problem_type='multi_label_classification' in the "
            "config"
        )


def _check_indices(labels: torch.Tensor, num_labels: int) -> None:
    """Raise a ValueError if a class index is out of range."""
    if labels.device.type != "cpu" or not _are_readable(labels):  # a GPU's cross-entropy raises an error by itself
        return
    invalid = labels[(labels != -100) & ((labels < 0) | (labels >= num_labels))]
    if len(invalid):
        raise ValueError(
            f"labels contain {int(invalid[0])}; a model with {num_labels} classes needs 0 to {num_labels - 1}, or -100 "
            "to ignore an image"
        )


def compute_classifier_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    config: PreTrainedConfig,
    num_items_in_batch: torch.Tensor | int | None,
) -> torch.Tensor | None:
    """Return the `compute_classification_loss` of a classifier with this configuration; None without labels.

    Raises:
        ValueError: the model has no head; see also `compute_classification_loss`.
    """
    if labels is None:
        return None
    if not config.num_labels:
        raise ValueError("labels need a model with a head, but num_labels=0; load the model with num_labels")
    return compute_classification_loss(logits, labels, config.problem_type, num_items_in_batch)


@dataclass(frozen=True)
class LayerFeatures:
    """Features of a batch of images after one layer.

    Attributes:
        patch_tokens: [B, h*w, D], row by row; meaningless on padding.
        grid: (h, w) in patches, or in cells of a ResNet's map.
        class_token: [B, D]; None if the model has none.
        other_tokens: [B, R, D], the distillation token and the registers; R is 0 if there are none.
    """

    patch_tokens: torch.Tensor
    grid: tuple[int, int]
    class_token: torch.Tensor | None
    other_tokens: torch.Tensor

    @property
    def feature_map(self) -> torch.Tensor:
        """Return the patch tokens as a map [B, D, h, w]."""
        return self.patch_tokens.transpose(1, 2).unflatten(2, self.grid).contiguous()


class HfPublishedMixin:
    """Abstract: check a model's configuration, and save it so that Auto classes load it as the same class.

    Class attributes:
        _find_class: set by the package, since its Auto classes know only its own classes: (class, checkpoint, options
            of `from_pretrained`) -> (class to load, its options).
    """

    config: Any
    _find_class: ClassVar[Callable[[Any, Any, dict[str, Any]], tuple[Any, dict[str, Any]]] | None] = None

    def __init__(self, config: Any) -> None:
        # Validate again, as fields may have been set since; label indices read from JSON are strings.
        labels = config.id2label
        if isinstance(labels, dict):
            config.id2label = {int(i) if str(i).isdecimal() else i: label for i, label in labels.items()}
            indices = config.label2id or {}
            if any(indices.get(label) != i for i, label in config.id2label.items()):  # missing, or of other labels
                config.label2id = {label: i for i, label in config.id2label.items()}
        config.validate()
        super().__init__(config)  # pyright: ignore[reportCallIssue]

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, so that transformers initializes these models as its own.

        In custom code, transformers skips modules without parameters of their own; their `init_weights` would not run.
        """
        return False

    def initialize_weights(self) -> None:
        """Initialize what was not loaded; a user's `_init_weights` never sees modules whose weights all were."""
        for module in self.modules():  # pyright: ignore[reportAttributeAccessIssue]
            tensors = [*module.parameters(), *module.buffers()]
            if all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors):
                module._is_hf_initialized = True
        super().initialize_weights()  # pyright: ignore[reportAttributeAccessIssue]

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Save the model; the configuration saves its code too (see `HfBaseConfig`).

        A subclass from another module takes its parent's entry in `auto_map` if it is registered
        (`register_for_auto_class`); otherwise that entry is left out.
        """
        kwargs.setdefault("save_original_format", False)
        self.config.auto_map = self._make_auto_map()
        super().save_pretrained(save_directory, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _make_auto_map(self) -> dict[str, str]:
        """Return "module.Class" for each Auto class: the family's classes, and this model's class in place of its
        parent.
        """
        name = type(self).__name__.removeprefix("FSDP")  # torch derives a class for sharded models
        model_class: Any = next((base for base in type(self).__mro__ if base.__name__ == name), type(self))
        target, *parents = (f"{base.__module__.rpartition('.')[2]}.{base.__name__}" for base in model_class.__mro__)
        classes: dict[str, str] = dict(getattr(self.config, "auto_classes", {}))
        auto_class_of = {value: key for key, value in reversed(classes.items())}  # the first Auto class counts
        if target in auto_class_of:  # a class of the family
            return classes
        auto_class = next((auto_class_of[each] for each in parents if each in auto_class_of), model_class._auto_class)
        if auto_class is None:
            return classes
        if model_class._auto_class is not None and model_class.__module__ != "__main__":  # registered, with its code
            return {**classes, auto_class: target}
        warnings.warn(
            f"the code of {name} is not saved, so {auto_class} cannot load it; put the class in a module of its "
            f'own and call {name}.register_for_auto_class("{auto_class}") before saving',
            UserWarning,
            stacklevel=3,
        )
        classes.pop(auto_class, None)
        return classes

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path | None, *args: Any, **kwargs: Any) -> Any:
        """Load a model; an Auto class loads a checkpoint's own class if its code is trusted."""
        if cls._find_class is not None:
            model_class, kwargs = cls._find_class(cls, pretrained_model_name_or_path, kwargs)
            if model_class is not cls:
                return model_class.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        return super().from_pretrained(  # pyright: ignore[reportAttributeAccessIssue]
            pretrained_model_name_or_path, *args, **kwargs
        )


class HfPreTrainedModel(HfPublishedMixin, PreTrainedModel):
    """Abstract: initialization, sharing and resizing for every model of the package."""

    config: Any
    config_class: ClassVar[Any]
    main_input_name = "pixel_values"
    input_modalities = "image"

    def post_init(self) -> None:
        super().post_init()
        # accelerate's FSDP does not accept names of blocks that the model does not have.
        names = {type(module).__name__ for module in self.modules()}
        self._no_split_modules = names.intersection(self._no_split_modules or ())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module as the original code (vit_jax): xavier-uniform dense layers, LeCun kernels, zero biases.

        A module of another kind initializes itself in its method `init_weights`, which runs after its children's.
        """
        if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            if isinstance(module, nn.Linear):
                init.xavier_uniform_(module.weight)
            elif isinstance(module, nn.Conv2d):
                lecun_normal_(module.weight)
            else:  # LeCun's too: where kernel and stride are equal, an output reads every input channel once
                init.normal_(module.weight, std=module.in_channels**-0.5)
            if isinstance(module.bias, nn.Parameter):
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | nn.BatchNorm1d | nn.BatchNorm2d):
            for name, tensor in module.state_dict(keep_vars=True).items():
                init.constant_(tensor, 1 if name in ("weight", "running_var") else 0)
        elif module is self:
            self.init_heads()
        elif not isinstance(module, PreTrainedModel) and hasattr(module, "init_weights"):
            module.init_weights()  # pyright: ignore[reportCallIssue]
        else:
            super()._init_weights(module)  # layers that a user's class adds

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return the attention implementation.

        Raises:
            ValueError: the family has no attention implementations to choose from.
        """
        if not self._supports_sdpa and requested_attention not in (None, "eager"):
            raise ValueError(
                f"{type(self).__name__} has a single attention implementation; leave "
                f'attn_implementation="{requested_attention}" out'
            )
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def init_heads(self) -> None:
        """Initialize the heads of a class of models; by default there is nothing to do."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path | None,
        *args: Any,
        config: PreTrainedConfig | str | Path | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a model; resample its tables if `image_size` or `patch_size` differs from the checkpoint's.

        Position tables are resampled (arXiv 2010.11929, section 3.2), patch kernels fitted by the pseudo-inverse of the
        resize (FlexiViT, arXiv 2212.08013). Give the sizes as keywords or in `config`.
        """
        sizes = {name: kwargs.pop(name) for name in SIZE_KEYS if name in kwargs}
        if config is not None and pretrained_model_name_or_path is not None:
            hub_options = {name: kwargs[name] for name in HUB_KEYS if name in kwargs}
            requested_config = config
            if not isinstance(requested_config, PreTrainedConfig):
                requested_config = cls.config_class.from_pretrained(requested_config, **hub_options)
            stored_config = type(requested_config).from_pretrained(pretrained_model_name_or_path, **hub_options)
            # Load with the checkpoint's sizes, which its weights have; the model is resized below.
            stored_sizes: dict[str, Any] = {}
            for name in SIZE_KEYS:
                if getattr(requested_config, name) != getattr(stored_config, name):
                    stored_sizes[name] = getattr(stored_config, name)
                    sizes.setdefault(name, getattr(requested_config, name))
            if requested_config is config:
                config = copy.deepcopy(config)
                for name, value in stored_sizes.items():
                    setattr(config, name, value)
            else:
                kwargs |= stored_sizes  # if `config` is a path, transformers sets these keywords as its fields
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)
        if sizes:
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            model.resize_to(**sizes)
        return loaded  # pyright: ignore[reportReturnType]

    def get_intermediate_layers(
        self,
        pixel_values: torch.Tensor,
        layers: int | Iterable[int] = 1,
        norm: bool = True,
        patch_attention_mask: torch.Tensor | None = None,
    ) -> tuple[LayerFeatures, ...]:
        """Return the features after some layers, as DINOv2's function of this name.

        Args:
            pixel_values: [B, C, H, W].
            layers: how many of the last layers; or indices from 0 on, negative ones count from the end. A ResNet's
                layers are its stages.
            norm: whether the model's last norm is applied to every layer, as DINOv2 and DINOv3 do; `hidden_states` of
                transformers and `forward_intermediates` of timm are without it. Of a ResNet only the last stage fits
                its norm.
            patch_attention_mask: [B, h, w], as in `forward`.

        Raises:
            ValueError: the model has no such layer.
        """
        model: Any = self.base_model
        outputs = model(
            pixel_values, patch_attention_mask=patch_attention_mask, output_hidden_states=True, return_dict=True
        )
        states = model.layer_states(outputs.hidden_states)
        count = len(states)
        indices = list(range(-layers, 0)) if isinstance(layers, int) else list(layers)
        if not indices or not all(-count <= index < count for index in indices):
            raise ValueError(
                f"layers={layers} does not fit a model with {count} layers; give how many of the last ones (1 to "
                f"{count}), or indices from {-count} to {count - 1}"
            )
        features: list[LayerFeatures] = []
        grid = self.config.grid_of(*pixel_values.shape[2:])
        for index in indices:
            state = states[index]
            if norm:
                state = model.normalize_layer(state, index % count == count - 1)
            features.append(model.split_tokens(state, grid))
        return tuple(features)

    def layer_states(self, hidden_states: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Return the state after every layer; the first of `hidden_states` is before all layers."""
        return list(hidden_states[1:])

    def normalize_layer(self, state: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Apply the model's last norm to the state after a layer."""
        layernorm: Any = self.layernorm
        return layernorm(state)

    def split_tokens(self, state: torch.Tensor, grid: tuple[int, int]) -> LayerFeatures:
        """Sort the tokens [B, N, D] of images of h x w patches by their kind."""
        return LayerFeatures(state, grid, None, state[:, :0])

    @torch.no_grad()
    def resize_to(
        self, image_size: int | Iterable[int] | None = None, patch_size: int | Iterable[int] | None = None
    ) -> None:
        """Change the image or patch size (px, int or (height, width)) in place.

        Learned positions are resampled to the new grid, and the patch kernel to the new patch.

        Raises:
            StrictDataclassError: the new image size does not fit the patch.
            ValueError: a stem or a feature pyramid is built for another patch, or stages set the patch size.
        """
        new = copy.deepcopy(self.config)
        for name, value in (("image_size", image_size), ("patch_size", patch_size)):
            if value is not None and isinstance(getattr(type(new), name, None), property):
                raise ValueError(f"{name}={value} does not fit a {type(self).__name__}, whose stem or stages set it")
            if value is not None:
                setattr(new, name, value if isinstance(value, int) else tuple(value))
        new.validate()
        for step in ("check_size", "resize_to"):  # all checks come before the first change
            for module in self.modules():
                if hasattr(module, step) and not isinstance(module, PreTrainedModel):
                    getattr(module, step)(new)
        for name in SIZE_KEYS:
            if getattr(self.config, name) != getattr(new, name):
                setattr(self.config, name, getattr(new, name))


class HfPooledForImageClassification(HfPreTrainedModel):
    """Abstract: a family's model (named `base_model_prefix`) with a zero-initialized linear head on
    its pooled output.
    """

    model_class: ClassVar[type[HfPreTrainedModel]]
    output_class: ClassVar[type[ImageClassifierOutput]] = ImageClassifierOutput

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.model_class(config))
        self._build_heads(config)
        self.post_init()

    def _build_heads(self, config: Any) -> None:
        """Add the classifier; an identity if there are no labels."""
        self.classifier = nn.Linear(config.pooled_size, config.num_labels) if config.num_labels else nn.Identity()

    def init_heads(self) -> None:
        """Initialize the weights of the heads with zeros."""
        for name in ("classifier", "distillation_classifier"):
            head = getattr(self, name, None)
            if isinstance(head, nn.Linear):
                init.zeros_(head.weight)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images.

        Args:
            pixel_values: [B, C, H, W]; a ViT ignores incomplete patches at the bottom and right, with a warning.
            labels: [B] class indices, or [B, K] probabilities (soft cross-entropy; 0/1 targets with
                `problem_type="multi_label_classification"`).
            patch_attention_mask: [B, h, w], as in the forward of the family's model.

        Returns:
            logits [B, K] (with a distillation head the mean of both, arXiv 2012.12877), and loss with labels.
        """
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        outputs = self.base_model(pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True, **kwargs)
        head_outputs = self._compute_head_outputs(outputs)
        loss = compute_classifier_loss(head_outputs["logits"], labels, self.config, num_items_in_batch)
        return self.output_class(
            loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions, **head_outputs
        )

    def _compute_head_outputs(self, outputs: Any) -> dict[str, torch.Tensor]:
        """Return the logits and other outputs of the heads, by the name of the output field."""
        return {"logits": self.classifier(outputs.pooler_output)}


class HfBaseBackbone(BackboneMixin, HfPreTrainedModel):
    """Abstract: return the stages of a family's model as feature maps; the config's `out_features` selects them.

    Checkpoints of a family's model and classifier load as its backbone, and the other way round. To load a folder, call
    the class's own `from_pretrained`, as transformers' `AutoBackbone.from_pretrained` only loads repositories of the
    Hub; `type(AutoBackbone.from_config(AutoConfig.from_pretrained(folder)))` is the class.
    """

    model_class: ClassVar[type[HfPreTrainedModel]]
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
        *(r"pooler\.", r"classifier\.", r"mask_token", r"prediction_head\.")
    ]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_size] * (config.num_stages + 1)
        setattr(self, self.base_model_prefix, self._build_model(config))
        self.post_init()

    def _build_model(self, config: Any) -> HfPreTrainedModel:
        """Return the family's model, whose stages become the feature maps."""
        return self.model_class(config)

    @BackboneMixin.out_features.getter
    def out_features(self) -> list[str]:
        return self.config.out_features

    @BackboneMixin.out_indices.getter
    def out_indices(self) -> list[int]:
        return self.config.out_indices

    @property
    def strides(self) -> list[int]:
        """Return the stride in px of each of the `feature_maps`; the vertical one if the two differ."""
        return [self.config.patch_stride[0]] * len(self.out_features)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the mixin's own forward is a placeholder)
        self,
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BackboneOutput:
        """Encode images as feature maps.

        Args:
            pixel_values: [B, C, H, W].
            patch_attention_mask: [B, h, w], as in the model's forward; the maps are meaningless on padding.

        Returns:
            feature_maps, one [B, D, h, w] for each of `out_features` (for a ViT see also its configuration); if
                requested, hidden_states and attentions.
        """
        outputs = self.base_model(pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True, **kwargs)
        # transformers annotates a tuple of any length as tuple[Tensor].
        maps: Any = self._select_maps(outputs, self.config.grid_of(pixel_values.shape[2], pixel_values.shape[3]))
        return BackboneOutput(feature_maps=maps, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    def _select_maps(self, outputs: Any, grid: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        """Return the maps of `out_features` from the model's outputs for an image of h x w patches."""
        stages = zip(self.stage_names, self._iterate_stage_states(outputs.hidden_states), strict=True)
        return tuple(self._map(state, grid) for name, state in stages if name in self.out_features)

    def _iterate_stage_states(self, hidden_states: tuple[torch.Tensor, ...]) -> Iterable[torch.Tensor]:
        """Return the hidden state of every stage."""
        return hidden_states

    def _map(self, state: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Return the patches of a hidden state [B, N, D] as a map [B, D, h, w]."""
        model: Any = self.base_model
        return model.split_tokens(state, grid).feature_map
