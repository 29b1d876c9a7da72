"""Token merging (ToMe, arXiv 2210.09461): every block makes the most alike of its patch tokens one.

Legend: B batch, N tokens of the image, n tokens left, S special tokens, D hidden size, A heads, K head size.
"""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional as F

from hf_vit.errors import UserError
from hf_vit.inference.freezing import REMEDY, precede
from hf_vit.inference.layers import FusedLayer
from hf_vit.inference.plan import Change, attends_otherwise
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
    """The groups that the tokens of one pass are merged into; special tokens stand first and are never merged."""

    def __init__(self, num_merged: int, num_special: int) -> None:
        self.num_merged, self.num_special = num_merged, num_special  # patch tokens that a block merges, half at most
        self.sizes: torch.Tensor | None = None  # [B, n, 1], tokens of the image in each; None before the first merge
        self.group_of: torch.Tensor | None = None  # [B, N], the group of each token of the image

    @property
    def attention_bias(self) -> torch.Tensor | None:
        """Return [B, 1, 1, n]: a group is attended to as often as it has tokens (proportional attention, section 3)."""
        return None if self.sizes is None else self.sizes.log()[:, None, None, :, 0]

    def merge(self, hidden_states: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Merge tokens [B, n, D] by bipartite soft matching of the heads' mean keys [B, n, K] (section 3)."""
        special = self.num_special
        count = min(self.num_merged, (hidden_states.shape[1] - special) // 2)
        if count < 1:
            return hidden_states
        # Tokens at even places look for a partner at odd places: counted over all, as in the authors' code.
        even, odd = slice(special + special % 2, None, 2), slice(special + 1 - special % 2, None, 2)
        alike = F.normalize(keys, dim=-1)
        score, partner = (alike[:, even] @ alike[:, odd].mT).max(dim=-1)
        order = score.argsort(dim=1, descending=True)
        merged, kept = order[:, :count], order[:, count:].sort(dim=1).values
        partners = partner.gather(1, merged)

        def sums(values: torch.Tensor) -> torch.Tensor:
            wide = (-1, -1, values.shape[2])
            sources, targets = values[:, even], values[:, odd]
            moved = sources.gather(1, merged[..., None].expand(wide))
            targets = targets.scatter_add(1, partners[..., None].expand(wide), moved)
            return torch.cat((values[:, :special], sources.gather(1, kept[..., None].expand(wide)), targets), dim=1)

        sizes = torch.ones_like(hidden_states[..., :1]) if self.sizes is None else self.sizes
        self.sizes = sums(sizes)
        # Those that are kept stand before those at odd places.
        first_target = special + kept.shape[1]
        stays = torch.ones_like(partner).scatter(1, merged, 0)
        place = torch.arange(hidden_states.shape[1], device=order.device).repeat(order.shape[0], 1)
        place[:, even] = torch.where(stays > 0, special + stays.cumsum(dim=1) - 1, first_target + partner)
        place[:, odd] = torch.arange(first_target, self.sizes.shape[1], device=order.device)
        self.group_of = place if self.group_of is None else place.gather(1, self.group_of)
        return sums(hidden_states * sizes) / self.sizes

    def spread(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Give every token of the image the state of its group: [B, n, D] -> [B, N, D]."""
        if self.group_of is None:
            return hidden_states
        return hidden_states.gather(1, self.group_of[..., None].expand(-1, -1, hidden_states.shape[2]))

    def spread_map(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Divide a group's share evenly among its tokens: [B, A, n, n] -> [B, A, N, N]; rows still sum to 1."""
        if self.group_of is None or self.sizes is None:
            return probabilities
        shares = probabilities / self.sizes[:, None, None, :, 0]
        rows, columns = self.group_of[:, None, :, None], self.group_of[:, None, None, :]
        shares = shares.gather(2, rows.expand(-1, shares.shape[1], -1, shares.shape[3]))
        return shares.gather(3, columns.expand(-1, shares.shape[1], shares.shape[2], -1))


@final
class MergingLayer(FusedLayer):
    """`FusedLayer` that merges tokens between attention and MLP; the last one gives all tokens of the image again."""

    is_last: bool

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        only_for_head: bool = False,
        groups: TokenGroups | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert groups is not None, "a merging layer belongs to a merging model"
        num_queries = self.num_read if only_for_head else None
        query, key, value = self.attention.project(self.layernorm_before(hidden_states))
        query, bias = query[:, :, :num_queries], groups.attention_bias
        attended = F.scaled_dot_product_attention(query, key, value, bias, scale=self.attention.scaling)
        hidden_states = self.attention.o_proj(attended.transpose(1, 2).flatten(2), hidden_states[:, :num_queries])
        if num_queries is None and not self.is_last:
            hidden_states = groups.merge(hidden_states, key.mean(dim=1))
        hidden_states = self.mlp(self.layernorm_after(hidden_states), hidden_states)
        return groups.spread(hidden_states) if num_queries is None and self.is_last else hidden_states

    def merged_map(self, hidden_states: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
        """Return this block's map over the tokens of the image, [B, A, N, N], for its input [B, n, D]."""
        query, key = self.attention.query_and_key(self.layernorm_before(hidden_states))
        return groups.spread_map(attention_probabilities(query, key, self.attention.scaling, groups.attention_bias))


class MergingModel(HfViTBaseModel):
    """Goes before the class of a model whose layers merge tokens."""

    num_merged: int

    def groups(self) -> TokenGroups:
        return TokenGroups(self.num_merged, self.config.num_special_tokens)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorated one's parameters are spelt out)
        self, pixel_values: torch.Tensor, patch_attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        _refuse_padding(patch_attention_mask)
        if attends_otherwise(self.config):
            raise UserError("merge_tokens does not work with a custom attention function; choose a built-in one")
        for name in ("output_hidden_states", "output_attentions"):
            asked = kwargs.get(name)
            if getattr(self.config, name) if asked is None else asked:
                raise UserError(
                    f"with merge_tokens there is no {name}, because tokens are merged between blocks; {REMEDY}"
                )
        kwargs["groups"] = self.groups()
        return super().forward(pixel_values, **kwargs)

    def attention_maps(
        self, pixel_values: torch.Tensor, layers: Iterable[int] | None = None, patch_attention_mask: Any = None
    ) -> AttentionMaps:
        """See `HfViTModel.attention_maps`; the maps are over all patches of the image, also where some were merged."""
        _refuse_padding(patch_attention_mask)
        wanted = self._layer_indices(layers)
        tokens, groups = self.embed(pixel_values, None), self.groups()
        hidden_states, maps = tokens.hidden_states, dict[int, Any]()
        for index, layer in enumerate(self.layer_sequence()):
            if index in wanted:
                maps[index] = layer.merged_map(hidden_states, groups)
            hidden_states = layer(hidden_states, groups=groups)
        return AttentionMaps(maps, tokens.grid, patch_token_slice(self.config))


def _refuse_padding(patch_attention_mask: Any) -> None:
    if patch_attention_mask is not None:
        raise UserError("merge_tokens does not work with patch_attention_mask; give images of one size")


def check_mergeable(model: nn.Module, num_merged: object) -> None:
    """Raise UserError for what is no number of tokens, or for a model whose tokens cannot be merged."""
    if type(num_merged) is not int or num_merged < 1:
        raise UserError(f"merge_tokens={num_merged!r}: give the number of tokens that each block merges, or None")
    vits = [module for module in model.modules() if isinstance(module, HfViTBaseModel)]
    for vit in vits:
        config = vit.config
        reasons = {
            f"a {type(vit).__name__}, which needs every token in its place": type(vit) not in _MERGING,
            "causal attention": config.is_causal,
            f"position_embedding={config.position_embedding!r}": config.position_embedding.startswith("relative"),
            "a custom attention function": attends_otherwise(config),
            "layers that share blocks": len(set(vit.layers)) < config.num_hidden_layers,
        }
        if why := next((reason for reason, holds in reasons.items() if holds), None):
            raise UserError(f"merge_tokens does not work with {why}; leave it out")
    if not vits or any(isinstance(module, HfBaseBackbone) for module in model.modules()):
        raise UserError(f"merge_tokens does not work with {type(model).__name__}; give a model or a classifier")


def merging_changes(model: nn.Module, changes: list[Change], num_merged: int) -> list[Change]:
    """Return other classes for the models in it, and for their layers as `changes` builds them."""
    vits: list[Any] = [module for module in model.modules() if isinstance(module, HfViTBaseModel)]
    built = {(change.owner, change.name): change.value for change in changes}
    added: list[Change] = []
    for vit in vits:
        last = len(vit.layers) - 1
        for index in range(last + 1):
            layer = built[vit.layers, str(index)]
            added += [Change(layer, "__class__", MergingLayer), Change(layer, "is_last", index == last)]
        added += [Change(vit, "num_merged", num_merged), Change(vit, "__class__", _MERGING[type(vit)])]
    return added


_MERGING = {kind: precede(kind, by=MergingModel) for kind in (HfViTModel, HfHybridViTModel)}
