"""Predict classes, masks or objects for image files."""

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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from PIL.Image import DecompressionBombError, Image

from hf_vit.data.files import is_image, list_images, refuse_name, walk
from hf_vit.data.idx import IdxImage, group_idx_files, parse_idx_name
from hf_vit.data.images import decode_image, describe_image_problem
from hf_vit.display import shorten_list
from hf_vit.errors import UserError
from hf_vit.evaluation.reading import compute_scores, explain_memory_errors, find_largest, read_and_prepare
from hf_vit.families import get_problem_type
from hf_vit.loading.model import LoadedModel, get_label_names
from hf_vit.loading.outputs import detect, get_dense_task, limit_batch, segment
from hf_vit.repositories.stores import StoreError, is_folder, is_store_url, match_objects, to_path, write_object
from hf_vit.results.delivery import deliver_folder, prepare_output
from hf_vit.results.facts import Facts, as_fraction
from hf_vit.writing import explain_write_errors, make_scratch_folder, replace_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hf_vit.evaluation.ray_runner import RayRunner

    Rest = tuple[Sequence["_File"], Sequence[str | None]]

PREDICTIONS_NAME = "predictions.json"
_ROWS = 1024  # rows that are written together
_BATCHES = 8  # batches of a part for another process


@dataclass(frozen=True)
class Prediction:
    """The prediction of a classifier for one image file.

    Attributes:
        image: the file.
        scores: (label, probability) of the most likely classes, best first.
        problem: why there is no prediction, or None.
        labels: for a multi-label model the classes that reach their thresholds, in the order of the model's classes;
            None for other models, whose prediction is the first of the scores.
        are_values: the scores are all values of a regression model, in their order.
    """

    image: str
    scores: list[tuple[str, float]]
    problem: str | None = None
    labels: list[str] | None = None
    are_values: bool = False


@dataclass(frozen=True)
class DensePrediction:
    """The prediction of a segmentation or detection model for one image file.

    Attributes:
        image: the file.
        answers: for segmentation every predicted class, {"label", "share" of the pixels}, the largest first; for
            detection every object, {"label", "score", "box": [x1, y1, x2, y2] px}, the highest score first.
        problem: why there is no prediction, or None.
        mask: [H, W] (height, width): for segmentation the class of every pixel; for a detector with masks the position
            of the object in `answers`, from 1 on, and 0 for the background; else None.
        picture: the image with the prediction drawn over it.
    """

    image: str
    answers: list[dict[str, Any]]
    problem: str | None = None
    mask: "NDArray[np.uint8 | np.uint16] | None" = field(default=None, compare=False, repr=False)
    picture: "Image | None" = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class _GivenImage:
    """An image that a caller has opened, to be read like an image file; `number` is its place from 1 on."""

    image: Any
    number: int

    def __str__(self) -> str:
        return f"image {self.number}"

    def read(self) -> Image:
        """Return the image as RGB."""
        return decode_image(self.image)


_File = Path | IdxImage | _GivenImage


@dataclass(frozen=True)
class _FileWork(ABC):
    """Base class of a `Work` whose parts are files; with `skip_bad_images` a batch leaves unreadable files out."""

    kind: ClassVar[type[Any]]  # of its predictions
    batch_size: int
    skip_bad_images: bool
    draft_side: int | None = None

    def batches(
        self, part: Sequence["_File"], prepare: "Callable[[Sequence[Image]], Any]"
    ) -> Iterator[tuple[Any, "Rest"]]:
        """Yield prepared batches of readable images, with the files and the problem of each unreadable one."""
        for start in range(0, len(part), self.batch_size):
            files = part[start : start + self.batch_size]
            is_local = not any(map(is_store_url, files))  # images of an object store are downloaded one by one
            pixel_values, results = read_and_prepare(files, self._open, prepare, in_threads=is_local)
            yield pixel_values, (files, [result if isinstance(result, str) else None for result in results])

    def _open(self, path: "_File") -> Image | str:
        """Return the image, or the problem of an unreadable one."""
        try:
            is_file = not isinstance(path, IdxImage | _GivenImage)
            return read_image(path, self.draft_side) if is_file else path.read()
        except StoreError:
            raise
        except UserError as error:
            if not self.skip_bad_images:
                raise
            return str(error)

    def answer(self, pixel_values: Any, rest: "Rest", loaded: LoadedModel) -> list[Any]:
        """Return a prediction for every file; without a readable one `pixel_values` are None."""
        answers = iter(() if pixel_values is None else self.predict(pixel_values, loaded))
        return [
            self.kind(str(path), **next(answers)) if problem is None else self.kind(str(path), [], problem)
            for path, problem in zip(*rest, strict=True)
        ]

    @abstractmethod
    def predict(self, images: Any, loaded: LoadedModel) -> Iterator[dict[str, Any]]:
        """Yield the fields of the prediction for every image."""


@dataclass(frozen=True)
class _Classification(_FileWork):
    """Predict the `top` classes, and the classes of a multi-label model by their thresholds."""

    kind = Prediction
    top: int = 5
    thresholds: Mapping[str, float] | None = None

    def predict(self, images: torch.Tensor, loaded: LoadedModel) -> Iterator[dict[str, Any]]:
        """Yield the most likely classes, or the values of a regression model."""
        names = loaded.label_sets[-1]  # the last set has words; the first one of timm has WordNet numbers
        are_values = get_problem_type(loaded.model) == "regression"
        limits = self.thresholds
        with torch.inference_mode():
            scores = compute_scores(loaded.model, images.to(loaded.device, loaded.dtype))
        for row in scores:
            indices = range(len(row)) if are_values else find_largest(row[None], self.top)[0].tolist()
            best = [(names[index], float(row[index])) for index in indices]
            labels = [name for name, value in zip(names, row, strict=True) if value >= limits[name]] if limits else None
            yield {"scores": best, "labels": labels, "are_values": are_values}


@dataclass(frozen=True)
class _DensePredictions(_FileWork):
    """Predict masks, or objects with a score of at least `threshold`; images are not prepared by the reader."""

    kind = DensePrediction
    threshold: float = 0.5
    tiles: bool = False

    def predict(self, images: "list[Image]", loaded: LoadedModel) -> Iterator[dict[str, Any]]:
        """Yield the classes of the pixels, or the objects."""
        describe = _describe_segmentation if get_dense_task(loaded.model) == "segmentation" else _describe_detection
        names = get_label_names(loaded.model)
        if self.tiles:
            outputs = [self._predict_tiles(loaded, image) for image in images]
        else:
            outputs = self._predict(loaded, images)
        for image, output in zip(images, outputs, strict=True):
            yield describe(image, output, names)

    def _predict_tiles(self, loaded: LoadedModel, image: "Image") -> Any:
        """Predict an image in tiles, a batch at a time, and join the outputs."""
        from hf_vit.data.tiles import Tiles

        overlap = min(loaded.input_size) // 4
        tiles = Tiles((image.height, image.width), loaded.input_size, overlap)
        crops = tiles.crops(image)
        outputs: list[Any] = []
        while batch := list(islice(crops, self.batch_size)):
            outputs += self._predict(loaded, batch)
        if len(tiles) == 1:
            return outputs[0]
        is_segmented = get_dense_task(loaded.model) == "segmentation"
        return tiles.join_classes(outputs) if is_segmented else tiles.join_boxes(outputs)

    def _predict(self, loaded: LoadedModel, images: "Sequence[Image]") -> list[Any]:
        """Return for every image the class of every pixel, [H, W], or the tensors of its objects; on the CPU."""
        pixel_values = loaded.pixel_values(images)
        sizes = [(image.height, image.width) for image in images]
        inputs = loaded.model, loaded.processor, pixel_values, sizes
        with torch.inference_mode(), explain_memory_errors(pixel_values):
            if get_dense_task(loaded.model) == "segmentation":
                return [classes.cpu() for classes in segment(*inputs)]
            objects = detect(*inputs, threshold=self.threshold)
        return [{name: value.cpu() for name, value in tensors.items()} for tensors in objects]


def predict_images(
    subject: LoadedModel,
    paths: Sequence[str | os.PathLike[str]],
    *,
    top: int = 5,
    batch_size: int = 32,
    skip_bad_images: bool = False,
) -> list[Prediction]:
    """Classify image files.

    Args:
        subject: an image classifier, see `load_model`.
        paths: image files, folders of images, and patterns ("photos/**/*.jpg").
        top, batch_size, skip_bad_images: see `hf_vit.evaluation.predict`.

    Raises:
        UserError: the model has no class names, a file is missing or unreadable, a folder has no image, or `top` is
            below 1.
    """
    return list(iterate_predictions(subject, paths, top=top, batch_size=batch_size, skip_bad_images=skip_bad_images))


def iterate_predictions(
    loaded: LoadedModel,
    paths: Sequence[Any],
    *,
    top: int = 5,
    threshold: float = 0.5,
    batch_size: int = 32,
    skip_bad_images: bool = False,
    tiles: bool = False,
    draft: bool = False,
    remote: "RayRunner | None" = None,
) -> Iterator[Any]:
    """Iterate over the predictions for image files, with a few batches in memory.

    Args:
        remote: Ray, whose processes run the same model.
        loaded, paths, top, threshold, batch_size, skip_bad_images, tiles, draft: see `hf_vit.evaluation.predict`.
    """
    if top < 1:
        raise UserError(f"--top {top} is too small; give at least 1")
    if not 0 <= threshold < 1:
        raise UserError(f"--threshold {threshold} is out of range; give a score from 0 to below 1")
    files = list(list_image_files(paths))
    prepare = loaded.prepare
    if get_dense_task(loaded.model) is not None:
        most = limit_batch(loaded.model, loaded.processor, batch_size)
        work = _DensePredictions(most, skip_bad_images, None, threshold, tiles)
        prepare = list  # it prepares the images, or their tiles, itself
    elif loaded.label_sets:
        side = loaded.draft_side if draft else None
        limits = _load_thresholds(loaded, loaded.label_sets[-1])
        work = _Classification(batch_size, skip_bad_images, side, top, limits)
    else:
        raise UserError(
            f"{loaded.name} has no class names to predict; give an image classifier with class names, or fine-tune it "
            "first (hf-vit finetune)"
        )
    if remote is None:
        answers = (work.answer(*batch, loaded) for batch in work.batches(files, prepare))
    else:
        size = _BATCHES * batch_size
        parts = [files[start : start + size] for start in range(0, len(files), size)]
        answers = (answer for _, answer in remote.run(work, parts, loaded))
    yield from chain.from_iterable(answers)


def _make_schema(loaded: LoadedModel, top: int) -> Any:
    """Return the Arrow schema of the table that `write_predictions` writes, with a pair of columns for each score."""
    import pyarrow as pa

    kind = get_problem_type(loaded.model)
    num_classes = len(loaded.label_sets[-1]) if loaded.label_sets else 1
    num_scores = num_classes if kind == "regression" else min(top, num_classes)
    columns: list[Any] = [("image", pa.string()), ("label", pa.string()), ("score", pa.float64())]
    for rank in range(2, num_scores + 1):
        columns += [(f"label_{rank}", pa.string()), (f"score_{rank}", pa.float64())]
    if kind == "multi_label_classification":
        columns.append(("labels", pa.string()))
    columns.append(("problem", pa.string()))  # why there is no prediction
    return pa.schema(columns)


def write_predictions(
    loaded: LoadedModel, paths: Sequence[Any], output: str | os.PathLike[str], **options: Any
) -> list[Prediction]:
    """Classify image files into a table with a row per image, and return the predictions of unreadable images.

    The columns are `image`, `label`, `score`, `label_2`, `score_2`, ... and `problem`; for a multi-label model also
    `labels`, the classes that reach their thresholds, as a JSON list. The scores of a regression model are its values.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    path = to_path(output)
    writers = {".csv": csv.CSVWriter, ".parquet": parquet.ParquetWriter}
    if path.suffix not in writers:
        raise UserError(f"the output {path} is not a table; give a file name that ends in {' or '.join(writers)}")
    predictions = iterate_predictions(loaded, paths, **options)
    schema = _make_schema(loaded, options.get("top", 5))
    unreadable: list[Prediction] = []
    with _open_table(path) as temporary, writers[path.suffix](temporary, schema) as writer:
        while batch := list(islice(predictions, _ROWS)):
            unreadable += [prediction for prediction in batch if prediction.problem is not None]
            rows = [_make_row(prediction, schema.names) for prediction in batch]
            with explain_write_errors(path):
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    return unreadable


@contextmanager
def _open_table(path: Path) -> Generator[Path]:
    """Yield a temporary file that becomes the file or object `path` if no error occurs."""
    if not is_store_url(path):
        with replace_file(path) as temporary:
            yield temporary
        return
    with make_scratch_folder("predictions") as folder:
        yield folder / "table"
        write_object(str(path), folder / "table")


def _make_row(prediction: Prediction, columns: Sequence[str]) -> dict[str, object]:
    """Return the row of a prediction in the table of `write_predictions`."""
    cells = [prediction.image, *chain.from_iterable(prediction.scores)]
    labels = None if prediction.labels is None else json.dumps(prediction.labels, ensure_ascii=False)
    return {**dict(zip(columns, cells, strict=False)), "labels": labels, "problem": prediction.problem}


def _load_thresholds(loaded: LoadedModel, names: Sequence[str]) -> dict[str, float] | None:
    """Return the thresholds of a multi-label model: of each class the last in facts.json or in a graph, else 0.5.

    None for other models.
    """
    if get_problem_type(loaded.model) != "multi_label_classification":
        return None
    exported: Any = getattr(loaded.model, "thresholds", {})
    recorded_thresholds = exported if loaded.facts_folder is None else Facts.load(loaded.facts_folder).find_thresholds()
    thresholds: dict[str, float] = {}
    if missing := [name for name in names if name not in recorded_thresholds]:
        remedy = "hf-vit evaluate --protocol multi-label records one for every class"
        _warn_once(f"no threshold is recorded for {shorten_list(missing)}, so 0.5 is used; {remedy}")
    for name in names:
        threshold = as_fraction(recorded_thresholds.get(name, 0.5))
        if threshold is None:
            raise UserError(
                f"facts.json has no threshold for the class {name}; measure it with hf-vit evaluate "
                "--protocol multi-label"
            )
        thresholds[name] = threshold
    return thresholds


def _describe_segmentation(image: "Image", classes: torch.Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Return answers, mask and picture of a `DensePrediction` for the class of every pixel."""
    from hf_vit.data.overview import paint_classes

    shares = torch.bincount(classes.flatten().long(), minlength=len(names)).double() / classes.numel()
    order = shares.argsort(descending=True, stable=True).tolist()
    return {
        "answers": [{"label": names[index], "share": float(shares[index])} for index in order if shares[index]],
        "mask": classes.numpy().astype(np.uint8 if len(names) <= 256 else np.uint16),
        "picture": paint_classes(image, classes, len(names)),
    }


def _describe_detection(image: "Image", objects: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, Any]:
    """Return answers, mask and picture of a `DensePrediction` for detected objects."""
    from hf_vit.data.overview import paint_objects

    rows = zip(objects["labels"].tolist(), objects["scores"].tolist(), objects["boxes"].tolist(), strict=True)
    mask: NDArray[np.uint8 | np.uint16] | None = None
    if "masks" in objects:
        masks = list(enumerate(objects["masks"].numpy(), start=1))
        mask = np.zeros((image.height, image.width), dtype=np.uint8 if len(masks) <= 255 else np.uint16)
        for number, is_object in reversed(masks):  # the highest score comes first in the list, and last onto the mask
            mask[is_object] = number
    return {
        "answers": [{"label": names[label], "score": score, "box": box} for label, score, box in rows],
        "mask": mask,
        "picture": paint_objects(image, objects, names),
    }


def write_dense_predictions(
    predictions: Iterator[DensePrediction], output: str | os.PathLike[str]
) -> list[DensePrediction]:
    """Write predictions into a new folder, which appears only when it is complete; return those of unreadable images.

    The folder has predictions.json, a list of {"image", "answers", "mask", "picture", "problem"} with the keys that
    apply, and the PNG files masks/NAME.png and pictures/NAME.png.
    """
    path = prepare_output(Path(output))
    names: set[str] = set()
    unreadable: list[DensePrediction] = []
    entries: list[dict[str, Any]] = []
    with deliver_folder(path) as folder:
        for prediction in predictions:
            entry: dict[str, Any] = {"image": prediction.image}
            entries.append(entry)
            if prediction.problem is not None:
                unreadable.append(prediction)
                entry["problem"] = prediction.problem
                continue
            entry["answers"] = prediction.answers
            entry |= _write_images(prediction, folder, _make_unique_name(Path(prediction.image).stem, names))
        with explain_write_errors(path):
            (folder / PREDICTIONS_NAME).write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return unreadable


def _write_images(prediction: DensePrediction, folder: Path, name: str) -> dict[str, str]:
    """Write the mask and the picture, and return their paths for predictions.json."""
    from PIL import Image

    mask = None if prediction.mask is None else Image.fromarray(prediction.mask)
    paths: dict[str, str] = {}
    for key, image in (("mask", mask), ("picture", prediction.picture)):
        if image is not None:
            paths[key] = f"{key}s/{name}.png"
            with explain_write_errors(folder):
                (folder / f"{key}s").mkdir(exist_ok=True)
                image.save(folder / paths[key])
    return paths


def _make_unique_name(stem: str, names: set[str]) -> str:
    """Return a name that is not in `names`, without regard to case, and add it in lower case."""
    candidates = chain([stem], (f"{stem}-{number}" for number in count(1)))
    name = next(candidate for candidate in candidates if candidate.lower() not in names)
    names.add(name.lower())
    return name


def list_image_files(paths: Iterable[Any]) -> Iterable[_File]:
    """Iterate over image files, the images in folders, those that match patterns, those of IDX files, and open ones."""
    for number, source in enumerate(paths, start=1):
        if not isinstance(source, str | os.PathLike):  # `decode_image` refuses what is no image
            yield _GivenImage(source, number)
            continue
        path = to_path(source)
        notes: list[str] = []
        if has_magic(str(source)) and (is_store_url(source) or not path.exists()):
            files, notes = _list_matches(str(source))
            if not files:
                raise UserError(f"no image matches {source}; give image files, folders, or another pattern")
        elif is_folder(path):
            files, notes = list_images(path)
            if not files:
                files, notes = _list_below(path)
            if not files:
                raise UserError(f"the folder {path} has no images; give image files, or a folder with images in it")
        else:
            idx_name = parse_idx_name(path.name)
            is_idx = idx_name is not None and idx_name[-1] == "images" and path.is_file()
            files = IdxImage.list_all(path) if is_idx else [path]
        for note in notes:
            _warn_once(note)
        for entry in files:
            refuse_name(entry)
        yield from files


def _list_matches(pattern: str) -> tuple[Sequence[Path | IdxImage], list[str]]:
    """Return the image files, or else the images of the IDX files, that match a pattern; and notes."""
    from PIL import Image

    suffixes = Image.registered_extensions()
    is_remote = is_store_url(pattern)
    matches = match_objects(pattern) if is_remote else sorted(map(Path, glob(pattern, recursive=True)))
    images = [path for path in matches if path.suffix.lower() in suffixes and (is_remote or path.is_file())]
    return (images, []) if images else _list_idx(matches, pattern)


def _list_below(folder: Path) -> tuple[Sequence[Path | IdxImage], list[str]]:
    """Return the images of the IDX files of a folder, or else those in the folders below it; and notes."""
    names, _ = walk(folder)
    idx_images, notes = _list_idx([folder.joinpath(*parts) for parts in names], str(folder))
    if idx_images:
        return idx_images, notes
    images = [folder.joinpath(*parts) for parts in names if is_image(parts[-1])]
    return images, [f"{folder} has no images itself, so the {len(images):,} in the folders below it are used"]


def _list_idx(paths: Sequence[Path], source: str) -> tuple[list[Path | IdxImage], list[str]]:
    """Return the images of the IDX files among some paths, none without such files, and notes."""
    if not any(parse_idx_name(path.name) for path in paths):
        return [], []
    files, notes = group_idx_files(paths, source)
    return [image for split in files.values() for image in IdxImage.list_all(split[0])], notes


@functools.cache
def _warn_once(note: str) -> None:
    logging.getLogger(__name__).warning(note)


def read_image(path: str | os.PathLike[str], draft_side: int | None = None) -> "Image":
    """Decode an image file of any mode to RGB; for `draft_side` see `decode_image`.

    Raises:
        UserError: the file is missing or is not a readable image.
    """
    if not is_store_url(path) and os.path.exists(path) and not os.path.isfile(path):  # reading a pipe may never end
        raise UserError(f"{path} is not a file; give an image file")
    try:
        return decode_image(path, draft_side)
    except FileNotFoundError as error:
        raise UserError(f"there is no image {path}; check the path") from error
    except DecompressionBombError as error:
        raise UserError(f"{path} is too large to be decoded safely ({error}); resize the image") from error
    except Exception as error:
        problem = describe_image_problem(error)
        separator = " " if problem.startswith("is ") else ": "
        raise UserError(f"{path}{separator}{problem}; convert or replace it") from error
