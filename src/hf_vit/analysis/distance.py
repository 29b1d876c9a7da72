"""Attention distance: the mean distance in pixels over which every head attends.

Legend: B batch, A heads, N tokens, h x w patch grid, n = h*w patches, L layers.
Source: arXiv 2010.11929, appendix D.7 and figure 7 (right).
"""

from typing import final

import torch

from hf_vit.analysis.analysis import Arrays, HeadMetric, Pictures, describe_arrays, draw_heads
from hf_vit.models.modeling_hf_vit import AttentionMaps


def compute_grid_distances(
    grid: tuple[int, int], patch_px: tuple[int, int], device: torch.device | str | None = None
) -> torch.Tensor:
    """Return the Euclidean distances in px between the patches of a grid, [h*w, h*w] float32, patches row by row."""
    h, w = grid
    rows = torch.arange(h, device=device, dtype=torch.float32).repeat_interleave(w) * patch_px[0]
    columns = torch.arange(w, device=device, dtype=torch.float32).repeat(h) * patch_px[1]
    return torch.hypot(rows[:, None] - rows, columns[:, None] - columns)


def compute_attention_distances(maps: AttentionMaps, layer: int, patch_px: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return the distance between query and key patches, weighted by attention and averaged over query patches.

    Returns:
        Arrays [B, A]. `distance` (px): attention to tokens other than patches counts as distance 0.
        `distance_renormalized` (px): attention renormalized over patches. `prefix_attention`: fraction that goes to
        other tokens. Axial layers: `distance` of the composed map (columns after rows), and `distance_rows` and
        `distance_columns` along each axis.
    """
    attention = maps[layer]
    if isinstance(attention, tuple):
        return _measure_axial_distances(attention[0].float(), attention[1].float(), patch_px)
    patch_attention = attention[:, :, maps.patch_tokens, maps.patch_tokens].float()
    distances = compute_grid_distances(maps.grid, patch_px, patch_attention.device)
    weighted = torch.einsum("baqk,qk->baq", patch_attention, distances)
    patch_share = patch_attention.sum(dim=-1)
    return {
        "distance": weighted.mean(dim=-1),
        "distance_renormalized": (weighted / patch_share.clamp(min=torch.finfo(patch_share.dtype).tiny)).mean(dim=-1),
        "prefix_attention": 1 - patch_share.mean(dim=-1),
    }


def _measure_axial_distances(
    rows: torch.Tensor, columns: torch.Tensor, patch_px: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Return the distances for row attention [B, A, h, w, w] and column attention [B, A, w, h, h].

    The composed map is computed for one row of queries at a time to save memory.
    """
    h, w = rows.shape[2], columns.shape[2]
    distances = compute_grid_distances((h, w), patch_px, rows.device).view(h, w, h, w)
    total = rows.new_zeros(rows.shape[:2])
    for query_row in range(h):
        # Query (i, j) attends to (i', j') through (i', j): first along column j, then along row i'.
        composed_attention = torch.einsum("bajk,bakjv->bajkv", columns[:, :, :, query_row], rows)
        total += torch.einsum("bajkv,jkv->ba", composed_attention, distances[query_row])
    along_rows, along_columns = distances[0, :, 0, :], distances[:, 0, :, 0]
    return {
        "distance": total / (h * w),
        "distance_rows": torch.einsum("bahqk,qk->ba", rows, along_rows) / (h * w),
        "distance_columns": torch.einsum("bawqk,qk->ba", columns, along_columns) / (h * w),
    }


@final
class AttentionDistance(HeadMetric):
    """Mean attention distance of every head and layer."""

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

    def compute(self, layer: int, maps: AttentionMaps) -> dict[str, torch.Tensor]:
        return compute_attention_distances(maps, layer, self.reader.layout.patch_px)

    def draw(self, arrays: Arrays) -> Pictures:
        distances = {name: arrays[name] for name in self.arrays if name in arrays and name != "prefix_attention"}
        return {"Attention distance by depth": draw_heads(distances, "mean attention distance (px)")}

    def summary(self, arrays: Arrays) -> dict[str, list[float]]:
        return {"distance_px_by_layer": [round(float(value), 3) for value in arrays["distance"].mean(axis=1)]}
