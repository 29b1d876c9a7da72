"""Principal components of the filters that embed the patches.

Legend: C channels, D hidden size, P patch side.
Source: arXiv 2010.11929, section 4.5 and figure 7 (left).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch
from torch import nn

from hf_vit.analysis import plots
from hf_vit.analysis.frame import Analysis, Arrays, ArraySpec, Context
from hf_vit.analysis.reading.encoder import encoder_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

NUM_COMPONENTS = 28  # as many as the figure shows


def principal_components(
    filters: torch.Tensor, count: int = NUM_COMPONENTS
) -> "tuple[NDArray[np.float32], NDArray[np.float32]]":
    """Filters [F, C, P, P'] -> their main components [count, C, P, P'] and the share of variance each explains.

    Filters are the samples: D of them for a patch embedding, one a channel for a convolution.
    """
    from sklearn.decomposition import PCA

    samples = filters.detach().cpu().double().flatten(1).numpy()
    pca: Any = PCA(n_components=min(count, *samples.shape), svd_solver="full").fit(samples)
    shape = (-1, *filters.shape[1:])
    return pca.components_.reshape(shape).astype(np.float32), pca.explained_variance_ratio_.astype(np.float32)


def patch_filters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The filters [F, C, P, P'] by name: "embedding", and of a hybrid also "root", standardised as they are used."""
    patches: Any = getattr(getattr(encoder_of(model), "embeddings", None), "patch_embeddings", None)
    projection = getattr(patches, "projection", None)
    if not isinstance(projection, nn.Conv2d):
        return {}
    with torch.no_grad():
        root = {"root": patches.stem.root_conv.standardized()} if hasattr(patches, "stem") else {}
    return {"embedding": projection.weight, **root}


@final
class PatchFilters(Analysis):
    """The first principal components of the patch embedding; of a hybrid, of its root too."""

    name = "patch_filters"
    title = "Principal components of the patch filters"
    source = "arXiv 2010.11929, section 4.5 and figure 7 (left)"
    shows = (
        "The directions in which the filters that embed a patch differ most, the strongest first, each stretched to "
        "its own range. Components have no sign and are no filters themselves."
    )
    arrays: ClassVar[Mapping[str, ArraySpec]] = {
        "embedding_components": ArraySpec(("component", "channel", "row", "column"), "1", "of the patch embedding"),
        "embedding_variance": ArraySpec(("component",), "share", "of the filters' variance that a component explains"),
        "root_components": ArraySpec(("component", "channel", "row", "column"), "1", "hybrid: of the 7x7 root"),
        "root_variance": ArraySpec(("component",), "share", "hybrid: of the root filters' variance"),
    }

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        return (
            None if patch_filters(context.subject.model) else "the model has no embeddings.patch_embeddings.projection"
        )

    def measure(self) -> Arrays:
        found: Arrays = {}
        for name, filters in patch_filters(self.context.subject.model).items():
            components, variance = principal_components(filters)
            found |= {f"{name}_components": components, f"{name}_variance": variance}
        return found

    def draw(self, arrays: Arrays) -> "dict[str, Figure]":
        pictures = {"Principal components of the patch filters": plots.filters(arrays["embedding_components"])}
        if "root_components" in arrays:
            pictures["Principal components of the root filters"] = plots.filters(arrays["root_components"])
        return pictures

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        return {"embedding_variance_of_28_components": round(float(arrays["embedding_variance"].sum()), 4)}
