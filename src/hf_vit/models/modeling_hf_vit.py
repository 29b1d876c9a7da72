"""Define the Vision Transformer from the bottom up: attention, MLP, block, pooler, the bare model, the classifier.

Legend: B batch, C channels, H x W px, h x w patch grid, N tokens, D hidden size, A heads, K head size or labels.
Sources: Dosovitskiy et al., arXiv 2010.11929 (section 3.1, appendix D.3, table 3); LayerScale 2103.17239; stochastic
depth 1603.09382; MAP pooling 2106.04560. Details that the paper leaves open follow the original JAX code (tanh GELU,
eps 1e-6, initialization).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self, Unpack, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vit import HfViTBaseConfig, HfViTConfig
from .embeddings_hf_vit import (
    RELATIVE_POSITIONS,
    Grid,
    HfViTEmbeddings,
    HfViTPatchEmbeddings,
    Rotation,
    Tokens,
    build_norm,
    make_additive_mask,
    rotate,
    to_rotation,
)
from .pretrained_hf_vit import (
    HfPooledForImageClassification,
    HfPreTrainedModel,
    LayerFeatures,
    check_values,
    lecun_normal_,
)


def make_attention_mask(config: HfViTBaseConfig, hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> Any:
    """Return the mask in the form that the attention implementation takes; None where it needs no mask.

    transformers makes masks only for implementations that have a mask function; custom attention functions get the mask
    that is added to logits.
    """
    if not config.is_causal and token_mask is None:
        return None  # otherwise an exported graph would add a mask of zeros in every layer
    if config._attn_implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        return make_additive_mask(hidden_states, token_mask, config.is_causal)
    if config.is_causal:
        return create_causal_mask(config, hidden_states, token_mask, past_key_values=None)
    return create_bidirectional_mask(config, hidden_states, token_mask)


def compute_attention_probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    attention_mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(q k' * scaling + bias + mask), [B, A, N, N], in the dtype of `query`."""
    logits = torch.matmul(query * scaling, key.transpose(2, 3))
    if position_bias is not None:
        logits = logits + position_bias
    if attention_mask is not None:
        logits = logits + attention_mask
    return torch.softmax(logits, dim=-1).to(query.dtype)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    is_causal: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by its formula; return the output [B, N, A, K] and the probabilities [B, A, N, N]."""
    probabilities = compute_attention_probabilities(query, key, scaling, attention_mask, position_bias)
    probabilities = F.dropout(probabilities, p=dropout, training=module.training)
    return torch.matmul(probabilities, value).transpose(1, 2).contiguous(), probabilities


class HfViTAttention(nn.Module):
    """Self-attention with separate q, k, v and output projections [B, N, D] -> [B, N, D]."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = config.is_causal
        self.attention_dropout = config.attention_probs_dropout_prob
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, width, bias=config.qkv_bias and config.key_bias)
        self.v_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, width, bias=config.projection_bias)
        self.q_layernorm = build_norm(config, self.head_dim) if config.use_qk_norm else None
        self.k_layernorm = build_norm(config, self.head_dim) if config.use_qk_norm else None
        self.inner_layernorm = build_norm(config) if config.norm_in_attention else None
        self.rotary_frequencies: nn.Parameter | None = None
        if config.rotary_embedding == "mixed":  # one row per axis
            self.rotary_frequencies = nn.Parameter(torch.zeros(2, config.num_attention_heads * (self.head_dim // 2)))
        self.rotary_pairing = config.rotary_pairing
        relative_class = RELATIVE_POSITIONS.get(config.position_embedding)
        self.relative_position = None if relative_class is None else relative_class(config)

    def init_weights(self) -> None:
        """Initialize learned frequencies in two orthogonal random directions for each head, as RoPE-ViT's code."""
        if self.rotary_frequencies is None:
            return
        count = self.head_dim // 4  # frequencies in each of the two directions
        magnitudes = 1 / self.config.rotary_base ** (torch.arange(count) / count)
        first = torch.rand(self.config.num_attention_heads, 1) * 2 * torch.pi  # angle of the first direction
        angles = torch.cat([first.expand(-1, count), (first + torch.pi / 2).expand(-1, count)], dim=1)
        frequencies = torch.stack([angles.cos(), angles.sin()]) * magnitudes.repeat(2)
        init.copy_(self.rotary_frequencies, frequencies.flatten(1).to(self.rotary_frequencies))

    def heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Split [B, N, A*K] into heads [B, A, N, K]; under tensor parallelism A is this process's
        share of the heads.
        """
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def compute_position_bias(
        self, query: torch.Tensor, grid: Grid | None, image_grids: list[Grid] | None
    ) -> torch.Tensor | None:
        """Return the bias [B, A, N, N] of relative positions; None if the layer has none.

        Raises:
            ValueError: flash attention is set, which takes no bias.
        """
        if self.relative_position is None:
            return None
        if "flash" in (self.config._attn_implementation or ""):
            raise ValueError(
                f"position_embedding='{self.config.position_embedding}' adds a bias that flash attention cannot take; "
                "use attn_implementation='sdpa', 'flex_attention' or 'eager'"
            )
        check_values(query, self.relative_position)
        return self.relative_position(query, grid, self.scaling, image_grids)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project tokens [B, N, D] to query, key and value [B, A, N, K]."""
        if not (self.config.qkv_bias and self.config.key_bias and self.config.projection_bias):
            check_values(hidden_states, self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        return (*self.query_and_key(hidden_states), self.heads(self.v_proj(hidden_states)))

    def query_and_key(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project tokens [B, N, D] to query and key [B, A, N, K], which is all that attention probabilities need."""
        return self.heads(self.q_proj(hidden_states)), self.heads(self.k_proj(hidden_states))

    def normalize_and_rotate(
        self, query: torch.Tensor, key: torch.Tensor, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize and rotate query and key [B, A, N, K], if the config says so."""
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotation is None:
            return query, key
        if self.rotary_frequencies is not None:  # then the rotation is coordinates
            coordinates = cast("torch.Tensor", rotation)
            heads = self.config.num_attention_heads
            if heads != query.shape[1]:
                raise ValueError(
                    f"rotary_embedding='mixed' needs all {heads} heads in one process, which has {query.shape[1]} "
                    "under tensor parallelism; load the model without tp_plan"
                )
            first, second = self.rotary_frequencies.to(coordinates).unflatten(1, (heads, 1, -1))
            rotation = to_rotation(coordinates[:, None, :, :1] * first + coordinates[:, None, :, 1:] * second)
        return rotate(query, rotation, self.rotary_pairing), rotate(key, rotation, self.rotary_pairing)

    def attend(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        grid: Grid | None = None,
        image_grids: list[Grid] | None = None,
        rotation: Rotation | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run attention without the output projection; return [B, N, D], and the probabilities if the implementation
        has them.
        """
        query, key, value = self.project(hidden_states)
        query, key = self.normalize_and_rotate(query, key, rotation)
        bias = self.compute_position_bias(query, grid, image_grids)
        if bias is not None:
            kwargs["position_bias"] = bias
        output, probabilities = self.interface(query, key, value, attention_mask, **kwargs)
        return output.flatten(2), probabilities

    def interface(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the attention implementation on query [.., A, n, K] and key and value [.., A, m, K].

        Returns:
            The output [.., n, A, K], and the probabilities or None.
        """
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation or "eager", eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        return attention_interface(self, query, key, value, mask, scaling=self.scaling, dropout=dropout, **kwargs)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the result [B, N, D] for tokens [B, N, D], and the probabilities, which are None unless "eager"."""
        output, probabilities = self.attend(hidden_states, attention_mask, **kwargs)
        if self.inner_layernorm is not None:
            output = self.inner_layernorm(output)
        return self.o_proj(output), probabilities

    def compute_probabilities(
        self,
        hidden_states: torch.Tensor,
        token_mask: torch.Tensor | None,
        grid: Grid,
        image_grids: list[Grid] | None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """Return the probabilities [B, A, N, N] from q and k, under any attention implementation; `token_mask` is [B,
        N] bool.
        """
        query, key = self.normalize_and_rotate(*self.query_and_key(hidden_states), rotation)
        mask = self.make_map_mask(Tokens(query[:, 0], grid, token_mask))
        bias = self.compute_position_bias(query, grid, image_grids)
        return compute_attention_probabilities(query, key, self.scaling, mask, bias)

    def make_map_mask(self, tokens: Tokens) -> torch.Tensor:
        """Return the mask [B or 1, 1, N, N] of all pairs of tokens, added to the logits of `compute_probabilities`."""
        return make_additive_mask(tokens.hidden_states, tokens.token_mask, self.is_causal)


class HfViTMLP(nn.Module):
    """Two dense layers with an activation between, [.., D] -> [.., D]; dropout after both (table 3's note)."""

    def __init__(self, config: HfViTBaseConfig, intermediate_size: int | None = None) -> None:
        super().__init__()
        size = intermediate_size or config.intermediate_size
        self.has_bias = config.mlp_bias
        self.fc1 = nn.Linear(config.hidden_size, size, bias=self.has_bias)
        self.activation_fn = ACT2FN[config.hidden_act]
        self.inner_layernorm = build_norm(config, size) if config.norm_in_mlp else None
        self.fc2 = nn.Linear(size, config.hidden_size, bias=self.has_bias)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Transform each token of [B, N, D]."""
        if not self.has_bias:
            check_values(hidden_states, self)
        hidden = self.dropout(self.activation_fn(self.fc1(hidden_states)))
        if self.inner_layernorm is not None:
            hidden = self.inner_layernorm(hidden)
        return self.dropout(self.fc2(hidden))

    def init_weights(self) -> None:
        """Initialize the biases with small random values, as the original code."""
        if self.has_bias:
            for layer in (self.fc1, self.fc2):
                init.normal_(layer.bias, std=1e-6)


class HfViTSwiGLU(nn.Module):
    """A dense layer gated by the SiLU of another, then a dense layer, [.., D] -> [.., D]; dropout as in `HfViTMLP`."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        size, width = config.intermediate_size, config.hidden_size
        self.has_bias = config.mlp_bias
        self.gate_proj = nn.Linear(width, size, bias=self.has_bias)
        self.up_proj = nn.Linear(width, size, bias=self.has_bias)
        self.inner_layernorm = build_norm(config, size) if config.norm_in_mlp else None
        self.down_proj = nn.Linear(size, width, bias=self.has_bias)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Transform each token of [B, N, D]."""
        if not self.has_bias:
            check_values(hidden_states, self)
        hidden = self.dropout(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        if self.inner_layernorm is not None:
            hidden = self.inner_layernorm(hidden)
        return self.dropout(self.down_proj(hidden))


MLPS: dict[str, type[nn.Module]] = {"dense": HfViTMLP, "swiglu": HfViTSwiGLU}


class HfViTLayerScale(nn.Module):
    """Learned factors, one per channel, that scale a residual branch (CaiT, arXiv 2103.17239)."""

    def __init__(self, hidden_size: int, initial_value: float) -> None:
        super().__init__()
        self.initial_value = initial_value
        self.lambda1 = nn.Parameter(torch.full((hidden_size,), initial_value))

    def init_weights(self) -> None:
        init.constant_(self.lambda1, self.initial_value)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.lambda1


def build_layer_scale(config: HfViTBaseConfig) -> HfViTLayerScale | None:
    """Return a LayerScale if the config sets an initial value, else None."""
    value = config.layer_scale_init_value
    return None if value is None else HfViTLayerScale(config.hidden_size, float(value))


class HfViTDropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): drop a residual branch for whole images, keep its expectation."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor, num_lines: int = 1) -> torch.Tensor:
        """Drop the branch [B * num_lines, ...] of whole images at random in training, and keep its expectation."""
        if not self.training:
            return branch
        images = branch.unflatten(0, (-1, num_lines))
        keep = torch.empty(images.shape[0], *[1] * branch.ndim, device=branch.device, dtype=branch.dtype)
        return (images * keep.bernoulli_(1.0 - self.rate) / (1.0 - self.rate)).flatten(0, 1)


class HfViTLayer(GradientCheckpointingLayer):
    """Block of attention and MLP, each with a residual: [B, N, D] -> [B, N, D].

    A norm precedes each, or follows each under the same name (`norm_after_branches`).
    """

    def __init__(self, config: HfViTBaseConfig, drop_path_rate: float) -> None:
        super().__init__()
        self.norm_after_branches = config.norm_after_branches
        self.layernorm_before = build_norm(config)
        self.attention = HfViTAttention(config)
        self.layer_scale1 = build_layer_scale(config)
        self.layernorm_after = build_norm(config)
        self.mlp = MLPS[config.mlp_type](config)
        self.layer_scale2 = build_layer_scale(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = HfViTDropPath(drop_path_rate) if drop_path_rate else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        num_lines: int = 1,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Transform tokens [B, N, D]; a mask [B, 1, 1 or N, N] is added to the logits of attention.

        Drop path treats `num_lines` consecutive entries of the batch as one image.
        """
        if self.norm_after_branches:
            branch = self.dropout(self.attention(hidden_states, attention_mask, **kwargs)[0])
            hidden_states = self._add(hidden_states, self.layernorm_before(branch), self.layer_scale1, num_lines)
            branch = self.layernorm_after(self.mlp(hidden_states))
            return self._add(hidden_states, branch, self.layer_scale2, num_lines)
        # The attention output gets no name, which would keep it in memory while the MLP, which needs most, runs.
        hidden_states = self._add(
            hidden_states,
            self.dropout(self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)[0]),
            self.layer_scale1,
            num_lines,
        )
        return self._add(hidden_states, self.mlp(self.layernorm_after(hidden_states)), self.layer_scale2, num_lines)

    def _add(
        self, hidden_states: torch.Tensor, branch: torch.Tensor, scale: nn.Module | None, num_lines: int
    ) -> torch.Tensor:
        """Return the residual sum with LayerScale and drop path, which are skipped if absent.

        Identity modules, called twice per layer, would slow down small batches.
        """
        scaled_branch = branch if scale is None else scale(branch)
        return hidden_states + (scaled_branch if self.drop_path is None else self.drop_path(scaled_branch, num_lines))

    def compute_attention_map(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, tokens: Tokens
    ) -> torch.Tensor:
        """Return the attention probabilities [B, A, N, N] of this block for its input [B, N, D]."""
        normalized = hidden_states if self.norm_after_branches else self.layernorm_before(hidden_states)
        arguments = tokens.grid, tokens.image_grids, tokens.rotation
        return self.attention.compute_probabilities(normalized, tokens.token_mask, *arguments)


def get_class_token_index(config: HfViTBaseConfig) -> int:
    """Return the index of the class token in the sequence; the distillation token follows it."""
    return -config.num_special_tokens if config.is_causal else 0


def get_patch_token_slice(config: HfViTBaseConfig) -> slice:
    """Return the slice of patch tokens in the sequence: after the special tokens, or before them if attention is
    causal.
    """
    special = config.num_special_tokens
    if config.is_causal:
        return slice(0, -special if special else None)
    return slice(special, None)


class AttentionPooling(nn.Module):
    """Attention of one learned query (probe [1, 1, D]) to all tokens, then an MLP with a residual:
    [B, N, D] -> [B, D].
    """

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.pooling_num_heads or config.num_attention_heads
        self.probe = nn.Parameter(torch.zeros(1, 1, width))
        self.attention = nn.ModuleDict(
            {name: nn.Linear(width, width) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        )
        self.layernorm = build_norm(config)
        self.mlp = HfViTMLP(config, config.pooling_intermediate_size)
        self.mlp.dropout.p = 0.0  # the original head has none

    def init_weights(self) -> None:
        """Initialize the probe xavier-uniform with Flax's fans 1 and D of [1, 1, D]; torch would take D and D."""
        bound = (6 / (1 + self.probe.shape[2])) ** 0.5
        init.uniform_(self.probe, -bound, bound)

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        """Pool tokens [B, N, D] to [B, D]; `token_mask` [B, N] is True at tokens that are not padding."""
        batch = hidden_states.shape[0]
        inputs = {"q_proj": self.probe.expand(batch, -1, -1), "k_proj": hidden_states, "v_proj": hidden_states}
        query, key, value = (
            self.attention[name](tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for name, tokens in inputs.items()
        )
        mask = None if token_mask is None else token_mask[:, None, None, :]
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        pooled = self.attention["o_proj"](output.transpose(1, 2).flatten(2))[:, 0]
        return pooled + self.mlp(self.layernorm(pooled))


class HfViTPooler(nn.Module):
    """Abstract: pool tokens [B, N, D] to [B, D], or [B, R] after a representation layer (`dense`,
    tanh; `pre_logits`).
    """

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        size = config.representation_size
        self.dense = None if size is None else nn.Linear(config.hidden_size, size)
        self.class_token = get_class_token_index(config)
        self.patch_tokens = get_patch_token_slice(config)

    def init_weights(self) -> None:
        if self.dense is not None:
            lecun_normal_(self.dense.weight)

    def pool(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return [B, D], without the representation layer; `token_mask` [B, N] is False on padding."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: use a class of POOLERS")

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        pooled = self.pool(hidden_states, token_mask)
        return pooled if self.dense is None else torch.tanh(self.dense(pooled))


class HfViTTokenPooler(HfViTPooler):
    """Pool by the class token."""

    def pool(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        return hidden_states[:, self.class_token]


class HfViTMeanPooler(HfViTPooler):
    """Pool by the mean of the patch tokens (GAP), without padding."""

    def pool(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        patches = hidden_states[:, self.patch_tokens]
        if token_mask is None:
            return patches.mean(dim=1)
        # A sum may exceed float16, and bfloat16 rounds counts.
        weight = token_mask[:, self.patch_tokens, None].to(torch.promote_types(patches.dtype, torch.float32))
        return ((patches * weight).sum(dim=1) / weight.sum(dim=1)).to(patches.dtype)


class HfViTTokenAndMeanPooler(HfViTMeanPooler):
    """Pool by the class token and the mean of the patch tokens, to [B, 2D] (DINOv2, arXiv 2304.07193)."""

    def pool(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([hidden_states[:, self.class_token], super().pool(hidden_states, token_mask)], dim=1)


class HfViTFirstPatchPooler(HfViTPooler):
    """Pool by the first patch's token, as big_vision's pool_type "0"."""

    def pool(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        return hidden_states[:, self.patch_tokens][:, 0]


class HfViTAttentionPooler(HfViTPooler):
    """Pool by a learned query (MAP) that attends to all tokens, or to all but the registers, which come first."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__(config)
        self.map = AttentionPooling(config)
        self.num_skipped_tokens = config.num_register_tokens if config.pooling == "map" else 0

    def pool(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.map(
            hidden_states[:, self.num_skipped_tokens :],
            None if token_mask is None else token_mask[:, self.num_skipped_tokens :],
        )


POOLERS: dict[str, type[HfViTPooler]] = {
    "token": HfViTTokenPooler,
    "gap": HfViTMeanPooler,
    "token_and_gap": HfViTTokenAndMeanPooler,
    "first_patch": HfViTFirstPatchPooler,
    "map": HfViTAttentionPooler,
    "map_with_registers": HfViTAttentionPooler,
}


@dataclass(frozen=True)
class AttentionMaps:
    """Attention probabilities of the requested layers.

    Attributes:
        maps: layer index -> [B, A, N, N] (plain and hybrid), or the pair (rows [B, A, h, w, w], columns
            [B, A, w, h, h]) of an axial layer.
        grid: (h, w) in patches.
        patch_tokens: which of the N tokens are patches, in raster order.
    """

    maps: dict[int, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
    grid: Grid
    patch_tokens: slice

    @property
    def axes(self) -> tuple[str, ...] | tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of a map's axes (of both maps of a pair)."""
        if isinstance(next(iter(self.maps.values())), tuple):
            return ("batch", "head", "row", "query", "key"), ("batch", "head", "column", "query", "key")
        return "batch", "head", "query", "key"

    def __getitem__(self, layer: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.maps:
            raise KeyError(f"layer {layer} was not requested; the maps have the layers {sorted(self.maps)}")
        return self.maps[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self.maps)

    def __len__(self) -> int:
        return len(self.maps)

    def dense(self, layer: int) -> torch.Tensor:
        """Return the map [B, A, N, N] from every token to every token; an axial layer's is the product of columns and
        rows.

        A token (i, j) attends to (i', j') through (i', j): first along row i', then along column j. Residuals and MLPs
        between the two are left out, as in attention rollout.
        """
        layer_map = self[layer]
        if isinstance(layer_map, torch.Tensor):
            return layer_map
        rows, columns = layer_map
        product = torch.einsum("bawqk,bakwv->baqwkv", columns, rows)
        return product.flatten(4, 5).flatten(2, 3)


class HfViTPreTrainedModel(HfPreTrainedModel):
    """Abstract: what transformers needs to know about models with these blocks."""

    config_class: ClassVar[type] = HfViTConfig
    base_model_prefix = "vit"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["HfViTEmbeddings", "HfViTLayer"]
    _input_embed_layer = "patch_embeddings"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": HfViTLayer, "attentions": HfViTAttention}


class HfViTBaseModel(HfViTPreTrainedModel):
    """Abstract: image -> tokens -> blocks -> last LayerNorm -> pooled output. Families replace the
    parts in which they differ.
    """

    # Parts of the names of attention implementations, "eager" aside, that return no probabilities.
    _without_attentions: ClassVar[tuple[str, ...]] = ("sdpa", "flash", "flex")

    def __init__(self, config: HfViTBaseConfig, add_pooling_layer: bool = True, use_mask_token: bool = False) -> None:
        super().__init__(config)
        self.embeddings = HfViTEmbeddings(config, self.build_patch_embeddings(config), use_mask_token)
        groups = config.num_hidden_groups or config.num_hidden_layers
        rate_step = config.drop_path_rate / max(groups - 1, 1)  # the rate grows linearly from 0 in the first block
        self.layers = nn.ModuleList([self.build_layer(config, i * rate_step) for i in range(groups)])
        self.layernorm = nn.Identity() if config.norm_after_pooling is None else build_norm(config)
        self.pooler: HfViTPooler | None = POOLERS[config.pooling](config) if add_pooling_layer else None
        self.post_init()

    @property
    def _norms_pooled(self) -> bool:
        """Return whether the last LayerNorm applies to the pooled output; without a pooler it applies to the tokens."""
        return bool(self.config.norm_after_pooling) and self.pooler is not None

    def build_patch_embeddings(self, config: Any) -> nn.Module:
        """Return the module that turns images into patch embeddings; families may replace it."""
        return HfViTPatchEmbeddings(config)

    def build_layer(self, config: Any, drop_path_rate: float) -> nn.Module:
        """Return one block; families may replace it."""
        return HfViTLayer(config, drop_path_rate)

    def layer_sequence(self) -> list[Any]:
        """Return the blocks in the order they run; layers of one group share a block (ALBERT)."""
        depth, groups = self.config.num_hidden_layers, self.config.num_hidden_groups
        if groups is None:  # however many blocks a user has left
            return list(self.layers)
        return [self.layers[index * groups // depth] for index in range(depth)]

    def embed(
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None, **corruption: torch.Tensor | None
    ) -> Tokens:
        """Return the tokens of images, converted to the model's dtype; for `corruption` see `corrupt_patches`."""
        dtype = self.layer_sequence()[0].layernorm_before.weight.dtype
        if isinstance(pixel_values, torch.Tensor) and pixel_values.is_floating_point():  # pyright: ignore[reportUnnecessaryIsInstance]
            pixel_values = pixel_values.to(dtype)
            check_values(pixel_values, self.embeddings.patch_embeddings)
        return self.embeddings(pixel_values, patch_attention_mask, **corruption)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        patch_sources: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode images.

        Args:
            pixel_values: [B, C, H, W]; incomplete patches at the bottom and right are ignored, with a warning.
            patch_attention_mask: [B, h, w], 1 on the image and 0 on padding, for batches of mixed sizes; every image is
                at the top left and gets the same outputs as without padding.
            interpolate_pos_encoding: ignored; accepted because transformers' ViT has it. Positions always fit the
                image.
            bool_masked_pos, patch_sources: [B, h*w], see `corrupt_patches`; for models with a [mask] embedding.

        Returns:
            last_hidden_state [B, N, D], special tokens first (last when `is_causal`); pooler_output [B, D or R], which
                is None without a pooling layer.

        Raises:
            ValueError: an image is smaller than a patch, or there is an `attention_mask` of tokens.

        Warns:
            UserWarning: `output_attentions` is set, but the attention implementation returns none; see
                `attention_maps`.
        """
        options = cast("dict[str, Any]", kwargs)
        if options.pop("attention_mask", None) is not None:  # peft and others pass one that is None
            raise ValueError("attention_mask is for text; give patch_attention_mask [B, h, w] for padding")
        self._warn_without_attentions(options.get("output_attentions", self.config.output_attentions))
        tokens = self.embed(
            pixel_values, patch_attention_mask, bool_masked_pos=bool_masked_pos, patch_sources=patch_sources
        )
        hidden_states = tokens.hidden_states
        attention_mask = self._make_attention_mask(tokens)
        arguments = self._make_layer_arguments(tokens)
        for layer in self.layer_sequence():
            hidden_states = layer(hidden_states, attention_mask, **arguments, **options)
        if not self._norms_pooled:
            hidden_states = self.layernorm(hidden_states)
        pooled = None if self.pooler is None else self.pooler(hidden_states, tokens.token_mask)
        if self._norms_pooled:
            pooled = self.layernorm(pooled)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def _make_layer_arguments(self, tokens: Tokens) -> dict[str, Any]:
        """Return the keyword arguments that all layers get: where the tokens are on the grid."""
        arguments = {"grid": tokens.grid, "image_grids": tokens.image_grids}
        return arguments if tokens.rotation is None else arguments | {"rotation": tokens.rotation}

    def _make_attention_mask(self, tokens: Tokens) -> Any:
        """Return the mask that all layers get, in the form that their attention takes."""
        return make_attention_mask(self.config, tokens.hidden_states, tokens.token_mask)

    def _warn_without_attentions(self, output_attentions: bool | None) -> None:
        """Warn that the attention implementation does not return the requested attentions."""
        implementation = self.config._attn_implementation or "eager"
        lacks_attentions = any(word in implementation for word in self._without_attentions)
        if output_attentions and implementation != "eager" and lacks_attentions:
            warnings.warn(
                f"output_attentions=True returns no attentions with attn_implementation='{implementation}'; use "
                "model.attention_maps(pixel_values), which works with every implementation, or "
                "model.set_attn_implementation('eager')",
                UserWarning,
                stacklevel=2,
            )

    def _resolve_layers(self, layers: Iterable[int] | None) -> set[int]:
        """Return the indices of layers, from 0 on; negative ones count from the end, None means all.

        Raises:
            ValueError: the model has no such layer.
        """
        depth = len(self.layer_sequence())
        indices = {index + depth if index < 0 else index for index in (range(depth) if layers is None else layers)}
        if not indices or not indices <= set(range(depth)):
            raise ValueError(
                f"layers={layers} does not fit a model with {depth} layers; give indices from {-depth} to {depth - 1}"
            )
        return indices

    def split_tokens(self, state: torch.Tensor, grid: Grid) -> LayerFeatures:
        """Sort the tokens [B, N, D] of images of h x w patches by their kind."""
        config = self.config
        patches = state[:, get_patch_token_slice(config)]
        special = state[:, patches.shape[1] :] if config.is_causal else state[:, : config.num_special_tokens]
        has_class = config.has_class_token
        return LayerFeatures(patches, grid, special[:, 0] if has_class else None, special[:, int(has_class) :])

    def attention_maps(
        self,
        pixel_values: torch.Tensor,
        layers: Iterable[int] | None = None,
        patch_attention_mask: torch.Tensor | None = None,
    ) -> AttentionMaps:
        """Recompute the attention probabilities of `layers` from q and k, whatever the attention implementation.

        Args:
            pixel_values: [B, C, H, W].
            layers: indices of layers (negative ones count from the end); None means all.
            patch_attention_mask: [B, h, w], as in `forward`.

        Raises:
            ValueError: the model has no such layer.
        """
        indices = self._resolve_layers(layers)
        tokens = self.embed(pixel_values, patch_attention_mask)
        hidden_states = tokens.hidden_states
        attention_mask = self._make_attention_mask(tokens)
        arguments = self._make_layer_arguments(tokens)
        maps: dict[int, Any] = {}
        for index, layer in enumerate(self.layer_sequence()[: max(indices) + 1]):
            if index in indices:
                maps[index] = layer.compute_attention_map(hidden_states, attention_mask, tokens)
            if index < max(indices):
                hidden_states = layer(hidden_states, attention_mask, **arguments)
        return AttentionMaps(maps, tokens.grid, get_patch_token_slice(self.config))


class HfViTModel(HfViTBaseModel):
    """The bare Vision Transformer, which returns tokens and a pooled output; `HfViTConfig` describes its options."""

    config: HfViTConfig


@dataclass
class HfViTImageClassifierOutput(ImageClassifierOutput):
    """`ImageClassifierOutput` with the logits [B, K] of both heads if the model has a distillation head."""

    cls_logits: torch.Tensor | None = None
    distillation_logits: torch.Tensor | None = None


class HfViTBaseForImageClassification(HfViTPreTrainedModel, HfPooledForImageClassification):
    """Abstract: a family's model with a zero-initialized linear head (2010.11929, section 3.2)."""

    model_class: ClassVar[type[HfViTBaseModel]]
    output_class = HfViTImageClassifierOutput
    vit: HfViTBaseModel

    def _build_heads(self, config: HfViTBaseConfig) -> None:
        """Add the classifier, and the one on the distillation token if the config has it."""
        super()._build_heads(config)
        if config.has_distillation_head:
            num_labels = config.num_labels
            self.distillation_classifier = nn.Linear(config.hidden_size, num_labels) if num_labels else nn.Identity()

    def attention_maps(self, pixel_values: torch.Tensor, **kwargs: Any) -> AttentionMaps:
        """Return attention maps; see `HfViTModel.attention_maps`."""
        return self.vit.attention_maps(pixel_values, **kwargs)

    def _compute_head_outputs(self, outputs: Any) -> dict[str, torch.Tensor]:
        """Return the logits; with a distillation head their mean, and those of each head."""
        head_outputs = super()._compute_head_outputs(outputs)
        if not self.config.has_distillation_head:
            return head_outputs
        token = outputs.last_hidden_state[:, get_class_token_index(self.config) + 1]
        heads = {"cls_logits": head_outputs["logits"], "distillation_logits": self.distillation_classifier(token)}
        return {"logits": (heads["cls_logits"] + heads["distillation_logits"]) / 2, **heads}

    @classmethod
    def _from_fields_of(cls, vit: "HfViTForImageClassification", **overrides: Any) -> Self:
        """Return an initialized model of this family with a plain ViT's fields and `overrides`."""
        foreign = ("model_type", "architectures", "auto_map")
        fields: dict[str, Any] = {k: v for k, v in vit.config.to_dict().items() if k not in foreign}
        model = cls(cls.config_class.from_dict({**fields, **overrides}))
        model.to(vit.dtype)  # pyright: ignore[reportCallIssue, reportArgumentType] (transformers wraps it untyped)
        return model.train(vit.training)


class HfViTForImageClassification(HfViTBaseForImageClassification):
    """The Vision Transformer with a linear classifier on the pooled output."""

    model_class = HfViTModel
