"""Evaluate ImageNet classifiers with reassessed labels (ReaL, arXiv 2006.07159), and on ObjectNet.

ReaL labels are all classes that people see in an image. A prediction is correct if it is one of them; images without
any are left out. ObjectNet (Barbu et al., NeurIPS 2019) has photographs of objects in unusual places and poses. Its
authors' mapping gives the correct ImageNet classes for its classes; classes without any are left out. The red border of
every image is cut off.
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
from hf_vit.evaluation.protocols.frame import ProtocolResult, Table, percent, sort_worst_first
from hf_vit.evaluation.reading import find_largest

if TYPE_CHECKING:
    from PIL.Image import Image

_PUBLISHED = re.compile(r"ILSVRC2012_val_0*([1-9]\d*)(_n\d+)?\.\w+")  # the Hub's names end in the class


@final
@dataclass(frozen=True, repr=False)
class RealResult(ProtocolResult):
    """The result of `real`.

    Attributes:
        num_images: number of evaluated images.
        top1: accuracy with the original labels.
        real: accuracy with the reassessed labels, on the images that have any; None without such images.
        num_labelled: number of images with a reassessed label.
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
        rows = [
            ["original labels", f"{self.num_images:,}", percent(self.top1)],
            ["reassessed labels (ReaL)", f"{self.num_labelled:,}", percent(self.real)],
        ]
        return [Table(["labels", "images", "accuracy"], rows, f"{self.title}: {judged}")]


def real(examination: Examination, *, real_labels: str | os.PathLike[str] | None = None) -> RealResult:
    """Measure accuracy with the original and with the reassessed labels of the same images, in one pass."""
    if real_labels is None:
        raise UserError(
            "--protocol real needs the reassessed labels; download real.json from "
            "github.com/google-research/reassessed-imagenet and give it with --real-labels"
        )
    labels = read_real_labels(real_labels, examination.list_file_names(), len(examination.data.label_names))
    originals = examination.labels(examination.split).tolist()
    agreements = [label in classes for label, classes in zip(originals, labels, strict=True) if classes]
    if 2 * sum(agreements) < len(agreements):  # of ImageNet's 90%
        raise UserError(
            f"only {sum(agreements):,} of {len(agreements):,} images have their own class among their reassessed "
            "labels, so images or classes are in another order than ImageNet's; keep its file names, and name class "
            "folders by their WordNet numbers"
        )
    num_images = num_correct = num_labeled = num_real = 0
    rows = iter(examination.list_rows())
    for logits, truth in examination.iterate_logits(examination.split):
        predictions = logits.argmax(dim=-1)
        num_correct += int((predictions == truth).sum())
        num_images += len(truth)
        for prediction in predictions.tolist():
            classes = {examination.model_classes[label] for label in labels[next(rows)]}
            num_labeled += bool(classes)
            num_real += prediction in classes
    real_accuracy = num_real / num_labeled if num_labeled else None
    return RealResult(num_images, num_correct / num_images, real_accuracy, num_labeled)


def read_real_labels(path: str | os.PathLike[str], file_names: Sequence[str], num_classes: int) -> list[list[int]]:
    """Return the reassessed labels of every image, matched by the published file names or by their sorted order."""
    file = Path(path)
    remedy = "download real.json again"
    missing = f"{file} does not exist; download real.json from github.com/google-research/reassessed-imagenet"
    labels = _read_json(file, remedy, missing)
    if not isinstance(labels, list) or not all(map(_is_labels, labels)):
        raise UserError(f"{file.name} is not a list with the class numbers of each image; {remedy}")
    unknown_labels = sorted({label for row in labels for label in row if not label < num_classes})
    if unknown_labels:
        raise UserError(
            f"{file.name} has the class {unknown_labels[0]}, but the data set only has {num_classes:,} classes; give "
            "one with all classes of ImageNet"
        )
    indices = _index_images(file_names, len(labels), file.name)
    highest = max(indices.values(), default=-1)
    if highest >= len(labels):
        raise UserError(
            f"{file.name} has labels of {len(labels):,} images, but none of image number {highest + 1:,}; {remedy}"
        )
    return [labels[indices[name]] for name in file_names]


def _index_images(file_names: Sequence[str], num_labels: int, labels_name: str) -> dict[str, int]:
    """Return the index of every file in the published order, from the published names, else from the sorted names."""
    matches = [_PUBLISHED.fullmatch(name) for name in file_names]
    if all(matches):
        indices = {match[0]: int(match[1]) - 1 for match in matches if match is not None}
    else:
        indices = {name: index for index, name in enumerate(sorted(file_names))}
        if num_labels != len(file_names):
            raise UserError(
                f"{labels_name} has labels of {num_labels:,} images, but the split has {len(file_names):,} whose "
                "names are not ImageNet's (ILSVRC2012_val_00000001.JPEG); keep the published file names, or give "
                "all images in their published order"
            )
    if len(indices) != len(file_names):
        raise UserError(
            f"two images of the split have the same file name, so they cannot be matched with {labels_name}; "
            "keep ImageNet's published file names"
        )
    return indices


def _is_labels(value: Any) -> bool:
    """Return whether a value is a list of class numbers."""
    return isinstance(value, list) and all(type(label) is int and label >= 0 for label in cast(list[Any], value))


def _read_json(file: Path, remedy: str, missing: str) -> Any:
    """Read a JSON file; raise UserError with `missing` if it does not exist, or with `remedy` if it is damaged."""
    if not file.is_file():
        raise UserError(missing)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.name} is not valid JSON ({error}); {remedy}") from error


FOLDERS = "folder_to_objectnet_label.json"
CLASSES = "objectnet_to_imagenet_1k.json"
BORDER = 2  # px


@final
@dataclass(frozen=True, repr=False)
class ObjectNetResult(ProtocolResult):
    """The result of `objectnet` on images of the classes that ImageNet has, too.

    Attributes:
        num_images: number of evaluated images.
        top1, top5: accuracy with all classes of the model; a prediction is correct if it is one of the mapped classes.
        top1_of_shared: top-1 accuracy if the model predicts only classes of the mapping.
        per_class: top-1 accuracy of every class.
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
        """Return the tables of the headline metrics and of the ten worst classes."""
        rows = [[name, percent(value)] for name, value in self.headline().items()]
        worst = sort_worst_first(self.per_class, 10)
        title = f"the {len(worst)} worst of {len(self.per_class)} classes"
        return [Table([], rows, judged), Table(["class", "top-1 accuracy"], worst, title)]


def objectnet(examination: Examination, *, mappings: str | os.PathLike[str] | None = None) -> ObjectNetResult:
    """Measure the accuracy of an ImageNet classifier on the images of ObjectNet whose classes both have."""
    if mappings is None:
        raise UserError(
            "--protocol objectnet needs its authors' mapping to ImageNet; give the folder 'mappings' of "
            "objectnet-1.0 with --mappings"
        )
    mapped_classes = map_classes(examination, Path(mappings))
    classes = examination.labels(examination.split)
    rows = [row for row in examination.list_rows() if int(classes[row]) in mapped_classes]
    if not rows:
        raise UserError("no evaluated image has a class of ImageNet; evaluate another --split")
    loaded = replace(examination.loaded, prepare=partial(_cut_border_and_prepare, examination.loaded.prepare))
    shared = sorted({number for numbers in mapped_classes.values() for number in numbers})
    hits: list[tuple[bool, bool, bool]] = []  # of every image: top-1, top-5, top-1 among the shared classes
    hits_by_class: dict[int, list[bool]] = {}
    for logits, labels in replace(examination, loaded=loaded).iterate_data_logits(rows):
        best = find_largest(logits, 5).tolist()
        best_shared = logits[:, shared].argmax(dim=-1).tolist()
        for label, predictions, shared_prediction in zip(labels.tolist(), best, best_shared, strict=True):
            is_correct = [prediction in mapped_classes[label] for prediction in predictions]
            hits.append((is_correct[0], any(is_correct), shared[shared_prediction] in mapped_classes[label]))
            hits_by_class.setdefault(label, []).append(is_correct[0])
    top1, top5, top1_of_shared = (sum(column) / len(hits) for column in zip(*hits, strict=True))
    names = examination.data.label_names
    per_class = {names[label]: sum(of_class) / len(of_class) for label, of_class in sorted(hits_by_class.items())}
    return ObjectNetResult(len(hits), top1, top5, top1_of_shared, per_class)


def map_classes(examination: Examination, folder: Path) -> dict[int, list[int]]:
    """Return class of the data -> correct classes of the model, for all classes with an entry in the mapping."""
    labels = _read_names(folder / FOLDERS)
    words = _read_names(folder / CLASSES)
    words_by_class: dict[int, list[str]] = {}
    for index, name in enumerate(examination.data.label_names):
        label = labels.get(name, name)
        if label in words:
            words_by_class[index] = words[label].split("; ")
    all_words = sorted({word for class_words in words_by_class.values() for word in class_words})
    numbers = {name: index for index, name in enumerate(examination.loaded.label_names(all_words))}
    unknown = [word for word in all_words if word not in numbers]
    if unknown:
        raise UserError(
            f"the model lacks the class '{unknown[0]}' of ObjectNet's mapping (missing classes: {len(unknown)}); "
            "give a classifier with ImageNet's class names"
        )
    return {index: [numbers[word] for word in class_words] for index, class_words in words_by_class.items()}


def _read_names(file: Path) -> Mapping[str, str]:
    """Read a JSON file that maps names to names."""
    remedy = "unpack objectnet-1.0 again"
    content = _read_json(file, remedy, f"{file} does not exist; give the folder 'mappings' of objectnet-1.0")
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise UserError(f"{file.name} is not a JSON object from names to names; {remedy}")
    return content  # pyright: ignore[reportUnknownVariableType]


def _cut_border_and_prepare(
    prepare: "Callable[[Sequence[Image]], torch.Tensor]", images: "Sequence[Image]"
) -> torch.Tensor:
    """Cut the border off images and prepare them; raise UserError for an image that is not larger than the border."""
    if any(min(image.size) <= 2 * BORDER for image in images):
        raise UserError(
            f"an image is not larger than the red border of {BORDER} px that ObjectNet's images have; unpack "
            "objectnet-1.0 again"
        )
    return prepare([image.crop((BORDER, BORDER, image.width - BORDER, image.height - BORDER)) for image in images])
