"""What every model of the package inherits: initializing, saving, loading, resizing, and the heads that all share.

Legend: B batch, C channels, H x W px, h x w places of a map, K labels.
Sources: the original code's initialization (arXiv 2010.11929); resizing: 2010.11929, section 3.2, and 2212.08013.
"""

import copy
import warnings
from collections.abc import Callable, Iterable
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

from .configuration_hf_vit import HfBaseConfig

SIZE_KEYS = ("image_size", "patch_size")
HUB_KEYS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def lecun_normal_(kernel: torch.Tensor) -> None:
    """Flax's default for dense layers and convolutions: variance 1 / fan-in, truncated at two deviations.

    transformers' function of this name truncates at +-2 instead, which makes the deviation 14% too large.
    """
    deviation = kernel[0].numel() ** -0.5 / 0.87962566103423978  # what the truncation takes away
    init.trunc_normal_(kernel, std=deviation, a=-2 * deviation, b=2 * deviation)


def check_values(inputs: torch.Tensor, *parts: nn.Module) -> None:
    """Refuse weights on the meta device, for which torch would read arbitrary memory.

    With every other layer it raises by itself.

    Raises:
        ValueError: the inputs have values, and a weight of the parts has none that a hook of accelerate brings.
    """
    if inputs.is_meta:
        return
    modules = [module for part in parts for module in part.modules() if not hasattr(module, "_hf_hook")]
    if any(parameter.is_meta for module in modules for parameter in module.parameters(recurse=False)):
        raise ValueError("a weight is on the meta device, without values; load all of the model's weights first")


def check_images(pixel_values: torch.Tensor, num_channels: int) -> None:
    """Refuse inputs that are not a batch of images, with a ValueError."""
    if not isinstance(pixel_values, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"pixel_values are {type(pixel_values).__name__}; the model needs a tensor [B, C, H, W]: use the image "
            'processor with return_tensors="pt"'
        )
    if pixel_values.ndim != 4 or pixel_values.shape[1] != num_channels:
        raise ValueError(
            f"pixel_values of shape {tuple(pixel_values.shape)}; the model needs [B, {num_channels}, H, W]"
        )
    if not pixel_values.is_floating_point():
        raise ValueError(
            f"pixel_values are {pixel_values.dtype}; the model needs normalized floats: use the image processor"
        )


def classification_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    problem_type: str | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Mean loss over the batch, or over `num_items_in_batch` of all accumulated batches.

    Args:
        logits: [B, K].
        labels: [B] or [B, 1] int: cross-entropy (-100 is ignored); [B, K]: soft cross-entropy of probabilities, or
            binary cross-entropy if `problem_type` is "multi_label_classification", summed over classes as in the
            original code (transformers' models take their mean); K = 1 or "regression": squared error.
        num_items_in_batch: label elements of the accumulated batches, as transformers' Trainer counts them.

    Raises:
        ValueError: labels and logits do not fit each other, or soft labels are no probabilities.
    """
    if not isinstance(labels, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"labels are {type(labels).__name__}; give a tensor: class indices [B], or targets [B, K]")
    labels = labels.to(logits.device)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if problem_type is None and logits.shape[1] == 1:
        problem_type = "regression"
    one_an_image, one_a_logit = labels.shape == logits.shape[:1], labels.shape == logits.shape
    indices = labels.shape in (logits.shape[:1], (len(logits), 1)) and not labels.is_floating_point()
    if problem_type == "regression" and (one_a_logit or (one_an_image and logits.shape[1] == 1)):
        each = ((wide - labels.to(wide.dtype).view_as(wide)) ** 2).mean(dim=1)
    elif problem_type == "multi_label_classification" and one_a_logit:
        each = F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="none").sum(dim=1)
    elif problem_type in (None, "single_label_classification") and one_a_logit:
        _check_probabilities(labels)
        each = F.cross_entropy(wide, labels.to(wide.dtype), reduction="none")
    elif problem_type in (None, "single_label_classification") and indices:
        labels = labels.flatten().long()
        _check_indices(labels, logits.shape[1])
        each = F.cross_entropy(wide, labels, reduction="none")
        if num_items_in_batch is None:
            return each.sum() / (labels != -100).sum().clamp(min=1)
    else:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} and {labels.dtype} for logits {tuple(logits.shape)} and "
            f"problem_type={problem_type}; give class indices [B], or probabilities or targets [B, K]"
        )
    if num_items_in_batch is None:
        return each.mean()
    return each.sum() * labels[0].numel() / num_items_in_batch


def _are_seen(labels: torch.Tensor) -> bool:
    """Return whether Python can look at values: a graph cannot, nor one image of those that `torch.func` maps over."""
    return not torch.compiler.is_compiling() and torch.func.debug_unwrap(labels) is labels


def _check_probabilities(labels: torch.Tensor) -> None:
    if not _are_seen(labels):
        return
    sums = labels.sum(dim=1, dtype=torch.float32)
    if bool(((sums - 1).abs() > 1e-2).any()):
        raise ValueError(
            f"labels [B, K] have rows that sum to {sums.min():.3g} ... {sums.max():.3g}, so they are not "
            "probabilities; set problem_type='multi_label_classification' in the config for multi-label "
            "images"
        )


def _check_indices(labels: torch.Tensor, num_labels: int) -> None:
    if labels.device.type != "cpu" or not _are_seen(labels):  # GPUs tell it themselves
        return
    wrong = labels[(labels != -100) & ((labels < 0) | (labels >= num_labels))]
    if len(wrong):
        raise ValueError(f"labels hold {int(wrong[0])}; with {num_labels} classes they run from 0 to {num_labels - 1}")


def classifier_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    config: PreTrainedConfig,
    num_items_in_batch: torch.Tensor | int | None,
) -> torch.Tensor | None:
    """`classification_loss` of a classifier with this configuration; None without labels.

    Raises:
        ValueError: there is no head; see also `classification_loss`.
    """
    if labels is None:
        return None
    if not config.num_labels:
        raise ValueError("labels were given to a model with num_labels=0, which has no head; set num_labels")
    return classification_loss(logits, labels, config.problem_type, num_items_in_batch)


class HfPublishedMixin:
    """Abstract: what is saved is published as the class that it is, and loaded as that.

    Class attributes:
        _find_class: set by the package, as its Auto classes know no class but its own: (class, source, options of
            `from_pretrained`) -> (class to load, its options).
    """

    config: Any
    _find_class: ClassVar[Callable[[Any, Any, dict[str, Any]], tuple[Any, dict[str, Any]]] | None] = None

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: initialize as transformers' own models.

        For what it takes for custom code, transformers passes over modules without parameters of their own, so that
        their `init_weights` would never run. That guards code that writes weights in place; this one keeps to
        `transformers.initialization`, which leaves loaded weights alone.
        """
        return False

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Save the model; the configuration saves its code too (see `HfBaseConfig`).

        A class of another module is published in the place of the one that it is derived from, by its own code where
        it is registered (`register_for_auto_class`); else that place stays empty.
        """
        kwargs.setdefault("save_original_format", False)
        self.config.auto_map = self._published()
        super().save_pretrained(save_directory, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _published(self) -> dict[str, str]:
        """Return the family's classes by Auto class, with this model's own in its place."""
        name = type(self).__name__.removeprefix("FSDP")  # of a sharded model, whose class torch derives
        own: Any = next((base for base in type(self).__mro__ if base.__name__ == name), type(self))
        names = [f"{base.__module__.rpartition('.')[2]}.{base.__name__}" for base in own.__mro__]
        classes: dict[str, str] = dict(getattr(self.config, "auto_classes", {}))
        place = next((key for each in names for key, target in classes.items() if target == each), own._auto_class)
        if place is None or classes.get(place) == names[0]:
            return classes
        if own._auto_class is not None and own.__module__ != "__main__":
            return {**classes, place: names[0]}
        if own.__module__ == "__main__" or place in classes:
            warnings.warn(
                f"the code of {name} is not saved, so {place} does not load it; put the class in a module of its own "
                f'and call {name}.register_for_auto_class("{place}") before saving',
                UserWarning,
                stacklevel=3,
            )
            classes.pop(place, None)
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

    def __init__(self, config: HfBaseConfig) -> None:
        # Fields may have been set since it was made; of labels with JSON's strings for indices.
        names: Any = config.id2label
        if isinstance(names, dict):
            config.id2label = {int(i) if str(i).isdecimal() else i: name for i, name in names.items()}
        config.validate()
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """torch's layers as the original code (vit_jax): xavier-uniform and LeCun's kernels, zero biases.

        Every other module says how by a method `init_weights`, which runs after those of its children.
        """
        if isinstance(module, nn.Linear | nn.Conv2d):
            (init.xavier_uniform_ if isinstance(module, nn.Linear) else lecun_normal_)(module.weight)
            if isinstance(module.bias, nn.Parameter):
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.BatchNorm1d | nn.BatchNorm2d):
            for name, tensor in module.state_dict(keep_vars=True).items():
                init.constant_(tensor, 1 if name in ("weight", "running_var") else 0)
        elif module is self:
            self.init_heads()
        elif not isinstance(module, PreTrainedModel) and hasattr(module, "init_weights"):
            module.init_weights()  # pyright: ignore[reportCallIssue]

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return the attention implementation; refuse one for a family without a choice.

        Raises:
            ValueError: the family does not have this implementation.
        """
        if not self._supports_sdpa and requested_attention not in (None, "eager"):
            raise ValueError(
                f"{type(self).__name__} has no choice of attention; leave "
                f'attn_implementation="{requested_attention}" out'
            )
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def init_heads(self) -> None:
        """What a class of models initializes otherwise than its parts do; nothing by default."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path | None,
        *args: Any,
        config: PreTrainedConfig | str | Path | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a model; another `image_size` or `patch_size` than the checkpoint's resamples its tables.

        Position tables are stretched (arXiv 2010.11929, section 3.2), patch kernels by the pseudo-inverse of the
        resize (FlexiViT, arXiv 2212.08013). Both may come as keywords or in `config`.
        """
        sizes = {name: kwargs.pop(name) for name in SIZE_KEYS if name in kwargs}
        if config is not None and pretrained_model_name_or_path is not None:
            hub = {name: kwargs[name] for name in HUB_KEYS if name in kwargs}
            given = config if isinstance(config, PreTrainedConfig) else cls.config_class.from_pretrained(config, **hub)
            stored = type(given).from_pretrained(pretrained_model_name_or_path, **hub)
            own = {name: getattr(stored, name) for name in SIZE_KEYS if getattr(given, name) != getattr(stored, name)}
            sizes = {**{name: getattr(given, name) for name in own}, **sizes}
            if given is config:
                config = copy.deepcopy(config)
                for name, value in own.items():
                    setattr(config, name, value)
            else:
                kwargs |= own  # with a path, transformers reads them as fields of the configuration
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)
        if sizes:
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            model.resize_to(**sizes)
        return loaded  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def resize_to(
        self, image_size: int | Iterable[int] | None = None, patch_size: int | Iterable[int] | None = None
    ) -> None:
        """Change the image or patch size (px, int or (height, width)) in place.

        Learned positions are resampled to the new grid, and the patch kernel to the new patch.

        Raises:
            StrictDataclassError: the new image size does not fit the patch.
            ValueError: a stem or a feature pyramid is built for another patch.
        """
        new = copy.deepcopy(self.config)
        for name, value in (("image_size", image_size), ("patch_size", patch_size)):
            if value is not None:
                setattr(new, name, value if isinstance(value, int) else tuple(value))
        new.validate()
        for step in ("check_size", "resize_to"):  # what refuses does so before anything is changed
            for module in self.modules():
                if hasattr(module, step) and not isinstance(module, PreTrainedModel):
                    getattr(module, step)(new)
        for name in SIZE_KEYS:
            if getattr(self.config, name) != getattr(new, name):
                setattr(self.config, name, getattr(new, name))


class HfPooledForImageClassification(HfPreTrainedModel):
    """Abstract: a family's model, by its `base_model_prefix`, with a zero-initialised linear head on what it pools."""

    model_class: ClassVar[type[HfPreTrainedModel]]
    output_class: ClassVar[type[ImageClassifierOutput]] = ImageClassifierOutput

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.model_class(config))
        self._build_heads(config)
        self.post_init()

    def _build_heads(self, config: Any) -> None:
        width = getattr(config, "representation_size", None) or config.hidden_size
        self.classifier = nn.Linear(width, config.num_labels) if config.num_labels else nn.Identity()

    def init_heads(self) -> None:
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
            pixel_values: [B, C, H, W]; of a ViT, what makes no whole patch is not seen, with a warning.
            labels: [B] class indices, or [B, K] probabilities (soft cross-entropy; 0/1 targets with
                `problem_type="multi_label_classification"`).
            patch_attention_mask: [B, h, w], as in the forward of the family's model.

        Returns:
            logits [B, K] (with a distillation head the mean of both, arXiv 2012.12877), and loss with labels.
        """
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        outputs = self.base_model(pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True, **kwargs)
        answers = self._answers(outputs)
        loss = classifier_loss(answers["logits"], labels, self.config, num_items_in_batch)
        return self.output_class(
            loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions, **answers
        )

    def _answers(self, outputs: Any) -> dict[str, torch.Tensor]:
        """Return the logits, and what else the heads say, of what the model returned."""
        return {"logits": self.classifier(outputs.pooler_output)}


class HfBaseBackbone(BackboneMixin, HfPreTrainedModel):
    """Abstract: the stages of a family's model as feature maps; `out_features`, `out_indices` are the configuration's.

    Checkpoints of a family's model and of its classifier load straight into its backbone, and the other way. Folders
    load by the class's own `from_pretrained`: transformers' `AutoBackbone.from_pretrained` knows repositories of the
    Hub alone. `type(AutoBackbone.from_config(AutoConfig.from_pretrained(folder)))` is the class of a folder.
    """

    model_class: ClassVar[type[HfPreTrainedModel]]
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
        *(r"pooler\.", r"classifier\.", r"mask_token", r"prediction_head\."),
    ]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_size] * (config.num_stages + 1)
        setattr(self, self.base_model_prefix, self._build_model(config))
        self.post_init()

    def _build_model(self, config: Any) -> HfPreTrainedModel:
        return self.model_class(config)

    @property
    def out_features(self) -> list[str]:
        return self.config.out_features

    @out_features.setter
    def out_features(self, out_features: list[str]) -> None:
        self.config.out_features = out_features

    @property
    def out_indices(self) -> list[int]:
        return self.config.out_indices

    @out_indices.setter
    def out_indices(self, out_indices: tuple[int, ...] | list[int]) -> None:
        self.config.out_indices = out_indices

    @property
    def strides(self) -> list[int]:
        """Px of the image behind one place of each of the `feature_maps`, of its height where they differ."""
        return [self.config.patch_stride[0]] * len(self.out_features)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the mixin's own forward is a placeholder)
        self,
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BackboneOutput:
        """Encode images to feature maps.

        Args:
            pixel_values: [B, C, H, W].
            patch_attention_mask: [B, h, w], as in the model's forward; what the maps hold on padding means nothing.

        Returns:
            feature_maps, one [B, D, h, w] for each of `out_features` (of a ViT see also its configuration);
            hidden_states and attentions where asked for.
        """
        outputs = self.base_model(pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True, **kwargs)
        # transformers writes tuple[Tensor] for a tuple of any length.
        maps: Any = self._maps(outputs, self.config.grid_of(pixel_values.shape[2], pixel_values.shape[3]))
        return BackboneOutput(feature_maps=maps, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    def _maps(self, outputs: Any, grid: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        """Return the maps of `out_features`, of what the model returned for an image of h x w patches."""
        stages = zip(self.stage_names, self._stage_states(outputs.hidden_states), strict=True)
        return tuple(self._map(state, grid) for name, state in stages if name in self.out_features)

    def _stage_states(self, hidden_states: tuple[torch.Tensor, ...]) -> Iterable[torch.Tensor]:
        """Return the hidden state of every stage."""
        return hidden_states

    def _map(self, state: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Return a hidden state [B, N, D] as [B, D, h, w]."""
        return state.transpose(1, 2).unflatten(2, grid).contiguous()
