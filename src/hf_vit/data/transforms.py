"""From Pillow images to `pixel_values`: exactly the saved image processor's numbers, varied in training."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from PIL import Image

from hf_vit.data.annotations import IGNORED, Target
from hf_vit.data.augmentation import AugmentationConfig, Augmenter, Seeded, random_keys, seeded
from hf_vit.data.images import decode_image, each_in_threads
from hf_vit.errors import UserError, first_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torchvision.transforms.v2 import InterpolationMode
    from transformers import BaseImageProcessor, PreTrainedConfig, ViTImageProcessor


def make_processor(config: "PreTrainedConfig", **kwargs: Any) -> "ViTImageProcessor":
    """Return the image processor that is saved beside a model: resize to the model's size, then scale to [-1, 1].

    Args:
        config: a model's configuration with `image_size` (px, int or (h, w)) and `num_channels`.
        **kwargs: of ViTImageProcessor, such as image_mean, image_std, resample.

    Raises:
        UserError: the model does not take RGB images.
    """
    from transformers import ViTImageProcessor

    if config.num_channels != 3:
        raise UserError(f"the model takes {config.num_channels} channels and images are RGB; build it with 3 channels")
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    # do_convert_rgb: its default None crashes on grayscale images once the processor is reloaded.
    defaults: dict[str, Any] = {
        "size": {"height": height, "width": width},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
    }
    return ViTImageProcessor(**(defaults | kwargs))


class _Unvaried:
    """What a model is judged by: every epoch sees the same, and a collator must not mix it."""

    mixable = False

    def finish(self, prepared: Sequence[Any], indices: "NDArray[np.uint64]") -> Sequence[Any]:
        """Nothing more."""
        return prepared

    def set_epoch(self, epoch: int) -> None:
        """Nothing: every epoch sees the same."""


class _Varied:
    """What a model learns from. Without `set_epoch`, the variation is drawn from torch's global generator, as
    torchvision's own transforms do; with it, it is a function of seed, epoch and image alone."""

    mixable = True

    def __init__(self, augmentation: AugmentationConfig | None, seed: int) -> None:
        self.augmentation, self.seed = augmentation or AugmentationConfig(), seed
        # Shared, so that loader workers that live on see the next epoch too.
        self._epoch = torch.tensor(-1).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose augmentation is drawn from now on."""
        self._epoch.fill_(epoch)

    def _keys(self, indices: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
        epoch = int(self._epoch)
        if epoch < 0:
            return torch.randint(2**63 - 1, (len(indices),)).numpy().astype(np.uint64)
        return random_keys(self.seed, epoch, indices)


class EvalTransform(_Unvaried):
    """Batch function for `Dataset.with_transform`: what the image processor makes of the images as RGB.

    For transformers' ViT processors the same numbers (on Pillow to 1e-6) are made by their libraries directly: faster.
    Grayscale, palette and RGBA images come out the same when given to the processor directly; 16-bit ones do not (see
    `to_rgb`), nor does transformers' pipeline look at transparency. Images may be undecoded, see `decode_image`.
    """

    def __init__(self, processor: "BaseImageProcessor") -> None:
        self.processor = processor
        self._direct = _direct(processor)

    def prepare(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Return [3, H, W] float32 for every image: all there is to do, once and for all."""
        return list(self.batch(images))

    def batch(self, images: Sequence[Any]) -> torch.Tensor:
        """Return the same in one tensor, [B, 3, H, W]."""
        rgb = each_in_threads(decode_image, images)
        if self._direct is None:
            try:
                return self.processor(images=rgb, return_tensors="pt")["pixel_values"]
            except ValueError as error:
                raise UserError(
                    f"the image processor cannot batch these images ({first_line(error):.200}); let it "
                    "resize or crop all images to one size in preprocessor_config.json"
                ) from error
        with torch.inference_mode(False):  # which is each thread's own, and what it makes no other may write to
            values = torch.empty(len(images), 3, *input_size(self.processor))
            each_in_threads(self._direct, rgb, values)
        return values

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        values = self.prepare(batch["image"])
        return {"pixel_values": values, "label": list(batch["label"]), "mixable": [False] * len(values)}


class TrainTransform(_Varied):
    """Batch function for `Dataset.with_transform`: varied images, which `TransformedImages` tells apart by their
    indices and this function by their contents.

    Args:
        processor: gives size, interpolation, scale, mean and standard deviation.
        augmentation: what to vary.
        seed: of the variation.
        distort: what else is done to every varied image, uint8 [3, H, W]; drawn from torch's generator, which is seeded
            for each.
    """

    def __init__(
        self,
        processor: "BaseImageProcessor",
        augmentation: AugmentationConfig | None = None,
        seed: int = 0,
        distort: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        from torchvision.transforms import v2

        super().__init__(augmentation, seed)
        if self.augmentation.scale_jitter is not None:
            raise UserError(
                "augmentation scale_jitter works for segmentation and detection only; use random_resized_crop"
            )
        self.processor = processor
        size, interpolation = input_size(processor), interpolation_of(processor)
        self._augment = Augmenter(self.augmentation, size, interpolation, mean_color(processor))
        self._distort = Seeded(distort, 2) if distort else None
        # Normal noise a pixel, of normalized images, as DeiT's (arXiv 2012.12877, table 9).
        erasing = self.augmentation.random_erasing
        self._erase = Seeded(v2.RandomErasing(erasing, value=cast(Any, "random")), 3) if erasing else None
        self._factor, self._offset = scaling(processor)

    def prepare(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Return the part without chance: uint8 [3, H, W], of the model's size unless a crop is still to come."""
        rgb = each_in_threads(decode_image, images)
        if self.augmentation.random_crop is not None:
            rgb = [_covering(image, self.processor) for image in rgb]
        elif self.augmentation.random_resized_crop is None:
            resized = self.processor(images=rgb, do_rescale=False, do_normalize=False, return_tensors="pt")
            return list(resized["pixel_values"])
        return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in rgb]

    def finish(self, prepared: Sequence[torch.Tensor], indices: "NDArray[np.uint64]") -> Sequence[torch.Tensor]:
        """Vary and scale: float32 [3, H, W] each. `indices` tell the images apart."""
        keys = self._keys(indices)
        pixels = self._augment(prepared, keys)
        if self._distort is not None:
            pixels = torch.stack(self._distort.each(pixels, keys))
        # One at a time: a batch of float32 does not fit into the processor's caches.
        scaled = [image.to(torch.float32).mul_(self._factor).add_(self._offset) for image in pixels]
        return scaled if self._erase is None else self._erase.each(scaled, keys)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        prepared = self.prepare(batch["image"])
        indices = np.asarray([_content_key(image) for image in prepared], dtype=np.uint64)
        return {"pixel_values": list(self.finish(prepared, indices)), "label": list(batch["label"])}


def eval_transform(processor: "BaseImageProcessor") -> EvalTransform:
    """Return images as the saved processor makes them; for `Dataset.with_transform`."""
    return EvalTransform(processor)


def train_transform(
    processor: "BaseImageProcessor", augmentation: AugmentationConfig | None = None, seed: int = 0
) -> TrainTransform:
    """Varied images; for `Dataset.with_transform` and `transform_split`."""
    return TrainTransform(processor, augmentation, seed)


def image_transforms(
    processor: "BaseImageProcessor", augmentation: AugmentationConfig | None = None, seed: int = 0
) -> tuple[TrainTransform, EvalTransform]:
    """Return both transforms of a model: (training, evaluation)."""
    return TrainTransform(processor, augmentation, seed), EvalTransform(processor)


def input_size(processor: Any) -> tuple[int, int]:
    """(height, width) px of what the processor makes."""
    crop = processor.crop_size if getattr(processor, "do_center_crop", None) else None
    size = crop or processor.size
    if not (size.get("height") and size.get("width")):
        raise UserError(f"the image processor's size is {dict(size)}; needed: a height and a width")
    return int(size["height"]), int(size["width"])


def pixel_scale(processor: Any, channels: int = 3) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """Return what a processor of transformers makes of x in 0..255, (x * factor - mean) / std: factor, mean and std."""
    factor = processor.rescale_factor if getattr(processor, "do_rescale", True) else 1.0
    normalises = getattr(processor, "do_normalize", True)
    mean, std = (processor.image_mean, processor.image_std) if normalises else (0.0, 1.0)
    if not factor or mean is None or std is None:
        raise UserError(
            f"the image processor cannot use rescale_factor={factor}, image_mean={mean}, image_std={std}; "
            "save one with all three"
        )
    means, stds = ((value,) * channels if isinstance(value, int | float) else tuple(value) for value in (mean, std))
    return float(factor), means, stds


def mean_color(processor: Any) -> tuple[int, ...]:
    """Return the color 0..255 that becomes 0, with which augmentation fills what it uncovers."""
    factor, mean, _ = pixel_scale(processor)
    return tuple(min(255, max(0, round(value / factor))) for value in mean)


def scaling(processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`pixel_scale` as one product and one sum: factor and offset, [3, 1, 1] each."""
    factor, *of_channels = pixel_scale(processor)
    mean, std = map(torch.tensor, of_channels)
    return (factor / std)[:, None, None], (-mean / std)[:, None, None]


def _covering(image: Image.Image, processor: Any) -> Image.Image:
    """Return the image in the smallest size of its own ratio that covers the model's."""
    height, width = input_size(processor)
    scale = max(height / image.height, width / image.width)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    return image.resize(size, Image.Resampling(processor.resample))


def _direct(processor: Any) -> "_DirectPillow | _DirectTorchvision | None":
    """Return the direct transform for one of transformers' ViT processors with default behavior; else None."""
    steps = [getattr(processor, f"do_{name}", None) for name in ("resize", "rescale", "normalize")]
    others = [getattr(processor, f"do_{name}", None) for name in ("center_crop", "pad")]
    fixed = all(getattr(processor, "size", {}).get(side) for side in ("height", "width"))
    kind = _DIRECT.get(type(processor).__name__)
    if kind is None or not all(steps) or any(others) or not fixed:
        return None
    return kind(processor) if kind is _DirectPillow or getattr(processor, "resample", None) in _OF_TORCHVISION else None


class _DirectPillow:
    """Resize by Pillow, scale by torch: an RGB image -> [3, H, W] float32, written to `place`."""

    def __init__(self, processor: Any) -> None:
        height, width = input_size(processor)
        self.size, self.resample = (width, height), Image.Resampling(processor.resample)
        self.factor, self.offset = scaling(processor)

    def __call__(self, image: Image.Image, place: torch.Tensor) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(image.resize(self.size, self.resample))).permute(2, 0, 1)
        return place.copy_(pixels).mul_(self.factor).add_(self.offset)


class _DirectTorchvision:
    """Resize and scale by torchvision, likewise: to the bit what its processor makes."""

    def __init__(self, processor: Any) -> None:
        self.size, self.interpolation = list(input_size(processor)), interpolation_of(processor)
        factor, *of_channels = pixel_scale(processor)
        self.mean, self.std = ((torch.tensor(values) * (1.0 / factor))[:, None, None] for values in of_channels)

    def __call__(self, image: Image.Image, place: torch.Tensor) -> torch.Tensor:
        from torchvision.transforms.v2 import functional as resizing

        pixels = _pixels(image).permute(2, 0, 1)
        resized = resizing.resize(pixels, self.size, interpolation=self.interpolation, antialias=True)[:3]
        return place.copy_(resized).sub_(self.mean).div_(self.std)


def _pixels(image: Image.Image) -> torch.Tensor:
    """uint8 [H, W, 3] of an RGB image, or, where that needs no copy, Pillow's own memory with its fourth channel."""
    import pyarrow

    try:
        shared: Any = pyarrow.array(image)
    except (TypeError, ValueError):  # a Pillow before 11.2, or an image of several blocks of memory
        return torch.from_numpy(np.array(image))
    return torch.from_dlpack(shared.flatten()).reshape(image.height, image.width, -1)


_DIRECT = {"ViTImageProcessorPil": _DirectPillow, "ViTImageProcessor": _DirectTorchvision}
_OF_TORCHVISION = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)  # of others it makes something else


def _content_key(image: torch.Tensor) -> int:
    """Return a number that tells images apart: a checksum of about 32x32 of the pixels of [3, H, W]."""
    rows, columns = (max(1, side // 32) for side in image.shape[1:])
    return zlib.crc32(image[:, ::rows, ::columns].contiguous().numpy().tobytes())


def interpolation_of(processor: Any) -> "InterpolationMode":
    from torchvision.transforms.v2 import InterpolationMode

    name = Image.Resampling(processor.resample).name.lower()
    return InterpolationMode.NEAREST_EXACT if name == "nearest" else InterpolationMode(name)


Example = dict[str, Any]
# What is varied of images, masks and boxes together.
_JOINT = ("random_resized_crop", "scale_jitter", "horizontal_flip", "color_jitter")
_PER_OBJECT = ("class_labels", "masks", "area", "iscrowd")


class DenseEvalTransform(_Unvaried):
    """Images as the processor makes them; masks resized to the same by the nearest pixel, boxes scaled along.

    Objects of crowds stay, and the examples of detection tell "area" (px of the original) and "iscrowd" too.
    """

    def __init__(self, processor: "BaseImageProcessor", target: Target) -> None:
        self.target: Target = target
        self._images = EvalTransform(processor)

    def prepare(self, rows: Mapping[str, Sequence[Any]]) -> list[Example]:
        """Examples of a batch of rows {"image", "mask" or "objects"}: all there is to do, once and for all."""
        images = each_in_threads(decode_image, rows["image"])
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


class DenseTrainTransform(_Varied):
    """Varied images with their masks or boxes: crop by scale or area, flip, color.

    Objects of which a crop leaves nothing, or less than 1 px a side, are dropped, and crowds are not learned.

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
        super().__init__(augmentation, seed)
        self.target: Target = target
        self._vary = _variation(self.augmentation, processor, target)
        self._factor, self._offset = scaling(processor)

    def prepare(self, rows: Mapping[str, Sequence[Any]]) -> list[Example]:
        """Return the part without chance: everything decoded, in its own size."""
        from torchvision.tv_tensors import Image as Pixels
        from torchvision.tv_tensors import Mask

        images = each_in_threads(decode_image, rows["image"])
        pixels = [Pixels(torch.from_numpy(np.array(image)).permute(2, 0, 1)) for image in images]
        if self.target == "mask":
            labels = [Mask(torch.from_numpy(np.array(mask))) for mask in rows["mask"]]
            return [{"pixels": image, "labels": mask} for image, mask in zip(pixels, labels, strict=True)]
        return [
            {"pixels": values, **_tensors(image.size, objects, with_crowds=False)}
            for values, image, objects in zip(pixels, images, rows["objects"], strict=True)
        ]

    def finish(self, prepared: Sequence[Example], indices: "NDArray[np.uint64]") -> list[Example]:
        """Vary and scale; `indices` tell the images apart."""
        keys = self._keys(indices).tolist()
        return [self._varied(example, key) for example, key in zip(prepared, keys, strict=True)]

    def _varied(self, example: Example, key: int) -> Example:
        with seeded(key):
            varied = self._vary(dict(example))
        plain = {
            name: value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value
            for name, value in varied.items()
        }
        pixels = plain.pop("pixels")
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
    """Return both transforms of a model for segmentation ("mask") or detection ("objects"): (training, evaluation)."""
    return DenseTrainTransform(processor, target, augmentation, seed), DenseEvalTransform(processor, target)


def refuse_apart(augmentation: AugmentationConfig) -> None:
    """Refuse, by name, what would vary images apart from their masks and boxes."""
    for field in fields(augmentation):
        if field.name not in _JOINT and getattr(augmentation, field.name) != field.default:
            raise UserError(
                f"augmentation {field.name} does not transform masks and boxes; for segmentation and "
                f"detection choose from {', '.join(_JOINT)}"
            )


def _variation(augmentation: AugmentationConfig, processor: "BaseImageProcessor", target: Target) -> Any:
    from torchvision.transforms import v2
    from torchvision.tv_tensors import Image as Pixels
    from torchvision.tv_tensors import Mask

    refuse_apart(augmentation)
    size, interpolation = input_size(processor), interpolation_of(processor)
    fill: Any = {Pixels: mean_color(processor), Mask: IGNORED if target == "mask" else 0}
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

    def __call__(self, example: Example) -> Any:
        from torchvision.transforms import v2

        height, width = example["pixels"].shape[-2:]
        low, high = self.scales
        scale = low + (high - low) * float(torch.rand(()))
        scale *= min(self.size[0] / height, self.size[1] / width)
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        return v2.Resize(size, self.interpolation)(example)


def _per_object(example: Example) -> tuple[torch.Tensor, ...]:
    return tuple(example[name] for name in _PER_OBJECT if name in example)


def _tensors(size: tuple[int, int], objects: Mapping[str, Sequence[Any]], with_crowds: bool = True) -> Example:
    """Return the objects of an image of (width, height) px, in its own size."""
    from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Mask

    rows = [row for row, is_crowd in enumerate(objects["iscrowd"]) if with_crowds or not is_crowd]
    objects = {name: [values[row] for row in rows] for name, values in objects.items()}
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


def _scaled(size: tuple[int, int], objects: Mapping[str, Sequence[Any]], target: tuple[int, int]) -> Example:
    """Return the objects of an image of (width, height) px, for the image resized to `target`."""
    tensors = _tensors(size, objects)
    across, down = target[0] / size[0], target[1] / size[1]
    boxes = tensors["boxes"].as_subclass(torch.Tensor) * torch.tensor([across, down, across, down])
    scaled = {**tensors, "boxes": boxes}
    if "masks" in tensors:
        drawn = [Image.fromarray(mask).resize(target, Image.Resampling.NEAREST) for mask in tensors["masks"].numpy()]
        stacked = np.stack([np.array(m) for m in drawn]) if drawn else np.zeros((0, *target[::-1]), dtype=np.uint8)
        scaled["masks"] = torch.from_numpy(stacked)
    return scaled
