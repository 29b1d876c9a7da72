"""Two models, or two revisions of one: what differs in their configuration, their weights and their answers."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from hf_vit.audit.disagreement import PairedAccuracy, judge_both
from hf_vit.conversion.fetch.addresses import HUB_ID
from hf_vit.data import load_data
from hf_vit.display import Displayed
from hf_vit.errors import UserError, one_line
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import Table, percent
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.repositories.reading import model_folder
from hf_vit.results.facts import DataFact
from hf_vit.results.figures import save_figure
from hf_vit.results.redaction import redact_values
from hf_vit.results.writing import write_atomically

_AT_REVISION = re.compile(rf"({HUB_ID.pattern})@([\w./-]+)")
# "encoder.layers.3.attention.q_proj.weight" is of the layer "encoder.layers.3".
_NUMBERED = re.compile(r".*\.\d+(?=\.)")
_LONGEST_VALUE = 60
NUMBERS, PICTURE = "diff.json", "disagreements.png"


@final
@dataclass(frozen=True)
class LayerDifference:
    """How far the weights of a layer lie apart.

    Attributes:
        layer: the module's path up to its last number, or the module's.
        num_values: in the tensors that both models have alike.
        norm: of the difference of these, divided by that of the first model's (Frobenius); None where there is no such
            number.
        notes: tensors that only one has, or that have other shapes, and why there is no norm.
    """

    layer: str
    num_values: int
    norm: float | None
    notes: tuple[str, ...] = ()


@final
@dataclass(frozen=True, repr=False)
class Difference(Displayed):
    """What differs between two models.

    Attributes:
        models: their names.
        described: see `LoadedModel.describe`.
        configuration: field -> its value in either, as JSON; None where there is no such field. Fields of the image
            processor begin with "processor.".
        layers: all layers in the order of the first model, those of the second alone behind them.
        data: the images that both were asked about, if they were.
        accuracy: what they answered.
    """

    models: tuple[str, str]
    described: tuple[dict[str, str], dict[str, str]]
    configuration: dict[str, tuple[str | None, str | None]]
    layers: list[LayerDifference]
    data: DataFact | None = None
    accuracy: PairedAccuracy | None = None

    def overview(self) -> dict[str, object]:
        changed = sum(layer.norm != 0 or bool(layer.notes) for layer in self.layers)
        told: dict[str, object] = {"models": " | ".join(self.models), "fields that differ": len(self.configuration)}
        told["layers that differ"] = f"{changed} of {len(self.layers)}"
        if self.accuracy is not None:
            told["top-1 accuracy"] = " | ".join(map(percent, self.accuracy.accuracies))
            told["McNemar's test"] = f"p = {self.accuracy.p_value:.3g}"
        return told

    def tables(self) -> list[Table]:
        """What a terminal shows: the fields that differ, every layer, and the answers."""
        fields = [
            [name, *("none" if value is None else _shortened(value) for value in values)]
            for name, values in self.configuration.items()
        ]
        layers = [
            [each.layer, "" if each.norm is None else f"{each.norm:.3g}", "; ".join(each.notes)] for each in self.layers
        ]
        header = ["", *self.models]
        tables = (
            [Table(header, fields, "configuration")] if fields else [Table([], [], "the configuration is the same")]
        )
        if all(each.norm == 0 and not each.notes for each in self.layers):
            tables.append(Table([], [], "the weights are the same, value by value"))
        else:
            tables.append(Table(["layer", "relative norm of the difference", ""], layers, "weights"))
        if self.accuracy is not None and self.data is not None:
            tables.append(self._answers(self.accuracy, self.data))
        return tables

    def _answers(self, accuracy: PairedAccuracy, data: DataFact) -> Table:
        rows = [
            ["top-1 accuracy", *map(percent, accuracy.accuracies)],
            ["right, where the other is wrong", f"{accuracy.only_first:,}", f"{accuracy.only_second:,}"],
            ["other answers than the other's", f"{accuracy.num_disagreements:,}", ""],
            ["McNemar's exact test", f"p = {accuracy.p_value:.3g}", ""],
        ]
        return Table(["", *self.models], rows, f"{data.name}, split {data.split}, {accuracy.num_images:,} images")

    def save(self, output: str | os.PathLike[str]) -> None:
        """Write diff.json, and disagreements.png where there are any, into a folder.

        Raises:
            UserError: nothing can be written there.
        """
        folder = Path(output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made: {error.strerror}") from error
        content: dict[str, Any] = {
            "format": 1,
            "models": self.described,
            "configuration": self.configuration,
            "layers": [asdict(layer) for layer in self.layers],
        }
        if self.accuracy is not None and self.data is not None:
            content |= {"data": self.data.model_dump(), "accuracy": _numbers_of(self.accuracy)}
        if self.accuracy is not None and self.accuracy.pictured:
            save_figure(self.accuracy.draw(), folder / PICTURE)
        else:
            (folder / PICTURE).unlink(missing_ok=True)
        plain = redact_values(json.loads(json.dumps(content, allow_nan=False)))
        write_atomically(folder / NUMBERS, json.dumps(plain, indent=2, ensure_ascii=False) + "\n")


def diff(
    first: Any,
    second: Any,
    *,
    data: str | None = None,
    split: str = "test",
    num_images: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    device: str | None = None,
    progress: bool = True,
    **options: Any,
) -> Difference:
    """Compare two models field by field, layer by layer, and image by image.

    Args:
        first, second: as `load_model` takes them, and "user/name@REVISION" of the Hub.
        data: see `load_data`; None to leave the answers alone.
        split, num_images, batch_size, seed, progress: see `Examination`.
        device: torch device; by default a GPU where there is one.
        **options: `skip_bad_images`, `image_column`, `label_column`: see `load_data`.

    Raises:
        UserError: a model or the data cannot be read, or a model does not know the classes of the data.
    """
    subjects = tuple(_open(source, device, as_classifier=data is not None) for source in (first, second))
    found = Difference(
        models=_names(subjects),
        described=(subjects[0].describe(), subjects[1].describe()),
        configuration=_fields_apart(*map(_configuration, subjects)),
        layers=list(layers_apart(subjects[0].model.state_dict(), subjects[1].model.state_dict())),
    )
    if data is None:
        return found
    images = load_data(data, image_size=subjects[0].image_size, **options)
    examined = [Examination(each, images, split, num_images, batch_size, seed, progress) for each in subjects]
    accuracy = judge_both(*examined)
    return replace(found, data=examined[0].fact(accuracy.num_images), accuracy=accuracy)


def _open(source: Any, device: str | None, *, as_classifier: bool) -> LoadedModel:
    """A model; of "user/name@revision" what the Hub has at that revision."""
    at_revision = _AT_REVISION.fullmatch(source) if isinstance(source, str) else None
    if at_revision is None or Path(str(source)).exists():
        return load_model(source, device, as_classifier=as_classifier)
    folder = model_folder(at_revision[1], at_revision[2])
    return replace(load_model(str(folder), device, as_classifier=as_classifier), name=str(source), folder=None)


def _names(subjects: tuple[LoadedModel, ...]) -> tuple[str, str]:
    first, second = (one_line(subject.name) for subject in subjects)
    return (first, second) if first != second else (f"{first} (first)", f"{second} (second)")


def _configuration(subject: LoadedModel) -> dict[str, str]:
    """The fields of config and image processor, as JSON."""
    processor = subject.processor.to_dict() if hasattr(subject.processor, "to_dict") else {}
    fields = (subject.configuration or {}) | {
        f"processor.{name}": value for name, value in processor.items() if not name.startswith("_")
    }
    return {one_line(name): one_line(json.dumps(value, sort_keys=True, default=str)) for name, value in fields.items()}


def _fields_apart(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    return {
        name: (first.get(name), second.get(name))
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    }


def layers_apart(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> Iterator[LayerDifference]:
    """Layer by layer how far two state dicts lie apart, in float64."""
    layers: dict[str, list[str]] = {}
    for name in dict.fromkeys([*first, *second]):
        numbered = _NUMBERED.match(name)
        layers.setdefault(numbered[0] if numbered else name.rpartition(".")[0] or name, []).append(name)
    for layer, names in layers.items():
        notes, apart, size, count = list[str](), 0.0, 0.0, 0
        for name in names:
            one, other = first.get(name), second.get(name)
            if one is None or other is None or one.shape != other.shape:
                notes.append(f"{name} {_shape(one)} | {_shape(other)}")
                continue
            one, other = one.detach().cpu().double(), other.detach().cpu().double()
            apart += float((one - other).square().sum())
            size += float(one.square().sum())
            count += one.numel()
        yield LayerDifference(layer, count, *_relative(apart, size, count, notes))


def _relative(apart: float, size: float, count: int, notes: list[str]) -> tuple[float | None, tuple[str, ...]]:
    """The relative norm of squared sums, and the notes with why there is none."""
    if not count:
        return None, tuple(notes)
    if not math.isfinite(apart + size):
        return None, (*notes, "not finite")
    if apart and not size:
        return None, (*notes, "zero in the first")
    return (math.sqrt(apart / size) if apart else 0.0), tuple(notes)


def _shape(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))


def _shortened(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 1] + "…"


def _numbers_of(accuracy: PairedAccuracy) -> dict[str, Any]:
    counts = {name: value for name, value in vars(accuracy).items() if isinstance(value, int)}
    pictured = [
        {"index": each.index, "file": each.file, "label": each.label, "answers": [a._asdict() for a in each.answers]}
        for each in accuracy.pictured
    ]
    return counts | {"top1": accuracy.accuracies, "p_value": accuracy.p_value, "pictured": pictured}
