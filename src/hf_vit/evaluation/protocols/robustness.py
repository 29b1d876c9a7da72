"""Accuracy under attack (FGSM, PGD), with patches dropped, and under common corruptions.

Legend: B batch, C channels, H x W px, h x w patch grid, E sizes of an attack, S shares of the patches.
Sources: arXiv 1412.6572 (FGSM), arXiv 1706.06083 (PGD), arXiv 2105.10497, section 3.1 (random, salient and non-salient
PatchDrop), arXiv 1903.12261 (ImageNet-C). An attack is measured in pixels, not in what the model is fed. Corruptions
have the parameters that ImageNet-C's authors publish with the data; blurs, whose parameters are lengths in 224 px
images, are scaled by side / 224. Glass blur, snow, frost, fog and elastic transform are left out, and images are not
stored as JPEG afterwards, so that the numbers are not those of ImageNet-C's files.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.nn import functional as F

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import Line, OneTableResult, Table, curves, percent
from hf_vit.evaluation.reading import enough_for, finite_logits
from hf_vit.families import family_of
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.pixels import PixelScale, crop_to_patches, image_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Loss = Callable[[torch.Tensor], torch.Tensor]
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def fgsm(loss: Loss, pixels: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Take one step of `epsilon` along the sign of the gradient, inside 0..1."""
    return (pixels + epsilon * gradient(loss, pixels).sign()).clamp(0, 1)


def pgd(
    loss: Loss, pixels: torch.Tensor, epsilon: float, *, steps: int = 10, start: torch.Tensor | None = None
) -> torch.Tensor:
    """Take steps of 2.5 epsilon / `steps` along the sign of the gradient, kept within `epsilon` and inside 0..1."""
    low, high = (pixels - epsilon).clamp(min=0), (pixels + epsilon).clamp(max=1)
    moved = pixels if start is None else (pixels + epsilon * start).clamp(low, high)
    for _ in range(steps):
        moved = (moved + 2.5 * epsilon / steps * gradient(loss, moved).sign()).clamp(low, high)
    return moved


def check_differentiable(subject: LoadedModel) -> None:
    """Raise UserError for what has no gradients with respect to pixels."""
    if not subject.is_differentiable:
        raise UserError(f"{subject.name} has no gradients, which attacks need; give the model that was exported")


def gradient(loss: Loss, pixels: torch.Tensor) -> torch.Tensor:
    """Return the gradient of every image's own loss by its pixels, [B, C, H, W]; parameters are left alone."""
    with torch.enable_grad(), enough_for(pixels):
        asked = pixels.detach().requires_grad_()
        return torch.autograd.grad(loss(asked).sum(), asked)[0]


@final
@dataclass(frozen=True, repr=False)
class RobustnessResult(OneTableResult):
    """What `robustness` measured with E sizes of the attack."""

    title: ClassVar[str] = "Robustness to attacks"
    source: ClassVar[str] = "FGSM: arXiv 1412.6572; PGD: arXiv 1706.06083"
    num_images: int
    epsilons: list[float]  # [E], in 1/255 of the range of a pixel
    clean: float  # accuracy without attack
    fgsm: list[float]  # [E], accuracy under FGSM
    pgd: list[float]  # [E], accuracy under PGD
    steps: int  # of PGD

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
        attacks = (("FGSM", self.fgsm), (f"PGD, {self.steps} steps", self.pgd))
        lines = [Line(name, [0.0, *self.epsilons], [self.clean, *found]) for name, found in attacks]
        return curves(lines, "largest change of a pixel (1/255)")


def robustness(examination: Examination, *, epsilons: Sequence[float] = EPSILONS, steps: int = 10) -> RobustnessResult:
    """Measure accuracy under white-box attacks on the cross-entropy of the true class, untargeted, in the maximum norm.

    PGD starts at random in the ball (by seed and content of the image), once, and its last step judges.
    """
    sizes = sorted(set(map(float, epsilons)))
    if not sizes or sizes[0] <= 0 or sizes[-1] > 255 or steps < 1:
        raise UserError(
            f"epsilons {list(epsilons)} (1/255) must lie in 0 < epsilon <= 255, steps {steps} be at least 1; "
            "choose others"
        )
    check_differentiable(examination.subject)
    scale, model = PixelScale.measure(examination.subject), examination.subject.model
    hits, images = np.zeros((2, len(sizes) + 1)), 0
    for values, labels in examination.judging("attacking"):
        pixels = scale.pixels(values).clamp(0, 1)
        start = random_start(pixels, examination.seed)

        def loss(moved: torch.Tensor, labels: torch.Tensor = labels) -> torch.Tensor:
            return F.cross_entropy(finite_logits(model, scale.values(moved)), labels, reduction="none")

        attacks = [[fgsm(loss, pixels, size / 255) for size in sizes]]
        attacks.append([pgd(loss, pixels, size / 255, steps=steps, start=start) for size in sizes])
        for row, attacked in enumerate(attacks):
            for column, moved in enumerate([pixels, *attacked]):
                hits[row, column] += count_right(model, scale.values(moved), labels)
        images += len(labels)
    (clean, *one), (_, *many) = (hits / images).tolist()
    return RobustnessResult(images, sizes, clean, one, many, steps)


def count_right(model: nn.Module, values: torch.Tensor, labels: torch.Tensor) -> int:
    """Return how many images [B, C, H, W] the model answers with their labels [B]."""
    with torch.inference_mode():
        return int((finite_logits(model, values).argmax(dim=1) == labels).sum())


def random_start(pixels: torch.Tensor, seed: int) -> torch.Tensor:
    """Draw where PGD begins in its ball: uniform in -1..1, [B, C, H, W], the same for an image in any batch."""
    drawn = [image_generator(image, seed).uniform(-1, 1, tuple(image.shape)) for image in pixels]
    return torch.from_numpy(np.stack(drawn)).to(pixels.device, pixels.dtype)


Fill = Literal["mean", "black"]
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ORDERS = ("random", "salient first", "salient last")
# Of a model whose patch is not known, an image has so many patches along its shorter side, as a ViT of patch 16 at 224.
_PATCHES = 14


@final
@dataclass(frozen=True, repr=False)
class PatchDropResult(OneTableResult):
    """What `patch_drop` measured."""

    title: ClassVar[str] = "Accuracy with patches dropped"
    source: ClassVar[str] = "arXiv 2105.10497, section 3.1"
    num_images: int
    shares: list[float]  # of the patches that were dropped, [S]
    accuracy: dict[str, list[float]]  # order of dropping -> [S]
    patch_px: tuple[int, int]  # height, width
    fill: Fill  # what is in a patch's place: the image's mean, per channel, or black

    def values(self) -> dict[str, Any]:
        patch = {"patch_px": list(self.patch_px), "fill": self.fill}
        return {"shares": self.shares, "accuracy_by_order": self.accuracy, **patch}

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
        return curves([Line(order, shares, found) for order, found in self.accuracy.items()], "patches dropped (%)")


def patch_drop(
    examination: Examination,
    *,
    shares: Sequence[float] = SHARES,
    patch_size: int | None = None,
    fill: Fill = "mean",
    orders: Sequence[str] = ORDERS,
) -> PatchDropResult:
    """Measure accuracy over the share of patches that are replaced: at random, the most, or the least salient first.

    A larger share drops the same patches and more. How salient a patch is: by how much dropping it would change the
    logit of the predicted class against the mean logit, to first order in the pixels (any classifier has that; the
    paper takes a self-supervised ViT's attention).
    """
    chosen = sorted(set(map(float, shares)))
    if not chosen or chosen[0] < 0 or chosen[-1] > 1:
        raise UserError(f"shares {list(shares)} must lie in 0..1")
    if fill not in ("mean", "black"):
        raise UserError(f"unknown fill '{fill}'; choose mean or black")
    if not orders or set(orders) - set(ORDERS):
        raise UserError(f"orders {list(orders)} contain an unknown order; choose from {', '.join(ORDERS)}")
    check_differentiable(examination.subject)
    scale, model = PixelScale.measure(examination.subject), examination.subject.model
    hits, images, patch = {order: np.zeros(len(chosen)) for order in orders}, 0, (0, 0)
    for given, labels in examination.judging("dropping patches"):
        values = crop_to_patches(model, given)  # nothing is dropped that nobody sees
        patch = patch_px(model, (values.shape[2], values.shape[3]), patch_size)
        filling = scale.values(torch.zeros_like(values)) if fill == "black" else values.mean(dim=(2, 3), keepdim=True)
        salient = saliency(model, values, filling, patch)
        ranks = _ranks(scale.pixels(values).clamp(0, 1), salient, examination.seed)
        for order, found in hits.items():
            for place, share in enumerate(chosen):
                found[place] += count_right(model, drop(values, ranks[order], share, filling, patch), labels)
        images += len(labels)
    accuracy = {order: (found / images).tolist() for order, found in hits.items()}
    return PatchDropResult(images, chosen, accuracy, patch, fill)


def patch_px(model: nn.Module, image_px: tuple[int, int], asked: int | None) -> tuple[int, int]:
    """Return (height, width) px of the patches an image is cut into; see `patch_drop`."""
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
    """Return the images with round(share * h * w) patches replaced."""
    dropped = ranks < round(share * ranks[0].numel())
    mask = dropped.repeat_interleave(patch[0], dim=1).repeat_interleave(patch[1], dim=2)
    return torch.where(mask[:, None, : values.shape[2], : values.shape[3]], filling, values)


def saliency(model: nn.Module, values: torch.Tensor, filling: torch.Tensor, patch: tuple[int, int]) -> torch.Tensor:
    """Return [B, h, w]: by how much replacing a patch changes the predicted class, to first order in the pixels.

    Exact for a linear model. The class is measured by its logit less the mean logit, which does not saturate.
    """

    def margin(asked: torch.Tensor) -> torch.Tensor:
        logits = finite_logits(model, asked)
        return logits.max(dim=1).values - logits.mean(dim=1)

    losses = (gradient(margin, values) * (values - filling)).sum(dim=1, keepdim=True)
    down, right = -values.shape[2] % patch[0], -values.shape[3] % patch[1]
    padded = F.pad(losses, (0, right, 0, down))
    return F.avg_pool2d(padded, patch, divisor_override=1)[:, 0].abs()


def _ranks(pixels: torch.Tensor, salient: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Return order -> [B, h, w], the place of every patch in it."""
    shape = salient.shape[1:]
    first = salient.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    drawn = [image_generator(image, seed).permutation(first.shape[1]) for image in pixels]
    ranks = torch.from_numpy(np.stack(drawn)).to(first.device), first, first.shape[1] - 1 - first
    return {order: each.unflatten(1, shape) for order, each in zip(ORDERS, ranks, strict=True)}


Picture = NDArray[np.float64]
_NOMINAL_PX = 224
_SUBPIXELS = 9


@final
@dataclass(frozen=True)
class Corruption:
    """One kind of corruption."""

    family: str  # noise, blur, weather or digital
    levels: tuple[Any, Any, Any, Any, Any]  # the parameter of severities 1 to 5
    # (picture [H, W, 3] in 0..1, parameter, randomness) -> a picture, which may leave 0..1
    apply: Callable[[Picture, Any, np.random.Generator], Picture]


def corrupt(picture: Picture, name: str, severity: int, generator: np.random.Generator) -> Picture:
    """Return a corrupted copy, in steps of 1/255 as a stored image has them."""
    kind = CORRUPTIONS[name]
    return np.rint(kind.apply(picture, kind.levels[severity - 1], generator).clip(0, 1) * 255) / 255


def _gaussian_noise(picture: Picture, deviation: float, generator: np.random.Generator) -> Picture:
    return picture + generator.normal(scale=deviation, size=picture.shape)


def _shot_noise(picture: Picture, photons: float, generator: np.random.Generator) -> Picture:
    return generator.poisson(picture * photons) / photons


def _impulse_noise(picture: Picture, share: float, generator: np.random.Generator) -> Picture:
    drawn = generator.random(picture.shape)
    return np.where(drawn < share, (drawn < share / 2).astype(float), picture)


def _defocus_blur(picture: Picture, radius: float, generator: np.random.Generator) -> Picture:
    return _filtered(picture, disk_kernel(_scaled(radius, picture)))


def _motion_blur(picture: Picture, parameters: tuple[float, float], generator: np.random.Generator) -> Picture:
    length, deviation = (_scaled(parameter, picture) for parameter in parameters)
    return _filtered(picture, motion_kernel(length, deviation, generator.uniform(-np.pi / 4, np.pi / 4)))


def _zoom_blur(picture: Picture, end_and_step: tuple[float, float], generator: np.random.Generator) -> Picture:
    from scipy import ndimage

    transform: Any = ndimage.affine_transform  # its types do not know an offset an axis
    middle = (np.array(picture.shape[:2]) - 1) / 2
    copies = [picture]
    for factor in np.arange(1, *end_and_step):
        matrix, offset = np.array([1 / factor, 1 / factor, 1]), np.append(middle * (1 - 1 / factor), 0)
        copies.append(transform(picture, matrix, offset, order=1, mode="nearest"))
    return np.mean(copies, axis=0)


def _brightness(picture: Picture, shift: float, generator: np.random.Generator) -> Picture:
    from skimage.color import hsv2rgb, rgb2hsv

    values = rgb2hsv(picture)
    values[..., 2] = (values[..., 2] + shift).clip(0, 1)
    return hsv2rgb(values)


def _contrast(picture: Picture, factor: float, generator: np.random.Generator) -> Picture:
    mean = picture.mean(axis=(0, 1))
    return (picture - mean) * factor + mean


def _pixelate(picture: Picture, factor: float, generator: np.random.Generator) -> Picture:
    height, width = picture.shape[:2]
    small = _image(picture).resize((max(int(width * factor), 1), max(int(height * factor), 1)), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX)) / 255


def _jpeg(picture: Picture, quality: int, generator: np.random.Generator) -> Picture:
    content = io.BytesIO()
    _image(picture).save(content, "JPEG", quality=quality)
    return np.asarray(Image.open(content)) / 255


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption("noise", (0.08, 0.12, 0.18, 0.26, 0.38), _gaussian_noise),
    "shot_noise": Corruption("noise", (60, 25, 12, 5, 3), _shot_noise),
    "impulse_noise": Corruption("noise", (0.03, 0.06, 0.09, 0.17, 0.27), _impulse_noise),
    "defocus_blur": Corruption("blur", (3, 4, 6, 8, 10), _defocus_blur),
    "motion_blur": Corruption("blur", ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)), _motion_blur),
    "zoom_blur": Corruption("blur", ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)), _zoom_blur),
    "brightness": Corruption("weather", (0.1, 0.2, 0.3, 0.4, 0.5), _brightness),
    "contrast": Corruption("digital", (0.4, 0.3, 0.2, 0.1, 0.05), _contrast),
    "pixelate": Corruption("digital", (0.6, 0.5, 0.4, 0.3, 0.25), _pixelate),
    "jpeg_compression": Corruption("digital", (25, 18, 15, 10, 7), _jpeg),
}


def disk_kernel(radius: float) -> Picture:
    """[2 r + 1, 2 r + 1] with r = ceil(radius): the share of every pixel that a disk about the middle covers; sum 1."""
    reach = int(np.ceil(radius))
    size = (2 * reach + 1) * _SUBPIXELS
    axis = (np.arange(size) + 0.5) / _SUBPIXELS - size / _SUBPIXELS / 2
    inside = axis[:, None] ** 2 + axis**2 <= radius**2
    kernel = inside.reshape(2 * reach + 1, _SUBPIXELS, 2 * reach + 1, _SUBPIXELS).mean(axis=(1, 3))
    return kernel / kernel.sum()


def motion_kernel(length: float, deviation: float, angle: float) -> Picture:
    """One-sided Gaussian weights along a line of 2 length + 1 px from the middle, at `angle` (radians); sum 1."""
    reach = int(np.ceil(2 * length + 1))
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    for step in np.arange(0, 2 * length + 1, 1 / _SUBPIXELS):
        weight = np.exp(-(step**2) / (2 * deviation**2))
        row, column = reach + step * np.sin(angle), reach + step * np.cos(angle)
        top, left = int(row), int(column)
        down, right = row - top, column - left
        shares = np.outer((1 - down, down), (1 - right, right))
        bottom, outer = min(top + 2, len(kernel)), min(left + 2, len(kernel))
        kernel[top:bottom, left:outer] += weight * shares[: bottom - top, : outer - left]
    return kernel / kernel.sum()


def _filtered(picture: Picture, kernel: Picture) -> Picture:
    """Convolve each channel with [k, k]; the border mirrored."""
    from scipy.signal import fftconvolve

    reach = len(kernel) // 2
    padded = np.pad(picture, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    return fftconvolve(padded, kernel[..., None], mode="valid", axes=(0, 1))


def _scaled(length: float, picture: Picture) -> float:
    return length * min(picture.shape[:2]) / _NOMINAL_PX


def _image(picture: Picture) -> Image.Image:
    return Image.fromarray(np.rint(picture * 255).astype(np.uint8))


def known_corruptions(names: Sequence[str] | None) -> list[str]:
    """Return the asked ones in the order of `CORRUPTIONS`; None is all of them."""
    if names and (unknown := sorted(set(names) - set(CORRUPTIONS))):
        raise UserError(f"unknown corruption {', '.join(unknown)}; choose from {', '.join(CORRUPTIONS)}")
    return [name for name in CORRUPTIONS if not names or name in names]


SEVERITIES = (1, 2, 3, 4, 5)


@final
@dataclass(frozen=True, repr=False)
class CorruptionsResult(OneTableResult):
    """What `corruptions` measured of images that were each put under every corruption."""

    title: ClassVar[str] = "Common corruptions"
    source: ClassVar[str] = "arXiv 1903.12261"
    num_images: int
    clean: float  # accuracy without corruption
    accuracy: dict[str, list[float]]  # corruption -> [5], by severity

    @property
    def mean_error(self) -> float:
        """Mean of the errors over severities and corruptions; not set against another model's, as in ImageNet-C."""
        return 1 - float(np.mean(list(self.accuracy.values())))

    def values(self) -> dict[str, Any]:
        return {
            "clean_accuracy": self.clean,
            "mean_corruption_error": self.mean_error,
            "error_above_clean": self.mean_error - (1 - self.clean),
            "accuracy_by_severity": self.accuracy,
        }

    def headline(self) -> dict[str, float]:
        every, some = len(CORRUPTIONS), len(self.accuracy)
        which = f"{every} corruptions" if some == every else f"{some} of {every} corruptions"
        return {f"mean error under {which}": self.mean_error}

    def table(self) -> Table:
        header = ["accuracy by severity", *map(str, SEVERITIES), "mean"]
        rows = [
            [name.replace("_", " "), *map(percent, found), percent(float(np.mean(found)))]
            for name, found in self.accuracy.items()
        ]
        every = [float(np.mean(column)) for column in zip(*self.accuracy.values(), strict=True)]
        rows.append(["all", *map(percent, every), percent(1 - self.mean_error)])
        return Table(header, rows)

    def draw(self) -> "Figure":
        lines = [Line(name.replace("_", " "), SEVERITIES, found) for name, found in self.accuracy.items()]
        return curves(lines, "severity", level=("not corrupted", self.clean))


def corruptions(examination: Examination, *, kinds: Sequence[str] | None = None) -> CorruptionsResult:
    """Measure accuracy on corrupted images, of every kind and severity.

    Images are corrupted as the model sees them, resized and cropped; the randomness of an image depends on the seed
    and on its content alone.
    """
    names = known_corruptions(kinds)
    scale, model = PixelScale.measure(examination.subject), examination.subject.model
    hits, clean, images = {name: np.zeros(len(SEVERITIES)) for name in names}, 0, 0
    for values, labels in examination.judging("corrupting"):
        pixels = scale.pixels(values).clamp(0, 1)
        clean += count_right(model, values, labels)
        for name in names:
            for place, severity in enumerate(SEVERITIES):
                changed = scale.values(corrupt_batch(pixels, name, severity, examination.seed))
                hits[name][place] += count_right(model, changed, labels)
        images += len(labels)
    return CorruptionsResult(images, clean / images, {name: (found / images).tolist() for name, found in hits.items()})


def corrupt_batch(pixels: torch.Tensor, name: str, severity: int, seed: int) -> torch.Tensor:
    """Corrupt pixels [B, 3, H, W] in 0..1, each image by its own randomness."""
    kind = list(CORRUPTIONS).index(name)
    pictures = pixels.permute(0, 2, 3, 1).double().cpu().numpy()
    changed = [
        corrupt(picture, name, severity, image_generator(image, seed, kind, severity))
        for picture, image in zip(pictures, pixels, strict=True)
    ]
    return torch.from_numpy(np.stack(changed)).permute(0, 3, 1, 2).to(pixels.device, pixels.dtype)
