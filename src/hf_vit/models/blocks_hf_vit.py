"""The Transformer block: attention and MLP, each with norm, LayerScale, dropout and drop path.

Legend: B batch, N tokens, D hidden size, A heads.
Sources: arXiv 2010.11929 section 3.1 and table 3; LayerScale 2103.17239; stochastic depth 1603.09382.
"""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_hf_vit import HfViTAttention
from .configuration_hf_vit import HfViTBaseConfig
from .embeddings_hf_vit import Tokens
from .linear_hf_vit import FUSED_GELUS, HfViTLinear, can_fuse_gelu, dense_gelu


class HfViTMLP(nn.Module):
    """Two dense layers with an activation between, [.., D] -> [.., D]; dropout after both (table 3's note)."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        self.fc1 = HfViTLinear(config.hidden_size, config.intermediate_size)
        self.activation_fn = ACT2FN[config.hidden_act]
        self.fused_gelu = FUSED_GELUS.get(config.hidden_act)
        self.fc2 = HfViTLinear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.fused_gelu is not None and can_fuse_gelu(self.fc1, hidden_states):
            activated = dense_gelu(self.fc1, hidden_states, self.fused_gelu)
        else:
            activated = self.activation_fn(self.fc1(hidden_states))
        return self.dropout(self.fc2(self.dropout(activated)))


class HfViTLayerScale(nn.Module):
    """A learned factor a channel on a residual branch (CaiT, arXiv 2103.17239)."""

    def __init__(self, hidden_size: int, initial_value: float) -> None:
        super().__init__()
        self.initial_value = initial_value
        self.lambda1 = nn.Parameter(torch.full((hidden_size,), initial_value))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.lambda1


def build_layer_scale(config: HfViTBaseConfig) -> HfViTLayerScale | None:
    value = config.layer_scale_init_value
    return None if value is None else HfViTLayerScale(config.hidden_size, float(value))


class HfViTDropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): drops a whole residual branch for an image, keeps its expectation."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return branch
        keep = torch.empty(branch.shape[0], *[1] * (branch.ndim - 1), device=branch.device, dtype=branch.dtype)
        return branch * keep.bernoulli_(1.0 - self.rate) / (1.0 - self.rate)


class HfViTLayer(GradientCheckpointingLayer):
    """Pre-norm block: attention, then MLP, each with a residual. [B, N, D] -> [B, N, D]."""

    def __init__(self, config: HfViTBaseConfig, drop_path_rate: float) -> None:
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = HfViTAttention(config)
        self.layer_scale1 = build_layer_scale(config)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HfViTMLP(config)
        self.layer_scale2 = build_layer_scale(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = HfViTDropPath(drop_path_rate) if drop_path_rate else None

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        hidden_states = self._add(hidden_states, self.dropout(attended), self.layer_scale1)
        return self._add(hidden_states, self.mlp(self.layernorm_after(hidden_states)), self.layer_scale2)

    def _add(self, hidden_states: torch.Tensor, branch: torch.Tensor, scale: nn.Module | None) -> torch.Tensor:
        """A module that does nothing is left out: called twice a layer, it shows in the time of a small batch."""
        scaled = branch if scale is None else scale(branch)
        return hidden_states + (scaled if self.drop_path is None else self.drop_path(scaled))

    def attention_map(self, hidden_states: torch.Tensor, attention_mask: Any, tokens: Tokens) -> torch.Tensor:
        """[B, A, N, N] of this block on its input [B, N, D]."""
        normed = self.layernorm_before(hidden_states)
        return self.attention.probabilities(normed, tokens.token_mask, tokens.grid, tokens.image_grids)
