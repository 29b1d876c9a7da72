"""Centred kernel alignment: which layers, of one model or of two, represent images alike.

Legend: B images of a minibatch, L layers.
Sources: arXiv 2010.15327, section 3 (minibatch CKA); used on ViTs and ResNets in arXiv 2108.08810. The unbiased
estimator is that of Song et al., JMLR 13 (2012).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.analysis.analysis import Analysis, Arrays, Context, Pictures, describe_arrays, keywords_of
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.outputs import watch_layers
from hf_vit.results.figures import integer_ticks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image


def gram(features: torch.Tensor) -> torch.Tensor:
    """Linear kernel [B, B] float64 of features [B, ...]: every image's tokens or pixels as one vector.

    The batch's mean is taken out first. HSIC_1 does not see it, and rounding grows with it.
    """
    rows = features.flatten(1).float()
    rows = rows - rows.mean(dim=0)
    return (rows @ rows.T).cpu().double()


def hsic(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Unbiased HSIC_1 of every pair of kernels, [L, B, B] and [L', B, B] -> [L, L']; B at least 4."""
    size = first.shape[-1]
    off = 1 - torch.eye(size, dtype=first.dtype)
    first, second = first * off, second * off
    ones = first.new_ones(size)
    sums, others = first @ ones, second @ ones  # [L, B]
    traces = torch.einsum("ibc,jbc->ij", first, second)
    products = sums.sum(dim=1)[:, None] * others.sum(dim=1) / ((size - 1) * (size - 2))
    return (traces + products - 2 / (size - 2) * sums @ others.T) / (size * (size - 3))


@final
class MinibatchCKA:
    """CKA of every layer of one model with every layer of another, batch by batch.

    The unbiased HSIC_1 of the pair and of each with itself are averaged over the minibatches separately, which makes
    the value independent of the batch size in expectation.
    """

    def __init__(self) -> None:
        self._sums: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)

    def update(self, first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
        """Kernels [B, B] of all layers of either model on the same images."""
        left, right = torch.stack(first), torch.stack(second)
        found = hsic(left, right), hsic(left, left).diagonal(), hsic(right, right).diagonal()
        self._sums = (self._sums[0] + found[0], self._sums[1] + found[1], self._sums[2] + found[2])

    def value(self) -> NDArray[np.float32]:
        """[L, L']; NaN where a layer gives all images the same output."""
        cross, own, others = self._sums
        scale = (own.clamp(min=0)[:, None] * others.clamp(min=0)).sqrt()
        return (cross / scale.where(scale > 0, torch.nan)).numpy().astype(np.float32)


def layer_kernels(subject: LoadedModel, images: "Sequence[Image]") -> tuple[list[torch.Tensor], list[str]]:
    """Return a kernel [B, B] per layer, in the order they ran, and their names; what runs twice counts twice."""
    kernels: list[torch.Tensor] = []
    names: list[str] = []

    def keep(name: str, features: torch.Tensor) -> None:
        if len(features) == len(images):
            kernels.append(gram(features))
            names.append(name)

    with watch_layers(subject.model, keep), torch.inference_mode():
        pixel_values = subject.pixel_values(images)
        subject.model(pixel_values, **keywords_of(subject.model, pixel_values))
    return kernels, names


class CKA(Analysis):
    """CKA of the layers of the model with each other."""

    name = "cka"
    title = "CKA within the model"
    source = "arXiv 2108.08810, section 3; estimator: arXiv 2010.15327"
    shows = (
        "Bright where two layers represent the images alike, up to a rotation and a scale; 1 is alike, 0 unrelated. It "
        "compares geometry, not what is represented. Noise makes small values scatter around 0."
    )
    arrays = describe_arrays(cka=("layer other_layer", "1", "of two layers"))

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        if context.images.size < 4:
            return f"it needs at least 4 images, not {context.images.size}"
        return None

    def measure(self) -> Arrays:
        """Compare in minibatches of nearly the same size, each of at least 4 images."""
        images, limit = self.context.images, self.context.settings.cka_batch_size
        second, running = self.context.against if self.second_input else None, MinibatchCKA()
        names, others = list[str](), list[str]()
        for part in np.array_split(np.arange(images.size), min(-(-images.size // limit), images.size // 4)):
            batch = [images.read(int(index)) for index in part]
            kernels, names = layer_kernels(self.context.subject, batch)
            other_kernels, others = (kernels, names) if second is None else layer_kernels(second, batch)
            running.update(kernels, other_kernels)
        self.notes.append(f"layers: {', '.join(names)}")
        if second is not None:
            self.notes.append(f"other layers: {', '.join(others)}")
        return {"cka": running.value()}

    def draw(self, arrays: Arrays) -> Pictures:
        first, second = self.context.subject, self.context.against if self.second_input else None
        names = [f"layer of {each.name}" for each in (first, second or first)]
        return {self.title: draw_cka(arrays["cka"], *names)}


@final
class CKABetween(CKA):
    """CKA of the layers of the model with those of another."""

    name = "cka_between"
    title = "CKA between two models"
    second_input = "against"
    arrays = describe_arrays(cka=("layer other_layer", "1", "of a layer of the model and one of the other model"))

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        if context.against is None:
            return "it compares with a second model: give --against MODEL"
        return super().obstacle(context)


def draw_cka(values: "NDArray[np.float32]", first: str, second: str) -> "Figure":
    """Return a heat map of [L, L'], layer 0 at the bottom left."""
    figure = new_figure(5.2, 4.2)
    axes = figure.add_subplot()
    picture = axes.imshow(values, origin="lower", cmap="magma", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_ylabel(first, parse_math=False)
    axes.set_xlabel(second, parse_math=False)
    for axis in (axes.xaxis, axes.yaxis):
        integer_ticks(axis)
    figure.colorbar(picture, ax=axes, label="CKA")
    return figure
