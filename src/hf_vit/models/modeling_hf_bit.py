"""Define BiT: ResNets with GroupNorm and standardized kernels, as classifiers.

Legend: B batch, C channels, C' channels of the last map, H x W px, h x w cells of a map.
Sources: arXiv 1912.11370; pre-activation units as in 1603.05027, with the constants and paddings of the original code.
The post-activation form, also the stem of the hybrids, is in `resnet_hf_vit`.
"""

import functools
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.output_capturing import OutputRecorder

from .configuration_hf_bit import HfBitConfig
from .configuration_hf_vit import HfBaseConfig
from .modeling_hf_resnet import HfResNetBaseBackbone, HfResNetBaseModel, HfResNetPreTrainedModel
from .pretrained_hf_vit import HfPooledForImageClassification
from .resnet_hf_vit import GROUPS, ResNetBottleneck, ResNetStem, StdConv2d, build_residual_stages, to_channels_last

EPS = 1e-5


def build_conv(config: Any, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> StdConv2d:
    """Return a convolution of the paper's ResNetV2."""
    standardization = "paper" if config.weight_standardization == "original" else config.weight_standardization
    return StdConv2d(in_channels, out_channels, kernel_size, stride, padding="even", standardization=standardization)


class HfBitPreActivationUnit(nn.Module):
    """Residual unit 1x1, 3x3, 1x1, each after GroupNorm and ReLU; nothing follows the sum.

    [B, C, H, W] -> [B, 4 * width, H / stride, W / stride]. If the shape changes, the shortcut projects the first
    convolution's input.
    """

    def __init__(self, config: HfBaseConfig, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = 4 * width
        conv = functools.partial(build_conv, config)
        self.norm1 = nn.GroupNorm(GROUPS, in_channels, EPS)
        self.conv1 = conv(in_channels, width, 1)
        self.norm2 = nn.GroupNorm(GROUPS, width, EPS)
        self.conv2 = conv(width, width, 3, stride)
        self.norm3 = nn.GroupNorm(GROUPS, width, EPS)
        self.conv3 = conv(width, out_channels, 1)
        shape_changes = stride != 1 or in_channels != out_channels
        self.projection = conv(in_channels, out_channels, 1, stride) if shape_changes else None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Transform a map [B, C, H, W]; norm and ReLU come before every convolution."""
        hidden = F.relu(self.norm1(features))
        residual = features if self.projection is None else self.projection(hidden)
        hidden = self.conv1(hidden)
        hidden = self.conv2(F.relu(self.norm2(hidden)))
        return residual + self.conv3(F.relu(self.norm3(hidden)))


class HfBitPreActivationEncoder(nn.Module):
    """Root (7x7/2 convolution, 3x3/2 max-pool), stages, GroupNorm and ReLU: [B, C, H, W] -> [B, C', h, w]."""

    def __init__(self, config: HfBitConfig) -> None:
        super().__init__()
        self.root_conv = build_conv(config, config.num_channels, config.stem_width, 7, 2)
        padded = nn.Sequential(nn.ZeroPad2d(1), nn.MaxPool2d(3, 2))
        self.root_pool = padded if config.zero_padded_pool else nn.MaxPool2d(3, 2, padding=1)
        self.stages, self.out_channels = build_residual_stages(config, HfBitPreActivationUnit)
        self.norm = nn.GroupNorm(GROUPS, self.out_channels, EPS)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the map [B, C', h, w] of images [B, C, H, W]."""
        features = self.root_pool(self.root_conv(to_channels_last(pixel_values)))
        for stage in self.stages:
            features = stage(features)
        return F.relu(self.norm(features))


class HfBitPreTrainedModel(HfResNetPreTrainedModel):
    """Abstract: what BiT's models share."""

    config: HfBitConfig
    config_class = HfBitConfig
    _no_split_modules: ClassVar[list[str]] = ["ResNetBottleneck", "HfBitPreActivationUnit"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": [OutputRecorder(ResNetBottleneck), OutputRecorder(HfBitPreActivationUnit)]
    }


class HfBitModel(HfBitPreTrainedModel, HfResNetBaseModel):
    """The bare BiT ResNet, which returns the cells of its last map and their mean."""

    def build_encoder(self, config: HfBitConfig) -> nn.Module:
        return HfBitPreActivationEncoder(config) if config.pre_activation else ResNetStem(config)

    def last_map(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.encoder(pixel_values).permute(0, 2, 3, 1)

    def normalize_layer(self, state: torch.Tensor, is_last: bool) -> torch.Tensor:
        return F.relu(self.encoder.norm(state)) if is_last and self.config.pre_activation else state


class HfBitForImageClassification(HfBitPreTrainedModel, HfPooledForImageClassification):
    """BiT with a linear classifier on the mean of its last map."""

    model_class: ClassVar[type] = HfBitModel


class HfBitBackbone(HfBitPreTrainedModel, HfResNetBaseBackbone):
    """BiT as a backbone; a stage's map is the next stage's input, without the last GroupNorm of a pre-activation
    network.
    """

    model_class: ClassVar[type] = HfBitModel
