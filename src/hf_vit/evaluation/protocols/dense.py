"""Segmentation and detection: metrics of torchmetrics and pycocotools, and plots of the worst images."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

import numpy as np
import torch

from hf_vit.data.annotations import IGNORED
from hf_vit.data.overview import paint_classes, paint_objects
from hf_vit.environment import require
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import (
    Extremes,
    ProtocolResult,
    Table,
    draw_classes,
    draw_images,
    make_thumbnail,
    percent,
    sort_worst_first,
)
from hf_vit.evaluation.reading import Collate
from hf_vit.loading.model import get_label_names, match_labels
from hf_vit.loading.outputs import detect, get_dense_task, limit_batch, segment

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

# In a training every process evaluates all images, so nothing is synchronized.
_NO_SYNC: Any = {"sync_on_compute": False}


def require_metrics() -> None:
    """Raise UserError if the libraries of the metrics are not installed."""
    require("torchmetrics", "pycocotools", purpose="measuring segmentation and detection", extra="dense")


@final
class SegmentationMeter:
    """IoU (intersection over union) and accuracies of class maps, from the pixel counts of all images together."""

    def __init__(self, num_classes: int) -> None:
        require_metrics()
        from torchmetrics.classification import MulticlassConfusionMatrix

        self._settings: dict[str, Any] = {"num_classes": num_classes, "ignore_index": IGNORED, "validate_args": False}
        self._matrix = MulticlassConfusionMatrix(**self._settings, **_NO_SYNC)
        self.num_images = 0

    def update(self, predicted: torch.Tensor, truth: torch.Tensor) -> None:
        """Add the class maps of an image, [H, W] with classes 0..K-1; the truth may contain `IGNORED`."""
        self._matrix.update(predicted.long().cpu()[None], truth.long().cpu()[None])
        self.num_images += 1

    def score_image(self, predicted: torch.Tensor, truth: torch.Tensor) -> float:
        """Return the mean IoU of one image; NaN if all of its pixels are ignored."""
        from torchmetrics.functional.classification import multiclass_jaccard_index

        return float(multiclass_jaccard_index(predicted.long().cpu()[None], truth.long().cpu()[None], **self._settings))

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """Compute the metrics of all images, over all classes and of every class with true or predicted pixels."""
        matrix = self._matrix.compute().double()
        truth, predicted, correct = matrix.sum(1), matrix.sum(0), matrix.diagonal()
        if not int(truth.sum()):
            raise UserError(f"no pixel of the {self.num_images:,} images has a labeled class; evaluate another --split")
        iou, accuracy = correct / (truth + predicted - correct), correct / truth  # NaN for classes without pixels
        rows = list(zip(names, iou.tolist(), accuracy.tolist(), truth.long().tolist(), strict=True))
        return {
            "mean_iou": float(iou.nanmean()),
            "pixel_accuracy": float(correct.sum() / truth.sum()),
            "mean_accuracy": float(accuracy.nanmean()),
            "iou": {name: value for name, value, *_ in rows if not math.isnan(value)},
            "accuracy": {name: value for name, _, value, pixels in rows if pixels},
            "pixels": {name: pixels for name, *_, pixels in rows if pixels},
        }


# Names of COCO's metrics in torchmetrics -> names here.
_COCO = {
    "map": "ap", "map_50": "ap50", "map_75": "ap75", "map_small": "ap_small", "map_medium": "ap_medium",
    "map_large": "ap_large", "mar_100": "ar100",
}  # fmt: skip


@final
class DetectionMeter:
    """Average precision of boxes, and of masks if `with_masks`, by COCO's rules.

    A prediction is {"boxes" [n, 4] x1 y1 x2 y2 px, "scores" [n], "labels" [n], with masks "masks" [n, H, W]} of n
    objects. A truth has no scores, but "iscrowd" [n] and "area" [n], which determines small and large objects (0: the
    area of the box or mask).
    """

    def __init__(self, with_masks: bool = False) -> None:
        require_metrics()
        from torchmetrics.detection import MeanAveragePrecision

        self.with_masks = with_masks
        kinds: Any = ("bbox", "segm") if with_masks else ("bbox",)
        # COCO's thresholds; torchmetrics rounds its own to float32, so that an IoU of 0.6 would not reach that of 0.6.
        rules: dict[str, Any] = {"iou_thresholds": np.linspace(0.5, 0.95, 10).tolist()}
        rules |= {"rec_thresholds": np.linspace(0, 1, 101).tolist(), "backend": "pycocotools", **_NO_SYNC}
        self._metric = MeanAveragePrecision(iou_type=kinds, class_metrics=True, **rules)
        self._image_metric = MeanAveragePrecision(iou_type="bbox", **rules)
        for metric in (self._metric, self._image_metric):
            metric.warn_on_many_detections = False  # COCO's rules use only the best 100 detections of an image
        self.num_images = self.num_objects = 0
        self.num_singles = 0  # objects that are no crowds

    def update(self, predicted: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> None:
        """Add the detected and the annotated objects of an image."""
        self._metric.update([self._to_cpu(predicted)], [self._to_cpu(truth)])
        self.num_images += 1
        self.num_objects += len(truth["labels"])
        # Crowds are ignored; without any other object there is no precision.
        self.num_singles += len(truth["labels"]) - int(sum(truth.get("iscrowd", ())))

    def score_image(self, predicted: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> float:
        """Return the average precision of the boxes of one image; NaN without objects, or if all objects are crowds."""
        if not len(truth["labels"]):
            return 0.0 if len(predicted["labels"]) else float("nan")
        self._image_metric.reset()
        self._image_metric.update([self._to_cpu(predicted)], [self._to_cpu(truth)])
        score = float(self._image_metric.compute()["map"])
        return score if score >= 0 else float("nan")  # torchmetrics returns -1 without objects

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """Compute the metrics of all images by name; those of masks begin with "mask_".

        Without objects of a size, torchmetrics returns -1 for its metrics, which become None here; classes without
        objects are left out.
        """
        if not self.num_singles:
            raise UserError(f"none of the {self.num_images:,} images has an annotated object; evaluate another --split")
        metrics: Mapping[str, torch.Tensor] = self._metric.compute()
        values: dict[str, Any] = {}
        kinds = {"": "bbox", "mask_": "segm"} if self.with_masks else {"": "bbox"}
        classes = metrics["classes"].reshape(-1).tolist()
        for prefix, kind in kinds.items():
            metric_prefix = f"{kind}_" if f"{kind}_map" in metrics else ""  # torchmetrics adds it only to two kinds
            for key, name in _COCO.items():
                value = float(metrics[metric_prefix + key])
                values[prefix + name] = value if value >= 0 else None
            precisions = zip(classes, metrics[f"{metric_prefix}map_per_class"].reshape(-1).tolist(), strict=True)
            values[f"{prefix}ap_of_class"] = {names[int(k)]: value for k, value in precisions if value >= 0}
        return values | {"objects": self.num_objects}

    def _to_cpu(self, image: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that torchmetrics takes, on the CPU."""
        keys = ["boxes", "labels", *(key for key in ("scores", "iscrowd", "area") if key in image)]
        tensors = {key: image[key].detach().cpu() for key in keys}
        if self.with_masks:
            tensors["masks"] = image["masks"].detach().cpu().bool()
        return tensors


_SIDE_PX = 320  # of an image in a plot


@final
@dataclass(frozen=True, order=True)
class WorstImage:
    """An image with a low score, its position among the evaluated images, and pictures of truth and prediction."""

    score: float
    index: int
    truth: "Image" = field(compare=False, repr=False)
    answer: "Image" = field(compare=False, repr=False)


def _make_worst_image(
    score: float, index: int, image: "Image", truth: Any, prediction: Any, paint: Any, names: Any
) -> WorstImage:
    """Make the entry of an image on which `paint`, which takes `names`, draws truth and prediction."""
    pictures = [make_thumbnail(paint(image, annotation, names), _SIDE_PX) for annotation in (truth, prediction)]
    return WorstImage(score, index, *pictures)


def draw_worst(worst: Sequence[WorstImage], measure: str) -> "Figure | None":
    """Draw truth and prediction side by side, one image per row, the worst first; `measure` is the score's name."""
    pictures: list[Image] = []
    titles: list[str] = []
    for entry in worst:
        pictures += [entry.truth, entry.answer]
        titles += [f"image {entry.index}: truth", f"prediction, {measure} {entry.score:.2%}"]
    return draw_images(pictures, titles, 2, (3.2, 3.2), 9) if worst else None


_ANNOTATIONS = {"mask": "masks", "objects": "boxes"}


# Reads the annotation of a row and its image, given the model's class for every class of the data.
ReadTruth = Callable[[Mapping[str, Any], "Image", Sequence[int]], Any]


def _collate(
    collate: Collate, read_truth: ReadTruth, rows: Sequence[Mapping[str, Any]]
) -> "tuple[torch.Tensor, list[Any], list[Image]]":
    """Collate rows to pixel values [B, C, H, W], the truth of every image, and the images."""
    images = collate.decode(rows)
    truths = [read_truth(row, image, collate.mapping) for row, image in zip(rows, images, strict=True)]
    return collate.prepare(images), truths, images


def require_task(examination: Examination, task: str, target: str) -> list[str]:
    """Return the classes of the model; raise UserError if model or data are for another task."""
    loaded = examination.loaded
    model_task = get_dense_task(loaded.model)
    if model_task != task:
        kind = f"a {model_task} model" if model_task else "a classifier"
        raise UserError(
            f"--protocol {task} needs a {task} model, but {loaded.name} is {kind}; choose --protocol "
            f"{model_task or 'top1'}, or give another model"
        )
    if examination.data.target != target:
        raise UserError(
            f"the images of '{examination.data.name}' have no {_ANNOTATIONS[target]}, which --protocol {task} needs; "
            f"give a data set with {_ANNOTATIONS[target]}"
        )
    return get_label_names(loaded.model)


def predict_dense(
    examination: Examination,
    read_truth: ReadTruth,
    names: Sequence[str],
    predict: Callable[..., Sequence[Any]],
) -> "Iterator[tuple[Image, Any, Any]]":
    """Iterate over (image, truth, prediction) of all evaluated images; `predict` is `segment` or `detect`."""
    loaded = examination.loaded
    batch_size = limit_batch(loaded.model, loaded.processor, examination.batch_size)
    examination = replace(examination, batch_size=batch_size)
    collate = Collate(loaded.prepare, match_labels(examination.data.label_names, names))
    with torch.inference_mode():
        for pixel_values, truths, images in examination.iterate(partial(_collate, collate, read_truth)):
            values = pixel_values.to(loaded.device, loaded.dtype)
            sizes = [image.size[::-1] for image in images]
            predictions = predict(loaded.model, loaded.processor, values, sizes)
            yield from zip(images, truths, predictions, strict=True)


@final
@dataclass(frozen=True, repr=False)
class SegmentationResult(ProtocolResult):
    """The result of `segmentation`; pixels with 255 in the truth are ignored.

    Attributes:
        num_images: number of evaluated images.
        mean_iou: mean IoU over the classes with true or predicted pixels.
        pixel_accuracy: share of correctly classified pixels.
        mean_accuracy: mean over the classes of the share of their correctly classified pixels.
        iou: IoU of the classes with true or predicted pixels.
        accuracy, pixels: accuracy and number of true pixels of the classes with true pixels.
        worst: the images with the lowest mean IoU, the worst first.
        seconds: wall time.
    """

    title: ClassVar[str] = "Segmentation"
    source: ClassVar[str] = "torchmetrics: MulticlassConfusionMatrix; ADE20K's rules (arXiv 1608.05442)"
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
        """Return the metrics, and the classes from the worst up."""
        rows = [[name, percent(value)] for name, value in self.headline().items()]
        classes = [
            [name, iou, percent(self.accuracy.get(name)), f"{self.pixels.get(name, 0):,}"]
            for name, iou in sort_worst_first(self.iou)
        ]
        return [Table([], rows, f"{self.title}: {judged}"), Table(["class", "IoU", "accuracy", "pixels"], classes)]

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        return {
            f"{stem}.png": draw_classes(self.iou, "intersection over union"),
            f"{stem}_worst_images.png": draw_worst(self.worst, "IoU"),
        }


def _read_mask(row: Mapping[str, Any], image: "Image", mapping: Sequence[int]) -> torch.Tensor:
    """Return the model's class number of every pixel, [H, W]."""
    table = torch.full((256,), IGNORED)
    table[: len(mapping)] = torch.tensor(mapping)
    return table[torch.from_numpy(np.asarray(row["mask"]).astype(np.int64))]


def segmentation(examination: Examination, *, worst: int = 8) -> SegmentationResult:
    """Measure the IoU and accuracy of segmentation at the original size of the images; draw the `worst` of them."""
    names = require_task(examination, "segmentation", "mask")
    if len(names) > IGNORED:
        raise UserError(f"the model has {len(names)} classes, but masks hold at most {IGNORED}; give one with fewer")
    meter = SegmentationMeter(len(names))
    worst_images = Extremes[WorstImage](worst)
    start = time.perf_counter()
    predictions = predict_dense(examination, _read_mask, names, segment)
    for index, (image, truth, prediction) in enumerate(predictions):
        meter.update(prediction, truth)
        if worst:
            score = meter.score_image(prediction, truth)
            entry = score, index, image, truth, prediction.cpu(), paint_classes, len(names)
            worst_images.add(-score, _make_worst_image, *entry)
    seconds = time.perf_counter() - start
    return SegmentationResult(meter.num_images, **meter.values(names), worst=worst_images.entries, seconds=seconds)


_NAMES = {
    "ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "AP, small", "ap_medium": "AP, medium",
    "ap_large": "AP, large", "ar100": "AR, 100 detections",
}  # fmt: skip


_DRAWN_FROM = 0.5  # objects with lower scores are not drawn


@final
@dataclass(frozen=True, repr=False)
class DetectionResult(ProtocolResult):
    """The result of `detection`.

    Attributes:
        num_images, objects: number of evaluated images and objects.
        measures: average precision of boxes: "ap" (mean over IoU thresholds .5 to .95), "ap50", "ap75", "ap_small"
            (below 32x32 px), "ap_medium", "ap_large" (above 96x96 px), and "ar100" (recall of 100 detections per
            image); the same for masks with the prefix "mask_". None without objects of this size.
        ap_of_class, mask_ap_of_class: average precision of the classes with objects.
        worst: the images with the lowest average precision of boxes, the worst first.
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
        """Return the metrics as facts.json records them."""
        classes = {"ap": dict(self.ap_of_class)}
        classes |= {"mask_ap": dict(self.mask_ap_of_class)} if self.mask_ap_of_class else {}
        measures = {name: value for name, value in self.measures.items() if value is not None}
        return {**measures, "objects": self.objects, "classes": classes}

    @classmethod
    def restore(cls, values: Mapping[str, Any], **others: Any) -> Self:
        measures = {name: value for name, value in values.items() if isinstance(value, float)}
        classes = {f"{name}_of_class": precisions for name, precisions in values["classes"].items()}
        return super().restore({**values, "classes": {}}, measures=measures, **classes, **others)

    def headline(self) -> dict[str, float]:
        titles = {"ap": "box AP", "ap50": "box AP50", "mask_ap": "mask AP", "mask_ap50": "mask AP50"}
        fractions = {title: self.measures.get(name) for name, title in titles.items()}
        return {title: value for title, value in fractions.items() if value is not None}

    def tables(self, judged: str) -> list[Table]:
        """Return the metrics, and the classes from the worst up."""
        measures, classes = ["", "boxes"], ["class", "AP"]
        measure_rows = [[text, percent(self.measures.get(name))] for name, text in _NAMES.items()]
        class_rows = sort_worst_first(self.ap_of_class)
        if "mask_ap" in self.measures:
            measures.append("masks")
            classes.append("mask AP")
            for name, row in zip(_NAMES, measure_rows, strict=True):
                row.append(percent(self.measures.get(f"mask_{name}")))
            for row in class_rows:
                row.append(percent(self.mask_ap_of_class.get(row[0])))
        title = f"{self.title}: {judged}, {self.objects:,} objects"
        return [Table(measures, measure_rows, title), Table(classes, class_rows)]

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        return {
            f"{stem}.png": draw_classes(self.ap_of_class, "average precision of boxes"),
            f"{stem}_worst_images.png": draw_worst(self.worst, "AP"),
        }


def _read_objects(row: Mapping[str, Any], image: "Image", mapping: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the truth of `DetectionMeter`: boxes (x1 y1 x2 y2 px), labels, and masks if all objects have one."""
    objects = row["objects"]
    boxes = torch.tensor(objects["bbox"], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    truth = {
        "boxes": boxes,
        "labels": torch.tensor([mapping[k] for k in objects["category"]], dtype=torch.int64),
        "iscrowd": torch.tensor(objects.get("iscrowd") or [0] * len(boxes), dtype=torch.int64),
        "area": torch.tensor(objects.get("area") or [0.0] * len(boxes), dtype=torch.float32),
    }
    object_masks = objects.get("segmentation")
    if object_masks is not None and None not in object_masks:
        masks = np.zeros((len(object_masks), image.height, image.width), dtype=bool)
        for mask, object_mask in zip(masks, object_masks, strict=True):
            mask[:] = np.asarray(object_mask).astype(bool)
        truth["masks"] = torch.from_numpy(masks)
    return truth


def detection(examination: Examination, *, worst: int = 8) -> DetectionResult:
    """Measure the average precision of detection at the original size of the images; draw the `worst` of them."""
    names = require_task(examination, "detection", "objects")
    worst_images = Extremes[WorstImage](worst)
    start = time.perf_counter()
    meter = None
    predictions = predict_dense(examination, _read_objects, names, detect)
    for index, (image, truth, prediction) in enumerate(predictions):
        meter = meter or DetectionMeter("masks" in truth and "masks" in prediction)
        meter.update(prediction, truth)
        if worst:
            drawn_objects = {name: values[prediction["scores"] >= _DRAWN_FROM] for name, values in prediction.items()}
            score = meter.score_image(prediction, truth)
            entry = score, index, image, truth, drawn_objects, paint_objects, names
            worst_images.add(-score, _make_worst_image, *entry)
    assert meter is not None  # `iterate` raises for a split without images
    values = meter.values(names)
    per_class = {name: values.pop(name) for name in ("ap_of_class", "mask_ap_of_class") if name in values}
    others: Any = {"worst": worst_images.entries, "seconds": time.perf_counter() - start}
    return DetectionResult(meter.num_images, values.pop("objects"), values, **per_class, **others)
