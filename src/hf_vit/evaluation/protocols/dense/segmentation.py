"""The class of every pixel: intersection over union and accuracies, over the pixels of all images together."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch

from hf_vit.data.annotations import IGNORED
from hf_vit.data.overview import paint_classes
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.dense.meters import SegmentationMeter
from hf_vit.evaluation.protocols.dense.pictures import (
    WorstImage,
    WorstImages,
    draw_classes,
    draw_worst,
)
from hf_vit.evaluation.protocols.dense.rows import DenseRows, answered, need_task
from hf_vit.evaluation.protocols.frame import ProtocolResult, Table, percent
from hf_vit.loading.outputs import segment

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
@dataclass(frozen=True, repr=False)
class SegmentationResult(ProtocolResult):
    """What `segmentation` measured; a pixel of 255 in the truth judges nothing.

    Attributes:
        num_images: images that judged.
        mean_iou: intersection over union, mean over the classes that are there or were answered.
        pixel_accuracy: share of the pixels whose class is right.
        mean_accuracy: of each class that is there the share of its pixels, their mean.
        iou: of each class that is there or was answered.
        accuracy, pixels: of each class that is there.
        worst: the images with the lowest mean intersection over union, worst first.
        seconds: wall time.
    """

    title: ClassVar[str] = "Segmentation"
    source: ClassVar[str] = (
        "torchmetrics: MulticlassJaccardIndex, MulticlassAccuracy; ADE20K's rules (arXiv 1608.05442)"
    )
    num_images: int
    mean_iou: float
    pixel_accuracy: float
    mean_accuracy: float
    iou: Mapping[str, float]
    accuracy: Mapping[str, float] = field(default_factory=dict[str, float])
    pixels: Mapping[str, int] = field(default_factory=dict[str, int])
    worst: Sequence[WorstImage] = field(default=(), compare=False)
    seconds: float = field(default=0.0, compare=False)

    def values(self) -> dict[str, Any]:
        return {
            "mean_iou": self.mean_iou,
            "pixel_accuracy": self.pixel_accuracy,
            "mean_accuracy": self.mean_accuracy,
            "classes": {"iou": dict(self.iou), "accuracy": dict(self.accuracy), "pixels": dict(self.pixels)},
        }

    def headline(self) -> dict[str, float]:
        return {"mean IoU": self.mean_iou, "pixel accuracy": self.pixel_accuracy, "class accuracy": self.mean_accuracy}

    def tables(self, judged: str) -> list[Table]:
        """The numbers, and the classes, the worst first."""
        rows = [[name, percent(value)] for name, value in self.headline().items()]
        worst_first = sorted(self.iou.items(), key=lambda item: item[1])
        classes = [
            [name, percent(iou), percent(self.accuracy[name]) if name in self.accuracy else "-",
             f"{self.pixels.get(name, 0):,}"]
            for name, iou in worst_first
        ]  # fmt: skip
        return [Table([], rows, f"{self.title}: {judged}"), Table(["class", "IoU", "accuracy", "pixels"], classes)]

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        return {
            f"{stem}.png": draw_classes(self.iou, "intersection over union"),
            f"{stem}_worst_images.png": draw_worst(self.worst, "IoU") if self.worst else None,
        }


class MaskRows(DenseRows):
    """Rows with masks: of each image the model's class of every pixel, [H, W]."""

    target = "mask"

    def truth(self, row: Mapping[str, Any], image: Any) -> torch.Tensor:
        table = torch.full((256,), IGNORED)
        table[: len(self.mapping)] = torch.tensor(self.mapping)
        return table[torch.from_numpy(np.asarray(row["mask"]).astype(np.int64))]


def segmentation(examination: Examination, *, worst: int = 8) -> SegmentationResult:
    """How well the class of every pixel is told, at the size of the images themselves.

    Args:
        examination: a segmentation model, and data with masks.
        worst: images to draw.

    Raises:
        UserError: the data have no masks, the model answers otherwise, it has more classes than masks of 8 bits, or it
            does not know the data's.
    """
    names = need_task(examination, "segmentation", MaskRows.target)
    if len(names) > IGNORED:
        raise UserError(f"the model has {len(names)} classes; masks tell {IGNORED} apart, as {IGNORED} judges nothing")
    meter, kept, start = SegmentationMeter(len(names)), WorstImages(worst), time.perf_counter()

    def answers(pixel_values: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
        yield from segment(examination.subject.model, examination.subject.processor, pixel_values, sizes)

    for index, image, truth, answer in answered(examination, MaskRows, names, answers):
        meter.update(answer, truth)
        if worst:
            pair = lambda image=image, truth=truth, answer=answer: (  # noqa: E731
                paint_classes(image, truth, len(names)),
                paint_classes(image, answer.cpu(), len(names)),
            )
            kept.add(meter.image_score(answer, truth), index, pair)
    seconds = time.perf_counter() - start
    return SegmentationResult(meter.num_images, **meter.values(names), worst=kept.kept(), seconds=seconds)
