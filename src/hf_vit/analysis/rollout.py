"""Attention rollout: where in the image the output's information comes from, all layers together.

Legend: B batch, A heads, N tokens, h x w patch grid.
Sources: arXiv 2010.11929, appendix D.8; identity mixing is arXiv 2005.00928's (Abnar and Zuidema).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from hf_vit.analysis.analysis import Arrays, AttentionAnalysis, Pictures, describe_arrays, shown_pixels
from hf_vit.evaluation.reading import finite_logits
from hf_vit.families import problem_type_of
from hf_vit.models.modeling_hf_vit import AttentionMaps
from hf_vit.results.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


def rollout_step(rolled: torch.Tensor | None, maps: AttentionMaps, layer: int, identity: float) -> torch.Tensor:
    """Return rollout [B, N, N] with one more layer: ((1 - identity) * mean over heads + identity * I) @ rolled.

    Row q says how much every input token contributes to token q; `rolled` is None before the first layer. The two
    attentions of an axial layer count as two layers, rows first; the identity stands for the residual connection.
    """
    found = maps[layer]
    if isinstance(found, torch.Tensor):
        mean = found.float().mean(dim=1)
        rolled = torch.eye(mean.shape[-1]).to(mean).expand_as(mean) if rolled is None else rolled
        return (1 - identity) * mean @ rolled + identity * rolled
    rows, columns = (part.float().mean(dim=1) for part in found)
    h, w = rows.shape[1], columns.shape[1]
    lines = (torch.eye(h * w).to(rows).expand(len(rows), -1, -1) if rolled is None else rolled).unflatten(1, (h, w))
    lines = (1 - identity) * torch.einsum("bhqk,bhkn->bhqn", rows, lines) + identity * lines
    lines = (1 - identity) * torch.einsum("bwqk,bkwn->bqwn", columns, lines) + identity * lines
    return lines.flatten(1, 2)


@final
class AttentionRollout(AttentionAnalysis):
    """Rollout from the output token to the patches, laid over the images."""

    name = "attention_rollout"
    title = "Attention rollout"
    source = "arXiv 2010.11929, appendix D.8; identity mixing: arXiv 2005.00928"
    shows = (
        "Attention multiplied through all layers, from the class token (without one: from the mean of the "
        "patches) to the patches. It follows attention alone: values, MLPs and the head are left out, so "
        "it does not explain a decision."
    )
    arrays = describe_arrays(
        rollout=("image row column", "share", "of the output's attention that reaches a patch of the first layer")
    )

    def measure(self) -> Arrays:
        found: list[torch.Tensor] = []
        self._pixels: list[np.ndarray] = []
        self._predictions: list[str] = []
        for pixel_values in self.batches(self.context.settings.num_pictures):
            self._pixels.append(shown_pixels(pixel_values))
            self._predictions += self._predicted(pixel_values)
            found.append(self._rollout(pixel_values).cpu())
        return {"rollout": torch.cat(found).numpy()}

    @torch.inference_mode()
    def _predicted(self, pixel_values: torch.Tensor) -> list[str]:
        subject = self.context.subject
        if not subject.label_sets or problem_type_of(subject.model) == "regression":
            return []
        best = finite_logits(subject.model, pixel_values).argmax(-1)
        return [subject.label_sets[-1][number] for number in best.tolist()]

    def _rollout(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] -> from the output token to the patches, [B, h, w]."""
        layout, rolled = self.reader.layout, list[torch.Tensor | None]([None])

        def add(layer: int, maps: AttentionMaps) -> None:
            rolled[0] = rollout_step(rolled[0], maps, layer, self.context.settings.rollout_identity)

        self.read(pixel_values, add)
        assert rolled[0] is not None
        to_patches = rolled[0][:, :, layout.patch_tokens]
        without = layout.class_token is None
        output = to_patches[:, layout.patch_tokens].mean(dim=1) if without else to_patches[:, layout.class_token]
        return output.unflatten(1, layout.grid(pixel_values))

    def draw(self, arrays: Arrays) -> Pictures:
        patch_px = self.reader.layout.patch_px
        labels, count = self.context.images.labels, len(arrays["rollout"])
        true = [f"label {name}" for name in labels[:count]] or [""] * count
        predicted = [f"prediction {name}" for name in self._predictions] or [""] * count
        titles = [f"{one}\n{other}".strip() for one, other in zip(true, predicted, strict=True)]
        return {"Attention rollout": draw_overlays(np.concatenate(self._pixels), arrays["rollout"], patch_px, titles)}


def draw_overlays(
    pixels: "NDArray[np.uint8]", maps: "NDArray[np.float32]", patch_px: tuple[int, int], titles: Sequence[str] = ()
) -> "Figure":
    """Images [I, H, W, 3] above themselves under a heat map [I, h, w], each on its own scale, which stands below it.

    A place of a map covers its patch, (height, width) in px: a hybrid's last ones reach beyond the image.
    """
    count = len(maps)
    figure = new_figure(2.2 * count, 5.0)
    for place, (image, found) in enumerate(zip(pixels, maps, strict=True)):
        height, width = image.shape[:2]
        for row in range(2):
            axes = figure.add_subplot(2, count, row * count + place + 1)
            axes.imshow(image, interpolation="nearest")
            if row:
                bottom, right = (side * px - 0.5 for side, px in zip(found.shape, patch_px, strict=True))
                extent = (-0.5, right, bottom, -0.5)
                heat = axes.imshow(found, cmap="inferno", alpha=0.6, extent=extent, interpolation="bilinear", vmin=0)
                axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
                scale = figure.colorbar(heat, ax=axes, orientation="horizontal", fraction=0.06, pad=0.03)
                scale.set_label("share of the attention", fontsize=7)
                scale.set_ticks([0, float(found.max())], labels=["0", f"{found.max():.1%}"], fontsize=7)
            elif titles:
                axes.set_title(titles[place], fontsize=8, parse_math=False)
            axes.set_axis_off()
    return figure
