"""Accuracy under attacks (FGSM, PGD), with dropped patches, and under common corruptions.

Legend: B batch, C channels, H x W px (height, width), h x w patch grid, E sizes of an attack, S shares of the patches.
Sources: arXiv 1412.6572 (FGSM), arXiv 1706.06083 (PGD), arXiv 2105.10497, section 3.1 (random, salient and non-salient
PatchDrop), arXiv 1903.12261 (ImageNet-C). The size of an attack is in pixels before the model's scaling. Corruptions
have the parameters of ImageNet-C's code; the lengths of blurs, which are for 224 px, are scaled by side / 224. Glass
blur, snow, frost, fog and elastic transform are missing, and images are not stored as JPEG, so results differ from
those on ImageNet-C's files.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from hf_vit.evaluation.protocols.frame import Line, SingleTableResult, Table, draw_curves, percent
from hf_vit.evaluation.reading import compute_logits, explain_memory_errors
from hf_vit.families import find_family
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.pixels import PixelScale, crop_to_patches, make_image_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Loss = Callable[[torch.Tensor], torch.Tensor]
Variants = Iterator[tuple[Any, torch.Tensor]]  # (name, pixel values [B, C, H, W])
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def fgsm(loss: Loss, pixels: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Attack pixels in 0..1 with one step of `epsilon` along the sign of the gradient."""
    return (pixels + epsilon * compute_gradient(loss, pixels).sign()).clamp(0, 1)


def pgd(
    loss: Loss, pixels: torch.Tensor, epsilon: float, *, steps: int, start: torch.Tensor | None = None
) -> torch.Tensor:
    """Attack pixels in 0..1 with steps of 2.5 epsilon / `steps` along the sign of the gradient, within `epsilon`.

    `start` in -1..1, [B, C, H, W], is the initial change in units of epsilon.
    """
    low, high = (pixels - epsilon).clamp(min=0), (pixels + epsilon).clamp(max=1)
    moved = pixels if start is None else (pixels + epsilon * start).clamp(low, high)
    for _ in range(steps):
        moved = (moved + 2.5 * epsilon / steps * compute_gradient(loss, moved).sign()).clamp(low, high)
    return moved


def check_differentiable(loaded: LoadedModel) -> None:
    """Raise UserError if a model has no gradients with respect to pixels."""
    if not loaded.is_differentiable:
        raise UserError(
            f"{loaded.name} has no gradients, because it is exported or optimized, so it cannot be attacked; "
            "give the original model"
        )


def make_loss(model: nn.Module, scale: PixelScale, labels: torch.Tensor) -> Loss:
    """Return the function from pixels [B, C, H, W] in 0..1 to log(exp(cross-entropy) - 1) of every image.

    Its gradient has the sign of the cross-entropy's, which vanishes by rounding where a model is confident.
    """

    def loss(pixels: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(model, scale.values(pixels))
        true = labels[:, None]
        return (logits.scatter(1, true, -torch.inf).logsumexp(dim=1, keepdim=True) - logits.gather(1, true))[:, 0]

    return loss


def compute_gradient(loss: Loss, pixels: torch.Tensor) -> torch.Tensor:
    """Return the gradient of every image's loss with respect to its pixels, [B, C, H, W]."""
    with torch.enable_grad(), explain_memory_errors(pixels):
        leaf = pixels.detach().requires_grad_()
        return torch.autograd.grad(loss(leaf).sum(), leaf)[0]


def measure_variants(
    examination: Examination, title: str, make_variants: Callable[[torch.Tensor, torch.Tensor], Variants]
) -> tuple[int, dict[Any, float]]:
    """Return the number of images, and for every variant of them the accuracy by its name.

    `make_variants` takes pixel values [B, C, H, W] and the model's classes [B] of a batch; `title` is that of the
    progress bar.
    """
    hits, counts = Counter[Any](), Counter[Any]()  # a variant may come twice
    images = 0
    for values, labels in examination.iterate_pixels(title):
        for name, variant in make_variants(values, labels):
            with torch.inference_mode():
                predictions = compute_logits(examination.loaded.model, variant).argmax(dim=1)
            hits[name] += int((predictions == labels).sum())
            counts[name] += len(labels)
        images += len(labels)
    return images, {name: hits[name] / count for name, count in counts.items()}


@final
@dataclass(frozen=True, repr=False)
class RobustnessResult(SingleTableResult):
    """The result of `robustness`.

    Attributes:
        epsilons: [E] sizes of the attack in 1/255 of the pixel range.
        clean: accuracy without attack.
        fgsm, pgd: [E] accuracy under FGSM and PGD.
        steps: steps of PGD.
    """

    title: ClassVar[str] = "Robustness to attacks"
    source: ClassVar[str] = "FGSM: arXiv 1412.6572; PGD: arXiv 1706.06083"
    epsilons: list[float]
    clean: float
    fgsm: list[float]
    pgd: list[float]
    steps: int

    def values(self) -> dict[str, Any]:
        attacked = {"epsilons_255": self.epsilons, "fgsm_accuracy": self.fgsm, "pgd_accuracy": self.pgd}
        return {"clean_accuracy": self.clean, **attacked, "pgd_steps": self.steps}

    def headline(self) -> dict[str, float]:
        index = self.epsilons.index(1.0) if 1.0 in self.epsilons else 0
        size = f"{self.epsilons[index]:g}/255"
        return {
            f"accuracy under FGSM, {size}": self.fgsm[index],
            f"accuracy under PGD, {size}, {self.steps} steps": self.pgd[index],
        }

    def table(self) -> Table:
        """Return a row for each size of the perturbation."""
        rows = [["0", percent(self.clean), percent(self.clean)]]
        for epsilon, fgsm_accuracy, pgd_accuracy in zip(self.epsilons, self.fgsm, self.pgd, strict=True):
            rows.append([f"{epsilon:g}", percent(fgsm_accuracy), percent(pgd_accuracy)])
        return Table(["epsilon (/255)", "accuracy, FGSM", f"accuracy, PGD ({self.steps} steps)"], rows)

    def draw(self) -> "Figure":
        attacks = (("FGSM", self.fgsm), (f"PGD, {self.steps} steps", self.pgd))
        lines = [Line(name, [0.0, *self.epsilons], [self.clean, *accuracies]) for name, accuracies in attacks]
        return draw_curves(lines, "largest change of a pixel (1/255)")


def robustness(examination: Examination, *, epsilons: Sequence[float] = EPSILONS, steps: int = 10) -> RobustnessResult:
    """Measure accuracy under untargeted white-box attacks on the cross-entropy, in the maximum norm.

    PGD starts once at a random point, which depends on the seed and the image, and its last step is evaluated.
    """
    sizes = sorted(set(map(float, epsilons)))
    if not sizes or sizes[0] <= 0 or sizes[-1] > 255 or steps < 1:
        raise UserError(
            f"--epsilons {list(epsilons)} and --steps {steps} cannot be used; give epsilons above 0 and at most 255 "
            "(in 1/255), and at least 1 step"
        )
    check_differentiable(examination.loaded)
    scale = PixelScale.measure(examination.loaded)

    def attack(values: torch.Tensor, labels: torch.Tensor) -> Variants:
        pixels = scale.pixels(values).clamp(0, 1)
        start = draw_start(pixels, examination.seed)
        loss = make_loss(examination.loaded.model, scale, labels)
        yield "clean", scale.values(pixels)
        for size in sizes:
            yield ("fgsm", size), scale.values(fgsm(loss, pixels, size / 255))
            yield ("pgd", size), scale.values(pgd(loss, pixels, size / 255, steps=steps, start=start))

    images, accuracy = measure_variants(examination, "attacking", attack)
    fgsm_accuracy, pgd_accuracy = ([accuracy[name, size] for size in sizes] for name in ("fgsm", "pgd"))
    return RobustnessResult(images, sizes, accuracy["clean"], fgsm_accuracy, pgd_accuracy, steps)


def draw_start(pixels: torch.Tensor, seed: int) -> torch.Tensor:
    """Draw the start of PGD, uniform in -1..1, [B, C, H, W]; an image has the same start in every batch."""
    starts = [make_image_generator(image, seed).uniform(-1, 1, tuple(image.shape)) for image in pixels]
    return torch.from_numpy(np.stack(starts)).to(pixels.device, pixels.dtype)


Fill = Literal["mean", "black"]
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ORDERS = ("random", "salient first", "salient last")
# Patches along the shorter side for models of unknown patch size, as in a ViT with 16 px patches at 224 px.
_PATCHES = 14


@final
@dataclass(frozen=True, repr=False)
class PatchDropResult(SingleTableResult):
    """The result of `patch_drop`.

    Attributes:
        shares: [S] shares of dropped patches.
        accuracy: order of dropping -> [S].
        patch_px: (height, width) px.
        fill: "mean" (of the image in every channel) or "black".
    """

    title: ClassVar[str] = "Accuracy with patches dropped"
    source: ClassVar[str] = "arXiv 2105.10497, section 3.1"
    shares: list[float]
    accuracy: dict[str, list[float]]
    patch_px: tuple[int, int]
    fill: Fill

    def values(self) -> dict[str, Any]:
        patch = {"patch_px": list(self.patch_px), "fill": self.fill}
        return {"shares": self.shares, "accuracy_by_order": self.accuracy, **patch}

    def headline(self) -> dict[str, float]:
        half = min(range(len(self.shares)), key=lambda index: abs(self.shares[index] - 0.5))
        return {
            f"accuracy, {self.shares[half]:.0%} of the patches dropped ({order})": accuracies[half]
            for order, accuracies in self.accuracy.items()
        }

    def table(self) -> Table:
        columns = zip(*self.accuracy.values(), strict=True)
        rows = [[f"{share:.0%}", *map(percent, cells)] for share, cells in zip(self.shares, columns, strict=True)]
        return Table(["dropped", *(f"accuracy, {order}" for order in self.accuracy)], rows)

    def draw(self) -> "Figure":
        shares = [100 * share for share in self.shares]
        lines = [Line(order, shares, accuracies) for order, accuracies in self.accuracy.items()]
        return draw_curves(lines, "patches dropped (%)")


def patch_drop(
    examination: Examination,
    *,
    shares: Sequence[float] = SHARES,
    patch_size: int | None = None,
    fill: Fill = "mean",
    orders: Sequence[str] = ORDERS,
) -> PatchDropResult:
    """Measure accuracy over the share of dropped patches, in random order, most salient first, or least salient first.

    A larger share includes the patches of a smaller one. The saliency of a patch is the change that dropping it makes
    to the logit of the predicted class minus the mean logit, to first order in the pixels. It exists for any
    classifier; the paper uses the attention of a self-supervised ViT.
    """
    sorted_shares = sorted(set(map(float, shares)))
    if not sorted_shares or sorted_shares[0] < 0 or sorted_shares[-1] > 1:
        raise UserError(f"shares={list(shares)} cannot be used; give numbers from 0 to 1")
    if fill not in ("mean", "black"):
        raise UserError(f"--fill {fill} is unknown; choose mean or black")
    if not orders or set(orders) - set(ORDERS):
        raise UserError(f"orders={list(orders)} is unknown; choose from {', '.join(ORDERS)}")
    check_differentiable(examination.loaded)
    scale = PixelScale.measure(examination.loaded)
    model = examination.loaded.model
    patch = (0, 0)

    def drop_patches(batch: torch.Tensor, labels: torch.Tensor) -> Variants:
        nonlocal patch
        values = crop_to_patches(model, batch)  # the model ignores the rest
        patch = choose_patch_size(model, (values.shape[2], values.shape[3]), patch_size)
        filling = scale.values(torch.zeros_like(values)) if fill == "black" else values.mean(dim=(2, 3), keepdim=True)
        patch_saliency = measure_saliency(model, values, filling, patch)
        ranks = _rank_patches(scale.pixels(values).clamp(0, 1), patch_saliency, examination.seed)
        for order in orders:
            for share in sorted_shares:
                yield (order, share), drop(values, ranks[order], share, filling, patch)

    images, accuracy = measure_variants(examination, "dropping patches", drop_patches)
    by_order = {order: [accuracy[order, share] for share in sorted_shares] for order in orders}
    return PatchDropResult(images, sorted_shares, by_order, patch, fill)


def choose_patch_size(model: nn.Module, image_px: tuple[int, int], patch_size: int | None) -> tuple[int, int]:
    """Return the (height, width) px of the patches to drop: the given size, the model's, or 1/14 of the image.

    Raises:
        UserError: the image is smaller than a patch.
    """
    side = patch_size or _find_patch_size(model) or max(min(image_px) // _PATCHES, 1)
    height, width = (side, side) if isinstance(side, int) else (int(side[0]), int(side[1]))
    if height < 1 or width < 1 or height > image_px[0] or width > image_px[1]:
        raise UserError(
            f"patches of {height}x{width} px do not fit images of {image_px[0]}x{image_px[1]} px; give a "
            "smaller --patch-size"
        )
    return height, width


def _find_patch_size(model: nn.Module) -> Any:
    """Return the patch size of a transformer of hf_vit, transformers or timm, an int or a pair; else None."""
    config = getattr(model, "config", None)
    family = find_family(getattr(config, "model_type", None))
    if family is not None and not family.has_tokens:
        config = None  # the patch_size of a ResNet is its total stride
    embedding = getattr(model, "patch_embed", None)  # of timm
    size = getattr(config, "patch_stride", None) or getattr(config, "patch_size", None)
    return size or getattr(embedding, "patch_size", None)


def drop(
    values: torch.Tensor, ranks: torch.Tensor, share: float, filling: torch.Tensor, patch: tuple[int, int]
) -> torch.Tensor:
    """Replace the round(share * h * w) patches with the lowest ranks [B, h, w] by the filling."""
    is_dropped = ranks < round(share * ranks[0].numel())
    mask = is_dropped.repeat_interleave(patch[0], dim=1).repeat_interleave(patch[1], dim=2)
    return torch.where(mask[:, None, : values.shape[2], : values.shape[3]], filling, values)


def measure_saliency(
    model: nn.Module, values: torch.Tensor, filling: torch.Tensor, patch: tuple[int, int]
) -> torch.Tensor:
    """Return the saliency of every patch, [B, h, w], see `patch_drop`; exact for a linear model.

    The logit minus the mean logit is used because, unlike a probability, it does not saturate.
    """

    def margin(pixels: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(model, pixels)
        return logits.max(dim=1).values - logits.mean(dim=1)

    losses = (compute_gradient(margin, values) * (values - filling)).sum(dim=1, keepdim=True)
    down, right = -values.shape[2] % patch[0], -values.shape[3] % patch[1]
    padded = F.pad(losses, (0, right, 0, down))
    return F.avg_pool2d(padded, patch, divisor_override=1)[:, 0].abs()


def _rank_patches(pixels: torch.Tensor, salient: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Return for every order the rank of every patch, [B, h, w]; the patch with rank 0 is dropped first."""
    by_saliency = salient.flatten(1).argsort(dim=1, descending=True, stable=True)
    salient_first = by_saliency.argsort(dim=1)  # the rank of a patch is its place in the order
    num_patches = salient_first.shape[1]
    random_ranks = np.stack([make_image_generator(image, seed).permutation(num_patches) for image in pixels])
    ranks = {
        "random": torch.from_numpy(random_ranks).to(salient_first.device),
        "salient first": salient_first,
        "salient last": num_patches - 1 - salient_first,
    }
    return {order: rank.unflatten(1, salient.shape[1:]) for order, rank in ranks.items()}


Picture = NDArray[np.float64]
_NOMINAL_PX = 224
_SUBPIXELS = 9


def corrupt(picture: Picture, name: str, severity: int, generator: np.random.Generator) -> Picture:
    """Return a corrupted copy of a picture [H, W, 3] in 0..1, rounded to steps of 1/255."""
    apply, parameters = CORRUPTIONS[name]
    return np.rint(apply(picture, parameters[severity - 1], generator).clip(0, 1) * 255) / 255


def _gaussian_noise(picture: Picture, deviation: float, generator: np.random.Generator) -> Picture:
    return picture + generator.normal(scale=deviation, size=picture.shape)


def _shot_noise(picture: Picture, photons: float, generator: np.random.Generator) -> Picture:
    return generator.poisson(picture * photons) / photons


def _impulse_noise(picture: Picture, share: float, generator: np.random.Generator) -> Picture:
    chance = generator.random(picture.shape)
    return np.where(chance < share, (chance < share / 2).astype(float), picture)


def _defocus_blur(picture: Picture, radius: float, generator: np.random.Generator) -> Picture:
    return _convolve(picture, make_disk_kernel(_scale_length(radius, picture)))


def _motion_blur(picture: Picture, parameters: tuple[float, float], generator: np.random.Generator) -> Picture:
    length, deviation = (_scale_length(parameter, picture) for parameter in parameters)
    return _convolve(picture, make_motion_kernel(length, deviation, generator.uniform(-np.pi / 4, np.pi / 4)))


def _zoom_blur(picture: Picture, end_and_step: tuple[float, float], generator: np.random.Generator) -> Picture:
    """Average the picture with copies of it that are enlarged by factors from 1 to `end`."""
    from scipy import ndimage

    transform: Any = ndimage.affine_transform  # Any: its type hints lack offsets per axis
    center = (np.array(picture.shape[:2]) - 1) / 2
    copies = [picture]
    for factor in np.arange(1, *end_and_step):
        matrix = np.array([1 / factor, 1 / factor, 1])
        offset = np.append(center * (1 - 1 / factor), 0)
        copies.append(transform(picture, matrix, offset, order=1, mode="nearest"))
    return np.mean(copies, axis=0)


def _brightness(picture: Picture, shift: float, generator: np.random.Generator) -> Picture:
    """Add `shift` to the value of every pixel in the color space HSV."""
    from skimage.color import hsv2rgb, rgb2hsv

    values = rgb2hsv(picture)
    values[..., 2] = (values[..., 2] + shift).clip(0, 1)
    return hsv2rgb(values)


def _contrast(picture: Picture, factor: float, generator: np.random.Generator) -> Picture:
    mean = picture.mean(axis=(0, 1))
    return (picture - mean) * factor + mean


def _pixelate(picture: Picture, factor: float, generator: np.random.Generator) -> Picture:
    height, width = picture.shape[:2]
    small = _to_image(picture).resize((max(int(width * factor), 1), max(int(height * factor), 1)), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX)) / 255


def _jpeg(picture: Picture, quality: int, generator: np.random.Generator) -> Picture:
    content = io.BytesIO()
    _to_image(picture).save(content, "JPEG", quality=quality)
    return np.asarray(Image.open(content)) / 255


# Name -> its function, whose result may leave 0..1, and the parameters of severities 1 to 5.
CORRUPTIONS: dict[str, tuple[Callable[[Picture, Any, np.random.Generator], Picture], tuple[Any, ...]]] = {
    "gaussian_noise": (_gaussian_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": (_shot_noise, (60, 25, 12, 5, 3)),
    "impulse_noise": (_impulse_noise, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": (_defocus_blur, (3, 4, 6, 8, 10)),
    "motion_blur": (_motion_blur, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    "zoom_blur": (_zoom_blur, ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))),
    "brightness": (_brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (_contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "pixelate": (_pixelate, (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": (_jpeg, (25, 18, 15, 10, 7)),
}


def make_disk_kernel(radius: float) -> Picture:
    """Return the share of every pixel that a centered disk covers, [2 r + 1, 2 r + 1] with r = ceil(radius); sum 1."""
    reach = int(np.ceil(radius))
    size = (2 * reach + 1) * _SUBPIXELS
    axis = (np.arange(size) + 0.5) / _SUBPIXELS - size / _SUBPIXELS / 2
    is_covered = axis[:, None] ** 2 + axis**2 <= radius**2
    kernel = is_covered.reshape(2 * reach + 1, _SUBPIXELS, 2 * reach + 1, _SUBPIXELS).mean(axis=(1, 3))
    return kernel / kernel.sum()


def make_motion_kernel(length: float, deviation: float, angle: float) -> Picture:
    """Return one-sided Gaussian weights on a line of 2 length + 1 px from the center at `angle` (radians); sum 1."""
    reach = int(np.ceil(2 * length + 1))
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    for step in np.arange(0, 2 * length + 1, 1 / _SUBPIXELS):
        weight = np.exp(-(step**2) / (2 * deviation**2))
        row, column = reach + step * np.sin(angle), reach + step * np.cos(angle)
        top, left = int(row), int(column)
        # The weight is shared among the four pixels around the point, of which some may lie outside of the kernel.
        shares = np.outer((1 - (row - top), row - top), (1 - (column - left), column - left))
        around = kernel[top : top + 2, left : left + 2]
        around += weight * shares[: around.shape[0], : around.shape[1]]
    return kernel / kernel.sum()


def _convolve(picture: Picture, kernel: Picture) -> Picture:
    """Convolve every channel with a kernel [k, k] and mirrored borders."""
    from scipy.signal import fftconvolve

    reach = len(kernel) // 2
    padded = np.pad(picture, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    return fftconvolve(padded, kernel[..., None], mode="valid", axes=(0, 1))


def _scale_length(length: float, picture: Picture) -> float:
    return length * min(picture.shape[:2]) / _NOMINAL_PX


def _to_image(picture: Picture) -> Image.Image:
    return Image.fromarray(np.rint(picture * 255).astype(np.uint8))


def list_corruptions(names: Sequence[str] | None) -> list[str]:
    """Return the named corruptions, by default all, in the order of `CORRUPTIONS`; raise UserError for unknown ones."""
    unknown_names = sorted(set(names or ()) - set(CORRUPTIONS))
    if unknown_names:
        raise UserError(f"the corruption {', '.join(unknown_names)} is unknown; choose from {', '.join(CORRUPTIONS)}")
    return [name for name in CORRUPTIONS if not names or name in names]


SEVERITIES = (1, 2, 3, 4, 5)


@final
@dataclass(frozen=True, repr=False)
class CorruptionsResult(SingleTableResult):
    """The result of `corruptions`.

    Attributes:
        clean: accuracy without corruption.
        accuracy: corruption -> [5] accuracy by severity.
    """

    title: ClassVar[str] = "Common corruptions"
    source: ClassVar[str] = "arXiv 1903.12261"
    clean: float
    accuracy: dict[str, list[float]]

    @property
    def mean_error(self) -> float:
        """Mean error over severities and corruptions, not divided by the errors of AlexNet as in ImageNet-C."""
        return 1 - float(np.mean(list(self.accuracy.values())))

    def values(self) -> dict[str, Any]:
        return {
            "clean_accuracy": self.clean,
            "mean_corruption_error": self.mean_error,
            "error_above_clean": self.mean_error - (1 - self.clean),
            "accuracy_by_severity": self.accuracy,
        }

    def headline(self) -> dict[str, float]:
        total, count = len(CORRUPTIONS), len(self.accuracy)
        kinds = f"{total} corruptions" if count == total else f"{count} of {total} corruptions"
        return {f"mean error under {kinds}": self.mean_error}

    def table(self) -> Table:
        """Return a row for each kind of corruption, and one for their mean."""
        header = ["accuracy by severity", *map(str, SEVERITIES), "mean"]
        rows = [
            [name.replace("_", " "), *map(percent, accuracies), percent(float(np.mean(accuracies)))]
            for name, accuracies in self.accuracy.items()
        ]
        means = [float(np.mean(column)) for column in zip(*self.accuracy.values(), strict=True)]
        rows.append(["all", *map(percent, means), percent(1 - self.mean_error)])
        return Table(header, rows)

    def draw(self) -> "Figure":
        lines = [Line(name.replace("_", " "), SEVERITIES, accuracies) for name, accuracies in self.accuracy.items()]
        return draw_curves(lines, "severity", level=("not corrupted", self.clean))


def corruptions(examination: Examination, *, kinds: Sequence[str] | None = None) -> CorruptionsResult:
    """Measure accuracy on images with corruptions of every kind and severity.

    Images are corrupted after resizing and cropping; the random numbers depend only on the seed and the image.
    """
    names = list_corruptions(kinds)
    scale = PixelScale.measure(examination.loaded)

    def corrupt_images(values: torch.Tensor, labels: torch.Tensor) -> Variants:
        pixels = scale.pixels(values).clamp(0, 1)
        yield "clean", values
        for name in names:
            for severity in SEVERITIES:
                yield (name, severity), scale.values(corrupt_batch(pixels, name, severity, examination.seed))

    images, accuracy = measure_variants(examination, "corrupting", corrupt_images)
    by_kind = {name: [accuracy[name, severity] for severity in SEVERITIES] for name in names}
    return CorruptionsResult(images, accuracy["clean"], by_kind)


def corrupt_batch(pixels: torch.Tensor, name: str, severity: int, seed: int) -> torch.Tensor:
    """Corrupt pixels [B, 3, H, W] in 0..1; the random numbers of an image do not depend on its batch."""
    kind = list(CORRUPTIONS).index(name)
    pictures = pixels.permute(0, 2, 3, 1).cpu().double().numpy()
    corrupted_images = [
        corrupt(picture, name, severity, make_image_generator(image, seed, kind, severity))
        for picture, image in zip(pictures, pixels, strict=True)
    ]
    return torch.from_numpy(np.stack(corrupted_images)).permute(0, 3, 1, 2).to(pixels.device, pixels.dtype)
