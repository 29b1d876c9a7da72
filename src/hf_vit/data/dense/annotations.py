"""What a picture bears beside one label: a mask of classes, or objects with boxes; how both are stored in a table."""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from datasets import Features
    from numpy.typing import NDArray

Target = Literal["label", "mask", "objects"]
# The value of a mask where nobody is judged, as in transformers and torchvision.
IGNORED = 255


@dataclass(frozen=True, slots=True)
class Annotation:
    """What is known of one image's mask or objects.

    Attributes:
        digest: SHA-256 of what it says, however it is stored.
        amounts: class number -> its pixels (mask) or objects.
    """

    digest: str
    amounts: dict[int, int]


def mask_features() -> "Features":
    """Columns of a table for segmentation: "mask" has class numbers, or `IGNORED`."""
    from datasets import Features
    from datasets import Image as ImageFeature

    return Features({"image": ImageFeature(), "mask": ImageFeature()})


def object_features(label_names: Sequence[str], with_masks: bool) -> "Features":
    """Columns of a table for detection: boxes [x, y, width, height] in px as in COCO, masks of mode "1" where known."""
    from datasets import ClassLabel, Features, List, Value
    from datasets import Image as ImageFeature

    objects: dict[str, Any] = {
        "bbox": List(List(Value("float64"))),
        "category": List(ClassLabel(names=list(label_names))),
        "area": List(Value("float64")),
        "iscrowd": List(Value("int64")),
    }
    if with_masks:
        objects["segmentation"] = List(ImageFeature())
    return Features({"image": ImageFeature(), "objects": objects})


def mask_annotation(mask: "NDArray[np.generic]") -> Annotation:
    """Of a mask [H, W] of class numbers."""
    values, counts = np.unique(mask, return_counts=True)
    content = f"{mask.shape[0]} {mask.shape[1]} ".encode() + mask.astype(np.uint8).tobytes()
    amounts = {int(value): int(count) for value, count in zip(values, counts, strict=True) if value != IGNORED}
    return Annotation(hashlib.sha256(content).hexdigest(), amounts)


def object_annotation(objects: Mapping[str, Sequence[Any]], masks: "Sequence[NDArray[np.bool_] | None]") -> Annotation:
    """Of the objects of one image: {"bbox", "category", "area", "iscrowd"} and their masks [H, W], if there are any."""
    drawn = [None if mask is None else hashlib.sha256(np.packbits(mask).tobytes()).hexdigest() for mask in masks]
    lines = sorted(
        json.dumps(told)
        for told in zip(
            [list(map(float, box)) for box in objects["bbox"]],
            map(int, objects["category"]),
            map(int, objects["iscrowd"]),
            drawn or [None] * len(objects["bbox"]),
            strict=True,
        )
    )
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Annotation(digest, dict(Counter(map(int, objects["category"]))))


def tight_box(mask: "NDArray[np.bool_]") -> list[float]:
    """[x, y, width, height] px around what is true in a mask [H, W], where anything is."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    left, top = int(columns[0]), int(rows[0])
    return [float(left), float(top), float(columns[-1] + 1 - left), float(rows[-1] + 1 - top)]


def stored_mask(mask: "NDArray[np.generic]", kind: Literal["PNG", "PPM"] = "PNG") -> dict[str, Any]:
    """A mask as a table stores it: classes [H, W] as mode "L", true and false as mode "1"; PPM is not compressed."""
    file = io.BytesIO()
    Image.fromarray(mask if mask.dtype == np.bool_ else mask.astype(np.uint8)).save(file, kind)
    return {"bytes": file.getvalue(), "path": None}
