"""Objects by box, class and, where model and data have them, mask: average precision by COCO's rules."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch

from hf_vit.data.overview import paint_objects
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.dense.meters import DetectionMeter
from hf_vit.evaluation.protocols.dense.pictures import (
    WorstImage,
    WorstImages,
    draw_classes,
    draw_worst,
)
from hf_vit.evaluation.protocols.dense.rows import DenseRows, answered, need_task
from hf_vit.evaluation.protocols.frame import ProtocolResult, Table, percent
from hf_vit.loading.outputs import detect

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES = {
    "ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "AP, small", "ap_medium": "AP, medium",
    "ap_large": "AP, large", "ar100": "AR, 100 answers",
}  # fmt: skip


_SHOWN_FROM = 0.5  # answers less sure are not drawn


@final
@dataclass(frozen=True, repr=False)
class DetectionResult(ProtocolResult):
    """What `detection` measured.

    Attributes:
        num_images, objects: that judged.
        measures: of boxes "ap" (mean over intersections over union of .5 to .95), "ap50", "ap75", "ap_small" (below
            32x32 px), "ap_medium", "ap_large" (above 96x96 px), "ar100" (recall of a hundred answers an image); of
            masks the same after "mask_". None where nothing of that size is there.
        ap_of_class, mask_ap_of_class: of each class that is there.
        worst: the images with the lowest average precision of boxes, worst first.
        seconds: wall time.
    """

    title: ClassVar[str] = "Detection"
    source: ClassVar[str] = "torchmetrics: MeanAveragePrecision, by pycocotools; COCO's rules (arXiv 1405.0312)"
    num_images: int
    objects: int
    measures: Mapping[str, float | None]
    ap_of_class: Mapping[str, float]
    mask_ap_of_class: Mapping[str, float] = field(default_factory=dict[str, float])
    worst: Sequence[WorstImage] = field(default=(), compare=False)
    seconds: float = field(default=0.0, compare=False)

    def values(self) -> dict[str, Any]:
        classes = {"ap": dict(self.ap_of_class)}
        classes |= {"mask_ap": dict(self.mask_ap_of_class)} if self.mask_ap_of_class else {}
        known = {name: value for name, value in self.measures.items() if value is not None}
        return {**known, "objects": self.objects, "classes": classes}

    def headline(self) -> dict[str, float]:
        shown = {f"{kind}{name}": text for kind in ("", "mask_") for name, text in list(_NAMES.items())[:2]}
        return {
            f"{'mask' if name.startswith('mask_') else 'box'} {text}": value
            for name, text in shown.items()
            if (value := self.measures.get(name)) is not None
        }

    def tables(self, judged: str) -> list[Table]:
        """The numbers, and the classes, the worst first."""
        has_masks = "mask_ap" in self.measures
        rows = [
            [text, *(_percent(self.measures.get(f"{kind}{name}")) for kind in ("", "mask_")[: 1 + has_masks])]
            for name, text in _NAMES.items()
        ]
        header = ["", "boxes", "masks"][: 2 + has_masks]
        classes = [
            [name, percent(value), *([_percent(self.mask_ap_of_class.get(name))] if has_masks else [])]
            for name, value in sorted(self.ap_of_class.items(), key=lambda item: item[1])
        ]
        title = f"{self.title}: {judged}, {self.objects:,} objects"
        return [Table(header, rows, title), Table(["class", "AP", "mask AP"][: 2 + has_masks], classes)]

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        return {
            f"{stem}.png": draw_classes(self.ap_of_class, "average precision of boxes"),
            f"{stem}_worst_images.png": draw_worst(self.worst, "AP") if self.worst else None,
        }


def _percent(value: float | None) -> str:
    return "-" if value is None else percent(value)


def result_of(meter: DetectionMeter, names: Sequence[str], worst: Sequence[WorstImage] = ()) -> DetectionResult:
    """What a meter has measured."""
    values = meter.values(names)
    of_class = {name: values.pop(name) for name in ("ap_of_class", "mask_ap_of_class") if name in values}
    return DetectionResult(meter.num_images, values.pop("objects"), values, **of_class, worst=worst)


def _has_masks(objects: Mapping[str, Any]) -> bool:
    return "segmentation" in objects and not any(mask is None for mask in objects["segmentation"])


def _stacked(masks: Sequence[Any], image: Any) -> torch.Tensor:
    """[n, H, W], of Pillow images."""
    drawn = [np.asarray(mask).astype(bool) for mask in masks]
    return torch.from_numpy(np.stack(drawn) if drawn else np.zeros((0, image.height, image.width), dtype=bool))


class ObjectRows(DenseRows):
    """Rows with objects: of each image their boxes [n, 4] x1 y1 x2 y2 px, labels, areas, crowds and, if all, masks."""

    target = "objects"

    def truth(self, row: Mapping[str, Any], image: Any) -> dict[str, torch.Tensor]:
        objects = row["objects"]
        boxes = torch.tensor(objects["bbox"], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        return {
            "boxes": boxes,
            "labels": torch.tensor([self.mapping[k] for k in objects["category"]], dtype=torch.int64),
            "iscrowd": torch.tensor(objects.get("iscrowd") or [0] * len(boxes), dtype=torch.int64),
            "area": torch.tensor(objects.get("area") or [0.0] * len(boxes), dtype=torch.float32),
            **({"masks": _stacked(objects["segmentation"], image)} if _has_masks(objects) else {}),
        }


def detection(examination: Examination, *, worst: int = 8) -> DetectionResult:
    """How well objects are found, at the size of the images themselves.

    Args:
        examination: a detector, and data with boxes.
        worst: images to draw.

    Raises:
        UserError: the data have no boxes, the model answers otherwise, or classes that the model does not know.
    """
    names = need_task(examination, "detection", ObjectRows.target)
    kept, start = WorstImages(worst), time.perf_counter()

    def answers(pixel_values: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> Iterator[Mapping[str, torch.Tensor]]:
        yield from detect(examination.subject.model, examination.subject.processor, pixel_values, sizes)

    meter: DetectionMeter | None = None
    for index, image, truth, answer in answered(examination, ObjectRows, names, answers):
        meter = meter or DetectionMeter("masks" in truth and "masks" in answer)
        meter.update(answer, truth)
        if worst:
            sure = {name: values[answer["scores"] >= _SHOWN_FROM] for name, values in answer.items()}
            pair = lambda image=image, truth=truth, sure=sure: (  # noqa: E731
                paint_objects(image, truth, names),
                paint_objects(image, sure, names),
            )
            kept.add(meter.image_score(answer, truth), index, pair)
    assert meter is not None  # a split without images was refused
    return replace(result_of(meter, names, kept.kept()), seconds=time.perf_counter() - start)
