"""Single heads: what each of them attends to in an image.

Legend: B batch, A heads, N tokens, h x w patch grid, L layers.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, final

import numpy as np
import torch

from hf_vit.analysis import plots
from hf_vit.analysis.frame import Arrays, ArraySpec, AttentionAnalysis, shown_pixels
from hf_vit.models.modeling_hf_vit import AttentionMaps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def query_maps(maps: AttentionMaps, layer: int, class_token: int | None) -> torch.Tensor:
    """Attention of one query to all patches, [B, A, h, w]; the class token's, or the central patch's without one."""
    (h, w), found = maps.grid, maps[layer]
    if isinstance(found, tuple):  # the composed map, of this query alone
        rows, columns = found
        return torch.einsum("bak,bakv->bakv", columns[:, :, w // 2, h // 2], rows[:, :, :, w // 2]).float()
    if class_token is not None:
        query = found[:, :, class_token]
    else:
        query = found[:, :, maps.patch_tokens][:, :, (h // 2) * w + w // 2]
    return query[:, :, maps.patch_tokens].unflatten(-1, (h, w)).float()


@final
class HeadMaps(AttentionAnalysis):
    """What every head of every layer attends to, for a few images."""

    name = "head_maps"
    title = "Attention of single heads"
    source = "the attention maps of arXiv 2010.11929, head by head"
    shows = (
        "One row a layer, one column a head: attention from the class token (without one: from the central patch) to "
        "the patches, each map on its own scale. Of one image; other images give other maps."
    )
    arrays: ClassVar[Mapping[str, ArraySpec]] = {
        "maps": ArraySpec(
            ("image", "layer", "head", "row", "column"), "share", "attention of the query; axial: composed map"
        )
    }

    def measure(self) -> Arrays:
        self._found: list[torch.Tensor] = []
        self._pixels: list[np.ndarray] = []
        self.read(self.context.settings.num_pictures)
        if self.reader.layout.class_token is None:
            self.notes.append("there is no class token: the query is the patch in the middle of the grid")
        return {"maps": torch.cat(self._found).numpy()}

    def begin(self, pixel_values: torch.Tensor) -> None:
        self._layers: list[torch.Tensor] = []
        self._pixels.append(shown_pixels(pixel_values))

    def observe(self, layer: int, maps: AttentionMaps) -> None:
        self._layers.append(query_maps(maps, layer, self.reader.layout.class_token).cpu())

    def end(self) -> None:
        self._found.append(torch.stack(self._layers, dim=1))

    def draw(self, arrays: Arrays) -> "dict[str, Figure]":
        return {"Attention of single heads": plots.head_grid(self._pixels[0][0], arrays["maps"][0])}
