"""From tokens to what the head sees: class token, mean (GAP) or attention pooling (MAP), then the representation layer.

Legend: B batch, N tokens, D hidden size, R representation size.
Sources: arXiv 2010.11929 section 3.1 and appendix D.3; MAP as in arXiv 2106.04560.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_hf_vit import HfViTBaseConfig
from .linear_hf_vit import HfViTLinear


class AttentionPooling(nn.Module):
    """One learned query (probe [1, 1, D]) attends to all tokens, then an MLP with a residual: [B, N, D] -> [B, D]."""

    def __init__(self, config: HfViTBaseConfig, mlp: nn.Module) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.probe = nn.Parameter(torch.zeros(1, 1, width))
        self.attention = nn.ModuleDict(
            {name: HfViTLinear(width, width) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        )
        self.layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = mlp

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        batch = hidden_states.shape[0]
        inputs = {"q_proj": self.probe.expand(batch, -1, -1), "k_proj": hidden_states, "v_proj": hidden_states}
        query, key, value = (
            self.attention[name](tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for name, tokens in inputs.items()
        )
        mask = None if token_mask is None else token_mask[:, None, None, :]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        pooled = self.attention["o_proj"](attended.transpose(1, 2).flatten(2))[:, 0]
        return pooled + self.mlp(self.layernorm(pooled))


class HfViTPooler(nn.Module):
    """Tokens [B, N, D] -> [B, D], or [B, R] with a representation layer (`dense`, tanh; the original's pre_logits)."""

    def __init__(self, config: HfViTBaseConfig, mlp: nn.Module | None) -> None:
        super().__init__()
        self.patch_tokens = patch_token_slice(config)
        self.class_token = class_token_index(config)
        if mlp is not None:
            self.map = AttentionPooling(config, mlp)
        # A method's name, not the bound method: a replica or a shallow copy must use its own parameters.
        self._pool = f"_{config.pooling}"
        size = config.representation_size
        self.dense = None if size is None else nn.Linear(config.hidden_size, size)

    def pool(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """[B, D] before the representation layer; `token_mask` [B, N] is True where a token is not padding."""
        return getattr(self, self._pool)(hidden_states, token_mask)

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        pooled = self.pool(hidden_states, token_mask)
        return pooled if self.dense is None else torch.tanh(self.dense(pooled))

    def _token(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        return hidden_states[:, self.class_token]

    def _gap(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        patches = hidden_states[:, self.patch_tokens]
        if token_mask is None:
            return patches.mean(dim=1)
        weight = token_mask[:, self.patch_tokens, None].to(patches.dtype)
        return (patches * weight).sum(dim=1) / weight.sum(dim=1)

    def _map(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        return self.map(hidden_states, token_mask)


def class_token_index(config: HfViTBaseConfig) -> int:
    """Where the class token stands in the sequence; the distillation token follows it."""
    return -config.num_special_tokens if config.is_causal else 0


def patch_token_slice(config: HfViTBaseConfig) -> slice:
    """Where the patch tokens stand in the sequence: after the special tokens, or before them when causal."""
    special = config.num_special_tokens
    return slice(0, -special if special else None) if config.is_causal else slice(special, None)
