"""Define AxialResNet: a ResNet whose 3x3 convolutions are column and row attention with relative positions.

Legend: B batch, H x W px, h x w cells of a map, C channels, A heads, L positions of a line (row or column), M = B *
lines of all images, K channels of a query or key, V = 2K channels of a value (each per head). Maps are [B, h, w, C].
Source: arXiv 2003.07853, section 3. Details that it leaves open follow its code: columns before rows, stride by mean
pooling after both, batch norms, initialization (He's variance by fan-out, position-sensitive parts by fan-in, last norm
of a unit zero). Choices made here: even paddings, halving rounds up, resampled tables.
"""

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_hf_axial_resnet import HEADS, HfAxialResNetConfig
from .configuration_hf_vit import HfBaseConfig
from .modeling_hf_resnet import HfResNetBaseBackbone, HfResNetBaseModel, HfResNetPreTrainedModel
from .pretrained_hf_vit import HfPooledForImageClassification


class DenseNorm(nn.Module):
    """1x1 convolution and batch norm on [..., C].

    The features are flattened first, as the result of a product with more axes depends on which inputs need gradients.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_channels, out_channels, bias=False)
        self.norm = nn.BatchNorm1d(out_channels)

    def init_weights(self) -> None:
        init.kaiming_normal_(self.dense.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dense(features.flatten(0, -2))).unflatten(0, features.shape[:-1])


class LogitNorm(nn.Module):
    """Batch norm of the logits q.k, q.r^q and k.r^k per head, as scales [3, A]; its shifts cancel in the softmax."""

    running_var: torch.Tensor
    momentum, eps = 0.1, 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, HEADS))
        self.register_buffer("running_var", torch.ones(3, HEADS))

    def init_weights(self) -> None:
        init.ones_(self.weight)
        init.ones_(self.running_var)

    def forward(self, q: torch.Tensor, k: torch.Tensor, to_q: torch.Tensor, to_k: torch.Tensor) -> torch.Tensor:
        """Return the scales [3, A] of the three logits of q, k [M, A, L, K] and offsets to_q, to_k [L, K, L]."""
        variance = self.running_var
        if self.training:
            mean_square, mean, number = self.compute_moments(q, k, to_q, to_k)
            variance = (mean_square - mean.square()).clamp(min=0)  # rounding may make it negative
            unbiased = variance.detach() * (number / (number - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return self.weight * torch.rsqrt(variance + self.eps)

    def compute_moments(self, q: torch.Tensor, k: torch.Tensor, to_q: torch.Tensor, to_k: torch.Tensor):
        """Return the mean squares and means [3, A] of the logits, and their number.

        Gram matrices give these sums without computing the logits.
        """
        number = q.shape[0] * q.shape[2] ** 2
        qk, offsets = torch.stack([q, k]), torch.stack([to_q, to_k])
        line_grams = qk.transpose(3, 4) @ qk
        position_grams = qk.permute(0, 2, 3, 4, 1) @ qk.permute(0, 2, 3, 1, 4)
        offset_grams = (offsets @ offsets.transpose(2, 3))[:, None]
        squares = [line_grams.prod(0).sum((0, 2, 3))[None], (position_grams * offset_grams).sum((2, 3, 4))]
        sums = [qk.sum(3).prod(0).sum((0, 2))[None], (qk.sum(1) * offsets.sum(3)[:, None]).sum((2, 3))]
        return torch.cat(squares) / number, torch.cat(sums) / number, number


def attend(qkv: torch.Tensor, scales: torch.Tensor, to_q: torch.Tensor, to_k: torch.Tensor, to_v: torch.Tensor):
    """Compute equation 4 as matrix products; return what queries read from values and from positions, both [M*A, L, V].

    Args:
        qkv: [M, A, L, 2K + V].
        scales: [3, A, 1, 1], see `LogitNorm`.
        to_q, to_k, to_v: embeddings of the offsets [L, K or V, L], for every query, key and query.
    """
    size = to_q.shape[1]
    q, k, v = qkv.split([size, size, to_v.shape[1]], dim=3)
    by_query = (q * scales[1]).flatten(0, 1).transpose(0, 1) @ to_q  # [L, M*A, L]
    by_key = (k * scales[2]).flatten(0, 1).transpose(0, 1) @ to_k
    keys, values = k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)
    logits = torch.baddbmm(by_query.transpose(0, 1), (q * scales[0]).flatten(0, 1), keys)
    probabilities = logits.add_(by_key.permute(1, 2, 0)).softmax(dim=-1)  # [M*A, L, L]
    return probabilities @ values, (probabilities.transpose(0, 1) @ to_v.transpose(1, 2)).transpose(0, 1)


class HfAxialResNetAttention(nn.Module):
    """Position-sensitive attention along axis 1 (columns) or 2 (rows) of [B, h, w, C], in at least float32.

    The table holds r^q, r^k and r^v [2L-1, 2K + V] for every offset of the key from the query; the heads share it.
    """

    def __init__(self, config: HfBaseConfig, width: int, axis: int, stride: int) -> None:
        super().__init__()
        self.axis = axis
        self.stride = stride
        self.key_size = width // HEADS // 2
        self.qkv = DenseNorm(width, 2 * width)
        self.logit_norm = LogitNorm()
        self.offset_embeddings = nn.Parameter(torch.zeros(2 * self.compute_span(config) - 1, 2 * width // HEADS))
        self.content_norm, self.position_norm = nn.BatchNorm1d(width), nn.BatchNorm1d(width)

    def init_weights(self) -> None:
        init.normal_(self.qkv.dense.weight, std=self.qkv.dense.in_features**-0.5)
        init.normal_(self.offset_embeddings, std=(2 * self.key_size) ** -0.5)

    def compute_span(self, config: HfBaseConfig) -> int:
        """Return the number of positions of a line at the nominal image size."""
        return -(-config.nominal_size[self.axis - 1] // self.stride)

    def table(self, length: int) -> torch.Tensor:
        """Return the offset embeddings [2L-1, 2K + V] for lines of any length, resampled with aligned corners."""
        if self.offset_embeddings.shape[0] == 2 * length - 1:
            return self.offset_embeddings
        embeddings = self.offset_embeddings.to(torch.promote_types(self.offset_embeddings.dtype, torch.float32))
        start = 1 // length  # a single position has offset 0, the middle of three
        size = 2 * length - 1 + 2 * start
        resampled = F.interpolate(embeddings.T[None], size=size, mode="linear", align_corners=True)
        return resampled[0].T[start : start + 2 * length - 1].to(self.offset_embeddings.dtype)

    def resize_to(self, config: HfBaseConfig) -> None:
        """Resample the table to the image size of another config."""
        if 2 * self.compute_span(config) - 1 != self.offset_embeddings.shape[0]:
            table = self.table(self.compute_span(config)).detach().contiguous()
            self.offset_embeddings = nn.Parameter(table, requires_grad=self.offset_embeddings.requires_grad)

    def add_normalized(self, content: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Apply both batch norms and add the results, [M, L, A, V]."""

        def normalize(norm: nn.BatchNorm1d, values: torch.Tensor) -> torch.Tensor:
            return norm(values.flatten(2).flatten(0, 1).to(norm.weight.dtype)).view(values.shape)

        return normalize(self.content_norm, content) + normalize(self.position_norm, position)

    def attend_lines(
        self, qkv: torch.Tensor, scales: torch.Tensor, to_q: torch.Tensor, to_k: torch.Tensor, to_v: torch.Tensor
    ) -> torch.Tensor:
        """Run `attend`, which explains the arguments; return the sum of its normalized outputs [M, L, A, V]."""
        outputs = attend(qkv.contiguous(), scales, to_q, to_k, to_v)
        content, position = (output.unflatten(0, (-1, HEADS)).transpose(1, 2) for output in outputs)
        return self.add_normalized(content, position)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Attend along one axis of a map [B, H, W, C]."""
        qkv = self.qkv(features if self.axis == 2 else features.transpose(1, 2))  # [B, lines, L, 2C]
        length = qkv.shape[2]
        size = self.key_size
        dtype = torch.promote_types(qkv.dtype, torch.float32)
        # The meta device, on which FLOPs are counted, does not support autocast.
        with nullcontext() if qkv.is_meta else torch.autocast(qkv.device.type, enabled=False):
            lines = qkv.to(dtype).flatten(0, 1).unflatten(2, (HEADS, 4 * size)).transpose(1, 2)  # [M, A, L, 4K]
            rows_q, rows_k, rows_v = self.table(length).to(dtype).split([size, size, 2 * size], dim=1)
            # to_q and to_v are [i, :, j] for query i and key j, from row j - i + L - 1 of the table; to_k is [j, :, i].
            to_q, to_k, to_v = (rows.unfold(0, length, 1).flip(0) for rows in (rows_q, rows_k.flip(0), rows_v))
            scales = self.logit_norm(lines[..., :size], lines[..., size : 2 * size], to_q, to_k).to(dtype)
            outputs = self.attend_lines(lines, scales[..., None, None], to_q, to_k, to_v)
        output = outputs.to(qkv.dtype).reshape(*qkv.shape[:3], features.shape[3])
        return output if self.axis == 2 else output.transpose(1, 2)


class HfAxialResNetBottleneck(nn.Module):
    """Residual unit (2003.07853, figure 2): [B, h, w, C] -> [B, h / stride, w / stride, 2 * width]."""

    def __init__(self, config: HfBaseConfig, in_channels: int, width: int, stride: int, stride_before: int) -> None:
        super().__init__()
        self.stride = stride
        self.reduce, self.expand = DenseNorm(in_channels, width), DenseNorm(width, 2 * width)
        self.column = HfAxialResNetAttention(config, width, axis=1, stride=stride_before)
        self.row = HfAxialResNetAttention(config, width, axis=2, stride=stride_before)
        shape_changes = stride != 1 or in_channels != 2 * width
        self.projection = DenseNorm(in_channels, 2 * width) if shape_changes else None

    def init_weights(self) -> None:
        init.zeros_(self.expand.norm.weight)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Transform a map [B, H, W, C], and reduce its height and width by the stride."""
        hidden = self.row(self.column(F.relu(self.reduce(features))))
        if self.stride != 1:
            hidden = F.avg_pool2d(hidden.permute(0, 3, 1, 2), self.stride, ceil_mode=True).permute(0, 2, 3, 1)
        if self.projection is not None:
            features = self.projection(features[:, :: self.stride, :: self.stride])
        return F.relu(self.expand(F.relu(hidden)) + features)


class HfAxialResNetStem(nn.Module):
    """Root (7x7/2 convolution, batch norm, ReLU, 3x3/2 max-pool) and stages: [B, C, H, W] -> [B, h, w, C']."""

    def __init__(self, config: HfBaseConfig) -> None:
        super().__init__()
        channels = config.stem_width
        stride = 4  # px of the image behind one cell after the root
        self.root_conv = nn.Conv2d(config.num_channels, channels, 7, stride=2, padding=3, bias=False)
        self.root_norm = nn.BatchNorm2d(channels)
        self.stages = nn.ModuleList()
        for index, depth in enumerate(config.stage_depths):
            width = 2 * config.stem_width * 2**index
            units = nn.Sequential()
            for unit in range(depth):
                step = 2 if unit == 0 and index > 0 else 1
                units.append(HfAxialResNetBottleneck(config, channels, width, step, stride))
                channels = 2 * width
                stride *= step
            self.stages.append(units)
        self.out_channels = channels

    def init_weights(self) -> None:
        init.kaiming_normal_(self.root_conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the map [B, h, w, C] of images [B, C, H, W]."""
        channels_last = pixel_values.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        features = F.relu(self.root_norm(self.root_conv(channels_last)))
        features = F.max_pool2d(features, kernel_size=3, stride=2, padding=1).permute(0, 2, 3, 1)
        for stage in self.stages:
            features = stage(features)
        return features


class HfAxialResNetPreTrainedModel(HfResNetPreTrainedModel):
    """Abstract: what AxialResNet's models share."""

    config: HfAxialResNetConfig
    config_class = HfAxialResNetConfig
    _no_split_modules: ClassVar[list[str]] = ["HfAxialResNetBottleneck"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": HfAxialResNetBottleneck}


class HfAxialResNetModel(HfAxialResNetPreTrainedModel, HfResNetBaseModel):
    """The bare AxialResNet, which returns the cells of its last map and their mean."""

    def build_encoder(self, config: HfAxialResNetConfig) -> nn.Module:
        return HfAxialResNetStem(config)

    def last_map(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.encoder(pixel_values)

    def feature_map(self, state: torch.Tensor) -> torch.Tensor:
        return state.permute(0, 3, 1, 2).contiguous()


class HfAxialResNetForImageClassification(HfAxialResNetPreTrainedModel, HfPooledForImageClassification):
    """AxialResNet with a linear classifier on the mean of its last map."""

    model_class: ClassVar[type] = HfAxialResNetModel


class HfAxialResNetBackbone(HfAxialResNetPreTrainedModel, HfResNetBaseBackbone):
    """AxialResNet as a backbone.

    transformers' DETR trains only stages with the names of its own ResNet and freezes all of this backbone; call
    `detr.model.backbone.model.requires_grad_(True)` to train it.
    """

    model_class: ClassVar[type] = HfAxialResNetModel
