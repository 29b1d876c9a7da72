"""Learning from a teacher: DeiT's distillation token (arXiv 2012.12877), or any student's logits (arXiv 1503.02531).

Legend: B images, C channels, H x W px, K labels, T temperature.
"""

from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import nn
from torch.nn import functional as F

from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.loading.pixels import PixelScale
from hf_vit.loading.start import ModelSource
from hf_vit.models.loss_hf_vit import classification_loss
from hf_vit.training.plan import Run
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.tasks.classification import ClassifierTask, build_for_classes
from hf_vit.training.tasks.teacher import Teacher, open_teacher
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer

Kind = Literal["hard", "soft", "logit"]
# What the teacher's part weighs; soft targets as arXiv 2012.12877, section 6, hard ones as its equation 3.
_WEIGHTS: dict[Kind, float] = {"hard": 0.5, "soft": 0.1, "logit": 0.1}
_TEMPERATURE = 3.0


@final
@dataclass(frozen=True)
class DistillationOptions:
    """What is learnt from whom.

    Attributes:
        teacher: see `open_teacher`.
        kind: "hard": the distillation token learns the teacher's first guess (arXiv 2012.12877, equation 3); "soft":
            it learns the teacher's probabilities (equation 2); "logit": any student's logits learn them.
        temperature: T of soft targets; None is 3. Hard ones have none.
        weight: share of the teacher's part in the loss, in 0..1; None is 0.5 for hard and 0.1 for soft targets, whose
            gradients are scaled by T^2.

    Raises:
        UserError: a value out of range.
    """

    teacher: Any
    kind: Kind = "logit"
    temperature: float | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _WEIGHTS:
            raise UserError(f"distillation '{self.kind}' is unknown; choose {', '.join(_WEIGHTS)}")
        if self.kind == "hard" and self.temperature is not None:
            raise UserError("hard distillation has no temperature: its target is one class; choose soft or logit")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature} must be above 0")
        if self.weight is not None and not 0 <= self.weight <= 1:
            raise UserError(f"distillation weight {self.weight} must be in 0..1")

    @property
    def uses_token(self) -> bool:
        """Whether the student needs a distillation token with a head of its own."""
        return self.kind != "logit"

    def settings(self) -> dict[str, Any]:
        """Plain values, without the teacher."""
        weight = _WEIGHTS[self.kind] if self.weight is None else self.weight
        settings: dict[str, Any] = {"distillation": self.kind, "distillation_weight": weight}
        if self.kind != "hard":
            settings["temperature"] = self.temperature or _TEMPERATURE
        return settings


def teaching_loss(logits: torch.Tensor, taught: torch.Tensor, temperature: float | None = None) -> torch.Tensor:
    """What an image costs a student that answers otherwise than its teacher.

    Args:
        logits: [B, K] of the student.
        taught: [B, K] of the teacher.
        temperature: T; None takes the teacher's first guess for the truth.

    Returns:
        [B], nats: the cross-entropy to the first guess, or KL(teacher || student) * T^2 of the probabilities at T.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if temperature is None:
        return F.cross_entropy(wide, taught.argmax(dim=1), reduction="none")
    student = F.log_softmax(wide / temperature, dim=1)
    teacher = F.log_softmax(taught.to(wide.dtype) / temperature, dim=1)
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1) * temperature**2


def distillation_loss(
    outputs: Any,
    labels: torch.Tensor,
    taught: torch.Tensor,
    options: DistillationOptions,
    *,
    problem_type: str | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """(1 - weight) * loss on the labels + weight * mean `teaching_loss` (arXiv 2012.12877, equations 2 and 3).

    With a token the class token's head learns the labels, and the distillation token's head the teacher's answers.

    Args:
        outputs: of the student: `logits` [B, K]; with a token also `cls_logits` and `distillation_logits`.
        labels: [B] or [B, K], see `classification_loss`.
        taught: [B, K], the teacher's logits.
        options: kind, weight and temperature.
        problem_type: of the student's configuration.
        num_items_in_batch: label elements of all accumulated batches, over which both means are taken.
    """
    settings = options.settings()
    weight, temperature = settings["distillation_weight"], settings.get("temperature")
    own, learner = (
        (outputs.cls_logits, outputs.distillation_logits) if options.uses_token else (outputs.logits, outputs.logits)
    )
    from_labels = classification_loss(own, labels, problem_type, num_items_in_batch)
    each = teaching_loss(learner, taught, temperature)
    images = len(each) if num_items_in_batch is None else num_items_in_batch / labels[0].numel()
    return (1 - weight) * from_labels + weight * each.sum() / images


@final
class DistillationTrainer(HfViTTrainer):
    """An `HfViTTrainer` whose student learns from labels and a teacher; evaluation looks at the labels alone.

    The teacher sees the very images that the student is trained on, varied and mixed, in its own scale and size.

    Args:
        teacher: see `open_teacher`; it must answer in the student's classes (`Teacher.for_classes`).
        distillation: kind, weight and temperature.
    """

    def __init__(self, *args: Any, teacher: Teacher, distillation: DistillationOptions, **kwargs: Any) -> None:
        super().__init__(*args, compute_loss_func=self._loss, **kwargs)
        self.teacher, self.distillation = teacher, distillation
        self._scale = PixelScale.of_processor(self.processing_class)
        self._taught: torch.Tensor | None = None
        teacher.subject.model.to(self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of both, while the student trains."""
        self._taught = None
        if model.training:
            with self.accelerator.autocast():
                self._taught = self.teacher.answer(inputs["pixel_values"], self._scale)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _loss(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        config = self.accelerator.unwrap_model(self.model).config
        problem = config.problem_type
        if self._taught is None:
            return classification_loss(outputs.logits, labels, problem, num_items_in_batch)
        return distillation_loss(
            outputs,
            labels,
            self._taught,
            self.distillation,
            problem_type=problem,
            num_items_in_batch=num_items_in_batch,
        )


@final
class Distillation(ClassifierTask):
    """A classifier that learns from the labels and a teacher.

    Args:
        options: see there.
        device: of the teacher.

    Raises:
        UserError: the teacher cannot be had.
    """

    trainer_class = DistillationTrainer

    def __init__(self, options: DistillationOptions, device: str | None = None) -> None:
        self.options = options
        self.teacher = open_teacher(options.teacher, device)

    def settings(self) -> dict[str, Any]:
        return {
            "teacher": self.teacher.subject.name,
            "teacher_fingerprint": self.teacher.subject.fingerprint,
            **self.options.settings(),
        }

    def check(self, recipe: Recipe) -> None:
        if recipe.loss == "bce":
            raise UserError("a teacher is learnt from with the softmax cross-entropy; choose --loss ce")
        if recipe.class_weights:
            raise UserError("a teacher is learnt from without class weights; choose --balanced-sampling")

    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        """The student and its image processor.

        Raises:
            UserError: the teacher has other labels than the data; the student has no place for a distillation token.
        """
        self.teacher.for_classes(data.label_names)
        tokens = {"use_distillation_token": True, "use_distillation_head": None} if self.options.uses_token else {}
        has_token = getattr(source.config, "use_distillation_token", None)
        if tokens and has_token is None:
            raise UserError(f"{source.name} has no place for a distillation token; use --distillation logit")
        if tokens and source.has_weights and not has_token:
            raise UserError(
                f"{source.name} was trained without a distillation token, which --distillation {self.options.kind} "
                "teaches; use --distillation logit, or start from a variant or a distilled checkpoint"
            )
        student, processor = build_for_classes(source, data, image_size, recipe, **tokens)
        if tokens and not student.config.has_distillation_head:
            raise UserError(f"{source.name} has no place for a distillation token; use --distillation logit")
        return student, processor

    def trainer_values(self, run: Run) -> dict[str, Any]:
        teacher = self.teacher.for_classes(run.data.label_names)
        return {**super().trainer_values(run), "teacher": teacher, "distillation": self.options}
