"""The parts of BiT's ResNets: under the stem of the hybrids, and under BiT itself.

Legend: B batch, C channels, H x W px, h x w places of a map.
Sources: BiT, arXiv 1912.11370, with weight standardization (1903.10520) and GroupNorm, in the post-activation form of
the original code, whose constants are kept.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_hf_vit import HfBaseConfig

GROUPS = 32


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] in the memory layout that convolutions run fastest in, on CPUs and GPUs alike."""
    return images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def same_padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """(before, after) of TensorFlow's SAME padding, which depends on the input's size and may be uneven."""
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


def pad_same(images: torch.Tensor, kernel: int, stride: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Pad unevenly where needed; what is even is left to the operator, returned as its (height, width) padding."""
    top, bottom = same_padding(images.shape[2], kernel, stride)
    left, right = same_padding(images.shape[3], kernel, stride)
    if top == bottom and left == right:
        return images, (top, left)
    return F.pad(images, (left, right, top, bottom)), (0, 0)


def pad_evenly(images: torch.Tensor, kernel: int, stride: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the same padding on all sides, whatever the input's size."""
    return images, (kernel // 2, kernel // 2)


def max_pool_same(features: torch.Tensor) -> torch.Tensor:
    """3x3 max-pool of stride 2 with SAME padding, which is even or lacks one place at the end: `ceil_mode` adds it."""
    padding = (same_padding(features.shape[2], 3, 2)[0], same_padding(features.shape[3], 3, 2)[0])
    return F.max_pool2d(features, kernel_size=3, stride=2, padding=padding, ceil_mode=True)


def standardize_by_std(kernel: torch.Tensor) -> torch.Tensor:
    """[O, I, k, k] an output channel: 1e-5 is added to the standard deviation, as in the original code."""
    rows = kernel.flatten(1)
    # Twice as fast on CPUs as torch.std_mean, and in bfloat16 as torch.mean, which copies all to float32.
    centred = rows - rows.sum(dim=1, keepdim=True) / rows.shape[1]
    deviation = torch.linalg.vector_norm(centred, dim=1, keepdim=True) * rows.shape[1] ** -0.5
    return (centred / (deviation + 1e-5)).view_as(kernel)


def standardize_by_variance(kernel: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """[O, I, k, k] an output channel: 1e-8 is added to the variance, as timm and transformers do."""
    rows = kernel.flatten(1)
    return F.layer_norm(rows, rows.shape[1:], eps=eps).view_as(kernel)


STANDARDIZATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("std", "original"), standardize_by_std),  # the latter of BiT's post-activation units
    "variance": standardize_by_variance,
    "paper": functools.partial(standardize_by_variance, eps=1e-10),  # BiT's (arXiv 1912.11370)
    None: nn.Identity(),
}
PADDINGS = {"same": pad_same, "even": pad_evenly}


class StdConv2d(nn.Conv2d):
    """Padded convolution whose kernel is standardized at every pass.

    Args:
        padding: "same" (TensorFlow's, by the input's size) or "even" (the same on all sides).
        standardization: "std" (w - mean) / (std + 1e-5), the original's; "variance", timm's and transformers'; "paper",
            BiT's; None leaves the kernel as it is, which is how adapters build their low-rank updates from this class.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str = "same",
        groups: int = 1,
        bias: bool = False,
        standardization: str | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, groups=groups, bias=bias)
        self.padding = padding
        self._standardize, self._pad = STANDARDIZATIONS[standardization], PADDINGS[padding]

    def standardized(self) -> torch.Tensor:
        """Return the kernel [O, I, k, k] that is used."""
        return self._standardize(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kernel = self.standardized()
        if self.kernel_size == self.stride == (1, 1) and self.groups == 1:  # a dense layer, and run faster as one
            return F.linear(input.permute(0, 2, 3, 1), kernel.flatten(1), self.bias).permute(0, 3, 1, 2)
        return self.convolved(input, kernel)

    def convolved(self, input: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Return what a standardized kernel makes of the input."""
        padded, padding = self._pad(input, self.kernel_size[0], self.stride[0])
        return F.conv2d(padded, kernel, self.bias, stride=self.stride, padding=padding, groups=self.groups)


def conv_and_norm(
    config: HfBaseConfig, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1
) -> tuple[StdConv2d, nn.GroupNorm]:
    """Return a convolution of the stem and the GroupNorm that follows it."""
    eps = config.layer_norm_eps if config.group_norm_eps is None else config.group_norm_eps
    style = config.weight_standardization
    conv = StdConv2d(in_channels, out_channels, kernel_size, stride, standardization=style)
    return conv, nn.GroupNorm(GROUPS, out_channels, eps)


class ResNetBottleneck(nn.Module):
    """Residual unit 1x1, 3x3, 1x1, each with GroupNorm; the ReLU comes after the sum (post-activation).

    [B, C, H, W] -> [B, 4 * width, H / stride, W / stride]; a projection where the shape changes, which is the first
    unit of every stage.
    """

    def __init__(self, config: HfBaseConfig, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = 4 * width
        self.conv1, self.norm1 = conv_and_norm(config, in_channels, width, 1)
        self.conv2, self.norm2 = conv_and_norm(config, width, width, 3, stride)
        self.conv3, self.norm3 = conv_and_norm(config, width, out_channels, 1)
        self.projection = self.projection_norm = None
        if stride != 1 or in_channels != out_channels:
            self.projection, self.projection_norm = conv_and_norm(config, in_channels, out_channels, 1, stride)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        residual = features
        if self.projection is not None and self.projection_norm is not None:
            residual = self.projection_norm(self.projection(features))
        hidden = F.relu(self.norm1(self.conv1(features)))
        hidden = F.relu(self.norm2(self.conv2(hidden)))
        return F.relu(self.norm3(self.conv3(hidden)) + residual)

    def init_weights(self) -> None:
        init.zeros_(self.norm3.weight)


def residual_stages(
    config: HfBaseConfig, build_unit: Callable[[HfBaseConfig, int, int, int], nn.Module]
) -> tuple[nn.ModuleList, int]:
    """(stages of units, which are built from config, channels, width and stride; channels of the last one)."""
    channels, stages = config.stem_width, nn.ModuleList()
    for index, depth in enumerate(config.stage_depths):
        width, units = config.stem_width * 2**index, nn.Sequential()
        for unit in range(depth):
            units.append(build_unit(config, channels, width, 2 if unit == 0 and index > 0 else 1))
            channels = 4 * width
        stages.append(units)
    return stages, channels


class ResNetStem(nn.Module):
    """Root (7x7/2 convolution, GroupNorm, ReLU, 3x3/2 max-pool) and stages: [B, C, H, W] -> [B, C', H', W']."""

    def __init__(self, config: HfBaseConfig) -> None:
        super().__init__()
        self.root_conv, self.root_norm = conv_and_norm(config, config.num_channels, config.stem_width, 7, 2)
        self.stages, self.out_channels = residual_stages(config, ResNetBottleneck)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        features = self.root_conv(channels_last(pixel_values))
        features = F.relu(max_pool_same(self.root_norm(features)))  # either order is the same; this one touches less
        for stage in self.stages:
            features = stage(features)
        return features
