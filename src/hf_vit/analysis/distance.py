"""Attention distance: how far every head looks.

Legend: B batch, A heads, N tokens, h x w patch grid, n = h*w patches, L layers.
Source: arXiv 2010.11929, appendix D.7 and figure 7 (right).
"""

from typing import final

import torch

from hf_vit.analysis.analysis import Arrays, HeadNumbers, Pictures, describe_arrays, heads_by_depth
from hf_vit.models.modeling_hf_vit import AttentionMaps


def grid_distances(
    grid: tuple[int, int], patch_px: tuple[int, int], device: torch.device | str | None = None
) -> torch.Tensor:
    """Return Euclidean distances in px between the patches of a grid, row by row: [h*w, h*w] float32."""
    h, w = grid
    rows = torch.arange(h, device=device, dtype=torch.float32).repeat_interleave(w) * patch_px[0]
    columns = torch.arange(w, device=device, dtype=torch.float32).repeat(h) * patch_px[1]
    return torch.hypot(rows[:, None] - rows, columns[:, None] - columns)


def attention_distances(maps: AttentionMaps, layer: int, patch_px: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return the distance between query and key, weighted by attention, averaged over the patches as queries.

    Returns:
        [B, A] each. `distance` (px): attention to tokens that are no patches counts as distance 0.
        `distance_renormalized` (px): over the attention that stays among patches. `prefix_attention`: the share that
        goes to other tokens. Axial layers: `distance` of the composed map (columns after rows), and along each axis,
        `distance_rows` and `distance_columns`.
    """
    found = maps[layer]
    if isinstance(found, tuple):
        return _axial_distances(found[0].float(), found[1].float(), patch_px)
    among = found[:, :, maps.patch_tokens, maps.patch_tokens].float()
    weighted = torch.einsum("baqk,qk->baq", among, grid_distances(maps.grid, patch_px, among.device))
    kept = among.sum(dim=-1)
    return {
        "distance": weighted.mean(dim=-1),
        "distance_renormalized": (weighted / kept.clamp(min=torch.finfo(kept.dtype).tiny)).mean(dim=-1),
        "prefix_attention": 1 - kept.mean(dim=-1),
    }


def _axial_distances(rows: torch.Tensor, columns: torch.Tensor, patch_px: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Rows [B, A, h, w, w] and columns [B, A, w, h, h]; the composed map is made for one row of queries at a time."""
    h, w = rows.shape[2], columns.shape[2]
    between = grid_distances((h, w), patch_px, rows.device).view(h, w, h, w)
    composed = rows.new_zeros(rows.shape[:2])
    for query_row in range(h):
        # A query (i, j) sees (i', j') through (i', j): along column j, and in that row along the row.
        reached = torch.einsum("bajk,bakjv->bajkv", columns[:, :, :, query_row], rows)
        composed += torch.einsum("bajkv,jkv->ba", reached, between[query_row])
    along_rows, along_columns = between[0, :, 0, :], between[:, 0, :, 0]
    return {
        "distance": composed / (h * w),
        "distance_rows": torch.einsum("bahqk,qk->ba", rows, along_rows) / (h * w),
        "distance_columns": torch.einsum("bawqk,qk->ba", columns, along_columns) / (h * w),
    }


@final
class AttentionDistance(HeadNumbers):
    """Mean attention distance of every head, by depth."""

    name = "attention_distance"
    title = "Attention distance"
    source = "arXiv 2010.11929, appendix D.7 and figure 7 (right)"
    shows = (
        "One dot per head: the distance in pixels between a query patch and the patches it attends to, "
        "weighted by attention and averaged over queries and images. It shows where heads look, not what "
        "they compute."
    )
    arrays = describe_arrays(
        distance=("layer head", "px", "attention to other tokens counts as distance 0; axial: composed map"),
        distance_renormalized=("layer head", "px", "attention renormalized over the patches"),
        prefix_attention=("layer head", "share", "attention of patches that goes to class and other tokens"),
        distance_rows=("layer head", "px", "axial: along rows"),
        distance_columns=("layer head", "px", "axial: along columns"),
    )

    def numbers(self, layer: int, maps: AttentionMaps) -> dict[str, torch.Tensor]:
        return attention_distances(maps, layer, self.reader.layout.patch_px)

    def draw(self, arrays: Arrays) -> Pictures:
        shown = {name: arrays[name] for name in self.arrays if name in arrays and name != "prefix_attention"}
        return {"Attention distance by depth": heads_by_depth(shown, "mean attention distance (px)")}

    def summary(self, arrays: Arrays) -> dict[str, list[float]]:
        return {"distance_px_by_layer": [round(float(value), 3) for value in arrays["distance"].mean(axis=1)]}
