"""Principal components of the patch embedding's filters.

Legend: C channels, D hidden size, P patch side.
Source: arXiv 2010.11929, section 4.5 and figure 7 (left).
"""

import math
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hf_vit.analysis.analysis import Analysis, Arrays, Context, Pictures, describe_arrays, find_encoder, find_model_type
from hf_vit.families import find_family
from hf_vit.results.figures import make_figure

NUM_COMPONENTS = 28  # as in the paper's figure


def compute_principal_components(
    filters: torch.Tensor, count: int = NUM_COMPONENTS
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the main components [count, C, P, P'] of filters [F, C, P, P'] and their shares of the variance.

    Filters are the samples: D filters of a patch embedding, or one per output channel of a convolution.
    """
    from sklearn.decomposition import PCA

    samples = filters.detach().cpu().double().flatten(1).numpy()
    pca: Any = PCA(n_components=min(count, *samples.shape), svd_solver="full").fit(samples)
    shape = (-1, *filters.shape[1:])
    return pca.components_.reshape(shape).astype(np.float32), pca.explained_variance_ratio_.astype(np.float32)


def list_patch_filters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return filters [F, C, P, P'] by name: "embedding" of a ViT, "root" of a hybrid or ResNet as it is used."""
    encoder = find_encoder(model)
    filters: dict[str, torch.Tensor] = {}
    patches = getattr(getattr(encoder, "embeddings", None), "patch_embeddings", None)
    projection = getattr(patches, "projection", None)
    if isinstance(projection, nn.Conv2d):
        filters["embedding"] = projection.weight
    if find_family(find_model_type(model)) is not None:
        for name, module in encoder.named_modules():
            if name.rpartition(".")[2] == "root_conv":
                with torch.no_grad():
                    filters["root"] = module.standardized() if hasattr(module, "standardized") else module.weight
    return filters


@final
class PatchFilters(Analysis):
    """The first principal components of the patch embedding and of the root convolution of hybrids and ResNets."""

    name = "patch_filters"
    reads_images = False
    title = "Principal components of the patch filters"
    source = "arXiv 2010.11929, section 4.5 and figure 7 (left)"
    shows = (
        "The directions in which the filters of the patch embedding differ most, the strongest first, each "
        "stretched to its own range. Components have no sign and are not filters themselves."
    )
    arrays = describe_arrays(
        embedding_components=("component channel row column", "1", "of the patch embedding"),
        embedding_variance=("component", "share", "of the filters' variance that a component explains"),
        root_components=("component channel row column", "1", "hybrid, ResNet: of the 7x7 root"),
        root_variance=("component", "share", "hybrid, ResNet: of the root filters' variance"),
    )

    @classmethod
    def find_obstacle(cls, context: Context) -> str | None:
        has_filters = bool(list_patch_filters(context.loaded.model))
        return None if has_filters else "the model has no embeddings.patch_embeddings.projection"

    def measure(self) -> Arrays:
        arrays: Arrays = {}
        for name, filters in list_patch_filters(self.context.loaded.model).items():
            components, variance = compute_principal_components(filters)
            arrays |= {f"{name}_components": components, f"{name}_variance": variance}
        return arrays

    def draw(self, arrays: Arrays) -> Pictures:
        titles = {"embedding": "patch", "root": "root"}
        return {
            f"Principal components of the {title} filters": _draw_filters(arrays[f"{name}_components"])
            for name, title in titles.items()
            if f"{name}_components" in arrays
        }

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        name = "embedding" if "embedding_variance" in arrays else "root"
        return {f"{name}_variance_of_28_components": round(float(arrays[f"{name}_variance"].sum()), 4)}


def _draw_filters(components: NDArray[np.float32]) -> Any:
    """Draw components [F, C, P, P'] as tiles in color or gray; 1x1 filters and other channel counts as one matrix."""
    count, channels, height, width = components.shape
    if channels not in (1, 3) or height * width == 1:
        figure = make_figure(7, 4)
        axes = figure.add_subplot()
        axes.imshow(components.reshape(count, -1), cmap="coolwarm", aspect="auto", interpolation="nearest")
        axes.set_xlabel("input channel" if height * width == 1 else "input channel, row, column")
        axes.set_ylabel("component")
        return figure
    columns = min(7, count)
    rows = math.ceil(count / columns)
    figure = make_figure(0.9 * columns, 0.9 * rows)
    for index, component in enumerate(components):
        axes = figure.add_subplot(rows, columns, index + 1)
        low, high = component.min(), component.max()
        tile = ((component - low) / max(high - low, 1e-12)).transpose(1, 2, 0)
        axes.imshow(tile if channels == 3 else tile[..., 0], cmap="gray", interpolation="nearest", vmin=0, vmax=1)
        axes.set_axis_off()
    return figure
