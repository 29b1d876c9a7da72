"""A model fed with every image in its own size and shape, several sizes in a batch (as NaViT, arXiv 2307.06304).

Legend: B images, H x W px, h x w patch grid.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hf_vit.errors import UserError
from hf_vit.families import family_of
from hf_vit.inference.mixed_sizes import without_padding
from hf_vit.subjects.subject import Subject

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BatchFeature


def at_own_size(subject: Subject, max_num_patches: int) -> Subject:
    """The same model with a `prepare` that gives pixel values and their `patch_attention_mask`, as a `BatchFeature`.

    An image is resized to the nearest whole patches, and shrunk only where it holds more than `max_num_patches` of
    them; it is scaled as the image processor does it, and neither cropped nor stretched by more than half a patch (by
    less than a whole one where it is shrunk).

    Raises:
        UserError: the model takes no batches of mixed sizes.
    """
    model: Any = subject.model
    family = family_of(getattr(getattr(model, "config", None), "model_type", None))
    if family is None or not family.is_vit or subject.processor is None:
        raise UserError(
            f"{subject.name} takes images of one size; --max-num-patches is for Vision Transformers of hf_vit "
            "(hf-vit convert makes one of another library's)"
        )
    if getattr(model.base_model, "pooler", None) is None:
        raise UserError(f"{subject.name} pools nothing, so that padding would count; load it with its pooling layer")
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
    """[C, H, W] of an RGB image."""
    h, w = own_grid((image.height, image.width), patch, max_num_patches)
    size = (w * patch[1], h * patch[0])
    resized = image if image.size == size else image.resize(size, processor.resample)
    fixed = {f"do_{step}": False for step in ("resize", "center_crop", "pad") if getattr(processor, f"do_{step}", None)}
    return processor(images=resized, return_tensors="pt", **fixed)["pixel_values"][0]


def _batch(images: Sequence[torch.Tensor], patch: tuple[int, int]) -> "BatchFeature":
    """Images [C, H, W] at the top left of [B, C, H, W], and where they are, [B, h, w]."""
    from transformers import BatchFeature

    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    pixel_values = images[0].new_zeros(len(images), len(images[0]), height, width)
    mask = torch.zeros(len(images), height // patch[0], width // patch[1], dtype=torch.int64)
    for number, image in enumerate(images):
        pixel_values[number, :, : image.shape[1], : image.shape[2]] = image
        mask[number, : image.shape[1] // patch[0], : image.shape[2] // patch[1]] = 1
    return BatchFeature({"pixel_values": pixel_values, "patch_attention_mask": mask})
