"""Define the Vision Transformer as a backbone: feature maps for detection, segmentation and depth.

Legend: B batch, C channels, H x W px, h x w patch grid, N tokens, D hidden size, L layers.
Sources: transformers' backbone contract; the simple feature pyramid of ViTDet (arXiv 2203.16527, section 3).
"""

import math
from typing import Any, ClassVar

import torch
from torch import nn

from .configuration_hf_vit import HfViTBaseConfig, HfViTConfig
from .embeddings_hf_vit import Grid
from .modeling_hf_vit import HfViTBaseModel, HfViTModel, HfViTPreTrainedModel
from .pretrained_hf_vit import HfBaseBackbone, check_values


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of every cell of a map [B, C, h, w]; transformers initializes norms by their name."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


def build_resize(config: HfViTBaseConfig, stride: int) -> tuple[nn.Sequential, int]:
    """Build the layers that resize a map from the patch stride to `stride` px; also return their output channels.

    Each doubling is a 2x2 deconvolution to half the channels, with norm and GELU between two of them; max-pooling makes
    a map smaller.
    """
    layers = nn.Sequential()
    width = config.hidden_size
    doublings = int(math.log2(config.patch_stride[0] / stride))
    for index in range(doublings):
        if index:
            layers.extend([ChannelLayerNorm(width, eps=config.layer_norm_eps), nn.GELU()])
        layers.append(nn.ConvTranspose2d(width, max(width // 2, 1), kernel_size=2, stride=2))
        width = max(width // 2, 1)
    if doublings < 0:
        # An odd side keeps its last row or column, so that a map is never empty.
        layers.append(nn.MaxPool2d(2**-doublings, ceil_mode=True))
    return layers, width


class PyramidLevel(nn.Module):
    """One scale of the pyramid: resize, 1x1 and 3x3 convolution, each with a norm: [B, D, h, w] -> [B, F, h', w']."""

    def __init__(self, config: HfViTBaseConfig, stride: int) -> None:
        super().__init__()
        self.resize, width = build_resize(config, stride)
        size = config.fpn_hidden_size
        self.projection = nn.Conv2d(width, size, kernel_size=1, bias=False)
        self.projection_norm = ChannelLayerNorm(size, eps=config.layer_norm_eps)
        self.convolution = nn.Conv2d(size, size, kernel_size=3, padding=1, bias=False)
        self.convolution_norm = ChannelLayerNorm(size, eps=config.layer_norm_eps)

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        hidden = self.projection_norm(self.projection(self.resize(feature_map)))
        return self.convolution_norm(self.convolution(hidden))


class SimpleFeaturePyramid(nn.Module):
    """ViTDet's pyramid from the last map: some of the strides 4, 8, 16 and 32 px (arXiv 2203.16527, section 3)."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        self.patch_stride = config.patch_stride
        self.levels = nn.ModuleList([PyramidLevel(config, stride) for stride in config.pyramid_strides])

    def forward(self, feature_map: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return maps [B, fpn_hidden_size, .., ..] of one map [B, D, h, w], one per stride, the finest first."""
        return tuple(level(feature_map) for level in self.levels)

    def check_size(self, config: HfViTBaseConfig) -> None:
        """Raise a ValueError if the patch size changes, as the layers are built for its stride."""
        if self.patch_stride != config.patch_stride:
            raise ValueError(
                f"the feature pyramid needs patch_size={self.patch_stride[0]}, got {config.patch_size}; load the "
                f"checkpoint with patch_size={config.patch_size} and use_feature_pyramid=False, save it, and load the "
                "saved model with use_feature_pyramid=True"
            )


class HfViTBaseBackbone(HfViTPreTrainedModel, HfBaseBackbone):
    """Abstract: return the stages of a family's model as feature maps.

    Config fields:
        out_features, out_indices: the output stages among "stem" (the embedded patches), "stage1" ... "stageL" (after
            each block).
        apply_layernorm: whether to apply the model's last LayerNorm to each stage.
        reshape_hidden_states: True: maps [B, D, h, w] of the patches; False: all tokens [B, N, D].
        use_feature_pyramid: whether to return ViTDet's four maps of strides 4, 8, 16 and 32 px (or those of
            `pyramid_strides`), made from the one stage of `out_features`, each with `fpn_hidden_size` channels.
    """

    model_class: ClassVar[type[HfViTBaseModel]]
    vit: HfViTBaseModel

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__(config)
        self.pyramid = SimpleFeaturePyramid(config) if config.use_feature_pyramid else None
        self.post_init()

    def _build_model(self, config: HfViTBaseConfig) -> HfViTBaseModel:
        return self.model_class(config, add_pooling_layer=False)

    @property
    def channels(self) -> list[int]:
        """Return the channels of each of the `feature_maps`."""
        if self.pyramid is not None:
            return [self.config.fpn_hidden_size] * len(self.config.pyramid_strides)
        return super().channels

    @property
    def strides(self) -> list[int]:
        return super().strides if self.pyramid is None else list(self.config.pyramid_strides)

    def _select_maps(self, outputs: Any, grid: Grid) -> tuple[torch.Tensor, ...]:
        """Return the maps of `out_features`, or the feature pyramid made from the only one."""
        maps = self.feature_maps(outputs, grid)
        if self.pyramid is None:
            return maps
        check_values(maps[0], self.pyramid)
        return self.pyramid(maps[0])

    def feature_maps(self, outputs: Any, grid: Grid) -> tuple[torch.Tensor, ...]:
        """Return the maps of `out_features` from the model's outputs."""
        return super()._select_maps(outputs, grid)

    def _map(self, state: torch.Tensor, grid: Grid) -> torch.Tensor:
        return self.feature_map(state, grid)

    def feature_map(self, hidden_state: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Turn one stage's tokens [B, N, D] into a map [B, D, h, w]; keep all tokens if `reshape_hidden_states` is
        False.
        """
        if self.config.apply_layernorm:
            hidden_state = self.vit.layernorm(hidden_state)
        if not self.config.reshape_hidden_states:
            return hidden_state
        return super()._map(hidden_state, grid)


class HfViTBackbone(HfViTBaseBackbone):
    """The Vision Transformer as a backbone for transformers' and torchvision's detectors and segmenters."""

    config: HfViTConfig
    model_class = HfViTModel
