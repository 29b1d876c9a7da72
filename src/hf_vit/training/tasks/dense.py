"""Segmentation from masks and detection from boxes: a head on a backbone, joint transforms, one protocol."""

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
    need_metrics,
)
from hf_vit.families import DENSE_HEADS, DenseTask
from hf_vit.loading.outputs import class_maps, detections
from hf_vit.results.facts import Record
from hf_vit.training.dense_model import build_dense_model
from hf_vit.training.plan import Run, Start
from hf_vit.training.tasks.task import MeasuredTask, active_settings
from hf_vit.training.trainer.dense_trainer import DenseTrainer, Judge, Judged
from hf_vit_settings import Recipe

_OF_LABELS = (
    *("loss", "class_weights", "balanced_sampling", "label_smoothing", "new_head", "head_bias"),
    *("tune", "sam_rho", "repeated_augmentation"),
)
_ANSWER = ("boxes", "scores", "labels")
_TRUTH = {"boxes": "boxes", "labels": "class_labels", "iscrowd": "iscrowd"}


def _sizes(batch: Mapping[str, Any]) -> list[tuple[int, int]]:
    count, _, height, width = batch["pixel_values"].shape
    return [(int(height), int(width))] * count


def segmentation_judge(processor: Any, names: list[str]) -> Judge:
    """Return what counts pixels."""
    meter = SegmentationMeter(len(names))

    def answers(outputs: Any, batch: Mapping[str, Any]) -> list[Judged]:
        maps = class_maps(outputs, processor, _sizes(batch))
        return [(answer.cpu(), truth.cpu()) for answer, truth in zip(maps, batch["labels"], strict=True)]

    def metrics() -> dict[str, float]:
        values = meter.values(names)
        return {name: values[name] for name in ("mean_iou", "pixel_accuracy")} | {"score": values["mean_iou"]}

    return Judge(meter.update, answers, metrics)


def detection_judge(processor: Any, names: list[str]) -> Judge:
    """Return what measures the average precision of boxes."""
    meter = DetectionMeter()

    def answers(outputs: Any, batch: Mapping[str, Any]) -> list[Judged]:
        boxes = [{name: each[name].cpu() for name in _ANSWER} for each in detections(outputs, processor, _sizes(batch))]
        truths = [{name: each[key].cpu() for name, key in _TRUTH.items() if key in each} for each in batch["labels"]]
        return list(zip(boxes, truths, strict=True))

    def metrics() -> dict[str, float]:
        values = meter.values(names)
        return {"ap": values["ap"] or 0.0, "ap50": values["ap50"] or 0.0, "score": values["ap"] or 0.0}

    return Judge(meter.update, answers, metrics)


class HeadTask(MeasuredTask):
    """Abstract: a head of `DENSE_HEADS`, by default the task's first, of `width` channels on one of the backbones."""

    trainer_class = DenseTrainer
    streams = False
    # Without objects in a batch a box head has no gradient; nor has the last norm of a BiT, which no map passes.
    arguments: ClassVar[dict[str, Any]] = {"ddp_find_unused_parameters": True}
    task: ClassVar[DenseTask]  # pyright: ignore[reportIncompatibleVariableOverride] - of these never None
    # What makes the judge of the validation split.
    judge: ClassVar[Callable[[Any, list[str]], Judge]]

    def __init__(self, head: str | None = None, width: int | None = None) -> None:
        heads = [name for name, each in DENSE_HEADS.items() if each.task == self.task]
        self.head, self.width = heads[0] if head is None else head, width
        if self.head not in heads:
            raise UserError(f"unknown head '{head}' for {self.task}; choose {', '.join(heads)}")
        self.auto_class = getattr(transformers, DENSE_HEADS[self.head].auto_class)
        if width is not None and width < 1:
            raise UserError(f"--head-width {width} must be at least 1")

    def protocol(self, data: ImageData) -> str:
        return self.task

    def settings(self) -> dict[str, Any]:
        return {"task": self.task, "head": self.head, "head_width": self.width}

    def check(self, recipe: Recipe) -> None:
        need_metrics()
        for name, value in active_settings(recipe, _OF_LABELS).items():
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{self.task} has no {flag} ({value}); leave that out, or choose its own recipe")
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

    def trainer_values(self, run: Run) -> dict[str, Any]:
        return {
            "new_judge": lambda: type(self).judge(run.processor, run.data.label_names),
            "layer_decay": run.recipe.layer_decay,
            "average_decay": run.recipe.average_decay,
        }


@final
class Segmentation(HeadTask):
    """Masks."""

    recipe = "segmentation-small"
    target = "mask"
    task = "segmentation"
    measured = ("mean_iou", "pixel_accuracy")
    judge = segmentation_judge

    def recalled_test(self, judged: Record, model: PreTrainedModel) -> SegmentationResult:
        test: dict[str, Any] = dict(judged.values)
        known = {name: test[name] for name in ("mean_iou", "pixel_accuracy", "mean_accuracy")}
        size = (judged.data and judged.data.size) or 0
        return SegmentationResult(size, **known, **test["classes"], seconds=judged.seconds or 0.0)


@final
class Detection(HeadTask):
    """Boxes, and outlines of the objects where there are masks and the head has a branch for them."""

    recipe = "detection-small"
    target = "objects"
    task = "detection"
    measured = ("ap", "ap50")
    judge = detection_judge

    def recalled_test(self, judged: Record, model: PreTrainedModel) -> DetectionResult:
        test: dict[str, Any] = dict(judged.values)
        classes = cast(dict[str, dict[str, float]], test.pop("classes"))
        objects = int(test.pop("objects"))
        return DetectionResult(
            (judged.data and judged.data.size) or 0,
            objects,
            {name: value for name, value in test.items() if isinstance(value, float)},
            classes["ap"],
            classes.get("mask_ap", {}),
            seconds=judged.seconds or 0.0,
        )
