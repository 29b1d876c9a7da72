"""What the analyses of attention maps share: one pass over the images, means by head, and how both are drawn.

Legend: B batch, C channels, H x W px, A heads, L layers.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.analysis.analyses.analysis import Analysis, Arrays, Context
from hf_vit.analysis.reading.attention import AttentionReader, attention_obstacle
from hf_vit.models.modeling_hf_vit import AttentionMaps
from hf_vit.results.figures import integer_ticks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AttentionAnalysis(Analysis):
    """Abstract: looks at the attention maps of all layers, batch by batch."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.reader = AttentionReader(context.subject.model)

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        return attention_obstacle(context.subject.model)

    def read(self, limit: int | None = None) -> None:
        """One pass over the (first `limit`) images: `begin`, then `observe` for every layer, then `end`."""
        for pixel_values in self.batches(self.context.settings.batch_size, limit):
            self.begin(pixel_values)
            with torch.inference_mode():
                self.reader.read(pixel_values, self.observe)
            self.end()

    def begin(self, pixel_values: torch.Tensor) -> None:
        """Before a batch [B, C, H, W]."""

    @abstractmethod
    def observe(self, layer: int, maps: AttentionMaps) -> None:
        """One layer of a batch."""

    def end(self) -> None:
        """After the last layer of a batch."""


@final
class LayerHeadMeans:
    """Running means over images of numbers that every layer and head has."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, NDArray[np.float64]]] = {}
        self._images = 0

    def add(self, layer: int, values: Mapping[str, torch.Tensor]) -> None:
        """Values [B, A] of one layer."""
        for name, found in values.items():
            layers = self._sums.setdefault(name, {})
            batch = found.sum(dim=0).cpu().double().numpy()
            layers[layer] = layers.get(layer, np.zeros_like(batch)) + batch
        if layer == 0:
            self._images += len(next(iter(values.values())))

    def arrays(self) -> Arrays:
        """[L, A] a name."""
        return {
            name: (np.stack([layers[layer] for layer in sorted(layers)]) / self._images).astype(np.float32)
            for name, layers in self._sums.items()
        }


def shown_pixels(pixel_values: torch.Tensor) -> NDArray[np.uint8]:
    """Images as the model was given them [B, C, H, W] -> [B, H, W, 3] to show; each stretched to its own range."""
    pixels = pixel_values.detach().float().cpu()
    low, high = pixels.amin(dim=(1, 2, 3), keepdim=True), pixels.amax(dim=(1, 2, 3), keepdim=True)
    stretched = (pixels - low) / (high - low).clamp(min=1e-12) * 255
    return stretched.round().to(torch.uint8).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()


def heads_by_depth(arrays: "Mapping[str, NDArray[np.float32]]", label: str) -> "Figure":
    """One panel an array [L, A]: a dot a head over the layer, a line through their means."""
    figure = new_figure(4.4 * len(arrays), 3.6)
    top = 1.05 * max(float(values.max()) for values in arrays.values())
    for place, (name, values) in enumerate(arrays.items()):
        axes = figure.add_subplot(1, len(arrays), place + 1)
        layers = np.arange(1, len(values) + 1)
        for head in values.T:
            axes.scatter(layers, head, s=10, alpha=0.6, color="tab:blue", linewidths=0)
        axes.plot(layers, values.mean(axis=1), color="tab:orange", label="mean of the heads")
        integer_ticks(axes.xaxis)
        axes.set_xlabel("layer")
        axes.set_ylabel(label)
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.set_ylim(0, top or 1)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    return figure
