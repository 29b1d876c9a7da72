"""The most likely classes of image files."""

import functools
import json
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob, has_magic
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from hf_vit.errors import UserError
from hf_vit.evaluation.reading import largest, scores
from hf_vit.evaluation.remote_model import NamedModel, RemoteModel
from hf_vit.families import problem_type_of
from hf_vit.loading.model import LoadedModel
from hf_vit.repositories.stores import StoreError, in_store, is_folder, matches, place_of, write
from hf_vit.results.facts import Facts, fraction
from hf_vit.results.writing import new_file, saying_why, scratch_folder

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

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
    batch_size: int = 32,
    skip_bad_images: bool = False,
    draft: bool = False,
    remote: RemoteModel | None = None,
) -> Iterator[Prediction]:
    """As `predict_images`, one after the other: of any number of images a few batches are in memory.

    With `draft` JPEG files are decoded at `draft_side` of the subject. With `remote`, the same model elsewhere, that
    answers.
    """
    if top < 1:
        raise UserError(f"top {top} must be at least 1")
    files = list(image_files(paths))
    if not subject.label_sets:
        raise UserError(f"{subject.name} has no named classes to answer with; give an image classifier")
    side = subject.draft_side if draft else None
    if remote is None:
        work = _Predicting(None, top, batch_size, skip_bad_images, side)
        yield from work.each(work.batches(files, subject.prepare), subject)
        return
    work, size = _Predicting(remote.model, top, batch_size, skip_bad_images, side), _BATCHES * batch_size
    parts = [files[start : start + size] for start in range(0, len(files), size)]
    for predictions in remote.runner.in_order(work, parts, subject):
        yield from predictions


class _Opened(NamedTuple):
    """A batch: files, why some of them are left out, and pixel values of the others, if there are any."""

    files: Sequence[Path]
    problems: Sequence[str | None]
    pixel_values: "torch.Tensor | None"


@dataclass(frozen=True)
class _Predicting:
    """A `Work` whose parts are files."""

    model: NamedModel | None
    top: int
    batch_size: int
    skip_bad_images: bool
    draft_side: int | None

    def opened(self, device: str | None) -> LoadedModel:
        assert self.model is not None
        return self.model.opened(device)

    def batches(self, part: Sequence[Path], prepare: "Callable[[Sequence[Image]], torch.Tensor]") -> Iterator[_Opened]:
        for start in range(0, len(part), self.batch_size):
            files = part[start : start + self.batch_size]
            opened = opened_images(files, self.skip_bad_images, self.draft_side)
            images = [one for one in opened if not isinstance(one, str)]
            problems = [one if isinstance(one, str) else None for one in opened]
            yield _Opened(files, problems, prepare(images) if images else None)

    def done(self, part: Sequence[Path], batches: Iterator[_Opened], subject: LoadedModel) -> list[Prediction]:
        return list(self.each(batches, subject))

    def each(self, batches: Iterator[_Opened], subject: LoadedModel) -> Iterator[Prediction]:
        """One after the other."""
        names = subject.label_sets[-1]  # of synonyms the words: timm's first set are WordNet's numbers
        thresholds, are_values = _thresholds(subject, names), problem_type_of(subject.model) == "regression"
        for files, problems, pixel_values in batches:
            rows = iter(() if pixel_values is None else _answers(subject, pixel_values))
            for path, problem in zip(files, problems, strict=True):
                if problem is not None:
                    yield Prediction(str(path), [], problem)
                    continue
                row = next(rows)
                places = range(len(row)) if are_values else largest(row[None], self.top)[0].tolist()
                best = [(names[k], float(row[k])) for k in places]
                labels = (
                    None
                    if thresholds is None
                    else [name for name, value in zip(names, row, strict=True) if value >= thresholds[name]]
                )
                yield Prediction(str(path), best, labels=labels, are_values=are_values)


def write_predictions(
    subject: LoadedModel,
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    top: int = 5,
    batch_size: int = 32,
    draft: bool = False,
    remote: RemoteModel | None = None,
) -> list[Prediction]:
    """Classify image files into a table, a row an image; unreadable ones are passed over, their row has no answer.

    The columns are `image`, `label`, `score`, `label_2`, `score_2`, ... and `problem`; for a model of several classes
    an image `labels`, too: those that reach their thresholds, as a list in JSON. The scores of a regression model are
    all its values.

    Args:
        subject, paths, top, batch_size, remote: as for `each_prediction`.
        output: .csv or .parquet, of this machine or an object store; it appears complete or not at all.

    Returns:
        The images that were passed over.

    Raises:
        UserError: another ending, nothing can be written there, or there is no image.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    place, writers = place_of(output), {".csv": csv.CSVWriter, ".parquet": parquet.ParquetWriter}
    if place.suffix not in writers:
        raise UserError(f"the output {place} is no table; give a file that ends in {' or '.join(writers)}")
    predictions = each_prediction(
        subject, paths, top=top, batch_size=batch_size, skip_bad_images=True, draft=draft, remote=remote
    )
    classes = len(subject.label_sets[-1]) if subject.label_sets else 1
    kind = problem_type_of(subject.model)
    endings = ["", *(f"_{rank}" for rank in range(2, (classes if kind == "regression" else min(top, classes)) + 1))]
    scored = [column for end in endings for column in ((f"label{end}", pa.string()), (f"score{end}", pa.float64()))]
    several = [("labels", pa.string())] if kind == "multi_label_classification" else []
    schema = pa.schema([("image", pa.string()), *scored, *several, ("problem", pa.string())])
    passed_over: list[Prediction] = []
    with _new_table(place) as temporary, writers[place.suffix](temporary, schema) as writer:
        while batch := list(islice(predictions, _ROWS)):
            passed_over += [each for each in batch if each.problem is not None]
            rows = [_row(each, schema.names) for each in batch]
            with saying_why(place):
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    return passed_over


@contextmanager
def _new_table(place: Path) -> Generator[Path]:
    """A file that goes to its place at the end, or vanishes."""
    if not in_store(place):
        with new_file(place) as temporary:
            yield temporary
        return
    with scratch_folder("predictions") as folder:
        yield folder / "table"
        write(str(place), folder / "table")


def _row(prediction: Prediction, columns: Sequence[str]) -> dict[str, object]:
    answers = [prediction.image, *chain.from_iterable(prediction.scores)]
    labels = None if prediction.labels is None else json.dumps(prediction.labels, ensure_ascii=False)
    return {**dict(zip(columns, answers, strict=False)), "labels": labels, "problem": prediction.problem}


def opened_images(paths: Sequence[Path], skip_bad_images: bool, draft_side: int | None = None) -> "list[Image | str]":
    """Every image, or why it is left out; those of a store are fetched one by one."""
    from hf_vit.data.images import each_in_threads

    def read_or_told(path: Path) -> "Image | str":
        try:
            return read_image(path, draft_side)
        except StoreError:
            raise
        except UserError as error:
            if not skip_bad_images:
                raise
            return str(error)

    return list(map(read_or_told, paths)) if any(map(in_store, paths)) else each_in_threads(read_or_told, paths)


def _answers(subject: LoadedModel, pixel_values: "torch.Tensor") -> "torch.Tensor":
    import torch

    with torch.inference_mode():
        return scores(subject.model, pixel_values.to(subject.device, subject.dtype))


def _thresholds(subject: LoadedModel, names: Sequence[str]) -> dict[str, float] | None:
    """Class -> probability from which on it is answered: the last that were fitted, else a half; None for one class."""
    if problem_type_of(subject.model) != "multi_label_classification":
        return None
    records = Facts.load(subject.folder).records if subject.folder is not None else []
    fitted = [record.values.get("thresholds") for record in records if "mean_average_precision" in record.values]
    told = fitted[-1] if fitted else dict.fromkeys(names, 0.5)
    known = {name: fraction(told.get(name)) for name in names} if isinstance(told, dict) else dict.fromkeys(names)
    if missing := [name for name, threshold in known.items() if threshold is None]:
        raise UserError(
            f"facts.json tells no threshold of the class {missing[0]}; evaluate again: --protocol multi-label"
        )
    return cast(dict[str, float], known)


def image_files(paths: Iterable[str | os.PathLike[str]]) -> Iterable[Path]:
    """The files, folders replaced by the image files directly inside them, patterns by those that match."""
    from PIL import Image

    from hf_vit.data.files import images_in, refuse_name

    known = Image.registered_extensions()
    for given in paths:
        path, is_remote = place_of(given), in_store(given)
        notes: list[str] = []
        if has_magic(str(given)) and (is_remote or not path.exists()):
            found = matches(str(given)) if is_remote else sorted(map(Path, glob(str(given), recursive=True)))
            inside = [entry for entry in found if entry.suffix.lower() in known and (is_remote or entry.is_file())]
            if not inside:
                raise UserError(f"no image matches {given}; give image files, folders, or another pattern")
        elif is_folder(path):
            inside, notes = images_in(path)
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
    from PIL import Image, UnidentifiedImageError

    from hf_vit.data.images import decode_image

    is_remote = in_store(path)
    if not is_remote and os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device may never end
        raise UserError(f"{path} is no file; give an image file")
    try:
        return decode_image(path, draft_side)
    except StoreError:  # says nothing of the image
        raise
    except FileNotFoundError as error:
        raise UserError(f"there is no image {path}; check the path") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{path} is not an image that can be read; convert it to PNG or JPEG") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{path} is too large to be opened safely ({error}); make it smaller") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        # Pillow's decoders raise these for truncated or damaged files.
        raise UserError(f"{path} cannot be read ({error}); convert it to PNG or JPEG") from error
