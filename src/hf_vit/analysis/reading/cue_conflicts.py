"""Images with the shape of one class and the texture of another, and a model's classes for them.

Source: Geirhos et al., arXiv 1811.12231; its files are named `cat/cat7-elephant1.png`: shape, then texture.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, final

from hf_vit.analysis.reading.images import AnalysisImages, images_of_files
from hf_vit.data.sources import IMAGE_SUFFIXES
from hf_vit.errors import UserError
from hf_vit.families import refuse_regression
from hf_vit.loading.model import LoadedModel

_NAME = re.compile(r"(?P<shape>[^\d\W][^\-]*?)\d*-(?P<texture>[^\d\W][^\-]*?)\d*")


@final
@dataclass(frozen=True)
class CueConflicts:
    """Images whose shape and texture disagree.

    Attributes:
        images: read in the order of their names; all of them, whatever the number of other images is.
        shapes, textures: class of every image, as the place in `classes`.
        classes: names, sorted.
        labels: for every class the places of a model's logits that stand for it; empty before `for_model`.
    """

    images: AnalysisImages
    shapes: list[int]
    textures: list[int]
    classes: list[str]
    labels: tuple[tuple[int, ...], ...] = ()

    def for_model(
        self, subject: LoadedModel, class_map: str | Path | Mapping[str, Sequence[str]] | None = None
    ) -> Self:
        """The same with `labels`: of the class's own name, or those that `class_map` (a dict or a JSON file) names.

        Raises:
            UserError: the model is no classifier with named classes, or lacks one, or the map cannot be read.
        """
        if not subject.label_sets:
            raise UserError(f"{subject.name} names no classes; cue conflicts need a classifier whose labels have names")
        refuse_regression(subject.model, subject.name, "shape_bias")
        chosen, lacking = _read_map(class_map), [""]
        for names in subject.label_sets:
            places = _places(names)
            wanted = {name: [_plain(label) for label in chosen.get(name, [name])] for name in self.classes}
            lacking = [f"'{label}' (class {name})" for name in wanted for label in wanted[name] if label not in places]
            if not lacking:
                labels = tuple(tuple(places[label] for label in wanted[name]) for name in self.classes)
                # What is measured depends on the names and the classes they stand for as much as on the pixels.
                told = (self.images.fingerprint, self.classes, self.shapes, self.textures, labels)
                fingerprint = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
                return replace(self, labels=labels, images=replace(self.images, fingerprint=fingerprint))
        shown = ", ".join(lacking[:3]) + ", ..." * (len(lacking) > 3)
        raise UserError(
            f"{subject.name} has no label {shown}; give --class-map FILE, "
            'a JSON object of every class and its labels, {"cat": ["tabby", "tiger cat"], ...}'
        )


def open_cue_conflicts(folder: str | os.PathLike[str]) -> CueConflicts:
    """Read a folder of class folders (or of images) named `<shape><number>-<texture><number>.<suffix>`.

    Images of one class for both are left out, and `images.notes` says so.

    Raises:
        UserError: no such folder, no readable image, a name of another form, or a folder that is not the shape's.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise UserError(f"{place} is no folder; cue conflicts are a folder of images like cat/cat7-elephant1.png")
    files = sorted(path for path in place.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    cues = {path: _cues(path, place) for path in files}
    disagreeing = [path for path in files if cues[path][0] != cues[path][1]]
    if not disagreeing:
        raise UserError(f"{place} holds no image whose shape and texture disagree; give such as cat/cat7-elephant1.png")
    images, kept = images_of_files(place.resolve().name, disagreeing)
    if same := len(files) - len(disagreeing):
        images.notes.append(f"{same} images of one class in shape and texture are left out of the cue conflicts")
    classes = sorted({name for path in kept for name in cues[path]})
    shapes, textures = ([classes.index(cues[path][cue]) for path in kept] for cue in (0, 1))
    return CueConflicts(images, shapes, textures, classes)


def _cues(path: Path, top: Path) -> tuple[str, str]:
    """(shape, texture) of a file's name."""
    match = _NAME.fullmatch(path.stem)
    if match is None:
        raise UserError(f"{path.name} does not name its shape and texture; needed: a name like cat7-elephant1.png")
    if path.parent != top and path.parent.name != match["shape"]:
        raise UserError(f"{path.name} lies in folder {path.parent.name}, but the shape it names is {match['shape']}")
    return match["shape"], match["texture"]


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()


def _places(labels: Sequence[str]) -> dict[str, int]:
    """Every label's place, by its whole name and by each of its synonyms ("tabby, tabby cat"); the first one counts."""
    found = {_plain(label): place for place, label in reversed(list(enumerate(labels)))}
    for place, label in enumerate(labels):
        for synonym in label.split(","):
            found.setdefault(_plain(synonym), place)
    return found


def _read_map(source: str | Path | Mapping[str, Sequence[str]] | None) -> Mapping[str, Sequence[str]]:
    if source is None or isinstance(source, Mapping):
        return source or {}
    try:
        found = json.loads(Path(source).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no class map {source}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not valid JSON ({error}); write it again") from error
    lists = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(labels, list) and labels and all(isinstance(one, str) for one in labels) for labels in lists):
        raise UserError(f'{source} must hold a JSON object of classes and their labels, {{"cat": ["tabby"], ...}}')
    return found
