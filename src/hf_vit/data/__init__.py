"""Images in, batches out: built-in and own data sets, checks before training, transforms and collators."""

from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.data.batches import (
    AnnotatedImages,
    ImageCollator,
    TransformedImages,
    TransformedStream,
    dense_collator,
    transform_split,
)
from hf_vit.data.image_data import ImageData, check_images
from hf_vit.data.images import to_rgb
from hf_vit.data.load import load_data
from hf_vit.data.tiles import Tiles
from hf_vit.data.transforms import (
    DenseEvalTransform,
    DenseTrainTransform,
    dense_transforms,
    eval_transform,
    image_transforms,
    make_processor,
    train_transform,
)

__all__ = [
    "AnnotatedImages",
    "AugmentationConfig",
    "DenseEvalTransform",
    "DenseTrainTransform",
    "ImageCollator",
    "ImageData",
    "Tiles",
    "TransformedImages",
    "TransformedStream",
    "check_images",
    "dense_collator",
    "dense_transforms",
    "eval_transform",
    "image_transforms",
    "load_data",
    "make_processor",
    "to_rgb",
    "train_transform",
    "transform_split",
]
