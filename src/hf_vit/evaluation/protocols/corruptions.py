"""Common corruptions of images, ten kinds in five severities, and accuracy under them.

Legend: B batch, H x W px.
Source: arXiv 1903.12261 (ImageNet-C). The parameters are those its authors publish with the data; blurs, whose
parameters are lengths in 224 px images, are scaled by side / 224. Glass blur, snow, frost, fog and elastic transform
are left out, and images are not stored as JPEG afterwards, so that the numbers are not those of ImageNet-C's files.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Picture = NDArray[np.float64]
_NOMINAL_PX = 224
_SUBPIXELS = 9


@final
@dataclass(frozen=True)
class Corruption:
    """One kind of corruption.

    Attributes:
        family: noise, blur, weather or digital.
        levels: the parameter of severities 1 to 5.
        apply: (picture [H, W, 3] in 0..1, parameter, randomness) -> a picture, which may leave 0..1.
    """

    family: str
    levels: tuple[Any, Any, Any, Any, Any]
    apply: Callable[[Picture, Any, np.random.Generator], Picture]


def corrupt(picture: Picture, name: str, severity: int, generator: np.random.Generator) -> Picture:
    """A corrupted copy, in steps of 1/255 as a stored image has them.

    Args:
        picture: [H, W, 3] in 0..1.
        name: of `CORRUPTIONS`.
        severity: 1 to 5.
        generator: of the noise, or of the direction of a motion.
    """
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


def _zoom_blur(picture: Picture, factors: NDArray[np.float64], generator: np.random.Generator) -> Picture:
    from scipy import ndimage

    transform: Any = ndimage.affine_transform  # its types do not know an offset an axis
    middle = (np.array(picture.shape[:2]) - 1) / 2
    copies = [picture]
    for factor in factors:
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
    "zoom_blur": Corruption(
        "blur",
        (
            np.arange(1, 1.11, 0.01),
            np.arange(1, 1.16, 0.01),
            np.arange(1, 1.21, 0.02),
            np.arange(1, 1.26, 0.02),
            np.arange(1, 1.31, 0.03),
        ),
        _zoom_blur,
    ),
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
    """Each channel convolved with [k, k]; the border mirrored."""
    from scipy.signal import fftconvolve

    reach = len(kernel) // 2
    padded = np.pad(picture, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    return fftconvolve(padded, kernel[..., None], mode="valid", axes=(0, 1))


def _scaled(length: float, picture: Picture) -> float:
    return length * min(picture.shape[:2]) / _NOMINAL_PX


def _image(picture: Picture) -> Image.Image:
    return Image.fromarray(np.rint(picture * 255).astype(np.uint8))


def known_corruptions(names: Sequence[str] | None) -> list[str]:
    """The asked ones in the order of `CORRUPTIONS`; None is all of them.

    Raises:
        UserError: there is no such corruption.
    """
    from hf_vit.errors import UserError

    if names and (unknown := sorted(set(names) - set(CORRUPTIONS))):
        raise UserError(f"there is no corruption {', '.join(unknown)}; there are {', '.join(CORRUPTIONS)}")
    return [name for name in CORRUPTIONS if not names or name in names]
