"""Head maps: what every attention head attends to in an image.

Legend: B batch, A heads, N tokens, h x w patch grid, L layers.
"""

from typing import final

import numpy as np
import torch

from hf_vit.analysis.analysis import Arrays, AttentionAnalysis, Pictures, describe_arrays, to_display_images
from hf_vit.models.modeling_hf_vit import AttentionMaps
from hf_vit.results.figures import make_figure


def query_maps(maps: AttentionMaps, layer: int, class_token: int | None) -> torch.Tensor:
    """Return the attention [B, A, h, w] of the class token, or else of the central patch, to all patches."""
    h, w = maps.grid
    attention = maps[layer]
    if isinstance(attention, tuple):  # the composed map of this query only
        rows, columns = attention
        return torch.einsum("bak,bakv->bakv", columns[:, :, w // 2, h // 2], rows[:, :, :, w // 2]).float()
    if class_token is not None:
        query = attention[:, :, class_token]
    else:
        query = attention[:, :, maps.patch_tokens][:, :, (h // 2) * w + w // 2]
    return query[:, :, maps.patch_tokens].unflatten(-1, (h, w)).float()


@final
class HeadMaps(AttentionAnalysis):
    """Attention maps of every head and layer for a few images."""

    name = "head_maps"
    title = "Attention of single heads"
    source = "attention maps as in arXiv 2010.11929, for single heads"
    shows = (
        "One row per layer, one column per head: attention from the class token (without one: from the "
        "central patch) to the patches, each map on its own scale. For one image; other images give other "
        "maps."
    )
    arrays = describe_arrays(
        maps=("image layer head row column", "share", "attention of the query; axial: composed map")
    )

    def measure(self) -> Arrays:
        maps_by_layer: dict[int, list[torch.Tensor]] = {}
        self._pixels: list[np.ndarray] = []
        class_token = self.reader.layout.class_token

        def add_layer(layer: int, maps: AttentionMaps) -> None:
            maps_by_layer.setdefault(layer, []).append(query_maps(maps, layer, class_token).cpu())

        for pixel_values in self.batches(self.context.settings.num_pictures):
            self.read(pixel_values, add_layer)
            self._pixels.append(to_display_images(pixel_values))
        if class_token is None:
            self.notes.append("the model has no class token, so the query is the patch in the middle of the grid")
        maps = [torch.cat(maps_by_layer[layer]) for layer in sorted(maps_by_layer)]
        return {"maps": torch.stack(maps, dim=1).numpy()}

    def draw(self, arrays: Arrays) -> Pictures:
        """Return a plot of the first image and its maps."""
        image = self._pixels[0][0]
        maps = arrays["maps"][0]
        layers, heads = maps.shape[:2]
        map_inches, label_inches, title_inches = 0.9, 0.6, 0.4
        # The image covers two rows and two columns at the left of the maps.
        figure = make_figure(map_inches * (heads + 2) + label_inches, map_inches * max(layers, 2) + title_inches)
        grid = figure.add_gridspec(layers, heads + 2)
        image_axes = figure.add_subplot(grid[: min(2, layers), :2])
        image_axes.imshow(image, interpolation="nearest")
        image_axes.set_axis_off()
        for layer in range(layers):
            for head in range(heads):
                axes = figure.add_subplot(grid[layer, head + 2])
                axes.imshow(maps[layer, head], cmap="inferno", interpolation="nearest", vmin=0)
                axes.set_xticks([])
                axes.set_yticks([])
                if head == 0:
                    axes.set_ylabel(f"layer {layer + 1}", fontsize=7)
                if layer == 0:
                    axes.set_title(f"head {head + 1}", fontsize=7)
        return {self.title: figure}
