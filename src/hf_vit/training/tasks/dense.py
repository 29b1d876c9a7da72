"""Segmentation from masks and detection from boxes: a head on a backbone, joint transforms, one protocol."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast, final

import transformers
from torch import nn
from transformers import PreTrainedModel, ViTImageProcessor

from hf_vit.conversion.loading import Source
from hf_vit.data import ImageData, dense_collator, dense_transforms
from hf_vit.data.transforms import refuse_apart
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
from hf_vit.training.plan import Run
from hf_vit.training.tasks.task import MeasuredTask, active_settings
from hf_vit.training.trainer.dense_trainer import DenseTrainer, Judge, Judged
from hf_vit_settings import Recipe

_OF_LABELS = (
    "loss",
    "class_weights",
    "balanced_sampling",
    "label_smoothing",
    "new_head",
    "head_bias",
    "tune",
    "sam_rho",
)
_ANSWER = ("boxes", "scores", "labels")
_TRUTH = {"boxes": "boxes", "labels": "class_labels", "iscrowd": "iscrowd"}


class _MeterJudge(Judge):
    """Abstract: counts with a meter of the protocols, at the size that the model sees."""

    meter: Any

    def __init__(self, processor: ViTImageProcessor, names: list[str]) -> None:
        self.processor, self.names = processor, names

    def sizes(self, batch: Mapping[str, Any]) -> list[tuple[int, int]]:
        count, _, height, width = batch["pixel_values"].shape
        return [(int(height), int(width))] * count

    def add(self, answer: Any, truth: Any) -> None:
        self.meter.update(answer, truth)


@final
class SegmentationJudge(_MeterJudge):
    """Counts pixels."""

    def __init__(self, processor: ViTImageProcessor, names: list[str]) -> None:
        super().__init__(processor, names)
        self.meter = SegmentationMeter(len(names))

    def answers(self, outputs: Any, batch: Mapping[str, Any]) -> list[Judged]:
        maps = class_maps(outputs, self.processor, self.sizes(batch))
        return [(answer.cpu(), truth.cpu()) for answer, truth in zip(maps, batch["labels"], strict=True)]

    def metrics(self) -> dict[str, float]:
        values = self.meter.values(self.names)
        measured = {name: values[name] for name in ("mean_iou", "pixel_accuracy")}
        return {**measured, "score": values["mean_iou"]}


@final
class DetectionJudge(_MeterJudge):
    """Average precision of boxes."""

    def __init__(self, processor: ViTImageProcessor, names: list[str]) -> None:
        super().__init__(processor, names)
        self.meter = DetectionMeter()

    def answers(self, outputs: Any, batch: Mapping[str, Any]) -> list[Judged]:
        return [
            (
                {name: answer[name].cpu() for name in _ANSWER},
                {name: truth[key].cpu() for name, key in _TRUTH.items() if key in truth},
            )
            for answer, truth in zip(
                detections(outputs, self.processor, self.sizes(batch)), batch["labels"], strict=True
            )
        ]

    def metrics(self) -> dict[str, float]:
        values = self.meter.values(self.names)
        return {"ap": values["ap"] or 0.0, "ap50": values["ap50"] or 0.0, "score": values["ap"] or 0.0}


class HeadTask(MeasuredTask):
    """Abstract: a head of `DENSE_HEADS`, by default the task's first, of `width` channels on one of the backbones."""

    trainer_class = DenseTrainer
    streams = False
    # Without objects in a batch a box head has no gradient; nor has the last norm of a BiT, which no map passes.
    arguments: ClassVar[dict[str, Any]] = {"ddp_find_unused_parameters": True}
    # The task's name, which its protocol has as well; and the class that judges the validation split.
    name: ClassVar[DenseTask]
    judge: ClassVar[Callable[[Any, list[str]], Judge]]

    def __init__(self, head: str | None = None, width: int | None = None) -> None:
        heads = [name for name, each in DENSE_HEADS.items() if each.task == self.name]
        self.head, self.width = heads[0] if head is None else head, width
        if self.head not in heads:
            raise UserError(f"unknown head '{head}' for {self.name}; choose {', '.join(heads)}")
        self.auto_class = getattr(transformers, DENSE_HEADS[self.head].auto_class)
        if width is not None and width < 1:
            raise UserError(f"--head-width {width} must be at least 1")

    def protocol(self, data: ImageData) -> str:
        return self.name

    def settings(self) -> dict[str, Any]:
        return {"task": self.name, "head": self.head, "head_width": self.width}

    def check(self, recipe: Recipe) -> None:
        need_metrics()
        for name, value in active_settings(recipe, (*_OF_LABELS, "tune", "sam_rho", "repeated_augmentation")).items():
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{self.name} has no {flag} ({value}); leave that out, or choose its own recipe")
        refuse_apart(recipe.augmentation)

    def build(
        self, source: Source, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        features: Any = data.split("train").features
        return build_dense_model(
            source,
            self.head,
            data.label_names,
            image_size=image_size,
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
        return f"{run.describe()}; {self.name}, head {self.head}"

    def trainer_values(self, run: Run) -> dict[str, Any]:
        return {
            "new_judge": lambda: type(self).judge(run.processor, run.data.label_names),
            "layer_decay": run.recipe.layer_decay,
            "average_decay": run.recipe.average_decay,
        }


@final
class Segmentation(HeadTask):
    """Masks."""

    target = "mask"
    name = "segmentation"
    measured = ("mean_iou", "pixel_accuracy")
    judge = SegmentationJudge

    def recalled_test(self, judged: Record, model: PreTrainedModel) -> SegmentationResult:
        test: dict[str, Any] = dict(judged.values)
        return SegmentationResult(
            (judged.data and judged.data.size) or 0,
            **{name: test[name] for name in ("mean_iou", "pixel_accuracy", "mean_accuracy")},
            **test["classes"],
            seconds=judged.seconds or 0.0,
        )


@final
class Detection(HeadTask):
    """Boxes, and outlines of the objects where there are masks and the head has a branch for them."""

    target = "objects"
    name = "detection"
    measured = ("ap", "ap50")
    judge = DetectionJudge

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
