"""Rewrite parts of a frozen model to save time and memory: keep tables, compute in portions, overwrite inputs.

Legend: B batch, C channels, H x W px, h x w patch grid, A heads, L positions of a line, M lines, K size of a query.
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

KEPT_GRIDS = 16  # number of image sizes whose tables are kept; the oldest is dropped first
SMALL_MAP = 1024  # cells of a map; torch normalizes smaller maps by another, slower kernel
CACHED_LOGITS = 2**18  # logits computed at a time on a CPU, so that they fit into its cache


@final
class CachingEmbeddings(HfViTEmbeddings):
    """`HfViTEmbeddings` that computes resampled and sinusoidal tables once per grid.

    Cached tables would not follow changes of their parameters, so the parameters are hidden in `tables`.
    """

    cache: dict[Any, Rows]
    tables: tuple[HfViTEmbeddings]  # in a tuple, which makes it no submodule

    def position_table(self, grid: Grid, like: torch.Tensor) -> Rows:
        """Return the position embeddings of a grid from the cache, or compute and cache them."""
        if type(like) is not torch.Tensor:  # a tracer's tensor, which may have no values
            return self.tables[0].position_table(grid, like)
        key = grid, like.dtype, like.device
        rows = self.cache.get(key)
        if rows is None:
            if len(self.cache) >= KEPT_GRIDS:
                self.cache.pop(next(iter(self.cache)), None)
            rows = self.cache[key] = self.tables[0].position_table(grid, like)
        return rows


@final
class PortionedAttention(HfAxialResNetAttention):
    """`HfAxialResNetAttention` that computes only as many lines at a time as fit into a CPU's cache.

    Both of its batch norms become one sum, unless they have hooks.
    """

    def add_normalized(self, content: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Apply both batch norms and add the results, as one scale for each and one shift."""
        if has_listeners(self.content_norm) or has_listeners(self.position_norm):
            return super().add_normalized(content, position)
        (scale, shift), (other_scale, other_shift) = (
            [tensor.view(content.shape[2:]) for tensor in scale_and_shift(norm)]
            for norm in (self.content_norm, self.position_norm)
        )
        return torch.addcmul(torch.addcmul(shift + other_shift, content, scale), position, other_scale)

    def attend_lines(
        self, qkv: torch.Tensor, scales: torch.Tensor, to_q: torch.Tensor, to_k: torch.Tensor, to_v: torch.Tensor
    ) -> torch.Tensor:
        """Attend along as many lines at a time as fit into the cache of a CPU."""
        compute, offsets = super().attend_lines, (to_q, to_k, to_v)
        if qkv.device.type != "cpu":
            return compute(qkv, scales, *offsets)
        lines_per_portion = max(CACHED_LOGITS // (HEADS * qkv.shape[2] ** 2), 1)
        return torch.cat([compute(portion, scales, *offsets) for portion in qkv.split(lines_per_portion)])


@final
class InPlaceBottleneck(ResNetBottleneck):
    """`ResNetBottleneck` that overwrites values that nothing reads again, unless its parts have hooks."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Transform a map [B, C, H, W]; where hooks listen, compute it in the original way."""
        if any(has_listeners(child) for child in self.children()):
            return super().forward(features)
        residual = features
        if self.projection is not None and self.projection_norm is not None:
            residual = _normalize(self.projection_norm, self.projection(features))
        hidden = F.relu_(_normalize(self.norm1, self.conv1(features)))
        hidden = F.relu_(_normalize(self.norm2, self.conv2(hidden)))
        return F.relu_(_normalize(self.norm3, self.conv3(hidden)).add_(residual))


def _normalize(norm: nn.GroupNorm, features: torch.Tensor) -> torch.Tensor:
    """Apply a GroupNorm to [B, C, H, W].

    For small bfloat16 maps with few channels per group and channels-last memory, torch's CPU kernel is slower than
    changing the memory order twice.
    """
    is_slow = features.device.type == "cpu" and features.dtype == torch.bfloat16
    if is_slow and features.shape[2] * features.shape[3] < SMALL_MAP and norm.num_channels <= 8 * norm.num_groups:
        return channels_last(norm(features.contiguous()))
    return norm(features)


def memory_changes(model: nn.Module) -> list[Change]:
    """Return the changes of class for modules that keep their weights."""
    changes: list[Change] = []
    for module in model.modules():
        if type(module) is HfViTEmbeddings:
            visible_parameters = {
                name: parameter for name, parameter in module._parameters.items() if "position" not in name
            }
            tables: Any = derive(HfViTEmbeddings, module, without=tuple(module._modules))
            tables._parameters = {
                name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)
            }
            changes += [
                *(Change(module, "cache", {}), Change(module, "tables", (tables,))),
                *(Change(module, "_parameters", visible_parameters), Change(module, "__class__", CachingEmbeddings)),
            ]
        elif type(module) is HfAxialResNetAttention:
            changes.append(Change(module, "__class__", PortionedAttention))
        elif type(module) is ResNetBottleneck:
            changes.append(Change(module, "__class__", InPlaceBottleneck))
    return changes
