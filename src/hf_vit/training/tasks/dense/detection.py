"""Learning to find objects from boxes, and to outline them where there are masks and the head does so."""

from collections.abc import Mapping
from typing import Any, cast, final

import torch
from transformers import ViTImageProcessor

from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.dense.detection import DetectionResult, detection
from hf_vit.evaluation.protocols.dense.meters import DetectionMeter
from hf_vit.loading.outputs import detections
from hf_vit.results.facts import Record
from hf_vit.training.plan import Run
from hf_vit.training.tasks.dense.head_task import HeadTask
from hf_vit.training.trainer.dense_trainer import Judge, Judged

_TOLD = ("boxes", "scores", "labels")
_TRUE = {"boxes": "boxes", "labels": "class_labels", "iscrowd": "iscrowd"}


@final
class DetectionJudge(Judge):
    """Average precision of boxes at the size that the model sees.

    Args:
        processor: of the model.
        names: of the classes.
    """

    def __init__(self, processor: ViTImageProcessor, names: list[str]) -> None:
        self.processor, self.names = processor, names
        self.meter = DetectionMeter()

    def answers(self, outputs: Any, batch: Mapping[str, Any]) -> list[Judged]:
        pixel_values: torch.Tensor = batch["pixel_values"]
        sizes = [(int(pixel_values.shape[-2]), int(pixel_values.shape[-1]))] * len(pixel_values)
        return [
            (
                {name: answer[name].cpu() for name in _TOLD},
                {name: truth[key].cpu() for name, key in _TRUE.items() if key in truth},
            )
            for answer, truth in zip(detections(outputs, self.processor, sizes), batch["labels"], strict=True)
        ]

    def add(self, answer: Any, truth: Any) -> None:
        self.meter.update(answer, truth)

    def metrics(self) -> dict[str, float]:
        values = self.meter.values(self.names)
        return {"ap": values["ap"] or 0.0, "ap50": values["ap50"] or 0.0, "score": values["ap"] or 0.0}


@final
class Detection(HeadTask):
    """Boxes."""

    target = "objects"
    name = "detection"
    measured = ("ap", "ap50")

    def new_judge(self, run: Run) -> Judge:
        return DetectionJudge(run.processor, run.data.label_names)

    def judge_test(self, examination: Examination) -> DetectionResult:
        return detection(examination)

    def recalled_test(self, judged: Record) -> DetectionResult:
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
