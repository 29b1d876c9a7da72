"""Attention entropy: how concentrated the attention of every head is.

Legend: B batch, A heads, N tokens, h x w patch grid.
"""

from typing import final

import torch

from hf_vit.analysis.analysis import Arrays, HeadMetric, Pictures, describe_arrays, draw_heads, round_values
from hf_vit.models.modeling_hf_vit import AttentionMaps


def compute_entropies(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats over the last axis, [..., N] -> [...]: 0 for one key, log N for uniform attention."""
    return torch.special.entr(probabilities.float()).sum(dim=-1)


def compute_attention_entropies(maps: AttentionMaps, layer: int) -> dict[str, torch.Tensor]:
    """Return the entropy in nats of a patch's attention, averaged over query patches, as arrays [B, A].

    Prefix tokens count as keys but not as queries. Axial layers have the `entropy` of the composed map and of both
    parts.
    """
    attention = maps[layer]
    if isinstance(attention, torch.Tensor):
        return {"entropy": compute_entropies(attention[:, :, maps.patch_tokens]).mean(dim=-1)}
    rows, columns = compute_entropies(attention[0]), compute_entropies(attention[1])  # [B, A, h, w], [B, A, w, h]
    # Chain rule: the entropy of the column step, plus the expected entropy of the row step.
    expected_row_entropy = torch.einsum("bawqk,bakw->bawq", attention[1].float(), rows)
    return {
        "entropy": (columns + expected_row_entropy).mean(dim=(2, 3)),
        "entropy_rows": rows.mean(dim=(2, 3)),
        "entropy_columns": columns.mean(dim=(2, 3)),
    }


@final
class AttentionEntropy(HeadMetric):
    """Mean attention entropy of every head and layer."""

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

    def compute(self, layer: int, maps: AttentionMaps) -> dict[str, torch.Tensor]:
        return compute_attention_entropies(maps, layer)

    def draw(self, arrays: Arrays) -> Pictures:
        return {"Attention entropy by depth": draw_heads(arrays, "mean attention entropy (nats)")}

    def summary(self, arrays: Arrays) -> dict[str, list[float | None]]:
        return {"entropy_nats_by_layer": round_values(arrays["entropy"].mean(axis=1))}
