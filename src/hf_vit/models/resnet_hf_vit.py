"""Define the parts of BiT's ResNets, which also form the stem of the hybrids.

Legend: B batch, C channels, H x W px, h x w cells of a map; a kernel is [O, I, k, k]: output and input channels, side.
Sources: BiT, arXiv 1912.11370, with weight standardization (1903.10520) and GroupNorm, in the post-activation form of
the original code and with its constants.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_hf_vit import HfBaseConfig

GROUPS = 32


def to_channels_last(images: torch.Tensor) -> torch.Tensor:
    """Return images [B, C, H, W] in the memory layout in which convolutions run fastest, on CPUs and GPUs alike."""
    return images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def compute_same_padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return TensorFlow's SAME padding (before, after) of one side, which depends on the side and may be uneven."""
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


def pad_same(images: torch.Tensor, kernel: int, stride: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Pad images if SAME padding is uneven; return them with the (height, width) padding left to the operator."""
    top, bottom = compute_same_padding(images.shape[2], kernel, stride)
    left, right = compute_same_padding(images.shape[3], kernel, stride)
    if top == bottom and left == right:
        return images, (top, left)
    return F.pad(images, (left, right, top, bottom)), (0, 0)


def pad_evenly(images: torch.Tensor, kernel: int, stride: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the images unchanged with the (height, width) padding left to the operator, the same for every size."""
    return images, (kernel // 2, kernel // 2)


def max_pool_same(features: torch.Tensor) -> torch.Tensor:
    """Run a 3x3 max-pool of stride 2 with SAME padding.

    The padding is even or one cell longer at the end; `ceil_mode` adds that cell.
    """
    padding = (compute_same_padding(features.shape[2], 3, 2)[0], compute_same_padding(features.shape[3], 3, 2)[0])
    return F.max_pool2d(features, kernel_size=3, stride=2, padding=padding, ceil_mode=True)


def standardize_by_std(kernel: torch.Tensor) -> torch.Tensor:
    """Standardize a kernel per output channel; add 1e-5 to the standard deviation, as in the original code."""
    rows = kernel.flatten(1)
    # On CPUs twice as fast as torch.std_mean, and in bfloat16 as torch.mean, which makes a float32 copy.
    centered = rows - rows.sum(dim=1, keepdim=True) / rows.shape[1]
    deviation = torch.linalg.vector_norm(centered, dim=1, keepdim=True) * rows.shape[1] ** -0.5
    return (centered / (deviation + 1e-5)).view_as(kernel)


def standardize_by_variance(kernel: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """Standardize a kernel per output channel; add `eps` to the variance (1e-8 in timm and transformers)."""
    rows = kernel.flatten(1)
    return F.layer_norm(rows, rows.shape[1:], eps=eps).view_as(kernel)


STANDARDIZATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("std", "original"), standardize_by_std),  # "original" is HfBitConfig's name for it
    "variance": standardize_by_variance,
    "paper": functools.partial(standardize_by_variance, eps=1e-10),  # arXiv 1912.11370
    None: nn.Identity(),
}
PADDINGS = {"same": pad_same, "even": pad_evenly}


class StdConv2d(nn.Conv2d):
    """Padded convolution that standardizes its kernel in every forward pass.

    Args:
        padding: "same" (TensorFlow's, which depends on the input's size) or "even" (the same on all sides).
        standardization: "std" (w - mean) / (std + 1e-5), as in the original code; "variance", as in timm and
            transformers; "paper", as in BiT; None leaves the kernel as it is (adapters build their low-rank updates
            from this class).
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
        """Return the standardized kernel [O, I, k, k]."""
        return self._standardize(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve [B, C, H, W] with the standardized kernel."""
        kernel = self.standardized()
        if self.kernel_size == self.stride == (1, 1) and self.groups == 1:  # faster as a dense layer
            return F.linear(input.permute(0, 2, 3, 1), kernel.flatten(1), self.bias).permute(0, 3, 1, 2)
        return self.convolve(input, kernel)

    def convolve(self, input: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Pad the input and convolve it with a standardized kernel."""
        padded, padding = self._pad(input, self.kernel_size[0], self.stride[0])
        return F.conv2d(padded, kernel, self.bias, stride=self.stride, padding=padding, groups=self.groups)


def build_conv_and_norm(
    config: HfBaseConfig, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1
) -> tuple[StdConv2d, nn.GroupNorm]:
    """Return a convolution of the stem and the GroupNorm that follows it."""
    eps = config.layer_norm_eps if config.group_norm_eps is None else config.group_norm_eps
    standardization = config.weight_standardization
    conv = StdConv2d(in_channels, out_channels, kernel_size, stride, standardization=standardization)
    return conv, nn.GroupNorm(GROUPS, out_channels, eps)


class ResNetBottleneck(nn.Module):
    """Residual unit 1x1, 3x3, 1x1, each with GroupNorm; the ReLU comes after the sum (post-activation).

    [B, C, H, W] -> [B, 4 * width, H / stride, W / stride]. The shortcut has a projection if the shape changes, as in
    the first unit of every stage.
    """

    def __init__(self, config: HfBaseConfig, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = 4 * width
        self.conv1, self.norm1 = build_conv_and_norm(config, in_channels, width, 1)
        self.conv2, self.norm2 = build_conv_and_norm(config, width, width, 3, stride)
        self.conv3, self.norm3 = build_conv_and_norm(config, width, out_channels, 1)
        self.projection = self.projection_norm = None
        if stride != 1 or in_channels != out_channels:
            self.projection, self.projection_norm = build_conv_and_norm(config, in_channels, out_channels, 1, stride)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Transform a map [B, C, H, W]."""
        residual = features
        if self.projection is not None and self.projection_norm is not None:
            residual = self.projection_norm(self.projection(features))
        hidden = F.relu(self.norm1(self.conv1(features)))
        hidden = F.relu(self.norm2(self.conv2(hidden)))
        return F.relu(self.norm3(self.conv3(hidden)) + residual)

    def init_weights(self) -> None:
        init.zeros_(self.norm3.weight)


def build_residual_stages(
    config: HfBaseConfig, build_unit: Callable[[HfBaseConfig, int, int, int], nn.Module]
) -> tuple[nn.ModuleList, int]:
    """Return the stages of residual units, and the channels of the last one.

    Args:
        config: names `stage_depths` and `stem_width`.
        build_unit: makes a unit from config, input channels, width and stride.
    """
    channels = config.stem_width
    stages = nn.ModuleList()
    for index, depth in enumerate(config.stage_depths):
        width = config.stem_width * 2**index
        units = nn.Sequential()
        for unit in range(depth):
            stride = 2 if unit == 0 and index > 0 else 1
            units.append(build_unit(config, channels, width, stride))
            channels = 4 * width  # a unit returns four times its inner width
        stages.append(units)
    return stages, channels


class ResNetStem(nn.Module):
    """Root (7x7/2 convolution, GroupNorm, ReLU, 3x3/2 max-pool) and stages: [B, C, H, W] -> [B, C', h, w]."""

    def __init__(self, config: HfBaseConfig) -> None:
        super().__init__()
        self.root_conv, self.root_norm = build_conv_and_norm(config, config.num_channels, config.stem_width, 7, 2)
        self.stages, self.out_channels = build_residual_stages(config, ResNetBottleneck)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the map [B, C', h, w] of images [B, C, H, W]."""
        features = self.root_conv(to_channels_last(pixel_values))
        features = F.relu(max_pool_same(self.root_norm(features)))  # ReLU after pooling: same result, fewer values
        for stage in self.stages:
            features = stage(features)
        return features
