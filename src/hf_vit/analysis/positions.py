"""Similarity of position embeddings.

Legend: D hidden size, h x w patch grid.
Source: arXiv 2010.11929, section 4.5 and figure 7 (center).
"""

import math
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hf_vit.analysis.analysis import (
    OUR_VITS,
    PREFIX_TOKENS,
    Analysis,
    Arrays,
    Context,
    Pictures,
    describe_arrays,
    find_encoder,
)
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.results.figures import make_figure

_MAX_TILES = 14  # tiles along an axis of the plot; more would be too small to see


def compute_position_similarity(table: torch.Tensor) -> torch.Tensor:
    """Return the cosine similarities [h, w, h, w] of all pairs of position embeddings [h, w, D]."""
    h, w = table.shape[:2]
    rows = F.normalize(table.detach().cpu().flatten(0, 1).double(), dim=-1)
    return (rows @ rows.T).view(h, w, h, w)


def get_patch_positions(model: nn.Module) -> torch.Tensor | None:
    """Return the position embeddings [h, w, D] of the model's patch grid; None if none are added to the patches."""
    encoder = find_encoder(model)
    config: Any = getattr(encoder, "config", None)
    kind = getattr(config, "model_type", None)
    with torch.no_grad():
        if kind in OUR_VITS:
            table, _ = encoder.embeddings.compute_position_table(config.grid, like=next(encoder.parameters()))
            return None if table is None else table[0].unflatten(0, config.grid)
        if kind not in PREFIX_TOKENS:
            return None
        (height, width), patch = as_pair(config.image_size), as_pair(config.patch_size)
        grid = (height // patch[0], width // patch[1])
        table = encoder.embeddings.position_embeddings[0]
        return table[table.shape[0] - grid[0] * grid[1] :].unflatten(0, grid)


@final
class PositionSimilarity(Analysis):
    """Cosine similarity between the position embeddings of all pairs of patches."""

    name = "position_similarity"
    reads_images = False
    title = "Similarity of position embeddings"
    source = "arXiv 2010.11929, section 4.5 and figure 7 (center)"
    shows = (
        "One tile per patch: the cosine similarity of its position embedding with those of all patches, arranged "
        "as in the image. Learned embeddings show what training made of them; sinusoidal ones are fixed."
    )
    arrays = describe_arrays(
        similarity=("row column other_row other_column", "cosine", "cosine similarity of two position embeddings")
    )

    @classmethod
    def find_obstacle(cls, context: Context) -> str | None:
        if get_patch_positions(context.loaded.model) is None:
            return "the model has no additive position embeddings that can be read"
        return None

    def measure(self) -> Arrays:
        table = get_patch_positions(self.context.loaded.model)
        assert table is not None
        return {"similarity": compute_position_similarity(table).float().cpu().numpy()}

    def draw(self, arrays: Arrays) -> Pictures:
        """Draw a tile per patch; for large grids only every second, third, ... patch."""
        similarity = arrays["similarity"]
        rows, columns = (np.arange(0, side, math.ceil(side / _MAX_TILES)) for side in similarity.shape[:2])
        tile_inches = 0.45 if max(len(rows), len(columns)) > 7 else 0.7
        colorbar_inches, label_inches = 1.2, 0.4
        figure = make_figure(tile_inches * len(columns) + colorbar_inches, tile_inches * len(rows) + label_inches)
        axes = figure.subplots(len(rows), len(columns), squeeze=False)
        for (row, column), tile in np.ndenumerate(axes):
            picture = tile.imshow(similarity[rows[row], columns[column]], vmin=-1, vmax=1, cmap="viridis")
            tile.set_xticks([])
            tile.set_yticks([])
        figure.supxlabel("patch column", fontsize=8)
        figure.supylabel("patch row", fontsize=8)
        figure.colorbar(picture, ax=axes, label="cosine similarity", fraction=0.046, pad=0.02)  # pyright: ignore[reportPossiblyUnboundVariable]
        return {self.title: figure}
