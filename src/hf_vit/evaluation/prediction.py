"""Predict image files: the most likely classes of each, or its masks or objects."""

import functools
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob, has_magic
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from PIL.Image import DecompressionBombError

from hf_vit.data.files import list_images, refuse_name
from hf_vit.data.images import decode_image, image_problem, map_in_threads
from hf_vit.errors import UserError
from hf_vit.evaluation.reading import enough_for, largest, scores
from hf_vit.families import problem_type_of
from hf_vit.loading.model import LoadedModel, get_label_names
from hf_vit.loading.outputs import detect, get_dense_task, segment
from hf_vit.repositories.stores import StoreError, is_folder, is_store_url, match_objects, to_path, write_object
from hf_vit.results.delivery import new_folder, prepare_output
from hf_vit.results.facts import Facts, as_fraction
from hf_vit.results.writing import explain_write_errors, new_file, scratch_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from hf_vit.evaluation.ray_runner import RayRunner

    Rest = tuple[Sequence[Path], Sequence[str | None]]

PREDICTIONS_NAME = "predictions.json"
_ROWS = 1024  # that are written at once
_BATCHES = 8  # of a part that another process answers


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image file, best first, as (label, probability); or why it has none.

    `labels` are the answer of a model of several classes an image: those that reach their threshold, in the order of
    its classes, perhaps none. It is None where an image has one class, which is the first of the scores.

    Where `are_values`, of a regression model, the scores are its values, all of them and in their order.
    """

    image: str
    scores: list[tuple[str, float]]
    problem: str | None = None
    labels: list[str] | None = None
    are_values: bool = False


@dataclass(frozen=True)
class DensePrediction:
    """What a model of segmentation or detection says of one image file; or why it says nothing.

    Attributes:
        image: the file.
        answers: of segmentation every class that was seen, {"label", "share" of the pixels}, the largest first; of
            detection every object, {"label", "score", "box": [x1, y1, x2, y2] px}, the surest first.
        problem: why there is no answer.
        mask: [H, W] uint8: of segmentation the class of every pixel; of a detector with masks the number of the answer
            that is seen there, from 1 on, and 0 for the ground; None where there is none.
        picture: the image with the answers drawn into it.
    """

    image: str
    answers: list[dict[str, Any]]
    problem: str | None = None
    mask: "NDArray[np.uint8 | np.uint16] | None" = field(default=None, compare=False, repr=False)
    picture: "Image | None" = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class _Files(ABC):
    """Abstract: a `Work` whose parts are files; an unreadable one is left out of the batch, if that is wanted."""

    batch_size: int
    skip_bad_images: bool
    draft_side: int | None = None

    def batches(self, part: Sequence[Path], prepare: "Callable[[list[Image]], Any]") -> Iterator[tuple[Any, "Rest"]]:
        for start in range(0, len(part), self.batch_size):
            files = part[start : start + self.batch_size]
            # Those of a store are fetched one by one.
            opened = (
                list(map(self._open, files)) if any(map(is_store_url, files)) else map_in_threads(self._open, files)
            )
            images = [one for one in opened if not isinstance(one, str)]
            yield (
                prepare(images) if images else None,
                (files, [one if isinstance(one, str) else None for one in opened]),
            )

    def _open(self, path: Path) -> "Image | str":
        """Return the image, or why it is left out."""
        try:
            return read_image(path, self.draft_side)
        except StoreError:
            raise
        except UserError as error:
            if not self.skip_bad_images:
                raise
            return str(error)

    @abstractmethod
    def answer(self, pixel_values: Any, rest: "Rest", subject: LoadedModel) -> list[Any]:
        """Return a prediction for every file."""


@dataclass(frozen=True)
class _Classifying(_Files):
    top: int = 5
    thresholds: Mapping[str, float] | None = None

    def answer(self, pixel_values: torch.Tensor | None, rest: "Rest", subject: LoadedModel) -> list[Prediction]:
        names = subject.label_sets[-1]  # of synonyms the words: timm's first set are WordNet's numbers
        are_values, limits = problem_type_of(subject.model) == "regression", self.thresholds
        rows: Iterator[torch.Tensor] = iter(())
        if pixel_values is not None:
            with torch.inference_mode():
                rows = iter(scores(subject.model, pixel_values.to(subject.device, subject.dtype)))
        predictions: list[Prediction] = []
        for path, problem in zip(*rest, strict=True):
            if problem is not None:
                predictions.append(Prediction(str(path), [], problem))
                continue
            row = next(rows)
            places = range(len(row)) if are_values else largest(row[None], self.top)[0].tolist()
            best = [(names[k], float(row[k])) for k in places]
            labels = [k for k, value in zip(names, row, strict=True) if value >= limits[k]] if limits else None
            predictions.append(Prediction(str(path), best, labels=labels, are_values=are_values))
        return predictions


@dataclass(frozen=True)
class _Locating(_Files):
    """Masks, or objects from a score of `threshold` on; the images come as they are."""

    threshold: float = 0.5
    tiles: bool = False

    def answer(self, pixel_values: "list[Image] | None", rest: "Rest", subject: LoadedModel) -> list[DensePrediction]:
        describe = _segmented if get_dense_task(subject.model) == "segmentation" else _detected
        images, names = pixel_values or [], get_label_names(subject.model)
        answers = [self._joined(subject, each) for each in images] if self.tiles else self._predict(subject, images)
        answered = zip(images, answers, strict=True)
        return [
            DensePrediction(str(path), [], problem)
            if problem is not None
            else DensePrediction(str(path), **describe(*next(answered), names))
            for path, problem in zip(*rest, strict=True)
        ]

    def _joined(self, subject: LoadedModel, image: "Image") -> Any:
        """As one of `_predict`, by tiles, a batch at a time."""
        from hf_vit.data.tiles import Tiles

        tiles = Tiles((image.height, image.width), subject.input_size, min(subject.input_size) // 4)
        crops, predicted = tiles.crops(image), list[Any]()
        while batch := list(islice(crops, self.batch_size)):
            predicted += self._predict(subject, batch)
        if len(tiles) == 1:
            return predicted[0]
        is_segmented = get_dense_task(subject.model) == "segmentation"
        return tiles.join_classes(predicted) if is_segmented else tiles.join_boxes(predicted)

    def _predict(self, subject: LoadedModel, images: "Sequence[Image]") -> list[Any]:
        """Return the class of every pixel [H, W] of each image, or its objects by name; on the CPU."""
        if not images:
            return []
        given = (
            subject.model,
            subject.processor,
            subject.pixel_values(images),
            [(image.height, image.width) for image in images],
        )
        with torch.inference_mode(), enough_for(given[2]):
            if get_dense_task(subject.model) == "segmentation":
                return [each.cpu() for each in segment(*given)]
            objects = detect(*given, threshold=self.threshold)
        return [{name: value.cpu() for name, value in each.items()} for each in objects]


def predict_images(
    subject: LoadedModel,
    paths: Sequence[str | os.PathLike[str]],
    *,
    top: int = 5,
    batch_size: int = 32,
    skip_bad_images: bool = False,
) -> list[Prediction]:
    """Classify image files, and the images of folders.

    Args:
        subject: an image classifier; see `load_model`.
        paths: image files; a folder stands for the images directly inside it, by name, a pattern ("photos/**/*.jpg")
            for those that match it.
        top: classes to report for every image, at most all.
        batch_size: images a step.
        skip_bad_images: an unreadable file gets no scores, and the `problem`, instead of an error.

    Raises:
        UserError: the model names no classes, a file is missing or is not a readable image, a folder holds no image,
            `top` is below 1.
    """
    return list(each_prediction(subject, paths, top=top, batch_size=batch_size, skip_bad_images=skip_bad_images))


def each_prediction(
    subject: LoadedModel,
    paths: Sequence[str | os.PathLike[str]],
    *,
    top: int = 5,
    threshold: float = 0.5,
    batch_size: int = 32,
    skip_bad_images: bool = False,
    tiles: bool = False,
    draft: bool = False,
    remote: "RayRunner | None" = None,
) -> Iterator[Any]:
    """Predict image files one after the other: of any number of images a few batches are in memory.

    With `draft` JPEG files are decoded at `draft_side` of the subject; with `remote` that has the same model answers.
    """
    if top < 1:
        raise UserError(f"top {top} must be at least 1")
    if not 0 <= threshold < 1:
        raise UserError(f"threshold {threshold} must be at least 0 and below 1")
    files, prepare = list(image_files(paths)), subject.prepare
    if get_dense_task(subject.model) is not None:
        work, prepare = _Locating(batch_size, skip_bad_images, None, threshold, tiles), list
    elif subject.label_sets:
        side, limits = subject.draft_side if draft else None, _thresholds(subject, subject.label_sets[-1])
        work = _Classifying(batch_size, skip_bad_images, side, top, limits)
    else:
        raise UserError(f"{subject.name} has no named classes to predict; give an image classifier")
    if remote is None:
        answers = (work.answer(*batch, subject) for batch in work.batches(files, prepare))
    else:
        size = _BATCHES * batch_size
        parts = [files[start : start + size] for start in range(0, len(files), size)]
        answers = (answer for _, answer in remote.answers(work, parts, subject))
    yield from chain.from_iterable(answers)


def write_predictions(
    subject: LoadedModel, paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], **options: Any
) -> list[Prediction]:
    """Classify image files into a table, a row an image; unreadable ones are passed over, their row has no answer.

    The columns are `image`, `label`, `score`, `label_2`, `score_2`, ... and `problem`; for a model of several classes
    an image `labels`, too: those that reach their thresholds, as a list in JSON. The scores of a regression model are
    all its values.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    place, writers = to_path(output), {".csv": csv.CSVWriter, ".parquet": parquet.ParquetWriter}
    if place.suffix not in writers:
        raise UserError(f"the output {place} is not a table; give a file that ends in {' or '.join(writers)}")
    predictions = each_prediction(subject, paths, **options)
    classes, kind = len(subject.label_sets[-1]) if subject.label_sets else 1, problem_type_of(subject.model)
    scored = classes if kind == "regression" else min(options.get("top", 5), classes)
    endings = ["", *(f"_{rank}" for rank in range(2, scored + 1))]
    columns = [column for end in endings for column in ((f"label{end}", pa.string()), (f"score{end}", pa.float64()))]
    several = [("labels", pa.string())] if kind == "multi_label_classification" else []
    schema = pa.schema([("image", pa.string()), *columns, *several, ("problem", pa.string())])
    passed_over: list[Prediction] = []
    with _new_table(place) as temporary, writers[place.suffix](temporary, schema) as writer:
        while batch := list(islice(predictions, _ROWS)):
            passed_over += [each for each in batch if each.problem is not None]
            rows = [_row(each, schema.names) for each in batch]
            with explain_write_errors(place):
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    return passed_over


@contextmanager
def _new_table(place: Path) -> Generator[Path]:
    """Make a file that goes to its place at the end, or vanishes."""
    if not is_store_url(place):
        with new_file(place) as temporary:
            yield temporary
        return
    with scratch_folder("predictions") as folder:
        yield folder / "table"
        write_object(str(place), folder / "table")


def _row(prediction: Prediction, columns: Sequence[str]) -> dict[str, object]:
    answers = [prediction.image, *chain.from_iterable(prediction.scores)]
    labels = None if prediction.labels is None else json.dumps(prediction.labels, ensure_ascii=False)
    return {**dict(zip(columns, answers, strict=False)), "labels": labels, "problem": prediction.problem}


def _thresholds(subject: LoadedModel, names: Sequence[str]) -> dict[str, float] | None:
    """Return class -> probability from which on it is answered: as last fitted, else a half; None for one class."""
    if problem_type_of(subject.model) != "multi_label_classification":
        return None
    records = Facts.load(subject.folder).records if subject.folder is not None else []
    fitted = [record.values.get("thresholds") for record in records if "mean_average_precision" in record.values]
    told = fitted[-1] if fitted else dict.fromkeys(names, 0.5)
    known = {name: as_fraction(told.get(name)) for name in names} if isinstance(told, dict) else dict.fromkeys(names)
    if missing := [name for name, threshold in known.items() if threshold is None]:
        raise UserError(
            f"facts.json has no threshold for the class {missing[0]}; run hf-vit evaluate --protocol multi-label"
        )
    return cast(dict[str, float], known)


def _segmented(image: "Image", classes: torch.Tensor, names: Sequence[str]) -> dict[str, Any]:
    from hf_vit.data.overview import paint_classes

    shares = torch.bincount(classes.flatten().long(), minlength=len(names)).double() / classes.numel()
    order = shares.argsort(descending=True, stable=True).tolist()
    return {
        "answers": [{"label": names[k], "share": float(shares[k])} for k in order if shares[k]],
        "mask": classes.numpy().astype(np.uint8 if len(names) <= 256 else np.uint16),
        "picture": paint_classes(image, classes, len(names)),
    }


def _detected(image: "Image", objects: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, Any]:
    from hf_vit.data.overview import paint_objects

    told = zip(objects["labels"].tolist(), objects["scores"].tolist(), objects["boxes"].tolist(), strict=True)
    mask: NDArray[np.uint8] | None = None
    if "masks" in objects:
        mask = np.zeros((image.height, image.width), dtype=np.uint8)
        for number, seen in reversed(list(enumerate(objects["masks"].numpy()))):  # the surest on top
            mask[seen] = min(number + 1, 255)
    return {
        "answers": [{"label": names[k], "score": score, "box": box} for k, score, box in told],
        "mask": mask,
        "picture": paint_objects(image, objects, names),
    }


def write_dense_predictions(
    predictions: Iterator[DensePrediction], output: str | os.PathLike[str]
) -> list[DensePrediction]:
    """Write answers into a new folder, which appears complete or not at all.

    It holds predictions.json, a list of {"image", "answers", "mask", "picture", "problem"} (what there is of them), and
    the PNG files that these name: masks/NAME.png and pictures/NAME.png.
    """
    place, names = prepare_output(Path(output)), set[str]()
    passed_over, listed = list[DensePrediction](), list[dict[str, Any]]()
    with new_folder(place) as folder:
        for each in predictions:
            entry: dict[str, Any] = {"image": each.image}
            listed.append(entry)
            if each.problem is not None:
                passed_over.append(each)
                entry["problem"] = each.problem
                continue
            entry["answers"] = each.answers
            entry |= _drawn(each, folder, _free_name(Path(each.image).stem, names))
        with explain_write_errors(place):
            (folder / PREDICTIONS_NAME).write_text(json.dumps(listed, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return passed_over


def _drawn(prediction: DensePrediction, folder: Path, name: str) -> dict[str, str]:
    """Write mask and picture; return what predictions.json says of them."""
    from PIL import Image

    mask = None if prediction.mask is None else Image.fromarray(prediction.mask)
    written: dict[str, str] = {}
    for key, image in (("mask", mask), ("picture", prediction.picture)):
        if image is not None:
            written[key] = f"{key}s/{name}.png"
            with explain_write_errors(folder):
                (folder / f"{key}s").mkdir(exist_ok=True)
                image.save(folder / written[key])
    return written


def _free_name(stem: str, names: set[str]) -> str:
    """Return a name that no other image has, on file systems that know no case, too."""
    name = next(each for number in count() if (each := stem + (f"-{number}" if number else "")).lower() not in names)
    names.add(name.lower())
    return name


def image_files(paths: Iterable[str | os.PathLike[str]]) -> Iterable[Path]:
    """Iterate over the files; a folder stands for the image files directly inside, a pattern for those that match."""
    from PIL import Image

    known = Image.registered_extensions()
    for given in paths:
        path, is_remote = to_path(given), is_store_url(given)
        notes: list[str] = []
        if has_magic(str(given)) and (is_remote or not path.exists()):
            found = match_objects(str(given)) if is_remote else sorted(map(Path, glob(str(given), recursive=True)))
            inside = [entry for entry in found if entry.suffix.lower() in known and (is_remote or entry.is_file())]
            if not inside:
                raise UserError(f"no image matches {given}; give image files, folders, or another pattern")
        elif is_folder(path):
            inside, notes = list_images(path)
            if not inside:
                raise UserError(
                    f"folder {path} holds no image; give image files or a folder with images directly inside"
                )
        else:
            inside = [path]
        for note in notes:
            _warn_once(note)
        for entry in inside:
            refuse_name(entry)
        yield from inside


@functools.cache
def _warn_once(note: str) -> None:
    logging.getLogger(__name__).warning(note)


def read_image(path: str | os.PathLike[str], draft_side: int | None = None) -> "Image":
    """Open an image file of any mode as RGB; `draft_side`: see `decode_image`.

    Raises:
        UserError: the file is missing, or is not a readable image; the message names it.
    """
    if not is_store_url(path) and os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device may never end
        raise UserError(f"{path} is not a file; give an image file")
    try:
        return decode_image(path, draft_side)
    except FileNotFoundError as error:
        raise UserError(f"there is no image {path}; check the path") from error
    except DecompressionBombError as error:
        raise UserError(f"{path} is too large to be opened safely ({error}); make it smaller") from error
    except Exception as error:
        problem = image_problem(error)
        separator = " " if problem.startswith("is ") else ": "
        raise UserError(f"{path}{separator}{problem}; convert it to PNG or JPEG") from error
