"""Column types of `datasets` for masks, which are decoded when a row is accessed."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Image, List, Value
from datasets.features.features import register_feature
from PIL import Image as Pillow

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
        """Decode a mask to a Pillow image of class numbers."""
        if isinstance(value, dict) and value["bytes"] is None:  # `datasets` would leave a truncated file open
            value = {"bytes": Path(value["path"]).read_bytes(), "path": None}
        mask = super().decode_example(value, token_per_repo_id)
        return Pillow.fromarray(read_class_numbers(mask, self.reduce_labels))


@dataclass
class RunLengthMask:
    """The mask of one object in COCO's compressed run lengths, decoded to an image of mode "1" by pycocotools."""

    dtype: ClassVar[str] = "PIL.Image.Image"
    pa_type: ClassVar[Any] = pa.struct({"size": pa.list_(pa.int32()), "counts": pa.binary()})
    _type: str = field(default="RunLengthMask", init=False, repr=False)

    def __call__(self) -> Any:
        return self.pa_type

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Pillow.Image:
        from pycocotools import mask

        return Pillow.fromarray(mask.decode(value).astype(np.bool_))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the function warns that it is experimental
    register_feature(ClassMask, "ClassMask")
    register_feature(RunLengthMask, "RunLengthMask")


def make_object_features(label_names: Sequence[str], masks: Image | RunLengthMask | None) -> dict[str, Any]:
    """Return the type of a column of objects: boxes [x, y, width, height] px as in COCO, classes, areas and masks."""
    return {
        "bbox": List(List(Value("float64"))),
        "category": List(ClassLabel(names=list(label_names))),
        "area": List(Value("float64")),
        "iscrowd": List(Value("int64")),
        **({} if masks is None else {"segmentation": List(masks)}),
    }
