"""Teachers and distillation, by DeiT's token (arXiv 2012.12877) or by the logits of any student (arXiv 1503.02531).

Legend: B images, C channels, H x W px, K classes of the data, T temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from hf_vit.errors import UserError
from hf_vit.families import get_problem_type, refuse_regression
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.pixels import PixelScale
from hf_vit.models.pretrained_hf_vit import compute_classification_loss
from hf_vit.training.plan import Run, Start
from hf_vit.training.tasks.classification import ClassifierTask, build_for_classes
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit_settings import DistillationOptions, Recipe

_PROBE_PX = 64
# Pillow's filters that torch's resize supports; bicubic is the best approximation of the others.
_MODES = {"nearest": "nearest-exact", "bilinear": "bilinear"}


@final
@dataclass(frozen=True)
class Teacher:
    """A classifier of transformers or timm that computes targets for a student; only meta pseudo labels train it.

    Attributes:
        loaded: the model.
        scale: the scale of its pixel values.
        size: (height, width) px of its input; None accepts every size.
        mode: the interpolation of the resize to that size.
        columns: the index of its output for every class of the data; None before the classes are matched.
    """

    loaded: LoadedModel
    scale: PixelScale = field(default_factory=PixelScale)
    size: tuple[int, int] | None = None
    mode: str = "bicubic"
    columns: tuple[int, ...] | None = None

    def select_classes(self, data_names: Sequence[str]) -> "Teacher":
        """Return a copy of the teacher whose logits are those of the data's classes, in their order.

        Raises a `UserError` if the teacher lacks one of the classes.
        """
        if not self.loaded.label_sets:
            raise UserError(
                f"the teacher {self.loaded.name} has no class names to match with those of the data; add "
                "label_names (timm) or id2label (transformers) to its config.json, in the order of its outputs"
            )
        try:
            return replace(self, columns=tuple(self.loaded.list_classes(data_names)))
        except UserError as error:
            raise UserError(f"the teacher {self.loaded.name} cannot be used: {error}") from error

    @torch.no_grad()
    def classify(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Return logits [B, K], float32 on the CPU, of images that its own processor prepares."""
        return self._compute(self.loaded.pixel_values(images)).cpu()

    def logits(self, values: torch.Tensor, scale: PixelScale) -> torch.Tensor:
        """Return the teacher's logits [B, K], float32, for a student's input [B, C, H, W] of this `scale`."""
        pixels = scale.pixels(values.float())
        if self.size is not None and tuple(pixels.shape[2:]) != self.size:
            smooth: dict[str, Any] = {} if self.mode == "nearest-exact" else {"antialias": True}
            # Bicubic interpolation leaves the range of pixels.
            pixels = F.interpolate(pixels, self.size, mode=self.mode, **smooth).clamp(0, 1)
        return self._compute(self.scale.values(pixels).to(self.loaded.dtype))

    def _compute(self, values: torch.Tensor) -> torch.Tensor:
        """Return the logits of the data's classes, float32, for input that the teacher's processor could have made."""
        output = self.loaded.model(values)
        logits: torch.Tensor = getattr(output, "logits", output)
        return logits.float() if self.columns is None else logits[:, list(self.columns)].float()


def open_teacher(source: Any, device: str | None = None) -> Teacher:
    """Load a teacher from a source of `load_model`, or check a given `Teacher`, and freeze it.

    A loaded teacher is on `device`, by default on a GPU if there is one; models made in Python are not moved.

    Raises:
        UserError: it is not a classifier with one class per image.
    """
    teacher = source if isinstance(source, Teacher) else _make_teacher(load_model(source, device, as_classifier=True))
    model, name = teacher.loaded.model, teacher.loaded.name
    refuse_regression(model, name, "a teacher's place")
    if get_problem_type(model) == "multi_label_classification":
        raise UserError(
            f"the teacher {name} is a multi-label model, but distillation needs a softmax over classes; give "
            "a teacher that was trained with one class per image"
        )
    model.eval().requires_grad_(False)
    return teacher


def _make_teacher(loaded: LoadedModel) -> Teacher:
    """Make a teacher of a loaded model, with scale and size of its processor or timm's configuration."""
    if loaded.processor is None:
        from timm.data.config import resolve_model_data_config

        config: Any = resolve_model_data_config(loaded.model)
        height, width = config["input_size"][1:]
        scale = PixelScale(tuple(config["mean"]), tuple(config["std"]))
        return Teacher(loaded, scale, (height, width), _MODES.get(config["interpolation"], "bicubic"))
    resample = getattr(loaded.processor, "resample", None) or Image.Resampling.BILINEAR
    mode = _MODES.get(Image.Resampling(resample).name.lower(), "bicubic")
    # The model has a fixed size if its processor resizes a small image to it as well.
    probe = loaded.prepare([Image.new("RGB", (_PROBE_PX // 2, _PROBE_PX // 2))])
    size = loaded.input_size if tuple(probe.shape[2:]) == loaded.input_size else None
    return Teacher(loaded, PixelScale.measure(loaded), size, mode)


class TaughtTask(ClassifierTask):
    """Abstract: a task whose classifier learns from labels and from a teacher, which computes on `device`."""

    def __init__(self, options: Any, device: str | None = None) -> None:
        self.options = options
        self.teacher = open_teacher(options.teacher, device)

    def settings(self) -> dict[str, Any]:
        loaded = self.teacher.loaded
        return {"teacher": loaded.name, "teacher_fingerprint": loaded.fingerprint, **self.options.settings()}


def distillation_loss(
    outputs: Any,
    labels: torch.Tensor,
    teacher_logits: torch.Tensor,
    options: DistillationOptions,
    *,
    problem_type: str | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Return (1 - weight) * loss on the labels + weight * mean loss on the teacher's logits [B, K].

    The latter is the cross-entropy with the teacher's most likely class, or KL(teacher || student) * T^2 of the
    probabilities at temperature T (arXiv 2012.12877, equations 3 and 2). With a distillation token the head of the
    class token learns the labels, and the head of the distillation token the teacher's logits. Both means are over
    `num_items_in_batch`, the label elements of all accumulated batches, if given.
    """
    settings = options.settings()
    weight = settings["distillation_weight"]
    temperature = settings.get("temperature")
    class_logits, student_logits = outputs.logits, outputs.logits
    if options.uses_token:
        class_logits, student_logits = outputs.cls_logits, outputs.distillation_logits
    label_loss = compute_classification_loss(class_logits, labels, problem_type, num_items_in_batch)
    logits = student_logits if student_logits.dtype == torch.float64 else student_logits.float()
    if temperature is None:
        losses = F.cross_entropy(logits, teacher_logits.argmax(dim=1), reduction="none")
        losses = losses + 0 * teacher_logits.amax(dim=1)  # NaN has an argmax too, but is no target
    else:
        student = F.log_softmax(logits / temperature, dim=1)
        teacher = F.log_softmax(teacher_logits.to(logits.dtype) / temperature, dim=1)
        losses = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1) * temperature**2
    images = len(losses) if num_items_in_batch is None else num_items_in_batch / labels[0].numel()
    return (1 - weight) * label_loss + weight * losses.sum() / images


@final
class DistillationTrainer(HfViTTrainer):
    """An `HfViTTrainer` whose student learns from labels and a teacher; evaluation uses the labels only.

    The teacher gets the student's images, augmented and mixed, converted to its own scale and size.

    Args:
        teacher: see `open_teacher`; its logits must be those of the student's classes (`Teacher.select_classes`).
        distillation: kind, weight and temperature.
    """

    def __init__(self, *args: Any, teacher: Teacher, distillation: DistillationOptions, **kwargs: Any) -> None:
        super().__init__(*args, compute_loss_func=self._loss, **kwargs)
        self.teacher, self.distillation = teacher, distillation
        self._scale = PixelScale.from_processor(self.processing_class)
        self._teacher_logits: torch.Tensor | None = None
        teacher.loaded.model.to(self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss from labels and teacher while the student trains."""
        self._teacher_logits = None
        if model.training:
            with torch.no_grad(), self.accelerator.autocast():
                self._teacher_logits = self.teacher.logits(inputs["pixel_values"], self._scale)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _loss(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return the loss from labels and teacher in training, from the labels only in evaluation."""
        problem = self.accelerator.unwrap_model(self.model).config.problem_type
        if self._teacher_logits is None:
            return compute_classification_loss(outputs.logits, labels, problem, num_items_in_batch)
        options: dict[str, Any] = {"problem_type": problem, "num_items_in_batch": num_items_in_batch}
        return distillation_loss(outputs, labels, self._teacher_logits, self.distillation, **options)


@final
class Distillation(TaughtTask):
    """Classification that learns from the labels and a teacher."""

    options: DistillationOptions
    trainer_class = DistillationTrainer

    def check(self, recipe: Recipe) -> None:
        if recipe.loss == "bce":
            raise UserError("--loss bce does not work with distillation, which needs cross-entropy; use --loss ce")
        if recipe.class_weights:
            raise UserError("--class-weights does not work with distillation; use --balanced-sampling instead")

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        """Build the student; raise a UserError if it cannot have the distillation token that the method trains."""
        self.teacher = self.teacher.select_classes(start.data.label_names)
        if not self.options.uses_token:
            return build_for_classes(start, recipe)
        source = start.source
        has_token = getattr(source.config, "use_distillation_token", None)  # None: the family has no such token
        no_token = UserError(
            f"{source.name} cannot have a distillation token, which --distillation {self.options.kind} "
            "trains; use --distillation logit"
        )
        if has_token is None:
            raise no_token
        if source.has_weights and not has_token:
            raise UserError(
                f"{source.name} has no distillation token, which --distillation {self.options.kind} trains; use "
                "--distillation logit, or start from a new model (such as --model B/16) or a distilled checkpoint"
            )
        student, processor = build_for_classes(start, recipe, use_distillation_token=True, use_distillation_head=None)
        if not student.config.has_distillation_head:
            raise no_token
        return student, processor

    def prepare_trainer(self, run: Run) -> dict[str, Any]:
        return {**super().prepare_trainer(run), "teacher": self.teacher, "distillation": self.options}
