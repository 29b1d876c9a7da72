"""What ResNets share as models: an encoder, the mean of its last map, and a linear classifier on that.

Legend: B batch, C channels, H x W px, h x w places of a map, K labels.
"""

import itertools
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn
from transformers.backbone_utils import filter_output_hidden_states
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_resnet import HfResNetBaseConfig
from .pretrained_hf_vit import (
    HfBaseBackbone,
    HfPooledForImageClassification,
    HfPreTrainedModel,
    check_images,
    refuse_missing,
)


class HfResNetPreTrainedModel(HfPreTrainedModel):
    """Abstract: no Transformer, no tokens."""

    base_model_prefix = "resnet"

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path | None, *args: Any, **kwargs: Any) -> Self:
        """As every model's.

        Raises:
            OSError: the weights have the names of version 0.1.0, before the first release.
        """
        with_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        if any(name.startswith(("vit.", "stem.")) for name in info["unexpected_keys"]):
            raise OSError(
                f"{pretrained_model_name_or_path} was saved by hf_vit 0.1.0, whose {cls.__name__} named its parameters "
                "otherwise; convert its source again with `hf-vit convert`, or train it again with this version"
            )
        return loaded if with_info else model


class HfResNetBaseModel(HfResNetPreTrainedModel):
    """Abstract: a family supplies the network, as `encoder`."""

    def __init__(self, config: HfResNetBaseConfig) -> None:
        super().__init__(config)
        self.encoder = self.build_encoder(config)
        self.post_init()

    def build_encoder(self, config: Any) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} is abstract: a family supplies its encoder")

    def last_map(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> [B, h, w, C']."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: a family knows the axes of its map")

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """[B, C, H, W] -> last_hidden_state [B, h*w, C'] row by row, pooler_output [B, C'], their mean.

        hidden_states, where asked for, are the maps of the root and of every unit, with the axes the family has inside.
        """
        if patch_attention_mask is not None:
            raise ValueError(f"patch_attention_mask does not go with {type(self).__name__}; give images of one size")
        check_images(pixel_values, self.config.num_channels)
        if not pixel_values.is_meta and any(parameter.is_meta for parameter in self.parameters()):
            refuse_missing(self)  # torch takes what is in memory for a kernel without values
        features = self.last_map(pixel_values.to(self.dtype)).flatten(1, 2)
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=features.mean(dim=1))


class HfResNetBaseForImageClassification(HfResNetPreTrainedModel, HfPooledForImageClassification):
    """Abstract: a family's model with a zero-initialised linear head."""

    model_class: ClassVar[type[HfResNetBaseModel]]


class HfResNetBaseBackbone(HfBaseBackbone, HfResNetPreTrainedModel):
    """Abstract: root and stages of a family's model as feature maps, for detectors and segmenters.

    Config fields:
        out_features, out_indices: which of "stem" (the root), "stage1" ... (after each stage): strides 4, 4, 8, 16 ...

    Checkpoints of a family's model and of its classifier load straight into its backbone, and the other way.
    """

    model_class: ClassVar[type[HfResNetBaseModel]]
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"classifier\."]

    def __init__(self, config: HfResNetBaseConfig) -> None:
        super().__init__(config)
        stages = range(len(config.stage_depths))
        self.num_features = [config.stem_width, *(4 * config.stem_width * 2**index for index in stages)]
        self.resnet = self.model_class(config)
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the mixin's own forward is a placeholder)
        self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BackboneOutput:
        """Images [B, C, H, W] -> one map [B, C', h, w] for each of `out_features`; hidden_states are the model's."""
        if not self.config.stage_depths:  # the maps are what units are given and put out
            raise ValueError("stage_depths=() is a root alone; a backbone needs at least one stage, such as (1,)")
        outputs = self.resnet(pixel_values, return_dict=True, **kwargs)
        ends = itertools.accumulate(self.config.stage_depths, initial=0)  # the root, and the last unit of every stage
        stages = zip(self.stage_names, ends, strict=True)
        # transformers writes tuple[Tensor] for a tuple of any length.
        feature_maps: Any = tuple(
            self.feature_map(outputs.hidden_states[end]) for name, end in stages if name in self.out_features
        )
        return BackboneOutput(feature_maps=feature_maps, hidden_states=outputs.hidden_states)

    @property
    def strides(self) -> list[int]:
        return [4 * 2 ** max(self.stage_names.index(name) - 1, 0) for name in self.out_features]

    def feature_map(self, state: torch.Tensor) -> torch.Tensor:
        """A hidden state as [B, C, h, w]."""
        return state.contiguous()
