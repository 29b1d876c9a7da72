"""Segmentation and detection: metrics one image after the other, by torchmetrics and pycocotools, and what is drawn."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch

from hf_vit.data.annotations import IGNORED
from hf_vit.data.overview import paint_classes, paint_objects
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import (
    Extremes,
    ProtocolResult,
    Table,
    draw_classes,
    draw_images,
    percent,
    thumbnail_of,
    worst_first,
)
from hf_vit.evaluation.reading import Collate
from hf_vit.loading.model import get_label_names, match_labels
from hf_vit.loading.outputs import detect, get_dense_task, segment

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

# Every process of a training judges all images by itself.
_ALONE: Any = {"sync_on_compute": False}


def need_metrics() -> None:
    """Refuse to go on without the libraries that measure dense predictions."""
    if absent := [name for name in ("torchmetrics", "pycocotools") if find_spec(name) is None]:
        raise UserError(f"segmentation and detection metrics need {' and '.join(absent)}: pip install 'hf-vit[dense]'")


@final
class SegmentationMeter:
    """Intersection over union and accuracies of class maps, from the pixel counts of all images together."""

    def __init__(self, num_classes: int) -> None:
        need_metrics()
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassJaccardIndex

        kinds: dict[str, Any] = {
            "mean_iou": (MulticlassJaccardIndex, {"average": "macro"}),
            "iou": (MulticlassJaccardIndex, {"average": "none"}),
            "pixel_accuracy": (MulticlassAccuracy, {"average": "micro"}),
            "accuracy": (MulticlassAccuracy, {"average": "none"}),
            "pixels": (MulticlassConfusionMatrix, {}),
        }
        self._settings: dict[str, Any] = {"num_classes": num_classes, "ignore_index": IGNORED, "validate_args": False}
        self._metrics = MetricCollection(
            {name: kind(**settings, **self._settings, **_ALONE) for name, (kind, settings) in kinds.items()}
        )
        self.num_images = 0

    def update(self, predicted: torch.Tensor, truth: torch.Tensor) -> None:
        """One image: class maps [H, W] with 0..K-1; the truth may hold `IGNORED`."""
        self._metrics.update(predicted.long().cpu()[None], truth.long().cpu()[None])
        self.num_images += 1

    def image_score(self, predicted: torch.Tensor, truth: torch.Tensor) -> float:
        """Mean intersection over union of one image by itself, NaN where none of its pixels judges."""
        from torchmetrics.functional.classification import multiclass_jaccard_index

        return float(multiclass_jaccard_index(predicted.long().cpu()[None], truth.long().cpu()[None], **self._settings))

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """Fractions by name: of all classes together, and of each class that is there or was answered."""
        counted: Mapping[str, torch.Tensor] = self._metrics.compute()
        truth, answered = counted["pixels"].sum(1), counted["pixels"].sum(0)
        if not int(truth.sum()):
            raise UserError(f"no pixel of the {self.num_images:,} images has a labeled class; choose another split")
        iou, accuracy, pixels = dict[str, float](), dict[str, float](), dict[str, int]()
        for k, name in enumerate(names):
            if truth[k] + answered[k] > 0:
                iou[name] = float(counted["iou"][k])
            if truth[k] > 0:
                accuracy[name], pixels[name] = float(counted["accuracy"][k]), int(truth[k])
        return {
            "mean_iou": float(counted["mean_iou"]),
            "pixel_accuracy": float(counted["pixel_accuracy"]),
            "mean_accuracy": sum(accuracy.values()) / len(accuracy),
            "iou": iou,
            "accuracy": accuracy,
            "pixels": pixels,
        }


# What torchmetrics calls the measurements of COCO -> what they are call_model here.
_COCO = {
    "map": "ap", "map_50": "ap50", "map_75": "ap75", "map_small": "ap_small", "map_medium": "ap_medium",
    "map_large": "ap_large", "mar_100": "ar100",
}  # fmt: skip


@final
class DetectionMeter:
    """Average precision as COCO has it, of boxes, and of masks where `with_masks`.

    A prediction is {"boxes" [n, 4] x1 y1 x2 y2 px, "scores" [n], "labels" [n], with masks "masks" [n, H, W]}; a truth
    has no scores, and besides "iscrowd" [n] and "area" [n], which decides what is small (0: the box's, the mask's).
    """

    def __init__(self, with_masks: bool = False) -> None:
        need_metrics()
        from torchmetrics.detection import MeanAveragePrecision

        self.with_masks = with_masks
        kinds: Any = ("bbox", "segm") if with_masks else ("bbox",)
        self._metric = MeanAveragePrecision(iou_type=kinds, class_metrics=True, backend="pycocotools", **_ALONE)
        self._of_one_image = MeanAveragePrecision(iou_type="bbox", backend="pycocotools", **_ALONE)
        for metric in (self._metric, self._of_one_image):
            metric.warn_on_many_detections = False  # COCO's rules cut more than a hundred answers an image off
        self.num_images = self.num_objects = self.num_singles = 0

    def update(self, predicted: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> None:
        """One image."""
        self._metric.update([self._plain(predicted)], [self._plain(truth)])
        self.num_images += 1
        self.num_objects += len(truth["labels"])
        crowds = truth.get("iscrowd")
        self.num_singles += len(truth["labels"]) - (0 if crowds is None else int(crowds.sum()))

    def image_score(self, predicted: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> float:
        """Average precision of the boxes of one image by itself, NaN where it has no object and none was answered, and
        where all of its objects are crowds.
        """
        if not len(truth["labels"]):
            return 0.0 if len(predicted["labels"]) else float("nan")
        self._of_one_image.reset()
        self._of_one_image.update([self._plain(predicted)], [self._plain(truth)])
        score = float(self._of_one_image.compute()["map"])
        return score if score >= 0 else float("nan")  # torchmetrics' -1: there was nothing to judge by

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """Fractions by name, None where nothing of that size is there; of masks under names that begin with "mask_"."""
        if not self.num_singles:
            raise UserError(f"none of the {self.num_images:,} images has an annotated object; choose another split")
        counted: Mapping[str, torch.Tensor] = self._metric.compute()
        values: dict[str, Any] = {}
        for prefix, kind in (("", "bbox"), ("mask_", "segm"))[: 1 + self.with_masks]:
            beginning = f"{kind}_" if f"{kind}_map" in counted else ""
            measured = {prefix + name: float(counted[beginning + key]) for key, name in _COCO.items()}
            values |= {name: value if value >= 0 else None for name, value in measured.items()}
            classes = counted["classes"].reshape(-1).tolist()
            each = counted[f"{beginning}map_per_class"].reshape(-1).tolist()
            of_class = zip(classes, each, strict=True)
            values[f"{prefix}ap_of_class"] = {names[int(k)]: value for k, value in of_class if value >= 0}
        return values | {"objects": self.num_objects}

    def _plain(self, image: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what torchmetrics takes, on the CPU."""
        keys = ["boxes", "labels", *(key for key in ("scores", "iscrowd", "area") if key in image)]
        plain = {key: image[key].detach().cpu() for key in keys}
        if self.with_masks:
            plain["masks"] = image["masks"].detach().cpu().bool()
        return plain


_SIDE_PX = 320  # of an image in a picture of several


@final
@dataclass(frozen=True, order=True)
class WorstImage:
    """An image that was answered badly: its score, its place among those that judge, truth and answer as pictures."""

    score: float
    index: int
    truth: "Image" = field(compare=False, repr=False)
    answer: "Image" = field(compare=False, repr=False)


def _worst_image(score: float, index: int, image: "Image", pair: tuple[Any, Any], paint: Any, names: Any) -> WorstImage:
    truth, answer = (thumbnail_of(paint(image, each, names), _SIDE_PX) for each in pair)
    return WorstImage(score, index, truth, answer)


def draw_worst(worst: Sequence[WorstImage], measure: str) -> "Figure | None":
    """Draw truth and answer side by side, an image a row, the worst first; `measure`: what its score is call_model."""
    pictures = [picture for entry in worst for picture in (entry.truth, entry.answer)]
    titles = ((f"image {each.index}: truth", f"answer, {measure} {each.score:.2%}") for each in worst)
    return draw_images(pictures, [title for pair in titles for title in pair], 2, (3.2, 3.2), 9) if worst else None


_WANTED = {"mask": "masks", "objects": "boxes"}


class DenseRows(Collate, ABC):
    """Abstract: rows of a data set -> pixel values [B, C, H, W], what is true of each image, and the images."""

    # Which `ImageData.target` its rows have.
    target: ClassVar[str]

    @abstractmethod
    def truth(self, row: Mapping[str, Any], image: "Image") -> Any:
        """Return what is true of an image, in the model's numbers of classes."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> "tuple[torch.Tensor, list[Any], list[Image]]":
        images = self.decode(rows)
        return self.prepare(images), [self.truth(row, image) for row, image in zip(rows, images, strict=True)], images


def need_task(examination: Examination, task: str, target: str) -> list[str]:
    """Return the classes of a model that does this task, on data for it."""
    subject, data = examination.subject, examination.data
    answered = get_dense_task(subject.model)
    if answered != task:
        other = f"does {answered}" if answered else "names images"
        raise UserError(f"{subject.name} {other}; choose --protocol {answered or 'top1'}, or give a model for {task}")
    if data.target != target:
        raise UserError(
            f"the images of '{data.name}' have no {_WANTED[target]}, which {task} is evaluated on; give data "
            "that have them"
        )
    return get_label_names(subject.model)


def answered(
    examination: Examination,
    kind: type[DenseRows],
    names: Sequence[str],
    predict: Callable[..., Sequence[Any]],
) -> "Iterator[tuple[int, Image, Any, Any]]":
    """(place, image, what is true, what the model answers) of every image that judges."""
    subject, index = examination.subject, 0
    collate = kind(subject.prepare, match_labels(examination.data.label_names, names))
    with torch.inference_mode():
        for pixel_values, truths, images in examination.iterate(collate):
            values, sizes = pixel_values.to(subject.device, subject.dtype), [image.size[::-1] for image in images]
            answers = predict(subject.model, subject.processor, values, sizes)
            for image, truth, answer in zip(images, truths, answers, strict=True):
                yield index, image, truth, answer
                index += 1


@final
@dataclass(frozen=True, repr=False)
class SegmentationResult(ProtocolResult):
    """What `segmentation` measured; a pixel of 255 in the truth judges nothing.

    Attributes:
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
        classes = {"iou": dict(self.iou), "accuracy": dict(self.accuracy), "pixels": dict(self.pixels)}
        fractions = {name: getattr(self, name) for name in ("mean_iou", "pixel_accuracy", "mean_accuracy")}
        return {**fractions, "classes": classes}

    def headline(self) -> dict[str, float]:
        return {"mean IoU": self.mean_iou, "pixel accuracy": self.pixel_accuracy, "class accuracy": self.mean_accuracy}

    def tables(self, judged: str) -> list[Table]:
        """Return the numbers, and the classes, the worst first."""
        rows = [[name, percent(value)] for name, value in self.headline().items()]
        classes = [
            [name, iou, percent(self.accuracy.get(name)), f"{self.pixels.get(name, 0):,}"]
            for name, iou in worst_first(self.iou)
        ]
        return [Table([], rows, f"{self.title}: {judged}"), Table(["class", "IoU", "accuracy", "pixels"], classes)]

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        return {
            f"{stem}.png": draw_classes(self.iou, "intersection over union"),
            f"{stem}_worst_images.png": draw_worst(self.worst, "IoU"),
        }


class MaskRows(DenseRows):
    """Rows with masks: of each image the model's class of every pixel, [H, W]."""

    target = "mask"

    def truth(self, row: Mapping[str, Any], image: Any) -> torch.Tensor:
        table = torch.full((256,), IGNORED)
        table[: len(self.mapping)] = torch.tensor(self.mapping)
        return table[torch.from_numpy(np.asarray(row["mask"]).astype(np.int64))]


def segmentation(examination: Examination, *, worst: int = 8) -> SegmentationResult:
    """Return how well the class of every pixel is told, at the size of the images themselves."""
    names = need_task(examination, "segmentation", MaskRows.target)
    if len(names) > IGNORED:
        raise UserError(f"the model has {len(names)} classes; masks tell {IGNORED} apart, as {IGNORED} is ignored")
    meter, kept, start = SegmentationMeter(len(names)), Extremes[WorstImage](worst), time.perf_counter()
    for index, image, truth, answer in answered(examination, MaskRows, names, segment):
        meter.update(answer, truth)
        if worst:
            score, pair = meter.image_score(answer, truth), (truth, answer.cpu())
            kept.add(-score, index, partial(_worst_image, score, index, image, pair, paint_classes, len(names)))
    seconds = time.perf_counter() - start
    return SegmentationResult(meter.num_images, **meter.values(names), worst=kept.kept(), seconds=seconds)


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
        shown = {f"{kind} {_NAMES[name]}": self.measures.get(f"{prefix}{name}")
                 for kind, prefix in (("box", ""), ("mask", "mask_")) for name in ("ap", "ap50")}  # fmt: skip
        return {name: value for name, value in shown.items() if value is not None}

    def tables(self, judged: str) -> list[Table]:
        """Return the numbers, and the classes, the worst first."""
        has_masks = "mask_ap" in self.measures
        rows = [
            [text, *(percent(self.measures.get(f"{kind}{name}")) for kind in ("", "mask_")[: 1 + has_masks])]
            for name, text in _NAMES.items()
        ]
        header = ["", "boxes", "masks"][: 2 + has_masks]
        classes = [
            [name, value, *([percent(self.mask_ap_of_class.get(name))] if has_masks else [])]
            for name, value in worst_first(self.ap_of_class)
        ]
        title = f"{self.title}: {judged}, {self.objects:,} objects"
        return [Table(header, rows, title), Table(["class", "AP", "mask AP"][: 2 + has_masks], classes)]

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        return {
            f"{stem}.png": draw_classes(self.ap_of_class, "average precision of boxes"),
            f"{stem}_worst_images.png": draw_worst(self.worst, "AP"),
        }


class ObjectRows(DenseRows):
    """Rows with objects: of each image their boxes [n, 4] x1 y1 x2 y2 px, labels, areas, crowds and, if all, masks."""

    target = "objects"

    def truth(self, row: Mapping[str, Any], image: Any) -> dict[str, torch.Tensor]:
        objects = row["objects"]
        drawn = objects.get("segmentation") if None not in (objects.get("segmentation") or ()) else None
        masks = {} if drawn is None else {"masks": _stack(drawn, image)}
        boxes = torch.tensor(objects["bbox"], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        return {
            "boxes": boxes,
            "labels": torch.tensor([self.mapping[k] for k in objects["category"]], dtype=torch.int64),
            "iscrowd": torch.tensor(objects.get("iscrowd") or [0] * len(boxes), dtype=torch.int64),
            "area": torch.tensor(objects.get("area") or [0.0] * len(boxes), dtype=torch.float32),
            **masks,
        }


def _stack(masks: Sequence[Any], image: "Image") -> torch.Tensor:
    """Return [n, H, W] of Pillow images."""
    drawn = [np.asarray(mask).astype(bool) for mask in masks]
    return torch.from_numpy(np.stack(drawn) if drawn else np.zeros((0, image.height, image.width), dtype=bool))


def detection(examination: Examination, *, worst: int = 8) -> DetectionResult:
    """Return how well objects are found, at the size of the images themselves."""
    names = need_task(examination, "detection", ObjectRows.target)
    kept, start, meter = Extremes[WorstImage](worst), time.perf_counter(), None
    for index, image, truth, answer in answered(examination, ObjectRows, names, detect):
        meter = meter or DetectionMeter("masks" in truth and "masks" in answer)
        meter.update(answer, truth)
        if worst:
            sure = {name: values[answer["scores"] >= _SHOWN_FROM] for name, values in answer.items()}
            score = meter.image_score(answer, truth)
            kept.add(-score, index, partial(_worst_image, score, index, image, (truth, sure), paint_objects, names))
    assert meter is not None  # a split without images was refused
    values = meter.values(names)
    of_class = {name: values.pop(name) for name in ("ap_of_class", "mask_ap_of_class") if name in values}
    measured: Any = {"worst": kept.kept(), "seconds": time.perf_counter() - start}
    return DetectionResult(meter.num_images, values.pop("objects"), values, **of_class, **measured)
