"""From what a model is fed back to pixels in 0..1, whichever library scales them.

Legend: B images, C channels, H x W px.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit.families import family_of
from hf_vit.subjects.subject import Subject

_PROBE_PX = 64
_TOLERANCE = 1e-3


@final
@dataclass(frozen=True)
class PixelScale:
    """How pixels in 0..1 are scaled before a model sees them: (pixels * factor - mean) / std, per channel.

    Attributes:
        mean, std: [C].
        factor: 1 where pixels stay in 0..1, 255 where nothing rescales them.
    """

    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    factor: float = 1.0

    @classmethod
    def of_processor(cls, processor: Any) -> Self:
        """What an image processor of transformers says of itself."""
        factor = 255 * float(processor.rescale_factor) if getattr(processor, "do_rescale", True) else 255.0
        if not getattr(processor, "do_normalize", True):
            return cls(factor=factor)
        mean, std = (
            (value,) * 3 if isinstance(value, int | float) else tuple(value)
            for value in (processor.image_mean, processor.image_std)
        )
        return cls(mean, std, factor)

    @classmethod
    def of(cls, subject: Subject) -> Self:
        """What any library does to pixels, measured by preparing a black, a white and a gray image.

        Raises:
            UserError: what is done to a pixel is no scaling.
        """
        from PIL import Image

        if subject.resizes:
            raise UserError(
                f"{subject.name} resizes images itself; attacks and corruptions change what a model is "
                "fed: give the model that was exported"
            )
        grays = [Image.new("RGB", (_PROBE_PX, _PROBE_PX), (level, level, level)) for level in (0, 255, 102)]
        values = subject.prepare(grays).double()
        black, white, gray = values.mean(dim=(2, 3))
        span = white - black
        even = values.amax(dim=(2, 3)) - values.amin(dim=(2, 3))
        expected = black + 0.4 * span
        limit = _TOLERANCE * float(span.abs().min())
        if limit <= 0 or float(even.max()) > limit or float((gray - expected).abs().max()) > limit:
            raise UserError(
                f"the image processor of {subject.name} does more to a pixel than scale it; needed for attacks and "
                "corruptions: one that only resizes, crops and scales each channel"
            )
        return cls(tuple((-black / span).tolist()), tuple((1 / span).tolist()))

    def values(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels in 0..1 [B, C, H, W] -> as the model is fed."""
        mean, std = self._constants(pixels)
        return (pixels * self.factor - mean) / std

    def pixels(self, values: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] as the model is fed -> pixels in 0..1, but for rounding."""
        mean, std = self._constants(values)
        return (values * std + mean) / self.factor

    def _constants(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(like.new_tensor(values)[:, None, None] for values in (self.mean, self.std))  # pyright: ignore[reportReturnType]


def image_generator(pixels: torch.Tensor, *keys: int) -> np.random.Generator:
    """Randomness of one image [C, H, W] in 0..1: by its content and `keys`, wherever it stands in whichever batch."""
    content = (pixels.detach().float().cpu() * 255).round().to(torch.uint8).contiguous()
    return np.random.default_rng([zlib.crc32(content.numpy().tobytes()), *keys])


def seen_part(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Images [B, C, H, W] without what makes no whole patch, of which our ViTs see nothing.

    A stem looks beyond the patches, and what other libraries do with such images is theirs: these stay as they are.
    """
    config: Any = getattr(model, "config", None)
    family = family_of(getattr(config, "model_type", None))
    if family is None or not family.is_vit or getattr(config, "stage_depths", None) is not None:
        return pixel_values
    h, w = config.grid_of(*pixel_values.shape[2:])
    return pixel_values[:, :, : h * config.patch_stride[0], : w * config.patch_stride[1]]
