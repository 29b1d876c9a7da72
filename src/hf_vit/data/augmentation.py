"""Augmentation of training images as a pure function of (seed, epoch, image).

The augmentation of an image in an epoch does not depend on loader workers, batch size, order or interruptions: every
random number is a hash of seed, epoch, image and its own index, and not the next number of a shared generator.

Cheap operations act on a whole batch of 8-bit pixels. torchvision's v2 transforms draw from torch's generator, once for
all images of a batch, so they run image by image, each with its own seed.
"""

import random
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps

from hf_vit.errors import UserError
from hf_vit_settings import AugmentationConfig

if TYPE_CHECKING:
    from torchvision.transforms.v2 import InterpolationMode

_DRAWS = 6  # random numbers of one image, see `Augmenter.__call__`


def make_random_keys(seed: int, epoch: int, images: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of (seed, epoch, image) for every image, [B] uint64 (B images)."""
    base = _draw_splitmix(np.zeros(1, dtype=np.uint64), np.asarray([seed % 2**64], dtype=np.uint64))
    return _draw_splitmix(_draw_splitmix(base, np.asarray([epoch], dtype=np.uint64)), images)


def draw_uniforms(keys: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    """Return `count` independent numbers in [0, 1) for every key, [B, count]; the same on every machine."""
    numbers = _draw_splitmix(keys[:, None], np.arange(count, dtype=np.uint64)[None, :])
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _draw_splitmix(state: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the numbers at these positions of SplitMix64 generators (Steele, Lea, Flood 2014) with these states."""
    values = state + (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@contextmanager
def seeded(key: int) -> Generator[None]:
    """Seed torch's CPU generator for a block of code, and restore its state afterwards."""
    state = torch.get_rng_state()
    # Not torch.manual_seed, which also seeds accelerators; a forked loader worker must not touch these.
    torch.default_generator.manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@dataclass(frozen=True)
class Seeded:
    """A transform that draws from torch's generator, seeded with (key ^ `salt`) for every image."""

    transform: Callable[[torch.Tensor], torch.Tensor]
    salt: int = 0

    def transform_all(self, images: Iterable[torch.Tensor], keys: NDArray[np.uint64]) -> list[torch.Tensor]:
        """Transform every image with its own seed."""
        results: list[torch.Tensor] = []
        for image, key in zip(images, keys.tolist(), strict=True):
            with seeded(key ^ self.salt):
                results.append(self.transform(image))
        return results


class Augmenter:
    """Applies an `AugmentationConfig` to 8-bit images.

    Args:
        config: the augmentation.
        size: (height, width) px of the model's input.
        interpolation: torchvision's InterpolationMode of the random resized crop.
        fill: color 0..255 of the border that a policy moves into the image.

    Raises:
        UserError: the crop does not fit the size, or a policy needs timm and it is not installed.
    """

    def __init__(
        self,
        config: AugmentationConfig,
        size: tuple[int, int],
        interpolation: "InterpolationMode",
        fill: tuple[int, ...] = (128, 128, 128),
    ) -> None:
        from torchvision.transforms import v2

        self.config = config
        self._crop: Seeded | None = None
        padding, scale = config.random_crop, config.random_resized_crop
        if padding is not None:
            if padding >= min(size):
                raise UserError(
                    f"random_crop={padding} is too large for images of {size[0]}x{size[1]} px; choose less than "
                    f"{min(size)}"
                )
            self._crop = Seeded(v2.RandomCrop(size, padding=padding or None, padding_mode="reflect"))
        elif scale is not None:
            crop = v2.RandomResizedCrop(size, scale=scale, interpolation=interpolation, antialias=True)
            self._crop = Seeded(crop)
        # The salts differ (a policy has its own), so that the random numbers of one step tell nothing about another's.
        self._later_steps: list[Seeded | _Policy] = []
        if config.randaugment is not None and config.randaugment[0] > 0:
            layers, magnitude = config.randaugment
            self._later_steps.append(Seeded(v2.RandAugment(layers, magnitude, num_magnitude_bins=31), salt=1))
        if config.auto_augment is not None:
            self._later_steps.append(open_policy(config.auto_augment, size, fill))
        if config.color_jitter:
            strength = config.color_jitter
            self._later_steps.append(Seeded(v2.ColorJitter(strength, strength, strength), salt=5))

    def __call__(self, images: Sequence[torch.Tensor], keys: NDArray[np.uint64]) -> torch.Tensor:
        """Augment a batch.

        Args:
            images: B uint8 tensors [3, H, W] (channels, height, width); of any size for a random resized crop, at least
                of the model's size for a random crop, else of the model's size.
            keys: [B] from `make_random_keys`.

        Returns:
            uint8 [B, 3, H, W].
        """
        config = self.config
        pixels = torch.stack(list(images) if self._crop is None else self._crop.transform_all(images, keys))
        horizontal, vertical, turn, flip, zoom, shear = draw_uniforms(keys, _DRAWS).T  # [B] each, in [0, 1)
        has_whole_shift = float(config.shift_px).is_integer()
        if has_whole_shift and config.shift_px:  # without interpolation, which would blur the image
            most = int(config.shift_px)
            right, down = (np.floor(draw * (2 * most + 1)).astype(np.int64) - most for draw in (horizontal, vertical))
            pixels = shift(pixels, right.tolist(), down.tolist())
        max_shift = 0.0 if has_whole_shift else config.shift_px
        if max_shift or config.rotation_degrees or config.shear_degrees or config.zoom:
            pixels = apply_affine(
                pixels,
                degrees=(turn * 2 - 1) * config.rotation_degrees,
                shear_degrees=(shear * 2 - 1) * config.shear_degrees,
                scale=1 + (zoom * 2 - 1) * config.zoom,
                right=(horizontal * 2 - 1) * max_shift,
                down=(vertical * 2 - 1) * max_shift,
            )
        if config.horizontal_flip:
            is_flipped = torch.from_numpy(flip < config.horizontal_flip)
            pixels[is_flipped] = pixels[is_flipped].flip(-1)
        for transform in self._later_steps:
            pixels = torch.stack(transform.transform_all(pixels, keys))
        return pixels


def shift(pixels: torch.Tensor, right: Sequence[int], down: Sequence[int]) -> torch.Tensor:
    """Move every image of a batch [B, C, H, W] by whole px, B distances right and down, and fill with 0."""
    height, width = pixels.shape[-2:]
    margin = max(1, *(abs(offset) for offset in (*right, *down)))
    padded = F.pad(pixels, (margin, margin, margin, margin))
    corners = zip(padded, (margin - dx for dx in right), (margin - dy for dy in down), strict=True)
    return torch.stack([image[:, top : top + height, left : left + width] for image, left, top in corners])


def apply_affine(
    pixels: torch.Tensor,
    degrees: NDArray[np.float64] | float = 0.0,
    shear_degrees: NDArray[np.float64] | float = 0.0,
    scale: NDArray[np.float64] | float = 1.0,
    right: NDArray[np.float64] | float = 0.0,
    down: NDArray[np.float64] | float = 0.0,
) -> torch.Tensor:
    """Shear, scale and rotate every image about its center, then move it; bilinear, filled with 0.

    torchvision's `affine` takes one image at a time, and rounding makes 3 in 100,000 of its pixels differ by 1.

    Args:
        pixels: uint8 [B, C, H, W] (batch, channels, height, width).
        degrees: counter-clockwise rotation, [B] or one number, like all others.
        shear_degrees: angle by which vertical lines lean to the right.
        scale: values above 1 enlarge.
        right, down: px.
    """
    height, width = pixels.shape[-2:]
    angle, shear_angle, factor, x_offset, y_offset = (
        np.broadcast_to(np.asarray(value, dtype=np.float64), len(pixels))
        for value in (np.deg2rad(degrees), np.deg2rad(shear_degrees), scale, right, down)
    )
    # The inverse map, from positions in the new image to positions in the old one.
    cos = np.cos(angle) / factor
    sin = np.sin(angle) / factor
    shear = np.tan(shear_angle)
    inverse = np.stack([np.stack([cos + shear * sin, -sin + shear * cos], -1), np.stack([sin, cos], -1)], 1)
    offset = -(inverse @ np.stack([x_offset, y_offset], -1)[:, :, None])
    # affine_grid's coordinates run from -1 to 1 along both sides, so they are scaled with the lengths of the sides.
    sides = np.asarray([width, height], dtype=np.float64)
    theta = np.concatenate(
        [inverse * sides[None, None, :] / sides[None, :, None], 2 * offset / sides[None, :, None]], -1
    )
    grid = F.affine_grid(torch.from_numpy(theta).to(torch.float32), list(pixels.shape), align_corners=False)
    moved = F.grid_sample(pixels.to(torch.float32), grid, mode="bilinear", align_corners=False)
    return moved.round_().clamp_(0, 255).to(torch.uint8)


# ---- policies of RandAugment, AutoAugment and 3-Augment, run by timm

# Largest translation as a share of the shorter side, as in timm's loader.
_LARGEST_SHIFT = 0.45


def open_policy(policy: str, size: tuple[int, int] = (224, 224), fill: tuple[int, ...] = (128, 128, 128)) -> "_Policy":
    """Return a policy that augments uint8 images [3, H, W]; it interpolates bilinearly or bicubically at random.

    Args:
        policy: "rand-m9-mstd0.5-inc1" (arXiv 1909.13719: magnitude 9 of 10 with a standard deviation of 0.5, two
            operations with a probability of 0.5), "3a" (arXiv 2204.07118, section 3: grayscale, solarization or blur),
            "original" or "v0" (AutoAugment, arXiv 1805.09501).
        size: (height, width) px.
        fill: color 0..255 of the border that is moved into the image.
    """
    try:
        from timm.data.auto_augment import auto_augment_transform, rand_augment_transform
    except ImportError as error:
        raise UserError(
            f"--auto-augment {policy} needs timm; install it with pip install 'hf-vit[timm]', or choose "
            "--auto-augment none"
        ) from error
    values: dict[str, Any] = {"translate_const": int(min(size) * _LARGEST_SHIFT), "img_mean": fill}
    if policy.startswith("rand"):
        augment: Any = rand_augment_transform(policy, values)
        operations = augment.ops
    else:
        augment = auto_augment_transform(policy, values)
        operations = [operation for sub_policy in augment.policy for operation in sub_policy]
    for operation in operations:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return _Policy(augment)


@dataclass(frozen=True)
class _Policy:
    """A policy of timm; Python's and numpy's generators, from which timm draws, are seeded with (key ^ 4)."""

    augment: Callable[[Image.Image], Image.Image]

    def transform_all(self, images: Iterable[torch.Tensor], keys: NDArray[np.uint64]) -> list[torch.Tensor]:
        """Augment every image with its own seed."""
        python_state, numpy_state = random.getstate(), np.random.get_state()
        results: list[torch.Tensor] = []
        try:
            for image, key in zip(images, keys.tolist(), strict=True):
                random.seed(key ^ 4)
                np.random.seed((key ^ 4) & 0xFFFF_FFFF)
                result = self.augment(Image.fromarray(image.permute(1, 2, 0).numpy()))
                results.append(torch.from_numpy(np.array(result)).permute(2, 0, 1))
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        return results


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """Posterize an image; the strongest level keeps 0 bits, for which Pillow has no result, and gives black."""
    if bits < 1:
        return image.point(lambda _: 0)
    return image if bits >= 8 else ImageOps.posterize(image, bits)
