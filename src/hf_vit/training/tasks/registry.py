"""The table of tasks: what `finetune` and `pretrain` can teach, one line each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_vit.training.tasks.classification import Classification
from hf_vit.training.tasks.contrast import Contrast
from hf_vit.training.tasks.dense.detection import Detection
from hf_vit.training.tasks.dense.segmentation import Segmentation
from hf_vit.training.tasks.distillation import Distillation, DistillationOptions
from hf_vit.training.tasks.masking import NextPatch, RandomMasking
from hf_vit.training.tasks.meta_pseudo_labels import MetaPseudoLabels
from hf_vit.training.tasks.momentum_contrast import ContrastiveOptions
from hf_vit.training.tasks.noisy_student import NoisyStudent
from hf_vit.training.tasks.patch_prediction import PatchPrediction
from hf_vit.training.tasks.self_training import SelfTraining, SelfTrainingOptions
from hf_vit.training.tasks.task import Task


@dataclass(frozen=True)
class TaskChoices:
    """Everything that a task can be told; each takes what concerns it.

    Attributes:
        distillation, device: the teacher, and where it computes.
        self_training, skip_bad_images: the teacher and the unlabelled images, and what becomes of unreadable ones.
        target, masking, static_masks: of patch prediction.
        contrastive: of contrast.
        head, head_width: of segmentation and detection: its name, and its channels.
        fields: of the model's configuration, in place of those it has.
    """

    distillation: DistillationOptions | None = None
    self_training: SelfTrainingOptions | None = None
    skip_bad_images: bool = False
    device: str | None = None
    target: str = "mean_color"
    masking: RandomMasking | None = None
    static_masks: bool = False
    contrastive: ContrastiveOptions | None = None
    head: str | None = None
    head_width: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class TaskLine:
    """A line of the table.

    Attributes:
        make: the task, as it was chosen.
        recipe: it has where none is named.
        has_labels: it learns from labels, masks or boxes, and is fine-tuned; else it is pre-trained.
    """

    make: Callable[[TaskChoices], Task[Any]]
    recipe: str
    has_labels: bool = False


def _distillation(told: TaskChoices) -> Distillation:
    assert told.distillation is not None
    return Distillation(told.distillation, told.device)


def _self_training(kind: type[SelfTraining]) -> Callable[[TaskChoices], SelfTraining]:
    def make(told: TaskChoices) -> SelfTraining:
        assert told.self_training is not None
        return kind(told.self_training, told.device, told.skip_bad_images)

    return make


TASKS: dict[str, TaskLine] = {
    "classification": TaskLine(lambda told: Classification(), "default-small", has_labels=True),
    "distillation": TaskLine(_distillation, "default-small", has_labels=True),
    "noisy-student": TaskLine(_self_training(NoisyStudent), "noisy-student", has_labels=True),
    "meta-pseudo-labels": TaskLine(_self_training(MetaPseudoLabels), "meta-pseudo-labels", has_labels=True),
    "segmentation": TaskLine(
        lambda told: Segmentation(told.head, told.head_width), "segmentation-small", has_labels=True
    ),
    "detection": TaskLine(lambda told: Detection(told.head, told.head_width), "detection-small", has_labels=True),
    "masked-patch": TaskLine(
        lambda told: PatchPrediction(told.target, told.masking or RandomMasking(), told.static_masks, told.fields),
        "pretrain-small",
    ),
    "next-patch": TaskLine(
        lambda told: PatchPrediction(told.target, NextPatch(), told.static_masks, told.fields), "pretrain-small"
    ),
    "contrastive": TaskLine(
        lambda told: Contrast(told.contrastive or ContrastiveOptions(), told.fields), "contrastive-small"
    ),
}
