"""Two models, or two revisions of one: what differs in their configuration, their weights and their answers."""

import heapq
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from hf_vit.data import load_data
from hf_vit.display import Displayed
from hf_vit.errors import UserError, one_line
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import Table, draw_images, percent, shortened, thumbnail_of
from hf_vit.evaluation.reading import scores_of
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.results.facts import DataFact
from hf_vit.results.figures import save_figure
from hf_vit.results.redaction import redact_values
from hf_vit.results.writing import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

# "encoder.layers.3.attention.q_proj.weight" is of the layer "encoder.layers.3".
_NUMBERED = re.compile(r".*\.\d+(?=\.)")
_LONGEST_VALUE, PICTURED = 60, 25
NUMBERS, PICTURE = "diff.json", "disagreements.png"


@dataclass(frozen=True)
class Answer:
    """The most likely class of an image, its probability, and whether it is the right one."""

    label: str
    probability: float
    is_right: bool


@final
@dataclass(frozen=True)
class Disagreement:
    """An image to which two models answer differently: its place, file (if it has one), right class and answers."""

    index: int
    file: str | None
    label: str
    answers: tuple[Answer, Answer]

    @property
    def sureness(self) -> float:
        """The probability of the less sure of the two answers."""
        return min(answer.probability for answer in self.answers)


@final
@dataclass(frozen=True)
class PairedAccuracy:
    """How two classifiers answer the same images.

    Attributes:
        num_images: images that both answered.
        both_right, only_first, only_second: of these, those that both answer right, and one alone.
        num_disagreements: images with different answers, right or wrong.
        pictured, thumbnails: of these the `PICTURED` of which both models are surest, and the images.
    """

    num_images: int
    both_right: int
    only_first: int
    only_second: int
    num_disagreements: int
    pictured: list[Disagreement]
    thumbnails: "list[Image]"

    @property
    def accuracies(self) -> tuple[float, float]:
        """Top-1 accuracy of the first and of the second."""
        right = (self.both_right + self.only_first, self.both_right + self.only_second)
        return right[0] / self.num_images, right[1] / self.num_images

    @property
    def p_value(self) -> float:
        """The two-sided p-value of McNemar's exact test (Psychometrika 12, 1947)."""
        from scipy.stats import binomtest

        apart = self.only_first + self.only_second
        return float(binomtest(self.only_first, apart).pvalue) if apart else 1.0

    def draw(self) -> "Figure":
        """Draw the images on which they disagree: the right class, and both answers."""
        titles = list[str]()
        for each in self.pictured:
            first, second = (f"{shortened(answer.label, 14)} {answer.probability:.0%}" for answer in each.answers)
            place = f"image {each.index}" if each.file is None else shortened(each.file)
            titles.append(f"{shortened(each.label, 20)} · {place}\n{first} | {second}")
        return draw_images(self.thumbnails, titles)

    def to_json(self) -> dict[str, Any]:
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        pictured = list(map(asdict, self.pictured))
        return counts | {"top1": self.accuracies, "p_value": self.p_value, "pictured": pictured}


def compare_answers(first: Examination, second: Examination) -> PairedAccuracy:
    """Ask two classifiers, one after the other, about the same images; a few bytes an image are kept."""
    _ = second.model_classes  # told before the first is asked
    before = [answer for batch in _answers(first) for answer, _, _ in batch]
    counts, surest, different, index = {True: [0, 0], False: [0, 0]}, list[tuple[Disagreement, "Image"]](), 0, 0
    for batch in _answers(second):
        for answer, label, image in batch:
            earlier = before[index]
            counts[earlier.is_right][not answer.is_right] += 1
            if (earlier.label, earlier.is_right) != (answer.label, answer.is_right):
                different += 1
                each = Disagreement(index, None, label, (earlier, answer)), thumbnail_of(image)
                surest = heapq.nlargest(PICTURED, [*surest, each], key=lambda each: (each[0].sureness, -each[0].index))
            index += 1
    if index != len(before):
        raise UserError(f"'{first.data.name}' gave {len(before):,} images, then {index:,}; give data that stays")
    (both, only_first), (only_second, _) = counts[True], counts[False]
    pictured = [replace(each, file=second.file_name(each.index)) for each, _ in surest]
    return PairedAccuracy(index, both, only_first, only_second, different, pictured, [image for _, image in surest])


def _answers(examination: Examination) -> "Iterator[list[tuple[Answer, str, Image]]]":
    """Iterate over batches of each image's answer, right class, and the image."""
    names: Sequence[str] = list(map(one_line, examination.answers))
    for logits, labels, images in examination.pictured_logits(what=f"asking {examination.subject.name}"):
        probabilities, classes = scores_of(examination.subject.model, logits).max(dim=-1)
        rows = zip(probabilities.tolist(), classes.tolist(), labels.tolist(), images, strict=True)
        yield [(Answer(names[best], value, best == label), names[label], image) for value, best, label, image in rows]


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

    @property
    def is_same(self) -> bool:
        return self.norm == 0 and not self.notes


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
        changed = sum(not layer.is_same for layer in self.layers)
        rows: dict[str, object] = {"models": " | ".join(self.models), "fields that differ": len(self.configuration)}
        rows["layers that differ"] = f"{changed} of {len(self.layers)}"
        if self.accuracy is not None:
            rows["top-1 accuracy"] = " | ".join(map(percent, self.accuracy.accuracies))
            rows["McNemar's test"] = f"p = {self.accuracy.p_value:.3g}"
        return rows

    def tables(self) -> list[Table]:
        """Return what a terminal shows: the fields that differ, every layer, and the answers."""
        header = ["", *self.models]
        fields = [
            [name, *("none" if value is None else shortened(value, _LONGEST_VALUE) for value in values)]
            for name, values in self.configuration.items()
        ]
        configuration = Table(header, fields, "configuration")
        if not fields:
            configuration = Table([], [], "the configuration is the same")
        weights = Table([], [], "the weights are the same, value by value")
        if not all(each.is_same for each in self.layers):
            layers = [
                [each.layer, "" if each.norm is None else f"{each.norm:.3g}", "; ".join(each.notes)]
                for each in self.layers
            ]
            weights = Table(["layer", "relative norm of the difference", ""], layers, "weights")
        if self.accuracy is None or self.data is None:
            return [configuration, weights]
        rows = [
            ["top-1 accuracy", *map(percent, self.accuracy.accuracies)],
            ["right, where the other is wrong", f"{self.accuracy.only_first:,}", f"{self.accuracy.only_second:,}"],
            ["other answers than the other's", f"{self.accuracy.num_disagreements:,}", ""],
            ["McNemar's exact test", f"p = {self.accuracy.p_value:.3g}", ""],
        ]
        title = f"{self.data.name}, split {self.data.split}, {self.accuracy.num_images:,} images"
        return [configuration, weights, Table(header, rows, title)]

    def save(self, output: str | os.PathLike[str]) -> None:
        """Write diff.json, and disagreements.png where there are any, into a folder."""
        folder = Path(output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made: {error.strerror}") from error
        content: dict[str, Any] = {
            "format": 1,
            "models": self.described,
            "configuration": self.configuration,
            "layers": list(map(asdict, self.layers)),
        }
        if self.accuracy is not None and self.data is not None:
            content |= {"data": self.data.model_dump(), "accuracy": self.accuracy.to_json()}
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
    models = [load_model(source, device, as_classifier=data is not None) for source in (first, second)]
    names = [one_line(loaded.name) for loaded in models]
    if names[0] == names[1]:
        names = [f"{names[0]} (first)", f"{names[1]} (second)"]
    one, other = map(_configuration, models)
    difference = Difference(
        models=(names[0], names[1]),
        described=(models[0].describe(), models[1].describe()),
        configuration={
            name: (one.get(name), other.get(name))
            for name in sorted({*one, *other})
            if one.get(name) != other.get(name)
        },
        layers=list(layers_apart(models[0].model.state_dict(), models[1].model.state_dict())),
    )
    if data is None:
        return difference
    images = load_data(data, image_size=models[0].image_size, **options)
    examined = [Examination(loaded, images, split, num_images, batch_size, seed, progress) for loaded in models]
    accuracy = compare_answers(*examined)
    return replace(difference, data=examined[0].fact(accuracy.num_images), accuracy=accuracy)


def _configuration(loaded: LoadedModel) -> dict[str, str]:
    """Return the fields of config and image processor, as JSON."""
    processor = loaded.processor.to_dict() if hasattr(loaded.processor, "to_dict") else {}
    fields = (loaded.configuration or {}) | {
        f"processor.{name}": value for name, value in processor.items() if not name.startswith("_")
    }
    return {one_line(name): one_line(json.dumps(value, sort_keys=True, default=str)) for name, value in fields.items()}


def layers_apart(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> Iterator[LayerDifference]:
    """Iterate over layers and how far two state dicts lie apart, in float64."""
    layers: dict[str, list[str]] = {}
    for name in dict.fromkeys([*first, *second]):
        numbered = _NUMBERED.match(name)
        layers.setdefault(numbered[0] if numbered else name.rpartition(".")[0] or name, []).append(name)
    for layer, names in layers.items():
        notes, apart, size, count = list[str](), 0.0, 0.0, 0
        for name in names:
            one, other = first.get(name), second.get(name)
            if one is None or other is None or one.shape != other.shape:
                shapes = ("none" if each is None else str(list(each.shape)) for each in (one, other))
                notes.append(f"{name} {' | '.join(shapes)}")
                continue
            one, other = one.detach().cpu().double(), other.detach().cpu().double()
            apart += float((one - other).square().sum())
            size += float(one.square().sum())
            count += one.numel()
        norm = None
        if count and not math.isfinite(apart + size):
            notes.append("not finite")
        elif count and apart and not size:
            notes.append("zero in the first")
        elif count:
            norm = math.sqrt(apart / size) if apart else 0.0
        yield LayerDifference(layer, count, norm, tuple(notes))
