"""Learning the class of every pixel from masks."""

from collections.abc import Mapping
from typing import Any, cast, final

import torch
from transformers import ViTImageProcessor

from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.dense.meters import SegmentationMeter
from hf_vit.evaluation.protocols.dense.segmentation import SegmentationResult, segmentation
from hf_vit.loading.outputs import class_maps
from hf_vit.results.facts import Record
from hf_vit.training.plan import Run
from hf_vit.training.tasks.dense.head_task import HeadTask
from hf_vit.training.trainer.dense_trainer import Judge, Judged


@final
class SegmentationJudge(Judge):
    """Counts pixels at the size that the model sees.

    Args:
        processor: of the model.
        names: of the classes.
    """

    def __init__(self, processor: ViTImageProcessor, names: list[str]) -> None:
        self.processor, self.names = processor, names
        self.meter = SegmentationMeter(len(names))

    def answers(self, outputs: Any, batch: Mapping[str, Any]) -> list[Judged]:
        pixel_values: torch.Tensor = batch["pixel_values"]
        sizes = [(int(pixel_values.shape[-2]), int(pixel_values.shape[-1]))] * len(pixel_values)
        maps = class_maps(outputs, self.processor, sizes)
        return [(answer.cpu(), truth.cpu()) for answer, truth in zip(maps, batch["labels"], strict=True)]

    def add(self, answer: Any, truth: Any) -> None:
        self.meter.update(answer, truth)

    def metrics(self) -> dict[str, float]:
        values = self.meter.values(self.names)
        return {
            "mean_iou": values["mean_iou"],
            "pixel_accuracy": values["pixel_accuracy"],
            "score": values["mean_iou"],
        }


@final
class Segmentation(HeadTask):
    """Masks."""

    target = "mask"
    name = "segmentation"
    measured = ("mean_iou", "pixel_accuracy")

    def new_judge(self, run: Run) -> Judge:
        return SegmentationJudge(run.processor, run.data.label_names)

    def judge_test(self, examination: Examination) -> SegmentationResult:
        return segmentation(examination)

    def recalled_test(self, judged: Record) -> SegmentationResult:
        test: dict[str, Any] = dict(judged.values)
        classes = cast(dict[str, Any], test["classes"])
        return SegmentationResult(
            (judged.data and judged.data.size) or 0,
            **{name: test[name] for name in ("mean_iou", "pixel_accuracy", "mean_accuracy")},
            **classes,
            seconds=judged.seconds or 0.0,
        )
