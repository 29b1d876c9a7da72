"""Teachers: image classifiers of transformers or timm that answer to a student's varied images.

Legend: B images, C channels, H x W px, K the data's classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast, final

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from hf_vit.data.transforms import input_size
from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.top1 import match_labels
from hf_vit.subjects.loading import label_names_of, load_classifier
from hf_vit.subjects.subject import Subject
from hf_vit.subjects.timm_models import is_timm, load_timm, timm_data_config, timm_label_names

# What torch's resize has of Pillow's filters; the others come closest to bicubic.
_MODES = {"nearest": "nearest-exact", "bilinear": "bilinear"}


@final
@dataclass(frozen=True)
class PixelScale:
    """What an image processor does to pixels in 0..1: (pixels * factor - mean) / std, per channel.

    Attributes:
        mean, std: [C].
        factor: 1 where pixels stay in 0..1, 255 where the processor does not rescale.
    """

    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    factor: float = 1.0

    @classmethod
    def of(cls, processor: Any) -> Self:
        """The scale of an image processor of transformers."""
        factor = 255 * float(processor.rescale_factor) if getattr(processor, "do_rescale", True) else 255.0
        if not getattr(processor, "do_normalize", True):
            return cls(factor=factor)
        return cls(tuple(processor.image_mean), tuple(processor.image_std), factor)

    def apply(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels in 0..1 [B, C, H, W] to what a model takes."""
        mean, std = self._constants(pixels)
        return (pixels * self.factor - mean) / std

    def undo(self, values: torch.Tensor) -> torch.Tensor:
        """What a model takes [B, C, H, W] back to pixels in 0..1."""
        mean, std = self._constants(values)
        return (values * std + mean) / self.factor

    def _constants(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(like.new_tensor(values)[:, None, None] for values in (self.mean, self.std))  # pyright: ignore[reportReturnType]


@final
@dataclass(frozen=True)
class Teacher:
    """A classifier that is asked and never trained.

    Attributes:
        model: takes [B, C, H, W] and gives logits, plain or as `.logits`.
        name: for people and facts.
        label_names: what it calls its classes, in the order of its logits; of several sets the first that fits counts.
        scale: what its pixels look like.
        size: (height, width) px it wants; None takes what comes.
        mode: of the resize to that size.
        columns: its class for each of the data's, once they are matched.
    """

    model: nn.Module
    name: str
    label_names: list[list[str]]
    scale: PixelScale = field(default_factory=PixelScale)
    size: tuple[int, int] | None = None
    mode: str = "bicubic"
    columns: tuple[int, ...] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a hash over its weights."""
        return Subject(self.model, cast(Any, None), self.name).fingerprint

    def for_classes(self, data_names: Sequence[str]) -> "Teacher":
        """The teacher, answering in the data's classes and their order; of others that it knows nothing is said.

        Raises:
            UserError: it knows no class of one of these names.
        """
        if not self.label_names:
            raise UserError(
                f"teacher {self.name} does not name its classes, so nobody can tell which are the data's; write "
                "label_names (timm) or id2label (transformers), in the order of its outputs, into its config.json"
            )
        errors: list[UserError] = []
        for names in self.label_names:
            try:
                return replace(self, columns=tuple(match_labels(data_names, names)))
            except UserError as error:
                errors.append(error)
        raise UserError(f"teacher {self.name}: {errors[0]}") from errors[0]

    @torch.no_grad()
    def answer(self, values: torch.Tensor, scale: PixelScale) -> torch.Tensor:
        """Logits [B, K], float32, of images [B, C, H, W] as a student of this `scale` takes them."""
        pixels = scale.undo(values.float())
        if self.size is not None and tuple(pixels.shape[2:]) != self.size:
            smooth: dict[str, Any] = {} if self.mode == "nearest-exact" else {"antialias": True}
            # Bicubic overshoots; an image does not.
            pixels = F.interpolate(pixels, self.size, mode=self.mode, **smooth).clamp(0, 1)
        dtype = next(self.model.parameters()).dtype
        output = self.model(self.scale.apply(pixels).to(dtype))
        logits: torch.Tensor = getattr(output, "logits", output)
        return logits.float() if self.columns is None else logits[:, list(self.columns)].float()


def open_teacher(source: Any, device: str | None = None) -> Teacher:
    """Load or wrap a teacher.

    Args:
        source: a folder or Hub id of an image classifier of transformers (hf_vit's among them), "timm:NAME", a folder
            that timm saved, a pair (model, image processor), or a `Teacher`.
        device: torch device; by default a GPU where there is one. Models made in Python stay where they are.

    Raises:
        UserError: there is no such model, it is no classifier, or it does not load.
    """
    if isinstance(source, Teacher):
        teacher = source
    elif isinstance(source, tuple):
        model, processor = cast("tuple[Any, Any]", source)
        teacher = _of_transformers(model, processor, type(model).__name__)
    elif is_timm(str(source)):
        teacher = _of_timm(load_timm(str(source), device), str(source))
    else:
        loaded = load_classifier(source, device)
        name = Path(loaded.source).name if loaded.folder is not None else loaded.source
        teacher = _of_transformers(loaded.model, loaded.processor, name)
    teacher.model.eval().requires_grad_(False)
    return teacher


def _of_transformers(model: Any, processor: Any, name: str) -> Teacher:
    filters = Image.Resampling(getattr(processor, "resample", None) or Image.Resampling.BILINEAR).name.lower()
    return Teacher(
        model,
        name,
        [label_names_of(model)],
        PixelScale.of(processor),
        _wanted_size(processor),
        _MODES.get(filters, "bicubic"),
    )


def _wanted_size(processor: Any) -> tuple[int, int]:
    """(height, width) px; processors that give only a shorter side are meant for squares."""
    size: Any = processor.size
    crops = getattr(processor, "do_center_crop", None) and getattr(processor, "crop_size", None)
    if not crops and size.get("shortest_edge"):
        return int(size["shortest_edge"]), int(size["shortest_edge"])
    return input_size(processor)


def _of_timm(model: nn.Module, source: str) -> Teacher:
    if not getattr(model, "num_classes", 0):
        raise UserError(f"teacher {source} is no classifier: it has no head (num_classes 0)")
    fed = timm_data_config(model)
    scale = PixelScale(tuple(fed["mean"]), tuple(fed["std"]))
    height, width = fed["input_size"][1:]
    name = source if source.startswith("timm:") and "/" not in source else f"timm:{Path(source).name}"
    return Teacher(
        model, name, timm_label_names(model), scale, (height, width), _MODES.get(fed["interpolation"], "bicubic")
    )
