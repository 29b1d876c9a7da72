"""From what a model is fed back to pixels in 0..1, whichever library scales them.

Legend: B batch, C channels, H x W px.
"""

import zlib
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from hf_vit.errors import UserError
from hf_vit.subjects.subject import Subject

_PROBE_PX = 64
_TOLERANCE = 1e-3


@final
@dataclass(frozen=True)
class PixelScale:
    """How a model's image processor scales pixels: value = black + pixel * (white - black), per channel.

    Attributes:
        black: [1, C, 1, 1], what a black pixel becomes.
        span: [1, C, 1, 1], white - black: 1 / standard deviation for the usual processors.
    """

    black: torch.Tensor
    span: torch.Tensor

    @classmethod
    def of(cls, subject: Subject) -> "PixelScale":
        """Measured by preparing a black, a white and a gray image.

        Raises:
            UserError: what the processor does to a pixel is no scaling.
        """
        from PIL import Image

        grays = [Image.new("RGB", (_PROBE_PX, _PROBE_PX), (level, level, level)) for level in (0, 255, 102)]
        values = subject.prepare(grays)
        black, white, gray = values.mean(dim=(2, 3))[:, None, :, None, None]
        span = white - black
        even = values.amax(dim=(2, 3)) - values.amin(dim=(2, 3))
        expected = black + 0.4 * span
        limit = _TOLERANCE * float(span.abs().min())
        if limit <= 0 or float(even.max()) > limit or float((gray - expected).abs().max()) > limit:
            raise UserError(
                f"the image processor of {subject.name} does more to a pixel than scale it; needed for attacks and "
                "corruptions: one that only resizes, crops and scales each channel"
            )
        weight = next(subject.model.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return cls(*(part.to(weight.device, dtype) for part in (black, span)))

    def pixels(self, values: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] as the model is fed -> pixels in 0..1."""
        return ((values - self.black) / self.span).clamp(0, 1)

    def values(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels in 0..1 [B, C, H, W] -> as the model is fed."""
        return self.black + pixels * self.span


def image_generator(pixels: torch.Tensor, *keys: int) -> np.random.Generator:
    """Randomness of one image [C, H, W] in 0..1: by its content and `keys`, wherever it stands in whichever batch."""
    content = (pixels.detach().float().cpu() * 255).round().to(torch.uint8).contiguous()
    return np.random.default_rng([zlib.crc32(content.numpy().tobytes()), *keys])
