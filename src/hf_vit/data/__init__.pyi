from .augmentation import AugmentationConfig
from .batches import (
    AnnotatedImages,
    ImageCollator,
    TransformedImages,
    TransformedStream,
    dense_collator,
    transform_split,
)
from .image_data import ImageData, check_images
from .images import to_rgb
from .load import load_data, load_images
from .tiles import Tiles
from .transforms import (
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
    "load_images",
    "make_processor",
    "to_rgb",
    "train_transform",
    "transform_split",
]
