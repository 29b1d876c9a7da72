"""The table of tasks: what `finetune` and `pretrain` can teach, one line each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_vit.training.tasks.classification import Classification
from hf_vit.training.tasks.dense import Detection, Segmentation
from hf_vit.training.tasks.distillation import Distillation
from hf_vit.training.tasks.meta_pseudo_labels import MetaPseudoLabels
from hf_vit.training.tasks.momentum_contrast import Contrast, ContrastiveOptions
from hf_vit.training.tasks.patch_prediction import NextPatch, PatchPrediction, RandomMasking
from hf_vit.training.tasks.self_training import NoisyStudent
from hf_vit.training.tasks.task import Task


@dataclass(frozen=True)
class TaskLine:
    """A line of the table.

    Attributes:
        make: builds the task from the keywords of `finetune` or `pretrain` that it names; it ignores the others.
        recipe: the default recipe.
        has_labels: it learns from labels, masks or boxes, and is fine-tuned; otherwise it is pre-trained.
    """

    make: Callable[..., Task[Any]]
    recipe: str
    has_labels: bool = False


TASKS: dict[str, TaskLine] = {
    "classification": TaskLine(lambda **_: Classification(), "default-small", has_labels=True),
    "distillation": TaskLine(
        lambda distillation, device, **_: Distillation(distillation, device), "default-small", has_labels=True
    ),
    "noisy-student": TaskLine(
        lambda self_training, device, skip_bad_images, **_: NoisyStudent(self_training, device, skip_bad_images),
        "noisy-student",
        has_labels=True,
    ),
    "meta-pseudo-labels": TaskLine(
        lambda self_training, device, skip_bad_images, **_: MetaPseudoLabels(self_training, device, skip_bad_images),
        "meta-pseudo-labels",
        has_labels=True,
    ),
    "segmentation": TaskLine(
        lambda head, head_width, **_: Segmentation(head, head_width), "segmentation-small", has_labels=True
    ),
    "detection": TaskLine(
        lambda head, head_width, **_: Detection(head, head_width), "detection-small", has_labels=True
    ),
    "masked-patch": TaskLine(
        lambda target, masking, static_masks, fields, **_: PatchPrediction(
            target, masking or RandomMasking(), static_masks, fields
        ),
        "pretrain-small",
    ),
    "next-patch": TaskLine(
        lambda target, static_masks, fields, **_: PatchPrediction(target, NextPatch(), static_masks, fields),
        "pretrain-small",
    ),
    "contrastive": TaskLine(
        lambda contrastive, fields, **_: Contrast(contrastive or ContrastiveOptions(), fields), "contrastive-small"
    ),
}
