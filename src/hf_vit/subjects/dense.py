"""What models of dense prediction say of images, in the images' own coordinates.

Legend: B batch, C channels, H x W px of an image, n objects.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_vit.families import DenseTask
from hf_vit.models.detection_hf_vit import HfMaskRCNNForObjectDetection, HfMaskRCNNOutput

# What the names of transformers' classes end in, and the Auto classes' behind "AutoModel".
TASKS: dict[str, DenseTask] = {
    "ForSemanticSegmentation": "segmentation",
    "ForUniversalSegmentation": "segmentation",
    "ForObjectDetection": "detection",
}


def dense_task_of(model: nn.Module) -> DenseTask | None:
    """What a model of transformers or of this package predicts for the places of an image; None: nothing."""
    name = type(model).__name__
    return next((task for ending, task in TASKS.items() if name.endswith(ending)), None)


@torch.no_grad()
def segment(
    model: nn.Module, processor: Any, pixel_values: torch.Tensor, sizes: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """The class of every pixel, [H, W] for each image, by the image processor's own post-processing.

    Args:
        model: of the task "segmentation", in evaluation mode.
        processor: the image processor saved with it.
        pixel_values: [B, C, ..], as the processor makes them.
        sizes: (height, width) of each image before that.
    """
    return class_maps(model(pixel_values=pixel_values), processor, sizes)


def class_maps(outputs: Any, processor: Any, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """As `segment`, of what the model returned."""
    return processor.post_process_semantic_segmentation(outputs, target_sizes=[tuple(size) for size in sizes])


@torch.no_grad()
def detect(
    model: nn.Module,
    processor: Any,
    pixel_values: torch.Tensor,
    sizes: Sequence[tuple[int, int]],
    threshold: float = 0.0,
) -> list[dict[str, torch.Tensor]]:
    """The objects of each image, by the image processor's own post-processing, or torchvision's.

    Args:
        model: of the task "detection", in evaluation mode.
        processor: the image processor saved with it.
        pixel_values: [B, C, ..], as the processor makes them.
        sizes: (height, width) of each image before that.
        threshold: scores must exceed it; Mask R-CNN has a threshold of its own besides.

    Returns:
        boxes [n, 4] (x1, y1, x2, y2 in px of the image), labels [n] and scores [n], the best first; of a Mask R-CNN
        that has them, masks [n, H, W], bool.
    """
    targets = [(int(height), int(width)) for height, width in sizes]
    in_image = {"target_sizes": targets} if isinstance(model, HfMaskRCNNForObjectDetection) else {}
    return detections(model(pixel_values=pixel_values, **in_image), processor, targets, threshold)


def detections(
    outputs: Any, processor: Any, sizes: Sequence[tuple[int, int]], threshold: float = 0.0
) -> list[dict[str, torch.Tensor]]:
    """As `detect`, of what the model returned; a Mask R-CNN's are of the sizes that it was given."""
    if isinstance(outputs, HfMaskRCNNOutput):
        told = outputs.detections or []
        return [_sorted({name: value[each["scores"] > threshold] for name, value in each.items()}) for each in told]
    return list(map(_sorted, processor.post_process_object_detection(outputs, threshold, list(sizes))))


def _sorted(objects: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    order = objects["scores"].argsort(descending=True, stable=True)
    ordered = {name: value[order] for name, value in objects.items()}
    return ordered | ({"masks": ordered["masks"][:, 0] >= 0.5} if "masks" in ordered else {})
