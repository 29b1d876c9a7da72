"""From what a model is fed back to pixels in 0..1, whichever library scales them.

Legend: B images, C channels, H x W px.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import torch
from torch import nn

from hf_vit.data.transforms import pixel_scale
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
        factor, mean, std = pixel_scale(processor)
        return cls(mean, std, 255 * factor)

    @classmethod
    def of(cls, subject: Subject) -> Self:
        """What any library does to pixels, measured by preparing a black, a white and a coloured image.

        Raises:
            UserError: what is done to a pixel is no scaling.
        """
        from PIL import Image

        if subject.resizes:
            raise UserError(
                f"{subject.name} resizes images itself, and what it is fed cannot be changed (attacks, corruptions, "
                "teachers): give the model that was exported"
            )
        colours = torch.tensor([[0.0] * 3, [1.0] * 3, [0.4, 0.2, 0.8]], dtype=torch.float64)
        levels = (255 * colours).round().int().tolist()
        values = subject.prepare([Image.new("RGB", (_PROBE_PX, _PROBE_PX), tuple(each)) for each in levels]).double()
        black, white, coloured = values.mean(dim=(2, 3))
        span = white - black
        even = values.amax(dim=(2, 3)) - values.amin(dim=(2, 3))
        expected = black + colours[2] * span
        limit = _TOLERANCE * float(span.abs().min())
        if limit <= 0 or float(even.max()) > limit or float((coloured - expected).abs().max()) > limit:
            raise UserError(
                f"the image processor of {subject.name} does more to a pixel than scale it; attacks, corruptions and "
                "teachers need one that only resizes, crops and scales each channel"
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
