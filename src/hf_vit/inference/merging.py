"""Merge tokens (ToMe, arXiv 2210.09461): every block merges its most similar patch tokens.

Legend: B batch, N tokens of the image, n tokens after merging, S special tokens, D hidden size, A heads, K head size.
"""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional as F

from hf_vit.errors import UserError
from hf_vit.inference.freezing import REMEDY, add_base
from hf_vit.inference.layers import FusedLayer
from hf_vit.inference.plan import Change, has_custom_attention
from hf_vit.models.modeling_hf_hybrid_vit import HfHybridViTModel
from hf_vit.models.modeling_hf_vit import (
    AttentionMaps,
    HfViTBaseModel,
    HfViTModel,
    attention_probabilities,
    patch_token_slice,
)
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone


@final
class TokenGroups:
    """The groups into which one pass merges the tokens; special tokens come first and are never merged."""

    def __init__(self, num_merged: int, num_special: int) -> None:
        self.num_merged, self.num_special = num_merged, num_special  # a block merges at most half of its patch tokens
        self.sizes: torch.Tensor | None = None  # [B, n, 1], tokens in each group; None before the first merge
        self.group_of: torch.Tensor | None = None  # [B, N], the group of each token of the image

    @property
    def attention_bias(self) -> torch.Tensor | None:
        """Return the bias [B, 1, 1, n] that weights a group by its number of tokens (proportional attention, section
        3).
        """
        return None if self.sizes is None else self.sizes.log()[:, None, None, :, 0]

    def merge(self, hidden_states: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Merge tokens [B, n, D] by bipartite soft matching of their keys [B, n, K], the mean of
        the heads (section 3).
        """
        special = self.num_special
        count = min(self.num_merged, (hidden_states.shape[1] - special) // 2)
        if count < 1:
            return hidden_states
        # Tokens with an even index are matched to tokens with an odd one; all tokens count, as in the authors' code.
        even, odd = slice(special + special % 2, None, 2), slice(special + 1 - special % 2, None, 2)
        normalized_keys = F.normalize(keys, dim=-1)
        similarity, best_match = (normalized_keys[:, even] @ normalized_keys[:, odd].mT).max(dim=-1)
        order = similarity.argsort(dim=1, descending=True)
        merged_indices, kept_indices = order[:, :count], order[:, count:].sort(dim=1).values
        merge_targets = best_match.gather(1, merged_indices)

        def sum_groups(values: torch.Tensor) -> torch.Tensor:
            """Add the values of merged tokens to those of their partners."""
            shape = (-1, -1, values.shape[2])
            sources, targets = values[:, even], values[:, odd]
            moved = sources.gather(1, merged_indices[..., None].expand(shape))
            targets = targets.scatter_add(1, merge_targets[..., None].expand(shape), moved)
            return torch.cat(
                (values[:, :special], sources.gather(1, kept_indices[..., None].expand(shape)), targets), dim=1
            )

        sizes = torch.ones_like(hidden_states[..., :1]) if self.sizes is None else self.sizes
        self.sizes = sum_groups(sizes)
        # The kept even tokens come before the odd ones.
        first_target = special + kept_indices.shape[1]
        is_kept = torch.ones_like(best_match).scatter(1, merged_indices, 0)
        group_of = torch.arange(hidden_states.shape[1], device=order.device).repeat(order.shape[0], 1)
        group_of[:, even] = torch.where(is_kept > 0, special + is_kept.cumsum(dim=1) - 1, first_target + best_match)
        group_of[:, odd] = torch.arange(first_target, self.sizes.shape[1], device=order.device)
        self.group_of = group_of if self.group_of is None else group_of.gather(1, self.group_of)
        return sum_groups(hidden_states * sizes) / self.sizes

    def spread(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Give every token of the image the state of its group: [B, n, D] -> [B, N, D]."""
        if self.group_of is None:
            return hidden_states
        return hidden_states.gather(1, self.group_of[..., None].expand(-1, -1, hidden_states.shape[2]))

    def spread_map(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Divide each group's attention evenly among its tokens: [B, A, n, n] -> [B, A, N, N]; rows still sum to 1."""
        if self.group_of is None or self.sizes is None:
            return probabilities
        shares = probabilities / self.sizes[:, None, None, :, 0]
        rows, columns = self.group_of[:, None, :, None], self.group_of[:, None, None, :]
        shares = shares.gather(2, rows.expand(-1, shares.shape[1], -1, shares.shape[3]))
        return shares.gather(3, columns.expand(-1, shares.shape[1], shares.shape[2], -1))


@final
class MergingLayer(FusedLayer):
    """`FusedLayer` that merges tokens between attention and MLP; the last layer returns all tokens of the image."""

    is_last: bool

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        only_for_head: bool = False,
        groups: TokenGroups | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend, then merge tokens by their keys, then apply the MLP: [B, N, D] -> [B, fewer, D]."""
        assert groups is not None, "a MergingLayer only runs inside a MergingModel, which makes the groups"
        num_queries = self.num_read if only_for_head else None
        query, key, value = self.attention.project(self.layernorm_before(hidden_states))
        query, bias = query[:, :, :num_queries], groups.attention_bias
        output = F.scaled_dot_product_attention(query, key, value, bias, scale=self.attention.scaling)
        hidden_states = self.attention.o_proj(output.transpose(1, 2).flatten(2), hidden_states[:, :num_queries])
        if num_queries is None and not self.is_last:
            hidden_states = groups.merge(hidden_states, key.mean(dim=1))
        hidden_states = self.mlp(self.layernorm_after(hidden_states), hidden_states)
        return groups.spread(hidden_states) if num_queries is None and self.is_last else hidden_states

    def merged_map(self, hidden_states: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
        """Return this block's map [B, A, N, N] over all tokens of the image, for its input [B, n, D]."""
        query, key = self.attention.query_and_key(self.layernorm_before(hidden_states))
        return groups.spread_map(attention_probabilities(query, key, self.attention.scaling, groups.attention_bias))


class MergingModel(HfViTBaseModel):
    """Class put before the class of a model whose layers merge tokens."""

    num_merged: int

    def new_groups(self) -> TokenGroups:
        """Return groups for one pass."""
        return TokenGroups(self.num_merged, self.config.num_special_tokens)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorated method lists its parameters)
        self, pixel_values: torch.Tensor, patch_attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the outputs with merged tokens.

        Raises:
            UserError: padding, a custom attention function, hidden states or attentions are requested.
        """
        _refuse_padding(patch_attention_mask)
        if has_custom_attention(self.config):
            raise UserError("merge_tokens does not work with a custom attention function; use a built-in one")
        for name in ("output_hidden_states", "output_attentions"):
            requested = kwargs.get(name)
            if getattr(self.config, name) if requested is None else requested:
                raise UserError(
                    f"{name} is not available with merge_tokens, as tokens are merged between blocks; {REMEDY}"
                )
        kwargs["groups"] = self.new_groups()
        return super().forward(pixel_values, **kwargs)

    def attention_maps(
        self, pixel_values: torch.Tensor, layers: Iterable[int] | None = None, patch_attention_mask: Any = None
    ) -> AttentionMaps:
        """Return attention maps over all patches of the image, merged ones included; see
        `HfViTModel.attention_maps`.
        """
        _refuse_padding(patch_attention_mask)
        indices = self._layer_indices(layers)
        tokens, groups = self.embed(pixel_values, None), self.new_groups()
        hidden_states, maps = tokens.hidden_states, dict[int, Any]()
        for index, layer in enumerate(self.layer_sequence()):
            if index in indices:
                maps[index] = layer.merged_map(hidden_states, groups)
            hidden_states = layer(hidden_states, groups=groups)
        return AttentionMaps(maps, tokens.grid, patch_token_slice(self.config))


def _refuse_padding(patch_attention_mask: Any) -> None:
    """Raise a UserError if a mask for padding is given."""
    if patch_attention_mask is not None:
        raise UserError("merge_tokens does not work with patch_attention_mask; give images of one size")


def check_mergeable(model: nn.Module, num_merged: object) -> None:
    """Raise a UserError for an invalid number of tokens, and for models whose tokens cannot be merged."""
    if type(num_merged) is not int or num_merged < 1:
        raise UserError(f"merge_tokens={num_merged!r} must be the number of tokens that each block merges, or None")
    vits = [module for module in model.modules() if isinstance(module, HfViTBaseModel)]
    for vit in vits:
        config = vit.config
        reasons = {
            f"a {type(vit).__name__}, which needs all tokens on a grid": type(vit) not in _MERGING,
            "causal attention": config.is_causal,
            f"position_embedding={config.position_embedding!r}": config.position_embedding.startswith("relative"),
            "rotary positions": config.rotary_embedding is not None,
            "norms inside or after attention": (
                config.use_qk_norm or config.norm_in_attention or config.norm_after_branches
            ),
            "a custom attention function": has_custom_attention(config),
            "layers that share blocks": len(set(vit.layers)) < config.num_hidden_layers,
        }
        if obstacle := next((reason for reason, applies in reasons.items() if applies), None):
            raise UserError(f"merge_tokens does not work with {obstacle}; leave it out")
    if not vits or any(isinstance(module, HfBaseBackbone) for module in model.modules()):
        raise UserError(
            f"merge_tokens does not work with {type(model).__name__}; give a bare Vision Transformer or a classifier"
        )


def merging_changes(model: nn.Module, changes: list[Change], num_merged: int) -> list[Change]:
    """Return the changes of class for the models in a model, and for their layers that `changes` builds."""
    vits: list[Any] = [module for module in model.modules() if isinstance(module, HfViTBaseModel)]
    new_modules = {(change.owner, change.name): change.value for change in changes}
    added: list[Change] = []
    for vit in vits:
        last_index = len(vit.layers) - 1
        for index in range(last_index + 1):
            layer = new_modules[vit.layers, str(index)]
            added += [Change(layer, "__class__", MergingLayer), Change(layer, "is_last", index == last_index)]
        added += [Change(vit, "num_merged", num_merged), Change(vit, "__class__", _MERGING[type(vit)])]
    return added


_MERGING = {kind: add_base(kind, base=MergingModel) for kind in (HfViTModel, HfHybridViTModel)}
