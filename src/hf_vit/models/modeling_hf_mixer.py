"""Define the MLP-Mixer from the bottom up: patches, MLP, block, the bare model, classifier and backbone.

Legend: B batch, C channels, H x W px, h x w patch grid, N tokens (one per patch), D hidden size, K labels.
Sources: Tolstikhin et al., arXiv 2105.01601 (section 2, table 1); stochastic depth 1603.09382. Details that the paper
leaves open follow the original JAX code, vit_jax/models_mixer.py (tanh GELU, eps 1e-6, initialization).
"""

from typing import Any, ClassVar, Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_mixer import HfMixerConfig
from .pretrained_hf_vit import (
    HfBaseBackbone,
    HfPooledForImageClassification,
    HfPreTrainedModel,
    check_images,
    check_values,
    lecun_normal_,
)


class HfMixerPatchEmbeddings(nn.Module):
    """Cut an image into patches and project each: [B, C, H, W] -> [B, N, D], row by row."""

    def __init__(self, config: HfMixerConfig) -> None:
        super().__init__()
        self.stride = config.patch_stride  # the projection may be replaced by a layer of peft, which has none
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, self.stride, stride=self.stride)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the patches [B, N, D] of images [B, C, H, W], padded on all sides to whole patches."""
        height, width = pixel_values.shape[2:]
        stride_h, stride_w = self.stride
        missing_rows, missing_columns = -height % stride_h, -width % stride_w
        if missing_rows or missing_columns:  # TensorFlow's SAME padding, which adds an odd px at the right or bottom
            left, top = missing_columns // 2, missing_rows // 2
            pixel_values = F.pad(pixel_values, (left, missing_columns - left, top, missing_rows - top))
        return self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)


class HfMixerEmbeddings(nn.Module):
    """Turn images of the model's one size into tokens: [B, C, H, W] -> [B, N, D]; there are no positions."""

    def __init__(self, config: HfMixerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embeddings = HfMixerPatchEmbeddings(config)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Embed images; raise a ValueError for other sizes than the model's one, and for weights without values."""
        check_images(pixel_values, self.config.num_channels)
        self.config.grid_of(pixel_values.shape[2], pixel_values.shape[3])
        check_values(pixel_values, self.patch_embeddings)
        return self.patch_embeddings(pixel_values)

    def check_size(self, config: HfMixerConfig) -> None:
        """Raise a ValueError if the sizes of a new config differ from the model's image (px) or patch size."""
        if (config.nominal_size, config.patch_stride) != (self.config.nominal_size, self.config.patch_stride):
            raise ValueError(
                f"this MLP-Mixer cannot be resized to image_size={config.image_size} and "
                f"patch_size={config.patch_size}, as its token MLP has a weight for every patch; keep image_size="
                f"{self.config.image_size} and patch_size={self.config.patch_size}, or train a new model"
            )


class HfMixerMLP(nn.Module):
    """Two dense layers with an activation between, across the last axis: [.., width] -> [.., width]."""

    def __init__(self, width: int, intermediate_size: int, hidden_act: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, intermediate_size)
        self.activation_fn = ACT2FN[hidden_act]
        self.fc2 = nn.Linear(intermediate_size, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation_fn(self.fc1(hidden_states)))

    def init_weights(self) -> None:
        for dense in (self.fc1, self.fc2):
            lecun_normal_(dense.weight)


class HfMixerLayer(GradientCheckpointingLayer):
    """Pre-norm block: an MLP across the tokens, then one across the channels, each with a residual, on [B, N, D].

    The token MLP is the same for every channel, the channel MLP for every token (equation 1).
    """

    def __init__(self, config: HfMixerConfig, drop_path_rate: float) -> None:
        super().__init__()
        h, w = config.grid
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.token_mlp = HfMixerMLP(h * w, config.token_intermediate_size, config.hidden_act)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HfMixerMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.drop_path_rate = drop_path_rate

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        token_branch = self.token_mlp(self.layernorm_before(hidden_states).transpose(1, 2)).transpose(1, 2)
        hidden_states = self.add(hidden_states, token_branch)
        return self.add(hidden_states, self.mlp(self.layernorm_after(hidden_states)))

    def add(self, hidden_states: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Return the residual sum; in training, drop the branch of whole images at random and keep its expectation."""
        if self.training and self.drop_path_rate:
            keep = torch.empty(branch.shape[0], 1, 1, device=branch.device, dtype=branch.dtype)
            branch = branch * keep.bernoulli_(1.0 - self.drop_path_rate) / (1.0 - self.drop_path_rate)
        return hidden_states + branch


class HfMixerPreTrainedModel(HfPreTrainedModel):
    """Abstract: what transformers needs to know about models with these blocks."""

    config: HfMixerConfig
    config_class: ClassVar[type] = HfMixerConfig
    base_model_prefix = "mixer"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["HfMixerEmbeddings", "HfMixerLayer"]
    _input_embed_layer = "patch_embeddings"
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": HfMixerLayer}


class HfMixerModel(HfMixerPreTrainedModel):
    """The bare MLP-Mixer: patches -> blocks -> last LayerNorm, and the mean of all tokens."""

    def __init__(self, config: HfMixerConfig) -> None:
        super().__init__(config)
        self.embeddings = HfMixerEmbeddings(config)
        step = config.drop_path_rate / max(config.num_hidden_layers - 1, 1)
        self.layers = nn.ModuleList([HfMixerLayer(config, i * step) for i in range(config.num_hidden_layers)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode images [B, C, H, W] of the configuration's `image_size`.

        Returns:
            last_hidden_state [B, N, D], row by row; pooler_output [B, D], their mean; hidden_states if requested.

        Raises:
            ValueError: images have another size, or `patch_attention_mask` is given, which other families use for
                padding.
        """
        if patch_attention_mask is not None:
            raise ValueError(
                f"{type(self).__name__} does not take patch_attention_mask; give images of one size without padding"
            )
        hidden_states = self.embeddings(pixel_values)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        hidden_states = self.layernorm(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=hidden_states.mean(dim=1))


class HfMixerForImageClassification(HfMixerPreTrainedModel, HfPooledForImageClassification):
    """The MLP-Mixer with a zero-initialized linear classifier on the mean of its tokens."""

    model_class: ClassVar[type] = HfMixerModel


class HfMixerBackbone(HfMixerPreTrainedModel, HfBaseBackbone):
    """The MLP-Mixer's blocks as feature maps, for detectors and segmenters that take images of one size.

    Config fields:
        out_features, out_indices: the output stages among "stem" (the embedded patches), "stage1" ... (after each
            block); a stage's map is the next block's input.
    """

    model_class: ClassVar[type] = HfMixerModel
