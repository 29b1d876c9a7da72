"""What a frozen model keeps between passes, computes in portions, and writes over.

Legend: h x w patch grid, A heads, L places of a line, M lines, K size of a query.
"""

from typing import Any, final

import torch
from torch import nn
from torch.nn import functional as F

from hf_vit.inference.layers import derive, scale_and_shift
from hf_vit.inference.plan import Change, has_listeners
from hf_vit.models.configuration_hf_axial_resnet import HEADS
from hf_vit.models.embeddings_hf_vit import Grid, HfViTEmbeddings, Rows
from hf_vit.models.modeling_hf_axial_resnet import HfAxialResNetAttention
from hf_vit.models.resnet_hf_vit import ResNetBottleneck, channels_last

KEPT_GRIDS = 16  # sizes of images whose tables are kept; of more, the oldest is computed anew
SMALL_MAP = 1024  # places, below which torch has another way to normalize
CACHED_LOGITS = 2**18  # computed at a time on a CPU: what fits into its cache


@final
class KeptEmbeddings(HfViTEmbeddings):
    """`HfViTEmbeddings` that computes resampled and sinusoidal tables once a grid.

    Tables that are kept do not follow their parameters, which therefore are out of reach: in `tables` alone.
    """

    kept: dict[Any, Rows]
    tables: tuple[HfViTEmbeddings]  # a tuple, so that it is no part of the model

    def position_table(self, grid: Grid, like: torch.Tensor) -> Rows:
        if type(like) is not torch.Tensor:  # nothing but shapes, maybe, as where a pass is traced
            return self.tables[0].position_table(grid, like)
        key = grid, like.dtype, like.device
        rows = self.kept.get(key)
        if rows is None:
            if len(self.kept) >= KEPT_GRIDS:
                self.kept.pop(next(iter(self.kept)), None)
            rows = self.kept[key] = self.tables[0].position_table(grid, like)
        return rows


@final
class PortionedAttention(HfAxialResNetAttention):
    """`HfAxialResNetAttention` that computes as many lines at a time as a CPU's cache holds the logits of.

    Both of its batch norms are one sum, unless somebody listens to them.
    """

    def add_normalized(self, content: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if has_listeners(self.content_norm) or has_listeners(self.position_norm):
            return super().add_normalized(content, position)
        (scale, shift), (other_scale, other_shift) = (
            [each.view(content.shape[2:]) for each in scale_and_shift(norm)]
            for norm in (self.content_norm, self.position_norm)
        )
        return torch.addcmul(torch.addcmul(shift + other_shift, content, scale), position, other_scale)

    def attend_lines(
        self, qkv: torch.Tensor, scales: torch.Tensor, to_q: torch.Tensor, to_k: torch.Tensor, to_v: torch.Tensor
    ) -> torch.Tensor:
        compute, offsets = super().attend_lines, (to_q, to_k, to_v)
        if qkv.device.type != "cpu":
            return compute(qkv, scales, *offsets)
        lines_per_portion = max(CACHED_LOGITS // (HEADS * qkv.shape[2] ** 2), 1)
        return torch.cat([compute(portion, scales, *offsets) for portion in qkv.split(lines_per_portion)])


@final
class InPlaceBottleneck(ResNetBottleneck):
    """`ResNetBottleneck` that writes sums and ReLUs over what nobody reads any more, nor listens to."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if any(has_listeners(part) for part in self.children()):
            return super().forward(features)
        residual = features
        if self.projection is not None and self.projection_norm is not None:
            residual = _normed(self.projection_norm, self.projection(features))
        hidden = F.relu_(_normed(self.norm1, self.conv1(features)))
        hidden = F.relu_(_normed(self.norm2, self.conv2(hidden)))
        return F.relu_(_normed(self.norm3, self.conv3(hidden)).add_(residual))


def _normed(norm: nn.GroupNorm, features: torch.Tensor) -> torch.Tensor:
    """Compute a GroupNorm of [B, C, H, W].

    On CPUs torch takes small maps in bfloat16, with few channels a group that are last in memory, value by value, for
    longer than two changes of the order in memory take.
    """
    is_slow = features.device.type == "cpu" and features.dtype == torch.bfloat16
    if is_slow and features.shape[2] * features.shape[3] < SMALL_MAP and norm.num_channels <= 8 * norm.num_groups:
        return channels_last(norm(features.contiguous()))
    return norm(features)


def memory_changes(model: nn.Module) -> list[Change]:
    """Return other classes for parts whose weights stay where they are."""
    changes: list[Change] = []
    for module in model.modules():
        if type(module) is HfViTEmbeddings:
            within_reach = {name: each for name, each in module._parameters.items() if "position" not in name}
            tables: Any = derive(HfViTEmbeddings, module, without=tuple(module._modules))
            tables._parameters = {name: each.detach() for name, each in module.named_parameters(recurse=False)}
            changes += [
                *(Change(module, "kept", {}), Change(module, "tables", (tables,))),
                *(Change(module, "_parameters", within_reach), Change(module, "__class__", KeptEmbeddings)),
            ]
        elif type(module) is HfAxialResNetAttention:
            changes.append(Change(module, "__class__", PortionedAttention))
        elif type(module) is ResNetBottleneck:
            changes.append(Change(module, "__class__", InPlaceBottleneck))
    return changes
