"""Images together with their masks or boxes: torchvision's v2 transforms on all at once, a function of the image's key.

Examples of segmentation: {"pixel_values": float [3, H, W], "labels": long [H, W]}, where `IGNORED` is not judged.
Examples of detection: {"pixel_values": float [3, H, W], "boxes": float [n, 4] as x1 y1 x2 y2 px of these pixels,
"class_labels": long [n], "masks": uint8 [n, H, W] where the data has them, "original_size": (H, W) px}.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from hf_vit.data.augmentation import AugmentationConfig, random_keys, seeded
from hf_vit.data.dense.annotations import IGNORED, Target
from hf_vit.data.images import to_rgb
from hf_vit.data.transforms import EvalTransform, input_size, interpolation_of, mean_colour, scaling
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import BaseImageProcessor

Example = dict[str, Any]
# What is varied of images, masks and boxes together.
_JOINT = ("random_resized_crop", "scale_jitter", "horizontal_flip", "color_jitter")
_PER_OBJECT = ("class_labels", "masks", "area", "iscrowd")


class DenseEvalTransform:
    """Images as the processor makes them; masks resized to the same by the nearest pixel, boxes scaled along.

    Objects of crowds stay, and the examples of detection tell "area" (px of the original) and "iscrowd" too.
    """

    def __init__(self, processor: "BaseImageProcessor", target: Target) -> None:
        self.target: Target = target
        self._images = EvalTransform(processor)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: every epoch sees the same."""

    def prepare(self, rows: Mapping[str, Sequence[Any]]) -> list[Example]:
        """Examples of a batch of rows {"image", "mask" or "objects"}: all there is to do, once and for all."""
        images: list[Image.Image] = [to_rgb(image) for image in rows["image"]]
        pixels = self._images.prepare(images)
        size = int(pixels[0].shape[-1]), int(pixels[0].shape[-2])
        if self.target == "mask":
            masks = [mask.resize(size, Image.Resampling.NEAREST) for mask in rows["mask"]]
            return [
                {"pixel_values": values, "labels": torch.from_numpy(np.array(mask)).long()}
                for values, mask in zip(pixels, masks, strict=True)
            ]
        return [
            {"pixel_values": values, **_scaled(image.size, objects, size)}
            for values, image, objects in zip(pixels, images, rows["objects"], strict=True)
        ]

    def finish(self, prepared: Sequence[Example], indices: "NDArray[np.uint64]") -> Sequence[Example]:
        """Nothing more."""
        return prepared


class DenseTrainTransform:
    """Varied images with their masks or boxes: crop by scale or area, flip, colour.

    Without `set_epoch`, the variation is drawn from torch's global generator; with it, it is a function of seed, epoch
    and the image's index alone. Objects of which a crop leaves nothing, or less than 1 px a side, are dropped, and
    crowds are not learnt.

    Args:
        processor: gives size, interpolation, scale, mean and standard deviation.
        target: "mask" or "objects".
        augmentation: what to vary; without a crop the whole image is shown, resized as the processor does.
        seed: of the variation.

    Raises:
        UserError: the augmentation has what does not move masks and boxes along.
    """

    def __init__(
        self,
        processor: "BaseImageProcessor",
        target: Target,
        augmentation: AugmentationConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.target: Target = target
        self.augmentation = augmentation or AugmentationConfig()
        self.seed = seed
        self._vary = _variation(self.augmentation, processor, target)
        self._factor, self._offset = scaling(processor)
        # Shared, so that loader workers that live on see the next epoch too.
        self._epoch = torch.tensor(-1).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """From now on vary as in this epoch."""
        self._epoch.fill_(epoch)

    def prepare(self, rows: Mapping[str, Sequence[Any]]) -> list[Example]:
        """The part without chance: everything decoded, in its own size."""
        from torchvision.tv_tensors import Image as Pixels
        from torchvision.tv_tensors import Mask

        images: list[Image.Image] = [to_rgb(image) for image in rows["image"]]
        pixels = [Pixels(torch.from_numpy(np.array(image)).permute(2, 0, 1)) for image in images]
        if self.target == "mask":
            labels = [Mask(torch.from_numpy(np.array(mask))) for mask in rows["mask"]]
            return [{"pixels": image, "labels": mask} for image, mask in zip(pixels, labels, strict=True)]
        return [
            {"pixels": values, **_tensors(image.size, _without_crowds(objects))}
            for values, image, objects in zip(pixels, images, rows["objects"], strict=True)
        ]

    def finish(self, prepared: Sequence[Example], indices: "NDArray[np.uint64]") -> list[Example]:
        """Vary and scale; `indices` tell the images apart."""
        epoch = int(self._epoch)
        if epoch < 0:
            keys = torch.randint(2**63 - 1, (len(prepared),)).numpy().astype(np.uint64)
        else:
            keys = random_keys(self.seed, epoch, indices)
        return [self._varied(example, key) for example, key in zip(prepared, keys.tolist(), strict=True)]

    def _varied(self, example: Example, key: int) -> Example:
        with seeded(key):
            varied = self._vary(dict(example))
        pixels = varied.pop("pixels").as_subclass(torch.Tensor)
        plain = {
            name: value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value
            for name, value in varied.items()
        }
        if self.target == "mask":
            plain["labels"] = plain["labels"].long()
        else:
            del plain["area"], plain["iscrowd"]  # of the whole objects, and 0
        if "masks" in plain:  # a crop may cut into a box and miss what is in it
            seen = (plain["masks"] != 0).flatten(1).any(1)
            plain |= {name: plain[name][seen] for name in ("boxes", "class_labels", "masks")}
        return {"pixel_values": pixels * self._factor + self._offset, **plain}


def dense_transforms(
    processor: "BaseImageProcessor", target: Target, augmentation: AugmentationConfig | None = None, seed: int = 0
) -> tuple[DenseTrainTransform, DenseEvalTransform]:
    """Both transforms of a model for segmentation ("mask") or detection ("objects"): (training, evaluation)."""
    return DenseTrainTransform(processor, target, augmentation, seed), DenseEvalTransform(processor, target)


def refuse_apart(augmentation: AugmentationConfig) -> None:
    """Refuse what would vary images apart from their masks and boxes.

    Raises:
        UserError: there is something of the kind; the message names it.
    """
    for field in fields(augmentation):
        if field.name not in _JOINT and getattr(augmentation, field.name) != field.default:
            raise UserError(
                f"augmentation {field.name} does not move masks and boxes along; for segmentation and detection there "
                f"are {', '.join(_JOINT)}"
            )


def _variation(augmentation: AugmentationConfig, processor: "BaseImageProcessor", target: Target) -> Any:
    from torchvision.transforms import v2
    from torchvision.tv_tensors import Image as Pixels
    from torchvision.tv_tensors import Mask

    refuse_apart(augmentation)
    size, interpolation = input_size(processor), interpolation_of(processor)
    fill: Any = {Pixels: mean_colour(processor), Mask: IGNORED if target == "mask" else 0}
    steps: list[Any] = []
    if augmentation.scale_jitter is not None:
        steps += [
            _ScaleJitter(size, augmentation.scale_jitter, interpolation),
            v2.RandomCrop(size, pad_if_needed=True, fill=fill),
        ]
    elif augmentation.random_resized_crop is not None:
        steps.append(v2.RandomResizedCrop(size, augmentation.random_resized_crop, interpolation=interpolation))
    else:
        steps.append(v2.Resize(size, interpolation))
    if augmentation.horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(augmentation.horizontal_flip))
    if augmentation.color_jitter:
        steps.append(v2.ColorJitter(*(augmentation.color_jitter,) * 3))
    if target == "objects":
        steps += [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=1.0, labels_getter=_per_object)]
    return v2.Compose(steps)


class _ScaleJitter:
    """torchvision's of the same name, with no side below 1 px."""

    def __init__(self, size: tuple[int, int], scales: tuple[float, float], interpolation: Any) -> None:
        self.size, self.scales, self.interpolation = size, scales, interpolation

    def __call__(self, example: Example) -> Example:
        from torchvision.transforms import v2

        height, width = example["pixels"].shape[-2:]
        low, high = self.scales
        scale = low + (high - low) * float(torch.rand(()))
        scale *= min(self.size[0] / height, self.size[1] / width)
        resized: Example = v2.Resize([max(1, round(height * scale)), max(1, round(width * scale))], self.interpolation)(
            example
        )
        return resized


def _per_object(example: Example) -> tuple[torch.Tensor, ...]:
    return tuple(example[name] for name in _PER_OBJECT if name in example)


def _tensors(size: tuple[int, int], objects: Mapping[str, Sequence[Any]]) -> Example:
    """The objects of an image of (width, height) px, in its own size."""
    from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Mask

    width, height = size
    corners = torch.tensor(objects["bbox"], dtype=torch.float32).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    boxes: Any = BoundingBoxes(corners, format=BoundingBoxFormat.XYXY, canvas_size=(height, width))  # pyright: ignore[reportCallIssue]
    tensors: Example = {
        "boxes": boxes,
        "class_labels": torch.tensor(objects["category"], dtype=torch.int64),
        "area": torch.tensor(objects["area"], dtype=torch.float32),
        "iscrowd": torch.tensor(objects["iscrowd"], dtype=torch.int64),
        "original_size": (height, width),
    }
    if "segmentation" in objects:
        drawn = [
            np.zeros((height, width), bool) if mask is None else np.array(mask) for mask in objects["segmentation"]
        ]
        stacked = np.stack(drawn) if drawn else np.zeros((0, height, width))
        tensors["masks"] = Mask(torch.from_numpy(stacked.astype(np.uint8)))
    return tensors


def _without_crowds(objects: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    single = [row for row, crowd in enumerate(objects["iscrowd"]) if not crowd]
    return {name: [values[row] for row in single] for name, values in objects.items()}


def _scaled(size: tuple[int, int], objects: Mapping[str, Sequence[Any]], target: tuple[int, int]) -> Example:
    """The objects of an image of (width, height) px, for the image resized to `target`."""
    tensors = _tensors(size, objects)
    across, down = target[0] / size[0], target[1] / size[1]
    boxes = tensors["boxes"].as_subclass(torch.Tensor) * torch.tensor([across, down, across, down])
    scaled = {**tensors, "boxes": boxes}
    if "masks" in tensors:
        drawn = [Image.fromarray(mask).resize(target, Image.Resampling.NEAREST) for mask in tensors["masks"].numpy()]
        stacked = np.stack([np.array(m) for m in drawn]) if drawn else np.zeros((0, *target[::-1]), dtype=np.uint8)
        scaled["masks"] = torch.from_numpy(stacked)
    return scaled
