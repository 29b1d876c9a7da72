"""Teachers, and distillation: DeiT's token (arXiv 2012.12877), or any student's logits (arXiv 1503.02531).

Legend: B images, C channels, H x W px, K the data's classes, T temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from hf_vit.errors import UserError
from hf_vit.families import problem_type_of, refuse_regression
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.pixels import PixelScale
from hf_vit.models.pretrained_hf_vit import classification_loss
from hf_vit.training.plan import Run, Start
from hf_vit.training.tasks.classification import ClassifierTask, build_for_classes
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit_settings import DistillationOptions, Recipe

_PROBE_PX = 64
# Pillow's filters that torch's resize has; the others come closest to bicubic.
_MODES = {"nearest": "nearest-exact", "bilinear": "bilinear"}


@final
@dataclass(frozen=True)
class Teacher:
    """A classifier of transformers or timm that answers to a student's images; only meta pseudo labels train it.

    Attributes:
        subject: the model.
        scale: of its pixel values.
        size: (height, width) px of its input; None takes every size.
        mode: of the resize to that size.
        columns: its class for each of the data's, once they are matched.
    """

    subject: LoadedModel
    scale: PixelScale = field(default_factory=PixelScale)
    size: tuple[int, int] | None = None
    mode: str = "bicubic"
    columns: tuple[int, ...] | None = None

    def for_classes(self, data_names: Sequence[str]) -> "Teacher":
        """Return the teacher with logits of the data's classes alone, in their order; all must be its own."""
        if not self.subject.label_sets:
            raise UserError(
                f"teacher {self.subject.name} has no class names to match with the data's; add label_names "
                "(timm) or id2label (transformers), in the order of its outputs, to its config.json"
            )
        try:
            return replace(self, columns=tuple(self.subject.classes_of(data_names)))
        except UserError as error:
            raise UserError(f"teacher {self.subject.name}: {error}") from error

    @torch.no_grad()
    def answer(self, values: torch.Tensor, scale: PixelScale) -> torch.Tensor:
        """Return logits [B, K], float32, of images [B, C, H, W] as a student of this `scale` takes them."""
        return self.logits(values, scale)

    @torch.no_grad()
    def classify(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Return logits [B, K], float32 on the CPU, of images as its own processor prepares them."""
        return self._of(self.subject.pixel_values(images)).cpu()

    def logits(self, values: torch.Tensor, scale: PixelScale) -> torch.Tensor:
        """Return the logits of `answer`, with gradients."""
        pixels = scale.pixels(values.float())
        if self.size is not None and tuple(pixels.shape[2:]) != self.size:
            smooth: dict[str, Any] = {} if self.mode == "nearest-exact" else {"antialias": True}
            # Bicubic overshoots; an image does not.
            pixels = F.interpolate(pixels, self.size, mode=self.mode, **smooth).clamp(0, 1)
        return self._of(self.scale.values(pixels).to(self.subject.dtype))

    def _of(self, values: torch.Tensor) -> torch.Tensor:
        output = self.subject.model(values)
        logits: torch.Tensor = getattr(output, "logits", output)
        return logits.float() if self.columns is None else logits[:, list(self.columns)].float()


def open_teacher(source: Any, device: str | None = None) -> Teacher:
    """Load or wrap a teacher: an image classifier of one class an image, see `load_model`, or a `Teacher`.

    It computes on a GPU where there is one, if no `device` is given; models made in Python stay where they are.
    """
    teacher = source if isinstance(source, Teacher) else _as_teacher(load_model(source, device, as_classifier=True))
    model, name = teacher.subject.model, teacher.subject.name
    refuse_regression(model, name, "a teacher's place")
    if problem_type_of(model) == "multi_label_classification":
        raise UserError(
            f"{name} is a multi-label model, and distillation needs a softmax over classes; give a teacher "
            "trained with one class per image"
        )
    model.eval().requires_grad_(False)
    return teacher


def _as_teacher(subject: LoadedModel) -> Teacher:
    if subject.processor is None:
        from timm.data.config import resolve_model_data_config

        config: Any = resolve_model_data_config(subject.model)
        height, width = config["input_size"][1:]
        scale = PixelScale(tuple(config["mean"]), tuple(config["std"]))
        return Teacher(subject, scale, (height, width), _MODES.get(config["interpolation"], "bicubic"))
    resample = getattr(subject.processor, "resample", None) or Image.Resampling.BILINEAR
    mode = _MODES.get(Image.Resampling(resample).name.lower(), "bicubic")
    # It has a size if images of every size become one.
    other = subject.prepare([Image.new("RGB", (_PROBE_PX // 2, _PROBE_PX // 2))])
    size = subject.input_size if tuple(other.shape[2:]) == subject.input_size else None
    return Teacher(subject, PixelScale.measure(subject), size, mode)


class TaughtTask(ClassifierTask):
    """Abstract: a classifier that learns from a teacher, too, which computes on `device`."""

    def __init__(self, options: Any, device: str | None = None) -> None:
        self.options = options
        self.teacher = open_teacher(options.teacher, device)

    def settings(self) -> dict[str, Any]:
        subject = self.teacher.subject
        return {"teacher": subject.name, "teacher_fingerprint": subject.fingerprint, **self.options.settings()}


def distillation_loss(
    outputs: Any,
    labels: torch.Tensor,
    taught: torch.Tensor,
    options: DistillationOptions,
    *,
    problem_type: str | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Return (1 - weight) * loss on the labels + weight * mean loss on the teacher's logits `taught` [B, K].

    The latter is the cross-entropy with the teacher's first guess, or KL(teacher || student) * T^2 of probabilities
    at T (arXiv 2012.12877, equations 3 and 2). With a token the class token's head learns the labels, and the
    distillation token's head the teacher's answers. `num_items_in_batch`: label elements of all accumulated batches,
    over which both means are taken.
    """
    settings = options.settings()
    weight, temperature = settings["distillation_weight"], settings.get("temperature")
    own, learner = (
        (outputs.cls_logits, outputs.distillation_logits) if options.uses_token else (outputs.logits, outputs.logits)
    )
    from_labels = classification_loss(own, labels, problem_type, num_items_in_batch)
    wide = learner if learner.dtype == torch.float64 else learner.float()
    if temperature is None:
        each = F.cross_entropy(wide, taught.argmax(dim=1), reduction="none")
    else:
        student = F.log_softmax(wide / temperature, dim=1)
        teacher = F.log_softmax(taught.to(wide.dtype) / temperature, dim=1)
        each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1) * temperature**2
    images = len(each) if num_items_in_batch is None else num_items_in_batch / labels[0].numel()
    return (1 - weight) * from_labels + weight * each.sum() / images


@final
class DistillationTrainer(HfViTTrainer):
    """An `HfViTTrainer` whose student learns from labels and a teacher; evaluation uses the labels alone.

    The teacher sees the very images that the student is trained on, varied and mixed, in its own scale and size.

    Args:
        teacher: see `open_teacher`; it must answer in the student's classes (`Teacher.for_classes`).
        distillation: kind, weight and temperature.
    """

    def __init__(self, *args: Any, teacher: Teacher, distillation: DistillationOptions, **kwargs: Any) -> None:
        super().__init__(*args, compute_loss_func=self._loss, **kwargs)
        self.teacher, self.distillation = teacher, distillation
        self._scale = PixelScale.from_processor(self.processing_class)
        self._taught: torch.Tensor | None = None
        teacher.subject.model.to(self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss from labels and teacher while the student trains."""
        self._taught = None
        if model.training:
            with self.accelerator.autocast():
                self._taught = self.teacher.answer(inputs["pixel_values"], self._scale)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _loss(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        problem = self.accelerator.unwrap_model(self.model).config.problem_type
        if self._taught is None:
            return classification_loss(outputs.logits, labels, problem, num_items_in_batch)
        items: dict[str, Any] = {"problem_type": problem, "num_items_in_batch": num_items_in_batch}
        return distillation_loss(outputs, labels, self._taught, self.distillation, **items)


@final
class Distillation(TaughtTask):
    """Learn from the labels and a teacher."""

    options: DistillationOptions
    trainer_class = DistillationTrainer

    def check(self, recipe: Recipe) -> None:
        if recipe.loss == "bce":
            raise UserError("distillation needs the softmax cross-entropy; choose --loss ce")
        if recipe.class_weights:
            raise UserError("distillation does not support class weights; use --balanced-sampling")

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        self.teacher, source = self.teacher.for_classes(start.data.label_names), start.source
        tokens = {"use_distillation_token": True, "use_distillation_head": None} if self.options.uses_token else {}
        has_token = getattr(source.config, "use_distillation_token", None)
        no_place = UserError(f"{source.name} does not support a distillation token; use --distillation logit")
        if tokens and has_token is None:
            raise no_place
        if tokens and source.has_weights and not has_token:
            raise UserError(
                f"{source.name} has no distillation token, which --distillation {self.options.kind} trains; "
                "use --distillation logit, or start from a variant or a distilled checkpoint"
            )
        student, processor = build_for_classes(start, recipe, **tokens)
        if tokens and not student.config.has_distillation_head:
            raise no_place
        return student, processor

    def trainer_values(self, run: Run) -> dict[str, Any]:
        return {**super().trainer_values(run), "teacher": self.teacher, "distillation": self.options}
