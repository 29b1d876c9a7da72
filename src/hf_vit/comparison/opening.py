"""The models of a comparison, each under a name of its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_vit.conversion.fetch.addresses import TIMM
from hf_vit.errors import UserError
from hf_vit.loading.model import LoadedModel, load_model


def open_models(sources: Sequence[Any], device: str | None = None) -> list[LoadedModel]:
    """Load all models, before any work; they are called by as little of their paths as tells them apart.

    Args:
        sources: as `load_model` takes them.
        device: torch device; by default a GPU where there is one.

    Raises:
        UserError: a model does not load or is given twice, or there are fewer than two.
    """
    if len(sources) < 2:
        raise UserError("a comparison needs at least two models; name more")
    subjects = [load_model(source, device) for source in sources]
    names = _names(sources, subjects)
    return [replace(subject, name=name) for subject, name in zip(subjects, names, strict=True)]


def _names(sources: Sequence[Any], subjects: Sequence[LoadedModel]) -> list[str]:
    """The last parts of folders and files, as many as it takes to tell them apart; other sources as they were given."""
    places = [_place(source, subject) for source, subject in zip(sources, subjects, strict=True)]
    if twice := sorted({place[-1] for place in places if places.count(place) > 1}):
        raise UserError(f"{', '.join(twice)} is given twice; give every model once")
    lengths = [1] * len(places)
    while True:
        names = ["/".join(place[-length:]) for place, length in zip(places, lengths, strict=True)]
        if len(set(names)) == len(names):
            return names
        lengths = [length + (names.count(name) > 1) for name, length in zip(names, lengths, strict=True)]


def _place(source: object, subject: LoadedModel) -> tuple[str, ...]:
    """Where a model is: the parts of its folder's or file's path, or what it is called."""
    if isinstance(source, tuple | LoadedModel):
        return (subject.name,)
    folder = subject.folder or Path(str(source).removeprefix(TIMM)).expanduser()
    return folder.resolve().parts if folder.exists() else (str(source),)
