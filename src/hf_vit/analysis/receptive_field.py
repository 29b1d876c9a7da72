"""The effective receptive field: which pixels the patch in the middle really depends on, by depth.

Legend: B batch, C channels, D feature channels, H x W px, h x w patch grid, L depths.
Source: Luo et al., arXiv 1701.04128.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from hf_vit.analysis.analysis import Arrays, FeatureAnalysis, Pictures, curves, describe_arrays, rounded
from hf_vit.results.figures import new_figure

# Two standard deviations of a Gaussian, as in the paper: a pixel counts whose gradient is above 1 - 0.9545 of the top.
INSIDE = 0.9545
MAX_CELLS = 48  # a side of a stored map


def field_energy(maps: torch.Tensor, pixel_values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return the squared gradient [H, W] of the middle place of maps [B, D, h, w], summed over images and colors.

    With random signs [B, D] it is, on average, the sum of the squared derivatives of all D channels.
    """
    h, w = maps.shape[2:]
    middle = (maps[:, :, h // 2, w // 2] * signs).sum()
    (gradient,) = torch.autograd.grad(middle, pixel_values, retain_graph=True)
    return gradient.double().square().sum(dim=(0, 1)).cpu()


def field_numbers(energy: torch.Tensor, grid: tuple[int, int]) -> dict[str, float]:
    """Numbers of a squared gradient [H, W] of the middle place of a grid h x w; NaN where there is no gradient.

    Returns:
        `size` (px): the root of the number of pixels whose gradient is above 1 - 0.9545 of the largest (the paper
        compares with the middle pixel's). `radius` (px): the root mean square distance from the center of the place,
        pixels weighted by the squared gradient. `outside`: the share of the squared gradient outside the place itself.
    """
    (height, width), (h, w) = energy.shape, grid
    total = energy.sum()
    if not total > 0:
        return dict.fromkeys(("size", "radius", "outside"), float("nan"))
    top, left = (h // 2) * height / h, (w // 2) * width / w
    rows, columns = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    squared = (rows - top - height / h / 2)[:, None].square() + (columns - left - width / w / 2).square()
    own = ((rows > top) & (rows < top + height / h))[:, None] & ((columns > left) & (columns < left + width / w))
    counted = (energy > (1 - INSIDE) ** 2 * energy.max()).sum()
    return {
        "size": counted.double().sqrt().item(),
        "radius": ((squared * energy).sum() / total).sqrt().item(),
        "outside": (energy[~own].sum() / total).item(),
    }


@contextmanager
def _differentiable(model: Any) -> Generator[None]:
    """Flex attention has no gradients on the CPU; sdpa gives the same there."""
    used = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if used != "flex_attention" or next(model.parameters()).device.type != "cpu":
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(used)


@final
class ReceptiveField(FeatureAnalysis):
    """Gradient of the patch in the middle with respect to the pixels, by depth."""

    name = "receptive_field"
    title = "Effective receptive field"
    source = "arXiv 1701.04128, with the gradients of all channels"
    shows = (
        "One map per depth: the root mean square gradient of the features of the patch in the middle with "
        "respect to every pixel, each map on its own scale, logarithmic. It is a first-order picture: what "
        "a pixel could change a little, not what the model uses."
    )
    arrays = describe_arrays(
        maps=("depth row column", "1", "gradient of the middle patch, the largest of a depth is 1"),
        size=("depth", "px", "root of the number of pixels with a gradient above 4.55% of the largest"),
        radius=("depth", "px", "root mean square distance from the patch's center"),
        outside=("depth", "share", "of the squared gradient, outside the patch itself"),
    )

    def measure(self) -> Arrays:
        with _differentiable(self.context.subject.model):
            return self._measure()

    def _measure(self) -> Arrays:
        energy: dict[int, torch.Tensor] = {}
        grids: list[tuple[int, int]] = []
        num_images = 0
        for pixel_values in self.batches():
            inputs = pixel_values.detach().clone().requires_grad_()
            with torch.enable_grad():
                maps, _ = self.maps(inputs)
            grids = [(features.shape[2], features.shape[3]) for features in maps]
            for depth, features in enumerate(maps):
                found = field_energy(features, inputs, self._signs(features, depth, num_images))
                energy[depth] = energy.get(depth, 0) + found
            num_images += len(inputs)
            del maps  # and with it the graph, before the next is made
        numbers = [field_numbers(energy[depth], grid) for depth, grid in enumerate(grids)]
        arrays = {name: np.array([one[name] for one in numbers], dtype=np.float32) for name in numbers[0]}
        return {"maps": np.stack([_shown(energy[depth]) for depth in sorted(energy)]), **arrays}

    def _signs(self, features: torch.Tensor, depth: int, first: int) -> torch.Tensor:
        """[B, D], the same for an image whatever the batches are."""
        seeds = ([self.context.settings.seed, depth, first + place] for place in range(len(features)))
        drawn = [np.random.default_rng(seed).choice((-1.0, 1.0), features.shape[1]) for seed in seeds]
        return torch.from_numpy(np.stack(drawn)).to(features)

    def draw(self, arrays: Arrays) -> Pictures:
        panels = {"size": {"": arrays["size"]}, "radius": {"": arrays["radius"]}}
        return {
            "Effective receptive field": _draw_fields(arrays["maps"]),
            "Size of the receptive field by depth": curves(panels, "depth", "px"),
        }

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        return {f"{name}_by_depth": rounded(arrays[name]) for name in ("size", "radius", "outside")}


def _shown(energy: torch.Tensor) -> Any:
    """[H, W] -> at most `MAX_CELLS` a side, root mean square gradient, the largest 1, float32."""
    size = min(energy.shape[0], MAX_CELLS), min(energy.shape[1], MAX_CELLS)
    root = F.adaptive_avg_pool2d(energy[None, None], size)[0, 0].sqrt()
    return (root / root.max().clamp(min=torch.finfo(root.dtype).tiny)).float().numpy()


def _draw_fields(maps: NDArray[np.float32]) -> Any:
    """Maps [L, h, w] with a largest value of 1, one tile a depth, logarithmic over three decades."""
    from matplotlib.colors import LogNorm

    columns = min(7, len(maps))
    rows = -(-len(maps) // columns)
    figure = new_figure(1.6 * columns + 0.8, 1.8 * rows)
    tiles = figure.subplots(rows, columns, squeeze=False).ravel()
    for depth, (axes, found) in enumerate(zip(tiles, maps, strict=False)):
        picture = axes.imshow(found.clip(1e-3), norm=LogNorm(1e-3, 1), cmap="magma", interpolation="nearest")
        axes.set_title(f"depth {depth}", fontsize=8)
    for axes in tiles:
        axes.set_axis_off()
    figure.colorbar(picture, ax=list(tiles), label="gradient")  # pyright: ignore[reportPossiblyUnboundVariable]
    return figure
