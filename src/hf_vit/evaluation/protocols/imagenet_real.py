"""ImageNet's validation images with reassessed labels (ReaL): all classes that people see in an image, perhaps none.

Source: arXiv 2006.07159. An answer is right if it is one of the image's labels; images without any are left out.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import ProtocolResult, Table, percent

_PUBLISHED = re.compile(r"ILSVRC2012_val_0*([1-9]\d*)\.\w+")


@final
@dataclass(frozen=True, repr=False)
class RealResult(ProtocolResult):
    """What `real` measured.

    Attributes:
        num_images: images that judged.
        num_labelled: those of them that have a reassessed label.
        top1: share of all images whose most likely class is the original label.
        real: share of the labelled ones whose most likely class is one of the reassessed labels; None without any.
    """

    title: ClassVar[str] = "ImageNet with reassessed labels (ReaL)"
    source: ClassVar[str] = "arXiv 2006.07159"
    num_images: int
    num_labelled: int
    top1: float
    real: float | None

    def values(self) -> dict[str, Any]:
        return {"top1": self.top1, "real": self.real, "num_labelled": self.num_labelled}

    def headline(self) -> dict[str, float]:
        return {"top-1 accuracy": self.top1, **({} if self.real is None else {"ReaL accuracy": self.real})}

    def tables(self, judged: str) -> list[Table]:
        real = "-" if self.real is None else percent(self.real)
        rows = [
            ["original labels", f"{self.num_images:,}", percent(self.top1)],
            ["reassessed labels (ReaL)", f"{self.num_labelled:,}", real],
        ]
        return [Table(["labels", "images", "accuracy"], rows, f"{self.title}: {judged}")]


def real(examination: Examination, *, real_labels: str | os.PathLike[str] | None = None) -> RealResult:
    """Accuracy by the original and by the reassessed labels of the same images, in one pass.

    Args:
        examination: a classifier, and ImageNet's validation images by class, the classes in the usual order (that of
            their WordNet numbers).
        real_labels: real.json as it is published; see `read_real_labels`.

    Raises:
        UserError: no file is given, or it does not fit the images or the classes.
    """
    if real_labels is None:
        raise UserError("ReaL needs the labels that were published with it; give the file with --real-labels real.json")
    labels = read_real_labels(real_labels, examination.file_names(), len(examination.data.label_names))
    seen = right = labelled = really = 0
    rows = iter(examination.judged_rows())
    for logits, truth in examination.logits(examination.split):
        answers = logits.argmax(dim=-1)
        right += int((answers == truth).sum())
        seen += len(truth)
        for answer in answers.tolist():
            classes = {examination.model_classes[label] for label in labels[next(rows)]}
            labelled += bool(classes)
            really += answer in classes
    return RealResult(seen, labelled, right / seen, really / labelled if labelled else None)


def read_real_labels(path: str | os.PathLike[str], file_names: Sequence[str], num_classes: int) -> list[list[int]]:
    """The reassessed labels of every image.

    Args:
        path: a JSON list with one list of class numbers an image, perhaps empty, in the order of the file names:
            the first is of ILSVRC2012_val_00000001.JPEG.
        file_names: of the images. Published names tell an image's place by their number, so that there may be fewer
            images than labels; of others there are as many, and their order tells it.
        num_classes: labels lie below.

    Raises:
        UserError: the file is missing or of another layout, or it does not fit the images.
    """
    place = Path(path)
    labels = _read(place, num_classes)
    numbers = [_PUBLISHED.fullmatch(name) for name in file_names]
    if all(numbers):
        indices: Mapping[str, int] = {found[0]: int(found[1]) - 1 for found in numbers if found is not None}
    else:
        indices = {name: index for index, name in enumerate(sorted(file_names))}
        if len(labels) != len(file_names):
            raise UserError(
                f"{place.name} has labels of {len(labels):,} images, the split has {len(file_names):,}, whose names "
                "are not ImageNet's (ILSVRC2012_val_00000001.JPEG); give the images as published, or as many"
            )
    if len(indices) != len(file_names):
        raise UserError(f"the split has two images of one file name, so that {place.name} cannot tell them apart")
    if (beyond := max(indices.values(), default=-1)) >= len(labels):
        raise UserError(f"{place.name} has labels of {len(labels):,} images, none of image number {beyond + 1:,}")
    return [labels[indices[name]] for name in file_names]


def _read(place: Path, num_classes: int) -> list[list[int]]:
    if not place.is_file():
        raise UserError(f"there is no file {place}; get real.json from google-research/reassessed-imagenet")
    try:
        labels: Any = json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place.name} is no JSON ({error}); get real.json again") from error
    if not isinstance(labels, list) or not all(_is_labels(each) for each in labels):  # pyright: ignore[reportUnknownVariableType]
        raise UserError(f"{place.name} is no list with a list of class numbers for every image; get real.json again")
    if outside := sorted({label for each in labels for label in each if not label < num_classes}):  # pyright: ignore[reportUnknownVariableType]
        raise UserError(
            f"{place.name} has the class {outside[0]}, the data has {num_classes:,}; give all of ImageNet's classes"
        )
    return labels  # pyright: ignore[reportUnknownVariableType]


def _is_labels(value: object) -> bool:
    return isinstance(value, list) and all(type(label) is int and label >= 0 for label in value)  # pyright: ignore[reportUnknownVariableType]
