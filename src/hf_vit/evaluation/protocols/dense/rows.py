"""How dense protocols read: images with what is true of them, beside what a model answers, one after the other."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hf_vit.data import to_rgb
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.loading.model import label_names_of, match_labels
from hf_vit.loading.outputs import dense_task_of

if TYPE_CHECKING:
    from PIL.Image import Image

_WANTED = {"mask": "masks", "objects": "boxes"}


class DenseRows(ABC):
    """Abstract: rows of a data set -> pixel values [B, C, H, W], what is true of each image, and the images.

    Args:
        prepare: Pillow images in RGB -> [B, C, H, W].
        mapping: for every class of the data the model's class of that name.
    """

    # Which `ImageData.target` its rows have.
    target: ClassVar[str]

    def __init__(self, prepare: "Callable[[Sequence[Image]], torch.Tensor]", mapping: Sequence[int]) -> None:
        self.prepare = prepare
        self.mapping = mapping

    @abstractmethod
    def truth(self, row: Mapping[str, Any], image: "Image") -> Any:
        """What is true of an image, in the model's numbers of classes."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> "tuple[torch.Tensor, list[Any], list[Image]]":
        images = [to_rgb(row["image"]) for row in rows]
        return self.prepare(images), [self.truth(row, image) for row, image in zip(rows, images, strict=True)], images


def need_task(examination: Examination, task: str, target: str) -> list[str]:
    """The classes of a model that does this task, on data for it.

    Raises:
        UserError: the model does something else, or the data have something else.
    """
    subject, data = examination.subject, examination.data
    answered = dense_task_of(subject.model)
    if answered != task:
        other = f"does {answered}" if answered else "names images"
        raise UserError(f"{subject.name} {other}; choose --protocol {answered or 'top1'}, or give a model for {task}")
    if data.target != target:
        raise UserError(f"the images of '{data.name}' have no {_WANTED[target]}, by which {task} is judged; give such")
    return label_names_of(subject.model)


def answered(
    examination: Examination,
    kind: type[DenseRows],
    names: Sequence[str],
    answers: Callable[[torch.Tensor, Sequence[tuple[int, int]]], Iterable[Any]],
) -> "Iterator[tuple[int, Image, Any, Any]]":
    """(place, image, what is true, what the model answers) of every image that judges.

    Args:
        examination: the model and the data.
        kind: of the rows.
        names: the model's classes.
        answers: pixel values [B, C, H, W] and the images' (height, width) px -> an answer each.
    """
    collate = kind(examination.subject.prepare, match_labels(examination.data.label_names, names))
    index = 0
    with torch.inference_mode():
        for pixel_values, truths, images in examination.read(collate):
            values = pixel_values.to(examination.subject.device, examination.subject.dtype)
            sizes = [(image.height, image.width) for image in images]
            for image, truth, answer in zip(images, truths, answers(values, sizes), strict=True):
                yield index, image, truth, answer
                index += 1
