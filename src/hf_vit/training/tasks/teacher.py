"""Teachers: image classifiers of transformers or timm that answer to a student's varied images.

Legend: B images, C channels, H x W px, K the data's classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from PIL import Image
from torch.nn import functional as F

from hf_vit.errors import UserError
from hf_vit.families import problem_type_of, refuse_regression
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.pixels import PixelScale
from hf_vit.loading.timm_models import timm_data_config

_PROBE_PX = 64
# What torch's resize has of Pillow's filters; the others come closest to bicubic.
_MODES = {"nearest": "nearest-exact", "bilinear": "bilinear"}


@final
@dataclass(frozen=True)
class Teacher:
    """A classifier that is asked; only meta pseudo labels train it.

    Attributes:
        subject: the model.
        scale: what its pixels look like.
        size: (height, width) px it wants; None takes what comes.
        mode: of the resize to that size.
        columns: its class for each of the data's, once they are matched.
    """

    subject: LoadedModel
    scale: PixelScale = field(default_factory=PixelScale)
    size: tuple[int, int] | None = None
    mode: str = "bicubic"
    columns: tuple[int, ...] | None = None

    def for_classes(self, data_names: Sequence[str]) -> "Teacher":
        """The teacher, answering in the data's classes and their order; of others that it knows nothing is said.

        Raises:
            UserError: it knows no class of one of these names.
        """
        if not self.subject.label_sets:
            raise UserError(
                f"teacher {self.subject.name} does not name its classes, so nobody can tell which are the data's; "
                "write label_names (timm) or id2label (transformers), in the order of its outputs, into its config.json"
            )
        try:
            return replace(self, columns=tuple(self.subject.classes_of(data_names)))
        except UserError as error:
            raise UserError(f"teacher {self.subject.name}: {error}") from error

    @torch.no_grad()
    def answer(self, values: torch.Tensor, scale: PixelScale) -> torch.Tensor:
        """Logits [B, K], float32, of images [B, C, H, W] as a student of this `scale` takes them."""
        return self.logits(values, scale)

    @torch.no_grad()
    def classify(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Logits [B, K], float32 on the CPU, of images as its own processor prepares them."""
        return self._of(self.subject.pixel_values(images)).cpu()

    def logits(self, values: torch.Tensor, scale: PixelScale) -> torch.Tensor:
        """What `answer` gives, with gradients."""
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
    """Load or wrap a teacher.

    Args:
        source: see `load_model`, of an image classifier; or a `Teacher`.
        device: torch device; by default a GPU where there is one. Models made in Python stay where they are.

    Raises:
        UserError: there is no such model, it is no classifier of one class an image, or it does not load.
    """
    teacher = source if isinstance(source, Teacher) else _wrapped(load_model(source, device, as_classifier=True))
    model, name = teacher.subject.model, teacher.subject.name
    refuse_regression(model, name, "a teacher's place")
    if problem_type_of(model) == "multi_label_classification":
        raise UserError(
            f"{name} judges each class by itself (multi-label), and students learn from a softmax over the classes; "
            "give a teacher that was trained with one class an image"
        )
    model.eval().requires_grad_(False)
    return teacher


def _wrapped(subject: LoadedModel) -> Teacher:
    if subject.processor is None:
        fed = timm_data_config(subject.model)
        height, width = fed["input_size"][1:]
        scale = PixelScale(tuple(fed["mean"]), tuple(fed["std"]))
        return Teacher(subject, scale, (height, width), _MODES.get(fed["interpolation"], "bicubic"))
    resample = getattr(subject.processor, "resample", None) or Image.Resampling.BILINEAR
    mode = _MODES.get(Image.Resampling(resample).name.lower(), "bicubic")
    return Teacher(subject, PixelScale.of(subject), _size_of(subject), mode)


def _size_of(subject: LoadedModel) -> tuple[int, int] | None:
    """What it is fed with, if images of every size become one."""
    other = subject.prepare([Image.new("RGB", (_PROBE_PX // 2, _PROBE_PX // 2))])
    return subject.input_size if tuple(other.shape[2:]) == subject.input_size else None
