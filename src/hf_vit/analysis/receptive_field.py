"""Effective receptive field: which pixels the features of the central patch depend on, by depth.

Legend: B batch, C channels, D feature channels, H x W px, h x w patch grid, L depths.
Source: Luo et al., arXiv 1701.04128.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from hf_vit.analysis.analysis import Arrays, FeatureAnalysis, Pictures, describe_arrays, draw_curves, round_values
from hf_vit.results.figures import make_figure

# As in the paper, two standard deviations of a Gaussian: pixels count if their gradient exceeds 1 - 0.9545 of the
# largest gradient.
INSIDE = 0.9545
MAX_CELLS = 48  # cells along a side of a saved map


def compute_field_energy(maps: torch.Tensor, pixel_values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return the squared gradient [H, W] of the central position of maps [B, D, h, w], summed over images and colors.

    The maps were computed from `pixel_values` [B, C, H, W]. With random signs [B, D] the result is in expectation the
    sum of the squared derivatives of all channels.
    """
    h, w = maps.shape[2:]
    middle = (maps[:, :, h // 2, w // 2] * signs).sum()
    (gradient,) = torch.autograd.grad(middle, pixel_values, retain_graph=True)
    return gradient.cpu().double().square().sum(dim=(0, 1))


def compute_field_metrics(energy: torch.Tensor, grid: tuple[int, int]) -> dict[str, float]:
    """Return metrics of a squared gradient [H, W] of the central position of a grid h x w; NaN if there is no gradient.

    Returns:
        `size` (px): square root of the number of pixels whose gradient exceeds 1 - 0.9545 of the largest (the paper
        compares with the central pixel). `radius` (px): root mean square distance from the center of the position,
        weighted by the squared gradient. `outside`: fraction of the squared gradient outside the position itself.
    """
    (height, width), (h, w) = energy.shape, grid
    total = energy.sum()
    if not total > 0:
        return dict.fromkeys(("size", "radius", "outside"), float("nan"))
    side_h, side_w = height / h, width / w  # of a position, in px
    top, left = (h // 2) * height / h, (w // 2) * width / w
    rows, columns = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    squared_distance = (rows - top - side_h / 2)[:, None].square() + (columns - left - side_w / 2).square()
    is_inside = ((rows > top) & (rows < top + side_h))[:, None] & ((columns > left) & (columns < left + side_w))
    num_pixels = (energy > (1 - INSIDE) ** 2 * energy.max()).sum()
    return {
        "size": num_pixels.double().sqrt().item(),
        "radius": ((squared_distance * energy).sum() / total).sqrt().item(),
        "outside": (energy[~is_inside].sum() / total).item(),
    }


@contextmanager
def _make_differentiable(model: Any) -> Generator[None]:
    """Replace flex attention by sdpa on the CPU, where flex attention has no gradients."""
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation != "flex_attention" or next(model.parameters()).device.type != "cpu":
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


@final
class ReceptiveField(FeatureAnalysis):
    """Gradient of the central patch's features with respect to the pixels, by depth."""

    name = "receptive_field"
    title = "Effective receptive field"
    source = "arXiv 1701.04128, with the gradients of all channels"
    shows = (
        "One map per depth: the root mean square gradient of the central patch's features with respect to "
        "every pixel, each map on its own logarithmic scale. Gradients show the effect of small changes of "
        "a pixel, not what the model uses."
    )
    arrays = describe_arrays(
        maps=("depth row column", "1", "gradient of the central patch; the largest of a depth is 1"),
        size=("depth", "px", "root of the number of pixels with a gradient above 4.55% of the largest"),
        radius=("depth", "px", "root mean square distance from the patch's center"),
        outside=("depth", "share", "fraction of the squared gradient outside the patch itself"),
    )

    def measure(self) -> Arrays:
        energy: dict[int, torch.Tensor] = {}
        grids: list[tuple[int, int]] = []
        num_images = 0
        with _make_differentiable(self.context.loaded.model):
            for pixel_values in self.batches():
                inputs = pixel_values.detach().clone().requires_grad_()
                with torch.enable_grad():
                    maps, _ = self.read_maps(inputs)
                self.compute_patch_px(inputs, maps[-1])  # refuses incomplete patches, whose middle is elsewhere
                grids = [(features.shape[2], features.shape[3]) for features in maps]
                for depth, features in enumerate(maps):
                    signs = self._draw_signs(features, depth, num_images)
                    energy[depth] = energy.get(depth, 0) + compute_field_energy(features, inputs, signs)
                num_images += len(inputs)
                del maps  # frees the graph before the next batch
        numbers = [compute_field_metrics(energy[depth], grid) for depth, grid in enumerate(grids)]
        arrays = {name: np.array([metrics[name] for metrics in numbers], dtype=np.float32) for name in numbers[0]}
        return {"maps": np.stack([_downsample(energy[depth]) for depth in sorted(energy)]), **arrays}

    def _draw_signs(self, features: torch.Tensor, depth: int, first_index: int) -> torch.Tensor:
        """Return random signs [B, D] that depend on seed, depth and the image's index, but not on the batch size."""
        seeds = ([self.context.settings.seed, depth, first_index + offset] for offset in range(len(features)))
        signs = [np.random.default_rng(seed).choice((-1.0, 1.0), features.shape[1]) for seed in seeds]
        return torch.from_numpy(np.stack(signs)).to(features)

    def draw(self, arrays: Arrays) -> Pictures:
        panels = {"size": {"": arrays["size"]}, "radius": {"": arrays["radius"]}}
        return {
            "Effective receptive field": _draw_fields(arrays["maps"]),
            "Size of the receptive field by depth": draw_curves(panels, "depth", "px"),
        }

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        return {f"{name}_by_depth": round_values(arrays[name]) for name in ("size", "radius", "outside")}


def _downsample(energy: torch.Tensor) -> Any:
    """Return the root mean square gradient of [H, W], at most `MAX_CELLS` per side, scaled to a maximum of 1."""
    size = min(energy.shape[0], MAX_CELLS), min(energy.shape[1], MAX_CELLS)
    root = F.adaptive_avg_pool2d(energy[None, None], size)[0, 0].sqrt()
    return (root / root.max().clamp(min=torch.finfo(root.dtype).tiny)).float().numpy()


def _draw_fields(maps: NDArray[np.float32]) -> Any:
    """Draw maps [L, h, w] with a maximum of 1, a tile per depth, on a logarithmic scale of three decades."""
    from matplotlib.colors import LogNorm

    columns = min(7, len(maps))
    rows = math.ceil(len(maps) / columns)
    figure = make_figure(1.6 * columns + 0.8, 1.8 * rows)
    tiles = figure.subplots(rows, columns, squeeze=False).ravel()
    for depth, (axes, field) in enumerate(zip(tiles, maps, strict=False)):
        heat_map = axes.imshow(field.clip(1e-3), norm=LogNorm(1e-3, 1), cmap="magma", interpolation="nearest")
        axes.set_title(f"depth {depth}", fontsize=8)
    for axes in tiles:
        axes.set_axis_off()
    figure.colorbar(heat_map, ax=list(tiles), label="gradient")  # pyright: ignore[reportPossiblyUnboundVariable]
    return figure
