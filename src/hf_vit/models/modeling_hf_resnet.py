"""Define what ResNets share as models: an encoder, the mean of its last map, and a linear classifier on that.

Legend: B batch, C channels, C' channels of the last map, H x W px, h x w cells of a map, K labels.
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
from .pretrained_hf_vit import HfBaseBackbone, HfPreTrainedModel, LayerFeatures, check_images, check_values


class HfResNetPreTrainedModel(HfPreTrainedModel):
    """Abstract: a model without tokens."""

    base_model_prefix = "resnet"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights, also in a replica of nn.DataParallel, which has no parameters itself."""
        return self.get_input_embeddings().weight.dtype  # pyright: ignore[reportReturnType]

    def get_input_embeddings(self) -> nn.Module:
        """Return the convolution that reads the image, which quantization and adapters look up."""
        return self.base_model.encoder.root_conv  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path | None, *args: Any, **kwargs: Any) -> Self:
        """Load a model, as for every model of the package.

        Raises:
            OSError: the weights have the names of version 0.1.0, before the first release.
        """
        with_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        if any(name.startswith(("vit.", "stem.")) for name in info["unexpected_keys"]):
            raise OSError(
                f"{pretrained_model_name_or_path} was saved by hf_vit 0.1.0, whose {cls.__name__} has other parameter "
                "names; convert the original checkpoint again with `hf-vit convert`, or train the model again"
            )
        return loaded if with_info else model


class HfResNetBaseModel(HfResNetPreTrainedModel):
    """Abstract: pool the last map of a network that the family defines in `build_encoder`."""

    def __init__(self, config: HfResNetBaseConfig) -> None:
        super().__init__(config)
        self.encoder: Any = self.build_encoder(config)
        self.post_init()

    def build_encoder(self, config: Any) -> nn.Module:
        """Return the network of the family: [B, C, H, W] -> its last map."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: define build_encoder")

    def last_map(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images [B, C, H, W] as the last map [B, h, w, C']."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: define last_map")

    def stage_states(self, hidden_states: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Return the states of the root and of the last unit of every stage."""
        if not self.config.stage_depths:  # hidden states are recorded at the units, of which there are none
            raise ValueError("stage_depths=() has no stages; give at least one, such as stage_depths=(1,)")
        return [hidden_states[end] for end in itertools.accumulate(self.config.stage_depths, initial=0)]

    def layer_states(self, hidden_states: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return self.stage_states(hidden_states)[1:]

    def split_tokens(self, state: torch.Tensor, grid: tuple[int, int]) -> LayerFeatures:
        cells = self.feature_map(state)
        return super().split_tokens(cells.flatten(2).transpose(1, 2), (cells.shape[2], cells.shape[3]))

    def normalize_layer(self, state: torch.Tensor, is_last: bool) -> torch.Tensor:
        return state

    def feature_map(self, state: torch.Tensor) -> torch.Tensor:
        """Return a hidden state as [B, C, h, w]."""
        return state.contiguous()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode images [B, C, H, W].

        Returns:
            last_hidden_state [B, h*w, C'], row by row; pooler_output [B, C'], its mean; if requested, hidden_states,
                the maps of the root and of every unit, with the family's internal order of axes.

        Raises:
            ValueError: `patch_attention_mask` is given, which other families use for padding.
        """
        if patch_attention_mask is not None:
            raise ValueError(
                f"{type(self).__name__} does not take patch_attention_mask; give images of one size without padding"
            )
        check_images(pixel_values, self.config.num_channels)
        check_values(pixel_values, self)
        features = self.last_map(pixel_values.to(self.dtype)).flatten(1, 2)
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=features.mean(dim=1))


class HfResNetBaseBackbone(HfResNetPreTrainedModel, HfBaseBackbone):
    """Abstract: return root and stages of a family's model as feature maps, for detectors and segmenters.

    Config fields:
        out_features, out_indices: the output stages among "stem" (the root), "stage1" ... (after each stage), with the
            strides 4, 4, 8, 16, ... px.
    """

    def __init__(self, config: HfResNetBaseConfig) -> None:
        super().__init__(config)
        self.num_features = [config.stem_width, *(4 * config.stem_width * 2**i for i in range(config.num_stages))]

    @property
    def strides(self) -> list[int]:
        return [4 * 2 ** max(self.stage_names.index(name) - 1, 0) for name in self.out_features]

    def _iterate_stage_states(self, hidden_states: tuple[torch.Tensor, ...]) -> Iterable[torch.Tensor]:
        model: Any = self.base_model
        return model.stage_states(hidden_states)

    def feature_map(self, state: torch.Tensor) -> torch.Tensor:
        """Return a hidden state as [B, C, h, w]."""
        model: Any = self.base_model
        return model.feature_map(state)
