"""Accuracy with parts of the image missing, on the model's patch grid.

Legend: B batch, C channels, H x W px, h x w patch grid, P patch side, S shares.
Source: arXiv 2105.10497, section 3.1 (random, salient and non-salient PatchDrop).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.attacks import check_differentiable, gradient
from hf_vit.evaluation.protocols.curves import Line, curves
from hf_vit.evaluation.protocols.frame import OneTableResult, Table, percent
from hf_vit.evaluation.reading import finite_logits
from hf_vit.families import family_of
from hf_vit.loading.pixels import PixelScale, image_generator, seen_part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Fill = Literal["mean", "black"]
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ORDERS = ("random", "salient first", "salient last")
# Of a model whose patch is not known, an image has so many patches along its shorter side, as a ViT of patch 16 at 224.
_PATCHES = 14


@final
@dataclass(frozen=True, repr=False)
class PatchDropResult(OneTableResult):
    """What `patch_drop` measured.

    Attributes:
        num_images: images that judged.
        shares: of the patches that were dropped, [S].
        accuracy: order of dropping -> [S].
        patch_px: (height, width) of a patch.
        fill: what is in a patch's place, "mean" (of the image, per channel) or "black".
    """

    title: ClassVar[str] = "Accuracy with patches dropped"
    source: ClassVar[str] = "arXiv 2105.10497, section 3.1"
    num_images: int
    shares: list[float]
    accuracy: dict[str, list[float]]
    patch_px: tuple[int, int]
    fill: Fill

    def values(self) -> dict[str, Any]:
        return {
            "shares": self.shares,
            "accuracy_by_order": self.accuracy,
            "patch_px": list(self.patch_px),
            "fill": self.fill,
        }

    def headline(self) -> dict[str, float]:
        place = min(range(len(self.shares)), key=lambda index: abs(self.shares[index] - 0.5))
        return {
            f"accuracy, {self.shares[place]:.0%} of the patches dropped ({order})": found[place]
            for order, found in self.accuracy.items()
        }

    def table(self) -> Table:
        columns = zip(*self.accuracy.values(), strict=True)
        rows = [[f"{share:.0%}", *map(percent, found)] for share, found in zip(self.shares, columns, strict=True)]
        return Table(["dropped", *(f"accuracy, {order}" for order in self.accuracy)], rows)

    def draw(self) -> "Figure":
        shares = [100 * share for share in self.shares]
        lines = [Line(order, shares, [100 * value for value in found]) for order, found in self.accuracy.items()]
        return curves(lines, "patches dropped (%)", "accuracy (%)")


def patch_drop(
    examination: Examination,
    *,
    shares: Sequence[float] = SHARES,
    patch_size: int | None = None,
    fill: Fill = "mean",
    orders: Sequence[str] = ORDERS,
) -> PatchDropResult:
    """Accuracy over the share of patches whose pixels are replaced: at random, the most, or the least salient first.

    A larger share drops the same patches and more. How salient a patch is: by how much dropping it would change the
    logit of the predicted class against the mean logit, to first order in the pixels (any classifier has that; the
    paper takes a self-supervised ViT's attention).

    Args:
        examination: the classifier and the data.
        shares: of the patches, 0 to 1.
        patch_size: px; by default the model's, and 1/14 of the shorter side where it has none.
        fill: "mean" of the image's own pixels, or "black", as in the paper.
        orders: of `ORDERS`.

    Raises:
        UserError: a share, order or fill that does not exist, a patch larger than the image, or no gradients.
    """
    chosen = sorted(set(map(float, shares)))
    if not chosen or chosen[0] < 0 or chosen[-1] > 1:
        raise UserError(f"shares {list(shares)} must lie in 0..1")
    if fill not in ("mean", "black"):
        raise UserError(f"fill '{fill}' is not known; choose mean or black")
    if not orders or set(orders) - set(ORDERS):
        raise UserError(f"orders {list(orders)} are not all known; there are {', '.join(ORDERS)}")
    check_differentiable(examination.subject)
    scale, model = PixelScale.of(examination.subject), examination.subject.model
    hits, images, patch = {order: np.zeros(len(chosen)) for order in orders}, 0, (0, 0)
    for given, labels in examination.judging("dropping patches"):
        values = seen_part(model, given)  # nothing is dropped that nobody sees
        patch = patch_px(model, (values.shape[2], values.shape[3]), patch_size)
        filling = scale.values(torch.zeros_like(values)) if fill == "black" else values.mean(dim=(2, 3), keepdim=True)
        ranks = _ranks(model, scale.pixels(values).clamp(0, 1), values, filling, patch, examination.seed)
        for order, found in hits.items():
            for place, share in enumerate(chosen):
                occluded = drop(values, ranks[order], share, filling, patch)
                with torch.inference_mode():
                    found[place] += int((finite_logits(model, occluded).argmax(dim=1) == labels).sum())
        images += len(labels)
    accuracy = {order: (found / images).tolist() for order, found in hits.items()}
    return PatchDropResult(images, chosen, accuracy, patch, fill)


def patch_px(model: nn.Module, image_px: tuple[int, int], asked: int | None) -> tuple[int, int]:
    """(height, width) px of the patches an image is cut into; see `patch_drop`."""
    config = getattr(model, "config", None)
    family = family_of(getattr(config, "model_type", None))
    if family is not None and not family.has_tokens:
        config = None  # what a ResNet calls patch_size is its total stride
    stride = getattr(config, "patch_stride", None) or getattr(config, "patch_size", None)
    stride = asked or stride or getattr(getattr(model, "patch_embed", None), "patch_size", None)
    stride = stride or max(min(image_px) // _PATCHES, 1)
    height, width = (stride, stride) if isinstance(stride, int) else (int(stride[0]), int(stride[1]))
    if height < 1 or width < 1 or height > image_px[0] or width > image_px[1]:
        raise UserError(
            f"patches of {height}x{width} px do not fit images of {image_px[0]}x{image_px[1]} px; give --patch-size"
        )
    return height, width


def drop(
    values: torch.Tensor, ranks: torch.Tensor, share: float, filling: torch.Tensor, patch: tuple[int, int]
) -> torch.Tensor:
    """The images with round(share * h * w) patches replaced.

    Args:
        values: [B, C, H, W].
        ranks: [B, h, w], 0 for the patch that goes first.
        share: 0 to 1.
        filling: what stands in their place; broadcasts against `values`.
        patch: (height, width) px.
    """
    dropped = ranks < round(share * ranks[0].numel())
    mask = dropped.repeat_interleave(patch[0], dim=1).repeat_interleave(patch[1], dim=2)
    return torch.where(mask[:, None, : values.shape[2], : values.shape[3]], filling, values)


def saliency(model: nn.Module, values: torch.Tensor, filling: torch.Tensor, patch: tuple[int, int]) -> torch.Tensor:
    """[B, h, w]: by how much replacing a patch changes the predicted class, to first order in the pixels.

    Exact for a linear model. The class is measured by its logit less the mean logit, which does not saturate.

    Args:
        model: a classifier.
        values: [B, C, H, W] as the model is fed.
        filling: what would stand in a patch's place; broadcasts against `values`.
        patch: (height, width) px.
    """

    def margin(asked: torch.Tensor) -> torch.Tensor:
        logits = finite_logits(model, asked)
        return logits.max(dim=1).values - logits.mean(dim=1)

    losses = (gradient(margin, values) * (values - filling)).sum(dim=1, keepdim=True)
    down, right = -values.shape[2] % patch[0], -values.shape[3] % patch[1]
    padded = F.pad(losses, (0, right, 0, down))
    return F.avg_pool2d(padded, patch, divisor_override=1)[:, 0].abs()


def _ranks(
    model: nn.Module,
    pixels: torch.Tensor,
    values: torch.Tensor,
    filling: torch.Tensor,
    patch: tuple[int, int],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Order -> [B, h, w], the place of every patch in it."""
    salient = saliency(model, values, filling, patch)
    shape = salient.shape[1:]
    first = salient.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    drawn = [image_generator(image, seed).permutation(first.shape[1]) for image in pixels]
    ranks = torch.from_numpy(np.stack(drawn)).to(first.device)
    return {
        "random": ranks.unflatten(1, shape),
        "salient first": first.unflatten(1, shape),
        "salient last": (first.shape[1] - 1 - first).unflatten(1, shape),
    }
