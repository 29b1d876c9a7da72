"""The model that is looked at: hf_vit's, transformers' or timm's, with what turns images into its input."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import nn

from hf_vit.data import eval_transform
from hf_vit.subjects.loading import label_names_of, load_pretrained
from hf_vit.subjects.timm_models import is_timm, load_timm, timm_data_config, timm_label_names

if TYPE_CHECKING:
    from PIL.Image import Image


@final
@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode and how it is fed.

    Attributes:
        model: any torch module that takes images [B, C, H, W].
        prepare: Pillow images (RGB) -> [B, C, H, W] on the CPU.
        name: for people and facts.
        folder: where its facts are kept; None for a model of the Hub or of timm, or one made in Python.
    """

    model: nn.Module
    prepare: "Callable[[Sequence[Image]], torch.Tensor]"
    name: str
    folder: Path | None = None

    @property
    def label_sets(self) -> list[list[str]]:
        """The names of a classifier's classes, in the order of its logits; several sets where there are synonyms."""
        if hasattr(self.model, "pretrained_cfg"):
            return timm_label_names(self.model)
        return [label_names_of(cast(Any, self.model))] if _classifies(self.model) else []

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(height, width) px of the images the model was made for, where its config tells."""
        size: Any = getattr(getattr(self.model, "config", None), "image_size", None)
        if size is None or isinstance(size, int):
            return None if size is None else (size, size)
        return int(size[0]), int(size[1])

    def pixel_values(self, images: "Sequence[Image]") -> torch.Tensor:
        """[B, C, H, W] on the model's device, in the dtype of its weights."""
        weight = next(self.model.parameters())
        return self.prepare(images).to(weight.device, weight.dtype)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a hash over config, parameters and buffers; the same on every device."""
        digest = hashlib.sha256()
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "to_dict"):
            kept = {key: value for key, value in config.to_dict().items() if not key.startswith(("_", "transformers_"))}
            digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name}\t{tensor.dtype}\t{tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    def describe(self) -> dict[str, str]:
        """Name, kind and fingerprint, as results keep them."""
        kind = getattr(getattr(self.model, "config", None), "model_type", None) or type(self.model).__name__
        return {"name": self.name, "kind": str(kind), "fingerprint": self.fingerprint}


def _classifies(model: nn.Module) -> bool:
    """A bare model's config names classes too ("LABEL_0"); what counts is its class, and that there is a head."""
    return "ForImageClassification" in type(model).__name__ and bool(getattr(model.config, "num_labels", 0))


def open_subject(source: Any, device: str | None = None) -> Subject:
    """Load or wrap a model.

    Args:
        source: a folder (timm's too), a Hub id, "timm:NAME" or "timm:NAME@FILE" (timm installed), a pair (model, image
            processor) or a `Subject`.
        device: torch device; by default a GPU where there is one. Models made in Python stay where they are.

    Raises:
        UserError: there is no such model, or it does not load.
    """
    if isinstance(source, Subject):
        return source
    if isinstance(source, tuple):
        model, processor = source
        return Subject(model.eval(), _prepare(processor), type(model).__name__)
    if is_timm(str(source)):
        return _timm_subject(str(source), device)
    model, processor, folder = load_pretrained(source, device)
    name = folder.resolve().name if folder is not None else str(source)
    return Subject(model.eval(), _prepare(processor), name, folder)


def _prepare(processor: Any) -> "Callable[[Sequence[Image]], torch.Tensor]":
    transform = eval_transform(processor)
    return lambda images: torch.stack(list(transform.prepare(images)))


def _timm_subject(source: str, device: str | None) -> Subject:
    model = load_timm(source, device)
    from timm.data.transforms_factory import create_transform

    transform: Any = create_transform(**timm_data_config(model), is_training=False)
    return Subject(model, lambda images: torch.stack([transform(image) for image in images]), source)
