"""Turn Pillow images into `pixel_values` with the values of the saved image processor, and augment training images."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from hf_vit.data.annotations import IGNORED, Target
from hf_vit.data.augmentation import AugmentationConfig, Augmenter, Seeded, make_random_keys, seeded
from hf_vit.data.images import decode_image, map_in_threads, view_pixels
from hf_vit.errors import UserError, get_first_line
from hf_vit.families import refuse_other_channels

if TYPE_CHECKING:
    from torchvision.transforms.v2 import InterpolationMode
    from transformers import BaseImageProcessor, BatchFeature, PreTrainedConfig, ViTImageProcessor


def make_processor(config: "PreTrainedConfig", **kwargs: Any) -> "ViTImageProcessor":
    """Return the image processor of a model, which resizes to its size and normalizes as its config says.

    Args:
        config: a model's configuration with `image_size` (px, int or (height, width)) and `num_channels`, and perhaps
            `image_mean` and `image_std`; without them, pixels are scaled to [-1, 1].
        **kwargs: arguments of ViTImageProcessor, such as image_mean, image_std, resample.

    Raises:
        UserError: the model does not take RGB images.
    """
    from transformers import ViTImageProcessor

    refuse_other_channels(config, "the model")
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    # With do_convert_rgb=None, the default, a reloaded processor crashes on grayscale images.
    defaults: dict[str, Any] = {"size": {"height": height, "width": width}, "do_convert_rgb": True}
    for name in ("image_mean", "image_std"):
        defaults[name] = np.broadcast_to(getattr(config, name, 0.5), 3).tolist()  # one number, or one per channel
    return ViTImageProcessor(**(defaults | kwargs))


class _FixedTransform:
    """Base of evaluation transforms, which do not depend on the epoch and whose images a collator must not mix."""

    mixable = False

    def finish(self, prepared: Sequence[Any], indices: NDArray[np.uint64]) -> Sequence[Any]:
        """Return the prepared images unchanged."""
        return prepared

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, because all epochs are the same."""


class _RandomTransform:
    """Base of training transforms.

    After `set_epoch` the augmentation depends only on seed, epoch and image. Before, it is drawn from torch's global
    generator, as in torchvision's transforms.
    """

    mixable = True

    def __init__(self, augmentation: AugmentationConfig | None, seed: int) -> None:
        self.augmentation = augmentation or AugmentationConfig()
        self.seed = seed
        # In shared memory, so that persistent loader workers see the next epoch too; -1 before `set_epoch`.
        self._epoch = torch.tensor(-1).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the augmentation; in a loader's worker for this worker alone."""
        if torch.utils.data.get_worker_info() is None:
            self._epoch.fill_(epoch)
        else:  # the workers share that memory, and the copies of repeated augmentation have an epoch each
            self._epoch = torch.tensor(epoch)

    def _draw_keys(self, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return a random key for every image: of (seed, epoch, image), or of torch's generator without an epoch."""
        epoch = int(self._epoch)
        if epoch < 0:
            return torch.randint(2**63 - 1, (len(indices),)).numpy().astype(np.uint64)
        return make_random_keys(self.seed, epoch, indices)


class EvalTransform(_FixedTransform):
    """Batch function for `Dataset.with_transform` that converts images to RGB and applies the image processor.

    For transformers' ViT processors, Pillow or torchvision is called directly, which is faster and gives the same
    values (with Pillow within 1e-6). Given to the processor itself, 16-bit images (see `to_rgb`) and transparent images
    would give other values. Images may be undecoded, see `decode_image`.
    """

    def __init__(self, processor: "BaseImageProcessor") -> None:
        self.processor = processor
        self._direct = _find_direct_transform(processor)

    def prepare(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Return [3, H, W] float32 (channels, height, width) for every image; nothing remains to be done."""
        return list(self.batch(images))

    def batch(self, images: Sequence[Any]) -> torch.Tensor:
        """Return the images as one tensor, [B, 3, H, W] float32."""
        direct = self._direct
        if direct is None:
            rgb = map_in_threads(decode_image, images)
            try:
                return self.processor(images=rgb, return_tensors="pt")["pixel_values"]
            except ValueError as error:
                raise UserError(
                    "the image processor cannot put images of different sizes into a batch "
                    f"({get_first_line(error):.200}); set do_resize or do_center_crop in preprocessor_config.json"
                ) from error
        with torch.inference_mode(False):  # other threads must not write to inference tensors
            values = torch.empty(len(images), 3, *get_input_size(self.processor))
            # Each is decoded and transformed at once, so that no image of full size waits for the others.
            map_in_threads(lambda image, output: direct(decode_image(image), output), images, values)
        return values

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        values = self.prepare(batch["image"])
        return {"pixel_values": values, "label": list(batch["label"]), "mixable": [False] * len(values)}


class TrainTransform(_RandomTransform):
    """Batch function for `Dataset.with_transform` that augments images.

    The augmentation depends on the index of an image in `TransformedImages`, and on its content in this function.

    Args:
        processor: gives size, interpolation, scale, mean and standard deviation.
        augmentation: the augmentation, by default none.
        seed: of the augmentation.
        distort: applied to every augmented image, uint8 [3, H, W]; may draw from torch's generator, which is seeded for
            every image.
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
            raise UserError("the augmentation scale_jitter needs segmentation or detection; use random_resized_crop")
        self.processor = processor
        size = get_input_size(processor)
        self._augment = Augmenter(self.augmentation, size, get_interpolation(processor), compute_mean_color(processor))
        self._distort = Seeded(distort, 2) if distort else None
        # Normal noise in every pixel of normalized images, as in DeiT (arXiv 2012.12877, table 9).
        erasing = self.augmentation.random_erasing
        self._erase = Seeded(v2.RandomErasing(erasing, value=cast(Any, "random")), 3) if erasing else None
        self._factor, self._offset = compute_scaling(processor)

    @property
    def keeps_pixels(self) -> bool:
        """Whether `prepare` only decodes, because a random crop of the image in its own size follows."""
        return self.augmentation.random_crop is None and self.augmentation.random_resized_crop is not None

    def prepare(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Do the part without random numbers: uint8 [3, H, W], of the model's size unless a random crop follows."""
        if self.augmentation.random_crop is not None:
            return map_in_threads(
                lambda image: _to_tensor(_resize_to_cover(decode_image(image), self.processor)), images
            )
        if self.keeps_pixels:
            return map_in_threads(lambda image: _to_tensor(decode_image(image)), images)
        rgb = map_in_threads(decode_image, images)
        resized = self.processor(images=rgb, do_rescale=False, do_normalize=False, return_tensors="pt")
        return list(resized["pixel_values"])

    def finish(self, prepared: Sequence[torch.Tensor], indices: NDArray[np.uint64]) -> Sequence[torch.Tensor]:
        """Augment and scale images to float32 [3, H, W]; `indices` identify the images in the random keys."""
        return self._vary(prepared, self._draw_keys(indices))

    def _vary(self, prepared: Sequence[torch.Tensor], keys: NDArray[np.uint64]) -> Sequence[torch.Tensor]:
        """Augment and scale images with these random keys."""
        pixels = self._augment(prepared, keys)
        if self._distort is not None:
            pixels = torch.stack(self._distort.transform_all(pixels, keys))
        # One at a time: a batch of float32 does not fit into the processor's caches.
        scaled_images = [image.to(torch.float32).mul_(self._factor).add_(self._offset) for image in pixels]
        return scaled_images if self._erase is None else self._erase.transform_all(scaled_images, keys)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        prepared = self.prepare(batch["image"])
        indices = np.asarray([_hash_content(image) for image in prepared], dtype=np.uint64)
        return {"pixel_values": list(self.finish(prepared, indices)), "label": list(batch["label"])}


class OwnShapeEvalTransform(EvalTransform):
    """Evaluation transform for a processor that keeps the shape of images (`keeps_shapes`): tensors of several sizes.

    Args:
        processor: the image processor.
        patch: (height, width) px of the model's patches.
    """

    def __init__(self, processor: "BaseImageProcessor", patch: tuple[int, int]) -> None:
        super().__init__(processor)
        self.patch = patch

    def prepare(self, images: Sequence[Any]) -> list[torch.Tensor]:
        processor: Any = self.processor
        return [
            fill_patches(image, processor, self.patch, processor.max_num_patches)
            for image in map_in_threads(decode_image, images)
        ]


class OwnShapeTrainTransform(TrainTransform):
    """Training transform for a processor that keeps the shape of images; a random crop fills its patches too."""

    mixable = False

    def __init__(
        self,
        processor: "BaseImageProcessor",
        patch: tuple[int, int],
        augmentation: AugmentationConfig | None = None,
        seed: int = 0,
    ) -> None:
        augmentation = augmentation or AugmentationConfig()
        if augmentation.random_crop is not None or augmentation.mixup_alpha or augmentation.cutmix_alpha:
            raise UserError(
                "random_crop, mixup and cutmix need images of one size, but the image processor of this model keeps "
                "their shape (max_num_patches); choose another recipe, or another size with --image-size"
            )
        super().__init__(processor, replace(augmentation, random_resized_crop=None), seed)
        self.patch = patch
        self._scale = augmentation.random_resized_crop
        self._crop = Seeded(self._crop_at_random)

    def prepare(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Return uint8 [3, H, W], resized unless a random crop follows."""
        rgb = map_in_threads(decode_image, images)
        return [self._fill(image) if self._scale is None else _to_tensor(image) for image in rgb]

    def _vary(self, prepared: Sequence[torch.Tensor], keys: NDArray[np.uint64]) -> Sequence[torch.Tensor]:
        """Augment and scale images, each in its own size."""
        images = prepared if self._scale is None else self._crop.transform_all(prepared, keys)
        vary = super()._vary
        return [vary([image], keys[number : number + 1])[0] for number, image in enumerate(images)]

    def _crop_at_random(self, image: torch.Tensor) -> torch.Tensor:
        from torchvision.transforms import RandomResizedCrop

        top, left, height, width = RandomResizedCrop.get_params(image, list(self._scale or ()), [3 / 4, 4 / 3])
        return self._fill(image[:, top : top + height, left : left + width])

    def _fill(self, image: Image.Image | torch.Tensor) -> torch.Tensor:
        processor: Any = self.processor
        steps = {"do_rescale": False, "do_normalize": False}
        return fill_patches(image, processor, self.patch, processor.max_num_patches, **steps)


def _to_tensor(image: Image.Image) -> torch.Tensor:
    """Return an RGB image as uint8 [3, H, W], which must not be written to."""
    return view_pixels(image.tobytes(), image.height, image.width)


def eval_transform(processor: "BaseImageProcessor") -> EvalTransform:
    """Return the evaluation transform for `Dataset.with_transform` and `transform_split`."""
    return EvalTransform(processor)


def train_transform(
    processor: "BaseImageProcessor", augmentation: AugmentationConfig | None = None, seed: int = 0
) -> TrainTransform:
    """Return the training transform for `Dataset.with_transform` and `transform_split`."""
    return TrainTransform(processor, augmentation, seed)


def image_transforms(
    processor: "BaseImageProcessor", augmentation: AugmentationConfig | None = None, seed: int = 0
) -> tuple[TrainTransform, EvalTransform]:
    """Return the training transform and the evaluation transform of a model."""
    return TrainTransform(processor, augmentation, seed), EvalTransform(processor)


def keeps_shapes(processor: Any) -> bool:
    """Return whether an image processor resizes images in their own shape to a number of patches, as SigLIP 2's."""
    return getattr(processor, "max_num_patches", None) is not None


def refuse_own_shapes(processor: Any, purpose: str, *_: Any) -> None:
    """Raise a UserError if an image processor keeps the shape of images, where all are needed in one size."""
    if keeps_shapes(processor):
        raise UserError(
            f"{purpose} needs images of one size, but the model's image processor keeps their shape; remove "
            "max_num_patches from preprocessor_config.json to resize all images to one size"
        )


def refuse_crops(processor: Any) -> None:
    """Raise a UserError if an image processor crops images."""
    if getattr(processor, "do_center_crop", None):
        raise UserError(
            "the image processor crops images, but not their masks and boxes; set its do_center_crop to False and "
            "its size to that of the crop"
        )


def fill_grid(size: tuple[int, int], patch: tuple[int, int], max_num_patches: int) -> tuple[int, int]:
    """Return the largest patch grid (h, w) with the aspect ratio of an image of `size`, (height, width) px.

    Sides are rounded up to whole patches. As in SigLIP 2's processor, a bisection finds the scale of the image to 1e-5;
    it is at most 100.
    """

    def scale_grid(scale: float) -> tuple[int, int]:
        h, w = (max(1, math.ceil(side * scale / px)) for side, px in zip(size, patch, strict=True))
        return h, w

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        if math.prod(scale_grid(middle)) <= max_num_patches:
            low = middle
        else:
            high = middle
    return scale_grid(low)


def fill_patches(
    image: Image.Image | torch.Tensor, processor: Any, patch: tuple[int, int], max_num_patches: int, **steps: Any
) -> torch.Tensor:
    """Resize an RGB image, or uint8 [3, H, W], to the patches that it fills, and process it: [3, H', W'].

    The processor itself resizes, as its rounding differs from Pillow's; `steps` are further arguments of it.
    """
    if isinstance(image, torch.Tensor):
        sides = (image.shape[1], image.shape[2])
        steps = {**steps, "input_data_format": "channels_first"}
    else:
        sides = image.height, image.width
    h, w = fill_grid(sides, patch, max_num_patches)
    size = {"height": h * patch[0], "width": w * patch[1]}
    steps |= {"do_resize": True, "size": size, "do_center_crop": False}
    return processor(images=image, return_tensors="pt", **steps)["pixel_values"][0]


def pad_to_patches(images: Sequence[torch.Tensor], patch: tuple[int, int]) -> "BatchFeature":
    """Pad images [C, H, W] to a batch [B, C, H, W], and return it with the mask of their patches, [B, h, w]."""
    from transformers import BatchFeature

    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    pixel_values = images[0].new_zeros(len(images), len(images[0]), height, width)
    mask = torch.zeros(len(images), height // patch[0], width // patch[1], dtype=torch.int64)
    for number, image in enumerate(images):
        pixel_values[number, :, : image.shape[1], : image.shape[2]] = image
        mask[number, : image.shape[1] // patch[0], : image.shape[2] // patch[1]] = 1
    return BatchFeature({"pixel_values": pixel_values, "patch_attention_mask": mask})


def get_input_size(processor: Any) -> tuple[int, int]:
    """Return the (height, width) px of the processor's output."""
    crop = processor.crop_size if getattr(processor, "do_center_crop", None) else None
    size = crop or processor.size
    if not (size.get("height") and size.get("width")):
        raise UserError(
            f"the image processor has size={dict(size)}, but height and width are needed; correct it in "
            "preprocessor_config.json"
        )
    return int(size["height"]), int(size["width"])


def get_pixel_scale(processor: Any, channels: int = 3) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """Return factor, mean and std of a processor, which maps x in 0..255 to (x * factor - mean) / std."""
    factor = processor.rescale_factor if getattr(processor, "do_rescale", True) else 1.0
    is_normalized = getattr(processor, "do_normalize", True)
    mean, std = (processor.image_mean, processor.image_std) if is_normalized else (0.0, 1.0)
    if not factor or mean is None or std is None:
        raise UserError(
            f"the image processor has rescale_factor={factor}, image_mean={mean} and image_std={std}, but all "
            "three are needed; add them to preprocessor_config.json"
        )

    def per_channel(value: Any) -> tuple[float, ...]:
        values = (value,) if isinstance(value, int | float) else tuple(value)
        return values * channels if len(values) == 1 else values  # one value holds for all channels

    return float(factor), per_channel(mean), per_channel(std)


def compute_mean_color(processor: Any) -> tuple[int, ...]:
    """Return the color 0..255 that the processor maps to 0; augmentation fills borders with it."""
    factor, mean, _ = get_pixel_scale(processor)
    return tuple(min(255, max(0, round(value / factor))) for value in mean)


def compute_scaling(processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factor and offset, [3, 1, 1] each, so that x * factor + offset is the processor's scaling."""
    factor, mean, std = get_pixel_scale(processor)
    std_tensor = torch.tensor(std)[:, None, None]
    return factor / std_tensor, -torch.tensor(mean)[:, None, None] / std_tensor


def _resize_to_cover(image: Image.Image, processor: Any) -> Image.Image:
    """Resize an image with its aspect ratio to the smallest size that covers the model's size."""
    height, width = get_input_size(processor)
    scale = max(height / image.height, width / image.width)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    return image.resize(size, Image.Resampling(processor.resample))


def _find_direct_transform(processor: Any) -> "_DirectPillow | _DirectTorchvision | None":
    """Return the direct transform of a ViT processor with default steps and a fixed size; else None."""
    steps = [getattr(processor, f"do_{name}", None) for name in ("resize", "rescale", "normalize")]
    extra_steps = [getattr(processor, f"do_{name}", None) for name in ("center_crop", "pad")]
    has_fixed_size = all(getattr(processor, "size", {}).get(side) for side in ("height", "width"))
    if not all(steps) or any(extra_steps) or not has_fixed_size:
        return None
    name = type(processor).__name__
    if name == "ViTImageProcessorPil":
        return _DirectPillow(processor)
    # Other filters give other values than transformers' processor.
    same_filters = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC
    if name == "ViTImageProcessor" and getattr(processor, "resample", None) in same_filters:
        return _DirectTorchvision(processor)
    return None


class _DirectPillow:
    """Resize an RGB image with Pillow, scale it with torch, and write it to `output`, [3, H, W] float32."""

    def __init__(self, processor: Any) -> None:
        height, width = get_input_size(processor)
        self.size = (width, height)
        self.resample = Image.Resampling(processor.resample)
        self.factor, self.offset = compute_scaling(processor)

    def __call__(self, image: Image.Image, output: torch.Tensor) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(image.resize(self.size, self.resample))).permute(2, 0, 1)
        return output.copy_(pixels).mul_(self.factor).add_(self.offset)


class _DirectTorchvision:
    """Resize and scale an RGB image with torchvision, with exactly the values of transformers' processor."""

    def __init__(self, processor: Any) -> None:
        self.size = list(get_input_size(processor))
        self.interpolation = get_interpolation(processor)
        factor, *mean_and_std = get_pixel_scale(processor)
        self.mean, self.std = ((torch.tensor(values) * (1.0 / factor))[:, None, None] for values in mean_and_std)

    def __call__(self, image: Image.Image, output: torch.Tensor) -> torch.Tensor:
        """Resize and scale an image into `output`, [3, H, W], and return it."""
        from torchvision.transforms.v2 import functional as resizing

        pixels = _share_pixels(image).permute(2, 0, 1)
        resized = resizing.resize(pixels, self.size, interpolation=self.interpolation, antialias=True)[:3]
        return output.copy_(resized).sub_(self.mean).div_(self.std)


def _share_pixels(image: Image.Image) -> torch.Tensor:
    """Return uint8 [H, W, 3] of an RGB image, or [H, W, 4] if Pillow's memory can be used without a copy."""
    import pyarrow

    try:
        shared: Any = pyarrow.array(image)
    except (TypeError, ValueError):  # Pillow before 11.2, or an image in several blocks of memory
        return torch.from_numpy(np.array(image))
    return torch.from_dlpack(shared.values).reshape(image.height, image.width, -1)


def _hash_content(image: torch.Tensor) -> int:
    """Return a checksum of about 32x32 pixels of an image [3, H, W], which identifies it."""
    rows, columns = (max(1, side // 32) for side in image.shape[1:])
    return zlib.crc32(image[:, ::rows, ::columns].contiguous().numpy().tobytes())


def get_interpolation(processor: Any) -> "InterpolationMode":
    """Return torchvision's name of the processor's resampling filter."""
    from torchvision.transforms.v2 import InterpolationMode

    name = Image.Resampling(processor.resample).name.lower()
    return InterpolationMode.NEAREST_EXACT if name == "nearest" else InterpolationMode(name)


Example = dict[str, Any]
# Augmentations that transform masks and boxes together with the image.
_JOINT = ("random_resized_crop", "scale_jitter", "horizontal_flip", "color_jitter")


class DenseEvalTransform(_FixedTransform):
    """Evaluation transform that resizes masks (nearest pixel) and boxes to the size of the processed image.

    Crowd objects are included. Examples of detection also have "area" (px of the original) and "iscrowd".
    """

    def __init__(self, processor: "BaseImageProcessor", target: Target) -> None:
        refuse_crops(processor)
        self.target: Target = target
        self._images = EvalTransform(processor)

    def prepare(self, rows: Mapping[str, Sequence[Any]]) -> list[Example]:
        """Return an example for every row of a batch {"image", "mask" or "objects"}; nothing remains to be done."""
        images = map_in_threads(decode_image, rows["image"])
        pixels = self._images.prepare(images)
        size = int(pixels[0].shape[-1]), int(pixels[0].shape[-2])
        if self.target == "mask":
            masks = [np.array(mask.resize(size, Image.Resampling.NEAREST)) for mask in rows["mask"]]
            annotations = [{"labels": torch.from_numpy(mask).long()} for mask in masks]
        else:
            pairs = zip(images, rows["objects"], strict=True)
            annotations = [_scale_objects(image.size, objects, size) for image, objects in pairs]
        return [{"pixel_values": values, **annotation} for values, annotation in zip(pixels, annotations, strict=True)]


class DenseTrainTransform(_RandomTransform):
    """Training transform that augments images together with their masks or boxes: crop, flip and color.

    Crowd objects are dropped, and so are objects with less than 1 px a side in a crop.

    Args:
        processor: gives size, interpolation, scale, mean and standard deviation.
        target: "mask" or "objects".
        augmentation: the augmentation; without a crop the whole image is resized as the processor does.
        seed: of the augmentation.

    Raises:
        UserError: an augmentation does not transform masks and boxes.
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
        self._steps = _compose_steps(self.augmentation, processor, target)
        self._factor, self._offset = compute_scaling(processor)

    def prepare(self, rows: Mapping[str, Sequence[Any]]) -> list[Example]:
        """Do the part without random numbers: decode images and annotations in their original size."""
        from torchvision.tv_tensors import Image as Pixels

        from hf_vit.data.mask_features import CenteredMask

        images = map_in_threads(decode_image, rows["image"])
        pixels = [Pixels(_to_tensor(image)) for image in images]
        if self.target == "mask":
            labels = [CenteredMask(torch.from_numpy(np.array(mask))) for mask in rows["mask"]]
            return [{"pixels": image, "labels": mask} for image, mask in zip(pixels, labels, strict=True)]
        return [
            {"pixels": values, **_make_object_tensors(image.size, objects, with_crowds=False)}
            for values, image, objects in zip(pixels, images, rows["objects"], strict=True)
        ]

    def finish(self, prepared: Sequence[Example], indices: NDArray[np.uint64]) -> list[Example]:
        """Augment and scale examples; `indices` identify the images in the random keys."""
        keys = self._draw_keys(indices).tolist()
        return [self._augment_example(example, key) for example, key in zip(prepared, keys, strict=True)]

    def _augment_example(self, example: Example, key: int) -> Example:
        """Augment image and annotations with the random numbers of `key`, and make them a training example."""
        with seeded(key):
            augmented_example = self._steps(dict(example))
        tensors = {name: value for name, value in augmented_example.items() if isinstance(value, torch.Tensor)}
        plain = augmented_example | {name: value.as_subclass(torch.Tensor) for name, value in tensors.items()}
        pixels = plain.pop("pixels")
        if self.target == "mask":
            plain["labels"] = plain["labels"].long()
        else:
            del plain["area"], plain["iscrowd"]  # wrong after a crop, and always 0
        if "masks" in plain:  # a crop may contain a part of an object's box, but nothing of the object
            is_visible = (plain["masks"] != 0).flatten(1).any(1)
            plain |= {name: plain[name][is_visible] for name in ("boxes", "class_labels", "masks")}
        return {"pixel_values": pixels * self._factor + self._offset, **plain}


def dense_transforms(
    processor: "BaseImageProcessor", target: Target, augmentation: AugmentationConfig | None = None, seed: int = 0
) -> tuple[DenseTrainTransform, DenseEvalTransform]:
    """Return the training and evaluation transforms of a model for segmentation ("mask") or detection ("objects")."""
    return DenseTrainTransform(processor, target, augmentation, seed), DenseEvalTransform(processor, target)


def refuse_image_only(augmentation: AugmentationConfig) -> None:
    """Raise UserError if an augmentation would transform images without their masks and boxes."""
    for field in fields(augmentation):
        if field.name not in _JOINT and getattr(augmentation, field.name) != field.default:
            raise UserError(
                f"the augmentation {field.name} does not transform masks and boxes; for segmentation and "
                f"detection use only {', '.join(_JOINT)}"
            )


def _compose_steps(augmentation: AugmentationConfig, processor: "BaseImageProcessor", target: Target) -> Any:
    """Return torchvision's transform of an image with its mask or objects to the model's size."""
    from torchvision.transforms import v2
    from torchvision.tv_tensors import Image as Pixels

    from hf_vit.data.mask_features import CenteredMask

    refuse_image_only(augmentation)
    size = get_input_size(processor)
    interpolation = get_interpolation(processor)
    fill: Any = {Pixels: compute_mean_color(processor), CenteredMask: IGNORED if target == "mask" else 0}
    steps: list[Any] = []
    if augmentation.scale_jitter is not None:
        steps += [
            partial(_jitter_scale, size=size, scales=augmentation.scale_jitter, interpolation=interpolation),
            v2.RandomCrop(size, pad_if_needed=True, fill=fill),
        ]
    elif augmentation.random_resized_crop is not None:
        steps.append(v2.RandomResizedCrop(size, augmentation.random_resized_crop, interpolation=interpolation))
    else:
        steps.append(v2.Resize(size, interpolation))
    if augmentation.horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(augmentation.horizontal_flip))
    if augmentation.color_jitter:
        strength = augmentation.color_jitter
        steps.append(v2.ColorJitter(strength, strength, strength))
    if target == "objects":
        steps += [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=1.0, labels_getter=_select_object_tensors)]
    return v2.Compose(steps)


def _jitter_scale(example: Example, size: tuple[int, int], scales: tuple[float, float], interpolation: Any) -> Any:
    """Resize image and annotations by a random zoom as torchvision's ScaleJitter, but to at least 1 px a side."""
    from torchvision.transforms import v2

    height, width = example["pixels"].shape[-2:]
    low, high = scales
    zoom = low + (high - low) * float(torch.rand(()))
    scale = zoom * min(size[0] / height, size[1] / width)  # at zoom 1 the image fits into the size
    return v2.Resize([max(1, round(height * scale)), max(1, round(width * scale))], interpolation)(example)


def _select_object_tensors(example: Example) -> tuple[torch.Tensor, ...]:
    """Return the tensors with one row for each object, which torchvision filters together with the boxes."""
    return tuple(example[name] for name in ("class_labels", "masks", "area", "iscrowd") if name in example)


def _make_object_tensors(
    size: tuple[int, int], objects: Mapping[str, Sequence[Any]], with_crowds: bool = True
) -> Example:
    """Return the objects of an image of (width, height) px as tensors."""
    from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat

    from hf_vit.data.mask_features import CenteredMask

    rows = [row for row, is_crowd in enumerate(objects["iscrowd"]) if with_crowds or not is_crowd]
    selected = {name: [values[row] for row in rows] for name, values in objects.items()}
    width, height = size
    corners = torch.tensor(selected["bbox"], dtype=torch.float32).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]  # x, y, width, height -> two corners
    boxes: Any = BoundingBoxes(corners, format=BoundingBoxFormat.XYXY, canvas_size=(height, width))  # pyright: ignore[reportCallIssue]
    tensors: Example = {
        "boxes": boxes,
        "class_labels": torch.tensor(selected["category"], dtype=torch.int64),
        "area": torch.tensor(selected["area"], dtype=torch.float32),
        "iscrowd": torch.tensor(selected["iscrowd"], dtype=torch.int64),
        "original_size": (height, width),
    }
    if "segmentation" in selected:
        masks = np.zeros((len(rows), height, width), dtype=np.uint8)
        for mask, image in zip(masks, selected["segmentation"], strict=True):
            if image is not None:
                mask[:] = np.array(image)
        tensors["masks"] = CenteredMask(torch.from_numpy(masks))
    return tensors


def _scale_objects(size: tuple[int, int], objects: Mapping[str, Sequence[Any]], target: tuple[int, int]) -> Example:
    """Return the objects of an image of (width, height) px as tensors, scaled to an image of `target` px."""
    from torchvision.transforms.v2 import functional

    tensors = _make_object_tensors(size, objects)
    x_scale, y_scale = target[0] / size[0], target[1] / size[1]
    boxes = tensors["boxes"].as_subclass(torch.Tensor) * torch.tensor([x_scale, y_scale, x_scale, y_scale])
    scaled_tensors = {**tensors, "boxes": boxes}
    if "masks" in tensors:
        scaled_tensors["masks"] = functional.resize(tensors["masks"], list(target[::-1])).as_subclass(torch.Tensor)
    return scaled_tensors
