"""Column types of `datasets` for masks, which are decoded when a row is asked for; imported when data is read."""

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

from hf_vit.data.annotations import class_numbers


@dataclass(repr=False)
class ClassMask(Image):
    """A file of class numbers, in whatever mode it was saved, decoded to one of mode "L".

    Attributes:
        reduce_labels: 0 means nothing that is judged, and every other number one less, as ADE20K counts.
    """

    reduce_labels: bool = False
    _type: str = field(default="ClassMask", init=False, repr=False)

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Pillow.Image:
        if isinstance(value, dict) and value["bytes"] is None:  # a file that is cut off would stay open
            value = {"bytes": Path(value["path"]).read_bytes(), "path": None}
        return Pillow.fromarray(class_numbers(super().decode_example(value, token_per_repo_id), self.reduce_labels))


@dataclass
class RunLengthMask:
    """One object's mask in COCO's compressed run lengths, decoded to an image of mode "1"; needs pycocotools."""

    dtype: ClassVar[str] = "PIL.Image.Image"
    pa_type: ClassVar[Any] = pa.struct({"size": pa.list_(pa.int32()), "counts": pa.binary()})
    _type: str = field(default="RunLengthMask", init=False, repr=False)

    def __call__(self) -> Any:
        return self.pa_type

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Pillow.Image:
        from pycocotools import mask

        return Pillow.fromarray(mask.decode(value).astype(np.bool_))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls itself experimental; without it a table does not know its own columns
    register_feature(ClassMask, "ClassMask")
    register_feature(RunLengthMask, "RunLengthMask")


def object_features(label_names: Sequence[str], masks: Image | RunLengthMask | None) -> dict[str, Any]:
    """Return the type of a column of objects: boxes [x, y, width, height] in px as in COCO, and masks, if any."""
    return {
        "bbox": List(List(Value("float64"))),
        "category": List(ClassLabel(names=list(label_names))),
        "area": List(Value("float64")),
        "iscrowd": List(Value("int64")),
        **({} if masks is None else {"segmentation": List(masks)}),
    }
