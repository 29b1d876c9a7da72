"""All tasks by name: what can be learned with labels, and without."""

from typing import Any

from hf_vit.training.tasks.classification import Classification
from hf_vit.training.tasks.dense import Detection, Segmentation
from hf_vit.training.tasks.distillation import Distillation
from hf_vit.training.tasks.momentum_contrast import Contrast
from hf_vit.training.tasks.patch_prediction import PatchPrediction
from hf_vit.training.tasks.self_training import MetaPseudoLabels, NoisyStudent

TASKS: dict[str, type[Any]] = {
    "classification": Classification,
    "distillation": Distillation,
    "noisy-student": NoisyStudent,
    "meta-pseudo-labels": MetaPseudoLabels,
    "segmentation": Segmentation,
    "detection": Detection,
    "masked-patch": PatchPrediction,
    "next-patch": PatchPrediction,
    "contrastive": Contrast,
}
FINETUNED = ("classification", "segmentation", "detection")
OBJECTIVES = [name for name, task in TASKS.items() if not task.has_labels]
