"""How a model is fed: the scale of its pixels, and every image in its own size and shape.

Legend: B images, C channels, H x W px, h x w patch grid.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np
import torch
from torch import nn

from hf_vit.data.transforms import pixel_scale
from hf_vit.errors import UserError
from hf_vit.families import family_of
from hf_vit.inference.mixed_sizes import without_padding
from hf_vit.loading.model import LoadedModel

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BatchFeature


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
        """Return what an image processor of transformers says of itself."""
        factor, mean, std = pixel_scale(processor)
        return cls(mean, std, 255 * factor)

    @classmethod
    def of(cls, subject: LoadedModel) -> Self:
        """Return what any library does to pixels, measured by preparing a black, a white and a coloured image.

        Raises:
            UserError: what is done to a pixel is no scaling.
        """
        from PIL import Image

        if subject.resizes:
            raise UserError(
                f"{subject.name} resizes images inside the graph, so attacks, corruptions and teachers "
                "cannot use it; give the model that was exported"
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
                f"the image processor of {subject.name} does more than resize, crop and normalize, which "
                "attacks, corruptions and teachers need"
            )
        return cls(tuple((-black / span).tolist()), tuple((1 / span).tolist()))

    def values(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels in 0..1 [B, C, H, W] -> as the model is fed."""
        mean, std = self._constants(pixels)
        return (pixels * self.factor - mean) / std

    def pixels(self, values: torch.Tensor) -> torch.Tensor:
        """Return [B, C, H, W] as the model is fed -> pixels in 0..1, but for rounding."""
        mean, std = self._constants(values)
        return (values * std + mean) / self.factor

    def _constants(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(like.new_tensor(values)[:, None, None] for values in (self.mean, self.std))  # pyright: ignore[reportReturnType]


def image_generator(pixels: torch.Tensor, *keys: int) -> np.random.Generator:
    """Randomness of one image [C, H, W] in 0..1: by its content and `keys`, wherever it stands in whichever batch."""
    content = (pixels.detach().float().cpu() * 255).round().to(torch.uint8).contiguous()
    return np.random.default_rng([zlib.crc32(content.numpy().tobytes()), *keys])


def seen_part(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return images [B, C, H, W] without what makes no whole patch, of which our ViTs see nothing.

    A stem looks beyond the patches, and what other libraries do with such images is theirs: these stay as they are.
    """
    config: Any = getattr(model, "config", None)
    family = family_of(getattr(config, "model_type", None))
    if family is None or not family.is_vit or getattr(config, "stage_depths", None) is not None:
        return pixel_values
    h, w = config.grid_of(*pixel_values.shape[2:])
    return pixel_values[:, :, : h * config.patch_stride[0], : w * config.patch_stride[1]]


def at_own_size(subject: LoadedModel, max_num_patches: int) -> LoadedModel:
    """Return the same model with a `prepare` that gives pixel values and their `patch_attention_mask`, as a
    `BatchFeature`.

    An image is resized to the nearest whole patches, and shrunk only where it holds more than `max_num_patches` of
    them; it is scaled as the image processor does it, and neither cropped nor stretched by more than half a patch (by
    less than a whole one where it is shrunk).
    """
    model: Any = subject.model
    family = family_of(getattr(getattr(model, "config", None), "model_type", None))
    if family is None or not family.is_vit or subject.processor is None:
        raise UserError(
            f"{subject.name} takes images of one size; --max-num-patches is for Vision Transformers of "
            "hf_vit (hf-vit convert converts those of other libraries)"
        )
    if getattr(model.base_model, "pooler", None) is None:
        raise UserError(f"{subject.name} has no pooling layer to mask padding with; load it with its pooling layer")
    if max_num_patches < 1:
        raise UserError(f"max_num_patches {max_num_patches} must be at least 1")
    patch, processor = model.config.patch_stride, subject.processor

    def prepare(images: "Sequence[Image]") -> Any:
        return _batch([_prepared(image, processor, patch, max_num_patches) for image in images], patch)

    return replace(subject, model=without_padding(subject.model), prepare=prepare)


def own_grid(size: tuple[int, int], patch: tuple[int, int], max_num_patches: int) -> tuple[int, int]:
    """(h, w): the patches that an image of `size` (height, width) px is resized to."""
    h, w = (max(1, round(side / px)) for side, px in zip(size, patch, strict=True))
    if h * w > max_num_patches:
        scale = math.sqrt(max_num_patches * patch[0] * patch[1] / (size[0] * size[1]))
        h, w = (max(1, int(side * scale / px)) for side, px in zip(size, patch, strict=True))
        h, w = min(h, max_num_patches // w or 1), min(w, max_num_patches // h or 1)
    return h, w


def _prepared(image: "Image", processor: Any, patch: tuple[int, int], max_num_patches: int) -> torch.Tensor:
    """Return [C, H, W] of an RGB image."""
    h, w = own_grid((image.height, image.width), patch, max_num_patches)
    size = (w * patch[1], h * patch[0])
    resized = image if image.size == size else image.resize(size, processor.resample)
    fixed = {f"do_{step}": False for step in ("resize", "center_crop", "pad") if getattr(processor, f"do_{step}", None)}
    return processor(images=resized, return_tensors="pt", **fixed)["pixel_values"][0]


def _batch(images: Sequence[torch.Tensor], patch: tuple[int, int]) -> "BatchFeature":
    """Return images [C, H, W] at the top left of [B, C, H, W], and where they are, [B, h, w]."""
    from transformers import BatchFeature

    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    pixel_values = images[0].new_zeros(len(images), len(images[0]), height, width)
    mask = torch.zeros(len(images), height // patch[0], width // patch[1], dtype=torch.int64)
    for number, image in enumerate(images):
        pixel_values[number, :, : image.shape[1], : image.shape[2]] = image
        mask[number, : image.shape[1] // patch[0], : image.shape[2] // patch[1]] = 1
    return BatchFeature({"pixel_values": pixel_values, "patch_attention_mask": mask})
