"""The Hybrid-ViT: a ResNet stem (root and bottleneck stages) whose feature map is cut into patches.

Legend: B batch, C channels, H x W px, h x w patch grid, D hidden size.
Sources: arXiv 2010.11929 section 3.1 and table 6; the stem is BiT's (arXiv 1912.11370) with weight standardisation
(1903.10520) and GroupNorm, in the post-activation form of the original code, whose constants are kept.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .backbone_hf_vit import HfViTBaseBackbone
from .blocks_hf_vit import HfViTLayer
from .configuration_hf_hybrid_vit import HfHybridViTConfig
from .linear_hf_vit import is_emulated
from .modeling_hf_vit import HfViTBaseForImageClassification, HfViTBaseModel, HfViTPreTrainedModel
from .positions_hf_vit import optimizer_steps
from .pretraining_hf_vit import HfViTBaseForMaskedPatchPrediction

GROUPS = 32


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
    """The same padding on all sides, whatever the input's size."""
    return images, (kernel // 2, kernel // 2)


def max_pool_same(features: torch.Tensor) -> torch.Tensor:
    """3x3 max-pool of stride 2 with SAME padding, which is even or lacks one place at the end: `ceil_mode` adds it."""
    padding = (same_padding(features.shape[2], 3, 2)[0], same_padding(features.shape[3], 3, 2)[0])
    return F.max_pool2d(features, kernel_size=3, stride=2, padding=padding, ceil_mode=True)


def relu(features: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """ReLU of features (+ residual); written into `features` where no gradient needs them, which saves two copies."""
    if torch.is_grad_enabled():
        return F.relu(features if residual is None else features + residual)
    return F.relu_(features if residual is None else features.add_(residual))


def standardize_by_std(kernel: torch.Tensor) -> torch.Tensor:
    """[O, I, k, k] an output channel: 1e-5 is added to the standard deviation, as in the original code."""
    deviation, mean = torch.std_mean(kernel, dim=(1, 2, 3), correction=0, keepdim=True)
    return (kernel - mean) / (deviation + 1e-5)


def standardize_by_variance(kernel: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """[O, I, k, k] an output channel: 1e-8 is added to the variance, as timm and transformers do."""
    variance, mean = torch.var_mean(kernel, dim=(1, 2, 3), correction=0, keepdim=True)
    return (kernel - mean) / torch.sqrt(variance + eps)


STANDARDIZATIONS = {
    "std": standardize_by_std,
    "variance": standardize_by_variance,
    "paper": functools.partial(standardize_by_variance, eps=1e-10),  # BiT's (arXiv 1912.11370)
}
PADDINGS = {"same": pad_same, "even": pad_evenly}


class StdConv2d(nn.Conv2d):
    """Padded convolution whose kernel is standardised, by default SAME and (w - mean) / (std + 1e-5) a channel.

    In evaluation without gradients the standardised kernel is computed once for each version of the weight, in the
    memory layout that the convolution runs in. Every in-place change, load, optimiser step, move, `train()` or
    `eval()` makes it anew (writing through `.data` needs one of the last two); of weights whose changes cannot be seen
    (inference tensors, tensor subclasses, compiled graphs) none is kept. Without gradients, bfloat16 that the processor
    would only emulate is computed in float32, and kernels are kept in it.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        standardization: str = "std",
        padding: str = "same",
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, bias=False)
        self._standardize, self._pad = STANDARDIZATIONS[standardization], PADDINGS[padding]
        self._cached: tuple[weakref.ref[torch.Tensor], tuple[Any, ...], torch.Tensor] | None = None

    def standardized(self) -> torch.Tensor:
        """The kernel [O, I, k, k] that is used."""
        return self._standardize(self.weight)

    def kernel(self) -> torch.Tensor:
        """`standardized()`, or the kept one."""
        weight, watched = self.weight, not (self.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
        if not watched or type(weight) is not nn.Parameter or weight.is_inference():
            return self.standardized()
        # A parameter that takes another's place may inherit its address and version, hence the reference.
        emulated = is_emulated(weight, weight)
        version = weight._version, weight.data_ptr(), weight.dtype, emulated, optimizer_steps()[0]
        if self._cached is None or self._cached[0]() is not weight or self._cached[1] != version:
            kernel = self._standardize(weight.float() if emulated else weight)
            self._cached = weakref.ref(weight), version, kernel.contiguous(memory_format=torch.channels_last)
        return self._cached[2]

    def train(self, mode: bool = True) -> "StdConv2d":
        self._cached = None
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> "StdConv2d":
        self._cached = None
        return super()._apply(fn, recurse)

    def __getstate__(self):
        return {**super().__getstate__(), "_cached": None}  # a copied or pickled model carries no derived kernel

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or not is_emulated(input, self.weight):
            return self._convolve(input, self.kernel())
        with torch.autocast("cpu", enabled=False):
            return self._convolve(input.float(), self.kernel().float()).to(torch.bfloat16)

    def _convolve(self, input: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        if self.kernel_size == self.stride == (1, 1):  # a dense layer on every place, and run faster as one
            return F.linear(input.permute(0, 2, 3, 1), kernel.flatten(1)).permute(0, 3, 1, 2)
        padded, padding = self._pad(input, self.kernel_size[0], self.stride[0])
        return F.conv2d(padded, kernel, stride=self.stride, padding=padding)


def conv_and_norm(
    config: Any, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1
) -> tuple[StdConv2d, nn.GroupNorm]:
    """A convolution of the stem and the GroupNorm that follows it."""
    eps = config.layer_norm_eps if config.group_norm_eps is None else config.group_norm_eps
    conv = StdConv2d(in_channels, out_channels, kernel_size, stride, config.weight_standardization)
    return conv, nn.GroupNorm(GROUPS, out_channels, eps)


class HfHybridViTBottleneck(nn.Module):
    """Residual unit 1x1, 3x3, 1x1, each with GroupNorm; the ReLU comes after the sum (post-activation).

    [B, C, H, W] -> [B, 4 * width, H / stride, W / stride]; a projection where the shape changes, which is the first
    unit of every stage.
    """

    def __init__(self, config: Any, in_channels: int, width: int, stride: int) -> None:
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
        hidden = relu(self.norm1(self.conv1(features)))
        hidden = relu(self.norm2(self.conv2(hidden)))
        return relu(self.norm3(self.conv3(hidden)), residual)


def residual_stages(config: Any, build_unit: Callable[[Any, int, int, int], nn.Module]) -> tuple[nn.ModuleList, int]:
    """(stages of units, which are built from config, channels, width and stride; channels of the last one)."""
    channels, stages = config.stem_width, nn.ModuleList()
    for index, depth in enumerate(config.stage_depths):
        width, units = config.stem_width * 2**index, nn.Sequential()
        for unit in range(depth):
            units.append(build_unit(config, channels, width, 2 if unit == 0 and index > 0 else 1))
            channels = 4 * width
        stages.append(units)
    return stages, channels


class HfHybridViTStem(nn.Module):
    """Root (7x7/2 convolution, GroupNorm, ReLU, 3x3/2 max-pool) and stages: [B, C, H, W] -> [B, C', H', W']."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.root_conv, self.root_norm = conv_and_norm(config, config.num_channels, config.stem_width, 7, 2)
        self.stages, self.out_channels = residual_stages(config, HfHybridViTBottleneck)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        # Convolutions run fastest with channels last on CPUs and GPUs alike.
        features = self.root_conv(pixel_values.contiguous(memory_format=torch.channels_last))
        features = relu(max_pool_same(self.root_norm(features)))  # either order is the same; this one touches less
        for stage in self.stages:
            features = stage(features)
        return features


class HfHybridViTPatchEmbeddings(nn.Module):
    """Stem, then patches of its feature map, each projected: [B, C, H, W] -> [B, h*w, D], row by row."""

    def __init__(self, config: HfHybridViTConfig) -> None:
        super().__init__()
        self.stem = HfHybridViTStem(config)
        side = config.stem_patch_size
        self.projection = nn.Conv2d(self.stem.out_channels, config.hidden_size, kernel_size=side, stride=side)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.projection(self.stem(pixel_values)).flatten(2).transpose(1, 2)


class HfHybridViTPreTrainedModel(HfViTPreTrainedModel):
    """Abstract: what every model of the hybrid family shares."""

    config: HfHybridViTConfig
    config_class = HfHybridViTConfig
    _no_split_modules: ClassVar[list[str]] = ["HfHybridViTBottleneck", "HfViTLayer"]

    @classmethod
    def auto_classes(cls) -> dict[str, type]:
        return {
            "AutoConfig": HfHybridViTConfig,
            "AutoModel": HfHybridViTModel,
            "AutoModelForImageClassification": HfHybridViTForImageClassification,
            "AutoModelForMaskedImageModeling": HfHybridViTForMaskedPatchPrediction,
            "AutoBackbone": HfHybridViTBackbone,
        }

    def _init_special_cases(self, module: nn.Module) -> None:
        super()._init_special_cases(module)
        if isinstance(module, HfHybridViTBottleneck):
            init.zeros_(module.norm3.weight)


class HfHybridViTModel(HfHybridViTPreTrainedModel, HfViTBaseModel):
    """The bare Hybrid-ViT: tokens and the pooled output."""

    _auto_class = "AutoModel"

    def build_patch_embeddings(self, config: Any) -> nn.Module:
        return HfHybridViTPatchEmbeddings(config)

    def build_layer(self, config: Any, drop_path_rate: float) -> nn.Module:
        return HfViTLayer(config, drop_path_rate)


class HfHybridViTForImageClassification(HfHybridViTPreTrainedModel, HfViTBaseForImageClassification):
    """The Hybrid-ViT with a linear classifier on the pooled output."""

    model_class = HfHybridViTModel
    _auto_class = "AutoModelForImageClassification"


class HfHybridViTForMaskedPatchPrediction(HfHybridViTPreTrainedModel, HfViTBaseForMaskedPatchPrediction):
    """The Hybrid-ViT with a head that predicts patches; see `HfViTForMaskedPatchPrediction`."""

    model_class = HfHybridViTModel
    _auto_class = "AutoModelForMaskedImageModeling"


class HfHybridViTBackbone(HfHybridViTPreTrainedModel, HfViTBaseBackbone):
    """The Hybrid-ViT as a backbone; see `HfViTBackbone`."""

    model_class = HfHybridViTModel
    _auto_class = "AutoBackbone"
