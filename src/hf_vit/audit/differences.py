"""Compare two models, or two revisions of one: their configuration, their weights and their predictions."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from hf_vit.data import load_data
from hf_vit.data.labels import normalize_name
from hf_vit.display import Displayed
from hf_vit.errors import UserError, to_one_line
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import Extremes, Table, draw_images, make_thumbnail, percent, shorten_list
from hf_vit.evaluation.reading import convert_to_scores
from hf_vit.loading.model import LoadedModel, get_values, load_model
from hf_vit.loading.pixels import keep_own_sizes
from hf_vit.repositories.reading import COUNTER
from hf_vit.results.facts import DataFact
from hf_vit.results.figures import save_figure
from hf_vit.results.redaction import redact_values
from hf_vit.results.trained_images import note_trained
from hf_vit.writing import explain_write_errors, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

# "encoder.layers.3.attention.q_proj.weight" belongs to the layer "encoder.layers.3".
_LAYER_NAME = re.compile(r".*\.\d+(?=\.)")
# Fields in which timm keeps where the weights came from.
_TIMM_ADDRESS = ("url", "file", "source", "hf_hub_id", "hf_hub_filename")
_MAX_VALUE_LENGTH, MAX_THUMBNAILS = 60, 25
RESULT_FILE, PLOT_FILE = "diff.json", "disagreements.png"


@dataclass(frozen=True)
class Prediction:
    """The most likely class of an image, its probability, and whether it is the correct class."""

    label: str
    probability: float
    is_right: bool


@final
@dataclass(frozen=True)
class Disagreement:
    """An image (position in the split, file name if known, correct class) and two models' different predictions."""

    index: int
    file: str | None
    label: str
    answers: tuple[Prediction, Prediction]

    @property
    def lower_probability(self) -> float:
        """Return the lower of the two predictions' probabilities; examples are sorted by it."""
        return min(answer.probability for answer in self.answers)


@final
@dataclass(frozen=True)
class PairedAccuracy:
    """Accuracy of two classifiers on the same images.

    Attributes:
        num_images: images that both models classified.
        both_right: images that both models classify correctly.
        only_first, only_second: images that only the first, or only the second, classifies correctly.
        num_disagreements: images with different predictions, correct or not.
        examples: at most `MAX_THUMBNAILS` disagreements, those with the highest probabilities.
        thumbnails: small images of the `examples`.
    """

    num_images: int
    both_right: int
    only_first: int
    only_second: int
    num_disagreements: int
    examples: list[Disagreement]
    thumbnails: "list[Image]"

    @property
    def accuracies(self) -> tuple[float, float]:
        """Return the top-1 accuracy of the first and of the second model."""
        right = (self.both_right + self.only_first, self.both_right + self.only_second)
        return right[0] / self.num_images, right[1] / self.num_images

    @property
    def p_value(self) -> float:
        """Return the two-sided p-value of McNemar's exact test (Psychometrika 12, 1947)."""
        from scipy.stats import binomtest

        num_discordant = self.only_first + self.only_second
        return float(binomtest(self.only_first, num_discordant).pvalue) if num_discordant else 1.0

    def draw(self) -> "Figure":
        """Draw the images on which the models disagree, titled with the correct class and both predictions."""
        titles = list[str]()
        for example in self.examples:
            answers = [f"{shorten_list(answer.label, 14)} {answer.probability:.0%}" for answer in example.answers]
            image_name = f"image {example.index}" if example.file is None else shorten_list(example.file)
            titles.append(f"{shorten_list(example.label, 20)} · {image_name}\n{' | '.join(answers)}")
        return draw_images(self.thumbnails, titles)

    def to_json(self) -> dict[str, Any]:
        """Return counts, accuracies, p-value and examples as diff.json stores them."""
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return counts | {"top1": self.accuracies, "p_value": self.p_value, "pictured": list(map(asdict, self.examples))}


def compare_predictions(first: Examination, second: Examination) -> PairedAccuracy:
    """Classify the same images with two models, one after the other, and compare the predictions.

    Only the first model's predictions are kept in memory, not its images.

    Raises:
        UserError: the data set returned a different number of images the second time.
    """
    _ = second.model_classes  # raises an error for unknown classes before the first model runs

    def add_picture(example: Disagreement, image: "Image") -> "tuple[Disagreement, Image]":
        return example, make_thumbnail(image)

    first_predictions = [prediction for prediction, _, _ in _iterate_predictions(first)]
    outcomes = Counter[tuple[bool, bool]]()  # (first model is right, second model is right) -> number of images
    most_certain = Extremes[tuple[Disagreement, "Image"]](MAX_THUMBNAILS)
    num_disagreements = 0
    for index, (first_prediction, row) in enumerate(zip_longest(first_predictions, _iterate_predictions(second))):
        if first_prediction is None or row is None:
            raise UserError(f"'{first.data.name}' changed during the comparison; give a data set that stays the same")
        prediction, label, image = row
        outcomes[first_prediction.is_right, prediction.is_right] += 1
        if (first_prediction.label, first_prediction.is_right) != (prediction.label, prediction.is_right):
            num_disagreements += 1
            example = Disagreement(index, None, label, (first_prediction, prediction))
            most_certain.add(example.lower_probability, add_picture, example, image)
    pictured = most_certain.entries
    return PairedAccuracy(
        num_images=len(first_predictions),
        both_right=outcomes[True, True],
        only_first=outcomes[True, False],
        only_second=outcomes[False, True],
        num_disagreements=num_disagreements,
        examples=[replace(example, file=second.file_name(example.index)) for example, _ in pictured],
        thumbnails=[image for _, image in pictured],
    )


def _iterate_predictions(examination: Examination) -> "Iterator[tuple[Prediction, str, Image]]":
    """Iterate over (prediction, correct class, image)."""
    class_names = [to_one_line(normalize_name(name)) for name in examination.model_label_names]
    for logits, labels, images in examination.iterate_logits_with_images(title=f"evaluating {examination.loaded.name}"):
        probabilities, classes = convert_to_scores(examination.loaded.model, logits).max(dim=-1)
        rows = zip(probabilities.tolist(), classes.tolist(), labels.tolist(), images, strict=True)
        for probability, predicted, label, image in rows:
            yield Prediction(class_names[predicted], probability, predicted == label), class_names[label], image


@final
@dataclass(frozen=True)
class LayerDifference:
    """How much the weights of one layer differ between two models.

    Attributes:
        layer: the module's path up to its last number, such as "encoder.layers.3", or the whole path if it has no
            number.
        num_values: values in the tensors that have the same name and shape in both models.
        norm: Frobenius norm of their difference divided by the norm of the first model's weights; None if undefined.
        notes: tensors that only one model has or whose shapes differ, and why the norm is undefined.
    """

    layer: str
    num_values: int
    norm: float | None
    notes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Return whether both models have the same tensors with the same values."""
        return self.norm == 0 and not self.notes


@final
@dataclass(frozen=True, repr=False)
class Difference(Displayed):
    """The differences between two models.

    Attributes:
        models: the models' names.
        described: the models' descriptions, see `LoadedModel.describe`.
        configuration: maps each differing field to both values as JSON; None where a model lacks the field. Fields of
            the image processor begin with "processor.".
        layers: all layers in the order of the first model, followed by those that only the second model has.
        data: the images that both models classified, if data was given.
        accuracy: the comparison of their predictions, if data was given.
        notes: which of the models was trained on these images.
    """

    models: tuple[str, str]
    described: tuple[dict[str, str], dict[str, str]]
    configuration: dict[str, tuple[str | None, str | None]]
    layers: list[LayerDifference]
    data: DataFact | None = None
    accuracy: PairedAccuracy | None = None
    notes: tuple[str, ...] = ()

    def overview(self) -> dict[str, object]:
        """Return the numbers of differing fields and layers, and the accuracies if both models were evaluated."""
        rows: dict[str, object] = {"models": " | ".join(self.models), "fields that differ": len(self.configuration)}
        rows["layers that differ"] = f"{sum(not layer.is_same for layer in self.layers)} of {len(self.layers)}"
        if self.accuracy is not None:
            rows["top-1 accuracy"] = " | ".join(map(percent, self.accuracy.accuracies))
            rows["McNemar's test"] = f"p = {self.accuracy.p_value:.3g}"
        return rows

    def tables(self) -> list[Table]:
        """Return the tables printed in a terminal: differing fields, layers, and predictions."""
        header = ["", *self.models]
        weights = "all weights are equal" if self.layers else "exported graphs have no weights to compare"
        tables = [Table([], [], "the configurations are equal"), Table([], [], weights)]
        if self.configuration:
            field_rows = [
                [name, *("none" if value is None else shorten_list(value, _MAX_VALUE_LENGTH) for value in values)]
                for name, values in self.configuration.items()
            ]
            tables[0] = Table(header, field_rows, "configuration")
        if not all(layer.is_same for layer in self.layers):
            layer_rows = [
                [layer.layer, "" if layer.norm is None else f"{layer.norm:.3g}", "; ".join(layer.notes)]
                for layer in self.layers
            ]
            tables[1] = Table(["layer", "relative norm of the difference", "notes"], layer_rows, "weights")
        if self.accuracy is None or self.data is None:
            return tables
        accuracy_rows = [
            ["top-1 accuracy", *map(percent, self.accuracy.accuracies)],
            ["only this model is correct", f"{self.accuracy.only_first:,}", f"{self.accuracy.only_second:,}"],
            ["different predictions", f"{self.accuracy.num_disagreements:,}", ""],
            ["McNemar's exact test", f"p = {self.accuracy.p_value:.3g}", ""],
        ]
        title = f"{self.data.name}, split {self.data.split}, {self.accuracy.num_images:,} images"
        return [*tables, Table(header, accuracy_rows, title), *(Table([], [], note) for note in self.notes)]

    def save(self, output: str | os.PathLike[str]) -> None:
        """Write diff.json to a folder, and disagreements.png if the predictions differ.

        Raises:
            UserError: the folder or a file cannot be written.
        """
        folder = Path(output).expanduser()
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {
            "format": 1,
            "models": self.described,
            "configuration": self.configuration,
            "layers": list(map(asdict, self.layers)),
        }
        if self.accuracy is not None and self.data is not None:
            content |= {"data": self.data.model_dump(), "accuracy": self.accuracy.to_json(), "notes": self.notes}
        if self.accuracy is not None and self.accuracy.examples:
            save_figure(self.accuracy.draw(), folder / PLOT_FILE)
        else:
            (folder / PLOT_FILE).unlink(missing_ok=True)
        redacted_content = redact_values(json.loads(json.dumps(content, allow_nan=False)))
        write_atomically(folder / RESULT_FILE, json.dumps(redacted_content, indent=2, ensure_ascii=False) + "\n")


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
    """Compare the configurations, weights and, if data is given, predictions of two models.

    Args:
        first, second: names or paths as `load_model` accepts them; "user/name@REVISION" selects a revision on the Hub.
        data: data set on which both models predict, see `load_data`; None compares no predictions.
        split, num_images, batch_size, seed, progress: see `Examination`.
        device: torch device; by default a GPU if there is one.
        **options: `skip_bad_images`, `image_column`, `label_column`: see `load_data`.

    Raises:
        UserError: a model or the data cannot be read, or a model does not know the classes of the data.
    """
    models = [load_model(source, device, as_classifier=data is not None) for source in (first, second)]
    names = [to_one_line(loaded.name) for loaded in models]
    if names[0] == names[1]:
        names = [f"{names[0]} (first)", f"{names[1]} (second)"]
    fields = [_read_configuration(loaded) for loaded in models]
    values = {name: (fields[0].get(name), fields[1].get(name)) for name in sorted({*fields[0], *fields[1]})}
    difference = Difference(
        models=(names[0], names[1]),
        described=(models[0].describe(), models[1].describe()),
        configuration={name: pair for name, pair in values.items() if pair[0] != pair[1]},
        layers=list(compare_layers(*({} if loaded.is_graph else loaded.model.state_dict() for loaded in models))),
    )
    if data is None:
        return difference
    size = models[0].image_size if models[0].image_size == models[1].image_size else None  # of built-in images
    images = load_data(data, image_size=size, **options, check=False, splits=[split], hash_others=True)
    inputs = (images, split, num_images, batch_size, seed, progress)
    examinations = [Examination(keep_own_sizes(loaded), *inputs) for loaded in models]
    accuracy = compare_predictions(*examinations)
    notes = tuple(
        f"{name}: {note}"
        for name, loaded in zip(names, models, strict=True)
        for note in note_trained(loaded.folder, examinations[0].list_digests())
    )
    return replace(difference, data=examinations[0].fact(accuracy.num_images), accuracy=accuracy, notes=notes)


def _read_configuration(loaded: LoadedModel) -> dict[str, str]:
    """Return the fields of a model's config and image processor, each value as JSON."""
    processor = loaded.processor.to_dict() if hasattr(loaded.processor, "to_dict") else {}
    timm_config: dict[str, Any] = getattr(loaded.model, "pretrained_cfg", None) or {}
    config = loaded.configuration or {name: timm_config[name] for name in timm_config if name not in _TIMM_ADDRESS}
    fields = config | {f"processor.{name}": value for name, value in processor.items() if not name.startswith("_")}
    return {
        to_one_line(name): to_one_line(json.dumps(value, sort_keys=True, default=str)) for name, value in fields.items()
    }


def compare_layers(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> Iterator[LayerDifference]:
    """Iterate over the layers of two state dicts and measure in float64 how much their weights differ."""
    layers: dict[str, list[str]] = {}
    # Batch norms' counters of steps have no effect, but are larger than any weight.
    for name in dict.fromkeys(name for name in (*first, *second) if not name.endswith(COUNTER)):
        layer_match = _LAYER_NAME.match(name)
        layers.setdefault(layer_match[0] if layer_match else name.rpartition(".")[0] or name, []).append(name)
    for layer, names in layers.items():
        yield _compare_layer(layer, names, first, second)


def _compare_layer(
    layer: str, names: list[str], first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> LayerDifference:
    """Compare the weights of these names; the norm is None where no weight can be compared or it is undefined."""
    notes = list[str]()
    squared_difference = 0.0
    squared_norm = 0.0
    count = 0
    for name in names:
        weight, other_weight = first.get(name), second.get(name)
        if weight is None or other_weight is None or weight.shape != other_weight.shape:
            shapes = ("none" if value is None else str(list(value.shape)) for value in (weight, other_weight))
            notes.append(f"{name} {' | '.join(shapes)}")
            continue
        values, other_values = get_values(weight).double(), get_values(other_weight).double()
        squared_difference += float((values - other_values).square().sum())
        squared_norm += float(values.square().sum())
        count += weight.numel()
    relative_norm = None
    if count and not math.isfinite(squared_difference + squared_norm):
        notes.append("some weights are not finite")
    elif count and squared_difference and not squared_norm:
        notes.append("all weights are zero in the first model, so the relative difference is undefined")
    elif count:
        relative_norm = math.sqrt(squared_difference / squared_norm) if squared_difference else 0.0
    return LayerDifference(layer, count, relative_norm, tuple(notes))
