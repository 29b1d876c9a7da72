"""Centered kernel alignment (CKA): which layers of one or two models represent images similarly.

Legend: B images of a minibatch, L layers.
Sources: arXiv 2010.15327, section 3 (minibatch CKA); arXiv 2108.08810 applies it to ViTs and ResNets. The unbiased
estimator is from Song et al., JMLR 13 (2012).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.analysis.analysis import Analysis, Arrays, Context, Pictures, describe_arrays, forward_options
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.outputs import watch_layers
from hf_vit.results.figures import make_figure, set_integer_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image


def compute_gram(features: torch.Tensor) -> torch.Tensor:
    """Return the linear kernel [B, B] in float64 of features [B, ...], each flattened to one vector.

    The batch mean is subtracted first: HSIC_1 does not depend on it, and rounding errors grow with it.
    """
    rows = features.flatten(1).float()
    centered = rows - rows.mean(dim=0)
    return (centered @ centered.T).cpu().double()


def compute_hsic(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the unbiased HSIC_1 [L, L'] of every pair of kernels [L, B, B] and [L', B, B]; B must be at least 4."""
    num_images = first.shape[-1]
    off_diagonal = 1 - torch.eye(num_images, dtype=first.dtype)
    kernels, other_kernels = first * off_diagonal, second * off_diagonal
    ones = first.new_ones(num_images)
    first_sums, second_sums = kernels @ ones, other_kernels @ ones  # [L, B]
    traces = torch.einsum("ibc,jbc->ij", kernels, other_kernels)
    products = first_sums.sum(dim=1)[:, None] * second_sums.sum(dim=1) / ((num_images - 1) * (num_images - 2))
    return (traces + products - 2 / (num_images - 2) * first_sums @ second_sums.T) / (num_images * (num_images - 3))


@final
class MinibatchCKA:
    """Accumulates CKA of every layer of one model with every layer of another, batch by batch.

    HSIC_1 of each pair, and of each layer with itself, is averaged over the minibatches separately. The expected value
    therefore does not depend on the batch size.
    """

    def __init__(self) -> None:
        self._sums: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)

    def update(self, first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
        """Add the kernels [B, B] of all layers of both models for the same images."""
        first_kernels, second_kernels = torch.stack(first), torch.stack(second)
        cross, first_norms, second_norms = self._sums
        self._sums = (
            cross + compute_hsic(first_kernels, second_kernels),
            first_norms + compute_hsic(first_kernels, first_kernels).diagonal(),
            second_norms + compute_hsic(second_kernels, second_kernels).diagonal(),
        )

    def value(self) -> NDArray[np.float32]:
        """Return CKA [L, L'], NaN for layers with the same output for all images."""
        cross, first_norms, second_norms = self._sums
        scale = (first_norms.clamp(min=0)[:, None] * second_norms.clamp(min=0)).sqrt()
        return (cross / scale.where(scale > 0, torch.nan)).numpy().astype(np.float32)


def compute_layer_kernels(loaded: LoadedModel, images: "Sequence[Image]") -> tuple[list[torch.Tensor], list[str]]:
    """Return a kernel [B, B] and the name of every layer in the order they ran, twice for a layer that runs twice."""
    kernels: list[torch.Tensor] = []
    names: list[str] = []

    def add_kernel(name: str, features: torch.Tensor) -> None:
        if len(features) == len(images):
            kernels.append(compute_gram(features))
            names.append(name)

    with watch_layers(loaded.model, add_kernel), torch.inference_mode():
        pixel_values = loaded.pixel_values(images)
        loaded.model(pixel_values, **forward_options(loaded.model, pixel_values))
    return kernels, names


class CKA(Analysis):
    """CKA of all pairs of layers of a model."""

    name = "cka"
    title = "CKA within the model"
    source = "arXiv 2108.08810, section 3; estimator: arXiv 2010.15327"
    shows = (
        "Bright where two layers represent the images similarly, up to rotation and scale: 1 is equal, 0 unrelated. "
        "CKA compares geometry, not what is represented. Noise makes small values scatter around 0."
    )
    arrays = describe_arrays(cka=("layer other_layer", "1", "CKA of two layers"))

    @classmethod
    def find_obstacle(cls, context: Context) -> str | None:
        if context.images.size < 4:
            return f"it needs at least 4 images, but got {context.images.size}"
        return None

    def measure(self) -> Arrays:
        """Compute CKA in minibatches of nearly equal size, each of at least 4 images."""
        images = self.context.images
        second_model = self.context.against if self.second_input else None
        cka = MinibatchCKA()
        names, other_names = list[str](), list[str]()
        num_batches = min(math.ceil(images.size / self.context.settings.cka_batch_size), images.size // 4)
        for indices in np.array_split(np.arange(images.size), num_batches):
            batch = [images.read(int(index)) for index in indices]
            kernels, names = compute_layer_kernels(self.context.loaded, batch)
            other_kernels, other_names = kernels, names
            if second_model is not None:
                other_kernels, other_names = compute_layer_kernels(second_model, batch)
            cka.update(kernels, other_kernels)
        self.notes.append(f"layers: {', '.join(names)}")
        if second_model is not None:
            self.notes.append(f"other layers: {', '.join(other_names)}")
        return {"cka": cka.value()}

    def draw(self, arrays: Arrays) -> Pictures:
        first = self.context.loaded
        second = self.context.against if self.second_input else None
        names = [f"layer of {model.name}" for model in (first, second or first)]
        return {self.title: draw_cka(arrays["cka"], *names)}


@final
class CKABetween(CKA):
    """CKA of the layers of one model with those of another."""

    name = "cka_between"
    title = "CKA between two models"
    second_input = "against"
    arrays = describe_arrays(
        cka=("layer other_layer", "1", "CKA of a layer of the model with a layer of the other model")
    )

    @classmethod
    def find_obstacle(cls, context: Context) -> str | None:
        if context.against is None:
            return "it needs a second model; give --against MODEL"
        return super().find_obstacle(context)


def draw_cka(values: "NDArray[np.float32]", first: str, second: str) -> "Figure":
    """Draw CKA [L, L'] as a heat map with layer 0 at the bottom left."""
    figure = make_figure(5.2, 4.2)
    axes = figure.add_subplot()
    heat_map = axes.imshow(values, origin="lower", cmap="magma", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_ylabel(first, parse_math=False)
    axes.set_xlabel(second, parse_math=False)
    for axis in (axes.xaxis, axes.yaxis):
        set_integer_ticks(axis)
    figure.colorbar(heat_map, ax=axes, label="CKA")
    return figure
