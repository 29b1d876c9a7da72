"""Policies of RandAugment, AutoAugment and 3-Augment with the scale and the noise of timm's code, which runs them."""

import random
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from hf_vit.errors import UserError

_POLICY = re.compile(
    r"3a|rand(-(m\d+|n\d+|p\d*\.?\d+|mstd\d*\.?\d+|mmax\d+|inc[01]))*|(original|originalr|v0|v0r)(-mstd\d*\.?\d+)?"
)
# What the largest shift is a share of: the shorter side, as in timm's own loader.
_LARGEST_SHIFT = 0.45


def is_policy(text: str) -> bool:
    """Whether a text has the form of one of timm's policies."""
    return _POLICY.fullmatch(text) is not None


def open_policy(
    policy: str, size: tuple[int, int] = (224, 224), fill: tuple[int, ...] = (128, 128, 128)
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """What varies a uint8 image [3, H, W], given a seed of its own; shears and turns are bilinear or bicubic by chance.

    Args:
        policy: "rand-m9-mstd0.5-inc1" (arXiv 1909.13719: magnitude 9 of 10 with a standard deviation of 0.5, stronger
            with rising magnitude, two layers of which each acts in every second image), "3a" (arXiv 2204.07118, section
            3: greyscale, solarisation or blur), "original" and "v0" (AutoAugment, arXiv 1805.09501).
        size: (height, width) px.
        fill: colour of what moves in, 0..255.

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

    def varied(image: torch.Tensor, seed: int) -> torch.Tensor:
        with _seeded(seed):
            changed = vary(Image.fromarray(image.permute(1, 2, 0).numpy()))
        return torch.from_numpy(np.array(changed)).permute(2, 0, 1)

    return varied


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """Black for the 0 bits that the strongest level leaves, which Pillow refuses."""
    if bits < 1:
        return image.point(lambda _: 0)
    return image if bits >= 8 else ImageOps.posterize(image, bits)


@contextmanager
def _seeded(seed: int) -> Generator[None]:
    """Python's and numpy's generators, from which timm draws, under this seed, and afterwards as they were."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
