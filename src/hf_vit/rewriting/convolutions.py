"""What ResNets compute at every pass though the weights stand still: standardised kernels, batch norms after products.

Legend: B batch, C channels, H x W px, O outputs, I inputs, k kernel side.
"""

from typing import Any, final

import torch
from torch import nn

from hf_vit.models.modeling_hf_axial_resnet import DenseNorm
from hf_vit.models.resnet_hf_vit import StdConv2d
from hf_vit.rewriting.dense import Dense, derived


@final
class StandardizedConv2d(StdConv2d):
    """`StdConv2d` that holds the standardised kernel [O, I, k, k], in whose dtype it computes, and not its weight."""

    kernel: torch.Tensor

    @classmethod
    def of(cls, conv: StdConv2d, dtype: torch.dtype) -> "StandardizedConv2d":
        new = derived(cls, conv)
        bias = None if conv.bias is None else conv.bias.detach().to(dtype)
        new._parameters, new._buffers = {}, {"weight": conv.weight.detach().to(dtype), "bias": bias}
        kernel = StdConv2d.standardized(new).contiguous(memory_format=torch.channels_last)
        new._buffers = {"kernel": kernel, "bias": bias}
        return new

    def standardized(self) -> torch.Tensor:
        return self.kernel

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wide = input.to(self.kernel.dtype)
        # In an engine's graph a product over channels would stand between two transposes.
        outputs = self.convolved(wide, self.kernel) if torch.compiler.is_exporting() else super().forward(wide)
        return outputs.to(input.dtype)


class ChannelwiseGroupNorm(nn.GroupNorm):
    """GroupNorm by sums over each channel's pixels, [B, C, H, W] -> [B, C, H, W]: for what has channels last.

    Where engines normalise a group at once, they take it to another layout and back; a compiler goes through memory by
    the group. The variance is that of what the mean was taken from, so that none of it cancels.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        centred = wide - self._of_groups(wide.mean((2, 3)))
        sums = torch.linalg.vector_norm(centred, dim=(2, 3)) ** 2
        variance = self._of_groups(sums / (input.shape[2] * input.shape[3]))
        weight, bias = (each[:, None, None] for each in (self.weight, self.bias))
        return (centred * (weight * torch.rsqrt(variance + self.eps)) + bias).to(input.dtype)

    def _of_groups(self, channels: torch.Tensor) -> torch.Tensor:
        """[B, C] -> [B, C, 1, 1], every channel with the mean of its group.

        By a product, which a compiler does not repeat for every pixel.
        """
        size = self.num_channels // self.num_groups
        means = channels.unflatten(1, (self.num_groups, size)).mean(2)
        spread = torch.eye(self.num_groups, dtype=means.dtype, device=means.device).repeat_interleave(size, 1)
        return (means @ spread)[:, :, None, None]


def as_affine(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift [C] of a batch norm in evaluation."""
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    return scale, norm.bias - norm.running_mean * scale


def dense_of_norm(dense_norm: DenseNorm, dtype: torch.dtype) -> Dense:
    """A product and the batch norm that follows it, in evaluation."""
    scale, shift = as_affine(dense_norm.norm)
    bias: Any = dense_norm.dense.bias  # the package's have none
    if bias is not None:
        shift = shift + bias * scale
    return Dense(dense_norm.dense.weight.to(dtype) * scale.to(dtype)[:, None], shift.to(dtype))
