"""Attention rollout: which patches the output attends to through all layers.

Legend: B batch, A heads, N tokens, h x w patch grid.
Sources: arXiv 2010.11929, appendix D.8; mixing in the identity is from arXiv 2005.00928 (Abnar and Zuidema).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from hf_vit.analysis.analysis import (
    Arrays,
    AttentionAnalysis,
    Pictures,
    describe_arrays,
    forward_options,
    to_display_images,
)
from hf_vit.evaluation.reading import compute_logits
from hf_vit.families import get_problem_type
from hf_vit.models.modeling_hf_vit import AttentionMaps
from hf_vit.results.figures import make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_HOT = 3  # times the 95th percentile


def add_rollout_layer(rollout: torch.Tensor | None, maps: AttentionMaps, layer: int, identity: float) -> torch.Tensor:
    """Return the rollout [B, N, N] with one more layer: ((1 - identity) * mean over heads + identity * I) @ rolled.

    Row q holds how much every input token contributes to token q. The row and column attention of an axial layer count
    as two layers, rows first. `identity` is the weight of the residual connection, and `rolled` is None at first.
    """
    attention = maps[layer]
    if isinstance(attention, torch.Tensor):
        mean = attention.float().mean(dim=1)
        rollout = torch.eye(mean.shape[-1]).to(mean).expand_as(mean) if rollout is None else rollout
        return (1 - identity) * mean @ rollout + identity * rollout
    rows, columns = (part.float().mean(dim=1) for part in attention)
    h, w = rows.shape[1], columns.shape[1]
    previous = torch.eye(h * w).to(rows).expand(len(rows), -1, -1) if rollout is None else rollout
    grid = previous.unflatten(1, (h, w))
    after_rows = (1 - identity) * torch.einsum("bhqk,bhkn->bhqn", rows, grid) + identity * grid
    after_columns = (1 - identity) * torch.einsum("bwqk,bkwn->bqwn", columns, after_rows) + identity * after_rows
    return after_columns.flatten(1, 2)


@final
class AttentionRollout(AttentionAnalysis):
    """Rollout from the output token to the patches, drawn over the images."""

    name = "attention_rollout"
    title = "Attention rollout"
    source = "arXiv 2010.11929, appendix D.8; identity mixing: arXiv 2005.00928"
    shows = (
        "Attention multiplied through all layers, from the class token or first patch (if the output is read from "
        "neither: from the mean of the patches) to the patches. It uses only attention, not values, MLPs or the head, "
        "so it does not explain a decision."
    )
    arrays = describe_arrays(
        rollout=(
            "image row column",
            "share",
            "fraction of the output's attention that reaches a patch of the first layer",
        )
    )

    def measure(self) -> Arrays:
        rollouts: list[torch.Tensor] = []
        self._pixels: list[np.ndarray] = []
        self._predictions: list[str] = []
        for pixel_values in self.batches(self.context.settings.num_pictures):
            self._pixels.append(to_display_images(pixel_values))
            self._predictions += self._predict(pixel_values)
            rollouts.append(self._compute_rollout(pixel_values).cpu())
        return {"rollout": torch.cat(rollouts).numpy()}

    @torch.inference_mode()
    def _predict(self, pixel_values: torch.Tensor) -> list[str]:
        """Return the predicted class names of a batch; empty for models without classes."""
        loaded = self.context.loaded
        if not loaded.label_sets or get_problem_type(loaded.model) == "regression":
            return []
        best = compute_logits(loaded.model, pixel_values, **forward_options(loaded.model, pixel_values)).argmax(-1)
        return [loaded.label_sets[-1][number] for number in best.tolist()]

    def _compute_rollout(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the rollout [B, h, w] from the output token to the patches for images [B, C, H, W]."""
        layout = self.reader.layout
        rollouts = list[torch.Tensor | None]([None])

        def add_layer(layer: int, maps: AttentionMaps) -> None:
            rollouts[0] = add_rollout_layer(rollouts[0], maps, layer, self.context.settings.rollout_identity)

        self.read(pixel_values, add_layer)
        assert rollouts[0] is not None
        to_patches = rollouts[0][:, :, layout.patch_tokens]
        if layout.output_token is None:
            output = to_patches[:, layout.patch_tokens].mean(dim=1)
        else:
            output = to_patches[:, layout.output_token]
        return output.unflatten(1, layout.grid(pixel_values))

    def draw(self, arrays: Arrays) -> Pictures:
        patch_px = self.reader.layout.patch_px
        labels = self.context.images.labels
        count = len(arrays["rollout"])
        label_lines = [f"label {name}" for name in labels[:count]] or [""] * count
        prediction_lines = [f"prediction {name}" for name in self._predictions] or [""] * count
        titles = ["\n".join(lines).strip() for lines in zip(label_lines, prediction_lines, strict=True)]
        return {"Attention rollout": draw_overlays(np.concatenate(self._pixels), arrays["rollout"], patch_px, titles)}


def draw_overlays(
    pixels: "NDArray[np.uint8]", maps: "NDArray[np.float32]", patch_px: tuple[int, int], titles: Sequence[str] = ()
) -> "Figure":
    """Draw images [I, H, W, 3] in one row, and below them the same images under heat maps [I, h, w] with color bars.

    Args:
        pixels: I images.
        maps: heat maps; each has its own scale, from 0 to its maximum. Models without registers use some patches as
            such, which draw so much attention that nothing else would be seen: if the maximum is more than 3 times the
            95th percentile, the scale ends at that percentile, as the color bar says.
        patch_px: (height, width) in px that a cell covers; the last cells of a hybrid extend beyond the image.
        titles: title of each image.
    """
    count = len(maps)
    figure = make_figure(2.2 * count, 5.0)
    for index, (image, heat_values) in enumerate(zip(pixels, maps, strict=True)):
        height, width = image.shape[:2]
        for row in range(2):
            axes = figure.add_subplot(2, count, row * count + index + 1)
            axes.imshow(image, interpolation="nearest")
            if row:
                bottom, right = (side * px - 0.5 for side, px in zip(heat_values.shape, patch_px, strict=True))
                extent = (-0.5, right, bottom, -0.5)
                highest, percentile = float(heat_values.max()), float(np.percentile(heat_values, 95))
                is_clipped = highest > _HOT * percentile > 0
                top = percentile if is_clipped else highest
                style: Any = {"cmap": "inferno", "alpha": 0.6, "interpolation": "bilinear", "vmin": 0, "vmax": top}
                overlay = axes.imshow(heat_values, extent=extent, **style)
                axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
                scale = figure.colorbar(overlay, ax=axes, orientation="horizontal", fraction=0.06, pad=0.03)
                scale.set_label("share of the attention", fontsize=7)
                label = f"95th percentile, {top:.1%}, to {highest:.1%}" if is_clipped else f"{top:.1%}"
                scale.set_ticks([0, top], labels=["0", label], fontsize=7)
            elif titles:
                axes.set_title(titles[index], fontsize=8, parse_math=False)
            axes.set_axis_off()
    return figure
