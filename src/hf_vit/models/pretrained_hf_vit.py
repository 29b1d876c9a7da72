"""What every model of the package inherits: initialising, saving, loading and resizing.

Legend: H x W px, P patch side.
Sources: the original code's initialisation (arXiv 2010.11929); resizing: 2010.11929, section 3.2, and 2212.08013.
"""

import copy
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from .configuration_hf_base import HfBaseConfig
from .loss_hf_vit import classifier_loss

SIZE_KEYS = ("image_size", "patch_size")
HUB_KEYS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def lecun_normal_(kernel: torch.Tensor) -> None:
    """Flax's default for dense layers and convolutions: variance 1 / fan-in, truncated at two deviations.

    transformers' function of this name truncates at +-2 instead, which makes the deviation 14% too large.
    """
    deviation = kernel[0].numel() ** -0.5 / 0.87962566103423978  # what the truncation takes away
    init.trunc_normal_(kernel, std=deviation, a=-2 * deviation, b=2 * deviation)


def refuse_missing(*parts: nn.Module) -> None:
    """Raises ValueError: a weight is on the meta device, and no hook of accelerate brings it when its module runs."""
    modules = [module for part in parts for module in part.modules() if not hasattr(module, "_hf_hook")]
    if any(parameter.is_meta for module in modules for parameter in module.parameters(recurse=False)):
        raise ValueError("a weight is on the meta device, without values; load all of the model's weights first")


def check_images(pixel_values: torch.Tensor, num_channels: int) -> None:
    """Raises ValueError: no batch of images, with what was given and what is needed."""
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
        """False: initialise as transformers' own models.

        For what it takes for custom code, transformers passes over modules without parameters of their own, so that
        their `init_weights` would never run. That guards code that writes weights in place; this one keeps to
        `transformers.initialization`, which leaves loaded weights alone.
        """
        return False

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """As transformers'; the configuration takes the code along (see `HfBaseConfig`).

        A class of another module is published in the place of the one that it is derived from, by its own code where
        it is registered (`register_for_auto_class`); else that place stays empty.
        """
        kwargs.setdefault("save_original_format", False)
        self.config.auto_map = self._published()
        super().save_pretrained(save_directory, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _published(self) -> dict[str, str]:
        """The family's classes by Auto class, with this model's own in its place."""
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
        """As transformers'; an Auto class loads a checkpoint's own class, where its code is trusted."""
        if cls._find_class is not None:
            model_class, kwargs = cls._find_class(cls, pretrained_model_name_or_path, kwargs)
            if model_class is not cls:
                return model_class.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        return super().from_pretrained(  # pyright: ignore[reportAttributeAccessIssue]
            pretrained_model_name_or_path, *args, **kwargs
        )


class HfPreTrainedModel(HfPublishedMixin, PreTrainedModel):
    """Abstract: initialisation, sharing and resizing for every model of the package."""

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
        """As transformers'; a family without a choice says so, where transformers says to ask it for one.

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
        """What a class of models initialises otherwise than its parts do; nothing by default."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path | None,
        *args: Any,
        config: PreTrainedConfig | str | Path | None = None,
        **kwargs: Any,
    ) -> Self:
        """As transformers'; another `image_size` or `patch_size` than the checkpoint's resamples its tables.

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

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    def init_heads(self) -> None:
        if isinstance(self.classifier, nn.Linear):
            init.zeros_(self.classifier.weight)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images [B, C, H, W]: logits [B, K], and the loss where there are labels (see the ViT's)."""
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        outputs = self.base_model(pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = classifier_loss(logits, labels, self.config, num_items_in_batch)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class HfBaseBackbone(BackboneMixin, HfPreTrainedModel):
    """Abstract: a model as a backbone, whose `out_features` and `out_indices` are its configuration's."""

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
