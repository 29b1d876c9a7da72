"""The tasks of segmentation, from masks, and detection, from boxes: a new head on a backbone."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast, final

import transformers
from torch import nn
from transformers import PreTrainedModel

from hf_vit.data import ImageData, dense_collator, dense_transforms
from hf_vit.data.transforms import refuse_image_only
from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.dense import (
    DetectionMeter,
    DetectionResult,
    SegmentationMeter,
    SegmentationResult,
    require_metrics,
)
from hf_vit.families import DENSE_HEADS, DenseTask
from hf_vit.loading.outputs import class_maps, detections
from hf_vit.results.facts import Record
from hf_vit.training.dense_model import build_dense_model
from hf_vit.training.plan import Run, Start, configure_weights
from hf_vit.training.tasks.task import MeasuredTask, find_active_settings
from hf_vit.training.trainer.dense_trainer import DenseTrainer, Judge, Judged
from hf_vit_settings import Recipe

# Settings of a recipe that apply to class labels only.
_LABEL_SETTINGS = (
    *("loss", "class_weights", "balanced_sampling", "label_smoothing", "new_head", "head_bias"),
    *("sam_rho", "repeated_augmentation"),
)
_DETECTION_KEYS = ("boxes", "scores", "labels")
# The meter's key -> the key in the labels of a batch.
_TRUTH_KEYS = {"boxes": "boxes", "labels": "class_labels", "iscrowd": "iscrowd"}


def _list_sizes(batch: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (height, width) px of every image of a batch."""
    count, _, height, width = batch["pixel_values"].shape
    return [(int(height), int(width))] * count


def segmentation_judge(processor: Any, names: list[str]) -> Judge:
    """Make the judge of segmentation, which counts the pixels of every class and computes the mean IoU."""
    meter = SegmentationMeter(len(names))

    def pair_maps(outputs: Any, batch: Mapping[str, Any]) -> list[Judged]:
        maps = class_maps(outputs, processor, _list_sizes(batch))
        return [(class_map.cpu(), truth.cpu()) for class_map, truth in zip(maps, batch["labels"], strict=True)]

    def compute_scores() -> dict[str, float]:
        values = meter.values(names)
        return {name: values[name] for name in ("mean_iou", "pixel_accuracy")} | {"score": values["mean_iou"]}

    return Judge(meter.update, pair_maps, compute_scores)


def detection_judge(processor: Any, names: list[str]) -> Judge:
    """Make the judge of detection, which computes the average precision of boxes."""
    meter = DetectionMeter()

    def pair_boxes(outputs: Any, batch: Mapping[str, Any]) -> list[Judged]:
        predictions = detections(outputs, processor, _list_sizes(batch))
        boxes = [{name: image[name].cpu() for name in _DETECTION_KEYS} for image in predictions]
        labels = batch["labels"]
        truths = [{name: image[key].cpu() for name, key in _TRUTH_KEYS.items() if key in image} for image in labels]
        return list(zip(boxes, truths, strict=True))

    def compute_scores() -> dict[str, float]:
        values = meter.values(names)
        return {"ap": values["ap"] or 0.0, "ap50": values["ap50"] or 0.0, "score": values["ap"] or 0.0}

    return Judge(meter.update, pair_boxes, compute_scores)


class HeadTask(MeasuredTask):
    """Abstract: trains a head of `DENSE_HEADS`, by default the task's first, with `width` channels on a backbone."""

    trainer_class = DenseTrainer
    streams = False
    # Some parameters get no gradient: those of a box head in a batch without objects, the last norm of a BiT always.
    arguments: ClassVar[dict[str, Any]] = {"ddp_find_unused_parameters": True}
    task: ClassVar[DenseTask]  # pyright: ignore[reportIncompatibleVariableOverride] - never None in subclasses
    # The function that makes the judge of the validation split.
    judge: ClassVar[Callable[[Any, list[str]], Judge]]

    def __init__(self, head: str | None = None, width: int | None = None) -> None:
        heads = [name for name, kind in DENSE_HEADS.items() if kind.task == self.task]
        self.head, self.width = heads[0] if head is None else head, width
        if self.head not in heads:
            raise UserError(f"unknown head '{head}' for {self.task}; choose {', '.join(heads)}")
        self.auto_class = getattr(transformers, DENSE_HEADS[self.head].auto_class)
        if width is not None and width < 1:
            raise UserError(f"--head-width is {width}, but a head needs at least 1 channel; choose a positive width")

    def protocol(self, data: ImageData) -> str:
        return self.task

    def settings(self) -> dict[str, Any]:
        return {"task": self.task, "head": self.head, "head_width": self.width}

    def check(self, recipe: Recipe) -> None:
        require_metrics()
        adapter = {"tune": "lora"} if recipe.tune == "lora" else {}  # heads have queries and values of their own
        for name, value in (find_active_settings(recipe, _LABEL_SETTINGS) | adapter).items():
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{self.task} does not support {flag} ({value}); leave it out, or choose a recipe for {self.task}"
            )
        refuse_image_only(recipe.augmentation)

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        data, features = start.data, cast(Any, start.data.split("train")).features
        return build_dense_model(
            start.source,
            self.head,
            data.label_names,
            image_size=start.image_size,
            width=self.width,
            use_masks=data.target == "objects" and "segmentation" in features["objects"],
            backbone_dropout=recipe.dropout,
            drop_path=recipe.drop_path,
            **recipe.architecture,
        )

    def transforms(self, run: Run) -> tuple[Any, Any]:
        return dense_transforms(run.processor, self.target, run.recipe.augmentation, run.options.seed)

    def collator(self, run: Run) -> Callable[..., Any]:
        return dense_collator

    def describe(self, run: Run) -> str:
        return f"{run.describe()}; {self.task}, head {self.head}"

    def prepare_trainer(self, run: Run) -> dict[str, Any]:
        return {
            "new_judge": lambda: type(self).judge(run.processor, run.data.label_names),
            **configure_weights(run),
        }


@final
class Segmentation(HeadTask):
    """Segmentation: learns a class for every pixel from masks."""

    recipe = "segmentation-small"
    target = "mask"
    task = "segmentation"
    metrics = ("mean_iou", "pixel_accuracy")
    judge = segmentation_judge

    def restore_test(self, evaluation: Record, model: PreTrainedModel) -> SegmentationResult:
        test: dict[str, Any] = dict(evaluation.values)
        scores = {name: test[name] for name in ("mean_iou", "pixel_accuracy", "mean_accuracy")}
        size = (evaluation.data and evaluation.data.size) or 0
        return SegmentationResult(size, **scores, **test["classes"], seconds=evaluation.seconds or 0.0)


@final
class Detection(HeadTask):
    """Detection: learns boxes, and outlines of the objects if the data have masks and the head a branch for them."""

    recipe = "detection-small"
    target = "objects"
    task = "detection"
    metrics = ("ap", "ap50")
    judge = detection_judge

    def restore_test(self, evaluation: Record, model: PreTrainedModel) -> DetectionResult:
        test: dict[str, Any] = dict(evaluation.values)
        classes = cast(dict[str, dict[str, float]], test.pop("classes"))
        objects = int(test.pop("objects"))
        return DetectionResult(
            (evaluation.data and evaluation.data.size) or 0,
            objects,
            {name: value for name, value in test.items() if isinstance(value, float)},
            classes["ap"],
            classes.get("mask_ap", {}),
            seconds=evaluation.seconds or 0.0,
        )
