"""Attention entropy: how narrowly every head looks.

Legend: B batch, A heads, N tokens, h x w patch grid.
"""

from typing import final

import torch

from hf_vit.analysis.analysis import Arrays, HeadNumbers, Pictures, describe_arrays, heads_by_depth
from hf_vit.models.modeling_hf_vit import AttentionMaps


def entropies(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats over the last axis: [..., N] -> [...]; 0 for one key, log N for all alike."""
    return torch.special.entr(probabilities.float()).sum(dim=-1)


def attention_entropies(maps: AttentionMaps, layer: int) -> dict[str, torch.Tensor]:
    """Return the entropy in nats of what a patch attends to, averaged over the patches: [B, A] each.

    Prefix tokens count as keys, not as queries. Axial layers: `entropy` of the composed map, and of both parts.
    """
    found = maps[layer]
    if isinstance(found, torch.Tensor):
        return {"entropy": entropies(found[:, :, maps.patch_tokens]).mean(dim=-1)}
    rows, columns = entropies(found[0]), entropies(found[1])  # [B, A, h, w], [B, A, w, h]
    # Of a choice in two steps: the first one's, and on average over it the second one's.
    second = torch.einsum("bawqk,bakw->bawq", found[1].float(), rows)
    return {
        "entropy": (columns + second).mean(dim=(2, 3)),
        "entropy_rows": rows.mean(dim=(2, 3)),
        "entropy_columns": columns.mean(dim=(2, 3)),
    }


@final
class AttentionEntropy(HeadNumbers):
    """Mean attention entropy of every head, by depth."""

    name = "attention_entropy"
    title = "Attention entropy"
    source = "Shannon entropy of the attention maps of arXiv 2010.11929"
    shows = (
        "One dot per head: the entropy (nats) of a patch's attention, averaged over patches and images: 0 "
        "for one token, log N for uniform attention over N. A narrow head may still look far."
    )
    arrays = describe_arrays(
        entropy=("layer head", "nats", "over all tokens as keys; axial: of the composed map"),
        entropy_rows=("layer head", "nats", "axial: along rows"),
        entropy_columns=("layer head", "nats", "axial: along columns"),
    )

    def numbers(self, layer: int, maps: AttentionMaps) -> dict[str, torch.Tensor]:
        return attention_entropies(maps, layer)

    def draw(self, arrays: Arrays) -> Pictures:
        return {"Attention entropy by depth": heads_by_depth(arrays, "mean attention entropy (nats)")}

    def summary(self, arrays: Arrays) -> dict[str, list[float]]:
        return {"entropy_nats_by_layer": [round(float(value), 4) for value in arrays["entropy"].mean(axis=1)]}
