"""The metrics of dense predictions, one image after the other; all arithmetic is torchmetrics' and pycocotools'."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, final

import torch

from hf_vit.data.annotations import IGNORED
from hf_vit.errors import UserError

# Every process of a training judges all images by itself.
_ALONE: Any = {"sync_on_compute": False}


def need_metrics() -> None:
    """Refuse to go on without the libraries that measure dense predictions.

    Raises:
        UserError: one of them is not installed.
    """
    if absent := [name for name in ("torchmetrics", "pycocotools") if find_spec(name) is None]:
        raise UserError(
            f"dense predictions are measured by {' and '.join(absent)}, not installed here: pip install 'hf-vit[dense]'"
        )


@final
class SegmentationMeter:
    """Intersection over union and accuracies of class maps, from the pixel counts of all images together.

    Args:
        num_classes: K, two or more.
    """

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
        """Fractions by name: of all classes together, and of each class that is there or was answered.

        Raises:
            UserError: no pixel judges.
        """
        counted: Mapping[str, torch.Tensor] = self._metrics.compute()
        truth, answered = counted["pixels"].sum(1), counted["pixels"].sum(0)
        if not int(truth.sum()):
            raise UserError(f"no pixel of the {self.num_images:,} images has a class to judge by; choose another split")
        there, named = (truth > 0).tolist(), ((truth + answered) > 0).tolist()
        accuracy = {names[k]: float(counted["accuracy"][k]) for k in range(len(names)) if there[k]}
        return {
            "mean_iou": float(counted["mean_iou"]),
            "pixel_accuracy": float(counted["pixel_accuracy"]),
            "mean_accuracy": sum(accuracy.values()) / len(accuracy),
            "iou": {names[k]: float(counted["iou"][k]) for k in range(len(names)) if named[k]},
            "accuracy": accuracy,
            "pixels": {names[k]: int(truth[k]) for k in range(len(names)) if there[k]},
        }


# What torchmetrics calls the measurements of COCO -> what they are called here.
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
        # More than a hundred answers an image are cut off on purpose, as COCO's rules have it.
        self._metric.warn_on_many_detections = False
        self._of_one_image = MeanAveragePrecision(iou_type="bbox", backend="pycocotools", **_ALONE)
        self._of_one_image.warn_on_many_detections = False
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
        """Fractions by name, None where nothing of that size is there; of masks under names that begin with "mask_".

        Raises:
            UserError: there is no object.
        """
        if not self.num_singles:
            raise UserError(f"none of the {self.num_images:,} images has an object to judge by; choose another split")
        counted: Mapping[str, torch.Tensor] = self._metric.compute()
        values: dict[str, Any] = {}
        for prefix, kind in (("", "bbox"), ("mask_", "segm"))[: 1 + self.with_masks]:
            beginning = f"{kind}_" if f"{kind}_map" in counted else ""
            values |= {prefix + name: _known(counted[beginning + key]) for key, name in _COCO.items()}
            classes = counted["classes"].reshape(-1).tolist()
            each = counted[f"{beginning}map_per_class"].reshape(-1).tolist()
            of_class = zip(classes, each, strict=True)
            values[f"{prefix}ap_of_class"] = {names[int(k)]: value for k, value in of_class if value >= 0}
        return values | {"objects": self.num_objects}

    def _plain(self, image: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What torchmetrics takes, on the CPU."""
        keys = ["boxes", "labels", *(key for key in ("scores", "iscrowd", "area") if key in image)]
        plain = {key: image[key].detach().cpu() for key in keys}
        if self.with_masks:
            plain["masks"] = image["masks"].detach().cpu().bool()
        return plain


def _known(value: torch.Tensor) -> float | None:
    return float(value) if float(value) >= 0 else None
