"""Prepare pixels for a model: its scaling of pixels, and batches of images in their original sizes.

Legend: B images, C channels, H x W px (height, width), h x w patch grid.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast, final

import numpy as np
import torch
from PIL import Image
from torch import nn

from hf_vit.data.transforms import fill_patches, get_pixel_scale, keeps_shapes, pad_to_patches
from hf_vit.errors import UserError
from hf_vit.families import find_family
from hf_vit.inference.mixed_sizes import without_padding
from hf_vit.loading.graphs import GraphForImageClassification
from hf_vit.loading.model import LoadedModel

_PROBE_PX = 64
_TOLERANCE = 1e-3


@final
@dataclass(frozen=True)
class PixelScale:
    """A model's scaling of pixels in 0..1: (pixels * factor - mean) / std in every channel.

    Attributes:
        mean, std: [C].
        factor: 1 for pixels in 0..1, 255 for pixels in 0..255.
    """

    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    factor: float = 1.0

    @classmethod
    def from_processor(cls, processor: Any) -> Self:
        """Read the scaling from the fields of an image processor of transformers."""
        factor, mean, std = get_pixel_scale(processor)
        return cls(mean, std, 255 * factor)

    @classmethod
    def measure(cls, loaded: LoadedModel) -> Self:
        """Measure the scaling of any library by preparing a black, a white and a colored image."""
        if loaded.resizes:
            raise UserError(
                f"the graph {loaded.name} contains its image processor, so it cannot be attacked, corrupted or "
                "used as a teacher; give the model that it was exported from"
            )
        colors = torch.tensor([[0.0] * 3, [1.0] * 3, [0.4, 0.2, 0.8]], dtype=torch.float64)
        levels = (255 * colors).round().int().tolist()
        probes = [Image.new("RGB", (_PROBE_PX, _PROBE_PX), tuple(color)) for color in levels]
        values = loaded.prepare(probes).double()
        black, white, colored = values.mean(dim=(2, 3))
        scale = white - black
        spread = values.amax(dim=(2, 3)) - values.amin(dim=(2, 3))
        expected_values = black + colors[2] * scale
        limit = _TOLERANCE * float(scale.abs().min())
        if limit <= 0 or float(spread.max()) > limit or float((colored - expected_values).abs().max()) > limit:
            raise UserError(
                f"the image processor of {loaded.name} does more than resize, crop and normalize, so the model "
                "cannot be attacked, corrupted or used as a teacher; use an image processor with only these "
                "steps in preprocessor_config.json"
            )
        return cls(tuple((-black / scale).tolist()), tuple((1 / scale).tolist()))

    def values(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scale pixels in 0..1, [B, C, H, W], for the model."""
        mean, std = self._get_constants(pixels)
        return (pixels * self.factor - mean) / std

    def pixels(self, values: torch.Tensor) -> torch.Tensor:
        """Undo `values`: return pixels in 0..1, [B, C, H, W], up to rounding."""
        mean, std = self._get_constants(values)
        return (values * std + mean) / self.factor

    def _get_constants(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(like.new_tensor(values)[:, None, None] for values in (self.mean, self.std))  # pyright: ignore[reportReturnType]


def make_image_generator(pixels: torch.Tensor, *keys: int) -> np.random.Generator:
    """Return a generator seeded by the content of an image [C, H, W] in 0..1 and `keys`, whatever its batch is."""
    content = (pixels.detach().float().cpu() * 255).round().to(torch.uint8).contiguous()
    return np.random.default_rng([zlib.crc32(content.numpy().tobytes()), *keys])


def crop_to_patches(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Crop images [B, C, H, W] to whole patches, because our ViTs ignore the rest.

    Images for models with a convolutional stem, and for models of other libraries, are not cropped.
    """
    config: Any = getattr(model, "config", None)
    if not _is_vit(model) or getattr(config, "stage_depths", None) is not None:
        return pixel_values
    h, w = config.grid_of(*pixel_values.shape[2:])
    return pixel_values[:, :, : h * config.patch_stride[0], : w * config.patch_stride[1]]


def keep_image_sizes(loaded: LoadedModel, max_num_patches: int) -> LoadedModel:
    """Return the model with a `prepare` that keeps image sizes and returns pixel values and `patch_attention_mask`.

    An image is resized to whole patches, and reduced only if it has more than `max_num_patches`. It is not cropped, and
    stretched by at most half a patch (less than one patch if it is reduced). If the image processor has a field
    `max_num_patches`, as that of SigLIP 2, images are enlarged too (`fill_grid`). Pixels are scaled as the image
    processor does.

    Raises:
        UserError: the model is no Vision Transformer of hf_vit with a pooling layer, or `max_num_patches` is below 1.
    """
    model: Any = loaded.model
    is_graph = _is_graph_for_shapes(model)
    if not (_is_vit(model) or is_graph) or loaded.processor is None:
        raise UserError(
            f"{loaded.name} only takes images of one size; leave --max-num-patches out, or give a Vision "
            "Transformer of hf_vit (hf-vit convert converts those of other libraries)"
        )
    if not is_graph and getattr(model.base_model, "pooler", None) is None:
        raise UserError(
            f"{loaded.name} has no pooling layer, which images of different sizes need; load it with its "
            "pooling layer (add_pooling_layer=True)"
        )
    if max_num_patches < 1:
        raise UserError(f"max_num_patches is {max_num_patches}, but it must be at least 1; choose a larger number")
    prepare = partial(_prepare_images, loaded.processor, model.config.patch_stride, max_num_patches)
    return replace(loaded, model=without_padding(loaded.model), prepare=prepare)


def _prepare_images(processor: Any, patch: tuple[int, int], max_num_patches: int, images: Sequence[Image.Image]) -> Any:
    """Return the inputs of a batch; a loader's workers receive this function, so it must be importable."""
    return pad_to_patches([_prepare_image(image, processor, patch, max_num_patches) for image in images], patch)


def _is_vit(model: Any) -> bool:
    """Return whether a model is a Vision Transformer of hf_vit."""
    family = find_family(getattr(getattr(model, "config", None), "model_type", None))
    return family is not None and family.is_vit


def _is_graph_for_shapes(model: Any) -> bool:
    """Return whether a model is an exported graph of a model that reads images in their own shape."""
    return isinstance(model, GraphForImageClassification) and model.config.patch_stride is not None


def find_max_patches(loaded: LoadedModel) -> int | None:
    """Return the number of patches for which a model's own processor keeps the shape of images, as SigLIP 2's does.

    None: the processor gives images of one size, or the model does not take others.
    """
    count = getattr(loaded.processor, "max_num_patches", None)
    model = cast(Any, loaded.model)
    is_pooling = _is_vit(model) and getattr(model.base_model, "pooler", None) is not None
    takes_others = is_pooling or _is_graph_for_shapes(model)
    return count if isinstance(count, int) and count > 0 and takes_others else None


def keep_own_sizes(loaded: LoadedModel) -> LoadedModel:
    """Return the model with images in their own sizes if its processor keeps these, else the model as it is."""
    max_num_patches = find_max_patches(loaded)
    return loaded if max_num_patches is None else keep_image_sizes(loaded, max_num_patches)


def fit_grid(size: tuple[int, int], patch: tuple[int, int], max_num_patches: int) -> tuple[int, int]:
    """Return the patch grid (h, w) to which an image of `size` (height, width) px is resized."""
    (height, width), (patch_height, patch_width) = size, patch
    h, w = max(1, round(height / patch_height)), max(1, round(width / patch_width))
    if h * w <= max_num_patches:
        return h, w
    # Both sides are reduced to the area of the patches, and rounded down.
    scale = math.sqrt(max_num_patches * patch_height * patch_width / (height * width))
    h, w = max(1, int(height * scale / patch_height)), max(1, int(width * scale / patch_width))
    # A long narrow image, whose short side was rounded up to 1 patch, may still have too many.
    return min(h, max_num_patches // w or 1), min(w, max_num_patches // h or 1)


def _prepare_image(image: Image.Image, processor: Any, patch: tuple[int, int], max_num_patches: int) -> torch.Tensor:
    """Resize an RGB image to whole patches and scale it: [C, H, W]."""
    if keeps_shapes(processor):
        return fill_patches(image, processor, patch, max_num_patches)
    h, w = fit_grid((image.height, image.width), patch, max_num_patches)
    size = (w * patch[1], h * patch[0])
    resized = image if image.size == size else image.resize(size, processor.resample)
    done_steps = [step for step in ("do_resize", "do_center_crop", "do_pad") if getattr(processor, step, None)]
    return processor(images=resized, return_tensors="pt", **dict.fromkeys(done_steps, False))["pixel_values"][0]
