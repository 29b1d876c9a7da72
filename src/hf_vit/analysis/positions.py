"""Similarity of the position embeddings.

Legend: D hidden size, h x w patch grid.
Source: arXiv 2010.11929, section 4.5 and figure 7 (center).
"""

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
    encoder_of,
)
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.results.figures import new_figure

_MAX_TILES = 14  # tiles along an axis of the picture; more would be too small to see


def position_similarity(table: torch.Tensor) -> torch.Tensor:
    """Position embeddings [h, w, D] -> cosine similarity of each with all others, [h, w, h, w]."""
    h, w = table.shape[:2]
    rows = F.normalize(table.detach().flatten(0, 1).double(), dim=-1)
    return (rows @ rows.T).view(h, w, h, w)


def patch_positions(model: nn.Module) -> torch.Tensor | None:
    """Return the position embeddings of the nominal patch grid, [h, w, D]; None where nothing is added to the
    patches.
    """
    encoder = encoder_of(model)
    config: Any = getattr(encoder, "config", None)
    kind = getattr(config, "model_type", None)
    with torch.no_grad():
        if kind in OUR_VITS:
            table, _ = encoder.embeddings.position_table(config.grid, like=next(encoder.parameters()))
            return None if table is None else table[0].unflatten(0, config.grid)
        if kind not in PREFIX_TOKENS:
            return None
        (height, width), patch = as_pair(config.image_size), as_pair(config.patch_size)
        grid = (height // patch[0], width // patch[1])
        table = encoder.embeddings.position_embeddings[0]
        return table[table.shape[0] - grid[0] * grid[1] :].unflatten(0, grid)


@final
class PositionSimilarity(Analysis):
    """Cosine similarity between the position embedding of each patch and those of all others."""

    name = "position_similarity"
    title = "Similarity of position embeddings"
    source = "arXiv 2010.11929, section 4.5 and figure 7 (center)"
    shows = (
        "One tile per patch: the cosine similarity of its position embedding with those of all patches, in "
        "their places. Learned tables show what training made of them; sinusoidal ones are fixed."
    )
    arrays = describe_arrays(similarity=("row column other_row other_column", "cosine", "of two position embeddings"))

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        if patch_positions(context.subject.model) is None:
            return "the model has no additive position embeddings that can be read"
        return None

    def measure(self) -> Arrays:
        table = patch_positions(self.context.subject.model)
        assert table is not None
        return {"similarity": position_similarity(table).float().cpu().numpy()}

    def draw(self, arrays: Arrays) -> Pictures:
        """Draw a tile per patch (of large grids, per every second, third, ... patch)."""
        similarity = arrays["similarity"]
        h, w = similarity.shape[:2]
        rows, columns = (np.arange(0, side, -(-side // _MAX_TILES)) for side in (h, w))
        side = 0.45 if max(len(rows), len(columns)) > 7 else 0.7
        figure = new_figure(side * len(columns) + 1.2, side * len(rows) + 0.4)
        axes = figure.subplots(len(rows), len(columns), squeeze=False)
        for (place, other), one in np.ndenumerate(axes):
            picture = one.imshow(similarity[rows[place], columns[other]], vmin=-1, vmax=1, cmap="viridis")
            one.set_xticks([])
            one.set_yticks([])
        figure.supxlabel("patch column", fontsize=8)
        figure.supylabel("patch row", fontsize=8)
        figure.colorbar(picture, ax=axes, label="cosine similarity", fraction=0.046, pad=0.02)  # pyright: ignore[reportPossiblyUnboundVariable]
        return {self.title: figure}
