"""A student that learns, under noise, from images which an unnoised teacher labelled (arXiv 1911.04252).

Legend: U unlabelled images, K labels, B labelled images of a batch, r unlabelled images a labelled one.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_vit.data import ImageData, to_rgb, train_transform
from hf_vit.data.load import UnlabelledImages
from hf_vit.errors import UserError
from hf_vit.loading.start import ModelSource
from hf_vit.training.plan import Run
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.tasks.self_training import SelfTraining
from hf_vit.training.tasks.unlabelled import UnlabelledCollator, stacked
from hf_vit.training.trainer.losses import smooth_labels
from hf_vit.training.trainer.sampling import derive_seed

_AT_ONCE = 64  # images that the teacher answers to


def balanced_rows(confidence: torch.Tensor, classes: torch.Tensor, per_class: int, seed: int) -> list[int]:
    """Rows with every class equally often (arXiv 1911.04252, section 3.1, data filtering and balancing).

    Of a class with more images the surest; of one with fewer all, as often as they fit in, and the rest by chance. A
    class without any stays without.

    Args:
        confidence: [U] probability of the class.
        classes: [U] class numbers.
        per_class: rows of every class.
        seed: of what is repeated once more than the others.
    """
    rows: list[int] = []
    for label in classes.unique().tolist():
        inside = torch.nonzero(classes == label)[:, 0]
        inside = inside[confidence[inside].argsort(descending=True, stable=True)][:per_class]
        whole, rest = divmod(per_class, len(inside))
        generator = torch.Generator().manual_seed(derive_seed(seed, label))
        again = inside[torch.randperm(len(inside), generator=generator)[:rest]]
        rows += [*inside.tolist() * whole, *again.tolist()]
    return rows


@final
class NoisyStudent(SelfTraining):
    """Noisy Student: the teacher, without noise, labels clean images once; the student learns them under noise.

    The noise is the recipe's (RandAugment, stochastic depth) and dropout before the head. Labelled and unlabelled
    images make one batch, whose mean cross-entropy is the loss (section 3.1).
    """

    # The collator smooths the labels: the teacher's probabilities stay as they are.
    arguments: ClassVar[dict[str, Any]] = {"label_smoothing_factor": 0.0}

    _probabilities: torch.Tensor  # [U, K], what the teacher says of the images that are kept
    _noise: RemovableHandle

    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        """The student, with dropout before its head, and its image processor.

        Raises:
            UserError: see `SelfTraining.build`; or the teacher is sure of no unlabelled image.
        """
        student, processor = super().build(source, data, image_size, recipe)
        rate = self.options.settings()["head_dropout"]
        head = student.get_submodule("classifier")
        self._noise = head.register_forward_pre_hook(
            lambda module, inputs: (F.dropout(inputs[0], rate, module.training), *inputs[1:])
        )
        return student, processor

    def released(self, module: Any) -> PreTrainedModel:
        self._noise.remove()
        return module

    def _label(self, images: UnlabelledImages) -> UnlabelledImages:
        least = self.options.settings()["confidence"]
        probabilities = self._answers(images)
        sure = probabilities.amax(dim=1)
        rows = torch.nonzero(sure >= least)[:, 0].tolist()
        if not rows:
            raise UserError(
                f"teacher {self.teacher.subject.name} is sure of none of the {len(images.seen)} unlabelled images of "
                f"{images.name}: of the surest {float(sure.max()):.2f}, needed {least:g}; lower --confidence, or "
                "train a better teacher"
            )
        self._probabilities = probabilities[rows]
        seen = [images.seen[row] for row in rows]
        left_out = images.left_out + len(images.seen) - len(rows)
        return UnlabelledImages(images.name, images.table.select(rows), seen, left_out)

    def _answers(self, images: UnlabelledImages) -> torch.Tensor:
        table: Any = images.table
        starts = range(0, len(table), _AT_ONCE)
        batches = (table[start : start + _AT_ONCE]["image"] for start in starts)
        logits = [self.teacher.classify([to_rgb(image) for image in batch]) for batch in batches]
        return torch.cat(logits).softmax(dim=1)

    def rows(self, run: Run) -> list[int]:
        sure, classes = self._probabilities.max(dim=1)
        most = min(int(classes.bincount().max()), run.task["images_per_class"])
        return balanced_rows(sure, classes, most, run.options.seed)

    def settings(self) -> dict[str, Any]:
        told = self._probabilities.argmax(dim=1).bincount(minlength=self._probabilities.shape[1])
        return {**super().settings(), "unlabelled_images_of_classes": told.tolist()}

    def unlabelled_transform(self, run: Run) -> Any:
        return train_transform(run.processor, run.recipe.augmentation, derive_seed(run.options.seed, 1))

    def collator(self, run: Run) -> Any:
        hard = run.task["pseudo_labels"] == "hard"
        return UnlabelledCollator(
            len(run.data.label_names), Join(self._probabilities, run.recipe.label_smoothing, hard)
        )


@final
class Join:
    """One batch of labelled and unlabelled images, [B (1 + r), C, H, W], with probabilities [B (1 + r), K] as labels.

    Args:
        probabilities: [U, K] of all unlabelled images.
        smoothing: of the labels, and of hard pseudo labels.
        hard: learn the likeliest class of an unlabelled image.
    """

    def __init__(self, probabilities: torch.Tensor, smoothing: float, hard: bool) -> None:
        self._smoothing, self._num_labels = smoothing, probabilities.shape[1]
        self._targets = self._smooth(probabilities.argmax(dim=1)) if hard else probabilities

    def __call__(self, batch: dict[str, torch.Tensor], unlabelled: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        taught = self._targets[[example["index"] for example in unlabelled]]
        return {
            "pixel_values": torch.cat([batch["pixel_values"], stacked(unlabelled)]),
            "labels": torch.cat([self._smooth(batch["labels"]), taught]),
        }

    def _smooth(self, labels: torch.Tensor) -> torch.Tensor:
        return smooth_labels(labels, self._num_labels, self._smoothing)
