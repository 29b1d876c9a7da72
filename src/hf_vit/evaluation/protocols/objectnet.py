"""ObjectNet (Barbu et al., NeurIPS 2019): photographs of objects in odd places and poses, for ImageNet's classifiers.

Its authors' mapping tells which of ImageNet's classes are right for each of its own; the others are left out. Every
image has a red border, which is cut off as their loader does.
"""

import json
import os
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

    def values(self) -> dict[str, Any]:
        return {
            "top1": self.top1,
            "top5": self.top5,
            "top1_of_shared": self.top1_of_shared,
            "per_class": self.per_class,
        }

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
    """Accuracy of an ImageNet classifier on ObjectNet's images of the classes that both have.

    Args:
        examination: a classifier that calls ImageNet's classes by their words ("analog clock"), and ObjectNet's images
            by folder.
        mappings: the folder "mappings" that lies beside the images.

    Raises:
        UserError: no folder is given, it is of another layout, the model does not know a class, or no image is left.
    """
    if mappings is None:
        raise UserError("ObjectNet needs its authors' mapping to ImageNet; give the folder with --mappings DIR")
    right = right_classes(examination, Path(mappings))
    classes = examination.labels(examination.split)
    rows = [row for row in examination.judged_rows() if int(classes[row]) in right]
    if not rows:
        raise UserError("no image that judges is of a class that ImageNet has too; choose another --split")
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
    """Class of the data -> the model's classes that are right for it; without those that ImageNet does not have.

    Raises:
        UserError: the mapping is of another layout, or the model does not know a class of it.
    """
    labels, words = _read(folder / FOLDERS), _read(folder / CLASSES)
    known = {
        index: words[label].split("; ")
        for index, name in enumerate(examination.data.label_names)
        if (label := labels.get(name, name)) in words
    }
    answers = examination.subject.label_names(sorted({word for each in known.values() for word in each}))
    numbers = {name: index for index, name in enumerate(answers)}
    if unknown := sorted({word for each in known.values() for word in each} - set(numbers)):
        raise UserError(
            f"the model has no class '{unknown[0]}' (and {len(unknown) - 1} others of the mapping); ObjectNet needs an "
            "ImageNet classifier that calls its classes by their words"
        )
    return {index: [numbers[word] for word in each] for index, each in known.items()}


def _read(place: Path) -> Mapping[str, str]:
    if not place.is_file():
        raise UserError(f"there is no {place}; give the folder 'mappings' of objectnet-1.0")
    try:
        content: Any = json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place.name} is no JSON ({error}); unpack objectnet-1.0 again") from error
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise UserError(f"{place.name} is no table from names to names; unpack objectnet-1.0 again")
    return content  # pyright: ignore[reportUnknownVariableType]


def _without_border(prepare: "Callable[[Sequence[Image]], torch.Tensor]", images: "Sequence[Image]") -> torch.Tensor:
    if any(min(image.size) <= 2 * BORDER for image in images):
        raise UserError(f"an image is not larger than ObjectNet's border of {BORDER} px; unpack objectnet-1.0 again")
    return prepare([image.crop((BORDER, BORDER, image.width - BORDER, image.height - BORDER)) for image in images])
