"""Training-time variation of images, a pure function of (seed, epoch, image).

Whatever the number of loader workers, the batch size, the order or an interruption: the same image in the same epoch
is varied in the same way. Every random choice is therefore a hash of those three numbers and of its own position,
instead of the next number of a generator that somebody else also draws from.

Cheap variations act on a whole batch of 8-bit pixels; torchvision's v2 transforms, which draw from torch's generator,
run image by image under a seed of their own.
"""

import random
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from hf_vit.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torchvision.transforms.v2 import InterpolationMode

_DRAWS = 6  # horizontal shift, vertical shift, angle, flip, zoom, shear


@dataclass(frozen=True)
class AugmentationConfig:
    """Which variations the training images get; the default is none at all.

    Applied in this order: crop, shift, rotation with shear and zoom, flip, RandAugment, policy, colour jitter, erasing;
    mixup or cutmix act on batches, in `ImageCollator`.

    Attributes:
        random_resized_crop: smallest and largest share of the image's area that a crop keeps, with an aspect ratio of
            3/4 to 4/3; None shows the whole image, resized as the image processor does.
        horizontal_flip: probability.
        randaugment: (layers, magnitude 0..30) of RandAugment (arXiv 1909.13719), as in "How to train your ViT?" (arXiv
            2106.10270), or None. torchvision's, without noise.
        random_erasing: probability that a rectangle of 2 to 33% of the image becomes noise (arXiv 1708.04896).
        mixup_alpha: Beta parameter of mixup (arXiv 1710.09412); 0 is off.
        cutmix_alpha: Beta parameter of cutmix (arXiv 1905.04899); 0 is off. With both on, every batch gets one of them.
        shift_px: largest random translation, px of the model's input, each direction; what moves in is black. A whole
            number moves by whole px, which keeps the pixels as they are; any other moves by fractions too, bilinear.
        rotation_degrees: largest random rotation about the centre, either direction, bilinear; corners become black.
        shear_degrees: largest random slant of upright lines, either direction, bilinear.
        zoom: largest random change of size as a share, larger or smaller, bilinear.
        random_crop: px of reflected edge around the image, in the smallest size that covers the model's; a crop of the
            model's size is shown (arXiv 2204.07118: simple random crop, 4 px). Not with random_resized_crop.
        auto_augment: a policy in timm's words, which it needs: "rand-m9-mstd0.5-inc1" or "3a", see `open_policy`.
        color_jitter: largest change of brightness, contrast and saturation, as a share (arXiv 2204.07118, table 1).
        scale_jitter: smallest and largest scale of an image that fits the model's size at scale 1; a crop of the
            model's size is shown, with an edge where the image is smaller (arXiv 2012.07177, large scale jittering).
            Of segmentation and detection; not with random_resized_crop.
    """

    random_resized_crop: tuple[float, float] | None = None
    horizontal_flip: float = 0.0
    randaugment: tuple[int, int] | None = None
    random_erasing: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    shift_px: float = 0
    rotation_degrees: float = 0.0
    shear_degrees: float = 0.0
    zoom: float = 0.0
    random_crop: int | None = None
    auto_augment: str | None = None
    color_jitter: float = 0.0
    scale_jitter: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        crop, rand, edge, scales = self.random_resized_crop, self.randaugment, self.random_crop, self.scale_jitter
        for name, is_met, need in (
            ("random_resized_crop", not crop or 0 < crop[0] <= crop[1] <= 1, "0 < smallest <= largest <= 1"),
            ("horizontal_flip", 0 <= self.horizontal_flip <= 1, "a probability, 0..1"),
            ("randaugment", rand is None or (rand[0] >= 0 and 0 <= rand[1] <= 30), "layers, magnitude 0..30"),
            ("auto_augment", _is_policy(self.auto_augment), "a policy such as rand-m9-mstd0.5-inc1 or 3a"),
            ("random_crop", edge is None or edge >= 0, "0 px or more"),
            ("random_crop", edge is None or crop is None, "one of random_crop and random_resized_crop"),
            ("color_jitter", 0 <= self.color_jitter <= 1, "a share, 0..1"),
            ("scale_jitter", not scales or 0.05 <= scales[0] <= scales[1] <= 10, "0.05 <= smallest <= largest <= 10"),
            ("scale_jitter", scales is None or crop is None, "one of scale_jitter and random_resized_crop"),
            ("random_erasing", 0 <= self.random_erasing <= 1, "a probability, 0..1"),
            ("mixup_alpha", self.mixup_alpha >= 0, "0 (off) or more"),
            ("cutmix_alpha", self.cutmix_alpha >= 0, "0 (off) or more"),
            ("shift_px", self.shift_px >= 0, "0 px or more"),
            ("rotation_degrees", 0 <= self.rotation_degrees <= 180, "0..180 degrees"),
            ("shear_degrees", 0 <= self.shear_degrees < 90, "0 to below 90 degrees"),
            ("zoom", 0 <= self.zoom < 1, "0 <= zoom < 1"),
        ):
            if not is_met:
                raise UserError(f"augmentation {name} = {getattr(self, name)}; needed: {need}")


def random_keys(seed: int, epoch: int, images: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    """[B] one well-mixed 64-bit number for every image in this epoch of this seed."""
    base = _stream(np.zeros(1, dtype=np.uint64), np.asarray([seed % 2**64], dtype=np.uint64))
    return _stream(_stream(base, np.asarray([epoch], dtype=np.uint64)), images)


def uniforms(keys: "NDArray[np.uint64]", count: int) -> "NDArray[np.float64]":
    """[B, count] numbers in [0, 1), independent of each other, the same for the same keys everywhere."""
    numbers = _stream(keys[:, None], np.arange(count, dtype=np.uint64)[None, :])
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _stream(state: "NDArray[np.uint64]", position: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    """The numbers at the given positions of the SplitMix64 generators (Steele, Lea, Flood 2014) of these states."""
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
        """Every image transformed, by its key."""
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

    Raises:
        UserError: the policy cannot be had, or the edge around a random crop is wider than the image.
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
    """Slant, scale and turn every image about its centre, then move it; bilinear, and what moves in is 0.

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

_POLICY = re.compile(
    r"3a|rand(-(m\d+|n\d+|p\d*\.?\d+|mstd\d*\.?\d+|mmax\d+|inc[01]))*|(original|originalr|v0|v0r)(-mstd\d*\.?\d+)?"
)
# What the largest shift is a share of: the shorter side, as in timm's own loader.
_LARGEST_SHIFT = 0.45


def _is_policy(text: str | None) -> bool:
    return text is None or _POLICY.fullmatch(text) is not None


def open_policy(policy: str, size: tuple[int, int] = (224, 224), fill: tuple[int, ...] = (128, 128, 128)) -> "_Policy":
    """What varies uint8 images [3, H, W], each by its key; shears and turns are bilinear or bicubic by chance.

    Args:
        policy: "rand-m9-mstd0.5-inc1" (arXiv 1909.13719: magnitude 9 of 10 with a standard deviation of 0.5, stronger
            with rising magnitude, two layers of which each acts in every second image), "3a" (arXiv 2204.07118, section
            3: greyscale, solarisation or blur), "original" and "v0" (AutoAugment, arXiv 1805.09501).
        size: (height, width) px.
        fill: color of what moves in, 0..255.

    Raises:
        UserError: timm is not installed.
    """
    try:
        from timm.data.auto_augment import auto_augment_transform, rand_augment_transform
    except ImportError as error:
        raise UserError(
            f"the policy {policy} is timm's, which is not installed: pip install 'hf-vit[timm]'; or choose "
            "--auto-augment none"
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
