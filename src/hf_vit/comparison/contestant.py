"""A model of a comparison: any image classifier, or any model that a linear probe makes one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from PIL import Image
from torch import nn

from hf_vit.comparison.image_gpt import ImageGPTFeatures
from hf_vit.comparison.probe import ProbedForImageClassification, fit_probe
from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.top1 import match_labels
from hf_vit.subjects.features import pre_logits
from hf_vit.subjects.loading import load_pretrained
from hf_vit.subjects.subject import Subject, open_subject
from hf_vit.subjects.timm_models import TIMM

HEAD, PROBE = "head", "linear probe"


@final
@dataclass(frozen=True)
class Contestant:
    """A loaded model.

    Attributes:
        name: in tables and of its file; unlike every other of the comparison.
        subject: the model and how it is fed.
        judged_by: `HEAD` or `PROBE`.
        differentiable: whether its answers have a gradient with respect to the pixels.
    """

    name: str
    subject: Subject
    judged_by: str
    differentiable: bool = True

    def describe(self) -> dict[str, str]:
        """Name, kind, what answers, and a fingerprint of config, weights and how images are prepared."""
        found = self.subject.describe()
        # A picture with edges and colours shows how the processor resizes, crops and scales.
        picture = Image.effect_mandelbrot((96, 80), (-2, -1.2, 0.6, 1.2), 60).convert("RGB")
        prepared = (self.subject.prepare([picture]) * 100).round().to(torch.int32).numpy().tobytes()
        fingerprint = hashlib.sha256(found["fingerprint"].encode() + prepared).hexdigest()[:16]
        return {**found, "fingerprint": fingerprint, "name": self.name, "judged_by": self.judged_by}


def open_models(sources: Sequence[Any], device: str | None = None) -> dict[str, Subject]:
    """Load all models, before any work: name -> model.

    Args:
        sources: as `open_subject` takes them.
        device: torch device; by default a GPU where there is one.

    Raises:
        UserError: a model does not load or is given twice, or there are fewer than two.
    """
    if len(sources) < 2:
        raise UserError("a comparison needs at least two models; name more")
    subjects = [_open(source, device) for source in sources]
    return dict(zip(_names(sources, subjects), subjects, strict=True))


def enter(name: str, subject: Subject, data: ImageData, probe: bool) -> Contestant:
    """Decide what answers for a model.

    Args:
        name: of the model.
        subject: it.
        data: its class names decide whether the model's head can be used.
        probe: let a linear probe answer where it cannot.

    Raises:
        UserError: the model has no head for these classes, and no probe was asked for.
    """
    if isinstance(subject.model, ImageGPTFeatures):
        if not probe:
            raise UserError(f"{name} is an ImageGPT, which has no head to compare; --probe trains a linear probe on it")
        return Contestant(name, subject, PROBE, differentiable=False)
    try:
        _require_classes(subject, data)
    except UserError as error:
        if not probe:
            raise UserError(f"{name}: {error}; or let a linear probe answer (--probe)") from error
        return Contestant(name, subject, PROBE)
    return Contestant(name, subject, HEAD)


def answering(contestant: Contestant, examination: Examination, probe_images: int | None) -> tuple[Subject, list[str]]:
    """The subject that answers with the data's classes, and what must be said about it.

    For `PROBE` the probe is trained here, on the train split.
    """
    if contestant.judged_by == HEAD:
        return contestant.subject, []
    head, strength = fit_probe(examination, probe_images)
    note = f"a linear probe (C = {strength:g}) of {head.in_features} features answers"
    return _probed(contestant, head, examination.data.label_names), [note]


def untrained(contestant: Contestant, data: ImageData, sample: torch.Tensor) -> Subject:
    """As `answering`, for timing alone: a probe, if it takes one, has not learned anything.

    Args:
        contestant: the model.
        data: tells the number of classes.
        sample: images as the model takes them, [B, C, H, W].
    """
    if contestant.judged_by == HEAD:
        return contestant.subject
    with torch.inference_mode():
        size = pre_logits(contestant.subject.model, sample).shape[1]
    head = nn.Linear(size, len(data.label_names)).to(sample.device)
    return _probed(contestant, head, data.label_names)


def input_size(subject: Subject) -> tuple[int, int]:
    """(height, width) px that the model is fed with, for a square image."""
    height, width = subject.prepare([Image.new("RGB", (64, 64))]).shape[-2:]
    return height, width


def _probed(contestant: Contestant, head: nn.Linear, label_names: list[str]) -> Subject:
    model = ProbedForImageClassification(contestant.subject.model, head, label_names)
    return replace(contestant.subject, model=model.eval())


def _open(source: Any, device: str | None) -> Subject:
    subject = open_subject(source, device)
    kind = getattr(getattr(subject.model, "config", None), "model_type", None)
    if kind != "imagegpt" or isinstance(source, Subject):
        return subject
    model, processor, _ = (*source, None) if isinstance(source, tuple) else load_pretrained(source, device)
    size = (int(processor.size["height"]), int(processor.size["width"]))
    features = ImageGPTFeatures(model, processor.clusters, size).eval().to(next(model.parameters()).device)

    def prepare(images: Any) -> torch.Tensor:
        return processor(images=list(images), do_color_quantize=False, return_tensors="pt")["pixel_values"]

    return replace(subject, model=features, prepare=prepare)


def _require_classes(subject: Subject, data: ImageData) -> None:
    sets = subject.label_sets
    if not sets:
        raise UserError("it has no head with named classes")
    fitting = [names for names in sets if set(data.label_names) <= set(names)]
    match_labels(data.label_names, (fitting or sets)[0])


def _names(sources: Sequence[Any], subjects: Sequence[Subject]) -> list[str]:
    """The last parts of folders, as many as it takes to tell them apart; other sources as they were given."""
    places = [_place(source, subject) for source, subject in zip(sources, subjects, strict=True)]
    if twice := sorted({place[-1] for place in places if places.count(place) > 1}):
        raise UserError(f"{', '.join(twice)} is given twice; give every model once")
    lengths = [1] * len(places)
    while True:
        names = ["/".join(place[-length:]) for place, length in zip(places, lengths, strict=True)]
        if len(set(names)) == len(names):
            return names
        lengths = [length + (names.count(name) > 1) for name, length in zip(names, lengths, strict=True)]


def _place(source: Any, subject: Subject) -> tuple[str, ...]:
    """Where a model is: the parts of its folder's path, or what it is called."""
    if isinstance(source, tuple | Subject):
        return (subject.name,)
    folder = subject.folder or Path(str(source).removeprefix(TIMM)).expanduser()
    return folder.resolve().parts if folder.is_dir() else (str(source),)
