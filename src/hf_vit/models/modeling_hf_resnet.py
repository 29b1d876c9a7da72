"""What ResNets share as models: an encoder, the mean of its last map, and a linear classifier on that.

Legend: B batch, C channels, H x W px, h x w places of a map, K labels.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_resnet import HfResNetBaseConfig
from .pretrained_hf_vit import (
    HfBaseBackbone,
    HfPreTrainedModel,
    check_images,
    check_values,
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
        check_values(pixel_values, self)
        features = self.last_map(pixel_values.to(self.dtype)).flatten(1, 2)
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=features.mean(dim=1))


class HfResNetBaseBackbone(HfResNetPreTrainedModel, HfBaseBackbone):
    """Abstract: root and stages of a family's model as feature maps, for detectors and segmenters.

    Config fields:
        out_features, out_indices: which of "stem" (the root), "stage1" ... (after each stage): strides 4, 4, 8, 16 ...
    """

    def __init__(self, config: HfResNetBaseConfig) -> None:
        super().__init__(config)
        stages = range(len(config.stage_depths))
        self.num_features = [config.stem_width, *(4 * config.stem_width * 2**index for index in stages)]

    @property
    def strides(self) -> list[int]:
        return [4 * 2 ** max(self.stage_names.index(name) - 1, 0) for name in self.out_features]

    def _stage_states(self, hidden_states: tuple[torch.Tensor, ...]) -> Iterable[torch.Tensor]:
        """Return the root's state, and that of the last unit of every stage."""
        if not self.config.stage_depths:  # the maps are what units are given and put out
            raise ValueError("stage_depths=() is a root alone; a backbone needs at least one stage, such as (1,)")
        return [hidden_states[end] for end in itertools.accumulate(self.config.stage_depths, initial=0)]

    def _map(self, state: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        return self.feature_map(state)

    def feature_map(self, state: torch.Tensor) -> torch.Tensor:
        """Return a hidden state as [B, C, h, w]."""
        return state.contiguous()
