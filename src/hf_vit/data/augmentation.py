"""Training-time variation of images, a pure function of (seed, epoch, image).

Whatever the number of loader workers, the batch size, the order or an interruption: the same image in the same epoch
is varied in the same way. Every random choice is therefore a hash of those three numbers and of its own position,
instead of the next number of a generator that somebody else also draws from.

Cheap variations act on a whole batch of 8-bit pixels; torchvision's v2 transforms, which draw from torch's generator,
run image by image under a seed of their own.
"""

import random
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from hf_vit.errors import UserError
from hf_vit_settings import AugmentationConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torchvision.transforms.v2 import InterpolationMode

_DRAWS = 6  # horizontal shift, vertical shift, angle, flip, zoom, shear


def random_keys(seed: int, epoch: int, images: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    """Return [B] one well-mixed 64-bit number for every image in this epoch of this seed."""
    base = _stream(np.zeros(1, dtype=np.uint64), np.asarray([seed % 2**64], dtype=np.uint64))
    return _stream(_stream(base, np.asarray([epoch], dtype=np.uint64)), images)


def uniforms(keys: "NDArray[np.uint64]", count: int) -> "NDArray[np.float64]":
    """Return [B, count] numbers in [0, 1), independent of each other, the same for the same keys everywhere."""
    numbers = _stream(keys[:, None], np.arange(count, dtype=np.uint64)[None, :])
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _stream(state: "NDArray[np.uint64]", position: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    """Return the numbers at the given positions of the SplitMix64 generators (Steele, Lea, Flood 2014) of these
    states.
    """
    values = state + (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@contextmanager
def seeded(key: int) -> Generator[None]:
    """Torch's CPU generator under its own seed, and afterwards as it was."""
    state = torch.get_rng_state()
    # Not torch.manual_seed: that also touches accelerators, which a forked loader worker must not.
    torch.default_generator.manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@dataclass(frozen=True)
class Seeded:
    """A transform that draws from torch's generator, under a seed of each image's own: its key ^ `salt`."""

    transform: Callable[[torch.Tensor], torch.Tensor]
    salt: int = 0

    def each(self, images: Iterable[torch.Tensor], keys: "NDArray[np.uint64]") -> list[torch.Tensor]:
        """Return every image transformed, by its key."""
        varied: list[torch.Tensor] = []
        for image, key in zip(images, keys.tolist(), strict=True):
            with seeded(key ^ self.salt):
                varied.append(self.transform(image))
        return varied


class Augmenter:
    """Applies an `AugmentationConfig` to 8-bit images.

    Args:
        config: what to vary.
        size: (height, width) px of the model's input.
        interpolation: of the random resized crop, a torchvision InterpolationMode.
        fill: color of what a policy moves in, 0..255.
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
        crop, edge = None, config.random_crop
        if config.random_resized_crop is not None:
            scale = config.random_resized_crop
            crop = v2.RandomResizedCrop(size, scale=scale, interpolation=interpolation, antialias=True)
        if edge is not None:
            if edge >= min(size):
                raise UserError(f"augmentation random_crop = {edge}; needed: less than {min(size)} px")
            crop = v2.RandomCrop(size, padding=edge or None, padding_mode="reflect")
        self._crop = None if crop is None else Seeded(crop)
        self._after: list[Seeded | _Policy] = []
        if config.randaugment is not None and config.randaugment[0] > 0:
            layers, magnitude = config.randaugment
            self._after.append(Seeded(v2.RandAugment(layers, magnitude, num_magnitude_bins=31), 1))
        if config.auto_augment is not None:
            self._after.append(open_policy(config.auto_augment, size, fill))
        if config.color_jitter:
            self._after.append(Seeded(v2.ColorJitter(*(config.color_jitter,) * 3), 5))

    def __call__(self, images: "Sequence[torch.Tensor]", keys: "NDArray[np.uint64]") -> torch.Tensor:
        """Vary a batch.

        Args:
            images: B uint8 tensors [3, H, W]; of any sizes with a random resized crop, at least the model's with a
                random crop, else of the model's size.
            keys: [B] from `random_keys`.

        Returns:
            uint8 [B, 3, H, W].
        """
        config = self.config
        pixels = torch.stack(list(images) if self._crop is None else self._crop.each(images, keys))
        draws = uniforms(keys, _DRAWS)
        signed, reach = draws * 2 - 1, config.shift_px  # in [-1, 1)
        if float(reach).is_integer():
            if reach:
                places = np.floor(draws[:, :2] * (2 * int(reach) + 1)).astype(np.int64) - int(reach)
                pixels = shift(pixels, *places.T.tolist())
            reach = 0.0
        if reach or config.rotation_degrees or config.shear_degrees or config.zoom:
            pixels = affine(
                pixels,
                degrees=signed[:, 2] * config.rotation_degrees,
                shear_degrees=signed[:, 5] * config.shear_degrees,
                scale=1 + signed[:, 4] * config.zoom,
                right=signed[:, 0] * reach,
                down=signed[:, 1] * reach,
            )
        if config.horizontal_flip:
            flipped = torch.from_numpy(draws[:, 3] < config.horizontal_flip)
            pixels[flipped] = pixels[flipped].flip(-1)
        for transform in self._after:
            pixels = torch.stack(transform.each(pixels, keys))
        return pixels


def shift(pixels: torch.Tensor, right: Sequence[int], down: Sequence[int]) -> torch.Tensor:
    """Move every image of [B, C, H, W] by whole px; what moves in is 0."""
    height, width = pixels.shape[-2:]
    reach = max(1, *(abs(offset) for offset in (*right, *down)))
    padded = F.pad(pixels, (reach, reach, reach, reach))
    return torch.stack(
        [
            image[:, reach - dy : reach - dy + height, reach - dx : reach - dx + width]
            for image, dx, dy in zip(padded, right, down, strict=True)
        ]
    )


def affine(
    pixels: torch.Tensor,
    degrees: "NDArray[np.float64] | float" = 0.0,
    shear_degrees: "NDArray[np.float64] | float" = 0.0,
    scale: "NDArray[np.float64] | float" = 1.0,
    right: "NDArray[np.float64] | float" = 0.0,
    down: "NDArray[np.float64] | float" = 0.0,
) -> torch.Tensor:
    """Slant, scale and turn every image about its center, then move it; bilinear, and what moves in is 0.

    Not torchvision's `affine`, which takes one image at a time and rounds otherwise: 3 in 100,000 pixels differ by 1.

    Args:
        pixels: uint8 [B, C, H, W].
        degrees: [B] or one number; counter-clockwise.
        shear_degrees: upright lines lean to the right.
        scale: above 1 enlarges.
        right, down: px.
    """
    batch, (height, width) = len(pixels), pixels.shape[-2:]
    turn, slant, factor, x, y = (
        np.broadcast_to(np.asarray(value, dtype=np.float64), batch)
        for value in (np.deg2rad(degrees), np.deg2rad(shear_degrees), scale, right, down)
    )
    # From a place in the new image back to the old one: undo the move, the turn, the scale, the slant.
    cos, sin, lean = np.cos(turn) / factor, np.sin(turn) / factor, np.tan(slant)
    back = np.stack([np.stack([cos + lean * sin, -sin + lean * cos], -1), np.stack([sin, cos], -1)], 1)
    offset = -(back @ np.stack([x, y], -1)[:, :, None])
    # affine_grid's coordinates run from -1 to 1 along either side, hence the sides' lengths.
    sides = np.asarray([width, height], dtype=np.float64)
    theta = np.concatenate([back * sides[None, None, :] / sides[None, :, None], 2 * offset / sides[None, :, None]], -1)
    grid = F.affine_grid(torch.from_numpy(theta).to(torch.float32), list(pixels.shape), align_corners=False)
    moved = F.grid_sample(pixels.to(torch.float32), grid, mode="bilinear", align_corners=False)
    return moved.round_().clamp_(0, 255).to(torch.uint8)


# ---- policies of RandAugment, AutoAugment and 3-Augment with the scale and the noise of timm's code, which runs them

# What the largest shift is a share of: the shorter side, as in timm's own loader.
_LARGEST_SHIFT = 0.45


def open_policy(policy: str, size: tuple[int, int] = (224, 224), fill: tuple[int, ...] = (128, 128, 128)) -> "_Policy":
    """Return what varies uint8 images [3, H, W], each by its key; shears and turns are bilinear or bicubic by chance.

    Args:
        policy: "rand-m9-mstd0.5-inc1" (arXiv 1909.13719: magnitude 9 of 10 with a standard deviation of 0.5, stronger
            with rising magnitude, two layers of which each acts in every second image), "3a" (arXiv 2204.07118, section
            3: grayscale, solarisation or blur), "original" and "v0" (AutoAugment, arXiv 1805.09501).
        size: (height, width) px.
        fill: color of what moves in, 0..255.
    """
    try:
        from timm.data.auto_augment import auto_augment_transform, rand_augment_transform
    except ImportError as error:
        raise UserError(
            f"the policy {policy} needs timm: pip install 'hf-vit[timm]'; or choose --auto-augment none"
        ) from error
    values: dict[str, Any] = {"translate_const": int(min(size) * _LARGEST_SHIFT), "img_mean": fill}
    vary: Any = (rand_augment_transform if policy.startswith("rand") else auto_augment_transform)(policy, values)
    for operation in vary.ops if policy.startswith("rand") else (each for steps in vary.policy for each in steps):
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return _Policy(vary)


@dataclass(frozen=True)
class _Policy:
    """A policy under each image's own seed, its key ^ 4, of Python's and numpy's generators, from which timm draws."""

    vary: Callable[[Image.Image], Image.Image]

    def each(self, images: Iterable[torch.Tensor], keys: "NDArray[np.uint64]") -> list[torch.Tensor]:
        states, varied = (random.getstate(), np.random.get_state()), list[torch.Tensor]()
        try:
            for image, key in zip(images, keys.tolist(), strict=True):
                random.seed(key ^ 4)
                np.random.seed((key ^ 4) & 0xFFFF_FFFF)
                changed = self.vary(Image.fromarray(image.permute(1, 2, 0).numpy()))
                varied.append(torch.from_numpy(np.array(changed)).permute(2, 0, 1))
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        return varied


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """Black for the 0 bits that the strongest level leaves, which Pillow refuses."""
    if bits < 1:
        return image.point(lambda _: 0)
    return image if bits >= 8 else ImageOps.posterize(image, bits)
