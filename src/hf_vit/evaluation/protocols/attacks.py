"""Accuracy under attack: FGSM and PGD, whose size is measured in pixels, not in what the model is fed.

Legend: B batch, C channels, H x W px, E sizes of the attack.
Sources: arXiv 1412.6572 (FGSM), arXiv 1706.06083 (PGD).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch
from torch.nn import functional as F

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.curves import Line, curves
from hf_vit.evaluation.protocols.frame import OneTableResult, Table, percent
from hf_vit.evaluation.reading import enough_for, finite_logits
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.pixels import PixelScale, image_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Loss = Callable[[torch.Tensor], torch.Tensor]
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def fgsm(loss: Loss, pixels: torch.Tensor, epsilon: float) -> torch.Tensor:
    """One step of `epsilon` along the sign of the gradient, inside 0..1.

    Args:
        loss: pixels [B, C, H, W] -> loss of every image [B].
        pixels: [B, C, H, W] in 0..1.
        epsilon: largest change of a pixel value, in 0..1.
    """
    return (pixels + epsilon * gradient(loss, pixels).sign()).clamp(0, 1)


def pgd(
    loss: Loss, pixels: torch.Tensor, epsilon: float, *, steps: int = 10, start: torch.Tensor | None = None
) -> torch.Tensor:
    """`steps` steps of 2.5 epsilon / steps along the sign of the gradient, kept within `epsilon` and inside 0..1.

    Args:
        loss: pixels [B, C, H, W] -> loss of every image [B].
        pixels: [B, C, H, W] in 0..1.
        epsilon: largest change of a pixel value, in 0..1.
        steps: gradients that are taken.
        start: [B, C, H, W] in -1..1, where in the ball to begin; by default in its middle.
    """
    low, high = (pixels - epsilon).clamp(min=0), (pixels + epsilon).clamp(max=1)
    moved = pixels if start is None else (pixels + epsilon * start).clamp(low, high)
    for _ in range(steps):
        moved = (moved + 2.5 * epsilon / steps * gradient(loss, moved).sign()).clamp(low, high)
    return moved


def check_differentiable(subject: LoadedModel) -> None:
    """Raise UserError for what has no gradients with respect to pixels."""
    if not subject.is_differentiable:
        raise UserError(f"{subject.name} has no gradients, which are asked for here; give the model it was made of")


def gradient(loss: Loss, pixels: torch.Tensor) -> torch.Tensor:
    """Of every image's own loss with respect to its pixels, [B, C, H, W]; parameters are left alone."""
    with torch.enable_grad(), enough_for(pixels):
        asked = pixels.detach().requires_grad_()
        return torch.autograd.grad(loss(asked).sum(), asked)[0]


@final
@dataclass(frozen=True, repr=False)
class RobustnessResult(OneTableResult):
    """What `robustness` measured.

    Attributes:
        num_images: images that judged.
        epsilons: sizes of the attack [E], in 1/255 of the range of a pixel.
        clean: accuracy without attack.
        fgsm: [E], accuracy under FGSM.
        pgd: [E], accuracy under PGD.
        steps: of PGD.
    """

    title: ClassVar[str] = "Robustness to attacks"
    source: ClassVar[str] = "FGSM: arXiv 1412.6572; PGD: arXiv 1706.06083"
    num_images: int
    epsilons: list[float]
    clean: float
    fgsm: list[float]
    pgd: list[float]
    steps: int

    def values(self) -> dict[str, Any]:
        attacked = {"epsilons_255": self.epsilons, "fgsm_accuracy": self.fgsm, "pgd_accuracy": self.pgd}
        return {"clean_accuracy": self.clean, **attacked, "pgd_steps": self.steps}

    def headline(self) -> dict[str, float]:
        place = self.epsilons.index(1.0) if 1.0 in self.epsilons else 0
        size = f"{self.epsilons[place]:g}/255"
        return {
            f"accuracy under FGSM, {size}": self.fgsm[place],
            f"accuracy under PGD, {size}, {self.steps} steps": self.pgd[place],
        }

    def table(self) -> Table:
        rows = [["0", percent(self.clean), percent(self.clean)]]
        for epsilon, one, many in zip(self.epsilons, self.fgsm, self.pgd, strict=True):
            rows.append([f"{epsilon:g}", percent(one), percent(many)])
        return Table(["epsilon (/255)", "accuracy, FGSM", f"accuracy, PGD ({self.steps} steps)"], rows)

    def draw(self) -> "Figure":
        sizes = [0.0, *self.epsilons]
        lines = [
            Line(name, sizes, [100 * value for value in (self.clean, *found)])
            for name, found in (("FGSM", self.fgsm), (f"PGD, {self.steps} steps", self.pgd))
        ]
        return curves(lines, "largest change of a pixel (1/255)", "accuracy (%)")


def robustness(examination: Examination, *, epsilons: Sequence[float] = EPSILONS, steps: int = 10) -> RobustnessResult:
    """Accuracy under white-box attacks on the cross-entropy of the true class, untargeted, in the maximum norm.

    PGD starts at random in the ball (by seed and content of the image), once, and its last step judges.

    Args:
        examination: the classifier and the data.
        epsilons: sizes of the attack, in 1/255.
        steps: of PGD.

    Raises:
        UserError: a size is not positive, or the image processor does more than scale pixels.
    """
    sizes = sorted(set(map(float, epsilons)))
    if not sizes or sizes[0] <= 0 or sizes[-1] > 255 or steps < 1:
        raise UserError(
            f"epsilons {list(epsilons)} (1/255) must lie in 0 < epsilon <= 255, steps {steps} be at least 1; "
            "choose others"
        )
    check_differentiable(examination.subject)
    scale, model = PixelScale.of(examination.subject), examination.subject.model
    hits, images = np.zeros((2, len(sizes) + 1)), 0
    for values, labels in examination.judging("attacking"):
        pixels = scale.pixels(values).clamp(0, 1)
        start = random_start(pixels, examination.seed)

        def loss(moved: torch.Tensor, labels: torch.Tensor = labels) -> torch.Tensor:
            return F.cross_entropy(finite_logits(model, scale.values(moved)), labels, reduction="none")

        attacks = [[fgsm(loss, pixels, size / 255) for size in sizes]]
        attacks.append([pgd(loss, pixels, size / 255, steps=steps, start=start) for size in sizes])
        with torch.no_grad():
            for row, attacked in enumerate(attacks):
                for column, moved in enumerate([pixels, *attacked]):
                    answers = finite_logits(model, scale.values(moved)).argmax(dim=1)
                    hits[row, column] += int((answers == labels).sum())
        images += len(labels)
    (clean, *one), (_, *many) = (hits / images).tolist()
    return RobustnessResult(images, sizes, clean, one, many, steps)


def random_start(pixels: torch.Tensor, seed: int) -> torch.Tensor:
    """Where PGD begins in its ball: uniform in -1..1, [B, C, H, W], the same for an image in any batch."""
    drawn = [image_generator(image, seed).uniform(-1, 1, tuple(image.shape)) for image in pixels]
    return torch.from_numpy(np.stack(drawn)).to(pixels.device, pixels.dtype)
