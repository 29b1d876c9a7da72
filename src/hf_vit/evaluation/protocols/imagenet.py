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
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import ProtocolResult, Table, percent
from hf_vit.evaluation.reading import largest

if TYPE_CHECKING:
    from PIL.Image import Image

_PUBLISHED = re.compile(r"ILSVRC2012_val_0*([1-9]\d*)\.\w+")


@final
@dataclass(frozen=True, repr=False)
class RealResult(ProtocolResult):
    """What `real` measured.

    Attributes:
        num_labelled: those of them that have a reassessed label.
        top1: share of all images whose most likely class is the original label.
        real: share of the labelled ones whose most likely class is one of the reassessed labels; None without any.
    """

    title: ClassVar[str] = "ImageNet with reassessed labels (ReaL)"
    source: ClassVar[str] = "arXiv 2006.07159"
    num_images: int
    top1: float
    real: float | None
    num_labelled: int

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
    """Accuracy by the original and by the reassessed labels of the same images, in one pass."""
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
    """The reassessed labels of every image."""
    place = Path(path)
    labels = _read(place, num_classes)
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


def _read(place: Path, num_classes: int) -> list[list[int]]:
    if not place.is_file():
        raise UserError(f"there is no file {place}; download real.json from google-research/reassessed-imagenet")
    try:
        labels: Any = json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place.name} is not valid JSON ({error}); download real.json again") from error
    if not isinstance(labels, list) or not all(_is_labels(each) for each in labels):  # pyright: ignore[reportUnknownVariableType]
        raise UserError(f"{place.name} is not a list of class numbers per image; download real.json again")
    if outside := sorted({label for each in labels for label in each if not label < num_classes}):  # pyright: ignore[reportUnknownVariableType]
        raise UserError(
            f"{place.name} has the class {outside[0]}, the data has {num_classes:,}; give all of ImageNet's classes"
        )
    return labels  # pyright: ignore[reportUnknownVariableType]


def _is_labels(value: object) -> bool:
    return isinstance(value, list) and all(type(label) is int and label >= 0 for label in value)  # pyright: ignore[reportUnknownVariableType]


FOLDERS, CLASSES = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
BORDER = 2  # px


@final
@dataclass(frozen=True, repr=False)
class ObjectNetResult(ProtocolResult):
    """What `objectnet` measured.

    Attributes:
        num_images: images that judged: those of classes that ImageNet has too.
        top1: share of images whose most likely class is one of the right ones, of all classes of the model.
        top5: share of images with a right one among the five most likely.
        top1_of_shared: top-1 accuracy where the model answers with the classes that both have alone.
        per_class: top-1 accuracy of every class that has images.
    """

    title: ClassVar[str] = "ObjectNet"
    source: ClassVar[str] = "Barbu et al., NeurIPS 2019"
    num_images: int
    top1: float
    top5: float
    top1_of_shared: float
    per_class: dict[str, float]

    def headline(self) -> dict[str, float]:
        return {
            "ObjectNet top-1 accuracy": self.top1,
            "ObjectNet top-5 accuracy": self.top5,
            "ObjectNet top-1 accuracy, shared classes alone": self.top1_of_shared,
        }

    def tables(self, judged: str) -> list[Table]:
        rows = [[name, percent(value)] for name, value in self.headline().items()]
        worst = sorted(self.per_class.items(), key=lambda item: item[1])[:10]
        title = f"the {len(worst)} worst of {len(self.per_class)} classes"
        classes = [[name, percent(value)] for name, value in worst]
        return [Table([], rows, judged), Table(["class", "top-1 accuracy"], classes, title)]


def objectnet(examination: Examination, *, mappings: str | os.PathLike[str] | None = None) -> ObjectNetResult:
    """Accuracy of an ImageNet classifier on ObjectNet's images of the classes that both have."""
    if mappings is None:
        raise UserError("ObjectNet needs its authors' mapping to ImageNet; give the folder with --mappings DIR")
    right = right_classes(examination, Path(mappings))
    classes = examination.labels(examination.split)
    rows = [row for row in examination.judged_rows() if int(classes[row]) in right]
    if not rows:
        raise UserError("no evaluation image has a class that ImageNet has too; choose another --split")
    subject = replace(examination.subject, prepare=partial(_without_border, examination.subject.prepare))
    shared = list(right)
    hits: list[tuple[int, bool, bool, bool]] = []
    for logits, labels in replace(examination, subject=subject).data_logits(rows):
        best = largest(logits, 5).tolist()
        among = torch.stack([logits[:, right[label]].amax(dim=-1) for label in shared], dim=-1).argmax(dim=-1)
        for label, answers, one in zip(labels.tolist(), best, among.tolist(), strict=True):
            allowed = right[label]
            in_five = any(answer in allowed for answer in answers)
            hits.append((label, answers[0] in allowed, in_five, shared[one] == label))
    names = examination.data.label_names
    per_class = {label: [hit for of, hit, *_ in hits if of == label] for label in {label for label, *_ in hits}}
    return ObjectNetResult(
        num_images=len(hits),
        top1=sum(hit for _, hit, _, _ in hits) / len(hits),
        top5=sum(hit for _, _, hit, _ in hits) / len(hits),
        top1_of_shared=sum(hit for *_, hit in hits) / len(hits),
        per_class={names[label]: sum(each) / len(each) for label, each in sorted(per_class.items())},
    )


def right_classes(examination: Examination, folder: Path) -> dict[int, list[int]]:
    """Class of the data -> the model's classes that are right for it; without those that ImageNet does not have."""
    labels, words = _read_names(folder / FOLDERS), _read_names(folder / CLASSES)
    known = {
        index: words[label].split("; ")
        for index, name in enumerate(examination.data.label_names)
        if (label := labels.get(name, name)) in words
    }
    answers = examination.subject.label_names(sorted({word for each in known.values() for word in each}))
    numbers = {name: index for index, name in enumerate(answers)}
    if unknown := sorted({word for each in known.values() for word in each} - set(numbers)):
        raise UserError(
            f"the model has no class '{unknown[0]}' (and {len(unknown) - 1} others of the mapping); "
            "ObjectNet needs an ImageNet classifier whose class names are ImageNet's"
        )
    return {index: [numbers[word] for word in each] for index, each in known.items()}


def _read_names(place: Path) -> Mapping[str, str]:
    if not place.is_file():
        raise UserError(f"there is no {place}; give the folder 'mappings' of objectnet-1.0")
    try:
        content: Any = json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place.name} is not valid JSON ({error}); unpack objectnet-1.0 again") from error
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise UserError(f"{place.name} does not map names to names; unpack objectnet-1.0 again")
    return content  # pyright: ignore[reportUnknownVariableType]


def _without_border(prepare: "Callable[[Sequence[Image]], torch.Tensor]", images: "Sequence[Image]") -> torch.Tensor:
    if any(min(image.size) <= 2 * BORDER for image in images):
        raise UserError(f"an image is not larger than ObjectNet's border of {BORDER} px; unpack objectnet-1.0 again")
    return prepare([image.crop((BORDER, BORDER, image.width - BORDER, image.height - BORDER)) for image in images])
