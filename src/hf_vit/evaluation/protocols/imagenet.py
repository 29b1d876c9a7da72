"""ImageNet classifiers on its images with reassessed labels (ReaL, arXiv 2006.07159), and on ObjectNet.

ReaL: all classes that people see in an image; an answer is right if it is one of them; images without any are left out.
ObjectNet (Barbu et al., NeurIPS 2019): photographs of objects in odd places and poses. Its authors' mapping tells which
of ImageNet's classes are right for each of its own; the others are left out. The red border of every image is cut off.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import ProtocolResult, Table, percent, worst_first
from hf_vit.evaluation.reading import largest

if TYPE_CHECKING:
    from PIL.Image import Image

_PUBLISHED = re.compile(r"ILSVRC2012_val_0*([1-9]\d*)\.\w+")


@final
@dataclass(frozen=True, repr=False)
class RealResult(ProtocolResult):
    """What `real` measured."""

    title: ClassVar[str] = "ImageNet with reassessed labels (ReaL)"
    source: ClassVar[str] = "arXiv 2006.07159"
    num_images: int
    top1: float  # share of all images whose most likely class is the original label
    real: float | None  # share of the labelled ones whose most likely class is one of the reassessed; None without any
    num_labelled: int  # images that have a reassessed label

    def headline(self) -> dict[str, float]:
        return {"top-1 accuracy": self.top1, **({} if self.real is None else {"ReaL accuracy": self.real})}

    def tables(self, judged: str) -> list[Table]:
        rows = [
            ["original labels", f"{self.num_images:,}", percent(self.top1)],
            ["reassessed labels (ReaL)", f"{self.num_labelled:,}", percent(self.real)],
        ]
        return [Table(["labels", "images", "accuracy"], rows, f"{self.title}: {judged}")]


def real(examination: Examination, *, real_labels: str | os.PathLike[str] | None = None) -> RealResult:
    """Measure accuracy by the original and by the reassessed labels of the same images, in one pass."""
    if real_labels is None:
        raise UserError("the protocol real needs the published labels; give them with --real-labels real.json")
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
    return RealResult(seen, right / seen, really / labelled if labelled else None, labelled)


def read_real_labels(path: str | os.PathLike[str], file_names: Sequence[str], num_classes: int) -> list[list[int]]:
    """Return the reassessed labels of every image."""
    place = Path(path)
    remedy = "download real.json again"
    missing = f"there is no file {place}; download real.json from google-research/reassessed-imagenet"
    labels = _read_json(place, remedy, missing)
    if not isinstance(labels, list) or not all(map(_is_labels, labels)):
        raise UserError(f"{place.name} is not a list of class numbers per image; {remedy}")
    if outside := sorted({label for each in labels for label in each if not label < num_classes}):
        raise UserError(
            f"{place.name} has the class {outside[0]}, the data has {num_classes:,}; give all of ImageNet's classes"
        )
    numbers = [_PUBLISHED.fullmatch(name) for name in file_names]
    if all(numbers):
        indices: Mapping[str, int] = {found[0]: int(found[1]) - 1 for found in numbers if found is not None}
    else:
        indices = {name: index for index, name in enumerate(sorted(file_names))}
        if len(labels) != len(file_names):
            raise UserError(
                f"{place.name} has labels of {len(labels):,} images, the split has {len(file_names):,}, "
                "whose file names are not ImageNet's (ILSVRC2012_val_00000001.JPEG); give all images in "
                "their published order, or with their published names"
            )
    if len(indices) != len(file_names):
        raise UserError(f"the split has two images of one file name, so that {place.name} cannot tell them apart")
    if (beyond := max(indices.values(), default=-1)) >= len(labels):
        raise UserError(f"{place.name} has labels of {len(labels):,} images, none of image number {beyond + 1:,}")
    return [labels[indices[name]] for name in file_names]


def _is_labels(value: Any) -> bool:
    return isinstance(value, list) and all(type(label) is int and label >= 0 for label in cast(list[Any], value))


def _read_json(place: Path, remedy: str, missing: str) -> Any:
    if not place.is_file():
        raise UserError(missing)
    try:
        return json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place.name} is not valid JSON ({error}); {remedy}") from error


FOLDERS, CLASSES = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
BORDER = 2  # px


@final
@dataclass(frozen=True, repr=False)
class ObjectNetResult(ProtocolResult):
    """What `objectnet` measured on images of the classes that ImageNet has too."""

    title: ClassVar[str] = "ObjectNet"
    source: ClassVar[str] = "Barbu et al., NeurIPS 2019"
    num_images: int
    top1: float  # share of images whose most likely class, of all of the model's, is one of the right ones
    top5: float  # share of images with a right one among the five most likely
    top1_of_shared: float  # top-1 accuracy where the model answers with the classes that both have alone
    per_class: dict[str, float]  # top-1 accuracy

    def headline(self) -> dict[str, float]:
        return {
            "ObjectNet top-1 accuracy": self.top1,
            "ObjectNet top-5 accuracy": self.top5,
            "ObjectNet top-1 accuracy, shared classes alone": self.top1_of_shared,
        }

    def tables(self, judged: str) -> list[Table]:
        rows = [[name, percent(value)] for name, value in self.headline().items()]
        worst = worst_first(self.per_class, 10)
        title = f"the {len(worst)} worst of {len(self.per_class)} classes"
        return [Table([], rows, judged), Table(["class", "top-1 accuracy"], worst, title)]


def objectnet(examination: Examination, *, mappings: str | os.PathLike[str] | None = None) -> ObjectNetResult:
    """Measure the accuracy of an ImageNet classifier on ObjectNet's images of the classes that both have."""
    if mappings is None:
        raise UserError("ObjectNet needs its authors' mapping to ImageNet; give the folder with --mappings DIR")
    right = right_classes(examination, Path(mappings))
    classes = examination.labels(examination.split)
    rows = [row for row in examination.judged_rows() if int(classes[row]) in right]
    if not rows:
        raise UserError("no evaluation image has a class that ImageNet has too; choose another --split")
    subject = replace(examination.subject, prepare=partial(_without_border, examination.subject.prepare))
    shared = list(right)
    hits: list[tuple[bool, bool, bool]] = []
    truth: list[int] = []
    for logits, labels in replace(examination, subject=subject).data_logits(rows):
        best = largest(logits, 5).tolist()
        among = torch.stack([logits[:, right[label]].amax(dim=-1) for label in shared], dim=-1).argmax(dim=-1)
        for label, answers, one in zip(labels.tolist(), best, among.tolist(), strict=True):
            is_right = [answer in right[label] for answer in answers]
            hits.append((is_right[0], any(is_right), shared[one] == label))
            truth.append(label)
    top1, top5, top1_of_shared = (sum(column) / len(hits) for column in zip(*hits, strict=True))
    per_class = {label: [hit for hit, of in zip(hits, truth, strict=True) if of == label] for label in sorted({*truth})}
    shares = {
        examination.data.label_names[label]: sum(hit for hit, *_ in each) / len(each)
        for label, each in per_class.items()
    }
    return ObjectNetResult(len(hits), top1, top5, top1_of_shared, shares)


def right_classes(examination: Examination, folder: Path) -> dict[int, list[int]]:
    """Return class of the data -> the model's classes that are right for it, where ImageNet has any."""
    labels, words = _read_names(folder / FOLDERS), _read_names(folder / CLASSES)
    known = {
        index: words[label].split("; ")
        for index, name in enumerate(examination.data.label_names)
        if (label := labels.get(name, name)) in words
    }
    words_of_all = sorted({word for each in known.values() for word in each})
    numbers = {name: index for index, name in enumerate(examination.subject.label_names(words_of_all))}
    if unknown := [word for word in words_of_all if word not in numbers]:
        raise UserError(
            f"the model has no class '{unknown[0]}' (and {len(unknown) - 1} others of the mapping); "
            "ObjectNet needs an ImageNet classifier whose class names are ImageNet's"
        )
    return {index: [numbers[word] for word in each] for index, each in known.items()}


def _read_names(place: Path) -> Mapping[str, str]:
    remedy = "unpack objectnet-1.0 again"
    content = _read_json(place, remedy, f"there is no {place}; give the folder 'mappings' of objectnet-1.0")
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise UserError(f"{place.name} does not map names to names; {remedy}")
    return content  # pyright: ignore[reportUnknownVariableType]


def _without_border(prepare: "Callable[[Sequence[Image]], torch.Tensor]", images: "Sequence[Image]") -> torch.Tensor:
    if any(min(image.size) <= 2 * BORDER for image in images):
        raise UserError(f"an image is not larger than ObjectNet's border of {BORDER} px; unpack objectnet-1.0 again")
    return prepare([image.crop((BORDER, BORDER, image.width - BORDER, image.height - BORDER)) for image in images])
