"""Similarity of the position embeddings.

Legend: D hidden size, h x w patch grid.
Source: arXiv 2010.11929, section 4.5 and figure 7 (center).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn
from torch.nn import functional as F

from hf_vit.analysis import plots
from hf_vit.analysis.frame import Analysis, Arrays, ArraySpec, Context
from hf_vit.analysis.reading.encoder import OURS, PREFIX_TOKENS, encoder_of
from hf_vit.models.configuration_hf_vit import as_pair

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def position_similarity(table: torch.Tensor) -> torch.Tensor:
    """Position embeddings [h, w, D] -> cosine similarity of each with all others, [h, w, h, w]."""
    h, w = table.shape[:2]
    rows = F.normalize(table.detach().flatten(0, 1).double(), dim=-1)
    return (rows @ rows.T).view(h, w, h, w)


def patch_positions(model: nn.Module) -> torch.Tensor | None:
    """The position embeddings of the nominal patch grid, [h, w, D]; None where nothing is added to the patches."""
    encoder = encoder_of(model)
    config: Any = getattr(encoder, "config", None)
    kind = getattr(config, "model_type", None)
    with torch.no_grad():
        if kind in OURS:
            table, _ = encoder.embeddings.position_table(config.grid, like=encoder.layernorm.weight)
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
        "One tile a patch: the cosine similarity of its position embedding with those of all patches, in their places. "
        "Learned tables show what training made of them; sinusoidal ones are fixed."
    )
    arrays: ClassVar[Mapping[str, ArraySpec]] = {
        "similarity": ArraySpec(("row", "column", "other_row", "other_column"), "cosine", "of two position embeddings")
    }

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        if patch_positions(context.subject.model) is None:
            return "the model adds no position embeddings to its patches, or they are not known here"
        return None

    def measure(self) -> Arrays:
        table = patch_positions(self.context.subject.model)
        assert table is not None
        return {"similarity": position_similarity(table).float().cpu().numpy()}

    def draw(self, arrays: Arrays) -> "dict[str, Figure]":
        return {"Similarity of position embeddings": plots.position_tiles(arrays["similarity"])}
