"""Column types of `datasets` for masks, decoded when a row is accessed, and masks as torchvision's tensors."""

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from datasets import ClassLabel, Image, List, Value
from datasets.features.features import register_feature
from PIL import Image as Pillow
from torchvision.transforms.v2 import InterpolationMode, functional
from torchvision.tv_tensors import Mask

from hf_vit.data.annotations import read_class_numbers


@dataclass(repr=False)
class ClassMask(Image):
    """A mask file of class numbers in any mode, decoded to an image of mode "L".

    Attributes:
        reduce_labels: see `read_class_numbers`; for masks as ADE20K stores them.
    """

    reduce_labels: bool = False
    _type: str = field(default="ClassMask", init=False, repr=False)

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Pillow.Image:
        if isinstance(value, dict) and value["bytes"] is None:  # `datasets` would leave a truncated file open
            value = {"bytes": Path(value["path"]).read_bytes(), "path": None}
        mask = super().decode_example(value, token_per_repo_id)
        if isinstance(value, dict) and mask.mode == "L":
            with Pillow.open(io.BytesIO(value["bytes"])) as picture:
                match = re.search(r"\bL;([24])\b", str(picture.tile))
            if match:  # Pillow stretches gray values of 2 and 4 bits to 0..255
                mask = mask.point([number * (2 ** int(match[1]) - 1) // 255 for number in range(256)])
        return Pillow.fromarray(read_class_numbers(mask, self.reduce_labels))


@dataclass
class RunLengthMask:
    """The mask of one object in COCO's compressed run lengths, decoded to an image of mode "1" by pycocotools."""

    dtype: ClassVar[str] = "PIL.Image.Image"
    pa_type: ClassVar[Any] = pa.struct({"size": pa.list_(pa.int32()), "counts": pa.binary()})
    _type: str = field(default="RunLengthMask", init=False, repr=False)

    def __call__(self) -> Any:
        return self.pa_type

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        return storage.cast(self.pa_type)

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Pillow.Image:
        from pycocotools import mask

        return Pillow.fromarray(mask.decode(value).astype(np.bool_))


with warnings.catch_warnings(action="ignore"):  # the function warns that it is experimental
    register_feature(ClassMask, "ClassMask")
    register_feature(RunLengthMask, "RunLengthMask")


class CenteredMask(Mask):
    """A mask [..., H, W] that is resized as images are, by the centers of pixels.

    torchvision resizes masks by the corners of pixels, which moves a smaller mask by up to half of its pixels.
    """


@functional.register_kernel(functional.resize, CenteredMask)
def _resize(mask: torch.Tensor, size: list[int], *_: Any, **__: Any) -> Mask:
    planes = mask.as_subclass(torch.Tensor).reshape(-1, *mask.shape[-2:])
    planes = functional.resize_image(planes, size, InterpolationMode.NEAREST_EXACT)
    return CenteredMask(planes.reshape(*mask.shape[:-2], *planes.shape[-2:]))


@functional.register_kernel(functional.resized_crop, CenteredMask)
def _crop_and_resize(
    mask: torch.Tensor, top: int, left: int, height: int, width: int, size: list[int], *_: Any, **__: Any
) -> Mask:
    return _resize(mask[..., top : top + height, left : left + width], size)


def make_object_features(label_names: Sequence[str], masks: Image | RunLengthMask | None) -> dict[str, Any]:
    """Return the type of a column of objects: boxes [x, y, width, height] px as in COCO, classes, areas and masks."""
    return {
        "bbox": List(List(Value("float64"))),
        "category": List(ClassLabel(names=list(label_names))),
        "area": List(Value("float64")),
        "iscrowd": List(Value("int64")),
        **({} if masks is None else {"segmentation": List(masks)}),
    }
