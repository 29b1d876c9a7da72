"""What ResNets share as models of the package: a stem that is the whole network, and the mean of its last map.

Legend: B batch, C channels, H x W px, h x w places of a map.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_resnet import HfResNetBaseConfig
from .modeling_hf_vit import HfViTPreTrainedModel


class HfResNetPreTrainedModel(HfViTPreTrainedModel):
    """Abstract: no Transformer, no attention."""

    config: Any
    supports_gradient_checkpointing = False
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = False


class HfResNetBaseModel(HfResNetPreTrainedModel):
    """Abstract: a family supplies the network, as `stem`."""

    def __init__(self, config: HfResNetBaseConfig) -> None:
        super().__init__(config)
        self.stem = self.build_stem(config)
        self.post_init()

    def build_stem(self, config: Any) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} is abstract: a family supplies its stem")

    def last_map(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> [B, h, w, C']."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: a family knows the axes of its map")

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """[B, C, H, W] -> last_hidden_state [B, h*w, C'] row by row, pooler_output [B, C'], their mean.

        hidden_states, where asked for, are the maps of the root and of every unit, with the axes the family has inside.
        """
        if patch_attention_mask is not None:
            raise ValueError(f"patch_attention_mask does not go with {type(self).__name__}; give images of one size")
        features = self.last_map(pixel_values.to(self.dtype)).flatten(1, 2)
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=features.mean(dim=1))
